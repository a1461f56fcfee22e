"""The pages of docs/ that use keras-hub run, and print what they say."""

import pytest

from tests.test_docs import KERAS_HUB_PAGES, run_page


@pytest.mark.parametrize("page", KERAS_HUB_PAGES, ids=lambda page: page.name)
def test_page(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run_page(page)


def test_there_is_one():
    assert "converting-keras-hub.md" in [page.name for page in KERAS_HUB_PAGES]
