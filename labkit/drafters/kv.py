"""What of the target's cache a draft may read: all of it, sinks and a recent window, or the keys that matter most."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from labkit import views
from labkit.attention import register_attention, top_attention
from labkit.backbone import Backbone
from labkit.cache import SlotCache
from labkit.errors import LabkitError, check_count
from labkit.protocol import Context
from labkit.session import Session


class Reader(ABC):
    """Runs a draft's rows against what it may read, over the rounds of one generation."""

    @abstractmethod
    def start(self, context: Context) -> None:
        """A new round."""

    @abstractmethod
    def run(self, x: Tensor, start: int, stop: int, first: int, count: int, through: Backbone | None = None) -> Tensor:
        """Rows first .. first+count-1 of a chain (row 0: the pending token) through layers [start, stop)."""


class KV(ABC):
    """A choice of what a draft reads. exact: its work is the target's own, and may be handed over."""

    exact: bool = False

    def check(self, session: Session) -> None:  # noqa: B027
        """Raise LabkitError if this model cannot be read so."""

    @abstractmethod
    def begin(self, session: Session, most: int) -> Reader:
        """Buffers for drafts of at most `most` rows."""

    @abstractmethod
    def slots(self, context: int) -> tuple[int, int]:
        """How many slots' keys, and how many slots' values, one row reads after `context` tokens."""

    def report(self, session: Session, depth: int) -> dict[str, int]:
        """Bytes of keys and values that one draft step through `depth` layers reads now, and all there are of them."""
        return {
            "kv_bytes_per_draft_step": self.read_bytes(session, depth),
            "kv_bytes_of_full": Full().read_bytes(session, depth),
        }

    def read_bytes(self, session: Session, depth: int) -> int:
        """Bytes of keys and values that one draft step through `depth` layers reads now, over the batch."""
        total = 0
        for layer in session.cache.slot_layers[:depth]:
            for index, buffer in enumerate((layer.keys, layer.values)):
                if buffer is not None:
                    slot = buffer.shape[1] * buffer.shape[3] * buffer.element_size()
                    total += slot * sum(self.slots(n)[index] for n in session.lengths)
        return total


class _Target(Reader):
    """The target's own slots."""

    def __init__(self, session: Session, through: Backbone | None = None):
        self.session, self.through = session, through

    def start(self, context: Context) -> None:
        """Nothing to gather."""

    def run(self, x: Tensor, start: int, stop: int, first: int, count: int, through: Backbone | None = None) -> Tensor:
        """A run of the session."""
        return self.session.run(x, start, stop, self.session.chain(first, count), through or self.through)


@dataclass(frozen=True)
class Full(KV):
    """All of the cache."""

    exact = True

    def begin(self, session: Session, most: int) -> Reader:
        """No buffers."""
        return _Target(session)

    def slots(self, context: int) -> tuple[int, int]:
        """All."""
        return context, context


@dataclass(frozen=True)
class Window(KV):
    """The first `sinks` and the last `recent` committed slots, at their true positions. Source: MagicDec, 2408.11049.

    They are gathered once a round into a small cache of the draft's own; the target's slots are only read.
    """

    sinks: int
    recent: int

    def __post_init__(self):
        for name, value in (("sinks", self.sinks), ("recent", self.recent)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise LabkitError(f"Window got {name}={value!r}; it must be an int of 0 or more")
        if self.sinks + self.recent < 1:
            raise LabkitError(
                "Window(0, 0) shows a draft nothing of the text; write at least one slot, such as Window(4, 60)"
            )

    def begin(self, session: Session, most: int) -> Reader:
        """A cache of sinks, window and draft rows."""
        return _Compact(session, min(self.sinks, session.capacity), min(self.recent, session.capacity), most)

    def slots(self, context: int) -> tuple[int, int]:
        """Sinks and window, or all where the text is shorter."""
        shown = min(context, self.sinks + self.recent + 1)
        return shown, shown


class _Compact(Reader):
    """Slots 0 .. sinks-1 hold the sinks, the next `recent` the window, then come the draft's rows."""

    def __init__(self, session: Session, sinks: int, recent: int, most: int):
        self.session, self.sinks, self.kept = session, sinks, sinks + recent
        self.backbone = session.backbone.for_prompts
        self.cache: SlotCache = self.backbone.cache(session.batch, self.kept + most)
        self._at = torch.arange(self.kept + most, device=session.n.device)[None]
        self._ready: set[int] = set()

    def start(self, context: Context) -> None:
        """Where the kept slots lie this round; they are gathered when a layer is first read."""
        self.pending = context.n[:, None] - 1
        at = self._at[:, : self.kept]
        self.source = torch.where(at < self.sinks, at, self.pending - self.kept + at)
        self.real = torch.where(at < self.sinks, at < self.pending, self.source >= self.sinks)
        self.source = torch.minimum(self.source, self.pending).clamp_min(0)
        self._ready = set()

    def _gather(self, index: int) -> None:
        theirs, ours = self.session.cache.slot_layers[index], self.cache.slot_layers[index]
        if theirs.keys is None or theirs.values is None:
            return
        if ours.keys is None or ours.values is None:
            ours.lazy_initialization(theirs.keys, theirs.values)
        for here, there in ((ours.keys, theirs.keys), (ours.values, theirs.values)):
            at = self.source.to(there.device)[:, None, :, None]
            assert here is not None
            here[:, :, : self.kept] = there.gather(2, at.expand(*there.shape[:2], self.kept, there.shape[3]))
        self._ready.add(index)

    def run(self, x: Tensor, start: int, stop: int, first: int, count: int, through: Backbone | None = None) -> Tensor:
        """Rows in the draft's own slots; they see what is kept and the rows before them."""
        for index in range(start, stop):
            if index not in self._ready:
                self._gather(index)
        at = self._at[:, self.kept + first : self.kept + first + count]
        slots = at.expand(self.session.batch, count)
        limit = self.backbone.limit - 1
        positions = (self.pending - self.kept + slots).clamp(0, limit)
        row = (self._at[:, None, self.kept :] <= at[:, :, None]).expand(self.session.batch, -1, -1)
        visible = torch.cat([self.real[:, None].expand(-1, count, -1), row], 2)
        drafted = (self.pending + self._at[:, self.kept :] - self.kept).clamp(0, limit)
        mask = self.backbone.mask(visible, positions, torch.cat([self.source, drafted], 1))
        return (through or self.backbone).run(x, start, stop, self.cache, slots, positions, mask)


@dataclass(frozen=True)
class TopK(KV):
    """For each query the `budget` keys of the whole cache that it attends to most; the draft's own rows among them.

    All keys are read to find them, and the values of those only. A bound on what choosing keys beforehand can reach.
    """

    budget: int

    def __post_init__(self):
        check_count(self.budget, "budget", "TopK")

    def check(self, session: Session) -> None:
        """The model's attention must be a function that can be replaced."""
        layer = views.layers_of(views.find_decoder(session.backbone.model))[0]
        if not views.takes_attention_function(type(layer._modules[views.attention_of(layer)])):
            raise LabkitError(
                f"TopK cannot replace the attention of {type(session.backbone.model).__name__}; write Window"
            )

    def begin(self, session: Session, most: int) -> Reader:
        """The target's layers with another attention function."""
        name = register_attention(f"labkit_top_{self.budget}", partial(top_attention, budget=self.budget))
        replace = lambda index, layer: views.with_attention(layer, name)  # noqa: E731
        return _Target(session, session.backbone.for_prompts.substituted(replace))

    def slots(self, context: int) -> tuple[int, int]:
        """All keys, few values."""
        return context, min(context, self.budget)
