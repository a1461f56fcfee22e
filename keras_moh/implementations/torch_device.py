"""PyTorch: where a tensor lives, and whether its values can be read."""

import torch
from torch._subclasses import FakeTensor


def describe(x: torch.Tensor) -> tuple[str, bool]:
    """The kind of device, and whether `x` has no values, or belongs to a graph or a transform."""
    is_traced = (
        x.device.type == "meta"
        or torch.compiler.is_compiling()
        or torch.jit.is_tracing()
        or isinstance(x, FakeTensor)
        or torch._C._are_functorch_transforms_active()
    )
    return x.device.type, is_traced
