r"""The definition of routed attention in plain `keras.ops`: every head, then the gates.

$$ O_h = g_h \, \mathrm{softmax}\!\left(\frac{Q_h K_{h'}^\top}{\sqrt{d}} + M\right) V_{h'} $$

for each query head `h`, with `h' = h // (H / G)` its key/value head, the gate $g_h$ of every token
(0 where the token did not take the head), and a mask `M`. Every other implementation is tested
against this one. It saves nothing: all heads are computed, as in the authors' code.
"""

from __future__ import annotations

from typing import Any

import keras
from keras import ops

from keras_moh.heads import dense_gates
from keras_moh.implementations.spec import AttentionSpec, Options
from keras_moh.masks import hide, merge, position_mask
from keras_moh.softmax import softmax


def unsupported_reason(spec: AttentionSpec) -> str | None:
    """`None`: this implementation serves every call."""
    return None


def attend(
    query: Any, key: Any, value: Any, heads: Any, gates: Any, options: Options
) -> tuple[Any, Any]:
    """Attention of every head, multiplied by its gate.

    Args:
        query: `(B, T, H, d)`.
        key: `(B, S, G, d)`.
        value: `(B, S, G, dv)`.
        heads: `(B, T, K)`, the heads that each token takes.
        gates: `(B, T, K)`, their gates.
        options: The `Options` of the call.

    Returns:
        The gated outputs `(B, T, H, dv)`, and the scores `(B, H, T, S)`: the softmax of every head
        before gates and dropout, 0 in a row without a key.
    """
    batch, query_length, num_heads, key_dim = ops.shape(query)
    key_length, groups = ops.shape(key)[1:3]
    mask = merge(
        options.mask,
        position_mask(
            query_length,
            key_length,
            options.is_causal,
            options.causal_offset,
            options.sliding_window,
        ),
    )
    # Query heads that share a key/value head stand side by side: G groups of H / G.
    grouped = (batch, query_length, groups, num_heads // groups, key_dim)
    grouped_query = ops.reshape(query * options.scale, grouped)
    scores = ops.einsum("btgrd,bsgd->bgrts", grouped_query, key)
    scores = ops.reshape(scores, (batch, num_heads, query_length, key_length))
    scores = ops.cast(masked_softmax(scores, mask), query.dtype)
    weights = scores
    if options.dropout > 0:
        weights = keras.random.dropout(scores, options.dropout, seed=options.seed)
    weights = ops.reshape(weights, (batch, groups, num_heads // groups, query_length, key_length))
    output = ops.einsum("bgrts,bsgd->btgrd", weights, value)
    output = ops.reshape(output, (batch, query_length, num_heads, ops.shape(value)[-1]))
    all_gates = ops.expand_dims(dense_gates(heads, gates, num_heads), -1)
    return output * ops.cast(all_gates, output.dtype), scores


def masked_softmax(scores: Any, mask: Any) -> Any:
    """The softmax over the keys that the mask leaves, in float32 at least; 0 where none is left."""
    if keras.backend.standardize_dtype(scores.dtype) != "float64":
        scores = ops.cast(scores, "float32")
    if mask is None:
        return softmax(scores)
    probabilities = softmax(hide(scores, mask))
    return ops.where(mask, probabilities, ops.zeros_like(probabilities))
