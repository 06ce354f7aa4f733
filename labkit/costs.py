"""What a round's model work costs, timed outside the loop on bare `Backbone.run` and head calls."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from labkit.protocol import Context, Drafter, Work
from labkit.session import Session

REPEATS = 3
"""Timings whose median counts."""


@torch.inference_mode()
def work_seconds(session: Session, work: Work) -> float:
    """Seconds of one `work` on a prefilled session of its backbone; slots at and above the pending one are written."""
    if work.other is not None:
        once = work.other(session)
        began = time.perf_counter()
        once()
        return time.perf_counter() - began
    total, backbone, rows = 0.0, session.backbone, session.chain(0, work.rows)
    x = session.tokens[:, : work.rows]
    if work.start > 0:
        x = torch.zeros((session.batch, work.rows, backbone.width), dtype=backbone.dtype, device=x.device)
    for _ in range(work.times):
        began = time.perf_counter()
        hidden = backbone.run(x, work.start, work.stop, session.cache, rows.slots, rows.positions, rows.mask)
        if work.head:
            backbone.head(hidden[:, -work.head :]).argmax(-1).tolist()
        else:
            hidden[0, 0, 0].item()
        total += time.perf_counter() - began
    return total


def whole_draft(drafter: Drafter) -> Work:
    """A full draft as the strategy proposes it, in a greedy round with all the room there is."""

    def ready(session: Session) -> Callable[[], Any]:
        rows, state = session.tokens.tolist(), drafter.begin(session)
        history = [row[:n] for row, n in zip(rows, session.lengths, strict=True)]
        room = [session.capacity] * session.batch
        context = Context(session.tokens, session.n, history, session.lengths, [False] * session.batch, room,
                          session.capacity, 0, warp=lambda scores, *rest: scores.float(),
                          noise=lambda level, vocab, member: None)  # fmt: skip
        return lambda: drafter.propose(state, context).tokens.tolist()

    return Work(0, 0, 1, other=ready)


class Clock:
    """Times work on a session, and another model's on an empty one of the same shape."""

    def __init__(self, session: Session):
        self.sessions = {None: session}

    def seconds(self, works: Sequence[Work]) -> float:
        """A median, so that a slow first time does not count; what is done several times over is timed as one."""
        once = [(work.times, self._on(work.backbone), replace(work, times=1)) for work in works]
        return statistics.median(
            sum(times * work_seconds(session, work) for times, session, work in once)
            for _ in range(REPEATS if works else 1)
        )

    def _on(self, backbone: Any) -> Session:
        if backbone not in self.sessions:
            target = self.sessions[None]
            self.sessions[backbone] = Session(backbone, target.batch, target.capacity)
            self.sessions[backbone].follow(target.n.to(backbone.device), target.lengths)
        return self.sessions[backbone]
