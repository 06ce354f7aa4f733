"""One way to train: transformers' Trainer around a module that gives its own loss, resumable at every checkpoint."""

import hashlib
import json
import logging
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from safetensors import SafetensorError
from safetensors.torch import load_model, save_model
from torch import nn
from torch.utils.data import Dataset

from labkit.doctor import machine
from labkit.errors import LabkitError

LOG = logging.getLogger(__name__)
CONFIG, CURVES, PROVENANCE, WHOLE = "config.json", "curves.jsonl", "provenance.json", "whole.json"
RESULT = "trained"
WEIGHTS = "model.safetensors"


@dataclass(frozen=True)
class Trained:
    """A finished run: its folder, what it made (a path in it), and its curves, a row for every evaluation."""

    folder: Path
    result: Path
    curves: list[dict[str, float]]

    @property
    def last(self) -> dict[str, float]:
        """The last row that was evaluated."""
        return next((row for row in reversed(self.curves) if len(row) > 4), {})


@dataclass(frozen=True)
class Schedule:
    """How long and how fast a run learns.

    steps: optimiser steps. batch: rows a step. lr: the highest, after `warmup` (a share of the steps), from where it
    falls along a cosine to a tenth. weight_decay, beta2: of AdamW. save_every, eval_every: steps. seed: of everything.
    """

    steps: int
    batch: int
    lr: float
    warmup: float = 0.03
    weight_decay: float = 0.1
    beta2: float = 0.95
    save_every: int = 100
    eval_every: int = 100
    seed: int = 0

    def __post_init__(self):
        if min(self.steps, self.batch, self.save_every, self.eval_every) < 1 or not self.lr > 0:
            raise LabkitError(f"got {self}; steps, batch, save_every and eval_every must be 1 or more, and lr above 0")


def fit(
    module: nn.Module,
    rows: Dataset,
    out: Any,
    schedule: Schedule,
    *,
    write: Callable[[Path], Any],
    evaluate: Callable[[], dict[str, float]],
    config: dict[str, Any],
    provenance: dict[str, Any],
    tokens_per_row: int,
    device: torch.device,
    dtype: torch.dtype,
    progress: bool = True,
) -> Trained:
    """Train `module` on `rows` in the folder `out`, or go on where a run of the same `config` in that folder stopped.

    module(**batch) gives {"loss": scalar}; its `step` is set before each step. write(folder) writes the result into an
    empty folder that is renamed to `out/trained` once whole. evaluate() gives a row of the curves. An interrupt (or
    SIGTERM) ends the run after the step at hand, with a checkpoint, and raises KeyboardInterrupt. Raises LabkitError
    for too few rows, a folder of another run, and a disk that is full; the last whole checkpoint always stays.
    """
    folder = Path(out)
    if len(rows) < schedule.batch:  # type: ignore
        raise LabkitError(f"got {len(rows)} rows of text, and one batch needs {schedule.batch}; give more text")  # type: ignore
    config = json.loads(json.dumps({**config, "schedule": vars(schedule)}))
    _claim(folder, config)
    resumed = last_whole(folder / "checkpoints")
    if (folder / RESULT).is_dir() and resumed is not None:
        load_model(module, str(resumed / WEIGHTS))
        return Trained(folder, folder / RESULT, _curves(folder))
    step = 0 if resumed is None else int(resumed.name.rpartition("-")[2])
    record = _Record(module, folder, schedule, evaluate, tokens_per_row, step)
    arguments = hf.TrainingArguments(
        output_dir=str(folder / "checkpoints"), max_steps=schedule.steps,
        per_device_train_batch_size=schedule.batch, learning_rate=schedule.lr,
        lr_scheduler_type="cosine_with_min_lr", lr_scheduler_kwargs={"min_lr_rate": 0.1},
        warmup_steps=max(1, round(schedule.warmup * schedule.steps)), weight_decay=schedule.weight_decay,
        adam_beta2=schedule.beta2, max_grad_norm=1.0, logging_strategy="steps", logging_steps=10,
        save_strategy="steps", save_steps=schedule.save_every, save_total_limit=2, bf16=dtype == torch.bfloat16,
        use_cpu=device.type == "cpu", seed=schedule.seed, data_seed=schedule.seed, report_to=[],
        disable_tqdm=not progress, remove_unused_columns=False, label_names=[], dataloader_pin_memory=False,
    )  # fmt: skip
    trainer = _Trainer(model=module, args=arguments, train_dataset=rows, callbacks=[record])
    trainer.remove_callback(hf.PrinterCallback)
    began = time.perf_counter()
    with _stopped_by_signals(record):
        try:
            trainer.train(resume_from_checkpoint=None if resumed is None else str(resumed))
        except (OSError, RuntimeError, SafetensorError) as error:
            if not record.saving:
                raise
            last = last_whole(folder / "checkpoints")
            raise LabkitError(
                f"no checkpoint could be written to {folder} ({error}); the last whole one is "
                f"{last.name if last else 'none'}: free some space and run the same again"
            ) from error
    seconds = time.perf_counter() - began
    if record.stopped:
        raise KeyboardInterrupt(f"stopped after step {trainer.state.global_step}; run the same again to go on")
    module.eval()
    if arguments.process_index == 0:
        known = {
            **provenance, "command": " ".join(sys.argv), "machine": machine(), "labkit": _version(),
            "resumed_at_step": step, "seconds_since_then": round(seconds, 1), "steps": schedule.steps,
            "tokens_seen": schedule.steps * schedule.batch * tokens_per_row * arguments.world_size,
        }  # fmt: skip
        _write_json(folder / PROVENANCE, known)
        with tempfile.TemporaryDirectory(dir=folder, prefix=".part-") as part:
            write(made := Path(part, RESULT))
            os.replace(made, folder / RESULT)
    return Trained(folder, folder / RESULT, _curves(folder))


