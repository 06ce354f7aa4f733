"""A round waits for the device once."""

import pytest
import torch
from roster import COUNT, PROMPTS, STRATEGIES, every_strategy, lab_of, texts
from waiting import HostCopies

import labkit
from labkit import (
    EarlyExit,
    Plain,
    decoding,
)

pytestmark = pytest.mark.usefixtures("unshaped")


def copies_per_round(monkeypatch, family, prompts, drafter, count=COUNT, **options):
    """Where each round waited, and the generation."""
    mode, rounds, whole = HostCopies(), [], decoding.play_round

    def play_round(*args):
        before = len(mode.seen)
        happened = whole(*args)
        rounds.append(mode.seen[before:])
        return happened

    monkeypatch.setattr(decoding, "play_round", play_round)
    with mode:
        out = lab_of(family).generate(prompts, drafter, max_new_tokens=count, **options)
    return rounds, out


@every_strategy
@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2"])
@pytest.mark.parametrize("options", [{}, {"temperature": 0.8, "top_p": 0.9}], ids=["greedy", "sampled"])
def test_one_copy_to_the_host_in_each_round(monkeypatch, strategy, family, options):
    drafter = STRATEGIES[strategy](PROMPTS, texts(family))
    rounds, out = copies_per_round(monkeypatch, family, PROMPTS, drafter, **options)
    assert len(rounds) == len(out.rounds) > 3
    assert [len(waits) for waits in rounds] == [1] * len(rounds), rounds[0]
    assert {name for waits in rounds for name, *_ in waits} == {"tolist"}
    assert out.settings["host_copies"] == len(rounds)


@every_strategy
def test_one_copy_under_rejection_too(monkeypatch, strategy):
    drafter = STRATEGIES[strategy](PROMPTS, texts())
    options = {"temperature": 0.8, "acceptance": labkit.Rejection()}
    rounds, _ = copies_per_round(monkeypatch, "llama", PROMPTS, drafter, **options)
    assert [len(waits) for waits in rounds] == [1] * len(rounds), rounds[0]


def test_waiting_is_counted():
    """The counter sees every way of waiting that it claims to see."""
    x = torch.tensor([1, 0, 1])
    ways = [
        x.tolist, x[0].item, x.cpu, x.numpy, x.nonzero, lambda: bool(x[0]), lambda: int(x[0]), lambda: float(x[0]),
        lambda: [1, 2][x[0]], lambda: x[x > 0], lambda: x.to("cpu"), lambda: x.to(device="cpu"), lambda: torch.where(x > 0),
        lambda: x.unique(), lambda: 1 if x.any() else 0, lambda: torch.equal(x, x), lambda: x.masked_select(x > 0),
        lambda: x.clone().__setitem__(x > 0, 7), lambda: x.repeat_interleave(x),
    ]  # fmt: skip
    for way in ways:
        with HostCopies() as mode:
            way()
        assert mode.seen, way
    with HostCopies() as mode:
        x[0], x[:2], x[x.long().clamp(0, 1)], torch.where(x > 0, x, 0), x.to(torch.float32), x + 1, x.gather(0, x)
    assert not mode.seen


def test_a_waiting_drafter_is_found(monkeypatch):
    class Peeks(Plain):
        def propose(self, state, context):
            assert int(context.n[0]) == context.lengths[0]
            return super().propose(state, context)

    rounds, _ = copies_per_round(monkeypatch, "llama", PROMPTS, Peeks(), count=6)
    assert [len(waits) for waits in rounds] == [2] * 6


def test_a_processor_that_waits_is_declared(monkeypatch):
    out = copies_per_round(monkeypatch, "llama", PROMPTS, EarlyExit(2, 3), no_repeat_ngram_size=3)[1]
    assert out.settings["host_copies"] > len(out.rounds)
