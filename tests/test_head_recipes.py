"""The recipes for heads and exit adapters, on states that are cached once."""

import functools
import json
import shutil

import families
import pytest
import torch
from safetensors.torch import load_file

import labkit
from labkit import EarlyExit, Heads, LabkitError, Medusa, MLPSpeculator, data
from labkit.data import PADDING, Corpus, Document
from labkit.heads import DraftVocabulary, load_adapter, load_draft_head
from labkit.heads.files import target_head
from labkit.session import HEAD_INPUT
from labkit.training.adapters import exit_adapter
from labkit.training.heads import HeadsLoss, judge_heads
from labkit.training.medusa import medusa
from labkit.training.mlp_speculator import mlp_speculator
from labkit.training.states import OwnRows, TextRows, cache_states

pytestmark = pytest.mark.usefixtures("few_objects")
TEXT = "".join(f"line {n}: the quick brown fox jumps over the lazy dog and runs away. " for n in range(12))
CORPUS = Corpus(tuple(Document(f"file-{n}", TEXT[n:]) for n in range(10)))
SMALL = dict(
    corpus=CORPUS, held_out=0.3, own_rows=12, eval_rows=4, length=24, prompt_tokens=6, new_tokens=10, batch=4,
    eval_every=100, progress=False,
)  # fmt: skip


@functools.cache
def lab(seed=0):
    tokenizer = data.train_tokenizer(CORPUS, 280)
    return labkit.Lab(families.tiny("llama", vocab=280, seed=seed, dtype=torch.float32), tokenizer)


def rows(prompts=((3, 5, 9), (4, 4), (7, 8, 9, 10, 11)), new=9):
    return OwnRows(tuple(prompts), new, 0.0)


