"""A cache without a length: every row of the batch writes to slots of its own, and rollback is nothing.

A committed token at position i lives in slot i. What a row may see is the mask's job alone, so rejected
rows are simply overwritten later, layers may run ahead of each other, and rows of different lengths share
one batch. The invariant, asserted in the tests: with n[b] committed tokens in row b, slots 0 .. n[b]-2 of
every layer, and of every tap, hold what a plain forward over the committed tokens would have written.
"""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin


class SlotLayer(CacheLayerMixin):
    """One layer's keys and values: `(batch, kv_heads, capacity + 1, head_dim)`, made at the first write.

    The buffers take shape and device from what is written. They start as zeros: a NaN in a masked slot
    would poison the output. The slot past capacity is scrap: padding rows write there, nobody reads it.
    """

    is_sliding = False

    def __init__(self, owner: "SlotCache"):
        super().__init__()
        self.owner = owner
        self.keys: Any = None
        self.values: Any = None
        self._shown: tuple[int, Any] = (-1, None)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Make both buffers."""
        rows = self.owner.capacity + 1
        self.keys, self.values = (x.new_zeros((*x.shape[:2], rows, x.shape[3])) for x in (key_states, value_states))
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        """Write the placed rows, return the first `width` slots."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.keys.scatter_(2, self.owner.slots_like(key_states), key_states)
        self.values.scatter_(2, self.owner.slots_like(value_states), value_states)
        width = self.owner.width
        if self._shown[0] != width:
            self._shown = width, (self.keys[:, :, :width], self.values[:, :, :width])
        return self._shown[1]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """The number of slots shown, from slot 0."""
        return self.owner.width, 0

    def get_seq_length(self) -> int:
        """Slots shown below the rows being written; labkit passes positions and masks itself."""
        return max(0, self.owner.width - self.owner.rows)

    def get_max_length(self) -> int:
        """Committed and draft slots together."""
        return self.owner.capacity


class SlotCache(Cache):
    """Preallocated keys, values and taps for `batch` rows of at most `capacity` slots.

    A tap is one more buffer, `(batch, capacity + 1, width)`: slot i holds the state of committed token i at
    that depth (the residual stream after `depth` layers; -1 = what the head reads). `left (batch, capacity + 1)` is
    the depth at which a target that exits early left each slot's token, 0 where it did not. `begun (batch,)` are the
    prompts' lengths. `copies` counts the device-to-host copies that rules on the data have cost.
    """

    def __init__(self, layers: int, batch: int, capacity: int, taps: Sequence[int] = ()):
        self.batch, self.capacity = batch, capacity
        self.taps: dict[int, Tensor | None] = dict.fromkeys(sorted(set(taps)))
        self.width = self.rows = self.copies = 0
        self.left: Tensor | None = None
        self.begun: Tensor = torch.zeros(batch, dtype=torch.long, device="cpu")
        self._copies: dict[tuple[torch.device, torch.Size], Tensor] = {}
        self.slot_layers = [SlotLayer(self) for _ in range(layers)]
        super().__init__(layers=list(self.slot_layers))

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """Slots shown below the rows being written."""
        return max(0, self.width - self.rows)

    def place(self, slots: Int[Tensor, "batch rows"], width: int) -> None:
        """Say where the next forward writes its rows, and how many slots it may be shown."""
        self.width, self.rows = width, slots.shape[1]
        self._slots, self._copies = slots[:, None, :, None], {}

    def slots_like(self, states: Float[Tensor, "batch kv_heads rows dim"]) -> Int[Tensor, "batch kv_heads rows dim"]:
        """The placed slots as an index for such states, on their device; the same tensor for every layer of a run."""
        kind = states.device, states.shape
        if kind not in self._copies:
            self._copies[kind] = self._slots.to(states.device).expand(states.shape)
        return self._copies[kind]

    def to_host(self, x: Tensor) -> list:
        """What a rule on the data found, as a list: one counted device-to-host copy."""
        self.copies += 1
        return x.tolist()

    def leave(self, slots: Int[Tensor, "batch rows"], depths: Int[Tensor, "batch rows"]) -> None:
        """Keep the depths at which these rows left."""
        if self.left is None:
            self.left = depths.new_zeros((self.batch, self.capacity + 1))
        self.left.scatter_(1, slots, depths)

    def write_tap(self, depth: int, hidden: Float[Tensor, "batch rows width"], slots: Int[Tensor, "batch rows"]):
        """Keep the states of these rows at `depth`."""
        tap = self.taps[depth]
        if tap is None:
            tap = self.taps[depth] = hidden.new_zeros((self.batch, self.capacity + 1, hidden.shape[2]))
        tap.scatter_(1, slots.to(tap.device)[:, :, None].expand_as(hidden), hidden)

    def move(self, source: Int[Tensor, "batch rows"], target: Int[Tensor, "batch rows"]) -> None:
        """Copy rows from slots to slots in all layers and taps: how an accepted tree path becomes contiguous."""
        for buffer in self.buffers():
            here, there = (at.to(buffer.device)[:, None, :, None] for at in (source, target))
            shape = (*buffer.shape[:2], source.shape[1], buffer.shape[3])
            buffer.scatter_(2, there.expand(shape), buffer.gather(2, here.expand(shape)))
        for tap in (tap for tap in self.taps.values() if tap is not None):
            here, there = (at.to(tap.device)[:, :, None].expand(-1, -1, tap.shape[2]) for at in (source, target))
            tap.scatter_(1, there, tap.gather(1, here))

    @property
    def nbytes(self) -> int:
        """Bytes that the buffers hold."""
        taps = [tap for tap in self.taps.values() if tap is not None]
        return sum(x.numel() * x.element_size() for x in [*self.buffers(), *taps])

    def buffers(self) -> list[Tensor]:
        """Keys and values of every layer that has been written."""
        return [x for layer in self.slot_layers if layer.is_initialized for x in (layer.keys, layer.values)]
