"""A run's folder: whose it is, its checkpoints and whether they are whole, and its curves."""

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from safetensors import SafetensorError

from labkit.errors import LabkitError

LOG = logging.getLogger(__name__)
CONFIG, CURVES, PROVENANCE, WHOLE = "config.json", "curves.jsonl", "provenance.json", "whole.json"
CHECKPOINTS, RESULT = "checkpoints", "trained"
PART = ".part-"
ALWAYS = ("step", "tokens", "seconds", "loss")
"""What a row of the curves holds that is not an evaluation."""


@dataclass(frozen=True)
class Trained:
    """A finished run: its folder, what it made (a path in it), and its curves, a row for every evaluation."""

    folder: Path
    result: Path
    curves: list[dict[str, float]]

    @property
    def last(self) -> dict[str, float]:
        """The last row that was evaluated."""
        return next((row for row in reversed(self.curves) if set(row) - set(ALWAYS)), {})


def name_folder(out: Any) -> Path:
    """`out` as a folder that is there; LabkitError where none can be."""
    if not isinstance(out, str | os.PathLike) or not os.fspath(out):
        raise LabkitError(f"got out={out!r}; write the name of a folder for the run")
    folder = Path(out)
    if folder.exists() and not folder.is_dir():
        raise LabkitError(f"{folder} is a file; name a folder for the run")
    with written("the folder", folder):
        folder.mkdir(parents=True, exist_ok=True)
    return folder


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """No other process trains in this folder meanwhile; what one that was killed left half-written is removed."""
    lock = FileLock(folder / ".lock")
    try:
        lock.acquire(timeout=0)
    except Timeout as error:
        raise LabkitError(f"another process trains in {folder}; wait for it, or name another folder") from error
    try:
        for leftover in folder.glob(f"{PART}*"):
            shutil.rmtree(leftover, ignore_errors=True)
        yield
    finally:
        lock.release()


@contextmanager
def written(what: str, folder: Path, *more: type[Exception]) -> Iterator[None]:
    """What cannot be written inside, most often because the disk is full, is a LabkitError that says how to go on."""
    try:
        yield
    except (OSError, SafetensorError, *more) as error:
        last = last_whole(folder)
        raise LabkitError(
            f"{what} could not be written to {folder} ({error}); the last whole checkpoint is "
            f"{last.name if last else 'none'}: free some space and run the same again"
        ) from error


def claim(folder: Path, config: dict[str, Any]) -> None:
    """Write the run's config, or compare it with the one that is there."""
    path = folder / CONFIG
    if not path.exists():
        with written(CONFIG, folder):
            write_json(path, config)
        return
    try:
        there = json.loads(path.read_text())
    except ValueError as error:
        raise LabkitError(f"{path} is not JSON ({error}); remove the folder or name another") from error
    if not isinstance(there, dict) or not isinstance(there.get("schedule"), dict):
        raise LabkitError(f"{path} is not of a training run; name another folder")
    there, config = _flat(there), _flat(config)
    if unlike := sorted(k for k in {*there, *config} if there.get(k) != config.get(k)):
        raise LabkitError(
            f"{folder} holds a run with other settings ({', '.join(unlike)}); name another folder, or write the "
            f"same settings to go on: {json.dumps({k: there.get(k) for k in unlike})}"
        )


def _flat(config: dict[str, Any]) -> dict[str, Any]:
    """The settings of the schedule by their own names: {"schedule.steps": 100}."""
    schedule = {f"schedule.{key}": value for key, value in config["schedule"].items()}
    return {key: value for key, value in config.items() if key != "schedule"} | schedule


def last_whole(folder: Path) -> Path | None:
    """The newest checkpoint of which every file is as it was written; newer, broken ones are removed."""
    found = [path for path in folder.glob(f"{CHECKPOINTS}/checkpoint-*") if path.name[11:].isdecimal()]
    for checkpoint in sorted(found, key=step_of, reverse=True):
        try:
            marks = json.loads((checkpoint / WHOLE).read_text())
            if all(_digest(checkpoint / name) == mark for name, mark in marks.items()):
                return checkpoint
        except (OSError, ValueError, AttributeError):
            pass
        LOG.warning("%s is not whole and is left out", checkpoint)
        shutil.rmtree(checkpoint, ignore_errors=True)
    return None


def mark_whole(checkpoint: Path) -> None:
    """To be called when every file of a checkpoint is written."""
    write_json(checkpoint / WHOLE, {path.name: _digest(path) for path in sorted(checkpoint.iterdir())})


def step_of(checkpoint: Path) -> int:
    """The steps that a checkpoint has behind it."""
    return int(checkpoint.name.rpartition("-")[2])


def read_curves(folder: Path) -> list[dict[str, float]]:
    """Every whole row of the curves."""
    path = folder / CURVES
    rows = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            rows.append(json.loads(line))
        except ValueError:  # the line at which a run was killed
            continue
    return rows


def keep_curves(folder: Path, step: int) -> list[dict[str, float]]:
    """The rows up to a step, and forget those behind it: they are to be made again."""
    kept = [row for row in read_curves(folder) if row["step"] <= step]
    with written(CURVES, folder):
        _replace(folder / CURVES, "".join(json.dumps(row) + "\n" for row in kept))
    return kept


def add_to_curves(folder: Path, row: dict[str, float]) -> None:
    """One more row."""
    with written(CURVES, folder), (folder / CURVES).open("a") as file:
        file.write(json.dumps(row) + "\n")


def write_json(path: Path, value: Any) -> None:
    """The whole file, or what was there before."""
    _replace(path, json.dumps(value, indent=1) + "\n")


def _replace(path: Path, text: str) -> None:
    part = path.with_name(f".{path.name}.part")
    part.write_text(text)
    os.replace(part, path)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
