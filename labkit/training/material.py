"""What heads and adapters learn from and are judged on: states of text, of own continuations, of held-out ones."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from labkit import data
from labkit.errors import LabkitError
from labkit.prompts import read_prompts
from labkit.training.asked import instructions
from labkit.training.states import OwnRows, Source, States, TextRows, cache_states


@dataclass(frozen=True)
class Material:
    """States to learn from, on text and on the target's own continuations, and to judge on (greedy continuations)."""

    text: States | None
    own: States | None
    held_out: States


def gather(
    lab: Any, folder: Path, depths: Sequence[int], *, corpus: Any, prompts: Any, held_out: Any, text_rows: int,
    own_rows: int, eval_rows: int, length: int, prompt_tokens: int, new_tokens: int, temperature: float,
    seed: int, progress: bool,
) -> Material:  # fmt: skip
    """Compute, or find in `folder`, all states of a recipe. The arguments are those of `mlp_speculator`."""
    if lab.tokenizer is None:
        raise LabkitError("training needs the target's tokenizer; write labkit.Lab(model, tokenizer)")
    train, rest = data.named(corpus).split(held_out)
    if prompts is None:
        ask, judge = (_beginnings(side.rows(lab.tokenizer, length), prompt_tokens) for side in (train, rest))
    else:
        every = _prompts(lab, instructions(own_rows + eval_rows, seed) if prompts == "instructions" else prompts)
        cut = min(eval_rows, max(1, round(len(every) * held_out)))
        judge, ask = every[:cut], every[cut:]
    sources: list[tuple[str, Source | None]] = [
        ("text", TextRows(_spread(train.rows(lab.tokenizer, length), text_rows)) if text_rows else None),
        ("own", OwnRows(tuple(_spread(ask, own_rows)), new_tokens, temperature, seed) if own_rows else None),
        ("held-out", OwnRows(tuple(_spread(judge, eval_rows)), new_tokens, 0.0, seed)),
    ]
    made: list[States | None] = []
    for kind, source in sources:
        if source is None:
            made.append(None)
            continue
        with tqdm(total=source.count, desc=f"states: {kind}", unit="row", disable=not progress or None) as bar:
            made.append(
                cache_states(
                    lab, source, folder / kind, depths, progress=lambda done, bar=bar: bar.update(done - bar.n)
                )
            )
    assert made[2] is not None
    return Material(made[0], made[1], made[2])


def _beginnings(rows: Any, tokens: int) -> list[tuple[int, ...]]:
    return [tuple(row[:tokens]) for row in rows.tolist()]


def _prompts(lab: Any, path: Any) -> list[tuple[int, ...]]:
    """Prompts of a JSONL file, or a list of texts or chat messages, through the chat template where there is one."""
    if isinstance(path, str | Path):
        try:
            texts = [json.loads(line)["prompt"] for line in Path(path).read_text().splitlines() if line.strip()]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise LabkitError(
                f'{str(path)!r} is no file of prompts ({type(error).__name__}: {error}); write {{"prompt": "…"}} in '
                "each line"
            ) from error
    else:
        texts = list(path)
    if len(texts) < 2:
        raise LabkitError(f"got {len(texts)} prompts; at least two are needed, one of them to judge on")
    chat = getattr(lab.tokenizer, "chat_template", None) is not None
    asked: list[Any] = [
        [{"role": "user", "content": text}] if chat and isinstance(text, str) else text for text in texts
    ]
    return [tuple(row) for row in read_prompts(asked, None, lab.tokenizer, lab.backbone.vocab).rows]


def _spread(rows: Any, count: int) -> Any:
    """`count` rows from all over the text, or all there are."""
    if count >= len(rows):
        return rows
    stride = len(rows) / count
    return (
        rows[[int(i * stride) for i in range(count)]]
        if hasattr(rows, "shape")
        else [rows[int(i * stride)] for i in range(count)]
    )
