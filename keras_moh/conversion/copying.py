"""A second model like the first: the same class, config and weights, and none of its objects."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from typing import Any

import keras

from keras_moh.conversion.configs import completed
from keras_moh.conversion.remembering import walk
from keras_moh.keras_internals import all_layers, nodes


def copy_model(model: keras.Model) -> keras.Model:
    """A copy of a built `model`, as from a file: from its config, and then with its weights.

    It is not compiled, unless its constructor compiles it.

    Raises:
        ValueError: if the model has no config that it can be made from, or the copy has other
            layers or weights than the model.
    """
    layers = _all_but_inputs(model)
    # So that classes which are not registered, from a notebook for instance, are found as well.
    classes = {keras.saving.get_registered_name(type(layer)): type(layer) for layer in layers}
    try:
        config = completed(keras.saving.serialize_keras_object(model), layers)
        config.pop("compile_config", None)
        # The lambdas in it, if any, are of the user's own process.
        copy = keras.saving.deserialize_keras_object(
            config, custom_objects=classes, safe_mode=False
        )
    except (AttributeError, NotImplementedError, TypeError) as error:
        raise ValueError(
            f"The model '{model.name}' cannot be copied: it must be one that Keras can save and "
            f"load, with `get_config` and `from_config` of every class. {error}"
        ) from error
    copies = _all_but_inputs(copy)
    if [type(layer) for layer in copies] != [type(layer) for layer in layers]:
        raise _differs(model, copy, f"{len(copies)} layers where the model has {len(layers)}")
    shapes, expected = ([tuple(w.shape) for w in m.weights] for m in (copy, model))
    if shapes != expected:
        raise _differs(model, copy, f"{len(shapes)} weights where the model has {len(expected)}")
    for own, source in zip(copies, layers, strict=True):
        # As a file does it: `Normalization` for one computes with what it makes of its weights.
        stored: dict[str, Any] = {}
        source.save_own_variables(stored)
        # Copies of the arrays as well: on JAX a step of training deletes those that it is given.
        own.load_own_variables({name: keras.ops.copy(value) for name, value in stored.items()})
    for own, source in zip(_with_files(copies), _with_files(layers), strict=True):
        if type(source).__module__.startswith("keras_hub."):
            # Of Llama3Tokenizer neither the files nor the config have the special tokens.
            own.__dict__.update(source.__dict__ | nodes(own))
        else:
            with tempfile.TemporaryDirectory() as folder:
                source.save_assets(folder)
                own.load_assets(folder)
    for layer, like in zip(copies, layers, strict=True):
        if layer.trainable != like.trainable:
            layer.trainable = like.trainable
    return copy


def _all_but_inputs(model: keras.Model) -> list[keras.Layer]:
    """The layers that have anything to copy; an input that models share is several in a copy."""
    return [x for x in all_layers(model) if not isinstance(x, keras.layers.InputLayer)]


def _with_files(layers: Sequence[keras.Layer]) -> list[Any]:
    """The layers with more state than config and weights: vocabularies, and tokenizers.

    A task of keras-hub has its preprocessor as an attribute that Keras does not track on PyTorch.
    """
    preprocessors = [getattr(layer, "preprocessor", None) for layer in layers]
    found = {id(layer): layer for layer in layers}
    for preprocessor in preprocessors:
        if isinstance(preprocessor, keras.Layer):
            found |= {id(layer): layer for _, layer in walk(preprocessor)}
    return [layer for layer in found.values() if hasattr(layer, "save_assets")]


def _differs(model: keras.Model, copy: Any, how: str) -> ValueError:
    return ValueError(
        f"The model '{model.name}' cannot be copied: what its config makes, a "
        f"{type(copy).__name__}, has {how}, or they are others. It must be built, and its config "
        "must say all that it was made of"
    )
