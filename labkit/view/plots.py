"""One figure for each question about acceptance, cost and speed; every number is one of `to_pandas()`."""

import math
import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from labkit.compare import Comparison
from labkit.decoding import PHASES
from labkit.errors import LabkitError
from labkit.trace import Generation
from labkit.view.figures import BLUE, CARD, GREEN, GREY, INK, ORANGE, POINTS, Picture, plain_axes

Z = 1.959964  # of a 95 % interval
PARTS = {"prefill": "#999999", "draft": BLUE, "verify": ORANGE, "accept": GREEN, "cache": "#E69F00", "other": "#CC79A7"}
HATCHES = {"prefill": "", "draft": "", "verify": "//", "accept": "..", "cache": "xx", "other": "\\\\"}
Results = Generation | Sequence[Generation]


def several(results: Any) -> dict[str, list[Generation]]:
    """Generations by name, from a comparison, a mapping, one, or a list."""
    if isinstance(results, Comparison):
        return {name: list(outs) for name, outs in results.generations.items()}
    if isinstance(results, Mapping):
        return {name: [out] if isinstance(out, Generation) else list(out) for name, out in results.items()}
    found: dict[str, list[Generation]] = {}
    for out in [results] if isinstance(results, Generation) else results:
        found.setdefault(out.settings["drafter"], []).append(out)
    return found


def wilson(hits: int, of: int) -> tuple[float, float]:
    """The 95 % interval of a share (Wilson 1927)."""
    middle, spread = hits + Z * Z / 2, Z * math.sqrt(hits * (of - hits) / of + Z * Z / 4)
    return max(0.0, (middle - spread) / (of + Z * Z)), min(1.0, (middle + spread) / (of + Z * Z))


def by_position(outs: Sequence[Generation]) -> dict[int, tuple[int, int]]:
    """By place in the draft, from 1: tokens accepted, and judged (accepted or rejected)."""
    found: dict[int, list[int]] = {}
    for out in outs:
        for row in range(len(out.tokens)):
            for piece in out.pieces(row):
                if piece.kind in ("accepted", "rejected"):
                    count = found.setdefault(piece.depth, [0, 0])
                    count[0] += piece.kind == "accepted"
                    count[1] += 1
    return {depth: (hits, of) for depth, (hits, of) in sorted(found.items())}


def acceptance(results: Results) -> Picture:
    """How many drafted tokens a round keeps, and how likely each place of a draft is to be kept.

    results: a generation, or several of one strategy. The second panel is conditional: of the tokens at a place that
    the target judged, those that it kept, with a 95 % interval. Raises LabkitError where nothing was drafted.
    """
    outs = [results] if isinstance(results, Generation) else list(results)
    counts = Counter(
        r.accepted[row]
        for o in outs
        for r in o.rounds
        for row in range(len(o.tokens))
        if r.tokens[row] and r.drafted[row]
    )
    places = by_position(outs)
    if not places:
        raise LabkitError("nothing was drafted in these results; give those of a strategy such as labkit.EarlyExit(4)")
    figure, rounds = Picture(8.4, 3.1), sum(counts.values())
    axes = plain_axes(figure, "drafted tokens accepted in a round", "rounds", 121)
    most, mean = max(*counts, *places), sum(k * n for k, n in counts.items()) / rounds
    axes.bar(range(most + 1), [counts[k] for k in range(most + 1)], color=BLUE, width=0.8)
    axes.axvline(mean, color=ORANGE, lw=1.6, ls="--")
    axes.set_xticks(range(0, most + 1, math.ceil(most / 10)))
    axes.yaxis.get_major_locator().set_params(integer=True)
    axes.set_title(f"{rounds} rounds, dashed: mean {mean:.2f}", fontsize=POINTS, loc="left")
    axes = plain_axes(figure, "place in the draft", "share accepted of those judged", 122)
    shares = [hits / of for hits, of in places.values()]
    bounds = [wilson(hits, of) for hits, of in places.values()]
    around = [[s - low for s, (low, _) in zip(shares, bounds, strict=True)],
              [high - s for s, (_, high) in zip(shares, bounds, strict=True)]]  # fmt: skip
    axes.errorbar(list(places), shares, yerr=around, fmt="o", color=BLUE, capsize=3)
    for (depth, (_, of)), (_, high) in zip(places.items(), bounds, strict=True):
        axes.annotate(str(of), (depth, high), xytext=(0, 3), textcoords="offset points", ha="center",
                      fontsize=POINTS - 2, color=GREY)  # fmt: skip
    axes.set_ylim(0, 1.14)
    axes.set_yticks([0, 0.25, 0.5, 0.75, 1])
    axes.set_xticks(list(places)[:: math.ceil(len(places) / 10)])
    axes.margins(x=0.12)
    axes.set_title("bars: 95 % interval, number: tokens judged", fontsize=POINTS, loc="left")
    return figure


