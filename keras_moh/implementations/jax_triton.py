"""JAX on a GPU: the Triton kernels of `triton_kernels.py`, launched by the package jax-triton.

Shapes are numbers in all that JAX compiles, so the kernels are given them as constants.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from keras_moh.implementations.rows import end_of_keys
from keras_moh.implementations.spec import AttentionSpec, Options, beyond_kernels
from keras_moh.implementations.triton_blocks import (
    COMBINE,
    Blocks,
    blocks,
    forward_sizes,
    splits,
    tiles_of_rows,
    too_many_rows,
)

# It is imported only for a launch, because without a GPU it refuses to be.
HAS_JAX_TRITON = importlib.util.find_spec("jax_triton") is not None
# The slots of a cache that no query may see are not read: see `keras_moh/cache.py`.
READS_ONLY_SEEN_KEYS = True
_OLDEST_CAPABILITY = 80


def unsupported_reason(spec: AttentionSpec) -> str | None:
    """Why this implementation cannot serve a call, or `None`."""
    if None in (spec.batch, spec.query_length, spec.key_length):
        return beyond_kernels(spec) or "it needs shapes that are numbers"
    return beyond_kernels(spec) or too_many_rows(spec) or _unsupported_device(spec.device)


def _unsupported_device(kind: str) -> str | None:
    """Why the kernels do not run on devices of this kind, or `None`."""
    if kind not in ("gpu", "cuda", "rocm"):
        return f"it needs a GPU, not '{kind}'"
    if not HAS_JAX_TRITON:
        return "it needs the package jax-triton: pip install 'keras-moh[jax-triton]'"
    capability = _capability(_target())
    if capability is not None and capability < _OLDEST_CAPABILITY:
        oldest, found = (f"{x // 10}.{x % 10}" for x in (_OLDEST_CAPABILITY, capability))
        return f"it needs a GPU of compute capability {oldest} or newer, not {found}"
    return None


def attend(
    query: Any, key: Any, value: Any, heads: Any, gates: Any, options: Options
) -> tuple[Any, None]:
    """Attention of the heads taken; see `reference.attend`."""
    if 0 in (*query.shape[:2], key.shape[1]):
        return jnp.zeros((*query.shape[:3], value.shape[-1]), query.dtype), None
    static = _Static(options.is_causal, options.scale, options.sliding_window, _target())
    offset = jnp.asarray(options.causal_offset, jnp.int32)
    arguments = (query, key, value, heads.astype(jnp.int32), gates, options.mask, offset)
    return _attend(static, *arguments), None


class _Static(NamedTuple):
    """The options that compiled code depends on."""

    is_causal: bool
    scale: float
    sliding_window: int | None
    target: str  # an architecture, as `triton_blocks.py` has it


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(static: _Static, *arguments: Any) -> Any:
    return _forward(static, *arguments)[0]


@functools.partial(jax.jit, static_argnums=0)
def _forward(static: _Static, *inputs: Any) -> tuple[Any, tuple[Any, ...]]:
    query, key, value, heads, *_ = inputs
    kernel = forward_sizes(heads.shape, query.shape[2] // key.shape[2])
    sizes = _blocks(kernel, static, query, value)
    tiles = tiles_of_rows(heads.shape, key.shape[2], sizes.rows)
    programs = len(query) * tiles
    parts = splits(programs, key.shape[1]) if kernel == "decode" else 1
    arrays, constants = _arguments(static, *inputs)
    constants |= {"tiles": tiles, "splits": parts}
    like_parts, outputs = (
        {
            "attended": jax.ShapeDtypeStruct((*shape, value.shape[3]), dtype),
            "log_sums": jax.ShapeDtypeStruct(shape, jnp.float32),
        }
        for shape, dtype in (((*heads.shape, parts), jnp.float32), (heads.shape, query.dtype))
    )
    outputs["output"] = jax.ShapeDtypeStruct((*query.shape[:3], value.shape[3]), query.dtype)
    launch = functools.partial(_launch, "forward_kernel", (programs, parts), static, sizes)
    if parts > 1:
        arrays["part_attended"], arrays["part_log_sums"] = launch(
            arrays, constants | {"output": None}, like_parts
        )
        launch = functools.partial(_launch, "combine_kernel", (heads.size,), static, COMBINE)
    attended, log_sums, output = launch(arrays, constants, outputs, zeroed=["output"])
    return output, (inputs, attended, log_sums)


@functools.partial(jax.jit, static_argnums=0)
def _backward(static: _Static, residuals: tuple[Any, ...], by_output: Any) -> tuple[Any, ...]:
    inputs, attended, log_sums = residuals
    query, key, value, heads, gates, *_ = inputs
    arrays, constants = _arguments(static, *inputs)
    arrays |= {"attended": attended, "log_sums": log_sums, "by_output": by_output}
    like_query, like_key, like_value, like_gates = (
        jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (query, key, value, gates)
    )

    sizes = _blocks("backward_query", static, query, value)
    tiles = tiles_of_rows(heads.shape, key.shape[2], sizes.rows)
    by_query, by_gates = _launch(
        *("backward_query_kernel", (len(query) * tiles,), static, sizes, arrays),
        constants | {"tiles": tiles},
        {"by_query": like_query, "by_gates": like_gates},
        zeroed=["by_query"],
    )

    sizes = _blocks("backward_key_value", static, query, value)
    tiles = -(-key.shape[1] // sizes.keys)
    spans = _spans(static, arrays, heads.shape, key.shape[2], tiles, sizes.keys)
    by_key, by_value = _launch(
        *("backward_key_value_kernel", (len(key) * key.shape[2] * tiles,), static, sizes),
        arrays | {"by_gates": by_gates, "spans": spans},
        constants | {"tiles": tiles},
        {"by_key": like_key, "by_value": like_value},
    )
    return by_query, by_key, by_value, None, by_gates, None, None


_attend.defvjp(_forward, _backward)


def _arguments(
    static: _Static,
    query: Any,
    key: Any,
    value: Any,
    heads: Any,
    gates: Any,
    mask: Any,
    offset: Any,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """What all kernels are given, by name: arrays, and constants.

    jax-triton takes no `None` for an array, so there is a mask and an end of keys where none is
    asked for, which the kernels do not read or which leaves all keys.
    """
    batch, length, num_heads, key_dim = query.shape
    _, key_length, groups, value_dim = value.shape
    taken = heads.shape[2]
    kind = "none" if mask is None else "keys" if mask.shape[2] == 1 else "pairs"
    mask = jnp.ones((1, 1, 1), bool) if mask is None else mask[:, 0]
    key_ends = jnp.full(batch, key_length, jnp.int32)
    if kind == "keys":
        key_ends = end_of_keys(jnp.broadcast_to(mask[:, 0], (batch, key_length)))

    token = jnp.arange(length, dtype=jnp.int32)[:, None]
    slot = jnp.arange(taken, dtype=jnp.int32)
    numbers = (heads // (num_heads // groups) * length + token) * taken + slot
    rows = jnp.sort(numbers.reshape(batch, -1))
    ends = jnp.array([0, length], jnp.int32)
    arrays = {
        **{"query": query, "key": key, "value": value, "heads": heads, "gates": gates},
        **{"rows": rows, "lists": _first_rows(rows, ends, heads.shape, groups)},
        **{"mask": mask, "key_ends": key_ends, "causal_offset": offset.reshape(1)},
    }
    by_entry, by_token, by_number = mask.shape[1] * mask.shape[2], mask.shape[2], 1
    strides = zip(mask.shape, (by_entry, by_token, by_number), strict=True)
    by_entry, by_token, by_number = (0 if size == 1 else stride for size, stride in strides)
    constants = {
        **{"scale": static.scale, "T": length, "S": key_length},
        **{"key_by_entry": key_length * groups * key_dim, "key_by_number": groups * key_dim},
        **{"value_by_entry": key_length * groups * value_dim},
        **{"value_by_number": groups * value_dim},
        **{"key_by_group": key_dim, "value_by_group": value_dim},
        **{"mask_by_entry": by_entry, "mask_by_token": by_token, "mask_by_number": by_number},
        **{"H": num_heads, "G": groups, "K": taken, "D": key_dim, "DV": value_dim},
        **{"IS_CAUSAL": static.is_causal, "WINDOW": static.sliding_window, "MASK": kind},
        **{"BLOCK_D": _power_of_2(key_dim), "BLOCK_DV": _power_of_2(value_dim)},
    }
    return arrays, constants


def _power_of_2(width: int) -> int:
    """The least one that is a width of a block: of 16, for products, or more."""
    return max(16, 1 << (width - 1).bit_length())


def _first_rows(rows: Any, tokens: Any, shape: tuple[int, ...], groups: int) -> Any:
    """The first row in each list of one of the tokens `(n,)` or of a later one: `(B, G, n)`.

    Args:
        rows: `(B, T K)`, as the kernels number them.
        tokens: `(n,)`, int32, before the first and beyond the last one too.
        shape: `(B, T, K)`.
        groups: `G`.
    """
    _, length, taken = shape
    group = jnp.arange(groups, dtype=jnp.int32)[:, None]
    numbers = (group * length + jnp.clip(tokens, 0, length)) * taken
    return jax.vmap(lambda rows: jnp.searchsorted(rows, numbers))(rows).astype(jnp.int32)


def _spans(
    static: _Static,
    arrays: dict[str, Any],
    shape: tuple[int, ...],
    groups: int,
    tiles: int,
    width: int,
) -> Any:
    """The first row that may see a tile of keys by position, and the end: `(B, G, tiles, 2)`."""
    token = width * jnp.arange(tiles, dtype=jnp.int32) - arrays["causal_offset"]
    window = static.sliding_window
    first, end = jnp.zeros_like(token), jnp.full_like(token, shape[1])
    if window is not None:
        first, end = token - window + 1, token + width - 1 + window
    if static.is_causal:
        first = token
    return jnp.stack([_first_rows(arrays["rows"], x, shape, groups) for x in (first, end)], -1)


def _blocks(kernel: str, static: _Static, query: Any, value: Any) -> Blocks:
    width = max(query.shape[3], value.shape[3])
    return blocks(kernel, static.target, width, query.dtype.itemsize)


def _target() -> str:
    """The name of the architecture of the devices."""
    architecture = jax.devices()[0].compute_capability
    if architecture.startswith("gfx"):
        return architecture.split(":")[0]
    return "sm_" + architecture.replace(".", "")


def _capability(target: str) -> int | None:
    """The compute capability of an architecture, if it is one of NVIDIA's."""
    return int(target.removeprefix("sm_")) if target.startswith("sm_") else None


