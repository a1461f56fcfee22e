r"""Any backend: the heads taken, as plain grouped-query attention with fewer query heads.

Where every token takes equally many of the query heads of each key/value head, the heads it took
are themselves grouped-query attention: slot `s` of the `K` that a token fills belongs to key/value
head `s // (K / G)`. So the query vectors of the heads taken are chosen, and the framework's own
fused attention does the rest. That is so if there is one key/value head, if all heads are taken,
or if the key/value heads divide the routing groups (arXiv 2606.20945).
"""

from __future__ import annotations

import math
from typing import Any

from keras import ops

from keras_moh.heads import fills_groups, taken_heads
from keras_moh.implementations.spec import AttentionSpec, Options, needs_reference
from keras_moh.masks import merge, position_mask


def unsupported_reason(spec: AttentionSpec) -> str | None:
    """Why this implementation cannot serve a call, or `None`."""
    reason = needs_reference(spec)
    if reason is not None:
        return reason
    if spec.dtype == "float16" and spec.device == "cpu":
        return "JAX's fused attention has no gradient in float16 on a CPU"
    if spec.dtype == "float64":
        return "Keras's fused attention computes in float32"
    heads = (spec.num_heads, spec.num_active_heads, spec.num_key_value_heads)
    if not fills_groups(*heads, spec.routing_groups):
        return (
            "a token may take more heads of one key/value head than of another: the "
            f"{spec.num_key_value_heads} key/value heads do not divide the routing groups "
            f"({spec.routing_groups})"
        )
    return None


def attend(
    query: Any, key: Any, value: Any, heads: Any, gates: Any, options: Options
) -> tuple[Any, None]:
    """Attention of the heads taken; see `reference.attend`."""
    num_heads = query.shape[2]
    if heads.shape[-1] == num_heads:
        return _attend_slots(query, key, value, gates, options), None
    query = _vectors(query, heads)
    return _place(_attend_slots(query, key, value, gates, options), heads, num_heads), None


def attend_rows(
    query: Any, key: Any, value: Any, heads: Any, gates: Any, plan: Any, options: Options
) -> Any:
    """The gated outputs `(B T K, dv)` of query rows `(B T K, d)`, in the order of `plan`."""
    shape = ops.shape(heads)
    by_slot = ops.argsort(plan.places)  # a token's slots are its heads, in their order
    slots = ops.reshape(ops.take(query, by_slot, axis=0), (*shape, query.shape[-1]))
    output = _attend_slots(slots, key, value, gates, options)
    rows = ops.reshape(output, (math.prod(shape), output.shape[-1]))
    return ops.take(rows, ops.argsort(by_slot), axis=0)


def _attend_slots(query: Any, key: Any, value: Any, gates: Any, options: Options) -> Any:
    """The gated outputs `(B, T, K, dv)` of the query vectors `(B, T, K, d)` of the heads taken."""
    # Fused kernels cut the work in half by causality, if they are told of it and of nothing else.
    aligned = isinstance(options.causal_offset, int) and options.causal_offset == 0
    is_causal = options.is_causal and aligned and options.sliding_window is None
    is_causal = is_causal and options.mask is None
    mask = options.mask
    if not is_causal:
        positions = position_mask(
            ops.shape(query)[1],
            ops.shape(key)[1],
            options.is_causal,
            options.causal_offset,
            options.sliding_window,
        )
        mask = merge(mask, positions)
    output = _attention(query, key, value, mask, options.scale, is_causal)
    if mask is not None:
        has_key = ops.any(ops.swapaxes(mask, 1, 2), axis=-1, keepdims=True)
        output = ops.where(has_key, output, ops.zeros_like(output))
    return output * ops.cast(ops.expand_dims(gates, -1), output.dtype)


def _attention(query: Any, key: Any, value: Any, mask: Any, scale: float, is_causal: bool) -> Any:
    """`ops.dot_product_attention`, also where it wants one width for all, or more than one head."""
    if key.shape[2] == 1:
        key, value = (ops.repeat(x, query.shape[2], axis=2) for x in (key, value))
    key_dim, value_dim = key.shape[3], value.shape[3]
    # Features of 0 change neither scores nor outputs.
    query, key = (_widened(x, value_dim) for x in (query, key))
    output = ops.dot_product_attention(
        query, key, _widened(value, key_dim), mask=mask, scale=scale, is_causal=is_causal
    )
    return output[..., :value_dim]


def _widened(x: Any, width: int) -> Any:
    """`x (..., features)` with features of 0 up to the width, if it has fewer."""
    missing = width - x.shape[-1]
    return ops.pad(x, [*[(0, 0)] * (len(x.shape) - 1), (0, missing)]) if missing > 0 else x


def _place(values: Any, heads: Any, num_heads: int) -> Any:
    """`(B, T, K, dv)` as `(B, T, H, dv)`, with zeros where a head is not taken."""
    taken = taken_heads(heads, num_heads)
    slots = ops.maximum(ops.cumsum(ops.cast(taken, "int32"), axis=-1) - 1, 0)
    values = _vectors(values, slots)
    return ops.where(ops.expand_dims(taken, -1), values, ops.zeros_like(values))


def _vectors(dense: Any, chosen: Any) -> Any:
    """Of each token's vectors `(B, T, H, d)` those that it chose: `(B, T, K, d)` for `(B, T, K)`.

    Whole vectors are copied, where `ops.take_along_axis` would look up number by number.
    """
    batch, length, count, features = ops.shape(dense)
    tokens = ops.reshape(ops.arange(batch * length, dtype="int32"), (batch, length, 1))
    flat = ops.reshape(dense, (batch * length * count, features))
    return ops.take(flat, tokens * count + ops.cast(chosen, "int32"), axis=0)
