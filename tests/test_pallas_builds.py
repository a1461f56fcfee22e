"""The kernels of `jax_pallas_tpu` are lowered for TPUs that are not there, and compiled.

A simulated TPU takes code that the compiler of a real one does not. Lowering, to the language of
that compiler, needs JAX alone; where libtpu is installed, as in the session `tpu`, it compiles too.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import pytest

from tests.conftest import is_installed
from tests.helpers import output_and_gradients
from tests.paths import LENGTH, largest_array

if keras.backend.backend() != "jax":
    pytest.skip("of another backend", allow_module_level=True)

import jax
import jax.numpy as jnp

from keras_moh.implementations import jax_pallas_tpu
from keras_moh.implementations.spec import Options


class Case(NamedTuple):
    batch: int = 2
    queries: int = 1024
    keys: int = 1024
    groups: int = 2
    widths: tuple[int, int] = (64, 64)
    dtype: str = "bfloat16"
    mask: tuple[int, ...] | None = None
    is_causal: bool = False
    sliding_window: int | None = None


CASES = {
    "all": Case(),
    "causal": Case(widths=(128, 64), is_causal=True),
    "causal window": Case(keys=1531, is_causal=True, sliding_window=100, dtype="float32"),
    "short": Case(queries=37, keys=41, groups=4, widths=(16, 24), sliding_window=9),
    "decoding": Case(queries=1, keys=4096, is_causal=True),
    "padding": Case(keys=1000, mask=(2, 1, 1, 1000), dtype="float16"),
    "mask": Case(mask=(1, 1, 1024, 1024), widths=(256, 256), dtype="float32", is_causal=True),
}
HEADS, TAKEN = 4, 2


def program(case: Case, with_gradients: bool) -> Callable[..., Any]:
    def attend(query: Any, key: Any, value: Any, gates: Any, heads: Any, *more: Any) -> Any:
        offset, mask = more
        options = Options(mask, case.is_causal, 0.1, offset, case.sliding_window)
        return jax_pallas_tpu.attend(query, key, value, heads, gates, options)[0]

    def run(*arguments: Any) -> Any:
        *inputs, heads, offset, mask = arguments
        cotangent = jnp.ones((*inputs[0].shape[:3], inputs[2].shape[3]))
        return output_and_gradients(
            lambda *inputs: attend(*inputs, heads, offset, mask), inputs, cotangent
        )

    return jax.jit(run if with_gradients else attend)


def stand_ins(case: Case, sharding: Any = None) -> list[Any]:
    """Query, key, value, gates, heads, offset and mask."""
    (d, dv), of_keys = case.widths, (case.batch, case.keys, case.groups)
    of_queries = case.batch, case.queries
    shapes = [
        *(((*of_queries, HEADS, d), case.dtype), ((*of_keys, d), case.dtype)),
        *(((*of_keys, dv), case.dtype), ((*of_queries, TAKEN), "float32")),
        *(((*of_queries, TAKEN), "int32"), ((), "int32"), (case.mask, "bool")),
    ]
    return [
        None if shape is None else jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)
        for shape, dtype in shapes
    ]


KERNELS = {False: 1, True: 3}


@pytest.mark.parametrize("with_gradients", KERNELS)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_lowered(case: Case, with_gradients: bool) -> None:
    run = program(case, with_gradients)
    exported = jax.export.export(run, platforms=["tpu"])(*stand_ins(case))
    assert exported.mlir_module().count("tpu_custom_call") == KERNELS[with_gradients]


LONG = Case(1, LENGTH, LENGTH)
LONG_CASES = {
    "nothing": LONG,
    "causal window": LONG._replace(is_causal=True, sliding_window=100),
    "padding": LONG._replace(mask=(1, 1, 1, LENGTH)),
}


@pytest.mark.parametrize("case", LONG_CASES.values(), ids=LONG_CASES)
def test_has_no_array_of_all_scores(case: Case) -> None:
    run = program(case, with_gradients=True)
    exported = jax.export.export(run, platforms=["tpu"])(*stand_ins(case))
    assert largest_array(exported.mlir_module()) < LENGTH**2


@pytest.mark.skipif(not is_installed("libtpu"), reason="without libtpu: see `nox -s tpu`")
@pytest.mark.parametrize("device", ["v5e", "v6e"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_compiled(case: Case, device: str) -> None:
    from jax.experimental import topologies

    chip = topologies.get_topology_desc(f"{device}:2x2", "tpu").devices[0]
    arguments = stand_ins(case, jax.sharding.SingleDeviceSharding(chip))
    compiled = program(case, with_gradients=True).lower(*arguments).compile()
    assert compiled.as_text().count('custom_call_target="tpu_custom_call"') == KERNELS[True]
