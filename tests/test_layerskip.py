"""The layerskip recipe: dropout and curriculum as published, and exits that learn."""

import json
import math
import os
import shutil

import families
import pytest
import torch
from torch.nn.functional import cross_entropy

import labkit
from labkit import EarlyExit, LabkitError, Plain, data
from labkit.data import Corpus, Document
from labkit.heads.trained import model_hash
from labkit.replay import ahead, replay_rounds
from labkit.training import layerskip as recipe
from labkit.training.early_exit_loss import LayerSkip, Rows, judge
from labkit.training.fit import Schedule, fit
from labkit.training.layerskip import layerskip

pytestmark = pytest.mark.usefixtures("few_objects")
TOKENS = torch.arange(40).view(4, 10) * 7 % 61


def module(layers=4, *, family="llama", dtype=torch.float32, steps=5, dropout=0.0, **how):
    how = {"rotation": 2} | how
    return LayerSkip(families.tiny(family, layers=layers, dtype=dtype), steps=steps, dropout=dropout, **how)


@pytest.mark.parametrize("scratch", [True, False])
def test_how_often_layers_are_dropped(scratch):
    """p_l(t) = S(t) D(l) p_max, each sample for itself; the same for the same seed and step, and only then."""
    made, count, layers, steps, highest = module(dropout=0.6, scratch=scratch, seed=3), 20_000, 4, 5, 0.6
    for step in range(steps):
        made.step = step
        keep = made.keep(count, TOKENS.device)
        share = 2 ** (step / (steps - 1)) - 1 if scratch else 1.0
        for layer in range(layers):
            p = share * (2 ** (layer / (layers - 1)) - 1) * highest
            found = 1 - keep[layer].double().mean().item()
            assert abs(found - p) <= 4 * math.sqrt(p * (1 - p) / count), (step, layer)
        assert torch.equal(keep, made.keep(count, TOKENS.device))
        rest = keep[1:].double() - keep[1:].double().mean(1, keepdim=True)
        assert (rest @ rest.T / count).triu(1).abs().max() < 0.01  # one layer says nothing of another
    other = module(dropout=0.6, scratch=scratch, seed=4)
    other.step = made.step
    assert not torch.equal(keep, other.keep(count, TOKENS.device))
    made.step = 3
    assert not torch.equal(keep, made.keep(count, TOKENS.device))
    assert made.eval().keep(count, TOKENS.device) is None
    assert module(dropout=0.6, exits=False).keep(count, TOKENS.device) is None


@pytest.mark.parametrize("rotation", [1, 2, 3, 6])
def test_the_curriculum(rotation):
    """Every R-th exit is on, each once in R steps, and the last layer always; weights as published, of sum 1."""
    layers, scale = 6, 0.7
    made = module(layers, rotation=rotation, exit_scale=scale)
    published = [scale * sum(range(layer + 1)) for layer in range(layers - 1)]
    published.append(layers - 1 + scale * sum(range(layers - 1)))
    seen = []
    for made.step in range(4, 4 + rotation):
        on = dict(made.on())
        enabled = [layer for layer in range(layers - 1) if (layer - made.step) % rotation == 0]
        total = sum(published[layer] for layer in [*enabled, layers - 1])
        assert on == pytest.approx({at: published[at] / total for at in [*enabled, layers - 1] if published[at]})
        assert sum(on.values()) == pytest.approx(1)
        seen += [layer for layer in on if layer != layers - 1]
    assert sorted(seen) == [1, 2, 3, 4]  # the first exit weighs nothing
    floor = dict(module(layers, rotation=1, exit_scale=scale, exit_floor=0.2).on())
    assert [floor[layer] / floor[5] for layer in range(6)] == pytest.approx(
        [max(weight / published[5], 0.2) for weight in published]
    )
    assert module(layers, exits=False).on() == [(5, 1.0)] and module(1, rotation=1).on() == [(0, 1.0)]


