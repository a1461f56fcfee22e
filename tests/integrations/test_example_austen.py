"""The example `examples/austen.py`, run as a user runs it, on a text made here."""

import importlib
import json
import struct
import sys
import zlib
from functools import partial

import keras
import numpy as np
import pytest

from tests import examples
from tests.helpers import to_numpy

run_example = partial(examples.run_example, "austen")
BACKEND = keras.backend.backend()
# 3,000 characters, 27 different ones: three syllables in turn, with others of the alphabet between.
LINES = ["", *(f"ba de {chr(ord('a') + i % 24)}i\u00a3" for i in range(299)), "the end."]


def string_vector(strings):
    """As R's own `serialize` writes it, version 3, with the CHARSXP flags of UTF-8 or ASCII."""
    content = b"X\n" + struct.pack(">iii", 3, 0x040201, 0x030500)
    content += struct.pack(">i", 5) + b"UTF-8" + struct.pack(">ii", 16, len(strings))
    for string in strings:
        encoded = string.encode()
        flags = 0x00040009 if string.isascii() else 0x00008009
        content += struct.pack(">ii", flags, len(encoded)) + encoded
    return content


def database(*objects):
    return b"".join(struct.pack(">i", len(x)) + zlib.compress(x) for x in objects)


@pytest.fixture
def austen(monkeypatch):
    monkeypatch.syspath_prepend(examples.EXAMPLES)
    monkeypatch.setattr(sys, "argv", ["austen.py", "--backend", BACKEND])
    return importlib.import_module("austen")


def test_trains_measures_writes_and_draws_and_does_nothing_twice(tmp_path):
    folder = tmp_path / "some data" / "r-cran-janeaustenr"
    folder.mkdir(parents=True)
    novels = database(string_vector(LINES), string_vector(["THE END", ""]))
    (folder / "Rdata.rdb").write_bytes(novels)
    length = len("\n".join(LINES)) + len("\n\nTHE END\n")
    output = tmp_path / "results"
    options = [
        *("--backend", BACKEND, "--data", folder.parent, "--output", output),
        *("--seeds", 1, "--steps", 2, "--layers", 1),
    ]
    process = run_example(*options)
    assert process.returncode == 0, process.stderr
    assert "━━━" in process.stdout  # Keras's progress bar
    assert "Fetching" not in process.stdout
    # A twentieth is kept, as whole passages of 129 characters.
    kept = int(length * 0.05) // 129 * 129
    assert kept > 0
    count = len(set("\n".join([*LINES, "THE END"])))
    assert f"{length - kept:,} characters to train on, {count} different ones" in process.stdout

    results = json.loads((output / "results.json").read_text())
    assert results["settings"] == {"backend": BACKEND, "text": None, "steps": 2, "layers": 1}
    variants = ["MHA", "MoH 75 %", "MoH 50 %"]
    assert list(results["runs"]) == list(results["seconds_per_step"]) == variants
    plain, *routed = (results["runs"][name]["0"] for name in variants)
    # The router: 96 features to all candidates, to the shared heads, and to the two kinds.
    assert [run["parameters"] - plain["parameters"] for run in routed] == [96 * (8 + 2)] * 2
    for name in variants:
        run = results["runs"][name]["0"]
        assert 0 < run["bits"] < 2 * np.log2(count)
        assert len(run["written"]) == 200
        assert set(run["written"]) <= set("\n".join([*LINES, "THE END"]))
        # What is printed are these numbers.
        assert f" {run['bits']:.3f} |" in process.stdout
        assert f"{name} writes {run['written']!r}" in process.stdout
    assert (output / "austen.png").read_bytes().startswith(b"\x89PNG")

    again = run_example(*options)
    assert again.returncode == 0, again.stderr
    assert "seed 0" not in again.stdout
    assert again.stdout.splitlines()[-9:] == process.stdout.splitlines()[-9:]
    assert json.loads((output / "results.json").read_text()) == results


def test_the_database_of_r_is_read(austen):
    vectors = [["Emma", "", "is £5"], [], ["The end"]]
    content = database(*map(string_vector, vectors))
    assert austen.novels(content) == "Emma\n\nis £5\n\n\n\nThe end"
    numbers = string_vector([]).replace(struct.pack(">i", 16), struct.pack(">i", 13))
    with pytest.raises(SystemExit, match="does not hold vectors of strings"):
        austen.novels(database(numbers))


def test_passages_are_of_the_whole_text_and_others_in_every_epoch(austen):
    batches = austen.Passages(np.arange(131, dtype="int32"), 5, 7)
    assert len(batches) == 7
    seen = set()
    epochs = []
    for epoch in 0, 1, 0:
        batches.start(epoch)
        epoch = [batches[i] for i in range(7)]
        for inputs, targets in epoch:
            assert inputs["token_ids"].shape == targets.shape == (32, 128)
            np.testing.assert_array_equal(inputs["token_ids"] + 1, targets)
            np.testing.assert_array_equal(inputs["padding_mask"], 1)
            seen |= set(inputs["token_ids"][:, 0].tolist())
        epochs.append(np.array([targets for _, targets in epoch]))
    assert seen == {0, 1, 2}
    np.testing.assert_array_equal(epochs[0], epochs[2])
    assert (epochs[0] != epochs[1]).any()


@pytest.mark.parametrize("budget", [None, (2, 2)])
def test_bits_per_character(austen, budget):
    """The mean over all characters of -log2 of their probability, newlines (0) included."""
    model = austen.make_model(budget, 5, 1, 10)
    random = np.random.default_rng(0)
    for weight in model.weights:
        if "seed" not in weight.path:
            weight.assign(weight + 0.5 * random.standard_normal(weight.shape))
    passages = random.integers(5, size=(35, 8))  # two batches, of which the last is not full
    passages = passages.astype("int32")
    ones = np.ones((35, 7), "int32")
    logits = to_numpy(model({"token_ids": passages[:, :-1], "padding_mask": ones}))
    probabilities = np.exp(logits.astype("float64"))
    probabilities /= probabilities.sum(axis=-1, keepdims=True)
    chosen = np.take_along_axis(probabilities, passages[:, 1:, np.newaxis], axis=-1)
    expected = -np.log2(chosen).mean()
    assert austen.bits_per_character(model, passages) == pytest.approx(expected, rel=1e-4)


def test_a_short_text_is_refused(austen, tmp_path):
    austen.OPTIONS.text = tmp_path / "short.txt"
    austen.OPTIONS.text.write_text("It is a truth " * 100)
    with pytest.raises(SystemExit, match="The text of 1,400 characters is too short"):
        austen.main(austen.OPTIONS)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--backend", "numpy"], "argument --backend: invalid choice: 'numpy'"),
        (["--steps", "150"], "--steps 150 is more than 100 and not a multiple of it"),
        (["--seeds", "0"], "argument --seeds: expected an integer of at least 1, not '0'"),
    ],
)
def test_a_bad_option_is_refused(arguments, message):
    process = run_example(*arguments)
    assert process.returncode == 2
    assert message in process.stderr
    assert "Traceback" not in process.stderr
