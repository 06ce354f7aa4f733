"""A chain drafted one token at a time: its static buffers, where it stops, and what its drafter has not seen yet."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from labkit.draft import Draft, Partial
from labkit.errors import LabkitError, check_callable
from labkit.protocol import Context, Drawn, StopRule, never
from labkit.session import Session


@dataclass(frozen=True)
class below:
    """Stop after a token that the draft gave less than this probability. Source: Kangaroo, 2404.18911."""

    confidence: Any

    def __post_init__(self):
        number = isinstance(self.confidence, int | float) and not isinstance(self.confidence, bool)
        if not (number and 0 <= self.confidence <= 1):
            raise LabkitError(f"got below({self.confidence!r}); write a probability from 0 to 1")

    def __call__(self, drawn: Drawn, level: int) -> Tensor:
        """Rows whose token was unsure."""
        return drawn.q < self.confidence


def check_stop(stop: Any) -> None:
    """Raise LabkitError unless `stop` can be called as a rule; a class such as `below` still wants its confidence."""
    check_callable(stop, "stop", "drawn, level", "write a rule such as labkit.below(0.6), or leave it out")


def stops(rule: StopRule, drawn: Drawn, level: int) -> Tensor | None:
    """What a stop rule says of each row, checked: `(batch,) bool`, or None for in no row. It may write into `drawn`."""
    found: Any = rule(drawn, level)
    if found is None:
        return None
    if not isinstance(found, Tensor) or found.dtype != torch.bool or found.shape != drawn.token.shape:
        got = f"{tuple(found.shape)}, {found.dtype}" if isinstance(found, Tensor) else repr(found)
        raise LabkitError(
            f"the stop rule {rule!r} returned {got}; needed is a tensor of shape {tuple(drawn.token.shape)}, "
            "torch.bool (True ends that row's draft), or None"
        )
    return found


@dataclass
class Chain:
    """Buffers for a chain of at most `most` tokens, over all rounds of a run: `tokens`, `q`, and laws where needed."""

    session: Session
    most: int
    stop: StopRule = never
    tokens: Tensor = field(init=False)
    q: Tensor = field(init=False)
    valid: Tensor = field(init=False)
    probs: Tensor | None = None
    count: int = 0

    def __post_init__(self):
        self.tokens = self.session.tokens.new_zeros((self.session.batch, self.most))
        self.q = torch.zeros_like(self.tokens, dtype=torch.float32)
        self.valid = torch.ones_like(self.tokens, dtype=torch.bool)

    def grow(self, context: Context, count: int, step: Callable[[int, Tensor], Tensor]) -> int:
        """Draw up to `count` tokens; how many levels there are now. A row that a stop rule ends has no later node.

        step(level, token (batch, 1)) -> logits (batch, vocab) of the next one; the first token is the pending one.
        Where a stop rule speaks, one counted copy a token tells whether any row goes on.
        """
        token, going, self.count = self.session.pending(), None, 0
        while self.count < count:
            level = self.count
            logits = step(level, token).float().to(context.n.device)
            self.valid[:, level] = True if going is None else going
            drawn = context.draw(logits, self.tokens[:, :level])
            self._put(level, drawn)
            token, self.count = self.tokens[:, level : level + 1], level + 1
            for rule in (self.stop, context.stop):
                over = stops(rule, drawn, level) if self.count < count else None
                if over is not None:
                    going = ~over if going is None else going & ~over
            if going is not None and self.count < count:
                on = self.session.to_host(going)
                if not any(row and not done for row, done in zip(on, context.done, strict=True)):
                    break
        return self.count

    def _put(self, level: int, drawn: Drawn) -> None:
        self.tokens[:, level] = drawn.token
        self.q[:, level] = drawn.q
        if drawn.probs is not None:
            if self.probs is None:
                self.probs = drawn.probs.new_zeros((*self.tokens.shape, drawn.probs.shape[-1]))
            self.probs[:, level] = drawn.probs

    def draft(self, exits: Tensor | None = None, partial: Partial | None = None) -> Draft:
        """What was drawn this round as a draft."""
        n = self.count
        if n == 0:
            return Draft.empty(self.tokens)
        probs = None if self.probs is None else self.probs[:, :n]
        return Draft.chain(self.tokens[:, :n], self.valid[:, :n], drawn=probs is not None, probs=probs, q=self.q[:, :n],
                           exits=exits, partial=partial)  # fmt: skip


class Unseen:
    """How many committed rows a drafter with KV of its own must feed: the pending one and those it has not seen.

    After a round in which all it drafted was accepted that is two, otherwise one: always two, for static shapes. It
    may have sat out rounds in a combinator; then it is as many as its longest lag.
    """

    def __init__(self, lengths: Sequence[int]):
        self._seen = list(lengths)

    def rows(self, context: Context) -> int:
        """Rows to feed this round, the pending one last."""
        behind = 0 if context.alone else max(n - seen for n, seen in zip(context.lengths, self._seen, strict=True))
        self._seen = list(context.lengths)
        return max(2, behind + 1)
