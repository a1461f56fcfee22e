"""The adapter of `keras.layers.MultiHeadAttention`."""

from __future__ import annotations

from typing import Any

import keras

from keras_moh.conversion.adapter import Adapter

SAME_ARGUMENTS = (
    "num_heads",
    "key_dim",
    "value_dim",
    "dropout",
    "use_bias",
    "output_shape",
    "attention_axes",
    "sliding_window",
    "kernel_initializer",
    "bias_initializer",
    "kernel_regularizer",
    "bias_regularizer",
    "activity_regularizer",
    "kernel_constraint",
    "bias_constraint",
    "seed",
)


@keras.saving.register_keras_serializable(package="keras_moh")
class MoHMultiHeadAttention(Adapter):
    """`MoHAttention` in the place of a `keras.layers.MultiHeadAttention`.

    `convert_to_moh` makes these. The call arguments are those of
    `keras.layers.MultiHeadAttention`, and `return_routing` of `MoHAttention`.

    Example:
    >>> import numpy as np, keras_moh
    >>> layer = keras_moh.MoHMultiHeadAttention(
    ...     num_heads=4, key_dim=2, num_shared_heads=1, top_k=1
    ... )
    >>> x = np.ones((2, 3, 8), "float32")
    >>> tuple(layer(x, x).shape)
    (2, 3, 8)
    """

    source = "keras.src.layers.attention.multi_head_attention.MultiHeadAttention"

    @classmethod
    def unsupported_reason(cls, layer: keras.Layer) -> str | None:
        if layer.get_config()["use_gate"]:
            return "it has use_gate=True, a gate of its own on every head's output"
        return super().unsupported_reason(layer)

    @classmethod
    def arguments_of(cls, layer: keras.Layer) -> dict[str, Any]:
        config = layer.get_config()
        return {name: config[name] for name in SAME_ARGUMENTS}

    def call(  # type: ignore[override]
        self,
        query: Any,
        value: Any,
        key: Any = None,
        query_mask: Any = None,
        value_mask: Any = None,
        key_mask: Any = None,
        attention_mask: Any = None,
        return_attention_scores: bool = False,
        training: bool | None = None,
        use_causal_mask: bool = False,
        return_routing: bool = False,
    ) -> Any:
        """Attend; see `MoHAttention`."""
        return super().call(
            query,
            value,
            key,
            query_mask=query_mask,
            value_mask=value_mask,
            key_mask=key_mask,
            attention_mask=attention_mask,
            return_attention_scores=return_attention_scores,
            return_routing=return_routing,
            training=training,
            use_causal_mask=use_causal_mask,
        )
