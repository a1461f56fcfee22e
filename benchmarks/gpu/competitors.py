"""The ways to compute a case. Each prepares what it likes, untimed, and is timed on its own layout.

Those of all heads compute plain attention, `H` heads without gates. The others compute the heads
taken, times their gates; `torch_triton` finds their rows as it runs, while the rows of the others
were gathered beforehand.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.gpu.cases import Core
from benchmarks.gpu.data import Data
from keras_moh import Routing, routed_attention

FLASH, CUDNN, FLEX = "SDPA, flash", "SDPA, cuDNN", "FlexAttention"
OURS, REFERENCE = "torch_triton", "reference"
FLEX_ROWS, VARLEN_ROWS = "FlexAttention of rows", "varlen_attn of rows"
OF_ALL_HEADS = (FLASH, CUDNN, FLEX)
OF_HEADS_TAKEN = (OURS, REFERENCE, FLEX_ROWS, VARLEN_ROWS)

# The rows and keys of which FlexAttention's kernels take whole blocks.
_FLEX_BLOCK = 128

Tensors = list[torch.Tensor]


class UnavailableError(RuntimeError):
    """A competitor cannot compute a case, or not in the time there is."""


@dataclass(frozen=True)
class Program:
    """A competitor on a case.

    Attributes:
        leaves: What `call` takes, and what it is differentiated by.
        call: The output, of whatever layout.
        own: From `(B, N, H, d)` to that layout.
        answer: From the output and the gradients by the leaves to what `data.expected` returns.
    """

    leaves: Tensors
    call: Callable[..., torch.Tensor]
    own: Callable[[torch.Tensor], torch.Tensor]
    answer: Callable[[Tensors], Tensors]

    def forward(self) -> Tensors:
        return [self.call(*self.leaves)]

    def training(self, cotangent: torch.Tensor) -> Tensors:
        """The output and all gradients; the `cotangent` is of its layout."""
        output = self.call(*self.leaves)
        return [output.detach(), *torch.autograd.grad(output, self.leaves, cotangent)]


def make(name: str, case: Core, data: Data) -> Program:
    """The program of a competitor."""
    made = _MAKERS[name](case, data)
    for leaf in made.leaves:
        leaf.requires_grad_(not case.cache)
    return made


def _routed(name: str, case: Core, data: Data) -> Program:
    def call(query: Any, key: Any, value: Any, gates: Any) -> torch.Tensor:
        routing = Routing(data.heads, gates, gates[..., :0])
        return routed_attention(
            query, key, value, routing, is_causal=case.is_causal, implementation=name
        )

    leaves = [x.clone() for x in (data.query, data.key, data.value, data.gates)]
    return Program(leaves, call, lambda x: x, list)


def _sdpa(backend: SDPBackend, case: Core, data: Data) -> Program:
    def call(query: Any, key: Any, value: Any) -> torch.Tensor:
        with sdpa_kernel(backend):
            return scaled_dot_product_attention(
                *(query, key, value), is_causal=case.is_causal, enable_gqa=_shares_keys(case)
            )

    return Program(_heads_first(data), call, _transposed, _all_transposed)


def _flex(case: Core, data: Data) -> Program:
    mask = None
    if case.is_causal:
        mask = create_block_mask(
            lambda b, h, i, j: i >= j,
            *(None, None, case.length, case.length),
            device=data.query.device.type,
        )
    attend = _flex_function(case, data)

    def call(query: Any, key: Any, value: Any) -> torch.Tensor:
        return attend(query, key, value, block_mask=mask, enable_gqa=_shares_keys(case))

    return Program(_heads_first(data), call, _transposed, _all_transposed)


def _flex_rows(case: Core, data: Data) -> Program:
    if data.query.is_cuda and (case.length, case.share, case.key_dim) != (4096, 0.5, 64):
        raise UnavailableError("its mask takes long to make: it is one for each list of rows")
    rows = _rows(case, data)
    length = -(-int(rows.counts.max()) // _FLEX_BLOCK) * _FLEX_BLOCK
    first = rows.counts.cumsum(0) - rows.counts
    number = torch.arange(len(rows.lists), device=first.device) - first[rows.lists]
    place = rows.lists * length + number

    def padded(x: torch.Tensor, fill: int = 0) -> torch.Tensor:
        """Of numbered rows those of each list, `(B, G, R, ...)`, with others at its end."""
        whole = x.new_full((case.batch * case.groups * length, *x.shape[1:]), fill)
        return whole.index_copy(0, place, x).unflatten(0, (case.batch, case.groups, length))

    last = rows.tokens if case.is_causal else torch.full_like(rows.tokens, case.key_length - 1)
    last = padded(last, -1)
    mask = create_block_mask(
        lambda b, h, i, j: last[b, h, i] >= j,
        *(case.batch, case.groups, length, case.key_length),
        device=data.query.device.type,
    )
    attend = _flex_function(case, data)

    def call(query: Any, key: Any, value: Any, gates: Any) -> torch.Tensor:
        output = attend(query, key, value, block_mask=mask)
        return output * gates[..., None].to(output.dtype)

    def answer(results: Tensors) -> Tensors:
        return rows.answer([x.flatten(0, 2)[place] for x in results[:2]], results[2:4]) + [
            rows.of_slots(x.flatten()[place]) for x in results[4:]
        ]

    query, key, value, gates = rows.gathered(data)
    leaves = [padded(query), key, value, padded(gates)]
    return Program(leaves, call, lambda x: padded(rows.of_heads(x)), answer)


def _varlen_rows(case: Core, data: Data) -> Program:
    if case.is_causal:
        raise UnavailableError("its causality is by the number of a row, not by its position")
    rows = _rows(case, data)
    query, key, value, gates = rows.gathered(data)
    leaves = [query[:, None], key.flatten(0, 2)[:, None], value.flatten(0, 2)[:, None], gates]
    ends = torch.nn.functional.pad(rows.counts.cumsum(0), (1, 0)).int()
    key_ends = case.key_length * torch.arange(len(ends), device=ends.device, dtype=torch.int32)
    longest = int(rows.counts.max())

    def call(query: Any, key: Any, value: Any, gates: Any) -> torch.Tensor:
        output = varlen_attn(query, key, value, ends, key_ends, longest, case.key_length)
        return output * gates[:, None, None].to(output.dtype)

    def answer(results: Tensors) -> Tensors:
        shape = (case.batch, case.groups, case.key_length, case.key_dim)
        by_keys = [x.view(shape) for x in results[2:4]]
        return rows.answer([x[:, 0] for x in results[:2]], by_keys) + [
            rows.of_slots(x) for x in results[4:]
        ]

    return Program(leaves, call, lambda x: rows.of_heads(x)[:, None], answer)


class _Rows(NamedTuple):
    """The rows of all lists, one after the other: list `b G + g` has those of entry and group.

    Attributes:
        case: What they are of.
        slots: The numbers of their slots in `(B, N, K)`.
        heads: Those of their heads in `(B, N, H)`.
        tokens: Their tokens.
        lists: Their lists.
        counts: How many a list has, `(B G,)`.
    """

    case: Core
    slots: torch.Tensor
    heads: torch.Tensor
    tokens: torch.Tensor
    lists: torch.Tensor
    counts: torch.Tensor

    def of_heads(self, x: torch.Tensor) -> torch.Tensor:
        """Out of `(B, N, H, d)`."""
        return x.flatten(0, 2)[self.heads]

    def of_slots(self, x: torch.Tensor) -> torch.Tensor:
        """To `(B, N, K)`."""
        case = self.case
        return torch.zeros_like(x).index_copy(0, self.slots, x).view(case.batch, case.length, -1)

    def gathered(self, data: Data) -> Tensors:
        """Queries, gates, and between them keys and values `(B, G, S, d)`."""
        key, value = (_transposed(x) for x in (data.key, data.value))
        return [self.of_heads(data.query), key, value, data.gates.flatten()[self.slots]]

    def answer(self, of_rows: Tensors, by_keys: Tensors) -> Tensors:
        """Outputs, and if given gradients, at their heads; the others with heads last again."""
        case = self.case
        shape = (case.batch, case.length, case.num_heads)
        empty = (
            x.new_zeros((case.batch * case.length * case.num_heads, x.shape[1])) for x in of_rows
        )
        of_heads = [
            whole.index_copy(0, self.heads, x).unflatten(0, shape)
            for whole, x in zip(empty, of_rows, strict=True)
        ]
        return of_heads + _all_transposed(by_keys)


def _rows(case: Core, data: Data) -> _Rows:
    device = data.heads.device
    entry = torch.arange(case.batch, device=device)[:, None, None]
    token = torch.arange(case.length, device=device)[:, None]
    heads = data.heads.long()
    lists = entry * case.groups + heads // (case.num_heads // case.groups)
    slots = lists.flatten().argsort(stable=True)
    places = (entry * case.length + token) * case.num_heads + heads
    return _Rows(
        case,
        slots,
        places.flatten()[slots],
        token.expand_as(heads).flatten()[slots],
        lists.flatten()[slots],
        torch.bincount(lists.flatten(), minlength=case.batch * case.groups),
    )


def _shares_keys(case: Core) -> bool:
    return case.groups < case.num_heads


def _transposed(x: torch.Tensor) -> torch.Tensor:
    return x.transpose(1, 2).contiguous()


def _all_transposed(tensors: Tensors) -> Tensors:
    return [_transposed(x) for x in tensors]


def _heads_first(data: Data) -> Tensors:
    return _all_transposed([data.query, data.key, data.value])


def _flex_function(case: Core, data: Data) -> Callable[..., Any]:
    """`flex_attention`, compiled where its kernels are."""
    if not data.query.is_cuda:
        return flex_attention
    if case.cache:
        raise UnavailableError("it is compiled for blocks of queries, not for a step of decoding")
    return _compiled_flex()


@functools.cache
def _compiled_flex() -> Callable[..., Any]:
    """`flex_attention`, compiled once for all lengths of each kind of heads and masks.

    To compile it takes seconds, which there are not for each length. Of lengths that may be any,
    its kernels look in every tile where they end, which those of a fixed length do not. Told that
    they are whole blocks, these do not either: in PyTorch 2.13 their code is the same, tiles and
    all, but for lengths and strides, which they are given. For sm_90 they have as many matrix
    instructions, and 0.4 to 11 % more of the others. How long they take was not compared.
    """
    # Else it goes on uncompiled after some kinds.
    torch._dynamo.config.recompile_limit = 1000

    @torch.compile(dynamic=True, fullgraph=True)
    def attend(query: Any, key: Any, value: Any, **options: Any) -> torch.Tensor:
        output = flex_attention(query, key, value, **options)
        # Not before it, where lengths are not yet known to be those of the mask.
        for x in (query, key, value):
            torch._check(x.shape[2] % _FLEX_BLOCK == 0)
        return output

    def with_fixed_heads(*tensors: torch.Tensor, **options: Any) -> torch.Tensor:
        for x in tensors:
            torch._dynamo.mark_static(x, 1)
            torch._dynamo.mark_static(x, 3)
        return attend(*tensors, **options)

    return with_fixed_heads


_MAKERS: dict[str, Callable[[Core, Data], Program]] = {
    FLASH: functools.partial(_sdpa, SDPBackend.FLASH_ATTENTION),
    CUDNN: functools.partial(_sdpa, SDPBackend.CUDNN_ATTENTION),
    FLEX: _flex,
    OURS: functools.partial(_routed, OURS),
    REFERENCE: functools.partial(_routed, REFERENCE),
    FLEX_ROWS: _flex_rows,
    VARLEN_ROWS: _varlen_rows,
}
