"""How far decoding with an early exit agrees with the full model."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from labkit.draft import Draft
from labkit.errors import LabkitError, check_lab
from labkit.lab import Lab, _Run
from labkit.prompts import read_prompts
from labkit.protocol import Context, Drafter


@dataclass(frozen=True)
class Agreement:
    """How far a lossy target says what the full model says; one entry a prompt.

    shares: of the positions of the full model's greedy text, those at which both say the same token. depths: the mean
    number of layers that the positions were read after. tokens: the positions.
    """

    shares: list[float]
    depths: list[float]
    tokens: list[int]

    @property
    def mean(self) -> float:
        """Mean share over prompts."""
        return statistics.fmean(self.shares)

    @property
    def depth(self) -> float:
        """Mean exit depth over prompts."""
        return statistics.fmean(self.depths)

    def __str__(self) -> str:
        return f"agreement {self.mean:.3f} over {len(self.shares)} prompts, read after {self.depth:.1f} layers"


@dataclass(frozen=True)
class _Told(Drafter):
    """Proposes a text that is known."""

    text: tuple[int, ...]

    @property
    def nodes(self) -> int:
        return len(self.text)

    def propose(self, state: Any, context: Context) -> Draft:
        return Draft.chain(torch.tensor([self.text], dtype=torch.long, device=context.n.device))


def agreement(
    lab: Lab, prompts: Any, early_exit: Any, *, exit_layers: Sequence[int] | None = None, max_new_tokens: int = 64
) -> Agreement:
    """Where decoding with an early exit, led along the full model's own greedy text, says the same token.

    early_exit: a number of layers, or a rule (labkit.exits) tested at `exit_layers`. One pass a prompt: the lossy
    target verifies the text. In float32 even the full depth may miss a near-tie, since batched rows round differently.
    """
    check_lab(lab, "agreement(lab, prompts, early_exit)")
    if early_exit is None:
        raise LabkitError("got early_exit=None; write a number of layers, or a rule such as labkit.confidence(0.9)")
    rows = read_prompts(prompts, None, lab.tokenizer, lab.backbone.vocab).rows
    _Run(lab, rows, None, dict(early_exit=early_exit, exit_layers=exit_layers, max_new_tokens=max_new_tokens))
    texts = [lab.generate(row, max_new_tokens=max_new_tokens).tokens[0] for row in rows]
    return told_agreement(lab, rows, texts, early_exit, exit_layers)


def told_agreement(lab: Lab, rows: Sequence, texts: Sequence, early_exit: Any, exit_layers: Any) -> Agreement:
    """The same for prompts of ids whose greedy texts are known."""
    shares, depths = [], []
    for row, text in zip(rows, texts, strict=True):
        options = dict(early_exit=early_exit, exit_layers=exit_layers, max_new_tokens=len(text))
        run = _Run(lab, row, _Told(tuple(text[:-1])), options)
        said = next(run.rounds()).target[0]
        left = run.session.left()
        shares.append(statistics.fmean(a == b for a, b in zip(said, text, strict=True)))
        depths.append(run.target.depth if left is None else left.double().mean().item())
    return Agreement(shares, depths, [len(text) for text in texts])
