"""Programs of PyTorch, which runs eagerly."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import torch
from keras import ops

MODES = ("eager",)


def _finished(results: list[Any]) -> list[Any]:
    if results[0].is_cuda:
        torch.cuda.synchronize()
    return results


def forward(
    call: Callable[..., Any], inputs: Sequence[Any], variables: Sequence[Any], mode: str
) -> Callable[[], list[Any]]:
    tensors = [ops.convert_to_tensor(x) for x in inputs]

    def program() -> list[Any]:
        with torch.no_grad():
            return _finished(keras.tree.flatten(call(*tensors)))

    return program


def training_step(
    call: Callable[..., Any],
    inputs: Sequence[Any],
    variables: Sequence[Any],
    cotangents: Sequence[Any],
    mode: str,
) -> Callable[[], list[Any]]:
    tensors = [ops.convert_to_tensor(x).requires_grad_() for x in inputs]
    by = [*tensors, *(variable.value for variable in variables)]
    factors = [ops.convert_to_tensor(x) for x in cotangents]

    def program() -> list[Any]:
        outputs = keras.tree.flatten(call(*tensors))
        gradients = torch.autograd.grad(outputs, by, factors)
        return _finished([*(output.detach() for output in outputs), *gradients])

    return program


def bare_attention(query: Any, key: Any, value: Any) -> Any:
    # At rank 4: PyTorch has no fused form of a lower one.
    batched = (x[None, None] for x in (query, key, value))
    return torch.nn.functional.scaled_dot_product_attention(*batched)[0, 0]
