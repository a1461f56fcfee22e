"""Routers: Keras layers that choose the heads of every token.

A router computes in float32 (float64 under a float64 policy) whatever the compute dtype is: two
candidates whose probabilities differ by less than a rounding error of bfloat16 would otherwise tie,
and the choice would depend on the backend. For the same reason ties go to the lowest head.
"""

from __future__ import annotations

import math
import string
from typing import Any

import keras
import numpy as np
from keras import ops

from keras_moh.errors import constraint, initializer, integer, regularizer
from keras_moh.routing.routing import (
    Routing,
    all_heads,
    constant_heads,
    routing_dtype,
    routing_spec,
)
from keras_moh.shapes import same_shape
from keras_moh.softmax import softmax


def largest(values: Any, k: int) -> Any:
    """The indices of the `k` largest of the last axis, ascending; the lowest index wins a tie.

    On PyTorch by a sort, since `top_k` breaks ties arbitrarily there. Elsewhere it keeps the order,
    and on JAX a sort takes up to four times as long.
    """
    if keras.backend.backend() == "torch":
        order = ops.argsort(-values, axis=-1)[..., :k]
    else:
        _, order = ops.top_k(values, k)
    return ops.sort(ops.cast(order, "int32"), axis=-1)


def _product(inputs: Any, kernel: Any) -> Any:
    """`inputs (..., D)` times `kernel (D, E)`.

    By `einsum`: `ops.matmul`, which `Dense` uses, rounds float64 to float32 on PyTorch. All axes
    have letters, since TensorFlow's gradient of an ellipsis is ten times slower.
    """
    tokens = string.ascii_lowercase[: len(inputs.shape) - 1]
    return ops.einsum(f"{tokens}y,yz->{tokens}z", inputs, kernel)


