"""Layers and models that remember, when saved, that attention in them was converted.

A layer's config says how to make the layer. Where a layer makes its attention itself, in its
`build` or from a number of layers, its config knows nothing of a conversion: saved and loaded, or
cloned, it would silently have its old attention again. So such a layer is given a subclass of its
class (`Remembering`), whose config is the old one and the adapters, and which converts again on
`from_config`, before weights are loaded.

A layer whose config holds those of the layers in it (functional models, `Sequential`, wrappers,
tasks of keras-hub with their backbone) needs none of this, and keeps its class.
"""

from __future__ import annotations

import collections
import functools
from collections.abc import Iterator
from typing import Any

import keras

from keras_moh.conversion.adapter import Adapter, build_like, class_name, replace
from keras_moh.conversion.configs import left_out
from keras_moh.keras_internals import children, refresh_variables

Path = tuple[str, ...]
"""The way from a layer down to one in it, by classes and numbers: `("Block:1", "Attention:0")`.

A layer's names change from process to process where nobody gave one, and the order of layers of
different classes from backend to backend.
"""


@keras.saving.register_keras_serializable(package="keras_moh")
class Remembering(keras.Layer):
    """What the class of a layer is mixed with, so that its config carries the adapters in it.

    Example:
    >>> import keras, keras_moh
    >>> @keras.saving.register_keras_serializable("my_package")
    ... class Block(keras.layers.Layer):
    ...     def build(self, shape):
    ...         self.attention = keras.layers.MultiHeadAttention(num_heads=4, key_dim=2)
    ...         self.attention.build(shape, shape)
    ...     def call(self, x):
    ...         return x + self.attention(x, x)
    >>> model = keras.Sequential([keras.Input((3, 8)), Block(name="block")])
    >>> new_model, report = keras_moh.convert_to_moh(model, num_shared_heads=1, top_k=1)
    >>> type(new_model.layers[0]).__name__, isinstance(new_model.layers[0], Block)
    ('MoHBlock', True)
    >>> again = keras.models.clone_model(new_model)
    >>> type(again.layers[0].attention).__name__
    'MoHMultiHeadAttention'
    """

    def get_config(self) -> dict[str, Any]:
        """The config of the layer as it was, and the adapters in it."""
        source = source_class(self)
        config = super().get_config()
        return {
            "source": {
                "module": source.__module__,
                "class_name": source.__name__,
                "registered_name": keras.saving.get_registered_name(source),
                "config": {**config, **left_out(self, source, config)},
                "build_config": self.get_build_config(),
            },
            "adapters": [
                {"path": "/".join(path), "adapter": keras.saving.serialize_keras_object(layer)}
                for path, layer in walk(self)
                if isinstance(layer, Adapter)
            ],
        }

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Any:
        """The layer as it was, converted again.

        Raises:
            ValueError: if the layer made from the old config is not the one that was converted.
        """
        layer = keras.saving.deserialize_keras_object(config["source"])
        at = dict(walk(layer))
        for entry in config["adapters"]:
            found = at.get(tuple(entry["path"].split("/")))
            if not isinstance(found, Adapter):  # else it came with its parent's config
                restore(layer, found, entry["adapter"])
        remember(layer)
        return layer

    def __reduce__(self) -> Any:
        """As Keras pickles every model and layer, by its file; a class made here has no name."""
        _, file = super().__reduce__()
        return Remembering._unpickle_model, file


def restore(layer: keras.Layer, found: keras.Layer | None, config: dict[str, Any]) -> None:
    """Put the adapter of a serialized `config` in the place of `found`, which is in `layer`."""
    unbuilt = {key: value for key, value in config.items() if key != "build_config"}
    adapter = keras.saving.deserialize_keras_object(unbuilt)
    if found is None or class_name(found) != adapter.source:
        raise ValueError(
            f"The config of the converted layer '{layer.name}' does not fit: a layer of the class "
            f"{adapter.source} was converted where there is now "
            f"{'none' if found is None else class_name(found)}. Was it saved with another version "
            f"of {adapter.source.split('.')[0]}?"
        )
    if found.built:  # else its own parent calls it first, and so builds it
        build_like(adapter, found, config["build_config"])
    replace(found, adapter)


def walk(layer: keras.Layer) -> Iterator[tuple[Path, keras.Layer]]:
    """All layers below `layer`, parents first, each once, with their paths; none in an adapter."""
    seen: set[int] = set()

    def below(parent: keras.Layer, path: Path) -> Iterator[tuple[Path, keras.Layer]]:
        numbers: collections.Counter[str] = collections.Counter()
        for child in children(parent):
            name = _source_name(child)
            at = (*path, f"{name}:{numbers[name]}")
            numbers[name] += 1
            if id(child) in seen:
                continue
            seen.add(id(child))
            yield at, child
            if not isinstance(child, Adapter):
                yield from below(child, at)

    return below(layer, ())


def parent(model: keras.Layer, layer: keras.Layer) -> keras.Layer:
    """The layer that has `layer`, one below `model`, among its sublayers."""
    at = {(): model, **dict(walk(model))}
    return next(at[path[:-1]] for path, found in at.items() if found is layer)


def remember(layer: keras.Layer) -> set[int]:
    """Let `layer`, and each layer in it that needs to, remember the adapters below it.

    Returns:
        The outermost layers, by `id`, whose configs say that they were converted: `layer` or what
        is in it; none where nothing was.
    """
    if isinstance(layer, Adapter):
        return {id(layer)}
    converted: set[int] = set()
    converted.update(*(remember(child) for child in children(layer)))
    if not converted:
        return converted
    refresh_variables(layer)
    if isinstance(layer, Remembering):
        return {id(layer)}
    if _count_converted(_config(layer)) >= len(converted):
        return converted
    source: Any = type(layer)
    object.__setattr__(layer, "__class__", remembering_class(source))
    return {id(layer)}


def _source_name(layer: keras.Layer) -> str:
    """The name of the class of `layer` before it was converted, if it was."""
    if isinstance(layer, Adapter):
        return layer.source.rsplit(".", 1)[1]
    return source_class(layer).__name__


def source_class(layer: keras.Layer) -> Any:
    """The class that a layer, or that of a remembering one, is an instance of."""
    return type(layer).__mro__[2] if isinstance(layer, Remembering) else type(layer)


@functools.cache
def remembering_class(source: Any) -> Any:
    """The subclass of `source` that remembers.

    It is saved under the name of `Remembering`, by which a new process finds what loads it.
    """
    namespace = {"__module__": __name__, "__doc__": f"A converted `{source.__name__}`."}
    cls = type(f"MoH{source.__name__}", (Remembering, source), namespace)
    register = keras.saving.register_keras_serializable(package="keras_moh", name="Remembering")
    register(cls)  # its name ...
    register(Remembering)  # ... and the class that the name stands for, as before
    return cls


def _config(layer: keras.Layer) -> Any:
    """The config of `layer`, or `None` if it has none of its own, as some of keras-hub's."""
    try:
        return layer.get_config()
    except (AttributeError, NotImplementedError):
        return None


def _count_converted(config: Any) -> int:
    """How many outermost configs of converted layers there are in `config`."""
    if isinstance(config, dict):
        name = config.get("registered_name")
        if name is not None:
            found = keras.saving.get_registered_object(name)
            if isinstance(found, type) and issubclass(found, Adapter | Remembering):
                return 1
        return sum(map(_count_converted, config.values()))
    if isinstance(config, list | tuple):
        return sum(map(_count_converted, config))
    return 0
