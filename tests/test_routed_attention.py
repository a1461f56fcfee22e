"""`routed_attention`, every implementation of it, and the choice among them."""

import functools
import os
import sys
import types
from typing import Any, NamedTuple

import hypothesis
import keras
import numpy as np
import pytest
from hypothesis import strategies as st
from keras import ops

import keras_moh
from keras_moh import Routing, UnsupportedError, implementations, routed_attention
from tests import oracle
from tests.helpers import compiled, output_and_gradients, to_numpy
from tests.paths import OF_KERAS, OF_KERNELS
from tests.samples import floats, padding

B, T, S, H, K, d, dv = 2, 3, 5, 6, 4, 7, 11
BACKEND = keras.backend.backend()
OTHER_BACKEND = "jax" if BACKEND == "torch" else "torch"
# JAX compiles every kind of call, and Triton's interpreter takes its time.
IS_SLOW = BACKEND == "jax" or os.environ.get("TRITON_INTERPRET") == "1"
TOLERANCES = {"float64": 1e-12, "float32": 1e-5, "float16": 1e-2, "bfloat16": 5e-2}


class Path(NamedTuple):
    """An implementation, and how it is run, on which its shapes and its code may depend."""

    implementation: str | None
    mode: str  # "eager", "graph" (TensorFlow's, of unknown batch and lengths), or "xla"


def paths() -> list[Path]:
    return [
        Path(name, mode)
        for name, (backend, _) in implementations.IMPLEMENTATIONS.items()
        if backend in (None, BACKEND)
        for mode in modes(backend)
    ]


def modes(backend: str | None) -> tuple[str, ...]:
    """Op by op, JAX takes seconds for every new shape."""
    if backend == "tensorflow":
        return "eager", "graph", "xla"
    return ("xla",) if BACKEND == "jax" else ("eager",)


@pytest.fixture(params=paths(), ids="-".join)
def path(request: pytest.FixtureRequest) -> Path:
    return request.param


FAST_PATHS = [path for path in paths() if path.implementation != "reference"]
each_fast_path = pytest.mark.parametrize("path", FAST_PATHS, ids="-".join)


@pytest.fixture(params=dict.fromkeys(path.implementation for path in paths()))
def implementation(request: pytest.FixtureRequest) -> str:
    return request.param


@functools.cache
def runner(
    path: Path,
    is_causal: bool,
    scale: float | None,
    sliding_window: int | None,
    routing_groups: int,
) -> Any:
    """`run(query, key, value, gates, heads, cotangent, offset[, mask])`: output and gradients.

    It is one for all calls that compiled code does not tell apart, so that they share that code.
    """

    def run(*tensors: Any) -> Any:
        *inputs, heads, cotangent, offset, mask = (*tensors, *[None] * (8 - len(tensors)))

        def attend(query: Any, key: Any, value: Any, gates: Any) -> Any:
            return routed_attention(
                *(query, key, value, Routing(heads, gates, gates[..., :0])),
                mask=mask,
                is_causal=is_causal,
                scale=scale,
                causal_offset=offset,
                sliding_window=sliding_window,
                routing_groups=routing_groups,
                implementation=path.implementation,
            )

        return output_and_gradients(attend, inputs, cotangent)

    if path.mode == "eager":
        return run
    if BACKEND == "jax":
        import jax

        return jax.jit(run)
    import tensorflow as tf

    if path.mode == "xla":
        return tf.function(run, jit_compile=True, autograph=False)

    @functools.cache
    def function_of(*specs: Any) -> Any:
        # One for each: TensorFlow's own cache takes a graph of unknown lengths for lengths of 1.
        return tf.function(run, autograph=False, input_signature=specs)

    def unknown(tensor: Any) -> tf.TensorSpec:
        """Batch and lengths are unknown, except for those that broadcast."""
        shape = [*tensor.shape]
        lengths = (0, 2, 3) if tensor.dtype == "bool" else (0, 1)[: len(shape)]
        for axis in lengths:
            shape[axis] = 1 if tensor.dtype == "bool" and shape[axis] == 1 else None
        return tf.TensorSpec(shape, tensor.dtype)

    def run_graph(*tensors: Any) -> Any:
        return function_of(*map(unknown, tensors))(*tensors)

    return run_graph


def some_mask(*shape: int) -> np.ndarray:
    """A mask of which about half is True, and no key is left to some of the rows."""
    mask = np.random.default_rng(1).random(shape) < 0.5
    mask.reshape(-1, shape[-1])[0] = False
    return mask


