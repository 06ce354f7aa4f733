"""How far a lossy or drafting threshold may be loosened, with a guarantee: Learn-then-Test (2110.01052).

The unit is the prompt, since the tokens of one prompt are not independent; the guarantee is about the mean over prompts
like those given, so give some that were not used to find the rule, drawn like those that are to come.
"""

import bisect
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from labkit.compare import as_html, as_text
from labkit.errors import LabkitError, check_callable, check_lab
from labkit.lab import Lab, _Run
from labkit.lossy import told_agreement
from labkit.prompts import read_prompts
from labkit.protocol import Drafter

GRID = 10_000
"""What is searched for in [0, 1] is found to one in so many."""


def hoeffding(mean: float, prompts: int, tolerance: float) -> float:
    """P-value of "the expected risk exceeds `tolerance`": exp(-2 n max(0, tolerance - mean)^2)."""
    return math.exp(-2 * prompts * max(0.0, tolerance - mean) ** 2)


def hoeffding_bentkus(mean: float, prompts: int, tolerance: float) -> float:
    """The smaller of two p-values for risks in [0, 1], never above `hoeffding`.

    Hoeffding's with the relative entropy of mean and tolerance, and Bentkus's e P(Binomial(n, tolerance) <= n mean).
    """
    if mean >= tolerance:
        return 1.0
    entropy = (1 - mean) * math.log((1 - mean) / (1 - tolerance)) + (mean and mean * math.log(mean / tolerance))
    total = prompts * mean
    whole = round(total) if abs(total - round(total)) < 1e-9 else math.ceil(total)
    return min(1.0, math.exp(-prompts * entropy), math.e * _binomial_tail(whole, prompts, tolerance))


def _binomial_tail(most: int, n: int, p: float) -> float:
    ways = lambda k: math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)  # noqa: E731
    return math.fsum(math.exp(ways(k) + k * math.log(p) + (n - k) * math.log1p(-p)) for k in range(most + 1))


def passing(p_values: Sequence[float], level: float) -> int:
    """How many hypotheses fixed-order testing rejects: those before the first p-value above `level`."""
    return next((at for at, p in enumerate(p_values) if p > level), len(p_values))


def _p_value(bound: Any, mean: float, prompts: int, tolerance: float) -> float:
    """What `bound` says, checked."""
    instead = "write labkit.calibration.hoeffding or …hoeffding_bentkus"
    check_callable(bound, "bound", "mean, prompts, tolerance", instead)
    found = bound(mean, prompts, tolerance)
    if isinstance(found, bool) or not isinstance(found, int | float) or not 0 <= found <= 1:
        raise LabkitError(f"the bound {bound!r} returned {found!r}; needed is a p-value from 0 to 1; {instead}")
    return found


@dataclass(frozen=True)
class Tested:
    """One threshold: each prompt's risk, the p-value, and what it gives (mean exit layer, or tokens per round)."""

    threshold: Any
    risks: list[float]
    p_value: float
    gives: float

    @property
    def risk(self) -> float:
        """Mean over prompts."""
        return statistics.fmean(self.risks)


@dataclass(frozen=True)
class Calibration:
    """What `calibrate` found: the loosest threshold that holds, or None, and every threshold's test.

    With probability `confidence` over the draw of prompts, the expected `measure` ("agreement", "acceptance rate") at
    `threshold` is at least `target`; that is, the expected risk is at most `tolerance`, 1 - target.
    """

    threshold: Any
    target: float
    confidence: float
    measure: str
    tested: list[Tested]
    bound: Callable[[float, int, float], float]

    @property
    def tolerance(self) -> float:
        """The largest expected risk that is allowed (delta)."""
        return 1 - self.target

    @property
    def level(self) -> float:
        """The probability of error (epsilon)."""
        return 1 - self.confidence

    @property
    def prompts(self) -> int:
        """How many there were (n)."""
        return len(self.tested[0].risks)

    @property
    def hoeffding_cost(self) -> float:
        """How far below the tolerance Hoeffding wants the mean risk: sqrt(ln(1 / level) / 2n)."""
        return math.sqrt(math.log(1 / self.level) / (2 * self.prompts))

    @property
    def allowed(self) -> float | None:
        """The largest mean risk that passes with this many prompts; None if not even 0 does."""
        fails = lambda at: self.bound(at / GRID, self.prompts, self.tolerance) > self.level  # noqa: E731
        found = bisect.bisect_left(range(GRID + 1), True, key=fails) - 1
        return None if found < 0 else found / GRID

    @property
    def reachable(self) -> float | None:
        """The highest target that the strictest threshold would have passed; None if none."""
        strictest = self.tested[0].risk
        holds = lambda at: self.bound(strictest, self.prompts, at / GRID) <= self.level  # noqa: E731
        found = 1 + bisect.bisect_left(range(1, GRID), True, key=holds)
        return None if found == GRID else 1 - found / GRID

    def notes(self) -> list[str]:
        """The result in words, and what so many prompts cost."""
        n, sure, name = self.prompts, f"{100 * self.confidence:g}%", getattr(self.bound, "__name__", "the bound")
        found = f"{self.threshold!r} is kept: {self.measure} of at least {self.target:g} on such prompts, with {sure} "
        found += "confidence"
        if self.threshold is None and self.allowed is None:
            fits = lambda count: self.bound(0.0, count, self.tolerance) <= self.level  # noqa: E731
            least = bisect.bisect_left(range(1 << 30), True, lo=1, key=fits)
            found = f"no threshold can be kept: {n} prompts cannot show {self.target:g}, were there no risk at all; "
            found += f"give at least {least}"
        elif self.threshold is None:
            found = f"no threshold is kept: the strictest, {self.tested[0].threshold!r}, does not show {self.target:g}"
            found += "; no target would have been reachable" if self.reachable is None else (
                f"; reachable with it would have been target={self.reachable:.4g}")  # fmt: skip
        allowed = "none passes" if self.allowed is None else f"up to {self.allowed:.3f} passes"
        cost = f"with {n} prompts Hoeffding at {sure} costs ±{self.hoeffding_cost:.2f}; of mean risks, "
        return [found, f"{cost}{allowed} here ({name}, tolerance {self.tolerance:.3g})"]

    def cells(self) -> list[list[str]]:
        """The table as text, heading first."""
        gives = "mean exit layer" if self.measure == "agreement" else "tokens/round"
        kept = passing([row.p_value for row in self.tested], self.level)
        return [["threshold", "mean risk", "p-value", gives, "holds"]] + [
            [f"{row.threshold!r}", f"{row.risk:.3f}", f"{row.p_value:.2g}", f"{row.gives:.2f}",
             "yes" if at < kept else "no" if at == kept else "not tested"] for at, row in enumerate(self.tested)
        ]  # fmt: skip

    def __str__(self) -> str:
        return as_text(self.cells(), self.notes())

    def _repr_html_(self) -> str:
        return as_html(self.cells(), self.notes())


