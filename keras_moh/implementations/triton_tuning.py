"""Sizes of tiles by measurement, for who sets `KERAS_MOH_AUTOTUNE=1`; else by the table.

The first call of a kind then times each kernel with the sizes of `triton_blocks.py` and with their
neighbours, for some seconds, and keeps the fastest: in memory, and among Triton's cached files
(`TRITON_CACHE_DIR`), from where later processes have it. What a kernel is launched with, and how
often, depends on its sizes, so that this is not `triton.autotune`, but works as it does. While a
CUDA graph is captured nothing can be timed: call once before.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import triton
from triton.runtime.cache import get_cache_manager
from triton.runtime.errors import OutOfResources, PTXASError

from keras_moh.implementations.triton_blocks import Blocks

_FILE = "keras_moh_blocks.json"
_fastest: dict[str, Blocks] = {}


def is_asked_for() -> bool:
    """Whether the environment asks for it."""
    return os.environ.get("KERAS_MOH_AUTOTUNE") == "1"


def fastest(kind: Any, candidates: Sequence[Blocks], launch: Callable[[Blocks], None]) -> Blocks:
    """The sizes of the candidates with which a launch takes the least time.

    Args:
        kind: What is launched and where, of a kind of which one choice serves all: with a `repr`.
        candidates: At least one of them must fit the device.
        launch: Runs the kernel; it may be run again and again.
    """
    name = _hash(kind, candidates)
    if name not in _fastest:
        _fastest[name] = _stored(name) or _measured(name, candidates, launch)
    return _fastest[name]


def _hash(kind: Any, candidates: Sequence[Blocks]) -> str:
    """A name by all that the choice depends on: the kernels' source and Triton's version too."""
    source = Path(__file__).with_name("triton_kernels.py").read_bytes()
    text = repr((triton.__version__, kind, list(candidates)))
    return hashlib.sha256(source + text.encode()).hexdigest()


def _stored(name: str) -> Blocks | None:
    path = get_cache_manager(name).get_file(_FILE)
    return None if path is None else Blocks(*json.loads(Path(path).read_text()))


def _measured(name: str, candidates: Sequence[Blocks], launch: Callable[[Blocks], None]) -> Blocks:
    chosen = min(candidates, key=lambda sizes: _milliseconds(lambda: launch(sizes)))
    get_cache_manager(name).put(json.dumps(chosen), _FILE, binary=False)
    return chosen


def _milliseconds(run: Callable[[], None]) -> float:
    try:
        return triton.testing.do_bench(run, return_mode="median")
    except (OutOfResources, PTXASError):
        return float("inf")
