"""Figures that show themselves on a page, light or dark, and never touch pyplot."""

import functools
import io
import threading
from typing import Any

from matplotlib import font_manager, ft2font
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.patches import FancyBboxPatch

BLUE, ORANGE, GREEN, GREY = "#0072B2", "#D55E00", "#009E73", "#555555"
CARD, RIM, INK = "#EEF1F4", "#AEB6BF", "#1F2328"
"""A figure's own ground, which no page shines through: no one grey for letters has 4.5 : 1 on white and on #111111."""
DPI, POINTS, ROUND_INCHES = 110, 10, 0.09
_drawing = threading.Lock()


class Picture(Figure):
    """A matplotlib Figure whose last expression in a cell is its image: a card with round corners."""

    def __init__(self, wide: float, high: float, free: bool = False):
        """free: axes stay where they are put; otherwise nothing overlaps and nothing is cut."""
        layout = None if free else ConstrainedLayoutEngine(w_pad=ROUND_INCHES, h_pad=ROUND_INCHES)
        super().__init__(figsize=(wide, high), dpi=DPI, layout=layout, facecolor="none")
        FigureCanvasAgg(self)
        self.patch.set_visible(False)
        inner = (wide - 0.02, high - 0.02)
        self.add_artist(FancyBboxPatch((0.01, 0.01), *inner, f"round,pad=0,rounding_size={ROUND_INCHES}", zorder=-1,
                                       fc=CARD, ec=RIM, lw=0.8, transform=self.dpi_scale_trans))  # fmt: skip

    def _repr_png_(self) -> bytes:
        return png(self)


def png(figure: Figure) -> bytes:
    """The figure as an image."""
    with _drawing:
        out = io.BytesIO()
        figure.savefig(out, format="png")
        return out.getvalue()


def luminance(colour: Any) -> float:
    """How light a colour is, from 0 to 1 (WCAG 2)."""
    linear = (x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in to_rgb(colour))
    return sum(weight * x for weight, x in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


@functools.cache
def _letters(font: str) -> frozenset[int]:
    return frozenset(ft2font.FT2Font(font_manager.findfont(font)).get_charmap())


def drawable(text: str, font: str) -> str:
    """Text with a box for each letter that the font lacks."""
    return "".join(letter if ord(letter) in _letters(font) else "▯" for letter in text)


def plain_axes(figure: Figure, x: str, y: str, place: Any = 111) -> Any:
    """Axes with both units said, 10 pt, on the figure's own ground, without a box."""
    axes = figure.add_subplot(place, facecolor="none")
    axes.set_xlabel(x, fontsize=POINTS, color=INK)
    axes.set_ylabel(y, fontsize=POINTS, color=INK)
    axes.tick_params(labelsize=POINTS, color=INK, labelcolor=INK)
    axes.spines[["top", "right"]].set_visible(False)
    return axes
