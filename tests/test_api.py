"""The public face: forms of prompts, transformers' spellings and its `generate`, seeds, tables, errors that help."""

import dataclasses
import functools
import inspect
import re

import families
import pytest
import torch
import transformers as hf
from scripted import RandomTree, Replay, reference
from tokenizers import Tokenizer, decoders, models
from transformers import LogitsProcessor, StoppingCriteria, StoppingCriteriaList

import labkit
from labkit import DraftModel, EarlyExit, LabkitError, Match, Plain, PromptLookup, Rejection
from labkit.options import Options

PIECES = ["<pad>", *"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ .,!?:;-"]
TEMPLATE = (
    "{% for message in messages %}{{ message['role'][0] }}:{{ message['content'] }};{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)
TEXTS = ["Hello, labkit", "ab", "a longer prompt: abc abc abc"]
COUNT = 14


@functools.cache
def tokenizer() -> hf.PreTrainedTokenizerFast:
    """One token a character; nothing is downloaded."""
    backend = Tokenizer(models.BPE({piece: i for i, piece in enumerate(PIECES)}, []))
    backend.decoder = decoders.Fuse()
    made = hf.PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>")
    made.chat_template = TEMPLATE
    return made


@functools.cache
def lab() -> labkit.Lab:
    model = families.tiny("llama")
    assert len(PIECES) == model.config.vocab_size
    return labkit.Lab(model, tokenizer())


@functools.cache
def small() -> hf.PreTrainedModel:
    return families.tiny("llama", seed=9, layers=2)


def ids(text: str) -> list[int]:
    return [PIECES.index(letter) for letter in text]


@functools.cache
def greedy(text: str, count: int = COUNT) -> list[int]:
    return reference(lab().model, ids(text), count)


@functools.cache
def theirs(text: str, **options) -> list[int]:
    """transformers' own greedy text."""
    model, prompt = lab().model, torch.tensor([ids(text)])
    mask = torch.ones_like(prompt)
    out = model.generate(prompt, attention_mask=mask, do_sample=False, max_new_tokens=COUNT, **options)
    return out[0, prompt.shape[1] :].tolist()


STRATEGIES = {
    "Plain": lambda prompts, texts: Plain(),
    "PromptLookup": lambda prompts, texts: PromptLookup(2, 3),
    "EarlyExit": lambda prompts, texts: EarlyExit(2, 3),
    "DraftModel": lambda prompts, texts: DraftModel(small(), 3),
    "chain": lambda prompts, texts: Replay(prompts, texts, 4, (2, 4, 0)),
    "trees": lambda prompts, texts: RandomTree(prompts, texts),
}
every_strategy = pytest.mark.parametrize("strategy", STRATEGIES)


def drafter_of(strategy, texts=TEXTS, outputs=None):
    return STRATEGIES[strategy]([ids(t) for t in texts], outputs or [greedy(t, 30) for t in texts])


# -- prompts --------------------------------------------------------------------------------------------

MESSAGES = [{"role": "user", "content": "Hello"}]
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


class Collects:
    def __init__(self):
        self.seen, self.ended = [], 0

    def put(self, value):
        assert not self.ended
        self.seen.append(value)

    def end(self):
        self.ended += 1


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


# -- spellings and settings -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spelled", "drafter"),
    [
        ({"assistant_early_exit": 2}, EarlyExit(2, max_draft=4)),
        ({"assistant_early_exit": 3, "num_assistant_tokens": 6}, EarlyExit(3, max_draft=6)),
        ({"prompt_lookup_num_tokens": 5}, PromptLookup(ngram=2, max_draft=5)),
        ({"prompt_lookup_num_tokens": 3, "max_matching_ngram_size": 4}, PromptLookup(ngram=4, max_draft=3)),
        ({}, Plain()),
    ],
    ids=str,
)
def test_transformers_spellings(spelled, drafter):
    out = lab().generate(TEXTS, max_new_tokens=COUNT, **spelled)
    ours = lab().generate(TEXTS, drafter, max_new_tokens=COUNT)
    assert out.settings["drafter"] == repr(drafter) == ours.settings["drafter"]
    assert [r.drafted for r in out.rounds] == [r.drafted for r in ours.rounds]
    assert out.tokens == ours.tokens == [greedy(t) for t in TEXTS]
    assert {name: out.settings[name] for name in spelled} == spelled


