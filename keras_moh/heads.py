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


def dense_gates(heads: Any, gates: Any, num_heads: int) -> Any:
    """The gates `(..., K)` of all heads, `(..., H)`, 0 where a head is not taken."""
    gates = ops.expand_dims(gates, -1)
    placed = ops.where(_slot_is_head(heads, num_heads), gates, ops.zeros_like(gates))
    return ops.sum(placed, axis=-2)
