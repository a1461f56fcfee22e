"""What the examples of pretrained models share: `examples/common.py`."""

import hashlib
import importlib.util
import zipfile
from pathlib import Path

import pytest

FILE = Path(__file__).parents[1] / "examples" / "common.py"


@pytest.fixture
def common():
    spec = importlib.util.spec_from_file_location("examples_common", FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def pip(common, monkeypatch):
    """In the place of pip: makes the wheel, and counts."""
    calls = []

    def download(command, folder, package):
        calls.append(command)
        with zipfile.ZipFile(folder / "some-1.0-py3-none-any.whl", "w") as archive:
            archive.writestr("some/data/a.bin", b"\x00content")
            archive.writestr("some/b.txt", "other")

    monkeypatch.setattr(common, "run", download)
    return calls


def sha256(content):
    return hashlib.sha256(content).hexdigest()


def test_files_are_fetched_once(common, pip, tmp_path, capsys):
    files = {"some/data/a.bin": sha256(b"\x00content"), "some/b.txt": sha256(b"other")}
    package = common.Package("some==1.0", "pip", files)
    for _ in range(2):
        a, b = common.files_of(package, tmp_path / "data")
        assert (a.name, b.name) == ("a.bin", "b.txt")
        assert (a.read_bytes(), b.read_bytes()) == (b"\x00content", b"other")
    assert len(pip) == 1
    assert pip[0][-1] == "some==1.0"
    assert capsys.readouterr().out == "Fetching some==1.0 with pip\n"


def test_other_files_are_refused(common, pip, tmp_path):
    package = common.Package("some==1.0", "pip", {"some/b.txt": sha256(b"another")})
    with pytest.raises(SystemExit, match=r"some/b.txt of some==1.0 is not the file"):
        common.files_of(package, tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "command", [["no-such-command"], ["python", "-c", "import sys; sys.exit(3)"]]
)
def test_a_failure_says_what_to_do(common, tmp_path, command):
    package = common.Package("some", "apt", {"usr/share/some": ""})
    with pytest.raises(
        SystemExit, match=r"(?s)Could not fetch some: .*usr/share/some may .*--data"
    ):
        common.run(command, tmp_path, package)


def test_seeds_are_summed_up(common):
    assert common.mean_and_range([0.25]) == "0.250"
    assert common.mean_and_range([0.1, 0.4, 0.4], 2) == "0.30 (0.10-0.40)"
    assert common.markdown_table(["a", "bcd"], [["long", "1"], ["x", "2"]]) == (
        "| a    | bcd |\n| :--- | --: |\n| long |   1 |\n| x    |   2 |"
    )
