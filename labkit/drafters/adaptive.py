"""Which strategy, and how long a draft: chosen anew each round by what was accepted and what a round costs here."""

import logging
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from labkit.costs import Clock
from labkit.draft import Draft
from labkit.drafters.combined import Combined, check_members
from labkit.drafters.record import Record
from labkit.errors import LabkitError
from labkit.protocol import Context, Drafter, Work
from labkit.session import Session

_log = logging.getLogger(__name__)


@dataclass
class _State:
    session: Session
    members: list[Any]
    records: list[Record]
    step: float
    picks: list[tuple[int, int]] = field(default_factory=list)
    """Each round's candidate and draft length; (-1, 0) is a plain step."""
    proposed: tuple[Record, Sequence[int], Tensor] | None = None


@dataclass(frozen=True, repr=False)
class Adaptive(Combined):
    """Each round the candidate and the draft length with the most expected tokens per time; or a plain step.

    With conditional acceptance alpha, k drafted tokens give (1 - alpha^(k+1)) / (1 - alpha) and cost k c + v plain
    steps: one more is worth it while the chance that all are accepted is above c times the speed-up. alpha is counted
    in the run, old counts fading to an optimistic prior, so that what was given up is tried again; c and v are timed at
    the start, three times on the session's own shapes, or in the run where a candidate does not know its work. Picks
    are logged (labkit.drafters.adaptive, DEBUG), and how many of each there were, with alpha and costs, is in the
    generation's settings. One counted copy a round that drafted tells each row's draft length. Lossless; but under
    `Rejection` the text of a seed depends on the picks, and so on the clock.
    """

    candidates: Sequence[Drafter]

    def __post_init__(self):
        given: Any = self.candidates
        if not isinstance(given, Sequence) or isinstance(given, str) or not 1 <= len(given) <= 15:
            raise LabkitError(f"Adaptive got {given!r}; write 1 to 15 strategies: Adaptive([PromptLookup(), …])")
        object.__setattr__(self, "candidates", tuple(given))
        check_members(self, *self.candidates)

    def __repr__(self) -> str:
        return f"Adaptive([{', '.join(map(repr, self.candidates))}])"

    @property
    def members(self) -> tuple[Drafter, ...]:
        """The candidates; a plain step is always one more."""
        return tuple(self.candidates)

    def begin(self, session: Session) -> _State:
        """Every candidate's state, and what its work costs here."""
        clock, depth = Clock(session), session.backbone.depth
        step, records = clock.seconds([Work(0, depth, 1, head=1)]), []
        for member in self.members:
            draft, verify = member.work(depth)
            known, rows = bool(verify), 1 + member.nodes
            whole = clock.seconds(verify if known else [Work(0, depth, rows, head=rows)])
            level = clock.seconds(draft) / max(1, member.levels) if known else None
            records.append(Record(member.levels, known, level, whole))
        return _State(session, [member.begin(session) for member in self.members], records, step)

    def propose(self, state: _State, context: Context) -> Draft:
        """Learn from the last round, pick, and let that candidate draft."""
        learn(state, context)
        index, levels = pick(state, context)
        state.picks.append((index, levels))
        if index < 0:
            _log.debug("round %d: plain", context.round)
            return Draft.empty(context.tokens)
        member, record = self.members[index], state.records[index]
        _log.debug("round %d: %d of %r, alpha %.2f", context.round, levels, member, record.alpha)
        began = time.perf_counter()
        draft = member.propose(state.members[index], context.for_member(index).shortened(levels))
        if not record.known:
            took = (time.perf_counter() - began) / levels
            record.draft = took if record.draft is None else 0.5 * (record.draft + took)
        deepest = (draft.valid * (draft.levels() + 1)).amax(1) if draft.nodes else context.n * 0
        state.proposed = record, context.lengths, deepest
        return draft

    def report(self, state: _State) -> dict[str, Any]:
        """Of each candidate, picks and what is thought of it in the end (seconds of a level and of a verification)."""
        picks = Counter(index for index, _ in state.picks)
        known = [
            {"drafter": repr(member), "picks": picks[i], "alpha": r.alpha, "draft_s": r.draft, "verify_s": r.verify}
            for i, (member, r) in enumerate(zip(self.members, state.records, strict=True))
        ]
        plain = {"plain_picks": picks[-1], "plain_s": state.step}
        return super().report(state) | {"adaptive": plain | {"candidates": known}}


def learn(state: _State, context: Context) -> None:
    """Count what the last round accepted, in rows that it did not finish: there the text was cut."""
    for record in state.records:
        record.fade()
    if state.proposed is None:
        return
    (record, before, deepest), state.proposed = state.proposed, None
    rows = zip(state.session.to_host(deepest), before, context.lengths, context.done, strict=True)
    for drafted, old, new, done in rows:
        if not done:
            record.count(drafted, new - old)


def pick(state: _State, context: Context) -> tuple[int, int]:
    """The best candidate and its draft length, the first of equals; one that was never timed is tried first."""
    choices = {(-1, 0): 1.0}
    for index, record in enumerate(state.records):
        for levels in range(1, context.length(record.levels) + 1):
            choices[index, levels] = record.rate(levels, state.step) if record.draft is not None else float("inf")
    return max(choices, key=lambda choice: choices[choice])
