"""Faults that were once in labkit, each with the case that showed it."""

import itertools

import families
import numpy as np
import pytest
import torch
from scripted import reference

import labkit
from labkit import Draft, DraftModel, EarlyExit, LabkitError, Plain, PromptLookup, views
from labkit.backbone import Backbone
from labkit.compare import differences
from labkit.drafters.written import read_strategy
from labkit.session import Session

PROMPT = [3, 14, 15, 9, 26, 5]


@pytest.fixture(scope="module")
def lab():
    return labkit.Lab(families.tiny("llama"))


def test_a_substituted_attention_function_runs(lab):
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    calls = []

    def mine(*args, **kwargs):
        calls.append(1)
        return sdpa_attention_forward(*args, **kwargs)

    AttentionInterface.register("mine", mine)
    backbone = lab.backbone.substituted(lambda index, layer: views.with_attention(layer, "mine"))
    session = Session(backbone, 1, 16)
    session.prefill([PROMPT])
    assert len(calls) == backbone.depth


def test_two_strategies_of_one_name_are_two_rows(lab):
    small, other = families.tiny("llama", seed=1, layers=2), families.tiny("llama", seed=2, layers=2)
    table = lab.compare([PROMPT], [DraftModel(small), DraftModel(other)], max_new_tokens=6)
    assert len(table.entries) == 3 and len({entry.name for entry in table.entries}) == 3
    assert len(lab.compare([PROMPT], EarlyExit(2), max_new_tokens=3).entries) == 2


def test_a_difference_is_near_a_tie_only_between_the_two_tokens(lab):
    text = reference(lab.model, PROMPT, 3)
    logits = lab.model(torch.tensor([[*PROMPT, *text[:2]]])).logits[0, -1]
    worst = int(logits.argmin())
    (found,) = differences(lab.backbone, [PROMPT], [text], [[*text[:2], worst]])
    assert not found.near_tie and found.gap == pytest.approx((logits.max() - logits[worst]).item())
    (ended,) = differences(lab.backbone, [PROMPT], [text], [text[:2]])
    assert not ended.near_tie and ended.index == 2


def test_a_changed_model_is_refused():
    other = families.tiny("llama", seed=8)

    def layer(model):
        model.model.layers[2] = other.model.layers[2]

    def head(model):
        model.lm_head = other.lm_head

    changes = (
        layer, head, lambda model: model.register_forward_hook(lambda *_: None), lambda model: model.float(),
        lambda model: model.model.register_forward_hook(lambda *_: None),
    )  # fmt: skip
    for change in changes:
        own = labkit.Lab(families.tiny("llama"))
        own.generate(PROMPT, max_new_tokens=2)
        change(own.model)
        with pytest.raises(LabkitError, match="was changed"):
            own.generate(PROMPT, max_new_tokens=2)
    own, calls = labkit.Lab(families.tiny("llama")), []
    own.model.model.layers[1].register_forward_hook(lambda *_: calls.append(1))
    own.generate(PROMPT, max_new_tokens=4)
    assert len(calls) == 5  # a layer is run whole, and its hooks with it: prefill and four steps


def test_what_generate_would_apply_and_labkit_does_not():
    own = labkit.Lab(families.tiny("llama"))
    own.model.generation_config.min_length = 20
    with pytest.raises(LabkitError, match="has min_length"):
        own.generate(PROMPT, max_new_tokens=2)


@pytest.mark.parametrize(
    "options",
    [{"bad_words_ids": [[100]]}, {"attention_mask": 1}, {"logits_processor": 5}, {"stopping_criteria": [None]},
     {"streamer": 5}],
    ids=str,
)  # fmt: skip
def test_odd_options(lab, options):
    with pytest.raises(LabkitError):
        lab.generate(PROMPT, max_new_tokens=3, **options)


def test_masks_of_any_kind(lab):
    want = lab.generate(PROMPT[1:], max_new_tokens=3).tokens
    mask = [0, 1, 1, 1, 1, 1]
    for given in (mask, [mask], list(map(float, mask)), torch.tensor(mask), np.array([mask])):
        assert lab.generate(PROMPT, attention_mask=given, max_new_tokens=3).tokens == want


@pytest.mark.smollm2
def test_messages_that_do_not_fit(smollm2):
    for message in ({"role": "user"}, {"role": "user", "content": 5}):
        with pytest.raises(LabkitError, match="chat template"):
            smollm2.generate([message], max_new_tokens=2)


