"""The random tensors of a case, and what must come of them: plain PyTorch in float64."""

from __future__ import annotations

from typing import NamedTuple

import torch

from benchmarks.gpu.cases import Core


class Data(NamedTuple):
    """Tensors of a case.

    Attributes:
        query: `(B, N, H, d)`.
        key: `(B, S, G, d)`.
        value: `(B, S, G, d)`.
        heads: `(B, N, K)`, int32, ascending: which heads a token takes.
        gates: `(B, N, K)`, float32.
        cotangent: `(B, N, H, d)`.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    heads: torch.Tensor
    gates: torch.Tensor
    cotangent: torch.Tensor


def draw(case: Core, device: torch.device) -> Data:
    """Random tensors, the same each time."""
    generator = torch.Generator(device).manual_seed(0)

    def normal(length: int, heads: int) -> torch.Tensor:
        shape = (case.batch, length, heads, case.key_dim)
        x = torch.randn(shape, generator=generator, device=device)
        return x.to(getattr(torch, case.dtype))

    query, cotangent = (normal(case.length, case.num_heads) for _ in range(2))
    key, value = (normal(case.key_length, case.groups) for _ in range(2))
    shape = (case.batch, case.length, case.num_heads)
    scores = torch.rand(shape, generator=generator, device=device)
    # Heads that are liked unevenly: the last one half as much again as the first.
    scores *= torch.linspace(1, 1.5, case.num_heads, device=device)
    heads = scores.topk(case.active).indices.sort().values.to(torch.int32)
    gates = 0.5 + torch.rand(heads.shape, generator=generator, device=device)
    return Data(query, key, value, heads, gates, cotangent)


def of_all_heads(data: Data) -> Data:
    """The same with all heads taken, with gates of 1: plain attention."""
    heads = torch.arange(data.query.shape[2], dtype=torch.int32, device=data.query.device)
    heads = heads.expand(*data.query.shape[:2], -1)
    gates = torch.ones(heads.shape, device=heads.device)
    return data._replace(heads=heads, gates=gates)


def some_tokens(case: Core, most: int, device: torch.device) -> torch.Tensor:
    """At most so many tokens of a sequence, evenly spread, the first and the last among them."""
    steps = min(most, case.length)
    return torch.linspace(0, case.length - 1, steps, device=device).long()


def expected(case: Core, data: Data, tokens: torch.Tensor, gradients: bool) -> list[torch.Tensor]:
    """The output at some tokens, and the gradients of these outputs times their cotangents.

    Returns:
        The output `(B, n, H, d)`; with `gradients` those by query `(B, n, H, d)`, key, value
        `(B, S, G, d)` and gates `(B, n, K)` as well.
    """
    at_tokens = (data.query[:, tokens], data.key, data.value, data.gates[:, tokens])
    leaves = [x.double().requires_grad_(gradients) for x in at_tokens]
    query, key, value, gates = leaves
    key, value = (x.repeat_interleave(case.num_heads // case.groups, 2) for x in (key, value))
    scores = torch.einsum("bnhd,bshd->bhns", query, key) * case.key_dim**-0.5
    if case.is_causal:
        hidden = torch.arange(case.key_length, device=tokens.device) > tokens[:, None]
        scores = scores.masked_fill(hidden, float("-inf"))
    output = torch.einsum("bhns,bshd->bnhd", scores.softmax(-1), value)
    by_head = torch.zeros(query.shape[:3], dtype=query.dtype, device=query.device)
    by_head = by_head.scatter(-1, data.heads[:, tokens].long(), gates)
    output = output * by_head[..., None]
    if not gradients:
        return [output]
    cotangent = data.cotangent[:, tokens].double()
    return [output.detach(), *torch.autograd.grad(output, leaves, cotangent)]
