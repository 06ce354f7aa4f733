"""What drafts with exits are made of, against full forwards: rules, catching up, adapters, heads, parts of the KV."""

import families
import pytest
import torch
from scripted import reference
from torch import nn
from transformers import DynamicCache

import labkit
from labkit import EarlyExit, LabkitError, TopK, Window
from labkit.attention import top_attention
from labkit.exits import decaying
from labkit.heads import Affine, DraftVocabulary, Kangaroo, load_adapter, save_adapter

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


def shaken(module, scale=0.3):
    generator = torch.Generator().manual_seed(5)
    for parameter in module.parameters():
        parameter.data += scale * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    return module


@torch.inference_mode()
def states(lab, ids):
    """The residual stream at every depth of a plain forward over `ids`, the last one before the norm."""
    out = lab.model(input_ids=torch.tensor([ids]), output_hidden_states=True)
    return out.hidden_states


def drafted(out):
    """(prefix, token, exit) of every drafted token, its prefix with all that was drafted before it."""
    for row, prompt in enumerate(out.prompts):
        text = list(prompt)
        for happened in out.rounds:
            for place, (token, exit) in enumerate(zip(happened.drafted[row], happened.exit[row], strict=True)):
                yield [*text, *happened.drafted[row][:place]], token, exit
            text += happened.tokens[row]


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


# -- adapters and heads ---------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("kind", ["affine", "plain", "Kangaroo", "head", "vocabulary"])
def test_adapters_and_heads_read_exit_states(lab, kind, batch):
    """Each drafted token is what the modules say of a full forward's exit states, all at once."""
    model, exit = lab.backbone, 3
    affine, kangaroo = shaken(Affine(32, torch.float64)), shaken(Kangaroo.like(lab))
    plain = shaken(nn.Linear(32, 32, dtype=torch.float64))
    own = shaken(nn.Sequential(nn.LayerNorm(32, dtype=torch.float64), nn.Linear(32, 61, dtype=torch.float64)))
    part = DraftVocabulary.of(lab, range(1, 61, 3))
    parts, say = {
        "affine": ({"adapter": affine}, lambda h: model.head(affine(h))),
        "plain": ({"adapter": plain}, lambda h: model.head(plain(h))),
        "Kangaroo": ({"adapter": kangaroo}, lambda h: model.logits(kangaroo(h))),
        "head": ({"head": own}, own),
        "vocabulary": ({"head": part}, lambda h: model.head(h)[..., range(1, 61, 3)]),
    }[kind]
    prompts = PROMPTS[:batch]
    out = lab.generate(prompts, EarlyExit(exit, 4, **parts), max_new_tokens=COUNT)
    assert out.tokens == [reference(lab.model, prompt, COUNT) for prompt in prompts]
    for prefix, token, _ in drafted(out):
        with torch.inference_mode():
            best = say(states(lab, prefix)[exit])[0, -1].argmax().item()
        assert token == (range(1, 61, 3)[best] if kind == "vocabulary" else best)


def test_an_adapter_starts_as_the_identity(lab):
    plain = lab.generate(PROMPTS, EarlyExit(3, 4), max_new_tokens=COUNT)
    for adapter in (Affine(32, torch.float64), Kangaroo.like(lab), nn.Identity()):
        out = lab.generate(PROMPTS, EarlyExit(3, 4, adapter=adapter), max_new_tokens=COUNT)
        assert [r.drafted for r in out.rounds] == [r.drafted for r in plain.rounds], adapter


