"""The loop: draft, verify, accept, trim, commit. There is no other."""

import itertools
import struct
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from labkit.draft import Draft
from labkit.errors import LabkitError
from labkit.noise import Noise
from labkit.protocol import Acceptance, Context, Drafter, Verdict
from labkit.session import Session
from labkit.stopping import Stopping
from labkit.warp import Warp

PHASES = ("draft", "verify", "accept", "commit")


@dataclass(frozen=True)
class Round:
    """What happened in one round, on the host. Every field is a list with one entry a row.

    tokens: committed ids, after trimming. drafted: proposed ids. q: the draft's probability of each drafted token ([]
    if it has none, 1 for a token without one). p: the target's. own: the target's probability of its own token, which
    ended the round (None where the text ended before it). target: what the target itself says after the pending token
    and after each drafted one (one more than drafted). accepted: how many drafted tokens stayed. rejected:
    whether the target turned one down. parents: of the drafted nodes (-1 = the pending token). path: the accepted ones'
    places among the drafted. exit: the layer each drafted token was read after ([] if not from the target, 0 for
    a token that is not). left: the layer after which a target that exits early was read for each committed token.
    seconds: by phase; the rows of a batch share them, a finished row has none ({}).
    """

    tokens: list[list[int]]
    drafted: list[list[int]]
    q: list[list[float]]
    p: list[list[float]]
    own: list[float | None]
    target: list[list[int]]
    accepted: list[int]
    rejected: list[bool]
    parents: list[list[int]]
    path: list[list[int]]
    exit: list[list[int]]
    left: list[list[int]]
    seconds: list[dict[str, float]]


def decode(
    session: Session, drafter: Drafter, state: Any, acceptance: Acceptance, warp: Warp, noise: Noise, stop: Stopping
) -> Iterator[Round]:
    """Generate into a prefilled `session` until `stop` is satisfied in every row, a round at a time.

    state: what `drafter.begin(session)` made. Each round is committed before it is yielded, so that a consumer may
    walk away at any time.
    """
    for number in itertools.count():
        if all(stop.done):
            return
        yield play_round(session, drafter, state, acceptance, warp, noise, stop, number)


@torch.inference_mode()
def play_round(
    session: Session,
    drafter: Drafter,
    state: Any,
    acceptance: Acceptance,
    warp: Warp,
    noise: Noise,
    stop: Stopping,
    number: int,
) -> Round:
    """One round, whole."""
    clock = [time.perf_counter()]
    draft = drafter.propose(state, _context(session, acceptance, warp, noise, stop, number))
    _check(draft, drafter, session)
    clock.append(time.perf_counter())
    with _explained(draft, drafter, session):
        logits = session.verify(draft)
        clock.append(time.perf_counter())
        scores = warp(logits, session.tokens, stop.lengths, draft.tokens, draft)
        verdict = acceptance(draft, scores, noise, session.n, number)
        host = _Host(draft, verdict, session.left())
    for row in host.rows:
        _check_row(draft, drafter, session, row["drafted"], row["parents"], row["valid"])
    clock.append(time.perf_counter())
    keep = stop.trim(host.blocks)
    session.commit(verdict.tokens, verdict.path, keep)
    clock.append(time.perf_counter())
    return host.round(keep, dict(zip(PHASES, map(float.__sub__, clock[1:], clock[:-1]), strict=True)))


@contextmanager
def _explained(draft: Draft, drafter: Drafter, session: Session) -> Iterator[None]:
    """Ask, when a round failed, whether an index in the draft is why: only then is a second copy worth it."""
    try:
        yield
    except (IndexError, RuntimeError):
        for row in zip(draft.tokens.tolist(), draft.parents.tolist(), draft.valid.tolist(), strict=True):
            _check_row(draft, drafter, session, *row)
        raise


def _check(draft: Any, drafter: Drafter, session: Session) -> None:
    """Raise LabkitError for a draft of the wrong make, as far as the host can tell without a copy."""
    name = type(drafter).__name__
    if not isinstance(draft, Draft):
        raise LabkitError(
            f"{name}.propose returned a {type(draft).__name__}; return a Draft, such as Draft.chain(tokens)"
        )
    if draft.nodes > drafter.nodes or draft.tokens.shape[0] != session.batch:
        raise LabkitError(
            f"{name} proposed {draft.nodes} nodes for {draft.tokens.shape[0]} row(s); needed are {drafter.nodes} at "
            f"most (its `nodes`) for {session.batch}: return that, or raise `nodes`"
        )
    shape, vocab = draft.tokens.shape, session.backbone.vocab
    wanted = {"tokens": (shape, torch.long), "parents": (shape, torch.long), "valid": (shape, torch.bool),
              "drawn": (shape, torch.bool), "probs": ((*shape, vocab), None), "q": (shape, None),
              "exits": (shape, torch.long)}  # fmt: skip
    for part, (size, kind) in wanted.items():
        value = getattr(draft, part)
        if value is None:
            continue
        if value.shape != size or not (value.dtype == kind if kind else value.is_floating_point()):
            raise LabkitError(
                f"{name}'s draft has {part} of shape {tuple(value.shape)}, {value.dtype}; needed are {tuple(size)}, "
                f"{kind or 'floating point'}"
            )
    if not min(1, draft.nodes) <= draft.depth <= draft.nodes:
        raise LabkitError(f"{name}'s draft has depth={draft.depth} for {draft.nodes} nodes; it is the number of levels")


