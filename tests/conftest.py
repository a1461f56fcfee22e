"""What every test run has in common: it uses the framework it was asked for, and no other."""

import importlib.util
import os
import re
from pathlib import Path

import hypothesis
import keras
import pytest

from tests.known_bugs import KNOWN_BUGS

FRAMEWORKS = {"torch", "jax", "tensorflow"}
PACKAGE = Path(__file__).parents[1] / "keras_moh"

# No deadline: a first call compiles. On a build server the same examples every time, so that no
# change is blamed for what an older one did; elsewhere new ones, which find more.
hypothesis.settings.register_profile("default", deadline=None)
hypothesis.settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "default")


def is_installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def pytest_configure(config: pytest.Config) -> None:
    """Refuse a run on the wrong framework: it would pass, and say nothing of the right one."""
    expected = os.environ.get("KERAS_MOH_EXPECTED_BACKEND")
    if expected is not None:
        backend = keras.backend.backend()
        if backend != expected:
            raise pytest.UsageError(f"these tests are for {expected}, but Keras uses {backend}")
        others = sorted(filter(is_installed, FRAMEWORKS - {expected}))
        if others:
            raise pytest.UsageError(
                f"these tests are for {expected} alone, but installed are also {', '.join(others)}"
            )

    # Doctests import every module, and one that is named after a framework imports that framework.
    config.option.ignore = [*(config.option.ignore or []), *map(str, modules_out_of_reach())]


def modules_out_of_reach() -> list[Path]:
    """The package's modules that import a framework which is not installed."""
    absent = {name for name in {*FRAMEWORKS, "triton"} if not is_installed(name)}
    return [path for path in PACKAGE.rglob("*.py") if absent & set(path.stem.split("_"))]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark what is known to fail, and on JAX leave out what another process is for.

    JAX has float64 in a whole process or not at all.
    """
    for item in items:
        for backend, pattern, reason in KNOWN_BUGS:
            if backend == keras.backend.backend() and re.search(pattern, item.nodeid):
                item.add_marker(pytest.mark.xfail(reason=reason, strict=True))
    if keras.backend.backend() != "jax":
        return
    import jax

    kept, left_out = [], []
    for item in items:
        needs_float64 = item.get_closest_marker("float64") is not None
        (kept if needs_float64 == jax.config.jax_enable_x64 else left_out).append(item)
    items[:] = kept
    config.hook.pytest_deselected(items=left_out)
