"""PyTorch: the heads taken, one fused attention for each list of tokens that took a head.

The list of rows of a head in one batch entry (see `torch_rows.py`) is a plain attention of few
queries over the keys of that entry, which PyTorch's fused kernel computes. Two things are saved
around it:

- Keys that no query may see are dropped before, rather than masked within.
- Under causality or a window a list goes in chunks of rows, each over no more than the span of keys
  that some row of it sees. Only the ends of that span, which not every row sees, have a mask: they
  are computed apart, and joined with the rest by their logarithmic sums.

Nothing of size `T x S` is kept for the gradient: the backward pass computes the probabilities
again, chunk by chunk, from their logarithmic sums.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.nn.functional import pad

from keras_moh.implementations.spec import AttentionSpec, Options, needs_reference
from keras_moh.implementations.torch_rows import (
    Plan,
    once_differentiable,
    place,
    plan,
    positions,
    take,
)

# Rows of a chunk where a chunk has a mask: short, so that keys beyond its last row are left out,
# yet long enough for the kernel to run at its full rate.
_CHUNK = 128
# The same for a list of all tokens: as many rows span fewer keys, so a chunk may have more of them.
# (The kernel's own causality takes 1.4 times as long: its threads share the rows unevenly.)
_CHUNK_OF_ALL = 256
# The kernel gives its threads as many queries each, and to one thread alone what has no more: there
# the keys are shared among the threads, if they are so many (a read of 1024 takes 10 us).
_OF_ONE_THREAD = 32
_WORTH_SHARING = 1024
# Keys that all rows of a chunk see, from which on they are computed apart from those with a mask.
_WORTH_A_PIECE = 256
# The slots of a cache that no query may see are not read: see `keras_moh/cache.py`.
READS_ONLY_SEEN_KEYS = True
# Kinds of devices that the fused kernel, with its logarithmic sums, is for.
_FUSED_DEVICES = ("cpu",)


def unsupported_reason(spec: AttentionSpec) -> str | None:
    """Why this implementation cannot serve a call, or `None`."""
    reason = needs_reference(spec)
    if reason is None and spec.is_traced:
        return "it reads how many tokens took each head, which a traced graph does not know"
    return reason


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    heads: torch.Tensor,
    gates: torch.Tensor,
    options: Options,
) -> tuple[torch.Tensor, None]:
    """Attention of the heads taken; see `reference.attend`."""
    rows = plan(heads, query.shape[2])
    return place(
        attend_rows(take(query, rows), key, value, heads, gates, rows, options), rows
    ), None


def attend_rows(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    heads: torch.Tensor,
    gates: torch.Tensor,
    plan: Plan,
    options: Options,
) -> torch.Tensor:
    """The gated outputs `(R, dv)` of query rows `(R, d)`; the rest as for `attend`."""
    shape = (*heads.shape[:2], plan.num_heads)
    dense_gates = gates.new_zeros(shape).scatter(-1, heads.long(), gates)
    row_gates = dense_gates.flatten().index_select(0, plan.places)
    # The fused kernel wants one width for all: features of 0 change neither scores nor outputs.
    key_dim, value_dim = key.shape[-1], value.shape[-1]
    if key_dim < value_dim:
        query, key = (pad(x, (0, value_dim - key_dim)) for x in (query, key))
    elif value_dim < key_dim:
        value = pad(value, (0, key_dim - value_dim))
    output = _Attend.apply(query, key, value, plan, options)[:, :value_dim]
    return output * row_gates[:, None].to(output.dtype)


class _Part(NamedTuple):
    """Some of the keys that a chunk's rows see, and what is added to the scores."""

    keys: slice
    bias: torch.Tensor | None = None


class _Chunk(NamedTuple):
    """Some rows of one list, and the keys that they see."""

    rows: slice
    entry: int
    group: int
    parts: list[_Part]


class _Attend(torch.autograd.Function):
    """The ungated attention of rows."""

    @staticmethod
    def forward(
        ctx: Any, query: Any, key: Any, value: Any, plan: Plan, options: Options
    ) -> torch.Tensor:
        visible = _visible_keys(key, plan, options)
        keys, values = _select(key, visible), _select(value, visible)
        output = torch.zeros_like(query)
        log_sums = query.new_zeros(len(query), dtype=_sum_dtype(query))
        for rows, entry, group, parts in _chunks(query, key, visible, plan, options):
            of_parts = [
                _forward(
                    query[rows],
                    keys[entry][part.keys, group],
                    values[entry][part.keys, group],
                    *(part.bias, options.scale),
                )
                for part in parts
            ]
            output[rows], log_sums[rows] = _joined(of_parts)
        ctx.save_for_backward(query, key, value, output, log_sums)
        ctx.plan, ctx.options, ctx.visible = plan, options, visible
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, by_output: torch.Tensor) -> tuple[Any, ...]:
        query, key, value, output, log_sums = ctx.saved_tensors
        keys, values = _select(key, ctx.visible), _select(value, ctx.visible)
        by_query, by_key, by_value = (torch.zeros_like(x) for x in (query, key, value))
        by_keys, by_values = ([torch.zeros_like(x) for x in xs] for xs in (keys, values))
        for rows, entry, group, parts in _chunks(query, key, ctx.visible, ctx.plan, ctx.options):
            for part in parts:
                span = part.keys, group
                of_queries, of_keys, of_values = _backward(
                    *(by_output[rows], query[rows], keys[entry][span], values[entry][span]),
                    *(output[rows], log_sums[rows]),
                    bias=part.bias,
                    scale=ctx.options.scale,
                )
                by_query[rows] += of_queries
                by_keys[entry][span] += of_keys
                by_values[entry][span] += of_values
        for entry, chosen in enumerate(ctx.visible):
            by_key[entry, chosen], by_value[entry, chosen] = by_keys[entry], by_values[entry]
        return by_query, by_key, by_value, None, None


