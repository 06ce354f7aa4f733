"""Medusa: independent heads that each predict one later token from the same state (2401.10774)."""

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from labkit.errors import LabkitError


class ResBlock(nn.Module):
    """h + SiLU(W h + b); starts as the identity."""

    def __init__(self, width: int, bias: bool = True, **where):
        super().__init__()
        self.linear = nn.Linear(width, width, bias=bias, **where)
        for parameter in self.parameters():
            nn.init.zeros_(parameter)

    def forward(self, hidden: Float[Tensor, "*shape width"]) -> Float[Tensor, "*shape width"]:
        """Add the block's correction."""
        return hidden + nn.functional.silu(self.linear(hidden))


class Medusa(nn.Module):
    """Head i predicts the token i + 2 places after the state's own, from that state alone.

    layers: ResBlocks in each head. base: None for heads with an output layer of their own (V1); else what turns
    states into logits for all of them (V2): the target's head, `lab.backbone.logits`. Source: 2401.10774.
    """

    target_head: str | None = None
    """The hash of the head of the target that it was loaded for."""

    def __init__(
        self,
        width: int,
        vocab: int,
        heads: int,
        layers: int = 1,
        *,
        base: Callable[[Tensor], Tensor] | None = None,
        bias: bool = True,
        device=None,
        dtype=None,
    ):
        super().__init__()
        self.width, self.vocab, self.count, self.layers, self.bias = width, vocab, heads, layers, bias
        self.base: Any
        self.__dict__["base"] = base  # the target's head is not one of our sub-modules
        self.top_k, self.candidates = (1,) * heads, 1
        where = {"device": device, "dtype": dtype}
        own = [] if base is not None else [lambda: nn.Linear(width, vocab, bias=False, **where)]
        self.heads = nn.ModuleList(
            nn.Sequential(*(ResBlock(width, bias, **where) for _ in range(layers)), *(make() for make in own))
            for _ in range(heads)
        )

    def start(self, state: Float[Tensor, "batch beams width"]) -> Float[Tensor, "batch beams width"]:
        """The state itself, in the heads' dtype."""
        first = next(self.parameters(), None)
        return state if first is None else state.to(first.dtype)

    def step(self, head: int, state: Tensor, tokens: Tensor) -> Tensor:
        """The same state: a head looks at no token."""
        return state

    def logits(self, head: int, state: Float[Tensor, "*shape width"]) -> Float[Tensor, "*shape vocab"]:
        """Of the token that head `head` predicts."""
        hidden = self.heads[head](state)
        return hidden if self.base is None else self.base(hidden)

    def forward(
        self, state: Float[Tensor, "*shape width"], heads: int | None = None
    ) -> Float[Tensor, "heads *shape vocab"]:
        """All heads' logits, or the first `heads` heads'."""
        count, current = self.count if heads is None else heads, self.start(state)
        if not 1 <= count <= self.count:
            raise LabkitError(f"got heads={count}; there are {self.count}")
        return torch.stack([self.logits(head, current) for head in range(count)])
