"""TensorFlow: the heads taken, in tiles of rows, in graphs, eagerly and compiled by XLA alike.

See `rows.py` for the rows, and `tensorflow_rows.py` for their order: by head, then batch entry. The
rows of a head in one batch entry are a list here, which is walked through in tiles: a tile's scores
over the keys of its entry are made, used and forgotten, so nothing of size `T x S` is ever in
memory. The backward pass makes them again.

In graphs and eagerly a list is cut into equal tiles, and under causality or a window a tile reads
only the keys that its rows may see. Under XLA, whose shapes are fixed, all tiles are of one length
and read all keys: a tile that reaches over the end of its list writes what the next list then
overwrites.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import tensorflow as tf
from keras import ops

from keras_moh.heads import dense_gates, fills_groups
from keras_moh.implementations.rows import Rows, rows_by_slot, rows_of, span_of_keys
from keras_moh.implementations.spec import AttentionSpec, Options, needs_reference
from keras_moh.implementations.tensorflow_device import is_compiled_by_xla
from keras_moh.implementations.tensorflow_rows import (
    Plan,
    as_one_entry,
    placed,
    taken,
    with_gradient,
)
from keras_moh.masks import hide

# Rows of a tile, at most; under XLA of every tile.
_LONGEST_TILE, _XLA_TILE = 512, 128
# Lists that may be worked on at once.
_PARALLEL_LISTS = 16


def unsupported_reason(spec: AttentionSpec) -> str | None:
    """Why this implementation cannot serve a call, or `None`."""
    return needs_reference(spec)


def attend(
    query: Any, key: Any, value: Any, heads: Any, gates: Any, options: Options
) -> tuple[Any, None]:
    """Attention of the heads taken; see `reference.attend`."""
    batch, length, num_heads, _ = ops.shape(query)
    if 0 in (*query.shape[:2], key.shape[1]):
        return tf.zeros((batch, length, num_heads, value.shape[-1]), query.dtype), None
    by_slot = fills_groups(num_heads, heads.shape[2], key.shape[2], options.routing_groups)
    rows = (rows_by_slot if by_slot else rows_of)(as_one_entry(heads), num_heads)
    output = _attend(rows, by_slot, taken(query, rows), key, value, heads, gates, options)
    return placed(output, rows, batch, length), None


def attend_rows(
    query: Any, key: Any, value: Any, heads: Any, gates: Any, plan: Plan, options: Options
) -> Any:
    """The gated outputs `(R, dv)` of query rows `(R, d)`; the rest as for `attend`."""
    if 0 in (*heads.shape[:2], key.shape[1]):
        return tf.zeros((ops.shape(query)[0], value.shape[-1]), query.dtype)
    return _attend(plan.rows, False, query, key, value, heads, gates, options)


def _attend(
    rows: Rows,
    by_slot: bool,
    query: Any,
    key: Any,
    value: Any,
    heads: Any,
    gates: Any,
    options: Options,
) -> Any:
    """The gated outputs `(R, dv)` of query rows `(R, d)`, which are by slot, or else by head."""
    if not isinstance(options.causal_offset, int):
        offset = tf.cast(options.causal_offset, tf.int32)
        options = dataclasses.replace(options, causal_offset=offset)
    batch, length, num_slots = ops.shape(heads)
    num_heads = rows.taken.shape[-1]
    row_gates = taken(dense_gates(heads, gates, num_heads), rows)
    lists = _Lists(
        positions=rows.positions % length,
        starts=_starts(rows, by_slot, batch, length, num_slots),
        batch=batch,
        length=length,
        of_group=(num_slots if by_slot else num_heads) // key.shape[2],
    )

    @with_gradient
    def gated(query: Any, key: Any, value: Any, row_gates: Any) -> Any:
        tensors = _tensors(lists, query, key, value, options)
        output = _outputs(tensors)
        factors = tf.cast(row_gates[:, None], output.dtype)

        def gradient(by_gated: Any) -> list[Any]:
            gradients = _gradients(tensors, by_gated, output, row_gates)
            inputs = (query, key, value, row_gates)
            return [tf.cast(x, y.dtype) for x, y in zip(gradients, inputs, strict=True)]

        return tf.cast(output * factors, query.dtype), gradient

    return gated(query, key, value, row_gates)


class _Lists(NamedTuple):
    """Where the rows of each head, or slot, and batch entry are, in this order."""

    positions: Any  # (R,): those of the tokens
    starts: Any  # (lists + 1,)
    batch: Any
    length: Any  # T
    of_group: int  # lists of a batch entry and key/value head


def _starts(rows: Rows, by_slot: bool, batch: Any, length: Any, num_slots: int) -> Any:
    if by_slot:
        return length * tf.range(batch * num_slots + 1)
    by_entry = tf.reshape(rows.taken, (batch, length, rows.taken.shape[-1]))
    counts = tf.reduce_sum(tf.cast(by_entry, tf.int32), axis=1)
    return tf.concat([[0], tf.cumsum(tf.reshape(tf.transpose(counts), (-1,)))], axis=0)


class _Tensors(NamedTuple):
    """What tiles are cut from."""

    lists: _Lists
    query: Any  # (R, d)
    key: Any  # (B G, S, d)
    value: Any  # (B G, S, dv)
    groups: int
    options: Options


class _Tile(NamedTuple):
    """Some rows of one list with the keys that they see."""

    query: Any  # (n, d)
    key: Any  # (m, d)
    value: Any  # (m, dv)
    visible: Any  # (n, m), or None if all keys are
    has_key: Any  # (n, 1), or None if all rows see a key


def _tensors(lists: _Lists, query: Any, key: Any, value: Any, options: Options) -> _Tensors:
    dtype = tf.float64 if query.dtype == tf.float64 else tf.float32

    def by_group(x: Any) -> Any:
        batch, length, groups, width = ops.shape(x)
        x = tf.transpose(tf.cast(x, dtype), (0, 2, 1, 3))
        return tf.reshape(x, (batch * groups, length, width))

    tensors = (tf.cast(query, dtype), by_group(key), by_group(value))
    return _Tensors(lists, *tensors, key.shape[2], options)


def _weights(tile: _Tile, scale: float) -> Any:
    """The softmax of a tile's scores: in a row that sees no key, anything finite."""
    scores = tf.matmul(scale * tile.query, tile.key, transpose_b=True)
    if tile.visible is not None:
        scores = hide(scores, tile.visible)
    return tf.nn.softmax(scores)


