"""Skipped layers: draft with the target's own weights, leaving out some attentions and some MLPs."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from labkit.costs import work_seconds
from labkit.draft import Draft
from labkit.drafters.chain import Chain, check_stop
from labkit.drafters.on_the_fly import OnTheFly, Skipping
from labkit.drafters.sublayers import SubLayers, evenly
from labkit.errors import LabkitError, check_count
from labkit.protocol import Context, Drafter, StopRule, Work, never
from labkit.session import Session


@dataclass
class _State:
    chain: Chain
    skipping: Skipping


@dataclass(frozen=True)
class SkipLayers(Drafter):
    """A chain of `max_draft` tokens from the target without the attention of some layers and the MLP of some.

    attention, mlp: layers, counted from 0. Nothing skipped is the self-draft, which must be accepted whole. The draft
    reads the target's own keys and values; its work is not the target's, so that nothing is handed over.
    search: OnTheFly() changes the set during a generation; it begins with the one given, or an even one of its `ratio`.
    Sources: Draft & Verify 2309.08168; SWIFT 2410.06916. `labkit.search_skips` looks for a good set beforehand.
    """

    attention: Sequence[int] = ()
    mlp: Sequence[int] = ()
    max_draft: int = 4
    stop: StopRule = field(default=never, kw_only=True)
    search: OnTheFly | None = field(default=None, kw_only=True)

    def __post_init__(self):
        check_count(self.max_draft, "max_draft", "SkipLayers")
        check_stop(self.stop)
        skipped = SubLayers(self.attention, self.mlp)
        object.__setattr__(self, "attention", skipped.attention)
        object.__setattr__(self, "mlp", skipped.mlp)
        if self.search is not None and not isinstance(self.search, OnTheFly):
            raise LabkitError(f"got search={self.search!r}; write labkit.drafters.OnTheFly(), or leave it out")

    def __repr__(self) -> str:
        parts = [f"{name}={getattr(self, name)}" for name in ("attention", "mlp", "max_draft")]
        parts += [] if self.stop is never else [f"stop={self.stop!r}"]
        parts += [] if self.search is None else [f"search={self.search!r}"]
        return f"SkipLayers({', '.join(parts)})"

    @property
    def nodes(self) -> int:
        """The draft length."""
        return self.max_draft

    @property
    def scratch(self) -> int:
        """The draft's slots, or as many as a candidate is scored in."""
        return self.max_draft if self.search is None else max(self.max_draft, self.search.count)

    def skipped(self, depth: int) -> SubLayers:
        """What is skipped on a target of `depth` layers, to begin with."""
        given = SubLayers(self.attention, self.mlp)
        return given if self.search is None or given != SubLayers() else evenly(depth, self.search.ratio)

    def work(self, depth: int) -> tuple[list[Work], list[Work]]:
        """Draft steps of one row through what is left; verification runs all. Unknown for a set that changes."""
        if self.search is not None:
            return [], []
        return [Work(0, depth, 1, other=self._bare)], super().work(depth)[1]

    def check(self, session: Session) -> None:
        """The layers must be the target's, and their sub-layers such that they can be left out."""
        skipped, depth = self.skipped(session.backbone.depth), session.backbone.depth
        skipped.check(depth)
        skipped.of(session.backbone).view(0, depth)

    def begin(self, session: Session) -> _State:
        """The target without the skipped sub-layers, and static buffers."""
        skipping = Skipping(session, self.skipped(session.backbone.depth), self.search)
        return _State(Chain(session, self.max_draft, self.stop), skipping)

    def propose(self, state: _State, context: Context) -> Draft:
        """One token a step, through what is left of all layers."""
        skipping, session, count = state.skipping, state.skipping.session, context.length(self.max_draft)
        if count > 0:
            skipping.look_around()

        def step(level: int, token: Tensor) -> Tensor:
            hidden = session.run(token, 0, session.backbone.depth, session.chain(level, 1), skipping.drafting)
            return skipping.drafting.head(hidden)[:, 0]

        state.chain.grow(context, count, step)
        return state.chain.draft()

    def report(self, state: _State) -> dict[str, Any]:
        """What a search ended with."""
        return {} if self.search is None else {"skipped": state.skipping.found()}

    def _bare(self, session: Session) -> Callable[[], Any]:
        depth, bare = session.backbone.depth, copy.copy(session)
        bare.backbone = self.skipped(depth).of(session.backbone)
        bare.backbone.view(0, depth)
        return lambda: work_seconds(bare, Work(0, depth, 1, self.max_draft, head=1))
