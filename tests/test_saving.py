"""What is saved comes back: configs, weights, models; in a new process and on another backend."""

import copy
import inspect
import json
import pickle
import subprocess
import sys
from pathlib import Path

import keras
import numpy as np
import pytest
from helpers import to_numpy
from samples import ARGUMENTS, B, D, S, T, floats, moh_attention

from keras_moh import MoHAttention, QueryNormRouter, RotaryEmbedding, Router, TwoStageRouter

SAVED = Path(__file__).parent / "saved"

# A value of its own for every argument of the constructor.
EVERY_ARGUMENT = {
    **{"num_heads": 6, "key_dim": 3, "num_shared_heads": 2, "top_k": 2, "num_key_value_heads": 3},
    **{"value_dim": 5, "output_shape": (7, 2), "dropout": 0.25, "use_bias": False},
    **{"router": "two_stage", "routing_groups": 2},
    **{"balance_loss_weight": 0.2, "z_loss_weight": 0.1, "qk_norm": "rms"},
    **{"attention_axes": (2,), "sliding_window": 3, "implementation": "reference"},
    "rotary_embedding": RotaryEmbedding(500.0, 4.0, name="turn"),
    "kernel_initializer": keras.initializers.HeNormal(seed=4),
    "bias_initializer": keras.initializers.Constant(0.5),
    "kernel_regularizer": keras.regularizers.L1L2(0.1, 0.2),
    "bias_regularizer": keras.regularizers.L1(0.3),
    "activity_regularizer": keras.regularizers.L2(0.4),
    "kernel_constraint": keras.constraints.MaxNorm(3.0),
    "bias_constraint": keras.constraints.NonNeg(),
    "seed": 9,
}
OF_EVERY_LAYER = {"name": "attention", "trainable": False, "dtype": "mixed_bfloat16"}


@keras.saving.register_keras_serializable("keras_moh_tests")
class ScaledRouter(TwoStageRouter):
    """A router of a user's own, with an argument of its own."""

    def __init__(self, *args, scale, **kwargs):
        super().__init__(*args, **kwargs)
        self.scale = scale

    def call(self, inputs, return_scores=False):
        return super().call(self.scale * inputs, return_scores=return_scores)

    def get_config(self):
        return {**super().get_config(), "scale": self.scale}


def test_every_argument_is_in_the_config():
    parameters = set(inspect.signature(MoHAttention.__init__).parameters) - {"self", "kwargs"}
    assert set(EVERY_ARGUMENT) == parameters
    config = MoHAttention(**EVERY_ARGUMENT, **OF_EVERY_LAYER).get_config()
    assert set(config) == parameters | set(OF_EVERY_LAYER)
    for name, value in EVERY_ARGUMENT.items():
        if isinstance(value, keras.initializers.Initializer | keras.regularizers.Regularizer):
            assert config[name]["config"] == value.get_config()
        elif isinstance(value, RotaryEmbedding):
            assert config[name]["config"]["scaling_factor"] == 4.0
        elif isinstance(value, keras.constraints.Constraint):
            assert config[name]["class_name"] == type(value).__name__
        else:
            assert config[name] == value
    assert config["name"] == "attention"
    assert config["trainable"] is False


CONFIGURATIONS = [
    EVERY_ARGUMENT | OF_EVERY_LAYER,
    ARGUMENTS,
    {"num_heads": 6, "key_dim": 3, "router": None},
    ARGUMENTS | {"router": "query_norm", "routing_groups": 2, "z_loss_weight": 0.1},
    {"num_heads": 6, "key_dim": 3, "router": QueryNormRouter(6, 1, 3, name="mine")},
    {"num_heads": 6, "key_dim": 3, "router": TwoStageRouter(6, 1, 3, name="mine")},
    {"num_heads": 6, "key_dim": 3, "router": ScaledRouter(6, 1, 3, scale=0.5)},
    {"num_heads": 6, "key_dim": 3, "router": ScaledRouter(6, 2, 4, scale=0.5, routing_groups=2)},
    ARGUMENTS | {"qk_norm": True, "output_shape": 7, "attention_axes": -2},
]


