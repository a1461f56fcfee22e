"""`jax_triton`: its launches, by Triton's interpreter in the place of jax-triton, and the choice.

The kernels are those of `torch_triton`, which `test_paths_torch_triton.py` has the tests of. What
is of JAX are the plan, the order of the arguments, the constants and the gradient.
"""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import numpy as np
import pytest

from keras_moh import UnsupportedError, implementations
from tests.conftest import is_installed
from tests.paths import (
    OPTIONS_OF_DECODING,
    OPTIONS_OF_HEADS,
    recorded_launches,
    shape_of_decoding,
    shape_of_heads,
)
from tests.samples import padding
from tests.test_paths import large_spec
from tests.test_routed_attention import OPTIONS as ALL_OPTIONS
from tests.test_routed_attention import SHAPES, Path, check, some_mask

if keras.backend.backend() != "jax" or not is_installed("jax_triton"):
    pytest.skip("of another backend, or without its extra", allow_module_level=True)

import jax
import jax.numpy as jnp
import jax_triton as package

from keras_moh.implementations import jax_triton
from keras_moh.implementations.triton_blocks import Blocks, splits

NAME = "jax_triton"
PATH = Path(NAME, "eager")


class Tensor:
    """An array, with what Triton's interpreter asks of a tensor of PyTorch's."""

    def __init__(self, array: np.ndarray) -> None:
        self.array, self.dtype = array, array.dtype

    def data_ptr(self) -> int:
        return self.array.ctypes.data

    def same(self, *_: Any, **__: Any) -> "Tensor":
        return self

    untyped_storage = cpu = new_empty = copy_ = set_ = same
    storage_offset = size = stride = same


def interpreted(
    *inputs: Any,
    kernel: Any,
    out_shape: Sequence[jax.ShapeDtypeStruct],
    grid: tuple[int, ...],
    zeroed_outputs: Sequence[int],
    **constants: Any,
) -> list[Any]:
    """What jax-triton does, on a CPU. Outputs are garbage where nothing is written."""
    outputs = [
        np.full(x.shape, 0 if i in zeroed_outputs else 77, x.dtype) for i, x in enumerate(out_shape)
    ]
    arrays = [np.array(x) for x in inputs]
    kernel[grid](*map(Tensor, (*arrays, *outputs)), **constants)
    return [jnp.asarray(x) for x in outputs]


