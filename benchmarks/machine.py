"""What a measurement was made on and with."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import keras
from keras import ops

from benchmarks import CORES

ROOT = Path(__file__).parents[1]
_DISTRIBUTIONS = {
    "torch": ["torch", "triton"],
    "jax": ["jax", "jaxlib"],
    "tensorflow": ["tensorflow", "tensorflow-cpu"],
}


def describe() -> dict[str, Any]:
    """The machine, the versions and the commit."""
    backend = keras.backend.backend()
    return {
        "processor": _processor(),
        "cores": CORES,
        "threads": os.environ["OMP_NUM_THREADS"],
        "device": str(ops.convert_to_tensor(0.0).device),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "versions": _versions(["keras", "numpy", *_DISTRIBUTIONS[backend]]),
        "commit": _git("rev-parse", "HEAD"),
        "modified": bool(_git("status", "--porcelain", "--untracked-files=no")),
    }


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    for line in cpuinfo.read_text().splitlines() if cpuinfo.exists() else ():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()


def _versions(distributions: list[str]) -> dict[str, str]:
    installed = {}
    for name in distributions:
        try:
            installed[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return installed


def _git(*arguments: str) -> str | None:
    """What git prints, or `None` outside a checkout."""
    try:
        process = subprocess.run(
            ["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return process.stdout.strip()
