"""Match and Rejection against the walk in plain Python, and their edges."""

import itertools
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from toys import (
    CPU,
    MODELS,
    TREES,
    VOCAB,
    generate,
    levels,
    outcomes,
    random_draft,
    same,
    table,
)
from waiting import NoSync

from labkit.acceptance import PLACES, Match, Rejection
from labkit.draft import Draft
from labkit.noise import Noise, Salt
from labkit.protocol import Verdict


def expected_verdict(draft: Draft, scores: Tensor, row: int, path: list[int], target: list[int], own: int) -> dict:
    """A row's verdict as protocol.py words it."""
    tokens, parents = draft.tokens[row].tolist(), draft.parents[row].tolist()
    p = scores[row].double().softmax(-1).tolist()
    end, pad = path[-1] if path else -1, draft.depth - len(path)
    probability = [p[1 + end][own], *(p[1 + up][x] for up, x in zip(parents, tokens, strict=True))]
    return {
        "path": path + [-1] * pad,
        "accepted": len(path),
        "tokens": [tokens[i] for i in path] + [own] + [0] * pad,
        "target": [own if i == end else t for i, t in enumerate(target, -1)],
        "p": pytest.approx(probability, rel=1e-4, abs=1e-7),
    }


def row_of(verdict: Verdict, row: int) -> dict:
    return {name: getattr(verdict, name)[row].tolist() for name in Verdict.__dataclass_fields__}


flag, size = st.booleans(), st.integers(0, 8)
drafts = given(seed=st.integers(0, 2**32), nodes=size, vocab=st.integers(2, 6), chain=flag, silent=flag)
steady = settings(max_examples=80, deadline=None, derandomize=True, database=None)


@drafts
@steady
def test_match_equals_the_plain_walk(seed, nodes, vocab, chain, silent):
    draft, scores = random_draft(seed, nodes, vocab, chain=chain)
    noise, n = Noise.of(seed, 16, silent=silent, device=CPU), torch.arange(16) + 2
    verdict = Match()(draft, scores, noise, n, round=3)
    for row, parents in enumerate(draft.parents.tolist()):
        at = torch.tensor([[2 + row, *(2 + row + level + 1 for level in levels(parents))]])
        gumbel = 0 if silent else Noise(noise.seeds[row : row + 1], False).gumbel(at, vocab, Salt.TARGET)[0]
        target = (scores[row] + gumbel).argmax(-1).tolist()
        path, fits = [], [-1]
        while fits:
            path.append(node := fits[0])
            proposed = draft.valid[row] & (draft.parents[row] == node) & (draft.tokens[row] == target[1 + node])
            fits = proposed.nonzero().flatten().tolist()
        path, own = path[1:], target[1 + node]
        assert row_of(verdict, row) == expected_verdict(draft, scores, row, path, target, own)


@drafts
@steady
def test_rejection_equals_the_plain_walk(seed, nodes, vocab, chain, silent):
    draft, scores = random_draft(seed, nodes, vocab, chain=chain)
    noise, n, round = Noise.of(seed, 16, silent=silent, device=CPU), torch.arange(16) + 2, seed % 7
    verdict = Rejection()(draft, scores, noise, n, round)
    best = scores.argmax(-1)
    laws = torch.nn.functional.one_hot(best, vocab) if silent else scores.softmax(-1)
    for row, parents in enumerate(draft.parents.tolist()):
        tokens, one = draft.tokens[row], Noise(noise.seeds[row : row + 1], silent)
        chosen = torch.nn.functional.one_hot(tokens, vocab)
        q = torch.where(draft.drawn[row, :, None], draft.probs[row], chosen).tolist()
        places = torch.arange(round * PLACES, round * PLACES + nodes + 1)[None]
        luck = one.uniform(places, Salt.ACCEPT)[0].tolist()
        seen = [parent if valid else -2 for parent, valid in zip(parents, draft.valid[row].tolist(), strict=True)]
        judged = outcomes(laws[row].tolist(), tokens.tolist(), seen, q, lambda i, p, q, u=luck: float(u[i] * q < p))
        ((_, path, law),) = judged
        gumbel = 0 if silent else one.gumbel(places[:, :1], vocab, Salt.RESIDUAL)[0, 0]
        own = (torch.tensor(law).log() + gumbel).argmax(-1).item()
        assert row_of(verdict, row) == expected_verdict(draft, scores, row, path, best[row].tolist(), own)


