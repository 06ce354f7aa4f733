"""A strategy kept short: at most so many levels, or until a stop rule fires."""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from labkit.draft import Draft
from labkit.drafters.chain import bare_context, check_stop, stops
from labkit.drafters.combined import Combined, State, check_members
from labkit.drafters.lookup import check_count
from labkit.errors import LabkitError
from labkit.protocol import Context, Drafter, Drawn, StopRule, Work
from labkit.session import Session


@dataclass(frozen=True, repr=False)
class AtMost(Combined):
    """The drafts of `drafter`, at most `k` levels deep."""

    k: int
    drafter: Drafter

    def __post_init__(self):
        check_count(self.k, "k", "AtMost")
        check_members(self, self.drafter)

    def __repr__(self) -> str:
        return f"AtMost({self.k}, {self.drafter!r})"

    @property
    def members(self) -> tuple[Drafter, ...]:
        """One."""
        return (self.drafter,)

    @property
    def levels(self) -> int:
        """No more than told."""
        return min(self.k, self.drafter.levels)

    @property
    def nodes(self) -> int:
        """A chain's levels; of a tree, whose shape is its own, all nodes."""
        all_ = self.drafter.nodes
        return min(self.k, all_) if self.drafter.levels == all_ else all_

    def work(self, depth: int) -> tuple[list[Work], list[Work]]:
        """A draft as it is, timed whole, and a verification of fewer rows."""
        draft, verify = self.drafter.work(depth)
        if self.nodes == self.drafter.nodes:
            return draft, verify
        most = 1 + self.nodes
        less = [replace(w, rows=min(w.rows, most), head=min(w.head, most)) for w in verify]
        return [Work(0, 0, 1, other=self._bare)] if draft else [], less

    def _bare(self, session: Session) -> Callable[[], Any]:
        state, context = self.begin(session), bare_context(session)
        return lambda: self.propose(state, context).tokens.tolist()

    def propose(self, state: State, context: Context) -> Draft:
        """A round with less room."""
        draft = self.drafter.propose(state.members[0], shortened(context, self.k))
        if draft.nodes > self.nodes:
            raise LabkitError(
                f"{type(self.drafter).__name__} proposed {draft.nodes} nodes in {self.k} levels; one that proposes "
                "trees must say in `levels` how deep they are, and any must stay below context.max_room"
            )
        return draft


@dataclass(frozen=True, repr=False)
class Until(Combined):
    """The drafts of `drafter`, ended by a stop rule such as labkit.below(0.5): no node below one where it fires.

    Drafters that grow chains token by token stop there; of others the later nodes are struck out. A token without a
    probability of its own has q = 1. The rule may be asked twice about a token, so its answer must be a function of it.
    """

    stop: StopRule
    drafter: Drafter

    def __post_init__(self):
        check_stop(self.stop)
        check_members(self, self.drafter)

    def __repr__(self) -> str:
        rule = self.stop.__name__ if isinstance(self.stop, FunctionType) else repr(self.stop)
        return f"Until({rule}, {self.drafter!r})"

    @property
    def members(self) -> tuple[Drafter, ...]:
        """One."""
        return (self.drafter,)

    def work(self, depth: int) -> tuple[list[Work], list[Work]]:
        """What a draft that is never stopped costs."""
        return self.drafter.work(depth)

    def propose(self, state: State, context: Context) -> Draft:
        """The draft with what lies below a stop struck out. Only ancestors decide, so the law of `Rejection` holds."""

        def both(drawn: Drawn, level: int) -> Tensor | None:
            said = [found for rule in (context.stop, self.stop) if (found := stops(rule, drawn, level)) is not None]
            return functools.reduce(torch.logical_or, said) if said else None

        draft = self.drafter.propose(state.members[0], replace(context, stop=both))
        return struck(draft, self.stop)


def struck(draft: Draft, stop: StopRule) -> Draft:
    """The draft without the nodes below those at which `stop` fires."""
    over: list[Tensor | None] = [None] * draft.nodes
    levels = draft.levels() if not draft.is_chain and draft.nodes else None
    for node in range(draft.nodes):
        q = torch.ones_like(draft.tokens[:, node], dtype=torch.float32) if draft.q is None else draft.q[:, node]
        drawn = Drawn(draft.tokens[:, node], q, None if draft.probs is None else draft.probs[:, node])
        for level in [node] if levels is None else range(min(node + 1, draft.depth)):
            found, before = stops(stop, drawn, level), over[node]
            if found is not None and levels is not None:
                found = found & (levels[:, node] == level)
            if found is not None:
                over[node] = found if before is None else before | found
    if all(found is None for found in over):
        return draft
    ends = torch.stack([torch.zeros_like(draft.valid[:, 0]) if found is None else found for found in over], 1)
    above, valid = draft.parents.clamp_min(0), draft.valid
    for _ in range(draft.depth - 1):
        valid = draft.valid & ((draft.parents < 0) | (valid & ~ends).gather(1, above))
    return replace(draft, valid=valid)


def shortened(context: Context, levels: int) -> Context:
    """The same round with room for drafts of at most so many levels."""
    room = [min(r, levels + 1) for r in context.room]
    return replace(context, room=room, max_room=min(context.max_room, levels + 1))