def test_an_exit_in_focus_learns_in_every_step():
    """As heavily as the last layer; the others as ever."""
    made = module(6, rotation=5, exit_floor=0.2, focus=2)
    for made.step in range(10):
        on = dict(made.on())
        assert (
            set(on) == {1, 5, made.step % 5} and on[1] == pytest.approx(on[5]) and sum(on.values()) == pytest.approx(1)
        )
        assert all(weight <= on[5] for weight in on.values())
    assert module(6, exits=False, focus=2).on() == [(5, 1.0)]


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_exits_learn_from_the_last_layers_law(share):
    """The loss is so much against the text and so much against the law; the last layer itself learns from the text."""
    made = module(dtype=torch.float64, rotation=1, exit_floor=0.2, distill=share).train()
    labels, states = TOKENS[:, 1:].flatten(), made.states(TOKENS)
    logits = [made.logits(state)[:, :-1].flatten(0, 1).float() for state in states]
    law, expected = logits[-1].softmax(-1).detach(), 0.0
    for at, weight in made.on():
        text, taught = cross_entropy(logits[at], labels), -(law * logits[at].log_softmax(-1)).sum(-1).mean()
        expected += weight * (text if at == 3 else (1 - share) * text + share * taught)
    loss = made(TOKENS)["loss"]
    assert loss.item() == pytest.approx(expected.item(), abs=1e-6)
    ours, theirs = (torch.autograd.grad(one, list(made.model.parameters())) for one in (loss, expected))
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(ours, theirs, strict=True))


def test_samples_pass_a_dropped_layer_by(monkeypatch):
    """Alone: neither forward nor backward do they see it, and the other samples are as ever."""
    made = module(dropout=0.5)
    made.step, whole = 4, made.eval().states(TOKENS)
    keep = torch.ones(4, 4, dtype=torch.bool)
    keep[2, 1] = keep[0, 3] = False
    monkeypatch.setattr(made, "keep", lambda batch, device: keep)
    states = made.train().states(TOKENS)
    embedded = made.model.get_input_embeddings()(TOKENS)
    assert torch.equal(states[2][1], states[1][1]) and torch.equal(states[0][3], embedded[3])
    for row in (0, 2):
        assert all(torch.equal(state[row], before[row]) for state, before in zip(states, whole, strict=True))
    assert torch.equal(states[1][1], whole[1][1]) and not torch.equal(states[2][1], whole[2][1])
    keep[2] = False
    made(TOKENS)["loss"].backward()
    grown = [any(p.grad.abs().sum() > 0 for p in layer.parameters()) for layer in made.layers]
    assert grown == [True, True, False, True]


def test_every_parameter_learns():
    """Over R steps, from its own exits: with the loss of the last layer left out, all below the last exit do."""
    made = module(exit_floor=0.2).train()
    exits = []
    for made.step in range(2):
        labels = TOKENS[:, 1:].flatten()
        exits += [made.exit_loss(made.states(TOKENS)[at], labels, None) for at, _ in made.on() if at < 3]
    sum(exits).backward()
    lacking = {name for name, p in made.model.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0}
    assert len(exits) == 3 and all(".layers.3." in name for name in lacking) and lacking
    for made.step in range(2):
        made(TOKENS)["loss"].backward()
    assert all(p.grad.abs().sum() > 0 for p in made.model.parameters())


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2", "opt", "cohere"])
def test_without_exits_it_is_the_plain_loss(family):
    """And with them, the exits' losses are those of the model cut there."""
    made = module(family=family, dtype=torch.float64, exits=False).train()
    model = made.model
    assert made(TOKENS)["loss"].item() == pytest.approx(model.eval()(TOKENS, labels=TOKENS).loss.item(), abs=1e-5)
    made = module(family=family, dtype=torch.float64, exit_scale=0.5, rotation=1).train()
    hidden = model(TOKENS, output_hidden_states=True).hidden_states[1:-1]
    labels = TOKENS[:, 1:].flatten()
    losses = [cross_entropy(made.logits(state)[:, :-1].flatten(0, 1), labels) for state in hidden]
    losses.append(model(TOKENS, labels=TOKENS).loss)
    expected = sum(weight * losses[at].item() for at, weight in made.on())
    assert made(TOKENS)["loss"].item() == pytest.approx(expected, abs=1e-5) and len(made.on()) == 3


def test_the_judges_figures():
    """Recomputed from the model's own hidden states, exit by exit; rows that fill no whole batch count alike."""
    made = module(dtype=torch.float64).eval()
    tokens = (torch.arange(70).view(7, 10) * 11 + 3) % 61
    found = judge(made, tokens, temperature=0.8, batch=4)
    model = made.model
    states = model(tokens, output_hidden_states=True).hidden_states
    states = [model.model.norm(state) for state in states[1:-1]] + [states[-1]]
    logits = [model.lm_head(state)[:, :-1].detach() for state in states]
    best, law = logits[-1].argmax(-1), (logits[-1] / 0.8).softmax(-1)
    for exit, own in enumerate(logits, 1):
        same = own.argmax(-1) == best
        replayed = replay_rounds(ahead(same, 4), torch.ones_like(same))
        expected = {
            "loss": cross_entropy(own.flatten(0, 1), tokens[:, 1:].flatten()).item(),
            "agree": same.double().mean().item(),
            "overlap": torch.minimum((own / 0.8).softmax(-1), law).sum(-1).mean().item(),
            "alpha": replayed.alpha, "tokens_per_round": replayed.tokens_per_round,
        }  # fmt: skip
        for name, value in expected.items():
            assert found[f"{name}_{exit}"] == pytest.approx(value, abs=1e-4), (exit, name)
    assert found["agree_4"] == 1 and found["tokens_per_round_4"] == 4.5 and 0 < found["agree_1"] < 1
    assert len(found) == 20


