"""Exit rules and stop rules, against full forwards; and what may be wrong with an exit."""

import copy
import pickle

import families
import pytest
import torch
from scripted import drafted, reference, shaken, states
from torch import nn
from transformers import DynamicCache
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

import labkit
from labkit import EarlyExit, LabkitError, TopK, Window
from labkit.exits import decaying
from labkit.heads import Adapter, Affine, DraftVocabulary, ExitClassifier, Kangaroo, load_adapter, save_adapter

PROMPTS = [[3, 14, 15, 9, 26, 5, 35], [8], [58, 9, 7, 9, 3, 2, 3, 8, 4, 6, 2, 6]]
COUNT = 16
RULES = {
    "confidence": labkit.confidence(0.3),
    "margin": labkit.margin(0.15),
    "saturation": labkit.saturation(0.8),
    "decaying": labkit.confidence(decaying(0.9, 4, 16)),
    "own": lambda layer, hidden_in, hidden_out, logits_fn, step: (step * 7 + layer) % 5 == 0,
}


@pytest.fixture(scope="module")
def lab():
    return labkit.Lab(families.tiny("llama", layers=6))


# -- rules ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("layers", [None, (2, 4)])
def test_a_token_is_read_where_the_rule_fired_and_caught_up_exactly(lab, rule, layers):
    """Alone in its batch, each token is what plain layers, run over the same prefix, say at its exit."""
    exits = set()
    for prompt in PROMPTS:
        out = lab.generate(prompt, EarlyExit(RULES[rule], 4, layers=layers), max_new_tokens=COUNT)
        for prefix, token, exit in drafted(out):
            with torch.inference_mode():
                hidden = states(lab, prefix)
                said = lambda depth, hidden=hidden: lab.backbone.head(hidden[depth][:, -1:])[:, 0]  # noqa: E731
                step = torch.tensor([len(prefix) - len(prompt)])
                want = 6
                for depth in layers or range(1, 6):
                    before, after = hidden[depth - 1][:, -1], hidden[depth][:, -1]
                    if RULES[rule](depth, before, after, lambda d=depth, said=said: said(d), step)[0]:
                        want = depth
                        break
                assert exit == want
                if exit < 6:  # hidden_states has the last depth behind the norm only
                    assert token == said(exit).argmax(-1).item()
            exits.add(exit)
    assert len(exits) > 1, "the rule must fire at several depths, or this shows nothing"


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("catch_up", ["exact", "project"])
def test_rules_draft_losslessly_in_a_ragged_batch(lab, rule, catch_up):
    drafter = EarlyExit(RULES[rule], 5, catch_up=catch_up)
    out = lab.generate(PROMPTS, drafter, max_new_tokens=COUNT)
    assert out.tokens == [reference(lab.model, prompt, COUNT) for prompt in PROMPTS]
    assert out.settings["host_copies"] > len(out.rounds)


def test_a_row_that_left_early_keeps_its_reading(lab):
    """In a batch a step goes as deep as its deepest row; each row is read where it left, as if it were alone."""
    drafter = EarlyExit(RULES["own"], 3)
    first = lambda out, row: (out.rounds[0].drafted[row][0], out.rounds[0].exit[row][0])  # noqa: E731
    whole = lab.generate(PROMPTS, drafter, max_new_tokens=COUNT)
    alone = [lab.generate(prompt, drafter, max_new_tokens=COUNT) for prompt in PROMPTS]
    assert [first(whole, row) for row in range(3)] == [first(out, 0) for out in alone]
    by_row = lambda layer, hidden_in, hidden_out, logits_fn, step: (  # noqa: E731
        torch.tensor([layer == 4, layer == 2, layer == 3])
    )
    out = lab.generate(PROMPTS, EarlyExit(by_row, 3, layers=(2, 3, 4)), max_new_tokens=COUNT)
    assert out.rounds[0].exit == [[4] * 3, [2] * 3, [3] * 3]
    for row, exit in enumerate((4, 2, 3)):
        want = lab.generate(PROMPTS[row], EarlyExit(exit, 1), max_new_tokens=2).rounds[0].drafted[0][0]
        assert out.rounds[0].drafted[row][0] == want


