"""What the adapters share: `MoHAttention` in the place of another attention layer.

An adapter is a `MoHAttention` that is called as its source layer was, so that whatever model holds
it need not know. Its config is that of `MoHAttention`: the recipe of the conversion.

In a model, the adapter takes the place of the source *in the same Python object* (`replace`): a
built Keras model refers to a layer from the attributes of its parent, from lists of its own, from
the nodes of its graph and from trackers of the framework, and not all of them can be found.
"""

from __future__ import annotations

import contextlib
import inspect
from typing import Any, ClassVar

import keras

from keras_moh.keras_internals import nodes
from keras_moh.moh_attention import MoHAttention

Names = dict[str, str]


class Adapter(MoHAttention):
    """Base class of the adapters.

    A subclass names its source, says what it cannot be and what a source layer's arguments are, and
    overrides `call` with the source's signature.
    """

    source: ClassVar[str]
    """The source class, as `module.Class`: named, not imported, since keras-hub is optional."""
    renamed: ClassVar[Names] = {}
    """What `MoHAttention` calls an argument that the source's `call` names otherwise."""
    causal_in: ClassVar[frozenset[str]] = frozenset()
    """The classes, as `module.Class`, that never call the source without a causal mask."""

    @classmethod
    def unsupported_reason(cls, layer: keras.Layer) -> str | None:
        """Why the adapter cannot stand for a built `layer` of the source class, or `None`."""
        for projection in projections(layer):
            if projection.quantization_mode is not None:
                return f"its projection '{projection.name}' is quantized: convert before quantizing"
            if projection.lora_enabled:
                return f"its projection '{projection.name}' has LoRA weights: convert before LoRA"
        return None

    @classmethod
    def arguments_of(cls, layer: keras.Layer) -> dict[str, Any]:
        """The arguments of the adapter that say what `layer` is."""
        raise NotImplementedError

    @classmethod
    def shapes_of(cls, layer: keras.Layer) -> tuple[tuple[int | None, ...], ...]:
        """The shapes that the adapter is to be built for: of the query, the value and the key."""
        query, key, value, _ = projections(layer)
        rank = len(query.equation.split(",")[0])
        features = (projection.kernel.shape[0] for projection in (query, value, key))
        return tuple((*[None] * (rank - 1), length) for length in features)

    @classmethod
    def sublayers_of(cls, layer: keras.Layer) -> tuple[keras.Layer, ...]:
        """The sublayers of the source that have weights, in the order of `own_sublayers`."""
        return projections(layer)

    def own_sublayers(self) -> tuple[keras.Layer, ...]:
        """The sublayers that take over weights of the source."""
        return projections(self)

    def take_weights_of(self, layer: keras.Layer) -> None:
        """Take the weights of `layer`, a built layer of the source class."""
        pairs = zip(self.own_sublayers(), self.sublayers_of(layer), strict=True)
        for own, source in pairs:
            for variable, value in zip(own.weights, source.weights, strict=True):
                variable.assign(value)
            own.trainable = source.trainable

    def compute_output_spec(self, *args: Any, **kwargs: Any) -> Any:
        """The symbolic results of a symbolic call."""
        arguments = inspect.signature(self.call).bind(*args, **kwargs).arguments
        arguments = {self.renamed.get(name, name): value for name, value in arguments.items()}
        return super().compute_output_spec(**arguments)


def class_name(layer: Any) -> str:
    """The class of `layer`, as `module.Class`."""
    return f"{type(layer).__module__}.{type(layer).__qualname__}"


def projections(layer: Any) -> tuple[keras.layers.EinsumDense, ...]:
    """The four projections; every source names them as `keras.layers.MultiHeadAttention` does."""
    return (layer._query_dense, layer._key_dense, layer._value_dense, layer._output_dense)


def build_like(adapter: Adapter, layer: keras.Layer, config: dict[str, Any] | None = None) -> None:
    """Build `adapter` for the place of the built `layer`, its weights under the same paths.

    Args:
        adapter: The adapter.
        layer: The source layer.
        config: The adapter's build config, where it was saved. By default it is built for what
            `layer` was built for.
    """
    with contextlib.ExitStack() as scopes:
        for name in layer.path.split("/")[:-1]:
            scopes.enter_context(keras.name_scope(name))
        if config is not None:
            adapter.build_from_config(config)
            return
        adapter.build(*adapter.shapes_of(layer))


def replace(layer: keras.Layer, adapter: Adapter) -> None:
    """Make the object `layer` into the built `adapter`, which is not to be used any more.

    The two objects share one state rather than the one having a copy: a Keras layer holds functions
    that are bound to the object it was made as, its wrapped `build` and `quantize`.
    """
    state = adapter.__dict__
    state.update(nodes(layer))
    object.__setattr__(layer, "__class__", type(adapter))
    object.__setattr__(layer, "__dict__", state)
