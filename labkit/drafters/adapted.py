"""The modules between an exit and its logits: an adapter, with or without keys and values of its own, and a head."""

from typing import Any

import torch
from torch import Tensor, nn

from labkit.drafters.chain import Unseen
from labkit.errors import LabkitError
from labkit.heads.adapters import Adapter
from labkit.heads.trained import check_classifier, check_trained
from labkit.protocol import Context
from labkit.session import PREFILL_ROWS, Rows, Session


def check_parts(adapter: Any, head: Any, fixed: bool) -> None:
    """Raise LabkitError for an adapter or head that is no module, or an adapter at an exit that moves."""
    for name, part in (("adapter", adapter), ("head", head)):
        if not isinstance(part, nn.Module) and not (name == "head" and part is None):
            raise LabkitError(f"got {name}={part!r}; give an nn.Module, or leave it out")
    if not fixed and not isinstance(adapter, nn.Identity):
        raise LabkitError("an adapter belongs to one exit layer; write exit=…, a number, or leave the adapter out")


class Adapted:
    """Exit states through `adapter` and `head` to logits, over the rounds of one generation."""

    def __init__(self, session: Session, exit: int, adapter: nn.Module, head: nn.Module | None):
        self.session, self.exit, self.adapter, self.head = session, exit, adapter, head
        self.cache = None
        if self.needs_tap(adapter):
            assert isinstance(adapter, Adapter)
            self.cache = type(session.cache)(adapter.layers, session.batch, session.capacity)
            self.unseen = Unseen(session.lengths)
            for first in range(1 - max(session.lengths), 0, PREFILL_ROWS):
                self._feed(first, min(PREFILL_ROWS, -first), None)

    @staticmethod
    def needs_tap(adapter: nn.Module) -> bool:
        """Whether it keeps keys and values over committed exit states."""
        return isinstance(adapter, Adapter) and adapter.layers > 0

    def logits(self, hidden: Tensor, level: int, context: Context) -> Tensor:
        """What is said of the exit state `hidden (batch, 1, width)` of row `level`: `(batch, vocab)`."""
        backbone = self.session.backbone
        if self.cache is not None:
            lag = self.unseen.rows(context) if level == 0 else 1
            hidden = self._feed(level + 1 - lag, lag, hidden)[:, -1:]
        else:
            hidden = self.adapter(hidden)
        if self.head is not None:
            return self.head(hidden)[:, 0]
        normed = isinstance(self.adapter, Adapter) and self.adapter.normed
        return (backbone.logits(hidden) if normed else backbone.head(hidden))[:, 0]

    def _feed(self, first: int, count: int, last: Tensor | None) -> Tensor:
        """Rows first .. first+count-1 of the chain through the adapter: committed ones from the tap, then `last`."""
        rows: Rows = self.session.chain(first, count)
        old = count - (last is not None)
        parts = [] if last is None else [last]
        if old:
            tap = self.session.cache.taps[self.exit]
            at = rows.slots[:, :old]
            if tap is None:  # a one-token prompt has no state yet: padding
                assert last is not None
                parts.insert(0, last.new_zeros((last.shape[0], old, last.shape[2])))
            else:
                parts.insert(0, tap.gather(1, at.to(tap.device)[:, :, None].expand(-1, -1, tap.shape[2])))
        mask = rows.mask.full if rows.mask.full is not None else rows.mask.sliding
        assert self.cache is not None
        self.cache.place(rows.slots, rows.mask.width)
        return self.adapter(torch.cat(parts, 1), self.cache, rows.positions, mask)


def check_fit(exit: Any, adapter: nn.Module, head: nn.Module | None, session: Session) -> None:
    """Raise LabkitError unless what reads an exit is made for this target's states, vocabulary and mode."""
    backbone = session.backbone
    check_trained(adapter, session, "adapter")
    check_trained(head, session, "head")
    check_classifier(exit, session)
    state = torch.zeros((1, 1, backbone.width), dtype=backbone.dtype, device=backbone.device)
    need = f"needed are modules for width {backbone.width}, {backbone.dtype}, on {backbone.device}"
    if isinstance(adapter, Adapter):
        adapter.check(backbone.width)
        cache, at = type(session.cache)(adapter.layers, 1, 1), session.tokens.new_zeros((1, 1))
        cache.place(at, 1)
        _try(adapter, state, "adapter", need, backbone.width, cache, at, state.new_zeros((1, 1, 1, 1)))
        if adapter.normed and head is None and backbone.head_width != backbone.width:
            raise LabkitError(
                f"the {type(adapter).__name__} adapter gives states of width {backbone.width}, and this model's "
                f"head reads width {backbone.head_width}; give a head too, or an adapter such as labkit.heads.Affine"
            )
        if adapter.exit not in (None, exit):
            raise LabkitError(
                f"the adapter was trained for exit={adapter.exit}, and this is exit={exit}; write that one"
            )
    else:
        _try(adapter, state, "adapter", need, backbone.width)
    if head is not None:
        out = _try(head, state, "head", need, None)
        if out.shape[-1] != backbone.vocab:
            raise LabkitError(
                f"the head says {out.shape[-1]} tokens, and the target has {backbone.vocab}; for part of them "
                "write labkit.heads.DraftVocabulary(head, tokens, vocab), with the ids of its tokens"
            )


def _try(module: nn.Module, state: Tensor, name: str, need: str, width: int | None, *rest: Any) -> Tensor:
    try:
        with torch.inference_mode():
            out: Any = module(state, *rest)
    except (RuntimeError, TypeError, ValueError) as error:
        raise LabkitError(
            f"the {name} {type(module).__name__} does not take an exit state ({error}); {need}"
        ) from error
    if not isinstance(out, Tensor) or out.shape[:-1] != state.shape[:-1] or (width and out.shape[-1] != width):
        got = tuple(out.shape) if isinstance(out, Tensor) else type(out).__name__
        raise LabkitError(f"the {name} {type(module).__name__} gave {got} for a state {tuple(state.shape)}; {need}")
    return out
