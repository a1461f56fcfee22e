"""Peak memory of one competitor, measured in a process of its own: `python -m benchmarks.memory`.

The process takes one JSON object as its argument, and prints another. A process's peak never
falls, so that each competitor needs its own; the answer is checked after the peak has been read.
"""

from __future__ import annotations

import dataclasses
import json
import resource
import subprocess
import sys
import time
from typing import Any

import numpy as np
from keras import ops

from benchmarks import competitors
from benchmarks.backends import load_backend
from benchmarks.cases import Case
from benchmarks.harness import Data, answer, check, draw, program
from benchmarks.machine import ROOT

_CHECKED_ROWS = 64


def measure_in_child(name: str, mode: str, case: Case, whole_check: bool) -> dict[str, float]:
    """Run a competitor in a new process.

    Args:
        name: Of the competitor.
        mode: A way to compile it.
        case: What to compute.
        whole_check: Whether to check the whole answer against that of the oracle, or, where the
            oracle would not fit into memory, the output of a few rows.

    Returns:
        `peak` bytes of the process, `growth`, by how many bytes the run and its compilation raised
        that peak, and `seconds` of a second run.
    """
    task = {
        "name": name,
        "mode": mode,
        "case": dataclasses.asdict(case),
        "whole_check": whole_check,
    }
    process = subprocess.run(
        [sys.executable, "-m", "benchmarks.memory", json.dumps(task)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return json.loads(process.stdout.splitlines()[-1])


def measure(name: str, mode: str, case: Case, whole_check: bool) -> dict[str, float]:
    """As `measure_in_child`, in this process."""
    data = draw(case)
    run = program(name, mode, case, data)
    before = _peak()
    run()
    peak = _peak()
    start = time.perf_counter()
    results = run()
    seconds = time.perf_counter() - start
    received = [np.asarray(ops.convert_to_numpy(x)) for x in results]
    del results
    if whole_check:
        oracle = competitors.oracle(name)
        expected = answer(program(oracle, load_backend().MODES[0], case, data))
        check(name, case, received, expected)
    else:
        check(name, case, [received[0][:, :_CHECKED_ROWS]], [_first_rows(name, case, data)])
    return {"seconds": seconds, "peak": peak, "growth": peak - before}


def _first_rows(name: str, case: Case, data: Data) -> np.ndarray:
    """The output of the first rows, which attend to all, without skipping any head."""
    plain = competitors.oracle(name) == competitors.KERAS
    oracle = competitors.DENSE if plain else competitors.REFERENCE
    layer = competitors.build(oracle, case, data.weights)
    run = load_backend().forward(
        lambda rows, tokens: layer(rows, tokens, use_causal_mask=case.is_causal),
        [data.tokens[:, :_CHECKED_ROWS], data.tokens],
        layer.trainable_variables,
        load_backend().MODES[0],
    )
    return answer(run)[0]


def _peak() -> int:
    """The largest resident size of this process so far, in bytes."""
    size = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return size if sys.platform == "darwin" else 1024 * size


if __name__ == "__main__":
    task: dict[str, Any] = json.loads(sys.argv[1])
    print(json.dumps(measure(**{**task, "case": Case(**task["case"])})))
