"""What the records say, as tables that are Markdown and can be read in a terminal.

`results` are the contents of results' files: the `suite`, the `backend`, the `machine` and the
`records`. A summary takes those of one suite, one for each backend.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.cases import BARS, Case
from benchmarks.competitors import (
    CHOSEN,
    CONVERTED,
    CONVERTED_REFERENCE,
    DENSE,
    KERAS,
    REFERENCE,
)

Record = dict[str, Any]  # as `harness.measure` returns it
Results = dict[str, Any]

NEVER_SLOWER_THAN = 1.05  # of the grid: times the reference, and for plain attention times Keras's
SHARE_OF_LIMIT = 0.9  # of `compact`, of its FLOPs; of the roofline
SHARE_OF_MEMORY = 0.5
LONG_BYTES = 12 * 2**30
LABELS = {KERAS: "Keras's attention", CHOSEN: "implementation=None"}


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table, its columns aligned: the first to the left, the others to the right."""
    lines = [[*header], *map(list, rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    lines = [[line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])] for line in lines]
    rule = [f":{'-' * (widths[0] - 1)}", *(f"{'-' * (width - 1)}:" for width in widths[1:])]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (lines[0], rule, *lines[1:]))


def mark(reached: bool) -> str:
    return "✓" if reached else "✗"


def case_of(record: Record) -> Case:
    return Case(**record["case"])


def seconds(record: Record, name: str) -> float:
    """The median time of a competitor, in its fastest mode."""
    return min(map(statistics.median, record["seconds"][name].values()))


def speedup(record: Record, name: str, over: str) -> float:
    return seconds(record, over) / seconds(record, name)


def active_flops(record: Record, name: str) -> float:
    """The FLOPs that a competitor's answer needs: plain attention has all heads active."""
    return record["flops"]["dense" if name in (KERAS, DENSE) else "active"]


def flop_limit(record: Record) -> float:
    return record["flops"]["dense"] / record["flops"]["active"]


def share_of_gemm(record: Record, name: str) -> float:
    return active_flops(record, name) / seconds(record, name) / record["gemm_rate"]


def record_table(record: Record) -> str:
    """Everything about one case: a row for each competitor in each of its modes.

    The speed-up is over the first competitor in its fastest mode.
    """
    if "memory" in record:
        return memory_table(record)
    first = next(iter(record["seconds"]))
    rows = []
    for name, by_mode in record["seconds"].items():
        for mode, times in by_mode.items():
            time, flops = statistics.median(times), active_flops(record, name)
            rows.append(
                (
                    f"{LABELS.get(name, name)} ({mode})",
                    f"{1e3 * time:.2f}",
                    f"{seconds(record, first) / time:.2f}",
                    f"{flops / 1e9:.2f}",
                    f"{flops / time / 1e9:.0f}",
                    f"{flops / time / record['gemm_rate']:.0%}",
                )
            )
    header = (str(case_of(record)), "ms", "speed-up", "active GFLOP", "GFLOP/s", "of GEMM")
    rounds = len(next(iter(record["seconds"][first].values())))
    lines = [
        table(header, rows),
        f"GEMM: {record['gemm_rate'] / 1e9:.0f} GFLOP/s. FLOP limit: {flop_limit(record):.2f}. "
        f"Medians of {rounds} rounds.",
        *(f"Skipped {name}: {reason}" for name, reason in record["skipped"].items()),
    ]
    return "\n".join(lines)


def memory_table(record: Record) -> str:
    rows = [
        (
            f"{LABELS.get(name, name)} ({mode})",
            f"{measured['growth'] / 2**20:.0f}",
            f"{measured['peak'] / 2**20:.0f}",
            f"{measured['seconds']:.2f}",
        )
        for name, by_mode in record["memory"].items()
        for mode, measured in by_mode.items()
    ]
    header = (str(case_of(record)), "MiB of the run", "MiB of the process", "seconds")
    return table(header, rows)


Cell = Callable[[str, Record], str]


def by_length(results: Sequence[Results], training: bool, cell: Cell, limit: bool = True) -> str:
    """A row for each backend, and a column for each length, causal or not."""
    columns: dict[tuple[bool, int], dict[str, Record]] = {}
    for result in results:
        for record in result["records"]:
            case = case_of(record)
            if case.training == training:
                column = columns.setdefault((case.is_causal, case.length), {})
                column[result["backend"]] = record
    keys = sorted(columns)
    title = f"{'training step' if training else 'forward'}, N ="
    header = [title, *(f"{length}{' causal' if causal else ''}" for causal, length in keys)]
    rows = [
        [
            result["backend"],
            *(
                cell(result["backend"], columns[key][result["backend"]])
                if result["backend"] in columns[key]
                else ""
                for key in keys
            ),
        ]
        for result in results
    ]
    if limit:
        limits = (flop_limit(next(iter(columns[key].values()))) for key in keys)
        rows.append(["FLOP limit", *(f"{value:.2f}" for value in limits)])
    return table(header, rows)


