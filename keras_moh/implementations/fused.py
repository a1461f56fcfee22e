"""Any backend: every head by the framework's fused attention, then multiplied by its gate.

It skips nothing, as the reference, but returns no scores: where the framework's attention is a
kernel of its own, as on PyTorch, that is faster, and nothing of size `T x S` is in memory.

TensorFlow has no such kernel on any device: there attention is made of two matrix products for each
key/value head, of all query vectors that share it. Keras's own repeats keys and values for every
query head instead, and goes over the scores once more to scale them. Forward and training step of 8
query heads on 4 key/value heads, `T = S = 1024`, took it 9.2 and 28 ms on two cores, and the
products here 7.7 and 23; at 4096 forward 115 and 95.
"""

from __future__ import annotations

from typing import Any

import keras
from keras import ops

from keras_moh.heads import dense_gates
from keras_moh.implementations.spec import AttentionSpec, Options, needs_reference
from keras_moh.masks import hide, merge, position_mask
from keras_moh.softmax import softmax


def unsupported_reason(spec: AttentionSpec) -> str | None:
    """Why this implementation cannot serve a call, or `None`."""
    reason = needs_reference(spec)
    if reason is not None:
        return reason
    if spec.dtype == "float16" and spec.device == "cpu":
        return "JAX's fused attention has no gradient in float16 on a CPU"
    if spec.dtype == "float64":
        return "Keras's fused attention computes in float32"
    return None


def attend(
    query: Any, key: Any, value: Any, heads: Any, gates: Any, options: Options
) -> tuple[Any, None]:
    """Attention of all heads, gated; see `reference.attend`."""
    return attend_slots(query, key, value, dense_gates(heads, gates, query.shape[2]), options), None


def attend_slots(query: Any, key: Any, value: Any, gates: Any, options: Options) -> Any:
    """The gated outputs `(B, T, K, dv)` of the query vectors `(B, T, K, d)` of the heads taken."""
    # Fused kernels cut the work in half by causality, if they are told of it and of nothing else.
    aligned = isinstance(options.causal_offset, int) and options.causal_offset == 0
    is_causal = options.is_causal and aligned and options.sliding_window is None
    is_causal = is_causal and options.mask is None
    mask = options.mask
    if not is_causal:
        positions = position_mask(
            ops.shape(query)[1],
            ops.shape(key)[1],
            options.is_causal,
            options.causal_offset,
            options.sliding_window,
        )
        mask = merge(mask, positions)
    attention = _products if keras.backend.backend() == "tensorflow" else _attention
    output = attention(query, key, value, mask, options.scale, is_causal)
    if mask is not None:
        has_key = ops.any(ops.swapaxes(mask, 1, 2), axis=-1, keepdims=True)
        output = ops.where(has_key, output, ops.zeros_like(output))
    return output * ops.cast(ops.expand_dims(gates, -1), output.dtype)


def _attention(query: Any, key: Any, value: Any, mask: Any, scale: float, is_causal: bool) -> Any:
    """`ops.dot_product_attention`, also where it wants one width for all, or more than one head."""
    if key.shape[2] == 1:
        key, value = (ops.repeat(x, query.shape[2], axis=2) for x in (key, value))
    key_dim, value_dim = key.shape[3], value.shape[3]
    # Features of 0 change neither scores nor outputs.
    query, key = (_widened(x, value_dim) for x in (query, key))
    output = ops.dot_product_attention(
        query, key, _widened(value, key_dim), mask=mask, scale=scale, is_causal=is_causal
    )
    return output[..., :value_dim]


def _products(query: Any, key: Any, value: Any, mask: Any, scale: float, is_causal: bool) -> Any:
    """`_attention`, as products of each key/value head with all query vectors that share it."""
    batch, length, heads, _ = ops.shape(query)
    groups = key.shape[2]
    if is_causal:
        mask = position_mask(length, ops.shape(key)[1], is_causal=True)
    rows = ops.transpose(query * scale, (0, 2, 1, 3))
    rows = ops.reshape(rows, (batch, groups, heads // groups * length, query.shape[3]))
    scores = ops.matmul(rows, ops.transpose(key, (0, 2, 3, 1)))
    shape = ops.shape(scores)
    scores = ops.reshape(ops.cast(scores, "float32"), (batch, heads, length, shape[-1]))
    if mask is not None:
        scores = hide(scores, mask)
    weights = ops.reshape(ops.cast(softmax(scores), value.dtype), shape)
    output = ops.matmul(weights, ops.transpose(value, (0, 2, 1, 3)))
    output = ops.reshape(output, (batch, heads, length, value.shape[3]))
    return ops.transpose(output, (0, 2, 1, 3))


def _widened(x: Any, width: int) -> Any:
    """`x (..., features)` with features of 0 up to the width, if it has fewer."""
    missing = width - x.shape[-1]
    return ops.pad(x, [*[(0, 0)] * (len(x.shape) - 1), (0, missing)]) if missing > 0 else x
