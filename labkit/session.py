"""One generation's committed tokens and cache on one backbone, and the runs that go through them."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from labkit.backbone import Backbone, Mask
from labkit.draft import Draft, Partial
from labkit.errors import LabkitError

PREFILL_ROWS = 512
"""Rows of a prompt that are run together; half of them on a CPU, which is as fast there and heeds a cancel sooner."""
HEAD_INPUT = -1
"""The tap of what the head reads: the state after the final norm."""


def bucket(width: int) -> int:
    """A width rounded up so that few shapes occur: multiples of 64 up to 512, then quarters of a power of two."""
    step = max(64, 1 << max(0, width.bit_length() - 3))
    return -(-width // step) * step


@dataclass(frozen=True)
class Rows:
    """Where the rows of a run lie, and what each of them sees."""

    slots: Int[Tensor, "batch rows"]
    positions: Int[Tensor, "batch rows"]
    mask: Mask

    def after(self, first: int) -> "Rows":
        """Rows `first` and later."""
        return self if first == 0 else Rows(self.slots[:, first:], self.positions[:, first:], self.mask.rows(first))


class Session:
    """`batch` rows of committed tokens, `n[b]` of them in row b, the last one pending (without KV yet).

    tokens (batch, capacity + 1) and n (batch,) live on the device; `lengths` is their mirror on the host.
    Every run writes only to slots at or above the pending one (or re-writes committed slots with the same).
    Of its `capacity` slots the last `scratch` are for drafts alone: no row comes to more than `longest` tokens.
    """

    def __init__(self, backbone: Backbone, batch: int, capacity: int, taps: Sequence[int] = (), scratch: int = 0):
        device = backbone.device
        for depth in taps:
            if depth != HEAD_INPUT and not 1 <= depth <= backbone.depth:
                raise LabkitError(
                    f"got a tap at depth {depth!r}; needed is a depth from 1 to {backbone.depth}, or {HEAD_INPUT} for "
                    "what the head reads (the token embeddings are in the model itself)"
                )
        self.backbone, self.batch, self.capacity, self.longest = backbone, batch, capacity, capacity - scratch
        self.cache = backbone.cache(batch, capacity, taps)
        self.tokens = torch.zeros((batch, capacity + 1), dtype=torch.long, device=device)
        self.n = torch.zeros(batch, dtype=torch.long, device=device)
        self.lengths = [0] * batch
        self.cache.begun = self.n
        self.writes = 0
        self._slots = torch.arange(capacity + 1, device=device)[None]
        self._draft: Draft | None = None
        self._verified = self._slots

    # -- committed tokens -------------------------------------------------------------------------------

    @torch.inference_mode()
    def prefill(self, prompts: Sequence[Sequence[int]]) -> None:
        """Commit the prompts and run all but each one's last token, in chunks."""
        longest = max(len(prompt) for prompt in prompts)
        ids = torch.tensor([[*prompt, *[0] * (longest - len(prompt))] for prompt in prompts], device="cpu")
        self.tokens[:, :longest] = ids.to(self.tokens.device)
        self.follow(torch.tensor([len(p) for p in prompts], device="cpu").to(self.n.device), [len(p) for p in prompts])
        self.cache.begun, whole = self.n, self.backbone.for_prompts
        together = PREFILL_ROWS // 2 if self.n.device.type == "cpu" else PREFILL_ROWS
        for first in range(0, longest - 1, together):
            last = min(first + together, longest - 1)
            at = self._slots[:, first:last].expand(self.batch, -1)
            rows = self._causal(at, last, -1)
            hidden = self.run(self.tokens[:, first:last], 0, self.backbone.depth, rows, whole)
            if HEAD_INPUT in self.cache.taps:
                self.norm(hidden, rows)

    def follow(self, n: Int[Tensor, "batch"], lengths: Sequence[int]) -> None:
        """Take over another session's lengths: how a draft model's own session keeps up."""
        self.n, self.lengths = n, list(lengths)

    def pending(self) -> Int[Tensor, "batch 1"]:
        """The last committed token of each row."""
        return self.tokens.gather(1, self.n[:, None] - 1)

    @torch.inference_mode()
    def commit(
        self, accepted: Int[Tensor, "batch depth1"], path: Int[Tensor, "batch depth"], keep: Sequence[int]
    ) -> None:
        """Append the first keep[b] of `accepted` to row b, and move a tree's accepted rows to their slots."""
        steps = self._slots[:, : path.shape[1] + 1]
        if self._draft is not None and not self._draft.is_chain:
            inside = path >= 0
            source = torch.where(inside, self.n[:, None] + path, self.capacity)
            target = torch.where(inside, self.n[:, None] + steps[:, :-1], self.capacity)
            self.cache.move(source, target)
            self.writes += 1
        kept = torch.tensor(keep, device="cpu").to(self.n.device, non_blocking=True)
        at = torch.where(steps < kept[:, None], self.n[:, None] + steps, self.capacity)
        self.tokens.scatter_(1, at, accepted)
        self.follow(self.n + kept, [length + k for length, k in zip(self.lengths, keep, strict=True)])

    def to_host(self, x: Tensor) -> list:
        """What a rule on the data found, as a list: one device-to-host copy, counted in the generation's settings."""
        return self.cache.to_host(x)

    # -- rows -------------------------------------------------------------------------------------------

    def chain(self, first: int, count: int) -> Rows:
        """Rows first .. first+count-1 of a chain, row 0 being the pending token (-1 the one before it)."""
        steps = torch.arange(first - 1, first - 1 + count, device=self.n.device)
        return self._causal(self.n[:, None] + steps, max(self.lengths) + first + count - 1, None)

    def again(self, count: int) -> Rows:
        """The last `count` tokens before the pending one once more, in scratch slots from the pending one on.

        Row i of a text of n tokens is the token at position n-1-count+i, in slot n-1+i. It sees the committed slots
        below the first of these rows, and the rows before it in their scratch slots. Where a text is shorter, the first
        rows are padding. Needs count-1 slots above the pending one; committed slots and taps are left as they are.
        """
        pending = self.n[:, None] - 1
        slots = pending + self._slots[:, :count]
        positions = slots - count
        real = positions >= 0
        shown = self._slots[:, : self._width(max(self.lengths) - 1 + count)]
        scratch = shown >= pending
        at = torch.where(scratch, shown - count, shown)
        known = (at >= 0) & (scratch | (shown < pending - count))
        visible = known[:, None] & (at[:, None] <= positions[:, :, None])
        visible = visible | (~real[:, :, None] & (shown == 0)[:, None])
        slots, positions = torch.where(real, slots, self.capacity), torch.where(real, positions, 0)
        return Rows(slots, positions, self.backbone.mask(visible, positions, at))

    def tree(self, draft: Draft) -> Rows:
        """All rows of a draft: the pending token and every node, each seeing its own ancestors only."""
        if draft.is_chain:
            return self.chain(0, 1 + draft.nodes)
        rows, pending = 1 + draft.nodes, self.n[:, None] - 1
        level = torch.nn.functional.pad(draft.levels() + 1, (1, 0))
        slots, positions = pending + self._slots[:, :rows], self._clamp(pending + level)
        shown = self._slots[:, : self._width(max(self.lengths) + draft.nodes)]
        row = shown - pending
        inside, row = (row >= 0) & (row < rows), row.clamp(0, rows - 1)
        above = draft.ancestry().gather(2, row[:, None].expand(-1, rows, -1)) & inside[:, None]
        visible = (shown < pending)[:, None] | above
        slot_positions = torch.where(inside, pending + level.gather(1, row), shown)
        return Rows(slots, positions, self.backbone.mask(visible, positions, slot_positions))

    def _causal(self, at: Int[Tensor, "batch rows"], reach: int, past: int | None) -> Rows:
        """Rows in slots `at`; those below 0, or in a prefill behind the pending token, are padding."""
        real = at >= 0 if past is None else at < self.n[:, None] + past
        slots, positions = torch.where(real, at, self.capacity), torch.where(real, self._clamp(at), 0)
        shown = self._slots[:, : self._width(reach)]
        visible = shown[:, None] <= torch.where(real, at, 0)[:, :, None]
        return Rows(slots, positions, self.backbone.mask(visible, positions, shown))

    def _width(self, reach: int) -> int:
        return min(bucket(reach), self.capacity)

    def _clamp(self, positions: Tensor) -> Tensor:
        return positions.clamp(0, self.backbone.limit - 1)

    # -- runs -------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def run(self, x: Tensor, start: int, stop: int, rows: Rows, through: Backbone | None = None) -> Tensor:
        """Run rows through layers [start, stop), keeping the states that a tap asks for; the residual stream.

        x: token ids `(batch, rows)` if start is 0, else hidden states. `through`: another backbone over the
        same weights (substituted layers).
        """
        self.writes += 1
        backbone = through or self.backbone
        for depth in [d for d in self.cache.taps if start < d < stop] + [stop]:
            x = backbone.run(x, start, depth, self.cache, rows.slots, rows.positions, rows.mask)
            if depth in self.cache.taps:
                self.cache.write_tap(depth, x, rows.slots)
            start = depth
        return x

    @torch.inference_mode()
    def norm(self, hidden: Tensor, rows: Rows) -> Tensor:
        """What the head reads, from the last layer's states; kept if a tap asks for it."""
        normed = self.backbone.norm(hidden)
        if HEAD_INPUT in self.cache.taps:
            self.cache.write_tap(HEAD_INPUT, normed, rows.slots)
        return normed

    def partial(self, hidden: Float[Tensor, "batch rows width"], depth: int) -> Partial:
        """What a drafter hands over: states of the first rows at `depth`, stamped with this moment."""
        return Partial(hidden, depth, self.writes)

    @torch.inference_mode()
    def verify(self, draft: Draft) -> Float[Tensor, "batch rows vocab"]:
        """The target's logits after the pending token (row 0) and after every node, resuming from `partial`."""
        partial, depth = draft.partial, self.backbone.depth
        ids = torch.cat([self.pending(), draft.tokens], 1)
        rows = self.tree(draft)
        hidden = partial.hidden
        if hidden is None:
            hidden = self.run(ids, 0, depth, rows)
        else:
            self._check_partial(partial, ids.shape[1])
            if partial.rows < ids.shape[1]:
                fresh = self.run(ids[:, partial.rows :], 0, partial.depth, rows.after(partial.rows))
                hidden = torch.cat([hidden, fresh], 1)
            hidden = self.run(hidden, partial.depth, depth, rows)
        self._draft, self._verified = draft, rows.slots
        return self.backbone.logits(self.norm(hidden, rows)).to(self.n.device)

    def left(self) -> Int[Tensor, "batch rows"] | None:
        """The depth each verified row was read at, on a target that exits early; None on any other."""
        if self.cache.left is None:
            return None
        left = self.cache.left.gather(1, self._verified)
        return torch.where(left == 0, self.backbone.depth, left)

    def _check_partial(self, partial: Partial, rows: int) -> None:
        if partial.stamp != self.writes:
            raise LabkitError(
                f"a Partial of write {partial.stamp} is stale: {self.writes - partial.stamp} later run(s) went through "
                "its slots; in a combinator the drafter that hands over work must propose last, or hand over nothing"
            )
        if not (0 < partial.depth <= self.backbone.depth and partial.rows <= rows):
            raise LabkitError(
                f"a Partial of {partial.rows} rows at depth {partial.depth} does not fit a draft of {rows} rows on a "
                f"target of {self.backbone.depth} layers"
            )