def test_projection_is_cheaper_and_hands_over_at_the_shallowest_exit(lab, monkeypatch):
    """Row 0 leaves at 2, row 1 at 5: exact catch-up runs both through layers 2 to 4, projection holds row 0."""
    deep = lambda layer, hidden_in, hidden_out, logits_fn, step: layer >= torch.where(step % 2 == 0, 2, 5)  # noqa: E731
    seen = {}
    for catch_up in ("exact", "project"):
        partials = []
        verify = labkit.Session.verify
        monkeypatch.setattr(
            labkit.Session,
            "verify",
            lambda self, draft, partials=partials, verify=verify: (
                partials.append((draft.partial.depth, draft.partial.rows)) or verify(self, draft)
            ),
        )
        out = lab.generate(PROMPTS[0], EarlyExit(deep, 2, catch_up=catch_up, layers=(2, 5)), max_new_tokens=COUNT)
        monkeypatch.undo()
        seen[catch_up] = partials[0]
        assert out.rounds[0].exit == [[2, 5]]
        assert out.tokens == [reference(lab.model, PROMPTS[0], COUNT)]
    assert seen == {"exact": (5, 2), "project": (2, 2)}


@torch.inference_mode()
def test_projected_states_are_keys_and_values_of_the_layers_that_were_left_out(lab):
    """Row 0 leaves at 2; row 1 goes to 5 and meets, in layers 2 to 4, what those make of row 0's exit state."""
    deep = lambda layer, hidden_in, hidden_out, logits_fn, step: layer >= torch.where(step % 2 == 0, 2, 5)  # noqa: E731
    short, prompt = [copy.deepcopy(lab.model) for _ in range(2)], PROMPTS[0]
    for model, depth in zip(short, (2, 5), strict=True):
        model.model.layers = model.model.layers[:depth]
    cache = DynamicCache()
    step = lambda model, ids: model(  # noqa: E731
        input_ids=torch.tensor([ids]), output_hidden_states=True, **{lab.backbone._cache_name: cache}
    )
    step(short[1], prompt[:-1])
    first = step(short[0], prompt[-1:])
    rotary = lab.model.model.rotary_emb(first.logits, torch.tensor([[len(prompt) - 1]]))
    raw = []
    hook = short[0].model.norm.register_forward_pre_hook(lambda module, inputs: raw.append(inputs[0]))
    step_cache, cache = cache, DynamicCache()
    step(short[0], prompt)
    hook.remove()
    cache, state = step_cache, raw[0][:, -1:]
    for index in range(2, 5):
        layer = lab.model.model.layers[index]
        x = layer.input_layernorm(state)
        k, v = (part(x).view(1, 1, 2, 8).transpose(1, 2) for part in (layer.self_attn.k_proj, layer.self_attn.v_proj))
        cache.update(apply_rotary_pos_emb(k, k, *rotary)[0], v, index)
    drafted = [first.logits[0, -1].argmax().item()]
    drafted.append(step(short[1], drafted).logits[0, -1].argmax().item())
    out = lab.generate(prompt, EarlyExit(deep, 2, catch_up="project", layers=(2, 5)), max_new_tokens=COUNT)
    exact = lab.generate(prompt, EarlyExit(deep, 2, layers=(2, 5)), max_new_tokens=COUNT)
    assert out.rounds[0].drafted == [drafted] != exact.rounds[0].drafted


def test_projection_on_a_target_that_exits_early_asks_no_rule(lab):
    """What an overtaken row leaves in the layers above is written there, not decoded by the lossy target's own exit."""
    fresh = labkit.Lab(lab.model)
    target = fresh.backbone.exiting(labkit.confidence(0.4))
    assert target.holding() is fresh.backbone.holding()


def test_minimum_maximum_and_layers(lab):
    always = lambda layer, hidden_in, hidden_out, logits_fn, step: torch.ones_like(step, dtype=torch.bool)  # noqa: E731
    never = lambda layer, hidden_in, hidden_out, logits_fn, step: torch.zeros_like(step, dtype=torch.bool)  # noqa: E731
    exits = lambda **kw: {e for r in lab.generate(PROMPTS[0], **kw).rounds for e in r.exit[0]}  # noqa: E731
    assert exits(drafter=EarlyExit(always, 2)) == {1}
    assert exits(drafter=EarlyExit(always, 2, minimum=3)) == {3}
    assert exits(drafter=EarlyExit(always, 2, layers=(2, 4))) == {2}
    assert exits(drafter=EarlyExit(never, 2, maximum=4)) == {4}
    assert exits(drafter=EarlyExit(never, 2)) == {6}
    assert lab.generate(PROMPTS[0], EarlyExit(never, 3)).acceptance_rate == 1.0


