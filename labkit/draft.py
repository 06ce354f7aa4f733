"""What a drafter proposes in one round: a token tree, and the work already done on it.

Rows and nodes. Row 0 of a verification is the pending token (the last committed one, which has no
keys and values yet); row 1 + i is node i of the draft. A node's level is its distance from the
pending token, minus one: children of the pending token are at level 0.
"""

from dataclasses import dataclass, field

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


@dataclass(frozen=True)
class Partial:
    """Hidden states that a draft hands over, so that verification resumes from them.

    `hidden (batch, rows, width)` is the residual stream of rows 0 .. rows-1 after `depth` layers;
    the keys and values of the layers below `depth` lie in those rows' slots already. One depth and
    one row count for the whole batch. `stamp` is the session's write count at hand-over: a Partial is
    valid until anyone else runs through those slots. The default hands over nothing.
    """

    hidden: Float[Tensor, "batch rows width"] | None = None
    depth: int = 0
    stamp: int = -1

    @property
    def rows(self) -> int:
        """How many rows have been run through the layers below `depth`."""
        return 0 if self.hidden is None else self.hidden.shape[1]


@dataclass(frozen=True)
class Draft:
    """A token tree for every row of the batch, in one fixed shape `(batch, nodes)`.

    tokens: proposed ids. parents: index of the parent node, -1 for a child of the pending token, always
    smaller than the node's own index. valid: False where a row proposes fewer (its tokens are ignored,
    but must be ids of the vocabulary; a node is valid only if its parent is). drawn: True where the
    token was drawn from `probs`, False where it was chosen outright (its law is one-hot). probs: the
    law each node was drawn from, needed by `Rejection` only. q: the draft's own probability of the
    token, for the record. exits: the number of layers each node's token was read after, for the record.
    depth: the number of levels. is_chain: node i is the child of node i-1 in every row.
    """

    tokens: Int[Tensor, "batch nodes"]
    parents: Int[Tensor, "batch nodes"]
    valid: Bool[Tensor, "batch nodes"]
    drawn: Bool[Tensor, "batch nodes"]
    depth: int
    is_chain: bool
    probs: Float[Tensor, "batch nodes vocab"] | None = None
    q: Float[Tensor, "batch nodes"] | None = None
    exits: Int[Tensor, "batch nodes"] | None = None
    partial: Partial = field(default_factory=Partial)

    @property
    def nodes(self) -> int:
        """The number of nodes in each row."""
        return self.tokens.shape[1]

    @classmethod
    def chain(
        cls,
        tokens: Int[Tensor, "batch nodes"],
        valid: Bool[Tensor, "batch nodes"] | None = None,
        *,
        drawn: bool = False,
        probs: Float[Tensor, "batch nodes vocab"] | None = None,
        q: Float[Tensor, "batch nodes"] | None = None,
        exits: Int[Tensor, "batch nodes"] | None = None,
        partial: Partial | None = None,
    ) -> "Draft":
        """One token after another: the usual draft. `drawn` tells whether all were drawn from `probs`."""
        nodes = tokens.shape[1]
        parents = torch.arange(-1, nodes - 1, device=tokens.device).expand_as(tokens)
        return cls(
            tokens=tokens,
            parents=parents,
            valid=torch.ones_like(tokens, dtype=torch.bool) if valid is None else valid,
            drawn=torch.full_like(tokens, drawn, dtype=torch.bool),
            depth=nodes,
            is_chain=True,
            probs=probs,
            q=q,
            exits=exits,
            partial=partial or Partial(),
        )

    @classmethod
    def tree(
        cls,
        tokens: Int[Tensor, "batch nodes"],
        parents: Int[Tensor, "#batch nodes"],
        valid: Bool[Tensor, "batch nodes"] | None = None,
        *,
        depth: int,
        drawn: bool = False,
        probs: Float[Tensor, "batch nodes vocab"] | None = None,
        q: Float[Tensor, "batch nodes"] | None = None,
        exits: Int[Tensor, "batch nodes"] | None = None,
        partial: Partial | None = None,
    ) -> "Draft":
        """Several continuations at once: `parents[i]` is the node that node i follows, -1 for the pending token.

        A parent comes before its children. One row of `parents` serves the whole batch. `depth` is the number of
        levels: it is asked for, as counting it would make the host wait for the device.
        """
        return cls(
            tokens=tokens,
            parents=parents.expand_as(tokens),
            valid=torch.ones_like(tokens, dtype=torch.bool) if valid is None else valid,
            drawn=torch.full_like(tokens, drawn, dtype=torch.bool),
            depth=depth,
            is_chain=tokens.shape[1] <= 1,
            probs=probs,
            q=q,
            exits=exits,
            partial=partial or Partial(),
        )

    @classmethod
    def empty(cls, like: Int[Tensor, "batch *rest"]) -> "Draft":
        """No proposal: verification is then one step of plain decoding. Batch and device are `like`'s."""
        return cls.chain(like.new_zeros((like.shape[0], 0)))

    def levels(self) -> Int[Tensor, "batch nodes"]:
        """Each node's distance from the pending token, minus one."""
        if self.is_chain:
            return torch.arange(self.nodes, device=self.tokens.device).expand_as(self.tokens)
        level = torch.zeros_like(self.parents)
        above = self.parents.clamp_min(0)
        for _ in range(self.depth - 1):
            level = torch.where(self.parents < 0, 0, level.gather(1, above) + 1)
        return level

    def ancestry(self) -> Bool[Tensor, "batch rows rows"]:
        """`[b, r, s]` is True where row s is row r itself or lies above it; rows = 1 + nodes."""
        rows = 1 + self.nodes
        device = self.tokens.device
        if self.is_chain:
            at = torch.arange(rows, device=device)
            return (at[:, None] >= at[None, :]).expand(self.tokens.shape[0], rows, rows)
        own = torch.eye(rows, dtype=torch.bool, device=device)
        above = torch.nn.functional.pad(self.parents + 1, (1, 0))
        seen = own.expand(self.tokens.shape[0], rows, rows)
        for _ in range(self.depth):
            seen = own | seen.gather(1, above[:, :, None].expand_as(seen))
        return seen
