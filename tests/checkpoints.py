"""Checkpoints, written by the tests."""

import json
from pathlib import Path
from typing import Any

import numpy as np

DTYPES = {"float32": "F32", "float16": "F16", "float64": "F64", "uint16": "BF16"}


def write_safetensors(file: Path, tensors: dict[str, np.ndarray]) -> Path:
    """Numbers of dtype uint16 are taken for those of bfloat16."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, array in tensors.items():
        begin, end = end, end + array.nbytes
        dtype = DTYPES[array.dtype.name]
        header[name] = {"dtype": dtype, "shape": array.shape, "data_offsets": [begin, end]}
    encoded = json.dumps(header).encode()
    content = b"".join(np.ascontiguousarray(array).tobytes() for array in tensors.values())
    file.write_bytes(len(encoded).to_bytes(8, "little") + encoded + content)
    return file