@pytest.mark.parametrize("arguments", CONFIGURATIONS)
def test_config_round_trip(arguments):
    layer = MoHAttention(**arguments)
    config = layer.get_config()
    again = MoHAttention.from_config(json.loads(json.dumps(config)))
    assert json.dumps(again.get_config()) == json.dumps(config)
    serialized = keras.saving.serialize_keras_object(layer)
    again = keras.saving.deserialize_keras_object(json.loads(json.dumps(serialized)))
    assert json.dumps(again.get_config()) == json.dumps(config)
    assert type(again.router) is type(layer.router)


def test_config_round_trip_of_a_router():
    router = TwoStageRouter(
        6, 2, 2, "he_normal", "l2", "non_neg", routing_groups=2, dtype="mixed_float16"
    )
    again = TwoStageRouter.from_config(json.loads(json.dumps(router.get_config())))
    assert again.get_config() == router.get_config()
    assert again.compute_dtype == "float32"
    assert again.routing_groups == 2


def test_routing_groups_are_the_routers():
    layer = MoHAttention(6, 3, router=TwoStageRouter(6, 2, 4, routing_groups=2))
    assert layer.routing_groups == layer.get_config()["routing_groups"] == 2
    assert MoHAttention(**ARGUMENTS, routing_groups=2).router.routing_groups == 2
    assert MoHAttention(6, 3, router=None).routing_groups == 1


def test_configs_of_layers_do_not_share_a_router():
    """A layer made from a config has a router, and so weights, of its own."""
    layer = MoHAttention(6, 3, router=TwoStageRouter(6, 1, 3))
    again = MoHAttention.from_config(layer.get_config())
    assert again.router is not layer.router


@pytest.mark.parametrize(
    "shapes",
    [[(B, T, D)], [(None, None, D), (None, None, 13)], [(B, T, D), (B, S, 13), (B, S, 17)]],
)
def test_build_config(shapes):
    layer = moh_attention()
    layer.build(*shapes)
    again = MoHAttention.from_config(layer.get_config())
    again.build_from_config(json.loads(json.dumps(layer.get_build_config())))
    assert [(w.path, w.shape) for w in again.weights] == [(w.path, w.shape) for w in layer.weights]


def small_model(**arguments):
    inputs = keras.Input((None, D))
    inner = keras.Sequential([keras.Input((None, D)), moh_attention(**arguments)], name="inner")
    middle = keras.Sequential([keras.Input((None, D)), inner], name="middle")
    return keras.Model(
        inputs,
        moh_attention(weights=2, router=None, num_shared_heads=None, top_k=None)(
            middle(inputs), inputs
        ),
    )


KINDS = {
    "two stages": {},
    "groups of heads": {"routing_groups": 2},
    "query norm": {"router": "query_norm"},
    "rotary": {"key_dim": 4, "rotary_embedding": RotaryEmbedding(50.0)},
    "everything": {
        "num_key_value_heads": 2,
        "value_dim": 5,
        "qk_norm": True,
        "dropout": 0.1,
        "seed": 2,
    },
    "router of one's own": {
        "router": ScaledRouter(6, 1, 3, scale=0.5),
        "num_shared_heads": None,
        "top_k": None,
    },
    "mixed_bfloat16": {"dtype": "mixed_bfloat16"},
}


@pytest.mark.parametrize("arguments", KINDS.values(), ids=KINDS)
def test_models_come_back(arguments, tmp_path):
    """Saved whole, by weights alone, by `clone_model`, pickled and copied, also once trained."""
    model, x = small_model(**arguments), floats(B, T, D)
    model.compile("sgd", "mse")
    model.train_on_batch(x, 0 * x)
    expected = model.predict_on_batch(x)

    model.save(tmp_path / "model.keras")
    model.save_weights(tmp_path / "model.weights.h5")
    clone = keras.models.clone_model(model)
    clone.set_weights(model.get_weights())
    other = keras.models.clone_model(model)
    other.load_weights(tmp_path / "model.weights.h5")
    models = {
        "load_model": keras.saving.load_model(tmp_path / "model.keras"),
        "load_weights": other,
        "clone_model": clone,
        "deepcopy": copy.deepcopy(model),
        "pickle": pickle.loads(pickle.dumps(model)),
    }
    for name, again in models.items():
        np.testing.assert_array_equal(again.predict_on_batch(x), expected, err_msg=name)
        assert [w.dtype for w in again.weights] == [w.dtype for w in model.weights]


