"""A text token by token on a notebook's page: what was accepted, what was rejected, what the target said itself."""

import html
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from labkit.compare import as_html as table_html
from labkit.compare import as_text as table_text
from labkit.errors import LabkitError
from labkit.trace import Generation
from labkit.view.letters import Spelled, Speller, Walk, as_html, visible

MOST = 400
PROMPT_TOKENS = 60
BASE = "unicode-bidi:isolate;padding:1px 0;"
STYLES = {
    "prompt": "opacity:.6;",
    "accepted": "border-bottom:2px solid #0072B2;background:rgba(0,114,178,.16);",
    "rejected": "border-bottom:2px dashed #D55E00;background:rgba(213,94,0,.16);text-decoration:line-through;",
    "target": "border-bottom:4px double #009E73;font-weight:bold;",
}
"""Signs besides colour: the kind of underline, a stroke, weight. The letters keep the page's own colour."""
NAMES = {
    "prompt": "prompt",
    "accepted": "accepted draft",
    "rejected": "rejected draft",
    "unjudged": "drafted behind or beside it, not judged",
    "target": "target's own token",
}
FRAMES = {"prompt": ("", ""), "accepted": ("[", "]"), "rejected": ("~", "~"), "target": ("*", "*")}
HEADING = ["#", "token", "text", "kind", "round", "exit layer", "draft p", "target p", "target's token", "ms"]


@dataclass(frozen=True)
class Cell:
    """One token. place: among the new tokens (-1 in the prompt), a drafted one's where it would have stood.

    milliseconds: of its round, by phase. unjudged: how many drafted tokens the round left unjudged, at a rejected one.
    """

    token: int
    spelled: Spelled
    kind: str
    place: int = -1
    round: int | None = None
    exit_layer: int | None = None
    draft_probability: float | None = None
    target_probability: float | None = None
    target_text: str = ""
    milliseconds: tuple[tuple[str, float], ...] = ()

    @property
    def shown(self) -> str:
        """Its text with signs, or its bytes."""
        return self.spelled.instead or visible(self.spelled.text) or "∅"

    def title(self) -> str:
        """The figures, a line each."""
        lines = [f"{NAMES[self.kind]}: {self.shown}", f"token id {self.token}"]
        if self.draft_probability is not None:
            lines.append(f"draft probability {self.draft_probability:.3f}")
        if self.target_probability is not None:
            lines.append(f"target probability {self.target_probability:.3f}")
        if self.kind == "rejected":
            lines.append(f"the target's token here: {self.target_text}")
        lines += [f"exit layer {self.exit_layer}"] if self.exit_layer else []
        if self.round is not None:
            phases = ", ".join(f"{phase} {ms:.1f}" for phase, ms in self.milliseconds)
            spent = f": {sum(ms for _, ms in self.milliseconds):.1f} ms ({phases})" if phases else ""
            lines.append(f"round {self.round}{spent}")
        return "\n".join(lines)

    def html(self) -> str:
        """A span; a line break breaks the line, unless it was only drafted."""
        said = html.escape(self.title()).replace("\n", "&#10;")
        text = self.spelled.text
        inner = html.escape(self.shown) if self.spelled.instead or not text else as_html(text, self.kind != "rejected")
        return f'<span class="labkit-{self.kind}" style="{BASE}{STYLES[self.kind]}" title="{said}">{inner}</span><wbr>'

    def row(self) -> list[str]:
        """Cells of the table."""
        share = lambda value: "–" if value is None else f"{value:.3f}"  # noqa: E731
        ms = f"{sum(ms for _, ms in self.milliseconds):.1f}" if self.milliseconds else "–"
        return [str(self.place) if self.place >= 0 else "–", str(self.token), self.shown, NAMES[self.kind],
                "–" if self.round is None else str(self.round), str(self.exit_layer or "–"),
                share(self.draft_probability), share(self.target_probability), self.target_text, ms]  # fmt: skip


def cells(result: Generation, speller: Speller, row: int = 0) -> list[Cell]:
    """All tokens of a row in the order of events: the prompt, then of each round its drafted tokens and the target's.

    Drafted tokens that were not accepted stand behind those that were, the rejected one first.
    """
    walk, found = Walk(speller), []
    for token in result.prompts[row]:
        found.append(Cell(token, walk.step(token), "prompt"))
    place = 0
    for number, happened in enumerate(result.rounds):
        for cell in _round(happened, row, number, place, walk, len(result.tokens[row])):
            found.append(cell)
            place += cell.kind in ("accepted", "target")
    return found


