"""Pretrained attention as Mixture-of-Head attention.

`convert_to_moh` copies a model and puts adapters in the places of its attention layers, one adapter
a file for each kind of source layer. keras-hub's layers are recognized by name: it is imported
only by who has one.
"""

from keras_moh.conversion.adapter import Adapter
from keras_moh.conversion.cached_multi_head_attention import MoHCachedMultiHeadAttention
from keras_moh.conversion.convert import convert_to_moh
from keras_moh.conversion.group_query_attention import MoHGroupQueryAttention
from keras_moh.conversion.llama_attention import LlamaRotaryEmbedding, MoHLlamaAttention
from keras_moh.conversion.mistral_attention import MoHMistralAttention
from keras_moh.conversion.multi_head_attention import MoHMultiHeadAttention
from keras_moh.conversion.qwen3_attention import MoHQwen3Attention
from keras_moh.conversion.report import (
    ConversionReport,
    ConvertedLayer,
    LeftLayer,
    OutputChange,
)

__all__ = [
    "Adapter",
    "ConversionReport",
    "ConvertedLayer",
    "LeftLayer",
    "LlamaRotaryEmbedding",
    "MoHCachedMultiHeadAttention",
    "MoHGroupQueryAttention",
    "MoHLlamaAttention",
    "MoHMistralAttention",
    "MoHMultiHeadAttention",
    "MoHQwen3Attention",
    "OutputChange",
    "convert_to_moh",
]
