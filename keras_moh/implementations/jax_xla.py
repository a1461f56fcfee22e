"""JAX: the heads taken, in tiles of rows, compiled by XLA.

See `rows.py` for the rows. Each list of rows is walked through in tiles: a tile's scores over the
keys of its batch entry are made, used and forgotten while they are in the processor's cache, so
nothing of size `T x S` is ever in memory. Shapes are fixed and numbers of tiles are not: loops run
as often as the lists need. A tile that reaches over the end of its list writes what the next list
then overwrites. The backward pass makes the scores again, tile by tile, from the logarithms of
their sums.

Under causality or a window a tile reads the shortest of some fixed spans that holds the keys which
its rows may see.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from keras_moh.heads import dense_gates, fills_groups
from keras_moh.implementations.rows import Rows, place, rows_by_slot, rows_of, span_of_keys, take
from keras_moh.implementations.spec import AttentionSpec, Options, needs_reference

# Rows of a tile, at most and at least: in between, so many that a list is a few of them, or a short
# one (of a mean length up to the last number) a single one.
_LONGEST_TILE, _SHORTEST_TILE, _TILES_OF_A_LIST, _SHORT_LIST = 256, 32, 4, 128
# Number of spans of keys, of which a tile reads the shortest that suffices.
_SPANS = 8


def unsupported_reason(spec: AttentionSpec) -> str | None:
    """Why this implementation cannot serve a call, or `None`."""
    reason = needs_reference(spec)
    if reason is None and None in (spec.batch, spec.query_length, spec.key_length):
        return "it needs shapes that are numbers"
    return reason


def attend(
    query: Any, key: Any, value: Any, heads: Any, gates: Any, options: Options
) -> tuple[Any, None]:
    """Attention of the heads taken; see `reference.attend`."""
    if 0 in (*query.shape[:2], key.shape[1]):
        return jnp.zeros((*query.shape[:3], value.shape[-1]), query.dtype), None
    by_slot = fills_groups(query.shape[2], heads.shape[2], key.shape[2], options.routing_groups)
    static = _Static(options.is_causal, options.scale, options.sliding_window, by_slot)
    offset = jnp.asarray(options.causal_offset, jnp.int32)
    arguments = (query, key, value, heads, gates, options.mask, offset)
    return _attend(static, *arguments), None


class _Static(NamedTuple):
    """The options that compiled code depends on."""

    is_causal: bool
    scale: float
    sliding_window: int | None
    by_slot: bool  # whether the lists of rows are by slot, instead of by head


class _Tensors(NamedTuple):
    """What tiles are cut from: rows have as many behind them as the longest tile."""

    query: Any  # (R + tile, d)
    positions: Any  # (R + tile,)
    key: Any  # (B, S, G, d)
    value: Any  # (B, S, G, dv)
    mask: Any  # (B or 1, T or 1, S or 1), or None
    offset: Any


class _Tile(NamedTuple):
    """One tile: its numbers, and its scores' ingredients."""

    query: Any  # (n, d)
    key: Any  # (m, d)
    value: Any  # (m, dv)
    visible: Any  # (n, m), or None
    start: Any  # first row
    first_key: Any
    is_row: Any  # (n,): rows past the end of the list are not


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(static: _Static, *arguments: Any) -> Any:
    return _forward(static, *arguments)[0]


@functools.partial(jax.jit, static_argnums=0)
def _forward(
    static: _Static,
    query: Any,
    key: Any,
    value: Any,
    heads: Any,
    gates: Any,
    mask: Any,
    offset: Any,
) -> tuple[Any, tuple[Any, ...]]:
    rows = (rows_by_slot if static.by_slot else rows_of)(heads, query.shape[2])
    tensors = _tensors(rows, query, key, value, mask, offset)
    length = len(tensors.positions)

    def of_tile(tile: _Tile, sums: tuple[()]) -> Any:
        scores = _scores(static, tile)
        peak = jnp.maximum(scores.max(axis=-1, keepdims=True), jnp.finfo(scores.dtype).min)
        weights = jnp.exp(scores - peak)
        total = weights.sum(axis=-1, keepdims=True)
        total = jnp.where(total > 0, total, 1)
        return (weights @ tile.value / total, (peak + jnp.log(total))[:, 0]), sums

    dtype = _accumulator(query)
    results = (jnp.zeros((length, value.shape[-1]), dtype), jnp.zeros(length, dtype))
    (output, log_sums), _ = _for_tiles(static, tensors, rows, of_tile, results)
    output = output[: len(rows.places)]
    # In this order XLA does both in one pass.
    gated = place(output, rows) * dense_gates(heads, gates, query.shape[2])[..., None]
    inputs = (query, key, value, heads, gates, mask, offset)
    return gated.astype(query.dtype), (inputs, rows, output, log_sums)


