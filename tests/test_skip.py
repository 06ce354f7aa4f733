"""Skipped sub-layers: against models whose projections are zero, scored on committed text, and refused."""

import copy
import functools

import families
import pytest
import torch
from scripted import reference
from transformers import DynamicCache

import labkit
from labkit import LabkitError, Session, SkipLayers, search_skips, views
from labkit.costs import work_seconds
from labkit.drafters import OnTheFly
from labkit.drafters.sublayers import SubLayers, agreement
from labkit.drafters.written import read_strategy

PROMPTS = [[3, 14, 15, 9, 26, 5, 35], [8], [58, 9, 7, 9, 3, 2, 3, 8, 4, 6, 2, 6]]
COUNT = 15
OUTPUTS = {"attention": ("o_proj", "out_proj", "attn.c_proj"), "mlp": ("down_proj", "fc2", "mlp.c_proj")}
"""What a sub-layer ends with, in the families whose layers only add its output to the stream."""


def lab_of(family, layers=4):
    return _lab_of(family, layers)


@functools.cache
def _lab_of(family, layers):
    return labkit.Lab(families.tiny(family, layers=layers))


def session_of(family, texts, room, taps=(), layers=4):
    session = Session(lab_of(family, layers).backbone, len(texts), max(map(len, texts)) + room, taps)
    session.prefill(texts)
    return session


@torch.no_grad()
def zeroed(model, attention, mlp):
    """A copy of the model in which those sub-layers give nothing, since their last projection is zero."""
    model = copy.deepcopy(model)
    for kind, skipped in (("attention", attention), ("mlp", mlp)):
        for index in skipped:
            layer = views.layers_of(views.find_decoder(model))[index]
            last = next(part for name, part in layer.named_modules() if name.endswith(OUTPUTS[kind]))
            for parameter in last.parameters():
                parameter.zero_()
    return model


@torch.inference_mode()
def after(model, drafting, text, block):
    """Logits of `drafting` for the tokens `block`, over keys and values of `text` as `model` writes them."""
    cache, name = DynamicCache(), lab_of("llama").backbone._cache_name
    for ids, through in ((text, model), (block, drafting)):
        if ids:
            logits = through(input_ids=torch.tensor([ids]), use_cache=True, **{name: cache}).logits[0]
    return logits


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "gemma", "phi3", "gpt2", "opt", "granite"])
@pytest.mark.parametrize(("attention", "mlp"), [((1, 2), ()), ((), (0, 3)), ((3,), (1, 3)), ((0, 1, 2), (0, 1, 2))])
def test_drafts_are_those_of_a_model_without(family, attention, mlp):
    lab = lab_of(family)
    less = zeroed(lab.model, attention, mlp)
    out = lab.generate(PROMPTS, SkipLayers(attention, mlp, max_draft=3), max_new_tokens=8)
    assert any(out.rounds[0].drafted)
    for row, prompt in enumerate(PROMPTS):
        text = list(prompt)
        for happened in out.rounds:
            block = text[-1:]
            for token in happened.drafted[row]:
                assert token == after(lab.model, less, text[:-1], block)[-1].argmax()
                block.append(token)
            text += happened.tokens[row]


@pytest.mark.parametrize("family", families.FAMILIES)
def test_a_skipped_layer_is_the_identity(family):
    """In every family, post-norms and multipliers included; and nothing of the MLP is computed."""
    lab = lab_of(family)
    backbone = SubLayers((2,), (2,)).of(lab.backbone)
    session, calls = session_of(family, PROMPTS, 4), []
    layer = lab.backbone._layers[2]
    linear = [part for part in layer.modules() if isinstance(part, torch.nn.Linear)]
    hooks = [part.register_forward_hook(lambda *_: calls.append(1)) for part in linear]
    rows, x = session.chain(0, 3), torch.randn(3, 3, 32, dtype=torch.float64)
    got = session.run(x, 2, 3, rows, backbone)
    assert torch.equal(got, x) and not calls
    assert not torch.allclose(session.run(x, 2, 3, rows), x)
    assert calls or not linear
    for hook in hooks:
        hook.remove()


# -- scoring --------------------------------------------------------------------------------------------

SCORED = ["llama", "mistral", "gemma3", "gpt2", "deepseek_v3"]


