"""JAX: where an array lives, and whether its values can be read."""

from typing import Any

import jax


def describe(x: Any) -> tuple[str, bool]:
    """The kind of device, and whether `x` is traced."""
    if isinstance(x, jax.core.Tracer):
        return jax.default_backend(), True
    return next(iter(x.devices())).platform, False