class _Trainer(hf.Trainer):
    """The Trainer, with checkpoints of modules whose parts share weights."""

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        folder = Path(output_dir or str(self.args.output_dir))
        folder.mkdir(parents=True, exist_ok=True)
        if self.args.should_save:
            save_model(self.accelerator.unwrap_model(self.model), str(folder / WEIGHTS))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        load_model(self.accelerator.unwrap_model(model or self.model), str(Path(resume_from_checkpoint, WEIGHTS)))


class _Record(hf.TrainerCallback):
    """Tells the module its step, evaluates, writes the curves, marks checkpoints as whole, and stops when asked."""

    def __init__(self, module: Any, folder: Path, schedule: Schedule, evaluate: Callable, tokens: int, step: int):
        self.module, self.folder, self.schedule, self.evaluate, self.tokens = module, folder, schedule, evaluate, tokens
        self.stopped = self.saving = False
        self.began = time.perf_counter()
        kept = [row for row in _curves(folder) if row["step"] <= step]
        self.earlier = kept[-1]["seconds"] if kept else 0.0
        (folder / CURVES).write_text("".join(json.dumps(row) + "\n" for row in kept))

    def on_step_begin(self, args, state, control, **kwargs):
        self.module.step = state.global_step

    def on_log(self, args, state, control, logs=None, **kwargs):
        if logs and "loss" in logs:
            self._row(args, state, {"loss": logs["loss"]})

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step % self.schedule.eval_every == 0 or state.global_step == self.schedule.steps:
            self.module.eval()
            with torch.no_grad():
                figures = self.evaluate()
            self.module.train()
            self._row(args, state, figures)
        if self.stopped:
            control.should_save = control.should_training_stop = True
        self.saving = control.should_save or state.global_step % args.save_steps == 0
        return control

    def on_save(self, args, state, control, **kwargs):
        checkpoint = Path(str(args.output_dir), f"checkpoint-{state.global_step}")
        if args.process_index == 0:
            _write_json(checkpoint / WHOLE, {p.name: _digest(p) for p in sorted(checkpoint.iterdir())})
        self.saving = False

    def _row(self, args, state, figures: dict[str, float]) -> None:
        if args.process_index:
            return
        seen = state.global_step * self.schedule.batch * self.tokens * args.world_size
        seconds = round(self.earlier + time.perf_counter() - self.began, 1)
        with (self.folder / CURVES).open("a") as file:
            file.write(json.dumps({"step": state.global_step, "tokens": seen, "seconds": seconds, **figures}) + "\n")


def last_whole(checkpoints: Path) -> Path | None:
    """The newest checkpoint of which every file is as it was written; newer, broken ones are removed."""
    found = sorted(checkpoints.glob("checkpoint-*"), key=lambda path: -int(path.name.rpartition("-")[2]))
    for checkpoint in found:
        try:
            marks = json.loads((checkpoint / WHOLE).read_text())
            if all(_digest(checkpoint / name) == mark for name, mark in marks.items()):
                return checkpoint
        except (OSError, ValueError):
            pass
        LOG.warning("%s is not whole and is left out", checkpoint)
        shutil.rmtree(checkpoint, ignore_errors=True)
    return None


@contextmanager
def _stopped_by_signals(record: _Record) -> Iterator[None]:
    """The first SIGINT or SIGTERM asks for the end of the step, a second one ends at once."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number, frame):
        if record.stopped:
            raise KeyboardInterrupt
        record.stopped = True

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _claim(folder: Path, config: dict[str, Any]) -> None:
    """Write the run's config, or compare it with the one that is there."""
    if folder.exists() and not folder.is_dir():
        raise LabkitError(f"{folder} is a file; name a folder for the run")
    folder.mkdir(parents=True, exist_ok=True)
    if (folder / CONFIG).exists():
        try:
            there = json.loads((folder / CONFIG).read_text())
        except ValueError as error:
            raise LabkitError(f"{folder / CONFIG} is not JSON ({error}); remove the folder or name another") from error
        if there != config:
            unlike = sorted(k for k in {*there, *config} if there.get(k) != config.get(k))
            raise LabkitError(
                f"{folder} holds a run with other settings ({', '.join(unlike)}); name another folder, or write the "
                f"same settings to go on: {json.dumps({k: there.get(k) for k in unlike})}"
            )
    else:
        _write_json(folder / CONFIG, config)


def _curves(folder: Path) -> list[dict[str, float]]:
    path = folder / CURVES
    rows = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            rows.append(json.loads(line))
        except ValueError:  # the line at which a run was killed
            continue
    return rows


def _write_json(path: Path, value: Any) -> None:
    part = path.with_name(f".{path.name}.part")
    part.write_text(json.dumps(value, indent=1) + "\n")
    os.replace(part, path)


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _version() -> str:
    from importlib.metadata import version

    return version("labkit-specdec")
