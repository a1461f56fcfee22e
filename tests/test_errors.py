"""A bad argument is refused in one line that names it, what was received and what is valid."""

import re

import keras
import numpy as np
import pytest

import keras_moh
from keras_moh import MoHAttention, RotaryEmbedding, TwoStageRouter

VALID = {"num_heads": 6, "key_dim": 3, "num_shared_heads": 2, "top_k": 2}
NOT_A_COUNT = [0, -2, True, 1.5, 2.0, "3", [3], np.ones(2)]
NOT_A_RATE = [-0.1, 1, 1.0, float("nan"), float("inf"), True, "0.1", None, [0.1]]
NOT_A_WEIGHT = [-0.1, float("nan"), float("inf"), True, "0.1", None, [0.1]]
NOT_A_FLAG = [0, 1, "True", None]
NOT_A_SEED = [-1, True, 1.5, "3", keras.random.SeedGenerator(0)]
NOT_OF_KERAS = ["nope", 3, True]


class Invalid:
    """An argument's name, invalid values, what the message says is valid, and other arguments."""

    def __init__(self, name, values, valid, **others):
        self.name, self.values, self.valid, self.others = name, values, valid, others

    def cases(self):
        for value in self.values:
            yield pytest.param(
                self.name, value, self.valid, self.others, id=f"{self.name}={value!r}"[:50]
            )


CONSTRUCTOR = [
    Invalid("num_heads", [*NOT_A_COUNT, None], "a positive integer"),
    Invalid("key_dim", [*NOT_A_COUNT, None], "a positive integer"),
    Invalid("num_shared_heads", [-1, True, 1.5, "3", [3]], "an integer of at least 0"),
    Invalid("num_shared_heads", [7], "at most `num_heads`"),
    Invalid("num_shared_heads", [None], "required unless `router` is None"),
    Invalid("top_k", [-1, True, 1.5, "3", [3]], "an integer of at least 0"),
    Invalid("top_k", [None], "required unless `router` is None"),
    Invalid("top_k", [5], "4 routed heads (num_heads=6 - num_shared_heads=2)"),
    Invalid("top_k", [1], "0 routed heads (num_heads=6 - num_shared_heads=6)", num_shared_heads=6),
    Invalid("top_k", [0], "4 routed heads (num_heads=6 - num_shared_heads=2)"),
    Invalid("num_key_value_heads", NOT_A_COUNT, "a positive integer"),
    Invalid("num_key_value_heads", [4, 12], "must be a multiple of"),
    Invalid("value_dim", NOT_A_COUNT, "a positive integer"),
    Invalid(
        "output_shape", [0, -1, True, 8.0, "8", (), (3, 0), [3.0]], "a tuple of positive integers"
    ),
    Invalid("dropout", NOT_A_RATE, "a number in [0, 1)"),
    Invalid("use_bias", NOT_A_FLAG, "True or False"),
    Invalid(
        "router", ["nope", 5, True, {}, [], TwoStageRouter, np.ones(2)], "'two_stage', 'query_norm'"
    ),
    Invalid("routing_groups", [*NOT_A_COUNT, None], "a positive integer"),
    Invalid("routing_groups", [3, 4, 6], "(valid here: 1, 2)"),
    # It divides all but one of the three numbers.
    Invalid("routing_groups", [3], "`num_heads`", num_heads=8, num_shared_heads=3, top_k=3),
    Invalid("routing_groups", [3], "`num_shared_heads`", num_shared_heads=2, top_k=3),
    Invalid("routing_groups", [3], "`top_k`", num_shared_heads=3, top_k=2),
    Invalid("balance_loss_weight", NOT_A_WEIGHT, "a finite number of at least 0"),
    Invalid("z_loss_weight", NOT_A_WEIGHT, "a finite number of at least 0"),
    Invalid("qk_norm", ["layer", "RMS", 1.5, None, [True], np.ones(2)], "True, False or 'rms'"),
    Invalid(
        *("rotary_embedding", [True, "rope", 10000.0, {}, keras.layers.Dense(3), RotaryEmbedding]),
        "(inputs, start_index=0, positions=None)",
    ),
    Invalid("attention_axes", [1.5, "1", True, (), (1, 1), [1.0], np.ones(2)], "distinct integers"),
    Invalid("sliding_window", NOT_A_COUNT, "a positive integer"),
    Invalid("implementation", ["nope", 3, True, ["reference"], np.ones(2)], "'reference'"),
    Invalid("kernel_initializer", NOT_OF_KERAS, "`keras.initializers.get`"),
    Invalid("bias_initializer", NOT_OF_KERAS, "`keras.initializers.get`"),
    Invalid("kernel_regularizer", NOT_OF_KERAS, "`keras.regularizers.get`"),
    Invalid("bias_regularizer", NOT_OF_KERAS, "`keras.regularizers.get`"),
    Invalid("activity_regularizer", NOT_OF_KERAS, "`keras.regularizers.get`"),
    Invalid("kernel_constraint", NOT_OF_KERAS, "`keras.constraints.get`"),
    Invalid("bias_constraint", NOT_OF_KERAS, "`keras.constraints.get`"),
    Invalid("seed", NOT_A_SEED, "an integer of at least 0"),
    # With no router, all heads are shared and none is routed.
    Invalid("num_shared_heads", [2, 0], "None or 6", router=None, top_k=None),
    Invalid("num_shared_heads", [6.0, True, "6"], "an integer", router=None, top_k=None),
    Invalid("top_k", [1], "None or 0", router=None, num_shared_heads=None),
    Invalid("top_k", [0.0, False, "0"], "an integer", router=None, num_shared_heads=None),
    Invalid("routing_groups", [2], "1 with", router=None, num_shared_heads=None, top_k=None),
    Invalid("z_loss_weight", [0.1], "0 with", router=None, num_shared_heads=None, top_k=None),
    # A router of one's own says itself how many heads there are.
    Invalid("top_k", [None], "required unless `router` is None", router="query_norm"),
    Invalid("top_k", [5], "4 routed heads", router="query_norm"),
    Invalid("routing_groups", [3], "(valid here: 1, 2)", router="query_norm"),
    Invalid("num_heads", [5], "the router's own, 6", router=TwoStageRouter(6, 2, 2)),
    Invalid("num_shared_heads", [1], "the router's own, 2", router=TwoStageRouter(6, 2, 2)),
    Invalid("top_k", [3], "the router's own, 2", router=TwoStageRouter(6, 2, 2)),
    Invalid("routing_groups", [2], "the router's own, 1", router=TwoStageRouter(6, 2, 2)),
    Invalid(
        *("routing_groups", [3], "the router's own, 2"),
        router=TwoStageRouter(6, 2, 2, routing_groups=2),
    ),
    Invalid("z_loss_weight", [0.1], "no TwoStageRouter", router=keras_moh.Router(6, 2, 2)),
]