def test_training_goes_on_after_loading(tmp_path):
    """Optimizer and losses included. (Of dropout, Keras does not save how far its seeds are.)"""
    model, x = small_model(z_loss_weight=0.1), floats(B, T, D)
    model.compile("adam", "mse")
    model.train_on_batch(x, 0 * x)
    model.save(tmp_path / "model.keras")
    again = keras.saving.load_model(tmp_path / "model.keras")
    losses = [model.train_on_batch(x, 0 * x) for _ in range(2)]
    losses_again = [again.train_on_batch(x, 0 * x) for _ in range(2)]
    np.testing.assert_allclose(losses_again, losses, rtol=1e-6)


def test_layer_that_was_pickled_or_copied():
    layer, x = moh_attention(dropout=0.1), floats(B, T, D)
    expected = to_numpy(layer(x, training=True) * 0 + layer(x))
    for again in (pickle.loads(pickle.dumps(layer)), copy.deepcopy(layer)):
        np.testing.assert_array_equal(to_numpy(again(x)), expected)


@pytest.mark.parametrize("file", ["model.keras", "model.weights.h5"])
def test_weights_of_another_layer_are_refused(file, tmp_path):
    def model(**arguments):
        return keras.Sequential([keras.Input((T, D)), moh_attention(**arguments)])

    model().save(tmp_path / file) if file == "model.keras" else model().save_weights(
        tmp_path / file
    )
    with pytest.raises(ValueError, match=r"routed_scores|shape"):
        model(num_shared_heads=3).load_weights(tmp_path / file)


IN_A_NEW_PROCESS = """
import sys
import keras
import keras_moh
import numpy as np

path = sys.argv[1]
model = keras.saving.load_model(path + ".keras")
arrays = np.load(path + ".npz")
outputs = model.predict(arrays["tokens"], verbose=0)
np.testing.assert_allclose(outputs, arrays["outputs"], atol=1e-5)
print(type(model.layers[2].router).__name__, [layer.name for layer in model.layers])
"""


@pytest.mark.parametrize("backend", ["torch", "jax", "tensorflow"])
def test_file_of_each_backend(backend):
    """Saved there, loaded here, with equal outputs."""
    model = keras.saving.load_model(SAVED / f"{backend}.keras")
    arrays = np.load(SAVED / f"{backend}.npz")
    outputs = model.predict(arrays["tokens"], verbose=0)
    assert np.abs(outputs).max() > 0.1
    np.testing.assert_allclose(outputs, arrays["outputs"], atol=1e-5)


def test_file_in_a_new_process():
    """One that imports the package and nothing else of it: no `custom_objects` are needed."""
    command = [
        sys.executable,
        "-W",
        "error::UserWarning",
        "-c",
        IN_A_NEW_PROCESS,
        str(SAVED / "jax"),
    ]
    subprocess.run(command, check=True, timeout=120)


def test_files_are_of_three_different_models():
    """So that none of them is a copy of another's."""
    outputs = [np.load(path)["outputs"] for path in sorted(SAVED.glob("*.npz"))]
    assert len(outputs) == 3
    for one, other in ((0, 1), (0, 2), (1, 2)):
        assert np.abs(outputs[one] - outputs[other]).max() > 0.1


def test_router_classes_are_registered():
    for cls in (MoHAttention, QueryNormRouter, RotaryEmbedding, Router, TwoStageRouter):
        assert keras.saving.get_registered_object(f"keras_moh>{cls.__name__}") is cls
