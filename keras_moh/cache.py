"""The key/value cache of `MoHAttention`, in keras-hub's convention.

A cache is one tensor `(B, 2, S, G, d)`: of each of its `S` slots the key (index 0) and the value.
A call writes the keys and values of its tokens from slot `cache_update_index` on, and attends to
all slots that causality and masks leave. Slot `s` stands at position `s`.

What a slot holds that nothing was written to is nobody's business. Its score is masked, but 0 times
infinity is no number: slots that no query of a call may see are taken for zeros.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
from keras import ops

from keras_moh.errors import integer, invalid_argument
from keras_moh.implementations.rows import span_of_keys
from keras_moh.masks import merge
from keras_moh.shapes import same_length, same_shape


def check_cache(
    cache: Any,
    index: Any,
    batch: int | None,
    length: int | None,
    num_key_value_heads: int,
    key_dim: int,
    value_dim: int,
) -> Any:
    """Check the arguments of a call by their static shapes.

    Args:
        cache: The argument `cache`.
        index: The argument `cache_update_index`.
        batch: `B` of the query.
        length: Number of tokens to be written.
        num_key_value_heads: `G`.
        key_dim: `d`.
        value_dim: `dv`.

    Returns:
        The index, a number as an `int`.
    """
    if cache is None:
        if index is not None:
            raise ValueError(
                "Argument `cache_update_index` needs a `cache`. Received: "
                f"cache_update_index={index} with cache=None"
            )
        return None
    if not hasattr(cache, "shape"):
        raise invalid_argument("cache", "a tensor", cache)
    if value_dim != key_dim:
        raise ValueError(
            "Argument `cache` needs values as wide as keys. Received: a cache with "
            f"value_dim={value_dim} and key_dim={key_dim}"
        )
    expected = (batch, 2, None, num_key_value_heads, key_dim)
    dtype = keras.backend.standardize_dtype(cache.dtype)
    if not same_shape(expected, cache.shape) or not keras.backend.is_float_dtype(dtype):
        raise ValueError(
            "Argument `cache` must be of a float dtype and of the shape (batch, 2, length, "
            f"key/value heads, features), here {expected}. Received: cache.shape="
            f"{tuple(cache.shape)} and cache.dtype={dtype}"
        )
    if index is None:
        return None
    if hasattr(index, "shape") and not isinstance(index, np.generic):
        index_dtype = keras.backend.standardize_dtype(index.dtype)
        if len(index.shape) or not keras.backend.is_int_dtype(index_dtype):
            raise invalid_argument("cache_update_index", "an integer or a scalar tensor", index)
    else:
        index = integer("cache_update_index", index, 0)
    first = index if isinstance(index, int) else 0
    slots = cache.shape[2]
    if isinstance(length, int) and isinstance(slots, int) and first + length > slots:
        raise ValueError(
            "Argument `cache` has no room for the tokens of the call. Received: "
            f"cache.shape={tuple(cache.shape)} and cache_update_index={index} with {length} tokens"
        )
    return index


def write(cache: Any, key: Any, value: Any, index: Any) -> Any:
    """The cache with `key (B, T, G, d)` and `value (B, T, G, d)` from slot `index` on.

    The index is an `int` or an int32 tensor.
    """
    update = ops.cast(ops.stack([key, value], axis=1), cache.dtype)
    zero = _zero_beside(index)
    return ops.slice_update(cache, (zero, zero, index, zero, zero), update)


def _zero_beside(index: Any) -> Any:
    """A start of a slice: XLA wants all of them in one dtype, which is int32 if one is a tensor."""
    return 0 if isinstance(index, int) else np.int32(0)


def padding_masks(
    masks: Sequence[Any], token_mask: Any, cache: Any, index: Any, tokens: Any
) -> tuple[Any, Any]:
    """The boolean masks `(B, T)` of the tokens of a call, and `(B, S)` of all slots, or `None`.

    Args:
        masks: Masks of keys or `None`, either `(B, T)` of the tokens or `(B, S)` of all slots.
        token_mask: A further mask `(B, T)` of the tokens, or `None`.
        cache: `(B, 2, S, G, d)`.
        index: Slot of the first token, or `None` if none is written: then all masks are of slots.
        tokens: `(B, T, D)`.
    """
    if index is None:
        return None, merge(*masks)
    length, slots = tokens.shape[1], cache.shape[2]

    def is_of_slots(mask: Any) -> bool:
        # Where lengths are unknown, only one that is surely that of the slots is.
        known = mask.shape[1] is not None and mask.shape[1] == slots != length
        return known or not same_length(length, mask.shape[1])

    given = [mask for mask in masks if mask is not None]
    of_slots = merge(*(mask for mask in given if is_of_slots(mask)))
    of_tokens = merge(token_mask, *(mask for mask in given if not is_of_slots(mask)))
    batch, length = ops.shape(tokens)[:2]
    start = (_zero_beside(index), index)
    own = None if of_slots is None else ops.slice(of_slots, start, (batch, length))
    placed = None
    if of_tokens is not None:
        everything = ops.ones((batch, ops.shape(cache)[2]), dtype="bool")
        placed = ops.slice_update(everything, start, of_tokens)
    return merge(of_tokens, own), merge(of_slots, placed)


def without_unseen(
    key: Any,
    value: Any,
    mask: Any,
    query_length: Any,
    is_causal: bool,
    offset: Any,
    sliding_window: int | None,
) -> tuple[Any, Any]:
    """Keys and values `(B, S, G, d)`, with zeros in the slots that no query may see.

    Args:
        key: `(B, S, G, d)`.
        value: `(B, S, G, d)`.
        mask: Boolean, of rank 4 and broadcastable to `(B, H, T, S)`, or `None`.
        query_length: `T`.
        is_causal: Whether a query sees only slots at or before its position.
        offset: Position of the first query.
        sliding_window: Width of the window around the query's position, or `None`.
    """
    slots = ops.shape(key)[1]
    seen = None if mask is None else ops.any(mask, axis=(1, 2))
    if is_causal or sliding_window is not None:
        first = ops.cast(offset, "int32")
        low, high = span_of_keys(first, first + query_length - 1, slots, is_causal, sliding_window)
        number = ops.arange(slots, dtype="int32")
        seen = merge(seen, ops.expand_dims(ops.logical_and(number >= low, number < high), 0))
    if seen is None:
        return key, value
    seen = ops.expand_dims(seen, (2, 3))
    return ops.where(seen, key, ops.zeros_like(key)), ops.where(seen, value, ops.zeros_like(value))