def _where_key(tile: _Tile, x: Any) -> Any:
    """`x (n, ...)`, with zeros in the rows that see no key."""
    return x if tile.has_key is None else tf.where(tile.has_key, x, tf.zeros_like(x))


def _outputs(tensors: _Tensors) -> Any:
    """The ungated outputs `(R, dv)`."""

    def of_tile(tile: _Tile) -> Any:
        output = tf.matmul(_weights(tile, tensors.options.scale), tile.value)
        return [_where_key(tile, output)], []

    (output,), _ = _for_tiles(tensors, [], of_tile, [tensors.value.shape[-1]], [])
    return output


def _gradients(tensors: _Tensors, by_gated: Any, output: Any, row_gates: Any) -> tuple[Any, ...]:
    """The gradients by query rows, key, value and row gates, from that by the gated outputs."""
    scale = tensors.options.scale
    by_gated, row_gates = tf.cast(by_gated, output.dtype), tf.cast(row_gates, output.dtype)
    by_row_gates = tf.reduce_sum(by_gated * output, axis=-1)
    by_output = by_gated * row_gates[:, None]
    # The mean of the gradient by the weights, under the weights: that of the output, projected.
    means = (by_row_gates * row_gates)[:, None]

    def of_tile(tile: _Tile, by_output: Any, means: Any) -> Any:
        by_output = _where_key(tile, by_output)
        weights = _weights(tile, scale)
        by_weights = tf.matmul(by_output, tile.value, transpose_b=True)
        by_scores = scale * weights * (by_weights - means)
        # Sums of (d, S), since products that turn the scores over take longer.
        summands = [
            tf.matmul(tile.query, by_scores, transpose_a=True),
            tf.matmul(by_output, weights, transpose_a=True),
        ]
        return [tf.matmul(by_scores, tile.key)], summands

    widths = [tensors.key.shape[-1], tensors.value.shape[-1]]
    (by_query,), sums = _for_tiles(tensors, [by_output, means], of_tile, widths[:1], widths)
    return by_query, *sums, by_row_gates


