"""Drafts made of drafts: of two by rows, or as one tree; of one what a stop rule leaves."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from jaxtyping import Bool
from torch import Tensor
from torch.nn.functional import pad

from labkit.draft import Draft
from labkit.drafters.chain import stops
from labkit.exits import lent
from labkit.protocol import Drawn, StopRule


def alike(drafts: Sequence[Draft]) -> list[Draft]:
    """The drafts with whatever optional part any of them has.

    Without a law of its own a node counts as chosen outright; without a probability it has q = 1, without an exit 0.
    """
    laws = [draft.probs for draft in drafts if draft.probs is not None]
    has_q, has_exits = (any(getattr(d, part) is not None for d in drafts) for part in ("q", "exits"))
    found = []
    for draft in drafts:
        parts: dict[str, Tensor] = {}
        if draft.probs is None:
            parts["drawn"] = torch.zeros_like(draft.drawn)
            if laws:
                parts["probs"] = laws[0].new_zeros((*draft.tokens.shape, laws[0].shape[-1]))
        if draft.q is None and has_q:
            parts["q"] = torch.ones_like(draft.tokens, dtype=torch.float32)
        if draft.exits is None and has_exits:
            parts["exits"] = torch.zeros_like(draft.tokens)
        found.append(replace(draft, **parts))
    return found


def mixed(first: Bool[Tensor, "batch"], one: Draft, two: Draft) -> Draft:
    """The draft `one` in the rows where `first` says so, `two` in the others; it hands over nothing."""
    one, two = alike([one, two])
    nodes, is_chain = max(one.nodes, two.nodes), one.is_chain and two.is_chain

    def rows(part: str) -> Tensor | None:
        mine, theirs = (padded(getattr(draft, part), nodes, -1 if part == "parents" else 0) for draft in (one, two))
        if mine is None or theirs is None:
            return None
        return torch.where(first.view(-1, *[1] * (mine.dim() - 1)), mine, theirs)

    parts = {part: rows(part) for part in ("tokens", "parents", "valid", "drawn", "probs", "q", "exits")}
    if is_chain:
        parts["parents"] = torch.arange(-1, nodes - 1, device=first.device).expand(len(first), -1)
    return Draft(depth=max(one.depth, two.depth), is_chain=is_chain, **parts)  # type: ignore


def padded(part: Tensor | None, nodes: int, value: int) -> Tensor | None:
    """A draft's part with room for so many nodes; the new ones are not valid."""
    if part is None or part.shape[1] == nodes:
        return part
    return pad(part, [0, 0] * (part.dim() - 2) + [0, nodes - part.shape[1]], value=value)


def merged(first: Draft, second: Draft) -> Draft:
    """One tree of both, the nodes of `first` (and what it hands over) first. Nothing is copied to the host.

    A node of `second` that was chosen outright and equals an earlier valid sibling (same parent, same token) is no
    longer valid, and its children hang under that one. No drawn node changes. Parents are known a level at a time.
    """
    partial, (first, second) = first.partial, alike([first, second])
    joined: dict[str, Tensor] = {}
    for part in ("tokens", "valid", "drawn", "probs", "q", "exits"):
        if getattr(first, part) is not None:
            joined[part] = torch.cat([getattr(first, part), getattr(second, part)], 1)
    at = torch.arange(first.nodes + second.nodes, device=first.tokens.device)
    own = at[first.nodes :].expand_as(second.tokens)
    like = joined["tokens"][:, None] == second.tokens[:, :, None]
    like = like & joined["valid"][:, None] & (at < own[:, :, None])
    place, parents, gone = own, first.parents, torch.zeros_like(second.valid)
    for _ in range(second.depth):
        above = torch.where(second.parents < 0, -1, place.gather(1, second.parents.clamp_min(0)))
        parents = torch.cat([first.parents, above], 1)
        same = like & (parents[:, None] == above[:, :, None])
        gone = same.any(2) & second.valid & ~second.drawn
        place = torch.where(gone, same.long().argmax(2), own)  # argmax takes the first
    joined["valid"] = torch.cat([first.valid, second.valid & ~gone], 1)
    return Draft(
        parents=parents, depth=max(first.depth, second.depth), is_chain=False, partial=partial, **joined,  # type: ignore
    )  # fmt: skip


def struck(draft: Draft, stop: StopRule) -> Draft:
    """The draft without the nodes below those at which `stop` fires."""
    over: list[Tensor | None] = [None] * draft.nodes
    levels = draft.levels() if not draft.is_chain and draft.nodes else None
    for node in range(draft.nodes):
        q = torch.ones_like(draft.tokens[:, node], dtype=torch.float32) if draft.q is None else draft.q[:, node]
        probs = None if draft.probs is None else lent(draft.probs[:, node])
        drawn = Drawn(lent(draft.tokens[:, node]), lent(q), probs)
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
