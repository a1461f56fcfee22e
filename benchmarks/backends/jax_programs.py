"""Programs of JAX, compiled by `jax.jit` as in `fit` and `predict`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import keras
from jax import numpy as jnp

MODES = ("jit",)
_TILE_ROWS = 256


def _stateless(call: Callable[..., Any], variables: Sequence[Any]) -> Callable[..., list[Any]]:
    """`call` as a function of its inputs and the variables' values: `Layer.stateless_call`."""

    def stateless(inputs: Sequence[Any], values: Sequence[Any]) -> list[Any]:
        mapping = list(zip(variables, values, strict=True))
        with keras.StatelessScope(state_mapping=mapping):
            return keras.tree.flatten(call(*inputs))

    return stateless


def _program(function: Callable[..., Any], *arguments: Sequence[Any]) -> Callable[[], list[Any]]:
    compiled = jax.jit(function)
    arrays = [[jnp.asarray(x) for x in argument] for argument in arguments]
    return lambda: jax.block_until_ready(keras.tree.flatten(compiled(*arrays)))


def forward(
    call: Callable[..., Any], inputs: Sequence[Any], variables: Sequence[Any], mode: str
) -> Callable[[], list[Any]]:
    values = [variable.value for variable in variables]
    return _program(_stateless(call, variables), inputs, values)


def training_step(
    call: Callable[..., Any],
    inputs: Sequence[Any],
    variables: Sequence[Any],
    cotangents: Sequence[Any],
    mode: str,
) -> Callable[[], list[Any]]:
    def step(inputs: Sequence[Any], values: Sequence[Any], cotangents: Sequence[Any]) -> Any:
        outputs, gradients = jax.vjp(_stateless(call, variables), inputs, values)
        return outputs, gradients(cotangents)

    values = [variable.value for variable in variables]
    return _program(step, inputs, values, cotangents)


@jax.checkpoint
def _tile(query: Any, key: Any, value: Any) -> Any:
    scores = query @ key.T
    weights = jnp.exp(scores - jax.lax.stop_gradient(scores.max(axis=-1, keepdims=True)))
    return (weights @ value) / weights.sum(axis=-1, keepdims=True)


def bare_attention(query: Any, key: Any, value: Any) -> Any:
    # In tiles whose scores stay in the cache, and are computed anew for the gradients.
    query = query * query.shape[-1] ** -0.5
    whole = len(query) // _TILE_ROWS * _TILE_ROWS
    outputs = [_tile(query[whole:], key, value)]
    if whole:
        tiles = query[:whole].reshape(-1, _TILE_ROWS, query.shape[-1])
        tiled = jax.lax.map(lambda tile: _tile(tile, key, value), tiles)
        outputs.insert(0, tiled.reshape(whole, -1))
    return jnp.concatenate(outputs)