def _speedup_cell(backend: str, record: Record) -> str:
    return f"{speedup(record, CHOSEN, KERAS):.2f}"


def _bar_cell(backend: str, record: Record) -> str:
    reached, case = speedup(record, CHOSEN, KERAS), case_of(record)
    bar = BARS[backend].get((case.training, case.is_causal, case.length))
    return f"{reached:.2f}" if bar is None else f"{reached:.2f} (bar {bar}) {mark(reached >= bar)}"


def _gemm_cell(backend: str, record: Record) -> str:
    return f"{share_of_gemm(record, CHOSEN):.0%}"


def _milliseconds_cell(backend: str, record: Record) -> str:
    return " / ".join(f"{1e3 * seconds(record, name):.3g}" for name in (KERAS, REFERENCE, CHOSEN))


def both_passes(results: Sequence[Results], cell: Cell, limit: bool = True) -> str:
    return "\n\n".join(by_length(results, training, cell, limit) for training in (False, True))


def bars(results: Sequence[Results]) -> str:
    return (
        "Speed-up of implementation=None over Keras's attention:\n\n"
        f"{both_passes(results, _bar_cell)}\n\n"
        "Share of the GEMM rate that implementation=None reaches on active FLOPs:\n\n"
        f"{both_passes(results, _gemm_cell, limit=False)}"
    )


def _grid_ratio(record: Record) -> float:
    name = CHOSEN if CHOSEN in record["seconds"] else DENSE
    return 1 / speedup(record, name, REFERENCE if name == CHOSEN else KERAS)


def is_slower(record: Record) -> bool:
    """Whether a record of the grid shows the layer slower than it must not be."""
    return _grid_ratio(record) > NEVER_SLOWER_THAN


def grid(results: Sequence[Results]) -> str:
    """Where the layer is slower than what it must not be slower than, the worst first."""
    lines = []
    for result in results:
        records = sorted(result["records"], key=_grid_ratio, reverse=True)
        short = [record for record in records if is_slower(record)]
        lines.append(
            f"{result['backend']}: {len(short)} of {len(records)} cases of at most "
            f"{result['options']['tokens']} tokens take more than {NEVER_SLOWER_THAN} times the "
            f"reference, or with router=None more than {NEVER_SLOWER_THAN} times Keras's attention."
        )
        rows = [
            (
                str(case_of(record))
                if CHOSEN in record["seconds"]
                else f"{case_of(record)}, plain",
                f"{_grid_ratio(record):.2f}",
            )
            for record in short
        ]
        if rows:
            lines.append(table(("case", "times as long"), rows))
    return "\n\n".join(lines)


def _by_case(
    header: Sequence[str],
    results: Sequence[Results],
    cells: Callable[[Record], Sequence[str]],
) -> str:
    """A row for each case of each backend."""
    rows = [
        (f"{result['backend']}, {case_of(record)}", *cells(record))
        for result in results
        for record in result["records"]
    ]
    return table(header, rows)


def compact(results: Sequence[Results]) -> str:
    rows = []
    for result in results:
        for record in result["records"]:
            dense, *others = record["seconds"]
            limit = flop_limit(record)
            for name in [x for x in others if x in ("compact", CHOSEN)]:
                reached = speedup(record, name, dense)
                share = reached / limit
                rows.append(
                    (
                        f"{result['backend']}, {case_of(record)}, {LABELS.get(name, name)}",
                        LABELS.get(dense, dense),
                        f"{reached:.2f}",
                        f"{limit:.2f}",
                        f"{share:.0%} {mark(share >= SHARE_OF_LIMIT)}",
                    )
                )
    return table(("compact", "over", "speed-up", "FLOP limit", "share"), rows)


def convert(results: Sequence[Results]) -> str:
    def cells(record: Record) -> tuple[str, str]:
        names = (CONVERTED_REFERENCE, CONVERTED)
        every_head, reached = (speedup(record, name, KERAS) for name in names)
        return f"{every_head:.2f}", f"{reached:.2f} {mark(reached > 1)}"

    return _by_case(
        ("speed-up over the original", "every head computed", "converted"), results, cells
    )


