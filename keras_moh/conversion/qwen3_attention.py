"""The adapter of keras-hub's `Qwen3Attention`."""

from __future__ import annotations

from typing import Any

import keras

from keras_moh.conversion.adapter import projections
from keras_moh.conversion.llama_attention import MoHLlamaAttention, decoder_arguments
from keras_moh.errors import number_in
from keras_moh.rotary_embedding import RotaryEmbedding


@keras.saving.register_keras_serializable(package="keras_moh")
class MoHQwen3Attention(MoHLlamaAttention):
    """`MoHAttention` in the place of keras-hub's `Qwen3Attention`.

    `convert_to_moh` makes these. The call arguments are those of `Qwen3Attention`, and
    `return_routing` of `MoHAttention`. A sliding window that the source ignores, as keras-hub 0.32
    does on JAX and PyTorch, is ignored here as well.

    Args:
        *args: Arguments of `MoHAttention`.
        qk_norm_epsilon: The epsilon of the norms of queries and keys. Defaults to 1e-6.
        **kwargs: Arguments of `MoHLlamaAttention`.

    Example:
    >>> import numpy as np, keras_moh
    >>> layer = keras_moh.MoHQwen3Attention(
    ...     num_heads=4, key_dim=2, num_key_value_heads=2, num_shared_heads=1, top_k=1,
    ...     router="query_norm", rotary_embedding=keras_moh.RotaryEmbedding(), use_bias=False,
    ...     qk_norm="rms",
    ... )
    >>> tuple(layer(np.ones((2, 3, 8), "float32")).shape)
    (2, 3, 8)
    """

    source = "keras_hub.src.models.qwen3.qwen3_attention.Qwen3Attention"
    causal_in = frozenset({"keras_hub.src.models.qwen3.qwen3_decoder.Qwen3TransformerDecoder"})

    def __init__(self, *args: Any, qk_norm_epsilon: float = 1e-6, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.qk_norm_epsilon = number_in("qk_norm_epsilon", qk_norm_epsilon, 0)

    @classmethod
    def arguments_of(cls, layer: keras.Layer) -> dict[str, Any]:
        return decoder_arguments(layer) | {
            "num_heads": layer.num_query_heads,
            "num_key_value_heads": layer.num_key_value_heads,
            "sliding_window": _sliding_window(layer),
            "kernel_initializer": layer.kernel_initializer,
            "qk_norm": "rms",
            "qk_norm_epsilon": layer.layer_norm_epsilon,
            "rotary_embedding": RotaryEmbedding(
                layer.rope_max_wavelength,
                layer.rope_scaling_factor,
                dtype=layer.dtype_policy,
                name="rotary_embedding",
            ),
        }

    @classmethod
    def sublayers_of(cls, layer: keras.Layer) -> tuple[keras.Layer, ...]:
        norms = (layer._query_dense_layer_norm, layer._key_dense_layer_norm)
        return (*projections(layer), *norms)

    def own_sublayers(self) -> tuple[keras.Layer, ...]:
        return (*projections(self), self.query_norm, self.key_norm)

    def _head_norm(self, name: str) -> keras.Layer:
        norm = super()._head_norm(name)
        norm.epsilon = self.qk_norm_epsilon
        return norm

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "qk_norm_epsilon": self.qk_norm_epsilon}


def _sliding_window(layer: keras.Layer) -> int | None:
    """The window of a `Qwen3Attention` where it has one.

    keras-hub 0.32 masks by it in its own attention alone, which it has on TensorFlow: through the
    fused one of Keras, on JAX and PyTorch, a token attends to all before it.
    """
    return layer.sliding_window_size if keras.backend.backend() == "tensorflow" else None
