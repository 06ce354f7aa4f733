"""A replay gives the rounds that real decoding makes, one by one."""

import functools
import random
import sys

import families
import pytest
import torch
from letters import TEXTS, lab

import labkit
from labkit import EarlyExit, Generation, Heads, LabkitError, Medusa, MLPSpeculator, PromptLookup, below
from labkit.costs import LayerCosts, measure_costs
from labkit.replay import Replayed, replay

COUNT = 40
PROMPTS = families.prompts(4, seed=2)  # the first has one token


@functools.cache
def tiny(name="llama"):
    return labkit.Lab(damped(families.tiny(name, layers=5)))


def damped(model):
    """The later layers nearly silent, so that exits agree often, and not always."""
    decoder = model.model
    for layer in decoder.layers[2:]:
        layer.self_attn.o_proj.weight.data *= 0.12
        layer.mlp.down_proj.weight.data *= 0.12
    return model


@functools.cache
def plain(prompt, eos=None):
    return tiny().generate(list(PROMPTS[prompt]), max_new_tokens=COUNT, eos_token_id=eos)


@functools.cache
def ended():
    """A text that ends with an end token long before its room does."""
    whole = plain(2).tokens[0]
    return next(t for place, t in enumerate(whole) if place >= 9 and t not in whole[:place])


def made_heads(kind):
    """Heads that are often right: they have learnt the text's own bigrams where they look at tokens, or by chance."""
    model = tiny()
    generator = torch.Generator().manual_seed(1)
    width, vocab = model.backbone.head_width, model.backbone.vocab
    if kind == "medusa":
        heads = Medusa(width, vocab, 3, base=model.backbone.logits, dtype=torch.float64)
        for parameter in heads.parameters():
            parameter.data.normal_(0, 0.02, generator=generator)
        return heads
    heads = MLPSpeculator(width, vocab, 3, 24, dtype=torch.float64)
    for parameter in heads.parameters():
        parameter.data.normal_(0, 0.3, generator=generator)
    follows = {a: b for p in range(4) for a, b in zip(plain(p).tokens[0], plain(p).tokens[0][1:], strict=False)}
    words = torch.randn(vocab, 24, generator=generator, dtype=torch.float64)
    for head in range(3):
        heads.emb[head].weight.data[:] = 8 * words
        heads.ln[head].weight.data[:], heads.ln[head].bias.data[:] = 1, 1
        reads = torch.nn.functional.gelu(1 + labkit.heads.mlp_speculator.unit(words))
        heads.head[head].weight.data[:] = 0
        for before, after in follows.items():
            heads.head[head].weight.data[after] += (
                reads[before] / reads[before].norm() - reads.mean(0) / reads.norm(dim=-1).mean()
            )
    return heads


def real(drafter, prompt, eos=None):
    out = tiny().generate(list(PROMPTS[prompt]), drafter, max_new_tokens=COUNT, eos_token_id=eos)
    assert out.tokens == plain(prompt, eos).tokens
    return out


def same(out, found, drafted=True):
    assert found.accepted == [r.accepted[0] for r in out.rounds]
    if drafted:
        assert found.drafted == [len(r.drafted[0]) for r in out.rounds]
        assert found.alpha == pytest.approx(out.alpha or 0)
    assert found.tokens_per_round == pytest.approx(out.tokens_per_round)


def settings():
    draw = random.Random(3)
    for number in range(20):
        threshold = None if number % 3 == 0 else round(draw.uniform(0.1, 0.95), 2)
        yield draw.randint(1, 5), draw.randint(1, 9), threshold, draw.randrange(4), number % 2 == 1


@functools.cache
def replayed(prompt, eos=None):
    return replay(tiny(), plain(prompt, eos), exits=(1, 2, 3, 4, 5), max_draft=9)


