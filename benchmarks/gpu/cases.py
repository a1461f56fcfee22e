"""What is computed: queries, keys, values and heads taken, as a layer would hand them over."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

FORWARD, TRAINING = "forward", "forward + backward"


@dataclass(frozen=True)
class Core:
    """Attention of `length` queries, each with `active` of the heads.

    Attributes:
        length: Queries of a sequence, `N`.
        batch: Sequences, `B`.
        num_heads: Query heads, `H`.
        groups: Key/value heads, `G`.
        key_dim: Width of a head, `d`.
        active: Heads that a token takes, `K`.
        is_causal: Whether a query sees only keys up to itself.
        cache: Keys of a step of decoding, which sees all; 0 for as many as queries.
        dtype: Name of the dtype of queries, keys and values.
    """

    length: int
    batch: int = 1
    num_heads: int = 32
    groups: int = 32
    key_dim: int = 64
    active: int = 16
    is_causal: bool = False
    cache: int = 0
    dtype: str = "bfloat16"

    @property
    def key_length(self) -> int:
        return self.cache or self.length

    @property
    def share(self) -> float:
        """The share of the heads that a token takes."""
        return self.active / self.num_heads

    @property
    def passes(self) -> tuple[str, ...]:
        """Decoding has no gradients."""
        return (FORWARD,) if self.cache else (FORWARD, TRAINING)

    def __str__(self) -> str:
        heads = f"{self.num_heads}/{self.groups} heads"
        causal = ", causal" if self.is_causal else ""
        cache = f", S={self.cache}" if self.cache else ""
        return (
            f"N={self.length}, B={self.batch}, {heads}, d={self.key_dim}, {self.share:.0%} active"
            f"{causal}{cache}"
        )


LENGTHS = (256, 512, 1024, 2048, 4096, 8192, 16384)
FIRST_LENGTHS = (512, 4096, 8192, 16384)  # where most speed-ups are asked for
HEADS = ((64, 32), (128, 32), (64, 8), (128, 8))  # d and G
SHARES = (0.5, 1.0, 0.75, 0.25, 0.9)
TOKENS = 16384  # of a batch


def cases() -> Iterator[Core]:
    """All cases, the most telling first: time may not suffice for the last."""
    for key_dim, groups in HEADS:
        yield Core(1, batch=8, groups=groups, key_dim=key_dim, cache=32768)
    others = tuple(length for length in LENGTHS if length not in FIRST_LENGTHS)
    first, *rest = HEADS
    for kinds, lengths, shares in (
        ([first], LENGTHS, SHARES[:2]),
        (rest, FIRST_LENGTHS, SHARES[:2]),
        (rest, others, SHARES[:2]),
        (HEADS, LENGTHS, SHARES[2:]),
    ):
        for heads, causal, length, share in itertools.product(
            kinds, (False, True), lengths, shares
        ):
            key_dim, groups = heads
            yield Core(
                length,
                batch=max(1, TOKENS // length),
                groups=groups,
                key_dim=key_dim,
                active=round(share * Core.num_heads),
                is_causal=causal,
            )


def gate() -> Iterator[Core]:
    """Short cases of every kind, whose every number is checked before anything is timed."""
    for key_dim, groups in HEADS:
        for causal in (False, True):
            yield Core(384, batch=2, groups=groups, key_dim=key_dim, is_causal=causal)
        yield Core(1, batch=2, groups=groups, key_dim=key_dim, cache=4096)
    yield Core(384, batch=2, groups=8, is_causal=True, dtype="float32")