def test_a_head_is_called_only_where_a_rule_asks(lab, monkeypatch):
    calls = []
    head = lab.backbone.head
    monkeypatch.setattr(lab.backbone, "head", lambda hidden: calls.append(1) or head(hidden))
    out = lab.generate(PROMPTS[0], EarlyExit(labkit.saturation(0.8), 3), max_new_tokens=COUNT)
    assert len(calls) == out.drafted
    calls.clear()
    out = lab.generate(PROMPTS[0], EarlyExit(labkit.confidence(0.3), 3), max_new_tokens=COUNT)
    tests = sum(min(e, 6) for r in out.rounds for e in r.exit[0])
    assert len(calls) == tests, "the test that fired has the logits that are drawn from"


def test_classifier(lab):
    module = shaken(nn.Linear(32, 1, dtype=torch.float64))
    out = lab.generate(PROMPTS, EarlyExit(labkit.classifier(module, 0.5), 3), max_new_tokens=COUNT)
    assert out.tokens == [reference(lab.model, prompt, COUNT) for prompt in PROMPTS]
    assert len({e for r in out.rounds for row in r.exit for e in row}) > 1


def test_decaying_threshold():
    bar = decaying(0.8, 4, 10)(torch.tensor([0, 10]))
    assert torch.allclose(bar.double(), torch.tensor([0.82, 0.72 + 0.1 * 2.718281828**-4]).double(), atol=1e-6)


# -- stop rules -----------------------------------------------------------------------------------------


def test_below_ends_a_draft_behind_the_unsure_token(lab):
    drafter = EarlyExit(3, 5, stop=labkit.below(0.5))
    out = lab.generate(PROMPTS, drafter, max_new_tokens=COUNT)
    assert out.tokens == [reference(lab.model, prompt, COUNT) for prompt in PROMPTS]
    room = [COUNT] * 3
    lengths = set()
    for happened in out.rounds:
        for row, q in enumerate(happened.q):
            if not happened.tokens[row]:
                continue
            assert all(x >= 0.5 for x in q[:-1]), "only the last token of a draft may be unsure"
            lengths.add(len(q))
            room[row] -= len(happened.tokens[row])
    assert len(lengths) > 2
    full = lab.generate(PROMPTS, EarlyExit(3, 5), max_new_tokens=COUNT)
    assert out.drafted < full.drafted
    assert out.settings["host_copies"] > len(out.rounds)
    assert full.settings["host_copies"] == len(full.rounds)


def test_a_stop_rule_of_ones_own(lab):
    two = lambda drawn, level: torch.full_like(drawn.token, level >= 1, dtype=torch.bool)  # noqa: E731
    out = lab.generate(PROMPTS, EarlyExit(3, 5, stop=two), max_new_tokens=COUNT)
    assert max(len(row) for r in out.rounds for row in r.drafted) == 2
    out = lab.generate(PROMPTS[2], labkit.DraftModel(lab, 5, stop=two), max_new_tokens=COUNT)
    assert max(len(row) for r in out.rounds for row in r.drafted) == 2 and out.acceptance_rate == 1
    for wrong in (lambda drawn, level: True, lambda drawn, level: drawn.q, lambda drawn, level: torch.tensor([True])):
        with pytest.raises(LabkitError, match=r"stop rule .* returned .*needed is a tensor of shape \(3,\)"):
            lab.generate(PROMPTS, EarlyExit(3, 5, stop=wrong), max_new_tokens=COUNT)


def scribble(drawn, level):
    """Writes into all that it is shown."""
    for part in (drawn.token, drawn.q, drawn.probs):
        if part is not None:
            part.zero_()
    return torch.zeros_like(drawn.token, dtype=torch.bool)


@pytest.mark.parametrize("make", [
    lambda stop: EarlyExit(3, 4, stop=stop), lambda stop: labkit.Until(stop, labkit.PromptLookup(2, 4)),
    lambda stop: labkit.Until(stop, EarlyExit(3, 4)), lambda stop: labkit.SkipLayers((1,), stop=stop),
], ids=["exit", "lookup", "until", "skip"])  # fmt: skip
@pytest.mark.parametrize(
    "options", [{}, {"temperature": 0.8, "acceptance": labkit.Rejection()}], ids=["greedy", "drawn"]
)
def test_a_stop_rule_that_writes_changes_nothing(lab, make, options):
    quiet = lambda drawn, level: torch.zeros_like(drawn.token, dtype=torch.bool)  # noqa: E731
    want, out = (lab.generate(PROMPTS, make(rule), max_new_tokens=COUNT, **options) for rule in (quiet, scribble))
    for one, other in zip(want.rounds, out.rounds, strict=True):
        assert (one.drafted, one.tokens, one.q) == (other.drafted, other.tokens, other.q)