# What may be asked of attention, beside its tensors.
OPTIONS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "scale": {"scale": 0.25},
    "causal": {"is_causal": True},
    "causal from 2": {"is_causal": True, "causal_offset": 2},
    "causal from -1": {"is_causal": True, "causal_offset": -1},  # no key for the first query
    "causal behind all keys": {"is_causal": True, "causal_offset": S + 2},
    "causal before all keys": {"is_causal": True, "causal_offset": -T - 2},
    "window": {"sliding_window": 2},
    "window of 1 from 1": {"sliding_window": 1, "causal_offset": 1},
    "window behind all keys": {"sliding_window": 2, "causal_offset": S + 5},
    "causal window from 1": {"is_causal": True, "sliding_window": 2, "causal_offset": 1},
    "mask (T, S)": {"mask": some_mask(T, S)},
    "mask (B, 1, 1, S)": {"mask": some_mask(B, 1, 1, S)},
    "mask (1, 1, 1, S)": {"mask": np.arange(S).reshape(1, 1, 1, S) % 2 > 0},
    "mask (1, 1, T, S)": {"mask": some_mask(1, 1, T, S)},
    "mask (B, 1, T, S)": {"mask": some_mask(B, 1, T, S)},
    "mask (B, 1, T, 1)": {"mask": some_mask(B, 1, T, 1)},
    "mask (B, 1, 1, 1)": {"mask": padding(1, 0, length=1)[:, None, None]},
    "mask (B, H, T, S)": {"mask": some_mask(B, H, T, S)},
    "mask, causal and window": {
        "mask": some_mask(B, H, T, S),
        "is_causal": True,
        "sliding_window": 3,
    },
    "no key in the first entry": {"mask": padding(0, 3, length=S)[:, None, None]},
    "no key in the last entry": {"mask": padding(3, 0, length=S)[:, None, None]},
    "no key at all": {"mask": np.zeros((1, 1, 1, S), bool)},
}


