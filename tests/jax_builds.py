"""Calls of attention that JAX lowers for devices that are not there."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from keras_moh.implementations.spec import Options
from tests.helpers import output_and_gradients
from tests.paths import LENGTH

HEADS, TAKEN = 4, 2


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
    "decoding, padding": Case(8, 1, 32768, groups=1, mask=(8, 1, 1, 32768), widths=(128, 128)),
    "decoding, mask": Case(queries=3, keys=1531, mask=(1, 1, 3, 1531), dtype="float32"),
    "padding": Case(keys=1000, mask=(2, 1, 1, 1000), dtype="float16"),
    "mask": Case(mask=(1, 1, 1024, 1024), widths=(256, 256), dtype="float32", is_causal=True),
}

# Long enough that no array of a tile is as large as all scores.
LONG = Case(1, LENGTH, LENGTH)
LONG_CASES = {
    "nothing": LONG,
    "causal window": LONG._replace(is_causal=True, sliding_window=100),
    "padding": LONG._replace(mask=(1, 1, 1, LENGTH)),
}


def program(implementation: Any, case: Case, with_gradients: bool) -> Callable[..., Any]:
    """The attention, or it and its gradients, as a function of `stand_ins(case)`."""

    def attend(query: Any, key: Any, value: Any, gates: Any, heads: Any, *more: Any) -> Any:
        offset, mask = more
        options = Options(mask, case.is_causal, 0.1, offset, case.sliding_window)
        return implementation.attend(query, key, value, heads, gates, options)[0]

    def run(*arguments: Any) -> Any:
        *inputs, heads, offset, mask = arguments
        cotangent = jnp.ones((*inputs[0].shape[:3], inputs[2].shape[3]))
        return output_and_gradients(
            lambda *inputs: attend(*inputs, heads, offset, mask), inputs, cotangent
        )

    return jax.jit(run if with_gradients else attend)


def stand_ins(case: Case, sharding: Any = None) -> list[Any]:
    """Query, key, value, gates, heads, offset and mask, without values."""
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
