"""The wall: a composition of layer ranges is the model, whatever patched it; what cannot be run is refused."""

import copy

import families
import pytest
import torch
from accelerate import cpu_offload
from accelerate.hooks import ModelHook, add_hook_to_module

from labkit import Backbone, LabkitError, views
from labkit.attention import packed_attention

EVERY = [*families.FAMILIES, *families.VARIANTS]
PROMPTS = [[3, 14, 15, 9, 26, 5, 35, 8, 9, 7, 12], [8, 4, 60, 2, 2, 19]]


def compose(backbone, prompts, splits, chunks, through=None):
    """Logits of ragged prompts, fed in chunks through layers split at `splits`."""
    longest, runner = max(map(len, prompts)), through or backbone
    cache, ids = backbone.cache(len(prompts), longest), torch.tensor([p + [0] * (longest - len(p)) for p in prompts])
    length, out = torch.tensor([[len(p)] for p in prompts]), []
    keys = torch.arange(longest)[None]
    with torch.inference_mode():
        for first, last in zip([0, *chunks], [*chunks, longest], strict=True):
            at = torch.arange(first, last).expand(len(prompts), -1)
            slots, at = torch.where(at < length, at, longest), torch.where(at < length, at, 0)
            mask = backbone.mask(keys[:, None] <= at[:, :, None], at, keys)
            x = ids[:, first:last]
            for start, stop in zip([0, *splits], [*splits, backbone.depth], strict=True):
                x = runner.run(x, start, stop, cache, slots, at, mask)
            out.append(backbone.head(x))
    return [row[: len(p)] for row, p in zip(torch.cat(out, 1), prompts, strict=True)]


def whole(model, prompts):
    with torch.inference_mode():
        return [model(input_ids=torch.tensor([p]), use_cache=False).logits[0] for p in prompts]


def assert_same(got, want, tolerance):
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("name", EVERY)
def test_composition_is_the_model(name):
    model = families.tiny(name)
    before = copy.deepcopy(model.config.to_dict())
    backbone, tolerance = Backbone(model), 10 * families.tolerance(name)
    for splits, chunks in (((1,), (3, 4)), ((1, 2, 3), (6,)), ((), (1, 2, 9)), ((4,), ())):
        assert_same(compose(backbone, PROMPTS, splits, chunks), whole(model, PROMPTS), tolerance)
        assert_same(compose(backbone, PROMPTS[:1], splits, chunks), whole(model, PROMPTS[:1]), tolerance)
    assert model.config.to_dict() == before and "forward" not in model.__dict__


