"""The quickstart, `examples/vit_digits.py`, run as a user runs it."""

import json
import os
from functools import partial

import keras
import numpy as np
import pytest

import keras_moh
from tests import examples

run_example = partial(examples.run_example, "vit_digits")


def test_trains_saves_reloads_and_draws(tmp_path):
    backend = keras.backend.backend()
    output = tmp_path / "a folder" / "of results"
    process = run_example(
        *("--backend", backend, "--epochs", 1, "--samples", 100, "--seed", 3, "--output", output),
        *("--heads", 5, "--shared-heads", 1, "--top-k", 2),
    )

    assert process.returncode == 0, process.stderr
    assert "━━━" in process.stdout  # Keras's progress bar
    assert "with 60% of the heads active" in process.stdout
    assert {path.name for path in output.iterdir()} == {"model.keras", "heads.png", "results.json"}
    image = (output / "heads.png").read_bytes()
    assert image.startswith(b"\x89PNG")
    assert len(image) < 200_000

    report = json.loads((output / "results.json").read_text())
    assert report["options"] == {
        "backend": backend,
        "dataset": "digits",
        "heads": 5,
        "shared_heads": 1,
        "top_k": 2,
        "epochs": 1,
        "samples": 100,
        "seed": 3,
        "output": str(output),
    }
    assert report["versions"].keys() == {"keras_moh", "keras", "numpy", backend}
    assert report["versions"]["keras_moh"] == keras_moh.__version__
    moh, plain, reloaded = (report["results"][name] for name in ("MoH", "plain", "reloaded"))
    # Of both layers, the router: 64 features to 4 routed heads and to the weights of the two kinds.
    assert moh["parameters"] - plain["parameters"] == 2 * 64 * (4 + 2)
    assert (moh["active_heads"], plain["active_heads"]) == (0.6, 1)
    assert reloaded["accuracy"] == moh["accuracy"]
    for result in (moh, plain):
        assert 0 <= result["accuracy"] <= 1
        assert result["seconds"] > 0

    loads = np.array(report["routed_head_loads"])
    assert loads.shape == (2, 4, 10)
    np.testing.assert_allclose(loads.sum(axis=1), 2, rtol=1e-6)  # top_k: what every token takes
    assert loads.min() >= 0
    assert loads.max() <= 1


def test_help_names_the_options():
    process = run_example("--help")
    assert process.returncode == 0
    for option in ("backend", "dataset", "heads", "shared-heads", "top-k", "epochs", "samples"):
        assert f"--{option} " in process.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--backend", "numpy"], "argument --backend: invalid choice: 'numpy'"),
        (["--dataset", "cats"], "argument --dataset: invalid choice: 'cats'"),
        (["--epochs", "0"], "argument --epochs: expected an integer of at least 1, not '0'"),
        (["--seed", "-1"], "argument --seed: expected an integer of at least 0, not '-1'"),
        (["--heads", "1.5"], "argument --heads: expected an integer of at least 1, not '1.5'"),
        (["--top-k", "7"], "--shared-heads 2 and --top-k 7 are more than the 8 of --heads"),
    ],
)
def test_a_bad_option_is_refused(arguments, message):
    process = run_example(*arguments)
    assert process.returncode == 2
    assert message in process.stderr
    assert "Traceback" not in process.stderr


def test_a_missing_package_is_named_with_the_extra_that_has_it(tmp_path):
    """Scikit-learn is hidden behind a module that fails as a missing one does."""
    (tmp_path / "sklearn.py").write_text("raise ModuleNotFoundError(name='sklearn')\n")
    backend = keras.backend.backend()
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    process = run_example("--backend", backend, PYTHONPATH=path)
    assert process.returncode == 1
    assert "needs sklearn, which is not installed" in process.stderr
    assert f'pip install "keras-moh[examples,{backend}]"' in process.stderr
    assert "Traceback" not in process.stderr
