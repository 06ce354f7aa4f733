"""What a round's model work costs, timed outside the loop on bare `Backbone.run` and head calls."""

import bisect
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from labkit.errors import LabkitError
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


@dataclass(frozen=True)
class LayerCosts:
    """(c, v) of drafts from the measured work of layers and head: call it with an exit layer (or name) and a length.

    depth: the target's layers. rows: how many rows at a time were measured, from 1. layers_s, head_s: seconds of all
    layers, and of norm and head, on so many rows; between them it is interpolated. drafts: c of named sources, which
    verify from layer 0 on. An exit's draft shares its work: verification resumes above the exit.
    """

    depth: int
    rows: tuple[int, ...]
    layers_s: tuple[float, ...]
    head_s: tuple[float, ...]
    drafts: Mapping[str, float] = field(default_factory=lambda: {"ngram": 0.0})

    def __call__(self, source: Any, length: int) -> tuple[float, float]:
        """In units of a plain step: one drafted token, and the verification of `length` of them."""
        step = self.layers_s[0] + self.head_s[0]
        layers, head = (self._at(1 + length, of) for of in (self.layers_s, self.head_s))
        if isinstance(source, int):
            share = source / self.depth
            below = share * self.layers_s[0]
            return (below + self.head_s[0]) / step, (below + (1 - share) * layers + head) / step
        if source not in self.drafts:
            raise LabkitError(f"the costs say nothing of {source!r}; write drafts={{{source!r}: c}}, c in plain steps")
        return self.drafts[source], (layers + head) / step

    def _at(self, rows: int, of: Sequence[float]) -> float:
        at = min(max(1, bisect.bisect_left(self.rows, rows)), len(self.rows) - 1)
        low, high = self.rows[at - 1], self.rows[at]
        return of[at - 1] + (of[at] - of[at - 1]) * (rows - low) / (high - low)


@torch.inference_mode()
def measure_costs(
    lab: Any, *, context: int = 128, rows: Sequence[int] = (1, 2, 3, 5, 9, 17), repeats: int = 5,
    drafts: Mapping[str, float] | None = None,
) -> LayerCosts:  # fmt: skip
    """Time the lab's layers and head on a text of `context` tokens: what replays multiply by. Medians of `repeats`."""
    backbone, most = lab.backbone, max(rows)
    if list(rows) != sorted(set(rows)) or rows[0] != 1 or len(rows) < 2 or repeats < 1:
        raise LabkitError(f"got rows={tuple(rows)!r}, repeats={repeats}; write rows as in (1, 2, 5), repeats from 1")
    if not 1 <= context <= backbone.limit - most:
        raise LabkitError(f"got context={context!r}; write 1 to {backbone.limit - most} tokens")
    session = Session(backbone, 1, context + most)
    session.prefill([[0] * context])
    works = {count: [Work(0, backbone.depth, count, head=head) for head in (0, count)] for count in rows}
    found: dict[int, list[tuple[float, ...]]] = {count: [] for count in rows}
    for repeat in range(1 + repeats):
        for count, pair in works.items():
            times = tuple(work_seconds(session, work) for work in pair)
            if repeat:  # the first time warms up
                found[count].append(times)
    middles = [[statistics.median(times) for times in zip(*found[count], strict=True)] for count in rows]
    head = tuple(max(0.0, whole - layers) for layers, whole in middles)
    return LayerCosts(backbone.depth, tuple(rows), tuple(layers for layers, _ in middles), head,
                      {"ngram": 0.0, **(drafts or {})})  # fmt: skip
