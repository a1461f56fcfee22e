"""The adapter of `keras_hub.layers.CachedMultiHeadAttention`, of GPT-2, OPT and others."""

from __future__ import annotations

from typing import Any

import keras

from keras_moh.conversion.multi_head_attention import MoHMultiHeadAttention


@keras.saving.register_keras_serializable(package="keras_moh")
class MoHCachedMultiHeadAttention(MoHMultiHeadAttention):
    """`MoHAttention` in the place of a `keras_hub.layers.CachedMultiHeadAttention`.

    `convert_to_moh` makes these. The call arguments are those of
    `keras_hub.layers.CachedMultiHeadAttention`, and `return_routing` of `MoHAttention`.

    Example:
    >>> import numpy as np, keras_moh
    >>> layer = keras_moh.MoHCachedMultiHeadAttention(
    ...     num_heads=4, key_dim=2, num_shared_heads=1, top_k=1
    ... )
    >>> x = np.ones((2, 1, 8), "float32")
    >>> cache = np.zeros((2, 2, 5, 4, 2), "float32")
    >>> output, cache = layer(x, x, cache=cache, cache_update_index=0)
    >>> tuple(output.shape), tuple(cache.shape)
    ((2, 1, 8), (2, 2, 5, 4, 2))
    """

    source = "keras_hub.src.layers.modeling.cached_multi_head_attention.CachedMultiHeadAttention"

    def call(  # type: ignore[override]
        self,
        query: Any,
        value: Any,
        key: Any = None,
        attention_mask: Any = None,
        cache: Any = None,
        cache_update_index: Any = None,
        return_attention_scores: bool = False,
        training: bool | None = None,
        return_routing: bool = False,
    ) -> Any:
        """Attend; see `MoHAttention`."""
        return super(MoHMultiHeadAttention, self).call(
            query,
            value,
            key,
            attention_mask=attention_mask,
            return_attention_scores=return_attention_scores,
            return_routing=return_routing,
            training=training,
            cache=cache,
            cache_update_index=cache_update_index,
        )
