"""Does a language model with Mixture-of-Head attention read as well? On the novels of Jane Austen.

A small language model, `keras_moh.models.MoHLLM`, is trained to tell the next character of the six
novels, three times over with each of

- MHA: multi-head attention, which is keras-hub's Llama as it is;
- MoH 75 %: of 8 heads a token takes 4 shared and 2 routed ones;
- MoH 50 %: 2 shared and 2 routed ones.

The models have the same parameters but for the routers', and are trained for as many steps on the
same passages. Measured are the bits that each of the characters at the end of the text takes, which
is not trained on, and the time that a step of training takes. Every model goes on with a sentence.

    python -m pip install "keras-moh[examples,hub,torch]"
    python examples/austen.py

The novels are fetched with apt, from Debian's r-cran-janeaustenr; `--text` takes any other text.
The output folder has the numbers and what the models wrote (`results.json`), and a figure. Whatever
is finished stays there: run the example again, and it goes on where it was interrupted.
"""

import argparse
import math
import struct
import sys
import zlib
from functools import partial
from pathlib import Path
from typing import Any

from common import (
    Package,
    add_time_again,
    comparison_parser,
    exit_without,
    files_of,
    integer_from,
    markdown_table,
    use_backend,
)

NOVELS = Package(
    "r-cran-janeaustenr",
    "apt",
    {
        "usr/lib/R/site-library/janeaustenr/data/Rdata.rdb": (
            "8fb5198960d0da724b1562f96e4221e5c1b41ff455000280b02c55980c3d8f21"
        ),
    },
)
# Shared heads, and routed heads that a token takes beside them, of 8. `None`: no routing.
HEADS = 8
VARIANTS = {"MHA": None, "MoH 75 %": (4, 2), "MoH 50 %": (2, 2)}
LENGTH, BATCH_SIZE = 128, 32  # of a passage in characters, of a batch in passages
EPOCH = 100  # steps, after which a training that is interrupted goes on
VALIDATION = 0.05  # of the text, its end
PROMPT, CONTINUATION = 64, 200  # characters


def parse_options() -> argparse.Namespace:
    parser = comparison_parser(
        "Train a small language model on Jane Austen's novels with Mixture-of-Head and with "
        "multi-head attention, and compare how well they tell the next character.",
        "torch",
        "austen_output",
    )
    add_time_again(parser)
    parser.add_argument(
        "--text", metavar="FILE", type=Path, help="to read instead of the novels, in UTF-8"
    )
    for name, default, text in [
        ("steps", 600, f"of training; if more than {EPOCH}, a multiple of it"),
        ("layers", 3, "of the model"),
    ]:
        parser.add_argument(
            f"--{name}", metavar="N", type=integer_from(1), default=default, help=text
        )
    options = parser.parse_args()
    if options.steps > EPOCH and options.steps % EPOCH:
        parser.error(f"--steps {options.steps} is more than {EPOCH} and not a multiple of it")
    return options


OPTIONS = parse_options()
use_backend(OPTIONS.backend)
try:
    import keras
    import keras_hub
    import numpy as np
    from comparing import Batches, Comparison, optimizer

    import keras_moh
except ModuleNotFoundError as error:
    exit_without(error, f"examples,hub,{OPTIONS.backend}")


# The text.


def novels(database: bytes) -> str:
    """All texts in a database of R: each is compressed, after its length in four bytes."""
    texts = []
    while database:
        decompressor = zlib.decompressobj()
        texts.append("\n".join(strings(decompressor.decompress(database[4:]))))
        database = decompressor.unused_data
    return "\n\n".join(texts)


def strings(serialized: bytes) -> list[str]:
    """A vector of strings as R writes it: numbers are of four bytes, the highest first."""
    (length,) = struct.unpack_from(">i", serialized, 14)  # of the encoding's name, after a header
    position = 18 + length
    kind, count = struct.unpack_from(">ii", serialized, position)
    if kind != 16:
        sys.exit("The file of the novels does not hold vectors of strings.")
    position += 8
    found = []
    for _ in range(count):
        _, length = struct.unpack_from(">ii", serialized, position)
        found.append(serialized[position + 8 :][:length].decode())
        position += 8 + length
    return found


class Passages(Batches):
    """Passages of the text from anywhere in it: as many batches of them in an epoch as `steps`."""

    def __init__(self, characters: np.ndarray, seed: int, steps: int):
        super().__init__()
        self.characters, self.seed, self.steps = characters, seed, steps
        self.start(0)

    def start(self, epoch: int) -> None:
        random = np.random.default_rng((self.seed, epoch))
        last = len(self.characters) - LENGTH - 1
        self.places = random.integers(last, size=(self.steps, BATCH_SIZE), endpoint=True)

    def __len__(self) -> int:
        return self.steps

    def __getitem__(self, index: int) -> tuple[dict[str, np.ndarray], np.ndarray]:
        places = self.places[index][:, np.newaxis] + np.arange(LENGTH + 1)
        return inputs_and_targets(self.characters[places])