def calibrate(
    lab: Lab,
    prompts: Any,
    make: Callable[[Any], Any],
    thresholds: Sequence[Any],
    *,
    target: float,
    confidence: float = 0.9,
    max_new_tokens: int = 64,
    exit_layers: Sequence[int] | None = None,
    bound: Callable[[float, int, float], float] = hoeffding_bentkus,
    progress: Callable[[str], None] = lambda text: None,
) -> Calibration:
    """Find the loosest of `thresholds`, given strict to loose, that keeps an agreement or acceptance rate of `target`.

    make(threshold): an exit rule or a number of layers, for lossy decoding (risk: 1 - `agreement`; the rule is tested
    at `exit_layers`), or a Drafter (risk: the share of its drafted tokens that were rejected in a real greedy run; 0
    for a prompt on which it drafted nothing, since nothing was wasted). The thresholds are tested in the given order at
    1 - confidence by the p-values of `bound`, and the last before the first that fails is kept: that needs no
    correction for their number, but the order must not come from these prompts. All are run, for the table.
    """
    for name, value in (("target", target), ("confidence", confidence)):
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1:
            raise LabkitError(f"got {name}={value!r}; needed is a number between 0 and 1, write {name}=0.9")
    if isinstance(thresholds, str) or not isinstance(thresholds, Sequence) or not thresholds:
        raise LabkitError(f"got thresholds={thresholds!r}; write a list from strict to loose, such as [0.99, 0.9, 0.8]")
    check_callable(make, "make", "threshold", "write a function of a threshold, such as labkit.confidence")
    check_callable(progress, "progress", "text", "write a function of a text, such as print, or leave it out")
    check_lab(lab, "calibrate(lab, prompts, make, thresholds, target=0.9)")
    rows = read_prompts(prompts, None, lab.tokenizer, lab.backbone.vocab).rows
    made = [make(threshold) for threshold in thresholds]
    for threshold, one in zip(thresholds, made, strict=True):
        if not (isinstance(one, Drafter | int) or callable(one)) or isinstance(one, bool):
            raise LabkitError(
                f"make({threshold!r}) returned {one!r}; needed is a drafter such as labkit.EarlyExit(12, stop=…), an "
                "exit rule such as labkit.confidence(0.9), or a number of layers"
            )
    _p_value(bound, 0.0, len(rows), 1 - target)  # asked before the runs, not after
    drafting = [isinstance(one, Drafter) for one in made]
    if any(drafting) and not all(drafting):
        raise LabkitError("make returned drafters for some thresholds and exits for others; calibrate one at a time")
    lossy = not drafting[0]
    for one in made:  # whatever is wrong with one of them is said before anything runs
        exits = {"early_exit": one} if lossy else {}
        _Run(lab, rows, None if lossy else one, exits | dict(exit_layers=exit_layers, max_new_tokens=max_new_tokens))
    texts = [lab.generate(row, max_new_tokens=max_new_tokens).tokens[0] for row in rows] if lossy else []
    tested = []
    for number, (threshold, one) in enumerate(zip(thresholds, made, strict=True), 1):
        progress(f"threshold {number} of {len(made)}: {threshold!r}")
        if lossy:
            found = told_agreement(lab, rows, texts, one, exit_layers)
            risks, gives = [1 - share for share in found.shares], found.depth
        else:
            outs = [lab.generate(row, one, max_new_tokens=max_new_tokens) for row in rows]
            risks = [1 - out.accepted / out.drafted if out.drafted else 0.0 for out in outs]
            gives = sum(out.new_tokens for out in outs) / sum(out.row_rounds for out in outs)
        p_value = _p_value(bound, statistics.fmean(risks), len(rows), 1 - target)
        tested.append(Tested(threshold, risks, p_value, gives))
    kept = passing([row.p_value for row in tested], 1 - confidence)
    measure = "agreement" if lossy else "acceptance rate"
    return Calibration(thresholds[kept - 1] if kept else None, target, confidence, measure, tested, bound)
