"""Adaptive: what it counts, what it picks, what it times; strategies of strategies as text, and their refusals."""

import itertools
import json
import logging
from types import SimpleNamespace

import families
import pytest
import torch
from scripted import Replay, watched
from test_combine import COUNT, PROMPTS, heads, lab, right, run, texts

import labkit
from labkit import (
    Adaptive,
    AtMost,
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
    costs,
    never,
)
from labkit.acceptance import PLACES
from labkit.drafters.adaptive import _State, learn, pick
from labkit.drafters.record import DISCOUNT, HOPE, Record
from labkit.drafters.written import read_strategy
from labkit.protocol import Work

# -- picking --------------------------------------------------------------------------------------------


def record(levels=6, draft=0.3, verify=1.0, **counts):
    return Record(levels, True, draft, verify, **counts)


def picked(*records, step=1.0, room=99):
    state = _State(None, [], list(records), step)  # type: ignore
    return pick(state, SimpleNamespace(length=lambda most: min(most, room - 1)))  # type: ignore


@pytest.mark.parametrize("alpha", [0.1, 0.3, 0.5, 0.7, 0.8, 0.9, 0.95])
@pytest.mark.parametrize("c", [0.02, 0.11, 0.31, 0.61, 0.89])
def test_one_more_while_the_chance_that_all_stay_exceeds_its_cost_times_the_speedup(alpha, c):
    many = 1e6
    one = record(levels=12, draft=c, accepted=alpha * many, judged=many, spoke=many, asked=many)
    index, k = picked(one)
    speed = max((1 - alpha ** (j + 1)) / (1 - alpha) / (j * c + 1) for j in range(13))
    wanted = 0
    while wanted < 12 and alpha ** (wanted + 1) > c * speed + 1e-9:
        wanted += 1
    assert k == wanted and index == (0 if k else -1)
    assert (k > 0) == (alpha > c), "it pays when alpha > c"


def test_the_better_candidate():
    good, bad = record(accepted=90, judged=100), record(accepted=10, judged=100)
    assert picked(bad, good)[0] == 1 and picked(good, bad)[0] == 0
    dear = record(accepted=90, judged=100, verify=9.0)
    assert picked(dear, bad) == (-1, 0) and picked(dear, good)[0] == 1
    assert picked(good, room=3) == (0, 2) and picked(good, room=1) == (-1, 0)
    assert picked(good, record(draft=None)) == (1, 1), "what was never timed is tried first"
    silent = record(draft=0.0, verify=1.5, accepted=90, judged=100, spoke=0, asked=1000)
    assert picked(silent, good)[0] == 1 and picked(silent)[0] == 0


def test_counting():
    """Rows of ragged drafts, each by its own length; a row that ended was cut and says nothing."""
    copied = SimpleNamespace(to_host=lambda x: x.tolist())
    one, other = record(), record(accepted=8, judged=10, spoke=4, asked=5)
    state = _State(copied, [], [one, other], 1.0)  # type: ignore
    state.proposed = one, [5, 5, 5, 5, 5], torch.tensor([3, 3, 0, 2, 3])
    learn(state, SimpleNamespace(lengths=[9, 6, 6, 7, 7], done=[False, False, False, False, True]))  # type: ignore
    assert (one.accepted, one.judged) == (3 + 0 + 0 + 1, 3 + 1 + 0 + 2)
    assert (one.spoke, one.asked) == (3, 4)
    assert (other.accepted, other.judged) == (8 * DISCOUNT, 10 * DISCOUNT) and record().alpha == HOPE
    learn(state, SimpleNamespace(lengths=[9] * 5, done=[False] * 5))  # type: ignore
    assert one.judged == 6 * DISCOUNT, "a round without a draft counts nothing"


# -- in the loop ----------------------------------------------------------------------------------------


@pytest.fixture
def states(monkeypatch):
    """The state of every Adaptive that begins, and a clock that says what it is told."""
    begun, begin = [], Adaptive.begin
    monkeypatch.setattr(Adaptive, "begin", lambda self, session: begun.append(begin(self, session)) or begun[-1])
    return begun


def seconds(monkeypatch, of):
    monkeypatch.setattr(costs, "work_seconds", lambda session, work: of(work))