def one_line(error: pytest.ExceptionInfo) -> str:
    """The message, without the page that Keras puts around one that comes from within `call`."""
    message = str(error.value)
    if message.startswith("Exception encountered when calling"):
        message = message.split("\n\n")[1]
    message = re.sub(r"\x1b\[\d+m", "", message)
    assert "\n" not in message
    return message


@pytest.mark.parametrize(
    ("name", "value", "valid", "others"), [case for row in CONSTRUCTOR for case in row.cases()]
)
def test_constructor_refuses(name, value, valid, others):
    with pytest.raises(ValueError, match=f"`{name}`") as error:
        MoHAttention(**{**VALID, **others, name: value})
    message = one_line(error)
    assert valid in message
    received = message.partition("Received: ")[2]
    assert f"{name}={' '.join(repr(value).split())}" in received


@pytest.mark.parametrize(
    "name", ["num_shared_heads", "top_k", "num_heads", "routing_groups", "kernel_initializer"]
)
def test_router_constructor_refuses(name):
    arguments = {"num_heads": 6, "num_shared_heads": 2, "top_k": 2, name: 1.5}
    with pytest.raises(ValueError, match=rf"`{name}`.*Received: {name}=1\.5") as error:
        TwoStageRouter(**arguments)
    one_line(error)


def test_unknown_constructor_argument():
    with pytest.raises(ValueError, match=r"Unrecognized keyword arguments.*MoHAttention.*use_gate"):
        MoHAttention(**VALID, use_gate=True)


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        # No shapes at all.
        ((5,), "`query_shape`: expected a tuple of integers .* query_shape=5"),
        (("abcd",), "`query_shape`: expected a tuple of integers .* query_shape='abcd'"),
        (((2, 5, 1.5),), r"`query_shape`: .* query_shape=\(2, 5, 1.5\)"),
        (((2, 5, -1),), r"`query_shape`: .* query_shape=\(2, 5, -1\)"),
        (((2, 5, 11), 7), "`value_shape`: .* value_shape=7"),
        (((2, 5, 11), (2, 7, 11), True), "`key_shape`: .* key_shape=True"),
        # No sequences of vectors.
        (((2, 11),), r"`query` must have rank 3 or more .* query_shape=\(2, 11\)"),
        (((11,),), r"`query` must have rank 3 or more .* query_shape=\(11,\)"),
        (((2, 5, None),), r"`query` .* a known, positive number of features.*\(2, 5, None\)"),
        (((2, 5, 0),), r"`query` .* a known, positive number of features.*\(2, 5, 0\)"),
        (((2, 5, 11), (2, 7, None)), r"`value` .* known, positive number.*\(2, 7, None\)"),
        # They disagree.
        (((2, 5, 11), None, (2, 7, 11)), r"`value` is required .* `key` .*\(2, 7, 11\)"),
        (
            ((2, 5, 11), (3, 7, 11)),
            r"`query` and `value` .* must be equal.*value_shape=\(3, 7, 11\)",
        ),
        (((2, 5, 11), (2, 7, 3, 11)), r"`value` must have the rank of `query`.*\(2, 7, 3, 11\)"),
        (((2, 5, 11), (2, 7, 11), (2, 3, 11)), r"`value` and `key`.*equal.*key_shape=\(2, 3, 11\)"),
    ],
)
def test_build_refuses(shapes, message):
    with pytest.raises(ValueError, match=message) as error:
        MoHAttention(**VALID).build(*shapes)
    one_line(error)