def test_settings_say_what_the_run_used():
    given = {
        "max_new_tokens": 5, "temperature": 0.7, "top_k": 9, "top_p": 0.8, "min_p": 0.01, "typical_p": 0.9,
        "repetition_penalty": 1.1, "no_repeat_ngram_size": 4, "bad_words_ids": [[3]], "min_new_tokens": 2, "seed": 8,
        "eos_token_id": [4, 5], "stop_strings": ["zz"], "early_exit": 3,
    }  # fmt: skip
    out = lab().generate(TEXTS[0], EarlyExit(2, 3), acceptance=Rejection(), **given)
    assert {name: out.settings[name] for name in given} == given
    assert out.settings["acceptance"] == repr(Rejection()) and out.settings["drafter"] == repr(EarlyExit(2, 3))
    assert (out.settings["depth"], out.settings["dtype"], out.settings["device"]) == (3, "float64", "cpu")
    assert out.lossless is False
    plain = lab().generate(TEXTS[0], max_new_tokens=2)
    assert plain.lossless is True and plain.settings["acceptance"] == repr(Match())


def test_the_models_own_sampling_settings_are_not_taken_over():
    model = families.tiny("llama")
    model.generation_config.update(do_sample=True, temperature=2.0, top_k=3, max_new_tokens=3)
    assert labkit.Lab(model).generate(ids(TEXTS[0]), max_new_tokens=COUNT).tokens == [greedy(TEXTS[0])]


def test_the_models_own_penalties_are_as_in_generate():
    model = families.tiny("llama")
    model.generation_config.update(repetition_penalty=1.5, no_repeat_ngram_size=3, min_new_tokens=2)
    own = labkit.Lab(model)
    for drafter in (Plain(), EarlyExit(2, 3)):
        out = own.generate(ids(TEXTS[0]), drafter, max_new_tokens=COUNT)
        assert out.tokens[0] == theirs(TEXTS[0], repetition_penalty=1.5, no_repeat_ngram_size=3)
        assert out.settings["repetition_penalty"] == 1.5
    out = own.generate(ids(TEXTS[0]), max_new_tokens=COUNT, repetition_penalty=1.0, no_repeat_ngram_size=0)
    assert out.tokens == [greedy(TEXTS[0])]


def test_help_lists_the_arguments():
    for method in (labkit.Lab.generate, labkit.Lab.stream, labkit.Lab.compare):
        assert {"max_new_tokens", "temperature", "seed", "assistant_early_exit"} <= set(
            inspect.signature(method).parameters
        )


@pytest.mark.parametrize("method", ["generate", "stream", "compare"])
def test_help_explains_every_argument(method):
    """The text is Options' own, so that the two cannot drift apart."""
    shown = inspect.getdoc(getattr(labkit.Lab, method))
    head, _, said = shown.partition("\nOptions, all by name")
    assert "prompt" in head and "drafter" in head and "labkit.options" not in shown
    for field in dataclasses.fields(Options):
        [(default, text)] = re.findall(rf"^ *{field.name}=(\S.*?): (\S.*)$", said, re.M)
        assert default == str(field.default) or (field.name == "eos_token_id" and default == "the model's own")
        assert len(text) > 10
    assert inspect.getdoc(Options).partition("\nOptions, all by name")[2] == said


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("max_tokens", "max_new_tokens"),
        ("temprature", "temperature"),
        ("num_assistant_token", "num_assistant_tokens"),
        ("eos_id", "eos_token_id"),
        ("draft", "drafter"),
        ("top_n", "top_p"),
        ("stop_string", "stop_strings"),
    ],
)
def test_unknown_argument_names_the_nearest(wrong, right):
    for call in (lab().generate, lab().stream):
        with pytest.raises(LabkitError, match=f"no argument '{wrong}'.*nearest is '{right}'"):
            call(TEXTS[0], **{wrong: 3})


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


class NoRepeats(LogitsProcessor):
    """A user's processor with a history: never one of the last three tokens, and more for even ids by length."""

    def __call__(self, input_ids, scores):
        scores = scores.clone()
        for row, text in enumerate(input_ids[:, -3:].tolist()):
            scores[row, text] = -torch.inf
            scores[row, ::2] += 0.3 * (input_ids.shape[1] % 4)
        return scores


class Sum(StoppingCriteria):
    """A user's criterion over the whole text."""

    def __init__(self, above=700):
        self.above = above

    def __call__(self, input_ids, scores, **kwargs):
        return input_ids.sum(1) > self.above


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


# -- sampling -------------------------------------------------------------------------------------------


