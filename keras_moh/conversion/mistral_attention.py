"""The adapter of keras-hub's `CachedMistralAttention`."""

from __future__ import annotations

from typing import Any

import keras

from keras_moh.conversion.llama_attention import MoHLlamaAttention, decoder_arguments
from keras_moh.rotary_embedding import RotaryEmbedding


@keras.saving.register_keras_serializable(package="keras_moh")
class MoHMistralAttention(MoHLlamaAttention):
    """`MoHAttention` in the place of keras-hub's `CachedMistralAttention`.

    `convert_to_moh` makes these. The call arguments are those of `CachedMistralAttention`, and
    `return_routing` of `MoHAttention`. The sliding window of the model is in the masks that its
    decoder makes; the layer's own `sliding_window` is the same, to skip what is outside of it.

    Example:
    >>> import numpy as np, keras_moh
    >>> layer = keras_moh.MoHMistralAttention(
    ...     num_heads=4, key_dim=2, num_key_value_heads=2, num_shared_heads=1, top_k=1,
    ...     router="query_norm", rotary_embedding=keras_moh.RotaryEmbedding(), use_bias=False,
    ... )
    >>> tuple(layer(np.ones((2, 3, 8), "float32")).shape)
    (2, 3, 8)
    """

    source = "keras_hub.src.models.mistral.mistral_attention.CachedMistralAttention"
    causal_in = frozenset(
        {"keras_hub.src.models.mistral.mistral_transformer_decoder.MistralTransformerDecoder"}
    )

    @classmethod
    def dropout_of(cls, layer: keras.Layer) -> float:
        """The rate of the source's dropout."""
        return layer._dropout

    @classmethod
    def arguments_of(cls, layer: keras.Layer) -> dict[str, Any]:
        config = layer.get_config()
        return decoder_arguments(layer) | {
            "num_heads": config["num_query_heads"],
            "num_key_value_heads": config["num_key_value_heads"],
            "sliding_window": config["sliding_window"],
            "kernel_initializer": config["kernel_initializer"],
            "rotary_embedding": RotaryEmbedding(
                config["rope_max_wavelength"],
                config["rope_scaling_factor"],
                dtype=layer.dtype_policy,
                name="rotary_embedding",
            ),
        }
