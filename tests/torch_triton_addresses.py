"""Triton's interpreter reads and writes whatever lies at an address: here it looks first.

What a GPU answers with an illegal access, or with numbers of others, is not seen otherwise.
"""

from typing import Any

import numpy as np
import pytest
import torch
from triton.runtime import interpreter


def check_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Refuse addresses that are in none of the tensors that a kernel is given."""
    builder, call = interpreter.interpreter_builder, interpreter.GridExecutor.__call__
    load, store = builder.create_masked_load, builder.create_masked_store
    spans: list[tuple[int, int]] = []

    def checked_call(self: Any, *args: Any, **kwargs: Any) -> Any:
        spans[:] = [span(x) for x in kwargs.values() if isinstance(x, torch.Tensor) and x.numel()]
        return call(self, *args, **kwargs)

    def check(pointers: Any, mask: Any) -> None:
        addresses = pointers.data[mask.data].astype("int64")
        size = max(pointers.get_element_ty().primitive_bitwidth // 8, 1)
        inside = [(first <= addresses) & (addresses + size <= end) for first, end in spans]
        if not np.any(inside, axis=0).all():
            raise IndexError("an address of no tensor")

    def checked_load(pointers: Any, mask: Any, *rest: Any) -> Any:
        check(pointers, mask)
        return load(pointers, mask, *rest)

    def checked_store(pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        check(pointers, mask)
        return store(pointers, value, mask, *rest)

    monkeypatch.setattr(interpreter.GridExecutor, "__call__", checked_call)
    monkeypatch.setattr(builder, "create_masked_load", checked_load)
    monkeypatch.setattr(builder, "create_masked_store", checked_store)


def span(x: torch.Tensor) -> tuple[int, int]:
    """The address of the first entry, and the end of the last."""
    last = sum((length - 1) * stride for length, stride in zip(x.shape, x.stride(), strict=True))
    return x.data_ptr(), x.data_ptr() + (last + 1) * x.itemsize
