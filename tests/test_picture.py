"""The strip of tokens and the picture of a comparison."""

import dataclasses
from dataclasses import dataclass

import families
import pytest
import torch
from matplotlib.figure import Figure
from scripted import Replay, reference
from transformers import LogitsProcessor

import labkit
from labkit import Draft, Drafter, PromptLookup
from labkit.view.picture import demo_picture, draw_legend, pieces

PROMPT = [3, 14, 15, 9, 26, 5]


@pytest.fixture(scope="module")
def lab():
    return labkit.Lab(families.tiny("llama"))


@dataclass(frozen=True)
class Bush(Drafter):
    """Siblings: a wrong token, then the right one with a wrong child."""

    text: tuple

    @property
    def nodes(self):
        return 3

    def propose(self, state, context):
        at = context.lengths[0] - len(PROMPT)
        if context.max_room < 3:
            return Draft.empty(context.tokens)
        right, after = self.text[at], self.text[at + 1]
        device = context.tokens.device
        return Draft(
            tokens=torch.tensor([[(right + 1) % 61, right, (after + 1) % 61]], device=device),
            parents=torch.tensor([[-1, -1, 1]], device=device),
            valid=torch.ones((1, 3), dtype=torch.bool, device=device),
            drawn=torch.zeros((1, 3), dtype=torch.bool, device=device),
            depth=2,
            is_chain=False,
        )


def test_the_strip_shows_the_rejected_child_of_a_tree(lab):
    text = tuple(reference(lab.model, PROMPT, 8))
    out = lab.generate(PROMPT, Bush(text), max_new_tokens=6)
    first = out.rounds[0]
    assert first.path == [[1]] and first.accepted == [1] and first.rejected == [True]
    shown = [piece.text for piece in pieces(out, lambda ids: " ".join(map(str, ids))) if piece.kind == "rejected"]
    assert shown[0].strip() == str((text[1] + 1) % 61)


SPELLED = ["", "a", " b", "\n", "\n    ", "\t", "  ", "x\n\n  y"]


def spelled(ids):
    """A decoder of ids below 8 to text; 8 and 9 are the two halves of one character, 10 and above letters."""
    whole = "".join(SPELLED[i] if i < 8 else "\1" if i == 8 else "\2" if i == 9 else chr(87 + i) for i in ids)
    return whole.replace("\1\2", "é").replace("\1", "\ufffd").replace("\2", "\ufffd")


def strip_of(lab, text, wrong=(9,)):
    out = lab.generate(PROMPT, Replay([PROMPT], [text], 2, wrong), max_new_tokens=len(text),
                       logits_processor=[Says(text)])  # fmt: skip
    assert out.tokens == [text]
    return out, pieces(out, spelled)


class Says(LogitsProcessor):
    """Leaves the model nothing but a text."""

    def __init__(self, text):
        self.text = text

    def __call__(self, input_ids, scores):
        at = min(input_ids.shape[1] - len(PROMPT), len(self.text) - 1)
        return torch.full_like(scores, -1e9).scatter(1, torch.full((len(scores), 1), self.text[at]), 0)


def test_the_strip_keeps_indentation_and_names_its_signs(lab):
    _, found = strip_of(lab, [1, 4, 1, 3, 6, 2, 7, 1, 0, 5, 8, 9, 8, 1])
    lines = "".join("|" if piece.kind == "break" else piece.text for piece in found)
    assert lines == "a⏎|····a⏎|·· bx⏎|⏎|  ya∅→\ufffdé\ufffda"
    assert {mark for piece in found for mark in piece.marks} == set("⏎·∅→\ufffd")
    # A line break that was drafted and turned down ends no line; it is no unknown sign either.
    out, found = strip_of(lab, [3] * 4 + [1] * 4, wrong=(0,))
    assert [piece.text for piece in found if piece.kind == "rejected"][:2] == ["⏎····"] * 2
    legend = Figure().add_subplot()
    draw_legend(legend, found)
    shown = [text.get_text() for text in legend.texts]
    assert shown[:3] == ["accepted draft", "rejected draft", "target's own token"]
    assert "line break" in shown[3] and "space" in shown[3] and "tab" not in shown[3] and "no text" not in shown[3]


@pytest.mark.parametrize("speedup", [0.5, 1.6, 12.0])
def test_the_picture_names_its_prompt(lab, speedup):
    table = lab.compare([PROMPT], [PromptLookup(1, 2)], max_new_tokens=24)
    table.entries[1] = dataclasses.replace(table.entries[1], name="P" * 70, speedup=speedup, tokens_per_second=1234.5)
    figure = demo_picture(table, spelled, "a caption", asked="code-01: cost in $x$ and $y$\nof it all")
    figure.draw_without_rendering()
    texts = [text.get_text() for text in figure.texts]
    assert texts[:2] == ["a caption", "Token by token, code-01: cost in $x$ and $y$ of it all"]
    assert not any(text.get_parse_math() for text in figure.texts)
    [bars] = [axes for axes in figure.axes if axes.get_xlabel()]
    ends = [label.get_window_extent().x1 for label in bars.texts]
    assert max(ends) <= figure.bbox.x1 and len(ends) == 2  # as long as the bars may be, their labels fit
    assert texts[2].startswith("PromptLookup(ngram=1, max_draft=2): ") and "drafted tokens accepted" in texts[2]