class ScoreDense(keras.layers.Dense):
    """A router's bias-free map from a token to scores, which stays in full precision."""

    def call(self, inputs: Any, training: bool | None = None) -> Any:
        """The scores `(..., units)` of `inputs (..., D)`."""
        return _product(inputs, self.kernel)

    def rematerialized_call(self, layer_call: Any, *args: Any, **kwargs: Any) -> Any:
        """`layer_call` as it is: a few numbers per token are not worth computing twice."""
        return layer_call

    def quantize(self, *args: Any, **kwargs: Any) -> None:
        """Refused: a rounded score would send tokens to other heads.

        `Model.quantize` reports this as a warning and leaves the layer as it is.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError(
            f"Layer '{self.name}' of a router is not quantized: its scores decide which heads a "
            "token takes, and stay in full precision."
        )


@keras.saving.register_keras_serializable(package="keras_moh")
class Router(keras.layers.Layer):
    """Base class of routers.

    A router of one's own overrides `call(inputs)` to return a `Routing`, and creates its weights in
    `build`; `MoHAttention(router=MyRouter(...))` then uses it. Whatever dtype policy it is given,
    it computes in float32, or in float64 if that policy computes in float64.

    A class with `needs_query = True` overrides `call(inputs, query)` instead: it is given the
    tokens' query vectors as well, `(..., H, d)`, as the query projection makes them, before
    `qk_norm` and rotary embedding. All heads' queries are then projected, those not taken too.

    Args:
        num_heads: Number of heads `H`.
        num_shared_heads: Number of shared heads `H_s`, which every token takes: heads
            `0 .. H_s - 1`, or with groups the first `H_s / r` heads of each (see `shared_heads`).
        top_k: Number of routed heads `k` that a token takes, out of the other `E = H - H_s`.
        routing_groups: Number `r` of groups of `H / r` neighbouring heads. Of each a token takes
            equally many: the first `H_s / r`, which are shared, and `k / r` of the others. It must
            divide `num_heads`, `num_shared_heads` and `top_k`. Defaults to 1.
        **kwargs: `name`, `trainable`, `dtype` of `keras.layers.Layer`.

    Raises:
        ValueError: if a number is not an integer in its range, or there are fewer than `top_k`
            candidates, or no head at all would be taken, or the groups would not be alike.

    Example:
    >>> import numpy as np, keras, keras_moh
    >>> @keras.saving.register_keras_serializable("my_package")
    ... class FirstHeads(keras_moh.Router):
    ...     def call(self, inputs):
    ...         tokens = keras.ops.shape(inputs)[:-1]
    ...         heads = keras.ops.arange(self.num_active_heads, dtype="int32")
    ...         heads = keras.ops.broadcast_to(heads, (*tokens, self.num_active_heads))
    ...         gates = keras.ops.ones_like(heads, dtype="float32")
    ...         uniform = keras.ops.ones((*tokens, self.num_routed_heads)) / self.num_routed_heads
    ...         return keras_moh.Routing(heads, gates, uniform)
    >>> router = FirstHeads(num_heads=4, num_shared_heads=1, top_k=2)
    >>> layer = keras_moh.MoHAttention(num_heads=4, key_dim=8, router=router)
    >>> output, routing = layer(np.ones((2, 3, 8), "float32"), return_routing=True)
    >>> tuple(routing.heads.shape)
    (2, 3, 3)
    """

    #: Whether `call` takes the query vectors of all heads beside the tokens.
    needs_query = False

    def __init__(
        self,
        num_heads: int,
        num_shared_heads: int,
        top_k: int,
        *,
        routing_groups: int = 1,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.supports_masking = True
        self.dtype_policy = keras.DTypePolicy(routing_dtype(self.compute_dtype))
        self.num_heads = integer("num_heads", num_heads, 1)
        self.num_shared_heads = integer("num_shared_heads", num_shared_heads, 0)
        self.top_k = integer("top_k", top_k, 0)
        if self.num_shared_heads > self.num_heads:
            raise ValueError(
                "Argument `num_shared_heads` must be at most `num_heads`. Received: "
                f"num_shared_heads={num_shared_heads} and num_heads={num_heads}"
            )
        if self.top_k > self.num_routed_heads:
            raise ValueError(
                f"Argument `top_k` must be at most the number of routed heads. Received: "
                f"top_k={top_k} with {self.num_routed_heads} routed heads "
                f"(num_heads={num_heads} - num_shared_heads={num_shared_heads})"
            )
        if self.top_k == 0 and self.num_routed_heads:
            raise ValueError(
                "Argument `top_k` must be positive unless every head is shared. Received: "
                f"top_k=0 with {self.num_routed_heads} routed heads "
                f"(num_heads={num_heads} - num_shared_heads={num_shared_heads}), "
                "which no token would ever take"
            )
        self.routing_groups = integer("routing_groups", routing_groups, 1)
        common = math.gcd(self.num_heads, self.num_shared_heads, self.top_k)
        if common % self.routing_groups:
            valid = ", ".join(str(r) for r in range(1, common + 1) if common % r == 0)
            raise ValueError(
                "Argument `routing_groups` must divide `num_heads`, `num_shared_heads` and `top_k` "
                f"(valid here: {valid}). Received: routing_groups={routing_groups} with "
                f"num_heads={num_heads}, num_shared_heads={num_shared_heads} and top_k={top_k}"
            )

    @property
    def shared_heads(self) -> tuple[int, ...]:
        """The `H_s` heads that every token takes, ascending: the first ones of each group."""
        heads, shared = self.num_heads, self.num_shared_heads
        length = heads // self.routing_groups
        return tuple(h for h in range(heads) if h % length < shared // self.routing_groups)

    @property
    def routed_heads(self) -> tuple[int, ...]:
        """The heads of the `E` candidates, ascending: all that are not shared."""
        return tuple(sorted({*range(self.num_heads)} - {*self.shared_heads}))

    @property
    def num_routed_heads(self) -> int:
        """Number of routed candidates `E`, out of which a token takes `top_k`."""
        return self.num_heads - self.num_shared_heads

    @property
    def num_active_heads(self) -> int:
        """Number of heads `K` that a token takes, shared ones included."""
        return self.num_shared_heads + self.top_k

    def rematerialized_call(self, layer_call: Any, *args: Any, **kwargs: Any) -> Any:
        """`layer_call` as it is: a few numbers per token are not worth computing twice."""
        return layer_call

    def compute_output_spec(self, inputs: Any, query: Any = None) -> Any:
        """The symbolic `Routing` for symbolic `inputs (..., D)`."""
        return routing_spec(
            inputs, self.num_active_heads, self.num_routed_heads, self.compute_dtype
        )

    def _largest_of_groups(self, values: Any) -> Any:
        """Of `(..., E)` the `k / r` largest candidates of every group, by number within it.

        `(..., k)`, with several groups `(..., r, k / r)`.
        """
        return largest(self._by_group(values), self.top_k // self.routing_groups)

    def _of_candidates(self, values: Any, candidates: Any) -> Any:
        """The values `(..., k)` of candidates, out of `(..., E)`."""
        return self._together(ops.take_along_axis(self._by_group(values), candidates, axis=-1))

    def _heads(self, candidates: Any) -> Any:
        """The heads `(..., K)`: in each group the shared ones, its first, then the candidates."""
        numbers = self._by_group(ops.arange(self.num_heads, dtype="int32"))
        shared = self.num_shared_heads // self.routing_groups
        heads = candidates + numbers[..., shared : shared + 1]
        if shared:
            shared_heads = ops.broadcast_to(numbers[..., :shared], (*ops.shape(heads)[:-1], shared))
            heads = ops.concatenate([shared_heads, heads], axis=-1)
        return self._together(heads)

    def _gates(self, shared_gates: Any, gates: Any) -> Any:
        """The gates `(..., K)` of `_heads`, from those of the shared and of the routed ones."""
        if not self.num_shared_heads:
            return gates
        parts = [self._by_group(x) for x in (shared_gates, gates)]
        return self._together(ops.concatenate(parts, axis=-1))

    def _by_group(self, x: Any) -> Any:
        """`(..., N)` as `(..., r, N / r)`, and as it is where there is one group."""
        if self.routing_groups == 1:
            return x
        lengths = (self.routing_groups, x.shape[-1] // self.routing_groups)
        return ops.reshape(x, (*ops.shape(x)[:-1], *lengths))

    def _together(self, x: Any) -> Any:
        """The inverse of `_by_group`."""
        if self.routing_groups == 1:
            return x
        return ops.reshape(x, (*ops.shape(x)[:-2], self.routing_groups * x.shape[-1]))

    def get_config(self) -> dict[str, Any]:
        """The constructor's arguments."""
        return {
            **super().get_config(),
            "num_heads": self.num_heads,
            "num_shared_heads": self.num_shared_heads,
            "top_k": self.top_k,
            "routing_groups": self.routing_groups,
        }


