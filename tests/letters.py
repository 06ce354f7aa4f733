"""A tiny model whose tokens are letters, with strategies, processors and streamers for it."""

import functools

import families
import pytest
import torch
import transformers as hf
from scripted import RandomTree, Replay, reference
from tokenizers import Tokenizer, decoders, models
from transformers import LogitsProcessor, StoppingCriteria

import labkit
from labkit import DraftModel, EarlyExit, Plain, PromptLookup

PIECES = ["<pad>", *"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ .,!?:;-"]
TEMPLATE = (
    "{% for message in messages %}{{ message['role'][0] }}:{{ message['content'] }};{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)
TEXTS = ["Hello, labkit", "ab", "a longer prompt: abc abc abc"]
COUNT = 14


@functools.cache
def tokenizer() -> hf.PreTrainedTokenizerFast:
    """One token a character; nothing is downloaded."""
    backend = Tokenizer(models.BPE({piece: i for i, piece in enumerate(PIECES)}, []))
    backend.decoder = decoders.Fuse()
    made = hf.PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>")
    made.chat_template = TEMPLATE
    return made


@functools.cache
def lab() -> labkit.Lab:
    model = families.tiny("llama")
    assert len(PIECES) == model.config.vocab_size
    return labkit.Lab(model, tokenizer())


@functools.cache
def small() -> hf.PreTrainedModel:
    return families.tiny("llama", seed=9, layers=2)


def ids(text: str) -> list[int]:
    return [PIECES.index(letter) for letter in text]


@functools.cache
def greedy(text: str, count: int = COUNT) -> list[int]:
    return reference(lab().model, ids(text), count)


@functools.cache
def theirs(text: str, **options) -> list[int]:
    """transformers' own greedy text."""
    model, prompt = lab().model, torch.tensor([ids(text)])
    mask = torch.ones_like(prompt)
    out = model.generate(prompt, attention_mask=mask, do_sample=False, max_new_tokens=COUNT, **options)
    return out[0, prompt.shape[1] :].tolist()


STRATEGIES = {
    "Plain": lambda prompts, texts: Plain(),
    "PromptLookup": lambda prompts, texts: PromptLookup(2, 3),
    "EarlyExit": lambda prompts, texts: EarlyExit(2, 3),
    "DraftModel": lambda prompts, texts: DraftModel(small(), 3),
    "chain": lambda prompts, texts: Replay(prompts, texts, 4, (2, 4, 0)),
    "trees": lambda prompts, texts: RandomTree(prompts, texts),
}
every_strategy = pytest.mark.parametrize("strategy", STRATEGIES)


def drafter_of(strategy, texts=TEXTS, outputs=None):
    return STRATEGIES[strategy]([ids(t) for t in texts], outputs or [greedy(t, 30) for t in texts])


MESSAGES = [{"role": "user", "content": "Hello"}]


class Collects:
    def __init__(self):
        self.seen, self.ended = [], 0

    def put(self, value):
        assert not self.ended
        self.seen.append(value)

    def end(self):
        self.ended += 1


class NoRepeats(LogitsProcessor):
    """A user's processor with a history: never one of the last three tokens, and more for even ids by length."""

    def __call__(self, input_ids, scores):
        scores = scores.clone()
        for row, text in enumerate(input_ids[:, -3:].tolist()):
            scores[row, text] = -torch.inf
            scores[row, ::2] += 0.3 * (input_ids.shape[1] % 4)
        return scores


class Sum(StoppingCriteria):
    """A user's criterion over the whole text."""

    def __init__(self, above=700):
        self.above = above

    def __call__(self, input_ids, scores, **kwargs):
        return input_ids.sum(1) > self.above