def _check_row(
    draft: Draft, drafter: Drafter, session: Session, tokens: list[int], parents: list[int], valid: list[int]
) -> None:
    """Raise LabkitError for values in one row of a draft that cannot be."""
    has, vocab, levels = f"{type(drafter).__name__}'s draft has", session.backbone.vocab, []
    for node, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
        if not 0 <= token < vocab:
            raise LabkitError(
                f"{has} token {token} at node {node}, but the vocabulary has {vocab} tokens; propose ids from 0 to "
                f"{vocab - 1}, in nodes with valid=False too"
            )
        if not -1 <= parent < node:
            raise LabkitError(
                f"{has} parents[{node}] = {parent}; needed is -1 (a child of the pending token) or the index of an "
                f"earlier node, smaller than {node}: list parents before their children"
            )
        if valid[node] and parent >= 0 and not valid[parent]:
            raise LabkitError(
                f"{has} node {node} valid under its parent {parent}, which is not; make both valid or none"
            )
        levels.append(0 if parent < 0 else levels[parent] + 1)
    if draft.is_chain and parents != list(range(-1, draft.nodes - 1)):
        raise LabkitError(f"{has} is_chain=True and the parents {parents}; write Draft.tree(tokens, parents, depth=…)")
    deepest = 1 + max((level for level, real in zip(levels, valid, strict=True) if real), default=-1)
    if deepest > draft.depth:
        raise LabkitError(f"{has} depth={draft.depth} and nodes on {deepest} levels; write depth={deepest}")


def _context(
    session: Session, acceptance: Acceptance, warp: Warp, noise: Noise, stop: Stopping, number: int
) -> Context:
    n = session.n
    return Context(
        tokens=session.tokens,
        n=n,
        history=stop.history,
        lengths=tuple(stop.lengths),
        done=tuple(stop.done),
        room=tuple(stop.room),
        max_room=stop.max_room,
        round=number,
        warp=warp,
        noise=lambda level, vocab, member: acceptance.draft_noise(noise, n, number, level, vocab, member),
        keep_law=acceptance.keep_law,
    )


class _Host:
    """A draft and its verdict, brought to the host in one copy."""

    def __init__(self, draft: Draft, verdict: Verdict, left: torch.Tensor | None):
        whole = [verdict.accepted[:, None], verdict.tokens, draft.tokens, draft.valid.long(), verdict.target]
        whole += [verdict.path, draft.parents]
        whole += [] if draft.exits is None else [draft.exits]
        whole += [] if left is None else [left]
        real = [verdict.p] + ([] if draft.q is None else [draft.q])
        packet = torch.cat([*whole, *(x.double().view(torch.long) for x in real)], 1)
        self.rows = []
        for words in packet.tolist():
            cells = iter(words)
            take = lambda count, cells=cells: list(itertools.islice(cells, count))  # noqa: E731
            row = {"accepted": take(1)[0], "tokens": take(draft.depth + 1), "drafted": take(draft.nodes)}
            row["valid"], row["target"], row["path"] = take(draft.nodes), take(1 + draft.nodes), take(draft.depth)
            row["parents"] = take(draft.nodes)
            row["exit"] = [] if draft.exits is None else take(draft.nodes)
            row["left"] = [] if left is None else take(1 + draft.nodes)
            row["p"] = _reals(take(1 + draft.nodes))
            row["q"] = [] if draft.q is None else _reals(take(draft.nodes))
            self.rows.append(row)
        self.blocks = [row["tokens"][: row["accepted"] + 1] for row in self.rows]

    def round(self, keep: Sequence[int], seconds: dict[str, float]) -> Round:
        """The record; invalid nodes are left out, a finished row is empty."""
        parts: dict[str, list] = {name: [] for name in Round.__dataclass_fields__ if name != "seconds"}
        for row, block, kept in zip(self.rows, self.blocks, keep, strict=True):
            nodes = [i for i, valid in enumerate(row["valid"]) if valid and kept]
            place = {-1: -1, **{node: at for at, node in enumerate(nodes)}}
            parts["tokens"].append(block[:kept])
            parts["drafted"].append([row["drafted"][i] for i in nodes])
            parts["q"].append([row["q"][i] for i in nodes if row["q"]])
            parts["p"].append([row["p"][1 + i] for i in nodes])
            parts["own"].append(row["p"][0] if kept > row["accepted"] else None)
            parts["target"].append([row["target"][0], *(row["target"][1 + i] for i in nodes)] if kept else [])
            parts["accepted"].append(min(row["accepted"], kept))
            parts["parents"].append([place[row["parents"][i]] for i in nodes])
            parts["exit"].append([row["exit"][i] for i in nodes if row["exit"]])
            parts["path"].append([place[node] for node in row["path"][: min(row["accepted"], kept)]])
            reads = [0, *(1 + node for node in row["path"])][:kept]
            parts["left"].append([row["left"][at] for at in reads if row["left"]])
            end = row["path"][row["accepted"] - 1] if row["accepted"] else -1
            parts["rejected"].append(kept > row["accepted"] and any(row["parents"][i] == end for i in nodes))
        return Round(seconds=[seconds if kept else {} for kept in keep], **parts)


def _reals(words: Sequence[int]) -> list[float]:
    return list(struct.unpack(f"{len(words)}d", struct.pack(f"{len(words)}q", *words)))
