"""`routed_attention`: attention of the heads that each token took."""

from __future__ import annotations

import math
from typing import Any

import keras
from keras import ops

from keras_moh.errors import boolean, integer, invalid_argument, number_in, optional_integer
from keras_moh.implementations import (
    check_implementation,
    choose_implementation,
    describe_device,
)
from keras_moh.implementations.spec import AttentionSpec, Options
from keras_moh.routing import Routing
from keras_moh.shapes import broadcasts_to, same_length, same_shape


def routed_attention(
    query: Any,
    key: Any,
    value: Any,
    routing: Routing,
    mask: Any = None,
    is_causal: bool = False,
    scale: float | None = None,
    causal_offset: Any = 0,
    sliding_window: int | None = None,
    dropout: float = 0.0,
    seed: Any = None,
    return_attention_scores: bool = False,
    implementation: str | None = None,
    routing_groups: int = 1,
) -> Any:
    r"""Dot-product attention of the heads that each token took, times their gates.

    For a token that took head `h` with gate `g`, the output of that head is

    $$ O_h = g \, \mathrm{softmax}(\mathrm{scale} \cdot Q_h K_{h'}^\top) V_{h'},
       \quad h' = \lfloor h G / H \rfloor, $$

    and 0 for a head that it did not take (arXiv 2410.11842, "Mixture-of-Head Attention").

    Args:
        query: `(B, T, H, d)`, float.
        key: `(B, S, G, d)`, float; `G` divides `H`.
        value: `(B, S, G, dv)`, float.
        routing: The `Routing` of the `B x T` tokens, with heads below `H`.
        mask: Boolean, `True` where a query may attend to a key: `(T, S)`, or rank 4 and
            broadcastable to `(B, H, T, S)`; `(B, 1, 1, S)` is key padding. Defaults to `None`.
        is_causal: Whether query `t` attends only to keys at positions up to
            `t + causal_offset`. Defaults to `False`.
        scale: Factor of the dot products. Defaults to `d ** -0.5`.
        causal_offset: Position of the first query among the keys, an integer or a scalar integer
            tensor. Defaults to 0, which aligns queries and keys at the start.
        sliding_window: If given, a query attends only to keys less than this many positions away
            from its own, on both sides. Defaults to `None`.
        dropout: Rate in `[0, 1)` of dropout on the softmax. Defaults to 0.
        seed: Seed of the dropout: an integer or a `keras.random.SeedGenerator`.
        return_attention_scores: Whether to return the scores too. Defaults to `False`.
        implementation: Name of the implementation to use, or `None`, the default, for the fastest
            that serves the call.
        routing_groups: Number of groups of `H / routing_groups` neighbouring heads, of which each
            token is known to take equally many. Defaults to 1. It is not checked, and lets
            `"compact"` serve where it is a multiple of `G`.

    Returns:
        The outputs `(B, T, H, dv)`, 0 at heads that were not taken and in rows that may attend to
        no key; with `return_attention_scores`, also the scores `(B, H, T, S)`: the softmax of every
        head before gates and dropout.

    Raises:
        ValueError: if shapes or dtypes disagree, or an argument is out of its range.
        UnsupportedError: if the implementation of that name cannot serve the call.

    Example:
    >>> import numpy as np, keras_moh
    >>> query, key, value = np.random.default_rng(0).normal(size=(3, 1, 5, 4, 8)).astype("float32")
    >>> routing = keras_moh.Routing(
    ...     heads=np.tile(np.array([0, 2], "int32"), (1, 5, 1)),
    ...     gates=np.ones((1, 5, 2), "float32"),
    ...     probabilities=np.zeros((1, 5, 0), "float32"),
    ... )
    >>> output = keras_moh.routed_attention(query, key, value, routing, is_causal=True)
    >>> tuple(output.shape), bool(keras.ops.all(output[:, :, 1] == 0))
    ((1, 5, 4, 8), True)
    """
    query, key, value = map(ops.convert_to_tensor, (query, key, value))
    if not isinstance(routing, Routing):
        raise invalid_argument("routing", "a `keras_moh.Routing`", routing)
    routing = Routing(*map(ops.convert_to_tensor, routing))
    _check_shapes(query, key, value, routing)
    _check_dtypes(query, key, value, routing)
    mask = _checked_mask(mask, query, key)
    is_causal = boolean("is_causal", is_causal)
    if scale is None:
        scale = 1.0 / math.sqrt(query.shape[-1])
    scale = number_in("scale", scale, 0)
    _check_causal_offset(causal_offset)
    sliding_window = optional_integer("sliding_window", sliding_window, 1)
    dropout = number_in("dropout", dropout, 0, below=1)
    return_attention_scores = boolean("return_attention_scores", return_attention_scores)
    check_implementation(implementation)
    routing_groups = integer("routing_groups", routing_groups, 1)
    active_heads = routing.heads.shape[-1]
    if query.shape[2] % routing_groups or active_heads % routing_groups:
        raise ValueError(
            "Argument `routing_groups` must divide the heads and the active heads. Received: "
            f"routing_groups={routing_groups} with {query.shape[2]} heads, of which {active_heads} "
            "are active"
        )
    options = Options(
        *(mask, is_causal, scale, causal_offset, sliding_window, dropout, seed, routing_groups)
    )
    spec = attention_spec(
        *(query, query.shape[2:], key, value, routing, options),
        *(return_attention_scores, routing_groups),
    )
    output, scores = choose_implementation(spec, implementation).attend(
        query, key, value, routing.heads, routing.gates, options
    )
    return (output, scores) if return_attention_scores else output


