"""The projections into heads and out of them, shaped as in `keras.layers.MultiHeadAttention`."""

from __future__ import annotations

import string
from typing import Any

import keras


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
