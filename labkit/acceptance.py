"""Which drafted tokens stay: one walk down the tree in index order, vectorised over the batch, no host sync."""

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from labkit.draft import Draft
from labkit.errors import LabkitError
from labkit.noise import Noise, Salt
from labkit.protocol import Acceptance, Verdict

PLACES = 4096
"""Places for noise within one round: more than any draft has nodes."""


class _Walk:
    """The current node of every row (-1 = the pending token), and the path that led there."""

    def __init__(self, draft: Draft):
        self.draft = draft
        batch = draft.tokens.shape[0]
        self.current = draft.tokens.new_full((batch,), -1)
        self.accepted = draft.tokens.new_zeros(batch)
        self.path = draft.tokens.new_full((batch, draft.depth + 1), -1)

    def children(self, node: int) -> Bool[Tensor, "batch"]:
        """Rows in which this node is a child of the current one."""
        return self.draft.valid[:, node] & (self.draft.parents[:, node] == self.current)

    def descend(self, node: int, where: Bool[Tensor, "batch"]) -> None:
        """Accept this node in some rows."""
        here = self.accepted[:, None]
        self.path.scatter_(1, here, torch.where(where[:, None], node, self.path.gather(1, here)))
        self.current = torch.where(where, node, self.current)
        self.accepted = self.accepted + where

    def verdict(self, scores: Tensor, target: Int[Tensor, "batch rows"], own: Int[Tensor, "batch"]) -> Verdict:
        """Everything that the loop and the record need, for the target's `own` token at the path's end."""
        draft, path = self.draft, self.path[:, :-1]
        chosen = torch.nn.functional.pad(draft.tokens, (0, 1)).gather(1, self.path.clamp_min(0))
        tokens = torch.where(self.path >= 0, chosen, 0).scatter_(1, self.accepted[:, None], own[:, None])
        end = self.current[:, None] + 1
        target = target.scatter(1, end, own[:, None])
        rows = torch.cat([end, draft.parents + 1], 1)
        said = torch.cat([own[:, None], draft.tokens], 1)
        log_p = scores.flatten(1).gather(1, rows * scores.shape[2] + said) - scores.logsumexp(-1).gather(1, rows)
        return Verdict(path, self.accepted, tokens, target, log_p.exp())


@dataclass(frozen=True)
class Match(Acceptance):
    """The target draws its own token at every node; the draft stays while it equals that. Lossless.

    Greedy decoding is its zero temperature. When sampling, the noise belongs to (seed, position, token), so
    that a prompt with its seed gives the same text for every drafter, draft length and batch: drafter-invariant
    sampling (Daliri et al. 2408.07978). The token after row 0 has position n, that after a node of level j n+j+1.
    """

    lossless = True
    keep_law = False

    def draft_noise(
        self, noise: Noise, n: Int[Tensor, "batch"], round: int, level: int, vocab: int, member: int = 0
    ) -> Tensor | None:
        """The noise that the target will use for the same position."""
        return None if noise.silent else noise.gumbel(n[:, None] + level, vocab, Salt.TARGET)[:, 0]

    def __call__(
        self, draft: Draft, scores: Float[Tensor, "batch rows vocab"], noise: Noise, n: Int[Tensor, "batch"], round: int
    ) -> Verdict:
        """Judge a draft."""
        target = self._draws(draft, scores, noise, n)
        walk = _Walk(draft)
        for node in range(draft.nodes):
            says = target.gather(1, walk.current[:, None] + 1)[:, 0]
            walk.descend(node, walk.children(node) & (draft.tokens[:, node] == says))
        return walk.verdict(scores, target, target.gather(1, walk.current[:, None] + 1)[:, 0])

    def _draws(self, draft: Draft, scores: Tensor, noise: Noise, n: Tensor) -> Int[Tensor, "batch rows"]:
        if noise.silent:
            return scores.max(-1).indices  # the first of equals, as argmax, and three times as fast
        at = n[:, None] + torch.arange(draft.depth + 1, device=n.device)
        gumbel = noise.gumbel(at, scores.shape[2], Salt.TARGET)
        if not draft.is_chain:
            level = torch.nn.functional.pad(draft.levels() + 1, (1, 0))
            gumbel = gumbel.gather(1, level[:, :, None].expand_as(scores))
        return (scores + gumbel).max(-1).indices


