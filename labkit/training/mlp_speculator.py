"""The recipe for MLPSpeculators."""

from pathlib import Path
from typing import Any

import torch
from torch import nn

from labkit.heads import MLPSpeculator
from labkit.session import HEAD_INPUT
from labkit.training.fit import Trained
from labkit.training.heads import train_heads
from labkit.training.material import gather


def mlp_speculator(
    lab: Any,
    out: Any,
    *,
    corpus: Any = "stdlib",
    prompts: Any = None,
    held_out: Any = 0.05,
    heads: int = 3,
    inner: int = 256,
    tie: bool = True,
    scale_input: bool = True,
    text_steps: int = 2000,
    own_steps: int = 1000,
    text_rows: int = 4000,
    own_rows: int = 1000,
    eval_rows: int = 32,
    length: int = 256,
    prompt_tokens: int = 64,
    new_tokens: int = 192,
    temperature: float = 1.0,
    batch: int = 8,
    lr: float = 1e-3,
    eval_every: int = 200,
    save_every: int = 100,
    seed: int = 0,
    dtype: Any = "bfloat16",
    progress: bool = True,
) -> Trained:
    """Train an MLPSpeculator: first on text, then on the target's own continuations (2404.19124).

    out: the run's folder; a run that stopped goes on
    corpus: stdlib, stdlib-docstrings, package:NAME, a file or a folder
    prompts: JSONL file of prompts to continue, or instructions; default: the beginnings of the corpus' rows
    held_out: share of the files (or of the prompts) held out for evaluation
    heads: tokens that it predicts
    inner: width of its recurrent state
    tie: one embedding, head and norm for all stages
    scale_input: normalise the target's state first
    text_steps: steps on text
    own_steps: steps on the target's own continuations
    text_rows: rows of text to compute states of
    own_rows: continuations to draw
    eval_rows: greedy continuations to evaluate on
    length: tokens of a row of text
    prompt_tokens: of a prompt cut from the corpus
    new_tokens: of a continuation
    temperature: of the draws of the continuations to learn from
    batch: rows a step
    lr: highest learning rate
    eval_every: steps between evaluations
    save_every: steps between checkpoints
    seed: of weights, order and continuations
    dtype: of the computation; the weights are float32 while they learn
    progress: show a bar
    """
    material = gather(
        lab, Path(out) / "states", (HEAD_INPUT,), corpus=corpus, prompts=prompts, held_out=held_out,
        text_rows=text_rows if text_steps else 0, own_rows=own_rows if own_steps else 0, eval_rows=eval_rows,
        length=length, prompt_tokens=prompt_tokens, new_tokens=new_tokens,
        temperature=temperature, seed=seed, progress=progress,
    )  # fmt: skip
    torch.manual_seed(seed)
    made = MLPSpeculator(lab.backbone.head_width, lab.backbone.vocab, heads, inner, tie=tie, scale_input=scale_input)
    start_small(made)
    recipe = dict(recipe="mlp-speculator", heads=heads, inner=inner, tie=tie, scale_input=scale_input, dtype=str(dtype))
    return train_heads(
        made, lab, out, material, recipe=recipe, steps=(text_steps, own_steps), batch=batch, lr=lr,
        eval_every=eval_every, save_every=save_every, seed=seed, dtype=dtype, progress=progress,
    )  # fmt: skip


def start_small(heads: MLPSpeculator) -> None:
    """Weights as published: normal with a deviation of 1 / sqrt(inner), norms 1 and 0."""
    for module in heads.modules():
        if isinstance(module, nn.Embedding | nn.Linear):
            nn.init.normal_(module.weight, 0.0, heads.inner**-0.5)