def _for_tiles(
    tensors: _Tensors,
    inputs: list[Any],
    of_tile: Callable[..., tuple[list[Any], list[Any]]],
    widths: list[int],
    sum_widths: list[int],
) -> tuple[list[Any], list[Any]]:
    """`of_tile(tile, *inputs of its rows)`, which gives results of rows and summands, of all tiles.

    Args:
        tensors: What tiles are cut from.
        inputs: Further inputs `(R, ...)`, to be cut likewise.
        of_tile: From `n` rows and `m` keys to results `(n, width)` and summands `(width, m)`.
        widths: Those of the results.
        sum_widths: Those of the summands.

    Returns:
        The results `(R, width)`, and of every batch entry, key and key/value head the sums of the
        summands, `(B, S, G, width)`.
    """
    drive = _for_fixed_tiles if is_compiled_by_xla() else _for_fitting_tiles
    results, sums = drive(tensors, inputs, of_tile, widths, sum_widths)
    key_length = ops.shape(tensors.key)[1]
    by_group = (tensors.groups, tensors.lists.of_group, tensors.lists.batch)
    sums = [
        tf.reduce_sum(tf.reshape(x, (*by_group, width, key_length)), axis=1)
        for x, width in zip(sums, sum_widths, strict=True)
    ]
    return results, [tf.transpose(x, (1, 3, 0, 2)) for x in sums]


