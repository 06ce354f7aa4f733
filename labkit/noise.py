"""Randomness as a pure function: of a row's seed, a place, a salt and a token id; never of what ran before.

The hash is splitmix64 (Steele, Lea & Flood 2014), applied after each of the four goes in (one pass over a sum of
them would give seed 3 at place 5 the noise of seed 4 at place 4), in int64 tensor operations on the seeds' device.
A row gets the same noise alone, in any batch, and whatever else is asked for.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from labkit.errors import LabkitError


def _signed(word: int) -> int:
    return word - (1 << 64) if word >= 1 << 63 else word


GOLDEN, MIX_1, MIX_2 = (_signed(c) for c in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


class Salt(IntEnum):
    """What a draw is for; draws with different salts are independent."""

    TARGET = 1
    DRAFT = 2
    ACCEPT = 3
    RESIDUAL = 4


def splitmix64(state: Int[Tensor, "*shape"]) -> Int[Tensor, "*shape"]:
    """The output of splitmix64 from each state; both are unsigned words in int64."""
    z = state + GOLDEN
    z.bitwise_xor_(_shift(z, 30)).mul_(MIX_1)
    z.bitwise_xor_(_shift(z, 27)).mul_(MIX_2)
    return z.bitwise_xor_(_shift(z, 31))


def _shift(z: Tensor, bits: int) -> Tensor:
    """Logical right shift: int64's own copies the sign down."""
    return (z >> bits).bitwise_and_((1 << (64 - bits)) - 1)


def _unit(word: Tensor) -> Tensor:
    """An odd multiple of 2^-53, so strictly inside (0, 1): the top 52 bits and a half (53 and a half would not fit)."""
    return _shift(word, 12).double().add_(0.5).mul_(2.0**-52)


@dataclass(frozen=True)
class Noise:
    """One seed for each row; `silent` is zero temperature: no noise at all."""

    seeds: Int[Tensor, "batch"]
    silent: bool

    @classmethod
    def of(cls, seed: Any, batch: int, *, silent: bool, device: torch.device) -> "Noise":
        """From one int (row b gets seed + b) or a sequence of one int a row; they count modulo 2^64. Checked here."""
        rows = [seed + row for row in range(batch)] if isinstance(seed, int) else seed
        if not isinstance(rows, Sequence) or len(rows) != batch or not all(isinstance(s, int) for s in rows):
            raise LabkitError(f"got seed={seed!r} for {batch} prompt(s); write one int, or a list of {batch} int(s)")
        words = [_signed(s % (1 << 64)) for s in rows]
        return cls(torch.tensor(words, dtype=torch.long, device=device), silent)

    def gumbel(self, at: Int[Tensor, "batch rows"], vocab: int, salt: int) -> Float[Tensor, "batch rows vocab"]:
        """Standard Gumbel noise for every token id, float32, finite: argmax(scores + noise) has law softmax(scores)."""
        tokens = torch.arange(vocab, device=at.device)
        u = _unit(splitmix64(splitmix64(self._place(at, salt))[:, :, None] + tokens))
        return u.log_().neg_().log_().neg_().float()

    def uniform(self, at: Int[Tensor, "batch rows"], salt: int) -> Float[Tensor, "batch rows"]:
        """Uniform numbers strictly inside (0, 1), float64."""
        return _unit(splitmix64(self._place(at, salt)))

    def _place(self, at: Tensor, salt: int) -> Tensor:
        return splitmix64(splitmix64(self.seeds)[:, None] + int(salt)) + at
