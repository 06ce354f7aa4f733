"""Figures that show themselves on a page and never touch pyplot."""

import io
import threading
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

BLUE, ORANGE, GREEN, GREY = "#0072B2", "#D55E00", "#009E73", "#555555"
DPI, POINTS = 110, 10
_drawing = threading.Lock()


class Picture(Figure):
    """A matplotlib Figure whose last expression in a cell is its image."""

    def __init__(self, wide: float, high: float):
        super().__init__(figsize=(wide, high), dpi=DPI, layout="constrained", facecolor="white")
        FigureCanvasAgg(self)

    def _repr_png_(self) -> bytes:
        return png(self)


def png(figure: Figure) -> bytes:
    """The figure as an image."""
    with _drawing:
        out = io.BytesIO()
        figure.savefig(out, format="png")
        return out.getvalue()


def plain_axes(figure: Figure, x: str, y: str, place: Any = 111) -> Any:
    """Axes with both units said, 10 pt, without a box."""
    axes = figure.add_subplot(place)
    axes.set_xlabel(x, fontsize=POINTS)
    axes.set_ylabel(y, fontsize=POINTS)
    axes.tick_params(labelsize=POINTS)
    axes.spines[["top", "right"]].set_visible(False)
    return axes