@every_strategy
@pytest.mark.parametrize("acceptance", [Match(), Rejection()], ids=repr)
def test_same_seed_same_text_and_the_global_generator_is_left_alone(strategy, acceptance):
    drafter = drafter_of(strategy)
    options = {"max_new_tokens": COUNT, "temperature": 1.2, "acceptance": acceptance}
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first = lab().generate(TEXTS, drafter, seed=3, **options)
    assert torch.equal(torch.get_rng_state(), before)
    torch.rand(7)
    assert lab().generate(TEXTS, drafter, seed=3, **options).tokens == first.tokens
    assert lab().generate(TEXTS, drafter, seed=[3, 4, 5], **options).tokens == first.tokens
    assert lab().generate(TEXTS, drafter, seed=4, **options).tokens != first.tokens
    twins = lab().generate([TEXTS[0]] * 3, drafter_of(strategy, [TEXTS[0]] * 3), seed=3, **options).tokens
    assert len({tuple(row) for row in twins}) == 3
    same = lab().generate([TEXTS[0]] * 3, drafter_of(strategy, [TEXTS[0]] * 3), seed=[9, 9, 9], **options).tokens
    if strategy != "trees":  # which draws other trees for other rows
        assert len({tuple(row) for row in same}) == 1


@every_strategy
def test_greedy_rejection_is_plain_decoding(strategy):
    out = lab().generate(TEXTS, drafter_of(strategy), max_new_tokens=COUNT, acceptance=Rejection())
    assert out.tokens == [greedy(t) for t in TEXTS] and out.lossless


@pytest.mark.parametrize(
    "options", [{"do_sample": True}, {"top_k": 1}, {"temperature": 1e-3}, {"top_p": 1e-6}], ids=str
)
@every_strategy
def test_what_counts_as_sampling(strategy, options):
    out = lab().generate(TEXTS, drafter_of(strategy), max_new_tokens=COUNT, seed=1, **options)
    if "do_sample" in options:
        assert out.tokens != [greedy(t) for t in TEXTS]
    elif "temperature" not in options:
        assert out.tokens == [greedy(t) for t in TEXTS]


@pytest.mark.parametrize("options", [{"temperature": 0}, {"temperature": 0.0}, {"do_sample": False}, {}], ids=str)
def test_what_counts_as_greedy(options):
    assert lab().generate(TEXTS[0], max_new_tokens=COUNT, **options).tokens == [greedy(TEXTS[0])]


# -- comparing ------------------------------------------------------------------------------------------


def test_compare():
    drafters = [EarlyExit(2, 3), PromptLookup(2, 3), DraftModel(lab(), 3)]
    table = lab().compare(TEXTS, drafters, max_new_tokens=COUNT)
    assert [e.name for e in table.entries] == [repr(d) for d in [Plain(), *drafters]]
    assert all(e.same_text == "yes" for e in table.entries) and table.notes == []
    plain, exit, lookup, itself = table.entries
    assert (plain.speedup, plain.tokens_per_round, plain.acceptance_rate, plain.alpha) == (1.0, 1.0, None, None)
    assert itself.acceptance_rate == itself.alpha == 1.0 and itself.tokens_per_round > 3
    for entry in table.entries:
        outs = table.generations[entry.name]
        assert [out.tokens for out in outs] == [[greedy(t)] for t in TEXTS]
        assert [out.prompts for out in outs] == [[ids(t)] for t in TEXTS]
        tokens, seconds = sum(o.new_tokens for o in outs), sum(o.seconds for o in outs)
        assert entry.tokens_per_second == pytest.approx(tokens / seconds)
        assert entry.tokens_per_round == pytest.approx(tokens / sum(len(o.rounds) for o in outs))
        assert entry.speedup == pytest.approx(entry.tokens_per_second / plain.tokens_per_second)
    assert 0 <= exit.acceptance_rate <= exit.alpha < 1
    shown = str(table).splitlines()
    assert shown[0].split()[:2] == ["strategy", "tokens/s"] and len(shown) == 2 + 4
    assert shown[2].startswith("Plain()") and "1.00x" in shown[2] and "yes" in shown[2]
    page = table._repr_html_()
    assert page.count("<tr>") == 5 and "EarlyExit(exit=2" in page