@functools.partial(jax.jit, static_argnums=0)
def _backward(static: _Static, residuals: tuple[Any, ...], by_gated: Any) -> tuple[Any, ...]:
    (query, key, value, heads, gates, mask, offset), rows, output, log_sums = residuals
    tensors = _tensors(rows, query, key, value, mask, offset)
    dtype = _accumulator(query)
    row_gates = take(dense_gates(heads, gates, query.shape[2]), rows)
    by_gated = take(by_gated, rows).astype(dtype)
    by_gates = jnp.sum(by_gated * output, axis=-1)
    by_output = _behind(by_gated * row_gates[:, None])
    # The mean of the gradient by the weights, under the weights: that of the output, projected.
    means = _behind(by_gates * row_gates)

    def of_tile(tile: _Tile, sums: tuple[Any, Any]) -> Any:
        of_rows = [
            lax.dynamic_slice_in_dim(x, tile.start, len(tile.query))
            for x in (by_output, means, log_sums)
        ]
        by_tile = jnp.where(tile.is_row[:, None], of_rows[0], 0)
        mean = jnp.where(tile.is_row, of_rows[1], 0)[:, None]
        # Rows that are not the list's have sums of other keys: their weights might be infinite.
        log_sum = jnp.where(tile.is_row, of_rows[2], jnp.inf)[:, None]
        weights = jnp.exp(_scores(static, tile) - log_sum)
        by_scores = static.scale * weights * (by_tile @ tile.value.T - mean)
        # Sums of (d, S), since products that turn the scores over take three times as long.
        summands = (tile.query.T @ by_scores, by_tile.T @ weights)
        sums = tuple(
            lax.dynamic_update_slice_in_dim(
                total,
                lax.dynamic_slice_in_dim(total, tile.first_key, len(tile.key), axis=1) + summand,
                tile.first_key,
                axis=1,
            )
            for total, summand in zip(sums, summands, strict=True)
        )
        return (by_scores @ tile.key,), sums

    results = (jnp.zeros(tensors.query.shape, dtype),)
    (by_query,), (by_key, by_value) = _for_tiles(
        static, tensors, rows, of_tile, results, (key, value)
    )
    by_query = place(by_query[: len(rows.places)].astype(query.dtype), rows)
    by_gates = jnp.take_along_axis(place(by_gates, rows), heads, axis=-1).astype(gates.dtype)
    return (
        by_query,
        by_key.astype(key.dtype),
        by_value.astype(value.dtype),
        None,
        by_gates,
        None,
        None,
    )


_attend.defvjp(_forward, _backward)


def _accumulator(x: Any) -> Any:
    """The dtype of scores and sums."""
    return jnp.promote_types(x.dtype, jnp.float32)


def _tile_length(rows_of_a_list: float) -> int:
    """Rows of a tile, by the mean length of the lists."""
    tiles = 1 if rows_of_a_list <= _SHORT_LIST else _TILES_OF_A_LIST
    length = 2 ** math.ceil(math.log2(max(rows_of_a_list / tiles, 1)))
    return min(max(length, _SHORTEST_TILE), _LONGEST_TILE)


def _behind(x: Any) -> Any:
    """Rows with zeros behind them, for a tile that reaches over the end."""
    return jnp.pad(x, ((0, _LONGEST_TILE), *[(0, 0)] * (x.ndim - 1)))


def _tensors(rows: Rows, query: Any, key: Any, value: Any, mask: Any, offset: Any) -> _Tensors:
    return _Tensors(
        query=_behind(take(query, rows).astype(_accumulator(query))),
        positions=_behind(rows.positions),
        key=key,
        value=value,
        mask=None if mask is None else mask[:, 0],
        offset=offset,
    )


def _scores(static: _Static, tile: _Tile) -> Any:
    scores = static.scale * (tile.query @ tile.key.T)
    return scores if tile.visible is None else jnp.where(tile.visible, scores, -jnp.inf)


