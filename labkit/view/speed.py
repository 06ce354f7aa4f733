"""Speed-up and tokens per round by exit layer: what was replayed and what was measured, on one chart."""

import textwrap
from typing import Any

from matplotlib.lines import Line2D

from labkit.errors import LabkitError
from labkit.view.figures import BLUE, GREEN, GREY, ORANGE, POINTS, Picture, plain_axes

LOOKS = [(BLUE, "o"), (ORANGE, "s"), (GREEN, "^"), ("#CC79A7", "D")]


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


def speedup(surface: Any, measured: Any = None, caption: str = "", max_drafts: Any = None) -> Picture:
    """Speed-up over plain decoding by exit layer, one colour for each draft length.

    surface: a table with exit_layer, max_draft, predicted_speedup and perhaps threshold (lines with hollow marks), as
    Replay.surface makes. measured: a table with exit_layer, max_draft, speedup and its quartiles speedup_q1, speedup_q3
    (full marks with bars), as Sweep.to_pandas makes. Of the one that has alpha, c and v (of the surface where both do)
    the bound (1 - α^(γ+1)) / (1 - α) / (γ c + v) is dashed. Lines without an exit layer are left out. caption: device,
    dtype, threads, c, v. max_drafts: the lengths shown, four at most. Raises LabkitError for other tables.
    """
    where = {"exit_layer", "max_draft"}
    quartiles = where | {"speedup", "speedup_q1", "speedup_q3"}
    for table, needed in ((surface, where | {"predicted_speedup"}), (measured, quartiles)):
        if table is not None and (missing := sorted(needed - set(table.columns))):
            raise LabkitError(f"the table has no column {missing[0]!r}; needed are {', '.join(sorted(needed))}")
    tables = {"replayed": surface, "measured": measured}
    tables = {name: t.dropna(subset=["exit_layer", "max_draft"]) for name, t in tables.items() if t is not None}
    bounded = next((t for t in tables.values() if {"alpha", "c", "v"} <= set(t.columns)), None)
    if bounded is not None:
        bounded = bounded[bounded["threshold"].isna()] if "threshold" in bounded else bounded
        alpha, cost = bounded["alpha"].clip(upper=1 - 1e-9), bounded["max_draft"] * bounded["c"] + bounded["v"]
        tables["bound"] = bounded.assign(bound=(1 - alpha ** (bounded["max_draft"] + 1)) / (1 - alpha) / cost)
    known = sorted(set(tables["replayed"]["max_draft"]))
    shown = list(max_drafts or known[:: max(1, -(-len(known) // len(LOOKS)))])[: len(LOOKS)]
    figure, kinds = Picture(8.4, 4.0), {}
    axes = plain_axes(figure, "exit layer (layers run for a draft)", "speed-up over plain decoding, times")
    for (colour, mark), length in zip(LOOKS, shown, strict=False):
        parts = {name: t[t["max_draft"] == length].astype({"exit_layer": int}) for name, t in tables.items()}
        best = parts["replayed"].groupby("exit_layer")["predicted_speedup"].max()
        axes.plot(
            best.index, best, color=colour, marker=mark, mfc="white", ms=5, lw=1.2, label=f"γ = {length}, replayed"
        )
        kinds["replayed"] = Line2D([], [], color=GREY, marker="o", mfc="white", lw=1.2)
        if len(real := parts.get("measured", ())):
            middle = real["speedup"]
            axes.errorbar(real["exit_layer"], middle, [middle - real["speedup_q1"], real["speedup_q3"] - middle],
                          fmt=mark, color=colour, capsize=3, ms=7, label=f"γ = {length}, measured")  # fmt: skip
            kinds["measured (median, quartiles)"] = Line2D([], [], color=GREY, marker="o", ls="none")
        if len(line := parts.get("bound", ())):
            axes.plot(line["exit_layer"], line["bound"], color=colour, ls="--", lw=1, label=f"γ = {length}, bound")
            kinds["bound from α, c, v"] = Line2D([], [], color=GREY, ls="--", lw=1)
    axes.axhline(1, color="black", lw=0.9)
    low, high = axes.get_ylim()
    low, high = max(0.0, min(low, 0.8)), max(high, 1.2)
    axes.axhspan(low, 1, color="#888888", alpha=0.15, lw=0)
    axes.annotate("slower", (0.01, 0.02), xycoords="axes fraction", fontsize=POINTS, color=GREY)
    axes.set_ylim(low, high)
    axes.xaxis.get_major_locator().set_params(integer=True)
    lengths = zip(LOOKS, shown, strict=False)
    key = {f"γ = {length}": Line2D([], [], color=c, marker=m, ls="none") for (c, m), length in lengths} | kinds
    figure.legend(key.values(), key.keys(), loc="outside right upper", fontsize=POINTS - 1, frameon=False)
    if caption:
        axes.set_title(textwrap.fill(caption, 84), fontsize=POINTS - 1, loc="left", color=GREY, parse_math=False)
    return figure