def _visible_keys(key: torch.Tensor, plan: Plan, options: Options) -> list[Any]:
    """The keys of each batch entry that some query may see: a range, or an index `(n,)`."""
    batch, length = key.shape[:2]
    first = int(options.causal_offset)
    last, low, high = first + plan.length - 1, 0, length
    if options.sliding_window is not None:
        low, high = first - options.sliding_window + 1, last + options.sliding_window
    if options.is_causal:
        high = min(high, last + 1)
    low = min(max(low, 0), length)
    high = min(max(high, low), length)
    if options.mask is None:
        return [slice(low, high)] * batch
    seen = options.mask[:, 0].any(1).expand(batch, length)[:, low:high]
    return [_as_range(entry.nonzero()[:, 0] + low) for entry in seen]


def _as_range(keys: torch.Tensor) -> Any:
    """Ascending numbers as a range if they are one: of that a view can be taken."""
    if not len(keys):
        return slice(0, 0)
    start, stop = int(keys[0]), int(keys[-1]) + 1
    return slice(start, stop) if stop - start == len(keys) else keys


def _select(x: torch.Tensor, visible: list[Any]) -> list[torch.Tensor]:
    return [entry[chosen] for entry, chosen in zip(x, visible, strict=True)]


def _chunks(
    query: torch.Tensor, key: torch.Tensor, visible: list[Any], plan: Plan, options: Options
) -> Iterator[_Chunk]:
    """The work to do, in the order of the rows; rows that see no key at all may be left out."""
    length, groups = key.shape[1:3]
    if plan.length == 1:
        yield from _chunks_of_one_query(plan, groups, visible)
        return
    mask = options.mask
    if mask is not None:
        mask = None if mask.shape[2] == 1 else mask.expand(plan.batch, 1, plan.length, length)[:, 0]
    whole = mask is None and not options.is_causal and options.sliding_window is None
    if not whole:
        token = positions(plan)
        query_position = token + options.causal_offset
        key_position = torch.arange(length, device=key.device)
        # As a list too: asking a tensor for single numbers would take longer than attending.
        query_list = query_position.tolist()

    def part_of(span: slice, rows: slice, entry: int, every: slice) -> _Part:
        hidden = None
        if span.start < every.start or every.stop < span.stop:
            distance = query_position[rows, None] - key_position[visible[entry]][span]
            hidden = _hidden(distance, options)
        if mask is not None:
            by_mask = ~mask[entry, token[rows]][:, visible[entry]][:, span]
            hidden = by_mask if hidden is None else hidden | by_mask
        if hidden is None:
            return _Part(span)
        return _Part(span, query.new_zeros(hidden.shape).masked_fill_(hidden, -math.inf))

    key_lists = [
        range(chosen.start, chosen.stop) if isinstance(chosen, slice) else chosen.tolist()
        for chosen in visible
    ]
    stop = 0
    for head, counts in enumerate(plan.counts):
        group = head // (plan.num_heads // groups)
        for entry, count in enumerate(counts):
            start, stop = stop, stop + count
            keys = key_lists[entry]
            if not count or not keys:
                continue
            if whole:
                everything = [_Part(slice(0, len(keys)))]
                yield _Chunk(slice(start, stop), entry, group, everything)
                continue
            chunk = _CHUNK_OF_ALL if count == plan.length else _CHUNK
            for begin in range(start, stop, chunk):
                rows = slice(begin, min(begin + chunk, stop))
                some, every = _spans(query_list[begin], query_list[rows.stop - 1], keys, options)
                if some.start == some.stop:
                    continue
                spans = [some] if mask is not None else _pieces(some, every)
                parts = [part_of(span, rows, entry, every) for span in spans]
                yield _Chunk(rows, entry, group, parts)


def _pieces(some: slice, every: slice) -> list[slice]:
    """The span `some` in pieces, such that as much as pays is seen by every row.

    A row that sees no key of a piece would have no logarithmic sum to join it by: so the pieces at
    the ends have one of the keys that every row sees.
    """
    start = every.start + (some.start < every.start)
    stop = every.stop - (every.stop < some.stop)
    if stop - start < _WORTH_A_PIECE:
        return [some]
    pieces = [slice(some.start, start), slice(start, stop), slice(stop, some.stop)]
    return [piece for piece in pieces if piece.start < piece.stop]


