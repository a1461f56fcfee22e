"""Does Mixture-of-Head attention classify as well as multi-head attention? On Fashion-MNIST.

A small vision transformer, `keras_moh.models.MoHViT`, is trained three times over with each of

- MHA: multi-head attention, the same model with `router=None`;
- MoH 75 %: of 8 heads a token takes 3 shared and 3 routed ones;
- MoH 50 %: 2 shared and 2 routed ones.

The models have the same parameters but for the routers', and are trained for as many steps on the
same images: moved, flipped and mixed (arXiv 1710.09412) by Keras's layers. Measured are the share
of the 10,000 test images that is classified right, and the time that a step of training takes.

    python -m pip install "keras-moh[examples,jax]"
    python examples/fashion_mnist.py

The images are those of `keras.datasets`. Where that cannot be reached, `--source debian` takes them
from a Debian package. The output folder has the numbers (`results.json`) and a figure. Whatever is
finished stays there: run the example again, and it goes on where it was interrupted.
"""

import argparse
import gzip
import math
import os
import sys
import warnings
from functools import partial
from pathlib import Path
from typing import Any

from common import Package, files_of, integer_from, markdown_table

HERE = Path(__file__).parent
DEBIAN = Package(
    "dataset-fashion-mnist",
    "apt",
    {
        f"usr/share/datasets/fashion-mnist/{name}-ubyte.gz": digest
        for name, digest in {
            "train-images-idx3": "b0564c3eedabfbf835052cff8503ea422014ce006caf5b757f851416ee8300c7",
            "train-labels-idx1": "0ae29f65d86684f32d1b9c85147786c547b9c6aebcaf235f0400a0cce308b056",
            "t10k-images-idx3": "cc1d090a38ace84dfa1aa66e3ada7c336ef481a96936906477e6dd344da56eaa",
            "t10k-labels-idx1": "8d3605d196f4be44669e46906da9733c8131fef761fdbfec72c424d5222f1a05",
        }.items()
    },
)
# Shared heads, and routed heads that a token takes beside them, of 8. `None`: no routing.
HEADS = 8
VARIANTS = {"MHA": None, "MoH 75 %": (3, 3), "MoH 50 %": (2, 2)}
BATCH_SIZE, LEARNING_RATE = 128, 3e-3


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train a small vision transformer on Fashion-MNIST with Mixture-of-Head and "
        "with multi-head attention, and compare their accuracy and their speed.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add, backends = parser.add_argument, ["jax", "torch", "tensorflow"]
    add("--backend", choices=backends, default="jax", help="Keras's framework")
    add("--source", choices=["keras", "debian"], default="keras", help="of the images")
    add("--data", metavar="FOLDER", type=Path, default=HERE / "data", help="of what is fetched")
    add("--output", metavar="FOLDER", type=Path, default="fashion_mnist_output", help="of results")
    for name, minimum, default, text in [
        ("epochs", 1, 3, "passes over the training images"),
        ("seeds", 1, 3, "trainings of each model"),
        ("depth", 1, 2, "layers of the model"),
        ("samples", 1, None, "training images to use, all if not given"),
    ]:
        add(f"--{name}", metavar="N", type=integer_from(minimum), default=default, help=text)
    add("--time-again", action="store_true", help="measure the times per step once more")
    return parser.parse_args()


OPTIONS = parse_options()
os.environ["KERAS_BACKEND"] = OPTIONS.backend  # Keras reads it when it is imported, which is next
os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # PyTorch: no thread spins on a busy machine
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # TensorFlow: errors only
try:
    import keras
    import numpy as np
    from comparing import Batches, Comparison, integers, without_routing
    from keras import layers

    import keras_moh
except ModuleNotFoundError as error:
    sys.exit(
        f"This example needs {error.name}, which is not installed. Install everything it needs by\n"
        f'    python -m pip install "keras-moh[examples,{OPTIONS.backend}]"'
    )
# Keras's MixUp asks for int64, which JAX has as int32: that is enough to number the images.
warnings.filterwarnings("ignore", "Explicitly requested dtype int64", UserWarning)