def _for_tiles(
    static: _Static,
    tensors: _Tensors,
    rows: Rows,
    of_tile: Callable[..., Any],
    results: tuple[Any, ...],
    sums_like: tuple[Any, ...] = (),
) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """`results of its rows, sums = of_tile(tile, sums)` for every tile of every list.

    The sums are over the rows of each key/value head, of the shapes of `sums_like`.
    """
    batch, key_length, groups = tensors.key.shape[:3]
    num_lists = len(rows.starts) - 1
    lists_of_group = num_lists // (batch * groups)
    dtype = tensors.query.dtype
    count = _tile_length(len(rows.places) / num_lists)
    widths = [key_length]
    if static.is_causal or static.sliding_window is not None:
        widths = sorted({-(-key_length * i // _SPANS) for i in range(1, _SPANS + 1)})

    def of_list(index: Any, carry: Any) -> Any:
        results, all_sums = carry
        entry, group = index // lists_of_group // groups, index // lists_of_group % groups
        key, value = (
            lax.dynamic_slice(x, (entry, 0, group, 0), (1, key_length, 1, x.shape[-1]))
            .reshape(key_length, x.shape[-1])
            .astype(dtype)
            for x in (tensors.key, tensors.value)
        )
        stop = rows.starts[index + 1]

        def step(carry: Any) -> Any:
            start, results, sums = carry
            first = tensors.positions[start] + tensors.offset
            last = tensors.positions[jnp.minimum(start + count, stop) - 1] + tensors.offset
            low, high = span_of_keys(
                first, last, key_length, static.is_causal, static.sliding_window
            )

            def of_width(width: int, sums: Any) -> Any:
                first_key = jnp.minimum(low, key_length - width)
                tile = _cut(
                    tensors, static, key, value, entry, start, stop, count, first_key, width
                )
                return of_tile(tile, sums)

            branch = jnp.sum(high - low > jnp.asarray(widths)[:-1])
            branches = [functools.partial(of_width, width) for width in widths]
            of_rows, sums = lax.switch(branch, branches, sums)
            results = tuple(
                lax.dynamic_update_slice_in_dim(result, update, start, axis=0)
                for result, update in zip(results, of_rows, strict=True)
            )
            return start + count, results, sums

        sums = tuple(jnp.zeros((x.shape[-1], key_length), dtype) for x in sums_like)
        _, results, sums = lax.while_loop(
            lambda carry: carry[0] < stop, step, (rows.starts[index], results, sums)
        )
        all_sums = tuple(
            x.at[entry, :, group].add(y.T) for x, y in zip(all_sums, sums, strict=True)
        )
        return results, all_sums

    all_sums = tuple(jnp.zeros(x.shape, dtype) for x in sums_like)
    return lax.fori_loop(0, num_lists, of_list, (results, all_sums))


def _cut(
    tensors: _Tensors,
    static: _Static,
    key: Any,
    value: Any,
    entry: Any,
    start: Any,
    stop: Any,
    count: int,
    first_key: Any,
    width: int,
) -> _Tile:
    """The tile of `count` rows from `start` on, over `width` keys from `first_key` on."""
    positions = lax.dynamic_slice_in_dim(tensors.positions, start, count)
    visible = None
    if tensors.mask is not None:
        mask = tensors.mask[entry if tensors.mask.shape[0] > 1 else 0]
        visible = mask[positions] if mask.shape[0] > 1 else mask
        if mask.shape[1] > 1:
            visible = lax.dynamic_slice_in_dim(visible, first_key, width, axis=1)
    distance = positions[:, None] + tensors.offset - first_key - jnp.arange(width)
    if static.is_causal:
        visible = distance >= 0 if visible is None else visible & (distance >= 0)
    if static.sliding_window is not None:
        near = jnp.abs(distance) < static.sliding_window
        visible = near if visible is None else visible & near
    return _Tile(
        query=lax.dynamic_slice_in_dim(tensors.query, start, count),
        key=lax.dynamic_slice_in_dim(key, first_key, width),
        value=lax.dynamic_slice_in_dim(value, first_key, width),
        visible=visible,
        start=start,
        first_key=first_key,
        is_row=start + jnp.arange(count) < stop,
    )
