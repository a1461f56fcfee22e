"""What `jax_triton` launches compiles, in JAX's programs for GPUs that are not there.

It is the kernels that `test_triton_builds.py` compiles one by one, with constants of JAX's.
"""

import keras
import pytest

from tests.conftest import is_installed

if keras.backend.backend() != "jax" or not is_installed("jax_triton"):
    pytest.skip("of another backend, or without its extra", allow_module_level=True)

import jax

from keras_moh.implementations import jax_triton
from tests.jax_builds import CASES, LONG_CASES, Case, program, stand_ins
from tests.paths import LENGTH, largest_array

NAME = "triton_kernel_call"
UNCHECKED = [jax.export.DisabledSafetyCheck.custom_call(NAME)]
KERNELS = {False: 1, True: 3}  # with gradients
COMBINING = 1  # in a step of decoding


@pytest.mark.parametrize(
    ("name", "target", "with_gradients"),
    [
        ("causal window", "sm_80", True),
        ("short", "sm_90", True),
        ("decoding", "sm_80", True),
        ("decoding", "sm_90", False),
        ("decoding, padding", "sm_80", False),
        ("decoding, mask", "sm_90", True),
        ("padding", "sm_80", True),
        ("mask", "sm_90", False),
    ],
)
def test_lowered(
    name: str, target: str, with_gradients: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jax_triton, "_target", lambda: target)
    run = program(jax_triton, CASES[name], with_gradients)
    exported = jax.export.export(run, platforms=["cuda"], disabled_checks=UNCHECKED)(
        *stand_ins(CASES[name])
    )
    kernels = KERNELS[with_gradients] + COMBINING * name.startswith("decoding")
    assert exported.mlir_module().count(f"custom_call @{NAME}(") == kernels


@pytest.mark.parametrize("case", LONG_CASES.values(), ids=LONG_CASES)
def test_has_no_array_of_all_scores(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax_triton, "_target", lambda: "sm_90")
    run = program(jax_triton, case, with_gradients=True)
    exported = jax.export.export(run, platforms=["cuda"], disabled_checks=UNCHECKED)(
        *stand_ins(case)
    )
    assert largest_array(exported.mlir_module()) < LENGTH**2


def test_several_calls_are_a_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """`jax.vmap`, for which jax-triton has no rule."""
    monkeypatch.setattr(jax_triton, "_target", lambda: "sm_90")
    run = jax.vmap(program(jax_triton, CASES["short"], with_gradients=True))
    several = [
        None if x is None else jax.ShapeDtypeStruct((3, *x.shape), x.dtype)
        for x in stand_ins(CASES["short"])
    ]
    exported = jax.export.export(jax.jit(run), platforms=["cuda"], disabled_checks=UNCHECKED)(
        *several
    )
    program_of_all = exported.mlir_module()
    assert program_of_all.count(f"custom_call @{NAME}(") == KERNELS[True]
    assert program_of_all.count("stablehlo.while") >= KERNELS[True]
