r"""Training a diffusion model, and drawing images with it.

Noise is added to an image in `T` steps of variances $\beta_t$ (arXiv 2006.11239). With
$\bar\alpha_t = \prod_{s \le t} (1 - \beta_s)$,

$$ x_t = \sqrt{\bar\alpha_t} \, x_0 + \sqrt{1 - \bar\alpha_t} \, \epsilon, \quad
   \epsilon \sim \mathcal N(0, 1), $$

and the model learns to predict $\epsilon$ from $x_t$ and $t$; a prediction of $\epsilon$ is one of
$x_0$, and that gives the step back to $x_{t-1}$. The variance of that step lies between $\beta_t$
and $\tilde\beta_t = \beta_t (1 - \bar\alpha_{t-1}) / (1 - \bar\alpha_t)$; where the model says
where, it learns that from the variational bound (arXiv 2102.09672).

The schedule's numbers are computed once in float64 by NumPy, and looked up step by step.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
from keras import ops

from keras_moh.errors import boolean, integer, invalid_argument, number_in
from keras_moh.models.moh_dit import MoHDiT

# Of the authors, who have them from DDPM: steps, and the variances of the first and the last.
STEPS = 1000
FIRST_VARIANCE, LAST_VARIANCE = 1e-4, 0.02


@dataclasses.dataclass(frozen=True)
class Schedule:
    r"""The numbers of some of the `T` steps of a diffusion, in the order of the steps.

    Attributes:
        times: Their numbers among all, int32.
        kept: $\bar\alpha$: of an image's variance, what is left of it after the step.
        kept_before: The same before the step: after the one kept before, 1 before the first.
    """

    times: np.ndarray
    kept: np.ndarray
    kept_before: np.ndarray

    @classmethod
    def linear(cls, num_steps: int = STEPS) -> Schedule:
        """Of `T` steps of linearly rising variances, `num_steps` that are evenly spaced."""
        variances = np.linspace(FIRST_VARIANCE, LAST_VARIANCE, STEPS)
        times = np.round(np.linspace(0, STEPS - 1, num_steps)).astype("int32")
        kept = np.cumprod(1 - variances)[times]
        return cls(times, kept, np.append(1.0, kept[:-1]))

    @property
    def variance(self) -> np.ndarray:
        r"""$\beta$, the variance that the step adds: the upper bound of that of the step back."""
        return 1 - self.kept / self.kept_before

    @property
    def variance_back(self) -> np.ndarray:
        r"""$\tilde\beta$, the lower bound; of the first step, where it is 0, the second's."""
        bound = self.variance * (1 - self.kept_before) / (1 - self.kept)
        return np.append(bound[1], bound[1:])

    def tables(self) -> dict[str, np.ndarray]:
        """What the steps need, each `(steps,)` in float32."""
        tables = {
            "image_by_noisy": 1 / np.sqrt(self.kept),
            "image_by_noise": np.sqrt(1 / self.kept - 1),
            "noisy_by_image": np.sqrt(self.kept),
            "noisy_by_noise": np.sqrt(1 - self.kept),
            "before_by_image": np.sqrt(self.kept_before),
            "before_by_noise": np.sqrt(1 - self.kept_before),
            "mean_by_image": self.variance * np.sqrt(self.kept_before) / (1 - self.kept),
            "mean_by_noisy": (1 - self.kept_before) * np.sqrt(1 - self.variance) / (1 - self.kept),
            "log_variance": np.log(self.variance),
            "log_variance_back": np.log(self.variance_back),
        }
        return {name: table.astype("float32") for name, table in tables.items()}


class Numbers:
    """The numbers of a schedule for the steps `index (B,)`, each to be multiplied with images."""

    def __init__(self, tables: dict[str, np.ndarray], index: Any) -> None:
        self._tables, self._index = tables, index

    def __getattr__(self, name: str) -> Any:
        table = ops.convert_to_tensor(self._tables[name])
        return ops.reshape(ops.take(table, self._index), (-1, 1, 1, 1))


def image_of(noisy: Any, noise: Any, numbers: Numbers) -> Any:
    """The image without its noise."""
    return numbers.image_by_noisy * noisy - numbers.image_by_noise * noise


def mean_back(image: Any, noisy: Any, numbers: Numbers) -> Any:
    """The mean of the image one step back."""
    return numbers.mean_by_image * image + numbers.mean_by_noisy * noisy


