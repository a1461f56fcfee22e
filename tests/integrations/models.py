"""Small models of keras-hub, with weights large enough for attention to matter."""

import functools
from collections.abc import Callable
from typing import Any

import keras
import keras_hub
import numpy as np

import keras_moh
from keras_moh.conversion import Adapter
from keras_moh.conversion.remembering import walk

VOCABULARY, LENGTH = 23, 11
TOKENS = np.array([[3, 8, 2, 17, 5, 4, 9, 11, 1, 2, 6], [7, 7, 12, 22, 3, 19, 8, 1, 13, 0, 0]])
PADDING = np.array([[1] * LENGTH, [1] * 9 + [0] * 2])

DECODER = {
    "vocabulary_size": VOCABULARY,
    "num_layers": 2,
    "num_query_heads": 6,
    "num_key_value_heads": 3,
    "hidden_dim": 24,
    "intermediate_dim": 20,
}
ENCODER = {
    "vocabulary_size": VOCABULARY,
    "num_layers": 2,
    "num_heads": 4,
    "hidden_dim": 20,
    "intermediate_dim": 24,
    "max_sequence_length": 16,
    "dropout": 0.0,  # else what a few steps of training do to the loss is drawn by lot
}
# Waves of all three kinds at this width: fast, between, and slow.
LLAMA_31 = {
    "rope_max_wavelength": 500.0,
    "rope_frequency_adjustment_factor": 8.0,
    "rope_low_freq_factor": 1.0,
    "rope_high_freq_factor": 4.0,
    "rope_pretraining_sequence_length": 24,
}
models = keras_hub.models

BACKBONES: dict[str, Callable[[], keras.Model]] = {
    "bert": functools.partial(models.BertBackbone, **ENCODER),
    "vit": lambda: models.ViTBackbone(
        image_shape=(12, 12, 3),
        patch_size=4,
        num_layers=2,
        num_heads=4,
        hidden_dim=20,
        mlp_dim=24,
    ),
    "gpt2": functools.partial(models.GPT2Backbone, **ENCODER),
    "opt": functools.partial(models.OPTBackbone, **ENCODER),
    "bart": functools.partial(models.BartBackbone, **ENCODER),
    "llama": functools.partial(models.LlamaBackbone, **DECODER, tie_word_embeddings=True),
    "llama 3.1": functools.partial(models.Llama3Backbone, **DECODER, **LLAMA_31),
    "mistral": functools.partial(models.MistralBackbone, **DECODER, sliding_window=4),
    "qwen3": functools.partial(
        models.Qwen3Backbone,
        **DECODER,
        head_dim=6,
        layer_norm_epsilon=1e-3,
        sliding_window_size=4,  # which not every backend of keras-hub's heeds
    ),
}
CAUSAL_LMS: dict[str, Any] = {
    "gpt2": models.GPT2CausalLM,
    "opt": models.OPTCausalLM,
    "llama": models.LlamaCausalLM,
    "llama 3.1": models.Llama3CausalLM,
    "mistral": models.MistralCausalLM,
    "qwen3": models.Qwen3CausalLM,
}


def with_noise(model: keras.Model) -> keras.Model:
    """The model with normal noise in all its weights, the same in every run."""
    random = np.random.default_rng(0)
    for weight in model.weights:
        if "int" not in str(weight.dtype) and "seed" not in weight.path:
            weight.assign(random.normal(weight.ndim == 1, 0.3, weight.shape))
    return model


def backbone(name: str) -> keras.Model:
    return with_noise(BACKBONES[name]())


def causal_lm(name: str) -> keras.Model:
    """Without a preprocessor: it takes and gives token numbers."""
    return CAUSAL_LMS[name](backbone(name), preprocessor=None)


def inputs_of(model: keras.Model) -> Any:
    """A batch with padding, or of images."""
    names = set(model.input) if isinstance(model.input, dict) else set()
    if not names:
        return np.random.default_rng(1).random((2, 12, 12, 3), "float32")
    batch = {
        "token_ids": TOKENS,
        "padding_mask": PADDING,
        "segment_ids": 0 * TOKENS,
        "encoder_token_ids": TOKENS[:, ::-1].copy(),
        "encoder_padding_mask": PADDING[:, ::-1].copy(),
        "decoder_token_ids": TOKENS,
        "decoder_padding_mask": PADDING,
    }
    return {name: batch[name] for name in names}


def outputs_of(model: keras.Model) -> list[np.ndarray]:
    """Those of `inputs_of`, zeros at padded positions."""
    outputs = keras.tree.flatten(model.predict_on_batch(inputs_of(model)))
    return [
        np.asarray(x) * (PADDING[..., None] if x.shape[1:2] == (LENGTH,) else 1) for x in outputs
    ]


def assert_equal_outputs(model: keras.Model, other: keras.Model, tolerance: float = 1e-5) -> None:
    for actual, expected in zip(outputs_of(model), outputs_of(other), strict=True):
        size = np.abs(expected).max()
        np.testing.assert_allclose(actual / size, expected / size, rtol=0, atol=tolerance)


def adapters(model: keras.Model) -> list[Adapter]:
    return [layer for _, layer in walk(model) if isinstance(layer, Adapter)]


def converted(model: keras.Model, shared: Any = 0.5, top_k: Any = 0.25) -> keras.Model:
    return keras_moh.convert_to_moh(model, shared, top_k)[0]
