"""Strategies made of strategies: how drafts merge, what is handed over, and what it costs."""

import functools
from dataclasses import replace

import families
import pytest
import torch
import transformers as hf
from scripted import RandomTree, Replay, reference

import labkit
from labkit import (
    Adaptive,
    AtMost,
    Draft,
    DraftModel,
    EarlyExit,
    Fallback,
    Heads,
    LabkitError,
    Plain,
    PromptLookup,
    Union,
    Until,
    below,
    never,
)
from labkit.drafters.lookup import Index
from labkit.drafters.mixture import alike, merged, mixed, struck
from labkit.protocol import Context
from labkit.session import Session

PROMPTS = [[3, 14, 15, 9, 26, 5, 35], [8], [58, 9, 7, 9, 3, 2, 3, 8, 4, 6, 2, 6]]
COUNT = 18


@functools.cache
def lab():
    return labkit.Lab(families.tiny("llama"))


@functools.cache
def texts():
    return [reference(lab().model, prompt, COUNT + 8) for prompt in PROMPTS]


@functools.cache
def heads():
    made = labkit.MLPSpeculator(32, 61, 3, 24, dtype=torch.float64)
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.4, generator=torch.Generator().manual_seed(3))
    return made


def right(length=3, wrong=(99,)):
    return Replay(PROMPTS, texts(), length, wrong)


def run(drafter, **options):
    return lab().generate(PROMPTS, drafter, max_new_tokens=COUNT, **options)


# -- drafts ---------------------------------------------------------------------------------------------


def tree(nodes: str, **parts) -> Draft:
    """One row: "parent:token" for each node; "!" behind it: drawn, "-": not valid."""
    words = nodes.split()
    flag = lambda mark: torch.tensor([[mark in word for word in words]])  # noqa: E731
    number = lambda i: torch.tensor([[int(word.strip("!-" if i else "").split(":")[i]) for word in words]])  # noqa: E731
    parents = number(0)
    levels = []
    for parent in parents[0].tolist():
        levels.append(0 if parent < 0 else levels[parent] + 1)
    drawn = flag("!")
    probs = torch.full((1, len(words), 9), 1 / 9) if drawn.any() else None
    tokens = torch.tensor([[int(word.split(":")[1].rstrip("!-")) for word in words]])
    return Draft(tokens, parents, ~torch.tensor([[word.endswith("-") for word in words]]), drawn,
                 depth=max(levels) + 1, is_chain=False, probs=probs, **parts)  # fmt: skip


def spelt(draft: Draft) -> str:
    rows = zip(draft.parents[0].tolist(), draft.tokens[0].tolist(), draft.drawn[0].tolist(), draft.valid[0].tolist())
    return " ".join(f"{p}:{t}{'!' * d}{'-' * (not v)}" for p, t, d, v in rows)


MERGED = {
    "different tokens": ("-1:1 0:2", "-1:3 0:4", "-1:1 0:2 -1:3 2:4"),
    "a shared beginning": ("-1:1 0:2", "-1:1 0:3", "-1:1 0:2 -1:1- 0:3"),
    "all shared": ("-1:1 0:2", "-1:1 0:2", "-1:1 0:2 -1:1- 0:2-"),
    "same token, other parent": ("-1:1 0:2", "-1:2 0:1", "-1:1 0:2 -1:2 2:1"),
    "into a drawn one": ("-1:1! 0:2!", "-1:1 0:2 1:3", "-1:1! 0:2! -1:1- 0:2- 1:3"),
    "a drawn one stays": ("-1:1! 0:2!", "-1:1! 0:2!", "-1:1! 0:2! -1:1! 2:2!"),
    "a drawn one stays by a chosen one": ("-1:1", "-1:1! 0:2", "-1:1 -1:1! 1:2"),
    "children of a chosen one may be drawn": ("-1:1 0:2", "-1:1 0:2! 1:5", "-1:1 0:2 -1:1- 0:2! 3:5"),
    "not into one that is not valid": ("-1:1- 0:2-", "-1:1 0:2", "-1:1- 0:2- -1:1 2:2"),
    "one that is not valid stays so": ("-1:1", "-1:1- 0:2-", "-1:1 -1:1- 1:2-"),
    "twins of its own": ("-1:7", "-1:1 -1:1 0:2 1:2 3:3", "-1:7 -1:1 -1:1- 1:2 1:2- 3:3"),
}


