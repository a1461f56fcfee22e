"""Routing is exact whatever the precision of the rest, and the same wherever it is computed."""

import keras
import numpy as np
import pytest
from helpers import compiled, to_numpy, weights_by_name
from keras import ops
from samples import B, D, S, T, floats, moh_attention

from keras_moh import TwoStageRouter

FLOAT64 = pytest.param("float64", marks=pytest.mark.float64)
# Policies of low precision, with how far the outputs may be from those in float32, relative to the
# largest: some 8 roundings (inputs, kernels, 3 projections, scores, sum, output) of half a unit.
UNIT = {"float16": 2.0**-10, "bfloat16": 2.0**-7}
LOW = {
    "mixed_float16": UNIT["float16"],
    "mixed_bfloat16": UNIT["bfloat16"],
    "float16": UNIT["float16"],
    "bfloat16": UNIT["bfloat16"],
}


def dtype_of(x):
    return keras.backend.standardize_dtype(x.dtype)


@pytest.mark.parametrize("policy", ["float32", *LOW, FLOAT64])
def test_dtypes(policy):
    layer = moh_attention(dtype=policy, qk_norm=True)
    output, scores, routing = layer(
        floats(B, T, D), return_attention_scores=True, return_routing=True
    )
    dtypes = keras.DTypePolicy(policy)
    assert dtype_of(output) == dtype_of(scores) == dtypes.compute_dtype
    exact = "float64" if policy == "float64" else "float32"
    assert [dtype_of(x) for x in routing] == ["int32", exact, exact]
    assert {dtype_of(weight) for weight in layer.router.weights} == {exact}
    others = [weight for weight in layer.weights if "/router/" not in weight.path]
    assert {dtype_of(weight) for weight in others} == {dtypes.variable_dtype}


@pytest.mark.parametrize(("policy", "unit"), LOW.items())
def test_close_to_float32_with_the_same_routing(policy, unit):
    query, value = floats(B, T, D), floats(B, S, D, seed=1)
    expected, expected_routing = moh_attention()(query, value, return_routing=True)
    output, routing = moh_attention(dtype=policy)(query, value, return_routing=True)
    for x, y in zip(routing, expected_routing, strict=True):
        np.testing.assert_array_equal(to_numpy(x), to_numpy(y))
    error = np.abs(to_numpy(output) - to_numpy(expected)).max() / np.abs(to_numpy(expected)).max()
    assert unit / 64 < error < 4 * unit


@pytest.mark.parametrize("policy", [*LOW])
def test_router_sees_differences_that_the_compute_dtype_does_not(policy):
    """Scores 1 and 1 + 2^-12 are one number in float16, where the lower head would win the tie."""
    router = TwoStageRouter(3, 1, 1, dtype=policy)
    router.build((None, None, 2))
    router.routed_scores.kernel.assign([[1.0, 1.0], [0.0, 2.0**-12]])
    heads, gates, probabilities = router(np.ones((1, 1, 2), "float32"))
    assert to_numpy(heads).tolist() == [[[0, 2]]]
    assert dtype_of(gates) == dtype_of(probabilities) == "float32"
    first, second = to_numpy(probabilities)[0, 0]
    np.testing.assert_allclose(second - first, 2.0**-13, rtol=1e-3)


@pytest.mark.float64
def test_float64_is_float64_throughout():
    """Rounding to float32 anywhere would show: results agree with NumPy's to 1e-13."""
    layer = moh_attention(dtype="float64", router=None, num_shared_heads=None, top_k=None)
    query, value = floats(B, T, D).astype("float64") / 3, floats(B, S, D, seed=1) / 3.0
    layer.build(query.shape, value.shape)
    weights = {name: to_numpy(weight) for name, weight in weights_by_name(layer).items()}
    q, k, v = (
        np.einsum("btd,dhe->bthe", x.astype("float64"), weights[f"{name}/kernel"])
        + weights[f"{name}/bias"]
        for name, x in (("query", query), ("key", value), ("value", value))
    )
    scores = np.exp(np.einsum("bthe,bshe->bhts", q, k) / np.sqrt(3))
    heads = np.einsum("bhts,bshe->bthe", scores / scores.sum(-1, keepdims=True), v)
    expected = np.einsum("bthe,hed->btd", heads, weights["attention_output/kernel"])
    expected += weights["attention_output/bias"]
    found = to_numpy(layer(query, value))
    assert found.dtype == "float64"
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-13)


@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16", FLOAT64])
def test_repeated_calls_are_equal_to_the_last_bit(policy):
    layer = moh_attention(dtype=policy)
    x = ops.convert_to_tensor(floats(17, T, D))
    layer.build(x.shape)
    first, *others = [
        [to_numpy(result) for result in keras.tree.flatten(layer(x, return_routing=True))]
        for _ in range(5)
    ]
    for results in others:
        for result, expected in zip(results, first, strict=True):
            np.testing.assert_array_equal(result, expected)


@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16", FLOAT64])
@pytest.mark.parametrize("num_candidates", [4, 37])
def test_ties_go_to_the_lowest_heads(policy, num_candidates):
    """Also far beyond the lengths up to which sorting happens to be stable, and when compiled."""
    router = TwoStageRouter(num_candidates + 2, 2, 3, dtype=policy)
    x = ops.convert_to_tensor(floats(B, T, D), router.compute_dtype)
    router.build(x.shape)
    router.routed_scores.kernel.assign(np.zeros((D, num_candidates)))
    for route in (router, lambda x: compiled(router, x)):
        heads = to_numpy(route(x).heads)
        np.testing.assert_array_equal(heads, np.broadcast_to([0, 1, 2, 3, 4], heads.shape))

    # Two levels: the odd candidates are all above the even ones.
    router.routed_scores.kernel.assign(np.tile(np.arange(num_candidates) % 2, (D, 1)))
    heads = to_numpy(router(ops.ones_like(x)).heads)
    expected = [0, 1, 2, 3, 5] if num_candidates == 4 else [0, 1, 3, 5, 7]
    np.testing.assert_array_equal(heads, np.broadcast_to(expected, heads.shape))


def test_heads_are_ascending_and_gates_go_with_them():
    layer = moh_attention(num_heads=13, num_shared_heads=2, top_k=5)
    x = floats(17, T, D)
    _, (heads, gates, probabilities) = layer(x, return_routing=True)
    heads, gates, probabilities = map(to_numpy, (heads, gates, probabilities))
    assert (np.diff(heads, axis=-1) > 0).all()
    assert (heads[..., :2] == [0, 1]).all()
    # Up to the factors common to the routed heads of a token, the gates are the probabilities.
    kept = np.take_along_axis(probabilities, heads[..., 2:] - 2, -1)
    ratio = gates[..., 2:] / kept
    np.testing.assert_allclose(ratio, np.broadcast_to(ratio[..., :1], ratio.shape), rtol=1e-5)
    others = np.sort(probabilities, -1)[..., :-5].max(-1)
    assert (kept.min(-1) >= others).all()
