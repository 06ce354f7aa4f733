"""What a generation gives back: the text, and what happened in every round."""

import html
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from labkit.decoding import PHASES, Round


@dataclass(frozen=True)
class Generation:
    """A finished generation.

    text: the new text; a string for one prompt, a list for a list, None without a tokenizer. tokens: the new ids
    of each row, EOS included. prompts: the ids each row started from. rounds: what happened, round by round.
    reasons: why each row ended ("length", "eos", "stop", "criteria"). settings: what the run used. lossless:
    whether the text is the target's own. seconds: wall time, prefill included.
    """

    text: str | list[str] | None
    tokens: list[list[int]]
    prompts: list[list[int]]
    rounds: list[Round]
    reasons: list[str | None]
    settings: Mapping[str, Any]
    lossless: bool
    seconds: float
    prefill_seconds: float

    @property
    def drafted(self) -> int:
        """Drafted tokens, over all rows."""
        return sum(len(row) for r in self.rounds for row in r.drafted)

    @property
    def accepted(self) -> int:
        """Accepted drafted tokens, over all rows."""
        return sum(sum(r.accepted) for r in self.rounds)

    @property
    def rejections(self) -> int:
        """Rounds in which the target turned a drafted token down, over all rows."""
        return sum(sum(r.rejected) for r in self.rounds)

    @property
    def row_rounds(self) -> int:
        """Rounds in which a row was still running, over all rows."""
        return sum(bool(row) for r in self.rounds for row in r.tokens)

    @property
    def new_tokens(self) -> int:
        """Committed tokens, over all rows."""
        return sum(len(row) for row in self.tokens)

    @property
    def tokens_per_round(self) -> float:
        """Tokens per round (tau), the target's own included; plain decoding has 1."""
        return self.new_tokens / max(1, self.row_rounds)

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted / drafted tokens; None if nothing was drafted."""
        return self.accepted / self.drafted if self.drafted else None

    @property
    def alpha(self) -> float | None:
        """Conditional acceptance: accepted / (accepted + rounds that rejected one); None if nothing was judged."""
        judged = self.accepted + self.rejections
        return self.accepted / judged if judged else None

    @property
    def tokens_per_second(self) -> float:
        """New tokens of all rows per second of wall time, prefill included."""
        return self.new_tokens / self.seconds

    @property
    def phase_seconds(self) -> dict[str, float]:
        """Seconds by phase, over all rounds."""
        shared = [next(filter(None, r.seconds)) for r in self.rounds]
        return {phase: sum(seconds[phase] for seconds in shared) for phase in PHASES}

    def summary(self) -> str:
        """The figures in one line."""
        rate = (
            "" if self.acceptance_rate is None else f", {self.acceptance_rate:.0%} of {self.drafted} drafted accepted"
        )
        return (
            f"{self.settings['drafter']}: {self.new_tokens} tokens in {len(self.rounds)} rounds, "
            f"{self.tokens_per_round:.2f} tokens per round{rate}, {self.tokens_per_second:.1f} tokens/s"
            f"{'' if self.lossless else ' (lossy: ' + ', '.join(self.settings['lossy']) + ')'}"
        )

    def __str__(self) -> str:
        texts = [self.text] if isinstance(self.text, str) else self.text or [str(row) for row in self.tokens]
        return "\n".join([*texts, f"[{self.summary()}]"])

    def __repr__(self) -> str:
        return f"Generation({self.summary()})"

    def _repr_html_(self) -> str:
        texts = [self.text] if isinstance(self.text, str) else self.text or [str(row) for row in self.tokens]
        shown = "".join(f'<div style="white-space:pre-wrap">{html.escape(text)}</div>' for text in texts)
        return f"{shown}<p><em>{html.escape(self.summary())}</em></p>"
