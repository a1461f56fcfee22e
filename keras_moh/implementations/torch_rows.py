"""PyTorch: the rows of routed attention, and projections of nothing but them.

The tokens that took head `h` in batch entry `b` are one list of *rows*, in the order of their
positions, and the lists follow one another by head and batch entry. The lengths of the lists are
read on the host, so that no row is computed in vain: hence a call cannot be captured in a graph.

The projections into and out of the heads are a product for each head, of its rows alone, and one
for neighbouring heads that all tokens took. So is their backward pass.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Run:
    """Rows of one head, or of neighbouring heads that all tokens took."""

    heads: slice
    rows: slice
    tokens: torch.Tensor | None  # of each row, as index into `B * T`; `None`: all, for each head


@dataclass(frozen=True)
class Plan:
    """Which rows there are, for heads `(B, T, K)`.

    Attributes:
        num_heads: `H`.
        batch: `B`.
        length: `T`.
        places: `(R,)`: each row's index into `(B, T, H)`.
        counts: Number of rows of each head and batch entry, by head, then batch entry.
        runs: The rows by head.
    """

    num_heads: int
    batch: int
    length: int
    places: torch.Tensor
    counts: list[list[int]]
    runs: list[Run]


def plan(heads: torch.Tensor, num_heads: int) -> Plan:
    """The rows of `heads (B, T, K)`, by head, batch entry and position."""
    batch, length, _ = heads.shape
    taken = torch.zeros((num_heads, batch * length), dtype=torch.bool, device=heads.device)
    taken.scatter_(0, heads.flatten(0, 1).T.long(), True)
    of_head, tokens = taken.nonzero(as_tuple=True)
    counts = taken.view(num_heads, batch, length).sum(-1).tolist()

    runs: list[Run] = []
    start = 0
    for head in range(num_heads):
        stop = start + sum(counts[head])
        full = stop - start == batch * length
        if full and runs and runs[-1].tokens is None and runs[-1].heads.stop == head:
            last = runs.pop()
            runs.append(Run(slice(last.heads.start, head + 1), slice(last.rows.start, stop), None))
        elif stop > start:
            rows = slice(start, stop)
            runs.append(Run(slice(head, head + 1), rows, None if full else tokens[rows]))
        start = stop
    return Plan(num_heads, batch, length, tokens * num_heads + of_head, counts, runs)


def positions(plan: Plan) -> torch.Tensor:
    """The position `t` of each row's token, `(R,)`."""
    return plan.places // plan.num_heads % plan.length


def take(dense: torch.Tensor, plan: Plan) -> torch.Tensor:
    """The rows `(R, d)` of `(B, T, H, d)`."""
    return dense.reshape(-1, dense.shape[-1]).index_select(0, plan.places)


def place(rows: torch.Tensor, plan: Plan) -> torch.Tensor:
    """Rows `(R, d)` as `(B, T, H, d)`, with zeros where a head is not taken."""
    dense = rows.new_zeros((plan.batch * plan.length * plan.num_heads, rows.shape[-1]))
    return dense.index_copy(0, plan.places, rows).view(
        plan.batch, plan.length, plan.num_heads, rows.shape[-1]
    )


def project(x: torch.Tensor, kernel: torch.Tensor, bias: Any, plan: Plan) -> torch.Tensor:
    """The rows `(R, d)` of `x (B, T, D)` times `kernel (D, H, d)`, with bias `(H, d)` or `None`."""
    return _Project.apply(x, kernel, bias, plan)


def combine(rows: torch.Tensor, kernel: torch.Tensor, bias: Any, plan: Plan) -> torch.Tensor:
    """The sum over heads of rows `(R, dv)` times `kernel (H, dv, *shape)`: `(B, T, *shape)`.

    With bias, of that shape, or `None`.
    """
    flat_bias = None if bias is None else bias.flatten()
    output = _Combine.apply(rows, kernel.flatten(2), flat_bias, plan)
    return output.view(plan.batch, plan.length, *kernel.shape[2:])


def once_differentiable(backward: Callable[..., Any]) -> Callable[..., Any]:
    """`backward`, refusing to be differentiated itself.

    PyTorch's own decorator of that name lets `torch.autograd.grad` leave the missing part out,
    silently, wherever the result depends on the inputs by another way as well.
    """

    @functools.wraps(backward)
    def refusing(ctx: Any, *gradients: torch.Tensor) -> Any:
        if torch.is_grad_enabled():
            raise NotImplementedError(
                "Products of only the heads taken have no second derivatives "
                "(`create_graph=True`); implementation='reference' has them."
            )
        return backward(ctx, *gradients)

    return refusing


