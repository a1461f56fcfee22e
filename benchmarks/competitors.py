"""The layers that compute a case, all with the same weights, and the tokens they are given."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import keras
import numpy as np
from keras import ops

from benchmarks.cases import Case
from keras_moh import MoHAttention, convert_to_moh
from keras_moh.conversion import Adapter
from keras_moh.implementations import IMPLEMENTATIONS

KERAS = "keras"  # Keras's own attention, the one to beat
DENSE = "router=None"  # MoHAttention without routing: the same function as Keras's
REFERENCE = "reference"  # every head is computed, then multiplied by its gate
CHOSEN = "chosen"  # implementation=None: what a user gets
CONVERTED = "converted"  # what `convert_to_moh` makes of Keras's own attention
CONVERTED_REFERENCE = "converted, reference"  # the same with every head computed


def implementations() -> list[str]:
    """The names of the fast implementations of this backend."""
    return [
        name
        for name, (backend, _) in IMPLEMENTATIONS.items()
        if backend in (None, keras.backend.backend()) and name != REFERENCE
    ]


def oracle(name: str) -> str:
    """The competitor whose answer that of `name` has to equal."""
    if name in (CONVERTED, CONVERTED_REFERENCE):
        return CONVERTED_REFERENCE
    return KERAS if name in (KERAS, DENSE) else REFERENCE


def build(name: str, case: Case, weights: Mapping[str, np.ndarray]) -> keras.Layer:
    """The layer of that name, with these weights as far as it has them."""
    if oracle(name) == CONVERTED_REFERENCE:
        implementation = "reference" if name == CONVERTED_REFERENCE else None
        return _converted(build(KERAS, case, weights), case, implementation)
    groups = case.num_key_value_heads or case.num_heads
    if name != KERAS:
        layer = _moh_attention(name, case)
    elif groups == case.num_heads:
        layer = keras.layers.MultiHeadAttention(case.num_heads, case.key_dim)
    else:
        layer = keras.layers.GroupQueryAttention(case.key_dim, case.num_heads, groups)
    shape = (case.batch, case.length, case.features)
    layer.build(shape, shape)
    for path, weight in _weights_by_path(layer).items():
        weight.assign(weights[path])
    return layer


def _converted(layer: keras.Layer, case: Case, implementation: str | None) -> keras.Layer:
    inputs = keras.Input((None, case.features))
    model, _ = convert_to_moh(
        keras.Model(inputs, layer(inputs, inputs)),
        case.num_shared_heads,
        case.top_k,
        router=case.router,
        routing_groups=case.routing_groups,
        implementation=implementation,
    )
    return model.layers[-1]


def _moh_attention(name: str, case: Case) -> MoHAttention:
    routing: dict[str, Any] = (
        {"router": None}
        if name == DENSE
        else {
            "num_shared_heads": case.num_shared_heads,
            "top_k": case.top_k,
            "router": case.router,
            "routing_groups": case.routing_groups,
            "implementation": None if name == CHOSEN else name,
        }
    )
    return MoHAttention(
        case.num_heads, case.key_dim, num_key_value_heads=case.num_key_value_heads, **routing
    )


def _weights_by_path(layer: keras.Layer) -> dict[str, keras.Variable]:
    return {weight.path.split("/", 1)[1]: weight for weight in layer.weights}


def call(layer: keras.Layer, case: Case, tokens: Any, cache: Any = None) -> Any:
    """The layer's output for `tokens`, as a user would ask for it; with a cache, that too."""
    if case.cache:
        index = case.cache - case.length if case.writes else None
        if isinstance(layer, MoHAttention):
            call = {"use_causal_mask": case.writes, "cache": cache, "cache_update_index": index}
            output, cache = layer(tokens, **call)
        else:
            output, cache = _cached_step(layer, tokens, cache, index)
        return [output, cache] if case.writes else output
    takes_a_value = isinstance(layer, Adapter) or not isinstance(layer, MoHAttention)
    inputs = (tokens, tokens) if takes_a_value else (tokens,)
    return layer(*inputs, use_causal_mask=case.is_causal, training=case.training)


def _cached_step(layer: keras.Layer, tokens: Any, cache: Any, index: int | None) -> Any:
    """One token by Keras's attention with a cache, as keras-hub adds it: by its fused function."""
    key, value = cache[:, 0], cache[:, 1]
    if index is not None:
        start = (0, index, 0, 0)
        key = ops.slice_update(key, start, layer._key_dense(tokens))
        value = ops.slice_update(value, start, layer._value_dense(tokens))
        cache = ops.stack([key, value], axis=1)
    heads = ops.dot_product_attention(layer._query_dense(tokens), key, value)
    return layer._output_dense(heads), cache


def draw_cache(case: Case, seed: int = 4) -> np.ndarray:
    """Random keys and values `(B, 2, S, G, d)`."""
    groups = case.num_key_value_heads or case.num_heads
    shape = (case.batch, 2, case.cache, groups, case.key_dim)
    return np.random.default_rng(seed).normal(size=shape).astype("float32")


def draw_weights(case: Case, seed: int = 0) -> dict[str, np.ndarray]:
    """Random weights of every competitor, by path.

    The router's have the standard deviation 0.5, so that its heads are unevenly loaded.
    """
    generator = np.random.default_rng(seed)
    layer = _moh_attention(CHOSEN, case)
    layer.build((case.batch, case.length, case.features))
    return {
        path: generator.normal(
            scale=0.5 if path.startswith("router/") else case.features**-0.5,
            size=tuple(weight.shape),
        ).astype("float32")
        for path, weight in _weights_by_path(layer).items()
    }


def draw_tokens(case: Case, weights: Mapping[str, np.ndarray], seed: int = 1) -> np.ndarray:
    """Random tokens `(B, N, D)`, none of which the router finds undecided between two heads.

    There two correct programs may choose differently, by rounding, and a comparison says nothing.
    """
    generator = np.random.default_rng(seed)
    tokens = np.empty((case.batch * case.length, case.features), "float32")
    undecided = np.ones(len(tokens), bool)
    while undecided.any():
        tokens[undecided] = generator.normal(size=(undecided.sum(), case.features))
        undecided = _is_undecided(tokens, weights, case)
    return tokens.reshape(case.batch, case.length, case.features)


def _is_undecided(tokens: np.ndarray, weights: Mapping[str, np.ndarray], case: Case) -> np.ndarray:
    """Whether the last score that a token takes and the first that it leaves are almost equal."""
    tokens = tokens.astype("float64")
    if case.router == "query_norm":
        query = np.einsum("nd,dhk->nhk", tokens, weights["query/kernel"]) + weights["query/bias"]
        query = query.reshape(len(tokens), case.routing_groups, -1, case.key_dim)
        shared = case.num_shared_heads // case.routing_groups
        scores = np.linalg.norm(query[:, :, shared:], axis=-1)
    else:
        scores = tokens @ weights["router/routed_scores/kernel"]
    scores = np.sort(scores.reshape(len(tokens), case.routing_groups, -1))
    taken = case.top_k // case.routing_groups
    if taken == scores.shape[-1]:
        return np.zeros(len(tokens), bool)
    return (scores[..., -taken] - scores[..., -taken - 1] < 1e-3).any(axis=-1)
