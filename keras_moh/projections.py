"""The projections into heads and out of them, shaped as in `keras.layers.MultiHeadAttention`.

All of them are `keras.layers.EinsumDense`. Those of the queries and of the outputs can be computed
for only the heads that each token took, where the backend has a module of rows: then the layer's
kernel and bias are used, without the layer.
"""

from __future__ import annotations

import string
from typing import Any

import keras
from keras import ops


def head_projection(
    rank: int, num_heads: int, head_dim: int, use_bias: bool, **kwargs: Any
) -> keras.layers.EinsumDense:
    """`(..., D)` of the given rank to `(..., num_heads, head_dim)`; kernel `(D, heads, dim)`."""
    return _projection(rank - 1, 1, (num_heads, head_dim), use_bias, **kwargs)


def output_projection(
    rank: int, output_shape: tuple[int, ...], use_bias: bool, **kwargs: Any
) -> keras.layers.EinsumDense:
    """`(..., H, dv)` of rank + 1 to `(..., *output_shape)`; kernel `(H, dv, *output_shape)`."""
    return _projection(rank - 1, 2, output_shape, use_bias, **kwargs)


def _projection(
    free_axes: int, contracted: int, outputs: tuple[int, ...], use_bias: bool, **kwargs: Any
) -> keras.layers.EinsumDense:
    letters = iter(string.ascii_lowercase)
    free, inner, outer = (
        "".join(next(letters) for _ in range(count))
        for count in (free_axes, contracted, len(outputs))
    )
    projection = keras.layers.EinsumDense(
        f"{free}{inner},{inner}{outer}->{free}{outer}",
        output_shape=(*[None] * (free_axes - 1), *outputs),
        bias_axes=outer if use_bias else None,
        **kwargs,
    )
    # An `EinsumDense` warns that it destroys the mask of its input. The attention layer has read
    # that mask and passes it on, so nothing is destroyed.
    projection.supports_masking = True
    return projection


def projects_rows(*projections: keras.layers.EinsumDense) -> bool:
    """Whether these projections may be computed for only the heads taken.

    A quantized projection is more than its kernel and bias, and an activity regularizer wants to
    see the outputs of all heads: these are called whole.
    """
    return all(
        projection.quantization_mode is None and projection.activity_regularizer is None
        for projection in projections
    )


class RowProjections:
    """The projections of the heads `(B, T, K)` that tokens took, by a backend's module of rows."""

    def __init__(self, rows: Any, heads: Any, num_heads: int) -> None:
        self._rows = rows
        self.plan = rows.plan(heads, num_heads)

    @property
    def positions(self) -> Any:
        """Of each row the position `t` of its token."""
        return self._rows.positions(self.plan)

    def project(self, tokens: Any, projection: keras.layers.EinsumDense) -> Any:
        """The rows of `tokens (B, T, D)` in the heads that they took."""
        kernel, bias = _weights(projection)
        return self._rows.project(tokens, kernel, bias, self.plan)

    def take(self, heads: Any) -> Any:
        """The rows of what is there in all heads, `(B, T, H, d)`."""
        return self._rows.take(heads, self.plan)

    def combine(self, rows: Any, projection: keras.layers.EinsumDense) -> Any:
        """The outputs `(B, T, *output_shape)` of rows."""
        kernel, bias = _weights(projection)
        return self._rows.combine(rows, kernel, bias, self.plan)


def _weights(projection: keras.layers.EinsumDense) -> tuple[Any, Any]:
    """Kernel and bias, in the compute dtype."""
    bias = projection.bias
    return (
        ops.convert_to_tensor(projection.kernel),
        None if bias is None else ops.convert_to_tensor(bias),
    )
