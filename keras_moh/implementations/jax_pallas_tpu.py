r"""JAX on a TPU: flash attention of only the rows that took a head, as Pallas kernels.

See `rows.py` for the rows. Those whose heads share a key/value head are one list, by position, and
lists are cut into tiles: of whichever heads, the rows of a tile read the same keys and values. Each
list begins with a tile of its own and has at least one, so an entry has at most `T K / tile + G` of
them, however unevenly its heads are taken. Rows are gathered into tiles before the kernels, and
gathered from them afterwards, because a TPU's kernels read and write whole blocks.

With scores $s_{ij}$, their logarithmic sums $l_i$ and gates $g_i$, and $\dot x$ for the gradient by
$x$, the kernels compute

$$ p_{ij} = e^{s_{ij} - l_i}, \quad a_i = \sum_j p_{ij} v_j, \quad
   \dot v_j = \sum_i p_{ij} \dot a_i, \quad
   \dot s_{ij} = p_{ij} (\dot a_i \cdot v_j - \dot a_i \cdot a_i), $$
$$ \dot q_i = \mathrm{scale} \sum_j \dot s_{ij} k_j, \quad
   \dot k_j = \mathrm{scale} \sum_i \dot s_{ij} q_i, $$

where $\dot a_i = g_i \dot o_i$, since $o_i = g_i a_i$ is the output; and $\dot g_i = \dot o_i \cdot
a_i$. Nowhere is anything divided by a gate, which may be 0.

Scores have keys along sublanes and rows along lanes. So what there is one of for a row (its
position, its maximum and its sums) is a vector along lanes, which takes no more memory than it has
numbers, and is spread over the scores for free. Sums are in float32. What a tile's rows may see by
position, and what padding leaves, is a range of blocks of keys, found before the kernels: a program
computes those only, and for the others of the grid fetches nothing. A mask is read as bits.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import keras
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from keras_moh.heads import dense_gates
from keras_moh.implementations.rows import (
    Rows,
    end_of_keys,
    place,
    rows_of,
    span_of_keys,
    take,
)
from keras_moh.implementations.spec import AttentionSpec, Options, beyond_kernels

_DEVICES = ("tpu",)
_LANES = 128
_BITS = 32
# Tiles' numbers of rows, of which the largest is taken that fits into a list of mean length, and
# blocks' numbers of keys, of which the smallest that holds all keys, if any. Nothing was timed:
# large ones, since with every tile keys and values are read again, that fit into a core's memory.
_ROWS, _KEYS = (128, 256, 512), (256, 512)
# Tiles of all entries of which there is room for three numbers in a core's memory of scalars.
_MOST_TILES = 2**16


def unsupported_reason(spec: AttentionSpec) -> str | None:
    """Why this implementation cannot serve a call, or `None`."""
    reason = beyond_kernels(spec)
    if reason is not None:
        return reason
    if spec.batch is None or spec.query_length is None or spec.key_length is None:
        return "it needs shapes that are numbers"
    shape = spec.query_length, spec.num_active_heads, spec.num_key_value_heads
    rows, _ = _block_lengths(shape[0] * shape[1] / shape[2], spec.key_length)
    tiles = spec.batch * _tiles_of_entry(*shape, rows)
    if tiles > _MOST_TILES:
        return f"the scalar memory has room for {_MOST_TILES} tiles, not for {tiles}"
    if spec.device not in _DEVICES:
        return f"it needs a TPU, not '{spec.device}'"
    if keras.distribution.distribution() is not None:
        return "its kernels are for one device, and keras.distribution divides arrays among several"
    return None


def attend(
    query: Any, key: Any, value: Any, heads: Any, gates: Any, options: Options
) -> tuple[Any, None]:
    """Attention of the heads taken; see `reference.attend`."""
    if 0 in (*query.shape[:2], key.shape[1]):
        return jnp.zeros((*query.shape[:3], value.shape[-1]), query.dtype), None
    static = _Static(options.is_causal, options.scale, options.sliding_window)
    offset = jnp.asarray(options.causal_offset, jnp.int32)
    return _attend(static, query, key, value, heads, gates, options.mask, offset), None


class _Static(NamedTuple):
    """The options that compiled code depends on."""

    is_causal: bool
    scale: float
    sliding_window: int | None


class _Sizes(NamedTuple):
    """How the work is cut."""

    batch: int
    groups: int
    tiles: int  # of an entry
    rows: int  # of a tile
    blocks: int  # of keys
    keys: int  # of a block: those of the last may be fewer
    key_length: int
    key_dim: int  # with zeros up to a multiple of the lanes
    value_dim: int  # as well


class _Tiles(NamedTuple):
    """The rows of all entries in tiles.

    Where a list has no more rows, a tile repeats its last one, with a gate of 0.
    """

    rows: Rows  # places (B R,) and positions (B R,), with R rows in the tiles of an entry
    gates: Any  # (B R,)
    groups: Any  # (B tiles,): the key/value head of each tile
    starts: Any  # (B tiles,): the first block of keys that the tile reads
    stops: Any  # (B tiles,): the end of those


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(static: _Static, *arguments: Any) -> Any:
    return _forward(static, *arguments)[0]


@functools.partial(jax.jit, static_argnums=0)
def _forward(static: _Static, *inputs: Any) -> tuple[Any, tuple[Any, ...]]:
    query, _, value, *_ = inputs
    sizes, tiles = _plan(static, *inputs)
    tensors = _tensors(sizes, tiles, *inputs)
    attended, log_sums = _call(
        *(_forward_kernel, static, sizes, tiles, tensors, ("by_attended", "log_sums")),
        scratch=((sizes.value_dim, sizes.rows), (1, sizes.rows), (1, sizes.rows)),
    )
    attended = _flat(attended, value.shape[-1])
    gated = place((attended * tiles.gates[:, None]).astype(query.dtype), tiles.rows)
    return gated, (inputs, attended, log_sums)


@functools.partial(jax.jit, static_argnums=0)
def _backward(static: _Static, residuals: tuple[Any, ...], by_gated: Any) -> tuple[Any, ...]:
    inputs, attended, log_sums = residuals
    query, key, value, heads, gates, *_ = inputs
    sizes, tiles = _plan(static, *inputs)
    by_rows = take(by_gated, tiles.rows).astype(jnp.float32)
    by_gates = jnp.sum(by_rows * attended, axis=-1)
    by_attended = _wide((by_rows * tiles.gates[:, None]).astype(attended.dtype))
    tensors = _tensors(sizes, tiles, *inputs)._replace(
        log_sums=log_sums,
        by_attended=by_attended.reshape(sizes.batch, -1, sizes.value_dim),
        means=(by_gates * tiles.gates).reshape(log_sums.shape),
    )
    (by_query,) = _call(
        *(_backward_query_kernel, static, sizes, tiles, tensors, ("query",)),
        scratch=((sizes.key_dim, sizes.rows),),
    )
    by_key, by_value = _call(
        *(_backward_key_value_kernel, static, sizes, tiles, tensors, ("key", "value")),
        scratch=((sizes.keys, sizes.key_dim), (sizes.keys, sizes.value_dim)),
        rows_are_inner=True,
    )
    by_query = place(_flat(by_query, query.shape[-1]).astype(query.dtype), tiles.rows)
    by_key, by_value = (
        by.reshape(*by.shape[:2], sizes.groups, -1)[:, : x.shape[1], :, : x.shape[3]]
        for x, by in ((key, by_key), (value, by_value))
    )
    by_gates = jnp.take_along_axis(place(by_gates, tiles.rows), heads, axis=-1)
    return (
        by_query,
        by_key.astype(key.dtype),
        by_value.astype(value.dtype),
        None,
        by_gates.astype(gates.dtype),
        None,
        None,
    )


_attend.defvjp(_forward, _backward)


# Around the kernels -------------------------------------------------------------------------------


def _block_lengths(rows_of_a_list: float, key_length: int) -> tuple[int, int]:
    """The rows of a tile and the keys of a block, for lists of that mean length."""
    rows = max(size for size in _ROWS if size <= max(rows_of_a_list, _ROWS[0]))
    keys = min(size for size in _KEYS if size >= min(key_length, _KEYS[-1]))
    return rows, keys


def _tiles_of_entry(length: int, num_active_heads: int, groups: int, rows: int) -> int:
    """The most tiles that an entry can have."""
    return length * num_active_heads // rows + groups


def _plan(
    static: _Static,
    query: Any,
    key: Any,
    value: Any,
    heads: Any,
    gates: Any,
    mask: Any,
    offset: Any,
) -> tuple[_Sizes, _Tiles]:
    """How the work is cut: the rows of each tile, and the blocks of keys that it reads."""
    batch, length, num_heads, key_dim = query.shape
    _, key_length, groups, value_dim = value.shape
    taken = heads.shape[2]
    tile_rows, block_keys = _block_lengths(length * taken / groups, key_length)
    sizes = _Sizes(
        batch=batch,
        groups=groups,
        tiles=_tiles_of_entry(length, taken, groups, tile_rows),
        rows=tile_rows,
        blocks=-(-key_length // block_keys),
        keys=block_keys,
        key_length=key_length,
        key_dim=_padded(key_dim),
        value_dim=_padded(value_dim),
    )
    rows = rows_of(heads, num_heads, groups)

    of_lists = jnp.diff(rows.starts).reshape(batch, groups)
    tiles_of_lists = jnp.maximum(-(-of_lists // sizes.rows), 1)
    end_tiles = jnp.cumsum(tiles_of_lists, axis=1)
    first_tiles = end_tiles - tiles_of_lists
    tile = jnp.arange(sizes.tiles)
    # Behind the last list its group goes on, with tiles of no rows.
    groups_of_tiles = jnp.sum(tile[:, None] >= end_tiles[:, None, :-1], axis=-1)

    def of_tiles(of_lists: Any) -> Any:
        return jnp.take_along_axis(of_lists, groups_of_tiles, axis=1)

    first_rows = (tile - of_tiles(first_tiles)) * sizes.rows
    left = of_tiles(of_lists) - first_rows
    row = jnp.minimum(jnp.arange(sizes.rows), left[..., None] - 1)
    first_rows += of_tiles(rows.starts[:-1].reshape(batch, groups))
    # The row before the first is that of no list.
    indices = jnp.clip(first_rows[..., None] + row, 0, len(rows.places) - 1)
    positions = rows.positions[indices]
    starts = (jnp.arange(batch)[:, None] * sizes.tiles + first_tiles) * sizes.rows
    moved = starts - rows.starts[:-1].reshape(batch, groups)
    tiled = Rows(
        places=rows.places[indices].reshape(-1),
        positions=positions.reshape(-1),
        starts=starts.reshape(-1),
        taken=rows.taken,
        indices=rows.indices + jnp.repeat(moved, num_heads // groups, axis=1)[:, None],
    )
    exists = jnp.arange(sizes.rows) < left[..., None]
    row_gates = take(dense_gates(heads, gates, num_heads), tiled).astype(jnp.float32)

    first, last = positions[..., 0] + offset, positions[..., -1] + offset
    low, high = span_of_keys(first, last, key_length, static.is_causal, static.sliding_window)
    if mask is not None and mask.shape[2] == 1:
        of_keys = jnp.broadcast_to(mask[:, 0, 0], (batch, key_length))
        high = jnp.minimum(high, end_of_keys(of_keys)[:, None])
    some = (left > 0) & (low < high)
    starts, stops = low // sizes.keys, -(-high // sizes.keys)
    starts, stops = (jnp.where(some, x, 0).astype(jnp.int32) for x in (starts, stops))
    return sizes, _Tiles(
        rows=tiled,
        gates=jnp.where(exists.reshape(-1), row_gates, 0),
        groups=groups_of_tiles.astype(jnp.int32).reshape(-1),
        starts=starts.reshape(-1),
        stops=stops.reshape(-1),
    )


class _Tensors(NamedTuple):
    """What the kernels read in blocks, of `R` rows and `S` keys of an entry that are whole blocks.

    Features are a multiple of the lanes. What a kernel has no use for is `None`.
    """

    query: Any  # (B, R, d)
    key: Any  # (B, S, G d)
    value: Any  # (B, S, G dv)
    positions: Any  # (B, 1, R)
    bits: Any  # (B or 1, S / 32, R or 1): see `_bits`
    log_sums: Any = None  # (B, 1, R)
    by_attended: Any = None  # (B, R, dv)
    means: Any = None  # (B, 1, R)


def _tensors(
    sizes: _Sizes,
    tiles: _Tiles,
    query: Any,
    key: Any,
    value: Any,
    heads: Any,
    gates: Any,
    mask: Any,
    offset: Any,
) -> _Tensors:
    dtype = _operand_dtype(query)
    keys = sizes.blocks * sizes.keys

    def in_blocks(x: Any) -> Any:
        behind = ((0, 0), (0, keys - sizes.key_length), (0, 0), (0, 0))
        return jnp.pad(_wide(x.astype(dtype)), behind).reshape(sizes.batch, keys, -1)

    positions, bits = tiles.rows.positions.reshape(sizes.batch, 1, -1), None
    if mask is not None:
        bits = _bits(mask[:, 0], sizes)
        if mask.shape[2] > 1:
            bits = jnp.broadcast_to(bits, (sizes.batch, *bits.shape[1:]))
            bits = jnp.take_along_axis(bits, positions, axis=2)
    queries = _wide(take(query, tiles.rows).astype(dtype))
    return _Tensors(
        query=queries.reshape(sizes.batch, -1, sizes.key_dim),
        key=in_blocks(key),
        value=in_blocks(value),
        positions=positions + offset,
        bits=bits,
    )


def _bits(mask: Any, sizes: _Sizes) -> Any:
    """A mask `(B or 1, T or 1, S or 1)` as bits: `(B or 1, S / 32, T or 1)`, int32.

    Of a block of keys, bit `i` of word `w` is that of key `i words + w`, of its `words`.
    """
    keys = sizes.blocks * sizes.keys
    mask = jnp.broadcast_to(mask, (*mask.shape[:2], sizes.key_length))
    mask = jnp.pad(mask, ((0, 0), (0, 0), (0, keys - sizes.key_length)))
    mask = mask.reshape(*mask.shape[:2], sizes.blocks, _BITS, sizes.keys // _BITS)
    bit = jnp.arange(_BITS, dtype=jnp.uint32)[:, None]
    words = jnp.sum(mask.astype(jnp.uint32) << bit, axis=3, dtype=jnp.uint32)
    words = lax.bitcast_convert_type(words, jnp.int32)
    return words.reshape(*mask.shape[:2], keys // _BITS).transpose(0, 2, 1)


def _operand_dtype(x: Any) -> Any:
    """The dtype of products' factors: a TPU has no float16."""
    return jnp.bfloat16 if x.dtype == jnp.bfloat16 else jnp.float32