def test_a_sequence_that_can_be_foretold_is_learnt(tmp_path):
    """Counting: the last layer says the next token, and so do the exits, though layers were dropped."""
    torch.manual_seed(0)
    made = LayerSkip(families.tiny("llama", layers=3, dtype=torch.float32), steps=80, rotation=2, exit_floor=0.3)
    made.model.apply(made.model._init_weights)
    rows = (torch.arange(12) + torch.arange(61)[:, None]) % 61
    fit(
        made, Rows(rows), tmp_path, Schedule(80, 16, 0.02, eval_every=80, save_every=80), write=os.mkdir,
        evaluate=lambda: judge(made, rows), config={}, provenance={}, tokens_per_row=12, device=TOKENS.device,
        dtype=torch.float32, progress=False,
    )  # fmt: skip
    with torch.no_grad():
        said = [made.logits(state)[:, :-1].argmax(-1) == rows[:, 1:] for state in made.states(rows)]
    assert said[-1].float().mean() == 1 and said[1].float().mean() > 0.95
    figures = judge(made, rows)
    assert figures["loss_3"] < 0.1 and figures["agree_2"] > 0.95 and figures["tokens_per_round_2"] > 3.5


CORPUS = Corpus(tuple(Document(f"{i:02}.txt", "".join(f"{k} " for k in range(i, i + 40))) for i in range(30)))
SMALL = {
    "corpus": CORPUS, "held_out": 0.2, "layers": 3, "width": 16, "heads": 2, "kv_heads": 1, "inner": 24, "vocab": 270,
    "tokens": 8 * 4 * 16, "batch": 4, "length": 16, "rotation": 2, "eval_every": 4, "eval_rows": 5, "save_every": 4,
    "device": "cpu", "progress": False,
}  # fmt: skip


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run from scratch, in bfloat16 as by default; tests that write take a copy."""
    return layerskip(tmp_path_factory.mktemp("layerskip") / "run", **{**SMALL, "tokens": 40 * 4 * 16}, exit_floor=0.2)


def test_a_model_from_scratch(trained):
    """Its loss falls at every layer; what is written opens by name and decodes the same with its exits."""
    first, last = (row for row in trained.curves if row["step"] in (4, 40) and "loss_1" in row)
    assert all(last[f"loss_{exit}"] < first[f"loss_{exit}"] - 0.1 for exit in (1, 2, 3))
    lab = labkit.load(str(trained.result), dtype="float32", device="cpu")
    prompts = ["1 2 3 ", "12 ", "30 31 32 33"]
    plain = lab.generate(prompts, Plain(), max_new_tokens=8)
    assert lab.generate(prompts, EarlyExit(1), max_new_tokens=8).tokens == plain.tokens
    assert lab.generate(prompts, EarlyExit(2, max_draft=3), max_new_tokens=8).tokens == plain.tokens
    rows = CORPUS.split(0.2)[1].rows(lab.tokenizer, 16)[:5]
    again = judge(LayerSkip(lab.model, steps=1, rotation=2), rows)
    assert [again[f"loss_{exit}"] for exit in (1, 2, 3)] == pytest.approx(
        [last[f"loss_{exit}"] for exit in (1, 2, 3)], abs=0.05
    )
    assert lab.tokenizer.model_max_length == 16 and lab.model.config.tie_word_embeddings
    assert json.loads((trained.result / "config.json").read_text())["dtype"] == "bfloat16"
    known = json.loads((trained.folder / "provenance.json").read_text())["data"]
    assert known["held_out_files"] == [document.name for document in CORPUS.split(0.2)[1].documents]
    assert known["train"] == CORPUS.split(0.2)[0].hash


def files(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_given_model_goes_on_learning(trained, tmp_path):
    """From its weights, with its tokenizer and all of the dropout from the start; its own folder stays as it is."""
    given = shutil.copytree(trained.result, tmp_path / "given")
    before = files(given)
    seen = []

    def keeping(module, *args, **kwargs):
        seen.append(module)
        return fit(module, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recipe, "fit", keeping)
        still = layerskip(tmp_path / "still", **SMALL, model=str(given), lr=1e-12)
        more = layerskip(tmp_path / "more", **SMALL, model=str(given), lr=3e-3)
    assert files(given) == before and not seen[0].scratch
    weights = {folder: labkit.load(str(folder)).model.state_dict() for folder in (given, still.result, more.result)}
    assert all(torch.equal(value, weights[still.result][name]) for name, value in weights[given].items())
    assert not all(torch.equal(value, weights[more.result][name]) for name, value in weights[given].items())
    assert more.last["loss_3"] < trained.last["loss_3"] < still.last["loss_3"] + 0.05
    assert (more.result / "tokenizer.json").read_bytes() == (given / "tokenizer.json").read_bytes()
    start = json.loads((more.folder / "config.json").read_text())["start"]
    assert start == model_hash(labkit.load(str(given))) != model_hash(labkit.load(str(more.result)))
    with pytest.raises(LabkitError, match="not of a training run"):
        layerskip(given, **SMALL, model=str(given))
    assert files(given) == before
    shutil.rmtree(given)
    shutil.copytree(more.result, given)
    with pytest.raises(LabkitError, match="start"):
        layerskip(still.folder, **SMALL, model=str(given), lr=1e-12)


def test_the_same_seed_makes_the_same_model(tmp_path, trained):
    """In a run of other settings it is refused, and another seed makes another."""
    short = {**SMALL, "tokens": 4 * 4 * 16, "dtype": "float32"}
    made = []
    for number, seed in enumerate((0, 0, 1)):
        torch.manual_seed(99 + number)
        made.append(layerskip(tmp_path / str(number), **short, seed=seed))
    one, same, other = ((done.result / "model.safetensors").read_bytes() for done in made)
    assert one == same != other
    with pytest.raises(LabkitError, match=r"other settings \(dropout, schedule.seed\)"):
        layerskip(tmp_path / "0", **short, seed=1, dropout=0.2)


REFUSED = {
    "no step": ({"tokens": 63}, "tokens=63, batch=4, length=16"),
    "no row": ({"eval_rows": 0}, "eval_rows=0"),
    "rows of one token": ({"length": 1}, "length=1"),
    "no batch": ({"batch": 0}, "batch=0"),
    "odd heads": ({"heads": 3}, "heads=3, kv_heads=1"),
    "odd kv": ({"kv_heads": 3}, "heads=2, kv_heads=3"),
    "no layers": ({"layers": 0}, "layers=0"),
    "half precision": ({"dtype": "float16"}, "dtype='float16'; write 'bfloat16' or 'float32'"),
    "dropout": ({"dropout": 1.0}, "dropout=1.0"),
    "rotation": ({"rotation": 4}, "rotation from 1 to the model's 3 layers"),
    "focus on the last": ({"focus": 3}, r"focus=3, distill=0.0; write an exit from 1 to 2 \(0: none\)"),
    "more than all": ({"distill": 1.1}, "focus=0, distill=1.1"),
    "short corpus": ({"length": 700, "tokens": 2800}, r"the held-out text has \d+ tokens, and one row needs 700"),
    "few rows": ({"batch": 4000, "tokens": 64000}, r"got \d+ rows of text, and one batch needs 4000"),
    "rate": ({"lr": -1.0}, "lr=-1.0"),
}  # fmt: skip


@pytest.mark.parametrize("fault", REFUSED)
def test_refusals(tmp_path, fault):
    given, message = REFUSED[fault]
    with pytest.raises(LabkitError, match=message):
        layerskip(tmp_path, **{**SMALL, **given})


def test_refusals_of_given_models(tmp_path, trained):
    given = shutil.copytree(trained.result, tmp_path / "given")
    with pytest.raises(LabkitError, match="length=32, and the model has 16 positions"):
        layerskip(tmp_path / "run", **{**SMALL, "length": 32, "tokens": 640}, model=str(given))
    (given / "tokenizer.json").unlink()
    with pytest.raises(LabkitError, match="has no tokenizer"):
        layerskip(tmp_path / "run", **SMALL, model=str(given))


def test_the_tokenizer_is_of_the_text_to_train_on(trained):
    train, _ = CORPUS.split(0.2)
    made = data.train_tokenizer(train, 270)
    assert labkit.load(str(trained.result)).tokenizer.get_vocab() == made.get_vocab()
