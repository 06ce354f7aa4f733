"""Figures of a run, built from matplotlib's objects (no pyplot)."""

import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from labkit.compare import Comparison
from labkit.trace import Generation
from labkit.view.figures import GREY, INK, Picture, drawable
from labkit.view.letters import SIGNS, signs
from labkit.view.strip import NAMES

ACCEPTED, REJECTED, TARGET = "#005A8C", "#B34700", "#00694A"
MARKS = dict(SIGNS.values()) | {"∅": "no text"}
"""Signs that stand in a strip for what would not be seen; those that occur are explained above it."""
COLUMNS, POINTS = 104, 9.0
WIDTH_INCHES, LINE_INCHES, TITLE_INCHES, MARGIN_INCHES = 8.4, 0.25, 0.42, 0.25
FONT, LETTER_INCHES = "DejaVu Sans Mono", POINTS * 0.602 / 72
LABEL_INCHES, MOST_LABEL, MOST_TITLE = 0.078, 52, 110


@dataclass(frozen=True)
class Part:
    """A token in a strip, or its part in one line: its visible text, and its kind (see labkit.pieces).

    marks: the signs in it that stand for something else. ends: whether a line ends behind it.
    """

    text: str
    kind: str
    marks: str = ""
    ends: bool = False

    @property
    def columns(self) -> int:
        """How wide it is drawn: a rejected token has room between its text and its box."""
        return len(self.text) + (self.kind == "rejected")


def parts_of(out: Generation, row: int = 0) -> list[Part]:
    """The tokens of one row in the order of events: accepted ones, the rejected ones, the target's own.

    A line break of the text ends a line; one that was only drafted is a sign like any other.
    """
    found: list[Part] = []
    for piece in out.pieces(row):
        if piece.kind == "unjudged":
            continue
        shown, marks = "", ""
        for sign, name in signs(piece.text) or [("∅", "no text")]:
            shown, marks = shown + sign, marks + (sign if name else "")
            if name == "line break" and piece.kind != "rejected":
                found.append(Part(drawable(shown, FONT), piece.kind, marks, ends=True))
                shown = marks = ""
        if shown:
            found.append(Part(drawable(shown, FONT), piece.kind, marks))
    return found


def _layout(parts: Sequence[Part]) -> list[list[tuple[int, Part]]]:
    lines: list[list[tuple[int, Part]]] = [[]]
    column, ended = 0, False
    for part in parts:
        if ended or (column and column + part.columns > COLUMNS):
            lines.append([])
            column = 0
        lines[-1].append((column, part))
        column, ended = column + part.columns, part.ends
    return lines


def _draw(axes: Axes, line: float, column: float, part: Part) -> None:
    """A token: in a filled box if accepted, in a dashed one if rejected, bold and underlined if the target's own."""
    colour = {"accepted": ACCEPTED, "rejected": REJECTED, "target": TARGET}[part.kind]
    wide = part.columns - 0.2
    if part.kind == "target":
        axes.plot((column + 0.1, column + 0.1 + wide), (line + 0.9, line + 0.9), lw=1.1, color=colour, clip_on=False)
    else:
        dashed: dict[str, Any] = dict(fc="none", ec=colour, ls=(0, (2, 1.5)))
        look: dict[str, Any] = dict(fc="#CBE1F1", ec="none") if part.kind == "accepted" else dashed
        axes.add_patch(Rectangle((column + 0.1, line + 0.09), wide, 0.82, lw=0.8, clip_on=False, **look))
    axes.text(column + (part.columns - len(part.text)) / 2, line + 0.5, part.text, family=FONT, size=POINTS,
              va="center_baseline", color=colour, weight="bold" if part.kind == "target" else "normal",
              parse_math=False)  # fmt: skip


def draw_legend(axes: Axes, parts: Iterable[Part]) -> None:
    """What the looks of a token mean, and the signs that occur in these."""
    axes.set(xlim=(0, COLUMNS), ylim=(1, 0))
    axes.set_axis_off()
    column = 0
    for kind in ("accepted", "rejected", "target"):
        _draw(axes, 0, column, one := Part(NAMES[kind], kind))
        column += one.columns + 2
    seen = {mark for part in parts for mark in part.marks}
    words = "  ".join(f"{mark} {meaning}" for mark, meaning in MARKS.items() if mark in seen)
    axes.text(
        COLUMNS, 0.5, drawable(words, FONT), family=FONT, size=POINTS - 2, va="center_baseline", ha="right", color=GREY
    )


def draw_strip(axes: Axes, parts: Sequence[Part]) -> None:
    """Draw tokens line by line; colour is never the only sign."""
    lines = _layout(parts)
    axes.set(xlim=(0, COLUMNS), ylim=(len(lines), 0))
    axes.set_axis_off()
    for number, line in enumerate(lines):
        for column, part in line:
            _draw(axes, number, column, part)