@pytest.mark.parametrize("family", SCORED)
@pytest.mark.parametrize("count", [1, 2, 5, 9, 40])
@torch.inference_mode()
def test_again_repeats_the_target(family, count):
    """With nothing skipped: the target's own logits, and its keys and values again, in scratch slots only."""
    session, backbone = session_of(family, PROMPTS, count - 1, taps=(2,)), lab_of(family).backbone
    tolerance, held = families.tolerance(family), [*session.cache.buffers(), session.cache.taps[2]]
    for buffer in held:  # what earlier rounds leave in the scratch slots plays no part
        for row, n in enumerate(session.lengths):
            (buffer[row, n - 1 :] if buffer.ndim == 3 else buffer[row, :, n - 1 :]).fill_(7.0)
    before = [buffer.clone() for buffer in held]
    rows = session.again(count)
    hidden = session.run(session.tokens.gather(1, rows.positions), 0, backbone.depth, rows)
    logits = backbone.head(hidden)
    for row, (prompt, n) in enumerate(zip(PROMPTS, session.lengths, strict=True)):
        first = max(0, n - 1 - count)
        old, new = slice(first, n - 1), slice(n - 1 + count - (n - 1 - first), n - 1 + count)
        assert rows.slots[row].tolist() == [session.capacity] * (count - (n - 1 - first)) + list(
            range(new.start, new.stop)
        )
        want = lab_of(family).model(input_ids=torch.tensor([prompt]), use_cache=False).logits[0, old]
        torch.testing.assert_close(logits[row, count - (n - 1 - first) :], want, atol=10 * tolerance, rtol=tolerance)
        for now, then in zip(held, before, strict=True):
            now, then = (x[row] if x.ndim == 3 else x[row].transpose(0, 1) for x in (now, then))
            assert torch.equal(now[: n - 1], then[: n - 1])
            torch.testing.assert_close(now[new], then[old], atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("family", ["llama", "gpt2", "opt", "mistral"])
@pytest.mark.parametrize("count", [1, 4, 6, 20])
def test_agreement_by_another_way(family, count):
    """The share is that of a model with zeroed projections, over keys and values that the target wrote before them."""
    lab, skipped = lab_of(family), SubLayers((1,), (2,))
    texts = [prompt + reference(lab.model, prompt, 4) for prompt in PROMPTS]
    session, less = session_of(family, texts, count), zeroed(lab.model, (1,), (2,))
    hits = rows = 0
    for text in texts:
        first = max(0, len(text) - 1 - count)
        said = after(lab.model, less, text[:first], text[first:-1]).argmax(-1).tolist()
        hits += sum(a == b for a, b in zip(said, text[first + 1 :], strict=True))
        rows += len(said)
    assert agreement(session, skipped.of(lab.backbone), count).tolist() == [hits, rows]
    alone = [agreement(session_of(family, [t], count), skipped.of(lab.backbone), count).tolist() for t in texts]
    assert [sum(column) for column in zip(*alone, strict=True)] == [hits, rows]


@pytest.mark.parametrize("family", SCORED)
def test_nothing_skipped_agrees_with_all_it_wrote(family):
    texts = [prompt + reference(lab_of(family).model, prompt, 6) for prompt in PROMPTS]
    assert agreement(session_of(family, texts, 6), SubLayers().of(lab_of(family).backbone), 6).tolist() == [18, 18]
    short = session_of(family, texts[1:2], 9)  # its three rows of padding, which repeat a token, do not count
    assert agreement(short, SubLayers().of(lab_of(family).backbone), 9).tolist() == [6, 6]


# -- targets, work, settings ----------------------------------------------------------------------------


@pytest.mark.parametrize("target", [3, labkit.confidence(0.2)], ids=["cut", "exiting"])
@pytest.mark.parametrize("search", [None, OnTheFly(1, 0.5, 6)], ids=["fixed", "on the fly"])
def test_targets_that_exit_early(target, search):
    lab, drafter = lab_of("gemma3"), SkipLayers((1,), (2,), 3, search=search)
    plain = lab.generate(PROMPTS, max_new_tokens=COUNT, early_exit=target)
    out = lab.generate(PROMPTS, drafter, max_new_tokens=COUNT, early_exit=target)
    assert out.tokens == plain.tokens and out.drafted > 0 and out.lossless is False
    if search is None and target != 3:  # the draft goes through all layers, and is not asked about leaving
        whole = lab.generate(PROMPTS, drafter, max_new_tokens=COUNT)
        assert out.rounds[0].drafted[1] == whole.rounds[0].drafted[1]


def test_work_is_what_is_left():
    lab, drafter, calls = lab_of("llama"), SkipLayers((1, 2), (3,), 3), []
    session = session_of("llama", PROMPTS[:1], 4)
    before = [x[:, :, :6].clone() for x in session.cache.buffers()]
    hooks = [
        module.register_forward_hook(lambda *_, name=(kind, i): calls.append(name))
        for i, layer in enumerate(lab.backbone._layers)
        for kind, module in (("attention", layer.self_attn.q_proj), ("mlp", layer.mlp))
    ]
    (draft,), (verify,) = drafter.work(4)
    assert work_seconds(session, draft) > 0
    left = [("attention", 0), ("mlp", 0), ("mlp", 1), ("mlp", 2), ("attention", 3)]
    assert sorted(calls) == sorted(left * 3)
    assert (verify.start, verify.stop, verify.rows, verify.other) == (0, 4, 4, None)
    assert all(torch.equal(x[:, :, :6], y) for x, y in zip(session.cache.buffers(), before, strict=True))
    assert SkipLayers(max_draft=3, search=OnTheFly()).work(4) == ([], [])
    for hook in hooks:
        hook.remove()


def test_settings():
    assert read_strategy("SkipLayers(attention=(2, 1), mlp=[3])") == SkipLayers((1, 2), (3,))
    assert repr(SkipLayers([2, 1], (), 2)) == "SkipLayers(attention=(1, 2), mlp=(), max_draft=2)"
    assert read_strategy(repr(SkipLayers((1,), (2,), 5))) == SkipLayers((1,), (2,), 5)
    assert SkipLayers(max_draft=9, search=OnTheFly(count=4)).scratch == 9 and SkipLayers().scratch == 4
    assert SkipLayers(search=OnTheFly(count=20)).scratch == 20
    assert SkipLayers((1,), search=OnTheFly()).skipped(8) == SubLayers((1,))


BAD = {
    r"attention=\(1, 7\).*layers 0 to 3": lambda: SkipLayers((1, 7)),
    r"mlp=\(4,\).*layers 0 to 3": lambda: SkipLayers((), (4,)),
    "all sub-layers of the 4 layers": lambda: SkipLayers(range(4), range(4)),
    "1 twice": lambda: SkipLayers((1, 2, 1)),
    r"-1; layers are ints": lambda: SkipLayers((), (-1,)),
    "True; layers are ints": lambda: SkipLayers((True,)),
    r"1\.0; layers are ints": lambda: SkipLayers((1.0,)),
    "attention=3; write the layers": lambda: SkipLayers(3),
    "mlp='12'; write the layers": lambda: SkipLayers((), "12"),
    "max_draft=0": lambda: SkipLayers((1,), max_draft=0),
    r"stop=0\.5": lambda: SkipLayers((1,), stop=0.5),
    "search=True": lambda: SkipLayers((1,), search=True),
    "every=0": lambda: OnTheFly(every=0),
    r"count=2\.5": lambda: OnTheFly(count=2.5),
    "ratio=0;": lambda: OnTheFly(ratio=0),
    r"enough=1\.5": lambda: OnTheFly(enough=1.5),
    r"OnTheFly got seed=\[1\]; write an int": lambda: OnTheFly(seed=[1]),
    "got progress=None; write a wrapper": lambda: search_skips(lab_of("llama"), PROMPTS, progress=None),
    "progress returned None; needed are": lambda: search_skips(
        lab_of("llama"), PROMPTS, steps=1, progress=lambda steps: None
    ),
    r"ratio=1\.2": lambda: search_skips(lab_of("llama"), PROMPTS, ratio=1.2),
    "steps=0": lambda: search_skips(lab_of("llama"), PROMPTS, steps=0),
    "seed=None": lambda: search_skips(lab_of("llama"), PROMPTS, seed=None),
    "first and the last of the 2 layers": lambda: search_skips(lab_of("llama", 2), PROMPTS),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_input(what):
    with pytest.raises(LabkitError, match=what) as error:
        lab_of("llama").generate(PROMPTS, BAD[what](), max_new_tokens=4)
    assert "\n" not in str(error.value)
