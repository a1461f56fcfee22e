"""`routed_attention`, every implementation of it, and the choice among them."""

import sys
import types
from typing import Any

import keras
import numpy as np
import pytest
from keras import ops

import keras_moh
from keras_moh import Routing, UnsupportedError, implementations, routed_attention
from tests import oracle
from tests.helpers import compiled, gradients, to_numpy
from tests.samples import floats

B, T, S, H, K, d, dv = 2, 3, 5, 6, 4, 7, 11
BACKEND = keras.backend.backend()
OTHER_BACKEND = "jax" if BACKEND == "torch" else "torch"
ONE_FOR_ALL_HEADS = {"torch_sdpa", "jax_xla", "tensorflow_xla"}  # masks
TOLERANCES = {"float64": 1e-12, "float32": 1e-5, "float16": 1e-2, "bfloat16": 5e-2}


@pytest.fixture(
    params=[
        name
        for name, (backend, _) in implementations.IMPLEMENTATIONS.items()
        if backend in (None, BACKEND)
    ]
)
def implementation(request: pytest.FixtureRequest) -> str:
    return request.param


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
    "window": {"sliding_window": 2},
    "window of 1 from 1": {"sliding_window": 1, "causal_offset": 1},
    "causal window from 1": {"is_causal": True, "sliding_window": 2, "causal_offset": 1},
    "mask (T, S)": {"mask": some_mask(T, S)},
    "mask (B, 1, 1, S)": {"mask": some_mask(B, 1, 1, S)},
    "mask (1, 1, T, S)": {"mask": some_mask(1, 1, T, S)},
    "mask (B, 1, T, 1)": {"mask": some_mask(B, 1, T, 1)},
    "mask (B, H, T, S)": {"mask": some_mask(B, H, T, S)},
    "mask, causal and window": {
        "mask": some_mask(B, H, T, S),
        "is_causal": True,
        "sliding_window": 3,
    },
    "no key at all": {"mask": np.zeros((1, 1, 1, S), bool)},
}


class Case:
    """Tensors of a call in every form: exact in float16, as all their entries are."""

    def __init__(self, groups: int = 2, queries: int = T, keys: int = S, taken: int = K) -> None:
        self.query = floats(B, queries, H, d, seed=1)
        self.key = floats(B, keys, groups, d, seed=2)
        self.value = floats(B, keys, groups, dv, seed=3)
        random = np.random.default_rng(4)
        order = random.random((B, queries, H)).argsort(axis=-1)
        self.heads = np.sort(order[..., :taken], axis=-1).astype("int32")
        self.gates = 2 + floats(B, queries, taken, seed=5)
        self.cotangent = floats(B, queries, H, dv, seed=6)

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


def assert_close(actual: Any, expected: np.ndarray, tolerance: float, name: str) -> None:
    size = max(np.abs(expected).max(initial=0), 1.0)
    np.testing.assert_allclose(
        to_numpy(actual), expected, rtol=0, atol=tolerance * size, err_msg=name
    )


def check(implementation: str | None, case: Case, options: dict[str, Any], dtype: str) -> None:
    """Values, scores and every gradient against the oracle."""
    mask, scale = case.mask(options), options.get("scale")
    arrays = tuple(x.astype("float64") for x in (case.query, case.key, case.value))
    expected, expected_scores = oracle.attend(*arrays, mask, scale)
    expected = expected * case.dense_gates[..., None]
    expected_gradients = oracle.attend_gradients(
        *arrays, case.dense_gates, mask, case.cotangent, scale
    )

    def attend(query: Any, key: Any, value: Any, gates: Any, **more: Any) -> Any:
        return routed_attention(
            *(query, key, value, case.routing(gates)),
            **options,
            **more,
            implementation=implementation,
        )

    def loss(*inputs: Any) -> Any:
        return ops.sum(ops.cast(attend(*inputs), gate_dtype) * cotangent)

    inputs, tolerance = case.tensors(dtype), TOLERANCES[dtype]
    gate_dtype = inputs[-1].dtype
    cotangent = ops.convert_to_tensor(case.cotangent, gate_dtype)
    mask_shape = np.shape(options.get("mask", np.True_))
    if implementation in ONE_FOR_ALL_HEADS and len(mask_shape) == 4 and mask_shape[1] > 1:
        with pytest.raises(UnsupportedError, match="head axis"):
            attend(*inputs)
        return
    output = compiled(attend, *inputs)

    assert keras.backend.standardize_dtype(output.dtype) == dtype
    assert_close(output, expected, tolerance, "output")
    if implementation in (None, "reference"):
        with_scores, scores = compiled(lambda *x: attend(*x, return_attention_scores=True), *inputs)
        assert_close(with_scores, expected, tolerance, "output beside scores")
        assert_close(scores, expected_scores, tolerance, "scores")
    nothing = (expected == 0).all(axis=-1)  # a head not taken, or a row without a key
    assert (to_numpy(output)[nothing] == 0).all()

    *by_tensors, by_gates = gradients(loss, inputs).inputs
    names = ("query", "key", "value")
    for name, actual, wanted in zip(names, by_tensors, expected_gradients, strict=False):
        assert_close(actual, wanted, tolerance, f"gradient by {name}")
    wanted = np.take_along_axis(expected_gradients[-1], case.heads, axis=-1)
    assert_close(by_gates, wanted, tolerance, "gradient by gates")
    assert (by_tensors[0][case.dense_gates == 0] == 0).all()


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_options(implementation: str, options: dict[str, Any]) -> None:
    check(implementation, Case(), options, "float32")


@pytest.mark.float64
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_options_in_float64(implementation: str, options: dict[str, Any]) -> None:
    check(implementation, Case(), options, "float64")


SHAPES = {
    "all heads": {"taken": H},
    "one head": {"taken": 1},
    "one key/value head": {"groups": 1},
    "as many key/value heads": {"groups": H},
    "one query": {"queries": 1},
    "one key": {"keys": 1},
    "more queries than keys": {"queries": 13},
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_shapes(implementation: str, shape: dict[str, int]) -> None:
    check(implementation, Case(**shape), {"is_causal": True}, "float32")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision(implementation: str, dtype: str) -> None:
    check(implementation, Case(), {"mask": some_mask(B, 1, 1, S)}, dtype)


def test_the_choice_is_right_as_well() -> None:
    check(None, Case(), {"is_causal": True}, "float32")


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


@pytest.mark.parametrize("offset", [0, 2])
def test_causal_offset_may_be_a_tensor(implementation: str, offset: int) -> None:
    case = Case()
    *inputs, gates = case.tensors("float32")

    def attend(offset: Any) -> Any:
        return routed_attention(
            *(*inputs, case.routing(gates)),
            is_causal=True,
            causal_offset=offset,
            sliding_window=3,
            implementation=implementation,
        )

    actual = compiled(attend, ops.convert_to_tensor(offset, "int32"))
    assert_close(actual, to_numpy(attend(offset)), TOLERANCES["float32"], "output")


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


def test_empty_batch(implementation: str) -> None:
    case = Case()
    *inputs, gates = (x[:0] for x in case.tensors("float32"))
    routing = Routing(case.heads[:0], gates, gates[..., :0])
    output = routed_attention(*inputs, routing, is_causal=True, implementation=implementation)
    assert tuple(output.shape) == (0, T, H, dv)


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