@dataclass(frozen=True)
class Rejection(Acceptance):
    """Accept x with probability min(1, p(x)/q(x)), else draw from the residual law. Lossless.

    Leviathan et al. 2211.17192, Chen et al. 2302.01318; on trees the siblings are tried in index order, each
    against what the earlier ones left of p (SpecInfer 2305.09781). `draft.probs[node]` must be the law that the
    node's token was really drawn from, given the tokens of all nodes of smaller index: a drafter that draws
    siblings without replacement stores the renormalised laws itself, and nodes are listed in the order drawn. A
    node that was chosen outright has a one-hot law; so has every node of a draft without `probs`, which is exact
    too, but accepts less. A drawn node must be verified: dropping it, or clearing `valid`, biases the law.
    """

    lossless = True
    keep_law = True

    def draft_noise(
        self, noise: Noise, n: Int[Tensor, "batch"], round: int, level: int, vocab: int, member: int = 0
    ) -> Tensor | None:
        """Noise of this round alone: a discarded draw that came back would bias the law."""
        salt = Salt.DRAFT + 16 * member
        return None if noise.silent else noise.gumbel(self._places(n, round) + level, vocab, salt)[:, 0]

    def _places(self, n: Tensor, round: int) -> Int[Tensor, "batch 1"]:
        return torch.full_like(n, round * PLACES)[:, None]

    def __call__(
        self, draft: Draft, scores: Float[Tensor, "batch rows vocab"], noise: Noise, n: Int[Tensor, "batch"], round: int
    ) -> Verdict:
        """Judge a draft."""
        best, places = scores.max(-1).indices, self._places(n, round)
        laws = torch.zeros_like(scores).scatter_(2, best[..., None], 1) if noise.silent else scores.softmax(-1)
        luck = noise.uniform(places + torch.arange(draft.nodes, device=n.device), Salt.ACCEPT)
        law, walk = laws[:, 0], _Walk(draft)
        for node in range(draft.nodes):
            here, token = walk.children(node), draft.tokens[:, node, None]
            q = torch.zeros_like(law).scatter_(1, token, 1)
            if draft.probs is not None:
                q = torch.where(draft.drawn[:, node, None], draft.probs[:, node].to(q.dtype), q)
            taken = here & (luck[:, node] * q.gather(1, token)[:, 0] < law.gather(1, token)[:, 0])
            left = _normalised((law - q).clamp_min_(0), law)
            law = torch.where(taken[:, None], laws[:, 1 + node], torch.where(here[:, None], left, law))
            walk.descend(node, taken)
        drawn = law.log()
        if not noise.silent:
            drawn = drawn + noise.gumbel(places, law.shape[-1], Salt.RESIDUAL)[:, 0]
        return walk.verdict(scores, best, drawn.argmax(-1))


def _normalised(mass: Float[Tensor, "batch vocab"], otherwise: Tensor) -> Float[Tensor, "batch vocab"]:
    """A law with these weights; `otherwise` where there are none (p = q up to rounding: nothing was rejected)."""
    total = mass.sum(-1, keepdim=True)
    return torch.where(total > 0, mass / total.clamp_min(torch.finfo(total.dtype).tiny), otherwise)


@dataclass(frozen=True)
class Typical(Acceptance):
    """Keep what the target finds typical: p(x) > min(epsilon, delta * exp(-H)), H the entropy of p. LOSSY.

    The longest path of such nodes is taken, the first in index order of several; then the target's own token. The
    result says `lossless=False`. Source: Medusa 2401.10774, which uses these defaults.
    """

    epsilon: Any = 0.09
    delta: Any = 0.3
    lossless = False
    keep_law = False

    def __post_init__(self):
        numbers = all(isinstance(x, int | float) for x in (self.epsilon, self.delta))
        if not (numbers and 0 <= self.epsilon <= 1 and self.delta >= 0):
            raise LabkitError(f"got {self}; needed are epsilon from 0 to 1 and delta of 0 or more; write Typical()")

    def draft_noise(
        self, noise: Noise, n: Int[Tensor, "batch"], round: int, level: int, vocab: int, member: int = 0
    ) -> Tensor | None:
        """None: a draft proposes what it finds best."""
        return None

    def __call__(
        self, draft: Draft, scores: Float[Tensor, "batch rows vocab"], noise: Noise, n: Int[Tensor, "batch"], round: int
    ) -> Verdict:
        """Judge a draft."""
        target, laws = Match()._draws(draft, scores, noise, n), scores.softmax(-1)
        floor = (-torch.special.entr(laws).sum(-1)).exp().mul_(self.delta).clamp_max_(self.epsilon)
        above = draft.parents + 1
        fits = laws.flatten(1).gather(1, above * scores.shape[2] + draft.tokens) > floor.gather(1, above)
        reached = torch.nn.functional.pad((fits & draft.valid).long(), (1, 0), value=1)
        for node in range(draft.nodes):
            reached[:, 1 + node] *= reached.gather(1, above[:, node, None])[:, 0]
        length = reached * torch.nn.functional.pad(draft.levels() + 1, (1, 0))
        on = torch.zeros_like(reached).scatter_(1, length.argmax(1, keepdim=True), 1)
        for node in reversed(range(draft.nodes)):  # scatter_add refuses to read what it writes to
            on.scatter_add_(1, above[:, node, None], on[:, 1 + node, None].clone())
        walk = _Walk(draft)
        for node in range(draft.nodes):
            walk.descend(node, on[:, 1 + node] > 0)
        return walk.verdict(scores, target, target.gather(1, walk.current[:, None] + 1)[:, 0])
