"""Drafting with another, smaller model of the same vocabulary."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from labkit.backbone import Backbone
from labkit.draft import Draft
from labkit.drafters.chain import Chain, Unseen, check_stop
from labkit.errors import LabkitError, check_count
from labkit.protocol import Context, Drafter, StopRule, Work, never
from labkit.session import Session


@dataclass
class _State:
    own: Session
    chain: Chain
    unseen: Unseen


@dataclass(frozen=True, repr=False)
class DraftModel(Drafter):
    """A chain of `max_draft` tokens from `model`: a transformers causal LM, a Backbone, or a Lab.

    Greedy when decoding is greedy, sampled with the same warping when it samples. It keeps a session of its
    own and re-feeds the last two committed tokens each round (more after rounds it sat out), so nothing has
    to be rolled back. Source: Leviathan et al. 2211.17192, Chen et al. 2302.01318.
    """

    model: Any
    max_draft: int = 4
    stop: StopRule = field(default=never, kw_only=True)

    def __post_init__(self):
        check_stop(self.stop)
        check_count(self.max_draft, "max_draft", "DraftModel")
        model = getattr(self.model, "backbone", self.model)
        if isinstance(model, str):
            raise LabkitError(f"DraftModel got model={model!r}, a name; write DraftModel(labkit.load({model!r}))")
        if not isinstance(model, Backbone | nn.Module):
            raise LabkitError(f"DraftModel got model={model!r}; give a transformers causal LM, a Backbone or a Lab")
        object.__setattr__(self, "model", model if isinstance(model, Backbone) else Backbone(model))

    def __repr__(self) -> str:
        model = self.model.model
        stop = "" if self.stop is never else f", stop={self.stop!r}"
        return f"DraftModel({model.config.name_or_path or self.model}, max_draft={self.max_draft}{stop})"

    @property
    def nodes(self) -> int:
        """The draft length."""
        return self.max_draft

    def work(self, depth: int) -> tuple[list[Work], list[Work]]:
        """A first draft step of two rows, then one row a step; verification runs the whole target."""
        own = self.model
        steps = [Work(0, own.depth, 2, head=1, backbone=own)]
        steps += [Work(0, own.depth, 1, self.max_draft - 1, 1, own)] if self.max_draft > 1 else []
        return steps, super().work(depth)[1]

    def check(self, session: Session) -> None:
        """The two vocabularies must be one."""
        self.model.check_unchanged()
        ours, target = self.model.vocab, session.backbone.vocab
        if ours != target:
            raise LabkitError(
                f"the draft model has {ours} tokens and the target {target}; "
                "a draft model must share the target's tokenizer: choose one of the same family"
            )
        if self.model.limit < session.longest:
            raise LabkitError(
                f"the draft model has {self.model.limit} positions, and prompt and new tokens need {session.longest}; "
                "write a smaller max_new_tokens, or choose a draft model with more positions"
            )

    def begin(self, session: Session) -> _State:
        """Prefill the draft model's own session with the same prompts."""
        own = Session(self.model, session.batch, session.capacity)
        rows = session.tokens.tolist()
        own.prefill([row[:n] for row, n in zip(rows, session.lengths, strict=True)])
        return _State(own, Chain(session, self.max_draft, self.stop), Unseen(session.lengths))

    def propose(self, state: _State, context: Context) -> Draft:
        """Feed what it has not seen, then draw token by token."""
        own, count = state.own, context.length(self.max_draft)
        own.follow(context.n.to(own.n.device), context.lengths)
        if count == 0:
            return Draft.empty(context.tokens)
        lag = state.unseen.rows(context)
        at = context.n[:, None] + torch.arange(-lag, 0, device=context.n.device)
        last = context.tokens.gather(1, at.clamp_min(0)).to(own.n.device)

        def step(level: int, token: Tensor) -> Tensor:
            rows = own.chain(1 - lag, lag) if level == 0 else own.chain(level, 1)
            hidden = own.run(last if level == 0 else token.to(own.n.device), 0, self.model.depth, rows)
            return self.model.head(hidden[:, -1:])[:, 0]

        state.chain.grow(context, count, step)
        return state.chain.draft()
