"""Faults that were once in labkit, each with the case that showed it."""

import dataclasses
import itertools
from dataclasses import dataclass

import families
import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from scripted import Replay, reference
from transformers import LogitsProcessor

import labkit
from labkit import Draft, Drafter, DraftModel, EarlyExit, LabkitError, Plain, PromptLookup, views
from labkit.backbone import Backbone
from labkit.compare import differences
from labkit.drafters.written import read_strategy
from labkit.session import Session
from labkit.view.picture import demo_picture, draw_legend, pieces

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


@dataclass(frozen=True)
class TooMany(Drafter):
    @property
    def nodes(self):
        return 1

    def propose(self, state, context):
        return Draft.chain(context.tokens[:, :5])


def test_a_draft_larger_than_promised(lab):
    with pytest.raises(LabkitError, match=r"proposed 5 nodes.*1 at most"):
        lab.generate(PROMPT, TooMany(), max_new_tokens=8)


def spoilt(**changes):
    """A drafter whose two-node chain has some parts replaced."""

    class Spoilt(Drafter):
        nodes = 2

        def propose(self, state, context):
            draft = Draft.chain(context.tokens[:, :2])
            for name, value in changes.items():  # past the checks of shapes that tests run with
                object.__setattr__(draft, name, value(draft) if callable(value) else value)
            return draft

    return Spoilt()


SPOILT = {
    "int32 tokens": {"tokens": lambda d: d.tokens.int()},
    "valid as int": {"valid": lambda d: d.valid.long()},
    "parents short": {"parents": lambda d: d.parents[:, :1]},
    "q of another shape": {"q": lambda d: torch.zeros(1)},
    "probs of another vocabulary": {"probs": lambda d: torch.zeros(1, 2, 7)},
    "depth 0": {"depth": 0},
    "depth 9": {"depth": 9},
}


@pytest.mark.parametrize("fault", SPOILT)
def test_malformed_drafts(lab, fault):
    with pytest.raises(LabkitError, match="Spoilt's draft has"):
        lab.generate(PROMPT, spoilt(**SPOILT[fault]), max_new_tokens=8)


def nodes(*values, kind=torch.long):
    """A part of a draft of two nodes, whose tokens and parents are otherwise right."""
    return torch.tensor([values], dtype=kind)


TREE = {"is_chain": False}
VALUES = {
    "an id too large": ({"tokens": nodes(3, 61)}, "Spoilt's draft has token 61 .*vocabulary has 61 tokens"),
    "a negative id": ({"tokens": nodes(-1, 3)}, "Spoilt's draft has token -1 .*vocabulary has 61 tokens"),
    "an invalid node's id": (
        {"tokens": nodes(3, 99), "valid": nodes(True, False, kind=torch.bool)}, "has token 99 .*valid=False too"),
    "a later parent": ({"parents": nodes(1, -1), **TREE}, r"parents\[0\] = 1; .*-1 .*smaller than 0"),
    "its own parent": ({"parents": nodes(-1, 1), **TREE}, r"parents\[1\] = 1; .*smaller than 1"),
    "a parent of no node": ({"parents": nodes(-1, 40), **TREE}, r"parents\[1\] = 40"),
    "a parent below -1": ({"parents": nodes(-1, -2), **TREE}, r"parents\[1\] = -2"),
    "no chain": ({"parents": nodes(-1, -1)}, r"is_chain=True .*parents \[-1, -1\].*Draft.tree"),
    "too shallow": ({"depth": 1, **TREE}, "depth=1 .*2 levels"),
    "an orphan": ({"valid": nodes(False, True, kind=torch.bool)}, "node 1 valid .*parent 0"),
}  # fmt: skip


@pytest.mark.parametrize("acceptance", [labkit.Match(), labkit.Rejection(), labkit.Typical()], ids=repr)
@pytest.mark.parametrize("fault", VALUES)
def test_values_of_a_draft_that_cannot_be(lab, fault, acceptance):
    """Told from the round's one copy, or from a second one after the failure."""
    changes, message = VALUES[fault]
    with pytest.raises(LabkitError, match=message):
        lab.generate(PROMPT, spoilt(**changes), max_new_tokens=8, acceptance=acceptance)


def test_a_failure_that_is_not_the_drafts_own_is_left_alone(lab, monkeypatch):
    def broken(session, draft):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(labkit.Session, "verify", broken)
    with pytest.raises(RuntimeError, match="out of memory"):
        lab.generate(PROMPT, max_new_tokens=8)


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
    from labkit.drafters.lookup import _Index

    for text, ngram, want in (
        ([1, 2, 3, 7, 9, 3, 8, 1, 2, 3], 3, [7, 9]),  # 1 2 3 before the later 3
        ([1, 2, 3, 7, 9, 3, 8, 1, 2, 3], 1, [8, 1]),  # one token: the latest
        ([4, 5, 6, 4, 5, 7, 4, 5], 2, [7, 4]),  # the later of two equal matches
        ([5, 5], 3, [5, 5]),  # into the present: periodically
        ([1, 2, 3], 3, []),
    ):
        assert _Index().continuation(text, ngram, 2) == want
        grown = _Index()
        for end in range(1, len(text)):
            grown.continuation(text[:end], ngram, 2)
        assert grown.continuation(text, ngram, 2) == want
