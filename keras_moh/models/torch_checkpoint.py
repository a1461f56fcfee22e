"""Reading PyTorch's files without running what they might hold.

A `.pt` file is a pickle in a zip archive. PyTorch's weights-only reader builds tensors and plain
Python values, and refuses every other object. One is let through: the authors' training programs
put their options beside the weights as an `argparse.Namespace`, which holds values and does
nothing.
"""

from __future__ import annotations

import argparse
import pickle
import zipfile
from pathlib import Path

import numpy as np
import torch


def read(path: Path, entries: tuple[str, ...]) -> dict[str, np.ndarray]:
    """The weights in `path` by name, as float32; see `checkpoints.read_checkpoint`."""
    with torch.serialization.safe_globals([argparse.Namespace]):
        try:
            # Mapped: beside the weights there may be an optimizer's state, of twice their size.
            content = torch.load(
                path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path)
            )
        except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
            raise ValueError(
                f"{path} is not a file of weights alone, and nothing else is read: a pickle can "
                "run code. Received: a file that PyTorch's weights-only reader refuses"
            ) from error
    if isinstance(content, dict):
        content = next((content[entry] for entry in entries if entry in content), content)
    if not isinstance(content, dict) or not all(map(torch.is_tensor, content.values())):
        found = f"{list(content)[:5]}" if isinstance(content, dict) else type(content).__name__
        raise ValueError(
            f"{path} must hold weights by name, alone or under {' or '.join(map(repr, entries))}. "
            f"Received: {found}"
        )
    return {name: tensor.float().numpy() for name, tensor in content.items()}