def inputs_and_targets(passages: np.ndarray) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Each character is to be told from those before it in the passage."""
    characters = passages[:, :-1]
    inputs = {"token_ids": characters, "padding_mask": np.ones_like(characters)}
    return inputs, passages[:, 1:]


# The model.


def make_model(
    budget: tuple[int, int] | None, vocabulary_size: int, num_layers: int, steps: int
) -> keras.Model:
    """A compiled language model, to be trained for so many steps."""
    width, inner = 96, 256
    if budget is None:
        backbone = keras_hub.models.LlamaBackbone(
            vocabulary_size=vocabulary_size,
            num_layers=num_layers,
            num_query_heads=HEADS,
            num_key_value_heads=HEADS,
            hidden_dim=width,
            intermediate_dim=inner,
        )
        model = keras_hub.models.LlamaCausalLM(backbone, preprocessor=None)
    else:
        num_shared_heads, top_k = budget
        model = keras_moh.models.MoHLLM(
            vocabulary_size,
            num_layers=num_layers,
            hidden_size=width,
            num_heads=HEADS,
            num_shared_heads=num_shared_heads,
            top_k=top_k,
            intermediate_size=inner,
        )
    model.compile(
        optimizer=optimizer(steps),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        # The loss without the balancing loss.
        weighted_metrics=[
            keras.metrics.SparseCategoricalCrossentropy(from_logits=True, name="nats")
        ],
        sampler=keras_hub.samplers.RandomSampler(temperature=0.7, seed=0),
    )
    return model


def bits_per_character(model: keras.Model, passages: np.ndarray) -> float:
    inputs, targets = inputs_and_targets(passages)
    results = model.evaluate(inputs, targets, batch_size=BATCH_SIZE, verbose=0, return_dict=True)
    return results["nats"] / math.log(2)


def continued(model: keras.Model, prompt: np.ndarray) -> np.ndarray:
    """What the model writes after the prompt."""
    padded = np.pad(prompt, (0, CONTINUATION))[np.newaxis]
    mask = np.arange(padded.shape[1])[np.newaxis] < len(prompt)
    result = model.generate({"token_ids": padded, "padding_mask": mask}, stop_token_ids=None)
    return keras.ops.convert_to_numpy(result["token_ids"])[0, len(prompt) :]


def main(options: argparse.Namespace) -> None:
    if options.text:
        text = options.text.read_text(encoding="utf-8")
    else:
        (file,) = files_of(NOVELS, options.data)
        text = novels(file.read_bytes())
    alphabet, characters = np.unique(list(text), return_inverse=True)
    characters = characters.astype("int32")
    count = int(VALIDATION * len(characters)) // (LENGTH + 1)
    if not count:
        sys.exit(
            f"The text of {len(text):,} characters is too short to keep {LENGTH} from training"
        )
    training, validation = np.split(characters, [-count * (LENGTH + 1)])
    prompt = validation[:PROMPT]
    print(f"{len(training):,} characters to train on, {len(alphabet)} different ones", flush=True)

    def measure(model: keras.Model) -> dict[str, Any]:
        bits = bits_per_character(model, validation.reshape(count, LENGTH + 1))
        written = "".join(alphabet[continued(model, prompt)])
        print(f"{bits:.3f} bits per character. It writes: {written!r}", flush=True)
        return {"bits": bits, "written": written}

    settings = {
        "backend": options.backend,
        "text": options.text and str(options.text),
        "steps": options.steps,
        "layers": options.layers,
    }
    comparison = Comparison(options.output, settings)
    epoch = min(EPOCH, options.steps)
    makes = {
        name: partial(make_model, budget, len(alphabet), options.layers, options.steps)
        for name, budget in VARIANTS.items()
    }
    for seed in range(options.seeds):
        batches = Passages(training, seed, epoch)
        for name, make in makes.items():
            comparison.train(name, seed, make, batches, options.steps // epoch, measure)
    if options.time_again or "seconds_per_step" not in comparison.results:
        comparison.time_steps(makes, Passages(training, 0, 1)[0])

    comparison.draw("bits", "bits per character").savefig(options.output / "austen.png", dpi=110)
    header = ["attention", "parameters", "bits per character", "step of training"]
    print(f"\n{markdown_table(header, comparison.rows('bits', 3))}")
    print(f"\nAfter {''.join(alphabet[prompt])!r}")
    for name in VARIANTS:
        print(f"{name} writes {comparison.of_seeds(name, 'written')[0]!r}")


if __name__ == "__main__":
    main(OPTIONS)
