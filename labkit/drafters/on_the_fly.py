"""A set of skipped sub-layers that gets better while the text grows."""

import logging
from dataclasses import dataclass, field
from random import Random
from typing import Any

import torch

from labkit.backbone import Backbone
from labkit.drafters.sublayers import SubLayers, agreement, check_share, neighbour
from labkit.errors import check_count, check_seed
from labkit.session import Session

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class OnTheFly:
    """After every `every` rounds score one more candidate set of sub-layers to skip against the present one.

    Each is scored by one parallel forward over the last `count` committed tokens (the share of them that it would have
    said), and the better stays: two forwards and one counted copy to the host each time, until a set scores at least
    `enough`. ratio: as in `labkit.search_skips`. The same seed tries the same. What is found is logged ("labkit", at
    level INFO), and the set at the end is in the generation's settings. Source: SWIFT, 2410.06916.
    """

    every: int = 4
    ratio: float = 0.45
    count: int = 50
    enough: float = 0.95
    seed: int = 0

    def __post_init__(self):
        for name in ("every", "count"):
            check_count(getattr(self, name), name, "OnTheFly")
        for name in ("ratio", "enough"):
            check_share(getattr(self, name), name)
        check_seed(self.seed, "OnTheFly")


@dataclass
class Skipping:
    """What is skipped now, in one generation: `skipped`, and the target without it."""

    session: Session
    skipped: SubLayers
    search: OnTheFly | None
    drafting: Backbone = field(init=False)
    rounds: int = 0
    score: float | None = None
    """The share of the last tokens that it said, when it was last asked."""

    def __post_init__(self):
        self.drafting = self.skipped.of(self.session.backbone)
        self._random = Random(0 if self.search is None else self.search.seed)

    def look_around(self) -> None:
        """Where a search is due: score a neighbour of the set on the same text, and keep the better."""
        self.rounds += 1
        if self.search is None or self.rounds % self.search.every:
            return
        session, present = self.session, self.drafting
        other = neighbour(self.skipped, session.backbone.depth, self._random)
        candidate = other.of(session.backbone)
        scores = [agreement(session, drafting, self.search.count) for drafting in (present, candidate)]
        (old, rows), (new, _) = session.to_host(torch.stack(scores))
        if new > old:
            self.skipped, self.drafting = other, candidate
            logger.info("%s says %d of the last %d tokens; the set before it, %d", other, new, rows, old)
        if rows:
            self.score = score = max(new, old) / rows
            if score >= self.search.enough:
                self.search = None

    def found(self) -> dict[str, Any]:
        """The set of now, with its score."""
        return {"attention": list(self.skipped.attention), "mlp": list(self.skipped.mlp), "score": self.score}
