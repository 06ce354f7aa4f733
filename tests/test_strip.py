"""The strip on a page: every token's text comes back whole, and none of it becomes a tag."""

import html.parser
import random
import re
import unicodedata

import pytest
from spellers import byte_level, byte_tokens, sentence_piece, told

from labkit.errors import LabkitError
from labkit.spelling import _byte_letters
from labkit.view.letters import SIGNS, visible
from labkit.view.strip import strip

SPECIALS = {
    "less": "<b onmouseover='x'> 1 < 2 <<", "tag": "<script>alert(1)</script>", "comment": "]]> <!-- --> <?x?>",
    "and": "a & b &amp; &lt; &#60; &", "quotes": "\"q\" 'q'", "dollar": "$5 and $x^2$ \\(x\\) \\[", "nul": "nul\0byte",
    "right to left": "שלום مرحبا \u202eevil\u202c \u2067x\u2069", "marks": "e\u0301 n\u0303 \u0301",
    "joined": "👩‍👩‍👧‍👦 🏳️‍🌈 \u200d", "breaks": "tab\there\nand\n\nlines\r\n", "spaces": "  spaces   ", "wide": "€ 漢字 ñ",
    "controls": "\x7f\x1b[31m \u2028\u2029",
}  # fmt: skip
LONE = (0xE2, 0x80, 0xFF, 0xC3, 0x00)
LABS = {"byte level": byte_level(), "SentencePiece": sentence_piece(), "bytes": byte_tokens()}
every_tokenizer = pytest.mark.parametrize("name", LABS)


class Page(html.parser.HTMLParser):
    """What a browser makes of it: the tags with their attributes, and the texts of the cells by kind."""

    def __init__(self, source):
        super().__init__(convert_charrefs=True)
        self.tags, self.cells, self.stack, self.sign = [], [], [], None
        self.feed(source)
        self.close()
        assert not self.stack

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag in ("br", "wbr"):
            return
        self.stack.append(dict(attributes))
        kind = dict(attributes).get("class", "")
        if re.fullmatch("labkit-(prompt|accepted|rejected|target)", kind):
            self.cells.append([kind[7:], "", dict(attributes)["title"], dict(attributes)["style"]])

    def handle_endtag(self, tag):
        if tag not in ("br", "wbr"):
            self.stack.pop()

    def handle_data(self, data):
        inside = [a for a in self.stack if a.get("class", "")[7:] in ("prompt", "accepted", "rejected", "target")]
        if not inside:
            return
        if self.stack[-1].get("class") == "labkit-sign":
            name = self.stack[-1]["aria-label"]
            back = {n: letter for letter, (_, n) in SIGNS.items()} | {"": ""}
            self.cells[-1][1] += back[name] if name in back else chr(int(name[2:], 16))
        else:
            self.cells[-1][1] += data

    def handle_comment(self, data):
        raise AssertionError(data)

    handle_decl = handle_pi = unknown_decl = handle_comment


ENTITY = "&(?:lt|gt|amp|quot|#x27|#10);"
ATTRIBUTE = rf' (?:class|role|aria-label|style|dir|title)="(?:[^"<>&\0-\x1f]|{ENTITY})*"'
GRAMMAR = re.compile(rf"(?:<(?:div|span)(?:{ATTRIBUTE})*>|</(?:div|span)>|<w?br>|[^<>&\0-\x1f]|{ENTITY})*")
"""All that a strip's page is made of; a letter of the text that is none of its own business fits nowhere in it."""


def byte_token(lab, byte):
    names = {f"<0x{byte:02X}>", {b: letter for letter, b in _byte_letters().items()}[byte]}
    return next(lab.tokenizer.convert_tokens_to_ids(n) for n in sorted(names) if n in lab.tokenizer.get_vocab())


def case(lab, dice):
    """Every special in a random order, and between them lone bytes: tokens, and the text that each has to have.

    A token that ends inside a character has no text of its own; what it shows is left to hex ("").
    """
    decode = lambda ids: lab.tokenizer.decode(ids, clean_up_tokenization_spaces=False)  # noqa: E731
    anchor, tokens, said = lab.tokenizer("a")["input_ids"], [], []
    parts = [*SPECIALS.values(), *LONE]
    for part in dice.sample(parts, len(parts)):
        if isinstance(part, int):  # a letter behind it, so that nothing completes it
            tokens += [byte_token(lab, part), byte_token(lab, ord("z"))]
            said += ["\0" if part == 0 else f"<{part:02X}>", "z"]
            continue
        ids, before = lab.tokenizer(part)["input_ids"], decode(anchor)
        assert decode(anchor + ids).endswith(part), part  # the tokenizer has it
        for at in range(len(ids)):
            whole = decode(anchor + ids[: at + 1])
            inside = whole.endswith("\ufffd")
            said.append("" if inside else whole[len(before) :])
            before = before if inside else whole
        tokens += ids
    return tokens, said