@pytest.mark.parametrize("name", MERGED)
def test_how_trees_merge(name):
    first, second, want = MERGED[name]
    assert spelt(merged(tree(first), tree(second))) == want


@pytest.mark.parametrize("seed", range(30))
def test_merging_equals_the_plain_walk(seed):
    """Node by node, on random trees that differ from row to row."""
    context = Context(torch.zeros(4, 2, dtype=torch.long), torch.ones(4, dtype=torch.long), [], [1] * 4, [False] * 4,
                      [9] * 4, 9, seed, lambda *a: None, lambda *a: None)  # fmt: skip
    one, two = (RandomTree([[1]] * 4, [[]] * 4, size=6, vocab=3, seed=s).propose(None, context) for s in (1, 2))
    two = replace(two, drawn=two.tokens == 0, probs=torch.full((4, 6, 3), 1 / 3))
    got = merged(one, two)
    for row in range(4):
        tokens, parents = [*one.tokens[row].tolist(), *two.tokens[row].tolist()], one.parents[row].tolist()
        valid, place = one.valid[row].tolist(), {-1: -1}
        for node in range(6):
            at, parent = 6 + node, place[int(two.parents[row, node])]
            twins = [i for i in range(at) if valid[i] and parents[i] == parent and tokens[i] == tokens[at]]
            merges = twins and bool(two.valid[row, node]) and not bool(two.drawn[row, node])
            place[node] = twins[0] if merges else at
            parents.append(parent)
            valid.append(bool(two.valid[row, node]) and not merges)
        assert got.parents[row].tolist() == parents and got.valid[row].tolist() == valid
        assert got.tokens[row].tolist() == tokens
    assert got.depth == max(one.depth, two.depth) and not got.is_chain


def test_what_one_draft_lacks():
    one = Draft.chain(
        torch.tensor([[1, 2]]), drawn=True, probs=torch.full((1, 2, 5), 0.2), q=torch.tensor([[0.2, 0.2]])
    )
    two = Draft.chain(torch.tensor([[3]]), exits=torch.tensor([[4]]))
    for got in (merged(one, two), mixed(torch.tensor([True]), one, two), *alike([one, two])[:1]):
        assert got.exits.tolist()[0][:2] == [0, 0] and got.drawn[0, :2].all()
    got = merged(one, two)
    assert got.q[0, 2] == 1 and got.exits[0, 2] == 4 and not got.drawn[0, 2] and got.probs[0, 2].sum() == 0
    assert merged(two, two).q is None and merged(two, two).probs is None
    lawless = replace(one, probs=None)
    assert not merged(lawless, one).drawn[0, :2].any(), "without its law a drawn token counts as chosen"


def test_mixing_by_rows():
    short = Draft.chain(torch.tensor([[1], [2]]))
    long = Draft.chain(torch.tensor([[3, 4], [5, 6]]))
    got = mixed(torch.tensor([True, False]), short, long)
    assert got.tokens.tolist() == [[1, 0], [5, 6]] and got.valid.tolist() == [[True, False], [True, True]]
    assert got.is_chain and got.parents.tolist() == [[-1, 0]] * 2 and got.depth == 2
    got = mixed(
        torch.tensor([True, False]), short, replace(long, parents=torch.full((2, 2), -1), depth=1, is_chain=False)
    )
    assert mixed(torch.tensor([True, False]), replace(long, is_chain=False), Draft.empty(long.tokens)).parents[
        1
    ].tolist() == [-1, -1]
    assert not got.is_chain and got.depth == 1 and got.levels().tolist() == [[0, 0]] * 2


