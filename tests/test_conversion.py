"""`convert_to_moh` on models of plain Keras; `integrations/` has those of keras-hub."""

import copy
import inspect
import json
import pathlib
import pickle
import re
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers, ops

import keras_moh
from keras_moh.conversion import Adapter
from keras_moh.conversion.remembering import Remembering, walk
from tests.helpers import to_numpy
from tests.samples import B, D, T, floats, padding

H = 6


def attention(**arguments: Any) -> keras.Layer:
    return layers.MultiHeadAttention(H, 5, bias_initializer="glorot_uniform", **arguments)


def group_attention(**arguments: Any) -> keras.Layer:
    return layers.GroupQueryAttention(7, H, 3, bias_initializer="glorot_uniform", **arguments)


@keras.saving.register_keras_serializable("keras_moh_tests")
class Block(layers.Layer):
    """A layer that makes its attention in `build`, in a list, as its config does not say."""

    def build(self, shape):
        self.attention = [attention(name="first"), group_attention(name="second")]
        for layer in self.attention:
            layer.build(shape, shape)
        self.norm = layers.LayerNormalization()
        self.norm.build(shape)

    def call(self, x):
        for layer in self.attention:
            x = x + layer(x, x, use_causal_mask=True)
        return self.norm(x)


@keras.saving.register_keras_serializable("keras_moh_tests")
class Subclassed(keras.Model):
    """A model of a class of its own, built by a call."""

    def __init__(self, blocks=2, **kwargs):
        super().__init__(**kwargs)
        self.blocks = [Block() for _ in range(blocks)]
        self.readout = layers.Dense(3)

    def call(self, x):
        for block in self.blocks:
            x = block(x)
        return self.readout(x)

    def get_config(self):
        return {"name": self.name, "blocks": len(self.blocks)}


@keras.saving.register_keras_serializable("keras_moh_tests")
class OwnGraph(keras.Model):
    """A functional model with a constructor of its own, as a backbone of keras-hub is one."""

    def __init__(self, width=D, **kwargs):
        inputs = keras.Input((None, width))
        x = inputs + attention()(inputs, inputs)
        super().__init__(inputs, Block(name="block")(x), **kwargs)
        self.width = width

    def get_config(self):
        return {"name": self.name, "width": self.width}


def functional() -> keras.Model:
    inputs = keras.Input((None, D), name="tokens")
    x = inputs + attention(name="causal", dropout=0.1)(inputs, inputs, use_causal_mask=True)
    shared = group_attention(name="shared")
    x = x + shared(x, x) + shared(inputs, x)
    y, _ = attention(name="scored", value_dim=3)(x, inputs, x, return_attention_scores=True)
    x = x + attention(name="windowed", sliding_window=2)(x, y)
    return keras.Model(inputs, {"x": x, "y": attention(name="shaped", output_shape=4)(x, x)})


def sequential() -> keras.Model:
    return keras.Sequential([keras.Input((None, D)), Block(), layers.Dense(3)])


def nested() -> keras.Model:
    inputs = keras.Input((None, D))
    return keras.Model(inputs, layers.Dense(3)(OwnGraph()(sequential_of_attention()(inputs))))


def sequential_of_attention() -> keras.Model:
    inner = keras.Input((None, D))
    return keras.Sequential(
        [keras.Input((None, D)), keras.Model(inner, group_attention()(inner, inner))]
    )


def subclassed() -> keras.Model:
    model = Subclassed()
    model(floats(B, T, D))
    return model


MODELS: dict[str, Callable[[], keras.Model]] = {
    "functional": functional,
    "sequential": sequential,
    "nested": nested,
    "subclassed": subclassed,
    "own graph": OwnGraph,
}
each_model = pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)


def predict(model: keras.Model, x: np.ndarray) -> list[np.ndarray]:
    return [np.asarray(y) for y in keras.tree.flatten(model.predict_on_batch(x))]


def adapters(model: keras.Model) -> list[Adapter]:
    return [layer for _, layer in walk(model) if isinstance(layer, Adapter)]


def assert_equal_outputs(model: keras.Model, other: keras.Model, tolerance: float = 1e-5) -> None:
    x = floats(B, T, D)
    for actual, expected in zip(predict(model, x), predict(other, x), strict=True):
        np.testing.assert_allclose(actual, expected, rtol=tolerance, atol=tolerance)


