"""Which implementation really ran: in models, in graphs and under a framework's transformations."""

import functools
import math
import re
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import pytest
from keras import ops

from keras_moh import Routing, UnsupportedError, implementations, routed_attention
from keras_moh.implementations import choose_implementation, costs
from keras_moh.implementations.spec import AttentionSpec
from tests.helpers import output_and_gradients, to_numpy
from tests.samples import D, floats, moh_attention

BACKEND = keras.backend.backend()
# The one on rows that each backend has, and which comes first.
ON_ROWS = {"torch": "torch_sdpa", "jax": "jax_xla", "tensorflow": "tensorflow_xla"}[BACKEND]
NAMES = [
    name
    for name, (backend, _) in implementations.IMPLEMENTATIONS.items()
    if backend in (None, BACKEND)
]
# Every implementation serves a layer of these.
SERVED_BY_ALL = {"num_key_value_heads": 2, "routing_groups": 2}


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the implementations that run from now on, or that graphs are made of."""
    implementations.load_implementations()
    names: list[str] = []

    def recording(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def recorded(*args: Any, **kwargs: Any) -> Any:
            names.append(name)
            return function(*args, **kwargs)

        return recorded

    for name in NAMES:
        module = implementations._loaded[name]
        for function in ("attend", "attend_rows"):
            if hasattr(module, function):
                monkeypatch.setattr(module, function, recording(name, getattr(module, function)))
    return names


@pytest.fixture
def always_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The choice of the first that serves, so that small tests see what large models get."""
    monkeypatch.setattr(costs, "is_worth_it", lambda name, spec: True)
    monkeypatch.setattr(costs, "skips_projections", lambda spec: True)


# In models ----------------------------------------------------------------------------------------

MODES: dict[str, dict[str, Any]] = {
    "graph": {"jit_compile": False},
    "jit": {"jit_compile": True},
    "eager": {"run_eagerly": True},
}
# On PyTorch, jit_compile=True captures a graph: see below.
USABLE = {name: mode for name, mode in MODES.items() if (BACKEND, name) != ("torch", "jit")}


def model_of(layer: keras.Layer, *unknown: None) -> keras.Model:
    inputs = keras.Input((*(unknown or (None,)), D))
    output = layer(inputs, use_causal_mask=not unknown)
    readout = keras.layers.Dense(1, kernel_initializer=keras.initializers.Constant(0.1))
    return keras.Model(inputs, readout(output))


def train_and_predict(
    layer: keras.Layer, mode: dict[str, Any], ran: list[str], *lengths: tuple[int, ...]
) -> tuple[list[set[str]], list[np.ndarray]]:
    """What runs in `fit`, `evaluate` and `predict`, and all that comes of it."""
    model = model_of(layer, *[None] * (len(lengths[0]) - 1 if len(lengths[0]) > 2 else 0))
    model.compile(keras.optimizers.SGD(0.01), "mse", **mode)
    seen, results = [], []
    for step in (model.fit, model.evaluate, model.predict):
        ran.clear()
        for shape in lengths:
            x = floats(*shape, D)
            y = [] if step == model.predict else [np.tanh(x[..., :1])]
            result = step(x, *y, verbose=0)
            result = result.history["loss"] if step == model.fit else result
            results.append(np.asarray(result))
        seen.append(set(ran))
    return seen, [*results, *model.get_weights()]


def assert_all_close(actual: list[np.ndarray], expected: list[np.ndarray]) -> None:
    for x, y in zip(actual, expected, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)


# Steps of changing batch and length.
SHAPES = ((2, 5), (3, 7))


@functools.cache
def expected_of_model(*lengths: tuple[int, ...], **arguments: Any) -> list[np.ndarray]:
    layer = moh_attention(**arguments, implementation="reference")
    return train_and_predict(layer, {}, [], *lengths)[1]


@pytest.mark.parametrize("mode", USABLE.values(), ids=USABLE)
@pytest.mark.parametrize("name", NAMES)
def test_named_one_in_a_model(name: str, mode: dict[str, Any], ran: list[str]) -> None:
    layer = moh_attention(**SERVED_BY_ALL, implementation=name)
    seen, results = train_and_predict(layer, mode, ran, *SHAPES)
    assert seen == [{name}] * 3
    assert_all_close(results, expected_of_model(*SHAPES, **SERVED_BY_ALL))


