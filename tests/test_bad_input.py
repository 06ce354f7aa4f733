"""Errors of the public face say what was got, what is needed and what to write."""

import families
import pytest
import torch
import transformers as hf
from letters import COUNT, MESSAGES, TEXTS, Collects, NoRepeats, Sum, lab, small

import labkit
from labkit import DraftModel, EarlyExit, LabkitError, Match, Plain, PromptLookup


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
    "exit 0": (lambda: EarlyExit(0), "got exit=0; write a layer's number, or a rule such as"),
    "exit too deep": (lambda: lab().generate("ab", EarlyExit(5)), "exit=5.*4 layers; write an int from 1 to 4"),
    "exit True": (lambda: EarlyExit(True), "exit=True; write a layer's number"),
    "exit text": (lambda: EarlyExit("2"), "exit='2'; write a layer's number"),
    "early_exit 0": (lambda: lab().generate("ab", early_exit=0), "early_exit=0.*4 layers; write an int from 1 to 4"),
    "early_exit text": (lambda: lab().generate("ab", early_exit="2"), "early_exit='2'.*write an int from 1 to 4"),
    "early_exit True": (lambda: lab().generate("ab", early_exit=True), "early_exit=True.*write an int from 1 to 4"),
    "early_exit too deep": (lambda: lab().generate("ab", early_exit=9), "early_exit=9.*write an int from 1 to 4"),
    "exit above the cut": (lambda: lab().generate("ab", EarlyExit(3), early_exit=2), "^the target of early_exit=2 has 2 layers: .*exit=3.*from 1 to 2"),
    "assistant exit 0": (lambda: lab().generate("ab", assistant_early_exit=0), "exit=0; write a layer's number"),
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
    "do_sample in words": (
        lambda: lab().generate("ab", do_sample="no"), "generate got do_sample='no'; write do_sample=True or do_sample=False"
    ),
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


@pytest.mark.parametrize(
    "options",
    [{"logits_processor": NoRepeats()}, {"stopping_criteria": Sum()}],
    ids=lambda options: next(iter(options)),
)
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
