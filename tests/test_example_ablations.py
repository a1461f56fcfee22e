"""The example `examples/ablations.py`, run as a user runs it, on images made here."""

import importlib
import json
import sys

import keras
import numpy as np
import pytest

from keras_moh import MoHAttention
from tests.examples import EXAMPLES, run_example, write_fashion_mnist
from tests.helpers import to_numpy

BACKEND = keras.backend.backend()


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ablations")
    write_fashion_mnist(folder / "dataset-fashion-mnist")
    process = run_example(
        *("ablations", "--backend", BACKEND, "--source", "debian", "--data", folder),
        *("--output", folder / "results", "--seeds", 1, "--depth", 1, "--epochs", 1),
    )
    assert process.returncode == 0, process.stderr
    files = {path.name for path in (folder / "results").iterdir()}
    assert files == {"backup", "accuracy.png", "loads.png", "results.json"}
    results = json.loads((folder / "results" / "results.json").read_text())
    for name, run in results["runs"].items():
        assert f"| {name} " in process.stdout
        assert f" {run['0']['accuracy']:.2f} |" in process.stdout
    return results["runs"]


def test_each_variant_differs_in_one_thing(results):
    shared = {"as it is": 3, "one stage": 3, "balance 0": 3, "balance 0.1": 3}
    shared |= {f"{n} shared": n for n in (0, 1, 2, 4, 5)}
    assert results.keys() == shared.keys()
    plain = results["as it is"]["0"]["parameters"] - 64 * (8 + 2)
    for name, num_shared_heads in shared.items():
        run = results[name]["0"]
        # Of 64 features each to the candidates, to several shared heads, and to two kinds.
        columns = 8 - num_shared_heads
        columns += num_shared_heads if num_shared_heads > 1 else 0
        columns += 0 if name == "one stage" or not num_shared_heads else 2
        assert run["parameters"] - plain == 64 * columns
        (loads,) = run["loads"]
        assert len(loads) == 8 - num_shared_heads
        assert sum(loads) == pytest.approx(6 - num_shared_heads)
        assert 0 <= min(loads) <= max(loads) <= 1


@pytest.fixture
def ablations(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.setattr(sys, "argv", ["ablations.py", "--backend", BACKEND])
    return importlib.import_module("ablations")


def test_the_gates_of_one_stage_sum_to_the_heads_of_each_kind(ablations):
    """With two stages it is their sum alone that is fixed by neither kind."""
    tokens = np.random.default_rng(0).normal(size=(5, 7, 64)).astype("float32")
    for make, alike in ((ablations.one_stage, True), (ablations.VARIANTS["as it is"], False)):
        layer = next(x for x in make(1).layers if isinstance(x, MoHAttention))
        gates = to_numpy(layer.router(tokens).gates)
        for kind in gates[..., :3], gates[..., 3:]:
            assert np.allclose(kind.sum(axis=-1), 3, atol=1e-5) == alike


def test_weights_of_the_balancing_loss(ablations):
    for name, weight in {"as it is": 0.01, "balance 0": 0, "balance 0.1": 0.1}.items():
        model = ablations.VARIANTS[name](2)
        layers = [x for x in model.layers if isinstance(x, MoHAttention)]
        assert [x.balance_loss_weight for x in layers] == [weight / 2] * 2


def test_loads_are_drawn_by_layer(ablations, tmp_path):
    comparison = ablations.Comparison(tmp_path, {"backend": BACKEND})
    loads = {"balance 0": [[0.1] * 5, [0.3] * 5]}
    loads |= {"as it is": [[0.6] * 5, [0.5] * 5], "balance 0.1": [[0.7] * 5, [0.9] * 5]}
    comparison.results["runs"] = {name: {"0": {"loads": x}} for name, x in loads.items()}
    figure = ablations.draw_loads(comparison)
    for axis, expected in zip(figure.axes, loads.values(), strict=True):
        heights = np.reshape([bar.get_height() for bar in axis.patches], (2, 5))
        np.testing.assert_allclose(heights, expected)
        places = np.reshape([bar.get_center()[0] for bar in axis.patches], (2, 5))
        np.testing.assert_allclose(places.mean(axis=0), [3, 4, 5, 6, 7])
    assert [axis.get_title() for axis in figure.axes] == [
        "balance 0",
        "balance 0.01",
        "balance 0.1",
    ]
