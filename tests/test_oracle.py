"""`MoHAttention` against an independent computation in NumPy, over shapes, masks and dtypes."""

import dataclasses
import functools
from typing import Any

import hypothesis
import keras
import numpy as np
import pytest
from hypothesis import strategies as st
from keras import ops

import keras_moh
from tests import oracle
from tests.helpers import compiled, gradients, set_weights_by_name, to_numpy, weights_by_name
from tests.samples import floats, moh_attention

# Every drawn shape is compiled anew on JAX, which takes a second.
EXAMPLES = 20 if keras.backend.backend() == "jax" else 50
LENGTHS = (1, 2, 3, 5, 7, 11, 13)
# Heads and key/value heads: attention with many, with grouped and with a single one.
HEADS = ((1, 1), (2, 1), (3, 3), (4, 2), (5, 5), (6, 2), (6, 3), (7, 1), (8, 4))
WAVES = (50.0, 2.0)  # of a rotary embedding: longest wavelength, scaling factor
ROUTER_MARGIN = 1e-6  # probabilities nearer than this may be swapped by float32
# Relative to the largest entry. Of the 8 and 11 bits of the half dtypes, logits lose some more.
TOLERANCES = {
    "float64": 1e-12,
    "float32": 1e-5,
    "mixed_float16": 5e-3,
    "mixed_bfloat16": 4e-2,
}


@dataclasses.dataclass(frozen=True)
class Case:
    """A layer and a call of it, by shapes, choices and a seed: the numbers follow from them."""

    arguments: dict[str, Any]
    shapes: tuple[tuple[int, ...], ...]  # of query[, value[, key]]
    mask_shapes: dict[str, tuple[int, ...]]
    density: float  # of the masks: how likely an entry is True
    call: dict[str, Any]
    seed: int

    def layer(self, dtype: str, **arguments: Any) -> keras_moh.MoHAttention:
        """The layer, its weights in steps of 1/256 that every dtype here holds exactly."""
        layer = moh_attention(**self.arguments, dtype=dtype, **arguments)
        layer.build(*self.shapes)
        set_weights_by_name(
            layer,
            {
                name: 0.25 * floats(*weight.shape, seed=self.seed + index)
                for index, (name, weight) in enumerate(weights_by_name(layer).items())
            },
        )
        return layer

    @property
    def inputs(self) -> list[np.ndarray]:
        return [floats(*shape, seed=self.seed - index) for index, shape in enumerate(self.shapes)]

    @property
    def masks(self) -> dict[str, np.ndarray]:
        random = np.random.default_rng(self.seed)
        return {
            name: random.random(shape) < self.density for name, shape in self.mask_shapes.items()
        }

    @property
    def bias_goes_astray(self) -> bool:
        """Whether Keras adds a bias along the wrong axis, as `test_heads_of_width_1` shows."""
        T, S = self.shapes[0][1], self.shapes[-1][1]
        H, G = self.arguments["num_heads"], self.arguments["num_key_value_heads"]
        d, dv = self.arguments["key_dim"], self.arguments["value_dim"] or self.arguments["key_dim"]
        return (
            keras.backend.backend() == "tensorflow"
            and self.arguments["use_bias"]
            and ((d == 1 and T == H) or (min(d, dv) == 1 and S == G))
        )

    def expected(
        self,
        layer: keras_moh.MoHAttention,
        inputs: list[np.ndarray] | None = None,
        further: dict[str, Any] | None = None,
        **weights: Any,
    ) -> oracle.Output:
        arguments = {
            name: self.arguments.get(name)
            for name in ("num_shared_heads", "top_k", "qk_norm", "sliding_window")
        }
        arguments["routing_groups"] = self.arguments.get("routing_groups", 1)
        arguments["router"] = self.arguments["router"]
        arguments["rotary"] = WAVES if self.arguments.get("rotary_embedding") else None
        arguments |= further or {}
        if self.arguments["router"] is None:
            arguments |= {"num_shared_heads": None, "top_k": 0}
        weights = {n: to_numpy(weight) for n, weight in weights_by_name(layer).items()} | weights
        return oracle.layer(
            weights, *(inputs or self.inputs), **arguments, **self.masks, **self.call
        )