@each_model
@pytest.mark.parametrize(("shared", "top_k"), [(1.0, 0), (0.5, 0.5), (0, H)])
def test_all_heads_active_change_nothing(make, shared, top_k):
    model = make()
    converted, report = keras_moh.convert_to_moh(model, shared, top_k)
    assert len(adapters(converted)) == len(report.converted) > 0
    assert not report.left
    assert_equal_outputs(converted, model)


@each_model
def test_the_original_is_untouched(make):
    model = make()
    weights, config = model.get_weights(), json.dumps(model.get_config(), default=str)
    objects = [(id(layer), type(layer)) for _, layer in walk(model)]
    converted, _ = keras_moh.convert_to_moh(model, 2, 2, sample=floats(B, T, D))
    converted.compile("sgd", "mse")
    x = floats(B, T, D)
    converted.fit(x, keras.tree.map_structure(np.zeros_like, model.predict(x)), verbose=0)
    assert [(id(layer), type(layer)) for _, layer in walk(model)] == objects
    assert json.dumps(model.get_config(), default=str) == config
    for weight, before in zip(model.get_weights(), weights, strict=True):
        np.testing.assert_array_equal(weight, before)
    assert not {id(w) for w in model.weights} & {id(w) for w in converted.weights}
    changed = [
        not np.array_equal(weight, before)
        for weight, before in zip(converted.get_weights(), weights, strict=True)
    ]
    assert any(changed)


@each_model
def test_converted_models_come_back(make, tmp_path):
    """From files, whole or by weights alone, cloned, copied, pickled, as what they became."""
    converted, _ = keras_moh.convert_to_moh(make(), 1, 2)
    converted.save(tmp_path / "model.keras")
    converted.save_weights(tmp_path / "model.weights.h5")
    other = keras.models.clone_model(converted)
    if not other.built:
        other(floats(B, T, D))
    other.load_weights(tmp_path / "model.weights.h5")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert type(loaded) is type(converted)
    for again in (loaded, other, pickle.loads(pickle.dumps(converted)), copy.deepcopy(converted)):
        expected = [type(layer) for _, layer in walk(converted)]
        assert [type(layer) for _, layer in walk(again)] == expected
        assert_equal_outputs(again, converted, 1e-6)
    expected = [layer.get_config() for layer in adapters(converted)]
    assert [layer.get_config() for layer in adapters(loaded)] == expected


def test_plain_models_stay_plain():
    """Where configs hold layers, the class of a model need not change."""
    for make, types in ((functional, 0), (sequential, 1), (nested, 2), (subclassed, 3)):
        converted, _ = keras_moh.convert_to_moh(make(), 2, 2)
        every = [converted, *(layer for _, layer in walk(converted))]
        assert sum(isinstance(layer, Remembering) for layer in every) == types
        assert isinstance(converted, type(make()))


def test_a_part_of_a_converted_model_is_saved_converted(tmp_path):
    converted, _ = keras_moh.convert_to_moh(OwnGraph(), 2, 2)
    block = converted.get_layer("block")
    assert isinstance(block, Block)
    part = keras.Model(converted.input, converted.get_layer("block").output)
    part.save(tmp_path / "part.keras")
    loaded = keras.saving.load_model(tmp_path / "part.keras")
    assert len(adapters(loaded)) == 3
    assert_equal_outputs(loaded, converted, 1e-6)


IN_A_NEW_PROCESS = """
import sys
import keras
import keras_moh
import numpy as np

model = keras.saving.load_model(sys.argv[1] + "/model.keras")
arrays = np.load(sys.argv[1] + "/arrays.npz")
outputs = model.predict(arrays["x"], verbose=0)
np.testing.assert_allclose(outputs["y"], arrays["y"], atol=1e-5)
assert "keras_hub" not in sys.modules
"""


