"""The user's model is left as it was, after errors too, and the default device plays no part."""

import families
import pytest
import torch
from roster import COUNT, PROMPTS, STRATEGIES, every_strategy, lab_of, texts
from scripted import reference
from transformers import StoppingCriteria

import labkit
from labkit import EarlyExit

pytestmark = pytest.mark.usefixtures("unshaped")

# -- the default device ---------------------------------------------------------------------------------


@every_strategy
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.8, "top_k": 9, "top_p": 0.9, "min_p": 0.01, "typical_p": 0.9},
        {"temperature": 0.8, "acceptance": labkit.Rejection()},
        {"repetition_penalty": 1.3, "min_new_tokens": 4, "eos_token_id": 5, "bad_words_ids": [[7], [1, 2]]},
    ],
    ids=["greedy", "sampled", "rejection", "processors"],
)
def test_the_default_device_plays_no_part(strategy, options):
    drafter = STRATEGIES[strategy](PROMPTS, texts("gemma3"))
    want = lab_of("gemma3").generate(PROMPTS, drafter, max_new_tokens=12, **options).tokens
    fresh = labkit.Lab(families.tiny("gemma3"))
    torch.set_default_device("meta")
    try:
        got = fresh.generate(PROMPTS, drafter, max_new_tokens=12, **options).tokens
    finally:
        torch.set_default_device(None)
    assert got == want


@pytest.mark.parametrize("family", ["llama", "gpt2", "gpt_oss", "gemma2"])
def test_early_exit_on_the_default_device(family):
    lab = labkit.Lab(families.tiny(family))
    torch.set_default_device("meta")
    try:
        out = lab.generate(PROMPTS, EarlyExit(2, 3), max_new_tokens=6, early_exit=3)
    finally:
        torch.set_default_device(None)
    assert out.tokens == lab.generate(PROMPTS, max_new_tokens=6, early_exit=3).tokens


# -- the user's model -----------------------------------------------------------------------------------


def fingerprint(model):
    """Everything of a model that a library could have left changed."""
    state = {name: (x.data_ptr(), x.dtype, x.shape, x._version) for name, x in model.state_dict(keep_vars=True).items()}
    modules = {
        name: (id(m), type(m), m.training, "forward" in vars(m), sorted(m._modules), sorted(vars(m)),
               [len(v) for k, v in sorted(vars(m).items()) if k.endswith("_hooks")],
               id(getattr(m, "config", None)))
        for name, m in model.named_modules()
    }  # fmt: skip
    grads = [p.requires_grad for p in model.parameters()]
    return state, modules, grads, model.config.to_dict(), model.generation_config.to_dict(), id(model.forward.__func__)


class Boom(Exception):
    pass


class RaisingCriterion(StoppingCriteria):
    def __call__(self, input_ids, scores, **kwargs):
        if input_ids.shape[1] > 10:
            raise Boom
        return torch.zeros(1, dtype=torch.bool)


def raising_processor(input_ids, scores):
    if input_ids.shape[1] > 10:
        raise Boom
    return scores


class RaisingDrafter(EarlyExit):
    def propose(self, state, context):
        draft = super().propose(state, context)
        if context.round == 2:
            raise Boom
        return draft


class RaisingStreamer:
    def __init__(self):
        self.count = 0

    def put(self, value):
        self.count += 1
        if self.count == 5:
            raise Boom

    def end(self):
        raise AssertionError("never reached")


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2"])
def test_the_model_is_never_changed(family):
    model = families.tiny(family)
    before = fingerprint(model)
    lab = labkit.Lab(model)
    want = texts(family)
    for strategy in STRATEGIES.values():
        assert lab.generate(PROMPTS, strategy(PROMPTS, want), max_new_tokens=COUNT).tokens == want
        lab.generate(PROMPTS, strategy(PROMPTS, want), max_new_tokens=9, early_exit=3, temperature=1.0)
    assert fingerprint(model) == before
    assert reference(model, PROMPTS[0], COUNT) == want[0]


@every_strategy
@pytest.mark.parametrize(
    "options",
    [
        {"stopping_criteria": [RaisingCriterion()]},
        {"logits_processor": [raising_processor]},
        {"streamer": RaisingStreamer},
        {"drafter": RaisingDrafter(2, 3)},
    ],
    ids=["criterion", "processor", "streamer", "drafter"],
)
def test_nothing_is_left_behind_after_an_error(strategy, options):
    lab, want = lab_of("llama"), texts()
    before = fingerprint(lab.model)
    options = {name: value() if isinstance(value, type) else value for name, value in options.items()}
    drafter = options.pop("drafter", None) or STRATEGIES[strategy](PROMPTS[:1], want[:1])
    with pytest.raises(Boom):
        lab.generate(PROMPTS[0], drafter, max_new_tokens=COUNT, **options)
    assert fingerprint(lab.model) == before
    assert not torch.is_inference_mode_enabled() and torch.is_grad_enabled()
    after = lab.generate(PROMPTS, STRATEGIES[strategy](PROMPTS, want), max_new_tokens=COUNT)
    assert after.tokens == want