def test_striking_out():
    q = torch.tensor([[0.9, 0.1, 0.9, 0.9, 0.1]])
    draft = tree("-1:1 0:2 1:3 0:4 2:5", q=q)
    assert spelt(struck(draft, below(0.5))) == "-1:1 0:2 1:3- 0:4 2:5-"
    assert struck(draft, never) is draft
    at = lambda level: lambda drawn, here: drawn.token > 0 if here == level else None  # noqa: E731
    assert spelt(struck(draft, at(0))) == "-1:1 0:2- 1:3- 0:4- 2:5-"
    assert spelt(struck(draft, at(1))) == "-1:1 0:2 1:3- 0:4 2:5-"
    assert spelt(struck(tree("-1:1 -1:2 1:3 2:4"), at(1))) == "-1:1 -1:2 1:3 2:4-"
    assert spelt(struck(replace(draft, q=None), below(0.99))) == spelt(draft), "q = 1 where there is none"


# -- what is handed over --------------------------------------------------------------------------------


def handed(monkeypatch, drafter, **options):
    """For each round: nodes of the draft, and rows that it handed over."""
    seen, whole = [], Session.verify
    monkeypatch.setattr(Session, "verify", lambda self, d: (seen.append((d.nodes, d.partial.rows)), whole(self, d))[1])
    assert run(drafter, **options).tokens == [text[:COUNT] for text in texts()]
    return seen


def test_who_hands_over(monkeypatch):
    full = lambda rounds: [rows for nodes, rows in rounds[:3]]  # noqa: E731
    for union in (Union(EarlyExit(2, 3), right(2)), Union(right(2), EarlyExit(2, 3))):
        assert set(handed(monkeypatch, union)[:3]) == {(5, 3)}
    both = Union(EarlyExit(2, 3), EarlyExit(1, 2))
    assert set(handed(monkeypatch, both)[:3]) == {(5, 3)} and both.bearer == 0
    assert full(handed(monkeypatch, Union(EarlyExit(2, 3, share=False), right(2)))) == [0] * 3
    assert full(handed(monkeypatch, Fallback(Plain(), EarlyExit(2, 3)))) == [3] * 3
    assert full(handed(monkeypatch, Fallback(EarlyExit(2, 3), Plain()))) == [3] * 3
    rounds = handed(monkeypatch, Fallback(PromptLookup(2, 3), EarlyExit(2, 3)))
    assert rounds[0] == (3, 0), "a mixture by rows hands over nothing"


def test_fallback_by_rows():
    """Each row has the lookup's draft where the lookup finds one, else the other's."""
    kinds, histories, indices = set(), [list(prompt) for prompt in PROMPTS], [Index() for _ in PROMPTS]
    for happened in run(Fallback(PromptLookup(2, 3), EarlyExit(2, 2))).rounds:
        for row, drafted in enumerate(happened.drafted):
            if happened.tokens[row] and drafted:
                found = indices[row].continuation(histories[row], 2, 3)
                assert drafted == found[: len(drafted)] if found else happened.exit[row] == [2] * len(drafted)
                assert set(happened.exit[row]) <= {0} if found else len(drafted) <= 2
                kinds.add((row, bool(found)))
            histories[row] += happened.tokens[row]
    assert {kind for _, kind in kinds} == {True, False}


class Careless(Union):
    """Proposes its bearer first."""

    def propose(self, state, context):
        drafts = [m.propose(s, context.for_member(i)) for i, (m, s) in enumerate(zip(self.members, state.members))]
        return merged(*drafts)


def test_a_partial_that_went_stale_is_refused():
    with pytest.raises(LabkitError, match=r"a Partial of write \d+ is stale"):
        run(Careless(EarlyExit(2, 3), EarlyExit(1, 2)))
    assert run(Careless(EarlyExit(2, 3), right(2))).tokens == [text[:COUNT] for text in texts()]


