r"""`RotaryEmbedding`, and how `MoHAttention` calls a layer of its kind.

Rotary position embedding (arXiv 2104.09864) turns feature `i` of the first half of a vector and
feature `i` of its second half, as the two coordinates of a point, by an angle that grows with the
position `t`:

$$ \theta_i = t\, c^{-1}\, \lambda^{-2 i / d}, \quad
   (x_i, x_{i + d/2}) \mapsto
   (x_i \cos\theta_i - x_{i + d/2} \sin\theta_i,\; x_{i + d/2} \cos\theta_i + x_i \sin\theta_i) $$

with the longest wavelength $\lambda$ and the scaling factor `c`. The dot product of a query and a
key then depends on their distance alone. These halves are those of LLaMA in Hugging Face's
Transformers and of `keras_hub.layers.RotaryEmbedding`; the original paper takes neighbouring
features instead.
"""

from __future__ import annotations

import inspect
from typing import Any

import keras
from keras import ops

from keras_moh.errors import invalid_argument, number_in
from keras_moh.shapes import broadcasts_to, same_shape


@keras.saving.register_keras_serializable(package="keras_moh")
class RotaryEmbedding(keras.layers.Layer):
    r"""Rotary position embedding (arXiv 2104.09864), for `MoHAttention(rotary_embedding=...)`.

    It has no weights, and computes in the dtype of its inputs, whatever its policy: angles are of
    float32 (float64 if the inputs are), and their sines and cosines of that dtype. The numbers are
    those of `keras_hub.layers.RotaryEmbedding`.

    Args:
        max_wavelength: The longest wavelength $\lambda$ (`rope_theta` of Hugging Face's configs).
            Defaults to 10000.
        scaling_factor: Factor `c` by which positions are divided. Defaults to 1.
        **kwargs: `name`, `trainable`, `dtype` of `keras.layers.Layer`.

    Call arguments:
        inputs: `(B, T, ..., d)`, float, `d` even: `(B, T, H, d)` for heads.
        start_index: Position of the first token, an integer or a scalar tensor. Defaults to 0.
        positions: Positions of the tokens, `(T,)` or `(B, T)`, in place of `start_index`.

    Returns:
        The turned vectors, of the shape of `inputs`.

    Raises:
        ValueError: if a number is not positive, `d` is odd, or the positions are not as above.

    Example:
    >>> import numpy as np, keras_moh
    >>> rotary = keras_moh.RotaryEmbedding()
    >>> x = np.ones((1, 3, 2, 4), "float32")
    >>> [round(float(feature), 4) for feature in rotary(x, start_index=7)[0, 0, 0]]
    [0.0969, 0.9276, 1.4109, 1.0675]
    >>> layer = keras_moh.MoHAttention(8, 4, num_shared_heads=2, top_k=2, rotary_embedding=rotary)
    >>> tuple(layer(np.ones((1, 3, 16), "float32"), use_causal_mask=True).shape)
    (1, 3, 16)
    """

    def __init__(
        self, max_wavelength: float = 10000, scaling_factor: float = 1.0, **kwargs: Any
    ) -> None:
        super().__init__(autocast=False, **kwargs)
        self.supports_masking = True
        self.max_wavelength = _positive("max_wavelength", max_wavelength)
        self.scaling_factor = _positive("scaling_factor", scaling_factor)

    def build(self, input_shape: Any) -> None:
        """Check that vectors have halves; there are no weights."""
        if len(input_shape) < 3 or input_shape[-1] is None or input_shape[-1] % 2:
            raise ValueError(
                "A rotary embedding is of vectors (batch, length, ..., features) with an even "
                f"number of features. Received: a shape of {tuple(input_shape)}"
            )

    def call(self, inputs: Any, start_index: Any = 0, positions: Any = None) -> Any:
        """The vectors `(B, T, ..., d)`, turned by their positions."""
        width = inputs.shape[-1]
        is_double = keras.backend.standardize_dtype(inputs.dtype) == "float64"
        dtype = "float64" if is_double else "float32"
        if positions is None:
            positions = ops.arange(ops.shape(inputs)[1], dtype=dtype) + ops.cast(start_index, dtype)
        else:
            positions = ops.cast(positions, dtype)
            _check_positions(positions, inputs)
        frequencies = self.frequencies(width, dtype)
        angles = ops.expand_dims(positions, -1) * (frequencies / self.scaling_factor)
        # One for each token, whatever axes are between tokens and features.
        between = tuple(range(len(angles.shape) - 1, len(angles.shape) + len(inputs.shape) - 4))
        angles = ops.expand_dims(angles, between) if between else angles
        cosines, sines = (ops.cast(x, inputs.dtype) for x in _cosines_and_sines(angles))
        first, second = inputs[..., : width // 2], inputs[..., width // 2 :]
        return ops.concatenate(
            [first * cosines - second * sines, second * cosines + first * sines], axis=-1
        )

    def frequencies(self, width: int, dtype: str) -> Any:
        """The angles by which one position turns the pairs of features, `(width / 2,)`."""
        exponents = ops.arange(0, width, 2, dtype=dtype) / width
        return ops.power(ops.cast(self.max_wavelength, dtype), -exponents)

    def compute_output_shape(self, input_shape: Any) -> Any:
        """The shape of the inputs."""
        return input_shape

    def get_config(self) -> dict[str, Any]:
        """The constructor's arguments."""
        return {
            **super().get_config(),
            "max_wavelength": self.max_wavelength,
            "scaling_factor": self.scaling_factor,
        }


def _cosines_and_sines(angles: Any) -> tuple[Any, Any]:
    """In the dtype of the angles, also where `ops.cos` rounds float64 to float32, as on JAX."""
    if keras.backend.standardize_dtype(angles.dtype) != "float64":
        return ops.cos(angles), ops.sin(angles)
    turns = ops.exp(1j * ops.cast(angles, "complex128"))
    return ops.real(turns), ops.imag(turns)


def check_rotary_embedding(rotary_embedding: Any) -> Any:
    """A layer to be called as `rotary_embedding(x, start_index=..., positions=...)`, or `None`."""
    if rotary_embedding is None:
        return None
    is_layer = isinstance(rotary_embedding, keras.layers.Layer)
    arguments = inspect.signature(rotary_embedding.call).parameters if is_layer else ()
    if not {"start_index", "positions"} <= {*arguments}:
        raise invalid_argument(
            "rotary_embedding",
            "None or a Keras layer whose call takes (inputs, start_index=0, positions=None), as "
            "`keras_moh.RotaryEmbedding` does",
            rotary_embedding,
        )
    return rotary_embedding


def rotate(rotary_embedding: Any, x: Any, start: Any) -> Any:
    """`x (B, T, H, d)`, turned by the positions from `start` on, in the dtype of `x`."""
    return ops.cast(rotary_embedding(x, start_index=start), x.dtype)


def rotate_rows(rotary_embedding: Any, rows: Any, positions: Any) -> Any:
    """Rows `(R, d)`, each turned by its own of the positions `(R,)`."""
    as_sequence = ops.expand_dims(rows, (0, 2))
    rotated = rotary_embedding(as_sequence, positions=positions)
    return ops.cast(ops.reshape(rotated, ops.shape(rows)), rows.dtype)


def _positive(name: str, value: Any) -> float:
    number = number_in(name, value, 0)
    if number == 0:
        raise invalid_argument(name, "a positive number", value)
    return number


def _check_positions(positions: Any, inputs: Any) -> None:
    shape, target = tuple(positions.shape), tuple(inputs.shape[:2])
    if not (same_shape(target[1:], shape) or broadcasts_to(shape, target)):
        raise ValueError(
            "Argument `positions` must have the shape (length,) or (batch, length) of `inputs`. "
            f"Received: positions.shape={shape} and inputs.shape={tuple(inputs.shape)}"
        )
