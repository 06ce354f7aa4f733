"""Opens JupyterLab on the first notebook."""

import importlib.util
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from labkit.errors import LabkitError

FIRST = "00_start_here.ipynb"


def lab_command(folder: Path, more: Sequence[str] = ()) -> list[str]:
    """What starts JupyterLab on the first notebook of a folder. `more`: arguments for JupyterLab itself."""
    if importlib.util.find_spec("jupyterlab") is None:
        raise LabkitError("JupyterLab is not installed; run in labkit's folder: pip install -e '.[notebook]'")
    if not (folder / FIRST).is_file():
        raise LabkitError(
            f"no {FIRST} in {folder}: an installed package comes without the notebooks; run labkit lab from an "
            "installation of the repository (pip install -e '.[notebook]'), or write --notebooks FOLDER"
        )
    return [sys.executable, "-m", "jupyterlab", str(folder / FIRST), *more]


def open_lab(folder: str | None, more: Sequence[str] = ()) -> None:
    """Run JupyterLab until it is stopped; `folder` is the repository's own notebooks if None."""
    command = lab_command(Path(folder) if folder else Path(__file__).parent.parent / "notebooks", more)
    if subprocess.run(command).returncode:
        raise LabkitError("JupyterLab ended with an error; what it said is above")
