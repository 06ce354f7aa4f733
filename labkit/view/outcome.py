"""What an explorer shows for one setting of its controls, and how it is made step by step."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from labkit.decoding import PHASES, Round
from labkit.lab import Lab, _Run
from labkit.protocol import Drafter
from labkit.replay import Replayed, replay
from labkit.trace import Generation

WARM_TOKENS = 8


@dataclass(frozen=True)
class Outcome:
    """A measured run beside plain decoding of the same prompt.

    settings: of the controls. replayed: what one forward pass foretold, where it can.
    """

    settings: dict[str, Any]
    generation: Generation
    plain: Generation
    replayed: "Replayed | None" = None

    @property
    def speedup(self) -> float:
        """Over plain decoding, times; prefill included in both."""
        return self.generation.tokens_per_second / self.plain.tokens_per_second

    @property
    def same_text(self) -> bool:
        """Whether the tokens are those of plain decoding."""
        return self.generation.tokens == self.plain.tokens

    @property
    def name(self) -> str:
        """What was run."""
        return self.generation.settings["drafter"]

    def cells(self) -> list[str]:
        """A line for a table under HEADING."""
        out = self.generation
        share = "–" if out.acceptance_rate is None else f"{out.acceptance_rate:.2f}"
        alpha = "–" if out.alpha is None else f"{out.alpha:.2f}"
        return [self.name, f"{out.tokens_per_second:.1f}", f"{self.speedup:.2f}x", f"{out.tokens_per_round:.2f}",
                share, alpha, "yes" if self.same_text else "NO"]  # fmt: skip


HEADING = ["run", "tokens/s", "speed-up", "tokens/round", "acceptance rate", "α", "same text"]


def stepwise(
    lab: Lab, prompt: Any, drafter: Drafter | None, options: dict[str, Any],
    progress: Callable[[int], None] = lambda tokens: None,
) -> Generation:  # fmt: skip
    """`lab.generate`, telling after each round how many tokens there are."""
    run, rounds, tokens = _Run(lab, prompt, drafter, options), [], 0
    for happened in run.rounds():
        rounds.append(happened)
        tokens += len(happened.tokens[0])
        progress(tokens)
    return run.result(rounds)


def measured(lab: Lab, prompt: Any, drafter: Drafter | None, options: dict[str, Any],
             progress: Callable[[int], None]) -> Generation:  # fmt: skip
    """The same after a few tokens that do not count: the first round of a strategy builds its views."""
    few = {**options, "max_new_tokens": min(WARM_TOKENS, options["max_new_tokens"])}
    stepwise(lab, prompt, drafter, few)
    return stepwise(lab, prompt, drafter, options, progress)


class Foretold:
    """A replay of every exit layer along the greedy text of one prompt, for the table and the strip.

    plain: plain decoding of that prompt. Source: theory.md's replay.
    """

    def __init__(self, lab: Lab, plain: Generation):
        self.plain, self.text, self.depth = plain, plain.tokens[0], lab.backbone.depth
        self.replay = replay(lab, plain, ngram=False)

    def rounds(self, exit: int, max_draft: int) -> Replayed:
        """The rounds that drafting after `exit` layers makes."""
        return self.replay.rounds(exit, max_draft)

    def generation(self, exit: int, max_draft: int) -> Generation:
        """The same as a generation for the strip; what was drafted behind a rejected token is not known."""
        guesses, rounds, at = self.replay.guesses[0][exit], [], 0
        assert guesses.p is not None  # of an exit layer
        guess, q, p = guesses.tokens[:, 0].tolist(), guesses.q[:, 0].tolist(), guesses.p.tolist()
        happened = self.rounds(exit, max_draft)
        for accepted, drafted in zip(happened.accepted, happened.drafted, strict=True):
            ended = at + accepted >= len(self.text)  # inside the draft: the target adds no token of its own
            seen = accepted if ended else min(accepted + 1, drafted)
            block = self.text[at : at + accepted + 1]
            rounds.append(Round(
                tokens=[block], drafted=[guess[at : at + seen]], q=[q[at : at + seen]], p=[p[at : at + seen]],
                target=[[*block, 0]], accepted=[accepted], rejected=[seen > accepted],
                parents=[list(range(-1, seen - 1))], path=[list(range(accepted))], exit=[[exit] * seen], left=[[]],
                seconds=[dict.fromkeys(PHASES, 0.0)], own=[None if ended else 1.0],
            ))  # fmt: skip
            at += accepted + 1
        settings = {"drafter": f"replayed: exit {exit}, max_draft {max_draft}"}
        return Generation(None, [self.text], self.plain.prompts, rounds, self.plain.reasons, settings, True, 0.0, 0.0,
                          self.plain.spelling)  # fmt: skip

    def row(self, exit: int, max_draft: int) -> list[str]:
        """A line for a table under HEADING."""
        happened = self.rounds(exit, max_draft)
        rate = sum(happened.accepted) / max(1, sum(happened.drafted))
        return [f"replayed: exit {exit}, max_draft {max_draft}", "–", "–", f"{happened.tokens_per_round:.2f}",
                f"{rate:.2f}", f"{happened.alpha:.2f}", "–"]  # fmt: skip


class Pace:
    """Lets a report through ten times a second at most."""

    def __init__(self):
        self.last = 0.0

    def due(self) -> bool:
        """Whether to report now."""
        now = time.perf_counter()
        due = now - self.last > 0.1
        self.last = now if due else self.last
        return due
