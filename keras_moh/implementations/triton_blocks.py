"""Block sizes of the Triton kernels."""

from __future__ import annotations

from typing import NamedTuple


class Blocks(NamedTuple):
    """Rows and keys of a tile, and how a program runs."""

    rows: int
    keys: int
    warps: int
    stages: int


def blocks(kernel: str, target: str, width: int, dtype: str) -> Blocks:
    if target == "interpreter":
        return Blocks(32, 32, 4, 1)
    return Blocks(64, 64, 4, 2)
