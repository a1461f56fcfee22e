"""What the examples on Fashion-MNIST share: the images, how they are changed, and the model."""

import argparse
import gzip
import math
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import keras
import numpy as np
from common import Package, files_of
from comparing import Batches, Comparison, integers, optimizer
from keras import layers

import keras_moh

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
HEADS = 8
BATCH_SIZE = 128

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


def vision_transformer(depth: int, **arguments: Any) -> keras.Model:
    """A small `MoHViT`, with these arguments of its attention."""
    return keras_moh.models.MoHViT(
        image_size=28,
        patch_size=7,
        num_classes=10,
        hidden_size=64,
        depth=depth,
        num_heads=HEADS,
        mlp_ratio=2,
        num_channels=1,
        **arguments,
    )


def compiled(model: keras.Model, steps: int) -> keras.Model:
    """The model, to be trained for so many steps."""
    model.compile(
        optimizer=optimizer(steps),
        loss=keras.losses.CategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model


def head_loads(model: keras.Model, images: np.ndarray) -> list[list[float]]:
    """Of each layer that routes, the shares of the tokens that take its candidates."""
    loads = []
    for layer in model.layers:
        if isinstance(layer, keras_moh.MoHAttention) and layer.router is not None:
            # A second model, on the same layers, gives the tokens that this one routes.
            tokens = keras.Model(model.input, layer.input)(images)
            heads = keras.ops.convert_to_numpy(layer.router(tokens).heads)
            taken = np.any(heads[..., np.newaxis] == layer.router.routed_heads, axis=2)
            loads.append(taken.mean(axis=(0, 1)).tolist())
    return loads


class ImageComparison(Comparison):
    """Of variants of a classifier, each given as a function of its depth that makes the model."""

    def __init__(
        self, options: argparse.Namespace, variants: Mapping[str, Callable[[int], keras.Model]]
    ):
        names = "backend", "epochs", "depth", "samples"
        super().__init__(options.output, {name: getattr(options, name) for name in names})
        self.options = options
        self.images, self.labels, *self.test = load_images(options)
        steps = options.epochs * math.ceil(len(self.images) / BATCH_SIZE)
        self.makes = {
            name: lambda make=make: compiled(make(options.depth), steps)
            for name, make in variants.items()
        }

    def train_all(self) -> None:
        """Every variant with every seed."""
        for seed in range(self.options.seeds):
            batches = AugmentedImages(self.images, self.labels, seed)
            for name, make in self.makes.items():
                self.train(name, seed, make, batches, self.options.epochs, self.measure)

    def measure(self, model: keras.Model) -> dict[str, Any]:
        results = model.evaluate(*self.test, batch_size=BATCH_SIZE, verbose=0, return_dict=True)
        print(f"{results['accuracy']:.2%} of the test images are classified right", flush=True)
        loads = head_loads(model, self.test[0][:1000])
        return {"accuracy": 100 * results["accuracy"], "loads": loads}

    def time_all(self) -> None:
        """A step of every variant, if that is not done or to be done again."""
        if self.options.time_again or "seconds_per_step" not in self.results:
            self.time_steps(self.makes, AugmentedImages(self.images, self.labels, 0)[0])
