"""TensorFlow: the rows of routed attention, and projections of nothing but them.

The tokens that took a head are one list of rows, over all batch entries together, as if they were
one (see `rows.py`). Lists differ in length, so that no row is computed in vain: hence a call cannot
be compiled by XLA, whose shapes are fixed.

The projections into and out of the heads are a product for each head, of its rows alone, and one
for the first heads as long as all tokens took them. So is their backward pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import tensorflow as tf
from keras import ops

from keras_moh.implementations import rows as rows_of_one
from keras_moh.implementations.rows import Rows


class Plan(NamedTuple):
    """Which rows there are, for heads `(B, T, K)`.

    Attributes:
        rows: The rows of all `N = B T` tokens as of one batch entry, by head and token.
        leading: Number of the first heads that all tokens took.
        sources: `(R',)`: the rows of the other heads, by token and head, less those of the first.
        targets: `(R',)`: their tokens.
        batch: `B`.
        length: `T`.
    """

    rows: Rows
    leading: Any
    sources: Any
    targets: Any
    batch: Any
    length: Any

    @property
    def places(self) -> Any:
        """`(R,)`: each row's index into `(B, T, H)`."""
        return self.rows.places


def with_gradient(function: Callable[..., tuple[Any, Callable[[Any], Any]]]) -> Callable[..., Any]:
    """`tf.custom_gradient` of one output, whose arguments and gradient are dense tensors.

    Of variables it would want to know more, and of a gather it would be given the slices.
    """

    @tf.custom_gradient
    def differentiable(*tensors: Any) -> tuple[Any, Callable[[Any], Any]]:
        result, gradient = function(*tensors)
        return result, lambda by_result: gradient(tf.convert_to_tensor(by_result))

    return lambda *arguments: differentiable(*map(tf.convert_to_tensor, arguments))


def as_one_entry(heads: Any) -> Any:
    """`(B, T, K)` as `(1, B T, K)`."""
    batch, length, num_slots = ops.shape(heads)
    return tf.reshape(heads, (1, batch * length, num_slots))


def taken(dense: Any, rows: Rows) -> Any:
    """The rows `(R, ...)` of `(B, T, H, ...)`, as `rows.take`, with a gather as gradient too."""
    shape = ops.shape(dense)

    @with_gradient
    def of_dense(dense: Any) -> Any:
        def gradient(by_rows: Any) -> Any:
            return tf.reshape(rows_of_one.place(by_rows, rows), shape)

        return rows_of_one.take(dense, rows), gradient

    return of_dense(dense)


def placed(values: Any, rows: Rows, batch: Any, length: Any) -> Any:
    """Rows `(R, ...)` as `(B, T, H, ...)`, as `rows.place`, with a gather as gradient too."""

    @with_gradient
    def of_rows(values: Any) -> Any:
        dense = rows_of_one.place(values, rows)
        dense = tf.reshape(dense, (batch, length, *ops.shape(dense)[2:]))
        return dense, lambda by_dense: rows_of_one.take(by_dense, rows)

    return of_rows(values)


def plan(heads: Any, num_heads: int) -> Plan:
    """The rows of `heads (B, T, K)`, by head, batch entry and position."""
    batch, length, _ = ops.shape(heads)
    rows = rows_of_one.rows_of(as_one_entry(heads), num_heads)
    counts = rows.starts[1:] - rows.starts[:-1]
    is_full = tf.cast(tf.equal(counts, batch * length), tf.int32)
    leading = tf.reduce_sum(tf.math.cumprod(is_full))
    is_taken, indices = rows.taken[0, :, leading:], rows.indices[0, :, leading:]
    return Plan(
        rows=rows,
        leading=leading,
        sources=tf.boolean_mask(indices, is_taken) - rows.starts[leading],
        targets=tf.cast(tf.where(is_taken)[:, 0], tf.int32),
        batch=batch,
        length=length,
    )


def positions(plan: Plan) -> Any:
    """The position `t` of each row's token, `(R,)`."""
    return plan.rows.positions % plan.length


def take(dense: Any, plan: Plan) -> Any:
    """The rows `(R, d)` of `(B, T, H, d)`."""
    return taken(dense, plan.rows)


def project(x: Any, kernel: Any, bias: Any, plan: Plan) -> Any:
    """The rows `(R, d)` of `x (B, T, D)` times `kernel (D, H, d)`, with bias `(H, d)` or `None`."""

    @with_gradient
    def projected(tokens: Any, kernel: Any, *biases: Any) -> Any:
        def gradient(by_rows: Any) -> tuple[Any, ...]:
            by_tokens = _combined(by_rows, kernel, 1, plan)
            by_kernel = _by_kernel(tokens, by_rows, 1, plan)
            return by_tokens, by_kernel, *(_sums(by_rows, plan) for _ in biases)

        return _projected(tokens, kernel, 1, plan, *biases), gradient

    tokens = tf.reshape(x, (plan.batch * plan.length, x.shape[-1]))
    return projected(tokens, kernel, *([] if bias is None else [bias]))