def test_the_right_one_is_found_and_a_bad_one_is_tried_again(monkeypatch, states):
    seconds(monkeypatch, lambda work: 1.0)
    prompts, want = PROMPTS[:1], [lab().generate(PROMPTS[0], max_new_tokens=90).tokens[0]]
    good, bad = Replay(prompts, want, 3), Replay(prompts, want, 6, (0,))
    assert lab().generate(prompts, Adaptive([bad, good]), max_new_tokens=60).tokens == [want[0][:60]]
    picks = states[-1].picks
    assert picks[0] == (0, 6) and (1, 3) in picks[1:3]
    assert sum(index == 1 for index, _ in picks) > len(picks) / 2
    seconds(monkeypatch, lambda work: 1.0 if work.rows == 1 else 3.0)
    lab().generate(prompts, Adaptive([bad]), max_new_tokens=80)
    tried = [at for at, (index, _) in enumerate(states[-1].picks) if index == 0]
    assert tried[0] == 0 and 1 < len(tried) < 40 and (-1, 0) in states[-1].picks
    assert max(b - a for a, b in itertools.pairwise(tried)) > 3, "given up for a while"


def test_drafts_are_as_long_as_picked(monkeypatch, states):
    seconds(monkeypatch, lambda work: 1.0 + 0.3 * (work.rows - 1))
    prompts, want = PROMPTS[:1], [lab().generate(PROMPTS[0], max_new_tokens=90).tokens[0]]
    out = lab().generate(prompts, Adaptive([Replay(prompts, want, 6, (1,))]), max_new_tokens=40)
    picks = [k for _, k in states[-1].picks]
    assert [len(r.drafted[0]) for r in out.rounds] == picks and {1, 2} <= set(picks[:-6])


def test_no_draft_where_it_cannot_pay(monkeypatch, states):
    seconds(monkeypatch, lambda work: 1.0 if work.rows == 1 else 50.0)
    out = run(Adaptive([right()]))
    assert out.drafted == 0 and set(states[-1].picks) == {(-1, 0)}
    assert out.settings["host_copies"] == len(out.rounds)


def test_what_it_times(monkeypatch, states):
    seen = []
    told = lambda session, work: seen.append((session.backbone, work)) or float(work.stop * work.rows * work.times)  # noqa: E731
    monkeypatch.setattr(costs, "work_seconds", told)
    small = labkit.Backbone(families.tiny("llama", seed=9, layers=2))
    unknown = EarlyExit(labkit.confidence(0.3), 3)
    run(Adaptive([EarlyExit(2, 4), DraftModel(small, 2), PromptLookup(2, 3), unknown]))
    state = states[-1]
    assert state.step == 4
    assert [r.draft for r in state.records[:3]] == [2, (4 + 2) / 2, 0]
    assert [r.verify for r in state.records] == [2 + 20, 12, 16, 16]
    assert {b for b, work in seen if work.backbone is small} == {small}
    assert {b for b, work in seen if work.backbone is None} == {lab().backbone}
    assert state.records[3].draft is not None and 0 < state.records[3].draft < 5, "by its own calls"


def test_timing_spoils_nothing(states):
    """Real timings of every kind of work, taps and a foreign model; the cache invariant after every round."""
    small = DraftModel(families.tiny("llama", seed=9, layers=2), 2)
    kangaroo = EarlyExit(2, 3, adapter=labkit.heads.Kangaroo.like(lab().backbone))
    drafter = Adaptive(
        [kangaroo, small, Heads(heads(), top_k=(3, 2)), EarlyExit(1, 3), EarlyExit(4, 2, kv=labkit.Window(1, 2))]
    )
    assert watched(lab(), PROMPTS, drafter, max_new_tokens=COUNT).tokens == [text[:COUNT] for text in texts()]
    assert all(r.draft > 0 and r.verify > 0 for r in states[-1].records)


def test_picks_are_logged(monkeypatch, caplog):
    seconds(monkeypatch, lambda work: 1.0)
    with caplog.at_level(logging.DEBUG, "labkit"):
        run(Adaptive([right()]))
    assert any("of Replay(" in r.message and "alpha" in r.message for r in caplog.records)


# -- figures --------------------------------------------------------------------------------------------


def test_work():
    one, two = EarlyExit(2, 3), PromptLookup(2, 5)
    for union in (Union(one, two), Union(two, one)):
        assert union.work(4) == ([Work(0, 2, 1, 3, 1)], [Work(0, 2, 6), Work(2, 4, 9, head=9)])
    assert Fallback(one, two).work(4) == Union(one, EarlyExit(labkit.confidence(0.1), 2)).work(4) == ([], [])
    assert AtMost(2, two).work(4) == ([], [Work(0, 4, 3, head=3)]) and AtMost(9, two).work(4) == two.work(4)
    draft, verify = AtMost(2, one).work(4)
    assert verify == [Work(0, 2, 1), Work(2, 4, 3, head=3)] and draft[0].other is not None
    assert Until(below(0.2), one).work(4) == one.work(4) and Adaptive([one]).work(4) == ([], [])


