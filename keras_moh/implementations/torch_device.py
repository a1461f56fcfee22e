"""PyTorch: where a tensor lives, and whether its values can be read."""

import torch
from torch._subclasses import FakeTensor


def describe(x: torch.Tensor) -> tuple[str, bool]:
    """The kind of device, and whether `x` belongs to a graph or a transform being traced."""
    is_traced = (
        torch.compiler.is_compiling()
        or torch.jit.is_tracing()
        or isinstance(x, FakeTensor)
        or torch._C._are_functorch_transforms_active()
    )
    return x.device.type, is_traced
