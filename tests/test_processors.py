"""The list of processors is the one that transformers' generate would build."""

import contextlib
import math
from collections.abc import Sequence

import pytest
import torch
import transformers as hf
from torch import Tensor
from transformers.generation import logits_process as lp

from labkit.errors import LabkitError
from labkit.warp import build_processors

VOCAB = 9


class Recorder(lp.LogitsProcessor):
    """Keeps every history, and writes into its scores as many a user's processor does."""

    def __init__(self):
        self.seen: list[list[int]] = []

    def __call__(self, input_ids, scores):
        assert input_ids.shape[0] == 1
        self.seen.append(input_ids[0].tolist())
        scores[:, input_ids.sum() % VOCAB] = -math.inf
        return scores


FULL: dict = {
    **{"temperature": 0.7, "top_k": 5, "top_p": 0.8, "min_p": 0.1, "typical_p": 0.9, "repetition_penalty": 1.3},
    **{"no_repeat_ngram_size": 3, "bad_words_ids": [[3], [2, 5]], "min_new_tokens": 4},
    **{"prompt_length": 5, "eos_ids": {1, 4}, "device": "cpu"},
}
NEUTRAL = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "typical_p": 1.0, "repetition_penalty": 1.0}
EXTRAS = {
    "none": [],
    "own": [Recorder()],
    "in place": [Recorder(), lp.NoRepeatNGramLogitsProcessor(7), lp.TemperatureLogitsWarper(0.2)],
    "twice": [lp.NoRepeatNGramLogitsProcessor(7), lp.NoRepeatNGramLogitsProcessor(8)],
}


@pytest.fixture(scope="module")
def llama() -> hf.LlamaForCausalLM:
    shape = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    return hf.LlamaForCausalLM(hf.LlamaConfig(vocab_size=VOCAB, **shape))


def described(processors: Sequence) -> list:
    plain = lambda v: v.tolist() if isinstance(v, Tensor) else v  # noqa: E731
    skip = ("prompt_ignore_length", "bad_word_ids")
    return [(type(p), {k: plain(v) for k, v in vars(p).items() if k not in skip}) for p in processors]


@pytest.mark.parametrize("sampling", [True, False])
@pytest.mark.parametrize("extra", EXTRAS)
@pytest.mark.parametrize("without", [None, "neutral", *list(FULL)[:9], "eos_ids"])
def test_processors_and_their_order_are_those_of_generate(llama, sampling, extra, without):
    chosen = {**FULL, **({} if without != "neutral" else NEUTRAL)}
    if without in FULL:
        chosen[without] = () if without == "eos_ids" else None
    ours = build_processors(**chosen, sampling=sampling, extra=EXTRAS[extra])
    asked = {name: value for name, value in chosen.items() if name not in ("prompt_length", "eos_ids", "device")}
    # typical_p and top_k have a default of their own there, which None would call for
    config = hf.GenerationConfig(do_sample=sampling, **asked)
    for name, value in asked.items():
        setattr(config, name, value)
    config._eos_token_tensor = torch.tensor(sorted(chosen["eos_ids"])) if chosen["eos_ids"] else None
    theirs = llama._get_logits_processor(
        config, input_ids_seq_length=5, logits_processor=lp.LogitsProcessorList(EXTRAS[extra]), device="cpu"
    )
    assert described(ours) == described(theirs)


BAD = {
    "temperature": [0, 0.0, -1.0, math.nan, math.inf, "1", True],
    "top_k": [-1, 2.5, True],
    "top_p": [-0.1, 1.1, "0.9"],
    "min_p": [-0.1, 1.1],
    "typical_p": [0.0, 1.5],
    "repetition_penalty": [0.0, -2.0],
    "no_repeat_ngram_size": [-1, 1.5],
    "min_new_tokens": [-1, 2.5],
    "bad_words_ids": [[], [[]], [3], [[-1]], [["a"]], "ab", 7, [[1], [4]]],
}


@pytest.mark.parametrize("name, value", [(name, value) for name, values in BAD.items() for value in values])
def test_bad_values_are_refused(name, value):
    with pytest.raises(LabkitError, match=f"got {name}=.*; write "):
        build_processors(**{**FULL, name: value}, sampling=True)
    with pytest.raises(LabkitError) if (name, value) != ("temperature", 0) else contextlib.nullcontext():
        build_processors(**{**FULL, name: value}, sampling=False)


def test_whole_numbers_and_tuples_will_do():
    got = build_processors(**{**FULL, "temperature": 2, "top_p": 0, "bad_words_ids": ((3,), (2, 5))}, sampling=True)
    assert [p.temperature for p in got if isinstance(p, lp.TemperatureLogitsWarper)] == [2.0]
