"""What the transformers of images have in common: patches, positions, and numbers by layer.

The models are graphs of Keras's own layers and of `MoHAttention`: `summary` shows them layer by
layer, and `keras.Model(model.input, model.get_layer(...).output)` gives what is inside.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
from keras import ops

from keras_moh.errors import integer, invalid_argument


def by_layer(name: str, value: Any, depth: int, minimum: int) -> tuple[int, ...]:
    """`value` for each of `depth` layers: one number for all of them, or a list of as many."""
    if not isinstance(value, (list, tuple)):
        return (integer(name, value, minimum),) * depth
    if len(value) != depth:
        expected = f"an integer or a list of {depth} integers, one for each layer"
        raise invalid_argument(name, expected, value)
    return tuple(integer(name, each, minimum) for each in value)


def routed_by_layer(
    name: str, value: int | Sequence[int] | None, depth: int, router: Any
) -> tuple[int | None, ...]:
    """A number of heads that the `router` gives a token, for each of `depth` layers."""
    if router is not None:
        return by_layer(name, value, depth, 0)
    if value is not None:
        raise invalid_argument(name, "None with router=None", value)
    return (None,) * depth


def check_multiple(name: str, value: Any, divisor_name: str, divisor: Any) -> None:
    """Check that argument `name` is a positive multiple of argument `divisor_name`."""
    integer(divisor_name, divisor, 1)
    if integer(name, value, 1) % divisor:
        raise invalid_argument(name, f"a multiple of {divisor_name}={divisor}", value)


def loss_weight(balance_loss_weight: float, top_k: Sequence[int | None]) -> float:
    """The weight of each layer's balancing loss, so that their sum is a mean of routed layers."""
    return balance_loss_weight / max(sum(map(bool, top_k)), 1)


def patches(images: Any, size: int) -> Any:
    """`(B, rows * size, columns * size, C)` to `(B, rows * columns, size * size * C)`."""
    height, width, channels = images.shape[1:]
    rows, columns = height // size, width // size
    images = ops.reshape(images, (-1, rows, size, columns, size, channels))
    return ops.reshape(
        ops.transpose(images, (0, 1, 3, 2, 4, 5)), (-1, rows * columns, size * size * channels)
    )


def images_of(tokens: Any, rows: int, columns: int, size: int) -> Any:
    """The inverse of `patches`."""
    channels = tokens.shape[-1] // size**2
    tokens = ops.reshape(tokens, (-1, rows, columns, size, size, channels))
    return ops.reshape(
        ops.transpose(tokens, (0, 1, 3, 2, 4, 5)), (-1, rows * size, columns * size, channels)
    )


def drop_path(x: Any, rate: float, name: str, dtype: Any) -> Any:
    """Stochastic depth (arXiv 1603.09382): in training the branch `x` of some images is 0."""
    if not rate:
        return x
    shape = (None, *(1,) * (len(x.shape) - 1))
    return keras.layers.Dropout(rate, noise_shape=shape, name=name, dtype=dtype)(x)


def drop_path_rates(rate: float, depth: int) -> list[float]:
    """Rates that rise linearly from 0 in the first layer to `rate` in the last."""
    return [float(each) for each in np.linspace(0.0, rate, depth)]


@keras.saving.register_keras_serializable(package="keras_moh")
class ClassToken(keras.layers.Layer):
    """A learned token before those of `(B, T, D)`: `(B, 1 + T, D)`."""

    def build(self, input_shape: Any) -> None:
        """Create the token for inputs of shape `(B, T, D)`."""
        self.token = self.add_weight(
            name="token", shape=(1, 1, input_shape[-1]), initializer=truncated_normal()
        )

    def call(self, inputs: Any) -> Any:
        """The tokens `(B, 1 + T, D)`."""
        token = ops.convert_to_tensor(self.token)
        token = ops.broadcast_to(token, (ops.shape(inputs)[0], 1, inputs.shape[-1]))
        return ops.concatenate([token, inputs], axis=1)

    def get_config(self) -> dict[str, Any]:
        """The constructor's arguments. Keras's default fails if `dtype` was given as a policy."""
        return super().get_config()


@keras.saving.register_keras_serializable(package="keras_moh")
class PositionEmbedding(keras.layers.Layer):
    """Adds an embedding of each position, learned or frozen, to `(B, T, D)`.

    Args:
        initializer: Initializer of the embeddings `(T, D)`.
        **kwargs: `name`, `trainable`, `dtype` of `keras.layers.Layer`.
    """

    def __init__(self, initializer: Any, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.initializer = keras.initializers.get(initializer)

    def build(self, input_shape: Any) -> None:
        """Create the embeddings for inputs of shape `(B, T, D)`."""
        self.embeddings = self.add_weight(
            name="embeddings", shape=input_shape[1:], initializer=self.initializer
        )

    def call(self, inputs: Any) -> Any:
        """The sum `(B, T, D)`."""
        return inputs + ops.convert_to_tensor(self.embeddings)

    def get_config(self) -> dict[str, Any]:
        """The constructor's arguments."""
        initializer = keras.initializers.serialize(self.initializer)
        return {**super().get_config(), "initializer": initializer}


@keras.saving.register_keras_serializable(package="keras_moh")
class GridPositions(keras.initializers.Initializer):
    """The 2-D sines and cosines of DiT (arXiv 2212.09748) for the cells of a square grid.

    The first half of a row is of the cell's column, the second of its row; each half is the sines,
    then the cosines, of the number times `10000 ** (-4 * i / D)`.
    """

    def __call__(self, shape: Any, dtype: Any = None) -> Any:
        """The table `(T, D)` of a grid of `sqrt(T)` rows and columns."""
        side, frequencies = round(shape[0] ** 0.5), shape[1] // 4
        turns = 10000.0 ** (-np.arange(frequencies) / frequencies)
        rows, columns = np.divmod(np.arange(side * side), side)
        angles = [number[:, np.newaxis] * turns for number in (columns, rows)]
        table = np.concatenate([f(angle) for angle in angles for f in (np.sin, np.cos)], axis=1)
        return ops.convert_to_tensor(table, dtype=dtype)

    def get_config(self) -> dict[str, Any]:
        """The constructor's arguments: none."""
        return {}


def truncated_normal() -> keras.initializers.Initializer:
    """The initializer of ViT's embeddings."""
    return keras.initializers.TruncatedNormal(stddev=0.02)