def _for_fitting_tiles(
    tensors: _Tensors, inputs: list[Any], of_tile: Any, widths: list[int], sum_widths: list[int]
) -> tuple[list[Any], list[Any]]:
    """`_for_tiles` where shapes may depend on values; the sums are `(lists, width, S)`."""
    dtype, starts = tensors.query.dtype, tensors.lists.starts
    num_lists, key_length = tf.shape(starts)[0] - 1, tf.shape(tensors.key)[1]
    offset, window = tensors.options.causal_offset, tensors.options.sliding_window

    def arrays(size: Any, shapes: list[Any]) -> list[tf.TensorArray]:
        return [
            tf.TensorArray(dtype, size, element_shape=shape, infer_shape=False) for shape in shapes
        ]

    def of_list(index: Any, results: Any, sums: Any) -> Any:
        start, count = starts[index], starts[index + 1] - starts[index]
        number = tf.maximum(-(-count // _LONGEST_TILE), 1)
        list_key, list_value, mask = _of_list(tensors, index)

        def of_part(part: Any) -> tuple[list[Any], list[Any]]:
            begin, end = start + part * count // number, start + (part + 1) * count // number
            positions = tensors.lists.positions[begin:end]
            # A list may be empty.
            ends = tf.concat([positions[:1], positions[-1:], [0, 0]], axis=0) + offset
            low, high = span_of_keys(
                ends[0], ends[1], key_length, tensors.options.is_causal, window
            )
            tile = _Tile(
                tensors.query[begin:end],
                list_key[low:high],
                list_value[low:high],
                *_visible(tensors.options, mask, positions, low, high),
            )
            of_rows, summands = of_tile(tile, *(x[begin:end] for x in inputs))
            padding = [[0, 0], [low, key_length - high]]
            return of_rows, [tf.pad(x, padding) for x in summands]

        def add_part(part: Any, of_parts: Any, list_sums: Any) -> Any:
            of_rows, summands = of_part(part)
            of_parts = [x.write(part, y) for x, y in zip(of_parts, of_rows, strict=True)]
            return part + 1, of_parts, [x + y for x, y in zip(list_sums, summands, strict=True)]

        if isinstance(tensors.lists.length, int) and tensors.lists.length <= _LONGEST_TILE:
            of_rows, list_sums = of_part(0)
        else:
            of_parts = arrays(number, [(None, width) for width in widths])
            list_sums = [tf.zeros((width, key_length), dtype) for width in sum_widths]
            _, of_parts, list_sums = tf.while_loop(
                lambda part, *_: part < number,
                add_part,
                (0, of_parts, list_sums),
                parallel_iterations=1,
            )
            of_rows = [x.concat() for x in of_parts]
        results = [x.write(index, y) for x, y in zip(results, of_rows, strict=True)]
        sums = [x.write(index, y) for x, y in zip(sums, list_sums, strict=True)]
        return index + 1, results, sums

    # One element more than there are lists, of nothing: arrays without any cannot be put together.
    results = arrays(num_lists + 1, [(None, width) for width in widths])
    sums = arrays(num_lists + 1, [(width, None) for width in sum_widths])
    _, results, sums = tf.while_loop(
        lambda index, *_: index < num_lists,
        of_list,
        (0, results, sums),
        parallel_iterations=_PARALLEL_LISTS,
    )
    ends = [tf.zeros((0, width), dtype) for width in widths]
    sum_ends = [tf.zeros((width, key_length), dtype) for width in sum_widths]
    return (
        [x.write(num_lists, y).concat() for x, y in zip(results, ends, strict=True)],
        [x.write(num_lists, y).stack()[:-1] for x, y in zip(sums, sum_ends, strict=True)],
    )


def _for_fixed_tiles(
    tensors: _Tensors, inputs: list[Any], of_tile: Any, widths: list[int], sum_widths: list[int]
) -> tuple[list[Any], list[Any]]:
    """`_for_tiles` where shapes are fixed; the sums are `(lists, width, S)`."""
    dtype, starts = tensors.query.dtype, tensors.lists.starts
    num_rows, num_lists = ops.shape(tensors.query)[0], ops.shape(starts)[0] - 1
    key_length = ops.shape(tensors.key)[1]

    def behind(x: Any) -> Any:
        """Rows with zeros behind them, for a tile that reaches over the end."""
        return tf.pad(x, [[0, _XLA_TILE], *[[0, 0]] * (len(x.shape) - 1)])

    all_query, all_positions = behind(tensors.query), behind(tensors.lists.positions)
    all_inputs = [behind(x) for x in inputs]

    def of_list(index: Any, results: Any, sums: Any) -> Any:
        stop = starts[index + 1]
        list_key, list_value, mask = _of_list(tensors, index)

        def of_part(begin: Any, results: Any, sums: Any) -> Any:
            positions = _cut(all_positions, begin)
            tile = _Tile(
                _cut(all_query, begin),
                list_key,
                list_value,
                *_visible(tensors.options, mask, positions, 0, key_length),
            )
            is_row = (begin + tf.range(_XLA_TILE) < stop)[:, None]
            cuts = [_cut(x, begin) for x in all_inputs]
            of_rows, summands = of_tile(
                tile, *(tf.where(is_row, x, tf.zeros_like(x)) for x in cuts)
            )
            results = [
                ops.slice_update(x, [begin, 0], y) for x, y in zip(results, of_rows, strict=True)
            ]
            return begin + _XLA_TILE, results, [x + y for x, y in zip(sums, summands, strict=True)]

        list_sums = [tf.zeros((width, key_length), dtype) for width in sum_widths]
        _, results, list_sums = tf.while_loop(
            lambda begin, *_: begin < stop, of_part, (starts[index], results, list_sums)
        )
        sums = [
            ops.slice_update(x, [index, 0, 0], y[None])
            for x, y in zip(sums, list_sums, strict=True)
        ]
        return index + 1, results, sums

    _, results, sums = tf.while_loop(
        lambda index, *_: index < num_lists,
        of_list,
        (
            0,
            [tf.zeros((num_rows + _XLA_TILE, width), dtype) for width in widths],
            [tf.zeros((num_lists, width, key_length), dtype) for width in sum_widths],
        ),
    )
    return [x[:num_rows] for x in results], sums


def _cut(x: Any, begin: Any) -> Any:
    """`_XLA_TILE` rows from `begin` on."""
    return tf.slice(x, [begin, *[0] * (len(x.shape) - 1)], [_XLA_TILE, *ops.shape(x)[1:]])


def _of_list(tensors: _Tensors, index: Any) -> tuple[Any, Any, Any]:
    """Key `(S, d)`, value `(S, dv)` and mask `(T or 1, S)` or `None` of a list."""
    batch = tensors.lists.batch
    entry, group = index % batch, index // batch // tensors.lists.of_group
    mask = tensors.options.mask
    if mask is not None:
        # Axes of length 1 may be known as such only when the graph runs.
        mask = mask[tf.minimum(entry, tf.shape(mask)[0] - 1), 0]
        mask = tf.broadcast_to(mask, (tf.shape(mask)[0], tf.shape(tensors.key)[1]))
    of_list = entry * tensors.groups + group
    return tensors.key[of_list], tensors.value[of_list], mask


def _visible(options: Options, mask: Any, positions: Any, low: Any, high: Any) -> tuple[Any, Any]:
    """Which of the keys `low` to `high` the queries at `positions` may see, and which see any.

    `None` for all. The comparisons are few: each takes as long as the scores' product.
    """
    query, key = positions[:, None] + options.causal_offset, tf.range(low, high)
    window, visible = options.sliding_window, []
    if mask is not None:
        mask = mask[:, low:high]
        if mask.shape[0] != 1:
            mask = tf.gather(mask, tf.minimum(positions, tf.shape(mask)[0] - 1))
        visible.append(mask)
    if options.is_causal:
        visible.append(query >= key)
    elif window is not None:
        visible.append(query > key - window)
    if window is not None:
        visible.append(query < key + window)
    if not visible:
        return None, None
    together = functools.reduce(tf.logical_and, visible)
    offset = options.causal_offset
    if options.is_causal and len(visible) == 1 and isinstance(offset, int) and offset >= 0:
        return together, None  # All see the first key.
    return together, tf.reduce_any(together, axis=-1, keepdims=True)
