"""The notebooks: paired with their scripts, stored without outputs, and run as strictly as a reader would look."""

import os
import subprocess
import sys
from pathlib import Path

import jupytext
import nbformat
import pytest
from notebook_checker import check

FOLDER = Path(__file__).parent.parent / "notebooks"
SCRIPTS = sorted((FOLDER / "src").glob("*.py"))
each = pytest.mark.parametrize("script", SCRIPTS, ids=[path.stem for path in SCRIPTS])


def pair(script: Path) -> Path:
    return FOLDER / f"{script.stem}.ipynb"


def bare(notebook) -> list[tuple]:
    return [(cell.cell_type, cell.source, cell.metadata.get("tags", [])) for cell in notebook.cells]


def test_there_is_a_notebook_for_each_script():
    assert SCRIPTS and [pair(s) for s in SCRIPTS] == sorted(FOLDER.glob("*.ipynb"))


@each
def test_script_and_notebook_say_the_same(script):
    assert bare(jupytext.read(script)) == bare(nbformat.read(pair(script), 4)), (
        "run: jupytext --sync notebooks/src/*.py"
    )


@each
def test_stored_bare(script):
    """No outputs, no counts, no front end's metadata; ids, and a kernel that every installation has."""
    notebook = nbformat.read(pair(script), 4)
    nbformat.validate(notebook)
    assert (notebook.nbformat, notebook.nbformat_minor) == (4, 5)
    assert notebook.metadata.kernelspec.name == "python3"
    assert set(notebook.metadata) <= {"kernelspec", "language_info", "jupytext"}
    ids = [cell.id for cell in notebook.cells]
    assert len(set(ids)) == len(ids)
    found = subprocess.run(
        [sys.executable, "-m", "nbstripout", "--keep-id", "--verify", pair(script)], capture_output=True, text=True
    )
    assert found.returncode == 0, found.stdout + found.stderr


@each
def test_shape(script):
    """A question first, one cell of parameters, and a last cell with the sentinel."""
    cells = nbformat.read(pair(script), 4).cells
    assert cells[0].cell_type == "markdown" and cells[0].source.splitlines()[0].endswith("?")
    parameters = [cell.source for cell in cells if "parameters" in cell.metadata.get("tags", [])]
    assert len(parameters) == 1 and all(
        name in parameters[0] for name in ('MODEL = "tiny"', "DEVICE = ", "LABKIT_QUICK")
    )
    assert cells[-1].source.endswith(f'print("{script.stem}: done")')


@pytest.mark.notebooks
@each
def test_runs(script):
    assert check(pair(script), limit_s=60, LABKIT_QUICK="1", HF_HUB_OFFLINE=os.environ["HF_HUB_OFFLINE"]) == []
