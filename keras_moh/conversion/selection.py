"""Which layers to convert, and how many of their heads to keep: what a user may say, resolved."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np

from keras_moh.errors import invalid_argument

# So that 0.7 of 10 heads, which is 7.000000000000001 or 6.999999999999999, is 7.
ROUNDING = 1e-6


class Found(NamedTuple):
    """An attention layer of a model."""

    layer: keras.Layer
    names: str
    """Those of the layers that it is in, outermost first, and its own, as a path.

    The layer's own path begins where it was built: a model called in another is not in it.
    """


def selected(found: Sequence[Found], selection: Any) -> list[int]:
    """The numbers of the layers that the argument `layers` of `convert_to_moh` names.

    Args:
        found: All attention layers, in their order.
        selection: A function of a layer, or one or several names or numbers (see `matches`).
    """
    if callable(selection):
        return [number for number, (layer, _) in enumerate(found) if selection(layer)]
    several = isinstance(selection, Iterable) and not isinstance(selection, str)
    selectors = selection if several else (selection,)
    numbers: set[int] = set()
    for selector in selectors:
        named = [number for number in range(len(found)) if matches(selector, number, found)]
        if not named:
            raise invalid_argument(
                "layers", f"names or numbers of attention layers ({_listed(found)})", selector
            )
        numbers.update(named)
    return sorted(numbers)


def matches(selector: Any, number: int, found: Sequence[Found]) -> bool:
    """Whether `selector` names attention layer `number`.

    By its number, negative ones from the end; or by names that follow each other in its path, such
    as `"self_attention"`, `"transformer_layer_3"` or `"transformer_layer_3/self_attention"`.
    """
    if isinstance(selector, str):
        layer, names = found[number]
        return any(f"/{selector}/" in f"/{path}/" for path in (layer_path(layer), names))
    if isinstance(selector, bool):
        return False
    try:
        return operator.index(selector) in (number, number - len(found))
    except TypeError:
        return False


def check_keys(name: str, budget: Any, found: Sequence[Found]) -> None:
    """Refuse keys of the argument `name` that name none of all attention layers."""
    unknown = [
        key
        for key in (budget if isinstance(budget, Mapping) else ())
        if not any(matches(key, number, found) for number in range(len(found)))
    ]
    if unknown:
        raise invalid_argument(name, f"keys that name attention layers ({_listed(found)})", unknown)


def num_heads_of(
    name: str, budget: Any, number: int, found: Sequence[Found], num_heads: int
) -> int:
    """What the argument `name`, of value `budget`, says of layer `number`, of `num_heads` heads."""
    layer = found[number].layer
    if isinstance(budget, Mapping):
        keys = [key for key in budget if matches(key, number, found)]
        if len(keys) != 1:
            raise ValueError(
                f"Argument `{name}` must have one key for each layer that is converted. Received: "
                f"{name} with {keys or 'no key'} for the layer '{layer_path(layer)}'"
            )
        budget = budget[keys[0]]
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


def _listed(found: Sequence[Found]) -> str:
    return ", ".join(f"{number}: '{layer_path(layer)}'" for number, (layer, _) in enumerate(found))


Budget = int | float | Callable[[keras.Layer], int | float] | Mapping[str | int, int | float]
