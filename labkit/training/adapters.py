"""The recipe for what stands at an exit: an adapter, a head over a draft vocabulary, a classifier that lets rows go."""

from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from labkit.errors import LabkitError
from labkit.heads import Affine, DraftVocabulary, ExitClassifier, Kangaroo, save_adapter
from labkit.loading import choose_dtype
from labkit.replay import ahead, replay_rounds, side_by_side
from labkit.session import HEAD_INPUT
from labkit.training.fit import Schedule, Trained, fit
from labkit.training.heads import frozen, most_frequent
from labkit.training.material import gather
from labkit.training.states import States, name

KINDS: dict[str, Any] = {
    "kangaroo": lambda lab: Kangaroo.like(lab), "affine": lambda lab: Affine(lab.backbone.width),
    "classifier": lambda lab: ExitClassifier(lab.backbone.width), "identity": lambda lab: nn.Identity(),
}  # fmt: skip
GUESSES = 4
"""Draft length at which tokens per round are replayed."""


class ExitLoss(nn.Module):
    """What an adapter with its head says of the exit state, against what the target says: soft cross-entropy.

    With a draft vocabulary the target's law is taken over its tokens. A classifier learns whether the exit, through the
    target's head, says the target's best token.
    """

    step = 0
    lab: Any

    def __init__(self, adapter: nn.Module, head: DraftVocabulary | None, lab: Any, exit: int):
        super().__init__()
        self.adapter, self.head, self.exit = adapter, head, exit
        self.__dict__["lab"] = lab  # the target is not one of our sub-modules

    def logits(self, state: Tensor) -> Tensor:
        """Of the draft: over its own vocabulary, if it has one."""
        hidden = self.adapter(state.float())
        if self.head is not None:
            return self.head.head(hidden)
        backbone = self.lab.backbone
        hidden = hidden.to(backbone.dtype)
        return backbone.logits(hidden) if getattr(self.adapter, "normed", False) else backbone.head(hidden)

    def forward(self, tokens: Int[Tensor, "batch length"], **states: Tensor) -> dict[str, Tensor]:
        """Places at which the text goes on; behind its end nothing is learnt."""
        there, state = tokens[:, 1:] >= 0, states[name(self.exit)]
        with torch.no_grad():
            target = self.lab.backbone.logits(states[name(HEAD_INPUT)].to(self.lab.backbone.dtype)).float()
        if isinstance(self.adapter, ExitClassifier):
            with torch.no_grad():
                says = self.lab.backbone.head(state.to(self.lab.backbone.dtype)).argmax(-1)
            right = (says == target.argmax(-1)).float()
            loss = binary_cross_entropy_with_logits(
                self.adapter(state.float())[..., 0].float(), right, reduction="none"
            )
        else:
            if self.head is not None:
                target = target[..., self.head.tokens]
            loss = -(target.softmax(-1) * self.logits(state).float().log_softmax(-1)).sum(-1)
        return {"loss": (loss * there).sum() / there.sum()}


@torch.no_grad()
def judge_exit(module: ExitLoss, states: States, batch: int = 8) -> dict[str, float]:
    """How an exit does on the target's own greedy continuations, without decoding again.

    agree: share of places where it says the target's own token; bare: the same for the exit without adapter and head.
    tokens_per_round, alpha: of the rounds that drafts of 4 make (exact). A classifier has right (share of places at
    which it tells whether the exit is right), leaves (share it lets go at 0.5), and agree (of those it lets go).
    """
    agree: list[Bool[Tensor, "places"]] = []
    bare: list[Tensor] = []
    leaves: list[Tensor] = []
    backbone, device = module.lab.backbone, module.lab.backbone.device
    for at in range(0, len(states), batch):
        rows = [states[i] for i in range(at, min(at + batch, len(states)))]
        tokens = torch.stack([row["tokens"] for row in rows]).long().to(device)
        state = torch.stack([row[name(module.exit)] for row in rows]).to(device, backbone.dtype)
        plain = backbone.head(state).argmax(-1) == tokens[:, 1:]
        if isinstance(module.adapter, ExitClassifier):
            same, go = plain, module.adapter(state.float())[..., 0].sigmoid() >= 0.5
        else:
            logits = module.logits(state)
            best = logits.argmax(-1)
            same, go = (best if module.head is None else module.head.tokens[best]) == tokens[:, 1:], plain
        for row, length in enumerate((tokens >= 0).sum(-1).tolist()):
            part = slice(int(rows[row]["begin"]) - 1, length - 1)
            agree.append(same[row, part].cpu())
            bare.append(plain[row, part].cpu())
            leaves.append(go[row, part].cpu())
    said, went, naked = torch.cat(agree).float(), torch.cat(leaves), torch.cat(bare).float()
    if isinstance(module.adapter, ExitClassifier):
        figures = {"right": (went == (said > 0)).float().mean(), "leaves": went.float().mean(),
                   "agree": said[went].mean() if went.any() else torch.zeros(()), "bare": naked.mean()}  # fmt: skip
        return {key: round(float(value), 4) for key, value in figures.items()}
    together, known = side_by_side([one[:, None] for one in agree])
    run = replay_rounds(ahead(together[..., 0], GUESSES), known)
    figures = {"agree": said.mean().item(), "bare": naked.mean().item(), "alpha": run.alpha,
               "tokens_per_round": run.tokens_per_round}  # fmt: skip
    return {key: round(value, 4) for key, value in figures.items()}


