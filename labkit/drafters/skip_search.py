"""Looking for sub-layers that a draft can do without, before decoding."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from random import Random
from typing import Any

import torch

from labkit.drafters.skip import SkipLayers
from labkit.drafters.sublayers import SubLayers, agreement, check_share, evenly, neighbour
from labkit.errors import LabkitError, check_callable, check_count, check_lab, check_seed
from labkit.session import Session


@dataclass(frozen=True)
class FoundSkips:
    """What `search_skips` found.

    attention, mlp: layers, from 0, whose attention or MLP is skipped. score: the share of the target's own tokens that
    the rest of it would have said, each after the true text. history: the best score so far, the start's first.
    """

    attention: tuple[int, ...]
    mlp: tuple[int, ...]
    score: float
    history: tuple[float, ...]

    def drafter(self, max_draft: int = 4, **settings: Any) -> SkipLayers:
        """The strategy that skips them."""
        return SkipLayers(self.attention, self.mlp, max_draft, **settings)


@torch.inference_mode()
def search_skips(
    lab: Any,
    prompts: Any,
    *,
    ratio: float = 0.45,
    steps: int = 100,
    seed: int = 0,
    max_new_tokens: int = 50,
    progress: Callable[[Iterable[int]], Iterable[int]] = iter,
) -> FoundSkips:
    """The best set of skipped sub-layers that a seeded local search finds on texts that the target writes.

    prompts: what `lab.generate` takes. ratio: the share of sub-layers to skip, of those between the first and the last
    layer, which are kept. Each step exchanges one to three of them and scores the set by one parallel forward over the
    `max_new_tokens` new tokens of each prompt; it stays unless it is worse. progress: wraps the steps, such as tqdm.
    The same seed finds the same. Sources: Draft & Verify 2309.08168; SWIFT 2410.06916.
    """
    check_count(steps, "steps", "search_skips")
    check_share(ratio, "ratio")
    check_seed(seed, "search_skips")
    check_callable(progress, "progress", "steps", "write a wrapper of an iterable such as tqdm, or leave it out")
    check_lab(lab, "search_skips(lab, prompts)")
    target, random = lab.backbone, Random(seed)
    best = evenly(target.depth, ratio)
    best.check(target.depth)
    out = lab.generate(prompts, max_new_tokens=max_new_tokens)
    sessions = []
    for prompt, new in zip(out.prompts, out.tokens, strict=True):
        session = Session(target, 1, len(prompt) + 2 * len(new))
        session.prefill([[*prompt, *new]])
        sessions.append((session, len(new)))

    def score(skipped: SubLayers) -> float:
        drafting = skipped.of(target)
        found = [agreement(session, drafting, count).to(target.device) for session, count in sessions]
        hits, rows = torch.stack(found).sum(0).tolist()
        return hits / max(1, rows)

    top = score(best)
    history = [top]
    wrapped: Any = progress(range(steps))
    if not isinstance(wrapped, Iterable):
        raise LabkitError(f"progress returned {wrapped!r}; needed are the steps it was given, as tqdm returns them")
    for _ in wrapped:
        other = neighbour(best, target.depth, random)
        value = score(other)
        if value >= top:
            best, top = other, value
        history.append(top)
    return FoundSkips(tuple(best.attention), tuple(best.mlp), top, tuple(history))
