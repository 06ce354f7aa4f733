"""What would have happened: the rounds that a drafter's guesses on a given text make, without decoding again."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor

from labkit.errors import LabkitError
from labkit.guesses import Guesses, guess, read_texts
from labkit.heads.trees import check_pair
from labkit.saved import pandas

NGRAM = 3
THRESHOLDS = (None, 0.4, 0.6, 0.8)

Costs = Mapping | Callable[[Any, int], tuple[float, float]]
"""(c, v) of a draft, in plain steps: one drafted token, and the verification of all. A function of exit (or name) and
draft length, such as labkit.costs.measure_costs makes; or a mapping from (exit, max_draft), or from exit alone."""


@dataclass(frozen=True)
class Replayed:
    """The rounds of replayed texts: `accepted` and `drafted` tokens of each.

    ended: how many of them ended the text inside the draft: all that was kept was accepted, and no own token followed.
    """

    accepted: list[int]
    drafted: list[int]
    ended: int = 0

    @property
    def tokens_per_round(self) -> float:
        """The target's own token included; plain decoding = 1."""
        return 1 + (sum(self.accepted) - self.ended) / max(1, len(self.accepted))

    @property
    def alpha(self) -> float:
        """The conditional probability that a drafted token is accepted."""
        accepted = sum(self.accepted)
        rejected = sum(a < d for a, d in zip(self.accepted, self.drafted, strict=True)) - self.ended
        return accepted / max(1, accepted + rejected)


def replay_rounds(agree: Bool[Tensor, "rows places guesses"], known: Bool[Tensor, "rows places"]) -> Replayed:
    """The rounds that begin at each row's first place and go on behind what each accepts.

    agree[r, t, j]: whether the guess made at place t for place t + j is the target's token there. known: the places
    that have a text at all (True, then False to the end of the row). A round accepts the guesses up to the first wrong
    one and ends with the target's own token. Source: theory.md's replay; exact on the target's own greedy text.
    """
    runs = agree.int().cumprod(-1).sum(-1).tolist()
    most = agree.shape[-1]
    walks = [_walk(run, [most] * length, length) for run, length in zip(runs, known.sum(-1).tolist(), strict=True)]
    return _together(walks)


def _walk(runs: Sequence[int], offered: Sequence[int], room: int) -> Replayed:
    """The rounds of one text of len(offered) places, with room for `room` tokens.

    runs: how many guesses from each place on are right; offered: how many are made there.
    """
    accepted, drafted, at, length, ended = [], [], 0, len(offered), 0
    while at < length:
        most = min(offered[at], room - at - 1)
        accepted.append(min(runs[at], most, length - at))
        drafted.append(most)
        ended = int(accepted[-1] == length - at)
        at += accepted[-1] + 1
    return Replayed(accepted, drafted, ended)


def _together(walks: Iterable[Replayed]) -> Replayed:
    accepted, drafted, ended = [], [], 0
    for one in walks:
        accepted += one.accepted
        drafted += one.drafted
        ended += one.ended
    return Replayed(accepted, drafted, ended)


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