def test_an_exit_rule_that_writes_changes_nothing(lab):
    def scribbles(layer, hidden_in, hidden_out, logits_fn, step):
        hidden_in.zero_()
        hidden_out.zero_()
        return step % 2 == 0

    even = lambda layer, hidden_in, hidden_out, logits_fn, step: step % 2 == 0  # noqa: E731
    out = lab.generate(PROMPTS, EarlyExit(scribbles, 3), max_new_tokens=COUNT)
    assert out.tokens == [reference(lab.model, prompt, COUNT) for prompt in PROMPTS]
    want, out = (lab.generate(PROMPTS, early_exit=rule, max_new_tokens=COUNT) for rule in (even, scribbles))
    assert out.tokens == want.tokens


# -- bad input ------------------------------------------------------------------------------------------


class Widthless(Adapter):
    def forward(self, hidden, cache=None, positions=None, mask=None):
        return hidden


def rule_of(value):
    return lambda layer, hidden_in, hidden_out, logits_fn, step: value


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda lab: EarlyExit(rule_of(True), 3), r"exit rule .* returned True at layer 1; needed is a tensor of shape \(3,\)"),
        (lambda lab: EarlyExit(rule_of(torch.tensor([True])), 3), r"returned \(1,\), torch.bool .*shape \(3,\)"),
        (lambda lab: EarlyExit(rule_of(torch.ones(3)), 3), r"returned \(3,\), torch.float32"),
        (lambda lab: EarlyExit(lambda layer: True), r"exit=.*cannot be called with \(layer, hidden_in, .*write a layer's"),
        (lambda lab: EarlyExit(2, stop=lambda drawn: None), r"stop=.*cannot be called with \(drawn, level\): too many"),
        (lambda lab: labkit.Until(lambda: None, EarlyExit(2)), r"stop=.*cannot be called with \(drawn, level\)"),
        (lambda lab: EarlyExit(labkit.confidence(lambda: 0.5)), r"confidence's threshold=.*with \(step\).*decaying"),
        (lambda lab: EarlyExit(labkit.confidence(lambda step: "0.5")), r"returned '0.5'; needed is .*each row: \(3,\)"),
        (lambda lab: EarlyExit(labkit.margin(lambda step: None)), "threshold .* returned None; needed is a number"),
        (lambda lab: EarlyExit(labkit.saturation(lambda step: step[:1])), r"returned \(1,\), torch.int64"),
        (lambda lab: EarlyExit(labkit.confidence(decaying)), r"got decaying\(start=tensor.*write decaying\(0.9"),
        (lambda lab: decaying(0.5, length=0), r"got decaying\(start=0.5, rate=4.0, length=0\).*length above 0; write"),
        (lambda lab: decaying("0.5"), "start='0.5'.*write decaying"),
        (lambda lab: decaying(0.5, float("nan")), "rate=nan.*write decaying"),
        (lambda lab: decaying(float("nan")), "start=nan.*write decaying"),
        (lambda lab: Kangaroo(32, 0), "Kangaroo got heads=0; it must be an int of at least 1$"),
        (lambda lab: Kangaroo(32, 4, 0), "Kangaroo got kv_heads=0"),
        (lambda lab: Kangaroo(32, 4, head_dim=0), "Kangaroo got head_dim=0"),
        (lambda lab: Kangaroo(32, 64), "head_dim=0; kv_heads must divide heads"),
        (lambda lab: Kangaroo("32", 4), "Kangaroo got width='32'"),
        (lambda lab: Affine(0), "Affine got width=0; it must be an int of at least 1$"),
        (lambda lab: Affine(-1), "Affine got width=-1"),
        (lambda lab: ExitClassifier(0), "ExitClassifier got width=0"),
        (lambda lab: EarlyExit(2, share="no"), "EarlyExit got share='no'; write share=True or share=False"),
        (lambda lab: EarlyExit(2, share=None), "share=None; write"),
        (lambda lab: EarlyExit(2, 0), "max_draft=0; .*at least 1; Plain"),
        (lambda lab: EarlyExit(2, max_draft="4"), "max_draft='4'; it must be an int of at least 1$"),
        (lambda lab: EarlyExit(2, kv=TopK(0)), "budget=0; it must be an int of at least 1$"),
        (lambda lab: EarlyExit("deep", 3), "exit='deep'"),
        (lambda lab: EarlyExit(2.5, 3), "exit=2.5"),
        (lambda lab: EarlyExit(2, layers=(1,)), "layers, minimum and maximum"),
        (lambda lab: EarlyExit(labkit.margin(0.3), layers=(1, 9)), "9; the target has depths 1 to 6"),
        (lambda lab: EarlyExit(labkit.margin(0.3), layers=()), r"layers=\(\)"),
        (lambda lab: EarlyExit(labkit.margin(0.3), maximum=7), "maximum=7, but"),
        (lambda lab: EarlyExit(labkit.margin(0.3), minimum=0), "minimum=0, but"),
        (lambda lab: EarlyExit(labkit.margin(0.3), minimum=5, maximum=3), "never tested: minimum=5, maximum=3 "),
        (lambda lab: EarlyExit(labkit.margin(0.3), layers=(1, 2), minimum=3), r"minimum=3, maximum=6 and layers=\(1, 2\)"),
        (lambda lab: EarlyExit(labkit.margin(0.3), layers=(5,), maximum=4), r"minimum=1, maximum=4 and layers=\(5,\)"),
        (lambda lab: EarlyExit(2, catch_up="project"), "catch_up"),
        (lambda lab: EarlyExit(None), "exit=None; write a layer's number, or a rule such as"),
        (lambda lab: EarlyExit(True), "exit=True; write a layer's number, or a rule such as"),
        (lambda lab: EarlyExit(labkit.margin(0.3), catch_up="soon"), "catch_up='soon'"),
        (lambda lab: EarlyExit(labkit.margin(0.3), adapter=Affine(32)), "belongs to one exit layer"),
        (lambda lab: EarlyExit(2, adapter=Affine(48, torch.float64)), "adapter has width 48, and the target 32"),
        (lambda lab: EarlyExit(2, adapter=Kangaroo(48, 4, dtype=torch.float64)), "width 48, and the target 32"),
        (lambda lab: EarlyExit(2, adapter=Affine(32)), "Affine does not take .* width 32, torch.float64, on cpu"),
        (lambda lab: EarlyExit(2, adapter=Affine(32, torch.float64, "meta")), "Affine does not take .* on cpu"),
        (lambda lab: EarlyExit(2, adapter=Kangaroo(32, 4)), "Kangaroo does not take .* torch.float64, on cpu"),
        (lambda lab: EarlyExit(2, adapter=Widthless()), "Widthless .* no width"),
        (lambda lab: EarlyExit(2, adapter=nn.Linear(48, 32)), "does not take an exit state"),
        (lambda lab: EarlyExit(2, adapter=nn.Linear(32, 16, dtype=torch.float64)), r"gave \(1, 1, 16\)"),
        (lambda lab: EarlyExit(2, adapter=lambda h: h), "give an nn.Module"),
        (lambda lab: EarlyExit(2, head=nn.Linear(32, 40, dtype=torch.float64)), "says 40 tokens, and the target has 61"),
        (lambda lab: EarlyExit(2, head=nn.Linear(32, 61)), "does not take an exit state"),
        (lambda lab: EarlyExit(2, kv=5), "kv=5"),
        (lambda lab: EarlyExit(2, kv=Window(0, 0)), "at least one slot"),
        (lambda lab: EarlyExit(2, kv=Window(-1, 4)), "sinks=-1"),
        (lambda lab: EarlyExit(2, kv=TopK(0)), "budget=0"),
        (lambda lab: EarlyExit(2, stop=0.5), "stop=0.5"),
        (lambda lab: EarlyExit(2, stop=labkit.below), "stop=<class .*below.*write a rule such as"),
        (lambda lab: labkit.Until(labkit.below, EarlyExit(2)), "stop=<class .*below.*write a rule such as"),
        (lambda lab: EarlyExit(2, stop=labkit.below(3)), r"below\(3\)"),
        (lambda lab: EarlyExit(labkit.confidence(1.5)), r"confidence\(1.5\)"),
        (lambda lab: EarlyExit(labkit.classifier(3)), r"classifier\(3\)"),
        (lambda lab: EarlyExit(labkit.classifier(nn.Linear(48, 1))), r"Linear does not take \(3, 32\), torch.float64"),
        (lambda lab: EarlyExit(labkit.classifier(nn.Linear(32, 2).double())), r"Linear gave \(3, 2\) for \(3, 32\)"),
        (lambda lab: EarlyExit(2, head=DraftVocabulary(nn.Linear(32, 3), [1, 1, 2], 61)), "different ids"),
        (lambda lab: EarlyExit(2, head=DraftVocabulary(nn.Linear(32, 3), [1.5, 2.5, 3], 61)), "torch.float32; .*ids"),
        (lambda lab: EarlyExit(2, head=DraftVocabulary(nn.Linear(32, 2), [True, False], 61)), "torch.bool; .*ids"),
        (lambda lab: EarlyExit(2, head=DraftVocabulary(nn.Linear(32, 3), "abc", 61)), "tokens='abc'"),
        (lambda lab: EarlyExit(2, head=DraftVocabulary(lambda h: h, [1, 2], 61)), "head=<function"),
        (lambda lab: EarlyExit(2, head=DraftVocabulary(nn.Linear(32, 3), [1, 99, 2], 61)), "from 0 to 60"),
        (lambda lab: EarlyExit(2, head=DraftVocabulary(nn.Linear(32, 3, dtype=torch.float64), [1, 2], 61)), "the map has 2"),
    ],
)  # fmt: skip
def test_bad_input(lab, make, message):
    before = {name: x.clone() for name, x in lab.model.state_dict().items()}
    with pytest.raises(LabkitError, match=message):
        lab.generate(PROMPTS, make(lab), max_new_tokens=4)
    assert all(x.equal(before[name]) for name, x in lab.model.state_dict().items())
    assert lab.generate(PROMPTS[0], max_new_tokens=4).tokens == [reference(lab.model, PROMPTS[0], 4)]


