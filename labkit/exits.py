"""Rules that say, between two layers, which rows may leave: for drafts, and for lossy early-exit decoding (CALM).

A rule is any callable `(layer, hidden_in, hidden_out, logits_fn, step) -> (batch,) bool`. layer: the depth, that is
how many layers the rows have been through. hidden_in, hidden_out (batch, width): the residual stream before and after
the last of them. logits_fn() -> (batch, vocab): what the head would say of hidden_out (computed once, only if called).
step (batch,): how many new tokens each row has before the one at stake. Source: CALM, 2207.07061.
"""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from labkit.cache import SlotCache
from labkit.errors import LabkitError, check_callable

ExitRule = Callable[..., Tensor]


@dataclass(frozen=True)
class decaying:
    """A threshold that falls with a new token's position t: clip(0.9 start + 0.1 exp(-rate t / length), 0, 1)."""

    start: float
    rate: float = 4.0
    length: int = 64

    def __post_init__(self):
        given = (self.start, self.rate, self.length)
        numbers = all(isinstance(x, int | float) and not isinstance(x, bool) for x in given)
        if not (numbers and 0 <= self.start <= 1 and 0 <= self.rate < math.inf and 0 < self.length < math.inf):
            raise LabkitError(
                f"got {self}; needed are a start from 0 to 1, a rate of 0 or more, and a length above 0; write "
                "decaying(0.9, 4.0, 64)"
            )

    def __call__(self, step: Int[Tensor, "batch"]) -> Float[Tensor, "batch"]:
        """The threshold of each row."""
        return (0.9 * self.start + 0.1 * torch.exp(-self.rate * step / self.length)).clamp(0, 1)


def _bar(threshold: Any, step: Tensor) -> Any:
    if not callable(threshold):
        return threshold
    found = threshold(step)
    number = isinstance(found, int | float) and not isinstance(found, bool)
    fits = found.shape in ((), step.shape) if isinstance(found, Tensor) else number
    if not fits:
        got = f"{tuple(found.shape)}, {found.dtype}" if isinstance(found, Tensor) else repr(found)
        raise LabkitError(
            f"the threshold {threshold!r} returned {got}; needed is a number, or one for each row: {tuple(step.shape)}"
        )
    return found


def _check_threshold(threshold: Any, name: str, low: float = 0) -> None:
    number = isinstance(threshold, int | float) and not isinstance(threshold, bool)
    needed = f"the threshold is a number from {low} to 1, or a callable of the position such as "
    needed += "labkit.exits.decaying(0.9)"
    if callable(threshold):
        check_callable(threshold, f"{name}'s threshold", "step", needed)
    elif not (number and low <= threshold <= 1):
        raise LabkitError(f"got {name}({threshold!r}); {needed}")


@dataclass(frozen=True)
class confidence:
    """Leave when the most probable token has at least probability `threshold` (a number, or a callable of `step`)."""

    threshold: Any

    def __post_init__(self):
        _check_threshold(self.threshold, "confidence")

    def __call__(self, layer, hidden_in, hidden_out, logits_fn, step) -> Bool[Tensor, "batch"]:
        """Rows whose top-1 probability is high enough."""
        logits = logits_fn().float()
        return (logits.amax(-1) - logits.logsumexp(-1)).exp() >= _bar(self.threshold, step)


@dataclass(frozen=True)
class margin:
    """Leave when the most probable token leads the second by at least `threshold` in probability."""

    threshold: Any

    def __post_init__(self):
        _check_threshold(self.threshold, "margin")

    def __call__(self, layer, hidden_in, hidden_out, logits_fn, step) -> Bool[Tensor, "batch"]:
        """Rows whose lead is large enough."""
        logits = logits_fn().float()
        first, second = (logits.topk(2).values - logits.logsumexp(-1, keepdim=True)).exp().unbind(-1)
        return first - second >= _bar(self.threshold, step)


@dataclass(frozen=True)
class saturation:
    """Leave when a layer hardly turns its input: their cosine is at least `threshold`. Needs no head."""

    threshold: Any

    def __post_init__(self):
        _check_threshold(self.threshold, "saturation", -1)

    def __call__(self, layer, hidden_in, hidden_out, logits_fn, step) -> Bool[Tensor, "batch"]:
        """Rows whose state has settled."""
        cosine = torch.cosine_similarity(hidden_in.float(), hidden_out.float(), dim=-1)
        return cosine >= _bar(self.threshold, step)


@dataclass(frozen=True)
class classifier:
    """Leave when `module(hidden_out) -> (batch,) or (batch, 1)` logits, through a sigmoid, reach `threshold`."""

    module: nn.Module
    threshold: Any = 0.5

    def __post_init__(self):
        _check_threshold(self.threshold, "classifier")
        if not isinstance(self.module, nn.Module):
            raise LabkitError(f"got classifier({self.module!r}); give an nn.Module from (batch, width) to (batch, 1)")

    def __call__(self, layer, hidden_in, hidden_out, logits_fn, step) -> Bool[Tensor, "batch"]:
        """Rows that the module lets go."""
        name, given = type(self.module).__name__, f"{tuple(hidden_out.shape)}, {hidden_out.dtype}"
        try:
            found = self.module(hidden_out)
        except (RuntimeError, TypeError, ValueError) as error:
            raise LabkitError(
                f"the classifier's {name} does not take {given} at layer {layer} ({error}); give a module of that "
                "width, dtype and device"
            ) from error
        if found.shape not in (step.shape, (*step.shape, 1)):
            raise LabkitError(
                f"the classifier's {name} gave {tuple(found.shape)} for {given}; needed is one logit for each row"
            )
        return found.reshape(step.shape).sigmoid() >= _bar(self.threshold, step)


