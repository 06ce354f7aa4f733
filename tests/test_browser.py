"""The notebooks in a real JupyterLab page, in Debian's chromium, in light and dark; pictures go to runs/screenshots."""

from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_notebook

pytestmark = pytest.mark.browser

ROOT = Path(__file__).parent.parent
SHOTS = ROOT / "runs" / "screenshots"
THEMES = pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])


def written(path, *cells):
    kernel = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
    sentinel = f"print('{path.stem}: done')"
    nbformat.write(new_notebook(cells=[new_code_cell(c) for c in (*cells, sentinel)], metadata=kernel), path)
    return path


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return tmp_path_factory.mktemp("made")


@pytest.fixture(scope="module")
def empty(made):
    return written(made / "empty.ipynb")


@pytest.fixture(scope="module")
def broken(made):
    return written(made / "broken.ipynb", BROKEN)


@pytest.fixture(scope="module")
def restarted(made):
    return written(made / "restarted.ipynb", EXPLORER)


@pytest.fixture(scope="module")
def opened(tmp_path_factory, made, empty, broken, restarted):
    """A function that opens a notebook in the one JupyterLab."""
    from lab_page import LabPage, chromium, jupyter_lab

    home = tmp_path_factory.mktemp("lab")
    with jupyter_lab([ROOT / "notebooks", made], home, LABKIT_QUICK="1") as server, chromium() as browser:
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


STATUS = "words => new RegExp(words).test(document.querySelector('.labkit-status')?.innerText ?? '')"


def wait_for_status(page, words):
    page.wait_for_function(STATUS, arg=words, timeout=30_000)


@THEMES
def test_exit_layer(opened, usual, dark):
    """Dragging the exit slider changes strip and table; Cancel ends a run."""
    opened_page = opened(ROOT / "notebooks" / "01_exit_layer.ipynb", dark=dark)
    opened_page.run_all("01_exit_layer: done")
    page = opened_page.page
    page.locator(".labkit-status").scroll_into_view_if_needed()
    wait_for_status(page, "^(done|cached)")
    strip, table = (page.locator(name).inner_text() for name in (".widget-html.labkit-strip", ".labkit-table"))
    page.locator(".labkit-exit .noUi-handle").focus()
    page.keyboard.press("ArrowRight")
    page.wait_for_function(
        "old => ['.widget-html.labkit-strip', '.labkit-table'].every((name, at) => document.querySelector(name).innerText !== old[at])",
        arg=[strip, table],
        timeout=30_000,
    )
    wait_for_status(page, "^(done|cached)")
    opened_page.shots(SHOTS, f"01_exit_layer-{'dark' if dark else 'light'}")
    page.locator(".labkit-status").scroll_into_view_if_needed()
    page.locator(".widget-slider", has_text="New tokens").locator(".noUi-handle").focus()
    page.keyboard.press("End")
    page.locator(".labkit-cancel:enabled").click()
    wait_for_status(page, "^cancelled")
    assert set(opened_page.said) <= usual, opened_page.said


BROKEN = """
import labkit, labkit.view
class Broken(labkit.Drafter):
    nodes = 2
    def propose(self, state, context):
        raise RuntimeError("no guess today")
explorer = labkit.view.exit_layer(labkit.load("tiny", device="cpu"), strategies={"Broken": lambda exit, max_draft: Broken()})
explorer
"""


EXPLORER = """
import labkit, labkit.view
labkit.view.exit_layer(labkit.load("tiny", device="cpu"), "def area(width, height):\\n", max_new_tokens=24)
"""


def test_a_restarted_kernel(opened, usual, restarted):
    """What was on the page goes with its kernel, and what is run again works: one explorer, no dead one beside it."""
    opened_page = opened(restarted)
    opened_page.run_all("restarted: done")
    page = opened_page.page
    wait_for_status(page, "^done")
    opened_page.menu("Kernel", "Restart Kernel and Run All Cells")
    page.locator(".jp-Dialog button.jp-mod-warn").click()
    page.wait_for_function("() => !document.querySelector('.labkit-status')", timeout=60_000)
    wait_for_status(page, "^done")
    for hook in (".labkit-status", ".labkit-run", ".labkit-exit", ".labkit-image"):
        assert page.locator(hook).count() == 1, hook
    assert page.get_by_text("Error displaying widget").count() == 0
    before = page.locator(".labkit-table").inner_text()
    page.locator(".labkit-exit .noUi-handle").focus()
    page.keyboard.press("ArrowRight")
    page.wait_for_function(
        "old => document.querySelector('.labkit-table').innerText !== old", arg=before, timeout=30_000
    )
    wait_for_status(page, "^(done|cached)")
    page.wait_for_function("() => document.querySelector('.labkit-image').naturalWidth > 100")
    opened_page.shots(SHOTS, "restarted")
    assert set(opened_page.said) <= usual, opened_page.said


def test_a_failing_strategy_is_seen(opened, broken):
    opened_page = opened(broken)
    opened_page.run_all("broken: done")
    page = opened_page.page
    wait_for_status(page, "^done")
    page.locator(".widget-dropdown", has_text="Strategy").locator("select").select_option("Broken")
    wait_for_status(page, "no guess today")
    opened_page.shots(SHOTS, "broken")
    page.locator(".widget-dropdown", has_text="Strategy").locator("select").select_option("EarlyExit")
    wait_for_status(page, "^(done|cached)")
