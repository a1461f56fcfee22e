"""Does a diffusion model with Mixture-of-Head attention draw as well? Fashion-MNIST, from noise.

A small diffusion transformer, `keras_moh.models.MoHDiT`, learns the pixels of the ten kinds of
clothes, with each of

- MHA: multi-head attention, the same model with `router=None`;
- MoH 75 %: of 8 heads a token takes 3 shared and 3 routed ones;
- MoH 50 %: 2 shared and 2 routed ones.

The models have the same parameters but for the routers', and are trained for as many steps on the
same images in the same order. Then each draws clothes, as many of every kind. A small classifier,
trained on the spot, compares them with the test images: by the Frechet distance between its
features of the ones and of the others (arXiv 1706.08500; there the classifier is Inception), and by
the share that it takes for the kind that was to be drawn. Both are of images drawn with
classifier-free guidance.

    python -m pip install "keras-moh[examples,jax]"
    python examples/fashion_dit.py

The images are those of `keras.datasets`. Where that cannot be reached, `--source debian` takes them
from a Debian package. The output folder has the numbers (`results.json`), a figure of them, what
was drawn (`drawn.png`), and the classifier. Whatever is finished stays there: run the example
again, and it goes on where it was interrupted.
"""

from functools import partial
from pathlib import Path
from typing import Any

from common import add_time_again, exit_without, image_parser, integer_from, use_backend

PARSER = image_parser(
    "Train a small diffusion transformer on Fashion-MNIST with Mixture-of-Head and with multi-head "
    "attention, and compare what they draw.",
    "fashion_dit_output",
    epochs=6,
    depth=3,
    seeds=1,
)
add_time_again(PARSER)
PARSER.add_argument(
    "--draws", metavar="N", type=integer_from(4), default=100, help="images of a kind to measure by"
)
PARSER.add_argument(
    "--sampler-steps",
    metavar="N",
    type=integer_from(2, 1000),
    default=50,
    help="of drawing, by DDIM",
)
OPTIONS = PARSER.parse_args()
use_backend(OPTIONS.backend)
try:
    import keras
    import numpy as np
    from common import markdown_table, mean_and_range
    from comparing import Batches, Comparison, warmed_up
    from fashion_images import HEADS, load_images
    from keras import layers
    from matplotlib.figure import Figure

    import keras_moh
except ModuleNotFoundError as error:
    exit_without(error, f"examples,{OPTIONS.backend}")

BUDGETS: dict[str, dict[str, Any]] = {
    "MHA": {"router": None},
    "MoH 75 %": {"num_shared_heads": 3, "top_k": 3},
    "MoH 50 %": {"num_shared_heads": 2, "top_k": 2},
}
KINDS = 10
BATCH_SIZE = 64
GUIDANCE_SCALE = 2.0
SHOWN = 4  # drawings of each kind


class LabelledImages(Batches):
    """All images once in an epoch, in another order each time, but those that fill no batch."""

    def __init__(self, images: np.ndarray, labels: np.ndarray, seed: int):
        super().__init__()
        self.images, self.labels, self.seed = images, labels, seed
        self.batch_size = min(BATCH_SIZE, len(images))
        self.start(0)

    def start(self, epoch: int) -> None:
        self.order = np.random.default_rng((self.seed, epoch)).permutation(len(self.images))

    def __len__(self) -> int:
        return len(self.images) // self.batch_size

    def __getitem__(self, index: int) -> tuple[dict[str, np.ndarray]]:
        chosen = self.order[index * self.batch_size :][: self.batch_size]
        return ({"images": self.images[chosen], "labels": self.labels[chosen]},)


def make_trainer(budget: dict[str, Any], depth: int, steps: int) -> keras.Model:
    """A diffusion model with this attention, to be trained for so many steps."""
    network = keras_moh.models.MoHDiT(
        image_size=28,
        patch_size=4,
        num_classes=KINDS,
        hidden_size=96,
        depth=depth,
        num_heads=HEADS,
        num_channels=1,
        learn_sigma=False,
        **budget,
    )
    trainer = keras_moh.models.DiffusionTrainer(network)
    # `fit` ends with the averages of the weights.
    trainer.compile(
        keras.optimizers.AdamW(
            warmed_up(2e-3, steps, steps // 20),
            weight_decay=0.01,
            global_clipnorm=1.0,
            use_ema=True,
            ema_momentum=0.995,
        )
    )
    return trainer


def draw(network: keras_moh.models.MoHDiT, count: int, steps: int) -> np.ndarray:
    """Drawings of each kind `(kind, count, 28, 28)`, of pixels from 0 to 255."""
    sampler = keras_moh.models.DiffusionSampler(
        network, "ddim", steps, batch_size=min(KINDS * count, 100), clip=True
    )
    drawn = sampler.sample(np.repeat(np.arange(KINDS), count), GUIDANCE_SCALE, seed=0)
    return np.round((drawn + 1) * 127.5).astype("uint8").reshape(KINDS, count, 28, 28)


# What a classifier sees in them.


def trained_classifier(images: np.ndarray, labels: np.ndarray, file: Path) -> keras.Model:
    """The classifier in the file, by which all are measured. It is made if it is not there."""
    if file.exists():
        return keras.saving.load_model(file)
    print("A classifier to measure by", flush=True)
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.Input((28, 28, 1)),
            layers.Conv2D(32, 3, 2, activation="relu"),
            layers.Conv2D(64, 3, 2, activation="relu"),
            layers.Flatten(),
            layers.Dense(64, activation="relu"),
            layers.Dense(KINDS),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss, metrics=["accuracy"])
    model.fit(images, labels, BATCH_SIZE, epochs=3)
    unfinished = file.with_name(f"unfinished_{file.name}")
    model.save(unfinished)
    unfinished.replace(file)
    return model


