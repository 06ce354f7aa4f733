"""Drafting with heads on the target's last hidden state: MLPSpeculator, Medusa, or any module with their verbs."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from labkit.draft import Draft
from labkit.drafters.chain import Chain
from labkit.errors import LabkitError
from labkit.heads.trained import check_trained
from labkit.heads.trees import FixedTree, ProductTree, check_choices, check_pair, tree_sizes
from labkit.protocol import Context, Drafter, Work
from labkit.session import HEAD_INPUT, Session


@dataclass
class _State:
    session: Session
    chain: Chain
    tree: ProductTree | FixedTree | None


@dataclass(frozen=True, repr=False)
class Heads(Drafter):
    """Chains or trees from `heads` (see labkit.load_heads); no KV of its own, no run of the target.

    top_k: how many tokens of each head in use (default: what the heads were made for); all 1 is a chain, drawn as the
    acceptance rule wants it. candidates: how many whole paths of that product tree are kept. tree: instead, fixed
    choices such as [(0,), (0, 0), (1,)], whose ranks stay below `top_k` if that is given too. A prompt of one token
    has no state yet: its first round proposes nothing. Sources: MLPSpeculator 2404.19124, Medusa 2401.10774.
    """

    heads: Any
    top_k: Any = None
    candidates: Any = None
    tree: Sequence[tuple[int, ...]] | None = None

    def __post_init__(self):
        verbs = ("count", "vocab", "width", "start", "step", "logits", "top_k")
        if not all(hasattr(self.heads, verb) for verb in verbs):
            raise LabkitError(f"got heads={self.heads!r}; give an MLPSpeculator or Medusa (see labkit.load_heads)")
        for name, value in (("top_k", self.top_k), ("tree", self.tree)):
            if value is not None and not isinstance(value, Sequence):
                raise LabkitError(f"got {name}={value!r}; write a sequence, such as (3, 2, 1) or [(0,), (0, 0)]")
        count, vocab = self.heads.count, self.heads.vocab
        top_k = tuple(self.heads.top_k if self.top_k is None else self.top_k)
        if not top_k or any(isinstance(k, bool) or not isinstance(k, int) or not 1 <= k <= vocab for k in top_k):
            raise LabkitError(f"got top_k={top_k!r}; write how many tokens of each head, such as (3, 2, 1)")
        if len(top_k) > count:
            raise LabkitError(f"top_k={top_k} asks for {len(top_k)} heads, and there are n_predict={count}")
        if self.tree is not None:
            if self.candidates is not None:
                raise LabkitError("got a tree and candidates; a fixed tree is not pruned, leave out one")
            check_choices(self.tree, len(top_k), [vocab] * count if self.top_k is None else top_k)
            object.__setattr__(self, "tree", tuple(tuple(choice) for choice in self.tree))
        leaves, candidates = math.prod(top_k), self.candidates
        if candidates is None:
            candidates = min(self.heads.candidates, leaves)
        if isinstance(candidates, bool) or not isinstance(candidates, int) or not 1 <= candidates <= leaves:
            raise LabkitError(f"got candidates={candidates!r}; the tree of top_k={top_k} has 1 .. {leaves} paths")
        object.__setattr__(self, "top_k", top_k)
        object.__setattr__(self, "candidates", candidates)

    def __repr__(self) -> str:
        shape = f"top_k={self.top_k}, candidates={self.candidates}"
        if self.tree is not None:
            shape = f"tree of {len(self.tree)} nodes"
        return f"Heads({type(self.heads).__name__}, {shape})"

    @property
    def taps(self) -> Sequence[int]:  # type: ignore
        """What the head reads, of every committed token."""
        return (HEAD_INPUT,)

    @property
    def levels(self) -> int:
        """The deepest level."""
        return len(self.top_k) if self.tree is None else max(map(len, self.tree))

    @property
    def nodes(self) -> int:
        """The most nodes of a tree."""
        return sum(tree_sizes(self.top_k, self.candidates)) if self.tree is None else len(self.tree)

    def check(self, session: Session) -> None:
        """Heads and target must have one width and one vocabulary."""
        check_pair(self.heads, session.backbone)
        check_trained(self.heads, session, "drafting")

    def begin(self, session: Session) -> _State:
        """The buffers of a chain or a tree."""
        tree = None
        if self.tree is not None:
            tree = FixedTree(self.heads, self.tree, session.tokens.device)
        elif max(self.top_k) > 1:
            tree = ProductTree(self.heads, self.top_k, self.candidates, session.tokens)
        return _State(session, Chain(session, self.levels), tree)

    def work(self, depth: int) -> tuple[list[Work], list[Work]]:
        """The heads' own work, and a verification of all nodes."""
        return [Work(0, 0, 1, other=self._bare)], super().work(depth)[1]

    def _bare(self, session: Session) -> Callable[[], Any]:
        state, token = self.begin(session), session.pending()
        shape, like = (session.batch, 1, self.heads.width), session.backbone.dtype
        hidden = torch.zeros(shape, dtype=like, device=token.device)
        if state.tree is not None:
            tree = state.tree
            return lambda: tree.draft(hidden, token, self.levels).tokens.tolist()
        step = self._steps(hidden)

        def once() -> None:
            last = token
            for level in range(self.levels):
                last = step(level, last).argmax(-1)[:, None]
            last.tolist()

        return once

    def propose(self, state: _State, context: Context) -> Draft:
        """From the state of the last accepted token, and the pending token after it."""
        session, count = state.session, context.length(self.levels)
        tap = session.cache.taps[HEAD_INPUT]
        if count == 0 or tap is None:
            return Draft.empty(context.tokens)
        last = (context.n - 2).clamp_min(0)[:, None, None].to(tap.device)
        hidden = tap.gather(1, last.expand(-1, 1, tap.shape[2]))
        if state.tree is not None:
            draft = state.tree.draft(hidden, session.pending(), count)
        else:
            state.chain.grow(context, count, self._steps(hidden))
            draft = state.chain.draft()
        return replace(draft, valid=draft.valid & (context.n >= 2)[:, None])

    def _steps(self, hidden: Tensor) -> Callable[[int, Tensor], Tensor]:
        """A chain's steps: one token a head, each after the one drawn before."""
        current = self.heads.start(hidden)

        def step(level: int, token: Tensor) -> Tensor:
            nonlocal current
            current = self.heads.step(level, current, token[:, :, None].to(current.device))
            return self.heads.logits(level, current)[:, 0]

        return step
