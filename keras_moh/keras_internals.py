"""The three names of Keras's private interface that the package needs, and why.

Masks travel attached to tensors, and Keras hands them to a layer only in some cases (for a layer
called on one tensor it fills an argument called `mask`, which attention layers do not have), so
they have to be read from the tensor. Losses of a call on JAX are kept per `StatelessScope`.
Neither has a public accessor; a new Keras release that moves them breaks this file alone.
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