def _padded(width: int) -> int:
    return -(-width // _LANES) * _LANES


def _wide(x: Any) -> Any:
    """`x (..., features)` with zeros up to a multiple of the lanes."""
    return jnp.pad(x, ((0, 0),) * (x.ndim - 1) + ((0, _padded(x.shape[-1]) - x.shape[-1]),))


def _flat(rows: Any, width: int) -> Any:
    """The rows `(B R, features)` that the kernels leave as `(B, R, _padded(features))`."""
    return rows.reshape(-1, rows.shape[-1])[:, :width]


def _specs(sizes: _Sizes, bits: Any, rows_are_inner: bool) -> tuple[_Tensors, _Tensors]:
    """The shape of each of the tensors, and its blocks."""

    def at(
        entry: Any, outer: Any, inner: Any, groups: Any, starts: Any, stops: Any
    ) -> tuple[Any, ...]:
        """The blocks to have at hand: where none is read, ones that are read before or after."""
        tile, block = (inner, outer) if rows_are_inner else (outer, inner)
        number = entry * sizes.tiles + tile
        start, stop = starts[number], stops[number]
        if rows_are_inner:
            tile = jnp.where((start <= block) & (block < stop), tile, 0)
        else:
            block = jnp.clip(start + block, 0, jnp.maximum(stop - 1, 0))
        return entry, groups[number], tile, block

    def spec(shape: tuple[int, int], place: Callable[..., tuple[Any, ...]]) -> pl.BlockSpec:
        return pl.BlockSpec((None, *shape), lambda *grid: place(*at(*grid)))

    def rows(width: int) -> tuple[tuple[int, ...], pl.BlockSpec]:
        blocks = spec((sizes.rows, width), lambda entry, group, tile, block: (entry, tile, 0))
        return (sizes.batch, sizes.tiles * sizes.rows, width), blocks

    def row() -> tuple[tuple[int, ...], pl.BlockSpec]:
        blocks = spec((1, sizes.rows), lambda entry, group, tile, block: (entry, 0, tile))
        return (sizes.batch, 1, sizes.tiles * sizes.rows), blocks

    def keys(width: int) -> tuple[tuple[int, ...], pl.BlockSpec]:
        blocks = spec((sizes.keys, width), lambda entry, group, tile, block: (entry, block, group))
        return (sizes.batch, sizes.blocks * sizes.keys, sizes.groups * width), blocks

    def words() -> tuple[Any, ...]:
        if bits is None:
            return None, None
        of_entries, _, of_rows = bits.shape
        return bits.shape, spec(
            (sizes.keys // _BITS, min(of_rows, sizes.rows)),
            lambda entry, group, tile, block: (
                entry if of_entries > 1 else 0,
                block,
                tile if of_rows > 1 else 0,
            ),
        )

    pairs = _Tensors(
        query=rows(sizes.key_dim),
        key=keys(sizes.key_dim),
        value=keys(sizes.value_dim),
        positions=row(),
        bits=words(),
        log_sums=row(),
        by_attended=rows(sizes.value_dim),
        means=row(),
    )
    shapes, specs = zip(*pairs, strict=True)
    return _Tensors(*shapes), _Tensors(*specs)


def _call(
    kernel: Callable[..., None],
    static: _Static,
    sizes: _Sizes,
    tiles: _Tiles,
    tensors: _Tensors,
    outputs: Sequence[str],
    scratch: Sequence[tuple[int, int]],
    rows_are_inner: bool = False,
) -> Sequence[Any]:
    """The outputs of a kernel, laid out as the tensors of those names.

    Its grid is of entries, tiles and blocks of keys, the last axis the inner one; or of entries,
    blocks and tiles.
    """
    shapes, specs = _specs(sizes, tensors.bits, rows_are_inner)
    axes = (sizes.tiles, sizes.blocks)
    call = pl.pallas_call(
        functools.partial(kernel, static, sizes),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(sizes.batch, *(reversed(axes) if rows_are_inner else axes)),
            in_specs=[
                _Tensors(
                    *(None if x is None else spec for x, spec in zip(tensors, specs, strict=True))
                )
            ],
            out_specs=[getattr(specs, name) for name in outputs],
            scratch_shapes=[pltpu.VMEM(shape, jnp.float32) for shape in scratch],
        ),
        out_shape=[
            jax.ShapeDtypeStruct(
                getattr(shapes, name),
                jnp.float32 if name == "log_sums" else tensors.query.dtype,
            )
            for name in outputs
        ],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary")
        ),
    )
    with jax.enable_x64(False):  # A TPU's indices have 32 bits.
        return call(tiles.groups, tiles.starts, tiles.stops, tensors)