def log_variance_back(between: Any, numbers: Numbers) -> Any:
    """The log variance of the step back, from where it lies `between` its bounds, -1 and 1."""
    share = (between + 1) / 2
    return share * numbers.log_variance + (1 - share) * numbers.log_variance_back


@keras.saving.register_keras_serializable(package="keras_moh")
class DiffusionTrainer(keras.Model):
    r"""Trains a diffusion model with `fit`, on images and their classes.

    The loss of an image is the mean square of what is wrong in the noise predicted at a random
    step, of 1000 with variances from 0.0001 to 0.02. With `learn_sigma` the variational bound of
    that step in bits per dimension is added, from which the variances alone learn (arXiv
    2102.09672); so in the authors' code. The losses of routers come on top.

    The authors train with `AdamW(1e-4, weight_decay=0)` and use the weights averaged over the
    steps: `use_ema=True, ema_momentum=0.9999` of the optimizer. `fit` ends with the averages in the
    place of the weights.

    Args:
        network: The `MoHDiT` to train.
        seed: Seed of steps and noise, an integer. Defaults to `None`.
        **kwargs: `name` of `keras.Model`.

    Call arguments:
        inputs: A dict of `images (B, H, W, C)`, scaled to `[-1, 1]` if they are pixels, and `labels
            (B,)`, integers.
        training: Passed on to the network.

    Returns:
        The loss `(B,)` of each image, float32. `fit` and `evaluate` take their mean.

    Raises:
        ValueError: if `network` is no `MoHDiT`.

    Example:
    >>> import keras, numpy as np, keras_moh
    >>> network = keras_moh.models.MoHDiT(
    ...     image_size=8, patch_size=4, num_classes=3, hidden_size=16, depth=1, num_heads=4,
    ...     num_shared_heads=1, top_k=2, num_channels=1,
    ... )
    >>> trainer = keras_moh.models.DiffusionTrainer(network)
    >>> trainer.compile(keras.optimizers.AdamW(1e-3, weight_decay=0))
    >>> data = {"images": np.zeros((6, 8, 8, 1), "float32"), "labels": np.arange(6) % 3}
    >>> history = trainer.fit(data, batch_size=3, epochs=2, verbose=0)
    >>> len(history.history["loss"])
    2
    """

    def __init__(self, network: MoHDiT, seed: int | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.network = _checked_network(network)
        self.seed = seed
        self.seed_generator = keras.random.SeedGenerator(seed)
        self._tables = Schedule.linear().tables()
        self.built = True  # the network is

    def call(self, inputs: dict[str, Any], training: bool | None = None) -> Any:
        """The loss `(B,)` of each image; see the class."""
        images = ops.cast(inputs["images"], "float32")
        batch = ops.shape(images)[0]
        times = keras.random.randint((batch,), 0, STEPS, dtype="int32", seed=self.seed_generator)
        noise = keras.random.normal(ops.shape(images), dtype="float32", seed=self.seed_generator)
        return self.loss_of(images, inputs["labels"], times, noise, training)

    def loss_of(
        self, images: Any, labels: Any, times: Any, noise: Any, training: bool | None = None
    ) -> Any:
        """The loss `(B,)` of each image at the steps `times (B,)` with the noise given."""
        images, labels, times, noise = map(ops.convert_to_tensor, (images, labels, times, noise))
        numbers = Numbers(self._tables, times)
        noisy = numbers.noisy_by_image * images + numbers.noisy_by_noise * noise
        inputs = {"images": noisy, "times": times, "labels": labels}
        predicted = ops.cast(self.network(inputs, training=training), "float32")
        channels = self.network.num_channels
        loss = _mean(ops.square(noise - predicted[..., :channels]))
        if not self.network.learn_sigma:
            return loss
        # The mean is not to learn from this part.
        guess = image_of(noisy, ops.stop_gradient(predicted[..., :channels]), numbers)
        mean = mean_back(guess, noisy, numbers)
        log_variance = log_variance_back(predicted[..., channels:], numbers)
        divergence = gaussian_divergence(
            mean_back(images, noisy, numbers), numbers.log_variance_back, mean, log_variance
        )
        surprise = pixel_surprise(images, mean, log_variance)
        first = ops.equal(times, 0)
        return loss + ops.where(first, _mean(surprise), _mean(divergence)) / math.log(2)

    def compute_loss(
        self,
        x: Any = None,
        y: Any = None,
        y_pred: Any = None,
        sample_weight: Any = None,
        training: bool = True,
    ) -> Any:
        """The mean of the images' losses, and the losses of routers."""
        if sample_weight is not None:
            y_pred = y_pred * ops.cast(sample_weight, y_pred.dtype)
        return ops.mean(y_pred) + sum(ops.cast(loss, "float32") for loss in self.losses)

    def get_config(self) -> dict[str, Any]:
        """The constructor's arguments."""
        network = keras.saving.serialize_keras_object(self.network)
        return {"network": network, "seed": self.seed, "name": self.name}

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> DiffusionTrainer:
        """The inverse of `get_config`."""
        network = keras.saving.deserialize_keras_object(config["network"], custom_objects)
        return cls(**{**config, "network": network})


def gaussian_divergence(mean: Any, log_variance: Any, other_mean: Any, other: Any) -> Any:
    """The Kullback-Leibler divergence of a Gaussian from another one, in nats, of each entry."""
    squares = ops.square(mean - other_mean) * ops.exp(-other)
    return (other - log_variance + ops.exp(log_variance - other) + squares - 1) / 2


def pixel_surprise(images: Any, mean: Any, log_variance: Any) -> Any:
    """Minus the log probability of pixels, one of 256 values from -1 to 1, under a Gaussian.

    A value stands for all numbers nearest to it, -1 and 1 also for all beyond.
    """
    scale = ops.exp(-log_variance / 2)
    below = _gaussian_cdf((images - mean - 1 / 255) * scale)
    up_to = _gaussian_cdf((images - mean + 1 / 255) * scale)
    mass = ops.where(images > 0.999, 1 - below, up_to - below)
    mass = ops.where(images < -0.999, up_to, mass)
    return -ops.log(ops.maximum(mass, 1e-12))


def _gaussian_cdf(x: Any) -> Any:
    return (1 + ops.erf(x / math.sqrt(2))) / 2


def _mean(x: Any) -> Any:
    """Of `(B, H, W, C)` the mean of each image."""
    return ops.mean(x, axis=(1, 2, 3))


def _checked_network(network: Any) -> MoHDiT:
    if not isinstance(network, MoHDiT):
        raise invalid_argument("network", "a `keras_moh.models.MoHDiT`", network)
    return network


METHODS = ("ddpm", "ddim")


class DiffusionSampler:
    r"""Draws images with a diffusion model, by DDPM or DDIM.

    Both go back from noise in `num_steps` of the 1000 steps. DDPM adds noise in each of them (arXiv
    2006.11239), DDIM does not (arXiv 2010.02502, with $\eta = 0$), and does with fewer of them.

    A step is compiled once, for one batch size, and serves all batches and all calls: the last
    batch is filled up. The noise comes from NumPy: with one seed, all backends draw the same
    images, up to rounding.

    Args:
        network: The `MoHDiT`, trained.
        method: `"ddpm"` or `"ddim"`. Defaults to `"ddpm"`.
        num_steps: Number of steps, from 2 to 1000. Defaults to 250, the authors'.
        batch_size: Number of images that are drawn at once. Defaults to 32.
        clip: Whether predicted images are clipped to `[-1, 1]` in each step: for pixels, which lie
            there, not for latents. Defaults to `False`.

    Raises:
        ValueError: for an argument out of its range.

    Example:
    >>> import keras_moh
    >>> network = keras_moh.models.MoHDiT(
    ...     image_size=8, patch_size=4, num_classes=3, hidden_size=16, depth=1, num_heads=4,
    ...     num_shared_heads=1, top_k=2, num_channels=1,
    ... )
    >>> sampler = keras_moh.models.DiffusionSampler(network, method="ddim", num_steps=5)
    >>> sampler.sample([0, 1, 2, 2], guidance_scale=4.0, seed=0, verbose=0).shape
    (4, 8, 8, 1)
    """

    def __init__(
        self,
        network: MoHDiT,
        method: str = "ddpm",
        num_steps: int = 250,
        batch_size: int = 32,
        clip: bool = False,
    ) -> None:
        if method not in METHODS:
            raise invalid_argument("method", "'ddpm' or 'ddim'", method)
        if integer("num_steps", num_steps, 2) > STEPS:
            raise invalid_argument("num_steps", f"an integer from 2 to {STEPS}", num_steps)
        self.network = _checked_network(network)
        self.batch_size = integer("batch_size", batch_size, 1)
        self.schedule = Schedule.linear(num_steps)
        clip = boolean("clip", clip)
        self._step = _StepBack(network, self.schedule, method == "ddpm", clip, guided=True)
        # Without guidance a step takes half the time.
        self._plain_step = _StepBack(network, self.schedule, method == "ddpm", clip, guided=False)

    def sample(
        self,
        labels: Sequence[int],
        guidance_scale: float = 1.0,
        seed: int | None = None,
        verbose: int = 1,
    ) -> np.ndarray:
        """Draw an image for each label.

        Args:
            labels: Classes `(N,)`; `num_classes` draws without one, if the network knows that.
            guidance_scale: As of `MoHDiT.guided`. Defaults to 1, without guidance; the authors' is
                4 for images to look at, 1.5 to measure by.
            seed: Seed of the noise, an integer. Defaults to `None`: others every time.
            verbose: Whether to show a progress bar, 0 or 1. Defaults to 1.

        Returns:
            Images `(N, H, W, C)`, float32.

        Raises:
            ValueError: if a label is none of the network's, or it knows no class `num_classes` and
                guidance needs it.
        """
        classes = self._checked_labels(labels)
        scale = number_in("guidance_scale", guidance_scale, 0)
        guided = scale != 1
        if guided and not self.network.knows_none:
            raise invalid_argument(
                "guidance_scale", "1 with a network of label_dropout=0", guidance_scale
            )
        step, size = (self._step if guided else self._plain_step), self.batch_size
        generator, steps = np.random.default_rng(seed), len(self.schedule.times)
        batches = range(0, len(classes), size)
        progress = keras.utils.Progbar(steps * len(batches), verbose=verbose, unit_name="step")
        shape = (size, *self.network.inputs[0].shape[1:])
        images = []
        for start in batches:
            inputs = {
                "labels": np.resize(classes[start : start + size], size),
                "images": generator.standard_normal(shape, "float32"),
                "scale": np.full(size, scale, "float32"),
            }
            for index in reversed(range(steps)):
                inputs["index"] = np.full(size, index, "int32")
                if step.draws:
                    inputs["noise"] = generator.standard_normal(shape, "float32")
                inputs["images"] = step.predict_on_batch(inputs)
                progress.add(1)
            images.append(inputs["images"])
        return np.concatenate(images)[: len(classes)]

    def _checked_labels(self, labels: Any) -> np.ndarray:
        array = np.asarray(labels)
        last = self.network.num_classes - (not self.network.knows_none)
        integers = array.ndim == 1 and array.size > 0 and array.dtype.kind in "iu"
        if not integers or array.min() < 0 or array.max() > last:
            raise invalid_argument("labels", f"a list of integers from 0 to {last}", labels)
        return array.astype("int32")


class _StepBack(keras.Model):
    """One step back for a batch: a model, so that Keras compiles it in each backend's way."""

    def __init__(
        self, network: MoHDiT, schedule: Schedule, draws: bool, clip: bool, guided: bool
    ) -> None:
        super().__init__(name="step_back")
        self.network, self.draws, self.clip, self.guided = network, draws, clip, guided
        self._times, self._tables = schedule.times, schedule.tables()
        self.built = True  # else JAX would run it once, operation by operation

    def call(self, inputs: dict[str, Any]) -> Any:
        """The images `(B, H, W, C)` one step back from `images`."""
        noisy, index = inputs["images"], inputs["index"]
        numbers = Numbers(self._tables, index)
        times = ops.take(ops.convert_to_tensor(self._times), index)
        of_network = {"images": noisy, "times": times, "labels": inputs["labels"]}
        if self.guided:
            predicted = self.network.guided(of_network, inputs["scale"][0])
        else:
            predicted = self.network(of_network, training=False)
        predicted = ops.cast(predicted, "float32")
        channels = self.network.num_channels
        noise = predicted[..., :channels]
        image = image_of(noisy, noise, numbers)
        if self.clip:
            image = ops.clip(image, -1.0, 1.0)
            noise = (numbers.image_by_noisy * noisy - image) / numbers.image_by_noise
        if not self.draws:
            return numbers.before_by_image * image + numbers.before_by_noise * noise
        if self.network.learn_sigma:
            log_variance = log_variance_back(predicted[..., channels:], numbers)
        else:
            log_variance = numbers.log_variance
        # The last image is not drawn: it is the mean.
        drawn = ops.reshape(ops.cast(index > 0, "float32"), (-1, 1, 1, 1)) * inputs["noise"]
        return mean_back(image, noisy, numbers) + ops.exp(log_variance / 2) * drawn
