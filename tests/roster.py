"""Strategies whose rounds wait for the device once, with tiny models, prompts and their texts."""

import functools

import families
import pytest
import torch
from scripted import RandomTree, Replay, accepted_lengths, reference

import labkit
from labkit import (
    AtMost,
    DraftModel,
    EarlyExit,
    Heads,
    Plain,
    PromptLookup,
    SkipLayers,
    Union,
    Until,
    never,
)
from labkit.heads import Affine, DraftVocabulary, Kangaroo

PROMPTS = [[3, 14, 15, 9, 26, 5, 35], [8], [58, 9, 7, 9, 3, 2, 3, 8, 4, 6, 2, 6]]
COUNT = 30


@functools.cache
def lab_of(family: str, **kwargs) -> labkit.Lab:
    return labkit.Lab(families.tiny(family, **kwargs))


@functools.cache
def text_of(family: str, prompt: tuple[int, ...], count: int) -> list[int]:
    return reference(lab_of(family).model, list(prompt), count)


@functools.cache
def small_model():
    return families.tiny("llama", seed=9, layers=2)


def texts(family: str = "llama", prompts=PROMPTS, count: int = COUNT) -> list[list[int]]:
    return [text_of(family, tuple(prompt), count) for prompt in prompts]


@functools.cache
def some_heads():
    heads = labkit.MLPSpeculator(32, 61, 3, 24, dtype=torch.float64)
    for parameter in heads.parameters():
        torch.nn.init.normal_(parameter, std=0.4, generator=torch.Generator().manual_seed(3))
    return heads


STRATEGIES = {
    "Plain": lambda prompts, texts: Plain(),
    "PromptLookup": lambda prompts, texts: PromptLookup(ngram=2, max_draft=3),
    "EarlyExit": lambda prompts, texts: EarlyExit(2, max_draft=3),
    "EarlyExit (share=False)": lambda prompts, texts: EarlyExit(2, max_draft=3, share=False),
    "DraftModel": lambda prompts, texts: DraftModel(small_model(), max_draft=3),
    "SkipLayers": lambda prompts, texts: SkipLayers((1,), (2,), max_draft=3),
    "Heads (chain)": lambda prompts, texts: Heads(some_heads(), top_k=(1, 1, 1)),
    "Heads (product tree)": lambda prompts, texts: Heads(some_heads(), top_k=(3, 2, 2), candidates=4),
    "Heads (fixed tree)": lambda prompts, texts: Heads(some_heads(), tree=[(0,), (1,), (0, 0), (0, 1), (1, 0)]),
    "window": lambda prompts, texts: EarlyExit(2, 3, kv=labkit.Window(1, 3)),
    "top keys": lambda prompts, texts: EarlyExit(2, 3, kv=labkit.TopK(3)),
    "affine adapter": lambda prompts, texts: EarlyExit(2, 3, adapter=Affine(32, torch.float64)),
    "Kangaroo": lambda prompts, texts: EarlyExit(2, 3, adapter=Kangaroo(32, 4, dtype=torch.float64)),
    "draft vocabulary": lambda prompts, texts: EarlyExit(
        2, 3, head=DraftVocabulary(torch.nn.Linear(32, 30, dtype=torch.float64), range(30), 61)
    ),
    "chain": lambda prompts, texts: Replay(prompts, texts, 4, accepted_lengths(4)),
    "trees": lambda prompts, texts: RandomTree(prompts, texts, taps=(1, -1)),
    "Union": lambda prompts, texts: Union(EarlyExit(2, 3), Heads(some_heads(), top_k=(3, 2, 2), candidates=4)),
    "Until(never)": lambda prompts, texts: AtMost(3, Until(never, EarlyExit(2, max_draft=4))),
}
every_strategy = pytest.mark.parametrize("strategy", STRATEGIES)