@pytest.mark.usefixtures("always_worth_it")
@pytest.mark.parametrize("mode", USABLE.values(), ids=USABLE)
def test_chosen_one_in_a_model(mode: dict[str, Any], ran: list[str]) -> None:
    seen, results = train_and_predict(moh_attention(), mode, ran, *SHAPES)
    assert [ON_ROWS in names for names in seen] == [True] * 3
    # On PyTorch and JAX, Keras first builds a model of stand-ins without values.
    assert set().union(*seen) <= {ON_ROWS, "reference"}
    assert seen[1:] == [{ON_ROWS}] * 2
    assert_all_close(results, expected_of_model(*SHAPES))


@pytest.mark.usefixtures("always_worth_it")
def test_chosen_one_over_axes_of_unknown_lengths(ran: list[str]) -> None:
    """Inputs of rank 4, attended to over one axis of two that are unknown."""
    shapes = ((2, 3, 5), (1, 2, 4))
    seen, results = train_and_predict(moh_attention(attention_axes=2), {}, ran, *shapes)
    assert seen[1:] == [{ON_ROWS}] * 2
    assert_all_close(results, expected_of_model(*shapes, attention_axes=2))


@pytest.mark.usefixtures("always_worth_it")
def test_chosen_one_behind_an_embedding(ran: list[str]) -> None:
    """With a mask of its padding, whose length is unknown too."""
    results = []
    for implementation in (None, "reference"):
        embedding = keras.layers.Embedding(13, D, "normal", mask_zero=True)
        layer = moh_attention(implementation=implementation)
        tokens = keras.Input((None,), dtype="int32")
        output = keras.layers.GlobalAveragePooling1D()(layer(embedding(tokens)))
        model = keras.Model(tokens, output)
        embedding.embeddings.assign(floats(13, D))
        model.compile(keras.optimizers.SGD(0.01), "mse")
        x = np.array([[5, 8, 2, 0, 0], [3, 12, 4, 1, 7], [9, 0, 0, 0, 0]])
        model.fit(x, np.zeros((3, D)), verbose=0)
        ran.clear()
        results.append([model.predict(x, verbose=0), model.predict(x[:2], verbose=0)])
        results[-1] += model.get_weights()
        assert set(ran) == {implementation or ON_ROWS}
    assert_all_close(*results)


def large_spec(**changes: Any) -> AttentionSpec:
    """A call on a CPU, much of which may be left out."""
    return AttentionSpec(
        **{
            **{"batch": 1, "query_length": 4096, "key_length": 4096, "num_heads": 12},
            **{"num_key_value_heads": 12, "num_active_heads": 6, "routing_groups": 1},
            **{"key_dim": 64, "value_dim": 64, "dtype": "float32", "device": "cpu"},
            **{"is_traced": False, "mask_shape": None, "is_causal": False, "sliding_window": None},
            **{"dropout": 0.0, "return_attention_scores": False},
            **changes,
        }
    )


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({}, ON_ROWS),
        ({"is_causal": True}, ON_ROWS),
        ({"mask_shape": (1, 1, 4096, 4096)}, ON_ROWS),
        ({"query_length": 2, "key_length": 2}, "reference"),
        ({"dropout": 0.1}, "reference"),
        ({"return_attention_scores": True}, "reference"),
        ({"mask_shape": (1, 12, 4096, 4096)}, "reference"),
    ],
    ids=str,
)
def test_choice_of_a_call(changes: dict[str, Any], name: str) -> None:
    chosen = choose_implementation(large_spec(**changes))
    assert chosen.__name__ == implementations.IMPLEMENTATIONS[name][1]


@pytest.mark.skipif(BACKEND != "tensorflow", reason="only TensorFlow has unknown lengths")
def test_choice_of_unknown_lengths() -> None:
    """What is fitted and predicted with TensorFlow is of unknown batch and length."""
    spec = large_spec(batch=None, query_length=None, key_length=None)
    assert choose_implementation(spec).__name__.endswith("tensorflow_xla")


# Calls of the function, long enough that no array of a tile is as large as all scores -------------

LENGTH, HEADS, TAKEN, WIDTH = 1531, 4, 2, 3


def inputs_of_length(*batch: int, length: int = LENGTH) -> tuple[list[Any], Any, Any]:
    """Query, key, value and gates; heads; and the cotangent."""
    tensors = [floats(*batch, length, HEADS, WIDTH, seed=seed) for seed in range(3)]
    random = np.random.default_rng(4).random((*batch, length, HEADS))
    heads = np.sort(random.argsort(axis=-1)[..., :TAKEN], axis=-1).astype("int32")
    gates = 2 + floats(*batch, length, TAKEN, seed=5)
    tensors = [ops.convert_to_tensor(x) for x in (*tensors, gates)]
    cotangent = ops.convert_to_tensor(floats(*batch, length, HEADS, WIDTH, seed=6))
    return tensors, ops.convert_to_tensor(heads), cotangent


