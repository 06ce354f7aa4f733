"""What all strategies that are made of strategies share."""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from labkit.acceptance import PLACES
from labkit.errors import LabkitError
from labkit.protocol import Drafter, Work
from labkit.session import Session


@dataclass
class State:
    """The session, and each member's own state."""

    session: Session
    members: list[Any]


class Combined(Drafter):
    """A strategy over `members`."""

    @property
    @abstractmethod
    def members(self) -> tuple[Drafter, ...]:
        """The strategies it is made of."""

    @property
    def levels(self) -> int:
        """As deep as the deepest."""
        return max(member.levels for member in self.members)

    @property
    def nodes(self) -> int:
        """As many as the largest member's."""
        return max(member.nodes for member in self.members)

    @property
    def hands_over(self) -> bool:
        """If any member does."""
        return any(member.hands_over for member in self.members)

    @property
    def scratch(self) -> int:
        """What the hungriest needs."""
        return max([self.nodes, *(member.scratch for member in self.members)])

    @property
    def taps(self) -> Sequence[int]:  # type: ignore
        """Every member's."""
        return sorted({depth for member in self.members for depth in member.taps})

    def work(self, depth: int) -> tuple[list[Work], list[Work]]:
        """Unknown: the data decide who drafts."""
        return [], []

    def check(self, session: Session) -> None:
        """Every member must fit."""
        for member in self.members:
            try:
                member.check(session)
            except LabkitError as error:
                raise LabkitError(f"{type(member).__name__} in {type(self).__name__}: {error}") from error

    def begin(self, session: Session) -> Any:
        """Every member's state."""
        return State(session, [member.begin(session) for member in self.members])

    def report(self, state: Any) -> dict[str, Any]:
        """Every member's; what two of them say differently under one name is marked (2)."""
        found: dict[str, Any] = {}
        for member, its in zip(self.members, state.members, strict=True):
            for name, value in member.report(its).items():
                key, count = name, 1
                while found.get(key, value) != value:
                    count += 1
                    key = f"{name} ({count})"
                found[key] = value
        return found

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(map(repr, self.members))})"


def check_members(owner: Drafter, *members: Any) -> None:
    """Raise LabkitError unless all are strategies, whose nodes the noise of one round has places for."""
    name = type(owner).__name__
    for member in members:
        if not isinstance(member, Drafter):
            raise LabkitError(f"{name} got {member!r}; needed is a strategy, such as labkit.PromptLookup()")
    if owner.nodes > PLACES:
        raise LabkitError(f"{name} has {owner.nodes} nodes; a draft has {PLACES} at most: write a smaller max_draft")
