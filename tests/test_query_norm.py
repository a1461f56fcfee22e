"""`QueryNormRouter` in the layer: what it is given, what learns, what it costs.

That its numbers are right is for `test_oracle.py`, `test_goldens.py` and
`test_layer_implementations.py`.
"""

from typing import Any

import keras
import numpy as np
import pytest
from keras import ops

import keras_moh
from keras_moh import MoHAttention, QueryNormRouter, Router
from tests.helpers import gradients, to_numpy
from tests.samples import ARGUMENTS, B, D, T, floats, moh_attention

H, d = ARGUMENTS["num_heads"], ARGUMENTS["key_dim"]


@pytest.mark.parametrize("qk_norm", [False, True, "rms"])
def test_the_longest_queries_are_taken_before_normalization(qk_norm: bool | str) -> None:
    layer, x = moh_attention(router="query_norm", qk_norm=qk_norm), floats(B, T, D)
    _, routing = layer(x, return_routing=True)
    lengths = np.linalg.norm(to_numpy(layer.query_dense(ops.convert_to_tensor(x))), axis=-1)
    longest = np.argsort(-lengths[..., 2:], axis=-1)[..., :2] + 2
    np.testing.assert_array_equal(to_numpy(routing.heads)[..., 2:], np.sort(longest, axis=-1))
    np.testing.assert_array_equal(to_numpy(routing.gates), 1)


def test_no_weights_and_the_gradient_of_the_gates() -> None:
    """What the outputs of a head are worth reaches its query by the gate as well."""
    layer, x = moh_attention(router="query_norm"), floats(B, 1, D)
    layer.build(x.shape)
    assert layer.router.weights == []
    # Over a single key the softmax is 1: only a gate tells the query anything.
    _, _, by_weights, _ = gradients(lambda x: ops.sum(layer(x) ** 2), [x], layer)
    by_heads = np.abs(by_weights["query/kernel"]).max(axis=(0, 2))
    assert (by_heads[:2] < 1e-6).all()
    assert by_heads[2:].max() > 1e-2


def test_losses_under_masks() -> None:
    layer = moh_attention(router="query_norm", z_loss_weight=0.5, balance_loss_weight=0.25)
    x, mask = floats(B, T, D), np.array([[True] * 3 + [False] * 2, [True] * 5])
    _, routing = layer(x, query_mask=mask, training=True, return_routing=True)
    balance_loss, z_loss = map(to_numpy, layer.losses)

    heads, probabilities = to_numpy(routing.heads)[mask], to_numpy(routing.probabilities)[mask]
    fraction = np.bincount(heads[:, 2:].ravel(), minlength=H)[2:] / len(heads)
    np.testing.assert_allclose(balance_loss, 0.25 * 4 * probabilities.mean(0) @ fraction, rtol=1e-5)
    lengths = np.linalg.norm(to_numpy(layer.query_dense(ops.convert_to_tensor(x)))[mask], axis=-1)
    scores = lengths[:, 2:] / lengths[:, 2:].std(axis=-1, ddof=1, keepdims=True)
    z = np.log(np.exp(scores).sum(axis=-1)) ** 2
    np.testing.assert_allclose(z_loss, 0.5 * z.mean(), rtol=1e-5)

    # What a padded token holds is nobody's business, infinities included.
    x[0, 3:] = np.inf
    output = layer(x, query_mask=mask, training=True)
    assert np.isfinite(to_numpy(output)).all()
    np.testing.assert_allclose([*map(to_numpy, layer.losses)], [balance_loss, z_loss], rtol=1e-6)


def test_it_trains() -> None:
    model = keras.Sequential([keras.Input((None, D)), moh_attention(router="query_norm")])
    model.compile(keras.optimizers.Adam(0.01), "mse")
    x = floats(4, T, D)
    history = model.fit(x, x, epochs=6, verbose=0).history["loss"]
    assert history[-1] < 0.9 * history[0]


@pytest.mark.parametrize("return_scores", [False, True])
@pytest.mark.parametrize("leading", [(B,), (B, T), (B, 3, T)], ids=str)
def test_router_alone(leading: tuple[int, ...], return_scores: bool) -> None:
    router = QueryNormRouter(H, 2, 2)
    x, query = floats(*leading, D), floats(*leading, H, d, seed=1)
    symbolic = router(
        keras.Input(batch_shape=x.shape),
        query=keras.Input(batch_shape=query.shape),
        return_scores=return_scores,
    )
    eager = router(x, query=query, return_scores=return_scores)
    for one, other in zip(keras.tree.flatten(symbolic), keras.tree.flatten(eager), strict=True):
        assert one.shape == tuple(other.shape)
        assert one.dtype == keras.backend.standardize_dtype(other.dtype)


@pytest.mark.parametrize("shape", [None, (B, T, H + 1, d), (B, T + 1, H, d), (B, T, H * d)])
def test_router_refuses_other_queries(shape: tuple[int, ...] | None) -> None:
    query = {} if shape is None else {"query": floats(*shape)}
    with pytest.raises((ValueError, TypeError), match="query"):
        QueryNormRouter(H, 2, 2)(floats(B, T, D), **query)


def test_a_router_of_ones_own_that_needs_queries() -> None:
    class FirstFeature(Router):
        """It takes the heads whose queries have the largest first feature."""

        needs_query = True

        def call(self, inputs: Any, query: Any) -> keras_moh.Routing:
            order = ops.argsort(-query[..., 0], axis=-1)[..., : self.num_active_heads]
            heads = ops.sort(ops.cast(order, "int32"), axis=-1)
            gates = ops.ones_like(heads, dtype=query.dtype)
            return keras_moh.Routing(heads, gates, ops.softmax(query[..., 0]))

    router = FirstFeature(H, num_shared_heads=0, top_k=2)
    layer = MoHAttention(H, d, router=router, balance_loss_weight=0.0)
    x = ops.convert_to_tensor(floats(B, T, D))
    _, routing = layer(x, return_routing=True)
    expected = np.argsort(-to_numpy(layer.query_dense(x))[..., 0], axis=-1)[..., :2]
    np.testing.assert_array_equal(to_numpy(routing.heads), np.sort(expected, axis=-1))
    symbolic = layer(keras.Input((T, D)), return_routing=True)[1]
    assert symbolic.heads.shape == (None, T, 2)


def test_flops_of_all_queries() -> None:
    """All heads are asked how long their queries are; no router has weights to count."""
    shapes = {"num_heads": 4, "key_dim": 3, "num_shared_heads": 1, "top_k": 1}
    counts = []
    for router in ("two_stage", "query_norm"):
        layer = MoHAttention(**shapes, router=router)
        layer.build((None, None, 7))
        counts.append(keras_moh.attention_flops(layer, 2, 5))
    two_stage, query_norm = counts
    assert query_norm.active.query == query_norm.dense.query == 2 * two_stage.active.query
    assert query_norm.active.output == two_stage.active.output == query_norm.dense.output / 2
    assert query_norm.active.router == 0
