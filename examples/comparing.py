"""What the examples that compare MoH with plain attention share: trainings, times and figures.

It imports Keras, so an example imports it after it has chosen the backend.
"""

import importlib
import json
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
from common import mean_and_range
from matplotlib.figure import Figure

import keras_moh


def with_router(
    model: keras.Model, make: Callable[[keras_moh.MoHAttention], keras_moh.Router | None]
) -> keras.Model:
    """The same model with the routers that `make` gives its attention layers.

    Without any, `None`, that is multi-head attention: all heads with weight 1.
    """

    def changed(layer: keras.Layer) -> keras.Layer:
        config = layer.get_config()
        if isinstance(layer, keras_moh.MoHAttention):
            config |= {"router": make(layer), "num_shared_heads": None, "top_k": None}
        return type(layer).from_config(config)

    return keras.models.clone_model(model, clone_function=changed)


class Batches(keras.utils.PyDataset):
    """Batches that depend on a seed and the number of the epoch, and on nothing else.

    So a training that was interrupted sees what it would have seen. `start` begins an epoch.
    """

    def start(self, epoch: int) -> None:
        raise NotImplementedError


class Comparison:
    """The results of trainings, of every variant with every seed, in a folder.

    They are written to `results.json` after each training, and what is there is not done again.
    The training that was interrupted goes on after its last whole epoch.
    """

    def __init__(self, folder: Path, settings: Mapping[str, Any]):
        self.folder, self.file = folder, folder / "results.json"
        self.results: dict[str, Any] = {"settings": dict(settings), "runs": {}}
        if self.file.exists():
            self.results = json.loads(self.file.read_text())
            if self.results["settings"] != settings:
                sys.exit(
                    f"{self.file} is of other settings: {self.results['settings']}\n"
                    f"These are: {dict(settings)}\nRemove {folder}, or choose another --output"
                )
        modules = ["keras_moh", "keras", "numpy", settings["backend"]]
        self.results["versions"] = {x: importlib.import_module(x).__version__ for x in modules}
        self.save()  # the settings, before there is anything to go on with

    def train(
        self,
        variant: str,
        seed: int,
        make: Callable[[], keras.Model],
        batches: Batches,
        epochs: int,
        measure: Callable[[keras.Model], dict[str, Any]],
    ) -> None:
        """Train a model and keep what `measure` says of it."""
        runs = self.results["runs"].setdefault(variant, {})
        if str(seed) in runs:
            return
        print(f"\n{variant}, seed {seed}", flush=True)
        keras.utils.set_random_seed(seed)
        model = make()
        backup = self.folder / "backup" / f"{variant} {seed}".replace(" ", "_")
        batches.start(0)

        def begin(epoch: int, logs: Any) -> None:
            batches.start(epoch)
            start_random_layers(model, seed, epoch)

        # Keras's own `fit`: that of keras-hub's models takes arrays and datasets only.
        keras.Model.fit(
            model,
            batches,
            epochs=epochs,
            shuffle=False,  # the batches are: by Python's random numbers, which are not resumed
            callbacks=[
                keras.callbacks.BackupAndRestore(
                    str(backup), double_checkpoint=True, delete_checkpoint=False
                ),
                keras.callbacks.LambdaCallback(on_epoch_begin=begin),
            ],
        )
        runs[str(seed)] = {"parameters": model.count_params(), **measure(model)}
        self.save()
        shutil.rmtree(backup)

    def time_steps(
        self, makes: Mapping[str, Callable[[], keras.Model]], batch: Any, rounds: int = 20
    ) -> None:
        """Measure the seconds that a step of training takes: the median of steps in turn."""
        print("\nTimes per step", flush=True)
        models = {name: make() for name, make in makes.items()}
        seconds: dict[str, list[float]] = {name: [] for name in models}
        for _ in range(2 + rounds):
            for name, model in models.items():
                start = time.perf_counter()
                model.train_on_batch(*batch)
                seconds[name].append(time.perf_counter() - start)
        # The first two compile.
        self.results["seconds_per_step"] = {
            name: statistics.median(values[2:]) for name, values in seconds.items()
        }
        self.save()

    def save(self) -> None:
        """All at once: a file that is half written would be of no use."""
        self.folder.mkdir(parents=True, exist_ok=True)
        unfinished = self.file.with_suffix(".unfinished")
        unfinished.write_text(json.dumps(self.results, indent=1) + "\n")
        unfinished.replace(self.file)

    def of_seeds(self, variant: str, measure: str) -> list[Any]:
        """What `measure` was of a variant, by seed: of those seeds that every variant has."""
        runs = self.results["runs"]
        seeds = set.intersection(*map(set, runs.values()))
        return [runs[variant][seed][measure] for seed in sorted(seeds, key=int)]

    def rows(self, measure: str, digits: int) -> list[list[str]]:
        """Of each variant its name, parameters, the measure over seeds, and the time if known."""
        seconds = self.results.get("seconds_per_step", {})
        return [
            [
                variant,
                f"{self.of_seeds(variant, 'parameters')[0]:,}",
                mean_and_range(self.of_seeds(variant, measure), digits),
                *([f"{1000 * seconds[variant]:.0f} ms"] if seconds else []),
            ]
            for variant in self.results["runs"]
        ]

    def draw(self, measure: str, label: str) -> Figure:
        """A point for every seed, a line at their mean, and beside them the times if known."""
        variants = list(self.results["runs"])
        seconds = self.results.get("seconds_per_step")
        figure = Figure(figsize=(max(8, 1.1 * len(variants)), 3), layout="constrained")
        values, *times = figure.subplots(1, 2 if seconds else 1, squeeze=False)[0]
        for place, variant in enumerate(variants):
            of_seeds = self.of_seeds(variant, measure)
            values.plot([place] * len(of_seeds), of_seeds, "o", color=f"C{place}", alpha=0.6)
            mean = statistics.mean(of_seeds)
            values.hlines(mean, place - 0.25, place + 0.25, color=f"C{place}")
        values.set(ylabel=label, xlim=(-0.5, len(variants) - 0.5))
        for axis in times:
            milliseconds = [1000 * seconds[variant] for variant in variants]
            axis.bar(
                range(len(variants)),
                milliseconds,
                0.6,
                color=[f"C{i}" for i in range(len(variants))],
            )
            axis.set(ylabel="ms per step of training")
        for axis in values, *times:
            axis.set_xticks(range(len(variants)), variants)
            axis.spines[["top", "right"]].set_visible(False)
        return figure