def attention(name: str | None, heads: Any, **options: Any) -> Callable[..., Any]:
    def attend(query: Any, key: Any, value: Any, gates: Any) -> Any:
        return routed_attention(
            *(query, key, value, Routing(heads, gates, gates[..., :0])),
            **options,
            implementation=name,
        )

    return attend


def largest_array(program: str) -> int:
    """Number of entries of the largest array in a program of XLA's, of either dialect."""
    shapes = re.findall(r"tensor<((?:\d+x)+)[a-z]|\b[a-z]+\d+\[([\d,]+)\]", program)
    assert shapes
    return max(math.prod(map(int, re.findall(r"\d+", "".join(shape)))) for shape in shapes)


OPTIONS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "causal": {"is_causal": True},
    "window": {"sliding_window": 100, "is_causal": True},
    "padding": {"mask": np.arange(LENGTH).reshape(1, 1, 1, LENGTH) < 1000},
}


@pytest.mark.skipif(BACKEND != "jax", reason="JAX's transformations")
class TestJax:
    @pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
    def test_is_a_loop_without_all_scores(self, options: dict[str, Any]) -> None:
        """Forward and backward, in the program that JAX hands to XLA."""
        tensors, heads, cotangent = inputs_of_length(1)
        assert self.has_loop_only("jax_xla", tensors, heads, cotangent, options)

    def test_the_reference_has_all_scores(self) -> None:
        """Else the test above could not fail."""
        tensors, heads, cotangent = inputs_of_length(1)
        assert not self.has_loop_only("reference", tensors, heads, cotangent, {})

    @staticmethod
    def has_loop_only(
        name: str, tensors: list[Any], heads: Any, cotangent: Any, options: dict[str, Any]
    ) -> bool:
        import jax

        attend = attention(name, heads, **options)
        forward = jax.jit(attend).lower(*tensors).as_text()
        backward = jax.jit(lambda *x: output_and_gradients(attend, x, cotangent))
        backward = backward.lower(*tensors).as_text()
        loops = [program.count("stablehlo.while") for program in (forward, backward)]
        small = [largest_array(program) < LENGTH**2 for program in (forward, backward)]
        assert all(small) == any(small)
        assert all(loops) == any(loops)
        return all(small) and loops[0] >= 2 and loops[1] >= 4

    def test_compiled_program_has_not_either(self) -> None:
        """XLA itself unrolls or fuses nothing into an array of all scores."""
        import jax

        tensors, heads, cotangent = inputs_of_length(1)
        attend = attention("jax_xla", heads, is_causal=True)
        run = jax.jit(lambda *x: output_and_gradients(attend, x, cotangent))
        program = run.lower(*tensors).compile().as_text()
        assert "while(" in program
        assert largest_array(program) < LENGTH**2

    @pytest.mark.parametrize("transformation", ["vmap", "vmap of grad", "scan", "grad of scan"])
    def test_transformed(self, transformation: str, ran: list[str]) -> None:
        """The same as called one after another, and by the same path."""
        import jax
        import jax.numpy as jnp

        tensors, heads, cotangent = inputs_of_length(3, 2, length=37)

        def attend(heads: Any, *tensors: Any) -> Any:
            return attention("jax_xla", heads, is_causal=True)(*tensors)

        def loss(heads: Any, cotangent: Any, *tensors: Any) -> Any:
            return jnp.sum(attend(heads, *tensors) * cotangent)

        by_tensors = jax.grad(loss, argnums=(2, 3, 4, 5))

        def scanned(*tensors: Any) -> Any:
            def step(total: Any, x: tuple[Any, ...]) -> Any:
                heads, cotangent, *tensors = x
                output = attend(heads, *tensors)
                return total + jnp.sum(output * cotangent), output

            total, outputs = jax.lax.scan(step, 0.0, (heads, cotangent, *tensors))
            return total, outputs

        run = {
            "vmap": lambda: jax.jit(jax.vmap(attend))(heads, *tensors),
            "vmap of grad": lambda: jax.jit(jax.vmap(by_tensors))(heads, cotangent, *tensors),
            "scan": lambda: jax.jit(scanned)(*tensors)[1],
            "grad of scan": lambda: jax.jit(
                jax.grad(lambda *x: scanned(*x)[0], argnums=(0, 1, 2, 3))
            )(*tensors),
        }[transformation]
        actual = jax.tree.leaves(run())
        assert set(ran) == {"jax_xla"}
        one = jax.jit(by_tensors if "grad" in transformation else attend)
        expected = [
            jax.tree.leaves(
                one(
                    heads[i],
                    *([cotangent[i]] * ("grad" in transformation)),
                    *(x[i] for x in tensors),
                )
            )
            for i in range(3)
        ]
        for x, *parts in zip(actual, *expected, strict=True):
            np.testing.assert_allclose(x, np.stack(parts), rtol=0, atol=1e-4)


