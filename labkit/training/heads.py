"""Recipes for heads that draft from the target's last state: MLPSpeculator and Medusa."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from labkit.errors import LabkitError
from labkit.heads import Medusa, MLPSpeculator, save_heads
from labkit.heads.files import target_head
from labkit.loading import choose_dtype
from labkit.replay import replay_rounds, side_by_side
from labkit.session import HEAD_INPUT
from labkit.training.fit import Schedule, Trained, fit
from labkit.training.material import Material, gather
from labkit.training.states import States, name


class HeadsLoss(nn.Module):
    """The sum of all heads' cross-entropies: from the state of token t, head i is to say token t + i + 2."""

    step = 0

    def __init__(self, heads: Any):
        super().__init__()
        self.heads = heads

    def forward(self, tokens: Int[Tensor, "batch length"], **states: Tensor) -> dict[str, Tensor]:
        """tokens: PADDING behind the end of a row, where nothing is learnt."""
        tokens, state = tokens.long(), states[name(HEAD_INPUT)]
        given, losses = tokens.clamp(min=0), []
        for head, logits, places in _each(self.heads, state, given):
            labels = tokens[:, head + 2 : head + 2 + places]
            losses.append(cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), ignore_index=-1))
        return {"loss": torch.stack(losses).sum()}


def _each(heads: Any, state: Tensor, given: Tensor) -> Iterator[tuple[int, Float[Tensor, "batch places vocab"], int]]:
    """(head, its logits at all places that have a token for it to say, their number), with the text's tokens."""
    current = heads.start(state)
    for head in range(heads.count):
        places = given.shape[1] - head - 2
        current = heads.step(head, current[:, :places], given[:, 1 + head : 1 + head + places, None])
        yield head, heads.logits(head, current), places


@torch.no_grad()
def judge_heads(heads: Any, states: States, lab: Any, batch: int = 8) -> dict[str, float]:
    """How heads do on the target's own greedy continuations, without decoding again.

    head_i: share of the places at which head i, told the tokens before, says the target's own. tokens_per_round, alpha:
    of the rounds that chains of all heads make (exact).
    """
    agree: list[Tensor] = []
    device = lab.backbone.device
    for at in range(0, len(states), batch):
        rows = [states[i] for i in range(at, min(at + batch, len(states)))]
        tokens = torch.stack([row["tokens"] for row in rows]).long().to(device)
        state = torch.stack([row[name(HEAD_INPUT)] for row in rows]).to(device)
        same = torch.zeros((*state.shape[:2], heads.count), dtype=torch.bool, device=device)
        for head, logits, places in _each(heads, state, tokens.clamp(min=0)):
            same[:, :places, head] = logits.argmax(-1) == tokens[:, head + 2 : head + 2 + places]
        # A round with token t + 1 pending reads the state of token t; its first guess is token t + 2.
        lengths = (tokens >= 0).sum(-1).tolist()
        first = [max(0, int(row["begin"]) - 2) for row in rows]
        agree += [same[row, first[row] : length - 2].cpu() for row, length in enumerate(lengths)]
    figures = {}
    for head in range(heads.count):
        said = torch.cat([one[: max(0, len(one) - head), head] for one in agree])
        figures[f"head_{head + 1}"] = said.float().mean().item()
    run = replay_rounds(*side_by_side(agree))
    figures |= {"alpha": run.alpha, "tokens_per_round": run.tokens_per_round}
    return {key: round(value, 4) for key, value in figures.items()}


@contextmanager
def frozen(lab: Any) -> Iterator[None]:
    """The target's weights ask for no gradient inside; afterwards each does as before."""
    before = [(parameter, parameter.requires_grad) for parameter in lab.model.parameters()]
    try:
        for parameter, _ in before:
            parameter.requires_grad_(False)
        yield
    finally:
        for parameter, asked in before:
            parameter.requires_grad_(asked)


