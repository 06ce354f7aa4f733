"""Self-speculation: draft with the target's own first layers, verify with the rest."""

from dataclasses import dataclass

import torch
from torch import Tensor

from labkit.draft import ChainBuffer, Draft
from labkit.drafters.lookup import check_count
from labkit.protocol import Context, Drafter, Work
from labkit.session import Session


@dataclass
class _State:
    session: Session
    chain: ChainBuffer
    hidden: Tensor | None = None


@dataclass(frozen=True)
class EarlyExit(Drafter):
    """A chain of `max_draft` tokens read after layer `exit` through the model's own norm and head.

    The layers below the exit run once per token: their keys, values and exit states are handed over, and
    verification resumes above them. `share=False` hands nothing over, so that verification recomputes: the
    ablation. `exit` = depth is the self-draft, which must be accepted whole. Source: LayerSkip, 2404.16710.
    """

    exit: int
    max_draft: int = 4
    share: bool = True

    def __post_init__(self):
        check_count(self.exit, "exit", "EarlyExit")
        check_count(self.max_draft, "max_draft", "EarlyExit")

    @property
    def nodes(self) -> int:
        """The draft length."""
        return self.max_draft

    def work(self, depth: int) -> tuple[list[Work], list[Work]]:
        """Draft steps through the first layers; verification resumes above them, or starts anew."""
        rows = 1 + self.max_draft
        draft = [Work(0, self.exit, 1, times=self.max_draft, head=1)]
        if not self.share:
            return draft, [Work(0, depth, rows, head=rows)]
        return draft, [Work(0, self.exit, 1), Work(self.exit, depth, rows, head=rows)]

    def check(self, session: Session) -> None:
        """The exit must be a layer of the target."""
        session.backbone.check_exit(self.exit)

    def begin(self, session: Session) -> _State:
        """Static buffers for tokens and exit states."""
        return _State(session, ChainBuffer(session.tokens, self.max_draft))

    def propose(self, state: _State, context: Context) -> Draft:
        """One token a step through layers [0, exit)."""
        session, chain, count = state.session, state.chain, context.length(self.max_draft)
        token = session.pending()
        for level in range(count):
            hidden = session.run(token, 0, self.exit, session.chain(level, 1))
            if state.hidden is None:
                state.hidden = hidden.new_zeros((hidden.shape[0], self.max_draft, hidden.shape[2]))
            state.hidden[:, level] = hidden[:, 0]
            logits = session.backbone.head(hidden)[:, 0].to(context.n.device)
            drawn = context.draw(logits, chain.tokens[:, :level])
            chain.put(level, drawn.token, drawn.q, drawn.probs)
            token = drawn.token[:, None]
        if count == 0:
            return Draft.empty(context.tokens)
        hidden = state.hidden if self.share else None
        partial = None if hidden is None else session.partial(hidden[:, :count], self.exit)
        return chain.draft(count, torch.full_like(chain.tokens[:, :count], self.exit), partial)
