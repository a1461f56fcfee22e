"""The measurement of one case: all competitors checked, then timed in turn."""

from __future__ import annotations

import dataclasses
import functools
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from keras import ops

from benchmarks import competitors
from benchmarks.backends import load_backend
from benchmarks.cases import Case
from benchmarks.competitors import oracle
from benchmarks.timing import Program, alternate
from keras_moh import UnsupportedError, attention_flops

GEMM_SIZE = 2048


class WrongAnswerError(Exception):
    """A competitor does not compute what it should, so that its time means nothing."""


@dataclasses.dataclass(frozen=True)
class Data:
    """What all competitors of a case are given."""

    weights: Mapping[str, np.ndarray]
    tokens: np.ndarray
    cotangents: np.ndarray
    cache: np.ndarray | None

    @property
    def inputs(self) -> list[np.ndarray]:
        """What the layer is called with."""
        return [self.tokens] if self.cache is None else [self.tokens, self.cache]


def draw(case: Case) -> Data:
    """The random weights, tokens and cotangents of a case, the same each time."""
    weights = competitors.draw_weights(case)
    tokens = competitors.draw_tokens(case, weights)
    cotangents = np.random.default_rng(2).normal(size=tokens.shape).astype("float32")
    cache = competitors.draw_cache(case) if case.cache else None
    return Data(weights, tokens, cotangents, cache)


def program(name: str, mode: str, case: Case, data: Data) -> Program:
    """The program of a competitor, which returns its output and, in training, all gradients."""
    layer = competitors.build(name, case, data.weights)
    call = functools.partial(competitors.call, layer, case)
    variables = layer.trainable_variables
    if case.training:
        return load_backend().training_step(call, data.inputs, variables, [data.cotangents], mode)
    return load_backend().forward(call, data.inputs, variables, mode)


def answer(program: Program) -> list[np.ndarray]:
    """What a program computes, as arrays."""
    return [np.asarray(ops.convert_to_numpy(x)) for x in program()]


def check(name: str, case: Case, received: list[np.ndarray], expected: list[np.ndarray]) -> None:
    """Compare a competitor's answer, array by array, with that of its oracle.

    An entry may be off by 1e-4 of the largest of its array, and by what rounding leaves of a
    gradient that is 0 in theory, as that of the keys' bias is.

    Raises:
        WrongAnswerError: if it is another one.
    """
    largest = max(np.abs(x).max() for x in expected)
    for number, (x, y) in enumerate(zip(received, expected, strict=True)):
        error = np.abs(x - y).max() if x.shape == y.shape else np.inf
        allowed = 1e-4 * np.abs(y).max() + 1e-5 * largest
        if not error <= allowed:  # so that a NaN is refused as well
            raise WrongAnswerError(
                f"{name} ({case}): result {number} of shape {x.shape} is off by {error:.1e} from "
                f"the answer of '{oracle(name)}', of shape {y.shape} and magnitude "
                f"{np.abs(y).max():.1e}"
            )


def checked_programs(
    case: Case, data: Data, names: Sequence[str]
) -> tuple[dict[tuple[str, str], Program], dict[str, str]]:
    """The programs of these competitors, by name and mode, each run once and found right.

    Returns:
        The programs, and the reasons of the implementations that do not serve the case.
    """
    modes = load_backend().MODES
    # Each is compiled once, also the oracle that is a competitor too.
    compiled = functools.cache(lambda name, mode: program(name, mode, case, data))
    oracles = {name: answer(compiled(name, modes[0])) for name in dict.fromkeys(map(oracle, names))}
    programs, skipped = {}, {}
    for name in names:
        for mode in modes:
            try:
                received = answer(compiled(name, mode))
            except UnsupportedError as error:
                skipped[name] = _reason(error)
                break
            check(name, case, received, oracles[oracle(name)])
            programs[name, mode] = compiled(name, mode)
    return programs, skipped


def _reason(error: UnsupportedError) -> str:
    """Why an implementation does not serve a call, out of the error that names much besides."""
    found = re.search(r"on the backend '\w+': (.*?)\. With implementation=None", str(error))
    return found[1] if found else str(error)


def gemm_rate() -> float:
    """The FLOP/s of a large square matrix product in this framework, in its fastest mode."""
    backend = load_backend()
    factor = np.random.default_rng(3).normal(size=(GEMM_SIZE, GEMM_SIZE)).astype("float32")
    programs = {
        mode: backend.forward(ops.matmul, [factor, factor], [], mode) for mode in backend.MODES
    }
    for run in programs.values():
        run()
    times = alternate(programs, rounds=7)
    return 2 * GEMM_SIZE**3 / min(map(statistics.median, times.values()))


def flops(case: Case) -> dict[str, float]:
    """The FLOPs of a case: of the active heads, and of all heads."""
    layer = competitors.build(competitors.CHOSEN, case, competitors.draw_weights(case))
    counted = attention_flops(layer, case.batch, case.length, use_causal_mask=case.is_causal)
    totals = {"active": counted.active.total, "dense": counted.dense.total}
    if case.cache:
        # Of the tokens the projections, and of the slots what is attended to.
        slots = attention_flops(layer, case.batch, case.length, case.cache)
        totals["active"] += slots.active.core - counted.active.core
        totals["dense"] += slots.dense.core - counted.dense.core
    passes = 3 if case.training else 1  # two products backward for each one forward
    return {name: passes * total for name, total in totals.items()}


Record = dict[str, Any]
Makers = Mapping[tuple[str, str], Callable[[Case, Data], Program]]


def measure(
    case: Case,
    names: Sequence[str],
    rounds: int,
    seconds: float,
    others: Makers | None = None,
) -> Record:
    """Check these competitors on a case, and time them in turn.

    Args:
        case: What to compute.
        names: Of the competitors.
        rounds: Least number of rounds.
        seconds: Least time for all rounds.
        others: Makers of further programs to time with them, by name and mode.

    Returns:
        What goes into the results' file: the case, its FLOPs, the GEMM rate, the seconds of every
        round by competitor and mode, and the reasons of those that were skipped.
    """
    data = draw(case)
    programs, skipped = checked_programs(case, data, names)
    for key, make in (others or {}).items():
        programs[key] = make(case, data)
        programs[key]()
    rate = gemm_rate()
    times: dict[str, dict[str, list[float]]] = {}
    for (name, mode), measured in alternate(programs, rounds, seconds).items():
        times.setdefault(name, {})[mode] = measured
    return {
        "case": dataclasses.asdict(case),
        "flops": flops(case),
        "gemm_rate": rate,
        "seconds": times,
        "skipped": skipped,
    }
