"""Every strategy, on every family: the text of plain decoding, token by token, and the cache invariant."""

import functools
import re
from collections import Counter
from dataclasses import dataclass, replace

import families
import pytest
import torch
from scripted import RandomTree, Replay, accepted_lengths, reference, shaken, watched

import labkit
from labkit import Drafter, MLPSpeculator
from labkit.drafters import (
    Adaptive,
    AtMost,
    DraftModel,
    EarlyExit,
    Fallback,
    Heads,
    OnTheFly,
    Plain,
    PromptLookup,
    SkipLayers,
    Union,
    Until,
)
from labkit.heads import Affine, DraftVocabulary, Kangaroo

PROMPTS = [[3, 14, 15, 9, 26, 5, 35], [8], [58, 9, 7, 9, 3, 2, 3, 8, 4, 6, 2, 6]]
COUNT = 15


backbone_of = functools.cache(labkit.Backbone)


@functools.cache
def small_model():
    return labkit.Backbone(families.tiny("llama", seed=9, layers=2))


@functools.cache
def some_heads(model):
    head = model.get_output_embeddings().weight
    heads = MLPSpeculator(head.shape[1], head.shape[0], 3, 24, dtype=head.dtype)
    for parameter in heads.parameters():
        torch.nn.init.normal_(parameter, std=0.4, generator=torch.Generator().manual_seed(3))
    return heads


STRATEGIES = {
    "Plain": lambda model, texts: Plain(),
    "PromptLookup": lambda model, texts: PromptLookup(ngram=2, max_draft=3),
    "DraftModel": lambda model, texts: DraftModel(small_model(), max_draft=3),
    "DraftModel (itself)": lambda model, texts: DraftModel(backbone_of(model), max_draft=3),
    "EarlyExit": lambda model, texts: EarlyExit(2, max_draft=3),
    "EarlyExit (first layer)": lambda model, texts: EarlyExit(1, max_draft=6),
    "EarlyExit (all layers)": lambda model, texts: EarlyExit(4, max_draft=3),
    "EarlyExit (share=False)": lambda model, texts: EarlyExit(2, max_draft=3, share=False),
    "Heads, chain": lambda model, texts: Heads(some_heads(model), top_k=(1, 1, 1)),
    "Heads, product tree": lambda model, texts: Heads(some_heads(model), top_k=(3, 2, 2), candidates=4),
    "Heads, fixed tree": lambda model, texts: Heads(some_heads(model), tree=[(0,), (1,), (0, 0), (0, 1), (1, 0)]),
    "exit rule": lambda model, texts: EarlyExit(labkit.confidence(0.3), 4),
    "exit rule, projected": lambda model, texts: EarlyExit(labkit.margin(0.2), 4, catch_up="project"),
    "exit rule, few layers": lambda model, texts: EarlyExit(labkit.saturation(0.7), 4, layers=(1, 2), maximum=3),
    "exit rule and window": lambda model, texts: EarlyExit(labkit.confidence(0.3), 4, kv=labkit.Window(1, 3)),
    "window": lambda model, texts: EarlyExit(4, 3, kv=labkit.Window(2, 2)),
    "top keys": lambda model, texts: EarlyExit(4, 3, kv=labkit.TopK(3)),
    "stop rule": lambda model, texts: EarlyExit(2, 5, stop=labkit.below(0.4)),
    "affine adapter": lambda model, texts: EarlyExit(
        2, 3, adapter=shaken(Affine(model.config.hidden_size, torch.float64))
    ),
    "Kangaroo": lambda model, texts: EarlyExit(2, 4, adapter=shaken(Kangaroo.like(backbone_of(model)))),
    "own head": lambda model, texts: EarlyExit(2, 3, head=shaken(torch.nn.Linear(32, 61, dtype=torch.float64))),
    "draft vocabulary": lambda model, texts: EarlyExit(
        2, 3, head=DraftVocabulary.of(backbone_of(model), range(0, 61, 2))
    ),
    "SkipLayers": lambda model, texts: SkipLayers((1, 3), (2,), max_draft=3),
    "SkipLayers (nothing)": lambda model, texts: SkipLayers(max_draft=3),
    "SkipLayers (on the fly)": lambda model, texts: SkipLayers(max_draft=2, search=OnTheFly(every=1, count=6)),
    "chain, sometimes right": lambda model, texts: Replay(PROMPTS, texts, 4, accepted_lengths(4)),
    "chain, never right": lambda model, texts: Replay(PROMPTS, texts, 3, (0,)),
    "chain, always right": lambda model, texts: Replay(PROMPTS, texts, 3, (99,)),
    "chain, states kept": lambda model, texts: Replay(PROMPTS, texts, 3, (1, 3, 0), taps=(2, -1)),
    "random trees": lambda model, texts: RandomTree(PROMPTS, texts, taps=(1, -1)),
    "Union": lambda model, texts: Union(EarlyExit(2, 3), PromptLookup(2, 3)),
    "Union, bearer named last": lambda model, texts: Union(PromptLookup(2, 3), EarlyExit(2, 3)),
    "Union of two bearers": lambda model, texts: Union(EarlyExit(1, 2), EarlyExit(3, 2)),
    "Union with a tree": lambda model, texts: Union(EarlyExit(2, 3), Heads(some_heads(model), top_k=(3, 2, 2))),
    "Union with random trees": lambda model, texts: Union(RandomTree(PROMPTS, texts), EarlyExit(2, 3)),
    "Fallback": lambda model, texts: Fallback(PromptLookup(2, 3), EarlyExit(2, 4)),
    "Fallback to a model": lambda model, texts: Fallback(PromptLookup(2, 3), DraftModel(small_model(), 2)),
    "Fallback to Kangaroo": lambda model, texts: Fallback(
        PromptLookup(2, 3), EarlyExit(2, 4, adapter=shaken(Kangaroo.like(backbone_of(model))))
    ),
    "Fallback to a tree": lambda model, texts: Fallback(PromptLookup(2, 3), RandomTree(PROMPTS, texts)),
    "AtMost": lambda model, texts: AtMost(2, EarlyExit(2, 4)),
    "Until": lambda model, texts: Until(labkit.below(0.4), EarlyExit(2, 4)),
    "Until, on a tree": lambda model, texts: Until(labkit.below(0.2), Heads(some_heads(model), top_k=(3, 2, 2))),
    "nested": lambda model, texts: AtMost(
        3, Until(labkit.below(0.2), Union(Fallback(PromptLookup(2, 4), EarlyExit(1, 2)), EarlyExit(2, 4)))
    ),
    "Adaptive": lambda model, texts: Adaptive([EarlyExit(2, 4), EarlyExit(4, 2), PromptLookup(2, 3), Plain()]),
    "Adaptive, nested": lambda model, texts: Union(
        Adaptive([Fallback(PromptLookup(2, 3), EarlyExit(4, 3)), EarlyExit(labkit.confidence(0.3), 3)]),
        PromptLookup(1, 2),
    ),
}
EVERY_FAMILY = [
    "exit rule, projected",
    "exit rule and window",
    "top keys",
    "SkipLayers",
    "Plain",
    "EarlyExit",
    "random trees",
    "chain, sometimes right",
]
WHOLE = ["llama", "gemma3", "gpt2"]
CASES = [(f, s) for f in families.FAMILIES for s in STRATEGIES if f in WHOLE or s in EVERY_FAMILY]
_labs: dict = {}