def load_images(options: argparse.Namespace) -> list[np.ndarray]:
    """Training images and labels, test images and labels, as Keras's pipelines take them."""
    if options.source == "debian":
        contents = [gzip.decompress(file.read_bytes()) for file in files_of(DEBIAN, options.data)]
        images, labels, test_images, test_labels = (
            np.frombuffer(content, "uint8", offset=offset)
            for content, offset in zip(contents, (16, 8, 16, 8), strict=True)
        )
    else:
        (images, labels), (test_images, test_labels) = keras.datasets.fashion_mnist.load_data()

    def scaled(pixels: np.ndarray) -> np.ndarray:
        return (pixels.reshape(-1, 28, 28, 1) / 255).astype("float32")

    return [
        scaled(images)[: options.samples],
        keras.utils.to_categorical(labels, 10)[: options.samples],
        scaled(test_images),
        keras.utils.to_categorical(test_labels, 10),
    ]


class AugmentedImages(Batches):
    """All images once in an epoch, in another order, each time changed in another way."""

    def __init__(self, images: np.ndarray, labels: np.ndarray, seed: int):
        super().__init__()
        self.images, self.labels, self.seed = images, labels, seed
        self.start(0)

    def start(self, epoch: int) -> None:
        random = np.random.default_rng((self.seed, epoch))
        self.order = random.permutation(len(self.images))
        flip, move, mix = integers(random, 3)
        self.augment = layers.Pipeline(
            [
                layers.RandomFlip("horizontal", seed=flip),
                layers.RandomTranslation(0.08, 0.08, fill_mode="constant", seed=move),
                layers.MixUp(0.2, seed=mix),
            ]
        )

    def __len__(self) -> int:
        return math.ceil(len(self.images) / BATCH_SIZE)

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        chosen = self.order[index * BATCH_SIZE :][:BATCH_SIZE]
        batch = self.augment({"images": self.images[chosen], "labels": self.labels[chosen]})
        images, labels = (keras.ops.convert_to_numpy(batch[name]) for name in ("images", "labels"))
        return images, labels


def make_model(budget: tuple[int, int] | None, depth: int, steps: int) -> keras.Model:
    """A compiled vision transformer, to be trained for so many steps."""
    num_shared_heads, top_k = budget or (HEADS, 0)
    model = keras_moh.models.MoHViT(
        image_size=28,
        patch_size=7,
        num_classes=10,
        hidden_size=64,
        depth=depth,
        num_heads=HEADS,
        num_shared_heads=num_shared_heads,
        top_k=top_k,
        mlp_ratio=2,
        num_channels=1,
    )
    if budget is None:
        model = without_routing(model)
    warmup = steps // 10
    learning_rate = keras.optimizers.schedules.CosineDecay(
        0.0, steps - warmup, warmup_target=LEARNING_RATE, warmup_steps=warmup
    )
    model.compile(
        optimizer=keras.optimizers.AdamW(learning_rate, weight_decay=0.05),
        loss=keras.losses.CategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model


def main(options: argparse.Namespace) -> None:
    images, labels, *test = load_images(options)

    def measure(model: keras.Model) -> dict[str, Any]:
        results = model.evaluate(*test, batch_size=BATCH_SIZE, verbose=0, return_dict=True)
        print(f"{results['accuracy']:.2%} of the test images are classified right", flush=True)
        return {"accuracy": 100 * results["accuracy"]}

    names = "backend", "epochs", "depth", "samples"
    comparison = Comparison(options.output, {name: getattr(options, name) for name in names})
    steps = options.epochs * math.ceil(len(images) / BATCH_SIZE)
    makes = {
        name: partial(make_model, budget, options.depth, steps) for name, budget in VARIANTS.items()
    }
    for seed in range(options.seeds):
        batches = AugmentedImages(images, labels, seed)
        for name, make in makes.items():
            comparison.train(name, seed, make, batches, options.epochs, measure)
    if options.time_again or "seconds_per_step" not in comparison.results:
        comparison.time_steps(makes, AugmentedImages(images, labels, 0)[0])

    figure = comparison.draw("accuracy", "test images classified right, %")
    figure.savefig(options.output / "fashion_mnist.png", dpi=110)
    header = ["attention", "parameters", "test accuracy, %", "step of training"]
    print(f"\n{markdown_table(header, comparison.rows('accuracy', 2))}")


if __name__ == "__main__":
    main(OPTIONS)