def test_compare_says_where_texts_differ():
    class Liar(Plain):
        pass

    table = lab().compare(TEXTS[0], [EarlyExit(2, 3)], max_new_tokens=COUNT, early_exit=3)
    assert [e.same_text for e in table.entries] == ["yes", "yes"]
    cut_model = "early_exit=3: the target is the first 3 of 4 layers (lossy); 'same text' compares with that cut model"
    assert table.notes == [cut_model] and str(table).endswith(cut_model)
    sampled = lab().compare(TEXTS, [EarlyExit(2, 3)], max_new_tokens=COUNT, temperature=1.0, seed=4)
    assert [e.same_text for e in sampled.entries] == ["yes", "yes"] and sampled.notes == []
    other = lab().compare(
        TEXTS, [EarlyExit(2, 3)], max_new_tokens=COUNT, temperature=1.0, seed=4, acceptance=Rejection()
    )
    assert "of 3" in other.entries[1].same_text and "DIFFERENT" not in str(other)
    [note] = other.notes
    assert "Rejection() keeps the law of the texts, not the texts" in note and "labkit.Match()" in note
    # Greedy rejection has the target's own text, and needs no word.
    assert lab().compare("ab", [EarlyExit(2, 3)], max_new_tokens=4, acceptance=Rejection()).notes == []
    typical = lab().compare("ab", [EarlyExit(2, 3)], max_new_tokens=4, temperature=1.0, acceptance=labkit.Typical())
    assert [note for note in typical.notes if "Typical(epsilon=0.09, delta=0.3) is lossy" in note] == typical.notes


def test_difference_report():
    from labkit.compare import differences

    right, wrong = greedy(TEXTS[0]), list(greedy(TEXTS[0]))
    wrong[5] = (wrong[5] + 1) % 61
    [found] = differences(lab().backbone, [ids(TEXTS[0])], [right], [wrong])
    assert (found.row, found.index, found.near_tie) == (0, 5, False) and "DIFFERENT at token 5 of row 0" in str(found)
    assert differences(lab().backbone, [ids(TEXTS[0])], [right], [right]) == []
    [short] = differences(lab().backbone, [ids(TEXTS[0])], [right], [right[:4]])
    assert short.index == 4


def test_figures():
    out = lab().generate(
        TEXTS, Replay([ids(t) for t in TEXTS], [greedy(t) for t in TEXTS], 3, (1,)), max_new_tokens=COUNT
    )
    assert out.tokens_per_round == pytest.approx(2, abs=0.2)
    assert out.new_tokens == 3 * COUNT and out.row_rounds == 3 * len(out.rounds)
    assert out.acceptance_rate == out.accepted / out.drafted
    assert out.alpha == out.accepted / (out.accepted + out.rejections)
    assert set(out.phase_seconds) == {"draft", "verify", "accept", "commit"}
    assert 0 < sum(out.phase_seconds.values()) <= out.seconds and out.prefill_seconds < out.seconds
    assert "tokens per round" in out.summary() and out.summary() in str(out) and "lossy" not in out.summary()
    assert "(lossy: early_exit=3)" in lab().generate("ab", max_new_tokens=2, early_exit=3).summary()
    lossy = lab().generate("ab", max_new_tokens=2, acceptance=labkit.Typical()).summary()
    assert "(lossy: Typical(epsilon=0.09, delta=0.3))" in lossy


# -- errors ---------------------------------------------------------------------------------------------


def trained():
    return families.tiny("llama").train()


def other_vocabulary():
    return DraftModel(families.tiny("llama", vocab=50, layers=2))


