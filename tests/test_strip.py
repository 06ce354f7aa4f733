"""The strip on a page: every token's text comes back whole, and none of it becomes a tag."""

import html.parser
import random
import re

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from labkit.decoding import Round
from labkit.errors import LabkitError
from labkit.spelling import Spelling, _byte_letters
from labkit.trace import Generation
from labkit.view.letters import SIGNS
from labkit.view.strip import strip

NASTY = [
    "<script>alert(1)</script>", "a & b &amp; &lt;", "\"quoted\" 'too'", "costs $5 and $x^2$", "\\(x\\)", "nul\0byte",
    "שלום עולם", "مرحبا \u202eevil\u202c", "e\u0301 n\u0303 \u0301", "👩‍👩‍👧‍👦 🏳️‍🌈", "tab\there\nand\n\nlines\r\n", "  spaces   ",
    "€ 漢字 ñ", "<b onmouseover='x'>", "]]> <!-- -->", "\x7f\x1b[31m", "\u2028\u2029", "",
]  # fmt: skip


class Lab:
    def __init__(self, tokenizer):
        self.tokenizer = tokenizer


def wrapped(tokenizer):
    return Lab(PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False))


def byte_level():
    letters = {byte: letter for letter, byte in _byte_letters().items()}
    vocab = {letters[byte]: byte for byte in range(256)}
    merges = [(letters[ord(" ")], "a"), ("a", "b"), ("<", "s"), (letters[0xE2], letters[0x82])]
    vocab |= {a + b: 256 + at for at, (a, b) in enumerate(merges)}
    made = Tokenizer(models.BPE(vocab, merges))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return wrapped(made)


def sentence_piece():
    words = [f"<0x{byte:02X}>" for byte in range(256)] + [
        "<unk>",
        "▁",
        *"abcdefghijklmnopqrstuvwxyz<>&$'\"/()",
        "▁a",
        "▁b",
    ]
    made = Tokenizer(
        models.BPE({w: i for i, w in enumerate(words)}, [("▁", "a"), ("▁", "b")], byte_fallback=True, unk_token="<unk>")
    )
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return wrapped(made)


def byte_tokens():
    words = [f"<0x{byte:02X}>" for byte in range(256)]
    made = Tokenizer(models.BPE({w: i for i, w in enumerate(words)}, [], byte_fallback=True))
    made.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    return wrapped(made)


LABS = {"byte level": byte_level(), "SentencePiece": sentence_piece(), "bytes": byte_tokens()}
every_tokenizer = pytest.mark.parametrize("name", LABS)


def told(prompt, tokens, dice, lab=None):
    """A generation that commits these tokens in rounds with drafts accepted, rejected and unjudged."""
    rounds, at = [], 0
    while at < len(tokens):
        block = tokens[at : at + dice.randint(1, 4)]
        accepted = len(block) - 1
        wrong = [dice.randrange(250) for _ in range(dice.randint(0, 3))]
        drafted = block[:accepted] + wrong
        rounds.append(Round(
            tokens=[block], drafted=[drafted], q=[[0.25] * len(drafted)], p=[[0.5] * len(drafted)],
            target=[[*block, *[0] * len(wrong)]], accepted=[accepted], rejected=[bool(wrong)],
            parents=[list(range(-1, len(drafted) - 1))], path=[list(range(accepted))], exit=[[3] * len(drafted)],
            left=[[]], seconds=[{"draft": 0.001, "verify": 0.002, "accept": 0.0, "commit": 0.0}], own=[0.5],
        ))  # fmt: skip
        at += len(block)
    return Generation(
        None, [tokens], [prompt], rounds, ["length"], {"drafter": "x"}, True, 1.0, 0.1, Spelling(lab and lab.tokenizer)
    )


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
            self.cells.append([kind[7:], "", dict(attributes)["title"]])

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


ALLOWED = {
    "div": {"class", "role", "aria-label", "style", "dir"},
    "span": {"class", "style", "title", "aria-label"},
    "br": set(),
    "wbr": set(),
}


@every_tokenizer
@pytest.mark.parametrize("seed", range(12))
def test_texts_come_back_and_no_tag_is_made(name, seed):
    lab, dice = LABS[name], random.Random(seed)
    if seed < 6:
        text = "".join(dice.sample(NASTY, 8))
        tokens = lab.tokenizer(text)["input_ids"]
    else:
        tokens = [dice.randrange(len(lab.tokenizer)) for _ in range(60)]  # lone bytes, whatever
    prompt = lab.tokenizer("a <b> & b")["input_ids"]
    out = told(prompt, tokens, dice, lab)
    shown = strip(out)
    decode = lambda ids: lab.tokenizer.decode(ids, clean_up_tokenization_spaces=False)  # noqa: E731
    whole, before = decode(prompt + tokens), decode(prompt)
    if seed < 6:  # tokens that end inside a character show its bytes and have no text
        partial = [decode(prompt + tokens[: at + 1]).endswith("\ufffd") for at in range(len(tokens))]
        committed = [cell for cell in shown.cells if cell.kind in ("accepted", "target")]
        kept = [cell.text for cell, ends_inside in zip(committed, partial, strict=True) if not ends_inside]
        assert "".join(kept) == whole[len(before) :]
    source = shown._repr_html_()
    source.encode()
    assert not re.search("[\x00-\x09\x0b-\x1f]", source)
    page = Page(source)
    for tag, attributes in page.tags:
        assert set(attributes) <= ALLOWED[tag], (tag, attributes)
    committed = [cell for cell in shown.cells if cell.kind in ("accepted", "target")]
    on_page = [cell for cell in page.cells if cell[0] in ("accepted", "target")]
    for cell, (kind, text, title) in zip(committed, on_page, strict=True):
        assert kind == cell.kind and title == cell.title()
        assert text == (cell.text or "∅")
    assert "$" not in re.sub(r"<span>\$</span>|title=\"[^\"]*\"", "", source)
    rows = shown.table()
    assert len(rows.rows) == len(shown.cells) and "<script" not in rows._repr_html_()
    str(shown).encode()


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
