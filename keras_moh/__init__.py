"""Mixture-of-Head attention (arXiv 2410.11842) for Keras 3, on TensorFlow, JAX and PyTorch."""

from keras_moh import models
from keras_moh.conversion import (
    ConversionReport,
    MoHCachedMultiHeadAttention,
    MoHGroupQueryAttention,
    MoHLlamaAttention,
    MoHMistralAttention,
    MoHMultiHeadAttention,
    MoHQwen3Attention,
    convert_to_moh,
)
from keras_moh.errors import UnsupportedError
from keras_moh.flops import AttentionFLOPs, PartFLOPs, attention_flops
from keras_moh.moh_attention import MoHAttention
from keras_moh.rotary_embedding import RotaryEmbedding
from keras_moh.routed_attention import routed_attention
from keras_moh.routing import (
    QueryNormRouter,
    Router,
    Routing,
    TwoStageRouter,
    load_balancing_loss,
    router_z_loss,
)

__version__ = "0.1.0"

__all__ = [
    "AttentionFLOPs",
    "ConversionReport",
    "MoHAttention",
    "MoHCachedMultiHeadAttention",
    "MoHGroupQueryAttention",
    "MoHLlamaAttention",
    "MoHMistralAttention",
    "MoHMultiHeadAttention",
    "MoHQwen3Attention",
    "PartFLOPs",
    "QueryNormRouter",
    "RotaryEmbedding",
    "Router",
    "Routing",
    "TwoStageRouter",
    "UnsupportedError",
    "__version__",
    "attention_flops",
    "convert_to_moh",
    "load_balancing_loss",
    "models",
    "routed_attention",
    "router_z_loss",
]
