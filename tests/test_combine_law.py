"""The law of combined strategies under Rejection, by counting, with combinations that must fail."""

import itertools
from dataclasses import replace

import pytest
import torch
from scripted import Drawing
from test_combine import lab
from toys import MODELS, ROWS, VOCAB, misfit, plain_law

from labkit import AtMost, Fallback, Rejection, Union, Until
from labkit.drafters.mixture import merged
from labkit.noise import Noise
from labkit.protocol import Context
from labkit.session import Session

MODELS = MODELS | {  # what one draft leaves of the target's law is spread out, so that a second one can bias it
    "skewed": tuple(
        torch.tensor([law] * VOCAB).log() for law in ([0.2, 0.4, 0.1, 0.1, 0.2], [0.6, 0.29, 0.05, 0.05, 0.01])
    )
}


def law_misfit(drafter, models="skewed") -> float:
    """As test_acceptance_law's `sampled`, with a real strategy: two tokens in each of many rows, by rounds."""
    rule, noise, target = Rejection(), Noise(torch.arange(ROWS) - ROWS // 2, False), MODELS[models][0]
    tokens, n = torch.zeros(ROWS, 32, dtype=torch.long), torch.ones(ROWS, dtype=torch.long)
    session = Session(lab().backbone, 1, 4)
    state = drafter.begin(session)
    for round in itertools.count():
        place = lambda level, vocab, member: rule.draft_noise(noise, n, round, level, vocab, member)  # noqa: E731
        lengths, done = n.tolist(), (n > 2).tolist()
        context = Context(tokens, n, [], lengths, done, [9] * ROWS, 9, round, lambda s, *rest: s.float(), place, True)
        draft = drafter.propose(state, context)
        pending = tokens.gather(1, n[:, None] - 1)
        verdict = rule(draft, target[torch.cat([pending, draft.tokens], 1)], noise, n, round)
        tokens.scatter_(1, n[:, None] + torch.arange(draft.depth + 1), verdict.tokens)
        n = (n + verdict.accepted + 1).clamp_max(3)
        if n.min() == 3:
            return misfit(tokens[:, 1:3], plain_law(MODELS[models]))


def toys(models="skewed"):
    draft, other = MODELS[models][1], torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(8))
    return Drawing(draft), Drawing(other), Drawing(draft, greedy=True), Drawing(draft, silent_after=(1, 3))


def unsure(drawn, level):
    return drawn.token % 2 == 0


LAWFUL = {
    "two drawn": lambda a, b, best, shy: Union(a, b),
    "one law twice": lambda a, b, best, shy: Union(a, replace(a, length=1)),
    "drawn and chosen": lambda a, b, best, shy: Union(a, best),
    "chosen and drawn": lambda a, b, best, shy: Union(best, a),
    "three": lambda a, b, best, shy: Union(Union(a, best), b),
    "by rows": lambda a, b, best, shy: Fallback(shy, b),
    "by rows, in a tree": lambda a, b, best, shy: Union(Fallback(shy, best), Fallback(shy, a)),
    "until": lambda a, b, best, shy: Until(unsure, Union(a, b)),
    "at most": lambda a, b, best, shy: Union(AtMost(1, a), AtMost(1, b)),
}


@pytest.mark.parametrize("name", LAWFUL)
def test_the_law_of_combinations(name):
    assert law_misfit(LAWFUL[name](*toys())) < 1


@pytest.mark.parametrize("models", ["different", "the same", "both cut", "cold draft"])
def test_the_law_of_a_union_of_other_models(models):
    a, b, best, _ = toys(models)
    assert law_misfit(Union(Union(a, best), b), models) < 1


class OneNoise(Union):
    """Both members draw with the same noise."""

    def propose(self, state, context):
        return merged(*(member.propose(s, context) for member, s in zip(self.members, state.members)))


class Drops(Union):
    """Merges drawn nodes too."""

    def propose(self, state, context):
        one, two = (m.propose(s, context.for_member(i)) for i, (m, s) in enumerate(zip(self.members, state.members)))
        both = merged(one, replace(two, drawn=torch.zeros_like(two.drawn)))
        return replace(both, drawn=torch.ones_like(both.drawn))


@pytest.mark.parametrize("wrong", [OneNoise, Drops])
def test_the_count_finds_a_wrong_union(wrong):
    a, *_ = toys()
    assert law_misfit(wrong(a, a)) > 1
    assert law_misfit(Union(a, a)) < 1


def test_the_count_finds_a_stop_that_drops_what_was_drawn(monkeypatch):
    """A rule may end a draft behind a token, never take the token itself back."""
    a, *_ = toys()

    class TakesBack(Until):
        def propose(self, state, context):
            draft = self.drafter.propose(state.members[0], context)
            return replace(draft, valid=draft.valid & ~(draft.tokens % 2 == 0).cummax(1).values)

    assert law_misfit(TakesBack(unsure, a)) > 1