class _Project(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any, kernel: Any, bias: Any, plan: Plan) -> torch.Tensor:
        ctx.save_for_backward(x, kernel)
        ctx.plan, ctx.has_bias = plan, bias is not None
        tokens = x.flatten(0, 1)
        rows = x.new_empty((len(plan.places), kernel.shape[-1]))
        for run in plan.runs:
            biases = None if bias is None else bias[run.heads].flatten()
            _put_product(rows, run, _of_run(tokens, run), kernel[:, run.heads].flatten(1), biases)
        return rows

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, by_rows: torch.Tensor) -> tuple[Any, ...]:
        x, kernel = ctx.saved_tensors
        tokens = x.flatten(0, 1)
        by_tokens, by_kernel = torch.zeros_like(tokens), torch.zeros_like(kernel)
        by_bias = kernel.new_zeros(kernel.shape[1:]) if ctx.has_bias else None
        for run in ctx.plan.runs:
            by_product = _by_token(by_rows, run).flatten(1)
            by_weights = by_kernel[:, run.heads].view(len(kernel), -1)
            torch.mm(_of_run(tokens, run).T, by_product, out=by_weights)
            if by_bias is not None:
                torch.sum(by_product, 0, out=by_bias[run.heads].view(-1))
            _add_product(by_tokens, run, by_product, kernel[:, run.heads].flatten(1).T)
        return by_tokens.view(x.shape), by_kernel, by_bias, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Any, kernel: Any, bias: Any, plan: Plan) -> torch.Tensor:
        ctx.save_for_backward(rows, kernel)
        ctx.plan, ctx.has_bias = plan, bias is not None
        shape = (plan.batch * plan.length, kernel.shape[-1])
        output = rows.new_zeros(shape) if bias is None else bias.repeat(shape[0], 1)
        for run in plan.runs:
            of_run, weights = _by_token(rows, run).flatten(1), kernel[run.heads].flatten(0, 1)
            _add_product(output, run, of_run, weights)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, by_output: torch.Tensor) -> tuple[Any, ...]:
        rows, kernel = ctx.saved_tensors
        by_rows, by_kernel = torch.empty_like(rows), torch.zeros_like(kernel)
        for run in ctx.plan.runs:
            by_product, chosen = _of_run(by_output, run), _by_token(rows, run).flatten(1)
            _put_product(by_rows, run, by_product, kernel[run.heads].flatten(0, 1).T)
            by_weights = by_kernel[run.heads].view(chosen.shape[-1], -1)
            torch.mm(chosen.T, by_product, out=by_weights)
        return by_rows, by_kernel, by_output.sum(0) if ctx.has_bias else None, None


def _by_token(rows: torch.Tensor, run: Run) -> torch.Tensor:
    """The rows of a run as `(tokens, heads, d)`, a view."""
    return rows[run.rows].unflatten(0, (run.heads.stop - run.heads.start, -1)).transpose(0, 1)


def _of_run(tokens: torch.Tensor, run: Run) -> torch.Tensor:
    return tokens if run.tokens is None else tokens.index_select(0, run.tokens)


def _put_product(
    rows: torch.Tensor, run: Run, x: torch.Tensor, weights: torch.Tensor, bias: Any = None
) -> None:
    """Make `x @ weights + bias`, by token, the rows of a run."""
    by_token = _by_token(rows, run)
    # Those of one head lie in memory as the product does: it goes there at once.
    out = by_token[:, 0] if by_token.shape[1] == 1 else None
    if bias is None:
        product = torch.mm(x, weights, out=out)
    else:
        product = torch.addmm(bias, x, weights, out=out)
    if out is None:
        by_token.copy_(product.view(by_token.shape))


def _add_product(tokens: torch.Tensor, run: Run, x: torch.Tensor, weights: torch.Tensor) -> None:
    """Add `x @ weights` to the tokens of a run."""
    if run.tokens is None:
        tokens.addmm_(x, weights)
    else:
        tokens.index_add_(0, run.tokens, x @ weights)
