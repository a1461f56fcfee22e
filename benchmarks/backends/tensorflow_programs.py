"""Programs of TensorFlow: graphs of `tf.function`, and the same compiled by XLA."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

MODES = ("graph", "jit")
_TILE_ROWS = 256

# Not that many functions are traced: each is another one, and none is timed while it is traced.
tf.get_logger().setLevel("ERROR")


def _program(
    function: Callable[..., Any], mode: str, *arguments: Sequence[Any]
) -> Callable[[], list[Any]]:
    # Without autograph errors arrive as they were raised; there is no control flow to convert.
    compiled = tf.function(function, jit_compile=mode == "jit", autograph=False)
    tensors = [[tf.convert_to_tensor(x) for x in argument] for argument in arguments]

    def program() -> list[Any]:
        results = keras.tree.flatten(compiled(*tensors))
        tf.test.experimental.sync_devices()
        return results

    return program


def forward(
    call: Callable[..., Any], inputs: Sequence[Any], variables: Sequence[Any], mode: str
) -> Callable[[], list[Any]]:
    return _program(lambda inputs: call(*inputs), mode, inputs)


def training_step(
    call: Callable[..., Any],
    inputs: Sequence[Any],
    variables: Sequence[Any],
    cotangents: Sequence[Any],
    mode: str,
) -> Callable[[], list[Any]]:
    def step(inputs: Sequence[Any], cotangents: Sequence[Any]) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(inputs)
            outputs = keras.tree.flatten(call(*inputs))
        by = [*inputs, *(variable.value for variable in variables)]
        return outputs, tape.gradient(outputs, by, output_gradients=cotangents)

    return _program(step, mode, inputs, cotangents)


def bare_attention(query: Any, key: Any, value: Any) -> Any:
    # In tiles whose scores stay in the cache.
    query = query * query.shape[-1] ** -0.5
    outputs = []
    for start in range(0, query.shape[0], _TILE_ROWS):
        scores = tf.matmul(query[start : start + _TILE_ROWS], key, transpose_b=True)
        outputs.append(tf.matmul(tf.nn.softmax(scores), value))
    return tf.concat(outputs, axis=0)
