"""What a call of `routed_attention` asks for: what the choice may depend on, and the rest."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

# What the kernels made for GPUs and TPUs compute in, and the most features of their heads.
_KERNEL_DTYPES = ("float32", "float16", "bfloat16")
_MOST_KERNEL_FEATURES = 256


@dataclass(frozen=True)
class AttentionSpec:
    """One call of `routed_attention`, without its values; an unknown length is `None`.

    Attributes:
        batch: `B`.
        query_length: `T`.
        key_length: `S`.
        num_heads: `H`.
        num_key_value_heads: `G`.
        num_active_heads: `K`, the heads that a token takes.
        routing_groups: Number of groups of heads, in each of which a token takes equally many.
        key_dim: `d`.
        value_dim: `dv`.
        dtype: Dtype of query, key and value.
        device: Kind of device, `"cpu"` for instance; `"meta"` for tensors without values.
        is_traced: Whether a graph is captured in which no value can be read.
        mask_shape: Shape of the mask, of rank 4, or `None`.
        is_causal: Whether causality is asked for.
        sliding_window: Width of the window, or `None`.
        dropout: Rate of dropout on the scores.
        return_attention_scores: Whether the scores are asked for.
    """

    batch: int | None
    query_length: int | None
    key_length: int | None
    num_heads: int
    num_key_value_heads: int
    num_active_heads: int
    routing_groups: int
    key_dim: int
    value_dim: int
    dtype: str
    device: str
    is_traced: bool
    mask_shape: tuple[int | None, ...] | None
    is_causal: bool
    sliding_window: int | None
    dropout: float
    return_attention_scores: bool


@dataclass(frozen=True)
class Options:
    """What is asked of the attention beside its tensors.

    Attributes:
        mask: Boolean, of rank 4 and broadcastable to `(B, H, T, S)`, or `None`.
        is_causal: Whether a query attends only to keys at or before its position.
        scale: Factor of the dot products.
        causal_offset: Position of the first query, an integer or a scalar tensor.
        sliding_window: Width of the window around the query's position, or `None`.
        dropout: Rate of dropout on the scores.
        seed: Seed of the dropout.
        routing_groups: Number of groups of heads, in each of which a token takes equally many.
    """

    mask: Any
    is_causal: bool
    scale: float
    causal_offset: Any
    sliding_window: int | None
    dropout: float = 0.0
    seed: Any = None
    routing_groups: int = 1


def needs_reference(spec: AttentionSpec) -> str | None:
    """Why only the reference, which has the scores of all heads, can serve a call, or `None`."""
    if spec.num_active_heads == 0:
        return "its tokens take a head"
    if spec.return_attention_scores:
        return "it does not keep the attention scores"
    if spec.dropout > 0:
        return "it has no dropout on the attention scores"
    if spec.mask_shape is not None and spec.mask_shape[1] != 1:
        return "its mask has no head axis"
    return None


def beyond_kernels(spec: AttentionSpec) -> str | None:
    """Why none of the kernels made for GPUs and TPUs can serve a call, or `None`."""
    reason = needs_reference(spec)
    if reason is not None:
        return reason
    if spec.dtype not in _KERNEL_DTYPES:
        return f"it computes in {', '.join(_KERNEL_DTYPES)}, not in {spec.dtype}"
    widest = max(spec.key_dim, spec.value_dim)
    if widest > _MOST_KERNEL_FEATURES:
        return f"its heads have at most {_MOST_KERNEL_FEATURES} features, not {widest}"
    return None
