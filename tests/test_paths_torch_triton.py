"""`torch_triton`: its kernels, interpreted, and its operation in graphs of every kind.

Where a GPU runs it nothing may be read on the host, no more may be in memory than the rows need,
and the result may not depend on which program is first. All of that can be seen without one.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest

from keras_moh import UnsupportedError, implementations
from tests.conftest import is_installed
from tests.helpers import output_and_gradients, to_numpy
from tests.paths import (
    HEADS,
    LENGTH,
    OPTIONS,
    OPTIONS_OF_DECODING,
    OPTIONS_OF_HEADS,
    WIDTH,
    attention,
    inputs_of_length,
    recorded_launches,
    shape_of_decoding,
    shape_of_heads,
)
from tests.samples import padding
from tests.test_paths import large_spec
from tests.test_paths_torch import captures
from tests.test_routed_attention import Path, check, some_mask

if keras.backend.backend() != "torch" or not is_installed("triton"):
    pytest.skip("of another backend, or without its extra", allow_module_level=True)

import torch
import triton
from torch._subclasses import FakeTensorMode
from triton.runtime.errors import InterpreterError

from keras_moh.implementations import torch_triton, triton_tuning
from keras_moh.implementations.triton_blocks import Blocks, neighbours, splits

NAME = "torch_triton"
PATH = Path(NAME, "eager")


@pytest.fixture
def tiles(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of that many rows and keys, so that short sequences have several."""
    monkeypatch.setattr(torch_triton, "blocks", lambda *_: Blocks(*request.param, 4, 1))


of_tiles = functools.partial(pytest.mark.parametrize, "tiles", indirect=True, ids=str)


# Values and every gradient ------------------------------------------------------------------------


@pytest.mark.usefixtures("tiles")
@of_tiles([(64, 32)])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("width", [16, 64, 72, 128])
@pytest.mark.parametrize("groups", [4, 2, 1])
@pytest.mark.parametrize("options", OPTIONS_OF_HEADS.values(), ids=OPTIONS_OF_HEADS)
def test_heads(options: dict[str, Any], groups: int, width: int, dtype: str) -> None:
    check(PATH, shape_of_heads(groups, width), options, dtype)


LOADS = ("even", "uneven", "the same", "by entry", "by position")


@pytest.mark.usefixtures("tiles")
@of_tiles([(16, 32)])
@pytest.mark.parametrize("mask", [None, (2, 1, 1, 59), (1, 1, 53, 59), (2, 1, 53, 59)], ids=str)
@pytest.mark.parametrize("load", LOADS)
def test_loads(load: str, mask: tuple[int, ...] | None) -> None:
    """Tiles that are partly or wholly visible, and lists that are empty, full and neither."""
    shape = {"queries": 53, "keys": 59, "heads": 6, "taken": 2, "groups": 3, "load": load}
    options: dict[str, Any] = {"is_causal": True, "sliding_window": 41, "causal_offset": 5}
    if mask is not None:
        options["mask"] = some_mask(*mask)
    check(PATH, shape, options, "float32")
    check(PATH, shape, {"mask": some_mask(*mask)} if mask else {}, "float32")


@pytest.mark.usefixtures("tiles")
@of_tiles([(16, 32)])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_of_strided_tensors(options: dict[str, Any]) -> None:
    """Keys and values that are views of a cache, a gradient that is expanded, a sliced mask."""
    tensors, heads, _ = inputs_of_length(2, length=43)
    query, key, value, gates = tensors
    cache = torch.stack([key, value], dim=1)
    if "mask" in options:
        options = {"mask": torch.arange(86).reshape(1, 1, 1, 86)[..., ::2] < 70}
    of_copies = attention("reference", heads, **options)
    of_views = attention(NAME, heads, **options)

    def views(query: Any, cache: Any, gates: Any) -> Any:
        return of_views(query, cache[:, 0], cache[:, 1], gates)

    def copies(query: Any, cache: Any, gates: Any) -> Any:
        return of_copies(query, cache[:, 0], cache[:, 1], gates)

    cotangent = torch.ones(()).expand(2, 43, HEADS, WIDTH)
    compare(
        views, copies, (query.transpose(0, 1).contiguous().transpose(0, 1), cache, gates), cotangent
    )


