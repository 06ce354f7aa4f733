"""Forms of prompts, and streams."""

import pytest
import torch
import transformers as hf
from letters import COUNT, MESSAGES, PIECES, TEXTS, Collects, drafter_of, every_strategy, greedy, ids, lab, tokenizer
from scripted import reference

import labkit
from labkit import EarlyExit

ONE = {
    "text": lambda: TEXTS[0],
    "ids": lambda: ids(TEXTS[0]),
    "a tuple": lambda: tuple(ids(TEXTS[0])),
    "a tensor": lambda: torch.tensor(ids(TEXTS[0])),
    "an int32 tensor": lambda: torch.tensor(ids(TEXTS[0]), dtype=torch.int32),
    "a tokenizer's output": lambda: tokenizer()(TEXTS[0]),
    "a plain dict": lambda: {"input_ids": ids(TEXTS[0])},
}
SEVERAL = {
    "texts": lambda: list(TEXTS),
    "a tuple of texts": lambda: tuple(TEXTS),
    "lists of ids": lambda: [ids(t) for t in TEXTS],
    "tensors": lambda: [torch.tensor(ids(t)) for t in TEXTS],
    "mixed": lambda: [TEXTS[0], ids(TEXTS[1]), torch.tensor(ids(TEXTS[2]))],
    "a tokenizer's output": lambda: tokenizer()(TEXTS),
    "padded on the left": lambda: tokenizer()(TEXTS, padding=True, padding_side="left", return_tensors="pt"),
    "padded on the right": lambda: tokenizer()(TEXTS, padding=True, padding_side="right", return_tensors="pt"),
}


@pytest.mark.parametrize("form", ONE)
def test_one_prompt(form):
    out = lab().generate(ONE[form](), EarlyExit(2, 3), max_new_tokens=COUNT)
    assert out.tokens == [greedy(TEXTS[0])] and out.prompts == [ids(TEXTS[0])]
    assert out.text == "".join(PIECES[i] for i in greedy(TEXTS[0]) if i)


@pytest.mark.parametrize("form", SEVERAL)
def test_several_prompts(form):
    out = lab().generate(SEVERAL[form](), EarlyExit(2, 3), max_new_tokens=COUNT)
    assert out.prompts == [ids(t) for t in TEXTS]
    assert out.tokens == [greedy(t) for t in TEXTS]
    assert out.text == ["".join(PIECES[i] for i in greedy(t) if i) for t in TEXTS]


@pytest.mark.parametrize("side", ["left", "right"])
def test_attention_mask_as_an_argument(side):
    batch = tokenizer()(TEXTS, padding=True, padding_side=side, return_tensors="pt")
    for mask in (batch["attention_mask"], batch["attention_mask"].bool(), batch["attention_mask"].tolist()):
        out = lab().generate(batch["input_ids"], max_new_tokens=COUNT, attention_mask=mask)
        assert out.tokens == [greedy(t) for t in TEXTS]


def test_a_list_of_one_gives_a_list_of_one():
    for form in ([TEXTS[0]], [ids(TEXTS[0])], torch.tensor([ids(TEXTS[0])])):
        out = lab().generate(form, max_new_tokens=COUNT)
        assert out.tokens == [greedy(TEXTS[0])] and isinstance(out.text, list) and len(out.text) == 1


def test_chat_messages():
    want = reference(lab().model, ids("u:Hello;a:"), COUNT)
    out = lab().generate(MESSAGES, max_new_tokens=COUNT)
    assert out.prompts == [ids("u:Hello;a:")] and out.tokens == [want] and isinstance(out.text, str)
    both = lab().generate([MESSAGES, [*MESSAGES, {"role": "assistant", "content": "x"}]], max_new_tokens=3)
    assert both.prompts == [ids("u:Hello;a:"), ids("u:Hello;a:x;a:")] and len(both.text) == 2


def test_without_a_tokenizer():
    out = labkit.Lab(lab().model).generate([ids(TEXTS[0])], max_new_tokens=COUNT)
    assert out.text is None and out.tokens == [greedy(TEXTS[0])]
    assert str(out) and repr(out) and out._repr_html_()
    assert [t.text for t in labkit.Lab(lab().model).stream(ids(TEXTS[0]), max_new_tokens=3)] == [""] * 3


# -- streaming ------------------------------------------------------------------------------------------


@every_strategy
def test_stream_gives_what_generate_gives(strategy):
    text = TEXTS[2]
    drafter = drafter_of(strategy, [text])
    out = lab().generate(text, drafter, max_new_tokens=COUNT)
    tokens = list(lab().stream(text, drafter, max_new_tokens=COUNT))
    assert [t.id for t in tokens] == out.tokens[0] == greedy(text)
    assert "".join(map(str, tokens)) == out.text
    assert sum(t.drafted for t in tokens) == out.accepted
    assert [t.round for t in tokens] == [i for i, r in enumerate(out.rounds) for _ in r.tokens[0]]


@every_strategy
@pytest.mark.parametrize("ends", [None, 7])
def test_streamer_gets_exactly_the_tokens(strategy, ends):
    text = TEXTS[2]
    ends = None if ends is None else greedy(text)[ends]
    streamer = Collects()
    out = lab().generate(text, drafter_of(strategy, [text]), max_new_tokens=COUNT, streamer=streamer, eos_token_id=ends)
    assert streamer.seen[0].tolist() == [ids(text)] and streamer.ended == 1
    assert [value.tolist() for value in streamer.seen[1:]] == [[token] for token in out.tokens[0]]


def test_transformers_streamer(capsys):
    streamer = hf.TextStreamer(tokenizer(), skip_prompt=True, skip_special_tokens=True)
    out = lab().generate(TEXTS[0], EarlyExit(2, 3), max_new_tokens=COUNT, streamer=streamer)
    assert capsys.readouterr().out == out.text + "\n"
