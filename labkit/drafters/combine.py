"""Two strategies as one: the second in rows where the first is silent, or both in one tree."""

from dataclasses import dataclass, replace

from labkit.draft import Draft
from labkit.drafters.combined import Combined, State, check_members
from labkit.drafters.mixture import merged, mixed
from labkit.protocol import Context, Drafter, Work


@dataclass(frozen=True, repr=False)
class Fallback(Combined):
    """The draft of `a`, and in rows where it proposes nothing that of `b`.

    Whether a row lacks a draft costs one counted copy to the host, unless `a` proposes nothing at all. A draft that is
    wholly one member's keeps what it hands over; a mixture by rows hands over nothing.
    """

    a: Drafter
    b: Drafter

    def __post_init__(self):
        check_members(self, self.a, self.b)

    @property
    def members(self) -> tuple[Drafter, ...]:
        """First choice and second."""
        return self.a, self.b

    def propose(self, state: State, context: Context) -> Draft:
        """The second member is only asked where it is needed."""
        first = self.a.propose(state.members[0], context.for_member(0))
        if first.nodes == 0:
            return self.b.propose(state.members[1], context.for_member(1))
        has = first.valid.any(1)
        told = state.session.to_host(has)
        if all(found or done for found, done in zip(told, context.done, strict=True)):
            return first
        return mixed(has, first, self.b.propose(state.members[1], context.for_member(1)))


@dataclass(frozen=True, repr=False)
class Union(Combined):
    """Both members' drafts in one tree.

    A token that a member chose outright (not drawn) and that an earlier sibling proposes too is merged into that one;
    a drawn token stays, as `Rejection` must judge it. The member that hands over work proposes last, and its nodes come
    first, so that its Partial holds; of two such members `a` is that one, and the other's work is done again.
    """

    a: Drafter
    b: Drafter

    def __post_init__(self):
        check_members(self, self.a, self.b)

    @property
    def members(self) -> tuple[Drafter, ...]:
        """Both."""
        return self.a, self.b

    @property
    def nodes(self) -> int:
        """The sum."""
        return self.a.nodes + self.b.nodes

    @property
    def bearer(self) -> int:
        """Which member proposes last."""
        return int(self.b.hands_over and not self.a.hands_over)

    def work(self, depth: int) -> tuple[list[Work], list[Work]]:
        """Both drafts; the bearer's verification, with the other's nodes in every pass."""
        (one, verify), (two, other) = (self.members[i].work(depth) for i in (self.bearer, 1 - self.bearer))
        if not verify or not other:
            return [], []
        more = self.members[1 - self.bearer].nodes
        return two + one, [replace(w, rows=w.rows + more, head=w.head and w.head + more) for w in verify]

    def propose(self, state: State, context: Context) -> Draft:
        """The bearer's nodes, then the other's."""
        other, first = (
            self.members[i].propose(state.members[i], context.for_member(i)) for i in (1 - self.bearer, self.bearer)
        )
        if other.nodes == 0:
            return first
        return merged(first, other) if first.nodes else replace(other, partial=first.partial)