@pytest.mark.parametrize("rule", [Match(), Rejection()], ids=repr)
def test_a_row_is_judged_alone(rule):
    draft, scores = random_draft(5, 7, 6)
    noise, n = Noise.of(9, 16, silent=False, device=CPU), torch.arange(16) + 2
    whole = rule(draft, scores, noise, n, 2)
    for b in range(16):
        at = slice(b, b + 1)
        mine = {name: getattr(draft, name)[at] for name in ("tokens", "parents", "valid", "drawn", "probs")}
        alone = replace(draft, **mine)
        assert same(rule(alone, scores[at], Noise(noise.seeds[at], False), n[at], 2), whole, at)


def test_greedy_is_one_rule():
    """At zero temperature both rules are the same, and follow the best token."""
    noise = Noise.of(0, 1, silent=True, device=CPU)
    for models in MODELS.values():
        text, last = [], 0
        for _ in range(9):
            text.append(last := models[0][last].argmax().item())
        for rule, tree in itertools.product((Match(), Rejection()), TREES.values()):
            assert generate(rule, models, tree, noise, 9).tolist() == [text]
            assert rule.draft_noise(noise, torch.tensor([4]), 0, 0, VOCAB) is None
    draft, scores = random_draft(3, 6, 4)
    noise, n = Noise.of(0, 16, silent=True, device=CPU), torch.arange(16)
    assert same(Match()(draft, scores, noise, n, 0), Rejection()(draft, scores, noise, n, 0))


def test_whose_noise():
    """Match's belongs to the position and is the target's own; Rejection's to the round, and to the draft alone."""
    noise, n = Noise.of(4, 2, silent=False, device=CPU), torch.tensor([6, 9])
    for level in range(3):
        match = Match().draft_noise(noise, n, 0, level, 7)
        assert match.equal(Match().draft_noise(noise, n + level, 5, 0, 7))
        assert match.equal(noise.gumbel(n[:, None] + level, 7, Salt.TARGET)[:, 0])
        rejection = Rejection().draft_noise(noise, n, 1, level, 7)
        assert rejection.equal(Rejection().draft_noise(noise, n + 1, 1, level, 7))
        assert not rejection.equal(Rejection().draft_noise(noise, n, 2, level, 7))
        assert not rejection.equal(Rejection().draft_noise(noise, n, 1, level + 1, 7))


# -- the edges ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("silent", [True, False], ids=["greedy", "sampling"])
@pytest.mark.parametrize("rule", [Match(), Rejection()], ids=repr)
def test_every_accepted_length(rule, silent):
    """Row j of a chain of 5 is wrong at node j (row 5 nowhere): exactly j tokens stay, then the target's own."""
    nodes, vocab = 5, 11
    text = torch.arange(1, nodes + 2)
    scores = torch.full((nodes + 1, 1 + nodes, vocab), -math.inf if silent else -200.0)
    scores.scatter_(2, text.expand(nodes + 1, -1)[..., None], 0.0)
    tokens = text[:nodes].repeat(nodes + 1, 1)
    tokens[range(nodes), range(nodes)] = 9
    noise = Noise.of(3, nodes + 1, silent=silent, device=CPU)
    verdict = rule(Draft.chain(tokens), scores, noise, torch.arange(nodes + 1) + 1, 0)
    assert verdict.accepted.tolist() == list(range(nodes + 1))
    for row in range(nodes + 1):
        assert verdict.path[row].tolist() == [*range(row), *[-1] * (nodes - row)]
        assert verdict.tokens[row].tolist() == [*text[: row + 1].tolist(), *[0] * (nodes - row)]
        assert verdict.target[row].tolist() == text.tolist()
        assert verdict.p[row, 1:].tolist() == [float(i != row) for i in range(nodes)] and verdict.p[row, 0] == 1


