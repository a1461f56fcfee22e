"""Attention over some axes of a tensor of higher rank, as attention over one sequence.

An input `(B, *axes, D)` is attended to over its *attention axes*; its other axes between batch and
features act as further batch axes. Folding moves the attention axes to the end, in their given
order, and merges each kind: `(B * batch axes, attention axes, ...)`. Everything behind it then
knows one batch axis and one sequence axis. Rank 3 with the single axis 1 is left as it is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from keras import ops

from keras_moh.errors import integer, invalid_argument
from keras_moh.shapes import broadcasts_to


def check_attention_axes(attention_axes: Any) -> tuple[int, ...] | None:
    """`attention_axes` as a tuple of distinct integers, or `None`."""
    if attention_axes is None:
        return None
    expected = "None, an integer, or a list or tuple of distinct integers"
    given = attention_axes if isinstance(attention_axes, (list, tuple)) else (attention_axes,)
    try:
        axes = tuple(integer("attention_axes", axis, -(10**9)) for axis in given)
    except ValueError:
        raise invalid_argument("attention_axes", expected, attention_axes) from None
    if not axes or len(set(axes)) < len(axes):
        raise invalid_argument("attention_axes", expected, attention_axes)
    return axes


def resolve_attention_axes(attention_axes: tuple[int, ...] | None, rank: int) -> tuple[int, ...]:
    """The attention axes of an input of the given rank, counted from 0; `None` means all."""
    if attention_axes is None:
        return tuple(range(1, rank - 1))
    axes = tuple(axis if axis >= 0 else rank + axis for axis in attention_axes)
    if len(set(axes)) < len(axes) or not all(1 <= axis <= rank - 2 for axis in axes):
        raise invalid_argument(
            "attention_axes",
            f"distinct axes from 1 to {rank - 2} for an input of rank {rank}",
            attention_axes,
        )
    return axes


def batch_axes(axes: tuple[int, ...], rank: int) -> tuple[int, ...]:
    """The axes between batch and features that are not attended over."""
    return tuple(axis for axis in range(1, rank - 1) if axis not in axes)


def _product(lengths: Sequence[Any]) -> Any:
    return math.prod(lengths[1:], start=lengths[0]) if lengths else 1


def fold(x: Any, axes: tuple[int, ...], rank: int) -> Any:
    """`(B, *axes, ...)` to `(B', T, ...)`; `rank` counts batch, axes and one feature axis."""
    if rank == 3:
        return x
    shape = ops.shape(x)
    batch = (0, *batch_axes(axes, rank))
    rest = tuple(range(rank - 1, len(shape)))
    folded = (
        _product([shape[axis] for axis in batch]),
        _product([shape[axis] for axis in axes]),
        *(shape[axis] for axis in rest),
    )
    return ops.reshape(ops.transpose(x, (*batch, *axes, *rest)), folded)


def unfold(x: Any, like: Any, axes: tuple[int, ...], rank: int) -> Any:
    """The inverse of `fold`: `(B', T, ...)` to `(B, *axes, ...)` with the axes of `like`."""
    if rank == 3:
        return x
    shape = ops.shape(like)
    order = (0, *batch_axes(axes, rank), *axes)
    rest = ops.shape(x)[2:]
    x = ops.reshape(x, (*(shape[axis] for axis in order), *rest))
    inverse = sorted(range(len(order)), key=order.__getitem__)
    return ops.transpose(x, (*inverse, *range(len(order), len(order) + len(rest))))


def unfold_scores(scores: Any, query: Any, key: Any, axes: tuple[int, ...], rank: int) -> Any:
    """`(B', H, T, S)` to Keras's `(B, *batch axes, H, *query axes, *key axes)`."""
    if rank == 3:
        return scores
    query_shape, key_shape = ops.shape(query), ops.shape(key)
    batch = [query_shape[axis] for axis in (0, *batch_axes(axes, rank))]
    attended = [query_shape[axis] for axis in axes] + [key_shape[axis] for axis in axes]
    return ops.reshape(scores, (*batch, ops.shape(scores)[1], *attended))


def scores_shape(
    query_shape: Sequence[Any],
    key_shape: Sequence[Any],
    num_heads: int,
    axes: tuple[int, ...],
) -> tuple[Any, ...]:
    """The shape of the attention scores: `(B, H, T, S)` for inputs of rank 3."""
    batch = [query_shape[axis] for axis in (0, *batch_axes(axes, len(query_shape)))]
    query_axes = [query_shape[axis] for axis in axes]
    key_axes = [key_shape[axis] for axis in axes]
    return (*batch, num_heads, *query_axes, *key_axes)


def full_mask_shape(
    mask_shape: Sequence[Any], scores: Sequence[Any], axes: tuple[int, ...]
) -> tuple[Any, ...]:
    """The shape of an attention mask at the rank of the scores, checked against their shape.

    As in Keras, axes that the mask leaves out are inserted before its query and key axes: for
    inputs of rank 3 it is `(T, S)`, `(B, T, S)` or `(B, H, T, S)`, each length being 1 or full.
    """
    mask_shape, scores, attended = tuple(mask_shape), tuple(scores), 2 * len(axes)
    leading = len(mask_shape) - attended
    missing = len(scores) - len(mask_shape)
    filled = (*mask_shape[:leading], *(1,) * missing, *mask_shape[leading:])
    if leading < 0 or missing < 0 or not broadcasts_to(filled, scores):
        raise ValueError(
            f"Argument `attention_mask` must have rank {attended} to {len(scores)} and broadcast "
            f"to the attention scores {scores}, with missing axes inserted before its last "
            f"{attended}. Received: attention_mask.shape={mask_shape}"
        )
    return filled


def fold_attention_mask(
    mask: Any, query: Any, key: Any, num_heads: int, axes: tuple[int, ...]
) -> Any:
    """An `attention_mask` as a boolean mask that broadcasts to `(B', H, T, S)`."""
    scores = scores_shape(query.shape, key.shape, num_heads, axes)
    shape = full_mask_shape(mask.shape, scores, axes)
    attended = 2 * len(axes)
    leading, missing = len(mask.shape) - attended, len(shape) - len(mask.shape)
    mask = ops.expand_dims(ops.cast(mask, "bool"), tuple(range(leading, leading + missing)))
    if len(query.shape) == 3:
        return mask

    # Only whole axes can be merged, so the ones that are to be merged are broadcast first.
    lengths = list(ops.shape(mask))
    wanted = scores_shape(ops.shape(query), ops.shape(key), num_heads, axes)
    head_axis = len(shape) - attended - 1
    if any(length != 1 for length in shape[:head_axis]):
        lengths[:head_axis] = wanted[:head_axis]
    if len(axes) > 1:
        lengths[head_axis + 1 :] = wanted[head_axis + 1 :]
    mask = ops.broadcast_to(mask, tuple(lengths))
    attended_lengths = lengths[head_axis + 1 :]
    return ops.reshape(
        mask,
        (
            _product(lengths[:head_axis]),
            lengths[head_axis],
            _product(attended_lengths[: len(axes)]),
            _product(attended_lengths[len(axes) :]),
        ),
    )
