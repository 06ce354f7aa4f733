"""Drafts of the wrong make, or with values that cannot be, are refused by name."""

from dataclasses import dataclass

import families
import pytest
import torch

import labkit
from labkit import Draft, Drafter, LabkitError

PROMPT = [3, 14, 15, 9, 26, 5]


@pytest.fixture(scope="module")
def lab():
    return labkit.Lab(families.tiny("llama"))


@dataclass(frozen=True)
class TooMany(Drafter):
    @property
    def nodes(self):
        return 1

    def propose(self, state, context):
        return Draft.chain(context.tokens[:, :5])


def test_a_draft_larger_than_promised(lab):
    with pytest.raises(LabkitError, match=r"proposed 5 nodes.*1 at most"):
        lab.generate(PROMPT, TooMany(), max_new_tokens=8)


def spoilt(**changes):
    """A drafter whose two-node chain has some parts replaced."""

    class Spoilt(Drafter):
        nodes = 2

        def propose(self, state, context):
            draft = Draft.chain(context.tokens[:, :2])
            for name, value in changes.items():  # past the checks of shapes that tests run with
                object.__setattr__(draft, name, value(draft) if callable(value) else value)
            return draft

    return Spoilt()


SPOILT = {
    "int32 tokens": {"tokens": lambda d: d.tokens.int()},
    "valid as int": {"valid": lambda d: d.valid.long()},
    "parents short": {"parents": lambda d: d.parents[:, :1]},
    "q of another shape": {"q": lambda d: torch.zeros(1)},
    "probs of another vocabulary": {"probs": lambda d: torch.zeros(1, 2, 7)},
    "depth 0": {"depth": 0},
    "depth 9": {"depth": 9},
}


@pytest.mark.parametrize("fault", SPOILT)
def test_malformed_drafts(lab, fault):
    with pytest.raises(LabkitError, match="Spoilt's draft has"):
        lab.generate(PROMPT, spoilt(**SPOILT[fault]), max_new_tokens=8)


def nodes(*values, kind=torch.long):
    """A part of a draft of two nodes, whose tokens and parents are otherwise right."""
    return torch.tensor([values], dtype=kind)


TREE = {"is_chain": False}
VALUES = {
    "an id too large": ({"tokens": nodes(3, 61)}, "Spoilt's draft has token 61 .*vocabulary has 61 tokens"),
    "a negative id": ({"tokens": nodes(-1, 3)}, "Spoilt's draft has token -1 .*vocabulary has 61 tokens"),
    "an invalid node's id": (
        {"tokens": nodes(3, 99), "valid": nodes(True, False, kind=torch.bool)}, "has token 99 .*valid=False too"),
    "a later parent": ({"parents": nodes(1, -1), **TREE}, r"parents\[0\] = 1; .*-1 .*smaller than 0"),
    "its own parent": ({"parents": nodes(-1, 1), **TREE}, r"parents\[1\] = 1; .*smaller than 1"),
    "a parent of no node": ({"parents": nodes(-1, 40), **TREE}, r"parents\[1\] = 40"),
    "a parent below -1": ({"parents": nodes(-1, -2), **TREE}, r"parents\[1\] = -2"),
    "no chain": ({"parents": nodes(-1, -1)}, r"is_chain=True .*parents \[-1, -1\].*Draft.tree"),
    "too shallow": ({"depth": 1, **TREE}, "depth=1 .*2 levels"),
    "an orphan": ({"valid": nodes(False, True, kind=torch.bool)}, "node 1 valid .*parent 0"),
}  # fmt: skip


@pytest.mark.parametrize("acceptance", [labkit.Match(), labkit.Rejection(), labkit.Typical()], ids=repr)
@pytest.mark.parametrize("fault", VALUES)
def test_values_of_a_draft_that_cannot_be(lab, fault, acceptance):
    """Told from the round's one copy, or from a second one after the failure."""
    changes, message = VALUES[fault]
    with pytest.raises(LabkitError, match=message):
        lab.generate(PROMPT, spoilt(**changes), max_new_tokens=8, acceptance=acceptance)


def test_a_failure_that_is_not_the_drafts_own_is_left_alone(lab, monkeypatch):
    def broken(session, draft):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(labkit.Session, "verify", broken)
    with pytest.raises(RuntimeError, match="out of memory"):
        lab.generate(PROMPT, max_new_tokens=8)
