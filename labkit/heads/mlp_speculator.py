"""MLPSpeculator: a small recurrent MLP that drafts from the target's last hidden state (2404.19124)."""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from labkit.errors import LabkitError

EPSILON = 1e-6


def unit(x: Float[Tensor, "*shape width"]) -> Float[Tensor, "*shape width"]:
    """Scaled to a mean square of one; no weights, no mean subtracted."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPSILON)


class ScaleShift(nn.Module):
    """An RMS norm with a scale and a shift."""

    def __init__(self, width: int, **where):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width, **where))
        self.bias = nn.Parameter(torch.zeros(width, **where))

    def forward(self, x: Float[Tensor, "*shape width"]) -> Float[Tensor, "*shape width"]:
        """Normalise, scale, shift."""
        return torch.addcmul(self.bias, self.weight, unit(x))


class MLPSpeculator(nn.Module):
    """Heads 0 .. n_predict-1; head i predicts the token i + 2 places after the state's own.

    width: of the target's residual stream. vocab: tokens. inner: width of the recurrent state (0 = `width`).
    tie: one embedding, head and norm for all stages (projection 0 its own, the others shared). scale_input:
    normalise the state first. top_k, candidates: the product tree it was made for. Parameters have the published
    names without their `speculator.` prefix. Sources: 2404.19124; text-generation-inference PR 1850.
    """

    target_head: str | None = None
    """The hash of the head of the target that it was loaded for."""

    def __init__(
        self,
        width: int,
        vocab: int,
        n_predict: int,
        inner: int = 0,
        *,
        tie: bool = False,
        scale_input: bool = False,
        top_k: Sequence[int] | None = None,
        candidates: int = 1,
        device=None,
        dtype=None,
    ):
        super().__init__()
        inner = inner or width
        if min(width, vocab, n_predict) < 1 or inner < 0:
            raise LabkitError(f"got width={width}, vocab={vocab}, n_predict={n_predict}, inner={inner}; write sizes")
        if top_k is not None and len(top_k) != n_predict:
            raise LabkitError(f"got top_k={tuple(top_k)} for {n_predict} heads; write one number a head")
        self.width, self.vocab, self.inner, self.count = width, vocab, inner, n_predict
        self.tie, self.scale_input = tie, scale_input
        self.top_k, self.candidates = tuple(top_k or [1] * n_predict), candidates
        state_weight = 0.5 ** (0.5 / n_predict)
        self.alpha = ((1 - state_weight**2) * inner / 2) ** 0.5 / state_weight
        where: Any = {"device": device, "dtype": dtype}

        def stages(make, own: int = 1) -> nn.ModuleList:
            made = [make(i) for i in range(min(own, n_predict) if tie else n_predict)]
            return nn.ModuleList(made + [made[-1]] * (n_predict - len(made)))

        self.emb = stages(lambda i: nn.Embedding(vocab, inner, **where))
        self.proj = stages(lambda i: nn.Linear(inner if i else width, inner, bias=False, **where), own=2)
        self.head = stages(lambda i: nn.Linear(inner, vocab, bias=False, **where))
        self.ln = stages(lambda i: ScaleShift(inner, **where))

    def start(self, state: Float[Tensor, "batch beams width"]) -> Float[Tensor, "batch beams width"]:
        """The recurrent state before head 0, from what the target's head reads."""
        state = state.to(self.proj[0].weight.dtype)  # type: ignore
        return unit(state) * 0.5**0.5 if self.scale_input else state

    def step(
        self, head: int, state: Float[Tensor, "batch #beams _"], tokens: Int[Tensor, "batch beams children"]
    ) -> Float[Tensor, "batch beams*children inner"]:
        """The state in which head `head` predicts, for every child of every beam; siblings share the projection.

        `state` may have one beam for all.
        """
        mixed = torch.add(self.proj[head](state)[:, :, None], self.emb[head](tokens), alpha=self.alpha)
        return nn.functional.gelu(self.ln[head](mixed)).flatten(1, 2)

    def logits(self, head: int, state: Float[Tensor, "batch beams inner"]) -> Float[Tensor, "batch beams vocab"]:
        """Of the token that head `head` predicts."""
        return self.head[head](state)

    def forward(
        self, state: Float[Tensor, "batch rows width"], tokens: Int[Tensor, "batch more"], heads: int | None = None
    ) -> Float[Tensor, "heads batch rows vocab"]:
        """All heads' logits on given text: head i reads row r's state and tokens[:, r : r+i+1].

        `tokens (batch, rows + heads - 1)` or longer; tokens[:, r] follows row r's own token. `heads`: the first so
        many only; their logits do not depend on it.
        """
        count, rows = self.count if heads is None else heads, state.shape[1]
        if not 1 <= count <= self.count or tokens.shape[1] < rows + count - 1:
            raise LabkitError(
                f"got {tokens.shape[1]} tokens a row for {rows} states and {count} heads of {self.count}; "
                f"needed are {rows + count - 1}, and at most n_predict={self.count} heads"
            )
        out = None
        current = self.start(state)
        for head in range(count):
            current = self.step(head, current, tokens[:, head : head + rows, None])
            logits = self.logits(head, current)
            out = logits.new_empty((count, *logits.shape)) if out is None else out
            out[head] = logits
        assert out is not None
        return out
