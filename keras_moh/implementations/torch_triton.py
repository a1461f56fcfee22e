"""PyTorch: the Triton kernels of `triton_kernels.py`, as an operation with a gradient.

The rows are sorted by operations of the graph. Nothing is read on the host and no shape depends on
values, so that a call can be compiled, exported and captured in a CUDA graph.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import pad

from keras_moh.implementations.spec import AttentionSpec, Options, beyond_kernels
from keras_moh.implementations.torch_rows import once_differentiable
from keras_moh.implementations.triton_blocks import (
    COMBINE,
    Blocks,
    blocks,
    forward_sizes,
    neighbours,
    splits,
    tiles_of_rows,
    too_many_rows,
)

HAS_TRITON = importlib.util.find_spec("triton") is not None
if HAS_TRITON:
    import triton

    from keras_moh.implementations import triton_kernels, triton_tuning

# The slots of a cache that no query may see are not read: see `keras_moh/cache.py`.
READS_ONLY_SEEN_KEYS = True
_OLDEST_CAPABILITY = (8, 0)


def unsupported_reason(spec: AttentionSpec) -> str | None:
    """Why this implementation cannot serve a call, or `None`."""
    return beyond_kernels(spec) or too_many_rows(spec) or _unsupported_device(spec.device)


@torch.compiler.assume_constant_result
def _unsupported_device(kind: str) -> str | None:
    """Why an operation of one's own does not run here on devices of this kind, or `None`."""
    if not HAS_TRITON:
        return "it needs the package triton: pip install 'keras-moh[triton]'"
    if torch._C._are_functorch_transforms_active():
        return "the transforms of torch.func do not know how to differentiate it"
    if triton.knobs.runtime.interpret and kind == "cpu":
        return None
    if kind != "cuda":
        return f"it needs a GPU, not '{kind}' (on a CPU, TRITON_INTERPRET=1 interprets it slowly)"
    if torch.version.hip is None:
        capability = torch.cuda.get_device_capability()
        if capability < _OLDEST_CAPABILITY:
            oldest, found = (".".join(map(str, x)) for x in (_OLDEST_CAPABILITY, capability))
            return f"it needs a GPU of compute capability {oldest} or newer, not {found}"
    return None


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    heads: torch.Tensor,
    gates: torch.Tensor,
    options: Options,
) -> tuple[torch.Tensor, None]:
    """Attention of the heads taken; see `reference.attend`."""
    heads = heads.to(torch.int32)
    rows = _sorted_rows(heads, query.shape[2], key.shape[2])
    ends = heads.shape[1] * torch.arange(2, dtype=torch.int32, device=rows.device)
    lists = _first_rows(rows, ends, heads.shape, key.shape[2])
    offset = None
    if options.is_causal or options.sliding_window is not None:
        offset = options.causal_offset
        if isinstance(offset, torch.Tensor):
            offset = offset.to(query.device, torch.int32)
        else:  # not by `torch.tensor`, which waits for the device
            offset = torch.full((), offset, dtype=torch.int32, device=query.device)
    output, _, _ = _attend(
        *(query, key, value, heads, gates, rows, lists, options.mask, offset),
        *(options.scale, options.is_causal, options.sliding_window),
    )
    return output, None


def _sorted_rows(heads: torch.Tensor, num_heads: int, groups: int) -> torch.Tensor:
    """The rows `(B, T K)` of `heads (B, T, K)`, as the kernels number them."""
    batch, length, slots = heads.shape
    token = torch.arange(length, dtype=torch.int32, device=heads.device)[:, None]
    slot = torch.arange(slots, dtype=torch.int32, device=heads.device)
    group = heads // (num_heads // groups)
    numbers = (group * length + token) * slots + slot
    return numbers.view(batch, length * slots).sort(dim=1).values


def _first_rows(
    rows: torch.Tensor, tokens: torch.Tensor, shape: torch.Size, groups: int
) -> torch.Tensor:
    """The first row in each list of one of the tokens `(n,)` or of a later one: `(B, G, n)`.

    Args:
        rows: `(B, T K)`, as the kernels number them.
        tokens: `(n,)`, int32, before the first and beyond the last one too.
        shape: `(B, T, K)`.
        groups: `G`.
    """
    batch, length, slots = shape
    group = torch.arange(groups, dtype=torch.int32, device=rows.device)[:, None]
    numbers = (group * length + tokens.clamp(0, length)) * slots
    numbers = numbers.flatten().expand(batch, -1).contiguous()
    return torch.searchsorted(rows, numbers, out_int32=True).view(batch, groups, len(tokens))


