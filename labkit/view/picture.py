"""Figures of a run, built from matplotlib's objects (no pyplot)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from labkit.compare import Comparison
from labkit.trace import Generation

ACCEPTED, REJECTED, TARGET = "#0072B2", "#D55E00", "#009E73"
COLUMNS, POINTS = 104, 9.0
WIDTH_INCHES, LINE_INCHES, MARGIN_INCHES = 8.4, 0.27, 0.25
FONT, LETTER_INCHES = "DejaVu Sans Mono", POINTS * 0.602 / 72


@dataclass(frozen=True)
class Piece:
    """A token in a strip: its visible text, and whether it was accepted, rejected, or the target's own."""

    text: str
    kind: str


def pieces(out: Generation, decode: Callable[[Sequence[int]], str], row: int = 0) -> list[Piece]:
    """The tokens of one row in the order of events: accepted ones, the rejected one, the target's own."""
    found: list[Piece] = []
    committed: list[int] = []

    def add(token: int, kind: str) -> None:
        text = decode([*committed, token])[len(decode(committed)) :]
        text = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text.replace("\t", "→"))
        found.append(Piece(text.replace(" ", "·") or "∅", kind))

    for happened in out.rounds:
        accepted = happened.accepted[row]
        for place, token in enumerate(happened.tokens[row]):
            own = place >= accepted
            if own and happened.rejected[row]:
                end = happened.path[row][-1] if accepted else -1
                add(happened.drafted[row][happened.parents[row].index(end)], "rejected")
            piece = decode([*committed, token])[len(decode(committed)) :]
            add(token, "target" if own else "accepted")
            committed.append(token)
            if "\n" in piece:
                found[-1] = Piece("⏎" * piece.count("\n"), found[-1].kind)
                found.append(Piece("", "break"))
    return found


def _layout(parts: Sequence[Piece]) -> list[list[tuple[int, Piece]]]:
    lines: list[list[tuple[int, Piece]]] = [[]]
    column = 0
    for part in parts:
        if part.kind == "break" or (column and column + len(part.text) > COLUMNS):
            lines.append([])
            column = 0
        if part.kind != "break":
            lines[-1].append((column, part))
            column += len(part.text)
    return [line for line in lines if line]


def _draw(axes: Axes, line: float, column: int, part: Piece) -> None:
    colour = {"accepted": ACCEPTED, "rejected": REJECTED, "target": TARGET}[part.kind]
    weight = "bold" if part.kind == "target" else "normal"
    axes.text(column, line + 0.45, part.text, family=FONT, size=POINTS, va="center", color=colour, weight=weight,
              parse_math=False)  # fmt: skip
    ends = (column + 0.1, column + len(part.text) - 0.1)
    if part.kind == "rejected":
        axes.plot(ends, (line + 0.48, line + 0.48), lw=1.0, ls=(0, (2, 1)), color=colour, clip_on=False)
    for height in {"accepted": (0.88,), "rejected": (), "target": (0.84, 0.94)}[part.kind]:
        axes.plot(ends, (line + height, line + height), lw=0.9, color=colour, clip_on=False)


def draw_strip(axes: Axes, parts: Sequence[Piece]) -> None:
    """Draw tokens line by line under a legend; colour is never the only sign."""
    lines = _layout(parts)
    axes.set_xlim(0, COLUMNS)
    axes.set_ylim(len(lines) + 1.4, 0)
    axes.set_axis_off()
    column = 0
    for text, kind in (
        ("accepted draft", "accepted"),
        ("rejected draft", "rejected"),
        ("target's own token", "target"),
    ):
        _draw(axes, 0, column, Piece(text, kind))
        column += len(text) + 3
    for number, line in enumerate(lines):
        for column, part in line:
            _draw(axes, number + 1.4, column, part)


def _panel(figure: Figure, top: float, height: float, left: float, width: float) -> Axes:
    """Axes placed in inches from the figure's top left: a strip's columns must be as wide as its letters."""
    wide, high = figure.get_size_inches()
    return figure.add_axes((left / wide, 1 - (top + height) / high, width / wide, height / high))


def _strip_inches(parts: Sequence[Piece]) -> float:
    return LINE_INCHES * (len(_layout(parts)) + 1.4)


def _add_strip(figure: Figure, top: float, parts: Sequence[Piece], title: str) -> float:
    """A titled strip below `top`; how far down it reaches, in inches."""
    axes = _panel(figure, top + 0.35, _strip_inches(parts), MARGIN_INCHES, COLUMNS * LETTER_INCHES)
    axes.set_title(title, fontsize=10, loc="left")
    draw_strip(axes, parts)
    return top + 0.35 + _strip_inches(parts)


def token_strip(out: Generation, decode: Callable[[Sequence[int]], str], row: int = 0, title: str = "") -> Figure:
    """One row's text, token by token: what was accepted, what was rejected, what the target said itself."""
    parts = pieces(out, decode, row)
    figure = Figure(figsize=(WIDTH_INCHES, 0.5 + _strip_inches(parts)), dpi=120)
    _add_strip(figure, 0, parts, title or out.summary())
    return figure


def demo_picture(
    comparison: Comparison, decode: Callable[[Sequence[int]], str], caption: str, prompt: int = 0
) -> Figure:
    """Speed-up over plain decoding by strategy, and below it a strip for each strategy on one prompt."""
    entries = comparison.entries
    strips = {e.name: pieces(comparison.generations[e.name][prompt], decode) for e in entries if e.alpha is not None}
    bars_inches = 0.32 * len(entries)
    high = 1.3 + bars_inches + sum(0.35 + _strip_inches(parts) for parts in strips.values())
    figure = Figure(figsize=(WIDTH_INCHES, high), dpi=120)
    figure.text(MARGIN_INCHES / WIDTH_INCHES, 1 - 0.2 / high, caption, fontsize=9, color="#555555", va="center")
    bars = _panel(figure, 0.4, bars_inches, 3.2, WIDTH_INCHES - 3.4)
    speedups = [e.speedup for e in entries]
    colours = [ACCEPTED if s >= 1 else REJECTED for s in speedups]
    bars.barh([e.name for e in entries], speedups, color=colours, height=0.62)
    bars.axvline(1, color="black", lw=0.8)
    bars.invert_yaxis()
    bars.set_xlim(0, max(1.2, *speedups) * 1.95)
    bars.set_xlabel("speed-up over plain decoding in the same loop, times (below 1: slower)", fontsize=9)
    bars.tick_params(labelsize=9)
    bars.spines[["top", "right"]].set_visible(False)
    for place, entry in enumerate(entries):
        label = (
            f"{entry.speedup:.2f}x, {entry.tokens_per_second:.1f} tokens/s, {entry.tokens_per_round:.2f} tokens a round"
        )
        bars.text(max(entry.speedup, 1) + 0.02, place, label, va="center", fontsize=8.5)
    top = 1.0 + bars_inches
    for name, parts in strips.items():
        top = _add_strip(figure, top, parts, name)
    return figure