@pytest.mark.parametrize("layers", [1, 2, 3])
def test_few_layers(layers):
    model = families.tiny("llama", layers=layers)
    assert_same(compose(Backbone(model), PROMPTS, (), (4,)), whole(model, PROMPTS), 1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_dtypes(dtype):
    model = families.tiny("gemma3", dtype=dtype)
    got, want = compose(Backbone(model), PROMPTS, (2,), (5,)), whole(model, PROMPTS)
    for a, b in zip(got, want, strict=True):
        assert (a - b).norm() / b.norm() < (1e-4 if dtype == torch.float32 else 0.1)


@pytest.mark.parametrize("name", families.REFUSED)
def test_refused(name):
    with pytest.raises(LabkitError, match=r"recurrent state|alibi|encoder-decoder") as error:
        Backbone(families.REFUSED[name]())
    assert "\n" not in str(error.value)


def test_refused_settings():
    model = families.tiny("llama")
    model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(LabkitError, match='attn_implementation="sdpa"'):
        Backbone(model)
    with pytest.raises(LabkitError, match=r"model\.eval\(\)"):
        Backbone(families.tiny("llama").train())
    with pytest.raises(LabkitError, match=r"no language-model head|needs a"):
        Backbone(families.tiny("llama").model)


def test_rope_that_depends_on_the_length_is_limited():
    for name in ("llama_dynamic", "phi3_longrope"):
        assert Backbone(families.tiny(name)).limit == 32


class Halve(ModelHook):
    """A hook that changes what the hooked module returns."""

    def post_forward(self, module, output):
        return output * 0.5


def test_hooks():
    model = families.tiny("llama")
    want = whole(model, PROMPTS)
    for module in (model.model, *model.model.layers, model.lm_head):
        add_hook_to_module(module, ModelHook())
    assert_same(compose(Backbone(model), PROMPTS, (2,), (4,)), want, 1e-9)
    add_hook_to_module(model.model.layers[1], Halve())
    assert_same(compose(Backbone(model), PROMPTS, (2,), (4,)), whole(model, PROMPTS), 1e-9)


def test_offloaded():
    model = families.tiny("llama")
    want = whole(model, PROMPTS)
    model = cpu_offload(model, execution_device=torch.device("cpu"))
    with pytest.raises(LabkitError, match="meta"):
        Backbone(model)
    assert_same(whole(model, PROMPTS), want, 1e-9)


def test_compiled():
    model = families.tiny("llama")

    def never(*args, **kwargs):
        raise AssertionError("a view ran the compiled whole")

    model.model._compiled_call_impl = never
    decoder = views.layer_range(model.model, 0, 2, substitute=lambda index, layer: layer, width=32)
    assert decoder._compiled_call_impl is None and model.model._compiled_call_impl is never
    other = families.tiny("llama")
    assert Backbone(torch.compile(other)).model is other


def test_patched_forwards():
    model = families.tiny("llama")
    own = model.model.forward

    def patched(*args, **kwargs):
        out = own(*args, **kwargs)
        out.last_hidden_state = out.last_hidden_state * 0.7 + 0.1
        return out

    model.model.forward = patched
    with pytest.raises(LabkitError, match="differs from its own forward"):
        Backbone(model)
    assert model.model.forward is patched
    model = families.tiny("llama")
    model.model.layers[1].forward = lambda hidden_states, **kwargs: hidden_states * 1.5
    try:
        assert_same(compose(Backbone(model), PROMPTS, (2,), (4,)), whole(model, PROMPTS), 1e-9)
    except LabkitError as error:
        assert "differs from its own forward" in str(error)


@pytest.mark.parametrize("group", [2, 3, 4])
@pytest.mark.parametrize("rows", [2, 5, 16])
def test_packed_gqa(rows, group):
    """Folding the query group into the rows gives what expanding keys and values gives."""
    generator = torch.Generator().manual_seed(rows * group)
    query = torch.randn(2, 2 * group, rows, 8, generator=generator)
    key, value = (torch.randn(2, 2, 40, 8, generator=generator) for _ in range(2))
    mask = torch.rand(2, 1, rows, 40, generator=generator) > 0.4
    mask[..., 0] = True
    got, _ = packed_attention(torch.nn.Identity(), query, key, value, mask, scaling=0.3)
    expanded = [x.repeat_interleave(group, 1) for x in (key, value)]
    want = torch.nn.functional.scaled_dot_product_attention(query, *expanded, attn_mask=mask, scale=0.3)
    torch.testing.assert_close(got, want.transpose(1, 2), atol=1e-6, rtol=1e-6)


PRE_NORM = ["llama", "qwen2", "gpt2", "opt", "gpt_neox", "phi3", "starcoder2", "mixtral", "deepseek_v3", "cohere"]


@pytest.mark.parametrize("name", families.FAMILIES)
def test_skipped_sublayers(name):
    """With both sub-layers skipped a layer passes the residual stream on unchanged."""
    model = families.tiny(name)
    backbone = Backbone(model)
    for attention, mlp in ((True, False), (False, True), (True, True)):

        def skip(index, layer, a=attention, m=mlp):
            return views.without(layer, attention=a, mlp=m) if index == 2 else layer

        got = compose(backbone, PROMPTS, (), (), through=backbone.substituted(skip))
        assert all(torch.isfinite(row).all() for row in got)
        assert not torch.allclose(got[0], whole(model, PROMPTS)[0])
    if name in PRE_NORM:
        decoder = views.find_decoder(model)
        layers = views.layers_of(decoder)
        layers[2].forward = lambda hidden_states, *args, **kwargs: hidden_states
        assert_same(got, whole(model, PROMPTS), 10 * families.tolerance(name))


def test_views_are_kept_and_bounded(monkeypatch):
    backbone = Backbone(families.tiny("llama"))
    assert backbone.view(0, 2) is backbone.view(0, 2)
    monkeypatch.setattr("labkit.backbone.MOST_VIEWS", 3)
    for start in range(4):
        backbone.view(start, 4)
    assert len(backbone._views) <= max(3, 3)


@pytest.mark.parametrize("exit", [0, 5, -1, True, 2.0, "2"])
def test_cut_out_of_range(exit):
    with pytest.raises(LabkitError, match="from 1 to 4"):
        Backbone(families.tiny("llama")).cut(exit)
