"""The figures of docs/how-fast.md: speed-up over length and over the share of active heads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.cases import Case
from benchmarks.competitors import CHOSEN, KERAS
from benchmarks.report import Record, Results, case_of, flop_limit, speedup

COLOURS = {"torch": "tab:red", "jax": "tab:blue", "tensorflow": "tab:orange"}


def draw(results: Sequence[Results], folder: Path) -> list[Path]:
    """Draw both figures from the results of the suite `curves` into a folder of images."""
    longest = max(case_of(record).length for result in results for record in result["records"])
    half = Case(longest).share
    figures = {
        "speed_length": _figure(
            results, "tokens N", lambda case: case.length if case.share == half else None
        ),
        "speed_share": _figure(
            results,
            f"share of active heads, N = {longest}",
            lambda case: case.share if case.length == longest else None,
        ),
    }
    paths = []
    # Without date and random names, so that the same figure is the same file.
    with matplotlib.rc_context({"svg.hashsalt": "keras_moh"}):
        for name, figure in figures.items():
            if name == "speed_length":
                for axis in figure.axes:
                    axis.set_xscale("log", base=2)
            paths.append(folder / f"{name}.svg")
            figure.savefig(paths[-1], metadata={"Date": None})
    return paths


def _figure(
    results: Sequence[Results], xlabel: str, position: Callable[[Case], float | None]
) -> Figure:
    """Two panels, forward and training; `position` is a case's place, `None` leaves it out."""
    figure = Figure(figsize=(9, 3.8), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    for axis, training in zip(panels, (False, True), strict=True):
        axis.set(title="training step" if training else "forward", xlabel=xlabel)
        axis.axhline(1, color="grey", linewidth=0.8)
        axis.set_yscale("log", base=2)  # twice as fast is as far above 1 as half is below
        axis.yaxis.set_major_formatter("{x:g}")
        for result in results:
            records = [r for r in result["records"] if case_of(r).training == training]
            backend = result["backend"]
            _line(axis, records, position, lambda r: speedup(r, CHOSEN, KERAS)).set(
                label=backend, color=COLOURS[backend], marker="o"
            )
        _line(axis, records, position, flop_limit).set(
            label="FLOP limit", color="black", linestyle="--"
        )
    panels[0].set_ylabel("speed-up over Keras's attention")
    panels[0].legend()
    return figure


def _line(
    axis: Axes,
    records: Sequence[Record],
    position: Callable[[Case], float | None],
    height: Callable[[Record], float],
) -> Any:
    points = sorted(
        (place, height(record))
        for record in records
        if (place := position(case_of(record))) is not None
    )
    return axis.plot(*zip(*points, strict=True))[0]
