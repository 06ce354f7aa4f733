"""What would have happened: the rounds that a drafter's guesses on a given text make, without decoding again."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool
from torch import Tensor


@dataclass(frozen=True)
class Replayed:
    """The rounds of replayed texts: `accepted` and `drafted` tokens of each."""

    accepted: list[int]
    drafted: list[int]

    @property
    def tokens_per_round(self) -> float:
        """The target's own token included; plain decoding = 1."""
        return 1 + sum(self.accepted) / max(1, len(self.accepted))

    @property
    def alpha(self) -> float:
        """The conditional probability that a drafted token is accepted."""
        accepted = sum(self.accepted)
        rejected = sum(a < d for a, d in zip(self.accepted, self.drafted, strict=True))
        return accepted / max(1, accepted + rejected)


def replay_rounds(agree: Bool[Tensor, "rows places guesses"], known: Bool[Tensor, "rows places"]) -> Replayed:
    """The rounds that begin at each row's first place and go on behind what each accepts.

    agree[r, t, j]: whether the guess made at place t for place t + j is the target's token there. known: the places
    that have a text at all (True, then False to the end of the row). A round accepts the guesses up to the first wrong
    one and ends with the target's own token. Source: theory.md's replay; exact on the target's own greedy text.
    """
    runs = agree.int().cumprod(-1).sum(-1).tolist()
    accepted, drafted = [], []
    for run, length in zip(runs, known.sum(-1).tolist(), strict=True):
        at = 0
        while at < length:
            most = min(agree.shape[-1], length - at - 1)
            accepted.append(min(run[at], most))
            drafted.append(most)
            at += accepted[-1] + 1
    return Replayed(accepted, drafted)


def ahead(agree: Bool[Tensor, "rows places"], guesses: int) -> Bool[Tensor, "rows places guesses"]:
    """For a drafter whose guess for a place does not depend on where the round began: the same seen from each start."""
    rows, places = agree.shape
    padded = torch.cat([agree, agree.new_zeros(rows, guesses - 1)], 1)
    return padded.unfold(1, guesses, 1)[:, :places]


def side_by_side(
    agree: list[Tensor],
) -> tuple[Bool[Tensor, "rows places guesses"], Bool[Tensor, "rows places"]]:
    """Texts of unlike lengths, each `(places, guesses)`, as `replay_rounds` takes them."""
    most = max(len(one) for one in agree)
    together = torch.zeros((len(agree), most, agree[0].shape[-1]), dtype=torch.bool, device=agree[0].device)
    known = torch.zeros((len(agree), most), dtype=torch.bool, device=agree[0].device)
    for row, one in enumerate(agree):
        together[row, : len(one)] = one
        known[row, : len(one)] = True
    return together, known
