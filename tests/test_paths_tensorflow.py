"""In TensorFlow's graphs `tensorflow_xla` runs, in loops and with no array of all scores."""

from typing import Any

import keras
import numpy as np
import pytest

from tests.helpers import output_and_gradients
from tests.paths import LENGTH, OPTIONS, attention, inputs_of_length, largest_array

if keras.backend.backend() != "tensorflow":
    pytest.skip("of another backend", allow_module_level=True)

import tensorflow as tf


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_compiled_program_has_no_array_of_all_scores(options: dict[str, Any]) -> None:
    compiled = program_of("tensorflow_xla", options)
    assert compiled.count("while(") >= 4
    assert largest_array(compiled) < LENGTH**2


def test_the_reference_has_one() -> None:
    """Else the test above could not fail."""
    assert largest_array(program_of("reference", {})) >= LENGTH**2


def program_of(name: str, options: dict[str, Any]) -> str:
    tensors, heads, cotangent = inputs_of_length(1)

    @tf.function(jit_compile=True, autograph=False)
    def run(*tensors: Any) -> Any:
        return output_and_gradients(attention(name, heads, **options), tensors, cotangent)

    return run.experimental_get_compiler_ir(*tensors)(stage="hlo")


@pytest.mark.parametrize("name", ["tensorflow_xla", "reference"])
def test_graph_has_a_loop(name: str) -> None:
    tensors, heads, cotangent = inputs_of_length(1)

    @tf.function(autograph=False)
    def run(*tensors: Any) -> Any:
        return output_and_gradients(attention(name, heads), tensors, cotangent)

    operations = [x.type for x in run.get_concrete_function(*tensors).graph.get_operations()]
    loops = sum(operation in ("While", "StatelessWhile") for operation in operations)
    assert loops == (2 if name == "tensorflow_xla" else 0)


@pytest.mark.parametrize("autograph", [False, True])
@pytest.mark.parametrize("jit_compile", [False, True])
def test_in_a_function_of_ones_own(autograph: bool, jit_compile: bool, ran: list[str]) -> None:
    tensors, heads, cotangent = inputs_of_length(2, length=37)

    def run(*tensors: Any) -> Any:
        attend = attention("tensorflow_xla", heads, is_causal=True)
        return output_and_gradients(attend, tensors, cotangent)

    run_as = tf.function(run, autograph=autograph, jit_compile=jit_compile)
    output, by = run_as(*tensors)
    expected, expected_by = output_and_gradients(
        attention("reference", heads, is_causal=True), tensors, cotangent
    )
    assert set(ran) == {"tensorflow_xla", "reference"}
    for x, y in zip([output, *by], [expected, *expected_by], strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=1e-4)


@pytest.mark.parametrize("shape", [(1, 1, 1, 37), (1, 1, 37, 37), (2, 1, 1, 37)], ids=str)
def test_mask_that_turns_out_to_be_for_all(shape: tuple[int, ...]) -> None:
    """Of a graph that knows none of its lengths: one may be 1, and hold for all."""
    tensors, heads, cotangent = inputs_of_length(2, length=37)
    mask = np.random.default_rng(1).random(shape) < 0.5

    @tf.function(autograph=False, input_signature=[tf.TensorSpec((None, 1, None, None), tf.bool)])
    def run(mask: Any) -> Any:
        attend = attention("tensorflow_xla", heads, mask=mask)
        return output_and_gradients(attend, tensors, cotangent)

    output, by = run(mask)
    expected, expected_by = output_and_gradients(
        attention("reference", heads, mask=mask), tensors, cotangent
    )
    for x, y in zip([output, *by], [expected, *expected_by], strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=1e-4)
