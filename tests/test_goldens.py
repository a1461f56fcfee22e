"""The authors' own numbers (see `goldens/README.md`) through `MoHAttention`."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from keras import ops

import keras_moh
from tests.helpers import compiled, gradients, set_weights_by_name, to_numpy

FILES = sorted(Path(__file__).parent.joinpath("goldens", "dit_attention").glob("*.npz"))
OURS = {
    "proj.bias": "attention_output/bias",
    "wg.weight": "router/routed_scores/kernel",
    "wg_0.weight": "router/group_scores/kernel",
    "wg_1.weight": "router/shared_scores/kernel",
    "q_norm.weight": "query_norm/gamma",
    "q_norm.bias": "query_norm/beta",
    "k_norm.weight": "key_norm/gamma",
    "k_norm.bias": "key_norm/beta",
}


class Case:
    """One golden file, with arrays by weights' names and in the layouts of this package."""

    def __init__(self, path: Path) -> None:
        self.arrays = dict(np.load(path))
        self.meta = json.loads(str(self.arrays.pop("meta")))
        self.num_heads = self.meta["num_heads"]
        self.key_dim = self.meta["effective_head_dim"]
        self.has_routed_heads = self.meta["routed_head"] > 0

    def weights(self, prefix: str) -> dict[str, np.ndarray]:
        """The arrays `<prefix><name>` of all parameters: the weights, or their gradients."""
        weights = {}
        for key, array in self.arrays.items():
            if key.startswith(prefix):
                weights.update(self._in_our_layout(key.removeprefix(prefix), array))
        return weights

    def _in_our_layout(self, name: str, array: np.ndarray) -> dict[str, np.ndarray]:
        heads = (self.num_heads, self.key_dim)
        if name.startswith("qkv"):
            parts = array.reshape(3, *heads, *array.shape[1:])
            if name == "qkv.weight":
                parts = np.moveaxis(parts, -1, 1)
            kind = name.replace("qkv.weight", "kernel").replace("qkv.bias", "bias")
            return {
                f"{n}/{kind}": part
                for n, part in zip(("query", "key", "value"), parts, strict=True)
            }
        if name == "proj.weight":
            return {"attention_output/kernel": array.T.reshape(*heads, -1)}
        return {OURS[name]: array.T}

    def layer(self, dtype: str) -> keras_moh.MoHAttention:
        layer = keras_moh.MoHAttention(
            self.num_heads,
            self.key_dim,
            num_shared_heads=self.meta["shared_head"],
            top_k=self.meta["routed_head"],
            qk_norm=self.meta["qk_norm"],
            balance_loss_weight=0.01,
            dtype=dtype,
        )
        layer.build(self.arrays["in/x"].shape)
        weights = self.weights("param/")
        if not self.meta["qkv_bias"]:
            zeros = np.zeros((self.num_heads, self.key_dim))
            weights.update({f"{name}/bias": zeros for name in ("query", "key", "value")})
        set_weights_by_name(layer, weights)
        return layer


def gates_of_all_heads(routing: keras_moh.Routing, num_heads: int) -> np.ndarray:
    heads, gates = to_numpy(routing.heads), to_numpy(routing.gates)
    dense = np.zeros((*heads.shape[:2], num_heads), gates.dtype)
    np.put_along_axis(dense, heads, gates, axis=-1)
    return dense


@pytest.fixture(params=FILES, ids=lambda path: path.stem)
def case(request: pytest.FixtureRequest) -> Case:
    return Case(request.param)


def check_forward(case: Case, dtype: str, tolerance: float, loss_tolerance: float) -> None:
    layer = case.layer(dtype)
    x = ops.convert_to_tensor(case.arrays["in/x"], dtype)

    def call(x: Any) -> Any:
        output, routing = layer(x, return_routing=True)
        return output, routing, layer(x, training=True), layer.losses

    output, routing, trained, losses = compiled(call, x)

    def assert_close(actual: Any, name: str) -> None:
        np.testing.assert_allclose(
            to_numpy(actual), case.arrays[f"f64/{name}"], rtol=tolerance, atol=tolerance
        )

    assert_close(output, "out_eval")
    assert_close(trained, "out_train")
    gates = gates_of_all_heads(routing, case.num_heads)
    assert_close(gates, "gates")
    if case.has_routed_heads:
        assert_close(routing.probabilities, "router_probs")
        taken = gates[..., case.meta["shared_head"] :] != 0
        np.testing.assert_array_equal(taken, case.arrays["routed_mask"] == 1)
        (loss,) = losses
        expected = 0.01 * case.arrays["f64/aux"]
        np.testing.assert_allclose(to_numpy(loss), expected, rtol=loss_tolerance)
    else:
        assert routing.probabilities.shape[-1] == 0
        assert losses == []


def check_gradients(case: Case, dtype: str, tolerance: float) -> None:
    layer = case.layer(dtype)
    cotangent = ops.convert_to_tensor(case.arrays["in/cotangent"], dtype)

    def loss(x: Any) -> Any:
        return ops.sum(layer(x, training=True) * cotangent) + sum(layer.losses)

    x = ops.convert_to_tensor(case.arrays["in/x"], dtype)
    value, (by_x,), by_weights, _ = gradients(loss, [x], layer)
    golden = case.weights("f64/grad/param/")
    biases = {f"{name}/bias" for name in ("query", "key", "value")}
    assert set(by_weights) - set(golden) == (set() if case.meta["qkv_bias"] else biases)

    # A loss is a sum over all outputs, and may cancel: its size is that of its terms.
    terms = np.abs(case.arrays["f64/out_train"] * case.arrays["in/cotangent"])
    assert abs(value - case.arrays["f64/loss"]) <= tolerance * terms.sum()
    # Some gradients, like that of the keys' bias, are exactly 0: what is left of them is rounding.
    golden, actual = golden | {"x": case.arrays["f64/grad/x"]}, by_weights | {"x": by_x}
    for name, expected in golden.items():
        size = max(np.abs(expected).max(), 0.1)
        np.testing.assert_allclose(
            actual[name], expected, rtol=0, atol=tolerance * size, err_msg=name
        )


def test_forward_in_float32(case: Case) -> None:
    check_forward(case, "float32", tolerance=2e-5, loss_tolerance=2e-5)


@pytest.mark.float64
def test_forward_in_float64(case: Case) -> None:
    check_forward(case, "float64", tolerance=1e-9, loss_tolerance=1e-6)


def test_gradients_in_float32(case: Case) -> None:
    check_gradients(case, "float32", tolerance=2e-4)


@pytest.mark.float64
def test_gradients_in_float64(case: Case) -> None:
    check_gradients(case, "float64", tolerance=1e-6 if case.has_routed_heads else 1e-9)
