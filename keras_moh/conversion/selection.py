"""Which layers to convert, and how many of their heads to keep: what a user may say, resolved."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy as np

from keras_moh.errors import invalid_argument

# So that 0.7 of 10 heads, which is 7.000000000000001 or 6.999999999999999, is 7.
ROUNDING = 1e-6


def selected(layers: Sequence[keras.Layer], selection: Any) -> list[int]:
    """The numbers of the `layers` that the argument `layers` of `convert_to_moh` names.

    Args:
        layers: All attention layers, in their order.
        selection: A function of a layer, or one or several names or numbers (see `matches`).
    """
    if callable(selection):
        return [number for number, layer in enumerate(layers) if selection(layer)]
    selectors = selection if isinstance(selection, list | tuple | set) else (selection,)
    numbers: set[int] = set()
    for selector in selectors:
        found = [i for i, layer in enumerate(layers) if matches(selector, i, layer, len(layers))]
        if not found:
            raise invalid_argument(
                "layers", f"names or numbers of attention layers ({_listed(layers)})", selector
            )
        numbers.update(found)
    return sorted(numbers)


def matches(selector: Any, number: int, layer: keras.Layer, count: int) -> bool:
    """Whether `selector` names attention layer `number` of `count`.

    By its number, negative ones from the end; or by names that follow each other in its path, such
    as `"self_attention"`, `"transformer_layer_3"` or `"transformer_layer_3/self_attention"`.
    """
    if isinstance(selector, str):
        return f"/{selector}/" in f"/{layer_path(layer)}/"
    if isinstance(selector, bool):
        return False
    try:
        return operator.index(selector) in (number, number - count)
    except TypeError:
        return False


def check_keys(name: str, budget: Any, layers: Sequence[keras.Layer]) -> None:
    """Refuse keys of the argument `name` that name none of all attention `layers`."""
    unknown = [
        key
        for key in (budget if isinstance(budget, Mapping) else ())
        if not any(matches(key, i, layer, len(layers)) for i, layer in enumerate(layers))
    ]
    if unknown:
        raise invalid_argument(
            name, f"keys that name attention layers ({_listed(layers)})", unknown
        )


def num_heads_of(
    name: str, budget: Any, number: int, layers: Sequence[keras.Layer], num_heads: int
) -> int:
    """What the argument `name`, of value `budget`, says of layer `number`, of `num_heads` heads."""
    layer = layers[number]
    if isinstance(budget, Mapping):
        found = [key for key in budget if matches(key, number, layer, len(layers))]
        if len(found) != 1:
            raise ValueError(
                f"Argument `{name}` must have one key for each layer that is converted. Received: "
                f"{name} with {found or 'no key'} for the layer '{layer_path(layer)}'"
            )
        budget = budget[found[0]]
    elif callable(budget):
        budget = budget(layer)
    return _heads(name, budget, num_heads)


def _heads(name: str, budget: Any, num_heads: int) -> int:
    if isinstance(budget, float | np.floating) and 0 <= budget <= 1:
        return math.floor(budget * num_heads + ROUNDING)
    if not isinstance(budget, bool):
        try:
            heads = operator.index(budget)
        except TypeError:
            heads = -1
        if 0 <= heads <= num_heads:
            return heads
    raise invalid_argument(
        name,
        f"a number of the {num_heads} heads, a share of them between 0.0 and 1.0, or a function or "
        "a dict that gives one for each layer",
        budget,
    )


def layer_path(layer: keras.Layer) -> str:
    """The path of a layer in its model; its name, if it is not built."""
    return layer.path or layer.name


def _listed(layers: Sequence[keras.Layer]) -> str:
    return ", ".join(f"{number}: '{layer_path(layer)}'" for number, layer in enumerate(layers))


Budget = int | float | Callable[[keras.Layer], int | float] | Mapping[str | int, int | float]