def test_file_in_a_new_process(tmp_path):
    """One that imports the package and nothing else of it."""
    converted, _ = keras_moh.convert_to_moh(functional(), 1, 2)
    converted.save(tmp_path / "model.keras")
    x = floats(B, T, D)
    np.savez(tmp_path / "arrays.npz", x=x, y=converted.predict(x, verbose=0)["y"])
    command = [sys.executable, "-W", "error::UserWarning", "-c", IN_A_NEW_PROCESS, str(tmp_path)]
    subprocess.run(command, check=True, timeout=240)


@keras.saving.register_keras_serializable("keras_moh_tests")
class Scaling(layers.Layer):
    """A layer that computes with what it makes of its weight, once, and with a list in a file."""

    def build(self, shape):
        self.scale = self.add_weight(shape=(), trainable=False)
        self.offsets = [0.0]
        self.finalize()

    def finalize(self):
        self.factor = 2 * to_numpy(self.scale)

    def call(self, x):
        return x * self.factor + self.offsets[0]

    def load_own_variables(self, store):
        super().load_own_variables(store)
        self.finalize()

    def save_assets(self, folder):
        (pathlib.Path(folder) / "offsets.json").write_text(json.dumps(self.offsets))

    def load_assets(self, folder):
        self.offsets = json.loads((pathlib.Path(folder) / "offsets.json").read_text())


def test_state_made_of_weights_and_of_files_comes_along():
    x = 3 + 2 * floats(B, T, D)
    inputs = keras.Input((None, D))
    normalization, scaling = layers.Normalization(), Scaling(name="scaling")
    normalization.adapt(x)
    y = scaling(normalization(inputs))
    model = keras.Model(inputs, attention()(y, y))
    scaling.scale.assign(1.5)
    scaling.finalize()
    scaling.offsets[0] = 0.25
    converted, _ = keras_moh.convert_to_moh(model, 1.0, 0)
    np.testing.assert_allclose(predict(converted, x)[0], predict(model, x)[0], atol=1e-5)
    # Nothing is shared, and the layer is part of the new model's graph.
    own = converted.get_layer("scaling")
    own.offsets[0] = 9.0
    assert scaling.offsets == [0.25]
    part = keras.Model(converted.input, own.output)
    expected = to_numpy(normalization(x)) * own.factor + 9.0
    np.testing.assert_allclose(predict(part, x)[0], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(keras.backend.backend() != "tensorflow", reason="strings need TensorFlow")
def test_vocabularies_come_along(tmp_path):
    texts = np.array([["the cat sat"], ["a dog"]])
    vectorization = layers.TextVectorization(output_sequence_length=T, name="texts")
    vectorization.adapt(texts)
    inputs = keras.Input((1,), dtype="string")
    x = layers.Embedding(9, D)(vectorization(inputs))
    model = keras.Model(inputs, attention()(x, x))
    converted, _ = keras_moh.convert_to_moh(model, 1.0, 0)
    converted.save(tmp_path / "model.keras")
    texts = ops.convert_to_tensor(texts)
    expected = to_numpy(model(texts))
    np.testing.assert_allclose(to_numpy(converted(texts)), expected, atol=1e-5)
    again = keras.saving.load_model(tmp_path / "model.keras")
    np.testing.assert_allclose(to_numpy(again(texts)), expected, atol=1e-5)
    converted.get_layer("texts").adapt(np.array([["quite other words"]]))
    np.testing.assert_array_equal(to_numpy(model(texts)), expected)


@keras.saving.register_keras_serializable("keras_moh_tests")
class CausalSelfAttention(layers.Layer):
    """A block around attention, of a name as attention has."""

    def build(self, shape):
        self.inner = attention(name="inner")
        self.inner.build(shape, shape)

    def call(self, x):
        return x + self.inner(x, x, use_causal_mask=True)


def test_blocks_that_are_called_attention():
    model = keras.Sequential([keras.Input((None, D)), CausalSelfAttention(), CausalSelfAttention()])
    once, report = keras_moh.convert_to_moh(model, 1.0, 0, layers=0)
    assert [layer.path.split("/")[-1] for layer in report.converted] == ["inner"]
    assert [layer.reason for layer in report.left] == ["it is not among `layers`"]
    twice, report = keras_moh.convert_to_moh(once, 1.0, 0)
    assert len(adapters(twice)) == 2
    assert len(report.converted) == 1
    assert not report.left
    assert_equal_outputs(twice, model)


def test_converting_again_converts_what_was_left():
    model = OwnGraph()
    once, _ = keras_moh.convert_to_moh(model, 2, 2, layers="block")
    adapters(once)[0].query_dense.trainable = False
    twice, report = keras_moh.convert_to_moh(once, 1.0, 0)
    assert [layer.num_active_heads for layer in adapters(twice)] == [6, 4, 4]
    assert len(report.converted) == 1
    for actual, expected in zip(twice.get_weights(), once.get_weights(), strict=True):
        np.testing.assert_array_equal(actual, expected)
    assert [layer.query_dense.trainable for layer in adapters(twice)] == [True, False, True]
    with pytest.raises(ValueError, match="nothing to convert"):
        keras_moh.convert_to_moh(twice, 2, 2)


def test_trainable_flags_are_kept():
    model = functional()
    model.get_layer("causal").trainable = False
    model.get_layer("shared")._query_dense.trainable = False
    converted, _ = keras_moh.convert_to_moh(model, 2, 2)
    assert not converted.get_layer("causal").trainable
    assert not converted.get_layer("shared").query_dense.trainable
    count = len(model.trainable_weights)
    assert len(converted.trainable_weights) == count == len(model.weights) - 10


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "float16"])
def test_dtypes_are_kept(policy):
    inputs = keras.Input((None, D))
    layer = attention(dtype=policy, name="attention")
    converted, _ = keras_moh.convert_to_moh(keras.Model(inputs, layer(inputs, inputs)), 2, 2)
    assert converted.get_layer("attention").dtype_policy.name == policy
    assert [w.dtype for w in converted.weights] == [w.dtype for w in layer.weights]


