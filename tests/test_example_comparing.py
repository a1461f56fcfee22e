"""What the examples that compare MoH with plain attention share: `examples/comparing.py`."""

import importlib
import json

import keras
import numpy as np
import pytest

from keras_moh import MoHAttention
from keras_moh.models import MoHViT
from tests.examples import EXAMPLES
from tests.helpers import to_numpy

SETTINGS = {"backend": keras.backend.backend(), "epochs": 3}


@pytest.fixture
def comparing(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    return importlib.import_module("comparing")


@pytest.fixture
def batches(comparing):
    """Numbers that are others in every epoch. `stop_at` is of an epoch that does not begin."""

    class Numbers(comparing.Batches):
        stop_at = None

        def start(self, epoch):
            if epoch == self.stop_at:
                raise KeyboardInterrupt
            self.random = np.random.default_rng(epoch).normal(size=(4, 5, 3)).astype("float32")

        def __len__(self):
            return 4

        def __getitem__(self, index):
            return self.random[index], self.random[index].sum(axis=1, keepdims=True)

    return Numbers()


def make():
    layers = [keras.layers.Dense(2), keras.layers.Dropout(0.5), keras.layers.Dense(1)]
    model = keras.Sequential([keras.Input((3,)), *layers])
    # Adam has moments, the schedule a step, weights their averages, and dropout the state of its
    # random numbers: a training that goes on needs them, too.
    schedule = keras.optimizers.schedules.CosineDecay(0.1, 12)
    model.compile(
        optimizer=keras.optimizers.Adam(schedule, use_ema=True, ema_momentum=0.8), loss="mse"
    )
    return model


def weights(model):
    return {"weights": [to_numpy(w).tolist() for w in model.weights]}


def never(model):
    raise AssertionError("trained twice")


def test_an_interrupted_training_ends_as_one_that_was_not(comparing, batches, tmp_path):
    whole = comparing.Comparison(tmp_path / "whole", SETTINGS)
    whole.train("MoH 75 %", 7, make, batches, 3, weights)

    interrupted = comparing.Comparison(tmp_path / "interrupted", SETTINGS)
    batches.stop_at = 2
    with pytest.raises(KeyboardInterrupt):
        interrupted.train("MoH 75 %", 7, make, batches, 3, never)
    # What was begun is not gone on with by other settings.
    with pytest.raises(SystemExit, match="of other settings"):
        comparing.Comparison(tmp_path / "interrupted", {**SETTINGS, "epochs": 4})
    batches.stop_at = None
    begun = []
    start, batches.start = batches.start, lambda epoch: (begun.append(epoch), start(epoch))
    later = comparing.Comparison(tmp_path / "interrupted", SETTINGS)
    later.train("MoH 75 %", 7, make, batches, 3, weights)
    assert begun == [0, 2]  # before the training, and its last epoch
    expected, found = (x.of_seeds("MoH 75 %", "weights")[0] for x in (whole, later))
    for a, b in zip(expected, found, strict=True):
        np.testing.assert_allclose(b, a, rtol=1e-6)

    last = comparing.Comparison(tmp_path / "interrupted", SETTINGS)
    last.train("MoH 75 %", 7, make, batches, 3, never)
    assert last.results == later.results
    assert last.of_seeds("MoH 75 %", "parameters") == [3 * 2 + 2 + 2 + 1]


def test_an_interruption_before_the_measurement_trains_no_epoch_twice(comparing, batches, tmp_path):
    comparison = comparing.Comparison(tmp_path, SETTINGS)
    with pytest.raises(AssertionError, match="trained twice"):
        comparison.train("MHA", 0, make, batches, 3, never)
    begun = []
    start, batches.start = batches.start, lambda epoch: (begun.append(epoch), start(epoch))
    comparison.train("MHA", 0, make, batches, 3, weights)
    assert begun == [0]


def test_results_of_other_settings_are_not_mixed(comparing, tmp_path):
    comparing.Comparison(tmp_path, SETTINGS)
    with pytest.raises(
        SystemExit, match=r"(?s)of other settings.*'epochs': 3.*'epochs': 4.*Remove"
    ):
        comparing.Comparison(tmp_path, {**SETTINGS, "epochs": 4})


def test_times_are_the_medians_of_steps_in_turn(comparing, tmp_path, monkeypatch):
    clock, called = [0.0], []

    class Model:
        def __init__(self, name, seconds):
            self.name, self.seconds = name, iter(seconds)

        def train_on_batch(self, x, y):
            called.append(self.name)
            clock[0] += next(self.seconds)

    monkeypatch.setattr(comparing.time, "perf_counter", lambda: clock[0])
    comparison = comparing.Comparison(tmp_path, SETTINGS)
    makes = {"a": lambda: Model("a", [9, 8, 1, 2, 7]), "b": lambda: Model("b", [9, 9, 4, 3, 5])}
    comparison.time_steps(makes, (None, None), rounds=3)
    assert comparison.results["seconds_per_step"] == {"a": 2, "b": 4}
    assert called == ["a", "b"] * 5
    assert json.loads((tmp_path / "results.json").read_text()) == comparison.results


def test_a_table_and_a_figure_of_seeds(comparing, tmp_path):
    comparison = comparing.Comparison(tmp_path, SETTINGS)
    parameters = {"parameters": 1234}
    comparison.results["runs"] = {
        # Of seed 11 only one variant is done: that is not compared.
        "MHA": {
            seed: {**parameters, "x": x} for seed, x in {"10": 3.0, "9": 1.0, "11": 50.0}.items()
        },
        "MoH": {seed: {**parameters, "x": 5.0} for seed in ("9", "10")},
    }
    assert comparison.rows("x", 0) == [["MHA", "1,234", "2 (1-3)"], ["MoH", "1,234", "5 (5-5)"]]
    assert len(comparison.draw("x", "some measure").axes) == 1
    comparison.results["seconds_per_step"] = {"MHA": 0.0123, "MoH": 0.5}
    assert comparison.of_seeds("MHA", "x") == [1.0, 3.0]
    assert comparison.rows("x", 1) == [
        ["MHA", "1,234", "2.0 (1.0-3.0)", "12 ms"],
        ["MoH", "1,234", "5.0 (5.0-5.0)", "500 ms"],
    ]
    values, times = comparison.draw("x", "some measure").axes
    assert values.get_ylabel() == "some measure"
    np.testing.assert_array_equal([line.get_ydata() for line in values.lines[:1]], [[1.0, 3.0]])
    np.testing.assert_allclose([bar.get_height() for bar in times.patches], [12.3, 500])


def test_plain_attention_is_that_of_keras(comparing):
    """The model without routing, its attention computed by Keras's own layer."""
    keras.utils.set_random_seed(0)
    arguments = {"image_size": 4, "patch_size": 2, "num_classes": 2, "num_channels": 1}
    routed = MoHViT(**arguments, hidden_size=6, depth=2, num_heads=3, num_shared_heads=1, top_k=1)
    model = comparing.with_router(routed, lambda layer: None)
    layers = [layer for layer in model.layers if isinstance(layer, MoHAttention)]
    assert [layer.num_heads for layer in layers] == [3, 3]
    assert not any("router" in weight.path for weight in model.weights)

    def keras_attention(layer):
        if not isinstance(layer, MoHAttention):
            return layer
        attention = keras.layers.MultiHeadAttention(3, 2)
        return OnItself(attention)

    class OnItself(keras.layers.Layer):
        def __init__(self, attention):
            super().__init__()
            self.attention = attention

        def build(self, shape):
            self.attention.build(shape, shape)

        def call(self, x):
            return self.attention(x, x)

    expected = keras.models.clone_model(model, clone_function=keras_attention)
    places = [layer for layer in expected.layers if isinstance(layer, OnItself)]
    for place, layer in zip(places, layers, strict=True):
        place.attention.set_weights(layer.get_weights())
    images = np.random.default_rng(0).normal(size=(3, 4, 4, 1)).astype("float32")
    np.testing.assert_allclose(to_numpy(model(images)), to_numpy(expected(images)), atol=1e-6)
