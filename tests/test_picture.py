"""The strip of tokens and the picture of a comparison."""

import dataclasses
import random
from dataclasses import dataclass

import families
import pytest
import torch
from looks import readable
from matplotlib.figure import Figure
from scripted import reference
from spellers import byte_level, told

import labkit
from labkit import Draft, Drafter, PromptLookup
from labkit.view.figures import drawable
from labkit.view.picture import FONT, _layout, demo_picture, draw_legend, parts_of, token_strip
from labkit.view.strip import strip

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
    shown = [(part.text, part.kind) for part in parts_of(out)][:4]
    ids = [(text[0] + 1) % 61, text[0], (text[1] + 1) % 61, text[1]]
    assert shown == list(zip(map(str, ids), ("rejected", "accepted", "rejected", "target"), strict=True))


NASTY = "a\n    \n\tb  $x$\r\n€ 漢 <b> e\u0301 \0 שלום\u202e\n"


@pytest.mark.filterwarnings("error:Glyph")
@pytest.mark.parametrize("seed", range(4))
def test_the_picture_says_what_the_strip_on_a_page_says(seed):
    spelled, dice = byte_level(), random.Random(seed)
    tokens = spelled.tokenizer(NASTY)["input_ids"]
    out = told([97], [*tokens, 0xE2, *tokens], dice, spelled, [10, *tokens[:8]])
    parts, cells = parts_of(out), [c for c in strip(out).cells if c.kind not in ("prompt", "unjudged")]
    assert "".join(part.text for part in parts) == drawable("".join(cell.shown for cell in cells), FONT)
    ended = [part for part in parts if part.ends]
    breaks = sum(cell.text.count("\n") for cell in cells if cell.kind != "rejected")
    assert len(ended) == breaks == 8 and all(part.text.endswith("⏎") for part in ended)
    assert any("⏎" in part.text for part in parts if part.kind == "rejected")  # a sign like any other
    assert len(_layout(parts)) >= 8 and all(line for line in _layout(parts))
    figure = readable(token_strip(out, title="a <title> of $x$"))
    assert not any(text.get_parse_math() for text in figure.texts)
    legend = Figure().add_subplot()
    draw_legend(legend, parts)
    shown = [text.get_text() for text in legend.texts]
    assert shown[:3] == ["accepted draft", "rejected draft", "target's own token"]
    for words in ("line break", "space", "tab", "return"):
        assert words in shown[3]
    assert "no text" not in shown[3] and "U+" not in shown[3]


@pytest.mark.parametrize("speedup", [0.5, 1.6, 12.0])
def test_the_picture_names_its_prompt(lab, speedup):
    table = lab.compare([PROMPT], [PromptLookup(1, 2)], max_new_tokens=24)
    table.entries[1] = dataclasses.replace(table.entries[1], name="P" * 70, speedup=speedup, tokens_per_second=1234.5)
    figure = demo_picture(table, "a caption", asked="code-01: cost in $x$ and $y$\nof it all")
    readable(figure)
    texts = [text.get_text() for text in figure.texts]
    assert texts[:2] == ["a caption", "Token by token, code-01: cost in $x$ and $y$ of it all"]
    assert not any(text.get_parse_math() for text in figure.texts)
    [bars] = [axes for axes in figure.axes if axes.get_xlabel()]
    ends = [label.get_window_extent().x1 for label in bars.texts]
    assert max(ends) <= figure.bbox.x1 and len(ends) == 2  # as long as the bars may be, their labels fit
    assert texts[2].startswith("PromptLookup(ngram=1, max_draft=2): ") and "drafted tokens accepted" in texts[2]