@pytest.mark.parametrize("make", [functional, OwnGraph])
def test_paths_of_weights_are_kept(make):
    model = make()
    converted, _ = keras_moh.convert_to_moh(model, 2, 2)
    paths = [weight.path for weight in model.weights]
    # Layers that nobody named have new numbers in each model, as in each process.
    expected = [re.sub(r"_\d+(?=/)", "", path) for path in paths]
    assert [re.sub(r"_\d+(?=/)", "", weight.path) for weight in converted.weights] == expected


# What adapters are called with --------------------------------------------------------------------


@pytest.mark.parametrize(
    "call",
    [
        {"use_causal_mask": True},
        {"attention_mask": padding(3, 5, length=T)[:, None]},
        {"return_attention_scores": True, "training": False},
        {"value_mask": padding(3, 5, length=T)},
    ],
    ids=lambda call: next(iter(call)),
)
@pytest.mark.parametrize("make", [attention, group_attention])
def test_adapters_are_called_as_their_sources(make, call):
    layer = make(name="attention")
    inputs = keras.Input((T, D))
    model = keras.Model(inputs, layer(inputs, inputs))
    adapter = keras_moh.convert_to_moh(model, 1.0, 0)[0].get_layer("attention")
    x = floats(B, T, D)
    for actual, expected in zip(
        keras.tree.flatten(adapter(x, x, x, **call)),
        keras.tree.flatten(layer(x, x, x, **call)),
        strict=True,
    ):
        np.testing.assert_allclose(to_numpy(actual), to_numpy(expected), rtol=1e-5, atol=1e-5)
    source, own = (list(inspect.signature(a.call).parameters) for a in (layer, adapter))
    assert own[: len(source)] == source
    assert own[len(source) :] == ["return_routing"]


def test_keras_masks_reach_adapters():
    inputs = keras.Input((T,), dtype="int32")
    x = layers.Embedding(9, D, mask_zero=True)(inputs)
    model = keras.Model(inputs, layers.GlobalAveragePooling1D()(attention()(x, x)))
    converted, _ = keras_moh.convert_to_moh(model, 1.0, 0)
    tokens = np.array([[3, 4, 5, 0, 0], [8, 1, 2, 3, 4]])
    np.testing.assert_allclose(
        converted.predict(tokens, verbose=0), model.predict(tokens, verbose=0), atol=1e-5
    )


def test_adapters_return_their_routing():
    converted, _ = keras_moh.convert_to_moh(functional(), 2, 2)
    x = floats(B, T, D)
    _, routing = converted.get_layer("causal")(x, x, return_routing=True)
    assert tuple(routing.heads.shape) == (B, T, 4)


