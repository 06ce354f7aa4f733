"""Every layer's law at every position, held against hidden states taken in one go."""

import json
import sys

import families
import pytest
import torch
from letters import TEXTS, ids, lab

import labkit
from labkit import EarlyExit, LabkitError
from labkit.layers import Layers

TEXT = families.prompts(3, seed=4)[1] * 2


@torch.inference_mode()
def direct(model, text):
    """Log-laws (layers, positions, vocab) and states (1 + layers, positions, width) of a plain forward."""
    found = []
    decoder = labkit.Backbone(model)._decoder
    hooks = [layer.register_forward_hook(lambda m, i, o: found.append(o[0] if isinstance(o, tuple) else o))
             for layer in (decoder.layers if hasattr(decoder, "layers") else decoder.h)]  # fmt: skip
    first = model(input_ids=torch.tensor([text]), output_hidden_states=True, use_cache=False)
    for hook in hooks:
        hook.remove()
    final = decoder.norm if hasattr(decoder, "norm") else decoder.ln_f
    head, config = model.get_output_embeddings(), model.config
    states = torch.stack([first.hidden_states[0][0], *(x.reshape(len(text), -1) for x in found)])
    logits = head(final(states[1:]))
    if scale := getattr(config, "logit_scale", None):
        logits = logits * scale
    if cap := getattr(config, "final_logit_softcapping", None):
        logits = cap * (logits / cap).tanh()
    assert torch.allclose(logits[-1], first.logits[0].to(logits), atol=1e-6)
    return logits.double().log_softmax(-1), states


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2", "cohere"])
@pytest.mark.parametrize("chunk", [5, 64])
def test_the_same_as_hidden_states(family, chunk):
    model = families.tiny(family)
    found = labkit.layers(labkit.Lab(model), TEXT, chunk=chunk, top=3)
    law, states = direct(model, TEXT)
    close = lambda one, other: torch.allclose(one.double(), other, atol=families.tolerance(family))  # noqa: E731
    final = law[-1].argmax(-1)
    of = lambda tokens: law.exp().gather(2, tokens.expand(len(law), -1)[..., None])[..., 0]  # noqa: E731
    assert found.tokens == TEXT and found.depth == 4 and found.top_token.shape == (4, len(TEXT))
    assert found.top_token.equal(law.argmax(-1)) and found.top_text == [
        [str(t) for t in x] for x in law.argmax(-1).tolist()
    ]
    assert close(found.top_probability, law.exp().max(-1).values)
    assert close(found.top_probabilities, law.exp().topk(3).values) and found.top_tokens.equal(law.topk(3).indices)
    assert close(found.entropy, -(law.exp() * law).sum(-1))
    assert close(found.final_probability, of(final))
    assert found.final_rank.equal((law > law.gather(2, final.expand(4, -1)[..., None])).sum(-1) + 1)
    assert close(found.next_probability[:, :-1], of(torch.tensor([*TEXT[1:], 0]))[:, :-1])
    assert found.next_probability[:, -1].isnan().all()
    assert close(found.kl, (law[-1].exp() * (law[-1] - law)).sum(-1)) and (found.kl[-1] == 0).all()
    assert close(found.cosine, torch.cosine_similarity(states[1:], states[:-1], -1))
    assert all(not x.is_cuda for x in (found.top_token, found.kl))


def test_the_first_layer_that_agrees_for_good():
    tokens = torch.tensor([[1, 2, 3, 4], [9, 2, 3, 4], [1, 2, 9, 4], [1, 9, 3, 4]])
    plain = {
        name: tokens.float() for name in "top_probability entropy final_probability next_probability cosine kl".split()
    }
    made = Layers([0] * 4, ["a"] * 4, [["b"] * 4] * 4, top_token=tokens, top_tokens=tokens[..., None], final_rank=tokens,
                  top_probabilities=tokens[..., None].float(), **plain)  # fmt: skip
    assert made.first_agreeing.tolist() == [3, 4, 4, 1]
    assert made.to_pandas().query("position == 0").agrees.tolist() == [False, False, True, True]