def combine(rows: Any, kernel: Any, bias: Any, plan: Plan) -> Any:
    """The sum over heads of rows `(R, dv)` times `kernel (H, dv, *shape)`: `(B, T, *shape)`.

    With bias, of that shape, or `None`.
    """

    @with_gradient
    def combined(rows: Any, kernel: Any) -> Any:
        def gradient(by_output: Any) -> tuple[Any, Any]:
            by_rows = _projected(by_output, kernel, 0, plan)
            return by_rows, _by_kernel(by_output, rows, 0, plan)

        return _combined(rows, kernel, 0, plan), gradient

    output = combined(rows, tf.reshape(kernel, (*kernel.shape[:2], math.prod(kernel.shape[2:]))))
    output = tf.reshape(output, (plan.batch, plan.length, *kernel.shape[2:]))
    return output if bias is None else output + bias


# Below a kernel is `(D, H, d)`, with the heads on axis 1, or `(H, d, D)`, with them on axis 0:
# sliced as it is, since to turn it over would take as long as what is saved.


def _projected(tokens: Any, kernel: Any, axis: int, plan: Plan, bias: Any = None) -> Any:
    """The rows `(R, d)` of `tokens (N, D)` times a kernel, with bias `(H, d)`."""

    def product(tokens: Any, heads: slice) -> Any:
        result = tf.matmul(tokens, _matrix(kernel, axis, heads), transpose_b=axis == 0)
        return result if bias is None else result + tf.reshape(bias[heads], (-1,))

    width = kernel.shape[1 + axis]
    of_leading = tf.reshape(product(tokens, slice(plan.leading)), (-1, plan.leading, width))
    of_leading = tf.reshape(tf.transpose(of_leading, (1, 0, 2)), (-1, width))
    of_others = _for_others(
        lambda head, positions, _: product(tf.gather(tokens, positions), slice(head, head + 1)),
        plan,
    )
    return tf.concat([of_leading, *of_others], axis=0)


def _combined(rows: Any, kernel: Any, axis: int, plan: Plan) -> Any:
    """The sums `(N, D)` over heads of `rows (R, d)` times a kernel."""

    def product(rows: Any, heads: slice) -> Any:
        return tf.matmul(rows, _matrix(kernel, axis, heads), transpose_b=axis == 1)

    products = _for_others(
        lambda head, _, of_head: product(rows[of_head], slice(head, head + 1)), plan
    )
    # One pass over the products, by token, where adding them up head by head would take several.
    of_others = tf.raw_ops.SparseSegmentSumWithNumSegments(
        data=tf.concat(products, axis=0),
        indices=plan.sources,
        segment_ids=plan.targets,
        num_segments=plan.batch * plan.length,
    )
    return product(_leading_rows(rows, plan), slice(plan.leading)) + of_others


def _by_kernel(tokens: Any, rows: Any, axis: int, plan: Plan) -> Any:
    """The gradient by a kernel between `tokens (N, D)` and `rows (R, d)`."""
    features, width = tokens.shape[-1], rows.shape[-1]
    shape = (features, -1, width) if axis == 1 else (-1, width, features)

    def product(tokens: Any, rows: Any) -> Any:
        factors = (tokens, rows) if axis == 1 else (rows, tokens)
        return tf.reshape(tf.matmul(*factors, transpose_a=True), shape)

    of_leading = product(tokens, _leading_rows(rows, plan))
    of_others = _for_others(
        lambda _, positions, of_head: product(tf.gather(tokens, positions), rows[of_head]), plan
    )
    of_others = tf.concat(of_others, axis=axis)
    others = [slice(None)] * axis + [slice(plan.leading, None)]
    return tf.concat([of_leading, of_others[tuple(others)]], axis=axis)


def _matrix(kernel: Any, axis: int, heads: slice) -> Any:
    """The kernel of some heads, `(D, heads d)` or `(heads d, D)`."""
    if axis == 1:
        return tf.reshape(kernel[:, heads], (kernel.shape[0], -1))
    return tf.reshape(kernel[heads], (-1, kernel.shape[2]))


def _sums(rows: Any, plan: Plan) -> Any:
    """The sums `(H, d)` of `rows (R, d)`."""
    num_heads = plan.rows.taken.shape[-1]
    return tf.math.unsorted_segment_sum(rows, plan.places % num_heads, num_heads)


def _leading_rows(rows: Any, plan: Plan) -> Any:
    """The rows of the leading heads, by token: `(N, heads d)`."""
    width, num_tokens = rows.shape[-1], plan.batch * plan.length
    by_head = tf.reshape(rows[: plan.leading * num_tokens], (plan.leading, num_tokens, width))
    return tf.reshape(tf.transpose(by_head, (1, 0, 2)), (num_tokens, plan.leading * width))


def _for_others(of_head: Callable[[int, Any, slice], Any], plan: Plan) -> list[Any]:
    """`of_head(head, positions, rows)` of every head, without rows for the leading ones."""
    starts = tf.maximum(plan.rows.starts, plan.rows.starts[plan.leading])
    results = []
    for head in range(starts.shape[0] - 1):
        rows = slice(starts[head], starts[head + 1])
        results.append(of_head(head, plan.rows.positions[rows], rows))
    return results
