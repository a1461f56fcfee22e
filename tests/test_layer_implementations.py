"""`MoHAttention` gives the same by every implementation: outputs, losses and every gradient.

The reference is the measure here; `test_oracle.py` and `test_routed_attention.py` say that it is
right.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import numpy as np
import pytest
from keras import ops

import keras_moh
from keras_moh import UnsupportedError, implementations
from keras_moh.implementations import costs
from tests.helpers import Gradients, gradients, to_numpy, weights_by_name
from tests.paths import OF_KERAS, OF_KERNELS
from tests.samples import B, D, S, T, floats, moh_attention, padding

BACKEND = keras.backend.backend()
H = 6
# Relative to the largest entry.
TOLERANCES = {"float64": 1e-11, "float32": 2e-5, "mixed_float16": 1e-2, "mixed_bfloat16": 8e-2}
PROJECTIONS = ("query_dense", "key_dense", "value_dense", "output_dense")


class Variant(NamedTuple):
    """An implementation, and whether the projections of heads not taken are left out."""

    implementation: str
    projections: str  # "by rows" or "whole"


def variants() -> list[Variant]:
    implementations.load_implementations()
    return [
        Variant(name, projections)
        for name, (backend, _) in implementations.IMPLEMENTATIONS.items()
        if backend in (None, BACKEND) and name != "reference"
        for projections in ("whole", "by rows")
        if projections == "whole"
        or (
            BACKEND in implementations.ROWS
            and hasattr(implementations._loaded[name], "attend_rows")
        )
    ]


@pytest.fixture(params=variants(), ids="-".join)
def variant(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Variant:
    by_rows = request.param.projections == "by rows"
    monkeypatch.setattr(costs, "skips_projections", lambda spec: by_rows)
    return request.param


@keras.saving.register_keras_serializable("keras_moh_tests")
class UnevenRouter(keras_moh.Router):
    """Early and late tokens take heads of their own, with gates by which the token learns."""

    def __init__(self, early: tuple[int, ...], late: tuple[int, ...], **kwargs: Any) -> None:
        super().__init__(H, 2, 2, **kwargs)
        self.early, self.late = early, late

    def call(self, inputs: Any) -> keras_moh.Routing:
        ones = ops.ones_like(inputs[..., :1])
        is_early = ops.cumsum(ones, axis=-2) <= 3
        heads = ops.where(is_early, *(ops.convert_to_tensor(x) for x in (self.early, self.late)))
        number = ops.arange(self.num_active_heads, dtype=inputs.dtype)
        gates = 1.5 + ops.tanh(inputs[..., :1] * (number + 1))
        probabilities = ones * ops.convert_to_tensor([0.1, 0.2, 0.3, 0.4], inputs.dtype)
        return keras_moh.Routing(ops.cast(heads, "int32"), gates, probabilities)


@dataclasses.dataclass(frozen=True)
class Case:
    """A layer, what is done to it once it is built, and a call of it in training."""

    arguments: dict[str, Any] = dataclasses.field(default_factory=dict)
    shapes: tuple[tuple[int, ...], ...] = ((B, T, D),)  # of query[, value[, key]]
    call: dict[str, Any] = dataclasses.field(default_factory=dict)
    prepare: Callable[[keras.Layer], None] = lambda layer: None
    scope: str | None = None  # of rematerialization

    def is_served(self, implementation: str, policy: str) -> bool:
        if implementation in OF_KERNELS:
            return policy != "float64"
        if implementation in OF_KERAS and policy in ("float64", "mixed_float16"):
            return False
        if implementation != "compact":
            return True
        layer = self.layer("reference", "float32")
        groups = layer.num_key_value_heads
        all_taken = layer.num_active_heads == layer.num_heads
        return all_taken or layer.routing_groups % groups == 0

    def layer(self, implementation: str | None, policy: str) -> keras_moh.MoHAttention:
        more: dict[str, Any] = {"balance_loss_weight": 0.5, "z_loss_weight": 0.25}
        router = self.arguments.get("router", "two_stage")
        if router not in ("two_stage", "query_norm"):
            more["z_loss_weight"] = 0.0
            more["router"] = router and router(dtype=policy)
        arguments = {**self.arguments, **more, "dtype": policy, "implementation": implementation}
        with keras.RematScope(mode=self.scope):
            layer = moh_attention(**arguments)
            layer.build(*self.shapes)
        self.prepare(layer)
        return layer

    def run(self, implementation: str | None, policy: str) -> Gradients:
        """Of a scalar of outputs and losses; further results are the output and the losses."""
        layer = self.layer(implementation, policy)
        dtype = "float64" if policy == "float64" else "float32"
        inputs = [floats(*shape, seed=10 + i).astype(dtype) for i, shape in enumerate(self.shapes)]
        call = {
            name: ops.convert_to_tensor(x) if isinstance(x, np.ndarray) else x
            for name, x in self.call.items()
        }

        def function(*inputs: Any) -> Any:
            output = layer(*inputs, **call, training=True)
            cotangent = ops.convert_to_tensor(floats(*output.shape, seed=99), dtype)
            losses = sum(ops.cast(loss, dtype) for loss in layer.losses)
            total = ops.sum(ops.cast(output, dtype) * cotangent) + losses
            return total, [output, *layer.losses]

        return gradients(function, inputs, layer)


def enable_lora(layer: keras.Layer) -> None:
    for index, name in enumerate(PROJECTIONS):
        projection = getattr(layer, name)
        projection.enable_lora(2)
        for adapter in (projection.lora_kernel_a, projection.lora_kernel_b):
            adapter.assign(0.25 * floats(*adapter.shape, seed=index))


def some_mask(*shape: int) -> np.ndarray:
    """Of every kind of row: one that may attend to nothing, and one to everything."""
    mask = np.random.default_rng(4).random(shape) < 0.6
    rows = mask.reshape(-1, shape[-1])
    rows[0], rows[-1] = True, False
    return mask


def rotary_embedding() -> dict[str, Any]:
    """In the form of a config, since a layer is of one model."""
    return keras.saving.serialize_keras_object(keras_moh.RotaryEmbedding(50.0))


CROSS = ((B, T, D), (B, S, 13), (B, S, 17))
RANK_4 = ((B, 3, T, D),)
NO_ROUTER = {"router": None, "num_shared_heads": None, "top_k": None}


def own_router(*heads: tuple[int, ...]) -> dict[str, Any]:
    router = functools.partial(UnevenRouter, *heads)
    return {"router": router, "num_shared_heads": None, "top_k": None}


GROUPS = {"routing_groups": 2, "num_key_value_heads": 2}  # so that "compact" serves
CASES = {
    "plain": Case(),
    "groups": Case(GROUPS),
    "no bias": Case({"use_bias": False}),
    "no bias, groups": Case({**GROUPS, "use_bias": False}),
    "value_dim, cross-attention": Case({"value_dim": 5}, CROSS),
    "value_dim, cross-attention, groups": Case({**GROUPS, "value_dim": 2}, CROSS),
    "output_shape": Case({"output_shape": (5, 2), "value_dim": 5}),
    "three key/value heads": Case({"num_key_value_heads": 3}),
    "one key/value head": Case({"num_key_value_heads": 1}),
    "causal": Case(call={"use_causal_mask": True}),
    "causal, groups": Case(GROUPS, call={"use_causal_mask": True}),
    "window": Case({"sliding_window": 2}, CROSS),
    "causal window": Case({"sliding_window": 3}, call={"use_causal_mask": True}),
    "query_mask": Case(call={"query_mask": padding(3, 5, length=T)}),
    "query_mask, one key/value head": Case(
        {"num_key_value_heads": 1},
        call={"query_mask": padding(5, 3, length=T)},
    ),
    "all queries of an entry padded": Case(call={"query_mask": padding(4, 0, length=T)}),
    "all keys of the first entry padded": Case(
        GROUPS, CROSS, {"value_mask": padding(0, 4, length=S)}
    ),
    "all keys of the last entry padded": Case({}, CROSS, {"value_mask": padding(4, 0, length=S)}),
    "masks of queries, values and keys": Case(
        {},
        CROSS,
        {
            "query_mask": padding(3, 5, length=T),
            "value_mask": padding(7, 4, length=S),
            "key_mask": some_mask(B, S),
        },
    ),
    "attention_mask (T, S)": Case({}, CROSS, {"attention_mask": some_mask(T, S)}),
    "attention_mask (B, T, S)": Case({}, CROSS, {"attention_mask": some_mask(B, T, S)}),
    "attention_mask (B, T, S), groups": Case(GROUPS, CROSS, {"attention_mask": some_mask(B, T, S)}),
    "every mask": Case(
        {"sliding_window": 4, "num_key_value_heads": 2},
        call={
            "query_mask": padding(4, 5, length=T),
            "attention_mask": some_mask(B, T, T),
            "use_causal_mask": True,
        },
    ),
    "layer norm": Case({"qk_norm": True}),
    "layer norm, groups, padding": Case(
        {**GROUPS, "qk_norm": True}, call={"query_mask": padding(3, 5, length=T)}
    ),
    "RMS norm": Case({"qk_norm": "rms", "num_key_value_heads": 2}),
    "rank 4": Case({}, RANK_4),
    "rank 4, one axis, causal": Case(
        {"attention_axes": 2}, RANK_4, {"use_causal_mask": True, "query_mask": some_mask(B, 3, T)}
    ),
    "rank 4, first axis": Case(
        {**GROUPS, "attention_axes": 1, "qk_norm": "rms", "output_shape": (5, 2)}, RANK_4
    ),
    "one query": Case({}, ((B, 1, D), (B, S, D))),
    "one token": Case({"num_key_value_heads": 1}, ((1, 1, D),)),
    "query norm": Case({"router": "query_norm"}),
    "query norm, groups, layer norm, padding": Case(
        {**GROUPS, "router": "query_norm", "qk_norm": True},
        call={"query_mask": padding(3, 5, length=T)},
    ),
    "query norm, rank 4": Case(
        {"router": "query_norm", "attention_axes": 2}, RANK_4, {"use_causal_mask": True}
    ),
    "query norm, rematerialized": Case({"router": "query_norm"}, scope="full"),
    "rotary": Case({"key_dim": 4, "rotary_embedding": rotary_embedding()}, CROSS),
    "rotary, layer norm, groups, padding, causal": Case(
        {**GROUPS, "key_dim": 4, "rotary_embedding": rotary_embedding(), "qk_norm": True},
        call={"query_mask": padding(3, 5, length=T), "use_causal_mask": True},
    ),
    "rotary, query norm, rank 4, first axis": Case(
        {
            **{"router": "query_norm", "key_dim": 4, "rotary_embedding": rotary_embedding()},
            **{"attention_axes": 1, "qk_norm": "rms", "sliding_window": 2},
        },
        RANK_4,
    ),
    "no router": Case(NO_ROUTER),
    "no router, causal": Case(
        {**NO_ROUTER, "num_key_value_heads": 2}, call={"use_causal_mask": True}
    ),
    "all candidates taken": Case({"top_k": 4}),
    "all heads shared": Case({"num_shared_heads": 6, "top_k": 0}),
    "one head": Case({"num_shared_heads": 0, "top_k": 1}),
    # None takes 3, all take 0, 1 and 4, and some take 2 or 5.
    "heads of unequal and of no load": Case(own_router((0, 1, 2, 4), (0, 1, 4, 5))),
    "heads of unequal and of no load, one key/value head, causal": Case(
        {**own_router((0, 1, 2, 4), (0, 1, 4, 5)), "num_key_value_heads": 1},
        call={"use_causal_mask": True},
    ),
    "the same heads for all": Case(own_router((0, 1, 4, 5), (0, 1, 4, 5))),
    "activity regularizer": Case({"activity_regularizer": keras.regularizers.L2(0.1)}),
    "LoRA": Case(prepare=enable_lora),
    "LoRA, groups": Case(GROUPS, prepare=enable_lora),
    "rematerialized": Case({"qk_norm": True}, scope="full"),
    "rematerialized, groups": Case(GROUPS, scope="full"),
}


@functools.cache
def expected(name: str, policy: str) -> Gradients:
    return CASES[name].run("reference", policy)


def check(name: str, variant: Variant, policy: str) -> None:
    case = CASES[name]
    if not case.is_served(variant.implementation, policy):
        with pytest.raises(UnsupportedError, match=r"key/value heads|float32|float16"):
            case.run(variant.implementation, policy)
        return
    found, wanted = case.run(variant.implementation, policy), expected(name, policy)

    def assert_close(actual: np.ndarray, desired: np.ndarray, what: str, size: float = 1) -> None:
        size = max(np.abs(desired).max(initial=0), size)
        np.testing.assert_allclose(
            *(actual, desired), rtol=0, atol=TOLERANCES[policy] * size, err_msg=what
        )

    assert len(found.further) == len(wanted.further)
    for index, (actual, desired) in enumerate(zip(found.further, wanted.further, strict=True)):
        assert actual.dtype == desired.dtype
        assert_close(actual, desired, f"loss {index}" if index else "output")
    for index, (actual, desired) in enumerate(zip(found.inputs, wanted.inputs, strict=True)):
        assert_close(actual, desired, f"gradient by input {index}")
    assert set(found.weights) == set(wanted.weights)
    sizes: dict[str, float] = {}
    for weight, gradient in wanted.weights.items():
        part = weight.split("/")[0]
        sizes[part] = max(sizes.get(part, 1.0), np.abs(gradient).max())
    for weight, actual in found.weights.items():
        # By the largest of the same part: a bias of all keys moves the scores of a row alike, so
        # that its own gradient is 0, but for rounding.
        desired, size = wanted.weights[weight], sizes[weight.split("/")[0]]
        assert_close(actual, desired, f"gradient by {weight}", size)


IN_LOW_PRECISION = (
    "rotary, layer norm, groups, padding, causal",
    "layer norm, groups, padding",
    "every mask",
    "query norm, groups, layer norm, padding",
)


# JAX compiles each case for seconds: there, what runs in float64 is seen in float64.
IN_FLOAT32 = [
    pytest.param(name, variant, id=f"{'-'.join(variant)}-{name}")
    for variant in variants()
    for name in CASES
    if BACKEND != "jax" or variant.implementation in OF_KERAS or name in IN_LOW_PRECISION
]


@pytest.mark.parametrize(("name", "variant"), IN_FLOAT32, indirect=["variant"])
def test_equals_the_reference(name: str, variant: Variant) -> None:
    check(name, variant, "float32")


@pytest.mark.float64
@pytest.mark.parametrize("name", CASES)
def test_equals_the_reference_in_float64(name: str, variant: Variant) -> None:
    check(name, variant, "float64")


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
@pytest.mark.parametrize("name", IN_LOW_PRECISION)
def test_equals_the_reference_in_low_precision(name: str, policy: str, variant: Variant) -> None:
    check(name, variant, policy)


def test_every_gradient_is_of_something() -> None:
    """Else the tests above would compare zeros: each parameter learns in some case."""
    largest: dict[str, float] = {}
    for name in ("plain", "layer norm", "RMS norm", "LoRA"):
        for weight, gradient in expected(name, "float32").weights.items():
            largest[weight] = max(largest.get(weight, 0.0), np.abs(gradient).max())
    del largest["key_norm/beta"]  # which moves the scores of a row alike
    assert len(largest) == 4 + 4 + 3 + 5 + 8
    assert min(largest.values()) > 0.1


QUANTIZED = dataclasses.replace(
    CASES["one key/value head"], prepare=lambda layer: layer.quantize("int8")
)


@functools.cache
def quantized(variant: Variant) -> np.ndarray:
    return QUANTIZED.run(variant.implementation, "float32").further[0]


def test_quantized_layer(variant: Variant) -> None:
    found, wanted = quantized(variant), quantized(Variant("reference", "whole"))
    # Rounded activations may fall on either side: then they differ by a step, one of 127.
    size = np.abs(wanted).max()
    np.testing.assert_allclose(found, wanted, rtol=0, atol=size / 127)
    plain = expected("one key/value head", "float32").further[0]
    assert 1e-4 * size < np.abs(found - plain).max() < 0.1 * size


@pytest.mark.parametrize("by_int8", [False, True])
def test_whole_projections_are_called(
    by_int8: bool, variant: Variant, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All four as layers, where something is to be seen of the heads not taken, and only there."""
    called: list[str] = []
    call = keras.layers.EinsumDense.__call__

    def recorded(self: keras.Layer, *args: Any, **kwargs: Any) -> Any:
        called.append(self.name)
        return call(self, *args, **kwargs)

    monkeypatch.setattr(keras.layers.EinsumDense, "__call__", recorded)
    arguments = {"num_key_value_heads": 1, "balance_loss_weight": 0.0}
    kinds = [{}, {}] if by_int8 else [{}, {"activity_regularizer": keras.regularizers.L2(0.1)}]
    for special, more in enumerate(kinds):
        layer = moh_attention(**arguments, **more, implementation=variant.implementation)
        layer.build((B, T, D))
        if by_int8 and special:
            layer.quantize("int8")
        called.clear()
        layer(floats(B, T, D))
        by_rows = variant.projections == "by rows" and not special
        assert sorted(called) == sorted(
            ["key", "value"] if by_rows else ["query", "key", "value", "attention_output"]
        )