@pytest.mark.parametrize(
    ("arguments", "shapes", "message"),
    [
        ({"attention_axes": 3}, [(2, 3, 5, 11)], r"`attention_axes`: .* from 1 to 2 .*\(3,\)"),
        ({"attention_axes": 0}, [(2, 3, 5, 11)], r"`attention_axes`: .* from 1 to 2 .*\(0,\)"),
        ({"attention_axes": -1}, [(2, 3, 5, 11)], r"`attention_axes`: .* from 1 to 2 .*\(-1,\)"),
        ({"attention_axes": (1, -3)}, [(2, 3, 5, 11)], r"`attention_axes`: expected distinct axes"),
        ({"attention_axes": 2}, [(2, 5, 11)], r"`attention_axes`: .* from 1 to 1 .* rank 3"),
        ({"sliding_window": 2}, [(2, 3, 5, 11)], "`sliding_window` needs a single attention axis"),
        (
            {"attention_axes": 2},
            [(2, 3, 5, 11), (2, 7, 5, 11)],
            r"`query` and `value` that are not attended over.*\(2, 7, 5, 11\)",
        ),
    ],
)
def test_build_refuses_axes(arguments, shapes, message):
    with pytest.raises(ValueError, match=message) as error:
        MoHAttention(**VALID, **arguments).build(*shapes)
    one_line(error)


def floats(*shape):
    return np.ones(shape, "float32")


def booleans(*shape):
    return np.ones(shape, "bool")