def test_addresses_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the tests could not fail by them: here there are fewer keys than is said."""
    launch = torch_triton._launch
    monkeypatch.setattr(
        torch_triton, "_launch", lambda *rest: launch(*rest[:-1], rest[-1] | {"S": 10**4})
    )
    tensors, heads, _ = inputs_of_length(1, length=43)
    with pytest.raises(InterpreterError, match="an address of no tensor"):
        attention(NAME, heads)(*tensors)


# Few rows and many keys --------------------------------------------------------------------------


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, tuple[int, ...]]]:
    """The kernels launched, and their grids. Keys are split in 4, in tiles of 16."""
    return recorded_launches(torch_triton, monkeypatch)


@pytest.mark.parametrize(
    ("queries", "groups", "dtype"),
    [(1, 8, "float32"), (2, 2, "float32"), (1, 2, "bfloat16"), (2, 1, "float32")],
)
@pytest.mark.parametrize("options", OPTIONS_OF_DECODING.values(), ids=OPTIONS_OF_DECODING)
def test_keys_are_split(
    options: dict[str, Any],
    groups: int,
    queries: int,
    dtype: str,
    launched: list[tuple[str, tuple[int, ...]]],
) -> None:
    """Values and gradients, with parts of which nothing is seen, and rows without a key."""
    check(PATH, shape_of_decoding(queries, groups), options, dtype)
    (kernel, grid), (combine, _), *backward = launched
    assert (kernel, grid[1], combine) == ("forward_kernel", 4, "combine_kernel")
    assert all(len(grid) == 1 for _, grid in backward)


@pytest.mark.parametrize("parts", [3, 7])
def test_many_parts(parts: int, launched: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """More than are combined at once; of 7 some are empty."""
    monkeypatch.setattr(torch_triton, "splits", lambda *_: parts)
    monkeypatch.setattr(torch_triton, "COMBINE", Blocks(1, 2, 4, 1))
    shape = {"queries": 1, "keys": 59, "heads": 4, "taken": 2, "groups": 2}
    check(PATH, shape, {}, "float32")
    assert launched[0][1][1] == parts


def test_a_mask_of_pairs_is_split(launched: list[tuple[str, tuple[int, ...]]]) -> None:
    shape = {"queries": 3, "keys": 59, "heads": 8, "taken": 3, "groups": 2}
    check(PATH, shape, {"mask": some_mask(2, 1, 3, 59)}, "float32")
    assert launched[1][0] == "combine_kernel"


def test_split_where_rows_are_few_and_keys_are_many() -> None:
    assert splits(tiles=64, key_length=32768) == 32  # 8 sequences of 8 key/value heads
    assert splits(tiles=64, key_length=1024) == 4  # for each enough keys
    assert splits(tiles=1, key_length=10**6) == 128
    for tiles in (0, 1, 7, 400, 2048, 10**6):
        for key_length in (0, 1, 255, 300, 5000, 10**6):
            number = splits(tiles, key_length)
            assert number & (number - 1) == 0 < number
            assert number == 1 or number * 256 <= key_length
            assert number == 1 or number * tiles <= 2048


def test_long_lists_are_not_split(launched: list[tuple[str, tuple[int, ...]]]) -> None:
    shape = {"queries": 17, "keys": 59, "heads": 8, "taken": 3, "groups": 8}
    check(PATH, shape, {}, "float32")
    (kernel, grid), *_ = launched
    assert (kernel, grid[1]) == ("forward_kernel", 1)


def compare(
    actual: Callable[..., Any], desired: Callable[..., Any], inputs: Any, cotangent: Any
) -> None:
    """Output and gradients of two functions."""
    output, by = output_and_gradients(actual, inputs, cotangent)
    wanted_output, wanted_by = output_and_gradients(desired, inputs, cotangent)
    for x, wanted in zip((output, *by), (wanted_output, *wanted_by), strict=True):
        size = max(float(wanted.abs().max()), 1.0)
        np.testing.assert_allclose(to_numpy(x), to_numpy(wanted), rtol=0, atol=2e-5 * size)


@pytest.mark.usefixtures("tiles")
@of_tiles([(16, 32)])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("queries", [43, 2])
def test_the_order_of_programs_does_not_matter(
    queries: int, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not to the last bit: no program reads, or adds to, what another one writes."""
    from triton.runtime.interpreter import interpreter_builder

    monkeypatch.setattr(torch_triton, "splits", lambda *_: 2)
    (query, *others, gates), heads, cotangent = inputs_of_length(2, length=43)
    query, gates, heads, cotangent = (x[:, -queries:] for x in (query, gates, heads, cotangent))
    tensors = [query, *others, gates]
    if "mask" in options:
        options = {"mask": padding(29, length=43)[:, None, None]}
    function = attention(NAME, heads, **options)
    results = [output_and_gradients(function, tensors, cotangent)]
    set_index = interpreter_builder.set_grid_idx
    monkeypatch.setattr(
        *(interpreter_builder, "set_grid_idx"),
        lambda *index: set_index(
            *(n - 1 - x for n, x in zip(interpreter_builder.grid_dim, index, strict=True))
        ),
    )
    results.append(output_and_gradients(function, tensors, cotangent))
    for x, y in zip(*([output, *by] for output, by in results), strict=True):
        np.testing.assert_array_equal(to_numpy(x), to_numpy(y))


