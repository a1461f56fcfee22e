"""The suites: which cases are measured, and which competitors meet in them.

A suite yields one record after the other, as `harness.measure` returns them. The first competitor
of a record is the one that the others are compared with. `report.py` says what comes of them.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from functools import partial

from benchmarks import memory, report
from benchmarks.backends import load_backend
from benchmarks.cases import HEADS_BY_SHARE, Case
from benchmarks.competitors import (
    CHOSEN,
    CONVERTED,
    CONVERTED_REFERENCE,
    DENSE,
    KERAS,
    REFERENCE,
    implementations,
)
from benchmarks.harness import Makers, Record, measure
from benchmarks.roofline import ROOFLINE, make_program

BOTH = (False, True)


@dataclasses.dataclass(frozen=True)
class Options:
    """What the command line asks for.

    Attributes:
        lengths: Lengths in place of the suite's own, if any.
        rounds: Least number of rounds of each measurement.
        seconds: Least time of the rounds of each measurement.
        tokens: The most tokens of a batch in the grid.
    """

    lengths: tuple[int, ...] | None = None
    rounds: int = 7
    seconds: float = 1.0
    tokens: int = 4096

    def measure(self, case: Case, names: list[str], others: Makers | None = None) -> Record:
        """`harness.measure` with these rounds."""
        return measure(case, names, self.rounds, self.seconds, others)

    def measure_doubted(
        self, case: Case, names: list[str], is_doubtful: Callable[[Record], bool]
    ) -> Record:
        """`measure`, anew and for three times as long where the record is doubtful.

        The worst of some hundred noisy ratios are bad mostly by chance. It is the second record
        that counts then, whatever it says.
        """
        record = self.measure(case, names)
        if not is_doubtful(record):
            return record
        return measure(case, names, 3 * self.rounds, 3 * self.seconds)


def bars(options: Options) -> Iterator[Record]:
    """All competitors on 3 shared and 3 routed of 12 heads."""
    names = [KERAS, DENSE, REFERENCE, *implementations(), CHOSEN]
    lengths = options.lengths or (256, 1024, 4096)
    for training, is_causal, length in itertools.product(BOTH, BOTH, lengths):
        yield options.measure(Case(length, training=training, is_causal=is_causal), names)


def grid(options: Options) -> Iterator[Record]:
    """Whether the layer ever loses, over lengths, shares of active heads and batches."""
    lengths = options.lengths or (16, 64, 256, 1024, 4096)
    for training, is_causal, length, batch in itertools.product(BOTH, BOTH, lengths, (1, 4, 16)):
        if batch * length > options.tokens:
            continue
        case = Case(length, batch, training=training, is_causal=is_causal)
        yield options.measure_doubted(case, [KERAS, DENSE], report.is_slower)
        for shared, routed in HEADS_BY_SHARE.values():
            case = dataclasses.replace(case, num_shared_heads=shared, top_k=routed)
            yield options.measure_doubted(case, [REFERENCE, CHOSEN], report.is_slower)


def compact(options: Options) -> Iterator[Record]:
    """Half of 16 heads on 4 key/value heads, chosen within the heads of each."""
    for training, length in itertools.product(BOTH, options.lengths or (1024, 4096)):
        case = Case(
            length,
            features=1024,
            num_heads=16,
            num_shared_heads=4,
            top_k=4,
            num_key_value_heads=4,
            routing_groups=4,
            training=training,
        )
        # Two at a time: what comes after a program of much memory is slower.
        for dense, name in itertools.product((KERAS, DENSE), ("compact", CHOSEN)):
            yield options.measure(case, [dense, name])


def convert(options: Options) -> Iterator[Record]:
    """Pretrained attention beside what `convert_to_moh` makes of it, with half of its heads."""
    names = [KERAS, CONVERTED_REFERENCE, CONVERTED]
    lengths = options.lengths or (1024, 4096)
    for training, is_causal, length in itertools.product(BOTH, BOTH, lengths):
        case = Case(length, training=training, is_causal=is_causal, router="query_norm")
        yield options.measure(case, names)


def curves(options: Options) -> Iterator[Record]:
    """The points of the figures: half of the heads over lengths, and all shares at the longest."""
    lengths = options.lengths or (128, 256, 512, 1024, 2048, 4096)
    for training in BOTH:
        for length in lengths:
            yield options.measure(Case(length, training=training), [KERAS, CHOSEN])
        for shared, routed in HEADS_BY_SHARE.values():
            if (shared, routed) != (Case.num_shared_heads, Case.top_k):
                case = Case(max(lengths), num_shared_heads=shared, top_k=routed, training=training)
                yield options.measure(case, [KERAS, CHOSEN])


def roofline(options: Options) -> Iterator[Record]:
    """The machine's limit beside what is reached, for the rows of the bars."""
    others = {(ROOFLINE, mode): partial(make_program, mode) for mode in load_backend().MODES}
    lengths = options.lengths or (256, 1024, 4096)
    for training, is_causal, length in itertools.product(BOTH, BOTH, lengths):
        case = Case(length, training=training, is_causal=is_causal)
        yield options.measure(case, [KERAS, CHOSEN], others=others)


def decode(options: Options) -> Iterator[Record]:
    """One token over a cache of keys and values, which is read, or written as well."""
    names = [KERAS, DENSE, REFERENCE, *implementations(), CHOSEN]
    slots = options.lengths or (1024, 4096, 8192, 16384, 32768)
    for writes, groups, length in itertools.product(BOTH, (None, 4), slots):
        case = Case(1, num_key_value_heads=groups, cache=length, writes=writes)
        yield options.measure(case, names)


def memory_record(case: Case, names: list[str], whole_check: bool) -> Record:
    """The peak memory of these competitors, each in a process of its own."""
    return {
        "case": dataclasses.asdict(case),
        "memory": {
            name: {
                mode: memory.measure_in_child(name, mode, case, whole_check)
                for mode in load_backend().MODES
            }
            for name in names
        },
    }


def memory_of_training(options: Options) -> Iterator[Record]:
    """The peak memory of one training step."""
    for length in options.lengths or (4096,):
        yield memory_record(Case(length, training=True), [KERAS, CHOSEN], whole_check=True)


def long(options: Options) -> Iterator[Record]:
    """The peak memory of long input, where plain attention may need more than there is."""
    for length in options.lengths or (16384,):
        yield memory_record(Case(length), [CHOSEN], whole_check=False)


SUITES: dict[str, Callable[[Options], Iterator[Record]]] = {
    "bars": bars,
    "grid": grid,
    "compact": compact,
    "convert": convert,
    "curves": curves,
    "decode": decode,
    "roofline": roofline,
    "memory": memory_of_training,
    "long": long,
}