BAD_CALLS = [
    # Masks of the wrong shape or rank, or no tensors; the scores are (2, 6, 5, 7).
    ({"query_mask": booleans(2, 7)}, r"`query_mask` .* \(2, 5\).*query_mask.shape=\(2, 7\)"),
    ({"query_mask": booleans(5)}, r"`query_mask` .* \(2, 5\).*query_mask.shape=\(5,\)"),
    ({"query_mask": booleans(2, 5, 1)}, r"`query_mask` .*query_mask.shape=\(2, 5, 1\)"),
    ({"query_mask": booleans(2, 1)}, r"`query_mask` .*query_mask.shape=\(2, 1\)"),
    ({"value_mask": booleans(2, 5)}, r"`value_mask` .* \(2, 7\).*value_mask.shape=\(2, 5\)"),
    ({"key_mask": booleans(2, 5)}, r"`key_mask` .* \(2, 7\).*key_mask.shape=\(2, 5\)"),
    ({"query_mask": [[True] * 5] * 2}, r"`query_mask`: expected a tensor.*query_mask=\[\[True"),
    ({"value_mask": True}, r"`value_mask`: expected a tensor.*value_mask=True"),
    ({"key_mask": "padding"}, r"`key_mask`: expected a tensor.*key_mask='padding'"),
    ({"attention_mask": booleans(5, 5)}, r"`attention_mask` .*attention_mask.shape=\(5, 5\)"),
    ({"attention_mask": booleans(7)}, r"`attention_mask` must have rank 2 to 4.*shape=\(7,\)"),
    ({"attention_mask": booleans(3, 5, 7)}, r"`attention_mask` .*shape=\(3, 5, 7\)"),
    ({"attention_mask": booleans(2, 3, 5, 7)}, r"`attention_mask` .*shape=\(2, 3, 5, 7\)"),
    ({"attention_mask": booleans(1, 2, 6, 5, 7)}, r"`attention_mask` .*shape=\(1, 2, 6, 5, 7\)"),
    ({"attention_mask": "causal"}, r"`attention_mask`: expected a tensor.*='causal'"),
    # Inputs that disagree with each other or with what the layer was built for.
    ({"value": floats(3, 7, 11)}, r"`query` and `value` .* must be equal.*\(3, 7, 11\)"),
    ({"value": floats(2, 7, 13)}, r"query, value, key, the features \(11, 11, 11\).*\(2, 7, 13\)"),
    ({"value": floats(2, 7, 3, 11)}, r"must have the rank 3.*\(2, 7, 3, 11\)|the rank of `query`"),
    ({"key": floats(2, 3, 11)}, r"`value` and `key`.*must be equal.*\(2, 3, 11\)"),
    ({"key": floats(2, 7, 13)}, r"query, value, key, the features \(11, 11, 11\).*\(2, 7, 13\)"),
    ({"value": None, "key": floats(2, 5, 11)}, r"`value` is required where `key` is given"),
    ({"value": "value"}, r"`value`: expected a tensor.*value='value'"),
    ({"key": [[1.0]]}, r"`key`: expected a tensor.*key=\[\[1.0\]\]"),
    ({"value": np.ones((2, 7, 11), "int32")}, r"`value` must be of a float dtype.*int32"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD_CALLS)
def test_call_refuses(arguments, message):
    layer = MoHAttention(**VALID)
    layer.build((2, 5, 11), (2, 7, 11))
    with pytest.raises(ValueError, match=message) as error:
        layer(floats(2, 5, 11), **{"value": floats(2, 7, 11), **arguments})
    one_line(error)


@pytest.mark.parametrize(
    ("query", "message"),
    [
        (floats(2, 5, 13), r"the features \(11, 11, 11\).*\(2, 5, 13\)"),
        (floats(2, 3, 5, 11), r"must have the rank 3.*\(2, 3, 5, 11\)"),
        (floats(2, 11), r"must have the rank 3.*\(2, 11\)"),
        (np.ones((2, 5, 11), "int32"), "`query` must be of a float dtype.*int32"),
    ],
)
def test_call_refuses_query(query, message):
    layer = MoHAttention(**VALID)
    layer.build((2, 5, 11))
    with pytest.raises(ValueError, match=message) as error:
        layer(query)
    one_line(error)


def test_call_refuses_list_of_inputs():
    with pytest.raises(ValueError, match="`query_shape`: expected a tuple of integers") as error:
        MoHAttention(**VALID)([floats(2, 5, 11), floats(2, 7, 11)])
    one_line(error)


@pytest.mark.parametrize("symbolic", [False, True])
def test_call_refuses_causality_over_several_axes(symbolic):
    x = keras.Input((3, 5, 11)) if symbolic else floats(2, 3, 5, 11)
    with pytest.raises(ValueError, match=r"`use_causal_mask` needs a single .*\(1, 2\)") as error:
        MoHAttention(**VALID)(x, use_causal_mask=True)
    one_line(error)


def test_symbolic_call_refuses_as_an_eager_one():
    mask = keras.Input((3, 5), dtype="bool")
    with pytest.raises(ValueError, match=r"`attention_mask` .*\(None, 3, 5\)") as error:
        MoHAttention(**VALID)(keras.Input((5, 11)), attention_mask=mask)
    one_line(error)


@pytest.mark.parametrize(
    "arguments",
    [
        {"num_heads": np.int64(6), "top_k": np.int32(2), "num_shared_heads": np.uint8(2)},
        {"dropout": np.float32(0.5), "balance_loss_weight": 1, "z_loss_weight": np.float64(0.1)},
        {"dropout": 0, "balance_loss_weight": 0},
        {"output_shape": [13, 3]},
        {"output_shape": np.int64(13)},
        {"attention_axes": [1]},
        {"attention_axes": np.int64(-2)},
        {"sliding_window": np.int16(1)},
        {"routing_groups": np.int64(2)},
        {"routing_groups": 2, "router": TwoStageRouter(6, 2, 2, routing_groups=2)},
        {"num_shared_heads": 6, "top_k": 0},
        {"num_shared_heads": 6, "top_k": 0, "routing_groups": 3},
        {"num_shared_heads": 0, "top_k": 6, "routing_groups": 6},
        {"num_shared_heads": 0, "top_k": 6},
        {"router": None, "num_shared_heads": 6, "top_k": 0},
        {"router": None, "num_shared_heads": None, "top_k": None},
        {"router": TwoStageRouter(6, 2, 2), "num_shared_heads": None, "top_k": None},
        {"seed": np.int64(0), "value_dim": None, "num_key_value_heads": None},
    ],
)
def test_unusual_but_valid(arguments):
    layer = MoHAttention(**{**VALID, **arguments})
    assert layer(floats(2, 5, 11)).shape[:2] == (2, 5)
    copy = MoHAttention.from_config(layer.get_config())
    assert copy.get_config() == layer.get_config()
    counts = [layer.num_heads, layer.num_shared_heads, layer.top_k, layer.sliding_window]
    counts.append(layer.routing_groups)
    assert {type(count) for count in counts} <= {int, type(None)}