def _round(happened: Any, row: int, number: int, place: int, walk: Walk, end: int) -> Iterator[Cell]:
    tokens, drafted, path = happened.tokens[row], happened.drafted[row], happened.path[row]
    ms = tuple((phase, 1000 * s) for phase, s in happened.seconds[row].items())
    depths: list[int] = []
    for parent in happened.parents[row]:
        depths.append(0 if parent < 0 else depths[parent] + 1)

    def of(node: int, kind: str, spelled: Spelled) -> Cell:
        said = happened.target[row][happened.parents[row][node] + 1]
        own = walk.aside(said) if kind != "accepted" else spelled
        return Cell(
            drafted[node], spelled, kind, place + depths[node], number,
            happened.exit[row][node] if happened.exit[row] else None,
            happened.q[row][node] if happened.q[row] else None, happened.p[row][node],
            (own.instead or visible(own.text)) if kind != "unjudged" else "", ms,
        )  # fmt: skip

    for at, node in enumerate(path):
        yield of(node, "accepted", walk.step(drafted[node], place + at == end - 1))
    last = path[-1] if path else -1
    others = [node for node in range(len(drafted)) if node not in path]
    if happened.rejected[row]:
        first = next(node for node in others if happened.parents[row][node] == last)
        yield of(first, "rejected", walk.aside(drafted[first]))
        others.remove(first)
    for node in others:
        yield of(node, "unjudged", walk.aside(drafted[node]))
    for at in range(len(path), len(tokens)):
        spelled = walk.step(tokens[at], place + at == end - 1)
        yield Cell(
            tokens[at], spelled, "target", place + at, number, None, None, None,
            spelled.instead or visible(spelled.text), ms,
        )  # fmt: skip


@dataclass(frozen=True)
class Table:
    """A strip's figures as a table, for a page and for a terminal."""

    rows: list[list[str]]

    def __str__(self) -> str:
        return table_text([HEADING, *self.rows], [])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return f'<div class="labkit-table">{table_html([HEADING, *self.rows], [])}</div>'


@dataclass(frozen=True, repr=False)
class Strip:
    """What `strip` returns: shown on a page by itself, as text when printed, as a table by `table()`."""

    every: list[Cell]
    start: int
    stop: int
    total: int

    @property
    def cells(self) -> list[Cell]:
        """What is shown: the slice, with the end of the prompt before the first token."""
        prompt = [cell for cell in self.every if cell.kind == "prompt"][-PROMPT_TOKENS:] if self.start == 0 else []
        return prompt + [c for c in self.every if c.kind != "prompt" and self.start <= c.place < self.stop]

    @property
    def text(self) -> str:
        """The new text of the slice, special tokens included."""
        return "".join(cell.spelled.text for cell in self.cells if cell.kind in ("accepted", "target"))

    def note(self) -> str:
        """What is left out, or nothing."""
        more = f"; start={self.stop} shows more" if self.stop < self.total else ""
        return f"tokens {self.start} to {self.stop} of {self.total}{more}" if self.start or more else ""

    def table(self) -> Table:
        """The same tokens and those that were drafted but not judged, as a table: for screen readers, and to search."""
        return Table([cell.row() for cell in self.cells])

    def __str__(self) -> str:
        shown = []
        for cell in self.cells:
            before, after = FRAMES.get(cell.kind, ("", ""))
            broken = "\n" if cell.spelled.text.endswith("\n") and cell.kind != "rejected" else ""
            shown.append("" if cell.kind == "unjudged" else f"{before}{cell.shown}{after}{broken}")
        return "\n".join(filter(None, ["".join(shown), "[accepted] ~rejected~ *target's own*", self.note()]))

    __repr__ = __str__

    def _repr_html_(self) -> str:
        shown = [cell.html() for cell in self.cells if cell.kind != "unjudged"]
        left = sum(cell.kind == "prompt" for cell in self.every) - PROMPT_TOKENS
        before = ['<span style="opacity:.6">… </span>'] if left > 0 and self.start == 0 else []
        key = " ".join(f'<span style="{BASE}{STYLES[kind]}">{NAMES[kind]}</span>' for kind in STYLES)
        note = f'<div style="font-size:85%;opacity:.75">{html.escape(self.note())}</div>' if self.note() else ""
        return (
            '<div class="labkit-strip mathjax_ignore tex2jax_ignore" role="group" '
            'aria-label="text, token by token; table() has the same as a table">'
            f'<div style="font-size:85%;margin-bottom:4px;word-spacing:2px">{key}</div>'
            '<div style="font-family:monospace;line-height:1.9;overflow-wrap:anywhere" dir="ltr">'
            f"{''.join(before + shown)}</div>{note}</div>"
        )


def strip(result: Generation, row: int = 0, start: int = 0, stop: int | None = None, *, lab: Any = None) -> Strip:
    """The text of one row token by token; new tokens start to stop (400 of them if not said).

    lab: whose tokenizer spells the tokens; without one, and without texts in the result, ids are shown. Raises
    LabkitError for a row or a slice that is not there.
    """
    if not 0 <= row < len(result.tokens):
        raise LabkitError(f"got row={row} of a result with {len(result.tokens)} row(s); write 0 to the last")
    total = len(result.tokens[row])
    stop = min(start + MOST if stop is None else stop, total)
    if not 0 <= start <= stop:
        raise LabkitError(f"got start={start} and stop={stop} of {total} tokens; write 0 <= start < stop")
    speller = Speller(None if lab is None else lab.tokenizer)
    return Strip(cells(result, speller, row), start, stop, total)
