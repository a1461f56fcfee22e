r"""`attention_flops`: the arithmetic of a layer, with the heads that a token takes and with all.

A multiply-add counts as 2. For self-attention of `N` tokens with `D = H d` features and no grouped
queries, plain attention takes

$$ \underbrace{2 N D^2}_{\text{query}} + \underbrace{4 N D^2}_{\text{key, value}}
   + \underbrace{4 N^2 D}_{\text{core}} + \underbrace{2 N D^2}_{\text{output}}
   = (8 D + 4 N) N D, $$

and with `K` of `H` heads active all but the keys and values shrink by `K / H`. What is not a matrix
product (biases, softmax, normalization, gates) is left out, as is usual.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from keras_moh.errors import boolean, integer, invalid_argument
from keras_moh.moh_attention import MoHAttention


@dataclass(frozen=True)
class PartFLOPs:
    """FLOPs of one forward call, part by part.

    Attributes:
        query: Of the query projection: of all heads, where a router chooses by the queries.
        key: Of the key projection.
        value: Of the value projection.
        core: Of the products of queries with keys, and of scores with values.
        output: Of the output projection.
        router: Of the router's scores.
    """

    query: int
    key: int
    value: int
    core: int
    output: int
    router: int

    @property
    def total(self) -> int:
        """The sum of all parts."""
        return self.query + self.key + self.value + self.core + self.output + self.router


@dataclass(frozen=True)
class AttentionFLOPs:
    """FLOPs of one forward call of a `MoHAttention`.

    Attributes:
        active: With only the heads that a token takes, and the router.
        dense: With all heads and no router: plain attention of the same shapes.
    """

    active: PartFLOPs
    dense: PartFLOPs

    @property
    def speedup_limit(self) -> float:
        """`dense.total / active.total`: the speed-up if every FLOP takes the same time."""
        return self.dense.total / self.active.total


def attention_flops(
    layer: MoHAttention,
    batch: int,
    query_length: int,
    key_length: int | None = None,
    use_causal_mask: bool = False,
) -> AttentionFLOPs:
    """Count the FLOPs of a call of `layer`, of its active heads and of all heads, part by part.

    A multiply-add counts as 2, and only matrix products count. A training step takes about three
    times as many: each product has two of the same size in the backward pass.

    Args:
        layer: A built `MoHAttention`. Of a `Router` of one's own, every weight with two axes or
            more counts as a matrix that each token is multiplied with.
        batch: Number of sequences `B`. For inputs of rank 4 and more, axes that are not attended
            over are part of the batch.
        query_length: Number of queries `T` of a sequence, over all attention axes.
        key_length: Number of keys `S`. Defaults to `query_length`.
        use_causal_mask: Whether query `t` attends only to keys up to `t`. The attention core then
            counts just the pairs of a query and a key that causality leaves, as it does with the
            layer's `sliding_window`. Defaults to `False`.

    Returns:
        `AttentionFLOPs`: the parts of `active` and `dense`, each with its `total`, and the
        `speedup_limit`.

    Raises:
        ValueError: if `layer` is no built `MoHAttention`, or a length is no positive integer.

    Example:
    >>> import keras_moh
    >>> layer = keras_moh.MoHAttention(12, 64, num_shared_heads=3, top_k=3)
    >>> layer.build((None, None, 768))
    >>> flops = keras_moh.attention_flops(layer, batch=1, query_length=1024)
    >>> flops.dense.query, flops.active.query
    (1207959552, 603979776)
    >>> print(f"{flops.dense.total:,} / {flops.active.total:,} = {flops.speedup_limit:.2f}")
    8,053,063,680 / 5,256,511,488 = 1.53
    """
    if not isinstance(layer, MoHAttention):
        raise invalid_argument("layer", "a `keras_moh.MoHAttention`", layer)
    if not layer.built:
        raise invalid_argument("layer", "a built layer: call it, or `layer.build`, first", layer)
    batch = integer("batch", batch, 1)
    query_length = integer("query_length", query_length, 1)
    key_length = query_length if key_length is None else integer("key_length", key_length, 1)
    pairs = _attended_pairs(
        query_length,
        key_length,
        boolean("use_causal_mask", use_causal_mask),
        layer.sliding_window,
    )
    router = 0 if layer.router is None else _weights_per_token(layer.router)

    needs_query = layer.router is not None and layer.router.needs_query

    def parts(heads: int, router: int) -> PartFLOPs:
        features, value_features, key_features = layer._features
        output_shape = layer._output_shape or (features,)
        groups, d, dv = layer.num_key_value_heads, layer.key_dim, layer.value_dim
        queries, keys = 2 * batch * query_length, 2 * batch * key_length
        return PartFLOPs(
            query=queries * features * (layer.num_heads if needs_query else heads) * d,
            key=keys * key_features * groups * d,
            value=keys * value_features * groups * dv,
            core=2 * batch * pairs * heads * (d + dv),
            output=queries * heads * dv * math.prod(output_shape),
            router=queries * router,
        )

    return AttentionFLOPs(
        active=parts(layer.num_active_heads, router), dense=parts(layer.num_heads, 0)
    )


def _weights_per_token(router: Any) -> int:
    return sum(math.prod(weight.shape) for weight in router.weights if len(weight.shape) > 1)


def _attended_pairs(
    query_length: int, key_length: int, is_causal: bool, sliding_window: int | None
) -> int:
    """Number of pairs of a query and a key that their positions allow to attend."""
    reach = sliding_window or query_length + key_length  # a window of this width leaves all pairs
    pairs = 0
    for position in range(query_length):
        first = max(position - reach + 1, 0)
        last = min(position if is_causal else position + reach - 1, key_length - 1)
        pairs += max(last - first + 1, 0)
    return pairs