@torch.library.custom_op("keras_moh::attend", mutates_args=())
def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    heads: torch.Tensor,
    gates: torch.Tensor,
    rows: torch.Tensor,
    lists: torch.Tensor,
    mask: torch.Tensor | None,
    causal_offset: torch.Tensor | None,
    scale: float,
    is_causal: bool,
    sliding_window: int | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gated outputs `(B, T, H, dv)`; by slot, ungated ones and logarithmic sums."""
    arguments = _arguments(
        *(query, key, value, heads, gates, rows, lists, mask, causal_offset),
        *(scale, is_causal, sliding_window),
    )
    outputs = {
        "output": query.new_zeros((*query.shape[:3], value.shape[3])),
        "attended": query.new_empty((*heads.shape, value.shape[3])),
        "log_sums": query.new_empty(heads.shape, dtype=torch.float32),
    }
    kernel = forward_sizes(heads.shape, query.shape[2] // key.shape[2])

    def launch(sizes: Blocks) -> None:
        tiles = tiles_of_rows(heads.shape, key.shape[2], sizes.rows)
        programs = len(query) * tiles
        parts = splits(programs, key.shape[1]) if kernel == "decode" else 1
        grid = programs, parts
        more = arguments | {"tiles": tiles, "splits": parts}
        if parts == 1:
            return _launch("forward_kernel", grid, sizes, more | outputs)
        shape = (*heads.shape, parts)
        attended = query.new_empty((*shape, value.shape[3]), dtype=torch.float32)
        log_sums = query.new_empty(shape, dtype=torch.float32)
        of_parts = {"attended": attended, "log_sums": log_sums, "output": None}
        _launch("forward_kernel", grid, sizes, more | of_parts)
        more |= {"part_attended": attended, "part_log_sums": log_sums}
        return _launch("combine_kernel", (heads.numel(),), COMBINE, more | outputs)

    _run(kernel, arguments, launch)
    return tuple(outputs.values())


@_attend.register_fake
def _(query: Any, key: Any, value: Any, heads: Any, *_: Any) -> tuple[torch.Tensor, ...]:
    return (
        query.new_empty((*query.shape[:3], value.shape[3])),
        query.new_empty((*heads.shape, value.shape[3])),
        query.new_empty(heads.shape, dtype=torch.float32),
    )


@torch.library.custom_op("keras_moh::attend_backward", mutates_args=())
def _attend_backward(
    by_output: torch.Tensor,
    attended: torch.Tensor,
    log_sums: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    heads: torch.Tensor,
    gates: torch.Tensor,
    rows: torch.Tensor,
    lists: torch.Tensor,
    mask: torch.Tensor | None,
    causal_offset: torch.Tensor | None,
    scale: float,
    is_causal: bool,
    sliding_window: int | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients by query, key, value and gates."""
    arguments = _arguments(
        *(query, key, value, heads, gates, rows, lists, mask, causal_offset),
        *(scale, is_causal, sliding_window),
    )
    by_query = query.new_zeros(query.shape)
    by_key, by_value, by_gates = (x.new_empty(x.shape) for x in (key, value, gates))
    by_output = by_output.contiguous()
    arguments |= {"log_sums": log_sums, "by_output": by_output, "by_gates": by_gates}

    def launch_rows(sizes: Blocks) -> None:
        tiles = tiles_of_rows(heads.shape, key.shape[2], sizes.rows)
        more = {"attended": attended, "by_query": by_query, "tiles": tiles}
        _launch("backward_query_kernel", (len(query) * tiles,), sizes, arguments | more)

    def launch_keys(sizes: Blocks) -> None:
        tiles = -(-key.shape[1] // sizes.keys)
        spans = _spans(rows, heads.shape, key.shape[2], tiles, sizes.keys, arguments)
        more = {"spans": spans, "by_key": by_key, "by_value": by_value, "tiles": tiles}
        grid = (len(key) * key.shape[2] * tiles,)
        _launch("backward_key_value_kernel", grid, sizes, arguments | more)

    _run("backward_query", arguments, launch_rows)
    _run("backward_key_value", arguments, launch_keys)  # which reads the gradients by the gates
    return by_query, by_key, by_value, by_gates


@_attend_backward.register_fake
def _(
    by_output: Any, attended: Any, log_sums: Any, query: Any, key: Any, value: Any, *others: Any
) -> tuple[torch.Tensor, ...]:
    _, gates, *_ = others
    return tuple(x.new_empty(x.shape) for x in (query, key, value, gates))


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    _, attended, log_sums = output
    *tensors, scale, is_causal, sliding_window = inputs
    ctx.save_for_backward(attended, log_sums, *tensors)
    ctx.options = scale, is_causal, sliding_window
    ctx.set_materialize_grads(False)


@once_differentiable
def _backward(
    ctx: Any, by_output: torch.Tensor | None, *_: None
) -> tuple[torch.Tensor | None, ...]:
    if by_output is None:  # What was made of the output has no gradient by it.
        return (None,) * len(ctx.needs_input_grad)
    by_query, by_key, by_value, by_gates = _attend_backward(
        by_output, *ctx.saved_tensors, *ctx.options
    )
    return by_query, by_key, by_value, None, by_gates, *[None] * 7


_attend.register_autograd(_backward, setup_context=_setup_context)


def _arguments(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    heads: torch.Tensor,
    gates: torch.Tensor,
    rows: torch.Tensor,
    lists: torch.Tensor,
    mask: torch.Tensor | None,
    causal_offset: torch.Tensor | None,
    scale: float,
    is_causal: bool,
    sliding_window: int | None,
) -> dict[str, Any]:
    """What all kernels are given, by name."""
    batch, length, num_heads, key_dim = query.shape
    _, key_length, groups, value_dim = value.shape
    key, value = (x if x.stride(3) == 1 else x.contiguous() for x in (key, value))
    of_keys = mask is not None and mask.shape[2] == 1
    kind = "none" if mask is None else "keys" if of_keys else "pairs"
    if mask is not None:
        # A mask of keys is read where there is no query, too: it keeps its axis of one.
        mask = mask.expand(batch, 1, -1, key_length)[:, 0]
    return {
        **{"query": query.contiguous(), "key": key, "value": value},
        **{"heads": heads.contiguous(), "gates": gates.contiguous()},
        **{"rows": rows, "lists": lists, "mask": mask, "causal_offset": causal_offset},
        "key_ends": _key_ends(mask) if of_keys else None,
        **{"scale": scale, "T": length, "S": key_length},
        **_strides("key", key, "by_entry", "by_number", "by_group"),
        **_strides("value", value, "by_entry", "by_number", "by_group"),
        **_strides("mask", mask, "by_entry", "by_token", "by_number"),
        **{"H": num_heads, "G": groups, "K": heads.shape[2], "D": key_dim, "DV": value_dim},
        **{"IS_CAUSAL": is_causal, "WINDOW": sliding_window, "MASK": kind},
        "BLOCK_D": max(16, triton.next_power_of_2(key_dim)),
        "BLOCK_DV": max(16, triton.next_power_of_2(value_dim)),
    }


def _strides(name: str, x: torch.Tensor | None, *axes: str) -> dict[str, int]:
    """The first three strides of `x`, if any, as arguments of those names."""
    strides = (0, 0, 0) if x is None else x.stride()[:3]
    return {f"{name}_{axis}": stride for axis, stride in zip(axes, strides, strict=True)}


def _key_ends(mask: torch.Tensor) -> torch.Tensor:
    """The end of the keys that a mask `(B, 1, S)`, alike for all tokens, leaves: `(B,)`, int32."""
    ends = torch.arange(1, mask.shape[2] + 1, dtype=torch.int32, device=mask.device)
    of_keys = torch.where(mask[:, 0], ends, torch.zeros_like(ends))
    return pad(of_keys, (1, 0)).amax(1)


def _spans(
    rows: torch.Tensor,
    shape: torch.Size,
    groups: int,
    tiles: int,
    width: int,
    arguments: dict[str, Any],
) -> torch.Tensor:
    """The first row that may see a tile of keys by position, and the end: `(B, G, tiles, 2)`."""
    offset, window = arguments["causal_offset"], arguments["WINDOW"]
    first = torch.zeros(tiles, dtype=torch.int32, device=rows.device)
    end = torch.full_like(first, shape[1])
    if offset is not None:
        token = width * torch.arange(tiles, dtype=torch.int32, device=rows.device) - offset
        first = token if arguments["IS_CAUSAL"] else token - window + 1
        end = end if window is None else token + width - 1 + window
    return torch.stack([_first_rows(rows, x, shape, groups) for x in (first, end)], -1)


def _run(kernel: str, arguments: dict[str, Any], launch: Callable[[Blocks], None]) -> None:
    """Launch a kernel with its sizes: those of the table, or the fastest on this device."""
    query, key = arguments["query"], arguments["key"]
    target, width = _target(query.device), max(arguments["D"], arguments["DV"])
    sizes = blocks(kernel, target, width, query.dtype.itemsize)
    if triton_tuning.is_asked_for():
        names = ("H", "G", "K", "D", "DV", "IS_CAUSAL", "WINDOW", "MASK")
        lengths = (x.bit_length() for x in (len(query), query.shape[1], key.shape[1]))
        kind = (kernel, target, query.dtype, *lengths, *(arguments[name] for name in names))
        sizes = triton_tuning.fastest(kind, neighbours(sizes), launch)
    launch(sizes)


def _target(device: torch.device) -> str:
    """The name of the architecture of a device."""
    if device.type == "cpu":
        return "interpreter"
    if torch.version.hip is not None:
        return torch.cuda.get_device_properties(device).gcnArchName.split(":")[0]
    return "sm_{}{}".format(*torch.cuda.get_device_capability(device))


def _launch(name: str, grid: tuple[int, ...], sizes: Blocks, arguments: dict[str, Any]) -> None:
    """Run a kernel, with those of the arguments that it has."""
    kernel = getattr(triton_kernels, name)
    arguments |= {"BLOCK_M": sizes.rows, "BLOCK_N": sizes.keys}
    arguments = {key: x for key, x in arguments.items() if key in kernel.arg_names}
    with torch.cuda.device_of(arguments["gates"]):
        kernel[grid](**arguments, num_warps=sizes.warps, num_stages=sizes.stages)