def test_exits_at_twenty_random_settings():
    rounds = accepted = 0
    for exit, most, threshold, prompt, ends in settings():
        eos = ended() if ends else None
        stop = {} if threshold is None else {"stop": below(threshold)}
        out = real(EarlyExit(exit, most, **stop), prompt, eos)
        same(out, replayed(prompt, eos).rounds(exit, most, threshold), drafted=threshold is None)
        rounds, accepted = rounds + len(out.rounds), accepted + out.accepted
    assert 60 < accepted < 8 * rounds and rounds > 100


@pytest.mark.parametrize("most", [1, 4, 9])
@pytest.mark.parametrize("ends", [False, True])
def test_the_end_of_a_text_inside_a_draft(most, ends):
    """The self-draft is right all the way: the text ends at its room, or with the end token in the middle of a draft."""
    eos = ended() if ends else None
    out = real(EarlyExit(5, most), 2, eos)
    same(out, replayed(2, eos).rounds(5, most))
    assert out.reasons == ["eos" if ends else "length"] and out.alpha == 1


@pytest.mark.parametrize("ngram", [1, 3])
@pytest.mark.parametrize("prompt", range(4))
def test_prompt_lookup(ngram, prompt):
    found = replay(tiny(), plain(prompt), exits=(), ngram=ngram, max_draft=6)
    assert found.sources == ["ngram"]
    for most in (1, 3, 6):
        same(real(PromptLookup(ngram, most), prompt), found.rounds("ngram", most))


@pytest.mark.parametrize("kind", ["mlp", "medusa"])
def test_heads(kind):
    heads, accepted = made_heads(kind), 0
    for prompt in range(4):
        for eos in (None, ended()):
            found = replay(tiny(), plain(prompt, eos), exits=(), heads={kind: heads}, ngram=False, max_draft=8)
            for most in (1, 3):
                out = real(labkit.AtMost(most, Heads(heads)), prompt, eos)
                same(out, found.rounds(kind, most))
                accepted += out.accepted
            assert found.rounds(kind, 8) == found.rounds(kind, 3)
    assert accepted > 20


def test_several_texts_and_other_forms():
    outs = [plain(p) for p in range(4)]
    both = replay(tiny(), outs, exits=(2,), max_draft=4)
    each = [replay(tiny(), out, exits=(2,), max_draft=4) for out in outs]
    assert both.rounds(2, 3).accepted == [a for one in each for a in one.rounds(2, 3).accepted]
    ids = outs[1].prompts[0] + outs[1].tokens[0]
    alone = replay(tiny(), ids, exits=(2,), max_draft=4)
    assert sum(alone.rounds(2, 3).accepted) + len(alone.rounds(2, 3).accepted) == len(ids) - 1
    assert replay(tiny(), [ids, ids], exits=(2,)).rounds(2, 3).accepted == 2 * alone.rounds(2, 3).accepted
    assert replay(lab(), TEXTS[0]).sources == [1, 2, 3, "ngram"]
    assert replay(lab(), TEXTS).rounds(1, 16).accepted
    batch = tiny().generate([list(p) for p in PROMPTS], max_new_tokens=COUNT)
    assert replay(tiny(), batch, exits=(2,), max_draft=4).rounds(2, 3) == both.rounds(2, 3)


def test_a_saved_generation(tmp_path):
    plain(1).save(tmp_path / "run.json")
    back = replay(tiny(), Generation.load(tmp_path / "run.json"), exits=(2,), max_draft=9)
    assert back.rounds(2, 5) == replayed(1).rounds(2, 5)


