"""The notebooks in a real JupyterLab page, in Debian's chromium, in light and dark; pictures go to runs/screenshots."""

from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_notebook

pytestmark = pytest.mark.browser

ROOT = Path(__file__).parent.parent
SHOTS = ROOT / "runs" / "screenshots"
THEMES = pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])


@pytest.fixture(scope="module")
def empty(tmp_path_factory):
    path = tmp_path_factory.mktemp("empty") / "empty.ipynb"
    kernel = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
    nbformat.write(new_notebook(cells=[new_code_cell("print('empty: done')")], metadata=kernel), path)
    return path


@pytest.fixture(scope="module")
def opened(tmp_path_factory, empty):
    """A function that opens a notebook in the one JupyterLab."""
    from lab_page import LabPage, chromium, jupyter_lab

    home = tmp_path_factory.mktemp("lab")
    with jupyter_lab([ROOT / "notebooks", empty.parent], home, LABKIT_QUICK="1") as server, chromium() as browser:
        pages = []

        def open(notebook: Path, **kwargs):
            pages.append(LabPage.open(browser, server, notebook, **kwargs))
            return pages[-1]

        yield open


@pytest.fixture(scope="module")
def usual(opened, empty):
    """What the console says of an empty notebook."""
    page = opened(empty)
    page.run_all("empty: done")
    return set(page.said)


@THEMES
def test_start_here(opened, usual, dark):
    page = opened(ROOT / "notebooks" / "00_start_here.ipynb", dark=dark)
    page.run_all("00_start_here: done")
    page.shots(SHOTS, f"00_start_here-{'dark' if dark else 'light'}")
    assert set(page.said) <= usual, page.said
    assert page.page.get_by_text("same text").count() >= 1
