"""One figure for each question about acceptance, cost and speed; every number is one of `to_pandas()`."""

from typing import Any

from labkit.view.figures import BLUE, ORANGE, POINTS, Picture, plain_axes


def by_exit(foretold: Any, exit: int, max_draft: int) -> Picture:
    """Tokens per round by exit layer, replayed from one pass; the chosen layer is marked."""
    figure = Picture(6.4, 2.6)
    axes = plain_axes(figure, "exit layer (layers run for a draft)", "tokens per round")
    layers = list(range(1, foretold.depth))
    heights = [foretold.rounds(layer, max_draft).tokens_per_round for layer in layers]
    axes.plot(layers, heights, color=BLUE, marker="o", markersize=4, lw=1.2)
    axes.plot([exit], [heights[exit - 1]], color=ORANGE, marker="D", markersize=9, ls="none", zorder=3)
    axes.annotate(f"layer {exit}: {heights[exit - 1]:.2f}", (exit, heights[exit - 1]), xytext=(0, 9),
                  textcoords="offset points", ha="center", fontsize=POINTS)  # fmt: skip
    axes.axhline(1, color="black", lw=0.8)
    axes.set_ylim(0.8, max_draft + 1.6)
    axes.margins(x=0.08)
    axes.set_title(f"replayed, drafts of {max_draft} (1 = plain decoding)", fontsize=POINTS, loc="left")
    axes.xaxis.get_major_locator().set_params(integer=True)
    return figure
