"""Generations of several strategies side by side: the table, and whether the texts are the same."""

import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from labkit.acceptance import Rejection
from labkit.backbone import Backbone
from labkit.draft import Draft
from labkit.protocol import Acceptance, Drafter
from labkit.session import Session
from labkit.trace import Generation

NEAR_TIE = {torch.float64: 1e-9, torch.float32: 1e-3, torch.float16: 3e-2, torch.bfloat16: 0.25}
"""Gap between two tokens' logits below which a difference in greedy text is rounding, by dtype."""


@dataclass(frozen=True)
class Difference:
    """Where two greedy texts of one prompt part: row, index of the first differing new token, and the gap there.

    gap: how far the lower of the two tokens' logits is below the highest; infinite where one text merely ends.
    """

    row: int
    index: int
    gap: float
    near_tie: bool

    def __str__(self) -> str:
        kind = "near-tie" if self.near_tie else "DIFFERENT"
        return f"{kind} at token {self.index} of row {self.row} (logit gap {self.gap:.2g})"


@torch.inference_mode()
def differences(
    backbone: Backbone, prompts: Sequence[Sequence[int]], ours: Sequence, theirs: Sequence
) -> list[Difference]:
    """Rows in which two lists of new tokens differ, with the target's logit gap at the first difference."""
    found = []
    for row, (prompt, a, b) in enumerate(zip(prompts, ours, theirs, strict=True)):
        if list(a) == list(b):
            continue
        index = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), None)
        if index is None:
            found.append(Difference(row, min(len(a), len(b)), float("inf"), False))
            continue
        ids = [*prompt, *a[:index]]
        session = Session(backbone, 1, len(ids))
        session.prefill([ids])
        logits = session.verify(Draft.empty(session.tokens))[0, -1].double()
        gap = (logits.max() - logits[[a[index], b[index]]].min()).item()
        found.append(Difference(row, index, gap, gap < NEAR_TIE.get(backbone.dtype, 0.25)))
    return found


def named(drafters: Sequence[Drafter]) -> dict[str, Drafter]:
    """Drafters by what they print as, each one of its own: a second of the same name is marked (2)."""
    found: dict[str, Drafter] = {}
    for drafter in drafters:
        name, count = repr(drafter), 1
        while found.get(name, drafter) != drafter:
            count += 1
            name = f"{drafter!r} ({count})"
        found[name] = drafter
    return found


@dataclass(frozen=True)
class Entry:
    """One strategy over all prompts; speeds are ratios of sums, never means of ratios."""

    name: str
    tokens_per_second: float
    speedup: float
    tokens_per_round: float
    acceptance_rate: float | None
    alpha: float | None
    same_text: str


@dataclass(frozen=True)
class Comparison:
    """What `Lab.compare` returns: `entries` for the table, `generations[name]` (one a prompt), and `notes`."""

    entries: list[Entry]
    generations: Mapping[str, list[Generation]]
    notes: list[str]

    def cells(self) -> list[list[str]]:
        """The table as text, heading first."""
        heading = ["strategy", "tokens/s", "speed-up", "tokens/round", "acceptance rate", "same text"]
        share = lambda value: "–" if value is None else f"{value:.2f}"  # noqa: E731
        return [heading] + [
            [e.name, f"{e.tokens_per_second:.1f}", f"{e.speedup:.2f}x", f"{e.tokens_per_round:.2f}",
             share(e.acceptance_rate), e.same_text] for e in self.entries
        ]  # fmt: skip

    def __str__(self) -> str:
        return as_text(self.cells(), self.notes)

    def _repr_html_(self) -> str:
        return as_html(self.cells(), self.notes)


def as_text(cells: Sequence[Sequence[str]], notes: Sequence[str]) -> str:
    """A table, heading first, with words in its first and last column and numbers between, and notes below it."""
    widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]
    lines = [
        "  ".join(
            cell.ljust(w) if i in (0, len(widths) - 1) else cell.rjust(w)
            for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        )
        for row in cells
    ]
    return "\n".join([lines[0].rstrip(), "-" * len(lines[0]), *(x.rstrip() for x in lines[1:]), *notes])


def as_html(cells: Sequence[Sequence[str]], notes: Sequence[str]) -> str:
    """The same for a notebook."""
    look = lambda at: f"padding:3px 8px;line-height:1.3;text-align:{'right' if at else 'left'}"  # noqa: E731
    cell = lambda tag, at, value: f'<{tag} style="{look(at)}">{html.escape(value)}</{tag}>'  # noqa: E731
    row = lambda tag, values: f"<tr>{''.join(cell(tag, at, v) for at, v in enumerate(values))}</tr>"  # noqa: E731
    below = "".join(f"<p>{html.escape(note)}</p>" for note in notes)
    return f"<table>{row('th', cells[0])}{''.join(row('td', c) for c in cells[1:])}</table>{below}"


def caveats(rule: Acceptance, sampling: bool, early_exit: int | None, depth: int) -> list[str]:
    """What "same text" cannot mean in a comparison under these settings."""
    found = []
    if early_exit is not None:
        found.append(
            f"early_exit={early_exit}: the target is the first {early_exit} of {depth} layers (lossy); 'same text' "
            "compares with that cut model"
        )
    if not rule.lossless:
        found.append(
            f"{rule} is lossy: it keeps drafted tokens that the target would not have chosen, texts may differ"
        )
    elif sampling and isinstance(rule, Rejection):
        found.append(f"{rule} keeps the law of the texts, not the texts; acceptance=labkit.Match() gives equal texts")
    return found


def tabulate(
    backbone: Backbone,
    generations: Mapping[str, list[Generation]],
    baseline: str,
    greedy: bool,
    notes: Sequence[str] = (),
) -> Comparison:
    """Compare the generations of the same prompts by several strategies with those of `baseline`."""
    entries, notes = [], list(notes)
    speed = lambda outs: sum(o.new_tokens for o in outs) / sum(o.seconds for o in outs)  # noqa: E731
    for name, outs in generations.items():
        same, ties, unlike = 0, 0, 0
        for index, (out, plain) in enumerate(zip(outs, generations[baseline], strict=True)):
            parted = [] if out.tokens == plain.tokens else differences(backbone, out.prompts, plain.tokens, out.tokens)
            ties += any(parted) and all(d.near_tie for d in parted) and greedy
            unlike += any(not d.near_tie or not greedy for d in parted)
            same += not parted
            notes += [f"{name}, prompt {index}: {d}" for d in parted if greedy]
        text = "yes" if same == len(outs) else f"{same} of {len(outs)}" + (f", {ties} near-tie" if ties else "")
        text += f", {unlike} DIFFERENT" if unlike and greedy and outs[0].lossless else ""
        drafted, accepted = sum(o.drafted for o in outs), sum(o.accepted for o in outs)
        judged = accepted + sum(o.rejections for o in outs)
        entries.append(
            Entry(
                name=name,
                tokens_per_second=speed(outs),
                speedup=speed(outs) / speed(generations[baseline]),
                tokens_per_round=sum(o.new_tokens for o in outs) / sum(o.row_rounds for o in outs),
                acceptance_rate=accepted / drafted if drafted else None,
                alpha=accepted / judged if judged else None,
                same_text=text,
            )
        )
    return Comparison(entries, generations, notes)