def check_rule(rule: Any, name: str) -> None:
    """Raise LabkitError unless `rule` can be called as one; a class such as `confidence` still wants its threshold."""
    arguments = "layer, hidden_in, hidden_out, logits_fn, step"
    check_callable(rule, name, arguments, "write a layer's number, or a rule such as labkit.confidence(0.9)")


def lent(x: Tensor) -> Tensor:
    """A copy for a rule, which may write into what it is shown: the states and tokens of the run stay as they are."""
    return x.clone()


def check_depths(layers: Any, depth: int, name: str = "layers") -> tuple[int, ...]:
    """The depths at which a rule is tested on a model of `depth` layers, in order; the last layer needs no test."""
    if layers is None:
        return tuple(range(1, depth))
    if isinstance(layers, str) or not isinstance(layers, Sequence) or not layers:
        raise LabkitError(f"got {name}={layers!r}; write depths from 1 to {depth}, such as (8, 16, 24)")
    wrong = [d for d in layers if isinstance(d, bool) or not isinstance(d, int) or not 1 <= d <= depth]
    if wrong:
        raise LabkitError(f"got {name}={tuple(layers)} with {wrong[0]!r}; the target has depths 1 to {depth}")
    return tuple(sorted({d for d in layers if d < depth}))


def fires(
    rule: ExitRule, layer: int, hidden_in: Tensor, hidden_out: Tensor, logits_fn: Callable, step: Tensor
) -> Tensor:
    """What the rule says of each row, checked. Shapes: see the module's docstring."""
    found: Any = rule(layer, lent(hidden_in), lent(hidden_out), logits_fn, step)
    if not isinstance(found, Tensor) or found.dtype != torch.bool or found.shape != step.shape:
        got = f"{tuple(found.shape)}, {found.dtype}" if isinstance(found, Tensor) else repr(found)
        raise LabkitError(
            f"the exit rule {rule!r} returned {got} at layer {layer}; needed is a tensor of shape "
            f"{tuple(step.shape)}, torch.bool: one answer for each row"
        )
    return found


def last_layer(run: Callable, x: Tensor, start: int, depth: int) -> tuple[Tensor, Tensor]:
    """Run rows from `start` to `depth`: the states before and after the last layer. `run(x, start, stop)`."""
    before = run(x, start, depth - 1)
    return before, run(x, 0, 1) if depth == 1 else run(before, depth - 1, depth)


class Leaving:
    """How rows go through a target that exits early: each on its own, its state kept from where it left.

    A row that has left still writes keys and values in the layers above, from that state, so that later tokens find
    something there. What a row gives depends on its own prefix only, so every lossless draft gives the same text.
    """

    def __init__(self, whole: Any, holding: Any, rule: ExitRule, depths: Sequence[int]):
        check_rule(rule, "early_exit")
        self.whole, self.holding, self.rule, self.depths = whole, holding, rule, depths

    def __call__(
        self, x: Tensor, start: int, stop: int, cache: SlotCache, slots: Int[Tensor, "batch rows"], positions, mask
    ) -> Float[Tensor, "batch rows width"]:
        """Backbone.run: rows through layers [start, stop), resuming above `start` what they did below it."""
        go = lambda x, a, b, way=self.whole: way.run(x, a, b, cache, slots, positions, mask)  # noqa: E731
        if start == stop == 0:
            return go(x, 0, 0)
        left = torch.zeros_like(slots)
        some = every = False
        if start > 0 and cache.left is not None:
            left = cache.left.gather(1, slots)
            left = torch.where(left > start, 0, left)  # a draft may have gone deeper than where it is resumed
            some, every = self._ask(left, cache)
        at = start
        for depth in [d for d in self.depths if start < d < stop] + [stop]:
            if every:
                break
            tested = depth in self.depths
            if some:
                before = x
                for layer in range(at, depth):
                    before, x = x, torch.where((left > 0)[..., None], x, go(x, layer, layer + 1))
            elif tested:
                before, x = last_layer(go, x, at, depth)
            else:
                before, x = x, go(x, at, depth)
            at = depth
            if tested:
                left = torch.where((left == 0) & self._fired(depth, before, x, positions, cache), depth, left)
                some, every = self._ask(left, cache)
        cache.leave(slots, left)
        return go(x, at, stop, self.holding)

    def _ask(self, left: Tensor, cache: SlotCache) -> list:
        return cache.to_host(torch.stack([(left > 0).any(), (left > 0).all()]))

    def _fired(self, depth: int, before: Tensor, after: Tensor, positions: Tensor, cache: SlotCache) -> Tensor:
        step = (positions + 1 - cache.begun[:, None]).flatten()
        logits = functools.cache(lambda: self.whole.head(after).flatten(0, 1))
        return fires(self.rule, depth, before.flatten(0, 1), after.flatten(0, 1), logits, step).view_as(positions)
