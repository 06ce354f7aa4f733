"""Runs of eleven steps, which end within an epoch, on a module of two layers: what the tests of training stop, break and compare."""

import functools
import os
import signal
import tempfile
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, dropout

from labkit.training.early_exit_loss import Rows
from labkit.training.fit import Schedule, fit

STEPS = 11
CPU = torch.device("cpu")


class Tied(nn.Module):
    """Says the next token; the head is the embedding, and dropout draws from the global generator."""

    step = 0

    def __init__(self, seed=0):
        super().__init__()
        random = torch.Generator().manual_seed(seed)
        self.embed, self.head = nn.Embedding(11, 8), nn.Linear(8, 11, bias=False)
        self.embed.weight = self.head.weight = nn.Parameter(torch.randn(11, 8, generator=random))
        self.middle = nn.Linear(8, 8, bias=False)
        self.middle.weight = nn.Parameter(0.4 * torch.randn(8, 8, generator=random))
        self.steps = []

    def forward(self, tokens):
        self.steps.append(self.step)
        hidden = dropout(torch.tanh(self.middle(self.embed(tokens))), 0.2, self.training)
        return {"loss": cross_entropy(self.head(hidden)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())}


def rows(count=10):
    """Three batches of 4 an epoch, the last of them not full."""
    return Rows((torch.arange(6) + torch.arange(count)[:, None]) % 11)


def train(out, *, module=None, config=None, evaluate=None, write=None, data=None, progress=False, device=CPU, **how):
    module = module or Tied()

    def save(folder):
        folder.mkdir()
        torch.save(module.state_dict(), folder / "weights.pt")

    def judge():
        assert not module.training and not torch.is_grad_enabled()
        return {"held_out": module(rows(2).tokens)["loss"].item()}

    how = {"save_every": 3, "eval_every": 4, "lr": 0.05, "steps": STEPS, "batch": 4} | how
    return fit(
        module, data or rows(), out, Schedule(**how), write=write or save, evaluate=evaluate or judge,
        config=config or {"recipe": "tied", "width": 8}, provenance={"data": "numbers"}, tokens_per_row=6,
        device=device, dtype=torch.float32, progress=progress,
    )  # fmt: skip


def made(trained):
    """Weights and curves, without the clock's."""
    weights = torch.load(trained.result / "weights.pt")
    curves = [{name: value for name, value in row.items() if name != "seconds"} for row in trained.curves]
    return {name: value.tolist() for name, value in weights.items()}, curves


@functools.cache
def uninterrupted():
    """Weights and curves of a run that nothing happened to."""
    with tempfile.TemporaryDirectory() as folder:
        return made(train(Path(folder, "run")))


def interrupted(out, at, number=signal.SIGINT):
    """Train until a signal comes in step `at`."""
    module = Tied()
    module.register_forward_pre_hook(
        lambda module, given: os.kill(os.getpid(), number) if module.training and module.step == at - 1 else None
    )
    with pytest.raises(KeyboardInterrupt, match=f"stopped after step {at}; run the same again to go on"):
        train(out, module=module)
