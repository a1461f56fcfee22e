"""The norms of queries and keys: Keras's own round float64 to float32 on PyTorch and JAX."""

from __future__ import annotations

from typing import Any

import keras
from keras import ops


class HeadLayerNormalization(keras.layers.LayerNormalization):
    """`LayerNormalization` of the last axis, in float64 as well."""

    def call(self, inputs: Any) -> Any:
        """The normalized `inputs (..., d)`."""
        if self.compute_dtype != "float64":
            return super().call(inputs)
        centred = inputs - _mean(inputs)
        return _unit_mean_square(centred, self.epsilon) * self.gamma + self.beta


class HeadRMSNormalization(keras.layers.RMSNormalization):
    """`RMSNormalization` of the last axis, in float64 as well."""

    def call(self, inputs: Any) -> Any:
        """The normalized `inputs (..., d)`."""
        if self.compute_dtype != "float64":
            return super().call(inputs)
        return _unit_mean_square(inputs, self.epsilon) * self.scale


def _mean(x: Any) -> Any:
    """The mean over the last axis: by a sum, since `ops.mean` rounds to float32 as well."""
    return ops.sum(x, axis=-1, keepdims=True) / x.shape[-1]


def _unit_mean_square(x: Any, epsilon: float) -> Any:
    return x * ops.rsqrt(_mean(ops.square(x)) + epsilon)
