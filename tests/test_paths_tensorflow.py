"""In TensorFlow's graphs `tensorflow_xla` runs, in loops and with no array of all scores."""

from typing import Any

import keras
import numpy as np
import pytest

import keras_moh
from tests.helpers import output_and_gradients
from tests.paths import LENGTH, OPTIONS, attention, inputs_of_length, largest_array
from tests.samples import floats

if keras.backend.backend() != "tensorflow":
    pytest.skip("of another backend", allow_module_level=True)

import tensorflow as tf

from keras_moh.implementations import tensorflow_xla


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


@pytest.mark.parametrize("jit_compile", [False, True])
@pytest.mark.parametrize("heads", [(3, 1), (1, 2)], ids=["half", "three of eight"])
@pytest.mark.usefixtures("always_worth_it")
def test_only_rows_are_projected(
    jit_compile: bool, heads: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In graphs of unknown shapes: of what XLA compiles, whose shapes are fixed, all heads are."""
    ranks: list[int] = []  # of the queries, which are `(R, d)` or `(B, T, H, d)`
    attend_rows, attend = tensorflow_xla.attend_rows, tensorflow_xla.attend

    def recorded(query: Any, *args: Any) -> Any:
        ranks.append(query.shape.rank)
        return (attend_rows if query.shape.rank == 2 else attend)(query, *args)

    for name in ("attend_rows", "attend"):
        monkeypatch.setattr(tensorflow_xla, name, recorded)
    shared, routed = heads
    options = {"num_heads": 8, "key_dim": 4, "num_shared_heads": shared, "top_k": routed}
    layer = keras_moh.MoHAttention(**options)
    reference = keras_moh.MoHAttention(**options, implementation="reference")
    tokens, cotangent = (floats(2, 37, 12, seed=seed) for seed in (1, 2))
    for one in (layer, reference):
        one.build(tokens.shape)
    reference.set_weights(layer.get_weights())

    def run(one: Any) -> Any:
        @tf.function(input_signature=[tf.TensorSpec((None, None, 12))] * 2, jit_compile=jit_compile)
        def output_and_gradients_of(tokens: Any, cotangent: Any) -> Any:
            with tf.GradientTape() as tape:
                tape.watch(tokens)
                output = one(tokens)
            by = [tokens, *(weight.value for weight in one.trainable_variables)]
            return output, *tape.gradient(output, by, output_gradients=cotangent)

        return output_and_gradients_of(tokens, cotangent)

    for x, y in zip(run(layer), run(reference), strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=1e-4)
    assert ranks == [4 if jit_compile else 2]


def test_gradients_of_some_of_the_outputs() -> None:
    """Those of a gather arrive as slices."""
    (query, key, value, *others), heads, cotangent = inputs_of_length(2, length=37)
    tensors, cotangent = [query, key, value, *others], cotangent[1:]
    gradients = []
    for name in ("tensorflow_xla", "reference"):
        attend = attention(name, heads)
        _, by = output_and_gradients(
            lambda *tensors, attend=attend: tf.gather(attend(*tensors), [1]), tensors, cotangent
        )
        gradients.append(by)
    for x, y in zip(*gradients, strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=1e-4)