def lab_of(family):
    """A tiny float64 model of the family, with its greedy texts by full forwards."""
    if family not in _labs:
        model = families.tiny(family)
        _labs[family] = labkit.Lab(model), [reference(model, prompt, COUNT) for prompt in PROMPTS]
    return _labs[family]


@pytest.mark.parametrize(("family", "strategy"), CASES, ids=lambda value: str(value))
def test_text_and_cache(family, strategy, request):
    if family != "llama":
        request.getfixturevalue("unshaped")
    lab, texts = lab_of(family)
    tolerance = families.tolerance(family)
    drafter = STRATEGIES[strategy](lab.model, texts)
    out = watched(lab, PROMPTS, drafter, tolerance, max_new_tokens=COUNT)
    assert out.tokens == texts
    alone = lab.generate(PROMPTS[0], drafter, max_new_tokens=COUNT)
    assert alone.tokens == texts[:1]
    if strategy in ("EarlyExit (all layers)", "DraftModel (itself)", "SkipLayers (nothing)", "chain, always right"):
        assert out.acceptance_rate == 1.0 and out.rejections == 0
    if strategy == "chain, never right":
        assert out.acceptance_rate == 0 and out.tokens_per_round == 1


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("room", [1, 2, 3, 4, 5, 6])
@pytest.mark.usefixtures("unshaped")
def test_exact_room(strategy, room):
    lab, texts = lab_of("llama")
    out = lab.generate(PROMPTS, STRATEGIES[strategy](lab.model, texts), max_new_tokens=room)
    assert out.tokens == [text[:room] for text in texts]
    assert out.reasons == ["length"] * 3


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.usefixtures("unshaped")
def test_drafter_invariant_sampling(strategy):
    """A prompt with its seed has one text, whatever the drafter, draft length and batch."""
    lab, _ = lab_of("gemma3")
    options = dict(max_new_tokens=COUNT, temperature=0.9, top_p=0.95)
    plain = lab.generate(PROMPTS, seed=[5, 6, 7], **options)
    drafter = STRATEGIES[strategy](lab.model, plain.tokens)
    out = watched(lab, PROMPTS, drafter, families.tolerance("gemma3"), seed=[5, 6, 7], **options)
    assert out.tokens == plain.tokens
    if "chain" not in strategy and "trees" not in strategy:
        assert lab.generate(PROMPTS[2], drafter, seed=7, **options).tokens == plain.tokens[2:]


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.usefixtures("unshaped")
def test_consumer_walks_away(strategy):
    lab, texts = lab_of("llama")
    stream = lab.stream(PROMPTS[0], STRATEGIES[strategy](lab.model, texts), max_new_tokens=COUNT)
    assert [next(stream).id for _ in range(3)] == texts[0][:3]
    stream.close()
    assert torch.is_inference_mode_enabled() is False
    assert lab.generate(PROMPTS, max_new_tokens=COUNT).tokens == texts


