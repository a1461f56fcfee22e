"""Under JAX's transformations `jax_xla` runs in loops, with no array of all scores."""

from typing import Any

import keras
import numpy as np
import pytest

from keras_moh import implementations
from tests.helpers import output_and_gradients
from tests.paths import LENGTH, OPTIONS, attention, inputs_of_length, largest_array
from tests.test_paths import GROUPS, large_spec

if keras.backend.backend() != "jax":
    pytest.skip("of another backend", allow_module_level=True)

import jax
import jax.numpy as jnp

from keras_moh.implementations import jax_triton


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_is_a_loop_without_all_scores(options: dict[str, Any]) -> None:
    """Forward and backward, in the program that JAX hands to XLA."""
    tensors, heads, cotangent = inputs_of_length(1)
    assert has_loop_only("jax_xla", tensors, heads, cotangent, options)


def test_the_reference_has_all_scores() -> None:
    """Else the test above could not fail."""
    tensors, heads, cotangent = inputs_of_length(1)
    assert not has_loop_only("reference", tensors, heads, cotangent, {})


def has_loop_only(
    name: str, tensors: list[Any], heads: Any, cotangent: Any, options: dict[str, Any]
) -> bool:
    attend = attention(name, heads, **options)
    forward = jax.jit(attend).lower(*tensors).as_text()
    backward = jax.jit(lambda *x: output_and_gradients(attend, x, cotangent))
    backward = backward.lower(*tensors).as_text()
    loops = [program.count("stablehlo.while") for program in (forward, backward)]
    small = [largest_array(program) < LENGTH**2 for program in (forward, backward)]
    assert all(small) == any(small)
    assert all(loops) == any(loops)
    return all(small) and loops[0] >= 2 and loops[1] >= 4


def test_compiled_program_has_not_either() -> None:
    """XLA itself unrolls or fuses nothing into an array of all scores."""
    tensors, heads, cotangent = inputs_of_length(1)
    attend = attention("jax_xla", heads, is_causal=True)
    run = jax.jit(lambda *x: output_and_gradients(attend, x, cotangent))
    program = run.lower(*tensors).compile().as_text()
    assert "while(" in program
    assert largest_array(program) < LENGTH**2


@pytest.mark.parametrize("transformation", ["vmap", "vmap of grad", "scan", "grad of scan"])
def test_transformed(transformation: str, ran: list[str]) -> None:
    """The same as called one after another, and by the same path."""
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
        "grad of scan": lambda: jax.jit(jax.grad(lambda *x: scanned(*x)[0], argnums=(0, 1, 2, 3)))(
            *tensors
        ),
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


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({}, "jax_xla"),
        ({"is_causal": True}, "jax_xla"),
        (GROUPS, "compact"),
        ({"num_active_heads": 12}, "compact"),
        ({"dropout": 0.1}, "reference"),
    ],
    ids=str,
)
def test_choice_on_a_gpu_without_kernels(
    changes: dict[str, Any], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jax_triton, "HAS_JAX_TRITON", False)
    chosen = implementations.choose_implementation(large_spec(device="gpu", **changes))
    assert chosen.__name__ == implementations.IMPLEMENTATIONS[name][1]
