"""Head numbers `(..., K)` of tokens, as something about each of the `H` heads."""

from __future__ import annotations

from typing import Any

from keras import ops


def _slot_is_head(heads: Any, num_heads: int) -> Any:
    """`(..., K, H)` boolean: whether slot `k` of a token holds head `h`."""
    return ops.equal(ops.expand_dims(heads, -1), ops.arange(num_heads, dtype="int32"))


def taken_heads(heads: Any, num_heads: int) -> Any:
    """Whether each head is taken: `(..., K)` head numbers to `(..., H)` booleans."""
    return ops.any(_slot_is_head(heads, num_heads), axis=-2)


def fills_groups(
    num_heads: int, num_active_heads: int, num_key_value_heads: int, routing_groups: int
) -> bool:
    """Whether every token takes equally many query heads of each key/value head.

    Then slot `k` of the `K` that a token fills belongs to key/value head `k // (K / G)`.
    """
    return num_active_heads == num_heads or routing_groups % num_key_value_heads == 0


def dense_gates(heads: Any, gates: Any, num_heads: int) -> Any:
    """The gates `(..., K)` of all heads, `(..., H)`, 0 where a head is not taken."""
    gates = ops.expand_dims(gates, -1)
    placed = ops.where(_slot_is_head(heads, num_heads), gates, ops.zeros_like(gates))
    return ops.sum(placed, axis=-2)