@pytest.mark.parametrize("silent", [True, False], ids=["greedy", "sampling"])
@pytest.mark.parametrize("rule", [Match(), Rejection()], ids=repr)
def test_nothing_proposed(rule, silent):
    """An empty draft, and a draft with no valid node, are one step of plain decoding."""
    noise, n = Noise.of(3, 4, silent=silent, device=CPU), torch.tensor([1, 2, 3, 4])
    scores = 2 * torch.randn(4, 4, 9, generator=torch.Generator().manual_seed(0))
    empty = rule(Draft.empty(n[:, None]), scores[:, :1], noise, n, 0)
    assert empty.path.shape == (4, 0) and empty.tokens.shape == (4, 1) and empty.accepted.tolist() == [0] * 4
    assert empty.target.equal(empty.tokens)
    torch.testing.assert_close(empty.p, scores[:, 0].softmax(-1).gather(1, empty.tokens))
    invalid = Draft.chain(scores[:, :3].argmax(-1), valid=torch.zeros(4, 3, dtype=torch.bool))
    verdict = rule(invalid, scores, noise, n, 0)
    assert verdict.accepted.tolist() == [0] * 4 and verdict.tokens[:, :1].equal(empty.tokens)
    assert (verdict.path == -1).all() and (verdict.tokens[:, 1:] == 0).all()


def test_without_probs_every_node_counts_as_chosen():
    draft, scores = random_draft(8, 6, 4)
    noise, n = Noise.of(3, 16, silent=False, device=CPU), torch.arange(16)
    chosen = replace(draft, drawn=torch.zeros_like(draft.drawn))
    without = replace(draft, probs=None)
    assert same(Rejection()(chosen, scores, noise, n, 0), Rejection()(without, scores, noise, n, 0))
    assert not same(Rejection()(draft, scores, noise, n, 0), Rejection()(without, scores, noise, n, 0))


def test_equal_laws_are_always_accepted():
    """p = q to the last bit, cold and hot: no division by an empty residual, no rejection."""
    for temperature in (1e-3, 1.0, 2.0):
        scores = table(1, temperature)[0].expand(1000, 2, VOCAB)
        noise, n = Noise.of(0, 1000, silent=False, device=CPU), torch.ones(1000, dtype=torch.long)
        token = (scores[:, 0] + Rejection().draft_noise(noise, n, 0, 0, VOCAB)).argmax(-1)
        draft = Draft.chain(token[:, None], drawn=True, probs=scores[:, :1].softmax(-1))
        verdict = Rejection()(draft, scores, noise, n, 0)
        assert verdict.accepted.eq(1).all() and verdict.p.isfinite().all()


@pytest.mark.parametrize("silent", [True, False], ids=["greedy", "sampling"])
@pytest.mark.parametrize("chain", [True, False], ids=["chain", "tree"])
@pytest.mark.parametrize("rule", [Match(), Rejection()], ids=repr)
def test_no_sync_and_no_default_device(rule, chain, silent):
    """Nothing waits for the host, and nothing is made on a default device; on "meta" there are no data to look at."""
    draft, scores = random_draft(4, 6, 5, chain=chain)
    noise, n = Noise.of(0, 16, silent=silent, device=CPU), torch.arange(16)
    before = torch.get_rng_state()
    with NoSync(), torch.device("meta"):
        verdict = rule(draft, scores, noise, n, 1)
        rule.draft_noise(noise, n, 1, 2, 5)
    assert verdict.tokens.device == CPU and torch.get_rng_state().equal(before)
    far = {name: getattr(draft, name).to("meta") for name in ("tokens", "parents", "valid", "drawn", "probs")}
    away = replace(draft, **far)
    judged = rule(away, scores.to("meta"), Noise(noise.seeds.to("meta"), silent), n.to("meta"), 1)
    for name in Verdict.__dataclass_fields__:
        assert getattr(judged, name).shape == getattr(verdict, name).shape
        assert getattr(judged, name).dtype == getattr(verdict, name).dtype
