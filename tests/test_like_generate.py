"""Where a text ends, and what transformers' generate would have written."""

import functools

import families
import pytest
import torch
import transformers as hf
from letters import (
    COUNT,
    PIECES,
    TEXTS,
    NoRepeats,
    Sum,
    drafter_of,
    every_strategy,
    greedy,
    ids,
    lab,
    tokenizer,
)
from transformers import StoppingCriteriaList

import labkit
from labkit import EarlyExit, Match, Rejection

# -- where the text ends --------------------------------------------------------------------------------


def cut(text, ends):
    return text[: 1 + next((i for i, t in enumerate(text) if t in ends), len(text))]


@every_strategy
def test_eos(strategy):
    model = families.tiny("llama")
    whole = [greedy(t) for t in TEXTS]
    ends = [whole[0][4], whole[2][6]]
    model.generation_config.eos_token_id = ends
    mine, drafter = labkit.Lab(model), drafter_of(strategy)
    prompts = [ids(t) for t in TEXTS]
    out = mine.generate(prompts, drafter, max_new_tokens=COUNT)
    assert out.tokens == [cut(text, ends) for text in whole]
    assert out.reasons == ["eos" if text[-1] in ends else "length" for text in out.tokens]
    assert mine.generate(prompts, drafter, max_new_tokens=COUNT, eos_token_id=None).tokens == whole
    other = whole[1][3]
    assert mine.generate(prompts, drafter, max_new_tokens=COUNT, eos_token_id=other).tokens == [
        cut(text, [other]) for text in whole
    ]


def test_eos_of_the_config_or_the_tokenizer():
    whole = greedy(TEXTS[0])
    model = families.tiny("llama")
    model.config.eos_token_id = whole[3]
    assert labkit.Lab(model).generate(ids(TEXTS[0]), max_new_tokens=COUNT).tokens == [cut(whole, [whole[3]])]


@every_strategy
@pytest.mark.usefixtures("unshaped")
def test_stop_strings(strategy):
    """Every window of one to three characters of the greedy text, wherever the blocks happen to end."""
    text = TEXTS[2]
    drafter, letters = drafter_of(strategy, [text]), [PIECES[i] for i in greedy(text)]
    for width in (1, 2, 3):
        for start in range(len(letters) - width + 1):
            stop = "".join(letters[start : start + width])
            if "<pad>" in stop:
                continue
            out = lab().generate(text, drafter, max_new_tokens=COUNT, stop_strings=stop)
            want = theirs_stopped(text, stop)
            assert out.tokens == [want] and out.reasons == ["stop"], (stop, width, start)
            assert out.text == lab().decode(want)


@functools.cache
def theirs_stopped(text, stop):
    """By hand: the shortest prefix of the greedy text that holds the stop string (across the prompt's end too)."""
    tokens = greedy(text)
    for count in range(1, len(tokens) + 1):
        whole = text + "".join(PIECES[i] for i in tokens[:count])
        if whole.endswith(stop):
            return tokens[:count]
    return tokens


def test_stop_strings_are_transformers():
    text = TEXTS[2]
    stop = "".join(PIECES[i] for i in greedy(text)[5:7])
    prompt = torch.tensor([ids(text)])
    out = lab().model.generate(
        prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=COUNT, stop_strings=[stop],
        tokenizer=tokenizer(),
    )  # fmt: skip
    mine = lab().generate(text, EarlyExit(2, 3), max_new_tokens=COUNT, stop_strings=[stop, "<never>"])
    assert mine.tokens == [out[0, prompt.shape[1] :].tolist()]


# -- what transformers' generate would have written ------------------------------------------------------

NO_REPEATS, SUM = (NoRepeats(),), StoppingCriteriaList([Sum()])
LIKE_THEIRS = {
    "repetition_penalty": {"repetition_penalty": 1.3},
    "no_repeat_ngram": {"no_repeat_ngram_size": 1},
    "bad_words": {"bad_words_ids": ((5,), (11,), (17, 3), (2, 9, 4))},
    "processor": {"logits_processor": NO_REPEATS},
    "criteria": {"stopping_criteria": SUM},
    "min_new_tokens": {"min_new_tokens": 9, "eos": 2},
    "eos": {"eos": 4},
    "all": {"repetition_penalty": 1.2, "no_repeat_ngram_size": 2, "logits_processor": NO_REPEATS, "eos": 3, "min_new_tokens": 6},
}  # fmt: skip


def as_lists(options):
    listed = {"bad_words_ids": lambda x: [list(word) for word in x], "logits_processor": list}
    return {name: listed[name](value) if name in listed else value for name, value in options.items()}


@functools.cache
def theirs_of(name, text):
    options = as_lists(LIKE_THEIRS[name])
    eos = options.pop("eos", None)
    if eos is not None:
        options["eos_token_id"] = greedy(text)[eos]
    prompt = torch.tensor([ids(text)])
    model = families.tiny("llama")
    model.generation_config.pad_token_id = 0
    if "logits_processor" in options:
        options["logits_processor"] = hf.LogitsProcessorList(options["logits_processor"])
    out = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=COUNT, **options
    )
    return out[0, prompt.shape[1] :].tolist()


@every_strategy
@pytest.mark.parametrize("name", LIKE_THEIRS)
@pytest.mark.usefixtures("unshaped")
def test_transformers_greedy_text(strategy, name):
    text = TEXTS[2]
    want = theirs_of(name, text)
    options = as_lists(LIKE_THEIRS[name])
    eos = options.pop("eos", None)
    if eos is not None:
        options["eos_token_id"] = greedy(text)[eos]
    drafter = drafter_of(strategy, [text], [want + greedy(text)])
    for acceptance in (Match(), Rejection()):
        out = lab().generate(text, drafter, max_new_tokens=COUNT, acceptance=acceptance, **options)
        assert out.tokens == [want]


@every_strategy
def test_processors_in_a_batch(strategy):
    options = as_lists(LIKE_THEIRS["all"])
    options.pop("eos"), options.pop("min_new_tokens")
    plain = [lab().generate(t, max_new_tokens=COUNT, **options).tokens[0] for t in TEXTS]
    drafter = drafter_of(strategy, TEXTS, [text + [0] * 20 for text in plain])
    assert lab().generate(TEXTS, drafter, max_new_tokens=COUNT, **options).tokens == plain


def test_these_options_matter():
    """Each of them changes the greedy text; a test that passes without them says nothing."""
    for name in LIKE_THEIRS:
        assert theirs_of(name, TEXTS[2]) != greedy(TEXTS[2]), name
