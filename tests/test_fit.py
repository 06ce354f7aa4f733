"""Training that stops and goes on: the same weights and curves, whatever happened in between."""

import json
import os
import shutil
import signal
import threading

import pytest
from small_run import STEPS, Tied, interrupted, made, train, uninterrupted

from labkit.training import fit as fitting
from labkit.training.folder import last_whole

pytestmark = pytest.mark.usefixtures("few_objects")


def test_the_loss_falls(tmp_path, capsys):
    module = Tied()
    done = train(tmp_path / "new" / "run", module=module)
    weights, curves = made(done)
    losses = [row["loss"] for row in curves if "loss" in row]
    assert [row["step"] for row in curves if "loss" in row] == [10, 11] and losses[1] < losses[0] < 3
    assert [row["step"] for row in curves if "held_out" in row] == [4, 8, 11] and done.last["step"] == 11
    assert curves[0]["held_out"] > curves[-2]["held_out"] and curves[0]["tokens"] == 4 * 4 * 6
    assert done.last["held_out"] == curves[-2]["held_out"] and not module.training
    assert sorted(set(module.steps)) == list(range(STEPS)) and (weights, curves) == uninterrupted()
    known = json.loads((done.folder / "provenance.json").read_text())
    assert known["data"] == "numbers" and known["resumed_at_step"] == 0 and known["tokens_seen"] == 11 * 4 * 6
    assert weights["embed.weight"] == weights["head.weight"] and module.embed.weight is module.head.weight
    assert {"command", "machine", "labkit", "seconds_since_then"} <= set(known)
    assert json.loads((done.folder / "config.json").read_text())["schedule"]["lr"] == 0.05
    assert capsys.readouterr() == ("", "")
    train(tmp_path / "bar", progress=True)
    assert "11/11" in capsys.readouterr().err


@pytest.mark.parametrize("at", [1, 3, 5, 7, 10])
def test_a_run_that_was_stopped_goes_on(tmp_path, at):
    """After the step at hand, wherever it is: in an epoch, at its end, at a checkpoint, between two loss rows."""
    before = signal.getsignal(signal.SIGTERM)
    interrupted(tmp_path, at, signal.SIGTERM if at % 2 else signal.SIGINT)
    assert last_whole(tmp_path).name == f"checkpoint-{at}" and not (tmp_path / "trained").exists()
    assert signal.getsignal(signal.SIGTERM) is before
    module = Tied(seed=1)
    assert made(train(tmp_path, module=module)) == uninterrupted()
    assert module.steps[0] == at and json.loads((tmp_path / "provenance.json").read_text())["resumed_at_step"] == at


def test_a_run_may_be_stopped_often_and_at_its_end(tmp_path):
    for at in (2, 4, 7, STEPS):
        interrupted(tmp_path, at)
    assert made(train(tmp_path)) == uninterrupted()


def test_a_second_signal_ends_at_once(tmp_path):
    """Nothing is written then, and the run goes on from the checkpoint before."""

    def twice():
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        pytest.fail("still here")

    with pytest.raises(KeyboardInterrupt):
        train(tmp_path, evaluate=twice)
    assert last_whole(tmp_path).name == "checkpoint-3"
    assert made(train(tmp_path)) == uninterrupted()


def test_a_finished_run_is_not_trained_again(tmp_path):
    """Its module gets the trained weights; killed before its result was written, it makes no step too many."""
    train(tmp_path)
    module = Tied(seed=3)
    assert made(train(tmp_path, module=module)) == uninterrupted() and not module.steps
    assert {name: value.tolist() for name, value in module.state_dict().items()} == uninterrupted()[0]
    shutil.rmtree(tmp_path / "trained")
    (tmp_path / ".part-killed").mkdir()
    assert made(train(tmp_path, module=Tied(seed=4))) == uninterrupted()
    assert not list(tmp_path.glob(".part-*"))
    shutil.rmtree(tmp_path / "checkpoints")
    assert made(train(tmp_path)) == uninterrupted()


def test_a_run_in_a_thread(tmp_path):
    """Signals are the main thread's there, and all else is the same."""
    found = []
    thread = threading.Thread(target=lambda: found.append(made(train(tmp_path))))
    thread.start()
    thread.join()
    assert found == [uninterrupted()]


def test_a_checkout_that_is_not_installed(tmp_path, monkeypatch):
    def missing(name):
        raise fitting.PackageNotFoundError(name)

    monkeypatch.setattr(fitting, "version", missing)
    train(tmp_path, steps=1)
    assert json.loads((tmp_path / "provenance.json").read_text())["labkit"] is None
