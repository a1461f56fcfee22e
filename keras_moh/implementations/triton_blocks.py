"""How the Triton kernels cut their work into tiles, by architecture and width of a head.

The sizes are seeds: of those tried, ones with large tiles that compile without spilling registers
in half precision, to which `tests/test_triton_builds.py` holds the compiler. Nothing was timed;
`triton_tuning.py` can do so on a device.
"""

from __future__ import annotations

from typing import NamedTuple

from keras_moh.implementations.spec import AttentionSpec


class Blocks(NamedTuple):
    """The tiles of a kernel, and how a program works through them.

    Attributes:
        rows: Rows of a tile, `BLOCK_M`.
        keys: Keys of a tile, `BLOCK_N`.
        warps: Warps of a program.
        stages: Tiles that are under way at once, from memory to their products.
    """

    rows: int
    keys: int
    warps: int
    stages: int


# An interpreter's time goes by the number of tiles, not by their size.
_INTERPRETED = Blocks(128, 128, 4, 1)

# By kernel and architecture: for heads of up to 64, 128 and 256 features, in half precision.
_HALF = {
    "forward": {
        "sm_80": (Blocks(128, 64, 8, 2), Blocks(64, 64, 8, 2), Blocks(32, 32, 4, 2)),
        "sm_90": (Blocks(128, 64, 8, 3), Blocks(128, 64, 8, 3), Blocks(64, 32, 8, 2)),
        "gfx942": (Blocks(128, 64, 8, 2), Blocks(128, 64, 8, 2), Blocks(32, 32, 4, 2)),
    },
    "decode": {
        "sm_80": (Blocks(16, 128, 4, 3), Blocks(16, 64, 4, 3), Blocks(16, 32, 4, 2)),
        "sm_90": (Blocks(16, 128, 4, 3), Blocks(16, 64, 4, 3), Blocks(16, 32, 4, 3)),
        "gfx942": (Blocks(16, 64, 4, 2), Blocks(16, 64, 4, 2), Blocks(16, 32, 4, 2)),
    },
    "backward_query": {
        "sm_80": (Blocks(128, 32, 8, 2), Blocks(64, 32, 4, 2), Blocks(32, 32, 4, 1)),
        "sm_90": (Blocks(128, 64, 8, 3), Blocks(128, 64, 8, 3), Blocks(32, 32, 4, 1)),
        "gfx942": (Blocks(128, 64, 8, 2), Blocks(64, 32, 4, 2), Blocks(32, 32, 4, 1)),
    },
    "backward_key_value": {
        "sm_80": (Blocks(32, 64, 4, 2), Blocks(64, 64, 8, 2), Blocks(16, 32, 4, 1)),
        "sm_90": (Blocks(64, 128, 8, 2), Blocks(32, 128, 8, 2), Blocks(16, 32, 4, 1)),
        "gfx942": (Blocks(32, 64, 4, 2), Blocks(32, 64, 4, 2), Blocks(16, 32, 4, 1)),
    },
}
# To combine parts takes hardly any time: one row, and this many parts at once.
COMBINE = Blocks(1, 32, 4, 1)
# The most rows of a list for which `decode` serves: those of its tiles.
_DECODE_ROWS = 16
# Keys are split among so many programs that those of a large GPU are busy for several rounds, but
# into no more parts, and none with fewer keys, than this. It does not depend on the device, so that
# the order of sums does not.
_PROGRAMS = 2048
_MOST_PARTS = 128
_LEAST_KEYS = 256
# In float32, which has no matrix units at full precision, products are made of registers.
_FLOAT32 = (Blocks(32, 32, 4, 1), Blocks(32, 32, 8, 1), Blocks(16, 16, 4, 1))


def blocks(kernel: str, target: str, width: int, itemsize: int) -> Blocks:
    """The sizes of a kernel.

    Args:
        kernel: `"forward"`, `"decode"` (`forward`, for lists of few rows),
            `"backward_query"` or `"backward_key_value"`.
        target: `"sm_90"` and the like, the name of an AMD architecture, or `"interpreter"`.
        width: The larger of `d` and `dv`, at most 256.
        itemsize: Bytes of a feature.
    """
    if target == "interpreter":
        return _INTERPRETED
    column = 0 if width <= 64 else 1 if width <= 128 else 2
    if itemsize == 4:
        return _FLOAT32[column]
    if not target.startswith("sm_"):
        return _HALF[kernel]["gfx942"][column]
    # All others of NVIDIA have less shared memory than these.
    is_large = target in ("sm_90", "sm_100", "sm_103")
    return _HALF[kernel]["sm_90" if is_large else "sm_80"][column]


def forward_sizes(shape: tuple[int, ...], heads_of_group: int) -> str:
    """Whose sizes the forward kernel has for `heads (B, T, K)`: `"forward"`, or `"decode"`.

    The latter are for lists of few rows, whose keys are split among programs: see `splits`.
    """
    longest_list = shape[1] * min(shape[2], heads_of_group)
    return "decode" if longest_list <= _DECODE_ROWS else "forward"


def tiles_of_rows(shape: tuple[int, ...], groups: int, block: int) -> int:
    """The most tiles of rows that an entry of `heads (B, T, K)` can have: see the kernels."""
    rows = shape[1] * shape[2]
    return min((rows + groups * (block - 1)) // block, rows)


def too_many_rows(spec: AttentionSpec) -> str | None:
    """Why the kernels cannot number the rows of an entry, by key/value head, or `None`."""
    rows = spec.num_key_value_heads * (spec.query_length or 0) * spec.num_active_heads
    if rows >= 2**31:
        return f"it numbers {rows} rows, which is more than an int32 can hold"
    return None


def neighbours(sizes: Blocks) -> list[Blocks]:
    """These sizes first, then others with which a kernel may be faster: one number is changed."""
    rows, keys, warps, stages = sizes
    return [
        sizes,
        *(sizes._replace(rows=x) for x in (rows // 2, 2 * rows) if 16 <= x <= 128),
        *(sizes._replace(keys=x) for x in (keys // 2, 2 * keys) if 16 <= x <= 128),
        sizes._replace(warps=12 - warps),  # 4 or 8
        *(sizes._replace(stages=x) for x in (stages - 1, stages + 1) if x >= 1),
    ]


def splits(tiles: int, key_length: int) -> int:
    """Among how many programs the keys of each of so many tiles of rows are split."""
    wanted = min(_PROGRAMS // max(tiles, 1), _MOST_PARTS, key_length // _LEAST_KEYS)
    return 1 << max(wanted, 1).bit_length() - 1  # a power of 2
