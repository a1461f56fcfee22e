"""The example `examples/fashion_dit.py`, run as a user runs it, on images made here."""

import importlib
import json
import sys
from functools import partial

import keras
import numpy as np
import pytest

from tests import examples

run_example = partial(examples.run_example, "fashion_dit")
BACKEND = keras.backend.backend()


def test_trains_draws_and_measures_and_does_nothing_twice(tmp_path):
    examples.write_fashion_mnist(tmp_path / "dataset-fashion-mnist")
    output = tmp_path / "results"
    options = ["--backend", BACKEND, "--source", "debian", "--data", tmp_path, "--output", output]
    numbers = ["--seeds", 1, "--depth", 1, "--epochs", 1, "--draws", 4, "--sampler-steps", 3]
    process = run_example(*options, *numbers)
    assert process.returncode == 0, process.stderr
    assert "━━━" in process.stdout  # Keras's progress bars
    assert {path.name for path in output.iterdir()} == {
        *("backup", "classifier.keras", "distance.png", "drawings", "drawn.png", "results.json")
    }
    assert (output / "drawn.png").read_bytes().startswith(b"\x89PNG")

    results = json.loads((output / "results.json").read_text())
    variants = ["MHA", "MoH 75 %", "MoH 50 %"]
    assert list(results["runs"]) == list(results["seconds_per_step"]) == variants
    plain, *routed = (results["runs"][name]["0"] for name in variants)
    # The router: 96 features to all candidates, to the shared heads, and to the two kinds.
    assert [run["parameters"] - plain["parameters"] for run in routed] == [96 * (8 + 2)] * 2
    for name in variants:
        measures = results["runs"][name]["0"]
        assert f" {measures['distance']:.2f} |" in process.stdout
        assert f" {measures['recognized']:.1f} |" in process.stdout
        # The share of 40 images, and these images: no two alike.
        count = measures["recognized"] * 40 / 100
        assert round(count) == pytest.approx(count)
        drawings = np.load(output / "drawings" / f"{name.replace(' ', '_')}_0.npy")
        assert drawings.shape == (10, 4, 28, 28)
        assert len(np.unique(drawings.reshape(40, -1), axis=0)) == 40
    # A new model, after a step, draws what is unlike any image; images are like images.
    assert results["real images"]["distance"] < 0.5 * plain["distance"]

    again = run_example(*options, *numbers)
    assert again.returncode == 0, again.stderr
    assert "seed 0" not in again.stdout
    assert "classifier" not in again.stdout
    assert again.stdout.splitlines()[-6:] == process.stdout.splitlines()[-6:]
    assert json.loads((output / "results.json").read_text()) == results


@pytest.fixture
def fashion_dit(monkeypatch):
    monkeypatch.syspath_prepend(examples.EXAMPLES)
    monkeypatch.setattr(sys, "argv", ["fashion_dit.py", "--backend", BACKEND])
    return importlib.import_module("fashion_dit")


def test_frechet_distance(fashion_dit):
    """A symmetric positive map of features is how they are moved at the least cost."""
    random = np.random.default_rng(0)
    features = random.normal(size=(300, 5)) @ random.normal(size=(5, 5))
    root = random.normal(size=(5, 5))
    move, shift = root @ root.T, random.normal(size=5)
    moved = features @ move + shift
    assert fashion_dit.frechet_distance(features, features) == pytest.approx(0, abs=1e-9)
    cost = (np.eye(5) - move) @ np.cov(features, rowvar=False) @ (np.eye(5) - move)
    mean = np.sum((moved.mean(axis=0) - features.mean(axis=0)) ** 2)
    for pair in (features, moved), (moved, features):
        assert fashion_dit.frechet_distance(*pair) == pytest.approx(mean + np.trace(cost))


def test_an_epoch_has_every_image_once(fashion_dit):
    images = np.arange(200.0).reshape(200, 1, 1, 1)
    batches = fashion_dit.LabelledImages(images, np.arange(200), seed=1)
    epochs = []
    for epoch in (0, 1, 0):
        batches.start(epoch)
        parts = [batches[i][0] for i in range(len(batches))]
        for part in parts:
            np.testing.assert_array_equal(part["images"].ravel(), part["labels"])
        epochs.append(np.concatenate([part["labels"] for part in parts]))
    assert len(set(epochs[0])) == len(epochs[0]) == 3 * 64
    np.testing.assert_array_equal(epochs[0], epochs[2])
    assert np.any(epochs[0] != epochs[1])


def test_help():
    process = run_example("--help")
    assert process.returncode == 0
    for option in "source", "output", "epochs", "seeds", "depth", "draws", "sampler-steps":
        assert f"--{option} " in process.stdout


@pytest.mark.parametrize(
    ("option", "value", "expected"),
    [
        ("--draws", "3", "of at least 4"),
        ("--samples", "1", "of at least 2"),  # one has no covariance
        ("--sampler-steps", "1", "from 2 to 1000"),
        ("--sampler-steps", "1001", "from 2 to 1000"),
    ],
)
def test_bad_options_are_refused_before_anything_is_trained(option, value, expected):
    process = run_example(option, value)
    assert process.returncode == 2
    assert f"argument {option}: expected an integer {expected}, not '{value}'" in process.stderr
