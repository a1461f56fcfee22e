r"""`MoHAttention`: Mixture-of-Head attention as a Keras layer.

Multi-head attention is a sum over its heads, $\sum_h O_h W_h$. Here every head is an expert: each
token takes the shared heads and a few routed ones, and the sum becomes a weighted one,
$\sum_h g_h O_h W_h$ (arXiv 2410.11842). The layer holds the weights, checks its arguments, and
joins three pure parts: the router (`routing/`), the projections (`projections.py`) and the
attention of the heads taken (`routed_attention.py`).

Two things are arranged around Keras rather than left to it:

- The losses of a call leave it as return values of the computation, and are added outside of it. So
  rematerialization repeats the computation without counting a loss twice, and no tracer leaks.
- Inside a `StatelessScope`, where Keras on JAX forgets the losses of a layer's earlier calls, the
  layer keeps its losses itself, by scope.
"""

from __future__ import annotations

import math
import weakref
from typing import Any, NamedTuple

import keras
from keras import ops

from keras_moh.cache import check_cache, padding_masks, without_unseen, write
from keras_moh.errors import (
    boolean,
    constraint,
    initializer,
    integer,
    invalid_argument,
    number_in,
    optional_integer,
    regularizer,
)
from keras_moh.folding import (
    batch_axes,
    check_attention_axes,
    fold,
    fold_attention_mask,
    full_mask_shape,
    resolve_attention_axes,
    scores_shape,
    unfold,
    unfold_scores,
)
from keras_moh.heads import taken_heads
from keras_moh.implementations import (
    check_implementation,
    choose_implementation,
    load_implementations,
    rows_of_projections,
)
from keras_moh.implementations.spec import Options
from keras_moh.keras_internals import attach_mask, attached_mask, current_stateless_scope
from keras_moh.masks import as_boolean, merge, without_padding
from keras_moh.normalization import HeadLayerNormalization, HeadRMSNormalization
from keras_moh.projections import (
    RowProjections,
    head_projection,
    output_projection,
    projects_rows,
)
from keras_moh.rotary_embedding import check_rotary_embedding, rotate, rotate_rows
from keras_moh.routed_attention import attention_spec
from keras_moh.routing import (
    QueryNormRouter,
    Router,
    Routing,
    TwoStageRouter,
    all_heads,
    load_balancing_loss,
    router_z_loss,
    routing_dtype,
    routing_spec,
)
from keras_moh.routing.routers import clone_initializer
from keras_moh.shapes import check_input_shapes, check_shape, input_shapes, same_shape


