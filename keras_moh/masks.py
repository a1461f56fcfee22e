"""Boolean masks of attention scores: `True` where a query may attend to a key.

All of them broadcast to the scores' shape `(B, H, T, S)`.
"""

from __future__ import annotations

from typing import Any

from keras import ops

# Far below any score, yet finite: a row without a key keeps a finite softmax and finite gradients.
_MASKED = -1e30


def hide(scores: Any, mask: Any) -> Any:
    """The scores where the mask is `True`, and something far below them where it is not."""
    return ops.where(mask, scores, _MASKED)


def merge(*masks: Any) -> Any:
    """The conjunction of the masks that are not `None`; `None` if there is none."""
    merged = None
    for mask in masks:
        if mask is not None:
            merged = mask if merged is None else ops.logical_and(merged, mask)
    return merged


def as_boolean(mask: Any) -> Any:
    """A mask of zeros and ones as a boolean one; `None` is passed through."""
    return None if mask is None else ops.cast(mask, "bool")


def without_padding(x: Any, mask: Any) -> Any:
    """`x (..., D)` with zeros at the tokens that the boolean mask `(...)`, if any, leaves out.

    What a padded token holds might overflow in a projection, and infinity times 0 is no number.
    """
    if mask is None:
        return x
    return ops.where(ops.expand_dims(mask, -1), x, ops.zeros_like(x))


def position_mask(
    query_length: Any,
    key_length: Any,
    is_causal: bool,
    causal_offset: Any = 0,
    sliding_window: int | None = None,
) -> Any:
    """The mask `(1, 1, T, S)` that positions alone give, or `None` if they give none.

    Query `t` stands at position `t + causal_offset`, key `s` at position `s`. Causality keeps the
    keys at or before the query's position, a window those less than `sliding_window` away from it,
    on both sides, as in `keras.layers.MultiHeadAttention`.
    """
    if not is_causal and sliding_window is None:
        return None
    query_position = ops.arange(query_length, dtype="int32") + ops.cast(causal_offset, "int32")
    key_position = ops.arange(key_length, dtype="int32")
    distance = ops.expand_dims(query_position, 1) - ops.expand_dims(key_position, 0)
    causal = distance >= 0 if is_causal else None
    window = None if sliding_window is None else ops.abs(distance) < sliding_window
    return ops.expand_dims(merge(causal, window), (0, 1))