def train_heads(
    heads: Any, lab: Any, out: Any, material: Material, *, recipe: dict[str, Any], steps: Sequence[int], batch: int,
    lr: float, eval_every: int, save_every: int, seed: int, dtype: Any, progress: bool,
) -> Trained:  # fmt: skip
    """Teach heads on the text, then on the target's own continuations; a stage of 0 steps is left out."""
    place, done = lab.backbone.device, None
    computed = choose_dtype(dtype, place)
    module = HeadsLoss(heads).to(place, torch.float32)

    def evaluate() -> dict[str, float]:
        with torch.autocast(place.type, computed, enabled=computed != torch.float32):
            return judge_heads(heads, material.held_out, lab)

    def write(folder: Path) -> None:
        save_heads(heads.to(torch.bfloat16), folder, lab)
        heads.to(torch.float32)

    with frozen(lab):
        for stage, (rows, count) in enumerate(zip((material.text, material.own), steps, strict=True), 1):
            if not count or rows is None:
                continue
            known = {"target": rows.index["target"], "target_name": lab.model.config.name_or_path,
                     "states": rows.index["source"], "held_out": material.held_out.index["source"]}  # fmt: skip
            schedule = Schedule(count, batch, lr, save_every=save_every, eval_every=eval_every, seed=seed + stage)
            done = fit(
                module, rows, Path(out) / f"stage{stage}", schedule, write=write, evaluate=evaluate,
                config={**recipe, "stage": stage, "states": rows.index["source"], "target": rows.index["target"]},
                provenance=known, tokens_per_row=rows.index["source"]["length"], device=place, dtype=computed,
                progress=progress,
            )  # fmt: skip
    if done is None:
        raise LabkitError(f"got steps={tuple(steps)}; write at least one step in a stage that has rows")
    return done


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
    prompts: JSONL file of prompts to continue; default: the beginnings of the corpus' rows
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
        length=length, prompt_tokens=prompt_tokens, new_tokens=new_tokens, seed=seed, progress=progress,
    )  # fmt: skip
    torch.manual_seed(seed)
    made = MLPSpeculator(lab.backbone.head_width, lab.backbone.vocab, heads, inner, tie=tie, scale_input=scale_input)
    start_small(made)
    recipe = dict(recipe="mlp-speculator", heads=heads, inner=inner, tie=tie, scale_input=scale_input, dtype=str(dtype))
    return train_heads(
        made, lab, out, material, recipe=recipe, steps=(text_steps, own_steps), batch=batch, lr=lr,
        eval_every=eval_every, save_every=save_every, seed=seed, dtype=dtype, progress=progress,
    )  # fmt: skip


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
    text_steps: int = 2000,
    own_steps: int = 1000,
    text_rows: int = 4000,
    own_rows: int = 1000,
    eval_rows: int = 32,
    length: int = 256,
    prompt_tokens: int = 64,
    new_tokens: int = 192,
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
    prompts: JSONL file of prompts to continue; default: the beginnings of the corpus' rows
    held_out: share of the files (or of the prompts) held out for evaluation
    heads: tokens that they predict
    layers: ResBlocks in each head
    version: 1, with output layers of their own that start as the target's; or 2, through the target's head
    text_steps: steps on text
    own_steps: steps on the target's own continuations
    text_rows: rows of text to compute states of
    own_rows: continuations to draw
    eval_rows: greedy continuations to evaluate on
    length: tokens of a row of text
    prompt_tokens: of a prompt cut from the corpus
    new_tokens: of a continuation
    batch: rows a step
    lr: highest learning rate
    eval_every: steps between evaluations
    save_every: steps between checkpoints
    seed: of order and continuations
    dtype: of the computation; the weights are float32 while they learn
    progress: show a bar
    """
    if version not in (1, 2):
        raise LabkitError(f"got version={version!r}; write 1 or 2")
    material = gather(
        lab, Path(out) / "states", (HEAD_INPUT,), corpus=corpus, prompts=prompts, held_out=held_out,
        text_rows=text_rows if text_steps else 0, own_rows=own_rows if own_steps else 0, eval_rows=eval_rows,
        length=length, prompt_tokens=prompt_tokens, new_tokens=new_tokens, seed=seed, progress=progress,
    )  # fmt: skip
    backbone = lab.backbone
    made = Medusa(
        backbone.head_width, backbone.vocab, heads, layers, base=target_head(backbone) if version == 2 else None
    )
    if version == 1:
        with torch.no_grad():
            for head in made.heads:
                head[-1].weight.copy_(backbone.model.get_output_embeddings().weight)  # type: ignore
    recipe = dict(recipe="medusa", heads=heads, layers=layers, version=version, dtype=str(dtype))
    return train_heads(
        made, lab, out, material, recipe=recipe, steps=(text_steps, own_steps), batch=batch, lr=lr,
        eval_every=eval_every, save_every=save_every, seed=seed, dtype=dtype, progress=progress,
    )  # fmt: skip


def start_small(heads: MLPSpeculator) -> None:
    """Weights as published: normal with a deviation of 1 / sqrt(inner), norms 1 and 0."""
    for module in heads.modules():
        if isinstance(module, nn.Embedding | nn.Linear):
            nn.init.normal_(module.weight, 0.0, heads.inner**-0.5)
