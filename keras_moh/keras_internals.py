"""The names of Keras's private interface that the package needs, and why.

Masks travel attached to tensors, and Keras hands them to a layer only in some cases (for a layer
called on one tensor it fills an argument called `mask`, which attention layers do not have), so
they have to be read from the tensor. Losses of a call on JAX are kept per `StatelessScope`.
A conversion puts new state into layers of a copied model, and has to see the model's layers as a
tree. None of this has a public accessor; a new Keras release that moves it breaks this file alone.
"""

from __future__ import annotations

from typing import Any

from keras.src import backend


def attached_mask(x: Any) -> Any:
    """The Keras mask attached to tensor `x`, or `None`."""
    return backend.get_keras_mask(x)


def attach_mask(x: Any, mask: Any) -> None:
    """Attach `mask` to tensor `x`, where the layers after this one find it."""
    backend.set_keras_mask(x, mask)


def current_stateless_scope() -> Any:
    """The innermost `keras.StatelessScope` that is open, or `None`."""
    return backend.get_stateless_scope()


def children(layer: Any) -> list[Any]:
    """The sublayers that `layer` tracks, in the order in which its code or its graph made them."""
    return list(layer._layers)


def all_layers(layer: Any) -> list[Any]:
    """`layer` and those below it, parents first, each once."""
    return list(layer._flatten_layers())


def nodes(layer: Any) -> dict[str, Any]:
    """The attributes that tie `layer` into graphs of functional models."""
    return {name: getattr(layer, name) for name in ("_inbound_nodes", "_outbound_nodes")}


def refresh_variables(layer: Any) -> None:
    """Let a built `layer` take note of variables that changed: on PyTorch it keeps a list."""
    layer._post_build()