@pytest.mark.parametrize("family", list(families.FAMILIES))
@pytest.mark.usefixtures("unshaped")
def test_static_early_exit_is_the_cut_model(family):
    """Decoding with the first E layers equals the same model with the rest physically removed."""
    lab, _ = lab_of(family)
    exit = 2
    cut = families.tiny(family)
    decoder = labkit.views.find_decoder(cut)
    layers = labkit.views.child(decoder, labkit.views.LAYERS)
    decoder._modules[layers] = torch.nn.ModuleList(list(decoder._modules[layers])[:exit])
    decoder.config.num_hidden_layers = exit
    if getattr(decoder.config, "layer_types", None):
        decoder.config.layer_types = decoder.config.layer_types[:exit]
    want = [reference(cut, prompt, COUNT) for prompt in PROMPTS]
    plain = lab.generate(PROMPTS, early_exit=exit, max_new_tokens=COUNT)
    assert plain.tokens == want and plain.lossless is False
    drafted = lab.generate(PROMPTS, EarlyExit(1, max_draft=3), early_exit=exit, max_new_tokens=COUNT)
    assert drafted.tokens == want
    assert lab.model.config.get_text_config().num_hidden_layers == 4


# -- the law of sampling --------------------------------------------------------------------------------

DRAWS, TOKENS = 2000, 3
SCRIPTED = re.compile("chain, |random trees|to a tree")
"""What is told the texts of PROMPTS beforehand."""
SAMPLED = {"temperature": 1.3, "top_k": 3, "max_new_tokens": TOKENS, "acceptance": labkit.Rejection()}


@functools.cache
def exact_law():
    """The probability of every text of TOKENS tokens, by full forwards of the tiny llama."""
    lab, _ = lab_of("llama")
    law = {(): 1.0}
    for _ in range(TOKENS):
        longer = {}
        for text, p in law.items():
            ids = torch.tensor([[*PROMPTS[0], *text]])
            with torch.inference_mode():
                best = (lab.model(input_ids=ids).logits[0, -1] / 1.3).topk(3)
            for token, q in zip(best.indices.tolist(), best.values.softmax(-1).tolist(), strict=True):
                longer[(*text, token)] = p * q
        law = longer
    return law


def surprise(drafter):
    """How far DRAWS sampled texts are from the exact law: (chi-square - cells) in its standard deviations."""
    lab, _ = lab_of("llama")
    out = lab.generate([PROMPTS[0]] * DRAWS, drafter, seed=list(range(DRAWS)), **SAMPLED)
    counts = Counter(map(tuple, out.tokens))
    assert set(counts) <= set(exact_law())
    wanted = {text: p * DRAWS for text, p in exact_law().items()}
    rare = [text for text, want in wanted.items() if want < 8]
    cells = [(counts[text], want) for text, want in wanted.items() if want >= 8]
    cells.append((sum(counts[t] for t in rare), sum(wanted[t] for t in rare)))
    chi = sum((got - want) ** 2 / want for got, want in cells if want)
    return (chi - len(cells) + 1) / (2 * len(cells)) ** 0.5


@pytest.mark.parametrize("strategy", [s for s in STRATEGIES if not SCRIPTED.search(s)])
@pytest.mark.usefixtures("unshaped")
def test_the_law_of_sampling_by_rejection(strategy):
    lab, texts = lab_of("llama")
    assert surprise(STRATEGIES[strategy](lab.model, texts)) < 5


@dataclass(frozen=True)
class Liar(Drafter):
    """Draws from one law and hands over another."""

    inner: Drafter
    nodes = 3

    def begin(self, session):
        return self.inner.begin(session)

    def propose(self, state, context):
        draft = self.inner.propose(state, context)
        return draft if draft.probs is None else replace(draft, probs=draft.probs.sqrt())


@pytest.mark.usefixtures("unshaped")
def test_a_wrong_law_is_seen():
    assert surprise(Liar(EarlyExit(2, max_draft=3))) > 8