@keras.saving.register_keras_serializable(package="keras_moh")
class TwoStageRouter(Router):
    r"""The router of the paper (arXiv 2410.11842, "Two-Stage Routing").

    With bias-free maps $W_r$ (`D -> E`), $W_s$ (`D -> H_s`) and $W_h$ (`D -> 2`) of a token `x`:

    1. routed heads: $p = \mathrm{softmax}(W_r x)$; the `k` largest are kept (the lowest head wins a
       tie), divided by their sum, and multiplied by `k`;
    2. shared heads: $H_s \, \mathrm{softmax}(W_s x)$; a single shared head has the constant gate 1
       and no $W_s$;
    3. where both kinds exist, $w = 2 \, \mathrm{softmax}(W_h x)$: the shared gates are multiplied
       by the first, the routed ones by the second.

    With `routing_groups=r` the choice alone changes: kept are the `k / r` largest of each group of
    heads, as in Grouped Query Experts (arXiv 2606.20945), which has such a choice for each group of
    heads that share a key/value head. Softmax, sum and factors stay those of all heads together.

    With `top_k=1` the renormalised gate is the constant 1, so $W_r$ learns from the balancing loss
    alone, as in the authors' code. Kernels of zeros make every candidate tie: all tokens would take
    the lowest heads, and the others would never learn.

    Args:
        num_heads: Number of heads `H`.
        num_shared_heads: Number of shared heads `H_s`, from 0 to `num_heads`.
        top_k: Number of routed heads `k` that a token takes; 0 only if every head is shared.
        kernel_initializer: Initializer of the three kernels. Defaults to `"glorot_uniform"`.
        kernel_regularizer: Optional regularizer of the three kernels.
        kernel_constraint: Optional constraint of the three kernels.
        routing_groups: Number `r` of groups of `H / r` neighbouring heads, of which a token takes
            equally many: each group's first `H_s / r` heads are shared, of its others a token takes
            `k / r`. It must divide `num_heads`, `num_shared_heads` and `top_k`. Defaults to 1.
        **kwargs: `name`, `trainable`, `dtype` of `keras.layers.Layer`.

    Call arguments:
        inputs: `(..., D)`, float.
        return_scores: Whether to return `(routing, scores)` with the scores $W_r x$, `(..., E)`.
            Defaults to `False`.

    Returns:
        A `Routing`.

    Raises:
        ValueError: as for `Router`.

    Example:
    >>> import numpy as np, keras_moh
    >>> router = keras_moh.TwoStageRouter(num_heads=6, num_shared_heads=2, top_k=2)
    >>> heads, gates, probabilities = router(np.ones((1, 3, 8), "float32"))
    >>> tuple(heads.shape), tuple(gates.shape), tuple(probabilities.shape)
    ((1, 3, 4), (1, 3, 4), (1, 3, 4))
    >>> keras_moh.TwoStageRouter(6, num_shared_heads=2, top_k=2, routing_groups=2).shared_heads
    (0, 3)
    """

    def __init__(
        self,
        num_heads: int,
        num_shared_heads: int,
        top_k: int,
        kernel_initializer: Any = "glorot_uniform",
        kernel_regularizer: Any = None,
        kernel_constraint: Any = None,
        *,
        routing_groups: int = 1,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            num_heads, num_shared_heads, top_k, routing_groups=routing_groups, **kwargs
        )
        self.kernel_initializer = initializer("kernel_initializer", kernel_initializer)
        self.kernel_regularizer = regularizer("kernel_regularizer", kernel_regularizer)
        self.kernel_constraint = constraint("kernel_constraint", kernel_constraint)
        self.routed_scores = self._dense("routed_scores", self.num_routed_heads, bool(self.top_k))
        self.shared_scores = self._dense(
            "shared_scores", self.num_shared_heads, self.num_shared_heads > 1
        )
        self.group_scores = self._dense(
            "group_scores", 2, bool(self.top_k and self.num_shared_heads)
        )

    def _dense(self, name: str, units: int, needed: bool) -> ScoreDense | None:
        if not needed:
            return None
        return ScoreDense(
            units,
            use_bias=False,
            kernel_initializer=clone_initializer(self.kernel_initializer),
            kernel_regularizer=self.kernel_regularizer,
            kernel_constraint=self.kernel_constraint,
            dtype=self.dtype_policy,
            name=name,
        )

    def build(self, input_shape: Any) -> None:
        """Create the kernels for inputs of shape `(..., D)`."""
        for dense in (self.routed_scores, self.shared_scores, self.group_scores):
            if dense is not None:
                dense.build(input_shape)

    def call(self, inputs: Any, return_scores: bool = False) -> Any:
        """Route every token; see the class."""
        scores, shared_scores, group_scores = self._scores(inputs)
        if shared_scores is not None:
            shared_gates = self.num_shared_heads * softmax(shared_scores)
        else:
            shape = (*ops.shape(inputs)[:-1], self.num_shared_heads)
            shared_gates = ops.ones(shape, dtype=inputs.dtype)
        if scores is None:
            heads = constant_heads(inputs, range(self.num_heads))
            routing = Routing(heads, shared_gates, shared_gates[..., :0])
            return (routing, routing.probabilities) if return_scores else routing

        probabilities = softmax(scores)
        candidates = self._largest_of_groups(probabilities)
        kept = self._of_candidates(probabilities, candidates)
        gates = self.top_k * kept / ops.sum(kept, axis=-1, keepdims=True)
        if group_scores is not None:
            factors = 2 * softmax(group_scores)
            shared_gates, gates = factors[..., :1] * shared_gates, factors[..., 1:] * gates
        routing = Routing(self._heads(candidates), self._gates(shared_gates, gates), probabilities)
        return (routing, scores) if return_scores else routing

    def compute_output_spec(self, inputs: Any, return_scores: bool = False) -> Any:
        """The symbolic results of a symbolic call."""
        routing = super().compute_output_spec(inputs)
        return (routing, routing.probabilities) if return_scores else routing

    def _scores(self, inputs: Any) -> list[Any]:
        """The scores of the routed heads, the shared ones and the two kinds; `None` without any.

        By one product for all: three as narrow as these would take three times as long.
        """
        denses = [self.routed_scores, self.shared_scores, self.group_scores]
        kernels = [dense.kernel for dense in denses if dense is not None]
        if not kernels:
            return [None, None, None]
        scores = _product(inputs, ops.concatenate(kernels, axis=-1))
        parts, stop = [], 0
        for dense in denses:
            start, stop = stop, stop + (0 if dense is None else dense.units)
            parts.append(None if dense is None else scores[..., start:stop])
        return parts

    def get_config(self) -> dict[str, Any]:
        """The constructor's arguments."""
        return {
            **super().get_config(),
            "kernel_initializer": keras.initializers.serialize(self.kernel_initializer),
            "kernel_regularizer": keras.regularizers.serialize(self.kernel_regularizer),
            "kernel_constraint": keras.constraints.serialize(self.kernel_constraint),
        }