# What is converted, and into what -----------------------------------------------------------------


def test_budgets():
    model = functional()
    names = ["causal", "shared", "scored", "windowed", "shaped"]
    every = dict.fromkeys(names, 2)

    def numbers(num_shared_heads: Any, top_k: Any, **arguments: Any) -> list[tuple[int, int]]:
        _, report = keras_moh.convert_to_moh(model, num_shared_heads, top_k, **arguments)
        return [(layer.num_shared_heads, layer.top_k) for layer in report.converted]

    assert numbers(1, 3) == [(1, 3)] * 5
    assert numbers(0.5, 0.34) == [(3, 2)] * 5
    assert numbers(np.int64(1), 1 / 3) == [(1, 2)] * 5
    assert numbers(np.float32(0.5), np.float64(0.34)) == [(3, 2)] * 5
    assert numbers(lambda layer: 1 if layer.name == "shared" else 0.5, 1) == [
        *[(3, 1), (1, 1)],
        *[(3, 1)] * 3,
    ]
    assert numbers(every, {**every, "causal": 0.5}) == [(2, 3), *[(2, 2)] * 4]
    assert numbers({0: 1, -1: 2}, 1, layers=[0, -1]) == [(1, 1), (2, 1)]


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"top_k": 7}, "`top_k`: expected a number of the 6 heads.*top_k=7"),
        ({"top_k": -1}, "`top_k`: expected a number of the 6 heads"),
        ({"top_k": 1.5}, "`top_k`: expected a number of the 6 heads"),
        ({"top_k": True}, "`top_k`: expected a number of the 6 heads"),
        ({"num_shared_heads": None}, "`num_shared_heads`: expected a number"),
        ({"top_k": 5}, "layer 'causal' .* cannot be converted.*top_k=5 with 4 routed heads"),
        ({"top_k": 0.1}, "layer 'causal' .* cannot be converted.*top_k=0"),
        ({"top_k": {"causal": 2}}, "one key for each layer.*no key for the layer 'shared'"),
        ({"top_k": {"causal": 2, "casual": 1}}, "keys that name attention layers.*'casual'"),
        ({"layers": "nowhere"}, "names or numbers of attention layers .0: 'causal', 1: 'shared'"),
        ({"layers": [5]}, "names or numbers of attention layers"),
        ({"layers": []}, "There is nothing to convert"),
        ({"layers": lambda layer: False}, "There is nothing to convert.*not among `layers`"),
        ({"router": "one_stage"}, "`router`: expected 'query_norm' or 'two_stage'"),
        ({"routing_groups": 4}, "cannot be converted.*routing_groups=4"),
        ({"implementation": "none"}, "cannot be converted.*implementation"),
        ({"balance_loss_weight": -1}, "balance_loss_weight"),
        ({"model": layers.Dense(1)}, "`model`: expected a keras.Model"),
        ({"model": keras.Sequential([layers.Dense(1)])}, "`model`: expected a built model"),
    ],
)
def test_what_is_refused(arguments, match):
    with pytest.raises(ValueError, match=match):
        keras_moh.convert_to_moh(
            **{"model": functional(), "num_shared_heads": 2, "top_k": 2} | arguments
        )


def test_some_layers_alone():
    model = nested()
    several = ({"first", "second"}, 2), (range(1, 3), 2), (np.array([0, -1]), 2)
    for selection, count in ((0, 1), ("block", 2), (["first", "second"], 2), *several):
        converted, report = keras_moh.convert_to_moh(model, 2, 2, layers=selection)
        assert len(report.converted) == len(adapters(converted)) == count
        assert {left.reason for left in report.left} == {"it is not among `layers`"}
        assert len(report.left) == 4 - count


def tower(name: str) -> keras.Model:
    inputs = keras.Input((None, D))
    return keras.Model(inputs, attention(name="attention")(inputs, inputs), name=name)


