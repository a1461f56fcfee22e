"""The kernels of `jax_pallas_tpu` are lowered for TPUs that are not there, and compiled.

A simulated TPU takes code that the compiler of a real one does not. Lowering, to the language of
that compiler, needs JAX alone; where libtpu is installed, as in the session `tpu`, it compiles too.
"""

import keras
import pytest

from tests.conftest import is_installed
from tests.paths import LENGTH, largest_array

if keras.backend.backend() != "jax":
    pytest.skip("of another backend", allow_module_level=True)

import jax

from keras_moh.implementations import jax_pallas_tpu
from tests.jax_builds import CASES, LONG_CASES, Case, program, stand_ins

KERNELS = {False: 1, True: 3}  # with gradients


@pytest.mark.parametrize("with_gradients", KERNELS)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_lowered(case: Case, with_gradients: bool) -> None:
    run = program(jax_pallas_tpu, case, with_gradients)
    exported = jax.export.export(run, platforms=["tpu"])(*stand_ins(case))
    assert exported.mlir_module().count("tpu_custom_call") == KERNELS[with_gradients]


@pytest.mark.parametrize("case", LONG_CASES.values(), ids=LONG_CASES)
def test_has_no_array_of_all_scores(case: Case) -> None:
    run = program(jax_pallas_tpu, case, with_gradients=True)
    exported = jax.export.export(run, platforms=["tpu"])(*stand_ins(case))
    assert largest_array(exported.mlir_module()) < LENGTH**2


def test_transforms_are_lowered() -> None:
    """Two that the simulator does not know: it has no grid with an axis more, and no effects."""
    inputs = stand_ins(CASES["short"])
    several = [jax.ShapeDtypeStruct((3, *inputs[0].shape), inputs[0].dtype), *inputs[1:]]
    of_some = jax.vmap(program(jax_pallas_tpu, CASES["short"], True), in_axes=(0, *[None] * 6))
    attend = jax.checkpoint(program(jax_pallas_tpu, CASES["short"], False))
    again = jax.grad(lambda *x: attend(*x).astype("float32").sum(), argnums=(0, 1, 2, 3))
    for run, arguments in ((of_some, several), (again, inputs)):
        exported = jax.export.export(jax.jit(run), platforms=["tpu"])(*arguments)
        assert exported.mlir_module().count("tpu_custom_call") == KERNELS[True]


needs_libtpu = pytest.mark.skipif(
    not is_installed("libtpu"), reason="without libtpu: see `nox -s tpu`"
)


@needs_libtpu
@pytest.mark.parametrize("device", ["v5e", "v6e"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_compiled(case: Case, device: str) -> None:
    from jax.experimental import topologies

    chip = topologies.get_topology_desc(f"{device}:2x2", "tpu").devices[0]
    arguments = stand_ins(case, jax.sharding.SingleDeviceSharding(chip))
    compiled = program(jax_pallas_tpu, case, with_gradients=True).lower(*arguments).compile()
    assert compiled.as_text().count('custom_call_target="tpu_custom_call"') == KERNELS[True]


@needs_libtpu
def test_compiled_where_there_is_float64() -> None:
    """With it JAX counts in 64 bits, and a TPU in 32."""
    with jax.enable_x64(True):
        test_compiled(CASES["mask"], "v5e")
