"""`labkit lab`: the command it makes, and what it says where there is nothing to open."""

import importlib.util
import sys
from pathlib import Path

import pytest

from labkit.cli import main
from labkit.errors import LabkitError
from labkit.open_lab import FIRST, lab_command


def test_opens_the_first_notebook_of_the_repository(monkeypatch):
    ran = []

    class Ended:
        returncode = 0

    monkeypatch.setattr("subprocess.run", lambda command: ran.append(command) or Ended)
    assert main(["lab", "--", "--no-browser", "--port=8889"]) == 0
    assert ran == [
        [
            sys.executable,
            "-m",
            "jupyterlab",
            str(Path(__file__).parent.parent / "notebooks" / FIRST),
            "--no-browser",
            "--port=8889",
        ]
    ]
    Ended.returncode = 1
    assert main(["lab"]) == 2


def test_a_folder_without_notebooks(tmp_path, capsys):
    assert main(["lab", "--notebooks", str(tmp_path)]) == 2
    assert "comes without the notebooks" in capsys.readouterr().err


def test_without_jupyterlab(tmp_path, monkeypatch):
    (tmp_path / FIRST).write_text("{}")
    assert lab_command(tmp_path)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(LabkitError, match=r"pip install -e '\.\[notebook\]'"):
        lab_command(tmp_path)
