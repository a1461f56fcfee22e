"""Runs an example as a user runs it, and makes what some would fetch."""

import gzip
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

EXAMPLES = Path(__file__).parents[1] / "examples"


def run_example(name: str, *arguments: Any, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, EXAMPLES / f"{name}.py", *map(str, arguments)],
        env={**os.environ, "PYTHONUTF8": "1", **environment},
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=500,
    )


def write_fashion_mnist(*folders: Path) -> None:
    """37 images to train on and 11 to test on, of noise, in the files of Fashion-MNIST."""
    random = np.random.default_rng(0)
    for name, count in ("train", 37), ("t10k", 11):
        pixels = random.integers(256, size=(count, 28, 28), dtype="uint8").tobytes()
        labels = random.integers(10, size=count, dtype="uint8").tobytes()
        for folder in folders:
            folder.mkdir(parents=True, exist_ok=True)
            images_file = folder / f"{name}-images-idx3-ubyte.gz"
            images_file.write_bytes(gzip.compress(bytes(16) + pixels))
            labels_file = folder / f"{name}-labels-idx1-ubyte.gz"
            labels_file.write_bytes(gzip.compress(bytes(8) + labels))
