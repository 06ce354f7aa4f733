"""Whether counts fit a law."""

import math

import torch


def chi_square(counts: torch.Tensor, expected: torch.Tensor) -> float:
    return ((counts.double() - expected) ** 2 / expected).sum().item()


def bound(freedom: int, x: float = 16.0) -> float:
    """A chi-square exceeds this with probability below exp(-x) = 1e-7 (Laurent & Massart 2000, lemma 1)."""
    return freedom + 2 * math.sqrt(freedom * x) + 2 * x