# The kernels --------------------------------------------------------------------------------------


def _forward_kernel(
    static: _Static,
    sizes: _Sizes,
    groups: Any,
    starts: Any,
    stops: Any,
    tensors: _Tensors,
    attended: Any,
    log_sums: Any,
    accumulated: Any,
    maximum: Any,
    total: Any,
) -> None:
    step = pl.program_id(2)
    number = pl.program_id(0) * sizes.tiles + pl.program_id(1)
    block = starts[number] + step

    @pl.when(step == 0)
    def _() -> None:
        accumulated[...] = jnp.zeros_like(accumulated)
        maximum[...] = jnp.full_like(maximum, jnp.finfo(jnp.float32).min)
        total[...] = jnp.zeros_like(total)

    @pl.when(block < stops[number])
    def _() -> None:
        scores = _scores(static, sizes, tensors, block)
        new_maximum = jnp.maximum(maximum[...], jnp.max(scores, axis=0, keepdims=True))
        weights = jnp.exp(scores - new_maximum)
        decay = jnp.exp(maximum[...] - new_maximum)
        value = tensors.value[...]
        total[...] = total[...] * decay + jnp.sum(weights, axis=0, keepdims=True)
        accumulated[...] = accumulated[...] * decay + _product(
            value, weights.astype(value.dtype), 0, 0
        )
        maximum[...] = new_maximum

    @pl.when(step == sizes.blocks - 1)
    def _() -> None:
        divisor = jnp.where(total[...] > 0, total[...], 1)
        attended[...] = (accumulated[...] / divisor).T.astype(attended.dtype)
        log_sums[...] = maximum[...] + jnp.log(divisor)