@pytest.fixture
def interpreter(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Launches without compiling, so that arrays have values, in tiles of several to a list."""
    monkeypatch.setattr(jax_triton, "_unsupported_device", lambda kind: None)
    monkeypatch.setattr(jax_triton, "_target", lambda: "interpreter")
    monkeypatch.setattr(jax_triton, "blocks", lambda *_: Blocks(16, 32, 4, 1))
    monkeypatch.setattr(package, "triton_call", interpreted)
    monkeypatch.setattr(jax.custom_batching, "sequential_vmap", lambda function: function)
    with jax.disable_jit():
        yield


SHAPE = {"queries": 37, "keys": 41, "heads": 6, "taken": 2, "groups": 3}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "nothing": ({"groups": 6, "load": "uneven", "some_gates_are_0": True}, {}, "float32"),
    "causal": (
        {"load": "by position", "widths": (72, 16)},
        {"is_causal": True, "causal_offset": -3},
        "bfloat16",
    ),
    "window": (
        {"load": "the same", "groups": 2, "taken": 3},
        {"sliding_window": 13, "causal_offset": 5},
        "float32",
    ),
    "causal window, padding": (
        {"load": "by entry"},
        {
            "mask": padding(30, 0, length=41)[:, None, None],
            "is_causal": True,
            "sliding_window": 13,
        },
        "float16",
    ),
    "mask": ({"groups": 1}, {"mask": some_mask(2, 1, 37, 41), "is_causal": True}, "float32"),
    "mask for all entries": ({}, {"mask": some_mask(1, 1, 37, 41)}, "float32"),
}


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize(("shape", "options", "dtype"), CASES.values(), ids=CASES)
def test_launches(shape: dict[str, Any], options: dict[str, Any], dtype: str) -> None:
    check(PATH, SHAPE | shape, options, dtype)


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("options", ALL_OPTIONS.values(), ids=ALL_OPTIONS)
def test_options(options: dict[str, Any]) -> None:
    check(PATH, {}, options, "float32")


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_shapes(shape: dict[str, int]) -> None:
    check(PATH, shape, {"is_causal": True}, "float32")


DTYPES = ("float32", "float16", "bfloat16")


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize(
    ("number", "width", "groups"),
    [(n, *x) for n, x in enumerate(itertools.product((16, 64, 72, 128), (4, 2, 1)))],
)
def test_heads(number: int, width: int, groups: int) -> None:
    """Each width and each number of groups with every dtype and most of the options.

    All combinations are tested with `torch_triton`.
    """
    dtype = DTYPES[(number + number // 3) % 3]
    options = list(OPTIONS_OF_HEADS.values())[number % 4]
    check(PATH, shape_of_heads(groups, width), options, dtype)


# Few rows and many keys ---------------------------------------------------------------------------


@pytest.fixture
def launched(
    interpreter: None, monkeypatch: pytest.MonkeyPatch
) -> list[tuple[str, tuple[int, ...]]]:
    """The kernels launched, and their grids. Keys are split in 4, in tiles of 16."""
    return recorded_launches(jax_triton, monkeypatch)


BACKWARD = ["backward_query_kernel", "backward_key_value_kernel"]


@pytest.mark.parametrize(
    ("queries", "groups", "dtype"),
    [(1, 8, "float32"), (2, 2, "float16"), (1, 2, "bfloat16"), (2, 1, "float32")],
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
    names = [name for name, _ in launched]
    assert names == ["forward_kernel", "combine_kernel", *BACKWARD]
    assert [len(grid) for _, grid in launched] == [2, 1, 1, 1]
    assert launched[0][1][1] == 4


@pytest.mark.parametrize("parts", [3, 7])
def test_many_parts(parts: int, launched: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """More than are combined at once; of 7 some are empty."""
    monkeypatch.setattr(jax_triton, "splits", lambda *_: parts)
    monkeypatch.setattr(jax_triton, "COMBINE", Blocks(1, 2, 4, 1))
    check(PATH, {"queries": 1, "keys": 59, "heads": 4, "taken": 2, "groups": 2}, {}, "float32")
    assert launched[0][1][1] == parts
    assert launched[1][0] == "combine_kernel"


def test_a_mask_of_pairs_is_split(launched: list[tuple[str, tuple[int, ...]]]) -> None:
    check(PATH, shape_of_decoding(3, 2), {"mask": some_mask(2, 1, 3, 59)}, "float32")
    assert launched[1][0] == "combine_kernel"


def test_long_lists_are_not_split(launched: list[tuple[str, tuple[int, ...]]]) -> None:
    check(PATH, shape_of_decoding(17, 8), {}, "float32")
    assert [name for name, _ in launched] == ["forward_kernel", *BACKWARD]
    assert launched[0][1][1] == 1


def test_split_by_the_rule_of_all_kernels(launched: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """With nothing in its place: of 600 keys each of 2 parts has enough, of 400 it has not."""
    monkeypatch.setattr(jax_triton, "splits", splits)
    for keys, parts in ((600, 2), (400, 1)):
        launched.clear()
        check(PATH, {"queries": 1, "keys": keys}, {}, "float32")
        assert launched[0][1][1] == parts
        assert ("combine_kernel" in dict(launched)) == (parts > 1)


# The choice ---------------------------------------------------------------------------------------


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax_triton, "_target", lambda: "sm_90")


def on_a_gpu(**changes: Any) -> Any:
    return dataclasses.replace(large_spec(), device="gpu", **changes)


CHOICES = {
    "plain": ({}, NAME),
    "in a graph": ({"is_traced": True}, NAME),
    "all heads": ({"num_active_heads": 12}, "compact"),
    "of unknown lengths": ({"batch": None, "query_length": None}, "reference"),
    "dropout": ({"dropout": 0.1}, "reference"),
}


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(("changes", "name"), CHOICES.values(), ids=CHOICES)
def test_choice_on_a_gpu(changes: dict[str, Any], name: str) -> None:
    chosen = implementations.choose_implementation(on_a_gpu(**changes))
    assert chosen.__name__.rpartition(".")[2] == name


REFUSED = {
    "float64": ({"dtype": "float64"}, "float32, float16, bfloat16, not in float64"),
    "wide keys": ({"key_dim": 257}, "at most 256 features, not 257"),
    "unknown length": ({"key_length": None}, "it needs shapes that are numbers"),
    "rows": ({"query_length": 2**26}, "numbers 4831838208 rows, which is more than an int32"),
    "mask of heads": ({"mask_shape": (1, 12, 1, 4096)}, "its mask has no head axis"),
}


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(("changes", "reason"), REFUSED.values(), ids=REFUSED)
def test_refuses(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(UnsupportedError, match=f"'{NAME}' .*: .*{reason}"):
        implementations.choose_implementation(on_a_gpu(**changes), NAME)


def test_refuses_other_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    assert jax_triton.unsupported_reason(large_spec()) == "it needs a GPU, not 'cpu'"
    monkeypatch.setattr(jax_triton, "_target", lambda: "gfx942")
    assert jax_triton.unsupported_reason(on_a_gpu()) is None
    monkeypatch.setattr(jax_triton, "_target", lambda: "sm_75")
    reason = "it needs a GPU of compute capability 8.0 or newer, not 7.5"
    assert jax_triton.unsupported_reason(on_a_gpu()) == reason


def test_refuses_without_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax_triton, "HAS_JAX_TRITON", False)
    reason = "it needs the package jax-triton: pip install 'keras-moh[jax-triton]'"
    assert jax_triton.unsupported_reason(on_a_gpu()) == reason
