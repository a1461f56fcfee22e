"""Models with Mixture-of-Head attention."""

from keras_moh.models.diffusion import DiffusionSampler, DiffusionTrainer
from keras_moh.models.moh_dit import MoHDiT
from keras_moh.models.moh_llama3 import load_moh_llama3
from keras_moh.models.moh_llm import MoHLLM
from keras_moh.models.moh_transnext import MoHTransNeXt
from keras_moh.models.moh_vit import MoHViT

__all__ = [
    "DiffusionSampler",
    "DiffusionTrainer",
    "MoHDiT",
    "MoHLLM",
    "MoHTransNeXt",
    "MoHViT",
    "load_moh_llama3",
]
