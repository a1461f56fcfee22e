"""Models with Mixture-of-Head attention."""

from keras_moh.models.moh_llama3 import load_moh_llama3

__all__ = ["load_moh_llama3"]
