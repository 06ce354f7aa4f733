"""Figures of a run, built from matplotlib's objects (no pyplot)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from labkit.compare import Comparison
from labkit.trace import Generation

ACCEPTED, REJECTED, TARGET = "#0072B2", "#D55E00", "#009E73"
COLUMNS, POINTS = 104, 9.0
WIDTH_INCHES, LINE_INCHES = 9.6, 0.27


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
                at = [i for i, parent in enumerate(happened.parents[row]) if parent == accepted - 1]
                add(happened.drafted[row][at[0] if at else accepted], "rejected")
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


def _draw(axes: Axes, line: int, column: float, part: Piece) -> None:
    colour = {"accepted": ACCEPTED, "rejected": REJECTED, "target": TARGET}[part.kind]
    axes.text(column, line + 0.45, part.text, family="DejaVu Sans Mono", size=POINTS, va="center", color=colour,
              weight="bold" if part.kind == "target" else "normal", parse_math=False)  # fmt: skip
    ends, style = (column + 0.1, column + len(part.text) - 0.1), dict(color=colour, clip_on=False)
    if part.kind == "rejected":
        axes.plot(ends, (line + 0.48, line + 0.48), lw=1.0, ls=(0, (2, 1)), **style)
    for height in {"accepted": (0.88,), "rejected": (), "target": (0.84, 0.94)}[part.kind]:
        axes.plot(ends, (line + height, line + height), lw=0.9, **style)


def draw_strip(axes: Axes, parts: Sequence[Piece]) -> None:
    """Draw tokens line by line under a legend; colour is never the only sign."""
    lines = _layout(parts)
    axes.set_xlim(0, COLUMNS)
    axes.set_ylim(len(lines) + 1.4, 0)
    axes.set_axis_off()
    column = 0
    for text, kind in (("accepted draft", "accepted"), ("rejected draft", "rejected"), ("target's own token", "target")):
        _draw(axes, 0, column, Piece(text, kind))
        column += len(text) + 3
    for number, line in enumerate(lines):
        for column, part in line:
            _draw(axes, number + 1.4, column, part)


def token_strip(out: Generation, decode: Callable[[Sequence[int]], str], row: int = 0, title: str = "") -> Figure:
    """One row's text, token by token: what was accepted, what was rejected, what the target said itself."""
    parts = pieces(out, decode, row)
    figure = Figure(figsize=(WIDTH_INCHES, 0.6 + LINE_INCHES * (len(_layout(parts)) + 1.4)), layout="constrained", dpi=120)
    axes = figure.subplots()
    axes.set_title(title or out.summary(), fontsize=10, loc="left")
    draw_strip(axes, parts)
    return figure


def demo_picture(comparison: Comparison, decode: Callable[[Sequence[int]], str], caption: str, prompt: int = 0) -> Figure:
    """Speed-up over plain decoding by strategy, and below it a strip for each strategy on one prompt."""
    drafting = [e for e in comparison.entries if e.acceptance_rate is not None]
    strips = {e.name: pieces(comparison.generations[e.name][prompt], decode) for e in drafting}
    heights = [0.5 + 0.34 * len(comparison.entries)]
    heights += [0.35 + LINE_INCHES * (len(_layout(parts)) + 1.4) for parts in strips.values()]
    figure = Figure(figsize=(WIDTH_INCHES, sum(heights) + 0.9), layout="constrained", dpi=120)
    panels = figure.subplots(len(heights), 1, height_ratios=heights, squeeze=False)[:, 0]
    figure.suptitle(caption, fontsize=9, color="#555555")
    bars, names = panels[0], [e.name for e in comparison.entries]
    speedups = [e.speedup for e in comparison.entries]
    colours = [ACCEPTED if s >= 1 else REJECTED for s in speedups]
    bars.barh(names, speedups, color=colours, height=0.62)
    bars.axvline(1, color="black", lw=0.8)
    bars.invert_yaxis()
    bars.set_xlim(0, max(1.2, *speedups) * 1.28)
    bars.set_xlabel("speed-up over plain decoding in the same loop (below 1: slower)", fontsize=9)
    bars.tick_params(labelsize=9)
    bars.spines[["top", "right"]].set_visible(False)
    for place, entry in enumerate(comparison.entries):
        label = f"{entry.speedup:.2f}x, {entry.tokens_per_second:.1f} tokens/s, {entry.tokens_per_round:.2f} per round"
        bars.text(entry.speedup + 0.01, place, label, va="center", fontsize=8.5)
    for axes, (name, parts) in zip(panels[1:], strips.items(), strict=True):
        axes.set_title(name, fontsize=10, loc="left")
        draw_strip(axes, parts)
    return figure
