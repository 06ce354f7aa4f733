"""The drafter that proposes nothing: plain decoding, and the baseline of every speed-up."""

from dataclasses import dataclass

from labkit.draft import Draft
from labkit.protocol import Context, Drafter


@dataclass(frozen=True)
class Plain(Drafter):
    """Plain decoding in the same loop: an empty draft each round."""

    @property
    def nodes(self) -> int:
        """None."""
        return 0

    def propose(self, state, context: Context) -> Draft:
        """Nothing."""
        return Draft.empty(context.tokens)
