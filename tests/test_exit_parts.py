"""Adapters and heads at an exit, and drafts that see part of the cache, against full forwards."""

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
from labkit.attention import top_attention
from labkit.heads import Affine, DraftVocabulary, Kangaroo, load_adapter, save_adapter

PROMPTS = [[3, 14, 15, 9, 26, 5, 35], [8], [58, 9, 7, 9, 3, 2, 3, 8, 4, 6, 2, 6]]
COUNT = 16


@pytest.fixture(scope="module")
def lab():
    return labkit.Lab(families.tiny("llama", layers=6))


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


def test_kangaroo_feeds_the_row_that_it_has_not_seen(lab):
    """After a round that accepts all, the last drafted token has gone through the target only."""
    adapter, prompt = shaken(Kangaroo.like(lab), 0.2), PROMPTS[0]
    out = lab.generate(prompt, EarlyExit(5, 1, adapter=adapter), max_new_tokens=110)
    assert out.accepted > 2
    for prefix, token, _ in drafted(out):
        with torch.inference_mode():
            assert token == lab.backbone.logits(adapter(states(lab, prefix)[5]))[0, -1].argmax().item()


def test_kangaroo_turns_queries_and_keys_as_llama_does(lab):
    adapter = Kangaroo.like(lab)
    x = torch.randn(1, 4, 5, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    at = torch.arange(3, 8)[None]
    want = apply_rotary_pos_emb(x, x, *lab.model.model.rotary_emb(x, at))[0]
    torch.testing.assert_close(adapter._rotated(x, at), want, atol=1e-6, rtol=0)


def test_kangaroo_needs_a_head_of_the_states_width():
    lab = labkit.Lab(families.tiny("opt"))
    with pytest.raises(LabkitError, match="head reads width 24"):
        lab.generate(PROMPTS, EarlyExit(2, adapter=Kangaroo.like(lab)))


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


def test_a_part_of_the_vocabulary_is_copied_without_the_target(lab):
    """A copy and a pickle take the norm along, never the model; ids may be made under any default device."""
    with torch.device("meta"):
        head = DraftVocabulary.of(lab, [1, 2, 7])
    hidden = torch.randn(1, 2, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    want = lab.backbone.head(hidden)[..., [1, 2, 7]]
    for made in (head, copy.deepcopy(head), pickle.loads(pickle.dumps(head))):
        torch.testing.assert_close(made(hidden)[..., [1, 2, 7]], want)
        assert made(hidden).softmax(-1)[..., [1, 2, 7]].sum(-1).allclose(torch.ones(1, 2, dtype=torch.float64))
    assert len(pickle.dumps(head)) < 20_000
    assert [name for name, _ in head.named_parameters()] == ["head.1.weight"], "the norm stays the target's"


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
