"""`python -m benchmarks --device gpu`."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import keras

from benchmarks.machine import describe
from benchmarks.report import machine

LIMIT = 430.0  # seconds; with what comes before and after it, less than 8 minutes


def unsupported_reason() -> str | None:
    """Why there is nothing to measure here, or `None`."""
    backend = keras.backend.backend()
    if backend != "torch":
        return f"it measures PyTorch: set KERAS_BACKEND=torch. Received: '{backend}'"
    import torch

    from keras_moh.implementations import torch_triton

    if not torch.cuda.is_available():
        return f"PyTorch {torch.__version__} finds no GPU"
    return torch_triton._unsupported_device("cuda")


def run(results: Path, device: str = "cuda", limit: float = LIMIT) -> None:
    """Check, measure, print the tables and write `RESULTS/gpu-torch.json`.

    Args:
        results: The folder.
        device: The device's name.
        limit: Seconds, about.
    """
    import torch

    from benchmarks.gpu import cases, report
    from benchmarks.gpu.suite import Suite, check_all

    where = torch.device(device)
    suite = Suite(where, limit)
    result: dict[str, Any] = {"suite": "gpu", "backend": "torch", "machine": describe()}
    if where.type == "cuda":
        result["machine"]["device"] = torch.cuda.get_device_name(where)
    print(machine(result), flush=True)
    result["checked"] = check_all(cases.gate(), where)
    print("\nRight, by float64:")
    print(*(f"- {case}" for case in result["checked"]), sep="\n", flush=True)
    result["records"] = []
    for record in suite.records(cases.cases()):
        result["records"].append(record)
        print(f"\n{report.record_table(record)}", flush=True)
    result["bars"] = [
        {**x._asdict(), "case": str(x.case)} for x in report.comparisons(result["records"])
    ]
    result["left_out"] = [dataclasses.asdict(case) for case in suite.left_out]
    print(f"\n{report.summary(result['records'], suite.left_out)}")
    results.mkdir(parents=True, exist_ok=True)
    path = results / "gpu-torch.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    print(f"\nWritten: {path}")
