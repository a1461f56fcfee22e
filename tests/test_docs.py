"""Every ```python block of the README and of the pages in docs/ runs, and prints what it says."""

import contextlib
import doctest
import io
import os
import re
import textwrap
from pathlib import Path
from unittest import mock

import pytest

ROOT = Path(__file__).parents[1]
EVERY_PAGE = [
    ROOT / "README.md",
    *sorted(page for page in (ROOT / "docs").rglob("*.md") if "```python" in page.read_text()),
]
# Those that need keras-hub run in `integrations/`, where it is.
KERAS_HUB_PAGES = [page for page in EVERY_PAGE if "import keras_hub" in page.read_text()]
PAGES = [page for page in EVERY_PAGE if page not in KERAS_HUB_PAGES]
# A block of Python and, where a ```text block follows it at once, what it prints.
BLOCK = re.compile(
    r"^(?P<indent> *)```python\n(?P<code>.*?)^(?P=indent)```\n"
    r"(?:\n*(?P=indent)```text\n(?P<printed>.*?)^(?P=indent)```\n)?",
    re.DOTALL | re.MULTILINE,
)
prints = doctest.OutputChecker()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_page(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run_page(page)


def run_page(page: Path) -> None:
    """A page is one script: its blocks share their names, and write into the current folder."""
    text, namespace = page.read_text(), {"__name__": "__main__"}
    with mock.patch.dict(os.environ):
        for block in BLOCK.finditer(text):
            line = text.count("\n", 0, block.start("code"))
            # Behind empty lines, so that a traceback names the line of the page.
            code = compile("\n" * line + textwrap.dedent(block["code"]), str(page), "exec")
            with contextlib.redirect_stdout(io.StringIO()) as output:
                exec(code, namespace)
            if block["printed"] is not None:
                expected = textwrap.dedent(block["printed"])
                assert prints.check_output(
                    expected, output.getvalue(), doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
                ), f"{page}:{line}: printed\n{output.getvalue()}instead of\n{expected}"


def test_no_block_is_missed():
    for page in EVERY_PAGE:
        found = len(BLOCK.findall(page.read_text()))
        assert found == page.read_text().count("```python") > 0, page
