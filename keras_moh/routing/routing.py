"""What a router returns, and its dense form over all heads."""

from __future__ import annotations

from typing import Any, NamedTuple

import keras
from keras import ops


class Routing(NamedTuple):
    """The heads of every token, with their gates.

    Attributes:
        heads: `(B, T, K)`, int32: the heads that a token takes, ascending, shared ones included.
        gates: `(B, T, K)`, float32 (float64 under a float64 policy): the factor of each of these
            heads' outputs.
        probabilities: `(B, T, E)`, dtype of the gates: the router's softmax over the routed
            candidates before the choice; `E` is 0 where there is nothing to choose.

    Inputs of higher rank keep their leading axes in place of `B, T`.
    """

    heads: Any
    gates: Any
    probabilities: Any


def routing_dtype(compute_dtype: str) -> str:
    """The dtype of gates and probabilities under a policy that computes in `compute_dtype`."""
    return "float64" if compute_dtype == "float64" else "float32"


def routing_spec(x: Any, num_active_heads: int, num_routed_heads: int, dtype: str) -> Routing:
    """The symbolic routing of `x (..., D)`."""
    leading = tuple(x.shape[:-1])
    return Routing(
        heads=keras.KerasTensor((*leading, num_active_heads), dtype="int32"),
        gates=keras.KerasTensor((*leading, num_active_heads), dtype=dtype),
        probabilities=keras.KerasTensor((*leading, num_routed_heads), dtype=dtype),
    )


def constant_heads(x: Any, heads: range) -> Any:
    """The same `heads` for every token of `x (..., D)`: `(..., len(heads))`, int32."""
    leading = ops.shape(x)[:-1]
    return ops.broadcast_to(
        ops.arange(heads.start, heads.stop, dtype="int32"), (*leading, len(heads))
    )


def all_heads(x: Any, num_heads: int, dtype: str) -> Routing:
    """The routing of plain attention: every token of `x (..., D)` takes every head with gate 1."""
    heads = constant_heads(x, range(num_heads))
    gates = ops.ones_like(heads, dtype=dtype)
    return Routing(heads, gates, gates[..., :0])
