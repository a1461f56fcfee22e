"""How each framework makes a program out of a computation: a function that runs it to its end.

The module of a framework has

- `MODES`: the ways to compile, the names of which go into the results;
- `forward(call, inputs, variables, mode)`: the program that returns the outputs of `call(*inputs)`,
  where `call` uses the Keras variables `variables`;
- `training_step(call, inputs, variables, cotangents, mode)`: the program that returns these outputs
  and then the gradients by all inputs and variables of the outputs times the `cotangents`. Those
  are random: a compiler could shorten the gradient of a plain sum;
- `bare_attention(query, key, value)`: attention of one head, `(T, d)`, `(S, d)` and `(S, dv)`, the
  fastest way that is known in this framework, for the roofline.

Outputs may be a tensor or a list of them. Programs return flat lists of tensors.
"""

from __future__ import annotations

import importlib
from types import ModuleType

import keras


def load_backend() -> ModuleType:
    """The module of the framework that Keras uses."""
    return importlib.import_module(f"{__name__}.{keras.backend.backend()}_programs")
