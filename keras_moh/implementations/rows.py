"""The rows of routed attention: every (token, head) pair that was taken, list by list.

The tokens that took head `h` in batch entry `b` are one list, by position. The
lists follow one another by batch entry and head, without gaps: `B T K` rows in all, however
unevenly the heads are taken. Both directions between tokens and rows are gathers: scattering is
slow where XLA compiles for a CPU.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from keras import ops

from keras_moh.heads import taken_heads


class Rows(NamedTuple):
    """Where the rows are.

    Attributes:
        places: `(R,)`, int32: of each row its index into `(B, T, H)`.
        positions: `(R,)`, int32: of each row the position `t` of its token.
        starts: `(B H + 1,)`, int32: the first row of each list, and the end of the last.
        taken: `(B, T, H)`, boolean: whether a head is taken.
        indices: `(B, T, H)`, int32: the row of each head that is taken, anything where it is not.
    """

    places: Any
    positions: Any
    starts: Any
    taken: Any
    indices: Any


def rows_of(heads: Any, num_heads: int) -> Rows:
    """The rows of `heads (B, T, K)`."""
    batch, length, _ = ops.shape(heads)
    entry = ops.reshape(ops.arange(batch, dtype="int32"), (-1, 1, 1))
    token = ops.reshape(ops.arange(length, dtype="int32"), (1, -1, 1))
    keys = ops.sort(ops.reshape((entry * num_heads + heads) * length + token, (-1,)))
    positions = keys % length
    of_list = keys // length
    places = (of_list // num_heads * length + positions) * num_heads + of_list % num_heads

    taken = taken_heads(heads, num_heads)
    lists = ops.reshape(ops.transpose(taken, (0, 2, 1)), (batch * num_heads, length))
    lists = ops.cast(lists, "int32")
    stops = ops.cumsum(ops.sum(lists, axis=-1))
    starts = ops.concatenate([ops.zeros((1,), dtype="int32"), ops.cast(stops, "int32")])
    indices = ops.expand_dims(starts[:-1], -1) + ops.cumsum(lists, axis=-1) - 1
    indices = ops.reshape(ops.cast(indices, "int32"), (batch, num_heads, length))
    return Rows(places, positions, starts, taken, ops.transpose(indices, (0, 2, 1)))


def span_of_keys(
    first: Any, last: Any, key_length: Any, is_causal: bool, sliding_window: int | None
) -> tuple[Any, Any]:
    """The range of keys of which queries at positions `first` to `last` may see any."""
    low, high = 0, key_length
    if sliding_window is not None:
        low, high = first - sliding_window + 1, last + sliding_window
    if is_causal:
        high = ops.minimum(high, last + 1)
    low = ops.minimum(ops.maximum(low, 0), key_length)
    return low, ops.minimum(ops.maximum(high, low), key_length)


def take(dense: Any, rows: Rows) -> Any:
    """The rows `(R, ...)` of `(B, T, H, ...)`."""
    shape = ops.shape(dense)
    flat = ops.reshape(dense, (shape[0] * shape[1] * shape[2], *shape[3:]))
    return ops.take(flat, rows.places, axis=0)


def place(values: Any, rows: Rows) -> Any:
    """Rows `(R, ...)` as `(B, T, H, ...)`, with zeros where a head is not taken."""
    dense = ops.take(values, ops.maximum(rows.indices, 0), axis=0)
    taken = ops.reshape(rows.taken, (*ops.shape(rows.taken), *[1] * (len(values.shape) - 1)))
    return ops.where(taken, dense, ops.zeros_like(dense))
