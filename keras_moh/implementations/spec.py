"""What an implementation may look at to say whether it can serve a call."""

from __future__ import annotations

from dataclasses import dataclass


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
        key_dim: `d`.
        value_dim: `dv`.
        dtype: Dtype of query, key and value.
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
    key_dim: int
    value_dim: int
    dtype: str
    mask_shape: tuple[int | None, ...] | None
    is_causal: bool
    sliding_window: int | None
    dropout: float
    return_attention_scores: bool