@pytest.mark.skipif(BACKEND != "tensorflow", reason="TensorFlow's graphs")
class TestTensorFlow:
    @pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
    def test_compiled_program_has_no_array_of_all_scores(self, options: dict[str, Any]) -> None:
        program = self.program("tensorflow_xla", options)
        assert program.count("while(") >= 4
        assert largest_array(program) < LENGTH**2

    def test_the_reference_has_one(self) -> None:
        """Else the test above could not fail."""
        assert largest_array(self.program("reference", {})) >= LENGTH**2

    @staticmethod
    def program(name: str, options: dict[str, Any]) -> str:
        import tensorflow as tf

        tensors, heads, cotangent = inputs_of_length(1)

        @tf.function(jit_compile=True, autograph=False)
        def run(*tensors: Any) -> Any:
            return output_and_gradients(attention(name, heads, **options), tensors, cotangent)

        return run.experimental_get_compiler_ir(*tensors)(stage="hlo")

    @pytest.mark.parametrize("name", ["tensorflow_xla", "reference"])
    def test_graph_has_a_loop(self, name: str) -> None:
        import tensorflow as tf

        tensors, heads, cotangent = inputs_of_length(1)

        @tf.function(autograph=False)
        def run(*tensors: Any) -> Any:
            return output_and_gradients(attention(name, heads), tensors, cotangent)

        operations = [x.type for x in run.get_concrete_function(*tensors).graph.get_operations()]
        loops = sum(operation in ("While", "StatelessWhile") for operation in operations)
        assert loops == (2 if name == "tensorflow_xla" else 0)

    @pytest.mark.parametrize("autograph", [False, True])
    @pytest.mark.parametrize("jit_compile", [False, True])
    def test_in_a_function_of_ones_own(
        self, autograph: bool, jit_compile: bool, ran: list[str]
    ) -> None:
        import tensorflow as tf

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
    def test_mask_that_turns_out_to_be_for_all(self, shape: tuple[int, ...]) -> None:
        """Of a graph that knows none of its lengths: one may be 1, and hold for all."""
        import tensorflow as tf

        tensors, heads, cotangent = inputs_of_length(2, length=37)
        mask = np.random.default_rng(1).random(shape) < 0.5

        @tf.function(
            autograph=False, input_signature=[tf.TensorSpec((None, 1, None, None), tf.bool)]
        )
        def run(mask: Any) -> Any:
            attend = attention("tensorflow_xla", heads, mask=mask)
            return output_and_gradients(attend, tensors, cotangent)

        output, by = run(mask)
        expected, expected_by = output_and_gradients(
            attention("reference", heads, mask=mask), tensors, cotangent
        )
        for x, y in zip([output, *by], [expected, *expected_by], strict=True):
            np.testing.assert_allclose(x, y, rtol=0, atol=1e-4)