def costs(outs: Sequence[Generation]) -> dict[str, float]:
    """Milliseconds per new token by part of the work; they add up to the wall time."""
    tokens, phases = sum(o.new_tokens for o in outs), [o.phase_seconds for o in outs]
    found = {"prefill": sum(o.prefill_seconds for o in outs)}
    found |= {("cache" if phase == "commit" else phase): sum(p[phase] for p in phases) for phase in PHASES}
    found["other"] = max(0.0, sum(o.seconds for o in outs) - sum(found.values()))
    return {part: 1000 * seconds / tokens for part, seconds in found.items()}


def _short(name: str, most: int = 34) -> str:
    lines = textwrap.wrap(name, most, break_long_words=True)
    return "\n".join(lines[:2]) + ("…" if len(lines) > 2 else "")


def cost_bars(results: Any) -> Picture:
    """Where the time of a token goes, strategy by strategy: why high acceptance may still be slow.

    results: a comparison, generations by name, one, or a list.
    """
    named = several(results)
    figure = Picture(8.4, 1.5 + 0.46 * len(named))
    axes = plain_axes(figure, "milliseconds per new token", "strategy")
    for at, outs in enumerate(named.values()):
        left = 0.0
        for part, ms in costs(outs).items():
            axes.barh(at, ms, left=left, color=PARTS[part], hatch=HATCHES[part], ec=CARD, lw=0.5, height=0.66,
                      label=part if at == 0 else None)  # fmt: skip
            left += ms
        drafted, accepted = sum(o.drafted for o in outs), sum(o.accepted for o in outs)
        axes.annotate(f"{left:.1f} ms" + (f", {accepted / drafted:.0%} accepted" if drafted else ""), (left, at),
                      xytext=(4, 0), textcoords="offset points", va="center", fontsize=POINTS)  # fmt: skip
    axes.spines["left"].set_visible(False)
    axes.set_yticks(range(len(named)), [_short(name) for name in named], fontsize=POINTS - 1, parse_math=False)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.5 * max(sum(costs(outs).values()) for outs in named.values()))
    figure.legend(loc="outside upper center", ncols=len(PARTS), fontsize=POINTS, frameon=False)
    return figure


def pareto(results: Any) -> Picture:
    """Tokens per round against what a round costs, in plain decoding's rounds; the front is joined.

    results: a comparison, or generations by name, with one named Plain() (or drafting nothing) to count in. Lines join
    points of one speed-up (prefill left out). Raises LabkitError without plain decoding.
    """
    named = several(results)
    rounds = lambda outs: sum(o.row_rounds for o in outs)  # noqa: E731
    spent = {name: sum(o.seconds - o.prefill_seconds for o in outs) / rounds(outs) for name, outs in named.items()}
    plain = next((spent[name] for name, outs in named.items() if not any(o.drafted for o in outs)), None)
    if plain is None:
        raise LabkitError("none of these is plain decoding, which a round's cost is counted in; add labkit.Plain()")
    points = {n: (spent[n] / plain, sum(o.new_tokens for o in outs) / rounds(outs)) for n, outs in named.items()}
    figure = Picture(8.4, 3.9)
    axes = plain_axes(figure, "cost of a round (plain decoding's round = 1)", "tokens per round")
    right, top = 1.12 * max(x for x, _ in points.values()), 1.15 * max(y for _, y in points.values())
    for speed in (0.5, 1, 2, 4):
        end = min(right, top / speed)
        axes.plot([0, end], [0, speed * end], color=INK if speed == 1 else "#8A929A", lw=0.8, ls="--", zorder=1)
        axes.annotate(f"{speed:g}x", (end, speed * end), fontsize=POINTS - 1, color=GREY, ha="right", va="bottom")
    front = [
        p for p in sorted(points.values()) if not any(q[0] <= p[0] and q[1] >= p[1] and q != p for q in points.values())
    ]
    axes.plot(*zip(*front, strict=True), color=GREEN, lw=1.4, zorder=2, label="front: nothing is better in both")
    for number, (name, (x, y)) in enumerate(points.items(), 1):
        axes.plot(
            [x], [y], marker="o", color=BLUE, markersize=15, ls="none", label=f"{number}  {_short(name)}", zorder=3
        )
        axes.annotate(str(number), (x, y), ha="center", va="center", color="white", fontsize=POINTS - 1, zorder=4)
    axes.set(xlim=(0, right), ylim=(0, top))
    shown = figure.legend(loc="outside right upper", fontsize=POINTS - 1, frameon=False, markerscale=0.5)
    for text in shown.get_texts():
        text.set_parse_math(False)
    return figure
