"""The adapters by source class, and the reasons why other attention has none."""

from __future__ import annotations

import keras

from keras_moh.conversion.adapter import Adapter, class_name
from keras_moh.conversion.cached_multi_head_attention import MoHCachedMultiHeadAttention
from keras_moh.conversion.group_query_attention import MoHGroupQueryAttention
from keras_moh.conversion.llama_attention import MoHLlamaAttention
from keras_moh.conversion.mistral_attention import MoHMistralAttention
from keras_moh.conversion.multi_head_attention import MoHMultiHeadAttention
from keras_moh.conversion.qwen3_attention import MoHQwen3Attention
from keras_moh.conversion.remembering import walk
from keras_moh.moh_attention import MoHAttention

ADAPTERS: dict[str, type[Adapter]] = {
    adapter.source: adapter
    for adapter in (
        MoHMultiHeadAttention,
        MoHGroupQueryAttention,
        MoHCachedMultiHeadAttention,
        MoHLlamaAttention,
        MoHMistralAttention,
        MoHQwen3Attention,
    )
}

# What is known of other classes of Keras and keras-hub, by the name of the class alone.
REASONS = {
    "Attention": "it has no heads",
    "AdditiveAttention": "it has no heads",
    "CachedGemmaAttention": "its scores may have a soft cap",
    "CachedGemma3Attention": "its scores may have a soft cap",
    "Gemma4TextAttention": "its scores may have a soft cap",
    "T5GemmaAttention": "its scores may have a soft cap",
    "T5MultiHeadAttention": "its scores have a relative position bias",
    "BloomAttention": "its scores have the ALiBi bias",
    "FalconAttention": "its scores have the ALiBi bias",
    "DisentangledSelfAttention": "its scores have terms of relative positions",
    "GptOssAttention": "its softmax has sinks",
    "GPTNeoXAttention": "its rotary embedding is of a part of each head",
    "WhisperCachedMultiHeadAttention": "its key projection has no bias where the others have one",
}


def is_attention(layer: keras.Layer) -> bool:
    """Whether `layer` is attention that is not converted, of a class with an adapter or not."""
    if class_name(layer) in ADAPTERS:
        return True
    if isinstance(layer, MoHAttention) or not type(layer).__name__.endswith("Attention"):
        return False
    # What a user calls `SelfAttention` may be a block around such a layer, with a norm and a sum.
    return not any(
        class_name(inner) in ADAPTERS or isinstance(inner, MoHAttention) for _, inner in walk(layer)
    )


def unsupported_reason(layer: keras.Layer) -> str | None:
    """Why no adapter can stand for an attention layer, or `None`."""
    adapter = ADAPTERS.get(class_name(layer))
    if adapter is not None:
        if not layer.built:
            return "it is not built: call the model once before it is converted"
        return adapter.unsupported_reason(layer)
    name = type(layer).__name__
    if name in REASONS:
        return REASONS[name]
    for cls in type(layer).__mro__[1:]:
        parent = f"{cls.__module__}.{cls.__qualname__}"
        if parent in ADAPTERS:
            return f"it is of a subclass of {parent.rsplit('.', 1)[1]}, which may compute otherwise"
    return f"there is no adapter for the class {class_name(layer)}"