@dataclass(frozen=True, eq=False)
class Replay:
    """What drafts from every exit layer, n-grams and heads would have been accepted in texts that are known.

    guesses: of each text by source, an exit layer or a name. rooms: the new tokens that each text had room for. Rows
    are replayed as if each ran alone. Accepted lengths are exact for greedy decoding, with any threshold; how many
    tokens were drafted under a threshold is known up to the first rejected one only, so those figures are estimates.
    """

    guesses: list[dict[Any, Guesses]]
    rooms: list[int]
    max_draft: int

    @property
    def sources(self) -> list[Any]:
        """Exit layers and names that can be asked for."""
        return list(self.guesses[0])

    def __repr__(self) -> str:
        return f"Replay({len(self.guesses)} texts, sources {self.sources}, max_draft={self.max_draft})"

    def rounds(self, source: int | str, max_draft: int, threshold: float | None = None) -> Replayed:
        """The rounds of EarlyExit(source, max_draft, stop=below(threshold)), PromptLookup or a chain of heads.

        source: an exit layer, "ngram", or heads' name; of several texts one after the other.
        """
        if source not in self.sources:
            raise LabkitError(f"got source {source!r}, which was not replayed; write one of {self.sources}")
        if isinstance(max_draft, bool) or not isinstance(max_draft, int) or not 1 <= max_draft <= self.max_draft:
            raise LabkitError(
                f"got max_draft={max_draft!r}; this replay has 1 to {self.max_draft}, write replay(…, max_draft=…)"
            )
        if threshold is not None and not (isinstance(threshold, int | float) and 0 <= threshold <= 1):
            raise LabkitError(f"got threshold={threshold!r}; write a probability from 0 to 1, or None")
        texts = zip(self.guesses, self.rooms, strict=True)
        return _together(
            _walk(one[source].runs, one[source].lengths(max_draft, threshold), room) for one, room in texts
        )

    def tokens_per_round(self, source: int | str, max_draft: int, threshold: float | None = None) -> float:
        """The target's own token included; plain decoding = 1."""
        return self.rounds(source, max_draft, threshold).tokens_per_round

    def lines(
        self, costs: Costs, thresholds: Sequence[float | None] = THRESHOLDS, max_drafts: Sequence[int] | None = None
    ) -> list[dict[str, Any]]:
        """`surface` as plain values."""
        found = []
        for source in self.sources:
            for most in max_drafts or range(1, self.max_draft + 1):
                for threshold in thresholds:
                    if threshold is not None and not isinstance(source, int):
                        continue
                    run, (c, v) = self.rounds(source, most, threshold), _cost(costs, source, most, most)
                    found.append({
                        "exit_layer": source if isinstance(source, int) else None, "max_draft": most,
                        "threshold": threshold, "tokens_per_round": run.tokens_per_round, "alpha": run.alpha,
                        "predicted_speedup": _speedup(run, costs, source, most), "source": str(source),
                        "estimate": threshold is not None, "c": c, "v": v,
                    })  # fmt: skip
        return found

    def surface(self, costs: Costs, **grid: Any) -> Any:
        """A table of the predicted speed-up over plain decoding at every source, max_draft and threshold.

        costs: see Costs; c and v are those of a whole draft. grid: thresholds, max_drafts, to choose from. The speed-up
        is tokens / (drafted tokens x c + verifications x v), in plain steps; a round without a draft is one plain step.
        See theory.md.
        """
        kinds = {"exit_layer": "Int64", "threshold": "float64"}
        return pandas().DataFrame(self.lines(costs, **grid)).astype(kinds)

    def best(self, costs: Costs, **grid: Any) -> dict[str, Any]:
        """The line of the surface with the highest predicted speed-up."""
        return max(self.lines(costs, **grid), key=lambda line: line["predicted_speedup"])


def _speedup(run: Replayed, costs: Costs, source: Any, most: int) -> float:
    total = 0.0
    for length in set(run.drafted):
        c, v = _cost(costs, source, length, most) if length else (0.0, 1.0)
        total += run.drafted.count(length) * (length * c + v)
    return run.tokens_per_round * len(run.drafted) / total


def _cost(costs: Costs, source: Any, length: int, most: int) -> tuple[float, float]:
    if callable(costs):
        return costs(source, length)
    for key in ((source, length), (source, most), source):
        if key in costs:
            return costs[key]
    raise LabkitError(f"the costs say nothing of {(source, most)!r}; give costs[{source!r}] = (c, v), or a function")


def replay(
    lab: Any,
    text_or_result_or_list: Any,
    *,
    exits: Sequence[int] | None = None,
    heads: Any = None,
    ngram: int | bool = True,
    max_draft: int = 16,
) -> Replay:
    """What would have been accepted at every exit layer, draft length and stop threshold, from one forward pass.

    text_or_result_or_list: a greedy Generation, a text (which is then taken for the target's own behind its first
    token), token ids, or a list of these. exits: layers (default: all but the last). heads: a module of labkit.heads,
    or a mapping from names to such; one has the name "heads". ngram: replay PromptLookup too, with n-grams of that
    length (True = 3). max_draft: the longest draft that can be asked for. See Replay.
    """
    layers = range(1, lab.backbone.depth) if exits is None else exits
    for layer in layers:
        lab.backbone.check_exit(layer, "exits")
    for name, value in (("max_draft", max_draft), ("ngram", NGRAM if ngram is True else ngram or 1)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise LabkitError(f"got {name}={value!r}; write an int of at least 1")
    named = {} if heads is None else heads if isinstance(heads, Mapping) else {"heads": heads}
    for module in named.values():
        check_pair(module, lab.backbone)
    length = NGRAM if ngram is True else int(ngram)
    if not (len(layers) or named or length):
        raise LabkitError("got nothing to replay; give exits, heads or ngram=True")
    texts = read_texts(lab, text_or_result_or_list)
    guesses = [guess(lab, text, list(layers), named, length, max_draft) for text in texts]
    return Replay(guesses, [text.room for text in texts], max_draft)
