"""Configs of keras-hub's layers that do not say all that the constructor was told.

`LlamaBackbone` of keras-hub 0.32 keeps `tie_word_embeddings` out of its config: such a model, as
SmolLM2 is one, cannot be made again from it. Constructors there keep their arguments as attributes
of the same name, from which the config is completed.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import keras


def left_out(layer: keras.Layer, source: type, config: dict[str, Any]) -> dict[str, Any]:
    """The arguments of the constructor of `source` that `layer` has, and its `config` has not."""
    if not source.__module__.startswith("keras_hub."):
        return {}
    values = {
        name: (getattr(layer, name, parameter.default), parameter.default)
        for name, parameter in inspect.signature(source).parameters.items()
        if name not in config and parameter.default is not parameter.empty
    }
    return {
        name: value
        for name, (value, default) in values.items()
        if value != default and isinstance(value, bool | int | float | str)
    }


def completed(serialized: Any, layers: Sequence[keras.Layer]) -> Any:
    """A serialized config with what the configs in it leave out of `layers`, found by name."""
    if isinstance(serialized, list | tuple):
        return [completed(item, layers) for item in serialized]
    if not isinstance(serialized, dict):
        return serialized
    result = {key: completed(value, layers) for key, value in serialized.items()}
    config = result.get("config")
    if isinstance(config, dict):
        for layer in layers:
            is_it = layer.name == config.get("name") and (
                keras.saving.get_registered_name(type(layer)) == result.get("registered_name")
            )
            if is_it:
                result["config"] = {**config, **left_out(layer, type(layer), config)}
    return result
