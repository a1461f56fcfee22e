"""Measure the framework that KERAS_BACKEND names, or show what was measured.

Suites that measure print every case, and a summary, and write RESULTS/SUITE-BACKEND.json:

  bars      all competitors, half of 12 heads active, beside the speed-ups that are asked for
  grid      whether the layer is ever slower than it would be without skipping heads
  compact   group-limited routing on grouped queries, against its FLOP limit
  convert   pretrained attention beside what convert_to_moh makes of it, with half of its heads
  curves    the points of the figures
  decode    one token over a key/value cache
  roofline  the machine's limit: the same matrix products and bare attention, nothing else
  memory    peak memory of a training step
  long      forward on a long sequence, and its peak memory

Suites that show what is in RESULTS:

  plot      draws the figures of the documentation
  docs      fills the tables of docs/how-fast.md

With --device gpu there are no suites: PyTorch's attention and the package's kernels are measured
on a GPU, in less than 8 minutes (see benchmarks/gpu/).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

import keras

from benchmarks import report
from benchmarks.gpu import command
from benchmarks.machine import ROOT, describe
from benchmarks.suites import SUITES, Options


def main(arguments: Sequence[str] | None = None) -> None:
    """Run what the command line asks for."""
    parser = _parser()
    parsed = parser.parse_args(arguments)
    if parsed.device == "gpu":
        reason = command.unsupported_reason()
        if reason is not None:
            parser.error(f"--device gpu cannot run: {reason}")
        command.run(parsed.results)
    elif parsed.suite == "plot":
        from benchmarks import plots  # only here: it needs Matplotlib

        results = [r for r in _read(parsed.results) if r["suite"] == "curves"]
        for path in plots.draw(results, ROOT / "docs" / "images"):
            print(f"Drawn: {path}")
    elif parsed.suite == "docs":
        report.fill(ROOT / "docs" / "how-fast.md", _read(parsed.results))
    else:
        _measure(parsed)


def _measure(parsed: argparse.Namespace) -> None:
    options = Options(parsed.lengths, parsed.rounds, parsed.seconds, parsed.tokens)
    result = {
        "suite": parsed.suite,
        "backend": keras.backend.backend(),
        "machine": describe(),
        "options": dataclasses.asdict(options),
        "records": [],
    }
    print(report.machine(result), flush=True)
    for record in SUITES[parsed.suite](options):
        result["records"].append(record)
        print(f"\n{report.record_table(record)}", flush=True)
    print(f"\n{report.SUMMARIES[parsed.suite]([result])}")
    parsed.results.mkdir(parents=True, exist_ok=True)
    path = parsed.results / f"{parsed.suite}-{result['backend']}.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    print(f"\nWritten: {path}")


def _read(folder: Path) -> list[report.Results]:
    return [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    defaults = Options()
    parser.add_argument(
        "--device", choices=["gpu"], help="measure attention alone on a GPU, instead of a suite"
    )
    parser.add_argument("--suite", choices=[*SUITES, "plot", "docs"], default="bars")
    parser.add_argument("--lengths", type=_lengths, help="instead of the suite's own: 256,1024")
    parser.add_argument(
        "--rounds", type=int, default=defaults.rounds, help="at least, %(default)s by default"
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=defaults.seconds,
        help="of the rounds of each case, at least, %(default)s by default",
    )
    parser.add_argument(
        "--tokens",
        type=int,
        default=defaults.tokens,
        help="most tokens of a batch in the grid, %(default)s by default",
    )
    parser.add_argument(
        "--results",
        type=Path,
        default=ROOT / "benchmarks" / "results",
        help="folder of the results, %(default)s by default",
    )
    return parser


def _lengths(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(",")))


if __name__ == "__main__":
    main()
