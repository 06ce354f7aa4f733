"""Prompt lookup: copy what followed the last time that the text ended like this (n-gram drafting)."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from labkit.draft import Draft
from labkit.errors import LabkitError
from labkit.protocol import Context, Drafter
from labkit.session import Session


def check_count(value: int, name: str, strategy: str) -> None:
    """Raise LabkitError unless `value` is an int of at least 1."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise LabkitError(f"{strategy} got {name}={value!r}; it must be an int of at least 1 (Plain() drafts nothing)")


@dataclass
class Index:
    """Where each n-gram of a text ended last, among those that something follows."""

    ends: dict[tuple[int, ...], int] = field(default_factory=dict)
    seen: int = 0

    def continuation(self, text: Sequence[int], ngram: int, count: int) -> list[int]:
        """What followed the longest, then latest, earlier match of the text's last `ngram` tokens or fewer."""
        for end in range(self.seen, len(text)):
            for size in range(1, min(ngram, end) + 1):
                self.ends[tuple(text[end - size : end])] = end
        self.seen = len(text)
        for size in range(min(ngram, len(text)), 0, -1):
            end = self.ends.get(tuple(text[-size:]))
            if end is not None:
                return [text[end + i % (len(text) - end)] for i in range(count)]
        return []


@dataclass(frozen=True)
class PromptLookup(Drafter):
    """Propose the continuation of the longest, then latest, earlier match of the last `ngram` tokens or fewer.

    Costs no model call: it looks at the host's copy of the text. A match so late that its continuation runs into
    the present is continued periodically. Rows without a match of even one token propose nothing, and where no row
    has one the round is a plain step. Source: Saxena, prompt-lookup-decoding (2023).
    """

    ngram: int = 3
    max_draft: int = 8

    def __post_init__(self):
        check_count(self.ngram, "ngram", "PromptLookup")
        check_count(self.max_draft, "max_draft", "PromptLookup")

    @property
    def nodes(self) -> int:
        """The draft length."""
        return self.max_draft

    def begin(self, session: Session) -> list[Index]:
        """An index for each row, which grows with its text."""
        return [Index() for _ in range(session.batch)]

    def propose(self, state: list[Index], context: Context) -> Draft:
        """A chain, valid in the rows that found a match."""
        count = context.length(self.max_draft)
        found = [
            [] if done or not count else index.continuation(text, self.ngram, count)
            for index, text, done in zip(state, context.history, context.done, strict=True)
        ]
        if not any(found):
            return Draft.empty(context.tokens)
        device = context.tokens.device
        tokens = torch.tensor([guess or [0] * count for guess in found], device="cpu").to(device, non_blocking=True)
        valid = torch.tensor([[bool(guess)] * count for guess in found], device="cpu").to(device, non_blocking=True)
        return Draft.chain(tokens, valid)
