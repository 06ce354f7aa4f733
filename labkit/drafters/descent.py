"""How far down the layers each token of a draft goes, and what is handed over for it."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from labkit.backbone import Backbone
from labkit.draft import Partial
from labkit.drafters.kv import Reader
from labkit.errors import LabkitError
from labkit.exits import check_depths, check_rule, fires, last_layer
from labkit.protocol import Context
from labkit.session import Session


@dataclass(frozen=True)
class Exits:
    """Where the tokens of a draft may be read: after one layer, or where a rule lets them go.

    exit: a layer or a rule. layers, minimum, maximum: of a rule only; see EarlyExit.
    """

    exit: Any
    layers: Sequence[int] | None
    minimum: int
    maximum: int | None

    def __post_init__(self):
        if not self.fixed:
            check_rule(self.exit, "exit")
            return
        if isinstance(self.exit, bool) or not isinstance(self.exit, int) or self.exit < 1:
            check_rule(self.exit, "exit")
        if self.layers is not None or self.maximum is not None or self.minimum != 1:
            raise LabkitError(
                "layers, minimum and maximum say where a rule is tested; exit=… is one layer, leave them out"
            )

    @property
    def fixed(self) -> bool:
        """Whether it is one layer."""
        return not callable(self.exit)

    def depths(self, target: Backbone) -> tuple[int, ...]:
        """The layer, or where the rule is tested; it is not tested at the last one."""
        if self.fixed:
            target.check_exit(self.exit)
            return (self.exit,)
        deepest = target.depth if self.maximum is None else self.maximum
        target.check_exit(self.minimum, "minimum")
        target.check_exit(deepest, "maximum")
        tested = check_depths(self.layers, target.depth)
        if not any(self.minimum <= d <= deepest for d in self.layers or (deepest,)):
            raise LabkitError(
                f"the rule is never tested: minimum={self.minimum}, maximum={deepest} and layers={self.layers} leave "
                "no layer; write minimum below maximum, and layers between them"
            )
        return (*(d for d in tested if self.minimum <= d < deepest), deepest)


class Descent:
    """Rows of a draft on their way through the layers: row `level` is the token that the draft's token `level` follows.

    depths: where a row may be read, ascending; a rule is tested at all but the last. Earlier rows that a deeper one
    overtakes are either taken along exactly, or (project) only leave keys and values in the layers that they skipped.
    With exact catch-up the rows that have not passed a layer are always the last ones, so that all are at least as deep
    as the last row: that is the depth handed over. With projection it is the shallowest exit.
    """

    def __init__(self, session: Session, reader: Reader, exits: Exits, most: int, project: bool):
        self.session, self.reader, self.project = session, reader, project
        self.depths, self.rule = exits.depths(session.backbone), None if exits.fixed else exits.exit
        self.exits: Int[Tensor, "batch most"] = session.tokens.new_full((session.batch, most), self.depths[-1])
        self._most = most
        self._states: dict[int, Tensor] = {}  # (batch, most, width) at each depth
        self._own: Tensor | None = None  # the same, each row where it was read
        self._reached: list[int] = []
        self._deepest: list[int] = []

    def start(self, context: Context) -> None:
        """A new round."""
        self._reached, self._deepest = [], []
        self.reader.start(context)

    def row(
        self, level: int, token: Int[Tensor, "batch 1"], context: Context, read: Callable[[Tensor], Tensor]
    ) -> Float[Tensor, "batch vocab"]:
        """Take one more row down until the rule lets all rows of the batch go; what `read` says of where each left.

        read: hidden (batch, 1, width) -> logits (batch, vocab).
        """
        at, mixed = 0, False
        left: Any = None
        shown: Any = None
        self._reached.append(0)
        for depth in self.depths:
            before, hidden = self._down(level, token, at, depth)
            at = depth
            shown = hidden if left is None else torch.where(left[:, None, None], shown, hidden)
            if self.rule is None:
                continue
            self.exits[:, level] = depth if left is None else torch.where(left, self.exits[:, level], depth)
            logits = functools.cache(lambda hidden=hidden: read(hidden))
            if depth == self.depths[-1]:
                break
            step = (context.n + level - self.session.cache.begun).to(hidden.device)
            fired = fires(self.rule, depth, before[:, -1], hidden[:, 0], logits, step)
            left = fired if left is None else left | fired
            gone = self.session.to_host(left)
            if all(out or done for out, done in zip(gone, context.done, strict=True)):
                break
            mixed = any(gone)
        self._deepest.append(at)
        if self.project:
            self._own = self._put(self._own, level, shown)
        return read(shown) if self.rule is None or mixed else logits()

    def _down(self, level: int, token: Tensor, at: int, depth: int) -> tuple[Any, Tensor]:
        """Layers [at, depth) for row `level` and for those before it that it overtakes; its states, one layer apart."""
        first = next(i for i, reached in enumerate(self._reached) if reached == at) if at else level
        if self.project and first < level:
            holding = self.session.backbone.holding()
            assert self._own is not None
            self.reader.run(self._own[:, first:level], at, depth, first, level - first, holding)
            self._reached[first:level] = [depth] * (level - first)
            first = level
        x = token if at == 0 else self._states[at][:, first : level + 1]
        go = lambda x, start, stop: self.reader.run(x, start, stop, first, level + 1 - first)  # noqa: E731
        before, after = (x, go(x, at, depth)) if depth == self.depths[-1] else last_layer(go, x, at, depth)
        self._states[depth] = self._put(self._states.get(depth), first, after)
        self._reached[first:] = [depth] * (level + 1 - first)
        return before, after[:, -1:]

    def _put(self, buffer: Tensor | None, first: int, rows: Any) -> Tensor:
        kept: Tensor = rows.new_zeros((rows.shape[0], self._most, rows.shape[2])) if buffer is None else buffer
        kept[:, first : first + rows.shape[1]] = rows
        return kept

    def partial(self) -> Partial:
        """What verification may resume from."""
        if not self._deepest:
            return Partial()
        depth = min(self._deepest) if self.project else self._deepest[-1]
        return self.session.partial(self._states[depth][:, : len(self._deepest)], depth)