def test_kangaroo_with_a_cache_is_kangaroo_without(lab):
    adapter = shaken(Kangaroo(32, 4, 2, 8, dtype=torch.float64))
    hidden = torch.randn(2, 9, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    whole = adapter(hidden)
    cache = lab.backbone.cache(2, 16)
    for first, last in ((0, 4), (4, 5), (5, 9)):
        at = torch.arange(first, last).expand(2, -1)
        mask = torch.where(torch.arange(16) <= at[:, :, None], 0.0, -1e30).double()[:, None]
        cache.place(at, 16)
        torch.testing.assert_close(adapter(hidden[:, first:last], cache, at, mask), whole[:, first:last])


@pytest.mark.parametrize("acceptance", [labkit.Match(), labkit.Rejection()], ids=["match", "rejection"])
def test_a_part_of_the_vocabulary_under_sampling(lab, acceptance):
    drafter = EarlyExit(3, 4, head=DraftVocabulary.of(lab, range(0, 61, 2)))
    out = lab.generate(PROMPTS, drafter, max_new_tokens=COUNT, temperature=0.9, top_p=0.9, acceptance=acceptance)
    assert all(token % 2 == 0 for r in out.rounds for row in r.drafted for token in row)
    if isinstance(acceptance, labkit.Match):
        assert out.tokens == lab.generate(PROMPTS, max_new_tokens=COUNT, temperature=0.9, top_p=0.9).tokens


@pytest.mark.parametrize(
    "make", [lambda lab: shaken(Affine(32, torch.float64)), lambda lab: shaken(Kangaroo.like(lab))]
)
def test_adapters_on_disk(lab, make, tmp_path):
    adapter = make(lab)
    save_adapter(adapter, tmp_path / "a", lab, exit=3)
    again = load_adapter(tmp_path / "a", lab)
    assert type(again) is type(adapter) and again.exit == 3
    assert all(x.equal(y) for x, y in zip(adapter.parameters(), again.parameters(), strict=True))
    want = lab.generate(PROMPTS, EarlyExit(3, 4, adapter=adapter), max_new_tokens=COUNT)
    out = lab.generate(PROMPTS, EarlyExit(3, 4, adapter=again), max_new_tokens=COUNT)
    assert [r.drafted for r in out.rounds] == [r.drafted for r in want.rounds]
    with pytest.raises(LabkitError, match="trained for exit=3, and this is exit=2"):
        lab.generate(PROMPTS, EarlyExit(2, 4, adapter=again))
    other = labkit.Lab(families.tiny("llama", layers=6, seed=1))
    with pytest.raises(LabkitError, match=r"trained for a target whose head has the hash sha256:\w+, and this one"):
        load_adapter(tmp_path / "a", other)
    assert load_adapter(tmp_path / "a", other, check=False).exit == 3


def test_adapters_that_cannot_be_stored_or_read(lab, tmp_path):
    with pytest.raises(LabkitError, match="got a Linear"):
        save_adapter(nn.Linear(32, 32), tmp_path / "b", lab, exit=3)
    with pytest.raises(LabkitError, match="exit=9"):
        save_adapter(Affine(32), tmp_path / "b", lab, exit=9)
    with pytest.raises(LabkitError, match="width 48, and the target 32"):
        save_adapter(Affine(48), tmp_path / "b", lab, exit=3)
    assert not (tmp_path / "b").exists()
    with pytest.raises(LabkitError, match="holds no adapter that labkit wrote"):
        load_adapter(tmp_path, lab)
    save_adapter(Affine(32), tmp_path / "c", lab, exit=3)
    (tmp_path / "c" / "adapter.safetensors").write_bytes(b"cut short")
    with pytest.raises(LabkitError, match="holds no adapter that labkit wrote"):
        load_adapter(tmp_path / "c", lab)


# -- part of the cache ----------------------------------------------------------------------------------


@torch.inference_mode()
def windowed(lab, prefix, committed, exit, sinks, recent):
    """What layers below `exit` say after `prefix`, whose tokens from `committed`-1 on see sinks and window only."""
    cache = DynamicCache()
    if committed > 1:
        lab.model(input_ids=torch.tensor([prefix[: committed - 1]]), **{lab.backbone._cache_name: cache})
    for at in range(committed - 1, len(prefix)):
        slot = torch.arange(at + 1)
        seen = (slot < sinks) | (slot >= committed - 1 - recent)
        mask = torch.where(seen, 0.0, -1e30).double()[None, None, None]
        out = lab.model(input_ids=torch.tensor([[prefix[at]]]), **{lab.backbone._cache_name: cache}, attention_mask=mask,
                        position_ids=torch.tensor([[at]]), output_hidden_states=True)  # fmt: skip
    return lab.backbone.head(out.hidden_states[exit][:, -1:])[0, -1]


@pytest.mark.parametrize(("sinks", "recent"), [(2, 3), (0, 1), (3, 0), (1, 50)])
def test_a_window_shows_sinks_and_recent_slots(lab, sinks, recent):
    out = lab.generate(PROMPTS, EarlyExit(4, 3, kv=Window(sinks, recent)), max_new_tokens=COUNT)
    assert out.tokens == [reference(lab.model, prompt, COUNT) for prompt in PROMPTS]
    for row, prompt in enumerate(out.prompts):
        text = list(prompt)
        for happened in out.rounds:
            for place, token in enumerate(happened.drafted[row]):
                prefix = [*text, *happened.drafted[row][:place]]
                assert token == windowed(lab, prefix, len(text), 4, sinks, recent).argmax().item()
            text += happened.tokens[row]


def test_a_wide_window_and_many_keys_draft_as_the_whole_cache(lab):
    want = [r.drafted for r in lab.generate(PROMPTS, EarlyExit(4, 3, share=False), max_new_tokens=COUNT).rounds]
    for kv in (Window(0, 64), Window(64, 0), TopK(64)):
        out = lab.generate(PROMPTS, EarlyExit(4, 3, kv=kv), max_new_tokens=COUNT)
        assert [r.drafted for r in out.rounds] == want, kv


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss", "deepseek_v3", "gpt2"])
def test_top_keys_in_other_families(family):
    lab = labkit.Lab(families.tiny(family))
    want = [reference(lab.model, prompt, 8) for prompt in PROMPTS]
    for budget in (1, 4, 64):
        out = lab.generate(PROMPTS, EarlyExit(4, 3, kv=TopK(budget)), max_new_tokens=8)
        assert out.tokens == want
    if family != "gpt_oss":  # its sinks are left out of the draft's softmax
        assert out.acceptance_rate == 1


def test_top_attention_by_brute_force():
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, heads, rows, 8, dtype=torch.float64, generator=generator)
               for heads, rows in ((4, 3), (2, 11), (2, 11)))  # fmt: skip
    mask = torch.zeros(2, 1, 3, 11, dtype=torch.float64)
    mask[:, :, 0, 9:] = mask[:, :, 1, 10:] = torch.finfo(torch.float64).min
    out, _ = top_attention(nn.Module(), q, k, v, mask, budget=4, scaling=0.3)
    for b, h, r in ((b, h, r) for b in range(2) for h in range(4) for r in range(3)):
        scores = (k[b, h // 2] @ q[b, h, r]) * 0.3 + mask[b, 0, r]
        best = sorted(range(11), key=lambda i, scores=scores: -scores[i].item())[:4]
        want = scores[best].softmax(-1) @ v[b, h // 2][best]
        torch.testing.assert_close(out[b, r, h], want)


def test_bytes_read_per_draft_step(lab):
    """Two kv heads of 8 dimensions, keys and values, 8 bytes each: 256 bytes a slot and layer."""
    read = lambda **kw: lab.generate(PROMPTS[2], EarlyExit(4, 3, **kw), max_new_tokens=COUNT, eos_token_id=None)  # noqa: E731
    full = read().settings
    assert full["kv_bytes_per_draft_step"] == full["kv_bytes_of_full"] == 4 * 256 * (12 + COUNT)
    assert read(kv=Window(2, 3)).settings["kv_bytes_per_draft_step"] == 4 * 256 * 6
    assert read(kv=TopK(5)).settings["kv_bytes_per_draft_step"] == 4 * 128 * (12 + COUNT + 5)


# -- bad input ------------------------------------------------------------------------------------------


def rule_of(value):
    return lambda layer, hidden_in, hidden_out, logits_fn, step: value


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda lab: EarlyExit(rule_of(True), 3), r"exit rule .* returned True at layer 1; needed is a tensor of shape \(3,\)"),
        (lambda lab: EarlyExit(rule_of(torch.tensor([True])), 3), r"returned \(1,\), torch.bool .*shape \(3,\)"),
        (lambda lab: EarlyExit(rule_of(torch.ones(3)), 3), r"returned \(3,\), torch.float32"),
        (lambda lab: EarlyExit("deep", 3), "exit='deep'"),
        (lambda lab: EarlyExit(2.5, 3), "exit=2.5"),
        (lambda lab: EarlyExit(2, layers=(1,)), "layers, minimum and maximum"),
        (lambda lab: EarlyExit(labkit.margin(0.3), layers=(1, 9)), "9; the target has depths 1 to 6"),
        (lambda lab: EarlyExit(labkit.margin(0.3), layers=()), r"layers=\(\)"),
        (lambda lab: EarlyExit(labkit.margin(0.3), maximum=7), "maximum=7, but"),
        (lambda lab: EarlyExit(labkit.margin(0.3), minimum=0), "minimum=0, but"),
        (lambda lab: EarlyExit(labkit.margin(0.3), catch_up="soon"), "catch_up='soon'"),
        (lambda lab: EarlyExit(labkit.margin(0.3), adapter=Affine(32)), "belongs to one exit layer"),
        (lambda lab: EarlyExit(2, adapter=Affine(48, torch.float64)), "adapter has width 48, and the target 32"),
        (lambda lab: EarlyExit(2, adapter=Kangaroo(48, 4, dtype=torch.float64)), "width 48, and the target 32"),
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
        (lambda lab: EarlyExit(2, stop=labkit.below(3)), r"below\(3\)"),
        (lambda lab: EarlyExit(labkit.confidence(1.5)), r"confidence\(1.5\)"),
        (lambda lab: EarlyExit(labkit.classifier(3)), r"classifier\(3\)"),
        (lambda lab: EarlyExit(2, head=DraftVocabulary(nn.Linear(32, 3), [1, 1, 2], 61)), "different ids"),
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
    assert EarlyExit(3) == EarlyExit(3) != EarlyExit(3, stop=labkit.below(0.5))
    assert repr(EarlyExit(3, adapter=Affine(8))) == "EarlyExit(exit=3, max_draft=4, share=True, adapter=Affine)"
