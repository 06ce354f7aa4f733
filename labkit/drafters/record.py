"""What a strategy did in a run and what it costs there, and how fast it may be expected to be."""

from dataclasses import dataclass

DISCOUNT, PRIOR, HOPE = 0.97, 0.5, 0.9
"""Of old counts in each round; weight and acceptance of what is assumed of a strategy."""


@dataclass
class Record:
    """What one candidate did and costs; counts are discounted, seconds are of one level and of a whole verification."""

    levels: int
    known: bool
    draft: float | None
    verify: float
    accepted: float = 0.0
    judged: float = 0.0
    spoke: float = 0.0
    asked: float = 0.0

    def fade(self) -> None:
        """One more round: what was counted so far counts less."""
        self.accepted *= DISCOUNT
        self.judged *= DISCOUNT
        self.spoke *= DISCOUNT
        self.asked *= DISCOUNT

    def count(self, drafted: int, committed: int) -> None:
        """A row's draft of so many levels, after which so many tokens were committed."""
        self.asked += 1
        self.spoke += drafted > 0
        self.accepted += min(drafted, committed - 1)
        self.judged += min(drafted, committed)

    @property
    def alpha(self) -> float:
        """Conditional acceptance; with nothing known, what is hoped."""
        return (PRIOR * HOPE + self.accepted) / (PRIOR + self.judged)

    def rate(self, levels: int, step: float) -> float:
        """Expected tokens per plain step of time. Verification costs between a plain step and a whole draft's."""
        share = (PRIOR + self.spoke) / (PRIOR + self.asked)
        more = sum(self.alpha**level for level in range(1, levels + 1))
        verify = step + (self.verify - step) * levels / self.levels
        return (1 + share * more) / ((levels * (self.draft or 0) + share * verify + (1 - share) * step) / step)