def rotary_embedding() -> dict[str, Any]:
    """In the form of a config: a layer is of one model, and of one process."""
    return keras.saving.serialize_keras_object(keras_moh.RotaryEmbedding(*WAVES))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    T, S, D, D_value, D_key, d, dv = draw(st.permutations(LENGTHS))
    B = draw(st.integers(1, 3))
    H, G = draw(st.sampled_from(HEADS))
    divisors = [r for r in range(1, H + 1) if H % r == 0]
    routing_groups = draw(st.just(1) | st.sampled_from(divisors))
    length = H // routing_groups
    shared = draw(st.integers(0, length))
    routed = draw(st.integers(1, length - shared)) if shared < length else 0
    rotary = draw(st.booleans())
    d = 2 * d if rotary else d
    router = draw(st.sampled_from(["two_stage", "two_stage", "query_norm", None]))

    shapes = [(B, T, D), (B, S, D_value), (B, S, D_key)][: draw(st.integers(1, 3))]
    S = S if len(shapes) > 1 else T
    full = (B, H, T, S)
    attention_shape = [draw(st.sampled_from([1, length])) for length in full]
    available = {
        "query_mask": (B, T),
        "value_mask": (B, S),
        "key_mask": (B, S),
        "attention_mask": draw(
            st.sampled_from([tuple(attention_shape), (B, *attention_shape[2:]), (T, S)])
        ),
    }
    arguments = {
        "num_heads": H,
        "num_key_value_heads": G,
        "key_dim": d,
        "value_dim": draw(st.sampled_from([None, dv])),
        "output_shape": draw(st.sampled_from([None, 3, (3, 2)])),
        "use_bias": draw(st.booleans()),
        "sliding_window": draw(st.none() | st.integers(1, max(T, S))),
        # Of a short vector the variance may be tiny, and the norm then magnifies rounding.
        "qk_norm": draw(st.sampled_from([False, True, "rms"])) if d >= 5 else False,
        "rotary_embedding": rotary_embedding() if rotary else None,
        "router": router,
        "num_shared_heads": routing_groups * shared if router else None,
        "top_k": routing_groups * routed if router else None,
        "routing_groups": routing_groups if router else 1,
        "balance_loss_weight": 1.0,
        "z_loss_weight": 1.0 if router else 0.0,
    }
    chosen = draw(st.sets(st.sampled_from(sorted(available))))
    return Case(
        arguments,
        tuple(shapes),
        {name: available[name] for name in sorted(chosen)},
        draw(st.sampled_from([0.0, 0.5, 0.8, 1.0])),
        {"use_causal_mask": draw(st.booleans())},
        draw(st.integers(10, 2**16)),
    )


def assert_close(actual: Any, expected: Any, tolerance: float, name: str) -> None:
    expected = np.asarray(expected)
    size = max(np.abs(expected).max(initial=0), 1.0)
    np.testing.assert_allclose(
        to_numpy(actual), expected, rtol=0, atol=tolerance * size, err_msg=name
    )


def check_routing(
    routing: keras_moh.Routing, expected: oracle.Routing, tolerance: float, valid: Any = ...
) -> None:
    """Compare the routing of the valid tokens."""
    heads, gates, probabilities = (to_numpy(part)[valid] for part in routing)
    assert heads.dtype == "int32"
    taken = np.nonzero(expected.taken[valid])[-1].reshape(heads.shape)
    np.testing.assert_array_equal(heads, taken)
    expected_gates = np.take_along_axis(expected.gates[valid], taken, axis=-1)
    assert_close(gates, expected_gates, tolerance, "gates")
    assert probabilities.shape == expected.probabilities[valid].shape
    assert_close(probabilities, expected.probabilities[valid], tolerance, "probabilities")