@keras.saving.register_keras_serializable(package="keras_moh")
class QueryNormRouter(Router):
    r"""The router without weights, for pretrained attention (arXiv 2410.11842, MoH-LLaMA3).

    The score of a candidate is the length of the token's query vector in that head, before
    `qk_norm` and rotary embedding, by the deviation of these lengths:

    $$ s_e = \frac{\lVert q_e \rVert}{\mathrm{std}_{e'} \lVert q_{e'} \rVert}, \quad
       p = \mathrm{softmax}(s), $$

    with the unbiased standard deviation over the `E` candidates. The `k` longest are taken (the
    lowest head wins a tie). A taken head has the gate 1, as a shared one has, and its gradient is
    that of $p$ (straight-through): lengths of queries learn what a head is worth. The authors
    divide by a zero or undefined deviation where all lengths are equal, or there is one candidate;
    here $p$ is uniform then.

    With `routing_groups=r` the `k / r` longest of each group of heads are taken. With bfloat16,
    whose vectors have few digits, near lengths may be ordered otherwise than in float32.

    Args:
        num_heads: Number of heads `H`.
        num_shared_heads: Number of shared heads `H_s`, from 0 to `num_heads`.
        top_k: Number of routed heads `k` that a token takes; 0 only if every head is shared.
        routing_groups: Number `r` of groups of `H / r` neighbouring heads, of which a token takes
            equally many, as in `Router`. Defaults to 1.
        **kwargs: `name`, `trainable`, `dtype` of `keras.layers.Layer`.

    Call arguments:
        inputs: `(..., D)`, float: the tokens, of which only the leading axes matter.
        query: `(..., H, d)`, float: their query vectors.
        return_scores: Whether to return `(routing, scores)` with the scores $s$, `(..., E)`, which
            are what a z-loss would be of. Defaults to `False`.

    Returns:
        A `Routing`.

    Raises:
        ValueError: as for `Router`, or if the queries do not fit the inputs or the heads.

    Example:
    >>> import numpy as np, keras_moh
    >>> router = keras_moh.QueryNormRouter(num_heads=4, num_shared_heads=1, top_k=1)
    >>> query = np.array([[[[1.0, 0.0], [3.0, 4.0], [0.0, 6.0], [2.0, 2.0]]]], "float32")
    >>> heads, gates, probabilities = router(np.ones((1, 1, 8), "float32"), query=query)
    >>> np.asarray(heads).tolist(), np.asarray(gates).tolist()
    ([[[0, 2]]], [[[1.0, 1.0]]])
    """

    needs_query = True

    def call(self, inputs: Any, query: Any, return_scores: bool = False) -> Any:
        """Route every token; see the class."""
        self._check_query(inputs, query)
        if not self.top_k:
            routing = all_heads(inputs, self.num_heads, self.compute_dtype)
            return (routing, routing.probabilities) if return_scores else routing
        if self.routing_groups == 1:
            query = query[..., self.num_shared_heads :, :]
        else:
            query = ops.take(query, self.routed_heads, axis=-2)
        norms = _norms(query)
        scores = _by_deviation(norms)
        probabilities = softmax(scores)
        candidates = self._largest_of_groups(norms)
        taken = self._of_candidates(probabilities, candidates)
        # In this order the gate is exactly 1.
        gates = 1 + (taken - ops.stop_gradient(taken))
        shared = ops.ones((*ops.shape(inputs)[:-1], self.num_shared_heads), dtype=gates.dtype)
        routing = Routing(self._heads(candidates), self._gates(shared, gates), probabilities)
        return (routing, scores) if return_scores else routing

    def compute_output_spec(
        self, inputs: Any, query: Any = None, return_scores: bool = False
    ) -> Any:
        """The symbolic results of a symbolic call."""
        self._check_query(inputs, query)
        routing = super().compute_output_spec(inputs)
        return (routing, routing.probabilities) if return_scores else routing

    def _check_query(self, inputs: Any, query: Any) -> None:
        expected = (*inputs.shape[:-1], self.num_heads, None)
        if query is None or not same_shape(expected, query.shape):
            received = "None" if query is None else f"of shape {tuple(query.shape)}"
            raise ValueError(
                f"Argument `query` must hold the query vectors of {self.num_heads} heads, of shape "
                f"{expected}. Received: query {received}"
            )