def exit_adapter(
    lab: Any,
    out: Any,
    *,
    kind: str = "kangaroo",
    exit: int = 0,
    draft_vocab: int = 0,
    corpus: Any = "stdlib",
    prompts: Any = None,
    held_out: Any = 0.05,
    steps: int = 2000,
    text_rows: int = 0,
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
    """Train what stands at an exit, on the target's own continuations or on text (Kangaroo, 2404.18911).

    out: the run's folder; a run that stopped goes on
    kind: kangaroo, affine, classifier (for a dynamic exit), or identity (a head over a draft vocabulary alone)
    exit: the exit layer; 0: at a sixth of the layers
    draft_vocab: a head of its own over so many of the most frequent tokens; 0: the target's head
    corpus: stdlib, stdlib-docstrings, package:NAME, a file or a folder
    prompts: JSONL file of prompts to continue, or instructions; default: the beginnings of the corpus' rows
    held_out: share of the files (or of the prompts) held out for evaluation
    steps: to train
    text_rows: rows of text to learn from, instead of the target's own continuations
    own_rows: continuations to draw and to learn from
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
    backbone = lab.backbone
    if kind not in KINDS:
        raise LabkitError(f"got kind={kind!r}; write one of {', '.join(KINDS)}")
    if (kind == "identity" and not draft_vocab) or (kind == "classifier" and draft_vocab):
        raise LabkitError("kind='identity' needs draft_vocab=…, and kind='classifier' has none")
    if not 0 <= draft_vocab <= backbone.vocab:
        raise LabkitError(f"got draft_vocab={draft_vocab}; the target has {backbone.vocab} tokens")
    exit = exit or max(1, backbone.depth // 6)
    backbone.check_exit(exit)
    material = gather(
        lab, Path(out) / "states", (exit, HEAD_INPUT), corpus=corpus, prompts=prompts, held_out=held_out,
        text_rows=text_rows, own_rows=0 if text_rows else own_rows, eval_rows=eval_rows, length=length,
        prompt_tokens=prompt_tokens, new_tokens=new_tokens,
        temperature=temperature, seed=seed, progress=progress,
    )  # fmt: skip
    rows = material.text or material.own
    if rows is None:
        raise LabkitError("got text_rows=0 and own_rows=0; write how many rows to learn from")
    torch.manual_seed(seed)
    adapter, place = KINDS[kind](lab), backbone.device
    head = _draft_head(lab, rows, draft_vocab, getattr(adapter, "normed", False)) if draft_vocab else None
    module = ExitLoss(adapter, head, lab, exit).to(place, torch.float32)
    computed = choose_dtype(dtype, place)

    def evaluate() -> dict[str, float]:
        with torch.autocast(place.type, computed, enabled=computed != torch.float32):
            return judge_exit(module, material.held_out)

    def write(folder: Path) -> None:
        save_adapter(adapter.to(torch.bfloat16), folder, lab, exit, head=head and head.to(torch.bfloat16))

    with frozen(lab):
        return fit(
            module, rows, out, Schedule(steps, batch, lr, save_every=save_every, eval_every=eval_every, seed=seed),
            write=write, evaluate=evaluate,
            config=dict(recipe="exit-adapter", kind=kind, exit=exit, draft_vocab=draft_vocab, dtype=str(computed),
                        states=rows.index["source"], target=rows.index["target"]),
            provenance={"target": rows.index["target"], "target_name": lab.model.config.name_or_path,
                        "states": rows.index["source"], "held_out": material.held_out.index["source"]},
            tokens_per_row=rows.index["source"]["length"], device=place, dtype=computed, progress=progress,
        )  # fmt: skip


def _draft_head(lab: Any, rows: States, count: int, normed: bool) -> DraftVocabulary:
    """A head over the most frequent tokens of the rows; it starts from the target's own rows for them."""
    ids = most_frequent(rows, lab.backbone.vocab, count)
    made = DraftVocabulary.reduced(lab.backbone.width, ids, lab.backbone.vocab, norm=not normed)
    norm, linear = made.head.children()
    with torch.no_grad():
        linear.weight.copy_(lab.model.get_output_embeddings().weight[ids.to(lab.backbone.device)])  # type: ignore
        final = lab.backbone.rms_weight()
        if isinstance(norm, nn.RMSNorm) and final is not None:
            norm.weight.copy_(final)
    return made
