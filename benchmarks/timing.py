"""Times of programs that take turns, so that each meets the same moods of the machine."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Hashable, Mapping
from typing import Any, TypeVar

Name = TypeVar("Name", bound=Hashable)
Program = Callable[[], Any]


def alternate(
    programs: Mapping[Name, Program], rounds: int, seconds: float = 0.0
) -> dict[Name, list[float]]:
    """The seconds that each program took in each round, one after the other.

    A program is called twice in a row, and the second call is timed: as a user calls it, after
    itself. What another one of much memory leaves behind made some take half as long again.

    Args:
        programs: What to time, by name, each called before so that it is compiled.
        rounds: Least number of rounds.
        seconds: Go on for at least this long, which gives short programs more rounds.
    """
    times: dict[Name, list[float]] = {name: [] for name in programs}
    gc.collect()
    gc.freeze()  # what is alive now need not be looked at again between the rounds
    gc.disable()
    try:
        finished, start = 0, time.perf_counter()
        while finished < rounds or time.perf_counter() - start < seconds:
            for name, program in programs.items():
                program()
                before = time.perf_counter()
                program()
                times[name].append(time.perf_counter() - before)
            gc.collect()
            finished += 1
    finally:
        gc.enable()
        gc.unfreeze()
    return times