def check_layer(case: Case, dtype: str) -> None:
    layer = case.layer(dtype)
    expected = case.expected(layer)
    hypothesis.assume(expected.routing.margin > ROUTER_MARGIN)
    hypothesis.assume(not case.bias_goes_astray)
    if case.arguments["router"] == "query_norm":
        # Queries are of the compute dtype, and of near norms the deviation magnifies rounding.
        hypothesis.assume(dtype in ("float32", "float64"))
        hypothesis.assume(expected.routing.scores.max(initial=0) < 50)

    def call(*inputs: Any) -> Any:
        results = layer(
            *inputs,
            **case.masks,
            **case.call,
            return_attention_scores=True,
            return_routing=True,
            training=True,
        )
        return *results, layer.losses

    float_dtype = "float64" if dtype == "float64" else "float32"
    inputs = [ops.convert_to_tensor(x, float_dtype) for x in case.inputs]
    output, scores, routing, losses = compiled(call, *inputs)

    tolerance = TOLERANCES[dtype]
    assert keras.backend.standardize_dtype(output.dtype) == layer.compute_dtype
    assert_close(output, expected.output, tolerance, "output")
    assert_close(scores, expected.scores, tolerance, "scores")

    # Whatever the dtype policy: heads, gates and losses are of full precision.
    precise = TOLERANCES[float_dtype]
    assert keras.backend.standardize_dtype(routing.gates.dtype) == float_dtype
    # How a padded token would be routed is nobody's business.
    valid = case.masks.get("query_mask", np.ones(case.shapes[0][:2], bool))
    check_routing(routing, expected.routing, precise, valid)
    if layer.top_k:
        balance_loss, z_loss = losses
        assert_close(balance_loss, expected.balance_loss, precise, "balance loss")
        assert_close(z_loss, expected.z_loss, precise, "z loss")
    else:
        assert losses == []


@hypothesis.settings(max_examples=EXAMPLES)
@hypothesis.given(cases())
def test_layer_in_float32(case: Case) -> None:
    check_layer(case, "float32")


