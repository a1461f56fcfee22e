"""`MoHAttention(router=None)` is Keras's own attention, weight for weight."""

import dataclasses
from typing import Any

import keras
import numpy as np
import pytest
from keras import ops

from keras_moh import MoHAttention
from tests import oracle
from tests.helpers import compiled, gradients, to_numpy
from tests.samples import Noise, floats, padding

B, T, S, D, D_value, D_key, d, dv = 2, 3, 5, 13, 11, 17, 7, 19
TOLERANCE = 1e-5  # of the largest entry


@dataclasses.dataclass(frozen=True)
class Case:
    """A layer of Keras's and a call of it; `num_key_value_heads` makes it grouped."""

    arguments: dict[str, Any] = dataclasses.field(default_factory=dict)
    cross: bool = False  # attention to other values and keys
    call: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        query = (B, T, D)
        return [query, (B, S, D_value), (B, S, D_key)] if self.cross else [query, query]

    @property
    def inputs(self) -> list[np.ndarray]:
        """Query, value and key; in self-attention, the query twice."""
        if not self.cross:
            return [floats(B, T, D)] * 2
        return [floats(*shape, seed=seed) for seed, shape in enumerate(self.shapes)]

    def layers(self) -> tuple[keras.Layer, MoHAttention]:
        noise = {"kernel_initializer": Noise(1), "bias_initializer": Noise(2)}
        arguments = {"num_heads": 6, "key_dim": d, **self.arguments}
        ours = MoHAttention(**arguments, router=None)
        ours.build(*self.shapes)
        if "num_key_value_heads" in arguments:
            arguments["num_query_heads"] = arguments.pop("num_heads")
            arguments["head_dim"] = arguments.pop("key_dim")
            theirs = keras.layers.GroupQueryAttention(**arguments, **noise)
        else:
            theirs = keras.layers.MultiHeadAttention(**arguments, **noise)
        theirs.build(*self.shapes)
        ours.set_weights([to_numpy(weight) for weight in theirs.weights])
        return theirs, ours

    def rows_with_keys(self) -> np.ndarray:
        """`(B, T)`: only there does Keras say what comes out, and only for (B, T, S) masks."""
        keys = self.shapes[1][1]
        mask = np.broadcast_to(
            oracle.allowed(
                T,
                keys,
                self.call.get("use_causal_mask", False),
                sliding_window=self.arguments.get("sliding_window"),
            ),
            (B, T, keys),
        )
        for name, new_axis in (("query_mask", 2), ("value_mask", 1), ("key_mask", 1)):
            if name in self.call:
                mask = mask & np.expand_dims(self.call[name], new_axis)
        return (mask & self.call.get("attention_mask", np.True_)).any(axis=-1)


some_mask = np.random.default_rng(1).random((B, T, S)) < 0.6
some_mask[0, 1] = False  # a row without a key
every_mask = {
    "attention_mask": some_mask,
    "value_mask": padding(4, 5, length=S),
    "key_mask": padding(5, 3, length=S),
    "use_causal_mask": True,
}
CASES = {
    "self-attention": Case(),
    "no bias": Case({"use_bias": False}),
    "one head": Case({"num_heads": 1}),
    "value_dim": Case({"value_dim": dv}),
    "output_shape": Case({"output_shape": 23}),
    "output_shape of rank 2": Case({"output_shape": (3, 5), "value_dim": dv}),
    "cross-attention": Case({"value_dim": dv}, cross=True),
    "causal": Case(call={"use_causal_mask": True}),
    "causal cross-attention": Case(cross=True, call={"use_causal_mask": True}),
    "window": Case({"sliding_window": 2}),
    "causal window": Case({"sliding_window": 2}, cross=True, call={"use_causal_mask": True}),
    "attention mask": Case(cross=True, call={"attention_mask": some_mask}),
    "padding of values": Case(cross=True, call={"value_mask": padding(2, 5, length=S)}),
    "padding of keys": Case(cross=True, call={"key_mask": padding(4, 1, length=S)}),
    "every mask": Case(
        {"sliding_window": 4},
        cross=True,
        call=every_mask,
    ),
    "groups": Case({"num_key_value_heads": 2}),
    "groups without bias": Case({"num_key_value_heads": 3, "use_bias": False}),
    "one key/value head": Case({"num_key_value_heads": 1}, cross=True),
    "causal groups": Case({"num_key_value_heads": 2}, call={"use_causal_mask": True}),
    "groups, every mask": Case(
        {"num_key_value_heads": 2, "sliding_window": 4},
        cross=True,
        call=every_mask,
    ),
}


