"""What a draft strategy must offer, what the loop gives it each round, and what acceptance returns."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jaxtyping import Float, Int
from torch import Tensor

from labkit.draft import Draft
from labkit.noise import Noise
from labkit.session import Session

Warp = Callable[..., Tensor]
"""`warp(scores (batch, rows, vocab), tokens, lengths, drafted, draft=None)`: float32 scores of the same shape after
temperature, top-p, penalties; labkit.warp.Warp is the one implementation."""


@dataclass(frozen=True)
class Drawn:
    """One drafted token for every row: `token (batch,)` and its probability `q (batch,)`.

    `probs (batch, vocab)` is the law it was drawn from, if it was drawn and acceptance needs the law.
    """

    token: Int[Tensor, "batch"]
    q: Float[Tensor, "batch"]
    probs: Float[Tensor, "batch vocab"] | None


StopRule = Callable[[Drawn, int], Tensor | None]
"""`stop(drawn, level) -> (batch,) bool`: True in the rows whose draft ends with this token, None if in no row ever.

It may look at the tokens drawn so far, never at one to come; what was drawn is verified all the same."""


def never(drawn: Drawn, level: int) -> None:
    """The stop rule that lets a draft go on to its full length."""


@dataclass(frozen=True)
class Context:
    """A round as a drafter sees it; built by the loop.

    On the device: `tokens (batch, capacity + 1)` with `n (batch,)` of them committed. On the host, from the
    last round's one copy: `history` (each row's committed ids, to be read only), `lengths` (the same as n), `done`,
    `room` (new tokens still allowed), `max_room` (the most room that an unfinished row has). `round` counts from 0.
    `alone`: the drafter proposes every round and every verified draft was its own; a combinator clears it.
    `member`: whose draws these are, 0 outside combinators. `stop`: ends drafts early, on top of a drafter's own rule.
    """

    tokens: Int[Tensor, "batch slots"]
    n: Int[Tensor, "batch"]
    history: Sequence[Sequence[int]]
    lengths: Sequence[int]
    done: Sequence[bool]
    room: Sequence[int]
    max_room: int
    round: int
    warp: Warp
    noise: Callable[[int, int, int], Tensor | None]
    keep_law: bool = False
    alone: bool = True
    member: int = 0
    stop: StopRule = never

    def length(self, most: int) -> int:
        """The draft length for this round: `most`, or less near the end of the room, where it may be 0."""
        return max(0, min(most, self.max_room - 1))

    def for_member(self, index: int) -> "Context":
        """The same round for member `index` (0 to 14) of a combinator: it is not alone, and its draws are its own."""
        return replace(self, alone=False, member=self.member * 16 + 1 + index)

    def shortened(self, levels: int) -> "Context":
        """The same round with room for drafts of at most so many levels."""
        room = [min(r, levels + 1) for r in self.room]
        return replace(self, room=room, max_room=min(self.max_room, levels + 1))

    def draw(self, logits: Float[Tensor, "batch vocab"], drafted: Int[Tensor, "batch level"]) -> Drawn:
        """The drafter's next token after the chain `drafted`, from its own `logits`.

        The logits are warped as the target's are. Greedy decoding chooses the best token; sampling draws
        with the noise that the acceptance rule prescribes.
        """
        level = drafted.shape[1]
        scores = self.warp(logits[:, None], self.tokens, self.lengths, drafted)[:, -1]
        noise = self.noise(level, logits.shape[-1], self.member)
        token = (scores if noise is None else scores + noise).max(-1).indices  # the first of equals, as argmax; faster
        probs = scores.softmax(-1)
        q = probs.gather(1, token[:, None])[:, 0]
        return Drawn(token, q, probs if self.keep_law and noise is not None else None)


@dataclass(frozen=True)
class Verdict:
    """What the target made of a draft.

    path (batch, depth): indices of the accepted nodes in order, -1 behind the last. accepted (batch,):
    how many. tokens (batch, depth + 1): the accepted tokens, then the target's own token, then zeros.
    target (batch, 1 + nodes): what the target itself says after the pending token and after each node
    (its own draw; under `Rejection` its most probable token, except where the round ended, which has the
    token drawn there). p (batch, 1 + nodes): the target's probability of each node's token at its parent
    (column 1 + i for node i; column 0: of the target's own token where the round ended).
    """

    path: Int[Tensor, "batch depth"]
    accepted: Int[Tensor, "batch"]
    tokens: Int[Tensor, "batch depth1"]
    target: Int[Tensor, "batch rows"]
    p: Float[Tensor, "batch rows"]


@dataclass(frozen=True)
class Work:
    """Model work of a round, for measuring its ideal: `times` runs of `rows` rows through layers [start, stop).

    `head`: the head reads the last rows, as many as were run. `backbone`: another model's; None = the target's.
    `other`: instead, work of another kind: given a session, it returns a function that does it once.
    """

    start: int
    stop: int
    rows: int
    times: int = 1
    head: int = 0
    backbone: Any = None
    other: Callable[[Session], Callable[[], Any]] | None = None


class Acceptance(ABC):
    """A rule that decides, on the device and for all rows at once, which drafted tokens stay."""

    lossless: bool
    keep_law: bool
    """Whether drafts must carry the law `probs` that their tokens were drawn from."""

    @abstractmethod
    def draft_noise(
        self, noise: Noise, n: Int[Tensor, "batch"], round: int, level: int, vocab: int, member: int = 0
    ) -> Tensor | None:
        """Gumbel noise `(batch, vocab)` for a drafter's draw at `level`; None at zero temperature.

        `member`: which drafter of a combinator draws; two of them must not share noise that decides acceptance.
        """

    @abstractmethod
    def __call__(
        self, draft: Draft, scores: Float[Tensor, "batch rows vocab"], noise: Noise, n: Int[Tensor, "batch"], round: int
    ) -> Verdict:
        """Judge a draft by the target's warped `scores`, row 0 those after the pending token."""


class Drafter(ABC):
    """A draft strategy: settings only (a frozen dataclass); its state is made by `begin` and passed around.

    A drafter rewinds itself: it re-feeds whatever it has not seen, and holds nothing that a rejected
    token could have spoiled. It never proposes deeper than `context.max_room - 1`.
    """

    taps: Sequence[int] = ()
    """Depths at which the session must keep every committed token's state (see SlotCache)."""

    @property
    @abstractmethod
    def nodes(self) -> int:
        """The most nodes it proposes in a round."""

    @property
    def levels(self) -> int:
        """The most levels of its drafts: as many as nodes in a chain, fewer in a tree."""
        return self.nodes

    @property
    def hands_over(self) -> bool:
        """Whether its drafts may carry a Partial: in a combinator it then proposes last and its nodes come first."""
        return False

    @property
    def scratch(self) -> int:
        """Slots that it uses above the pending one; capacity is allocated from this."""
        return self.nodes

    def check(self, session: Session) -> None:  # noqa: B027
        """Raise LabkitError if this strategy cannot draft for the session's model."""

    def begin(self, session: Session) -> Any:
        """State for one generation; by default the session itself."""
        return session

    def work(self, depth: int) -> tuple[list[Work], list[Work]]:
        """The model work of drafting a full round, and of verifying it, on a target of `depth` layers."""
        return [], [Work(0, depth, 1 + self.nodes, head=1 + self.nodes)]

    def report(self, state: Any) -> dict[str, Any]:
        """What a generation's settings should record of this strategy when it is over: values that JSON has."""
        return {}

    @abstractmethod
    def propose(self, state: Any, context: Context) -> Draft:
        """The draft for this round."""
