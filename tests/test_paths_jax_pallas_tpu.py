"""`jax_pallas_tpu`: its kernels on a simulated TPU, and when it is chosen.

There are few cases, because each takes seconds: those of `test_routed_attention.py` and others run
in the session `tpu`. That real ones take the kernels is what `test_pallas_builds.py` tests.
"""

import dataclasses
from typing import Any

import keras
import numpy as np
import pytest

from keras_moh import UnsupportedError, implementations
from tests.paths import attention, inputs_of_length
from tests.samples import padding
from tests.test_paths import large_spec
from tests.test_routed_attention import Path, check, some_mask

if keras.backend.backend() != "jax":
    pytest.skip("of another backend", allow_module_level=True)

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu

from keras_moh.implementations import jax_pallas_tpu

NAME = "jax_pallas_tpu"
PATH = Path(NAME, "xla")


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that short sequences have several, of rows and of keys."""
    monkeypatch.setattr(jax_pallas_tpu, "_block_lengths", lambda *_: (16, 64))


# Values and every gradient ------------------------------------------------------------------------

SHAPE = {"queries": 29, "keys": 83, "heads": 6, "taken": 2}
# Lists that are empty, full and neither; tiles that see all of a block, some of it and none.
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "causal": (
        {"groups": 6, "load": "uneven", "some_gates_are_0": True},
        {"is_causal": True, "causal_offset": 45},
        "float32",
    ),
    "causal, before some keys": (
        {"groups": 3, "load": "by position", "widths": (72, 16)},
        {"is_causal": True, "causal_offset": -9},
        "bfloat16",
    ),
    "window": (
        {"groups": 2, "taken": 3, "load": "the same", "widths": (16, 130)},
        {"sliding_window": 21, "causal_offset": 47},
        "float32",
    ),
    "padding": (
        {"groups": 3, "load": "by entry"},
        {"mask": padding(70, 0, length=83)[:, None, None]},
        "float16",
    ),
    "padding at the start, causal window": (
        {"groups": 1, "load": "even"},
        {
            "mask": padding(40, 83, length=83)[:, None, None, ::-1],
            "is_causal": True,
            "sliding_window": 50,
            "causal_offset": 54,
        },
        "bfloat16",
    ),
    "mask": (
        {"groups": 3, "load": "by entry", "taken": 1},
        {"mask": some_mask(2, 1, 29, 83), "sliding_window": 70},
        "float32",
    ),
    "mask for all entries": (
        {"groups": 2, "load": "uneven"},
        {"mask": some_mask(1, 1, 29, 83), "is_causal": True, "causal_offset": 54},
        "bfloat16",
    ),
}


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize(("shape", "options", "dtype"), CASES.values(), ids=CASES)
def test_tiles(
    shape: dict[str, Any], options: dict[str, Any], dtype: str, simulated_tpu: list[Any]
) -> None:
    check(PATH, SHAPE | shape, options, dtype)
    assert len(simulated_tpu) == 3  # kernels


@pytest.mark.usefixtures("small_blocks")
def test_transformed() -> None:
    """Several calls at once, with a plan for each, differentiated."""
    tensors, heads, cotangent = inputs_of_length(2, 1, length=19)

    def by_tensors(name: str) -> Any:
        def loss(heads: Any, cotangent: Any, *tensors: Any) -> Any:
            return jnp.sum(attention(name, heads, is_causal=True)(*tensors) * cotangent)

        return jax.jit(jax.vmap(jax.grad(loss, argnums=(2, 3, 4, 5))))(heads, cotangent, *tensors)

    for x, y in zip(by_tensors(NAME), by_tensors("reference"), strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=1e-4)


@pytest.mark.usefixtures("small_blocks")
def test_races_would_be_found(simulated_tpu: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the tests above could not fail by them: here cores share what one should have."""
    parallel = tpu.CompilerParams(dimension_semantics=["parallel"] * 3)
    monkeypatch.setattr(tpu, "CompilerParams", lambda **_: parallel)
    tensors, heads, _ = inputs_of_length(1, length=139)  # of 21 tiles and 3 blocks
    attention(NAME, heads)(*tensors)
    assert [record.races_found for record in simulated_tpu] == [True]
    simulated_tpu.clear()


# The choice ---------------------------------------------------------------------------------------


def on_a_tpu(**changes: Any) -> Any:
    return dataclasses.replace(large_spec(), device="tpu", **changes)


CHOICES = {
    "plain": ({}, NAME),
    "in a graph": ({"is_traced": True}, NAME),
    "decoding": ({"query_length": 1}, NAME),
    "all heads": ({"num_active_heads": 12}, "compact"),
    "of unknown lengths": ({"batch": None, "query_length": None}, "reference"),
    "dropout": ({"dropout": 0.1}, "reference"),
}


@pytest.mark.parametrize(("changes", "name"), CHOICES.values(), ids=CHOICES)
def test_choice_on_a_tpu(changes: dict[str, Any], name: str) -> None:
    chosen = implementations.choose_implementation(on_a_tpu(**changes))
    assert chosen.__name__.rpartition(".")[2] == name


REFUSED = {
    "float64": ({"dtype": "float64"}, "float32, float16, bfloat16, not in float64"),
    "wide keys": ({"key_dim": 257}, "at most 256 features, not 257"),
    "wide values": ({"value_dim": 300}, "at most 256 features, not 300"),
    "unknown length": ({"key_length": None}, "it needs shapes that are numbers"),
    "tiles": ({"batch": 2000}, "room for 65536 tiles, not for 120000"),
    "mask of heads": ({"mask_shape": (1, 12, 1, 4096)}, "its mask has no head axis"),
}


@pytest.mark.parametrize(("changes", "reason"), REFUSED.values(), ids=REFUSED)
def test_refuses(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(UnsupportedError, match=f"'{NAME}' .*: .*{reason}"):
        implementations.choose_implementation(on_a_tpu(**changes), NAME)


def test_refuses_other_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax_pallas_tpu, "_DEVICES", ("tpu",))
    for device in ("cpu", "gpu"):
        spec = dataclasses.replace(on_a_tpu(), device=device)
        assert jax_pallas_tpu.unsupported_reason(spec) == f"it needs a TPU, not '{device}'"


def test_refuses_to_be_distributed(monkeypatch: pytest.MonkeyPatch) -> None:
    data_parallel = keras.distribution.DataParallel(devices=["cpu:0"], auto_shard_dataset=False)
    monkeypatch.setattr(keras.distribution, "distribution", lambda: data_parallel)
    assert "keras.distribution divides" in jax_pallas_tpu.unsupported_reason(on_a_tpu())
