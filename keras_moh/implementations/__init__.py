"""The ways to compute `routed_attention`, and the choice among them.

The table names each implementation with the one backend that it needs (`None`: any) and its module,
in order of preference. A module has two functions:

- `unsupported_reason(spec) -> str | None`: why it cannot serve a call of this `AttentionSpec`, in
  words for an error message, or `None` if it can. It is cheap, and looks at nothing but the spec.
- `attend(query, key, value, heads, gates, options)`: the computation, as `reference.attend`
  describes it, with `None` for the scores if it does not keep them.

One that can take its queries, and leave its outputs, as rows of only the heads taken has a function
`attend_rows` as well. Where a backend has a module of rows (see `torch_rows.py`), the projections
into and out of the heads are left out for the heads that were not taken.

What to run is decided before the call, by data that can be printed, never by trying: the first of
the table that can serve the call, and that `costs.py` expects to be worth it. Modules are imported
when they are first asked, so that one backend's code never imports another's.
"""

from __future__ import annotations

import importlib
from typing import Any

import keras

from keras_moh.errors import UnsupportedError, invalid_argument
from keras_moh.implementations import costs
from keras_moh.implementations.spec import AttentionSpec

IMPLEMENTATIONS: dict[str, tuple[str | None, str]] = {
    "torch_triton": ("torch", "keras_moh.implementations.torch_triton"),
    "torch_sdpa": ("torch", "keras_moh.implementations.torch_sdpa"),
    "jax_triton": ("jax", "keras_moh.implementations.jax_triton"),
    "jax_pallas_tpu": ("jax", "keras_moh.implementations.jax_pallas_tpu"),
    "jax_xla": ("jax", "keras_moh.implementations.jax_xla"),
    "tensorflow_xla": ("tensorflow", "keras_moh.implementations.tensorflow_xla"),
    "compact": (None, "keras_moh.implementations.compact"),
    "fused": (None, "keras_moh.implementations.fused"),
    "reference": (None, "keras_moh.implementations.reference"),
}

# Modules that project only the heads taken, by backend.
ROWS = {
    "tensorflow": "keras_moh.implementations.tensorflow_rows",
    "torch": "keras_moh.implementations.torch_rows",
}


def check_implementation(implementation: Any) -> str | None:
    """`implementation` if it is `None` or a name of the table, of whichever backend."""
    named = isinstance(implementation, str) and implementation in IMPLEMENTATIONS
    if implementation is not None and not named:
        names = ", ".join(f"'{name}'" for name in IMPLEMENTATIONS)
        raise invalid_argument("implementation", f"None or one of {names}", implementation)
    return implementation


_loaded: dict[str, Any] = {}


def load_implementations() -> None:
    """Import the modules that this backend may use, which `torch.compile` cannot do in a graph."""
    for name, (backend, module) in IMPLEMENTATIONS.items():
        if backend in (None, keras.backend.backend()) and name not in _loaded:
            _loaded[name] = importlib.import_module(module)
    backend = keras.backend.backend()
    if "device" not in _loaded:
        _loaded["device"] = importlib.import_module(f"{__name__}.{backend}_device")
    if backend in ROWS and "rows" not in _loaded:
        _loaded["rows"] = importlib.import_module(ROWS[backend])


def describe_device(x: Any) -> tuple[str, bool]:
    """The kind of device that holds `x`, and whether it is traced: see `AttentionSpec`."""
    if "device" not in _loaded:
        load_implementations()
    return _loaded["device"].describe(x)


def rows_of_projections(implementation: Any, spec: AttentionSpec) -> Any:
    """The module of rows to project only the heads taken with, or `None` to project all.

    A traced graph does not know how many rows a head has.
    """
    rows = _loaded.get("rows")
    takes_rows = hasattr(implementation, "attend_rows") and not spec.is_traced
    return rows if rows and takes_rows and costs.skips_projections(spec) else None


def _load(name: str, spec: AttentionSpec) -> tuple[Any, str | None]:
    """The module of that name, and why it cannot serve `spec`."""
    backend, _ = IMPLEMENTATIONS[name]
    if backend is not None and backend != keras.backend.backend():
        return None, f"it needs the backend '{backend}'"
    if name not in _loaded:
        load_implementations()
    return _loaded[name], _loaded[name].unsupported_reason(spec)


def choose_implementation(spec: AttentionSpec, name: str | None = None) -> Any:
    """The module to serve `spec`: the one of that name, or else the fastest that can.

    Raises:
        UnsupportedError: if the named one cannot serve the call, with its reason.
    """
    for candidate in IMPLEMENTATIONS if name is None else (name,):
        implementation, reason = _load(candidate, spec)
        if reason is None and (name is not None or costs.is_worth_it(candidate, spec)):
            return implementation
    raise UnsupportedError(
        f"implementation='{candidate}' cannot serve this call on the backend "
        f"'{keras.backend.backend()}': {reason}. "
        "With implementation=None one that can is chosen. "
        f"Received: {spec}"
    )