def _panel(figure: Picture, top: float, height: float, left: float, width: float) -> Axes:
    """Axes placed in inches from the figure's top left: a strip's columns must be as wide as its letters."""
    wide, high = figure.get_size_inches()
    return figure.add_axes((left / wide, 1 - (top + height) / high, width / wide, height / high), facecolor="none")


def _words(figure: Picture, top: float, words: str, **look) -> None:
    wide, high = figure.get_size_inches()
    figure.text(MARGIN_INCHES / wide, 1 - top / high, words, va="center", parse_math=False, **look)


def _strip_inches(parts: Sequence[Part]) -> float:
    return LINE_INCHES * len(_layout(parts))


def _add_strips(figure: Picture, top: float, strips: dict[str, list[Part]]) -> None:
    """Titled strips below `top`, under one legend."""
    legend = _panel(figure, top, LINE_INCHES, MARGIN_INCHES, COLUMNS * LETTER_INCHES)
    draw_legend(legend, [part for parts in strips.values() for part in parts])
    top += LINE_INCHES
    for title, parts in strips.items():
        _words(figure, top + 0.62 * TITLE_INCHES, title, size=9.5)
        top += TITLE_INCHES
        draw_strip(_panel(figure, top, _strip_inches(parts), MARGIN_INCHES, COLUMNS * LETTER_INCHES), parts)
        top += _strip_inches(parts)


def _strips_inches(strips: dict[str, list[Part]]) -> float:
    return LINE_INCHES + sum(TITLE_INCHES + _strip_inches(parts) for parts in strips.values()) + 0.2


def token_strip(out: Generation, row: int = 0, title: str = "") -> Picture:
    """One row's text, token by token: what was accepted, what was rejected, what the target said itself."""
    strips = {_short(title or out.summary(), MOST_TITLE): parts_of(out, row)}
    figure = Picture(WIDTH_INCHES, 0.15 + _strips_inches(strips), free=True)
    _add_strips(figure, 0.15, strips)
    return figure


def _draw_bars(axes: Axes, comparison: Comparison) -> None:
    entries = comparison.entries
    speedups = [e.speedup for e in entries]
    labels = [f"{e.speedup:.2f}x, {e.tokens_per_second:.1f} tokens/s, {e.tokens_per_round:.2f} tokens a round"
              for e in entries]  # fmt: skip
    wide = axes.get_position().width * WIDTH_INCHES
    limit = (
        max(1, *speedups) * wide / (wide - 0.1 - 0.88 * LETTER_INCHES * max(map(len, labels)))
    )  # room for the labels
    axes.barh(range(len(entries)), speedups, color=[ACCEPTED if s >= 1 else REJECTED for s in speedups], height=0.62)
    axes.set_yticks(range(len(entries)), [_short(e.name, MOST_LABEL) for e in entries], parse_math=False)
    axes.axvline(1, color=INK, lw=0.8)
    axes.invert_yaxis()
    axes.set_xlim(0, limit)
    axes.set_xlabel("speed-up over plain decoding (below 1: slower)", fontsize=9)
    axes.tick_params(labelsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    for place, (e, label) in enumerate(zip(entries, labels, strict=True)):
        axes.text(max(e.speedup, 1) + 0.012 * limit, place, label, va="center", fontsize=8.5)


def _short(text: str, most: int) -> str:
    text = " ".join(text.split())
    return text if len(text) <= most else text[: most - 1] + "…"


def demo_picture(comparison: Comparison, caption: str, prompt: int = 0, asked: str = "") -> Picture:
    """Speed-up over plain decoding by strategy, and below it a strip for each strategy on one prompt.

    asked: what that prompt is called or says, for the heading of the strips.
    """
    strips = {}
    for name, outs in comparison.generations.items():
        out = outs[prompt]
        if out.drafted:
            rates = (
                f"{out.accepted} of {out.drafted} drafted tokens accepted, {out.tokens_per_round:.2f} tokens a round"
            )
            strips[_short(f"{_short(name, MOST_LABEL)}: {rates}", MOST_TITLE)] = parts_of(out)
    bars_inches = 0.32 * len(comparison.entries)
    high = 1.55 + bars_inches + _strips_inches(strips)
    figure = Picture(WIDTH_INCHES, high, free=True)
    _words(figure, 0.2, caption, size=9, color=GREY)
    left = 0.35 + LABEL_INCHES * min(MOST_LABEL, max(len(e.name) for e in comparison.entries))
    _draw_bars(_panel(figure, 0.4, bars_inches, left, WIDTH_INCHES - left - 0.2), comparison)
    top = 1.2 + bars_inches
    heading = textwrap.shorten(f"Token by token, {asked or f'prompt {prompt}'}", 88, placeholder=" …")
    _words(figure, top, heading, size=10, weight="bold")
    _add_strips(figure, top + 0.25, strips)
    return figure