def _chunks_of_one_query(plan: Plan, groups: int, visible: list[Any]) -> Iterator[_Chunk]:
    """The work where each batch entry has one query, which sees all keys that are visible.

    It is bound by the reading of keys: heads that share them and stand side by side read them once.
    """
    of_head = plan.num_heads // groups
    rows = [
        (entry, head // of_head)
        for head, counts in enumerate(plan.counts)
        for entry, count in enumerate(counts)
        if count
    ]
    start = 0
    for (entry, group), same in itertools.groupby(rows):
        stop = start + len(list(same))
        keys = visible[entry]
        count = keys.stop - keys.start if isinstance(keys, slice) else len(keys)
        if count:
            yield _Chunk(slice(start, stop), entry, group, [_Part(slice(0, count))])
        start = stop


def _spans(first: int, last: int, keys: Sequence[int], options: Options) -> tuple[slice, slice]:
    """Of the ascending `keys`, those that some and those that every query of a range may see."""
    low, high = keys[0], keys[-1]
    some, every = [low, high], [low, high]
    if options.sliding_window is not None:
        reach = options.sliding_window - 1
        some = [first - reach, last + reach]
        every = [last - reach, first + reach]
    if options.is_causal:
        some[1], every[1] = min(some[1], last), min(every[1], first)
    start, stop = bisect_left(keys, some[0]), bisect_left(keys, some[1] + 1)
    stop = max(start, stop)
    inner = bisect_left(keys, every[0]), bisect_left(keys, every[1] + 1)
    if inner[0] >= inner[1]:
        inner = start, start
    return slice(start, stop), slice(*inner)


def _hidden(distance: torch.Tensor, options: Options) -> torch.Tensor:
    """Whether positions hide a key, from the query's position less the key's."""
    if options.sliding_window is None:
        return distance < 0
    far = distance.abs() >= options.sliding_window
    return far | (distance < 0) if options.is_causal else far


def _sum_dtype(x: torch.Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bias: Any,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The attention `(n, d)` of queries `(n, d)` over keys `(m, d)`, and its logarithmic sums.

    Rows without a key give 0, and have a sum of which the backward pass makes no gradient.
    """
    if query.device.type in _FUSED_DEVICES:
        if bias is None and len(query) <= _OF_ONE_THREAD and len(key) >= _WORTH_SHARING:
            return _forward_by_threads(query, key, value, scale)
        output, log_sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            *(x[None, None] for x in (query, key, value)),
            attn_mask=None if bias is None else bias[None, None],
            scale=scale,
        )
        return output[0, 0], log_sums[0, 0]
    scores = _scores(query, key, bias, scale)
    log_sums = scores.logsumexp(-1).clamp(min=torch.finfo(scores.dtype).min)
    return (scores - log_sums[:, None]).exp().to(value.dtype) @ value, log_sums


def _forward_by_threads(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """`_forward` without a bias, of which each thread computes the part over some of the keys."""
    threads = torch.get_num_threads()
    shared = len(key) - len(key) % threads
    keys, values = (x[:shared].unflatten(0, (threads, 1, -1)) for x in (key, value))
    queries = query.expand(threads, 1, *query.shape)
    outputs, sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        queries, keys, values, scale=scale
    )
    parts = list(zip(outputs[:, 0], sums[:, 0], strict=True))
    if shared < len(key):
        parts.append(_forward(query, key[shared:], value[shared:], None, scale))
    return _joined(parts)


def _joined(parts: list[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over all keys, of outputs and logarithmic sums over some of them each."""
    if len(parts) == 1:
        return parts[0]
    outputs, sums = (torch.stack(of_parts) for of_parts in zip(*parts, strict=True))
    log_sums = sums.logsumexp(0)
    return ((sums - log_sums).exp()[..., None] * outputs).sum(0), log_sums


def _backward(
    by_output: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    output: torch.Tensor,
    log_sums: torch.Tensor,
    bias: Any,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients by query, key and value of `_forward`."""
    if query.device.type in _FUSED_DEVICES:
        gradients = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *(x[None, None] for x in (by_output, query, key, value, output, log_sums)),
            dropout_p=0.0,
            is_causal=False,
            attn_mask=None if bias is None else bias[None, None],
            scale=scale,
        )
        return tuple(gradient[0, 0] for gradient in gradients)
    weights = (_scores(query, key, bias, scale) - log_sums[:, None]).exp()
    by_weights = (by_output @ value.T).to(weights.dtype)
    mean = (by_output * output).to(weights.dtype).sum(-1, keepdim=True)
    by_scores = (scale * weights * (by_weights - mean)).to(query.dtype)
    return by_scores @ key, by_scores.T @ query, weights.to(by_output.dtype).T @ by_output


def _scores(query: torch.Tensor, key: torch.Tensor, bias: Any, scale: float) -> torch.Tensor:
    scores = scale * (query @ key.T).to(_sum_dtype(query))
    return scores if bias is None else scores + bias
