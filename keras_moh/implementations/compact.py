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
from keras_moh.implementations import fused
from keras_moh.implementations.spec import AttentionSpec, Options


def unsupported_reason(spec: AttentionSpec) -> str | None:
    """Why this implementation cannot serve a call, or `None`."""
    reason = fused.unsupported_reason(spec)
    if reason is not None:
        return reason
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
        return fused.attend_slots(query, key, value, gates, options), None
    query = _vectors(query, heads)
    return _place(fused.attend_slots(query, key, value, gates, options), heads, num_heads), None


def attend_rows(
    query: Any, key: Any, value: Any, heads: Any, gates: Any, plan: Any, options: Options
) -> Any:
    """The gated outputs `(B T K, dv)` of query rows `(B T K, d)`, in the order of `plan`."""
    shape = ops.shape(heads)
    by_slot = ops.argsort(plan.places)  # a token's slots are its heads, in their order
    slots = ops.reshape(ops.take(query, by_slot, axis=0), (*shape, query.shape[-1]))
    output = fused.attend_slots(slots, key, value, gates, options)
    rows = ops.reshape(output, (math.prod(shape), output.shape[-1]))
    return ops.take(rows, ops.argsort(by_slot), axis=0)


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
    vectors = ops.take(flat, tokens * count + ops.cast(chosen, "int32"), axis=0)
    # Of nothing JAX takes what is of the shape of `flat`.
    return ops.reshape(vectors, (*ops.shape(chosen), features))
