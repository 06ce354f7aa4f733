"""The output law of Match and Rejection, exactly and by counting."""

import math

import pytest
import torch
from counts import bound, chi_square
from toys import (
    CPU,
    LIARS,
    MODELS,
    PROMPT,
    ROWS,
    TREES,
    VOCAB,
    Tree,
    exact_law,
    generate,
    grow,
    misfit,
    plain_law,
    table,
)

from labkit.acceptance import Match, Rejection
from labkit.draft import Draft
from labkit.noise import Noise, Salt
from labkit.protocol import Acceptance

SMALL = [name for name, tree in TREES.items() if len(tree) <= 4]


@pytest.mark.parametrize("name", SMALL)
def test_the_reference_has_the_exact_law(name):
    """Enumeration proves the rule that the code is compared with below, to rounding."""
    models = MODELS["different"]
    torch.testing.assert_close(exact_law(models, TREES[name]), plain_law(models), rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", LIARS)
def test_a_wrong_law_biases_the_reference(name):
    models = MODELS["different"]
    assert (exact_law(models, LIARS[name]) - plain_law(models)).abs().sum() > 0.02


# -- the law of the real thing, by counting -----------------------------------------------------------------


def sampled(rule: Acceptance, models, tree: Tree, ragged: bool = False, of: type[Noise] = Noise) -> float:
    tokens = generate(rule, models, tree, of(torch.arange(ROWS) - ROWS // 2, False), 2, ragged)
    return misfit(tokens, plain_law(models))


@pytest.mark.parametrize("rule", [Match(), Rejection()], ids=repr)
@pytest.mark.parametrize("tree", TREES)
def test_law_for_every_tree(rule, tree):
    assert sampled(rule, MODELS["different"], TREES[tree]) < 1


@pytest.mark.parametrize("rule", [Match(), Rejection()], ids=repr)
@pytest.mark.parametrize("tree", ["chain of 3", "binary tree", "drawn before chosen"])
@pytest.mark.parametrize("models", [name for name in MODELS if name != "different"])
def test_law_for_every_pair_of_models(rule, tree, models):
    assert sampled(rule, MODELS[models], TREES[tree]) < 1


@pytest.mark.parametrize("rule", [Match(), Rejection()], ids=repr)
def test_law_of_rows_that_propose_fewer(rule):
    assert sampled(rule, MODELS["different"], TREES["binary tree"], ragged=True) < 1


@pytest.mark.parametrize("name", LIARS)
def test_the_count_finds_a_wrong_law(name):
    assert sampled(Rejection(), MODELS["different"], LIARS[name]) > 1
    assert sampled(Match(), MODELS["different"], LIARS[name]) < 1, "Match takes no notice of the draft's law"


class OneSalt(Noise):
    """Draft draws and residual draws from the same noise: what Rejection must not do."""

    def gumbel(self, at, vocab, salt):
        return super().gumbel(at, vocab, Salt.TARGET)


class OnePlace(Noise):
    """The same noise at every position."""

    def gumbel(self, at, vocab, salt):
        return super().gumbel(torch.zeros_like(at), vocab, salt)


def test_the_count_finds_repeated_noise():
    assert sampled(Match(), MODELS["different"], TREES["chain of 1"], of=OnePlace) > 1


def test_the_count_finds_shared_noise():
    assert sampled(Rejection(), MODELS["different"], TREES["chain of 1"], of=OneSalt) > 1


class ByPosition(Rejection):
    """Noise that belongs to the position: a discarded draw comes back in the next round."""

    def _places(self, n, round):
        return n[:, None]


def after_a_controller(rule: Rejection) -> float:
    """A drafter that proposes again exactly when the token behind the rejected one was its favourite."""
    target, draft = MODELS["different"][0], table(2)[:1].expand(VOCAB, -1)
    favourite, rows = target[0].argmax(), torch.arange(ROWS)
    noise, n, last = Noise(rows, False), torch.full((ROWS,), PROMPT), torch.zeros(ROWS, dtype=torch.long)
    first = grow(TREES["chain of 2"], draft, last, lambda level: rule.draft_noise(noise, n, 0, level, VOCAB))
    verdict = rule(first, target[torch.cat([last[:, None], first.tokens], 1)], noise, n, 0)
    last, n = verdict.tokens[:, 0], n + 1
    second = grow(TREES["chain of 1"], draft, last, lambda level: rule.draft_noise(noise, n, 1, level, VOCAB))
    second.valid.logical_and_((first.tokens[:, 1] == favourite)[:, None])
    after = rule(second, target[torch.cat([last[:, None], second.tokens], 1)], noise, n, 1)
    tokens = torch.stack([last, torch.where(verdict.accepted > 0, verdict.tokens[:, 1], after.tokens[:, 0])], 1)
    return misfit(tokens, plain_law(MODELS["different"]))


def test_a_discarded_draw_does_not_come_back():
    assert after_a_controller(Rejection()) < 1
    assert after_a_controller(ByPosition()) > 1


# -- Match: the text belongs to the seed --------------------------------------------------------------------


@pytest.mark.parametrize("silent", [True, False], ids=["greedy", "sampling"])
@pytest.mark.parametrize("models", MODELS)
def test_match_gives_one_text_for_every_drafter(models, silent):
    noise = Noise.of(7, 40, silent=silent, device=CPU)
    plain = generate(Match(), MODELS[models], [], noise, 12)
    for name, tree in {**TREES, **LIARS}.items():
        assert generate(Match(), MODELS[models], tree, noise, 12, ragged=True).equal(plain), name
    alone = generate(Match(), MODELS[models], TREES["binary tree"], Noise.of(7 + 33, 1, silent=silent, device=CPU), 12)
    assert alone.equal(plain[33:34])


def test_shared_noise_agrees_often():
    """At least (1 - TV) / (1 + TV) of single drafted tokens are accepted (Daliri et al.); unshared noise gives less."""
    noise, n, last = Noise(torch.arange(ROWS), False), torch.full((ROWS,), PROMPT), torch.zeros(ROWS, dtype=torch.long)
    slack = 5 * math.sqrt(0.25 / ROWS)
    for name in ("different", "hot", "both cut", "the same"):
        models = MODELS[name]
        p, q = (scores[0].double().softmax(-1) for scores in models)
        distance = 0.5 * (p - q).abs().sum().item()
        least, rate = (1 - distance) / (1 + distance), {}
        for rule in (Match(), Rejection()):
            noise_at = lambda level, rule=rule: rule.draft_noise(noise, n, 0, level, VOCAB)  # noqa: E731
            draft = grow(TREES["chain of 1"], models[1], last, noise_at)
            scores = models[0][torch.cat([last[:, None], draft.tokens], 1)]
            rate[rule] = Match()(draft, scores, noise, n, 0).accepted.double().mean().item()
        assert rate[Match()] > least - slack
        assert abs(rate[Rejection()] - (p * q).sum().item()) < slack
        if name != "both cut":  # there the bound lies below the p·q of unshared noise, and tells nothing
            assert rate[Rejection()] < least - slack
    assert rate[Match()] == least == 1 and rate[Rejection()] < 0.9, "the two models were the same"


def test_a_residual_without_mass():
    """If a rejection leaves nothing of p (here q is 1.5 p: a rounding, magnified), p itself is drawn."""
    scores = table(1)[0].expand(ROWS, 2, VOCAB)
    law, token = scores[0, 0].double().softmax(-1), torch.full((ROWS, 1), 2)
    draft = Draft.chain(token, drawn=True, probs=1.5 * scores[:, :1].softmax(-1))
    verdict = Rejection()(draft, scores, Noise(torch.arange(ROWS), False), torch.ones_like(token[:, 0]), 0)
    rejected = verdict.tokens[verdict.accepted == 0, 0]
    assert abs(len(rejected) / ROWS - 1 / 3) < 0.01
    assert chi_square(rejected.bincount(minlength=VOCAB), len(rejected) * law) < bound(VOCAB - 1)