def test_a_generation_text_and_table():
    out = lab().generate(TEXTS[:2], EarlyExit(2, 3), max_new_tokens=6)
    found = labkit.layers(lab(), out, row=1)
    assert found.tokens == out.prompts[1] + out.tokens[1] and "".join(found.texts) == TEXTS[1] + out.text[1]
    begin = len(out.prompts[1])
    assert found.top_token[-1, begin - 1 : -1].tolist() == out.tokens[1]
    assert "".join(found.top_text[-1][begin - 1 : -1]) == out.text[1]
    assert (found.next_probability[-1, begin - 1 : -1] == found.final_probability[-1, begin - 1 : -1]).all()
    table = found.to_pandas()
    assert len(table) == 4 * len(found.tokens) and table.top_text.tolist() == [
        text for line in found.top_text for text in line
    ]
    for layer, place in ((1, 0), (3, 4)):
        [line] = table.query(f"layer == {layer} and position == {place}").to_dict("records")
        assert line["kl"] == found.kl[layer - 1, place].item() and line["text"] == found.texts[place]
        assert line["final_rank"] == found.final_rank[layer - 1, place].item()
    assert labkit.layers(lab(), ids(TEXTS[0])).tokens == labkit.layers(lab(), TEXTS[0]).tokens == ids(TEXTS[0])
    assert labkit.layers(lab(), "a").next_probability.isnan().all()


@pytest.mark.parametrize("name", ["l.json", "l.json.gz"])
def test_saved_and_loaded(name, tmp_path):
    found = labkit.layers(lab(), TEXTS[0])
    found.save(tmp_path / name)
    back = Layers.load(tmp_path / name)
    assert back.to_pandas().equals(found.to_pandas()) and back.top_tokens.equal(found.top_tokens)
    assert back.kl.dtype == found.kl.dtype and repr(back) == repr(found)
    lab().generate("ab", max_new_tokens=2).save(tmp_path / "run.json")
    with pytest.raises(LabkitError, match="holds generation; needed is a labkit layers"):
        Layers.load(tmp_path / "run.json")
    whole = (tmp_path / name).read_bytes()
    for part in (whole[: len(whole) // 2], whole[:-6], b""):
        (tmp_path / name).write_bytes(part)
        with pytest.raises(LabkitError, match="is truncated or no labkit layers"):
            Layers.load(tmp_path / name)
    (tmp_path / name).write_bytes(whole)
    if name.endswith("json"):
        data = json.loads((tmp_path / name).read_text())
        for wrong in ({"version": 0}, {"kl": None}, {"kl": {"dtype": "no", "values": []}}):
            kept = {k: v for k, v in {**data, **wrong}.items() if v is not None}
            (tmp_path / name).write_text(json.dumps(kept))
            with pytest.raises(LabkitError, match=r"version 0|lacks parts"):
                Layers.load(tmp_path / name)


def test_memory_does_not_grow_with_layers_times_positions_times_vocabulary(live_bytes):
    """What is held at most, beyond keys, values and results, is one chunk's."""
    most = []
    seen = labkit.layers.__globals__["_divergence"]

    def watched(one, other):
        most.append(live_bytes())
        return seen(one, other)

    tiny = labkit.Lab(families.tiny("llama", vocab=4000))
    text = [t % 4000 for t in range(7, 127)]
    labkit.layers(tiny, text[:8], chunk=8)
    labkit.layers.__globals__["_divergence"] = watched
    try:
        labkit.layers(tiny, text, chunk=8)
    finally:
        labkit.layers.__globals__["_divergence"] = seen
    law = 8 * 4000 * 8
    assert max(most) - most[0] < law < 120 * 4000 * 8 / 10


def test_bad_input(monkeypatch):
    for wrong, words in (
        ("", "prompt 0 is empty"), ([], "empty list of prompts"), ([[1], [2]], "got 2 texts"), (3, "got a prompt of type"),
        ([1] * 129, "129 tokens is longer than the model's 128 positions"), ([61], "vocabulary has 61"),
    ):  # fmt: skip
        with pytest.raises(LabkitError, match=words):
            labkit.layers(lab(), wrong)
    out = lab().generate("ab", max_new_tokens=2)
    with pytest.raises(LabkitError, match="got row=1; this generation has rows 0 to 0"):
        labkit.layers(lab(), out, row=1)
    for wrong in ({"chunk": 0}, {"top": 0}, {"top": True}):
        with pytest.raises(LabkitError, match="write an int of at least 1"):
            labkit.layers(lab(), "ab", **wrong)
    assert labkit.layers(lab(), "ab", top=1000).top_tokens.shape == (4, 2, 61)
    found = labkit.layers(lab(), "ab")
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(LabkitError, match="pip install pandas"):
        found.to_pandas()