DROPOUT = Case({"dropout": 0.5, "seed": 3, **GROUPS})


def test_dropout_goes_to_the_reference() -> None:
    wanted = DROPOUT.run("reference", "float32")
    found = DROPOUT.run(None, "float32")
    np.testing.assert_array_equal(found.further[0], wanted.further[0])


@pytest.mark.parametrize("name", dict.fromkeys(variant.implementation for variant in variants()))
def test_dropout_is_refused_in_training(name: str) -> None:
    with pytest.raises(UnsupportedError, match=f"'{name}' .*no dropout on the attention"):
        DROPOUT.run(name, "float32")
    # Without training there is no dropout, and nothing to refuse.
    x = floats(B, T, D)
    expected = DROPOUT.layer("reference", "float32")(x)
    output = DROPOUT.layer(name, "float32")(x, training=False)
    np.testing.assert_allclose(to_numpy(output), to_numpy(expected), atol=1e-4)


@pytest.mark.parametrize("name", ["plain", "groups", "no router", "every mask", "rank 4"])
def test_the_choice_is_right_as_well(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the costs: by the first implementation that serves the case."""
    monkeypatch.setattr(costs, "is_worth_it", lambda name, spec: True)
    monkeypatch.setattr(costs, "skips_projections", lambda spec: True)
    layer = CASES[name].layer(None, "float32")
    wanted = expected(name, "float32").further[0]
    inputs = [floats(*shape, seed=10 + i) for i, shape in enumerate(CASES[name].shapes)]
    output = to_numpy(layer(*inputs, **CASES[name].call))
    np.testing.assert_allclose(output, wanted, rtol=0, atol=2e-5 * np.abs(wanted).max())


@pytest.mark.parametrize(
    "other", [name for name, (needs, _) in implementations.IMPLEMENTATIONS.items() if needs]
)
def test_file_that_names_an_implementation(other: str, tmp_path: Any) -> None:
    """Of whichever backend: it loads, with its weights, and raises when it is called."""
    backend, _ = implementations.IMPLEMENTATIONS[other]
    x = floats(B, T, D)
    layer = moh_attention(implementation=other, name="attention")
    model = keras.Sequential([keras.Input((None, D)), layer])
    model.save(tmp_path / "model.keras")
    again = keras.saving.load_model(tmp_path / "model.keras")
    layer_again = again.get_layer("attention")
    assert layer_again.implementation == other
    for name, weight in weights_by_name(layer_again).items():
        np.testing.assert_array_equal(to_numpy(weight), to_numpy(weights_by_name(layer)[name]))
    if backend == BACKEND:
        np.testing.assert_array_equal(to_numpy(again(x)), to_numpy(model(x)))
        return
    message = f"implementation='{other}' .* backend '{BACKEND}': it needs the backend '{backend}'"
    with pytest.raises(UnsupportedError, match=message):
        again(x)
    with pytest.raises(UnsupportedError, match=message):
        again.predict(x, verbose=0)
