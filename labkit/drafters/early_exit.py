"""Self-speculation: draft with the target's own first layers, verify with the rest."""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from torch import Tensor, nn

from labkit.costs import whole_draft
from labkit.draft import Draft
from labkit.drafters.adapted import Adapted, check_fit, check_parts
from labkit.drafters.chain import Chain, check_stop
from labkit.drafters.descent import Descent, Exits
from labkit.drafters.kv import KV, Full
from labkit.errors import LabkitError, check_count, check_flag
from labkit.exits import ExitRule
from labkit.protocol import Context, Drafter, StopRule, Work, never
from labkit.session import Session


class _NoAdapter(nn.Identity):
    """The identity of which there is one: copied or unpickled it is the same, so that a strategy equals its copy."""

    def __reduce__(self) -> str:
        return "NO_ADAPTER"


NO_ADAPTER = _NoAdapter()


@dataclass
class _State:
    chain: Chain
    descent: Descent
    adapted: Adapted


@dataclass(frozen=True, repr=False)
class EarlyExit(Drafter):
    """A chain of `max_draft` tokens read after layer `exit` through the model's own norm and head.

    The layers below the exit run once per token: their keys, values and exit states are handed over, and verification
    resumes above them (`share=False` hands nothing over: the ablation). `exit` = depth is the self-draft, which must
    be accepted whole. Sources: LayerSkip 2404.16710; CALM 2207.07061; Kangaroo 2404.18911; MagicDec 2408.11049.

    exit: a layer, or a rule (labkit.exits) tested between layers, at `layers` (default all) from `minimum` on; a token
    for which it never fires is read after `maximum` layers (default all). Each test costs a view and a copy to the
    host, most a head too. In a batch a token goes as deep as its deepest row. catch_up: "exact" takes earlier tokens
    through the layers that a deeper one needs; "project" only writes their keys and values there, from where they left.
    adapter, head: modules between exit and logits (labkit.heads.Adapter). kv: what of the cache the draft may read;
    anything but Full() is approximate, and nothing is handed over. stop: ends a draft early, such as labkit.below(0.6).
    """

    exit: int | ExitRule
    max_draft: int = 4
    share: bool = True
    stop: StopRule = field(default=never, kw_only=True)
    adapter: nn.Module = field(default=NO_ADAPTER, kw_only=True)
    head: nn.Module | None = field(default=None, kw_only=True)
    kv: KV = field(default=Full(), kw_only=True)
    layers: Sequence[int] | None = field(default=None, kw_only=True)
    minimum: int = field(default=1, kw_only=True)
    maximum: int | None = field(default=None, kw_only=True)
    catch_up: str = field(default="exact", kw_only=True)

    def __post_init__(self):
        check_count(self.max_draft, "max_draft", "EarlyExit")
        check_flag(self.share, "share", "EarlyExit")
        check_stop(self.stop)
        if self.catch_up not in ("exact", "project"):
            raise LabkitError(f'got catch_up={self.catch_up!r}; write "exact" or "project"')
        if not isinstance(self.kv, KV):
            raise LabkitError(f"got kv={self.kv!r}; write labkit.Window(4, 60), labkit.TopK(64), or nothing")
        check_parts(self.adapter, self.head, self.exits.fixed)
        if self.exits.fixed and self.catch_up != "exact":
            raise LabkitError(f"catch_up={self.catch_up!r} is for a rule; exit={self.exit} is one layer, leave it out")

    @property
    def exits(self) -> Exits:
        """Where a token may be read."""
        return Exits(self.exit, self.layers, self.minimum, self.maximum)

    @property
    def nodes(self) -> int:
        """The draft length."""
        return self.max_draft

    @property
    def hands_over(self) -> bool:
        """Unless told not to, or the draft's work is only like the target's."""
        return self.share and self.kv.exact

    @property
    def taps(self) -> Sequence[int]:  # type: ignore
        """An adapter with KV reads the exit states of committed tokens."""
        return (self.exit,) if Adapted.needs_tap(self.adapter) else ()  # type: ignore

    def __repr__(self) -> str:
        told = {f.name: x for f in fields(self) if (x := getattr(self, f.name)) != f.default or not f.kw_only}
        shown = (f"{name}={type(x).__name__ if isinstance(x, nn.Module) else repr(x)}" for name, x in told.items())
        return f"EarlyExit({', '.join(shown)})"

    def work(self, depth: int) -> tuple[list[Work], list[Work]]:
        """Draft steps through the first layers; verification resumes above them, or starts anew. Unknown for a rule."""
        exit, rows = self.exit, 1 + self.max_draft
        if not isinstance(exit, int):
            return [], []
        bare = isinstance(self.adapter, nn.Identity) and self.head is None and self.kv.exact
        draft = [Work(0, exit, 1, self.max_draft, head=1)] if bare else [whole_draft(self)]
        if not self.hands_over:
            return draft, [Work(0, depth, rows, head=rows)]
        return draft, [Work(0, exit, 1), Work(exit, depth, rows, head=rows)]

    def check(self, session: Session) -> None:
        """The exit must be a layer of the target, and what reads it must fit."""
        self.exits.depths(session.backbone)
        check_fit(self.exit, self.adapter, self.head, session)
        self.kv.check(session)

    def begin(self, session: Session) -> _State:
        """Static buffers for tokens and exit states."""
        reader = self.kv.begin(session, self.max_draft)
        descent = Descent(session, reader, self.exits, self.max_draft, self.catch_up == "project")
        adapted = Adapted(session, descent.depths[-1], self.adapter, self.head)
        return _State(Chain(session, self.max_draft, self.stop), descent, adapted)

    def propose(self, state: _State, context: Context) -> Draft:
        """One token a step, as deep as the exit says."""
        descent, adapted = state.descent, state.adapted
        descent.start(context)

        def step(level: int, token: Tensor) -> Tensor:
            return descent.row(level, token, context, lambda hidden: adapted.logits(hidden, level, context))

        count = state.chain.grow(context, context.length(self.max_draft), step)
        return state.chain.draft(descent.exits[:, :count], descent.partial() if self.hands_over else None)

    def report(self, state: _State) -> dict[str, Any]:
        """Bytes of keys and values that a draft step reads at the run's end, and that it would read of all of them."""
        return self.kv.report(state.descent.session, state.descent.depths[-1])
