"""What every test run has in common: it uses the framework it was asked for, and no other."""

import functools
import importlib.util
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import keras
import pytest

from keras_moh import implementations
from keras_moh.implementations import costs
from tests.known_bugs import KNOWN_BUGS

FRAMEWORKS = {"torch", "jax", "tensorflow"}
TESTS = Path(__file__).parent
PACKAGE = TESTS.parent / "keras_moh"
INTEGRATIONS = TESTS / "integrations"

# A TPU is simulated at seconds a call: every run has few tests of that, the session `tpu` has all.
SIMULATES_TPU = os.environ.get("KERAS_MOH_SIMULATE_TPU") == "1"
TELLING_ON_TPU = "|".join(
    [
        r"test_paths_jax_pallas_tpu\.py",
        r"test_options\[.*(mask \(B, 1, T, 1\)|before all keys|no key in the first entry)",
        r"test_shapes\[.*(no query|no key|all heads)",
        r"test_options_in_float64\[.*nothing",
        r"test_named_one_in_a_model\[.*jit",
        r"test_every_implementation_serves",
    ]
)

# No deadline: a first call compiles. On a build server the same examples every time, so that no
# change is blamed for what an older one did; elsewhere new ones, which find more.
hypothesis.settings.register_profile("default", deadline=None)
hypothesis.settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "default")


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the implementations that run from now on, or that graphs are made of."""
    implementations.load_implementations()
    names: list[str] = []

    def recording(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def recorded(*args: Any, **kwargs: Any) -> Any:
            names.append(name)
            return function(*args, **kwargs)

        return recorded

    for name in implementations.IMPLEMENTATIONS.keys() & implementations._loaded:
        module = implementations._loaded[name]
        for function in ("attend", "attend_rows"):
            if hasattr(module, function):
                monkeypatch.setattr(module, function, recording(name, getattr(module, function)))
    return names


@pytest.fixture
def always_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The choice of the first that serves, so that small tests see what large models get.

    But for `fused`, which has no size from which on it pays.
    """
    rule = costs.is_worth_it
    monkeypatch.setattr(
        costs, "is_worth_it", lambda name, spec: name != "fused" or rule(name, spec)
    )
    monkeypatch.setattr(costs, "skips_projections", lambda spec: True)


@pytest.fixture(autouse=True)
def simulated_tpu(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[list[Any]]:
    """A TPU of two cores, simulated, for tests with `jax_pallas_tpu` in their name.

    Its memory is full of NaN at first. What the cores read and write is recorded, by kernel.
    """
    records: list[Any] = []
    if "jax_pallas_tpu" not in request.node.nodeid or keras.backend.backend() != "jax":
        yield records
        return
    from jax._src.pallas.mosaic.interpret import interpret_pallas_call as simulator
    from jax.experimental.pallas import tpu

    from keras_moh.implementations import jax_pallas_tpu

    # One thread waits for the cores, which need others.
    assert os.environ.get("NPROC") != "1", "a simulated TPU would wait for ever"
    record = simulator.RaceDetectionState
    monkeypatch.setattr(
        *(simulator, "RaceDetectionState"), lambda **x: records.append(record(**x)) or records[-1]
    )
    monkeypatch.setattr(jax_pallas_tpu, "_DEVICES", ("tpu", "cpu"))
    with tpu.force_tpu_interpret_mode(
        tpu.InterpretParams(detect_races=True, num_cores_or_threads=2)
    ):
        yield records
    tpu.reset_tpu_interpret_mode_state()
    races = [record.races_found for record in records]
    assert not any(races)


@pytest.fixture(autouse=True)
def checked_addresses(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests with `torch_triton` in their name, whose kernels Triton interprets."""
    if "torch_triton" in request.node.nodeid and all(map(is_installed, ("torch", "triton"))):
        from tests.torch_triton_addresses import check_addresses

        check_addresses(monkeypatch)


def is_installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def pytest_configure(config: pytest.Config) -> None:
    """Refuse a run on the wrong framework: it would pass, and say nothing of the right one."""
    expected = os.environ.get("KERAS_MOH_EXPECTED_BACKEND")
    if expected is not None:
        backend = keras.backend.backend()
        if backend != expected:
            raise pytest.UsageError(f"these tests are for {expected}, but Keras uses {backend}")
        # keras-hub brings TensorFlow along on every backend: its tests have their own session.
        allowed = "KERAS_MOH_OTHERS_ALLOWED" in os.environ
        others = sorted(filter(is_installed, FRAMEWORKS - {expected}))
        if others and not allowed:
            raise pytest.UsageError(
                f"these tests are for {expected} alone, but installed are also {', '.join(others)}"
            )

    # Doctests import every module, and one that is named after a framework imports that framework.
    ignored = [*modules_out_of_reach(), *([] if is_installed("keras_hub") else [INTEGRATIONS])]
    config.option.ignore = [*(config.option.ignore or []), *map(str, ignored)]


def modules_out_of_reach() -> list[Path]:
    """The package's modules, and what tests share, that import what is not installed."""
    absent = {name for name in {*FRAMEWORKS, "triton"} if not is_installed(name)}
    shared = [path for path in TESTS.glob("*.py") if not path.name.startswith("test_")]
    return [path for path in [*PACKAGE.rglob("*.py"), *shared] if absent & {*path.stem.split("_")}]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark what is known to fail, and leave out what another process is for.

    JAX has float64 in a whole process or not at all, and so is Triton interpreted, or it compiles.
    """
    for item in items:
        for backend, pattern, reason in KNOWN_BUGS:
            if backend == keras.backend.backend() and re.search(pattern, item.nodeid):
                item.add_marker(pytest.mark.xfail(reason=reason, strict=True))
    kept, left_out = [], []
    for item in items:
        (kept if belongs_here(item) else left_out).append(item)
    items[:] = kept
    config.hook.pytest_deselected(items=left_out)


def belongs_here(item: pytest.Item) -> bool:
    """Whether the test is one of those that this process is for."""
    if keras.backend.backend() == "jax":
        return belongs_here_on_jax(item)
    if keras.backend.backend() == "torch":
        needs_interpreter = "torch_triton" in item.nodeid
        return needs_interpreter == (os.environ.get("TRITON_INTERPRET") == "1")
    return True


def belongs_here_on_jax(item: pytest.Item) -> bool:
    import jax

    if "jax_triton" in item.nodeid:  # Without a GPU it has tests of its own only, interpreted.
        interprets = os.environ.get("TRITON_INTERPRET") == "1"
        return interprets and "test_paths_jax_triton.py" in item.nodeid
    needs_float64 = item.get_closest_marker("float64") is not None
    if needs_float64 != jax.config.jax_enable_x64:
        return False
    of_tpu = "jax_pallas_tpu" in item.nodeid
    if SIMULATES_TPU:
        return of_tpu or "pallas_builds" in item.nodeid
    return not of_tpu or re.search(TELLING_ON_TPU, item.nodeid) is not None