def test_surface_and_best():
    found = replay(tiny(), plain(1), exits=(1, 3), max_draft=4)
    costs = {1: (0.25, 1.1), 3: (0.65, 1.2), ("ngram", 2): (0.0, 1.3), "ngram": (0.0, 1.5)}
    table = found.surface(costs, thresholds=(None, 0.5))
    assert len(table) == 2 * 4 * 2 + 4 and list(table.columns)[:6] == (
        "exit_layer max_draft threshold tokens_per_round alpha predicted_speedup".split())  # fmt: skip
    for line in table.to_dict("records"):
        source = "ngram" if line["source"] == "ngram" else int(line["exit_layer"])
        threshold = None if line["threshold"] != line["threshold"] else line["threshold"]
        run = found.rounds(source, line["max_draft"], threshold)
        assert (line["tokens_per_round"], line["alpha"]) == (run.tokens_per_round, run.alpha)
        c, v = costs.get((source, line["max_draft"]), costs[source])
        assert (line["c"], line["v"]) == (c, v)
        steps = sum(d * c + (v if d else 1) for d in run.drafted)
        if source != "ngram":
            assert line["predicted_speedup"] == pytest.approx(COUNT / steps) and line["estimate"] == (
                threshold is not None
            )
    best = found.best(costs, thresholds=(None, 0.5))
    assert best["predicted_speedup"] == table.predicted_speedup.max()
    free = lambda source, length: (0.0, 1.0)  # noqa: E731
    assert found.best(free)["predicted_speedup"] == pytest.approx(found.best(free)["tokens_per_round"])


def test_costs():
    costs = LayerCosts(10, (1, 3, 5), (0.8, 1.0, 1.4), (0.2, 0.2, 0.4), {"ngram": 0.0, "mlp": 0.1})
    assert costs(5, 2) == pytest.approx((0.6, 0.4 + 0.5 + 0.2)) and costs("ngram", 3) == pytest.approx((0, 1.2 + 0.3))
    assert costs(10, 4)[1] == pytest.approx(0.8 + 0.4) and costs("mlp", 6)[1] == pytest.approx(1.8 + 0.6)
    with pytest.raises(LabkitError, match="nothing of 'medusa'"):
        costs("medusa", 2)
    measured = measure_costs(tiny(), context=20, rows=(1, 2, 4), repeats=2)
    assert 0 < measured(1, 2)[0] < measured(5, 2)[0] and measured(2, 3)[1] > 0
    assert replay(tiny(), plain(1), max_draft=3).best(measured)["predicted_speedup"] > 0
    for wrong in ({"context": 0}, {"context": 128}, {"rows": (2, 3)}, {"rows": (1,)}, {"repeats": 0}):
        with pytest.raises(LabkitError, match="write"):
            measure_costs(tiny(), **wrong)


def test_bad_input(monkeypatch):
    found = replayed(1)
    for call, words in (
        (lambda: replay(lab(), ""), "prompt 0 is empty"),
        (lambda: replay(lab(), "a"), "give 2 tokens or more"),
        (lambda: replay(lab(), []), "empty list of prompts"),
        (lambda: replay(lab(), [1] * 129), "the model's 128 positions"),
        (lambda: replay(lab(), TEXTS[0], exits=(9,)), "exits=9, but the target has 4 layers"),
        (lambda: replay(lab(), TEXTS[0], max_draft=0), "got max_draft=0"),
        (lambda: replay(lab(), TEXTS[0], ngram=-1), "got ngram=-1"),
        (lambda: replay(lab(), TEXTS[0], exits=(), ngram=False), "nothing to replay"),
        (lambda: replay(lab(), TEXTS[0], heads=Medusa(8, 61, 2)), "heads read states of width 8"),
        (lambda: replay(lab(), lab().generate("ab", max_new_tokens=3, temperature=0.7)), "has temperature=0.7"),
        (
            lambda: replay(lab(), lab().generate("ab", max_new_tokens=3, repetition_penalty=1.3)),
            "repetition_penalty=1.3",
        ),
        (lambda: replay(lab(), lab().generate("ab", max_new_tokens=3, early_exit=2)), "a lossy target"),
        (lambda: found.rounds(6, 2), r"got source 6, which was not replayed; write one of \[1"),
        (lambda: found.rounds(2, 10), "this replay has 1 to 9"),
        (lambda: found.rounds(2, 3, 1.5), "a probability from 0 to 1"),
        (lambda: found.surface({1: (0.1, 1)}), "costs say nothing of"),
    ):
        with pytest.raises(LabkitError, match=words):
            call()
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(LabkitError, match="pip install pandas"):
        found.surface(lambda source, length: (0.1, 1.0))
    assert found.best(lambda source, length: (0.1, 1.0)) and Replayed([1], [1]).tokens_per_round == 2