def _backward_query_kernel(
    static: _Static,
    sizes: _Sizes,
    groups: Any,
    starts: Any,
    stops: Any,
    tensors: _Tensors,
    by_query: Any,
    accumulated: Any,
) -> None:
    step = pl.program_id(2)
    number = pl.program_id(0) * sizes.tiles + pl.program_id(1)
    block = starts[number] + step

    @pl.when(step == 0)
    def _() -> None:
        accumulated[...] = jnp.zeros_like(accumulated)

    @pl.when(block < stops[number])
    def _() -> None:
        key = tensors.key[...]
        _, by_scores = _weights(static, sizes, tensors, block)
        accumulated[...] += _product(key, by_scores.astype(key.dtype), 0, 0)

    @pl.when(step == sizes.blocks - 1)
    def _() -> None:
        by_query[...] = (static.scale * accumulated[...]).T.astype(by_query.dtype)


def _backward_key_value_kernel(
    static: _Static,
    sizes: _Sizes,
    groups: Any,
    starts: Any,
    stops: Any,
    tensors: _Tensors,
    by_key: Any,
    by_value: Any,
    by_key_sum: Any,
    by_value_sum: Any,
) -> None:
    block, tile = pl.program_id(1), pl.program_id(2)
    number = pl.program_id(0) * sizes.tiles + tile
    last_tile = sizes.tiles - 1

    @pl.when((tile == 0) | (groups[jnp.maximum(number - 1, 0)] != groups[number]))
    def _() -> None:
        by_key_sum[...] = jnp.zeros_like(by_key_sum)
        by_value_sum[...] = jnp.zeros_like(by_value_sum)

    @pl.when((starts[number] <= block) & (block < stops[number]))
    def _() -> None:
        query, by_attended = tensors.query[...], tensors.by_attended[...]
        weights, by_scores = _weights(static, sizes, tensors, block)
        by_key_sum[...] += _product(by_scores.astype(query.dtype), query, 1, 0)
        by_value_sum[...] += _product(weights.astype(query.dtype), by_attended, 1, 0)

    # The one after the last tile of all is not there to be read.
    next_number = jnp.minimum(number + 1, sizes.batch * sizes.tiles - 1)

    @pl.when((tile == last_tile) | (groups[next_number] != groups[number]))
    def _() -> None:
        by_key[...] = (static.scale * by_key_sum[...]).astype(by_key.dtype)
        by_value[...] = by_value_sum[...].astype(by_value.dtype)