@pytest.mark.skipif(BACKEND != "torch", reason="PyTorch's modes")
class TestTorch:
    @pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
    def test_has_no_tensor_of_all_scores(self, options: dict[str, Any]) -> None:
        assert self.largest("torch_sdpa", options) < LENGTH**2

    def test_the_reference_has_one(self) -> None:
        """Else the test above could not fail."""
        assert self.largest("reference", {}) >= LENGTH**2

    @staticmethod
    def largest(name: str, options: dict[str, Any]) -> int:
        """Entries of the largest tensor that any operation makes, forward and backward."""
        from torch import Tensor
        from torch.utils._python_dispatch import TorchDispatchMode

        sizes = []

        class Recorder(TorchDispatchMode):
            def __torch_dispatch__(self, function, types, args=(), kwargs=None):
                result = function(*args, **(kwargs or {}))
                results = keras.tree.flatten(result)
                sizes.extend(
                    x.untyped_storage().nbytes() // x.itemsize
                    for x in results
                    if isinstance(x, Tensor)
                )
                return result

        tensors, heads, cotangent = inputs_of_length(1)
        with Recorder():
            output_and_gradients(attention(name, heads, **options), tensors, cotangent)
        return max(sizes)

    @pytest.mark.parametrize("training", [False, True])
    def test_flops_are_those_of_the_heads_taken(self, training: bool) -> None:
        """In the layer: PyTorch's own count, against that of the formula."""
        import torch
        from torch.utils.flop_counter import (
            FlopCounterMode,
            sdpa_backward_flop_count,
            sdpa_flop_count,
        )

        # The one for CPUs is not among those that are counted anyway.
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        backward_kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        kernels = {
            kernel: lambda *shapes, **_: sdpa_flop_count(*shapes[:3]),
            backward_kernel: lambda *shapes, **_: sdpa_backward_flop_count(*shapes[:4]),
        }
        counts = {}
        for name in ("torch_sdpa", "reference"):
            layer = moh_attention(
                num_heads=8, num_shared_heads=1, top_k=1, key_dim=16, implementation=name
            )
            x = ops.convert_to_tensor(floats(2, 301, D))
            layer.build(x.shape)
            with FlopCounterMode(display=False, custom_mapping=kernels) as counter:
                output = layer(x, use_causal_mask=False)
                if training:
                    output.sum().backward()
            counts[name] = counter.get_total_flops()
        # A quarter of the attention and of two of the four projections is left.
        assert 0.25 < counts["torch_sdpa"] / counts["reference"] < 0.33

    def captures(self) -> dict[str, Callable[..., Any]]:
        import torch

        compiled = functools.partial(torch.compile, backend="aot_eager", fullgraph=True)

        def exported(function: Callable[..., Any]) -> Callable[..., Any]:
            class Module(torch.nn.Module):
                def forward(self, *args: Any) -> Any:
                    return function(*args)

            return lambda *args: torch.export.export(Module(), args, strict=False).module()(*args)

        return {
            "compile": compiled,
            "export": exported,
            "vmap": lambda f: lambda *args: torch.vmap(f)(*(x[None] for x in args))[0],
            "grad": lambda f: lambda *args: torch.func.vjp(f, *args)[0],
            "trace": lambda f: lambda *args: torch.jit.trace(f, args, check_trace=False)(*args),
        }

    CAPTURES = ("compile", "export", "vmap", "grad", "trace")

    @pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
    @pytest.mark.usefixtures("always_worth_it")
    @pytest.mark.parametrize("capture", CAPTURES)
    def test_captured_graph_is_of_the_reference(self, capture: str, ran: list[str]) -> None:
        """None of them knows how many tokens take a head."""
        tensors, heads, _ = inputs_of_length(2, length=37)
        attend = attention(None, heads, is_causal=True)
        expected = attention("reference", heads, is_causal=True)(*tensors)
        ran.clear()
        output = self.captures()[capture](attend)(*tensors)
        assert "torch_sdpa" not in ran
        np.testing.assert_allclose(to_numpy(output), to_numpy(expected), rtol=0, atol=1e-5)
        # Called as it is, it is the other one again.
        attend(*tensors)
        assert ran[-1] == "torch_sdpa"

    @pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
    @pytest.mark.parametrize("capture", CAPTURES)
    def test_named_one_refuses_to_be_captured(self, capture: str) -> None:
        import torch

        tensors, heads, _ = inputs_of_length(2, length=37)
        captured = self.captures()[capture](attention("torch_sdpa", heads))
        error = torch._dynamo.exc.Unsupported if capture == "compile" else UnsupportedError
        with pytest.raises(error, match="which a traced graph does not know"):
            captured(*tensors)

    @pytest.mark.parametrize("kind", ["meta", "fake"])
    def test_tensors_without_values(self, kind: str) -> None:
        from torch._subclasses import FakeTensorMode

        tensors, heads, _ = inputs_of_length(2, length=37)

        def stand_ins() -> Iterator[Any]:
            for x in (*tensors, heads):
                yield x.to("meta") if kind == "meta" else mode.from_tensor(x)

        mode = FakeTensorMode()
        *tensors, heads = stand_ins()
        with mode if kind == "fake" else keras.device("meta"):
            output = attention(None, heads)(*tensors)
            assert tuple(output.shape) == (2, 37, HEADS, WIDTH)
            with pytest.raises(UnsupportedError, match="which a traced graph does not know"):
                attention("torch_sdpa", heads)(*tensors)

    def test_model_of_compiled_graphs(
        self, always_worth_it: None, ran: list[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """`jit_compile=True`: the reference, with the same results."""
        import torch

        # The last step needs a C++ compiler.
        compiled = functools.partial(torch.compile, backend="aot_eager")
        monkeypatch.setattr(torch, "compile", compiled)
        seen, results = train_and_predict(moh_attention(), {"jit_compile": True}, ran, *SHAPES)
        assert all("reference" in ran_in_step for ran_in_step in seen)
        assert seen[-1] == {"reference"}  # the first may build the model, without a graph
        assert_all_close(results, expected_of_model(*SHAPES))
