"""Shapes are checked at run time in the tests; the real model and the browser are asked for by markers."""

import gc
import os
import shutil
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # for the processes that tests start: the cores are taken

import jaxtyping

# The doors (lab, options, prompts, loading, a strategy's settings) check their input themselves, in labkit's words.
CHECKED = "heads.medusa heads.mlp_speculator heads.trees acceptance backbone cache compare decoding draft noise probe protocol session stopping trace views warp"
jaxtyping.install_import_hook([f"labkit.{name}" for name in CHECKED.split()], "beartype.beartype")
torch.set_num_threads(1)


def missing(marker: str) -> str | None:
    """Why a test with this marker cannot run here, or None."""
    if marker == "smollm2":
        from labkit.loading import cache_folder

        folder = cache_folder() / "smollm2-135m"
        return None if folder.exists() else f"SmolLM2-135M is not in {folder.parent}: run `labkit fetch smollm2-135m`"
    if marker == "browser":
        return None if shutil.which("chromium") else "chromium is not installed"
    if marker == "notebooks":
        return "ten seconds each: ask for them by LABKIT_REQUIRE=notebooks, as .ci/run does"
    return None if torch.cuda.is_available() else "no CUDA device"


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config):
    """The whole suite runs in two processes, unless -n gives a number; files that are named run in this one.

    A file's tests share its models, so they stay together.
    """
    if not config.pluginmanager.hasplugin("xdist") or hasattr(config, "workerinput"):
        return
    option, named = config.option, config.args_source is pytest.Config.ArgsSource.ARGS
    if option.numprocesses is None and not (named or option.usepdb or option.collectonly):
        option.numprocesses = 2
    if option.numprocesses and option.dist == "no":
        option.dist, option.loadscopereorder = "loadfile", False


LONG = ("test_conformance.py", "test_browser.py")
"""They begin, so that no process has one of them left when the other is through."""


def pytest_collection_modifyitems(items):
    """Skip with a reason, unless LABKIT_REQUIRE names the marker: then the test runs, and fails."""
    items.sort(key=lambda item: item.path.name not in LONG)
    required = set(filter(None, os.environ.get("LABKIT_REQUIRE", "").split(",")))
    for marker in ("smollm2", "browser", "notebooks", "gpu"):
        reason = None if marker in required else missing(marker)
        if reason:
            for item in items:
                if item.get_closest_marker(marker):
                    item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture
def unshaped():
    """No checks of shapes, which are half of the time of a tiny model: for tests that repeat what others run with them."""
    before = jaxtyping.config.jaxtyping_disable
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", before)


@pytest.fixture
def live_bytes():
    """A function that says how many bytes of tensors there are, of those made in the test.

    What is older is left out of gc.collect and gc.get_objects: seconds become milliseconds.
    """

    def count() -> int:
        gc.collect()
        storages = {}
        for thing in gc.get_objects():
            if issubclass(type(thing), torch.Tensor) and thing.layout == torch.strided and thing.device.type != "meta":
                storage = thing.untyped_storage()
                storages[storage.data_ptr()] = storage.nbytes()
        return sum(storages.values())

    gc.collect()
    gc.freeze()
    yield count
    gc.unfreeze()


@pytest.fixture(scope="module")
def few_objects():
    """The Trainer collects garbage at each start, a third of a second: what was made before is kept out of it."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(scope="session")
def smollm2():
    """The real model, float32 on the CPU."""
    import labkit

    return labkit.load("smollm2-135m", device="cpu")
