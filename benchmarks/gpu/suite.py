"""The measurement: first that all is right, then how fast it is, and an end in time."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from benchmarks.gpu import competitors, timing
from benchmarks.gpu.cases import FORWARD, TRAINING, Core
from benchmarks.gpu.competitors import (
    OF_ALL_HEADS,
    OF_HEADS_TAKEN,
    OURS,
    Program,
    Tensors,
)
from benchmarks.gpu.data import Data, draw, expected, of_all_heads, some_tokens
from benchmarks.harness import WrongAnswerError

Record = dict[str, Any]

# Of a result, in units of its largest entry.
TOLERANCES = {"float32": 1e-4, "bfloat16": 2e-2}
CHECKED_TOKENS = 16
# What PyTorch raises where a kernel cannot serve; and what is wrong is not timed.
_UNAVAILABLE = (RuntimeError, ValueError, WrongAnswerError)


def check(name: str, case: Core, data: Data, program: Program, tokens: torch.Tensor) -> None:
    """Compare outputs at these tokens, and all gradients that they have, with float64.

    Raises:
        WrongAnswerError: if one is another.
    """
    wanted = expected(case, data, tokens, gradients=not case.cache)
    if case.cache:
        results = program.forward()
    else:
        cotangent = torch.zeros_like(data.cotangent)
        cotangent[:, tokens] = data.cotangent[:, tokens]
        results = program.training(program.own(cotangent))
    at_tokens = (True, True, False, False, True)
    received = program.answer([x.detach() for x in results])
    # Plain attention has no gates.
    for number, (x, y) in enumerate(zip(received, wanted, strict=False)):
        found = x[:, tokens] if at_tokens[number] else x
        error = (found.double() - y).abs().max().item()
        size = y.abs().max().item()
        if not error <= TOLERANCES[case.dtype] * size:  # so that a NaN is refused as well
            raise WrongAnswerError(
                f"{name} ({case}): result {number} is off by {error:.1e}, of magnitude {size:.1e}"
            )


def check_all(cases: Iterable[Core], device: torch.device) -> list[str]:
    """Check the package's kernels on these cases, every number.

    Raises:
        WrongAnswerError: if one is wrong.
    """
    checked = []
    for case in cases:
        data = draw(case, device)
        tokens = torch.arange(case.length, device=device)
        check(OURS, case, data, competitors.make(OURS, case, data), tokens)
        checked.append(f"{case}, {case.dtype}")
    return checked


def measure(
    case: Core, data: Data, names: Iterable[str], seconds: float
) -> tuple[dict[str, dict[str, list[float]]], dict[str, str]]:
    """The seconds by pass and competitor, each found right before; and why others have none.

    Raises:
        Exception: if it is the package's kernels that cannot serve, or are wrong.
    """
    times: dict[str, dict[str, list[float]]] = {name: {} for name in case.passes}
    skipped = {}
    device = data.query.device
    tokens = some_tokens(case, CHECKED_TOKENS, device)
    for name in names:
        try:
            program = competitors.make(name, case, data)
            check(name, case, data, program, tokens)
            measured = {
                name: timing.device_times(run, device, seconds)
                for name, run in _passes(case, data, program).items()
            }
        except _UNAVAILABLE as error:
            if name == OURS:
                raise
            skipped[name] = _reason(error)
        else:
            for kind, of_pass in measured.items():
                times[kind][name] = of_pass
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return times, skipped


def _passes(case: Core, data: Data, program: Program) -> dict[str, Callable[[], Tensors]]:
    if case.cache:
        return {FORWARD: program.forward}
    cotangent = program.own(data.cotangent)
    return {FORWARD: program.forward, TRAINING: functools.partial(program.training, cotangent)}


def _reason(error: Exception) -> str:
    """The first line of a message, short enough for a table."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0][:150]


class Suite:
    """The measurement of one case after the other, of which some may be left out.

    Attributes:
        left_out: The cases for which time did not suffice.
    """

    def __init__(self, device: torch.device, limit: float, seconds: float = 0.05) -> None:
        """Args are the device, the seconds from now that there are, and those of each program."""
        self.device = device
        self.seconds = seconds
        self.left_out: list[Core] = []
        self._end = time.monotonic() + limit
        # Plain attention is the same whatever share of the heads is active beside it.
        self._of_all_heads = functools.cache(self._measure_all_heads)

    def records(self, cases: Iterable[Core]) -> Iterator[Record]:
        """Of each case for which the time suffices that the longest one took so far."""
        longest = 0.0
        for case in cases:
            start = time.monotonic()
            if start + longest > self._end:
                self.left_out.append(case)
                continue
            yield self._record(case)
            longest = max(longest, time.monotonic() - start)

    def _record(self, case: Core) -> Record:
        dense, skipped = self._of_all_heads(dataclasses.replace(case, active=case.num_heads))
        data = draw(case, self.device)
        times, also_skipped = measure(case, data, OF_HEADS_TAKEN, self.seconds)
        return {
            "case": dataclasses.asdict(case),
            "seconds": {kind: dense[kind] | times[kind] for kind in case.passes},
            "skipped": skipped | also_skipped,
        }

    def _measure_all_heads(self, case: Core) -> Any:
        data = of_all_heads(draw(case, self.device))
        return measure(case, data, OF_ALL_HEADS, self.seconds)