def optimizer(steps: int) -> keras.Optimizer:
    """AdamW for so many steps: a tenth of them warm up, the rate then falls as a cosine."""
    return keras.optimizers.AdamW(warmed_up(3e-3, steps, steps // 10), weight_decay=0.05)


def warmed_up(
    rate: float, steps: int, warmup: int
) -> keras.optimizers.schedules.LearningRateSchedule:
    """A learning rate that rises in the first of the steps, and then falls as a cosine."""
    return keras.optimizers.schedules.CosineDecay(
        0.0, steps - warmup, warmup_target=rate, warmup_steps=warmup
    )


def start_random_layers(model: keras.Model, seed: int, epoch: int) -> None:
    """Let what layers draw in an epoch depend on these alone: a backup lacks their states.

    On PyTorch `Dropout` without a seed has none, and draws from PyTorch's own numbers.
    """
    random = np.random.default_rng((seed, epoch))
    keras.utils.set_random_seed(int(random.integers(2**31)))
    for state in [x for x in model.variables if x.name == "seed_generator_state"]:
        state.assign(random.integers(2**32, size=state.shape, dtype="uint32"))


def integers(random: Any, count: int) -> Sequence[int]:
    """Seeds for Keras's random layers."""
    return [int(x) for x in random.integers(2**31, size=count)]
