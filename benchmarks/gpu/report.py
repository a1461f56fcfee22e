"""Tables of what was measured, and the speed-ups that are asked for."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from benchmarks.gpu.cases import FORWARD, Core
from benchmarks.gpu.competitors import CUDNN, FLASH, FLEX, OF_ALL_HEADS, OURS
from benchmarks.report import mark, table

Record = dict[str, Any]  # as `suite.Suite` makes it


def bar(case: Core, measured: str, competitor: str) -> float | None:
    """The least speed-up over a competitor that the project asks for, if any.

    Args:
        case: What was computed.
        measured: `FORWARD` or `TRAINING`.
        competitor: With all heads.
    """
    if case.cache:
        return 1.6 if competitor == FLASH and case.share == 0.5 else None
    if case.share == 1:
        return 1 / 1.1 if competitor == FLEX else None
    if case.share != 0.5:
        return None
    if competitor in (FLASH, FLEX):
        if case.length == 512:
            return 1.6 if measured == FORWARD else None
        if case.length >= 4096:
            return 1.85 if measured == FORWARD else 1.7
    if competitor == CUDNN and case.length >= 4096:
        return 1.4
    return None


# The speed-up of the paper's own Triton kernel over MHA, at 50 % and N = 512 (arXiv 2410.11842),
# on a device of its own.
PAPER = 1.376 / 0.863


def case_of(record: Record) -> Core:
    return Core(**record["case"])


def speedup(record: Record, measured: str, over: str) -> float:
    """Of ours over a competitor."""
    times = record["seconds"][measured]
    return statistics.median(times[over]) / statistics.median(times[OURS])


class Comparison(NamedTuple):
    """A speed-up that is asked for, and what was reached: `None` if the competitor has no time."""

    case: Core
    measured: str
    over: str
    bar: float
    reached: float | None


def comparisons(records: Sequence[Record]) -> Iterator[Comparison]:
    """All speed-ups that are asked for in these cases."""
    for record in records:
        case = case_of(record)
        for measured, name in itertools.product(case.passes, OF_ALL_HEADS):
            wanted = bar(case, measured, name)
            if wanted is not None:
                has_time = name in record["seconds"][measured]
                reached = speedup(record, measured, name) if has_time else None
                yield Comparison(case, measured, name, wanted, reached)


def record_table(record: Record) -> str:
    """A row for each competitor: its times, and the speed-up of ours over it."""
    case = case_of(record)
    names = dict.fromkeys(name for times in record["seconds"].values() for name in times)
    rows = [
        (name, *(cell for measured in case.passes for cell in _cells(record, measured, name)))
        for name in names
    ]
    header = [
        str(case),
        *(cell for measured in case.passes for cell in (f"{measured}, ms", "ours")),
    ]
    lines = [table(header, rows)]
    lines += [f"Skipped {name}: {reason}" for name, reason in record["skipped"].items()]
    if case == Core(512, batch=case.batch):
        lines.append(f"The paper reports {PAPER:.2f} over MHA for its own kernel at N=512.")
    return "\n".join(lines)


def _cells(record: Record, measured: str, name: str) -> tuple[str, str]:
    if name not in record["seconds"][measured]:
        return "", ""
    time = statistics.median(record["seconds"][measured][name])
    reached, wanted = speedup(record, measured, name), bar(case_of(record), measured, name)
    asked = "" if wanted is None else f" (bar {wanted:.2f}) {mark(reached >= wanted)}"
    return f"{1e3 * time:.3f}", f"{reached:.2f}{asked}"


def summary(records: Sequence[Record], left_out: Sequence[Core]) -> str:
    """How many bars are reached, which are not, and what time did not suffice for."""
    found = list(comparisons(records))
    compared = [x for x in found if x.reached is not None]
    missed = [x for x in compared if x.reached < x.bar]
    lines = [
        f"{len(compared) - len(missed)} of {len(compared)} bars reached; for "
        f"{len(found) - len(compared)} more the competitor has no time."
    ]
    if missed:
        rows = [
            (str(x.case), x.measured, x.over, f"{x.bar:.2f}", f"{x.reached:.2f}") for x in missed
        ]
        lines.append(table(("missed", "pass", "over", "bar", "reached"), rows))
    lines.append(f"Left out for want of time: {len(left_out)} cases.")
    lines += [f"- {case}" for case in left_out]
    return "\n".join(lines)