def _scores(static: _Static, sizes: _Sizes, tensors: _Tensors, block: Any) -> Any:
    """The scores `(keys, rows)` of a block, with minus infinity where a row sees no key."""
    scores = static.scale * _product(tensors.key[...], tensors.query[...], 1, 1)
    number = block * sizes.keys + lax.broadcasted_iota(jnp.int32, scores.shape, 0)
    distance = tensors.positions[...] - number
    sees = []
    if sizes.key_length % sizes.keys:
        sees.append(number < sizes.key_length)
    if static.is_causal:
        sees.append(distance >= 0)
    if static.sliding_window is not None:
        sees.append(jnp.abs(distance) < static.sliding_window)
    if tensors.bits is not None:
        bits = jnp.broadcast_to(tensors.bits[...], (sizes.keys // _BITS, sizes.rows))
        # With one bit after the other in the sign.
        sees.append(jnp.concatenate([bits << (_BITS - 1 - i) for i in range(_BITS)]) < 0)
    return jnp.where(functools.reduce(jnp.logical_and, sees), scores, -jnp.inf) if sees else scores


def _weights(static: _Static, sizes: _Sizes, tensors: _Tensors, block: Any) -> tuple[Any, Any]:
    """The weights `(keys, rows)` of a block, and the gradient by the scores."""
    weights = jnp.exp(_scores(static, sizes, tensors, block) - tensors.log_sums[...])
    by_weights = _product(tensors.value[...], tensors.by_attended[...], 1, 1)
    return weights, weights * (by_weights - tensors.means[...])


def _product(a: Any, b: Any, axis_of_a: int, axis_of_b: int) -> Any:
    """The product over these axes in float32, exact to the rounding of the factors."""
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return lax.dot_general(
        *(a, b, (((axis_of_a,), (axis_of_b,)), ((), ()))),
        precision=precision,
        preferred_element_type=jnp.float32,
    )