@pytest.mark.parametrize("dtype", ["mixed_bfloat16", "mixed_float16"])
@hypothesis.settings(max_examples=EXAMPLES // 2)
@hypothesis.given(cases())
def test_layer_in_half_precision(dtype: str, case: Case) -> None:
    check_layer(case, dtype)


@pytest.mark.float64
@hypothesis.settings(max_examples=EXAMPLES)
@hypothesis.given(cases())
def test_layer_in_float64(case: Case) -> None:
    check_layer(case, "float64")


def test_groups_of_heads_in_inputs_of_rank_4() -> None:
    layer = moh_attention(attention_axes=2, routing_groups=2, z_loss_weight=1.0)
    x = floats(2, 3, 5, 11)
    layer.build(x.shape)
    weights = {name: to_numpy(weight) for name, weight in weights_by_name(layer).items()}
    expected = oracle.layer(
        weights, x.reshape(6, 5, 11), num_shared_heads=2, top_k=2, routing_groups=2
    )
    assert expected.routing.margin > ROUTER_MARGIN

    def call(x: Any) -> Any:
        return *layer(x, return_routing=True, training=True), layer.losses

    output, routing, (balance_loss, z_loss) = compiled(call, ops.convert_to_tensor(x))
    tolerance = TOLERANCES["float32"]
    assert_close(output, expected.output.reshape(x.shape), tolerance, "output")
    routing = keras_moh.Routing(*(ops.reshape(part, (6, 5, -1)) for part in routing))
    check_routing(routing, expected.routing, tolerance)
    assert_close(balance_loss, 0.01 * expected.balance_loss, tolerance, "balance loss")
    assert_close(z_loss, expected.z_loss, tolerance, "z loss")


@pytest.mark.xfail(
    keras.backend.backend() == "tensorflow",
    reason="Keras's ops.add takes the bias (H, 1) for one of channels, and adds it along axis 1",
    strict=True,
)
def test_heads_of_width_1() -> None:
    """As many queries as heads of width 1: a bias `(H, 1)` might be taken for one `(T,)`."""
    layer = moh_attention(key_dim=1)
    x = floats(2, layer.num_heads, 5)
    layer.build(x.shape)
    weights = {name: to_numpy(weight) for name, weight in weights_by_name(layer).items()}
    expected = oracle.layer(weights, x, num_shared_heads=2, top_k=2)
    assert_close(layer(x), expected.output, TOLERANCES["float32"], "output")


# The router, at the limits of its arguments: (H, H_s, k, r).
ROUTERS = [
    (1, 1, 0, 1),  # a single shared head
    (1, 0, 1, 1),  # a single candidate
    (5, 5, 0, 1),  # all shared
    (5, 0, 1, 1),
    (5, 0, 5, 1),  # all candidates taken
    (5, 1, 1, 1),  # one shared head has no scores
    (5, 1, 4, 1),
    (5, 4, 1, 1),  # one candidate beside shared heads
    (7, 3, 2, 1),
    (13, 2, 5, 1),
    *((24, 6, 12, r) for r in (1, 2, 3, 6)),  # in every number of groups
    (6, 6, 0, 3),  # all shared
    (12, 0, 4, 2),  # none shared
    (12, 0, 4, 4),  # one of three in each group
    (9, 3, 6, 3),  # all candidates taken
    (6, 0, 6, 6),  # a group for every head
    (10, 2, 6, 2),
]


def random_router(x: np.ndarray, *arguments: int, dtype: str = "float32") -> Any:
    """A router built for `x`, of arguments `(H, H_s, k, r)`, and its weights by name."""
    num_heads, num_shared_heads, top_k, routing_groups = arguments
    router = keras_moh.TwoStageRouter(
        num_heads, num_shared_heads, top_k, routing_groups=routing_groups, dtype=dtype
    )
    router.build(x.shape)
    weights = {
        name: 0.25 * floats(*weight.shape, seed=index)
        for index, (name, weight) in enumerate(weights_by_name(router).items())
    }
    set_weights_by_name(router, weights)
    return router, weights


def check_router(arguments: tuple[int, int, int, int], dtype: str) -> None:
    num_heads, num_shared_heads, top_k, routing_groups = arguments
    x = floats(2, 3, 11, seed=num_heads)
    router, weights = random_router(x, *arguments, dtype=dtype)
    expected = oracle.route(x.astype("float64"), weights, *arguments)
    routing = compiled(router, ops.convert_to_tensor(x, dtype))

    assert expected.margin > ROUTER_MARGIN
    assert routing.heads.shape == (2, 3, num_shared_heads + top_k)
    assert routing.probabilities.shape == (2, 3, num_heads - num_shared_heads)
    check_routing(routing, expected, TOLERANCES[dtype])
    groups = oracle.heads_by_group(num_heads, num_shared_heads, routing_groups)
    assert router.shared_heads == tuple(h for shared, _ in groups for h in shared)
    assert router.routed_heads == tuple(h for _, routed in groups for h in routed)


@pytest.mark.parametrize("arguments", ROUTERS, ids=str)
def test_router_in_float32(arguments: tuple[int, int, int, int]) -> None:
    check_router(arguments, "float32")


@pytest.mark.float64
@pytest.mark.parametrize("arguments", ROUTERS, ids=str)
def test_router_in_float64(arguments: tuple[int, int, int, int]) -> None:
    check_router(arguments, "float64")


@pytest.mark.parametrize("shape", [(7, 11), (2, 3, 5, 11), (2, 0, 11)], ids=str)
def test_router_in_groups_of_inputs_of_any_rank(shape: tuple[int, ...]) -> None:
    x = floats(*shape)
    router, weights = random_router(x, 12, 3, 6, 3)
    expected = oracle.route(x.astype("float64"), weights, 12, 3, 6, 3)
    routing = compiled(router, ops.convert_to_tensor(x))
    assert expected.margin > ROUTER_MARGIN
    assert routing.heads.shape == (*shape[:-1], 9)
    check_routing(routing, expected, TOLERANCES["float32"])


@pytest.mark.parametrize("routing_groups", [1, 3])
@pytest.mark.parametrize("top_k", [1, 3, 8, 17])
@pytest.mark.parametrize("distinct", [1, 2, 3])
def test_equal_probabilities_take_the_lowest_heads(
    top_k: int, distinct: int, routing_groups: int
) -> None:
    """Candidates in `distinct` classes of equal kernels: all tie, or many at the boundary do."""
    E, D, r = 18, 5, routing_groups
    arguments = (r * (E + 1), r, r * top_k, r)
    router = keras_moh.TwoStageRouter(*arguments[:3], routing_groups=r)
    x = floats(3, 7, D)
    router.build(x.shape)
    weights = {
        "routed_scores/kernel": floats(D, distinct, seed=1)[:, np.arange(r * E) % distinct],
        "group_scores/kernel": floats(D, 2, seed=2),
    }
    if r > 1:
        weights["shared_scores/kernel"] = floats(D, r, seed=3)
    set_weights_by_name(router, weights)
    expected = oracle.route(x.astype("float64"), weights, *arguments)
    routing = compiled(router, ops.convert_to_tensor(x))

    assert expected.margin == 0
    taken = np.nonzero(expected.taken)[-1].reshape(3, 7, r * (top_k + 1))
    np.testing.assert_array_equal(to_numpy(routing.heads), taken)
    if distinct == 1:
        lowest = (np.arange(r)[:, None] * (E + 1) + np.arange(top_k + 1)).ravel()
        np.testing.assert_array_equal(taken, np.broadcast_to(lowest, taken.shape))


@pytest.mark.parametrize("valid", [None, "some", "none"])
def test_losses(valid: str | None) -> None:
    scores = floats(2, 5, 7)
    probabilities = oracle.softmax(scores).astype("float32")
    taken = np.argsort(np.argsort(-scores, kind="stable", axis=-1), axis=-1) < 3
    mask = {None: None, "some": np.arange(5) < [[2], [4]], "none": np.zeros((2, 5), bool)}[valid]

    balance_loss = keras_moh.load_balancing_loss(probabilities, taken, mask)
    z_loss = keras_moh.router_z_loss(scores, mask)

    assert_close(
        balance_loss, oracle.load_balancing_loss(probabilities, taken, mask), 1e-6, "balance loss"
    )
    assert_close(z_loss, oracle.router_z_loss(scores, mask), 1e-6, "z loss")
    if valid == "none":
        assert float(balance_loss) == float(z_loss) == 0


def check_query_norm_router(arguments: tuple[int, int, int, int], dtype: str) -> None:
    num_heads, *_, routing_groups = arguments
    query = floats(2, 3, num_heads, 5, seed=num_heads)
    router = keras_moh.QueryNormRouter(*arguments[:3], routing_groups=routing_groups, dtype=dtype)
    expected = oracle.route_by_query_norm(query.astype("float64"), *arguments[1:])
    x = ops.ones((2, 3, 11), dtype=dtype)
    routing, scores = compiled(
        lambda query: router(x, query=query, return_scores=True),
        ops.convert_to_tensor(query, dtype),
    )
    assert expected.margin > ROUTER_MARGIN
    assert router.weights == []
    check_routing(routing, expected, TOLERANCES[dtype])
    assert_close(scores, expected.scores, TOLERANCES[dtype], "scores")
    # Exactly: the heads not taken have no gate, and those taken are as they were.
    assert (to_numpy(routing.gates) == 1).all()


@pytest.mark.parametrize("arguments", ROUTERS, ids=str)
def test_query_norm_router_in_float32(arguments: tuple[int, int, int, int]) -> None:
    check_query_norm_router(arguments, "float32")


@pytest.mark.float64
@pytest.mark.parametrize("arguments", ROUTERS, ids=str)
def test_query_norm_router_in_float64(arguments: tuple[int, int, int, int]) -> None:
    check_query_norm_router(arguments, "float64")


QUERIES = {
    "equal": np.ones((1, 1, 1)),
    "equal but for rounding": 1 + 1e-7 * np.arange(6)[:, None],
    "zero": np.zeros((6, 1)),
    "all but one zero": 1.0 * (np.arange(6) == 4)[:, None],
    "tiny": 1e-15 * (1 + np.arange(6)[:, None] % 3),
    "huge": 1e18 * (1 + np.arange(6)[:, None] % 3),
}


@pytest.mark.parametrize("top_k", [1, 2, 4])
@pytest.mark.parametrize("name", QUERIES)
def test_query_norm_router_where_lengths_say_little(name: str, top_k: int) -> None:
    query = np.broadcast_to(QUERIES[name], (2, 3, 6, 5)).astype("float32")
    router = keras_moh.QueryNormRouter(6, 2, top_k)
    x = ops.ones((2, 3, 11))

    def loss(query: Any) -> Any:
        routing, scores = router(x, query=query, return_scores=True)
        weighted = ops.sum(routing.gates * ops.arange(2 + top_k, dtype="float32"))
        return weighted + ops.sum(ops.square(scores)), [*routing]

    _, (by_query,), _, (heads, gates, probabilities) = gradients(loss, [query])
    assert np.isfinite(by_query).all()
    assert (gates == 1).all()
    np.testing.assert_allclose(probabilities.sum(axis=-1), 1, rtol=1e-6)
    if "equal" in name or name == "zero":
        np.testing.assert_allclose(probabilities, 0.25, rtol=1e-5)
    if name in ("equal", "zero"):
        np.testing.assert_array_equal(heads, np.broadcast_to(np.arange(2 + top_k), heads.shape))
    if name in ("all but one zero", "tiny", "huge"):
        lengths = np.broadcast_to(QUERIES[name], (6, 5))[:, 0]
        best = np.argsort(-lengths[2:], kind="stable")[:top_k] + 2
        taken = np.array([0, 1, *sorted(best)])
        np.testing.assert_array_equal(heads, np.broadcast_to(taken, heads.shape))


# Layers and calls that have every parameter between them, to differentiate.
B, T, S, D = 2, 3, 5, 7
PLAIN = {"num_heads": 5, "key_dim": 3, "balance_loss_weight": 0.5, "z_loss_weight": 0.25}
GRADIENT_CASES = {
    "shared and routed heads, causal": Case(
        {**PLAIN, "router": "two_stage", "num_shared_heads": 2, "top_k": 2},
        ((B, T, D),),
        {},
        1.0,
        {"use_causal_mask": True},
        seed=11,
    ),
    "one shared head, layer norm, groups, cross-attention, padding": Case(
        {
            **PLAIN,
            "router": "two_stage",
            "num_heads": 4,
            "num_key_value_heads": 2,
            "num_shared_heads": 1,
            "top_k": 2,
            "key_dim": 5,
            "value_dim": 3,
            "qk_norm": True,
        },
        ((B, T, D), (B, S, 2), (B, S, 1)),
        {"query_mask": (B, T), "value_mask": (B, S), "key_mask": (B, S)},
        0.8,
        {},
        seed=12,
    ),
    "routed heads only, RMS norm, one key/value head, window": Case(
        {
            **PLAIN,
            "router": "two_stage",
            "num_key_value_heads": 1,
            "num_shared_heads": 0,
            "top_k": 3,
            "qk_norm": "rms",
            "output_shape": (3, 2),
            "sliding_window": 2,
            "key_dim": 4,
            "rotary_embedding": rotary_embedding(),
        },
        ((B, T, D), (B, S, D)),
        {},
        1.0,
        {},
        seed=13,
    ),
    "shared heads only, rows without a key": Case(
        {**PLAIN, "router": "two_stage", "num_shared_heads": 5, "top_k": 0, "use_bias": False},
        ((B, T, D), (B, S, D)),
        {"attention_mask": (B, 5, T, S)},
        0.2,
        {},
        seed=14,
    ),
    "groups of heads": Case(
        {
            **PLAIN,
            "router": "two_stage",
            "num_heads": 6,
            "num_key_value_heads": 2,
            "num_shared_heads": 2,
            "top_k": 2,
            "routing_groups": 2,
        },
        ((B, T, D),),
        {"query_mask": (B, T)},
        0.8,
        {},
        seed=16,
    ),
    "groups of heads, none shared": Case(
        {
            **PLAIN,
            "router": "two_stage",
            "num_heads": 6,
            "num_shared_heads": 0,
            "top_k": 3,
            "routing_groups": 3,
            "use_bias": False,
        },
        ((B, T, D),),
        {},
        1.0,
        {},
        seed=17,
    ),
    "query norm": Case(
        {**PLAIN, "router": "query_norm", "num_shared_heads": 2, "top_k": 2},
        ((B, T, D),),
        {"query_mask": (B, T)},
        0.8,
        {"use_causal_mask": True},
        seed=18,
    ),
    "query norm, groups, no head shared, RMS norm": Case(
        {
            **PLAIN,
            "router": "query_norm",
            "num_heads": 6,
            "num_key_value_heads": 2,
            "num_shared_heads": 0,
            "top_k": 2,
            "routing_groups": 2,
            "qk_norm": "rms",
            "key_dim": 6,
            "rotary_embedding": rotary_embedding(),
        },
        ((B, T, D), (B, S, D)),
        {},
        1.0,
        {},
        seed=19,
    ),
    "query norm, one candidate": Case(
        {**PLAIN, "router": "query_norm", "num_shared_heads": 4, "top_k": 1},
        ((B, T, D),),
        {},
        1.0,
        {},
        seed=20,
    ),
    "query norm, every candidate taken": Case(
        {**PLAIN, "router": "query_norm", "num_shared_heads": 1, "top_k": 4},
        ((B, T, D),),
        {},
        1.0,
        {},
        seed=21,
    ),
    "no router": Case(
        {**PLAIN, "router": None, "z_loss_weight": 0.0, "num_shared_heads": None, "top_k": None},
        ((B, T, D), (B, S, D)),
        {"attention_mask": (T, S)},
        0.5,
        {},
        seed=15,
    ),
}


@functools.cache
def differences(name: str) -> dict[str, np.ndarray]:
    """Central differences of the oracle's loss, by every entry of every weight and input."""
    case = GRADIENT_CASES[name]
    layer = case.layer("float32")
    point = {n: to_numpy(weight).astype("float64") for n, weight in weights_by_name(layer).items()}
    point |= {f"input {i}": x.astype("float64") for i, x in enumerate(case.inputs)}
    routing = case.expected(layer).routing
    constants: dict[str, Any] = {}
    if layer.top_k:
        valid = case.masks.get("query_mask", np.ones((B, T), bool))
        constants["fraction"] = routing.chosen[valid].mean(axis=0)
    if case.arguments["router"] == "query_norm":
        constants["constants"] = (routing.chosen, routing.probabilities)

    def loss() -> float:
        weights = {n: array for n, array in point.items() if not n.startswith("input")}
        inputs = [array for n, array in point.items() if n.startswith("input")]
        expected = case.expected(layer, inputs, constants, **weights)
        np.testing.assert_array_equal(expected.routing.taken, routing.taken)
        losses = 0.5 * expected.balance_loss + 0.25 * expected.z_loss
        return float((expected.output * cotangent(expected.output.shape)).sum() + losses)

    step = 1e-5
    derivatives = {}
    for n, array in point.items():
        derivatives[n] = np.zeros_like(array)
        for index in np.ndindex(array.shape):
            here, values = array[index], []
            for x in (here + step, here - step):
                array[index] = x
                values.append(loss())
            array[index] = here
            derivatives[n][index] = (values[0] - values[1]) / (2 * step)
    return derivatives


def cotangent(shape: tuple[int, ...]) -> np.ndarray:
    return floats(*shape, seed=99)


def check_gradients(name: str, dtype: str, tolerance: float) -> None:
    case, expected = GRADIENT_CASES[name], differences(name)
    layer = case.layer(dtype)

    def loss(*inputs: Any) -> Any:
        output = layer(*inputs, **case.masks, **case.call, training=True)
        weights = ops.convert_to_tensor(cotangent(output.shape), dtype)
        return ops.sum(output * weights) + sum(layer.losses)

    inputs = [ops.convert_to_tensor(x, dtype) for x in case.inputs]
    _, by_inputs, by_weights, _ = gradients(loss, inputs, layer)
    actual = by_weights | {f"input {i}": gradient for i, gradient in enumerate(by_inputs)}
    assert set(actual) == set(expected)
    for parameter, gradient in actual.items():
        assert_close(gradient, expected[parameter], tolerance, parameter)


@pytest.mark.parametrize("name", GRADIENT_CASES)
def test_gradients_in_float32(name: str) -> None:
    check_gradients(name, "float32", tolerance=2e-5)


@pytest.mark.float64
@pytest.mark.parametrize("name", GRADIENT_CASES)
def test_gradients_in_float64(name: str) -> None:
    check_gradients(name, "float64", tolerance=1e-8)


def test_gradients_cover_every_parameter() -> None:
    names = set().union(*(differences(name) for name in GRADIENT_CASES))
    projections = ("query", "key", "value", "attention_output")
    assert names >= {f"{name}/{kind}" for name in projections for kind in ("kernel", "bias")}
    assert names >= {
        f"{name}_norm/{kind}" for name in ("query", "key") for kind in ("gamma", "beta")
    }
    assert names >= {"query_norm/scale", "key_norm/scale"}
    routers = ("routed_scores", "shared_scores", "group_scores")
    assert names >= {f"router/{name}/kernel" for name in routers}
    assert names >= {"input 0", "input 1", "input 2"}


@pytest.mark.parametrize("dtype", ["float32", "mixed_bfloat16", "mixed_float16"])
def test_gradients_are_finite_where_no_key_is_left(dtype: str) -> None:
    layer = moh_attention(qk_norm=True, dtype=dtype)
    x = floats(2, 5, 11)
    layer.build(x.shape)
    mask = np.zeros((2, 5, 5), bool)
    mask[1, 3:, :2] = True

    def loss(x: Any) -> Any:
        return ops.sum(ops.cast(layer(x, attention_mask=mask, training=True), "float32"))

    _, (by_x,), by_weights, _ = gradients(loss, [x], layer)
    for name, gradient in {"x": by_x, **by_weights}.items():
        assert np.isfinite(gradient).all(), name
    # The first sequence has no key at all: no value of it reaches any output.
    assert (by_x[0] == 0).all()
    assert (by_x[1] != 0).any()


@pytest.mark.parametrize(("top_k", "learns"), [(1, False), (2, True)])
def test_task_loss_teaches_the_routed_scores_only_with_two_heads(top_k: int, learns: bool) -> None:
    layer = moh_attention(top_k=top_k)
    x = floats(2, 5, 11)
    layer.build(x.shape)

    _, _, of_task, _ = gradients(lambda x: ops.sum(layer(x, training=True) ** 2), [x], layer)
    _, _, of_balance, _ = gradients(
        lambda x: (layer(x, training=True), sum(layer.losses))[1], [x], layer
    )

    kernel = "router/routed_scores/kernel"
    # With one head the renormalised gate p / p is 1, up to rounding, whatever the scores are.
    size = np.abs(of_task[kernel]).max() / np.abs(of_task["router/group_scores/kernel"]).max()
    assert size > 1e-2 if learns else size < 1e-5
    assert np.abs(of_balance[kernel]).max() > 1e-5
    assert np.abs(of_balance["query/kernel"]).max() == 0
