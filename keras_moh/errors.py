"""The package's error type and the checks of arguments that several modules share.

A bad argument is refused at the earliest moment, in one line that names the argument, what is
valid, and what was received. Every check returns the value in its canonical form, so that a
constructor reads as a list of ``self.x = check("x", x)``.
"""

from __future__ import annotations

import operator
from types import ModuleType
from typing import Any

import keras


class UnsupportedError(ValueError):
    """An implementation of `routed_attention` was asked for by name but cannot serve the call."""


def invalid_argument(name: str, expected: str, value: Any) -> ValueError:
    """The error for argument `name`, which should have been `expected` and was `value`."""
    received = " ".join(repr(value).split())  # arrays have lines of their own
    return ValueError(
        f"Invalid value for argument `{name}`: expected {expected}. Received: {name}={received}"
    )


def integer(name: str, value: Any, minimum: int) -> int:
    """`value` as an int of at least `minimum`; booleans and floats are refused."""
    expected = "a positive integer" if minimum == 1 else f"an integer of at least {minimum}"
    if isinstance(value, bool):
        raise invalid_argument(name, expected, value)
    try:
        number = operator.index(value)
    except TypeError:
        raise invalid_argument(name, expected, value) from None
    if number < minimum:
        raise invalid_argument(name, expected, value)
    return number


def optional_integer(name: str, value: Any, minimum: int) -> int | None:
    """As `integer`, with `None` passed through."""
    return None if value is None else integer(name, value, minimum)


def boolean(name: str, value: Any) -> bool:
    """`value` if it is `True` or `False`."""
    if not isinstance(value, bool):
        raise invalid_argument(name, "True or False", value)
    return value


def number_in(name: str, value: Any, minimum: float, below: float = float("inf")) -> float:
    """`value` as a finite float with ``minimum <= value < below``."""
    expected = (
        f"a finite number of at least {minimum:g}"
        if below == float("inf")
        else f"a number in [{minimum:g}, {below:g})"
    )
    if isinstance(value, (bool, str)):
        raise invalid_argument(name, expected, value)
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise invalid_argument(name, expected, value) from None
    # Written so that a NaN, which compares false with everything, is refused as well.
    if not minimum <= number < below:
        raise invalid_argument(name, expected, value)
    return number


def _keras_object(module: ModuleType, name: str, value: Any) -> Any:
    """What `module.get` makes of `value`, Keras's own error being of unnamed arguments."""
    try:
        return module.get(value)
    except (TypeError, ValueError) as error:
        kind = module.__name__.rsplit(".", 1)[-1]
        raise invalid_argument(name, f"what `keras.{kind}.get` takes", value) from error


def initializer(name: str, value: Any) -> Any:
    """The `keras.initializers.Initializer` that `value` names, configures or is."""
    return _keras_object(keras.initializers, name, value)


def regularizer(name: str, value: Any) -> Any:
    """The `keras.regularizers.Regularizer` that `value` names, configures or is, or `None`."""
    return _keras_object(keras.regularizers, name, value)


def constraint(name: str, value: Any) -> Any:
    """The `keras.constraints.Constraint` that `value` names, configures or is, or `None`."""
    return _keras_object(keras.constraints, name, value)
