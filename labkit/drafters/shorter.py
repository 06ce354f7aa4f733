"""A strategy kept short: at most so many levels, or until a stop rule fires."""

import functools
from dataclasses import dataclass, replace
from types import FunctionType

import torch
from torch import Tensor

from labkit.costs import whole_draft
from labkit.draft import Draft
from labkit.drafters.chain import check_stop, stops
from labkit.drafters.combined import Combined, State, check_members
from labkit.drafters.mixture import struck
from labkit.errors import LabkitError, check_count
from labkit.protocol import Context, Drafter, Drawn, StopRule, Work


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
        return [whole_draft(self)] if draft else [], less

    def propose(self, state: State, context: Context) -> Draft:
        """A round with less room."""
        draft = self.drafter.propose(state.members[0], context.shortened(self.k))
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
