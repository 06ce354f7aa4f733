"""The checker's own tests: each fault that other runners let pass must fail, and a clean notebook pass."""

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_notebook
from notebook_checker import check

WIDGETS = """
import threading, ipywidgets
slider, button = ipywidgets.IntSlider(description="exit"), ipywidgets.Button(description="run")
label = ipywidgets.HTML(description="shown")
"""
RAISES = "def fail(*_): raise ValueError('seen?')\n"
FOLLOWS = "slider.observe(lambda change: setattr(label, 'value', str(change.new)), 'value')"


async def slide(page):
    page.set(page.find(description="exit"), value=3)
    await page.until(lambda: page.states[page.find(description="shown")]["value"] == "3")


async def slide_blindly(page):
    page.set(page.find(description="exit"), value=3)
    await page.until(lambda: page.problems)


async def press(page):
    page.click(page.find(description="run"))
    await page.until(lambda: page.problems)


def run(tmp_path, *cells, last="print('small: done')", **kwargs):
    path = tmp_path / "small.ipynb"
    nbformat.write(new_notebook(cells=[new_code_cell(c) for c in (*cells, last)]), path)
    return check(path, **{"limit_s": 30, **kwargs})


@pytest.mark.parametrize("subshell", [False, True])
def test_clean_one_passes(tmp_path, subshell):
    assert run(tmp_path, WIDGETS, FOLLOWS, acts=[slide], subshell=subshell) == []


@pytest.mark.parametrize("subshell", [False, True])
def test_error_in_an_observer(tmp_path, subshell):
    found = run(tmp_path, WIDGETS, RAISES + "slider.observe(fail, 'value')", acts=[slide_blindly], subshell=subshell)
    assert found == ["error: ValueError: seen?"]


@pytest.mark.parametrize("subshell", [False, True])
def test_error_in_a_button_callback(tmp_path, subshell):
    found = run(tmp_path, WIDGETS, RAISES + "button.on_click(fail)", acts=[press], subshell=subshell)
    assert found == ["error: ValueError: seen?"]


@pytest.mark.parametrize(
    ("fault", "word"),
    [
        (WIDGETS + RAISES + "button.on_click(fail)\nbutton.click()", "ValueError: seen?"),
        (RAISES + "import threading\nthread = threading.Thread(target=fail)\nthread.start(); thread.join()", "exception in a thread: ValueError: seen?"),
        ("import matplotlib.pyplot as plt\nfigure = plt.figure()", "open pyplot figures: 1"),
        ("import warnings\nwarnings.warn('careful')", "stderr:"),
        ("import os\nwritten = os.write(2, b'from below')", "stderr: from below"),
        ("1 / 0", "ZeroDivisionError"),
        (WIDGETS + "out = ipywidgets.Output()\nwith out:\n    1 / 0", "error in an Output widget"),
        ("import logging\nlogging.getLogger('x').warning('heard')", "stderr: heard"),
    ],
    ids=["click", "thread", "figure", "warning", "descriptor", "cell", "output", "logging"],
)  # fmt: skip
def test_each_fault_fails(tmp_path, fault, word):
    found = run(tmp_path, fault)
    assert any(word in problem for problem in found), found


def test_missing_sentinel(tmp_path):
    assert run(tmp_path, last="print('done')") == ["the last cell has not printed 'small: done'"]


def test_over_its_time(tmp_path):
    assert ["over its time of 3 s"] == run(tmp_path, "import time; time.sleep(20)", limit_s=3)