def test_models_in_a_model_are_named():
    """Though they were built on their own, so that their layers' paths say nothing of them."""
    inputs = keras.Input((None, D))
    towers = keras.Sequential([tower("left"), keras.Sequential([tower("inner")], name="right")])
    model = keras.Model(inputs, towers(inputs))
    budget = {"left": 1, "right/inner": 3}
    _, report = keras_moh.convert_to_moh(model, budget, budget)
    assert [layer.num_active_heads for layer in report.converted] == [2, 6]
    for name, number in (("left", 0), ("right", 1), ("inner/attention", 1)):
        converted, report = keras_moh.convert_to_moh(model, 2, 2, layers=name)
        assert len(report.converted) == 1
        both = [converted.layers[-1].layers[0].layers[-1], converted.layers[-1].layers[1]]
        assert [isinstance(both[0], Adapter), bool(adapters(both[1]))] == [not number, bool(number)]


def test_models_in_a_model_share_an_input():
    """Their configs have one each."""
    shared, inputs = keras.Input((None, D)), keras.Input((None, D))
    parts = [keras.Model(shared, attention()(shared, shared)) for _ in range(2)]
    model = keras.Model(inputs, parts[1](parts[0](inputs)))
    converted, report = keras_moh.convert_to_moh(model, 1.0, 0)
    assert len(report.converted) == 2
    assert_equal_outputs(converted, model)


class OwnAttention(layers.MultiHeadAttention):
    pass


def with_others() -> keras.Model:
    inputs = keras.Input((T, D))
    x = inputs + attention(name="good")(inputs, inputs)
    x = x + attention(name="gated", use_gate=True)(x, x)
    x = x + OwnAttention(2, 3, name="own")(x, x)
    x = x + layers.Attention(name="plain")([x, x])
    return keras.Model(inputs, x, name="with_others")


def test_what_cannot_be_is_listed():
    model = with_others()
    converted, report = keras_moh.convert_to_moh(model, 0.5, 0.5, sample=floats(B, T, D))
    assert [layer.path for layer in report.converted] == ["good"]
    assert [(layer.path, layer.source) for layer in report.left] == [
        ("gated", "MultiHeadAttention"),
        ("own", "OwnAttention"),
        ("plain", "Attention"),
    ]
    reasons = [layer.reason for layer in report.left]
    assert "use_gate=True" in reasons[0]
    assert "a subclass of MultiHeadAttention" in reasons[1]
    assert "no heads" in reasons[2]
    assert_equal_outputs(converted, model)
    with pytest.raises(ValueError, match=r"'gated', which cannot be .*use_gate=True.*Nothing was"):
        keras_moh.convert_to_moh(model, 2, 2, layers=["good", "gated"])
    with pytest.raises(ValueError, match=r"There is nothing to convert in .*use_gate=True"):
        keras_moh.convert_to_moh(model, 2, 2, layers=lambda layer: False)


def test_lora_and_quantization_come_after_the_conversion():
    for change in (lambda d: d.enable_lora(2), lambda d: d.quantize("int8")):
        inputs = keras.Input((T, D))
        layer = attention(name="attention")
        model = keras.Model(inputs, layer(inputs, inputs))
        change(layer._query_dense)
        with pytest.raises(ValueError, match="convert before"):
            keras_moh.convert_to_moh(model, 2, 2)


def test_models_that_cannot_be_copied_are_refused():
    class WithoutConfig(keras.Model):
        def __init__(self, layer):
            super().__init__()
            self.layer = layer

        def call(self, x):
            return self.layer(x, x)

    model = WithoutConfig(attention())
    model(floats(B, T, D))
    with pytest.raises(ValueError, match="cannot be copied"):
        keras_moh.convert_to_moh(model, 2, 2)


def test_config_of_another_version_is_refused():
    converted, _ = keras_moh.convert_to_moh(subclassed(), 2, 2)
    config = converted.get_config()
    config["adapters"][0]["path"] = "Block:7/MultiHeadAttention:0"
    with pytest.raises(ValueError, match=r"does not fit.*was converted where there is now none"):
        type(converted).from_config(config)


# What a converted model does ----------------------------------------------------------------------


