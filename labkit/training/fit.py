"""One way to train: transformers' Trainer around a module that gives its own loss, resumable at every checkpoint."""

import json
import os
import shlex
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from accelerate import PartialState
from accelerate.utils import reduce
from safetensors.torch import load_model, save_model
from torch import Tensor, nn
from torch.utils.data import Dataset
from tqdm.auto import tqdm

from labkit.doctor import machine
from labkit.errors import LabkitError
from labkit.loading import quiet
from labkit.training import folder as files
from labkit.training.folder import RESULT, Trained, add_to_curves, last_whole, write_json, written

WEIGHTS, LOSSES = "model.safetensors", "losses.json"
LOSS_EVERY = 10
"""Steps whose mean loss is a row of the curves."""


@dataclass(frozen=True)
class Schedule:
    """How long and how fast a run learns.

    steps: optimiser steps. batch: rows a step, in each process. lr: the highest, after `warmup` (a share of the steps),
    from where it falls along a cosine to a tenth. weight_decay, beta2: of AdamW. save_every, eval_every: steps. seed:
    of everything.
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
    SIGTERM) ends the run after the step at hand, with a checkpoint, and raises KeyboardInterrupt. A run that is
    finished is not trained again: the module then gets its last checkpoint's weights, if that is still there. Raises
    LabkitError for too few rows, a folder of another run, and a disk that is full; the last whole checkpoint stays.
    """
    folder = files.name_folder(out)
    if len(rows) < schedule.batch:  # type: ignore
        raise LabkitError(f"got {len(rows)} rows of text, and one batch needs {schedule.batch}; give more text")  # type: ignore
    arguments = _arguments(folder, schedule, device, dtype)
    began, first = time.perf_counter(), arguments.process_index == 0
    with arguments.main_process_first(local=False):
        files.claim(folder, json.loads(json.dumps({**config, "schedule": vars(schedule)})))
    with files.alone(folder) if first else nullcontext():
        resumed = last_whole(folder)
        step = 0 if resumed is None else files.step_of(resumed)
        finished = (folder / RESULT).is_dir()
        if finished or step >= schedule.steps:  # the Trainer would go one step too far
            if resumed is not None:
                load_model(module, str(resumed / WEIGHTS))
        else:
            record = _Record(module, folder, schedule, evaluate, tokens_per_row, progress, first)
            record.go_on_from(resumed, step)
            trainer = _Trainer(record, model=module, args=arguments, train_dataset=rows, callbacks=[record])
            trainer.remove_callback(hf.PrinterCallback)
            with _stopped_by_signals(record), record.bar:
                trainer.train(resume_from_checkpoint=None if resumed is None else str(resumed))
            if record.stopped:
                raise KeyboardInterrupt(f"stopped after step {trainer.state.global_step}; run the same again to go on")
            trainer.accelerator.wait_for_everyone()
        module.eval()
        if first and not finished:
            known = {
                **provenance, "command": _command(), "machine": machine(), "labkit": _version(),
                "resumed_at_step": step, "seconds_since_then": round(time.perf_counter() - began, 1),
                "steps": schedule.steps,
                "tokens_seen": schedule.steps * schedule.batch * tokens_per_row * arguments.world_size,
            }  # fmt: skip
            with written("the result", folder, RuntimeError), quiet():
                write_json(folder / files.PROVENANCE, known)
                with tempfile.TemporaryDirectory(dir=folder, prefix=files.PART) as part:
                    write(made := Path(part, RESULT))
                    os.replace(made, folder / RESULT)
        PartialState().wait_for_everyone()
    return Trained(folder, folder / RESULT, files.read_curves(folder))


def _arguments(folder: Path, schedule: Schedule, device: torch.device, dtype: torch.dtype) -> hf.TrainingArguments:
    made = hf.TrainingArguments(
        output_dir=str(folder / files.CHECKPOINTS), max_steps=schedule.steps,
        per_device_train_batch_size=schedule.batch, learning_rate=schedule.lr,
        lr_scheduler_type="cosine_with_min_lr", lr_scheduler_kwargs={"min_lr_rate": 0.1},
        warmup_steps=max(1, round(schedule.warmup * schedule.steps)), weight_decay=schedule.weight_decay,
        adam_beta2=schedule.beta2, max_grad_norm=1.0, logging_strategy="no", logging_steps=LOSS_EVERY,
        save_strategy="steps", save_steps=schedule.save_every, save_total_limit=2, bf16=dtype == torch.bfloat16,
        use_cpu=device.type == "cpu", seed=schedule.seed, data_seed=schedule.seed, report_to=[], disable_tqdm=True,
        remove_unused_columns=False, label_names=[], dataloader_pin_memory=False,
    )  # fmt: skip
    if device.index not in (None, own := made.device.index or 0):
        raise LabkitError(f"got device {device}, and this process trains on number {own}; set CUDA_VISIBLE_DEVICES")
    made._n_gpu = min(1, made.n_gpu)  # one process a device: torchrun starts several
    return made