def test_copies_to_the_host():
    for drafter, extra in (
        (Fallback(Plain(), EarlyExit(2, 3)), 0), (Fallback(EarlyExit(2, 3), Plain()), 1),
        (Union(EarlyExit(2, 3), right()), 0), (AtMost(2, EarlyExit(2, 3)), 0), (Until(below(0.4), right()), 0),
    ):  # fmt: skip
        out = run(drafter)
        copies, drafting = out.settings["host_copies"], sum(any(r.drafted) for r in out.rounds)
        assert copies == len(out.rounds) + extra * drafting, drafter


@functools.cache
def short_model():
    settings = {"num_hidden_layers": 2, "max_position_embeddings": 30, "n_inner": 48}
    return labkit.Backbone(families.build(hf.GPT2Config, families.SMALL | settings | families.NO_DROPOUT))


@pytest.mark.parametrize(
    "among",
    [lambda a: a, lambda a: Union(a, PromptLookup(2, 9)), lambda a: Union(EarlyExit(2, 3), AtMost(2, a)),
     lambda a: Fallback(PromptLookup(2, 9), a), lambda a: Adaptive([a, EarlyExit(2, 7)])],
    ids=["alone", "Union", "Union, nested", "Fallback", "Adaptive"],
)  # fmt: skip
def test_a_draft_model_needs_positions_for_the_text_only(among):
    """Whatever slots the others want for their drafts. The longest prompt has 12 tokens: 12 + 18 = 30."""
    drafter = among(DraftModel(short_model(), 3))
    assert run(drafter).tokens == [text[:COUNT] for text in texts()]
    with pytest.raises(LabkitError, match="has 30 positions, and prompt and new tokens need 31"):
        lab().generate(PROMPTS, drafter, max_new_tokens=COUNT + 1)


# -- shorter drafts -------------------------------------------------------------------------------------


def test_at_most_is_the_shorter_strategy():
    for k in (1, 2, 4, 9):
        cut, short = run(AtMost(k, EarlyExit(2, 4))), run(EarlyExit(2, min(k, 4)))
        assert [replace(r, seconds=[]) for r in cut.rounds] == [replace(r, seconds=[]) for r in short.rounds]
        assert AtMost(k, EarlyExit(2, 4)).nodes == min(k, 4)
    flat = run(AtMost(1, Heads(heads(), top_k=(3, 2, 2))))
    assert {p for r in flat.rounds for row in r.parents for p in row} == {-1} and flat.drafted > 0
    with pytest.raises(LabkitError, match="must say in `levels`"):
        run(AtMost(2, RandomTree(PROMPTS, texts())))


def test_until_is_the_strategy_with_a_stop(monkeypatch):
    rule = below(0.5)
    cut, own = run(Until(rule, EarlyExit(2, 5))), run(EarlyExit(2, 5, stop=rule))
    assert [replace(r, seconds=[]) for r in cut.rounds] == [replace(r, seconds=[]) for r in own.rounds]
    assert cut.settings["host_copies"] == own.settings["host_copies"]
    second = lambda drawn, level: torch.full_like(drawn.q, level == 1, dtype=torch.bool)  # noqa: E731
    for drafter in (right(4), Heads(heads(), top_k=(2, 2, 2)), Union(EarlyExit(2, 4), right(4))):
        rounds = run(Until(second, AtMost(4, drafter))).rounds
        for parents in (row for r in rounds for row in r.parents):
            assert all(p < 0 or parents[p] < 0 for p in parents)
        assert any(p >= 0 for r in rounds for row in r.parents for p in row)
    speaks = below(0.0)
    for drafter in (Until(second, Until(speaks, EarlyExit(2, 5))), Until(speaks, Until(second, EarlyExit(2, 5)))):
        assert max(nodes for nodes, _ in handed(monkeypatch, drafter)) == 2, "no more are drawn"
    with pytest.raises(LabkitError, match="the stop rule"):
        run(Until(lambda drawn, level: True, EarlyExit(2, 3)))
