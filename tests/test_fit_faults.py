"""Broken checkpoints, full disks, folders of others: nothing is lost, and the message says what to do."""

import errno
import json
import os
import shutil

import pytest
import torch
from small_run import interrupted, made, rows, train, uninterrupted

from labkit import LabkitError
from labkit.training.folder import alone, last_whole

pytestmark = pytest.mark.usefixtures("few_objects")


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


DAMAGES = {
    "gone": shutil.rmtree,
    "no weights": lambda at: (at / "model.safetensors").unlink(),
    "half weights": lambda at: os.truncate(at / "model.safetensors", 100),
    "one bit of the optimiser": lambda at: flip(at / "optimizer.pt"),
    "empty state": lambda at: os.truncate(at / "trainer_state.json", 0),
    "no mark": lambda at: (at / "whole.json").unlink(),
    "half a mark": lambda at: os.truncate(at / "whole.json", 20),
    "another mark": lambda at: (at / "whole.json").write_text("[]"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_broken_checkpoint_is_left_out(tmp_path, damage):
    """The run goes on from the last whole one."""
    interrupted(tmp_path, 8)
    DAMAGES[damage](tmp_path / "checkpoints" / "checkpoint-8")
    (tmp_path / "checkpoints" / "checkpoint-mine").mkdir()
    assert last_whole(tmp_path).name == "checkpoint-6" and not (tmp_path / "checkpoints" / "checkpoint-8").exists()
    assert made(train(tmp_path)) == uninterrupted()
    assert json.loads((tmp_path / "provenance.json").read_text())["resumed_at_step"] == 6


def test_a_run_without_any_whole_checkpoint_begins_anew(tmp_path):
    interrupted(tmp_path, 2)
    DAMAGES["no mark"](tmp_path / "checkpoints" / "checkpoint-2")
    with (tmp_path / "curves.jsonl").open("a") as file:
        file.write('{"step": 2, "tok')
    assert made(train(tmp_path)) == uninterrupted()


def full(*args, **kwargs):
    raise OSError(errno.ENOSPC, "No space left on device")


def after(count, function, error=full):
    """The function, until it was called so often."""
    calls = []

    def called(*args, **kwargs):
        calls.append(1)
        return error(*args, **kwargs) if len(calls) > count else function(*args, **kwargs)

    return called


def half(value, path, *rest):
    with open(path, "wb") as file:
        file.write(b"half")
    raise RuntimeError("[enforce fail at inline_container.cc:664] . unexpected pos 64 vs 0")


FULL = {
    "weights": ("labkit.training.fit.save_model", 2, full, "a checkpoint", "checkpoint-6"),
    "first weights": ("labkit.training.fit.save_model", 0, full, "a checkpoint", "none"),
    "optimiser": ("torch.save", 6, half, "a checkpoint", "checkpoint-6"),
    "marks": ("labkit.training.folder.mark_whole", 1, full, "a checkpoint", "checkpoint-3"),
}


@pytest.mark.parametrize("place", FULL)
def test_a_full_disk(tmp_path, monkeypatch, place):
    """LabkitError, the checkpoint before is still there, and with space again the run goes on."""
    name, count, error, what, last = FULL[place]
    module, _, attribute = name.rpartition(".")
    with monkeypatch.context() as patch:
        patch.setattr(name, after(count, getattr(__import__(module, fromlist="x"), attribute), error))
        with pytest.raises(
            LabkitError, match=rf"{what} could not be written .*the last whole checkpoint is {last}: free"
        ):
            train(tmp_path)
    assert getattr(last_whole(tmp_path), "name", "none") == last and not (tmp_path / "trained").exists()
    assert made(train(tmp_path)) == uninterrupted()


def test_a_disk_that_is_full_for_the_result(tmp_path):
    """Nothing half-written is left, and what was trained is written by the next try."""

    def begin(folder):
        folder.mkdir()
        (folder / "weights.pt").write_bytes(b"half")
        full()

    with pytest.raises(LabkitError, match=r"the result could not be written .*checkpoint-11: free"):
        train(tmp_path, write=begin)
    assert not (tmp_path / "trained").exists() and not list(tmp_path.glob(".part-*"))
    assert made(train(tmp_path)) == uninterrupted()


def test_a_disk_that_is_full_for_the_curves(tmp_path):
    def fill():
        os.rename(tmp_path / "curves.jsonl", tmp_path / "aside")
        os.symlink("/dev/full", tmp_path / "curves.jsonl")
        return {"held_out": 0.0}

    with pytest.raises(LabkitError, match=r"curves.jsonl could not be written .*No space left.*checkpoint-3: free"):
        train(tmp_path, evaluate=fill)
    os.rename(tmp_path / "aside", tmp_path / "curves.jsonl")
    assert made(train(tmp_path)) == uninterrupted()


def damaged_config(out):
    train(out, steps=1)
    (out / "config.json").write_text("{")


def models_folder(out):
    out.mkdir()
    (out / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')


OTHERS = {
    "setting": ({"config": {"recipe": "tied", "width": 9}}, r"other settings \(width\).*\"width\": 8"),
    "more": ({"config": {"recipe": "other", "width": 8, "new": 1}}, r"other settings \(new, recipe\)"),
    "schedule": ({"lr": 0.01, "steps": 3}, r"other settings \(schedule.lr, schedule.steps\).*\"schedule.lr\": 0.05"),
}


@pytest.mark.parametrize("change", OTHERS)
def test_another_runs_folder_is_refused(tmp_path, change):
    given, message = OTHERS[change]
    interrupted(tmp_path, 2)
    there = sorted(tmp_path.rglob("*"))
    with pytest.raises(LabkitError, match=message):
        train(tmp_path, **given)
    assert sorted(tmp_path.rglob("*")) == there


REFUSED = {
    "half a config": (damaged_config, {}, "is not JSON"),
    "a model's folder": (models_folder, {}, "is not of a training run; name another folder"),
    "a file": (lambda out: out.write_text("x"), {}, "is a file"),
    "no room for a folder": (lambda out: None, {"out": "/proc/no/such"}, "could not be written"),
    "no folder": (lambda out: None, {"out": None}, "out=None"),
    "too few rows": (lambda out: None, {"data": rows(3)}, "got 3 rows of text, and one batch needs 4"),
    "no steps": (lambda out: None, {"steps": 0}, "steps=0"),
    "no rate": (lambda out: None, {"lr": 0.0}, "lr=0.0"),
    "another device": (lambda out: None, {"device": torch.device("cuda:1")}, "CUDA_VISIBLE_DEVICES"),
}


@pytest.mark.parametrize("fault", REFUSED)
def test_refusals(tmp_path, fault):
    prepare, given, message = REFUSED[fault]
    prepare(tmp_path / "run")
    with pytest.raises(LabkitError, match=message):
        train(**{"out": tmp_path / "run", **given})


def test_two_runs_in_one_folder(tmp_path):
    with alone(tmp_path), pytest.raises(LabkitError, match="another process trains in"):
        train(tmp_path)
    train(tmp_path)
