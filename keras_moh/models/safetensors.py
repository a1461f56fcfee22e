"""Reading safetensors files: names and shapes first, numbers when they are asked for.

The format is a length of 8 bytes, a header of JSON, and the numbers: nothing in it can run, unlike
in a pickle (https://huggingface.co/docs/safetensors, "Format"). It is read here so that loading
needs no more than NumPy, which has no bfloat16: those numbers are widened to float32.
"""

from __future__ import annotations

import dataclasses
import json
import math
import operator
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

DTYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2"}
# The format's own limit: a longer header is an attack or an accident.
MAX_HEADER = 100_000_000
# What reading a header that is none may raise.
_DAMAGES = (
    AttributeError,
    KeyError,
    TypeError,
    RecursionError,
    UnicodeDecodeError,
    json.JSONDecodeError,
)


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """Where one tensor is."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int

    def read(self) -> np.ndarray:
        """The numbers; bfloat16 as float32."""
        stored = np.memmap(
            self.file, DTYPES[self.dtype], "r", self.offset, (math.prod(self.shape),)
        )
        if self.dtype == "BF16":
            # bfloat16 is the upper half of a float32.
            return (stored.astype("<u4") << 16).view("<f4").reshape(self.shape)
        return np.asarray(stored).reshape(self.shape)


def stored_tensors(files: Iterable[Path]) -> dict[str, StoredTensor]:
    """All tensors of `files` by name.

    Raises:
        ValueError: if a file is not in the format or has a dtype that weights do not have, or two
            have a tensor of one name.
    """
    tensors: dict[str, StoredTensor] = {}
    for file in files:
        for name, tensor in _header(file).items():
            if name in tensors:
                raise ValueError(
                    f"Weight '{name}' is stored twice: in {tensors[name].file.name} and {file.name}"
                )
            tensors[name] = tensor
    return tensors


def _header(file: Path) -> dict[str, StoredTensor]:
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if not 2 <= length <= min(MAX_HEADER, size - 8):
            raise _not_safetensors(file, f"a header of {length} bytes in {size}")
        try:
            entries = json.loads(stream.read(length))
            entries.pop("__metadata__", None)
            return {name: _tensor(file, 8 + length, size, entries[name]) for name in entries}
        except _DAMAGES as e:
            raise _not_safetensors(file, f"{type(e).__name__} in the header: {e}") from e


def _tensor(file: Path, start: int, size: int, entry: dict[str, Any]) -> StoredTensor:
    dtype, shape = entry["dtype"], tuple(map(operator.index, entry["shape"]))
    if dtype not in DTYPES:
        raise _not_safetensors(file, f"a tensor of dtype {dtype}, not one of {', '.join(DTYPES)}")
    begin, end = map(operator.index, entry["data_offsets"])
    if min((begin, *shape)) < 0 or start + end > size:
        raise _not_safetensors(file, f"a tensor at {begin}:{end} in {size - start} bytes")
    if end - begin != math.prod(shape) * np.dtype(DTYPES[dtype]).itemsize:
        raise _not_safetensors(file, f"{end - begin} bytes for {dtype} of shape {shape}")
    return StoredTensor(file, dtype, shape, start + begin)


def _not_safetensors(file: Path, found: str) -> ValueError:
    return ValueError(f"{file} is not a safetensors file of weights: it has {found}")