def attention_spec(
    query: Any,
    query_heads: tuple[int, int],
    key: Any,
    value: Any,
    routing: Routing,
    options: Options,
    return_attention_scores: bool,
    routing_groups: int,
) -> AttentionSpec:
    """What a call asks for.

    Args:
        query: `(B, T, ...)`, the queries or the tokens that they are made of.
        query_heads: `(H, d)`.
        key: `(B, S, G, d)`.
        value: `(B, S, G, dv)`.
        routing: The `Routing` of the `B x T` tokens.
        options: The `Options` of the call.
        return_attention_scores: Whether the scores are asked for.
        routing_groups: Number of groups of heads, in each of which a token takes equally many.
    """
    device, is_traced = describe_device(query)
    return AttentionSpec(
        batch=_known(query.shape[0]),
        query_length=_known(query.shape[1]),
        key_length=_known(key.shape[1]),
        num_heads=query_heads[0],
        num_key_value_heads=key.shape[2],
        num_active_heads=routing.heads.shape[-1],
        routing_groups=routing_groups,
        key_dim=query_heads[1],
        value_dim=value.shape[3],
        dtype=keras.backend.standardize_dtype(key.dtype),
        device=device,
        is_traced=is_traced,
        mask_shape=None if options.mask is None else tuple(map(_known, options.mask.shape)),
        is_causal=options.is_causal,
        sliding_window=options.sliding_window,
        dropout=options.dropout,
        return_attention_scores=return_attention_scores,
    )


def _known(length: Any) -> int | None:
    """A static length, or `None` if it is unknown or, on JAX, symbolic."""
    return length if isinstance(length, int) else None


def _check_shapes(query: Any, key: Any, value: Any, routing: Routing) -> None:
    shapes = {"query": tuple(query.shape), "key": tuple(key.shape), "value": tuple(value.shape)}
    for name, shape in shapes.items():
        if len(shape) != 4:
            raise ValueError(
                f"Argument `{name}` must have the shape (batch, length, heads, features). "
                f"Received: {name}.shape={shape}"
            )
    if not same_shape(shapes["key"][:3], shapes["value"][:3]):
        raise ValueError(
            "Arguments `key` and `value` must agree in batch, length and heads. Received: "
            f"key.shape={shapes['key']} and value.shape={shapes['value']}"
        )
    if not same_length(shapes["query"][0], shapes["key"][0]) or shapes["query"][3] != key.shape[3]:
        raise ValueError(
            "Arguments `query` and `key` must agree in batch and features. Received: "
            f"query.shape={shapes['query']} and key.shape={shapes['key']}"
        )
    if shapes["query"][2] % shapes["key"][2]:
        raise ValueError(
            "The number of query heads must be a multiple of the number of key/value heads. "
            f"Received: query.shape={shapes['query']} and key.shape={shapes['key']}"
        )
    heads, gates = tuple(routing.heads.shape), tuple(routing.gates.shape)
    if len(heads) != 3 or not same_shape(shapes["query"][:2], heads[:2]) or heads != gates:
        raise ValueError(
            "Argument `routing` must hold heads and gates of shape (batch, length, active heads) "
            f"for the batch and length of `query`. Received: query.shape={shapes['query']}, "
            f"routing.heads.shape={heads} and routing.gates.shape={gates}"
        )


def _check_dtypes(query: Any, key: Any, value: Any, routing: Routing) -> None:
    dtypes = [keras.backend.standardize_dtype(x.dtype) for x in (query, key, value)]
    if not keras.backend.is_float_dtype(dtypes[0]) or len(set(dtypes)) > 1:
        raise ValueError(
            "Arguments `query`, `key` and `value` must have one float dtype. Received: the dtypes "
            f"{', '.join(dtypes)}"
        )
    heads_dtype = keras.backend.standardize_dtype(routing.heads.dtype)
    if not keras.backend.is_int_dtype(heads_dtype):
        raise ValueError(
            "Argument `routing` must hold heads of an integer dtype. Received: "
            f"routing.heads.dtype={heads_dtype}"
        )


def _checked_mask(mask: Any, query: Any, key: Any) -> Any:
    """The mask at rank 4, or `None`."""
    if mask is None:
        return None
    mask = ops.convert_to_tensor(mask)
    if keras.backend.standardize_dtype(mask.dtype) != "bool":
        raise invalid_argument("mask", "a boolean tensor", mask)
    target = (query.shape[0], query.shape[2], query.shape[1], key.shape[1])
    shape = tuple(mask.shape)
    if not broadcasts_to((1, 1, *shape) if len(shape) == 2 else shape, target):
        raise ValueError(
            "Argument `mask` must have the shape (T, S), or rank 4 and broadcast to "
            f"(B, H, T, S) = {target}. Received: mask.shape={shape}"
        )
    return ops.expand_dims(mask, (0, 1)) if len(shape) == 2 else mask


def _check_causal_offset(causal_offset: Any) -> None:
    if isinstance(causal_offset, int):  # first: of an offset that varies PyTorch's graphs know this
        valid = not isinstance(causal_offset, bool)
    elif hasattr(causal_offset, "dtype"):
        dtype = keras.backend.standardize_dtype(causal_offset.dtype)
        valid = keras.backend.is_int_dtype(dtype) and len(causal_offset.shape) == 0
    else:
        valid = False
    if not valid:
        raise invalid_argument(
            "causal_offset", "an integer or a scalar integer tensor", causal_offset
        )