@keras.saving.register_keras_serializable(package="keras_moh")
class MoHAttention(keras.layers.Layer):
    r"""Mixture-of-Head attention (arXiv 2410.11842).

    A router gives each token `top_k` heads of its own beside `num_shared_heads` heads that are
    always on; the output is the gated sum over the heads a token took,

    $$ y = \sum_{h \in \mathrm{taken}(x)} g_h(x) \,
       \mathrm{softmax}\!\left(\frac{Q_h K_{h'}^\top}{\sqrt{d}}\right) V_{h'} W_h + b. $$

    The parameters are those of `keras.layers.MultiHeadAttention` (of grouped-query attention with
    `num_key_value_heads`), with the same kernel shapes, plus the router's. With `router=None` the
    layer is that attention.

    In the shapes below `B` is the batch, `T` and `S` the query and key length, `D` the features,
    `H` the heads, `G` the key/value heads, `d` and `dv` the features of a head, `E` the routed
    candidates `num_heads - num_shared_heads`, and `K = num_shared_heads + top_k` the active heads.

    Args:
        num_heads: Number of query heads `H`.
        key_dim: Features `d` of a head's query and key.
        num_shared_heads: Number of heads that every token takes, from 0 to `num_heads`. Required
            unless `router` is `None` or a `Router`.
        top_k: Number of routed heads that a token takes beside them; 0 only if every head is
            shared. With 1, the routed gate is constant and the choice learns from the balancing
            loss alone. Required unless `router` is `None` or a `Router`.
        num_key_value_heads: Number of key/value heads `G`, a divisor of `num_heads`; query head
            `h` uses key/value head `h // (H / G)`. Defaults to `num_heads`.
        value_dim: Features `dv` of a head's value. Defaults to `key_dim`.
        output_shape: Features of the output, an integer or a tuple. Defaults to the query's `D`.
        dropout: Rate in `[0, 1)` of dropout on the attention scores in training. Defaults to 0.
        use_bias: Whether the four projections have biases. Defaults to `True`.
        router: `"two_stage"` (the paper's, see `TwoStageRouter`), `"query_norm"` (the one without
            weights, for pretrained attention, see `QueryNormRouter`), a `Router`, or `None` for
            plain attention: every head with gate 1, and no router weights. Defaults to
            `"two_stage"`.
        routing_groups: Number `r` of groups of `H / r` neighbouring heads, of which a token takes
            equally many: the first `H_s / r`, which are shared, and `top_k / r` of the others
            (see `TwoStageRouter`; arXiv 2606.20945 has one group for each key/value head). It must
            divide `num_heads`, `num_shared_heads` and `top_k`. Defaults to 1, with a `Router` to
            the router's own.
        balance_loss_weight: Weight of the load-balancing loss (see `load_balancing_loss`), added in
            training; 0 leaves it out. Defaults to 0.01. Keras sums the losses of the layers, where
            the authors average them: divide by the number of routed layers to match them.
        z_loss_weight: Weight of the router z-loss (see `router_z_loss`), likewise. Defaults to 0.
        qk_norm: Normalization of each head's query and key, with epsilon 1e-5: `True` for layer
            normalization, `"rms"` for RMS normalization. Defaults to `False`.
        rotary_embedding: A layer that turns queries and keys by their positions, after `qk_norm`:
            `keras_moh.RotaryEmbedding`, `keras_hub.layers.RotaryEmbedding`, or another whose call
            takes `(inputs (B, T, H, d), start_index=0, positions=None)`. Needs a single attention
            axis. Defaults to `None`.
        attention_axes: Axes of the inputs over which to attend, an integer or a tuple. Defaults to
            `None`: all between batch and features.
        sliding_window: If given, a query attends only to keys less than this many positions away,
            on both sides. Needs a single attention axis.
        implementation: Name of an implementation of `routed_attention`, or `None`, the default, for
            the fastest that serves the call.
        kernel_initializer: Initializer of the kernels, the router's included.
        bias_initializer: Initializer of the biases.
        kernel_regularizer: Regularizer of the kernels, the router's included.
        bias_regularizer: Regularizer of the biases.
        activity_regularizer: Regularizer of the outputs of the four projections.
        kernel_constraint: Constraint of the kernels, the router's included.
        bias_constraint: Constraint of the biases.
        seed: Seed of the dropout, an integer.
        **kwargs: `name`, `trainable`, `dtype` of `keras.layers.Layer`. Whatever the dtype policy,
            routing and losses are computed in float32, or in float64 if the policy is.

    Call arguments:
        query: `(B, T, D)`, or of higher rank `(B, ..., D)`.
        value: `(B, S, D_v)`. Defaults to `query`: self-attention.
        key: `(B, S, D_k)`. Defaults to `value`.
        query_mask: Boolean `(B, T)`, `False` at padded queries: their head outputs are 0, and no
            loss counts them. In self-attention it masks the keys too. Defaults to the Keras mask
            attached to `query`, and is attached to the output.
        value_mask: Boolean `(B, S)`, `False` at padded keys. Defaults likewise. With a cache it
            has one entry for each token of the call, or for each slot of the cache.
        key_mask: Boolean `(B, S)`, combined with `value_mask`. Defaults likewise.
        attention_mask: `True` (or 1) where a query may attend to a key: `(T, S)`, `(B, T, S)` or
            `(B, H, T, S)`, each length being 1 or full.
        return_attention_scores: Whether to return the scores too. Defaults to `False`.
        return_routing: Whether to return the `Routing` too. Defaults to `False`.
        training: Whether to drop out and to add the losses. Defaults to the mode of the
            surrounding model.
        use_causal_mask: Whether query `t` attends only to keys up to `t`. Needs a single attention
            axis. Defaults to `False`.
        cache: `(B, 2, S, G, d)`, the keys (at index 0) and values of `S` positions, as in
            keras-hub: the call attends to these, and all masks are of them. Needs inputs of rank
            3, and `value_dim` to be `key_dim`. Slots that causality and masks hide from every query
            may hold anything. Defaults to `None`.
        cache_update_index: Position of the first token of the call, an integer or a scalar tensor:
            keys and values of the call are written into the cache from there on, and causality,
            window and rotary embedding count from there. That there is room for them is checked
            of an integer, not of a tensor. Defaults to `None`, with which the cache is read, and
            `value` and `key` are not.

    Returns:
        `output`, or a tuple `(output[, attention_scores][, cache][, routing])`:

        - `output`: `(B, T, D)`, or `(B, T, *output_shape)`. Where a query may attend to no key it
          is the bias of the output projection.
        - `attention_scores`: `(B, H, T, S)`, the softmax of every head before gates and dropout.
        - `cache`: if one was given, with the keys and values of this call.
        - `routing`: a `Routing` of heads `(B, T, K)`, gates `(B, T, K)` and probabilities
          `(B, T, E)`.

    Raises:
        ValueError: for an argument, a shape or a mask that is not as above.
        UnsupportedError: if the implementation of that name cannot serve the call.

    Example:
    >>> import numpy as np, keras, keras_moh
    >>> layer = keras_moh.MoHAttention(num_heads=8, key_dim=16, num_shared_heads=2, top_k=2)
    >>> output, routing = layer(np.ones((2, 5, 32), "float32"), return_routing=True)
    >>> tuple(output.shape), tuple(routing.heads.shape)
    ((2, 5, 32), (2, 5, 4))
    >>> model = keras.Sequential([
    ...     keras.layers.Embedding(100, 32, mask_zero=True),
    ...     keras_moh.MoHAttention(num_heads=8, key_dim=4, num_shared_heads=2, top_k=2),
    ...     keras.layers.GlobalAveragePooling1D(),
    ... ])
    >>> tuple(model(np.array([[5, 8, 2, 0, 0]])).shape)
    (1, 32)

    With a cache, a prompt of five tokens and then a sixth:

    >>> decoder = keras_moh.MoHAttention(8, 4, num_shared_heads=2, top_k=2)
    >>> x, cache = np.ones((1, 6, 32), "float32"), np.zeros((1, 2, 9, 8, 4), "float32")
    >>> _, cache = decoder(x[:, :5], use_causal_mask=True, cache=cache, cache_update_index=0)
    >>> output, cache = decoder(x[:, 5:], use_causal_mask=True, cache=cache, cache_update_index=5)
    >>> tuple(output.shape), tuple(cache.shape)
    ((1, 1, 32), (1, 2, 9, 8, 4))
    """

    def __init__(
        self,
        num_heads: int,
        key_dim: int,
        num_shared_heads: int | None = None,
        top_k: int | None = None,
        num_key_value_heads: int | None = None,
        value_dim: int | None = None,
        output_shape: int | tuple[int, ...] | None = None,
        dropout: float = 0.0,
        use_bias: bool = True,
        router: str | Router | None = "two_stage",
        routing_groups: int = 1,
        balance_loss_weight: float = 0.01,
        z_loss_weight: float = 0.0,
        qk_norm: bool | str = False,
        rotary_embedding: Any = None,
        attention_axes: int | tuple[int, ...] | None = None,
        sliding_window: int | None = None,
        implementation: str | None = None,
        kernel_initializer: Any = "glorot_uniform",
        bias_initializer: Any = "zeros",
        kernel_regularizer: Any = None,
        bias_regularizer: Any = None,
        activity_regularizer: Any = None,
        kernel_constraint: Any = None,
        bias_constraint: Any = None,
        seed: int | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.supports_masking = True
        self._losses_by_scope: weakref.WeakKeyDictionary[Any, list[Any]] = (
            weakref.WeakKeyDictionary()
        )

        self.num_heads = integer("num_heads", num_heads, 1)
        self.key_dim = integer("key_dim", key_dim, 1)
        self.value_dim = optional_integer("value_dim", value_dim, 1) or self.key_dim
        self.num_key_value_heads = (
            optional_integer("num_key_value_heads", num_key_value_heads, 1) or self.num_heads
        )
        if self.num_heads % self.num_key_value_heads:
            raise ValueError(
                "Argument `num_heads` must be a multiple of `num_key_value_heads`. Received: "
                f"num_heads={num_heads} and num_key_value_heads={num_key_value_heads}"
            )
        # Not `output_shape`: that name belongs to the symbolic output of a called layer.
        self._output_shape = _check_output_shape(output_shape)
        self.dropout = number_in("dropout", dropout, 0, below=1)
        self.use_bias = boolean("use_bias", use_bias)
        self.balance_loss_weight = number_in("balance_loss_weight", balance_loss_weight, 0)
        self.z_loss_weight = number_in("z_loss_weight", z_loss_weight, 0)
        if not isinstance(qk_norm, (bool, str)) or qk_norm not in (True, False, "rms"):
            raise invalid_argument("qk_norm", "True, False or 'rms'", qk_norm)
        self.qk_norm = qk_norm
        if isinstance(rotary_embedding, dict):
            rotary_embedding = keras.saving.deserialize_keras_object(rotary_embedding)
        self.rotary_embedding = check_rotary_embedding(rotary_embedding)
        self.attention_axes = check_attention_axes(attention_axes)
        self.sliding_window = optional_integer("sliding_window", sliding_window, 1)
        self.implementation = check_implementation(implementation)

        self.kernel_initializer = initializer("kernel_initializer", kernel_initializer)
        self.bias_initializer = initializer("bias_initializer", bias_initializer)
        self.kernel_regularizer = regularizer("kernel_regularizer", kernel_regularizer)
        self.bias_regularizer = regularizer("bias_regularizer", bias_regularizer)
        # Not `activity_regularizer`, which Keras would apply to this layer's own outputs as well.
        self._activity_regularizer = regularizer("activity_regularizer", activity_regularizer)
        self.kernel_constraint = constraint("kernel_constraint", kernel_constraint)
        self.bias_constraint = constraint("bias_constraint", bias_constraint)

        if isinstance(router, dict):
            router = keras.saving.deserialize_keras_object(router)
        self._router_name = router if isinstance(router, str) else None
        self.router = self._make_router(
            router, num_shared_heads, top_k, integer("routing_groups", routing_groups, 1)
        )
        self.seed = optional_integer("seed", seed, 0)
        self.seed_generator = keras.random.SeedGenerator(self.seed) if self.dropout else None

    def _make_router(
        self, router: Any, num_shared_heads: int | None, top_k: int | None, routing_groups: int
    ) -> Router | None:
        if router is None:
            for name, value, valid in (
                ("num_shared_heads", num_shared_heads, self.num_heads),
                ("top_k", top_k, 0),
            ):
                if value is not None and integer(name, value, 0) != valid:
                    raise invalid_argument(name, f"None or {valid} with router=None", value)
            if routing_groups != 1:
                raise invalid_argument("routing_groups", "1 with router=None", routing_groups)
            if self.z_loss_weight:
                raise invalid_argument("z_loss_weight", "0 with router=None", self.z_loss_weight)
            return None
        if self._router_name in ("two_stage", "query_norm"):
            if num_shared_heads is None or top_k is None:
                missing = "num_shared_heads" if num_shared_heads is None else "top_k"
                raise ValueError(
                    f"Argument `{missing}` is required unless `router` is None or a `Router`. "
                    f"Received: {missing}=None with router={router!r}"
                )
            numbers = (self.num_heads, num_shared_heads, top_k)
            common = {
                "routing_groups": routing_groups,
                "dtype": self.dtype_policy,
                "name": "router",
            }
            if self._router_name == "query_norm":
                return QueryNormRouter(*numbers, **common)
            return TwoStageRouter(
                *numbers,
                kernel_initializer=clone_initializer(self.kernel_initializer),
                kernel_regularizer=self.kernel_regularizer,
                kernel_constraint=self.kernel_constraint,
                **common,
            )
        if not isinstance(router, Router):
            raise invalid_argument(
                "router", "'two_stage', 'query_norm', a `keras_moh.Router` or None", router
            )
        for name, value in (
            ("num_heads", self.num_heads),
            ("num_shared_heads", num_shared_heads),
            ("top_k", top_k),
        ):
            if value is not None and value != getattr(router, name):
                raise invalid_argument(name, f"the router's own, {getattr(router, name)}", value)
        if routing_groups not in (1, router.routing_groups):
            own = f"the router's own, {router.routing_groups}"
            raise invalid_argument("routing_groups", own, routing_groups)
        if self.z_loss_weight and not isinstance(router, (TwoStageRouter, QueryNormRouter)):
            raise invalid_argument(
                "z_loss_weight",
                "0 with a router that is no TwoStageRouter or QueryNormRouter",
                self.z_loss_weight,
            )
        return router

    @property
    def num_shared_heads(self) -> int:
        """Number of shared heads `H_s`; all heads with `router=None`."""
        return self.num_heads if self.router is None else self.router.num_shared_heads

    @property
    def top_k(self) -> int:
        """Number of routed heads `k` that a token takes; 0 with `router=None`."""
        return 0 if self.router is None else self.router.top_k

    @property
    def routing_groups(self) -> int:
        """Number of groups of heads of which a token takes equally many; 1 with `router=None`."""
        return 1 if self.router is None else self.router.routing_groups

    @property
    def num_active_heads(self) -> int:
        """Number of heads `K` that a token takes, shared ones included."""
        return self.num_shared_heads + self.top_k

    @property
    def query_dense(self) -> keras.layers.EinsumDense:
        """The query projection, kernel `(D, H, d)`."""
        return self._query_dense

    @property
    def key_dense(self) -> keras.layers.EinsumDense:
        """The key projection, kernel `(D, G, d)`."""
        return self._key_dense

    @property
    def value_dense(self) -> keras.layers.EinsumDense:
        """The value projection, kernel `(D, G, dv)`."""
        return self._value_dense

    @property
    def output_dense(self) -> keras.layers.EinsumDense:
        """The output projection, kernel `(H, dv, *output_shape)`."""
        return self._output_dense

    def build(self, query_shape: Any, value_shape: Any = None, key_shape: Any = None) -> None:
        """Create the weights.

        Args:
            query_shape: Shape of the query, `(B, T, D)` or of higher rank.
            value_shape: Shape of the value. Defaults to the query's.
            key_shape: Shape of the key. Defaults to the value's.

        Raises:
            ValueError: if the shapes disagree, or a number of features is unknown.
        """
        query_shape, value_shape, key_shape = input_shapes(
            check_shape("query_shape", query_shape),
            check_shape("value_shape", value_shape),
            check_shape("key_shape", key_shape),
        )
        rank = len(query_shape)
        self._axes = resolve_attention_axes(self.attention_axes, rank)
        check_input_shapes(query_shape, value_shape, key_shape, batch_axes(self._axes, rank))
        for name in ("sliding_window", "rotary_embedding"):
            value = getattr(self, name)
            if value is not None and len(self._axes) > 1:
                raise ValueError(
                    f"Argument `{name}` needs a single attention axis. Received: "
                    f"{name}={value} with attention axes {self._axes}"
                )
        self._rank = rank
        self._features = (query_shape[-1], value_shape[-1], key_shape[-1])
        # Rematerialization, if any, is of the whole computation: within it the parts are plain.
        with keras.RematScope(mode=None):
            self._build_projections(query_shape, value_shape, key_shape)
        if self.router is not None and not self.router.built:
            self.router.build(query_shape)
        if self.rotary_embedding is not None and not self.rotary_embedding.built:
            self.rotary_embedding.build((None, None, self.num_heads, self.key_dim))
        load_implementations()

    def _build_projections(self, query_shape: Any, value_shape: Any, key_shape: Any) -> None:
        rank = len(query_shape)
        self._query_dense = head_projection(
            rank, self.num_heads, self.key_dim, name="query", **self._sublayer_arguments()
        )
        self._query_dense.build(query_shape)
        self._key_dense = head_projection(
            rank, self.num_key_value_heads, self.key_dim, name="key", **self._sublayer_arguments()
        )
        self._key_dense.build(key_shape)
        self._value_dense = head_projection(
            rank,
            self.num_key_value_heads,
            self.value_dim,
            name="value",
            **self._sublayer_arguments(),
        )
        self._value_dense.build(value_shape)
        self._output_dense = output_projection(
            rank,
            self._output_shape or (query_shape[-1],),
            name="attention_output",
            **self._sublayer_arguments(),
        )
        self._output_dense.build((*query_shape[:-1], self.num_heads, self.value_dim))
        if self.qk_norm:
            self.query_norm, self.key_norm = (
                self._head_norm("query_norm"),
                self._head_norm("key_norm"),
            )

    def _sublayer_arguments(self) -> dict[str, Any]:
        return {
            "use_bias": self.use_bias,
            "kernel_initializer": clone_initializer(self.kernel_initializer),
            "bias_initializer": clone_initializer(self.bias_initializer),
            "kernel_regularizer": self.kernel_regularizer,
            "bias_regularizer": self.bias_regularizer,
            "activity_regularizer": self._activity_regularizer,
            "kernel_constraint": self.kernel_constraint,
            "bias_constraint": self.bias_constraint,
            "dtype": self.dtype_policy,
        }

    def _head_norm(self, name: str) -> keras.layers.Layer:
        kind = HeadRMSNormalization if self.qk_norm == "rms" else HeadLayerNormalization
        norm = kind(epsilon=1e-5, dtype=self.dtype_policy, name=name)
        norm.build((None, None, None, self.key_dim))
        return norm

    def call(
        self,
        query: Any,
        value: Any = None,
        key: Any = None,
        query_mask: Any = None,
        value_mask: Any = None,
        key_mask: Any = None,
        attention_mask: Any = None,
        return_attention_scores: bool = False,
        return_routing: bool = False,
        training: bool | None = None,
        use_causal_mask: bool = False,
        cache: Any = None,
        cache_update_index: Any = None,
    ) -> Any:
        """Attend; see the class for arguments and results."""
        is_self_attention = value is None
        inputs = _with_defaults(query, value, key, query_mask, value_mask, key_mask)
        index = self._check_call(inputs, attention_mask, use_causal_mask, cache, cache_update_index)
        if index is not None and not isinstance(index, int):
            index = ops.cast(index, "int32")  # JAX and TensorFlow do not slice by every dtype
        query, value, key, query_mask, value_mask, key_mask = inputs
        query_mask = as_boolean(query_mask)
        own_mask = query_mask if is_self_attention else None
        key_masks = (as_boolean(value_mask), as_boolean(key_mask))
        if cache is None:
            key_mask = merge(own_mask, *key_masks)
            mask = self._folded_padding(key_mask, (1, 2))
        else:
            key_mask, slot_mask = padding_masks(key_masks, own_mask, cache, index, key)
            mask = self._folded_padding(slot_mask, (1, 2))
        attended = key if cache is None else cache[:, 0]
        mask = merge(self._folded_attention_mask(attention_mask, query, attended), mask)
        # The seed is drawn here, once: a rematerialized computation may not change the generator,
        # and has to repeat the same dropout.
        training = bool(training)
        drop = training and self.seed_generator is not None
        seed = _DrawnSeed(self.seed_generator) if drop else None

        def compute(query: Any, value: Any, key: Any) -> Any:
            return self._compute(
                query,
                value,
                key,
                query_mask=query_mask,
                key_mask=key_mask,
                mask=mask,
                is_causal=bool(use_causal_mask),
                cache=cache,
                index=index,
                dropout=self.dropout if drop else 0.0,
                seed=seed,
                with_router_scores=training and self.z_loss_weight > 0,
                with_attention_scores=return_attention_scores,
            )

        rematerialized = super().rematerialized_call(compute, query, value, key)
        if rematerialized is not compute and self._activity_regularizer is not None:
            raise ValueError(
                "Argument `activity_regularizer` must be None in a layer that is rematerialized: "
                "the losses of its projections would be counted twice, or be lost. Received: "
                f"activity_regularizer={self._activity_regularizer}"
            )
        results = rematerialized(query, value, key)
        if training and self.top_k:
            self._add_losses(results["routing"], results.get("router_scores"), query_mask)
        if query_mask is not None:
            attach_mask(results["output"], query_mask)
        returned = ["output"]
        if return_attention_scores:
            returned.append("attention_scores")
        if cache is not None:
            returned.append("cache")
        if return_routing:
            returned.append("routing")
        return _one_or_tuple([results[name] for name in returned])

    def _compute(
        self,
        query: Any,
        value: Any,
        key: Any,
        *,
        query_mask: Any,
        key_mask: Any,
        mask: Any,
        is_causal: bool,
        cache: Any,
        index: Any,
        dropout: float,
        seed: Any,
        with_router_scores: bool,
        with_attention_scores: bool,
    ) -> dict[str, Any]:
        """The computation of a call, without effects: its results by name, those asked for."""
        results = {}
        start = 0 if index is None else index  # position of the first query
        tokens, key = without_padding(query, query_mask), without_padding(key, key_mask)
        value = without_padding(value, key_mask)
        query_heads, routed_by = None, {}
        if self.router is not None and self.router.needs_query:
            query_heads = self._query_dense(tokens)
            routed_by = {"query": query_heads}
        if self.router is None:
            routing = all_heads(query, self.num_heads, routing_dtype(self.compute_dtype))
        elif with_router_scores and self.top_k:
            routing, results["router_scores"] = self.router(query, return_scores=True, **routed_by)
        else:
            routing = self.router(query, **routed_by)
        results["routing"] = routing

        if cache is None or index is not None:
            key_heads, value_heads = (
                self._key_heads(key, start),
                self._fold(self._value_dense(value)),
            )
        if cache is not None:
            if index is not None:
                cache = write(cache, key_heads, value_heads, index)
            key_heads, value_heads = cache[:, 0], cache[:, 1]
            results["cache"] = cache
        routing = Routing(*map(self._fold, routing))
        if query_mask is not None:
            # A padded query has no output: by its gates, since in the mask, where its scores need
            # it, it would turn a mask of keys, which is small and cheap, into one of all pairs.
            if with_attention_scores:
                mask = merge(mask, self._folded_padding(query_mask, (1, 3)))
            valid = ops.expand_dims(self._fold(query_mask), -1)
            gates = ops.where(valid, routing.gates, ops.zeros_like(routing.gates))
            routing = routing._replace(gates=gates)

        options = Options(
            mask=mask,
            is_causal=is_causal,
            scale=1.0 / math.sqrt(self.key_dim),
            causal_offset=start,
            sliding_window=self.sliding_window,
            dropout=dropout,
            seed=seed,
            routing_groups=self.routing_groups,
        )
        folded_tokens = self._fold(tokens)
        spec = attention_spec(
            folded_tokens,
            (self.num_heads, self.key_dim),
            *(key_heads, value_heads, routing, options),
            *(with_attention_scores, self.routing_groups),
        )
        implementation = choose_implementation(spec, self.implementation)
        if cache is not None and not getattr(implementation, "READS_ONLY_SEEN_KEYS", False):
            key_heads, value_heads = without_unseen(
                *(key_heads, value_heads, mask, ops.shape(query)[1]),
                *(is_causal, start, self.sliding_window),
            )
        arguments = (key_heads, value_heads, routing.heads, routing.gates)
        # Queries that the router has seen are there already, in all heads.
        projections = [self._output_dense]
        if query_heads is None:
            projections.append(self._query_dense)
        by_rows = rows_of_projections(implementation, spec)
        if by_rows is not None and projects_rows(*projections):
            rows = RowProjections(by_rows, routing.heads, self.num_heads)
            query_rows = (
                rows.project(folded_tokens, self._query_dense)
                if query_heads is None
                else rows.take(self._fold(query_heads))
            )
            if self.qk_norm:
                query_rows = self.query_norm(query_rows)
            if self.rotary_embedding is not None:
                positions = rows.positions + start
                query_rows = rotate_rows(self.rotary_embedding, query_rows, positions)
            head_outputs = implementation.attend_rows(query_rows, *arguments, rows.plan, options)
            output = self._unfold(rows.combine(head_outputs, self._output_dense), query)
        else:
            if query_heads is None:
                query_heads = self._query_dense(tokens)
            if self.qk_norm:
                query_heads = self.query_norm(query_heads)
            query_heads = self._fold(query_heads)
            if self.rotary_embedding is not None:
                query_heads = rotate(self.rotary_embedding, query_heads, start)
            head_outputs, scores = implementation.attend(query_heads, *arguments, options)
            output = self._output_dense(self._unfold(head_outputs, query))
            if with_attention_scores:
                results["attention_scores"] = unfold_scores(
                    scores, query, key, self._axes, self._rank
                )
        results["output"] = output
        return results

    def _key_heads(self, key: Any, start: Any) -> Any:
        """The folded keys of tokens of which the first stands at position `start`."""
        heads = self._key_dense(key)
        if self.qk_norm:
            heads = self.key_norm(heads)
        heads = self._fold(heads)
        if self.rotary_embedding is not None:
            heads = rotate(self.rotary_embedding, heads, start)
        return heads

    def _fold(self, x: Any) -> Any:
        return fold(x, self._axes, self._rank)

    def _unfold(self, x: Any, like: Any) -> Any:
        return unfold(x, like, self._axes, self._rank)

    def _folded_attention_mask(self, mask: Any, query: Any, key: Any) -> Any:
        if mask is None:
            return None
        return fold_attention_mask(mask, query, key, self.num_heads, self._axes)

    def _folded_padding(self, mask: Any, new_axes: tuple[int, int]) -> Any:
        """A padding mask `(B, T)` or `(B, S)` with axes of length 1, to broadcast to the scores."""
        if mask is None:
            return None
        return ops.expand_dims(fold(mask, self._axes, len(mask.shape) + 1), new_axes)

    def _add_losses(self, routing: Routing, router_scores: Any, query_mask: Any) -> None:
        if self.router is not None and self.balance_loss_weight:
            taken = taken_heads(routing.heads, self.num_heads)
            if self.routing_groups == 1:
                taken = taken[..., self.num_shared_heads :]
            else:
                taken = ops.take(taken, self.router.routed_heads, axis=-1)
            loss = load_balancing_loss(routing.probabilities, taken, query_mask)
            self.add_loss(self.balance_loss_weight * loss)
        if self.z_loss_weight:
            self.add_loss(self.z_loss_weight * router_z_loss(router_scores, query_mask))

    def add_loss(self, loss: Any) -> None:
        """Add a scalar loss of this call, as `keras.layers.Layer.add_loss` does.

        Inside a `keras.StatelessScope` (every training step on JAX) Keras forgets the losses of a
        layer's earlier calls: there each call of a layer is outermost and clears them. So they are
        kept here for as long as that scope lives.
        """
        scope = current_stateless_scope()
        if scope is None:
            super().add_loss(loss)
        elif scope.collect_losses:
            self._losses_by_scope.setdefault(scope, []).extend(keras.tree.flatten(loss))

    def _get_own_losses(self) -> list[Any]:
        scope = current_stateless_scope()
        if scope is None:
            return super()._get_own_losses()
        return list(self._losses_by_scope.get(scope, ()))

    def rematerialized_call(self, layer_call: Any, *args: Any, **kwargs: Any) -> Any:
        """`layer_call` as it is: `call` rematerializes its computation, but not its losses."""
        return layer_call

    def quantize(self, mode: Any = None, type_check: bool = True, config: Any = None) -> None:
        """Quantize the four projections in place; the router stays in full precision.

        Args:
            mode: A mode of `keras.layers.EinsumDense.quantize`, `"int8"` for instance.
            type_check: Not used: the layer's own type is not in question.
            config: Optional `keras.quantizers.QuantizationConfig` in place of `mode`.
        """
        for projection in self._projections:
            projection.quantize(mode, config=config)

    @property
    def _projections(self) -> tuple[keras.layers.EinsumDense, ...]:
        return (self._query_dense, self._key_dense, self._value_dense, self._output_dense)

    def get_build_config(self) -> dict[str, Any] | None:
        """The shapes the layer was built with, and the policies of quantized projections."""
        config = super().get_build_config()
        quantized = {
            projection.name: keras.dtype_policies.serialize(projection.dtype_policy)
            for projection in (self._projections if self.built else ())
            if projection.quantization_mode is not None
        }
        return {**(config or {}), "quantized": quantized} if quantized else config

    def build_from_config(self, config: dict[str, Any]) -> None:
        """Build the layer as a saved one was built, quantized projections included."""
        super().build_from_config(config)
        for projection in self._projections if self.built else ():
            if projection.name in (config or {}).get("quantized", {}):
                policy = keras.dtype_policies.deserialize(config["quantized"][projection.name])
                projection.dtype_policy = policy

    def compute_output_shape(
        self, query_shape: Any, value_shape: Any = None, key_shape: Any = None
    ) -> tuple[int | None, ...]:
        """The output's shape: the query's, with `output_shape` (if given) for its features."""
        query_shape, _, _ = input_shapes(query_shape, value_shape, key_shape)
        return (*query_shape[:-1], *(self._output_shape or (query_shape[-1],)))

    def compute_output_spec(
        self,
        query: Any,
        value: Any = None,
        key: Any = None,
        query_mask: Any = None,
        value_mask: Any = None,
        key_mask: Any = None,
        attention_mask: Any = None,
        return_attention_scores: bool = False,
        return_routing: bool = False,
        training: bool | None = None,
        use_causal_mask: bool = False,
        cache: Any = None,
        cache_update_index: Any = None,
    ) -> Any:
        """The symbolic results of a symbolic call."""
        inputs = _with_defaults(query, value, key, query_mask, value_mask, key_mask)
        self._check_call(inputs, attention_mask, use_causal_mask, cache, cache_update_index)
        dtype = self.compute_dtype
        results = [keras.KerasTensor(self.compute_output_shape(query.shape), dtype=dtype)]
        if return_attention_scores:
            shape = self._scores_shape(query.shape, inputs.key.shape, cache)
            results.append(keras.KerasTensor(shape, dtype=dtype))
        if cache is not None:
            results.append(keras.KerasTensor(cache.shape, dtype=dtype))
        if return_routing:
            results.append(self._routing_spec(query))
        return _one_or_tuple(results)

    def _routing_spec(self, query: Any) -> Routing:
        if self.router is None:
            return routing_spec(query, self.num_heads, 0, routing_dtype(self.compute_dtype))
        if not self.router.needs_query:
            return self.router.compute_output_spec(query)
        shape = (*query.shape[:-1], self.num_heads, self.key_dim)
        query_heads = keras.KerasTensor(shape, dtype=self.compute_dtype)
        return self.router.compute_output_spec(query, query=query_heads)

    def _scores_shape(self, query_shape: Any, key_shape: Any, cache: Any) -> tuple[Any, ...]:
        if cache is not None:
            key_shape = (cache.shape[0], cache.shape[2])
        return scores_shape(query_shape, key_shape, self.num_heads, self._axes)

    def _check_call(
        self,
        inputs: _Inputs,
        attention_mask: Any,
        use_causal_mask: bool,
        cache: Any,
        cache_update_index: Any,
    ) -> Any:
        """Check the arguments of a call by their static shapes, which symbolic ones have too.

        Returns:
            The index, a number as an `int`.
        """
        for name, x in (*inputs._asdict().items(), ("attention_mask", attention_mask)):
            if x is not None and not hasattr(x, "shape"):
                raise invalid_argument(name, "a tensor", x)
        for name in ("query", "value", "key"):
            dtype = keras.backend.standardize_dtype(getattr(inputs, name).dtype)
            if not keras.backend.is_float_dtype(dtype):
                raise ValueError(
                    f"Argument `{name}` must be of a float dtype. Received: {name}.dtype={dtype}"
                )
        shapes = input_shapes(inputs.query.shape, inputs.value.shape, inputs.key.shape)
        features = tuple(shape[-1] for shape in shapes)
        if len(shapes[0]) != self._rank or features != self._features:
            raise ValueError(
                f"The inputs must have the rank {self._rank} and, in the order query, value, key, "
                f"the features {self._features} that the layer was built for. Received: shapes "
                f"{shapes}"
            )
        check_input_shapes(*shapes, batch_axes(self._axes, self._rank))
        if use_causal_mask and len(self._axes) > 1:
            raise ValueError(
                "Argument `use_causal_mask` needs a single attention axis. Received: "
                f"use_causal_mask={use_causal_mask} with attention axes {self._axes}"
            )
        if cache is not None and self._rank != 3:
            raise ValueError(
                "Argument `cache` needs inputs of rank 3. Received: a cache with inputs of rank "
                f"{self._rank}"
            )
        index = check_cache(
            *(cache, cache_update_index, shapes[0][0], shapes[2][1]),
            *(self.num_key_value_heads, self.key_dim, self.value_dim),
        )
        for name, shape in zip(("query", "value", "key"), shapes, strict=True):
            valid = [shape[:-1]]
            if cache is not None and name != "query":
                of_slots = (cache.shape[0], cache.shape[2])
                valid = [of_slots] if index is None else [*valid, of_slots]
            mask = getattr(inputs, f"{name}_mask")
            if mask is not None and not any(same_shape(each, mask.shape) for each in valid):
                raise ValueError(
                    f"Argument `{name}_mask` must have one entry per token, of shape "
                    f"{' or '.join(map(str, valid))}. Received: "
                    f"{name}_mask.shape={tuple(mask.shape)}"
                )
        if attention_mask is not None:
            scores = self._scores_shape(shapes[0], shapes[2], cache)
            full_mask_shape(attention_mask.shape, scores, self._axes)
        return index

    def get_config(self) -> dict[str, Any]:
        """The constructor's arguments."""
        return {
            **super().get_config(),
            "num_heads": self.num_heads,
            "key_dim": self.key_dim,
            "num_shared_heads": self.num_shared_heads,
            "top_k": self.top_k,
            "num_key_value_heads": self.num_key_value_heads,
            "value_dim": self.value_dim,
            "output_shape": self._output_shape,
            "dropout": self.dropout,
            "use_bias": self.use_bias,
            "router": self._router_name or keras.saving.serialize_keras_object(self.router),
            "routing_groups": self.routing_groups,
            "balance_loss_weight": self.balance_loss_weight,
            "z_loss_weight": self.z_loss_weight,
            "qk_norm": self.qk_norm,
            "rotary_embedding": keras.saving.serialize_keras_object(self.rotary_embedding),
            "attention_axes": self.attention_axes,
            "sliding_window": self.sliding_window,
            "implementation": self.implementation,
            "kernel_initializer": keras.initializers.serialize(self.kernel_initializer),
            "bias_initializer": keras.initializers.serialize(self.bias_initializer),
            "kernel_regularizer": keras.regularizers.serialize(self.kernel_regularizer),
            "bias_regularizer": keras.regularizers.serialize(self.bias_regularizer),
            "activity_regularizer": keras.regularizers.serialize(self._activity_regularizer),
            "kernel_constraint": keras.constraints.serialize(self.kernel_constraint),
            "bias_constraint": keras.constraints.serialize(self.bias_constraint),
            "seed": self.seed,
        }


class _DrawnSeed(keras.random.SeedGenerator):
    """The next seed of a generator, drawn once and for all.

    `keras.random` takes generators and integers, no seed tensors, hence the form of a generator.
    """

    def __init__(self, generator: keras.random.SeedGenerator) -> None:
        self._initial_seed = generator.get_config()["seed"]
        self._value = generator.next()

    def next(self, ordered: bool = True) -> Any:
        return self._value


class _Inputs(NamedTuple):
    """The tensors of a call, none but masks missing."""

    query: Any
    value: Any
    key: Any
    query_mask: Any
    value_mask: Any
    key_mask: Any


def _with_defaults(
    query: Any, value: Any, key: Any, query_mask: Any, value_mask: Any, key_mask: Any
) -> _Inputs:
    """The value is the query unless given, the key the value; masks are those attached to them."""
    if value is None and key is not None:
        raise ValueError(
            "Argument `value` is required where `key` is given. Received: value=None and a key of "
            f"shape {tuple(key.shape)}"
        )
    if query_mask is None:
        query_mask = attached_mask(query)
    if value is None:
        value = query
    elif value_mask is None:
        value_mask = attached_mask(value)
    if key is None:
        key = value
    elif key_mask is None:
        key_mask = attached_mask(key)
    return _Inputs(query, value, key, query_mask, value_mask, key_mask)


def _one_or_tuple(results: list[Any]) -> Any:
    return results[0] if len(results) == 1 else tuple(results)


def _check_output_shape(output_shape: Any) -> tuple[int, ...] | None:
    if output_shape is None:
        return None
    lengths = output_shape if isinstance(output_shape, (list, tuple)) else (output_shape,)
    try:
        shape = tuple(integer("output_shape", length, 1) for length in lengths)
    except ValueError:
        shape = ()
    if not shape:
        raise ValueError(
            "Invalid `output_shape`: expected None, a positive integer or a tuple of positive "
            f"integers. Received: output_shape={output_shape!r}"
        )
    return shape
