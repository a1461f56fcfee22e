"""TensorFlow: where tensors live, and whether shapes may depend on their values."""

from typing import Any

import tensorflow as tf
from tensorflow.python.ops.control_flow_util import GraphOrParentsInXlaContext


def describe(x: Any) -> tuple[str, bool]:
    """The kind of device, and whether `x` is being compiled by XLA, whose shapes are fixed."""
    return "gpu" if tf.config.list_logical_devices("GPU") else "cpu", is_compiled_by_xla()


def is_compiled_by_xla() -> bool:
    """Whether the graph that is being built is for XLA."""
    return not tf.executing_eagerly() and GraphOrParentsInXlaContext(
        tf.compat.v1.get_default_graph()
    )