def test_cached_states_are_those_of_a_forward(tmp_path):
    states = cache_states(lab(), rows(), tmp_path / "s", (2, HEAD_INPUT), batch=2, dtype=torch.float32)
    assert len(states) == 3
    for at, prompt in enumerate(rows().prompts):
        row = states[at]
        ids = row["tokens"][row["tokens"] != PADDING].long()
        text = lab().generate(list(prompt), max_new_tokens=9)
        assert ids.tolist() == [*prompt, *text.tokens[0]] and row["begin"] == len(prompt)
        seen = lab().model.model(ids[None], output_hidden_states=True).hidden_states
        torch.testing.assert_close(row["depth_2"][: len(ids) - 1], seen[2][0, :-1], atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(row["depth_-1"][: len(ids) - 1], seen[-1][0, :-1], atol=1e-5, rtol=1e-4)


def test_a_cache_goes_on_and_refuses_others(tmp_path, monkeypatch):
    monkeypatch.setattr("labkit.training.states.SHARD_ROWS", 2)
    text = TextRows(torch.arange(40).view(5, 8))
    cache_states(lab(), text, tmp_path, (1,))
    shards = sorted(tmp_path.glob("*.safetensors"))
    assert len(shards) == 3
    before = [shard.read_bytes() for shard in shards]
    shards[1].write_bytes(before[1][:100])
    stamp = shards[0].stat().st_mtime_ns
    states = cache_states(lab(), text, tmp_path, (1,))
    assert [shard.read_bytes() for shard in shards] == before and shards[0].stat().st_mtime_ns == stamp
    assert torch.equal(torch.stack([states[i]["tokens"] for i in range(5)]).long(), text.tokens)
    for other, source, depths in ((lab(1), text, (1,)), (lab(), TextRows(text.tokens + 1), (1,)), (lab(), text, (2,))):
        with pytest.raises(LabkitError, match=r"holds states of another (target|source|depths)"):
            cache_states(other, source, tmp_path, depths)


def counting(length=12, count=6):
    """Rows that count on, with states that tell the token: what heads can learn whole."""
    tokens = (torch.arange(length) + 3 * torch.arange(count)[:, None]) % 17
    return tokens, torch.nn.functional.one_hot(tokens[:, :-1], 17).float()


def head_kinds():
    torch.manual_seed(0)
    reduced = DraftVocabulary(torch.nn.Linear(17, 17, bias=False), list(range(17)), 17).requires_grad_(False)
    torch.nn.init.eye_(reduced.head.weight)
    return {
        "mlp": MLPSpeculator(17, 17, 3, 24), "tied": MLPSpeculator(17, 17, 3, 24, tie=True, scale_input=True),
        "V1": Medusa(17, 17, 3), "part of the vocabulary": Medusa(17, 17, 3, 2, base=reduced),
    }  # fmt: skip


@pytest.mark.parametrize("kind", head_kinds())
def test_heads_learn_a_sequence_whole(kind):
    """Labels are shifted right: each head reaches all of it. Every parameter of a head gets a gradient."""
    heads = head_kinds()[kind].train()
    loss, (tokens, state) = HeadsLoss(heads), counting()
    learn = torch.optim.AdamW(heads.parameters(), 0.02)
    for step in range(250):
        learn.zero_grad()
        found = loss(tokens=tokens, **{"depth_-1": state})["loss"]
        found.backward()
        assert step or all(p.grad is not None and p.grad.abs().sum() > 0 for p in heads.parameters())
        learn.step()
    heads.eval()
    given, current = tokens.clamp(min=0), heads.start(state)
    for head in range(3):
        places = given.shape[1] - head - 2
        current = heads.step(head, current[:, :places], given[:, 1 + head : 1 + head + places, None])
        assert torch.equal(heads.logits(head, current).argmax(-1), tokens[:, head + 2 : head + 2 + places]), head


def test_padding_teaches_nothing():
    heads, (tokens, state) = head_kinds()["mlp"], counting()
    padded = torch.cat([tokens, torch.full((6, 3), PADDING)], 1)
    longer = torch.cat([state, torch.randn(6, 3, 17)], 1)
    found = [HeadsLoss(heads)(tokens=t, **{"depth_-1": s})["loss"] for t, s in ((tokens, state), (padded, longer))]
    torch.testing.assert_close(*found)


def test_judged_rounds_are_those_of_decoding(tmp_path):
    """tokens_per_round and alpha of a replay equal those of real runs over the same greedy texts."""
    prompts, new = rows().prompts, 40
    states = cache_states(lab(), rows(prompts, new), tmp_path, (HEAD_INPUT,), dtype=torch.float32)
    torch.manual_seed(1)
    heads = Medusa(lab().backbone.head_width, 280, 3, base=target_head(lab().backbone)).eval()
    for parameter in heads.parameters():
        torch.nn.init.normal_(parameter, 0.0, 0.02)
    assert all((states[i]["tokens"] != 0).all() for i in range(3))  # none ends early
    found = judge_heads(heads, states, lab())
    outs = [lab().generate(list(p), Heads(heads, top_k=(1, 1, 1)), max_new_tokens=new) for p in prompts]
    rounds = [r for out in outs for r in out.rounds]
    accepted = sum(r.accepted[0] for r in rounds)
    rejected = sum(r.accepted[0] < len(r.drafted[0]) for r in rounds)
    assert accepted and rejected
    assert found["tokens_per_round"] == round(1 + accepted / len(rounds), 4)
    assert found["alpha"] == round(accepted / (accepted + rejected), 4)


@pytest.mark.parametrize("make, how", [(mlp_speculator, {"inner": 16}), (medusa, {}), (medusa, {"draft_vocab": 90}), (medusa, {"version": 1})])  # fmt: skip
def test_a_recipe_for_heads(tmp_path, make, how):
    done = make(
        lab(), tmp_path / "run", text_steps=12, own_steps=0, text_rows=20, lr=0.02, dtype="float32", **SMALL, **how
    )
    losses = [row["loss"] for row in done.curves if "loss" in row]
    assert {"head_1", "alpha", "tokens_per_round"} <= set(done.last) and losses
    heads = labkit.load_heads(done.result, lab())
    out = lab().generate("the quick", Heads(heads), max_new_tokens=10)
    assert out.tokens == lab().generate("the quick", max_new_tokens=10).tokens
    assert all(p.requires_grad for p in lab().model.parameters()) and lab().model.model.embed_tokens.weight.grad is None
    with pytest.raises(LabkitError, match="made for a target"):
        labkit.load_heads(done.result, lab(1))


def test_two_stages_are_one_run_however_often_it_stopped(tmp_path):
    """A second stage starts from what the first one wrote, be that now, from a checkpoint, or without any."""

    def run(folder, own):
        how = dict(text_steps=6, own_steps=own, text_rows=20, inner=16, lr=0.02, dtype="float32")
        return mlp_speculator(lab(), tmp_path / folder, **SMALL, **how)

    whole = run("whole", 5)
    run("parts", 5)
    shutil.rmtree(tmp_path / "parts" / "stage2")
    again = run("parts", 5)
    shutil.rmtree(tmp_path / "parts" / "stage2")
    shutil.rmtree(tmp_path / "parts" / "stage1" / "checkpoints")
    bare = run("parts", 5)
    first = load_file(tmp_path / "whole" / "stage1" / "trained" / "model.safetensors")
    made = [load_file(done.result / "model.safetensors") for done in (whole, again, bare)]
    assert any(not torch.equal(first[name], made[0][name]) for name in first)
    for other in made[1:]:
        assert all(torch.equal(made[0][name], other[name]) for name in made[0])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("how", [{"kind": "kangaroo"}, {"kind": "affine", "draft_vocab": 80}, {"kind": "identity", "draft_vocab": 60}, {"kind": "classifier"}])  # fmt: skip
def test_a_recipe_for_an_exit(tmp_path, how, dtype):
    done = exit_adapter(lab(), tmp_path / "run", exit=2, steps=15, lr=0.01, dtype=dtype, **SMALL, **how)
    assert "agree" in done.last and "bare" in done.last
    made = load_adapter(done.result, lab())
    assert made.exit == 2
    head = load_draft_head(done.result, lab()) if "draft_vocab" in how else None
    if how["kind"] == "classifier":
        drafter = EarlyExit(labkit.classifier(made, 0.5), layers=(2, 3))
    else:
        drafter = EarlyExit(2, adapter=made, head=head)
    out = lab().generate("the quick", drafter, max_new_tokens=10)
    assert out.tokens == lab().generate("the quick", max_new_tokens=10).tokens
    if head is None:
        with pytest.raises(LabkitError, match="without a draft head; leave head= out"):
            load_draft_head(done.result, lab())
    else:
        assert json.loads((done.result / "config.json").read_text())["draft_head"]["norm"]
    with pytest.raises(LabkitError, match="was trained for a target whose head"):
        load_adapter(done.result, lab(1))


@pytest.mark.parametrize("call, said", [
    (lambda out: medusa(lab(), out, version=3, **SMALL), "version=3"),
    (lambda out: medusa(lab(), out, version=1, draft_vocab=5, **SMALL), "draft_vocab=5"),
    (lambda out: medusa(lab(), out, text_steps=0, own_steps=0, **SMALL), "at least one step"),
    (lambda out: mlp_speculator(lab(), out, **{**SMALL, "prompts": "no/such.jsonl"}), "no file of prompts"),
    (lambda out: exit_adapter(lab(), out, kind="moose", **SMALL), "kangaroo, affine"),
    (lambda out: exit_adapter(lab(), out, kind="identity", **SMALL), "needs draft_vocab"),
    (lambda out: exit_adapter(lab(), out, exit=9, **SMALL), "exit=9"),
    (lambda out: exit_adapter(lab(), out, draft_vocab=999, **SMALL), "draft_vocab=999"),
    (lambda out: exit_adapter(labkit.Lab(lab().model), out, **SMALL), "tokenizer"),
])  # fmt: skip
def test_bad_input(tmp_path, call, said):
    with pytest.raises(LabkitError, match=said):
        call(tmp_path / "run")