def test_sizes_and_taps():
    union = Union(EarlyExit(2, 3), Heads(heads(), top_k=(3, 2, 2), candidates=4))
    assert (union.nodes, union.levels, union.scratch, union.taps) == (14, 3, 14, [-1])
    both = Fallback(PromptLookup(2, 8), union)
    assert (both.nodes, both.levels, both.hands_over) == (14, 8, True)
    assert not Union(Plain(), PromptLookup()).hands_over and Adaptive([Plain(), union]).nodes == 14


def test_what_was_picked_is_reported(monkeypatch, states):
    """Of an Adaptive in other strategies too, by its own state; and no tensor among it."""
    seconds(monkeypatch, lambda work: 1.0 + 0.1 * work.rows)
    inner = Adaptive([right(), Plain(), EarlyExit(labkit.confidence(0.3), 2)])
    for drafter in (inner, AtMost(3, inner), Union(PromptLookup(), Until(never, inner))):
        settings = run(drafter).settings
        told, state = json.loads(json.dumps(dict(settings)))["adaptive"], states[-1]
        assert (told["plain_picks"], told["plain_s"]) == (state.picks.count((-1, 0)), state.step)
        for index, (got, record) in enumerate(zip(told["candidates"], state.records, strict=True)):
            assert got["drafter"] == repr(inner.members[index])
            assert got["picks"] == sum(picked == index for picked, _ in state.picks)
            assert (got["alpha"], got["draft_s"], got["verify_s"]) == (record.alpha, record.draft, record.verify)
        assert told["candidates"][0]["picks"] > 0 and told["candidates"][0]["alpha"] > HOPE
        assert settings["kv_bytes_of_full"] > 0


def test_reports_are_merged():
    settings = run(Union(EarlyExit(2, 3), EarlyExit(4, 2))).settings
    assert settings["kv_bytes_of_full (2)"] == 2 * settings["kv_bytes_of_full"]
    assert "kv_bytes_of_full (2)" not in run(Fallback(EarlyExit(2, 3), EarlyExit(2, 2))).settings


# -- as text --------------------------------------------------------------------------------------------

WRITTEN = [
    Union(EarlyExit(24, 2), PromptLookup()),
    Until(below(0.5), EarlyExit(24, 4)),
    Until(never, AtMost(2, Fallback(PromptLookup(2), Plain()))),
    EarlyExit(labkit.confidence(0.9), 4, kv=labkit.Window(4, 60)),
    EarlyExit(labkit.confidence(labkit.exits.decaying(0.9)), 4, layers=(8, 16), stop=below(0.3)),
    Adaptive([EarlyExit(8, 6), EarlyExit(16, 6), PromptLookup(), Plain()]),
]


@pytest.mark.parametrize("drafter", WRITTEN, ids=repr)
def test_a_strategy_is_read_as_it_is_written(drafter):
    assert read_strategy(repr(drafter)) == drafter


def test_short_spellings():
    assert read_strategy("Fallback(PromptLookup, EarlyExit(8, 2))") == Fallback(PromptLookup(), EarlyExit(8, 2))
    asked = []
    read_strategy(
        "Fallback(Plain(), DraftModel('small', 2))", {"model": lambda name: asked.append(name) or lab().backbone}
    )
    assert asked == ["small"]


REFUSED = {
    "Union(EarlyExit(2, 2), 3)": "Union got 3; needed is a strategy",
    "Fallback(Plain(), below(0.5))": r"Fallback got below\(confidence=0.5\)",
    "AtMost(0, Plain())": "AtMost got k=0",
    "AtMost(True, Plain())": "AtMost got k=True",
    "Until(0.5, Plain())": "got stop=0.5",
    "Until(below(2), Plain())": r"got below\(2\)",
    "Adaptive([])": "write 1 to 15 strategies",
    "Adaptive(Plain())": "write 1 to 15 strategies",
    f"Union(PromptLookup(1, {PLACES}), PromptLookup())": f"a draft has {PLACES} at most",
    "Union(Plain())": "missing a required argument: 'b'",
    "Union(Plain(), Unoin(Plain(), Plain()))": "the nearest is 'Union'",
    "below(0.5)": "no strategy is called 'below'",
    "[Plain()]": "is not a strategy",
    "Union(Plain(), print(1))": "no strategy, rule or kv is called 'print'",
    "Union(Plain(), (lambda: 1)())": "not a literal",
    "Until(never(), Plain()).nodes": "is not a",
}


@pytest.mark.parametrize("text", REFUSED)
def test_refusals(text):
    with pytest.raises(LabkitError, match=REFUSED[text]):
        read_strategy(text)


def test_members_are_checked():
    with pytest.raises(LabkitError, match=r"EarlyExit in Union: .*exit=9"):
        run(Union(Plain(), EarlyExit(9, 2)))
    with pytest.raises(LabkitError, match="Union in AtMost: EarlyExit in Union: "):
        run(AtMost(2, Union(Plain(), EarlyExit(9, 2))))
