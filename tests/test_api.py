"""The public face: transformers' spellings, settings, seeds, tables."""

import dataclasses
import inspect
import re

import families
import pytest
import torch
from letters import (
    COUNT,
    TEXTS,
    drafter_of,
    every_strategy,
    greedy,
    ids,
    lab,
    theirs,
)
from scripted import Replay

import labkit
from labkit import DraftModel, EarlyExit, LabkitError, Match, Plain, PromptLookup, Rejection
from labkit.options import Options

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


# -- sampling -------------------------------------------------------------------------------------------


@every_strategy
@pytest.mark.parametrize("acceptance", [Match(), Rejection()], ids=repr)
@pytest.mark.usefixtures("unshaped")
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
