"""Looking for sub-layers that a draft can do without: beforehand, and while the text grows."""

import json
import logging
import random

import pytest
import torch
from scripted import reference, watched
from test_skip import PROMPTS, lab_of, session_of

import labkit
from labkit import Plain, SkipLayers, Union, search_skips
from labkit.drafters import OnTheFly, on_the_fly
from labkit.drafters.sublayers import SubLayers, agreement, evenly


def test_search_finds_better_sets_and_repeats_itself():
    lab = lab_of("llama", 8)
    before, seen = torch.get_rng_state(), []
    random.seed(1)
    options = dict(ratio=0.2, steps=20, max_new_tokens=20)
    found = search_skips(lab, PROMPTS, **options, progress=lambda steps: seen.append(len(steps)) or steps)
    assert torch.equal(torch.get_rng_state(), before) and seen == [20]
    random.seed(2)  # plays no part
    assert found == search_skips(lab, PROMPTS, **options)
    assert found != search_skips(lab, PROMPTS, **options, seed=1)
    assert len(found.history) == 21 and list(found.history) == sorted(found.history)
    assert found.score == found.history[-1] > found.history[0]
    texts = [prompt + reference(lab.model, prompt, 20) for prompt in PROMPTS]
    for skipped, score in ((evenly(8, 0.2), found.history[0]), (SubLayers(found.attention, found.mlp), found.score)):
        hits, rows = agreement(session_of("llama", texts, 20, layers=8), skipped.of(lab.backbone), 20).tolist()
        assert rows == 60 and hits / rows == score
    drafter = found.drafter(3, stop=labkit.below(0.1))
    assert drafter == SkipLayers(found.attention, found.mlp, 3, stop=labkit.below(0.1))
    assert lab.generate(PROMPTS, drafter, max_new_tokens=20).tokens == [text[-20:] for text in texts]


@pytest.mark.parametrize("prompts", [PROMPTS, PROMPTS[:1]], ids=["ragged", "one"])
@pytest.mark.parametrize("options", [{}, {"temperature": 0.9, "seed": 4}], ids=["greedy", "sampled"])
def test_on_the_fly(prompts, options, caplog):
    """The text is plain, and each scoring is one copy more; with more rows to score than there is text, too."""
    lab, drafter = lab_of("llama", 8), SkipLayers(max_draft=2, search=OnTheFly(3, 0.2, count=50, enough=1.0, seed=1))
    plain = lab.generate(prompts, max_new_tokens=24, **options)
    with caplog.at_level(logging.INFO, "labkit"):
        out = watched(lab, prompts, drafter, max_new_tokens=24, **options)
    assert out.tokens == plain.tokens
    scored = sum(any(r.drafted) for r in out.rounds) // 3
    assert scored > 1 and out.settings["host_copies"] == len(out.rounds) + scored
    assert caplog.messages and all("SubLayers" in message for message in caplog.messages)
    found = json.loads(json.dumps(out.settings["skipped"]))
    assert caplog.messages[-1].startswith(repr(SubLayers(found["attention"], found["mlp"]))) and 0 < found["score"] <= 1
    assert "skipped" not in plain.settings and lab.generate(prompts[0], Union(drafter, Plain())).settings["skipped"]
    again = lab.generate(prompts, drafter, max_new_tokens=24, **options)
    assert [r.drafted for r in again.rounds] == [r.drafted for r in out.rounds]
    fixed = lab.generate(
        prompts, SkipLayers(evenly(8, 0.2).attention, evenly(8, 0.2).mlp, 2), max_new_tokens=24, **options
    )
    assert [r.drafted for r in fixed.rounds] != [r.drafted for r in out.rounds]
    assert [r.drafted for r in fixed.rounds[:2]] == [r.drafted for r in out.rounds[:2]]


@pytest.mark.parametrize(
    ("scores", "kept", "scorings"),
    [([[3, 9], [4, 9]] * 9, True, 9), ([[4, 9], [4, 9]] * 9, False, 9), ([[3, 9], [2, 9]] * 9, False, 9),
     ([[1, 9], [8, 9]] * 9, True, 1), ([[8, 9], [1, 9]] * 9, False, 1), ([[0, 0], [0, 0]] * 9, False, 9)],
)  # fmt: skip
def test_the_better_stays_until_it_is_good_enough(monkeypatch, scores, kept, scorings):
    given = iter(scores)
    asked = []
    monkeypatch.setattr(on_the_fly, "agreement", lambda s, d, n: asked.append(d) or torch.tensor(next(given)))
    session = session_of("llama", PROMPTS, 4)
    state = on_the_fly.Skipping(session, SubLayers((1,), (2,)), OnTheFly(2, 0.5, enough=0.8))
    for _ in range(18):
        before = state.drafting
        state.look_around()
        if asked and state.rounds % 2 == 0 and len(asked) == state.rounds:
            assert asked[-2] is before and state.drafting is (asked[-1] if kept else before)
    (old, rows), (new, _) = scores[:2]
    assert state.found()["score"] == (max(old, new) / rows if rows else None)
    assert SubLayers(state.found()["attention"], state.found()["mlp"]) == state.skipped
    assert len(asked) == 2 * scorings and session.cache.copies == scorings
