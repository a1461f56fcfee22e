r"""Triton: flash attention of only the rows that took a head, forward and backward.

A *row* is a slot `k` of a token `t` in batch entry `b`: the query vector of the head that it holds.
The rows of an entry whose heads share the key/value head `g` are one list, by position. A tile of a
list is `BLOCK_M` neighbouring rows: of whichever heads, they read the same keys and values, so
heads that share them are packed for free. Gates and outputs are of rows; queries are gathered from
their `(B, T, H, d)`, and gated outputs go to their place in `(B, T, H, dv)`.

With scores $s_{ij}$, their logarithmic sums $l_i$ and gates $g_i$, and $\dot x$ for the gradient by
$x$, the kernels compute

$$ p_{ij} = e^{s_{ij} - l_i}, \quad a_i = \sum_j p_{ij} v_j, \quad o_i = g_i a_i, $$
$$ \dot g_i = \dot o_i \cdot a_i, \quad
   \dot v_j = \sum_i g_i p_{ij} \dot o_i, \quad
   \dot s_{ij} = g_i p_{ij} (\dot o_i \cdot v_j - \dot g_i), $$
$$ \dot q_i = \mathrm{scale} \sum_j \dot s_{ij} k_j, \quad
   \dot k_j = \mathrm{scale} \sum_i \dot s_{ij} q_i. $$

Nowhere is anything divided by a gate, which may be 0. A list is one program's per tile of rows
(forward, and by queries and gates) or per tile of keys (by keys and values), so no two programs
write to one place: no atomics, and results are the same bit for bit every time.

Sums are in float32. Scores are in units of `log2(e)`, for `exp2`. A program reads the keys between
the first and the last that any of its rows may see by position, and none that a mask hides from all
of them, whatever they hold.

The kernels know nothing of a framework. Their arguments, contiguous unless strides are given:

- `query (B, T, H, D)`, `key (B, S, G, D)`, `value (B, S, G, DV)`, with strides of keys and values
  for all axes but the last, which is contiguous.
- `heads (B, T, K)`, int32, and `gates (B, T, K)`: what each slot holds.
- `rows (B, T K)`, int32: the rows of each entry as numbers `(g T + t) K + k`, ascending.
- `lists (B, G, 2)`, int32: the first row of each list, and its end.
- `mask`: boolean, with strides by entry, token and key, or `None`. `MASK` says what it is of:
  `"none"`, `"keys"` (alike for all tokens) or `"pairs"`.
- `key_ends (B,)`, int32: the end of the keys that a mask of keys leaves; else `None`.
- `causal_offset`, int32: the position of the first token; `None` if no position matters.
- `WINDOW`: the width of the sliding window, or `None`.
- `attended (B, T, K, DV)` and `log_sums (B, T, K)`, float32: $a$ and $l$, kept for the gradients.

A step of decoding has few rows and many keys. There the keys of a tile are split among programs,
each of which leaves its own $a^{(n)}$ and $l^{(n)}$, and another kernel combines them:

$$ l = \ln \sum_n e^{l^{(n)}}, \quad a = \sum_n e^{l^{(n)} - l} a^{(n)}. $$
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
# Numbers of no address, for whose multiples of 16 no kernel need be compiled of its own.
COUNTS = ("tiles", "splits")


@triton.jit(do_not_specialize=COUNTS)
def forward_kernel(
    query,
    key,
    value,
    heads,
    gates,
    rows,
    lists,
    mask,
    key_ends,
    causal_offset,
    attended,
    log_sums,
    output,
    scale,
    T,
    S,
    tiles,
    splits,
    key_by_entry,
    key_by_number,
    key_by_group,
    value_by_entry,
    value_by_number,
    value_by_group,
    mask_by_entry,
    mask_by_token,
    mask_by_number,
    H: tl.constexpr,
    G: tl.constexpr,
    K: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    MASK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):
    """`attended`, `log_sums` and `output` of a tile of rows. Grid: `(B tiles, splits)`.

    With an `output` of `None` there are an `attended (B, T, K, splits, DV)`, float32, and
    `log_sums (B, T, K, splits)` of each part of the keys, `-inf` where it has none that a row sees.
    """
    entry, group, first_row, end_row = _tile_of_rows(lists, tiles, G, BLOCK_M)
    if first_row >= end_row:
        return
    rows += entry * T * K
    key += entry * key_by_entry + group * key_by_group
    value += entry * value_by_entry + group * value_by_group
    mask = _of_entry(mask, entry, mask_by_entry)
    exists, token, slot, place, offset, start, stop, start_of_all, stop_of_all = _load_tile(
        key_ends,
        causal_offset,
        *(heads, rows, entry, group, first_row, end_row, T, S),
        *(H, K, IS_CAUSAL, WINDOW, MASK, BLOCK_M),
    )
    part = tl.program_id(1)
    if output is None:
        of_part = tl.cdiv(tl.cdiv(stop - start, BLOCK_N), splits) * BLOCK_N
        start += part * of_part
        stop = tl.minimum(stop, start + of_part)

    q = _load(query, place, D, exists, D, BLOCK_D)
    accumulated = tl.zeros((BLOCK_M, BLOCK_DV), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    maximum = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    for begin in range(start, stop, BLOCK_N):
        _, v, scores = _load_keys(
            mask,
            *(q, key, value, token, offset, begin, stop, start_of_all, stop_of_all, scale),
            *(key_by_number, value_by_number, mask_by_token, mask_by_number),
            *(D, DV, IS_CAUSAL, WINDOW, MASK, BLOCK_N, BLOCK_D, BLOCK_DV),
        )
        new_maximum = tl.maximum(maximum, tl.max(scores, 1))
        # While a row has seen no key, its maximum is no number to subtract.
        shift = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
        weights = tl.exp2(scores - shift[:, None])
        decay = tl.exp2(maximum - shift)
        total = total * decay + tl.sum(weights, 1)
        accumulated = accumulated * decay[:, None] + _dot(weights.to(v.dtype), v)
        maximum = new_maximum

    has_key = total > 0
    total = tl.where(has_key, total, 1.0)
    accumulated = accumulated / total[:, None]
    log_sum = maximum + tl.log2(total)
    if output is None:
        slot = slot * splits + part
    else:
        log_sum = tl.where(has_key, log_sum, 0.0)
        gate = tl.load(gates + slot, exists, 0.0).to(tl.float32)
        _store(output, place, DV, exists, accumulated * gate[:, None], DV, BLOCK_DV)
    _store(attended, slot, DV, exists, accumulated, DV, BLOCK_DV)
    tl.store(log_sums + slot, log_sum, exists)


@triton.jit(do_not_specialize=COUNTS)
def combine_kernel(
    heads,
    gates,
    part_attended,
    part_log_sums,
    attended,
    log_sums,
    output,
    splits,
    H: tl.constexpr,
    K: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):
    """`attended`, `log_sums` and `output` of a slot, out of those of its parts. Grid: `(B T K,)`.

    The parts are added `BLOCK_N` at once.
    """
    slot = tl.program_id(0).to(tl.int64)
    maximum = float("-inf")
    for first in range(0, splits, BLOCK_N):
        part = first + tl.arange(0, BLOCK_N)
        log_sum = tl.load(part_log_sums + slot * splits + part, part < splits, float("-inf"))
        maximum = tl.maximum(maximum, tl.max(log_sum, 0))
    shift = tl.where(maximum == float("-inf"), 0.0, maximum)
    accumulated = tl.zeros((BLOCK_DV,), tl.float32)
    total = 0.0
    for first in range(0, splits, BLOCK_N):
        part = first + tl.arange(0, BLOCK_N)
        log_sum = tl.load(part_log_sums + slot * splits + part, part < splits, float("-inf"))
        weight = tl.exp2(log_sum - shift)
        a = _load(part_attended, slot * splits + part, DV, part < splits, DV, BLOCK_DV)
        accumulated += tl.sum(weight[:, None] * a, 0)
        total += tl.sum(weight, 0)

    total = tl.where(total > 0, total, 1.0)
    accumulated = accumulated / total
    place = slot // K * H + tl.load(heads + slot)
    gate = tl.load(gates + slot).to(tl.float32)
    feature = tl.arange(0, BLOCK_DV)
    tl.store(output + place * DV + feature, accumulated * gate, feature < DV)
    tl.store(attended + slot * DV + feature, accumulated, feature < DV)
    tl.store(log_sums + slot, shift + tl.log2(total))


@triton.jit(do_not_specialize=COUNTS)
def backward_query_kernel(
    query,
    key,
    value,
    heads,
    gates,
    rows,
    lists,
    mask,
    key_ends,
    causal_offset,
    attended,
    log_sums,
    by_output,
    by_query,
    by_gates,
    scale,
    T,
    S,
    tiles,
    key_by_entry,
    key_by_number,
    key_by_group,
    value_by_entry,
    value_by_number,
    value_by_group,
    mask_by_entry,
    mask_by_token,
    mask_by_number,
    H: tl.constexpr,
    G: tl.constexpr,
    K: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    MASK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):
    """The gradients by the queries and gates of a tile of rows. Grid: `(B tiles,)`."""
    entry, group, first_row, end_row = _tile_of_rows(lists, tiles, G, BLOCK_M)
    if first_row >= end_row:
        return
    rows += entry * T * K
    key += entry * key_by_entry + group * key_by_group
    value += entry * value_by_entry + group * value_by_group
    mask = _of_entry(mask, entry, mask_by_entry)
    exists, token, slot, place, offset, start, stop, start_of_all, stop_of_all = _load_tile(
        key_ends,
        causal_offset,
        *(heads, rows, entry, group, first_row, end_row, T, S),
        *(H, K, IS_CAUSAL, WINDOW, MASK, BLOCK_M),
    )

    q = _load(query, place, D, exists, D, BLOCK_D)
    by_o = _load(by_output, place, DV, exists, DV, BLOCK_DV)
    a = _load(attended, slot, DV, exists, DV, BLOCK_DV)
    by_gate = tl.sum(by_o.to(tl.float32) * a.to(tl.float32), 1)
    tl.store(by_gates + slot, by_gate, exists)
    log_sum = tl.load(log_sums + slot, exists, 0.0)
    by_q = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    for begin in range(start, stop, BLOCK_N):
        k, v, scores = _load_keys(
            mask,
            *(q, key, value, token, offset, begin, stop, start_of_all, stop_of_all, scale),
            *(key_by_number, value_by_number, mask_by_token, mask_by_number),
            *(D, DV, IS_CAUSAL, WINDOW, MASK, BLOCK_N, BLOCK_D, BLOCK_DV),
        )
        weights = tl.exp2(scores - log_sum[:, None])
        by_scores = weights * (_dot(by_o, tl.trans(v)) - by_gate[:, None])
        by_q += _dot(by_scores.to(k.dtype), k)

    factor = scale * tl.load(gates + slot, exists, 0.0).to(tl.float32)
    _store(by_query, place, D, exists, by_q * factor[:, None], D, BLOCK_D)


@triton.jit(do_not_specialize=COUNTS)
def backward_key_value_kernel(
    query,
    key,
    value,
    heads,
    gates,
    rows,
    lists,
    mask,
    key_ends,
    causal_offset,
    log_sums,
    by_output,
    by_gates,
    spans,
    by_key,
    by_value,
    scale,
    T,
    S,
    tiles,
    key_by_entry,
    key_by_number,
    key_by_group,
    value_by_entry,
    value_by_number,
    value_by_group,
    mask_by_entry,
    mask_by_token,
    mask_by_number,
    H: tl.constexpr,
    G: tl.constexpr,
    K: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    MASK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):
    """The gradients by a tile of keys and values, contiguous. Grid: `(B G tiles,)`.

    `spans (B, G, tiles, 2)`, int32, has the first row and the end of those that may see a tile.
    """
    tile = tl.program_id(0) % tiles
    group = tl.program_id(0) // tiles % G
    entry = (tl.program_id(0) // tiles // G).to(tl.int64)
    spans += 2 * ((entry * G + group) * tiles + tile)
    first_row, end_row = tl.load(spans), tl.load(spans + 1)
    rows += entry * T * K
    key += entry * key_by_entry + group * key_by_group
    value += entry * value_by_entry + group * value_by_group
    mask = _of_entry(mask, entry, mask_by_entry)
    offset = _load_or(causal_offset, 0, 0)
    key_end = _load_or(key_ends, entry, S)

    begin = tile * BLOCK_N
    number = begin + tl.arange(0, BLOCK_N)
    start, stop = _keys_of_some(offset, offset + T - 1, key_end, IS_CAUSAL, WINDOW)
    end_row = tl.where(begin < stop, end_row, first_row)
    loaded = _is_key(mask, number, stop, mask_by_number, MASK) & (number >= start)
    k = _load(key, number, key_by_number, loaded, D, BLOCK_D)
    v = _load(value, number, value_by_number, loaded, DV, BLOCK_DV)
    by_k = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    by_v = tl.zeros((BLOCK_N, BLOCK_DV), tl.float32)
    for first_of_tile in range(first_row, end_row, BLOCK_M):
        exists, token, slot, place = _load_rows(
            heads, rows, entry, group, first_of_tile, end_row, T, H, K, BLOCK_M
        )
        q = _load(query, place, D, exists, D, BLOCK_D)
        by_o = _load(by_output, place, DV, exists, DV, BLOCK_DV)
        gate = tl.load(gates + slot, exists, 0.0).to(tl.float32)
        by_gate = tl.load(by_gates + slot, exists, 0.0).to(tl.float32)
        log_sum = tl.load(log_sums + slot, exists, 0.0)

        # Keys by rows, so that no product needs its left factor transposed.
        scores = _dot(k, tl.trans(q)) * (scale * LOG2_E)
        allowed = loaded[:, None]
        if MASK == "pairs":
            allowed = _is_pair(
                mask, token[None, :], number[:, None], stop, mask_by_token, mask_by_number
            )
        first, last = _positions(rows, group, first_of_tile, end_row, offset, T, K, BLOCK_M)
        start_of_all, stop_of_all = _keys_of_all(first, last, key_end, IS_CAUSAL, WINDOW, MASK)
        if (begin < start_of_all) | (begin + BLOCK_N > stop_of_all):
            near = _is_near(token[None, :] + offset, number[:, None], IS_CAUSAL, WINDOW)
            scores = tl.where(near & allowed, scores, float("-inf"))
        weights = tl.exp2(scores - log_sum[None, :]) * gate[None, :]
        by_v += _dot(weights.to(by_o.dtype), by_o)
        by_scores = weights * (_dot(v, tl.trans(by_o)) - by_gate[None, :])
        if MASK == "pairs":  # Here a key that no row sees was loaded, whatever it holds.
            by_scores = tl.where(allowed, by_scores, 0.0)
        by_k += _dot(by_scores.to(q.dtype), q)

    place = (entry * S + number) * G + group
    exists = number < S
    _store(by_key, place, D, exists, by_k * scale, D, BLOCK_D)
    _store(by_value, place, DV, exists, by_v, DV, BLOCK_DV)


@triton.jit
def _tile_of_rows(lists, tiles, G: tl.constexpr, BLOCK_M: tl.constexpr):
    """This program's entry and list, its tile's first row and the list's end; no tile: 0 and 0.

    An entry has at most `(T K + G (BLOCK_M - 1)) // BLOCK_M` tiles, however its rows are spread,
    and no more than rows.
    """
    entry = (tl.program_id(0) // tiles).to(tl.int64)
    # The last tiles first: under causality they have the most keys, and the short ones fill up.
    tile = tiles - 1 - tl.program_id(0) % tiles
    WIDTH: tl.constexpr = triton.next_power_of_2(G)
    group = tl.arange(0, WIDTH)
    pointers = lists + 2 * (entry * G + group)
    first_row = tl.load(pointers, group < G, 0)
    end_row = tl.load(pointers + 1, group < G, 0)
    of_list = tl.cdiv(end_row - first_row, BLOCK_M)
    end_tile = tl.cumsum(of_list, 0)
    is_list = (tile < end_tile) & (tile >= end_tile - of_list)
    first_row += (tile - (end_tile - of_list)) * BLOCK_M
    return (
        entry,
        tl.sum(tl.where(is_list, group, 0), 0),
        tl.sum(tl.where(is_list, first_row, 0), 0),
        tl.sum(tl.where(is_list, end_row, 0), 0),
    )


@triton.jit
def _positions(rows, group, first_row, end_row, offset, T, K: tl.constexpr, BLOCK_M: tl.constexpr):
    """The positions of the first and the last row of a tile."""
    last_row = tl.minimum(first_row + BLOCK_M, end_row) - 1
    first = tl.load(rows + first_row) // K - group * T
    last = tl.load(rows + last_row) // K - group * T
    return first + offset, last + offset


@triton.jit
def _load_rows(
    heads,
    rows,
    entry,
    group,
    first_row,
    end_row,
    T,
    H: tl.constexpr,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """Of rows: whether they exist, their tokens, and their places in `(B, T, K)`, `(B, T, H)`."""
    row = first_row + tl.arange(0, BLOCK_M)
    exists = row < end_row
    number = tl.load(rows + row, exists, group * T * K)  # that of token 0
    token = number // K - group * T
    slot = (entry * T + token) * K + number % K
    head = tl.load(heads + slot, exists, 0)
    return exists, token, slot, (entry * T + token) * H + head


@triton.jit
def _load_keys(
    mask,
    q,
    key,
    value,
    token,
    offset,
    begin,
    stop,
    start_of_all,
    stop_of_all,
    scale,
    key_by_number,
    value_by_number,
    mask_by_token,
    mask_by_number,
    D: tl.constexpr,
    DV: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    MASK: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):
    """The keys and values from `begin` on, and their scores with the queries: `-inf` if unseen."""
    number = begin + tl.arange(0, BLOCK_N)
    loaded = _is_key(mask, number, stop, mask_by_number, MASK)
    allowed = loaded[None, :]
    if MASK == "pairs":
        allowed = _is_pair(
            mask, token[:, None], number[None, :], stop, mask_by_token, mask_by_number
        )
        loaded = tl.max(allowed.to(tl.int32), 0) > 0
    k = _load(key, number, key_by_number, loaded, D, BLOCK_D)
    v = _load(value, number, value_by_number, loaded, DV, BLOCK_DV)
    scores = _dot(q, tl.trans(k)) * (scale * LOG2_E)
    if (begin < start_of_all) | (begin + BLOCK_N > stop_of_all):
        near = _is_near(token[:, None] + offset, number[None, :], IS_CAUSAL, WINDOW)
        scores = tl.where(near & allowed, scores, float("-inf"))
    return k, v, scores


@triton.jit
def _load_tile(
    key_ends,
    causal_offset,
    heads,
    rows,
    entry,
    group,
    first_row,
    end_row,
    T,
    S,
    H: tl.constexpr,
    K: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    MASK: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """The rows of a tile as `_load_rows`, the offset, and keys that some and that all may see."""
    exists, token, slot, place = _load_rows(
        heads, rows, entry, group, first_row, end_row, T, H, K, BLOCK_M
    )
    offset = _load_or(causal_offset, 0, 0)
    key_end = _load_or(key_ends, entry, S)
    first, last = _positions(rows, group, first_row, end_row, offset, T, K, BLOCK_M)
    start, stop = _keys_of_some(first, last, key_end, IS_CAUSAL, WINDOW)
    start_of_all, stop_of_all = _keys_of_all(first, last, key_end, IS_CAUSAL, WINDOW, MASK)
    return exists, token, slot, place, offset, start, stop, start_of_all, stop_of_all


@triton.jit
def _keys_of_some(first, last, end, IS_CAUSAL: tl.constexpr, WINDOW: tl.constexpr):
    """The range of keys of which positions `first` to `last` may see any."""
    start, stop = 0, end
    if WINDOW is not None:
        start = tl.maximum(first - WINDOW + 1, 0)
        stop = tl.minimum(stop, last + WINDOW)
    if IS_CAUSAL:
        stop = tl.minimum(stop, last + 1)
    return start, stop


@triton.jit
def _keys_of_all(
    first, last, end, IS_CAUSAL: tl.constexpr, WINDOW: tl.constexpr, MASK: tl.constexpr
):
    """The range of keys that positions `first` to `last` all see: with a mask, none for sure."""
    start, stop = 0, end
    if WINDOW is not None:
        start = last - WINDOW + 1
        stop = tl.minimum(stop, first + WINDOW)
    if IS_CAUSAL:
        stop = tl.minimum(stop, first + 1)
    if MASK != "none":
        stop = 0
    return start, stop


@triton.jit
def _is_near(position, number, IS_CAUSAL: tl.constexpr, WINDOW: tl.constexpr):
    """Whether queries at these positions see keys of these numbers, as far as positions tell."""
    distance = position - number
    near = distance >= 0 if IS_CAUSAL else distance == distance
    if WINDOW is not None:
        near &= (distance < WINDOW) & (distance > -WINDOW)
    return near


@triton.jit
def _is_key(mask, number, stop, mask_by_number, MASK: tl.constexpr):
    """Whether the numbers are below `stop`, and left by a mask of keys."""
    is_key = number < stop
    if MASK == "keys":
        is_key = tl.load(mask + number * mask_by_number, is_key, False)
    return is_key


@triton.jit
def _is_pair(mask, token, number, stop, mask_by_token, mask_by_number):
    """Whether the numbers are below `stop`, and a mask of pairs leaves them to the tokens."""
    pointers = mask + token.to(tl.int64) * mask_by_token + number * mask_by_number
    return tl.load(pointers, (number < stop) & (token >= 0), False)


@triton.jit
def _of_entry(mask, entry, mask_by_entry):
    """The mask of an entry, or `None`."""
    if mask is not None:
        mask += entry * mask_by_entry
    return mask


@triton.jit
def _load_or(pointer, index, default):
    """A number of those at `pointer`, or the default if there are none."""
    return default if pointer is None else tl.load(pointer + index)


@triton.jit
def _load(pointer, number, stride, exists, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """The vectors of these numbers, with 0 where none exists, and up to the block's width."""
    feature = tl.arange(0, BLOCK)
    pointers = pointer + number.to(tl.int64)[:, None] * stride + feature[None, :]
    return tl.load(pointers, exists[:, None] & (feature < WIDTH)[None, :], 0.0)


@triton.jit
def _store(pointer, number, stride, exists, values, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    feature = tl.arange(0, BLOCK)
    pointers = pointer + number.to(tl.int64)[:, None] * stride + feature[None, :]
    tl.store(pointers, values, exists[:, None] & (feature < WIDTH)[None, :])


@triton.jit
def _dot(a, b):
    """The product in float32, exact to its rounding."""
    if INTERPRETED:  # which multiplies the bits of bfloat16
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, input_precision="ieee")
