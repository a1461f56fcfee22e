"""The adapter of `keras.layers.GroupQueryAttention`."""

from __future__ import annotations

from typing import Any

import keras

from keras_moh.conversion.multi_head_attention import MoHMultiHeadAttention

SAME_ARGUMENTS = (
    "num_key_value_heads",
    "dropout",
    "use_bias",
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
class MoHGroupQueryAttention(MoHMultiHeadAttention):
    """`MoHAttention` in the place of a `keras.layers.GroupQueryAttention`.

    `convert_to_moh` makes these. The call arguments are those of
    `keras.layers.GroupQueryAttention`, and `return_routing` of `MoHAttention`.

    Example:
    >>> import numpy as np, keras_moh
    >>> layer = keras_moh.MoHGroupQueryAttention(
    ...     num_heads=4, key_dim=2, num_key_value_heads=2, num_shared_heads=1, top_k=1
    ... )
    >>> x = np.ones((2, 3, 8), "float32")
    >>> tuple(layer(x, x).shape)
    (2, 3, 8)
    """

    source = "keras.src.layers.attention.grouped_query_attention.GroupedQueryAttention"

    @classmethod
    def arguments_of(cls, layer: keras.Layer) -> dict[str, Any]:
        config = layer.get_config()
        return {name: config[name] for name in SAME_ARGUMENTS} | {
            "num_heads": config["num_query_heads"],
            "key_dim": config["head_dim"],
        }
