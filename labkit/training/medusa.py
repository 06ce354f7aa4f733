"""The recipe for Medusa heads."""

from pathlib import Path
from typing import Any

import torch

from labkit.errors import LabkitError
from labkit.heads import Medusa
from labkit.heads.files import target_head
from labkit.session import HEAD_INPUT
from labkit.training.fit import Trained
from labkit.training.heads import most_frequent, train_heads
from labkit.training.material import gather


def medusa(
    lab: Any,
    out: Any,
    *,
    corpus: Any = "stdlib",
    prompts: Any = None,
    held_out: Any = 0.05,
    heads: int = 3,
    layers: int = 1,
    version: int = 2,
    draft_vocab: int = 0,
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
    """Train Medusa heads on a target that does not change (Medusa-1, 2401.10774).

    out: the run's folder; a run that stopped goes on
    corpus: stdlib, stdlib-docstrings, package:NAME, a file or a folder
    prompts: JSONL file of prompts to continue, or instructions; default: the beginnings of the corpus' rows
    held_out: share of the files (or of the prompts) held out for evaluation
    heads: tokens that they predict
    layers: ResBlocks in each head
    version: 1, with output layers of their own that start as the target's; or 2, through the target's head
    draft_vocab: of version 2: speak only so many of the most frequent tokens; 0: all
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
    seed: of order and continuations
    dtype: of the computation; the weights are float32 while they learn
    progress: show a bar
    """
    if version not in (1, 2) or not 0 <= draft_vocab <= lab.backbone.vocab or (draft_vocab and version == 1):
        raise LabkitError(
            f"got version={version!r}, draft_vocab={draft_vocab!r}; write version 1 or 2, and with 2 a draft_vocab of "
            f"up to the target's {lab.backbone.vocab} tokens"
        )
    material = gather(
        lab, Path(out) / "states", (HEAD_INPUT,), corpus=corpus, prompts=prompts, held_out=held_out,
        text_rows=text_rows if text_steps else 0, own_rows=own_rows if own_steps else 0, eval_rows=eval_rows,
        length=length, prompt_tokens=prompt_tokens, new_tokens=new_tokens,
        temperature=temperature, seed=seed, progress=progress,
    )  # fmt: skip
    backbone, base = lab.backbone, None
    if version == 2:
        rows = material.own or material.text
        base = target_head(backbone, most_frequent(rows, backbone.vocab, draft_vocab) if draft_vocab and rows else None)
    made = Medusa(backbone.head_width, backbone.vocab, heads, layers, base=base)
    if version == 1:
        with torch.no_grad():
            for head in made.heads:
                head[-1].weight.copy_(backbone.model.get_output_embeddings().weight)  # type: ignore
    recipe = dict(
        recipe="medusa", heads=heads, layers=layers, version=version, draft_vocab=draft_vocab, dtype=str(dtype)
    )
    return train_heads(
        made, lab, out, material, recipe=recipe, steps=(text_steps, own_steps), batch=batch, lr=lr,
        eval_every=eval_every, save_every=save_every, seed=seed, dtype=dtype, progress=progress,
    )  # fmt: skip