class _Record(hf.TrainerCallback):
    """Tells the module its step, evaluates, writes the curves, shows the bar, and stops when asked."""

    def __init__(
        self,
        module: Any,
        folder: Path,
        schedule: Schedule,
        evaluate: Callable[[], dict[str, float]],
        tokens: int,
        progress: bool,
        first: bool,
    ):
        self.module, self.folder, self.schedule, self.evaluate, self.tokens = module, folder, schedule, evaluate, tokens
        self.first, self.stopped = first, False
        self.fresh: list[Tensor] = []
        self.losses: list[float] = []
        self.began, self.earlier = time.perf_counter(), 0.0
        self.bar: Any = tqdm(total=schedule.steps, unit="step", disable=not (progress and first))

    def go_on_from(self, checkpoint: Path | None, step: int) -> None:
        """Take up the curves where a checkpoint left them: those behind it are made again."""
        kept = files.keep_curves(self.folder, step) if self.first else []
        self.earlier = kept[-1]["seconds"] if kept else 0.0
        if checkpoint is not None and (checkpoint / LOSSES).exists():
            self.losses = json.loads((checkpoint / LOSSES).read_text())
        self.bar.update(step)

    def on_step_begin(self, args, state, control, **kwargs):
        self.module.step = state.global_step

    def on_step_end(self, args, state, control, **kwargs):
        step, last = state.global_step, state.global_step == self.schedule.steps
        if step % self.schedule.eval_every == 0 or last:
            self.module.eval()
            with torch.no_grad():
                figures = self.evaluate()
            self.module.train()
            self._row(args, step, figures)
        if step % LOSS_EVERY == 0 or last:
            losses = self.pending()
            self._row(args, step, {"loss": sum(losses) / len(losses)})
            self.losses = []
        if args.world_size > 1:  # a signal may reach the processes in different steps
            stopped: Any = reduce(torch.tensor(float(self.stopped), device=args.device), "sum")
            self.stopped = stopped.item() > 0
        if self.stopped:
            control.should_save = control.should_training_stop = True
        self.bar.update()
        return control

    def pending(self) -> list[float]:
        """The loss of every step since the last row of them, the mean over all processes."""
        if self.fresh:
            self.losses += reduce(torch.stack(self.fresh), "mean").tolist()  # type: ignore
            self.fresh = []
        return self.losses

    def _row(self, args, step: int, figures: dict[str, float]) -> None:
        seen = step * self.schedule.batch * self.tokens * args.world_size
        seconds = round(self.earlier + time.perf_counter() - self.began, 1)
        if self.first:
            add_to_curves(self.folder, {"step": step, "tokens": seen, "seconds": seconds, **figures})
        if "loss" in figures:
            self.bar.set_postfix(loss=f"{figures['loss']:.3f}")


class _Trainer(hf.Trainer):
    """The Trainer, with the loss of every step, and checkpoints that are whole and whose modules may share weights."""

    def __init__(self, record: _Record, **given):
        self.record = record
        super().__init__(**given)

    def training_step(self, *given, **named):
        loss = super().training_step(*given, **named)
        self.record.fresh.append(loss)
        return loss

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        folder = Path(output_dir or str(self.args.output_dir))
        folder.mkdir(parents=True, exist_ok=True)
        if self.args.should_save:
            save_model(self.accelerator.unwrap_model(self.model), str(folder / WEIGHTS))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        load_model(self.accelerator.unwrap_model(model or self.model), str(Path(resume_from_checkpoint, WEIGHTS)))

    def _save_checkpoint(self, *given, **named) -> None:
        checkpoint = Path(str(self.args.output_dir), f"checkpoint-{self.state.global_step}")
        losses = self.record.pending()
        with written("a checkpoint", self.record.folder, RuntimeError), quiet():
            super()._save_checkpoint(*given, **named)
            self.accelerator.wait_for_everyone()  # every process adds a file
            if self.record.first:
                write_json(checkpoint / LOSSES, losses)
                files.mark_whole(checkpoint)


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


def _command() -> str:
    """What was written in the shell, without the folder that the program lies in."""
    program = Path(sys.argv[0])
    name = program.parent.name if program.name == "__main__.py" else program.name
    return shlex.join([name, *sys.argv[1:]])


def _version() -> str | None:
    try:
        return version("labkit-specdec")
    except PackageNotFoundError:  # run from a checkout
        return None