def some_heads(
    load: str, random: np.random.Generator, shape: tuple[int, int, int], taken: int, groups: int
) -> np.ndarray:
    """The heads `(B, T, taken)` of tokens, equally many of each group of the `H` in `(B, T, H)`."""
    _, T, H = shape
    preference = random.random(shape)
    if load == "uneven":  # All take head 0 and none head 1.
        preference[..., :2] = [2, -1]
        preference[..., 3:] += 0.4
    elif load == "the same":  # The first, and the last ones.
        preference = np.broadcast_to(abs(np.arange(H) - 0.6), shape)
    elif load == "by entry":
        preference = np.broadcast_to(np.roll(np.arange(H), 1), shape).copy()
        preference[::2] *= -1
    elif load == "by position":
        preference = np.broadcast_to(np.arange(H), shape).copy()
        preference[:, T // 3 :] *= -1
    else:
        assert load == "even"
    by_group = preference.reshape(*shape[:2], groups, H // groups)
    order = np.argsort(-by_group, axis=-1, kind="stable")[..., : taken // groups]
    heads = order + np.arange(0, H, H // groups)[:, None]
    return np.sort(heads.reshape(*shape[:2], taken), axis=-1).astype("int32")


class Case:
    """Tensors of a call in every form: exact in float16, as all their entries are."""

    def __init__(
        self,
        groups: int = 2,
        queries: int = T,
        keys: int = S,
        taken: int = K,
        *,
        batch: int = B,
        heads: int = H,
        widths: tuple[int, int] = (d, dv),
        load: str = "even",
        routing_groups: int = 1,
        some_gates_are_0: bool = False,
        seed: int = 0,
    ) -> None:
        key_dim, value_dim = widths
        self.query = floats(batch, queries, heads, key_dim, seed=seed + 1)
        self.key = floats(batch, keys, groups, key_dim, seed=seed + 2)
        self.value = floats(batch, keys, groups, value_dim, seed=seed + 3)
        random = np.random.default_rng(seed + 4)
        shape = (batch, queries, heads)
        self.routing_groups = routing_groups
        self.heads = some_heads(load, random, shape, taken, routing_groups)
        self.gates = 2 + floats(batch, queries, taken, seed=seed + 5)
        if some_gates_are_0:
            self.gates *= random.random(self.gates.shape) < 0.7
        self.cotangent = floats(batch, queries, heads, value_dim, seed=seed + 6)

    @property
    def dense_gates(self) -> np.ndarray:
        gates = np.zeros(self.query.shape[:3])
        np.put_along_axis(gates, self.heads, self.gates, axis=-1)
        return gates

    def tensors(self, dtype: str) -> tuple[Any, ...]:
        """Query, key, value and gates."""
        gate_dtype = "float64" if dtype == "float64" else "float32"
        inputs = (self.query, self.key, self.value)
        return *(ops.convert_to_tensor(x, dtype) for x in inputs), ops.convert_to_tensor(
            self.gates, gate_dtype
        )

    def routing(self, gates: Any) -> Routing:
        return Routing(self.heads, gates, gates[..., :0])

    def mask(self, options: dict[str, Any]) -> np.ndarray:
        """The options' mask and positions, in one."""
        positions = oracle.allowed(
            self.query.shape[1],
            self.key.shape[1],
            options.get("is_causal", False),
            options.get("causal_offset", 0),
            options.get("sliding_window"),
        )
        return positions & options.get("mask", np.True_)

    def run(self, path: Path, options: dict[str, Any], dtype: str) -> tuple[Any, Any]:
        """The output, and the gradients by query, key, value and gates."""
        static = (options.get(name) for name in ("scale", "sliding_window"))
        run = runner(path, options.get("is_causal", False), *static, self.routing_groups)
        inputs = self.tensors(dtype)
        offset = options.get("causal_offset", 0)
        more = [self.heads, ops.convert_to_tensor(self.cotangent, inputs[-1].dtype), offset]
        if "mask" in options:
            mask = options["mask"]
            more.append(mask if mask.ndim == 4 else mask[None, None])
        if path.mode != "eager":
            more = map(ops.convert_to_tensor, more)
        return run(*inputs, *more)


def assert_close(actual: Any, expected: np.ndarray, tolerance: float, name: str) -> None:
    size = max(np.abs(expected).max(initial=0), 1.0)
    np.testing.assert_allclose(
        to_numpy(actual), expected, rtol=0, atol=tolerance * size, err_msg=name
    )


def refusal(path: Path, case: Case, options: dict[str, Any], dtype: str = "float32") -> str | None:
    """What the reason says for which the implementation cannot serve the call, if it cannot."""
    if path.implementation in (None, "reference"):
        return None
    if case.heads.shape[-1] == 0:
        return "its tokens take a head"
    mask_shape = np.shape(options.get("mask", np.True_))
    if len(mask_shape) == 4 and mask_shape[1] > 1:
        return "mask has no head axis"
    if path.implementation in OF_KERNELS and dtype == "float64":
        return "not in float64"
    if path.implementation in OF_KERAS:
        if dtype == "float64":
            return "computes in float32"
        if dtype == "float16":
            return "no gradient in float16"
    if path.implementation == "compact":
        taken_of_all = case.heads.shape[-1] == case.query.shape[2]
        if not taken_of_all and case.routing_groups % case.key.shape[2]:
            return "key/value heads do not divide the routing groups"
    return None


def check(
    path: Path,
    shape: dict[str, Any],
    options: dict[str, Any],
    dtype: str,
    tolerance: float | None = None,
) -> None:
    """Values, scores and every gradient against the oracle."""
    groups, taken = shape.get("groups", 2), shape.get("taken", K)
    if path.implementation == "compact" and taken % groups == 0:
        shape = {"routing_groups": groups, **shape}
    case = Case(**shape)
    reason = refusal(path, case, options, dtype)
    if reason is not None:
        with pytest.raises(UnsupportedError, match=reason):
            case.run(path, options, dtype)
        return
    mask, scale = case.mask(options), options.get("scale")
    arrays = tuple(x.astype("float64") for x in (case.query, case.key, case.value))
    expected, expected_scores = oracle.attend(*arrays, mask, scale)
    expected = expected * case.dense_gates[..., None]
    *expected_gradients, by_dense_gates = oracle.attend_gradients(
        *arrays, case.dense_gates, mask, case.cotangent, scale
    )
    expected_gradients.append(np.take_along_axis(by_dense_gates, case.heads, axis=-1))
    tolerance = tolerance or TOLERANCES[dtype]

    output, by = case.run(path, options, dtype)
    assert keras.backend.standardize_dtype(output.dtype) == dtype
    assert_close(output, expected, tolerance, "output")
    nothing = (expected == 0).all(axis=-1)  # a head not taken, or a row without a key
    assert (to_numpy(output)[nothing] == 0).all()
    names = ("query", "key", "value", "gates")
    for name, tensor, actual, wanted in zip(
        names, case.tensors(dtype), by, expected_gradients, strict=True
    ):
        if actual is None:  # Nothing depends on anything, where there is nothing.
            assert 0 in output.shape or 0 in case.key.shape
            actual = ops.zeros_like(tensor)
        assert actual.dtype == tensor.dtype
        assert_close(actual, wanted, tolerance, f"gradient by {name}")
    if by[0] is not None:
        assert (to_numpy(by[0])[case.dense_gates == 0] == 0).all()

    if path.implementation in (None, "reference"):
        *inputs, gates = case.tensors(dtype)

        def attend_with_scores(*tensors: Any) -> Any:
            return routed_attention(
                *(*tensors, case.routing(gates)),
                **options,
                return_attention_scores=True,
                implementation=path.implementation,
            )

        with_scores, scores = compiled(attend_with_scores, *inputs)
        assert_close(with_scores, expected, tolerance, "output beside scores")
        assert_close(scores, expected_scores, tolerance, "scores")


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_options(path: Path, options: dict[str, Any]) -> None:
    check(path, {}, options, "float32")


@pytest.mark.float64
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_options_in_float64(path: Path, options: dict[str, Any]) -> None:
    check(path, {}, options, "float64")


SHAPES = {
    "all heads": {"taken": H},
    "one head": {"taken": 1},
    "one key/value head": {"groups": 1},
    "as many key/value heads": {"groups": H},
    "one query": {"queries": 1},
    "one key": {"keys": 1},
    "more queries than keys": {"queries": 13},
    "no query": {"queries": 0},
    "no key": {"keys": 0},
    "no batch": {"batch": 0},
    "no head": {"taken": 0},
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_shapes(path: Path, shape: dict[str, int]) -> None:
    check(path, shape, {"is_causal": True}, "float32")


@pytest.mark.parametrize("kind", ["keys", "pairs"])
@pytest.mark.parametrize("empty", ["batch", "queries", "keys"])
def test_masks_of_nothing(path: Path, empty: str, kind: str) -> None:
    shape = {"batch": B, "queries": T, "keys": S} | {empty: 0}
    queries = shape["queries"] if kind == "pairs" else 1
    mask = np.ones((shape["batch"], 1, queries, shape["keys"]), bool)
    check(path, shape, {"mask": mask}, "float32")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision(path: Path, dtype: str) -> None:
    check(path, {}, {"mask": some_mask(B, 1, 1, S)}, dtype)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("groups", [1, 2])
def test_the_choice_is_right_as_well(groups: int, dtype: str) -> None:
    check(Path(None, modes(None)[0]), {"groups": groups}, {"is_causal": True}, dtype)


# Long enough for several tiles, chunks and spans of keys, and no multiple of any of them.
LONG = {"queries": 523, "keys": 509, "heads": 4, "taken": 2, "widths": (5, 3)}
LONG_MASK = (2, 1, 523, 509)
UNKNOWN_KEYS = padding(333, 0, length=509)[:, None, None]
LONG_CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "nothing": ({"load": "uneven"}, {}),
    "all on one head": ({"load": "the same", "taken": 1}, {}),
    "all heads": ({"taken": 4}, {"is_causal": True}),
    "causal": ({"load": "uneven"}, {"is_causal": True}),
    "gates of 0": ({"some_gates_are_0": True}, {"is_causal": True}),
    "causal from 77": ({"load": "by position"}, {"is_causal": True, "causal_offset": 77}),
    "causal from -300": ({"load": "by entry"}, {"is_causal": True, "causal_offset": -300}),
    "causal behind all keys": ({}, {"is_causal": True, "causal_offset": 1000}),
    "causal before all keys": ({}, {"is_causal": True, "causal_offset": -600}),
    "window": ({"load": "by position"}, {"sliding_window": 37}),
    "window from 300": ({"load": "uneven"}, {"sliding_window": 37, "causal_offset": 300}),
    "causal window": (
        {"load": "by entry"},
        {"is_causal": True, "sliding_window": 37, "causal_offset": -50},
    ),
    "wide window": ({"load": "even"}, {"sliding_window": 331}),
    "wide causal window": (
        {"taken": 4},
        {"is_causal": True, "sliding_window": 450, "causal_offset": 300},
    ),
    "padding": ({"load": "the same"}, {"mask": UNKNOWN_KEYS[::-1]}),
    "padding at the end": ({"load": "even"}, {"mask": UNKNOWN_KEYS}),
    "mask": ({"load": "uneven"}, {"mask": some_mask(*LONG_MASK)}),
    "mask for all entries": (
        {"load": "by entry"},
        {"mask": oracle.allowed(523, 509, is_causal=True)[None, None]},
    ),
    "causal mask": ({}, {"mask": some_mask(*LONG_MASK), "is_causal": True}),
    "causal window and padding": (
        {"load": "uneven"},
        {
            "mask": UNKNOWN_KEYS[::-1],
            "is_causal": True,
            "sliding_window": 37,
            "causal_offset": -7,
        },
    ),
    "window and mask": (
        {"load": "by position"},
        {"mask": some_mask(*LONG_MASK), "sliding_window": 37},
    ),
}


@each_fast_path
@pytest.mark.parametrize(("shape", "options"), LONG_CASES.values(), ids=LONG_CASES)
def test_long(path: Path, shape: dict[str, Any], options: dict[str, Any]) -> None:
    check(path, LONG | shape, options, "float32")


@each_fast_path
@pytest.mark.float64
@pytest.mark.parametrize("name", ["nothing", "causal", "mask", "causal window and padding"])
def test_long_in_float64(path: Path, name: str) -> None:
    shape, options = LONG_CASES[name]
    check(path, LONG | shape, options, "float64")


@each_fast_path
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", ["causal", "causal window and padding"])
def test_long_in_half_precision(path: Path, name: str, dtype: str) -> None:
    shape, options = LONG_CASES[name]
    check(path, LONG | shape, options, dtype)


@each_fast_path
@pytest.mark.parametrize("widths", [(72, 5), (64, 80), (128, 256), (256, 128)], ids=str)
def test_widths(path: Path, widths: tuple[int, int]) -> None:
    """Of keys and values, which no fused kernel may want alike, or to be multiples of anything."""
    shape = {"queries": 37, "keys": 41, "heads": 2, "taken": 1, "groups": 1, "widths": widths}
    check(path, shape, {"is_causal": True}, "float32")


@each_fast_path
def test_large_scores(path: Path) -> None:
    """Of several hundreds on either side, where an exponential of the wrong row is infinite."""
    shape = LONG | {"queries": 67, "keys": 71, "load": "uneven"}
    check(path, shape, {"scale": 50.0}, "float32", tolerance=3e-4)


@st.composite
def drawn_options(draw: st.DrawFn) -> dict[str, Any]:
    """Of few kinds, since each is compiled anew, and with any numbers."""
    is_causal, window, full = draw(
        st.sampled_from([(True, None, False), (True, 23, True), (False, 23, False)])
    )
    random = np.random.default_rng(draw(st.integers(0, 99)))
    keys, queries = PROPERTY["keys"], PROPERTY["queries"]
    if full:
        density = draw(st.sampled_from([0.0, 0.02, 0.5, 1.0]))
        mask = random.random((2, 1, queries, keys)) < density
    else:
        lengths = draw(st.lists(st.integers(0, keys), min_size=2, max_size=2))
        mask = padding(*lengths, length=keys)[:, None, None]
        if draw(st.booleans()):  # Holes, and padding at the start.
            mask = mask[..., ::-1] & (random.random(mask.shape) < 0.7)
    return {
        "is_causal": is_causal,
        "sliding_window": window,
        "causal_offset": draw(st.integers(-queries - 30, keys + 30)),
        "mask": mask,
    }


PROPERTY = {"queries": 149, "keys": 163, "heads": 4, "taken": 2, "widths": (5, 3)}


@each_fast_path
@hypothesis.settings(max_examples=25 if IS_SLOW else 100)
@hypothesis.given(
    options=drawn_options(),
    load=st.sampled_from(["even", "uneven", "the same", "by entry", "by position"]),
    seed=st.integers(0, 99),
)
def test_any_masks_and_loads(path: Path, options: dict[str, Any], load: str, seed: int) -> None:
    check(path, {**PROPERTY, "load": load, "seed": seed}, options, "float32")


@pytest.mark.float64
def test_oracle_gradients_are_differences_of_its_outputs() -> None:
    case, mask, step = Case(queries=2, keys=3), some_mask(B, H, 2, 3), 1e-5
    arrays = [x.astype("float64") for x in (case.query, case.key, case.value, case.dense_gates)]
    expected = oracle.attend_gradients(*arrays, mask, case.cotangent)

    def loss() -> float:
        outputs, _ = oracle.attend(*arrays[:3], mask)
        return float((case.cotangent * arrays[3][..., None] * outputs).sum())

    for array, gradient in zip(arrays, expected, strict=True):
        for index in np.ndindex(array.shape):
            here = array[index]
            array[index] = here + step
            above = loss()
            array[index] = here - step
            below = loss()
            array[index] = here
            assert abs((above - below) / (2 * step) - gradient[index]) < 1e-7


# JAX has no integers of 64 bits, but for those of a run in float64.
@pytest.mark.parametrize("dtype", ["int32", "int8" if BACKEND == "jax" else "int64"])
@pytest.mark.parametrize("offset", [0, 2])
def test_causal_offset_may_be_a_tensor(implementation: str, offset: int, dtype: str) -> None:
    case = Case(routing_groups=2)
    *inputs, gates = case.tensors("float32")

    def attend(offset: Any) -> Any:
        return routed_attention(
            *(*inputs, case.routing(gates)),
            is_causal=True,
            causal_offset=offset,
            sliding_window=3,
            implementation=implementation,
            routing_groups=2,
        )

    actual = compiled(attend, ops.convert_to_tensor(offset, dtype))
    assert_close(actual, to_numpy(attend(offset)), TOLERANCES["float32"], "output")


REFUSED = {
    "mask of every head": ({"mask": some_mask(B, H, T, S)}, "its mask has no head axis"),
    "dropout": ({"dropout": 0.5, "seed": 7}, "it has no dropout on the attention scores"),
    "scores": ({"return_attention_scores": True}, "it does not keep the attention scores"),
}


@pytest.mark.parametrize(("options", "reason"), REFUSED.values(), ids=REFUSED)
def test_refused_by_all_but_the_reference(options: dict[str, Any], reason: str) -> None:
    case = Case(routing_groups=2)
    routing = case.routing(ops.convert_to_tensor(case.gates))

    def attend(implementation: str | None) -> Any:
        return routed_attention(
            *(case.query, case.key, case.value, routing),
            **options,
            implementation=implementation,
            routing_groups=2,
        )

    for name in {path.implementation for path in paths()} - {"reference"}:
        with pytest.raises(UnsupportedError, match=f"implementation='{name}' .*: {reason}"):
            attend(name)
    expected = keras.tree.flatten(attend("reference"))
    for actual, wanted in zip(keras.tree.flatten(attend(None)), expected, strict=True):
        np.testing.assert_array_equal(to_numpy(actual), to_numpy(wanted))


def dropped_weights(seed: Any, case: Case, rate: float) -> np.ndarray:
    """The weights of the heads taken after dropout, `(B, T, K, S)`: values are the identity."""
    query, key, _, _ = case.tensors("float32")
    keys = case.key.shape[1]
    value = np.broadcast_to(np.eye(keys, dtype="float32")[:, None], (*case.key.shape[:3], keys))
    gates = np.ones(case.heads.shape, "float32")
    output, scores = routed_attention(
        *(query, key, value, case.routing(gates)),
        dropout=rate,
        seed=seed,
        return_attention_scores=True,
    )
    _, expected = oracle.attend(case.query, case.key, case.value, np.ones((1, 1, 1, 1), bool))
    assert_close(scores, expected, TOLERANCES["float32"], "scores before dropout")
    return np.take_along_axis(to_numpy(output), case.heads[..., None], axis=2)


def test_dropout_is_seeded() -> None:
    case = Case()
    first, again, other = (dropped_weights(s, case, 0.5) for s in (1, 1, 2))
    np.testing.assert_array_equal(first, again)
    assert (first != other).any()

    generator = keras.random.SeedGenerator(1)
    drawn, next_drawn = (dropped_weights(generator, case, 0.5) for _ in range(2))
    assert (drawn != next_drawn).any()


def test_dropout_keeps_the_expectation() -> None:
    rate, case = 0.25, Case(queries=101, keys=53)
    actual = dropped_weights(1, case, rate)
    _, scores = oracle.attend(case.query, case.key, case.value, np.ones((1, 1, 1, 1), bool))
    scores = np.take_along_axis(scores.transpose(0, 2, 1, 3), case.heads[..., None], axis=2)

    kept = actual != 0
    np.testing.assert_allclose(actual[kept], scores[kept] / (1 - rate), rtol=1e-4, atol=1e-6)
    # Of n independent draws, the share is within 5 standard deviations of the rate.
    assert abs(np.mean(~kept) - rate) < 5 * np.sqrt(rate * (1 - rate) / kept.size)
    variance = (scores**2).sum() * rate / (1 - rate)
    assert abs((actual - scores).sum()) < 5 * np.sqrt(variance)


def test_dropout_of_zero_needs_no_seed() -> None:
    case = Case()
    weights = dropped_weights(None, case, 0.0)
    np.testing.assert_allclose(weights.sum(axis=-1), 1, rtol=1e-5)


BAD_ARGUMENTS = {
    "query of rank 3": ({"query": floats(B, T, d)}, r"`query` must have the shape .*\(2, 3, 7\)"),
    "key of rank 3": ({"key": floats(B, S, d)}, r"`key` must have the shape .*\(2, 5, 7\)"),
    "value of rank 5": ({"value": floats(B, S, 2, 1, dv)}, "`value` must have the shape"),
    "value of another length": ({"value": floats(B, 13, 2, dv)}, "`key` and `value` must agree"),
    "key of another batch": (
        {"key": floats(3, S, 2, d), "value": floats(3, S, 2, dv)},
        "`query` and `key` must agree in batch and features",
    ),
    "key of another width": ({"key": floats(B, S, 2, 3)}, "`query` and `key` must agree in batch"),
    "heads that do not divide": (
        {"key": floats(B, S, 4, d), "value": floats(B, S, 4, dv)},
        "query heads must be a multiple of the number of key/value heads",
    ),
    "integer query": ({"query": np.ones((B, T, H, d), "int32")}, "one float dtype.*int32, float32"),
    "key of another dtype": (
        {"key": floats(B, S, 2, d).astype("float16")},
        "one float dtype.*float32, float16",
    ),
    "routing of another length": (
        {"routing": Routing(np.zeros((B, 7, K), "int32"), floats(B, 7, K), floats(B, 7, 0))},
        r"`routing` must hold .*routing.heads.shape=\(2, 7, 4\)",
    ),
    "routing without gates": (
        {"routing": Routing(np.zeros((B, T, K), "int32"), floats(B, T, 1), floats(B, T, 0))},
        r"`routing` must hold .*routing.gates.shape=\(2, 3, 1\)",
    ),
    "routing by floats": (
        {"routing": Routing(floats(B, T, K), floats(B, T, K), floats(B, T, 0))},
        "`routing` .*integer",
    ),
    "no routing": ({"routing": None}, "`routing`: expected a `keras_moh.Routing`"),
    "float mask": ({"mask": floats(T, S)}, "`mask`: expected a boolean tensor"),
    "mask of rank 3": ({"mask": np.ones((B, T, S), bool)}, r"`mask` must have .*\(2, 3, 5\)"),
    "mask of another length": ({"mask": np.ones((T, 7), bool)}, r"`mask` must have .*\(3, 7\)"),
    "is_causal=1": ({"is_causal": 1}, "`is_causal`: expected True or False"),
    "negative scale": ({"scale": -1.0}, "`scale`: expected a finite number of at least 0"),
    "scale=nan": ({"scale": float("nan")}, "`scale`: expected a finite number of at least 0"),
    "scale='large'": ({"scale": "large"}, "`scale`: expected a finite number of at least 0"),
    "causal_offset=1.5": ({"causal_offset": 1.5}, "`causal_offset`: expected an integer"),
    "causal_offset=[1]": ({"causal_offset": np.array([1])}, "`causal_offset`: expected an integer"),
    "sliding_window=0": ({"sliding_window": 0}, "`sliding_window`: expected a positive integer"),
    "sliding_window=2.0": ({"sliding_window": 2.0}, "`sliding_window`: .*=2.0"),
    "sliding_window=True": ({"sliding_window": True}, "`sliding_window`: .*=True"),
    "dropout=1": ({"dropout": 1}, r"`dropout`: expected a number in \[0, 1\)"),
    "dropout=-0.1": ({"dropout": -0.1}, "`dropout`: .*=-0.1"),
    "return_attention_scores=None": (
        {"return_attention_scores": None},
        "`return_attention_scores`: expected True or False",
    ),
    "implementation='fastest'": (
        {"implementation": "fastest"},
        ", ".join(f"'{name}'" for name in implementations.IMPLEMENTATIONS) + ".*'fastest'",
    ),
}


@pytest.mark.parametrize(("arguments", "message"), BAD_ARGUMENTS.values(), ids=BAD_ARGUMENTS)
def test_refuses(arguments: dict[str, Any], message: str) -> None:
    case = Case()
    valid = {"query": case.query, "key": case.key, "value": case.value}
    valid["routing"] = case.routing(case.gates)
    with pytest.raises(ValueError, match=message) as error:
        routed_attention(**(valid | arguments))
    assert "\n" not in str(error.value)


class ServedError(Exception):
    """Tells that an implementation was chosen and called."""


@pytest.fixture
def register(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Put an implementation first in the table: `register(name, backend, reason to refuse)`."""

    def register(name: str, backend: str | None, reason: str | None) -> None:
        def attend(*args: Any, **kwargs: Any) -> Any:
            raise ServedError(name)

        if backend in (None, BACKEND):
            module = types.ModuleType(name)
            module.unsupported_reason, module.attend = lambda spec: reason, attend
            monkeypatch.setitem(sys.modules, f"fake_{name}", module)
        table = {name: (backend, f"fake_{name}"), **implementations.IMPLEMENTATIONS}
        monkeypatch.setattr(implementations, "IMPLEMENTATIONS", table)

    return register


def call(implementation: str | None) -> np.ndarray:
    case = Case()
    routing = case.routing(case.gates)
    output = routed_attention(
        case.query, case.key, case.value, routing, implementation=implementation
    )
    return to_numpy(output)


@pytest.mark.parametrize("backend", [None, BACKEND])
def test_first_that_serves_is_taken(register: Any, backend: str | None) -> None:
    register("slow", backend, None)
    register("fast", backend, None)
    register("refusing", backend, "it is Monday")
    with pytest.raises(ServedError, match="fast"):
        call(None)
    with pytest.raises(ServedError, match="slow"):
        call("slow")


def test_refusal_goes_to_the_next(register: Any) -> None:
    expected = call(None)
    register("refusing", None, "it is Monday")
    register("foreign", OTHER_BACKEND, None)
    np.testing.assert_array_equal(call(None), expected)


def test_named_one_raises_its_reason(register: Any) -> None:
    register("refusing", BACKEND, "it is Monday")
    with pytest.raises(UnsupportedError, match=r"implementation='refusing' .*: it is Monday"):
        call("refusing")


def test_named_one_of_another_backend_raises(register: Any) -> None:
    register("foreign", OTHER_BACKEND, None)
    message = f"implementation='foreign' .* backend '{BACKEND}': it needs the backend"
    with pytest.raises(UnsupportedError, match=f"{message} '{OTHER_BACKEND}'"):
        call("foreign")


def test_layer_of_another_backends_implementation_raises_on_call(register: Any) -> None:
    register("foreign", OTHER_BACKEND, None)
    arguments = {"num_heads": 6, "key_dim": 2, "num_shared_heads": 2, "top_k": 2}
    layer = keras_moh.MoHAttention(**arguments, implementation="foreign")
    layer = keras_moh.MoHAttention.from_config(layer.get_config())
    with pytest.raises(UnsupportedError, match=f"it needs the backend '{OTHER_BACKEND}'"):
        layer(floats(B, T, d))


def test_what_is_chosen_by(register: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that an implementation may look at to refuse: shapes, dtype and options, no values."""
    seen = []
    register("curious", None, None)
    monkeypatch.setattr(sys.modules["fake_curious"], "unsupported_reason", seen.append)
    case = Case()
    with pytest.raises(ServedError):
        routed_attention(
            *case.tensors("float32")[:3],
            case.routing(case.gates),
            mask=some_mask(T, S),
            is_causal=True,
            sliding_window=2,
            dropout=0.5,
        )
    (spec,) = seen
    assert (spec.batch, spec.query_length, spec.key_length) == (B, T, S)
    assert (spec.num_heads, spec.num_key_value_heads, spec.num_active_heads) == (H, 2, K)
    assert (spec.key_dim, spec.value_dim, spec.dtype) == (d, dv, "float32")
    assert (spec.mask_shape, spec.is_causal, spec.sliding_window) == ((1, 1, T, S), True, 2)
    assert (spec.dropout, spec.return_attention_scores) == (0.5, False)