PADDED = [[1, 2, 3], [4, 5]]
BAD = {
    "empty text": (lambda: lab().generate(""), "prompt 0 is empty.*give at least one token"),
    "empty ids": (lambda: lab().generate([[1, 2], []]), "prompt 1 is empty.*give at least one token"),
    "empty list": (lambda: lab().generate([]), "empty list of prompts; give at least one"),
    "all masked": (lambda: lab().generate([[1, 2]], attention_mask=[[0, 0]]), "prompt 0 is empty"),
    "too long a prompt": (lambda: lab().generate([1] * 130), "130 tokens.*128 positions; shorten the prompt by 3 tokens"),
    "prompt and text": (
        lambda: lab().generate([1] * 100, max_new_tokens=29), "100 tokens and max_new_tokens=29.*128.*write max_new_tokens=28"
    ),
    "exit 0": (lambda: EarlyExit(0), "EarlyExit got exit=0; it must be an int of at least 1"),
    "exit too deep": (lambda: lab().generate("ab", EarlyExit(5)), "exit=5.*4 layers; write an int from 1 to 4"),
    "exit True": (lambda: EarlyExit(True), "exit=True; it must be an int"),
    "exit text": (lambda: EarlyExit("2"), "exit='2'; it must be an int"),
    "early_exit 0": (lambda: lab().generate("ab", early_exit=0), "early_exit=0.*4 layers; write an int from 1 to 4"),
    "early_exit text": (lambda: lab().generate("ab", early_exit="2"), "early_exit='2'.*write an int from 1 to 4"),
    "early_exit True": (lambda: lab().generate("ab", early_exit=True), "early_exit=True.*write an int from 1 to 4"),
    "early_exit too deep": (lambda: lab().generate("ab", early_exit=9), "early_exit=9.*write an int from 1 to 4"),
    "exit above the cut": (lambda: lab().generate("ab", EarlyExit(3), early_exit=2), "^the target of early_exit=2 has 2 layers: .*exit=3.*from 1 to 2"),
    "assistant exit 0": (lambda: lab().generate("ab", assistant_early_exit=0), "exit=0; it must be an int of at least 1"),
    "assistant exit deep": (lambda: lab().generate("ab", assistant_early_exit=7), "exit=7.*from 1 to 4"),
    "max_draft 0": (lambda: EarlyExit(2, max_draft=0), "EarlyExit got max_draft=0; it must be.*Plain"),
    "max_draft negative": (lambda: PromptLookup(max_draft=-1), "PromptLookup got max_draft=-1; it must be"),
    "draft tokens 0": (lambda: lab().generate("ab", assistant_early_exit=2, num_assistant_tokens=0), "max_draft=0; it must"),
    "ngram 0": (lambda: PromptLookup(ngram=0), "ngram=0; it must be an int of at least 1"),
    "draft model's max_draft": (lambda: DraftModel(small(), max_draft=0), "DraftModel got max_draft=0; it must be"),
    "another vocabulary": (
        lambda: lab().generate("ab", other_vocabulary()), "draft model has 50 tokens and the target 61.*choose one"
    ),
    "id too large": (lambda: lab().generate([1, 61]), "prompt 0 has token id 61.*vocabulary has 61 tokens"),
    "id in a later row": (lambda: lab().generate([[1], [2, 99]]), "prompt 1 has token id 99.*vocabulary has 61 tokens"),
    "text, no tokenizer": (lambda: labkit.Lab(lab().model).generate("ab"), "needs a tokenizer; give token ids, or"),
    "chat, no tokenizer": (lambda: labkit.Lab(lab().model).generate(MESSAGES), "needs a tokenizer; give token ids, or"),
    "mask of another shape": (
        lambda: lab().generate(PADDED, attention_mask=[[1, 1, 1], [1, 1, 1]]), "mask has rows of.*3, 3.*3, 2.*give the mask"
    ),
    "mask of fewer rows": (lambda: lab().generate(PADDED, attention_mask=[[1, 1, 1]]), "attention_mask has rows.*give the mask"),
    "no drafter": (lambda: lab().generate("ab", "early_exit"), "'early_exit' is not a draft strategy; write for example"),
    "drafter class": (lambda: lab().generate("ab", EarlyExit), "is not a draft strategy; write for example"),
    "a model as drafter": (lambda: lab().generate("ab", small()), "is not a draft strategy; write for example"),
    "two strategies": (
        lambda: lab().generate("ab", Plain(), assistant_early_exit=2), "got drafter and assistant_early_exit; ask for one"
    ),
    "two of transformers": (
        lambda: lab().generate("ab", assistant_early_exit=2, prompt_lookup_num_tokens=3), "ask for one strategy"
    ),
    "num_assistant_tokens alone": (
        lambda: lab().generate("ab", num_assistant_tokens=3), "num_assistant_tokens=3 has no effect; write drafter="
    ),
    "greedy and a temperature": (
        lambda: lab().generate("ab", do_sample=False, temperature=0.7), "do_sample=False contradicts.*temperature.*leave out"
    ),
    "sampling at 0": (lambda: lab().generate("ab", do_sample=True, temperature=0), "contradicts temperature=0; write"),
    "temperature below 0": (lambda: lab().generate("ab", temperature=-1), "got temperature=-1; needed is.*; write"),
    "top_p above 1": (lambda: lab().generate("ab", top_p=1.5), "got top_p=1.5; needed is.*; write"),
    "temperature of 0 or more": (lambda: lab().generate("ab", temperature=-1), "needed is a number of 0 or more"),
    "a draft model's name": (
        lambda: DraftModel("smollm2-135m"), r"got model='smollm2-135m'.*write DraftModel\(labkit.load\('smollm2-135m'\)\)"
    ),
    "no draft model": (lambda: DraftModel(3), "got model=3.*a transformers causal LM"),
    "assistant_model": (
        lambda: lab().generate("ab", assistant_model=small()),
        r"assistant_model.*write drafter=labkit.DraftModel\(assistant_model\)",
    ),
    "an argument like no other": (lambda: lab().generate("ab", zzzz=1), "no argument 'zzzz'. All: "),
    "seeds": (lambda: lab().generate(TEXTS, seed=[1, 2]), r"got seed=\[1, 2\] for 3 prompt.*write one int, or a list of 3"),
    "seed text": (lambda: lab().generate("ab", seed="x"), "got seed='x' for 1 prompt.*write one int"),
    "no seed": (lambda: lab().generate("ab", seed=None), "got seed=None for 1 prompt.*write one int"),
    "unsupported processor": (
        lambda: lab().generate("ab", logits_processor=[hf.PrefixConstrainedLogitsProcessor(lambda b, x: [1], 1)]),
        "got PrefixConstrainedLogitsProcessor.*cannot run on a draft.*leave it out",
    ),
    "stream of a batch": (lambda: lab().stream(TEXTS), "stream takes one prompt and got 3; use generate"),
    "streamer of a batch": (lambda: lab().generate(TEXTS, streamer=Collects()), "streamer takes one prompt and got 3; leave"),
    "training": (lambda: labkit.Lab(trained()), r"training mode.*call model\.eval\(\)"),
    "max_new_tokens 0": (lambda: lab().generate("ab", max_new_tokens=0), "got max_new_tokens=0; needed is.*write 64"),
    "max_new_tokens text": (lambda: lab().generate("ab", max_new_tokens=True), "got max_new_tokens=True; needed is.*write"),
    "acceptance class": (lambda: lab().generate("ab", acceptance=Match), r"write labkit.Match\(\), labkit.Rejection\(\) or"),
    "end token": (lambda: lab().generate("ab", eos_token_id="x"), "got end tokens 'x'; needed are token ids; write"),
    "stop string": (lambda: lab().generate("ab", stop_strings=""), "stop_strings=''; needed are strings.*write None"),
    "prompt of no kind": (lambda: lab().generate(3.5), "got a prompt of type float; write text"),
    "not a model": (lambda: labkit.Lab("smollm2"), "got a str; labkit needs a transformers causal LM"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_explained(name):
    call, message = BAD[name]
    with pytest.raises(LabkitError, match=f"(?s){message}") as caught:
        call()
    assert type(caught.value) is LabkitError and len(str(caught.value)) < 900


def test_bad_input_is_found_before_anything_runs():
    """stream checks at the call, not at the first token."""
    with pytest.raises(LabkitError):
        lab().stream("ab", EarlyExit(9))
    with pytest.raises(LabkitError):
        lab().compare([], [EarlyExit(2)])


# -- bad input that the list above does not name ---------------------------------------------------------


@pytest.mark.parametrize("prompt", [[-1], [3, -1, 2]], ids=str)
def test_negative_ids(prompt):
    with pytest.raises(LabkitError, match="token id -1"):
        lab().generate(prompt)


@pytest.mark.parametrize("options", [{"logits_processor": NoRepeats()}, {"stopping_criteria": Sum()}], ids=str)
def test_one_processor_or_criterion_instead_of_a_list(options):
    ((name, one),) = options.items()
    wanted = lab().generate("ab", max_new_tokens=3, **{name: [one]})
    assert lab().generate("ab", max_new_tokens=3, **options).tokens == wanted.tokens


def test_max_new_tokens_of_another_type():
    for call in (lab().generate, lambda *a, **k: lab().compare(*a, [Plain()], **k)):
        with pytest.raises(LabkitError, match="max_new_tokens"):
            call("ab", max_new_tokens="5")


def dropping():
    model = families.tiny("gpt2")
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.5
    return model


def test_put_in_training_mode_after_it_was_loaded():
    """Either refused, or decoded as in eval mode; and the flags are the user's."""
    model = dropping()
    mine = labkit.Lab(model)
    want = mine.generate([1, 2, 3], EarlyExit(2, 3), max_new_tokens=COUNT).tokens
    model.train()
    try:
        assert mine.generate([1, 2, 3], EarlyExit(1, 3), max_new_tokens=COUNT).tokens == want
    except LabkitError as error:
        assert "eval()" in str(error)
    assert all(module.training for module in model.modules())
