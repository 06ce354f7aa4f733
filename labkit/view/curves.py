"""How a training run went: its loss, and how it did on held-out text."""

from typing import Any

from matplotlib import colormaps

from labkit.errors import LabkitError
from labkit.view.figures import BLUE, POINTS, Picture, plain_axes

KNOWN = ("step", "tokens", "seconds")
WHOLE = ("loss", "tokens_per_round")
"""Figures that are no shares."""


def curves(trained: Any, figure: str = "tokens_per_round") -> Picture:
    """The loss of a run by step, and beside it a figure of its evaluations.

    trained: what a recipe of labkit.training returns, or the rows of its curves. figure: a name, or what several names
    begin with ("head" for head_1, head_2, …). Raises LabkitError for a figure that no evaluation has.
    """
    rows = getattr(trained, "curves", trained)
    every = dict.fromkeys(name for row in rows for name in row if name not in KNOWN)
    names = [name for name in every if name == figure or name.startswith(f"{figure}_")]
    if not names:
        raise LabkitError(f"got figure={figure!r}; the evaluations of this run have {', '.join(every) or 'nothing'}")
    picture = Picture(8.4, 2.9)
    axes = plain_axes(picture, "steps", "training loss, nats", 121)
    steps, losses = zip(*((row["step"], row["loss"]) for row in rows if "loss" in row), strict=True)
    axes.plot(steps, losses, color=BLUE, marker="o", ms=4)
    axes.set_xlim(left=0)
    unit = "" if figure in WHOLE else ", share of places"
    axes = plain_axes(picture, "steps", f"{figure.replace('_', ' ')}{unit} (held out)", 122)
    for at, name in enumerate(names):
        steps, values = zip(*((row["step"], row[name]) for row in rows if name in row), strict=True)
        colour = colormaps["viridis"](0.85 * at / max(1, len(names) - 1))
        axes.plot(steps, values, color=colour, marker="osD^"[at % 4], ms=4, label=name.replace("_", " "))
    axes.set_xlim(left=0)
    if unit:
        axes.set_ylim(bottom=0)
    if len(names) > 1:
        axes.legend(fontsize=POINTS - 1, frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
    return picture
