"""`torch_sdpa` does no more than the work of the heads taken, and runs in no captured graph."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import pytest
from keras import ops

from keras_moh import UnsupportedError, implementations
from tests.helpers import output_and_gradients, to_numpy
from tests.paths import (
    HEADS,
    LENGTH,
    OPTIONS,
    WIDTH,
    attention,
    inputs_of_length,
    model_of,
)
from tests.samples import D, floats, moh_attention

if keras.backend.backend() != "torch":
    pytest.skip("of another backend", allow_module_level=True)

import torch
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from keras_moh.implementations import torch_sdpa


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_has_no_tensor_of_all_scores(options: dict[str, Any]) -> None:
    assert largest_tensor("torch_sdpa", options) < LENGTH**2


def test_the_reference_has_one() -> None:
    """Else the test above could not fail."""
    assert largest_tensor("reference", {}) >= LENGTH**2


@pytest.mark.parametrize("groups", [6, 2])
@pytest.mark.parametrize("slots", [1024, 16384])
def test_long_caches_are_not_left_to_keras(groups: int, slots: int, ran: list[str]) -> None:
    """Also with all heads, by the rule of `costs.py` as it is."""
    arguments = {"router": None, "num_shared_heads": None, "top_k": None, "key_dim": 64}
    layer = moh_attention(**arguments, num_key_value_heads=groups)
    layer(floats(1, 1, D), cache=torch.ones((1, 2, slots, groups, 64)))
    assert {*ran} == {"torch_sdpa" if slots == 16384 else "compact"}


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("slots", [1024, 1025])
def test_keys_are_shared_among_threads(threads: int, slots: int, dtype: str) -> None:
    """Where there are few queries: as many keys for each thread, and what is left by itself."""
    shape = (1, 2, slots, 2, 4)
    cache = torch.from_numpy(np.random.default_rng(0).normal(size=shape)).to(getattr(torch, dtype))
    arguments = {"key_dim": 4, "num_key_value_heads": 2, "dtype": dtype}
    layer, reference = (
        moh_attention(**arguments, implementation=name) for name in ("torch_sdpa", "reference")
    )
    x = torch.as_tensor(floats(1, 1, D)).to(cache.dtype)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        output, _ = layer(x, cache=cache)
    finally:
        torch.set_num_threads(before)
    expected, _ = reference(x, cache=cache)
    tolerance = 1e-12 if dtype == "float64" else 2e-2
    assert (output - expected).abs().max() <= tolerance * expected.abs().max()


@pytest.mark.parametrize("groups", [6, 2])
@pytest.mark.parametrize("masked", [False, True])
def test_decoding_copies_no_keys(groups: int, masked: bool) -> None:
    """A step reads views of the cache: what it makes is smaller than one head's keys."""
    slots, made = 4096, []
    layer = moh_attention(key_dim=4, num_key_value_heads=groups, implementation="torch_sdpa")
    x, cache = floats(1, 1, D), torch.ones((1, 2, slots, groups, 4))
    mask = (np.arange(slots) < slots - 3)[None] if masked else None
    layer(x, cache=cache, key_mask=mask)

    class Recorder(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            for tensor in keras.tree.flatten(result):
                if isinstance(tensor, torch.Tensor) and tensor.dtype == torch.float32:
                    storage = tensor.untyped_storage()
                    if storage.data_ptr() != cache.untyped_storage().data_ptr():
                        made.append(storage.nbytes() // tensor.itemsize)
            return result

    with torch.no_grad(), Recorder():
        layer(x, cache=cache, key_mask=mask)
    assert made
    assert max(made) < slots


def largest_tensor(name: str, options: dict[str, Any]) -> int:
    """Entries of the largest tensor that any operation makes, forward and backward."""
    sizes = []

    class Recorder(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            results = keras.tree.flatten(result)
            sizes.extend(
                x.untyped_storage().nbytes() // x.itemsize
                for x in results
                if isinstance(x, torch.Tensor)
            )
            return result

    tensors, heads, cotangent = inputs_of_length(1)
    with Recorder():
        output_and_gradients(attention(name, heads, **options), tensors, cotangent)
    return max(sizes)


@pytest.mark.parametrize("training", [False, True])
def test_flops_are_those_of_the_heads_taken(training: bool) -> None:
    """In the layer: PyTorch's own count, against that of the formula."""
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
    # For gradients the fused kernel makes the scores again.
    share = counts["torch_sdpa"] / counts["reference"]
    assert 0.25 < share < (0.33 if training else 0.3)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_without_the_kernel_for_cpus(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on other devices, by plain products, also of rows that see no key."""
    options = options | ({"causal_offset": -2} if options.get("is_causal") else {})
    monkeypatch.setattr(torch_sdpa, "_FUSED_DEVICES", ())
    with FlopCounterMode(display=False) as counter:
        results = output_and_all_gradients("torch_sdpa", options)
    check(results, options)
    assert counter.get_total_flops() > 0  # plain products are counted, the kernel is not


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("offset", [-7, 0, 900])
@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"sliding_window": 23}], ids=str)
def test_pieces_of_a_span_are_joined(
    options: dict[str, Any], offset: int, fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keys that all rows of a chunk see, however few, apart from those that only some see."""
    joined, pieces = torch_sdpa._joined, []
    monkeypatch.setattr(torch_sdpa, "_joined", lambda of: pieces.append(len(of)) or joined(of))
    monkeypatch.setattr(torch_sdpa, "_CHUNK", 5)
    monkeypatch.setattr(torch_sdpa, "_CHUNK_OF_ALL", 5)
    monkeypatch.setattr(torch_sdpa, "_WORTH_A_PIECE", 1)
    if not fused:
        monkeypatch.setattr(torch_sdpa, "_FUSED_DEVICES", ())
    options = {"sliding_window": 101, **options, "causal_offset": offset}
    check(output_and_all_gradients("torch_sdpa", options), options)
    assert max(pieces) == 3


def output_and_all_gradients(name: str, options: dict[str, Any]) -> list[Any]:
    tensors, heads, cotangent = inputs_of_length(1)
    output, by_inputs = output_and_gradients(attention(name, heads, **options), tensors, cotangent)
    return [output, *by_inputs]


def check(results: list[Any], options: dict[str, Any]) -> None:
    """Against the reference."""
    for actual, expected in zip(
        results, output_and_all_gradients("reference", options), strict=True
    ):
        size = max(float(expected.abs().max()), 1.0)
        np.testing.assert_allclose(to_numpy(actual), to_numpy(expected), rtol=0, atol=2e-5 * size)


def captures() -> dict[str, Callable[..., Any]]:
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


def test_compiled_for_changing_offsets() -> None:
    """A number that varies is a symbol in the graph, from the second one on."""
    implementations.load_implementations()  # which a graph cannot
    tensors, heads, _ = inputs_of_length(2, length=7)
    torch._dynamo.reset()

    def attend(offset: int) -> Any:
        options = {"is_causal": True, "causal_offset": offset}
        return attention("reference", heads, **options)(*tensors)

    compiled = captures()["compile"](attend)
    for offset in (0, 3, 5, -2):
        np.testing.assert_allclose(
            to_numpy(compiled(offset)), to_numpy(attend(offset)), rtol=0, atol=1e-5
        )


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
@pytest.mark.usefixtures("always_worth_it")
@pytest.mark.parametrize("capture", CAPTURES)
def test_captured_graph_is_of_the_reference(capture: str, ran: list[str]) -> None:
    """None of them knows how many tokens take a head."""
    tensors, heads, _ = inputs_of_length(2, length=37)
    attend = attention(None, heads, is_causal=True)
    expected = attention("reference", heads, is_causal=True)(*tensors)
    ran.clear()
    output = captures()[capture](attend)(*tensors)
    assert "torch_sdpa" not in ran
    np.testing.assert_allclose(to_numpy(output), to_numpy(expected), rtol=0, atol=1e-5)
    # Called as it is, it is the other one again.
    attend(*tensors)
    assert ran[-1] == "torch_sdpa"


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("capture", CAPTURES)
def test_named_one_refuses_to_be_captured(capture: str) -> None:
    tensors, heads, _ = inputs_of_length(2, length=37)
    captured = captures()[capture](attention("torch_sdpa", heads))
    error = torch._dynamo.exc.Unsupported if capture == "compile" else UnsupportedError
    with pytest.raises(error, match="which a traced graph does not know"):
        captured(*tensors)


@pytest.mark.parametrize("kind", ["meta", "fake"])
def test_tensors_without_values(kind: str) -> None:
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


def test_short_sequences_take_the_fused_kernel(ran: list[str]) -> None:
    """Where no head is worth skipping; nothing as large as the scores is made."""
    x, layer = floats(2, 5, D), moh_attention()
    output = layer(x)
    assert ran == ["fused"]
    layer.implementation = "reference"
    np.testing.assert_allclose(to_numpy(output), to_numpy(layer(x)), rtol=1e-5, atol=1e-5)
    assert largest_tensor("fused", {}) < LENGTH**2


@pytest.mark.usefixtures("always_worth_it")
def test_model_of_compiled_graphs(ran: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """`jit_compile=True`: the reference, with the same results."""
    # The last step needs a C++ compiler.
    compiled = functools.partial(torch.compile, backend="aot_eager")
    monkeypatch.setattr(torch, "compile", compiled)
    x, models = floats(2, 5, D), [model_of(moh_attention()) for _ in range(2)]
    models[0].compile(jit_compile=True)
    predicted = models[0].predict(x, verbose=0)
    assert set(ran) == {"reference"}
    np.testing.assert_allclose(predicted, to_numpy(models[1](x)), rtol=1e-4, atol=1e-5)
    assert ran[-1] == "torch_sdpa"


@pytest.mark.parametrize("part", ["attention", "layer"])
def test_second_derivatives_are_refused(part: str) -> None:
    """Loudly, also where the result depends on the input by another way as well."""
    if part == "layer":
        layer = moh_attention(implementation="torch_sdpa")
        x = ops.convert_to_tensor(floats(2, 37, D)).requires_grad_()
        output = layer(x)
    else:
        (x, *others), heads, _ = inputs_of_length(2, length=37)
        x.requires_grad_()
        output = attention("torch_sdpa", heads)(x, *others)
    with pytest.raises(NotImplementedError, match="no second derivatives"):
        torch.autograd.grad((output**2).sum(), x, create_graph=True)