def frechet_distance(features: np.ndarray, others: np.ndarray) -> float:
    """Between the Gaussians with the means and covariances of features `(N, F)` and `(M, F)`.

    The trace of the root of two covariances' product is that of a symmetric matrix's.
    """
    means = [x.mean(axis=0) for x in (features, others)]
    covariances = [np.cov(x.astype("float64"), rowvar=False) for x in (features, others)]
    variances, axes = np.linalg.eigh(covariances[0])
    root = axes * np.sqrt(np.maximum(variances, 0)) @ axes.T
    of_product = np.linalg.eigvalsh(root @ covariances[1] @ root)
    traces = sum(map(np.trace, covariances)) - 2 * np.sqrt(np.maximum(of_product, 0)).sum()
    return float(np.sum((means[0] - means[1]) ** 2) + traces)


class Judge:
    """Compares images with the test images."""

    def __init__(self, classifier: keras.Model, test_images: np.ndarray):
        last_but_one = classifier.layers[-2].output
        self.model = keras.Model(classifier.inputs, [last_but_one, *classifier.outputs])
        self.test_features, _ = self.look_at(test_images)

    def look_at(self, images: np.ndarray) -> list[np.ndarray]:
        return self.model.predict(images, batch_size=500, verbose=0)

    def measures(self, images: np.ndarray, labels: np.ndarray) -> dict[str, float]:
        """Of images `(N, 28, 28, 1)` of these kinds: the distance, and the share taken for them."""
        features, logits = self.look_at(images)
        return {
            "distance": frechet_distance(features, self.test_features),
            "recognized": 100 * float(np.mean(np.argmax(logits, axis=-1) == labels)),
        }


# The comparison.


def drawings_file(folder: Path, variant: str, seed: int) -> Path:
    return folder / "drawings" / f"{variant} {seed}.npy".replace(" ", "_")


def draw_sheet(folder: Path) -> Figure:
    """Some of what each variant draws: its kinds from left to right."""
    figure = Figure(figsize=(9, 1.2 * len(BUDGETS) * SHOWN / 2), layout="constrained")
    for axis, name in zip(figure.subplots(len(BUDGETS), 1), BUDGETS, strict=True):
        drawings = np.load(drawings_file(folder, name, 0))[:, :SHOWN]
        axis.imshow(drawings.transpose(1, 2, 0, 3).reshape(28 * SHOWN, 28 * KINDS), cmap="gray_r")
        axis.set_title(name)
        axis.axis("off")
    return figure


def main() -> None:
    output, count = OPTIONS.output, OPTIONS.draws
    names = "backend", "epochs", "depth", "samples", "draws", "sampler_steps"
    comparison = Comparison(output, {name: getattr(OPTIONS, name) for name in names})
    (output / "drawings").mkdir(exist_ok=True)
    images, labels, test_images, test_labels = load_images(OPTIONS)
    labels, test_labels = labels.argmax(axis=-1), test_labels.argmax(axis=-1)
    judge = Judge(trained_classifier(images, labels, output / "classifier.keras"), test_images)
    # As many real images, to compare with: by chance they too are a little off.
    real = judge.measures(images[: KINDS * count], labels[: KINDS * count])
    comparison.results["real images"] = real

    def measure(file: Path, trainer: keras.Model) -> dict[str, float]:
        drawings = draw(trainer.network, count, OPTIONS.sampler_steps)
        np.save(file, drawings[:, :SHOWN])
        pixels = drawings.reshape(-1, 28, 28, 1).astype("float32") / 255
        measures = judge.measures(pixels, np.repeat(np.arange(KINDS), count))
        print("Distance {distance:.1f}, {recognized:.1f} % recognized".format(**measures))
        return measures

    scaled = 2 * images - 1  # as the models take pixels
    steps = OPTIONS.epochs * len(LabelledImages(scaled, labels, 0))
    makes = {
        name: partial(make_trainer, budget, OPTIONS.depth, steps)
        for name, budget in BUDGETS.items()
    }
    for seed in range(OPTIONS.seeds):
        batches = LabelledImages(scaled, labels, seed)
        for name, make in makes.items():
            file = drawings_file(output, name, seed)
            comparison.train(name, seed, make, batches, OPTIONS.epochs, partial(measure, file))
    if OPTIONS.time_again or "seconds_per_step" not in comparison.results:
        comparison.time_steps(makes, LabelledImages(scaled, labels, 0)[0])

    draw_sheet(output).savefig(output / "drawn.png", dpi=110)
    comparison.draw("distance", "Frechet distance").savefig(output / "distance.png", dpi=110)
    rows = [
        [*row[:3], mean_and_range(comparison.of_seeds(row[0], "recognized"), 1), row[3]]
        for row in comparison.rows("distance", 2)
    ]
    real_row = ["real images", "", f"{real['distance']:.2f}", f"{real['recognized']:.1f}", ""]
    header = ["attention", "parameters", "distance", "recognized, %", "step of training"]
    print(f"\n{markdown_table(header, [*rows, real_row])}")


if __name__ == "__main__":
    main()
