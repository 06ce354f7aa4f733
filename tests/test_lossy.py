"""Lossy decoding against an independent CALM decoder, and agreement against full forwards."""

import families
import pytest
import torch
from calm import COUNT, PROMPTS, RULES, Calm, _labs, always, calm, lab_of, never
from scripted import reference
from test_conformance import STRATEGIES

import labkit
from labkit import agreement


def test_the_reference_without_a_rule_is_the_model():
    model = lab_of().model
    for prompt in PROMPTS:
        assert calm(model, prompt, never, None) == (reference(model, prompt, COUNT), [4] * COUNT)


@pytest.mark.parametrize("name", RULES)
def test_lossy_text_is_calms(name):
    lab, (rule, layers) = lab_of(), RULES[name]
    wanted = [calm(lab.model, prompt, rule, layers) for prompt in PROMPTS]
    depths = {depth for _, exits in wanted for depth in exits}
    assert len(depths) > 1 and any(text != reference(lab.model, p, COUNT) for (text, _), p in zip(wanted, PROMPTS))
    options = dict(early_exit=rule, exit_layers=layers, max_new_tokens=COUNT)
    batch = lab.generate(PROMPTS, **options)
    assert batch.lossless is False
    for row, (text, exits) in enumerate(wanted):
        alone = lab.generate(PROMPTS[row], **options)
        for out, at in ((alone, 0), (batch, row)):
            assert out.tokens[at] == text
            assert [depth for r in out.rounds for depth in r.left[at]] == exits


@pytest.mark.parametrize("family", list(families.FAMILIES))
def test_alone_and_in_a_batch(family, request):
    """Alone, the layers above an exit only write keys and values; in a batch the row goes along, frozen."""
    if family != "llama":
        request.getfixturevalue("unshaped")
    lab = lab_of(family)
    mixed = False
    for rule, layers in ((labkit.confidence(0.4), (1, 2, 3)), (labkit.saturation(0.75), (2, 3))):
        options = dict(early_exit=rule, exit_layers=layers, max_new_tokens=COUNT)
        batch = lab.generate(PROMPTS, **options)
        assert batch.tokens == [lab.generate(prompt, **options).tokens[0] for prompt in PROMPTS]
        mixed |= any(len({row[0] for row in r.left}) > 1 for r in batch.rounds)
    assert mixed


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_draft_for_an_exiting_target_changes_nothing(family, strategy, request):
    if family != "llama":
        request.getfixturevalue("unshaped")
    lab = lab_of(family)
    rule, layers = RULES["margin at two depths"]
    options = dict(early_exit=rule, exit_layers=layers, max_new_tokens=COUNT)
    key = f"{family} exiting"
    if key not in _labs:
        _labs[key] = lab.generate(PROMPTS, **options)
    plain = _labs[key]
    out = lab.generate(PROMPTS, STRATEGIES[strategy](lab.model, plain.tokens), **options)
    assert out.tokens == plain.tokens and out.lossless is False
    left = lambda out: [[d for r in out.rounds for d in r.left[row]] for row in range(3)]  # noqa: E731
    assert left(out) == left(plain) and {d for row in left(out) for d in row} >= {1, 4}


def test_every_row_may_leave_at_once():
    for family in ("llama", "gemma3", "gpt2"):
        lab = lab_of(family)
        out = lab.generate(PROMPTS, early_exit=always, exit_layers=(2,), max_new_tokens=COUNT)
        assert {d for r in out.rounds for row in r.left for d in row} == {2}
    whole = lab.generate(PROMPTS, early_exit=never, max_new_tokens=COUNT)
    assert whole.tokens == lab.generate(PROMPTS, max_new_tokens=COUNT).tokens and whole.lossless is False


# -- agreement ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("exit", [1, 2, 3])
def test_agreement_of_a_cut_by_full_forwards(family, exit):
    """One forward for each position: the full model's text, then the first layers' word for it."""
    lab, prompts = lab_of(family), families.prompts(5)
    found = agreement(lab, prompts, exit, max_new_tokens=COUNT)
    shares = []
    for prompt in prompts:
        text, same = list(prompt), 0
        for _ in range(COUNT):
            out = lab.model(input_ids=torch.tensor([text]), use_cache=False, output_hidden_states=True)
            state = out.hidden_states[exit][:, -1:]
            said = int(lab.backbone.head(state)[0, 0].argmax())
            token = int(out.logits[0, -1].argmax())
            same += said == token
            text.append(token)
        shares.append(same / COUNT)
    assert found.shares == shares and 0 < found.mean < 1
    assert found.depths == [exit] * 5 and found.depth == exit and found.tokens == [COUNT] * 5


@pytest.mark.parametrize("name", RULES)
def test_agreement_of_a_rule_by_calm(name):
    """The reference decoder, led along the full model's text."""
    lab, (rule, layers) = lab_of(), RULES[name]
    found = agreement(lab, PROMPTS, rule, exit_layers=layers, max_new_tokens=COUNT)
    for prompt, share, depth in zip(PROMPTS, found.shares, found.depths):
        text, decoder, said, exits = reference(lab.model, prompt, COUNT), Calm(lab.model), [], []
        depths = [d for d in layers or range(1, 4) if d < 4]
        with torch.inference_mode():
            for position, token in enumerate([*prompt, *text][:-1]):
                new = position - len(prompt) + 1
                logits, left = decoder.token(token, position, rule if new >= 0 else None, depths, new)
                said += [int(logits.argmax())] * (new >= 0)
                exits += [left] * (new >= 0)
        assert share == sum(a == b for a, b in zip(said, text, strict=True)) / COUNT
        assert depth == pytest.approx(sum(exits) / COUNT)
    assert found.depth < 4


def test_agreement_is_whole_where_nothing_is_left_out():
    lab = lab_of()
    for exit in (4, never):
        found = agreement(lab, PROMPTS, exit, max_new_tokens=COUNT)
        assert found.shares == [1.0] * 3 and found.depths == [4.0] * 3
    assert "agreement 1.000 over 3 prompts, read after 4.0 layers" in str(found)


def test_agreement_hears_the_models_own_penalties():
    """What the generation config prescribes holds for the text and for the word compared with it."""
    lab = labkit.Lab(families.tiny("llama"))
    without = lab.generate(PROMPTS, max_new_tokens=COUNT).tokens
    lab.model.generation_config.repetition_penalty = 1.5
    assert lab.generate(PROMPTS, max_new_tokens=COUNT).tokens != without
    assert agreement(lab, PROMPTS, 4, max_new_tokens=COUNT).shares == [1.0] * 3


def test_a_text_of_one_token():
    assert agreement(lab_of(), PROMPTS, 4, max_new_tokens=1).tokens == [1, 1, 1]
