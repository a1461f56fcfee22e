"""The rows of routed attention: every (token, head) pair that was taken, list by list.

The tokens that took head `h` in batch entry `b` are one list, by position. The lists follow one
another by batch entry and head, without gaps: `B T K` rows in all, however unevenly the heads are
taken. Where every token takes equally many query heads of each key/value head, the slots that a
token fills serve as heads: a list for each of them, of all tokens. Kernels that pack the heads of a
key/value head have one list for each of those, by position and head.

Both directions between tokens and rows are gathers: scattering vectors is slow where XLA compiles
for a CPU. Single numbers are scattered, once, to say which places the rows have: sorting them would
take two to five times as long.
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
        starts: `(B H + 1,)`, by slots `(B K + 1,)`, by key/value heads `(B G + 1,)`, int32: the
            first row of each list, and the end of the last.
        taken: `(B, T, H)`, boolean: whether a head is taken.
        indices: `(B, T, H)`, int32: the row of each head that is taken, anything where it is not.
    """

    places: Any
    positions: Any
    starts: Any
    taken: Any
    indices: Any


def rows_of(heads: Any, num_heads: int, num_lists: int | None = None) -> Rows:
    """The rows of `heads (B, T, K)`, in `num_lists` of an entry: one for each head, or for several.

    Those of a list are neighbours, `num_heads / num_lists` of them.
    """
    batch, length, _ = ops.shape(heads)
    num_lists = num_heads if num_lists is None else num_lists
    shared = num_heads // num_lists

    taken = taken_heads(heads, num_heads)
    lists = ops.reshape(taken, (batch, length, num_lists, shared))
    lists = ops.reshape(ops.transpose(lists, (0, 2, 1, 3)), (batch * num_lists, length * shared))
    lists = ops.cast(lists, "int32")
    stops = ops.cumsum(ops.sum(lists, axis=-1))
    starts = ops.concatenate([ops.zeros((1,), dtype="int32"), ops.cast(stops, "int32")])
    indices = ops.expand_dims(starts[:-1], -1) + ops.cumsum(lists, axis=-1) - 1
    indices = ops.reshape(ops.cast(indices, "int32"), (batch, num_lists, length, shared))
    indices = ops.reshape(ops.transpose(indices, (0, 2, 1, 3)), (batch, length, num_heads))

    tokens = ops.reshape(ops.arange(batch * length, dtype="int32"), (batch, length, 1))
    pairs = ops.reshape(tokens * num_heads + heads, (-1,))
    of_pairs = ops.reshape(ops.take_along_axis(indices, heads, axis=-1), (-1, 1))
    places = ops.scatter_update(ops.zeros_like(pairs), of_pairs, pairs)
    return Rows(places, places // num_heads % length, starts, taken, indices)


def rows_by_slot(heads: Any, num_heads: int) -> Rows:
    """The rows of `heads (B, T, K)`, in a list for each batch entry and slot."""
    batch, length, num_slots = ops.shape(heads)
    entry = ops.reshape(ops.arange(batch, dtype="int32"), (-1, 1, 1))
    token = ops.reshape(ops.arange(length, dtype="int32"), (1, -1, 1))
    places = (entry * length + token) * num_heads + heads
    taken = taken_heads(heads, num_heads)
    slots = ops.cumsum(ops.cast(taken, "int32"), axis=-1) - 1
    return Rows(
        places=ops.reshape(ops.transpose(places, (0, 2, 1)), (-1,)),
        positions=ops.arange(batch * num_slots * length, dtype="int32") % length,
        starts=length * ops.arange(batch * num_slots + 1, dtype="int32"),
        taken=taken,
        indices=(entry * num_slots + ops.cast(slots, "int32")) * length + token,
    )


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


def end_of_keys(mask: Any) -> Any:
    """The end of the keys that a mask `(..., S)` leaves: `(...,)`, int32."""
    ends = ops.arange(1, ops.shape(mask)[-1] + 1, dtype="int32")
    return ops.max(ops.where(mask, ends, ops.zeros_like(ends)), axis=-1)


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
