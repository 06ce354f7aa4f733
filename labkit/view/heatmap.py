"""What every layer would say at every position, as a picture."""

import math
from typing import Any

from matplotlib import colormaps
from matplotlib.colors import LogNorm, Normalize
from matplotlib.patches import Rectangle

from labkit.errors import LabkitError
from labkit.view.figures import ORANGE, POINTS, Picture, drawable, luminance
from labkit.view.letters import visible

COLOURS = {
    "probability": ("top_probability", "viridis", Normalize(0, 1), "probability"),
    "entropy": ("entropy", "cividis_r", Normalize(0, 8), "entropy, nats"),
    "rank": ("final_rank", "cividis_r", LogNorm(1, 1000), "rank (1 = first)"),
}
"""The tensor that each shows, its colours, their fixed range, and its unit."""
MOST_POSITIONS, MOST_LETTERS = 16, 8
FONT, EVEN = "DejaVu Sans", 0.179
"""On a ground of that luminance black and white letters are seen equally well."""


def short(text: str, most: int = MOST_LETTERS) -> str:
    """A token's text in a cell: signs for what is not seen, a box for what the font lacks, cut to `most` letters."""
    shown = drawable(visible(text), FONT) or "∅"
    return shown if len(shown) <= most else shown[: most - 1] + "…"


def heatmap(layers: Any, colour: str = "probability", start: int = 0, stop: int | None = None) -> Picture:
    """Layers upward, positions to the right: each layer's most probable next token, on a colour.

    layers: of labkit.layers. colour: "probability" (of that token), "entropy" (of the layer's law, nats) or "rank" (of
    the last layer's token in the layer's law). start, stop: positions, 16 of them if not said. The frame marks the
    first layer that agrees with the last one for good. Raises LabkitError for another colour or no positions.
    """
    if colour not in COLOURS:
        raise LabkitError(f"got colour={colour!r}; write one of {', '.join(map(repr, COLOURS))}")
    stop = min(start + MOST_POSITIONS if stop is None else stop, len(layers.texts))
    if not 0 <= start < stop:
        raise LabkitError(f"got start={start}, stop={stop} of {len(layers.texts)} positions; write 0 <= start < stop")
    name, palette, norm, unit = COLOURS[colour]
    values = getattr(layers, name)[:, start:stop].float().numpy()
    depth, places = values.shape
    figure = Picture(max(4.6, 2.2 + 0.66 * places), 1.9 + 0.3 * depth)
    axes = figure.add_subplot()
    image = axes.imshow(values, origin="lower", aspect="auto", cmap=palette, norm=norm,
                        extent=(start - 0.5, stop - 0.5, 0.5, depth + 0.5), interpolation="nearest")  # fmt: skip
    shades = colormaps[palette](norm(values))
    for row in range(depth):
        for column in range(places):
            ink = "black" if luminance(shades[row, column]) > EVEN else "white"
            axes.text(start + column, row + 1, short(layers.top_text[row][start + column]), ha="center", va="center",
                      fontsize=POINTS - 2, family=FONT, color=ink, parse_math=False)  # fmt: skip
    for place, first in enumerate(layers.first_agreeing[start:stop].tolist(), start):
        axes.add_patch(Rectangle((place - 0.47, first - 0.46), 0.94, 0.92, fill=False, ec=ORANGE, lw=2.2))
    axes.set_xticks(range(start, stop), [short(text) for text in layers.texts[start:stop]], rotation=45,
                    ha="right", rotation_mode="anchor", fontsize=POINTS, family=FONT, parse_math=False)  # fmt: skip
    step = math.ceil(depth / 16)
    axes.set_yticks(range(depth, 0, -step), [str(layer) for layer in range(depth, 0, -step)], fontsize=POINTS)
    axes.set_xlabel(f"text, token by token (positions {start} to {stop - 1})", fontsize=POINTS)
    axes.set_ylabel("layer (layers run)", fontsize=POINTS)
    of = "the last layer's token" if colour == "rank" else "the layer's law" if colour == "entropy" else "that token"
    title = f"next token by layer, coloured by {colour} of {of}\nframed: first layer that agrees with the last for good"
    axes.set_title(title, fontsize=POINTS, loc="left")
    bar = figure.colorbar(image, ax=axes, pad=0.01, extend="neither" if colour == "probability" else "max")
    bar.set_label(unit, fontsize=POINTS)
    bar.ax.tick_params(labelsize=POINTS)
    return figure