@every_tokenizer
@pytest.mark.parametrize("seed", range(12))
def test_texts_come_back_and_no_tag_is_made(name, seed):
    """In every case every special stands in the prompt, among the accepted, the rejected and the target's own."""
    lab, dice = LABS[name], random.Random(seed)
    tokens, said = case(lab, dice)
    prompt, _ = case(lab, dice)
    shown = strip(told(prompt, tokens, dice, lab, tokens), stop=len(tokens))
    committed = [cell for cell in shown.cells if cell.kind in ("accepted", "target")]
    for cell, text in zip(committed, said, strict=True):
        assert cell.text == text or (not text and re.fullmatch("(<[0-9A-F]{2}>)+", cell.text)), (cell.text, text)
    for source in (shown._repr_html_(), strip(told(tokens, prompt, dice, lab, prompt))._repr_html_()):
        assert GRAMMAR.fullmatch(source), source[GRAMMAR.match(source).end() :][:200]
        assert not re.search("[\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufffd]", source)
        assert "$" not in re.sub(r"<span>\$</span>|title=\"[^\"]*\"", "", source)  # no formula for MathJax
        assert "\\" not in re.sub(r"<span>\\</span>|title=\"[^\"]*\"", "", source)
    page = Page(shown._repr_html_())
    seen = [cell for cell in shown.cells if cell.kind != "unjudged"]
    for cell, (kind, text, title, style) in zip(seen, page.cells, strict=True):
        assert (kind, text, title) == (cell.kind, cell.text or "∅", cell.title()) and "unicode-bidi:isolate" in style
    assert {cell.kind for cell in seen} == {"prompt", "accepted", "rejected", "target"}
    body = re.sub(r"title=\"[^\"]*\"", "", shown._repr_html_())
    assert body.count("\N{DOTTED CIRCLE}") == sum(bool(c.text and unicodedata.combining(c.text[0])) for c in seen) > 0
    rows = shown.table()
    assert len(rows.rows) == len(shown.cells)
    assert not re.search("[<>&\0]", re.sub(rf"</?(?:table|tr|th|td|div)[^<>&]*>|{ENTITY}", "", rows._repr_html_()))
    str(shown).encode()


@every_tokenizer
@pytest.mark.parametrize("seed", range(6))
def test_any_tokens_in_any_order(name, seed):
    lab, dice = LABS[name], random.Random(seed)
    tokens = [dice.randrange(len(lab.tokenizer)) for _ in range(60)]  # lone bytes, whatever
    shown = strip(told(tokens[:20], tokens[20:], dice, lab, tokens))
    assert GRAMMAR.fullmatch(shown._repr_html_()) and Page(shown._repr_html_()).cells
    assert "\ufffd" not in shown._repr_html_()


def test_a_token_that_ends_inside_a_character_shows_as_hex():
    lab = byte_level()
    out = told(list(b"a"), [259, 0xAC, 97, 0xE2], random.Random(0), lab)
    assert [c.text for c in strip(out).cells if c.kind in ("accepted", "target")] == ["<E2><82>", "€", "a", "<E2>"]
    assert "&lt;E2&gt;&lt;82&gt;" in strip(out)._repr_html_()


def test_signs_and_looks():
    lab = byte_level()
    out = told(list(b"hi "), list(b"a b\n\tc"), random.Random(1), lab)
    source = strip(out)._repr_html_()
    assert "⏎</span><br>" in source and "→" in source and "·" in source
    for look in (
        "2px solid #0072B2",
        "2px dashed #D55E00",
        "line-through",
        "double #009E73",
        "font-weight:bold",
        "unicode-bidi:isolate",
    ):
        assert look in source
    assert not re.search(r"(?<![-\w])color:", source)  # letters keep the page's own colour, light or dark
    for said in (
        "draft probability 0.250",
        "target probability 0.500",
        "exit layer 3",
        "round 0: 3.0 ms (draft 1.0, verify 2.0",
    ):
        assert said in source
    assert "♥" not in source and len(strip(out).table().rows) == len(strip(out).cells)
    assert "*target's own*" in str(strip(out))


def test_joiners_stay_where_they_join():
    for whole in ("👩‍👩‍👧‍👦", "🏳️‍🌈", "می‌خواهم"):
        assert visible(whole) == whole
    assert visible("\u200d") == "⟨U+200D⟩" and visible("a\u200d") == "a⟨U+200D⟩"


def test_a_slice_of_a_long_text():
    out = told([1] * 100, [97] * 1000, random.Random(2), byte_level())
    whole = strip(out)
    assert len(whole.text) == 400 and whole.note() == "tokens 0 to 400 of 1000; start=400 shows more"
    assert "tokens 0 to 400 of 1000" in whole._repr_html_() and sum(c.kind == "prompt" for c in whole.cells) == 60
    end = strip(out, start=990)
    assert end.text == "a" * 10 and not [c for c in end.cells if c.kind == "prompt"]
    assert end.cells[0].place == 990
    for wrong in ({"row": 1}, {"start": -1}, {"start": 5, "stop": 2}, {"start": 2000}):
        with pytest.raises(LabkitError, match="got"):
            strip(out, **wrong)


def test_without_a_tokenizer_ids_are_shown():
    assert strip(told([1], [5, 6], random.Random(3))).text == "56"
