"""How heads that draft from the target's last state learn, and how they are judged."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from labkit.data import PADDING
from labkit.errors import LabkitError
from labkit.heads import DraftVocabulary, load_heads, save_heads
from labkit.loading import choose_dtype
from labkit.replay import replay_rounds, side_by_side
from labkit.session import HEAD_INPUT
from labkit.training.fit import Schedule, Trained, fit
from labkit.training.material import Material
from labkit.training.states import States, name


class HeadsLoss(nn.Module):
    """The sum of all heads' cross-entropies: from the state of token t, head i is to say token t + i + 2."""

    step = 0

    def __init__(self, heads: Any):
        super().__init__()
        self.heads = heads

    def forward(self, tokens: Int[Tensor, "batch length"], **states: Tensor) -> dict[str, Tensor]:
        """tokens: PADDING behind the end of a row, where nothing is learnt."""
        tokens, state, losses = tokens.long(), states[name(HEAD_INPUT)], []
        labels, base = tokens, getattr(self.heads, "base", None)
        if isinstance(base, DraftVocabulary):  # other tokens cannot be learnt
            place = torch.full((base.vocab + 1,), PADDING, device=tokens.device)
            labels = place.index_copy(0, base.tokens, torch.arange(len(base.tokens), device=tokens.device))[tokens]
        for head, logits, places in _each(self.heads, state, tokens.clamp(min=0)):
            if isinstance(base, DraftVocabulary):
                logits = logits[..., base.tokens]
            right = labels[:, head + 2 : head + 2 + places].flatten()
            losses.append(cross_entropy(logits.flatten(0, 1).float(), right, ignore_index=PADDING))
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
            # The next stage starts from what this one wrote, whether that was now or in an earlier run.
            heads.to(place, torch.float32)
            heads.load_state_dict(load_heads(done.result, lab, dtype=torch.float32).state_dict())
            heads.requires_grad_(True)
    if done is None:
        raise LabkitError(f"got steps={tuple(steps)}; write at least one step in a stage that has rows")
    return done


def most_frequent(rows: States, vocab: int, count: int) -> Int[Tensor, "count"]:
    """The ids of the `count` tokens that occur most in the rows, in order."""
    seen = torch.zeros(vocab, dtype=torch.long)
    for at in range(len(rows)):
        tokens = rows[at]["tokens"].long()
        seen += torch.bincount(tokens[tokens >= 0], minlength=vocab)
    return seen.topk(count).indices.sort().values
