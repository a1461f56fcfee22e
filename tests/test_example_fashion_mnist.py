"""The example `examples/fashion_mnist.py`, run as a user runs it, on images made here."""

import json
import os
from functools import partial

import keras
import pytest

from tests import examples

run_example = partial(examples.run_example, "fashion_mnist")
BACKEND = keras.backend.backend()


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """What Debian's package would have, and the same as what Keras would have fetched."""
    folder = tmp_path_factory.mktemp("some data")
    examples.write_fashion_mnist(
        folder / "dataset-fashion-mnist", folder / "datasets" / "fashion-mnist"
    )
    return folder


def test_trains_measures_and_draws_and_does_nothing_twice(data, tmp_path):
    output = tmp_path / "a folder" / "of results"
    options = ["--backend", BACKEND, "--output", output, "--seeds", 1, "--depth", 1]
    epochs = ["--epochs", 1]
    process = run_example("--source", "debian", "--data", data, *options, *epochs)
    assert process.returncode == 0, process.stderr
    assert "━━━" in process.stdout  # Keras's progress bar
    assert "Fetching" not in process.stdout
    assert {path.name for path in output.iterdir()} == {
        *("backup", "fashion_mnist.png", "results.json")
    }
    assert not list((output / "backup").iterdir())
    assert (output / "fashion_mnist.png").read_bytes().startswith(b"\x89PNG")

    results = json.loads((output / "results.json").read_text())
    assert results["settings"] == {"backend": BACKEND, "epochs": 1, "depth": 1, "samples": None}
    assert results["versions"].keys() == {"keras_moh", "keras", "numpy", BACKEND}
    variants = ["MHA", "MoH 75 %", "MoH 50 %"]
    assert list(results["runs"]) == list(results["seconds_per_step"]) == variants
    plain, *routed = (results["runs"][name]["0"] for name in variants)
    # The router: 64 features to all candidates, to the shared heads, and to the two kinds.
    assert [run["parameters"] - plain["parameters"] for run in routed] == [64 * (8 + 2)] * 2
    for name in variants:
        # A share of 11 images. And what is printed are these numbers.
        accuracy = results["runs"][name]["0"]["accuracy"]
        assert round(accuracy * 11 / 100) == pytest.approx(accuracy * 11 / 100, abs=1e-4)
        assert results["seconds_per_step"][name] > 0
        assert f"| {name} " in process.stdout
        assert f" {accuracy:.2f} |" in process.stdout

    # All of it is done: so it is shown, with the images from another source, and nothing trained.
    again = run_example(*options, *epochs, KERAS_HOME=str(data))
    assert again.returncode == 0, again.stderr
    assert "seed 0" not in again.stdout
    assert again.stdout.splitlines()[-5:] == process.stdout.splitlines()[-5:]
    assert json.loads((output / "results.json").read_text()) == results


def test_help_names_the_options():
    process = run_example("--help")
    assert process.returncode == 0
    for option in "backend", "source", "data", "output", "epochs", "seeds", "depth", "samples":
        assert f"--{option} " in process.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--backend", "numpy"], "argument --backend: invalid choice: 'numpy'"),
        (["--source", "cats"], "argument --source: invalid choice: 'cats'"),
        (["--epochs", "0"], "argument --epochs: expected an integer of at least 1, not '0'"),
    ],
)
def test_a_bad_option_is_refused(arguments, message):
    process = run_example(*arguments)
    assert process.returncode == 2
    assert message in process.stderr
    assert "Traceback" not in process.stderr


def test_a_missing_package_is_named_with_the_extra_that_has_it(tmp_path):
    """Keras is hidden behind a module that fails as a missing one does."""
    (tmp_path / "keras.py").write_text("raise ModuleNotFoundError(name='keras')\n")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    process = run_example("--backend", BACKEND, PYTHONPATH=path)
    assert process.returncode == 1
    assert "needs keras, which is not installed" in process.stderr
    assert f'pip install "keras-moh[examples,{BACKEND}]"' in process.stderr
    assert "Traceback" not in process.stderr
