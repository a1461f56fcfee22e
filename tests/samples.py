"""The small layer and the random inputs that many tests share. Every length is its own."""

from typing import Any

import keras
import numpy as np

from keras_moh import MoHAttention

B, T, S, D = 2, 5, 7, 11
ARGUMENTS = {"num_heads": 6, "key_dim": 3, "num_shared_heads": 2, "top_k": 2}


@keras.saving.register_keras_serializable("keras_moh_tests")
class Noise(keras.initializers.Initializer):
    """Normal noise, new values for every weight and the same in every run."""

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed
        self.generator = np.random.default_rng(seed)

    def clone(self) -> "Noise":
        return self

    def __call__(self, shape: tuple[int, ...], dtype: Any = None) -> Any:
        return keras.ops.convert_to_tensor(self.generator.normal(0, 0.5, shape), dtype)

    def get_config(self) -> dict[str, Any]:
        return {"seed": self.seed}


def moh_attention(weights: int = 0, **arguments: Any) -> MoHAttention:
    """A small layer with noise for weights, biases included: other noise for other `weights`."""
    noise = {"kernel_initializer": Noise(weights), "bias_initializer": Noise(weights + 1)}
    return MoHAttention(**{**ARGUMENTS, **noise, **arguments})


def floats(*shape: int, seed: int = 0) -> np.ndarray:
    """Float32 noise in steps of 1/64 between -2 and 2, which every float dtype holds exactly."""
    steps = np.random.default_rng(seed).integers(-127, 128, shape)
    return (steps / 64).astype("float32")


def padding(*lengths: int, length: int) -> np.ndarray:
    """The mask `(len(lengths), length)` of sequences padded at their end, `False` there."""
    return np.arange(length) < np.array(lengths)[:, None]
