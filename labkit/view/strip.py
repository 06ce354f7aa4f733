"""A text token by token on a notebook's page: what was accepted, what was rejected, what the target said itself."""

import html
from dataclasses import dataclass

from labkit.compare import as_html as table_html
from labkit.compare import as_text as table_text
from labkit.decoding import PHASES
from labkit.errors import LabkitError
from labkit.pieces import Piece
from labkit.trace import Generation
from labkit.view.letters import as_html, visible

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

    piece: what happened to it; None in the prompt.
    """

    token: int
    text: str
    kind: str
    place: int = -1
    piece: Piece | None = None

    @property
    def shown(self) -> str:
        """Its text with signs."""
        return visible(self.text) or "∅"

    def phases(self) -> dict[str, float]:
        """Milliseconds of its round by phase."""
        return {} if self.piece is None else {phase: getattr(self.piece, f"{phase}_ms") for phase in PHASES}

    def title(self) -> str:
        """The figures, a line each."""
        lines, piece = [f"{NAMES[self.kind]}: {self.shown}", f"token id {self.token}"], self.piece
        if piece is None:
            return "\n".join(lines)
        if piece.draft_probability is not None:
            lines.append(f"draft probability {piece.draft_probability:.3f}")
        if piece.target_probability is not None:
            lines.append(f"target probability {piece.target_probability:.3f}")
        if self.kind == "rejected":
            lines.append(f"the target's token here: {visible(piece.target_text)}")
        lines += [f"exit layer {piece.exit_layer}"] if piece.exit_layer else []
        spent = self.phases()
        phases = ", ".join(f"{phase} {ms:.1f}" for phase, ms in spent.items())
        lines.append(
            f"round {piece.round}" + (f": {sum(spent.values()):.1f} ms ({phases})" if any(spent.values()) else "")
        )
        return "\n".join(lines)

    def html(self) -> str:
        """A span; a line break breaks the line, unless it was only drafted."""
        said = html.escape(self.title()).replace("\n", "&#10;")
        inner = as_html(self.text, self.kind != "rejected") if self.text else "∅"
        return f'<span class="labkit-{self.kind}" style="{BASE}{STYLES[self.kind]}" title="{said}">{inner}</span><wbr>'

    def row(self) -> list[str]:
        """Cells of the table."""
        share = lambda value: "–" if value is None else f"{value:.3f}"  # noqa: E731
        start = ["–" if self.place < 0 else str(self.place), str(self.token), self.shown, NAMES[self.kind]]
        if (piece := self.piece) is None:
            return start + ["–"] * 6
        ms = f"{sum(self.phases().values()):.1f}"
        return [*start, str(piece.round), str(piece.exit_layer or "–"), share(piece.draft_probability),
                share(piece.target_probability), visible(piece.target_text), ms]  # fmt: skip


def cells(result: Generation, row: int = 0) -> list[Cell]:
    """All tokens of a row in the order of events: the prompt, then each round's drafted tokens and the target's."""
    begin = len(result.prompts[row])
    prompt = [
        Cell(token, text, "prompt") for token, text in zip(result.prompts[row], result.texts.prompts[row], strict=True)
    ]
    return prompt + [Cell(p.token, p.text, p.kind, p.position - begin, p) for p in result.pieces(row)]


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
        """The new text of the slice, special tokens and bytes of unfinished characters included."""
        return "".join(cell.text for cell in self.cells if cell.kind in ("accepted", "target"))

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
            broken = "\n" if cell.text.endswith("\n") and cell.kind != "rejected" else ""
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


def strip(result: Generation, row: int = 0, start: int = 0, stop: int | None = None) -> Strip:
    """The text of one row token by token; new tokens start to stop (400 of them if not said).

    Raises LabkitError for a row or a slice that is not there.
    """
    if not 0 <= row < len(result.tokens):
        raise LabkitError(f"got row={row} of a result with {len(result.tokens)} row(s); write 0 to the last")
    total = len(result.tokens[row])
    stop = min(start + MOST if stop is None else stop, total)
    if not 0 <= start <= stop:
        raise LabkitError(f"got start={start} and stop={stop} of {total} tokens; write 0 <= start < stop")
    return Strip(cells(result, row), start, stop, total)