def roofline(results: Sequence[Results]) -> str:
    def cells(record: Record) -> tuple[str, str, str]:
        limit, reached = speedup(record, "roofline", KERAS), speedup(record, CHOSEN, KERAS)
        share = reached / limit
        return f"{limit:.2f}", f"{reached:.2f}", f"{share:.0%} {mark(share >= SHARE_OF_LIMIT)}"

    return _by_case(
        ("speed-up over Keras's attention", "limit", "reached", "share"), results, cells
    )


def decode(results: Sequence[Results]) -> str:
    """The fastest way to attend with all heads, the step of the layer, and their quotient."""

    def cells(record: Record) -> tuple[str, str, str, str]:
        dense, reference, ours = (
            min(seconds(record, name) for name in names)
            for names in ((KERAS, DENSE), (REFERENCE,), (CHOSEN,))
        )
        times = (f"{1e3 * time:.3g}" for time in (dense, reference, ours))
        return *times, f"{dense / ours:.2f}"

    header = ("decoding, ms", "all heads", REFERENCE, LABELS[CHOSEN], "speed-up")
    return _by_case(header, results, cells)


def _least(record: Record, name: str, quantity: str) -> float:
    return min(measured[quantity] for measured in record["memory"][name].values())


def memory(results: Sequence[Results]) -> str:
    def cells(record: Record) -> tuple[str, str, str]:
        ours, keras = (_least(record, name, "growth") for name in (CHOSEN, KERAS))
        reached = mark(ours <= SHARE_OF_MEMORY * keras)
        return f"{keras / 2**20:.0f}", f"{ours / 2**20:.0f}", f"{ours / keras:.2f} {reached}"

    return _by_case(("peak memory, MiB", LABELS[KERAS], LABELS[CHOSEN], "share"), results, cells)


def long(results: Sequence[Results]) -> str:
    def cells(record: Record) -> tuple[str, str]:
        peak = _least(record, CHOSEN, "peak")
        return (
            f"{peak / 2**30:.2f} {mark(peak <= LONG_BYTES)}",
            f"{_least(record, CHOSEN, 'seconds'):.2f}",
        )

    return _by_case(("long input", "GiB of the process", "seconds"), results, cells)


def curves(results: Sequence[Results]) -> str:
    return both_passes(
        [{**result, "records": _at_half(result["records"])} for result in results], _speedup_cell
    )


def _at_half(records: Sequence[Record]) -> list[Record]:
    return [record for record in records if case_of(record).share == 0.5]


SUMMARIES: dict[str, Callable[[Sequence[Results]], str]] = {
    "bars": bars,
    "grid": grid,
    "compact": compact,
    "convert": convert,
    "curves": curves,
    "decode": decode,
    "roofline": roofline,
    "memory": memory,
    "long": long,
}


def machine(result: Results) -> str:
    """One line on what a result was measured with."""
    described = result["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in described["versions"].items())
    commit = (described["commit"] or "unknown")[:10] + (
        " modified" if described["modified"] else ""
    )
    return (
        f"{result['backend']}: {described['processor']}, {described['cores']} cores "
        f"(OMP_NUM_THREADS={described['threads']}), {described['device']}, {described['system']}, "
        f"Python {described['python']}, {versions}, commit {commit}"
    )


# The blocks of docs/how-fast.md: the suite that each is made from, and how.
DOCS_BLOCKS: dict[str, tuple[str, Callable[[Sequence[Results]], str]]] = {
    "machines": ("bars", lambda results: "\n".join(f"- {machine(result)}" for result in results)),
    "speed-ups": ("bars", lambda results: both_passes(results, _speedup_cell)),
    "milliseconds": ("bars", lambda results: both_passes(results, _milliseconds_cell, limit=False)),
    "gemm": ("bars", lambda results: both_passes(results, _gemm_cell, limit=False)),
    **{
        suite: (suite, SUMMARIES[suite])
        for suite in ("roofline", "compact", "decode", "convert", "grid", "memory", "long")
    },
}
_BLOCK = re.compile(
    r"(?P<begin><!-- benchmarks: (?P<name>[\w-]+) -->\n).*?(?P<end><!-- end -->)", re.DOTALL
)


def fill(page: Path, results: Sequence[Results]) -> None:
    """Write the tables between the page's marks anew, those of which there are results."""

    def replacement(match: re.Match[str]) -> str:
        suite, block = DOCS_BLOCKS[match["name"]]
        chosen = [result for result in results if result["suite"] == suite]
        if not chosen:
            return match[0]
        return f"{match['begin']}\n{block(chosen)}\n\n{match['end']}"

    page.write_text(_BLOCK.sub(replacement, page.read_text()))