def assert_close(actual: Any, expected: Any, name: str, size: float = 1.0) -> None:
    actual, expected = to_numpy(actual), to_numpy(expected)
    size = max(np.abs(expected).max(), size)
    np.testing.assert_allclose(actual, expected, rtol=0, atol=TOLERANCE * size, err_msg=name)


@pytest.fixture(params=CASES.values(), ids=CASES)
def case(request: pytest.FixtureRequest) -> Case:
    return request.param


def test_weights_have_the_same_order_and_shapes(case: Case) -> None:
    theirs, ours = case.layers()
    names = [(weight.path.split("/")[-2:], weight.shape) for weight in theirs.weights]
    assert [(weight.path.split("/")[-2:], weight.shape) for weight in ours.weights] == names


def test_outputs_and_scores(case: Case) -> None:
    theirs, ours = case.layers()
    rows = case.rows_with_keys()
    inputs = [ops.convert_to_tensor(x) for x in case.inputs]

    def call(*inputs: Any) -> Any:
        # Theirs with scores alone: without, it fails on JAX where value_dim is not key_dim.
        expected, expected_scores = theirs(*inputs, **case.call, return_attention_scores=True)
        beside, scores = ours(*inputs, **case.call, return_attention_scores=True)
        return expected, expected_scores, ours(*inputs, **case.call), beside, scores

    expected, expected_scores, output, beside_scores, scores = compiled(call, *inputs)
    assert output.shape == expected.shape
    assert rows.any()
    for actual in (output, beside_scores):
        assert_close(to_numpy(actual)[rows], to_numpy(expected)[rows], "output")
    heads_last = (0, 2, 1, 3)
    scores, expected_scores = (
        to_numpy(x).transpose(heads_last)[rows] for x in (scores, expected_scores)
    )
    assert_close(scores, expected_scores, "scores")


def test_gradients(case: Case) -> None:
    theirs, ours = case.layers()
    rows = case.rows_with_keys()

    def gradients_of(layer: keras.Layer, **call: Any) -> dict[str, np.ndarray]:
        def loss(*inputs: Any) -> Any:
            output = layer(*inputs, **case.call, **call)
            output = output[0] if call else output
            weights = floats(*output.shape, seed=9)
            weights[~rows] = 0
            return ops.sum(output * ops.convert_to_tensor(weights))

        _, by_inputs, by_weights, _ = gradients(loss, case.inputs, layer)
        return by_weights | {f"input {index}": x for index, x in enumerate(by_inputs)}

    expected, actual = gradients_of(theirs, return_attention_scores=True), gradients_of(ours)
    assert set(actual) == set(expected)
    for name, gradient in actual.items():
        # The keys' bias moves all scores of a row alike: its gradient is 0, but for rounding.
        by_kernel = expected[name.replace("key/bias", "key/kernel")]
        assert_close(gradient, expected[name], name, size=max(np.abs(by_kernel).max(), 1.0))


def test_without_a_value_it_is_self_attention() -> None:
    theirs, ours = Case().layers()
    x = floats(B, T, D)
    assert_close(ours(x), theirs(x, x), "output")


def test_query_mask_is_what_keras_makes_of_an_attached_one() -> None:
    theirs, ours = Case(cross=True).layers()
    query, value, key = map(ops.convert_to_tensor, Case(cross=True).inputs)
    mask = padding(2, 3, length=T)

    output = ours(query, value, key, query_mask=mask)
    expected = theirs(query, value, key, attention_mask=mask[:, :, None])
    assert_close(to_numpy(output)[mask], to_numpy(expected)[mask], "output")
    bias = to_numpy(ours.output_dense.bias)
    np.testing.assert_array_equal(
        to_numpy(output)[~mask], np.broadcast_to(bias, ((~mask).sum(), D))
    )
