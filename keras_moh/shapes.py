"""Static shapes: comparisons that let unknown lengths (`None`) pass, and the layer's inputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from keras_moh.errors import integer, invalid_argument


def check_shape(name: str, shape: Any) -> tuple[int | None, ...] | None:
    """`shape` as a tuple of integers and `None`; `None` itself is passed through."""
    try:
        return (
            shape
            if shape is None
            else tuple(None if length is None else integer(name, length, 0) for length in shape)
        )
    except (TypeError, ValueError):
        expected = "a tuple of integers of at least 0, or None where a length is unknown"
        raise invalid_argument(name, expected, shape) from None


def same_length(expected: int | None, received: int | None) -> bool:
    """Whether two static dimensions agree; an unknown one (`None`) agrees with every length."""
    return expected is None or received is None or expected == received


def same_shape(expected: Sequence[int | None], received: Sequence[int | None]) -> bool:
    """Whether two static shapes agree, as far as their dimensions are known."""
    return len(expected) == len(received) and all(map(same_length, expected, received))


def broadcasts_to(received: Sequence[int | None], target: Sequence[int | None]) -> bool:
    """Whether a shape of the same rank broadcasts to `target`, as far as both are known."""
    return len(received) == len(target) and all(
        length == 1 or same_length(length, wanted)
        for length, wanted in zip(received, target, strict=True)
    )


def input_shapes(query_shape: Any, value_shape: Any, key_shape: Any) -> tuple[Any, Any, Any]:
    """The shapes as tuples, the value's defaulting to the query's, the key's to the value's."""
    if value_shape is None and key_shape is not None:
        raise ValueError(
            "Argument `value` is required where `key` is given. Received: no value and a key of "
            f"shape {tuple(key_shape)}"
        )
    query_shape = tuple(query_shape)
    value_shape = query_shape if value_shape is None else tuple(value_shape)
    key_shape = value_shape if key_shape is None else tuple(key_shape)
    if not same_shape(value_shape[:-1], key_shape[:-1]):
        raise ValueError(
            "All dimensions of `value` and `key`, except the last one, must be equal. Received: "
            f"value_shape={value_shape} and key_shape={key_shape}"
        )
    return query_shape, value_shape, key_shape


def check_input_shapes(
    query_shape: Any, value_shape: Any, key_shape: Any, outer_axes: tuple[int, ...]
) -> None:
    """Check that the shapes of inputs are complete, and agree in the axes not attended over."""
    for name, shape in (("query", query_shape), ("value", value_shape), ("key", key_shape)):
        if len(shape) < 3 or not shape[-1]:
            raise ValueError(
                f"Argument `{name}` must have rank 3 or more and a known, positive number of "
                f"features. Received: {name}_shape={shape}"
            )
        if len(shape) != len(query_shape):
            raise ValueError(
                f"Argument `{name}` must have the rank of `query`. Received: "
                f"{name}_shape={shape} with query_shape={query_shape}"
            )
    for axis in (0, *outer_axes):
        if not same_length(query_shape[axis], value_shape[axis]):
            raise ValueError(
                "All dimensions of `query` and `value` that are not attended over, except the last "
                f"one, must be equal. Received: query_shape={query_shape} and "
                f"value_shape={value_shape}"
            )