def _launch(
    name: str,
    grid: tuple[int, ...],
    static: _Static,
    sizes: Blocks,
    arrays: dict[str, Any],
    constants: dict[str, Any],
    outputs: dict[str, jax.ShapeDtypeStruct],
    zeroed: Sequence[str] = (),
) -> Sequence[Any]:
    """The outputs of a kernel, of which those named are 0 where it writes nothing.

    It is given those of the arrays that it has, and next, as its signature has them, the outputs.
    """
    import jax_triton

    from keras_moh.implementations import triton_kernels

    kernel = getattr(triton_kernels, name)
    constants |= {"BLOCK_M": sizes.rows, "BLOCK_N": sizes.keys}
    inputs = [arrays[name] for name in kernel.arg_names if name in arrays.keys() - outputs.keys()]

    # jax-triton has no rule for `jax.vmap`.
    @jax.custom_batching.sequential_vmap
    def call(*inputs: Any) -> Sequence[Any]:
        return jax_triton.triton_call(
            *inputs,
            kernel=kernel,
            out_shape=list(outputs.values()),
            grid=grid,
            num_warps=sizes.warps,
            num_stages=sizes.stages,
            compute_capability=_capability(static.target),
            zeroed_outputs=tuple(list(outputs).index(name) for name in zeroed),
            **{name: x for name, x in constants.items() if name in kernel.arg_names},
        )

    return call(*inputs)