@pytest.mark.parametrize("router", ["query_norm", "two_stage"])
def test_losses_are_divided_by_the_layers_that_route(router):
    model = sequential()
    budget = {"first": 2, "second": 0}
    converted, _ = keras_moh.convert_to_moh(
        model, {"first": 2, "second": 6}, budget, router=router, balance_loss_weight=0.5
    )
    assert [layer.balance_loss_weight for layer in adapters(converted)] == [0.5, 0.5]
    converted, _ = keras_moh.convert_to_moh(
        model, 2, 2, router=router, balance_loss_weight=0.5, z_loss_weight=0.1
    )
    weights = [(layer.balance_loss_weight, layer.z_loss_weight) for layer in adapters(converted)]
    assert weights == [(0.25, 0.05)] * 2
    converted(floats(B, T, D), training=True)
    assert len(converted.losses) == 4


@each_model
def test_fit_lowers_the_loss(make):
    converted, _ = keras_moh.convert_to_moh(make(), 2, 2)
    x = floats(B, T, D)
    targets = keras.tree.map_structure(np.zeros_like, converted.predict(x, verbose=0))
    converted.compile(keras.optimizers.Adam(0.01), "mse")
    losses = converted.fit(x, targets, epochs=8, verbose=0).history["loss"]
    assert losses[-1] < losses[0]


def test_lora_of_projections(tmp_path):
    converted, _ = keras_moh.convert_to_moh(functional(), 2, 2)
    for layer in adapters(converted):
        layer.query_dense.enable_lora(2)
        layer.value_dense.enable_lora(2)
    x = floats(B, T, D)
    before = predict(converted, x)
    converted.compile("sgd", "mse")
    targets = keras.tree.map_structure(np.zeros_like, converted.predict(x, verbose=0))
    frozen = to_numpy(converted.get_layer("causal").query_dense._kernel)
    converted.fit(x, targets, verbose=0)
    np.testing.assert_array_equal(
        to_numpy(converted.get_layer("causal").query_dense._kernel), frozen
    )
    assert not np.allclose(predict(converted, x)[0], before[0], atol=1e-6)


@pytest.mark.parametrize("make", [functional, sequential, OwnGraph])
def test_quantized_models_come_back(make, tmp_path):
    """Those of a class of its own do not in Keras, where their config says nothing of it."""
    converted, _ = keras_moh.convert_to_moh(make(), 1.0, 0)  # else a rounding may choose others
    before = predict(converted, floats(B, T, D))
    converted.quantize("int8")
    assert all(layer.query_dense.quantization_mode == "int8" for layer in adapters(converted))
    for x, y in zip(predict(converted, floats(B, T, D)), before, strict=True):
        assert 0 < np.abs(x - y).max() < 0.3
    converted.save(tmp_path / "model.keras")
    again = keras.saving.load_model(tmp_path / "model.keras")
    assert_equal_outputs(again, converted, 1e-6)


def test_report():
    _, report = keras_moh.convert_to_moh(with_others(), 2, 0.5, sample=floats(B, T, D))
    assert report.active_share == 5 / 6
    assert report.change.relative > 0
    lines = str(report).splitlines()
    assert lines[0] == (
        "1 attention layer converted to MoH, router 'query_norm', 83.3 % of the heads active"
    )
    assert lines[1] == "  good  MultiHeadAttention  5 of 6 heads (2 shared + 3 routed)"
    assert lines[2] == "3 attention layers left as they were:"
    assert "use_gate=True" in lines[3]
    assert lines[-1].startswith("On the sample the outputs move by ")
    with pytest.raises(AttributeError):
        report.router = "two_stage"


def test_a_sample_needs_float_outputs():
    inputs = keras.Input((T, D))
    model = keras.Model(inputs, ops.argmax(attention()(inputs, inputs), axis=-1))
    with pytest.raises(ValueError, match="`sample` needs a model with outputs of a float dtype"):
        keras_moh.convert_to_moh(model, 2, 2, sample=floats(B, T, D))


def test_a_long_sequence_takes_a_fast_path(ran):
    """By the rule of `costs.py` as it is."""
    inputs = keras.Input((None, 64))
    layer = layers.MultiHeadAttention(8, 32)
    model = keras.Model(inputs, layer(inputs, inputs, use_causal_mask=True))
    converted, _ = keras_moh.convert_to_moh(model, 0.25, 0.25)
    converted.predict(floats(1, 1024, 64), verbose=0)
    assert {*ran} - {"reference"}
