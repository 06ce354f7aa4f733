"""Prompt lookup: copy what followed the last time that the text ended like this (n-gram drafting)."""

from dataclasses import dataclass

import torch

from labkit.draft import Draft
from labkit.errors import LabkitError
from labkit.protocol import Context, Drafter


def check_count(value: int, name: str, strategy: str) -> None:
    """Raise LabkitError unless `value` is an int of at least 1."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise LabkitError(f"{strategy} got {name}={value!r}; it must be an int of at least 1 (Plain() drafts nothing)")


@dataclass(frozen=True)
class PromptLookup(Drafter):
    """Propose the continuation of the longest, then latest, earlier match of the last `ngram` tokens or fewer.

    Costs no model call. A match so late that its continuation runs into the present is continued periodically.
    Rows without a match of even one token propose nothing. Source: Saxena, prompt-lookup-decoding (2023).
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

    def propose(self, state, context: Context) -> Draft:
        """A chain, valid in the rows that found a match."""
        count, tokens, n = context.length(self.max_draft), context.tokens, context.n[:, None]
        if count == 0:
            return Draft.empty(tokens)
        at = torch.arange(tokens.shape[1], device=tokens.device)
        run = (at < n - 1).expand_as(tokens)
        matched = torch.zeros_like(tokens)
        for back in range(self.ngram):
            last = tokens.gather(1, (n - 1 - back).clamp_min(0))
            run = run & (tokens.roll(back, 1) == last) & (at >= back) & (n - 1 >= back)
            matched += run
        best = (matched * tokens.shape[1] + at).argmax(1, keepdim=True)
        ahead = torch.arange(count, device=tokens.device) % (n - 1 - best).clamp_min(1)
        found = matched.gather(1, best) > 0
        guess = tokens.gather(1, (best + 1 + ahead).clamp_max(tokens.shape[1] - 1))
        return Draft.chain(torch.where(found, guess, 0), valid=found.expand(-1, count))