def _norms(x: Any) -> Any:
    """The lengths of the vectors `(..., d)`, with the gradient 0 at a vector of length 0."""
    squares = ops.sum(ops.square(x), axis=-1)
    is_zero = squares == 0
    lengths = ops.sqrt(ops.where(is_zero, ops.ones_like(squares), squares))
    return ops.where(is_zero, ops.zeros_like(lengths), lengths)


def _by_deviation(values: Any) -> Any:
    """The values `(..., E)`, not negative, by their unbiased standard deviation.

    Where they are equal but for rounding the deviation says nothing, and is left out.
    """
    count = values.shape[-1]
    if count == 1:
        return values
    # A deviation has the unit of the values: by the largest, no square is lost.
    unit = ops.stop_gradient(ops.max(values, axis=-1, keepdims=True))
    unit = ops.where(unit > 0, unit, ops.ones_like(unit))
    shares = values / unit
    distances = shares - ops.sum(shares, axis=-1, keepdims=True) / count
    variance = ops.sum(ops.square(distances), axis=-1, keepdims=True) / (count - 1)
    rounding = 4 * float(np.finfo(keras.backend.standardize_dtype(values.dtype)).eps)
    says_nothing = variance <= rounding**2
    deviation = unit * ops.sqrt(ops.where(says_nothing, ops.ones_like(variance), variance))
    return values / ops.where(says_nothing, ops.ones_like(deviation), deviation)


def clone_initializer(initializer: Any) -> Any:
    """A fresh copy of an initializer, since an instance gives the same values each time."""
    if isinstance(initializer, keras.initializers.Initializer):
        return initializer.clone()
    return initializer
