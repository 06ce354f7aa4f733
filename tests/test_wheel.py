"""What an installed wheel brings along: the code, the prompts, the small model with its drafts."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SCRIPT = """
import labkit
lab = labkit.load("tiny", device="cpu")
prompt = "def fib(n):\\n"
plain = lab.generate(prompt, max_new_tokens=12)
drafters = [labkit.EarlyExit(4), labkit.Heads(labkit.load_heads("tiny/medusa", lab))]
assert all(lab.generate(prompt, drafter, max_new_tokens=12).tokens == plain.tokens for drafter in drafters)
print(labkit.__file__, lab.model.config.name_or_path)
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """The folder of an installed wheel."""
    home = tmp_path_factory.mktemp("wheel")
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "-q",
        "--no-deps",
        "--no-build-isolation",
        "--no-index",
        "-w",
        home,
        ".",
    ]
    sources = home / "sources"  # a build writes into its sources
    sources.mkdir()
    for name in ("labkit", "data", "pyproject.toml", "README.md", "LICENSE"):
        os.symlink(ROOT / name, sources / name)
    subprocess.run(command, cwd=sources, check=True, capture_output=True, text=True)
    (wheel,) = home.glob("*.whl")
    with zipfile.ZipFile(wheel) as file:
        file.extractall(home / "site")
    return home / "site"


def test_every_module_and_file_is_in_the_wheel(installed):
    def below(folder):
        files = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
        return {file for file in files if "__pycache__" not in file.parts}

    assert below(ROOT / "labkit") == {file for file in below(installed / "labkit") if file.parts[0] != "_data"}
    for name in ("prompts", "tiny"):
        assert below(ROOT / "data" / name) == below(installed / "labkit" / "_data" / name)
    assert not (installed / "labkit" / "_data" / "results").exists()


def test_the_small_model_opens_from_the_wheel(installed, tmp_path):
    env = {**os.environ, "PYTHONPATH": str(installed), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([sys.executable, "-c", SCRIPT], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    where, name = done.stdout.split()
    assert Path(where).is_relative_to(installed) and name == "tiny"