def test_settings_print_as_written():
    drafter = EarlyExit(labkit.confidence(0.9), 4, layers=(8, 16), stop=labkit.below(0.5), kv=Window(4, 60))
    assert repr(drafter) == (
        "EarlyExit(exit=confidence(threshold=0.9), max_draft=4, share=True, stop=below(confidence=0.5), "
        "kv=Window(sinks=4, recent=60), layers=(8, 16))"
    )
    assert repr(EarlyExit(labkit.margin(0.5), maximum=1)).endswith("maximum=1)"), "1 equals a minimum's default"
    assert EarlyExit(3) == EarlyExit(3) != EarlyExit(3, stop=labkit.below(0.5))
    assert repr(EarlyExit(3, adapter=Affine(8))) == "EarlyExit(exit=3, max_draft=4, share=True, adapter=Affine)"


@pytest.mark.parametrize("again", [copy.copy, copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
def test_a_copy_equals_the_original(again):
    for drafter in (EarlyExit(2), EarlyExit(labkit.margin(0.5), 3, kv=Window(4, 60), stop=labkit.below(0.5))):
        assert again(drafter) == drafter and repr(again(drafter)) == repr(drafter)


@pytest.mark.parametrize(
    "call",
    [
        lambda lab: labkit.agreement(lab, PROMPTS, 2),
        lambda lab: labkit.calibrate(lab, PROMPTS, labkit.confidence, [0.9], target=0.8),
        lambda lab: labkit.search_skips(lab, PROMPTS),
        lambda lab: DraftVocabulary.of(lab, [1, 2]),
        lambda lab: Kangaroo.like(lab),
        lambda lab: labkit.head_accuracies(lab, None, ["a"]),
        lambda lab: load_adapter("no-folder", lab),
        lambda lab: save_adapter(Affine(32), "no-folder", lab, 2),
        lambda lab: labkit.load_heads(".", lab),
    ],
)
def test_what_is_no_lab(lab, call):
    for wrong, name in ((None, "None"), ("tiny", "'tiny'"), (lab.model, "a LlamaForCausalLM"), ([lab], "a list")):
        with pytest.raises(
            LabkitError, match=rf"^got {name} for a Lab; write \S+\(.*lab.* with lab = labkit.load\(name"
        ):
            call(wrong)