# Sizes of tiles by measurement --------------------------------------------------------------------


def milliseconds(sizes: Blocks) -> float:
    """By hand: most keys first, then least warps."""
    return 1000 / sizes.keys + sizes.warps


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> list[tuple[str, Blocks]]:
    """The kernels that are launched to be timed, and those that are launched at last."""
    launches: list[tuple[str, Blocks]] = []
    launch = torch_triton._launch

    def record(name: str, grid: Any, sizes: Blocks, arguments: dict[str, Any]) -> None:
        launches.append((name, sizes))
        launch(name, grid, sizes, arguments)

    def do_bench(run: Callable[[], None], return_mode: str) -> float:
        run()
        _, sizes = launches[-1]
        if sizes.rows == 64:
            raise triton.runtime.errors.OutOfResources(2, 1, "shared memory")
        return milliseconds(sizes)

    monkeypatch.setenv("KERAS_MOH_AUTOTUNE", "1")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(triton.testing, "do_bench", do_bench)
    monkeypatch.setattr(torch_triton, "_launch", record)
    monkeypatch.setattr(torch_triton, "blocks", lambda *_: Blocks(32, 32, 8, 1))
    monkeypatch.setattr(triton_tuning, "_fastest", {})
    return launches


def test_sizes_by_measurement(
    timed: list[tuple[str, Blocks]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of each kernel the fastest is launched, with the same result, and measured only once."""
    tensors, heads, cotangent = inputs_of_length(1, length=17)

    def run(tokens: int = 17) -> list[tuple[str, Blocks]]:
        timed.clear()
        (query, *others, gates), of_queries = tensors, heads[:, -tokens:]
        query, gates = query[:, -tokens:], gates[:, -tokens:]
        of_name, of_reference = (attention(x, of_queries) for x in (NAME, "reference"))
        compare(of_name, of_reference, (query, *others, gates), cotangent[:, -tokens:])
        return list(timed)

    kernels = ("forward_kernel", "backward_query_kernel", "backward_key_value_kernel")
    last = [(name, Blocks(32, 64, 8, 1)) for name in kernels]
    first = run()
    assert len(first) == 3 * (len(neighbours(Blocks(32, 32, 8, 1))) + 1)
    assert [x for x in first if x in last][1::2] == last
    assert run() == last  # from memory
    monkeypatch.setattr(triton_tuning, "_fastest", {})
    assert run() == last  # from a file
    assert len(run(tokens=2)) > 3  # another kind


def test_sizes_by_the_table(
    timed: list[tuple[str, Blocks]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is timed without being asked for."""
    monkeypatch.setattr(triton.testing, "do_bench", lambda *_, **__: pytest.fail("it was timed"))
    tensors, heads, _ = inputs_of_length(1, length=17)
    for asked in ("", "0"):
        monkeypatch.setenv("KERAS_MOH_AUTOTUNE", asked)
        attention(NAME, heads)(*tensors)
    assert timed == 2 * [("forward_kernel", Blocks(32, 32, 8, 1))]


def test_neighbours_are_sizes() -> None:
    for sizes in (Blocks(128, 64, 8, 3), Blocks(16, 128, 4, 1), Blocks(32, 32, 4, 2)):
        found = neighbours(sizes)
        assert found[0] == sizes
        assert len(set(found)) == len(found) > 4
        assert {x.warps for x in found} == {4, 8}
        assert all(16 <= x.rows <= 128 and 16 <= x.keys <= 128 and x.stages for x in found)


# Graphs -------------------------------------------------------------------------------------------


# All tokens, and a step of decoding, whose keys are split.
@pytest.fixture(params=[37, 1])
def queries(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(torch_triton, "splits", lambda *_: 2)
    return request.param


def inputs_of_last(queries: int) -> tuple[list[Any], Any, Any]:
    """Those of `inputs_of_length` of the last tokens, with the keys and values of all."""
    (query, *others, gates), heads, cotangent = inputs_of_length(2, length=37)
    query, gates, heads, cotangent = (x[:, -queries:] for x in (query, gates, heads, cotangent))
    return [query, *others, gates], heads, cotangent


def arguments_of_operation(queries: int, **options: Any) -> tuple[Any, ...]:
    """What the operation is called with."""
    tensors, heads, _ = inputs_of_last(queries)
    recorded: list[tuple[Any, ...]] = []
    operation = torch_triton._attend
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            torch_triton, "_attend", lambda *args: recorded.append(args) or operation(*args)
        )
        attention(NAME, heads, **options)(*tensors)
    (arguments,) = recorded
    return arguments


OPERATION_OPTIONS = {
    "nothing": {},
    "causal": {"is_causal": True, "causal_offset": 2},
    "mask": {"mask": some_mask(2, 1, 37, 37), "sliding_window": 9},
}


@pytest.mark.parametrize("options", OPERATION_OPTIONS.values(), ids=OPERATION_OPTIONS)
def test_operations_are_sound(options: dict[str, Any], queries: int) -> None:
    """By PyTorch's own tests: schema, gradient, stand-ins, and tracing with changing shapes."""
    if "mask" in options:
        options = options | {"mask": options["mask"][:, :, -queries:]}
    query, key, value, heads, gates, *others = arguments_of_operation(queries, **options)
    query, key, value, gates = (x.clone().requires_grad_() for x in (query, key, value, gates))
    arguments = (query, key, value, heads, gates, *others)
    torch.library.opcheck(torch_triton._attend, arguments)
    with torch.no_grad():
        output, attended, log_sums = torch_triton._attend(*arguments)
        torch.library.opcheck(
            *(torch_triton._attend_backward, (output, attended, log_sums, *arguments)),
        )


@pytest.mark.parametrize("options", OPERATION_OPTIONS.values(), ids=OPERATION_OPTIONS)
def test_nothing_is_read_on_the_host(
    options: dict[str, Any], queries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Around the kernels: tensors without values raise if one is asked for."""
    launched: list[str] = []
    monkeypatch.setattr(torch_triton, "_launch", lambda name, *_: launched.append(name))
    tensors, heads, cotangent = inputs_of_last(queries)
    mode = FakeTensorMode(allow_non_fake_inputs=False)
    fake_query, fake_key, fake_value, fake_gates, fake_heads, fake_cotangent = map(
        mode.from_tensor, (*tensors, heads, cotangent)
    )
    if "mask" in options:
        mask = torch.as_tensor(options["mask"][:, :, -queries:])
        options = options | {"mask": mode.from_tensor(mask)}
    values = {"mask": None, "is_causal": False, "causal_offset": 0, "sliding_window": None}
    call = implementations.spec.Options(**{**values, **options}, scale=0.5)
    with mode:
        rest: list[Any] = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch_triton, "_attend", lambda *x: rest.extend(x) or x[:3])
            torch_triton.attend(fake_query, fake_key, fake_value, fake_heads, fake_gates, call)
        results = torch_triton._attend._init_fn(*rest)
        gradients = torch_triton._attend_backward._init_fn(fake_cotangent, *results[1:], *rest)
    combines = ["combine_kernel"] if queries == 1 else []
    backward = ["backward_query_kernel", "backward_key_value_kernel"]
    assert launched == ["forward_kernel", *combines, *backward]
    inputs = (fake_query, fake_key, fake_value, fake_gates)
    assert [x.shape for x in gradients] == [x.shape for x in inputs]


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_kernels_have_no_tensor_of_all_scores(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []

    def record(name: str, grid: Any, blocks: Any, arguments: dict[str, Any]) -> None:
        tensors = (x for x in arguments.values() if isinstance(x, torch.Tensor))
        sizes.append(sum(x.untyped_storage().nbytes() // x.itemsize for x in tensors))

    monkeypatch.setattr(torch_triton, "_launch", record)
    tensors, heads, cotangent = inputs_of_length(1)
    output_and_gradients(attention(NAME, heads, **options), tensors, cotangent)
    assert len(sizes) == 3
    assert max(sizes) < LENGTH**2 / 4


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("capture", ["compile", "export", "trace"])
def test_captured_graph(capture: str, ran: list[str], queries: int) -> None:
    tensors, heads, _ = inputs_of_last(queries)
    options = {"is_causal": True, "causal_offset": 37 - queries}
    attend = attention(NAME, heads, **options)
    expected = attention("reference", heads, **options)(*tensors)
    ran.clear()
    output = captures()[capture](attend)(*tensors)
    assert set(ran) == {NAME}
    np.testing.assert_allclose(to_numpy(output), to_numpy(expected), rtol=0, atol=1e-5)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("capture", ["vmap", "grad"])
def test_transforms_are_refused(capture: str) -> None:
    tensors, heads, _ = inputs_of_length(2, length=37)
    captured = captures()[capture](attention(NAME, heads))
    with pytest.raises(UnsupportedError, match="differentiate it"):
        captured(*tensors)


@pytest.mark.parametrize("dynamic", [True, False])
def test_compiled_for_changing_shapes(dynamic: bool) -> None:
    """Values and gradients, without breaks; what the first shape makes serves the others too."""
    from torch._dynamo.testing import CompileCounterWithBackend

    implementations.load_implementations()  # which a graph cannot
    counter = CompileCounterWithBackend("aot_eager")
    torch._dynamo.reset()
    mask = torch.as_tensor(some_mask(7, 1, 1, 53))

    def function(name: str) -> Callable[..., Any]:
        def attend(query: Any, key: Any, value: Any, gates: Any, heads: Any, offset: Any) -> Any:
            options = {"mask": mask[: query.shape[0], ..., : key.shape[1]], "causal_offset": offset}
            return attention(name, heads, **options, is_causal=True)(query, key, value, gates)

        return attend

    compiled = torch.compile(function(NAME), backend=counter, fullgraph=True, dynamic=dynamic)
    graphs = []
    # Lengths that are equal in the first call are taken to be so in all: each is its own.
    for batch, length in ((5, 37), (6, 41), (5, 13)):
        tensors, heads, cotangent = inputs_of_length(batch, length=length)

        def with_rest(attend: Callable[..., Any]) -> Callable[..., Any]:
            return lambda *x: attend(*x, heads, torch.tensor(3))  # noqa: B023

        compare(with_rest(compiled), with_rest(function("reference")), tensors, cotangent)
        graphs.append(counter.frame_count)
    assert graphs[0] > 0
    assert (graphs[-1] == graphs[0]) == dynamic


def test_exported_for_any_shapes() -> None:
    tensors, heads, _ = inputs_of_length(2, length=37)

    class Module(torch.nn.Module):
        def forward(self, query: Any, key: Any, value: Any, gates: Any, heads: Any) -> Any:
            return attention(NAME, heads, sliding_window=9)(query, key, value, gates)

    shape = {0: torch.export.Dim("batch"), 1: torch.export.Dim("length")}
    program = torch.export.export(
        *(Module(), (*tensors, heads)), dynamic_shapes=[shape] * 5, strict=False
    )
    operations = [node.target for node in program.graph.nodes]
    assert torch.ops.keras_moh.attend.default in operations
    for batch, length in ((2, 37), (3, 11)):
        tensors, heads, _ = inputs_of_length(batch, length=length)
        expected = attention("reference", heads, sliding_window=9)(*tensors)
        output = program.module()(*tensors, heads)
        np.testing.assert_allclose(to_numpy(output), to_numpy(expected), rtol=0, atol=1e-5)


class WithoutGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.sum()

    @staticmethod
    def backward(ctx: Any, by_sum: torch.Tensor) -> None:
        return None


def test_what_is_made_of_the_output_may_have_no_gradient() -> None:
    tensors, heads, _ = inputs_of_length(1, length=17)
    tensors = [x.requires_grad_() for x in tensors]
    output = WithoutGradient.apply(attention(NAME, heads)(*tensors))
    by = torch.autograd.grad(output + tensors[0].sum(), tensors, allow_unused=True)
    assert (by[0] == 1).all()
    assert by[1:] == (None, None, None)


def test_second_derivatives_are_refused() -> None:
    (x, *others), heads, _ = inputs_of_length(2, length=37)
    output = attention(NAME, heads)(x.requires_grad_(), *others)
    with pytest.raises(NotImplementedError, match="no second derivatives"):
        torch.autograd.grad((output**2).sum(), x, create_graph=True)


# The choice ---------------------------------------------------------------------------------------


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Take it that there is a GPU, of a capability of NVIDIA's or one of AMD's."""

    def put_in(capability: tuple[int, int], hip: str | None = None) -> None:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
        monkeypatch.setattr(torch.version, "hip", hip)

    put_in((9, 0))
    return put_in


def chosen(**changes: Any) -> str:
    spec = dataclasses.replace(large_spec(), device="cuda", **changes)
    return implementations.choose_implementation(spec).__name__.rpartition(".")[2]


CHOICES = {
    "plain": ({}, NAME),
    "in a graph": ({"is_traced": True}, NAME),
    "short": ({"query_length": 2, "key_length": 2}, NAME),
    "of unknown lengths": ({"batch": None, "query_length": None, "key_length": None}, NAME),
    "decoding": ({"query_length": 1}, NAME),
    "all heads": ({"num_active_heads": 12}, "compact"),
    "masks of heads": ({"mask_shape": (1, 12, 1, 4096)}, "reference"),
    "dropout": ({"dropout": 0.1}, "reference"),
}


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(("changes", "name"), CHOICES.values(), ids=CHOICES)
def test_choice_on_a_gpu(changes: dict[str, Any], name: str) -> None:
    assert chosen(**changes) == name


def test_choice_by_device(gpu: Callable[..., None]) -> None:
    for capability, hip, name in (
        ((7, 5), None, "fused"),
        ((8, 0), None, NAME),
        ((12, 0), None, NAME),
        ((9, 4), "6.4", NAME),
    ):
        gpu(capability, hip)
        assert chosen() == name
    # Not on a CPU, where only the interpreter runs it.
    assert implementations.choose_implementation(large_spec()).__name__.endswith("torch_sdpa")


REFUSED = {
    "float64": ({"dtype": "float64"}, "float32, float16, bfloat16, not in float64"),
    "wide keys": ({"key_dim": 257}, "at most 256 features, not 257"),
    "wide values": ({"value_dim": 300}, "at most 256 features, not 300"),
    "rows": ({"query_length": 2**26}, r"numbers 4831838208 rows, which is more than an int32"),
    "meta": ({"device": "meta"}, "needs a GPU, not 'meta'"),
    "mask of heads": ({"mask_shape": (1, 12, 1, 4096)}, "its mask has no head axis"),
}


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(("changes", "reason"), REFUSED.values(), ids=REFUSED)
def test_refuses(changes: dict[str, Any], reason: str) -> None:
    spec = dataclasses.replace(large_spec(), **{"device": "cuda", **changes})
    with pytest.raises(UnsupportedError, match=f"'{NAME}' .*: .*{reason}"):
        implementations.choose_implementation(spec, NAME)


def test_refuses_old_devices(gpu: Callable[..., None]) -> None:
    gpu((7, 5))
    reason = torch_triton.unsupported_reason(dataclasses.replace(large_spec(), device="cuda"))
    assert reason == "it needs a GPU of compute capability 8.0 or newer, not 7.5"


def test_refuses_without_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
    assert "needs a GPU, not 'cpu'" in torch_triton.unsupported_reason(large_spec())


def test_refuses_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_triton, "HAS_TRITON", False)
    reason = torch_triton.unsupported_reason(large_spec())
    assert reason == "it needs the package triton: pip install 'keras-moh[triton]'"
