"""What the tests need of a framework, in words that all three understand.

A test speaks of weights by name (`"query/kernel"`, `"router/routed_scores/kernel"`) and of
gradients as NumPy arrays; only this file knows how each framework differentiates.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
from keras import ops


def to_numpy(x: Any) -> np.ndarray:
    """A tensor as a NumPy array; bfloat16, which NumPy does not know, as float32."""
    array = np.asarray(ops.convert_to_numpy(x))
    return array if array.dtype.kind in "biuf" else array.astype("float32")


def weights_by_name(layer: keras.Layer) -> dict[str, keras.Variable]:
    """The weights of a built layer or model, by their path below its own name."""
    return {weight.path.split(f"{layer.name}/", 1)[-1]: weight for weight in layer.weights}


def set_weights_by_name(layer: keras.Layer, values: Mapping[str, Any]) -> None:
    """Assign to every weight of a built layer; `values` must name exactly its weights."""
    weights = weights_by_name(layer)
    assert set(values) == set(weights), f"{sorted(values)} are not {sorted(weights)}"
    for name, value in values.items():
        weights[name].assign(value)


def compiled(function: Callable[..., Any], *inputs: Any) -> Any:
    """`function(*inputs)`, compiled on JAX, where op by op each new shape takes seconds.

    The function may read `layer.losses` after calling a layer, and returns them or any tensors.
    """
    if keras.backend.backend() != "jax":
        return function(*inputs)
    import jax

    def stateless(*inputs: Any) -> Any:
        with keras.StatelessScope(collect_losses=True):
            return function(*inputs)

    return jax.jit(stateless)(*inputs)


class Gradients(NamedTuple):
    """A scalar and its derivatives, as NumPy; zeros by what it does not depend on."""

    value: np.ndarray
    inputs: tuple[np.ndarray, ...]
    weights: dict[str, np.ndarray]
    further: tuple[np.ndarray, ...] = ()


def gradients(
    function: Callable[..., Any], inputs: Sequence[Any], layer: keras.Layer | None = None
) -> Gradients:
    """The scalar `function(*inputs)` and its gradients by the inputs and by the layer's weights.

    Args:
        function: Takes the inputs as tensors, returns a scalar tensor, or a tuple of it and a list
            of further results. It is called once, and may read `layer.losses` after calling the
            layer: on JAX it runs in a stateless scope.
        inputs: Float arrays or tensors. Whatever else the function needs, it closes over.
        layer: A built layer or model whose trainable weights are differentiated by, if any.
    """
    weights = {} if layer is None else weights_by_name(layer)
    weights = {name: weight for name, weight in weights.items() if weight.trainable}
    inputs = tuple(map(ops.convert_to_tensor, inputs))
    differentiate = {"torch": _torch, "jax": _jax, "tensorflow": _tensorflow}

    def with_further(*inputs: Any) -> tuple[Any, list[Any]]:
        results = function(*inputs)
        return results if isinstance(results, tuple) else (results, [])

    value, further, derivatives = differentiate[keras.backend.backend()](
        with_further, inputs, tuple(weights.values())
    )
    derivatives = [
        np.zeros(x.shape, keras.backend.standardize_dtype(x.dtype)) if d is None else to_numpy(d)
        for x, d in zip((*inputs, *weights.values()), derivatives, strict=True)
    ]
    return Gradients(
        to_numpy(value),
        tuple(derivatives[: len(inputs)]),
        dict(zip(weights, derivatives[len(inputs) :], strict=True)),
        tuple(map(to_numpy, further)),
    )


def output_and_gradients(
    function: Callable[..., Any], inputs: Sequence[Any], cotangent: Any
) -> tuple[Any, Sequence[Any]]:
    """The tensor `function(*inputs)`, and the gradients of its product with `cotangent`.

    In the framework's own words, to be traced and compiled by who calls it; `None` is the gradient
    by what the output does not depend on.
    """
    backend = keras.backend.backend()
    if backend == "jax":
        import jax

        output, pullback = jax.vjp(function, *inputs)
        return output, pullback(ops.cast(cotangent, output.dtype))
    if backend == "tensorflow":
        import tensorflow as tf

        with tf.GradientTape() as tape:
            tape.watch(inputs)
            output = function(*inputs)
        cotangent = tf.cast(cotangent, output.dtype)
        by_inputs = tape.gradient(output, inputs, cotangent)
        return output, [None if x is None else tf.convert_to_tensor(x) for x in by_inputs]

    import torch

    inputs = [x.detach().clone().requires_grad_() for x in inputs]
    output = function(*inputs)
    by_inputs = torch.autograd.grad(output, inputs, cotangent.to(output.dtype), allow_unused=True)
    return output.detach(), by_inputs


def _torch(function: Callable, inputs: tuple, weights: tuple) -> tuple[Any, Any, Sequence[Any]]:
    import torch

    inputs = tuple(x.detach().clone().requires_grad_() for x in inputs)
    value, further = function(*inputs)
    by = (*inputs, *(weight.value for weight in weights))
    derivatives = torch.autograd.grad(value, by, allow_unused=True)
    return value.detach(), [x.detach() for x in further], derivatives


def _jax(function: Callable, inputs: tuple, weights: tuple) -> tuple[Any, Any, Sequence[Any]]:
    import jax

    def stateless(inputs: tuple, values: tuple) -> Any:
        mapping = list(zip(weights, values, strict=True))
        with keras.StatelessScope(state_mapping=mapping, collect_losses=True):
            return function(*inputs)

    values = tuple(weight.value for weight in weights)
    differentiated = jax.jit(jax.value_and_grad(stateless, argnums=(0, 1), has_aux=True))
    (value, further), by = differentiated(inputs, values)
    return value, further, (*by[0], *by[1])


def _tensorflow(
    function: Callable, inputs: tuple, weights: tuple
) -> tuple[Any, Any, Sequence[Any]]:
    import tensorflow as tf

    with tf.GradientTape() as tape:
        tape.watch(inputs)
        value, further = function(*inputs)
    derivatives = tape.gradient(value, (*inputs, *(weight.value for weight in weights)))
    derivatives = [None if d is None else tf.convert_to_tensor(d) for d in derivatives]
    return value, further, derivatives