@pytest.mark.parametrize(
    "prompt",
    [
        [{"input_ids": [[1, 2], [3, 4]]}, {"input_ids": [[5, 6]]}],
        [None],
        [1.5, 2.0],
        [[None]],
        [{"role": "user"}, 3],
        [object()],
    ],
)
def test_prompts_of_no_kind(lab, prompt):
    with pytest.raises(LabkitError):
        lab.generate(prompt, max_new_tokens=2)


def test_numpy_ids_and_a_list_of_tokenizer_outputs(lab):
    want = lab.generate(PROMPT, max_new_tokens=3).tokens
    assert lab.generate([np.int64(token) for token in PROMPT], max_new_tokens=3).tokens == want
    padded = {"input_ids": [0, *PROMPT], "attention_mask": [0, *[1] * len(PROMPT)]}
    assert lab.generate([padded, {"input_ids": PROMPT}], max_new_tokens=3).tokens == want * 2


def test_padding_without_a_mask_is_refused():
    class Tokenizer:
        pad_token_id = 0

        def decode(self, ids, **kwargs):
            return str(ids)

    padded = labkit.Lab(families.tiny("llama"), Tokenizer())
    ids = torch.tensor([[0, 0, 5], [3, 4, 5]])
    for given in (ids, ids.tolist(), {"input_ids": ids.tolist()}):
        with pytest.raises(LabkitError, match="attention_mask"):
            padded.generate(given, max_new_tokens=2)
    assert padded.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=2).prompts[0] == [0, 0, 5]


def test_neutral_values_do_not_ask_for_sampling(lab):
    want = lab.generate(PROMPT, max_new_tokens=8).tokens
    for neutral in ({"top_p": 1.0}, {"top_k": 0}, {"min_p": 0.0}, {"typical_p": 1.0}, {"temperature": 0}):
        assert lab.generate(PROMPT, max_new_tokens=8, **neutral).tokens == want
    assert lab.generate(PROMPT, max_new_tokens=8, do_sample=False, temperature=1.0).tokens == want


def test_a_strategy_with_an_unhashable_literal():
    with pytest.raises(LabkitError, match="not a literal"):
        read_strategy("EarlyExit({[]: 1})")


def test_a_draft_model_with_too_few_positions(lab):
    short = families.tiny("llama", layers=1)
    short.config.max_position_embeddings = 16
    with pytest.raises(LabkitError, match="16 positions"):
        lab.generate(PROMPT, DraftModel(short), max_new_tokens=20)


def test_sessions_used_by_hand_keep_no_graph(lab):
    session = Session(lab.backbone, 1, 16)
    session.prefill([PROMPT])
    assert not session.verify(Draft.empty(session.tokens)).requires_grad
    assert all(not buffer.requires_grad for buffer in session.cache.buffers())


@pytest.mark.smollm2
def test_a_stream_is_the_text(smollm2):
    """Also characters of several tokens, and one that the end cuts off."""
    prompt = "Emoji: 😀😁😂🤣 漢字かな交じり文"
    for count, drafter in itertools.product((1, 2, 3, 9), (Plain(), PromptLookup())):
        whole = smollm2.generate(prompt, drafter, max_new_tokens=count)
        assert "".join(map(str, smollm2.stream(prompt, drafter, max_new_tokens=count))) == whole.text


def test_probe_needs_no_taps_at_the_embeddings():
    backbone = Backbone(families.tiny("llama"))
    for depth in (0, -2, 9):
        with pytest.raises(LabkitError, match="tap at depth"):
            Session(backbone, 1, 8, (depth,))


def test_a_lookup_takes_the_longest_then_the_latest_match():
    from labkit.drafters.lookup import Index

    for text, ngram, want in (
        ([1, 2, 3, 7, 9, 3, 8, 1, 2, 3], 3, [7, 9]),  # 1 2 3 before the later 3
        ([1, 2, 3, 7, 9, 3, 8, 1, 2, 3], 1, [8, 1]),  # one token: the latest
        ([4, 5, 6, 4, 5, 7, 4, 5], 2, [7, 4]),  # the later of two equal matches
        ([5, 5], 3, [5, 5]),  # into the present: periodically
        ([1, 2, 3], 3, []),
    ):
        assert Index().continuation(text, ngram, 2) == want
        grown = Index()
        for end in range(1, len(text)):
            grown.continuation(text[:end], ngram, 2)
        assert grown.continuation(text, ngram, 2) == want
