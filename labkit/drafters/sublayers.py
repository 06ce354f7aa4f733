"""Sets of skipped sub-layers: the model without them, how well it then agrees with a text, and a step of search."""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import torch
from torch import Tensor

from labkit import views
from labkit.backbone import Backbone
from labkit.errors import LabkitError
from labkit.session import Session


@dataclass(frozen=True)
class SubLayers:
    """Layers, counted from 0, whose attention and whose MLP are skipped."""

    attention: Sequence[int] = ()
    mlp: Sequence[int] = ()

    def __post_init__(self):
        for name in ("attention", "mlp"):
            given: Any = getattr(self, name)
            if isinstance(given, str) or not isinstance(given, Sequence):
                raise LabkitError(f"got {name}={given!r}; write the layers to skip it in, from 0, such as (1, 2)")
            wrong = [i for i in given if isinstance(i, bool) or not isinstance(i, int) or i < 0]
            if wrong:
                raise LabkitError(f"got {name}={tuple(given)} with {wrong[0]!r}; layers are ints, counted from 0")
            twice = [i for i in given if list(given).count(i) > 1]
            if twice:
                raise LabkitError(f"got {name}={tuple(given)} with {twice[0]} twice; name each layer once")
            object.__setattr__(self, name, tuple(sorted(given)))

    def check(self, depth: int) -> None:
        """Raise LabkitError unless these are some, but not all, of the sub-layers of `depth` layers."""
        for name in ("attention", "mlp"):
            beyond = [i for i in getattr(self, name) if i >= depth]
            if beyond:
                raise LabkitError(f"got {name}={getattr(self, name)}; the target has layers 0 to {depth - 1}")
        if len(self.attention) == len(self.mlp) == depth:
            raise LabkitError(f"all sub-layers of the {depth} layers are skipped; leave at least one to draft with")

    def of(self, target: Backbone) -> Backbone:
        """The target's own weights, in all its layers even where it exits early, without these sub-layers."""

        def substitute(index, layer):
            skipped = {"attention": index in self.attention, "mlp": index in self.mlp}
            return views.without(layer, **skipped) if any(skipped.values()) else layer

        return target.for_prompts.substituted(substitute)


@torch.inference_mode()
def agreement(session: Session, drafting: Backbone, count: int) -> Tensor:
    """How many of the last `count` committed tokens `drafting` would have said, and how many of them there are: (2,).

    One parallel forward in scratch slots; each token is guessed from the committed text before it. Source: SWIFT.
    """
    rows = session.again(count)
    real = rows.slots < session.capacity
    ids = session.tokens.gather(1, rows.positions)
    said = drafting.head(session.run(ids, 0, session.backbone.depth, rows, drafting)).argmax(-1).to(ids.device)
    hits = (said == session.tokens.gather(1, rows.positions + 1)) & real
    return torch.stack([hits.sum(), real.sum()])


def check_share(share: Any, name: str) -> None:
    """Raise LabkitError unless `share` is a number above 0 and up to 1."""
    if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share <= 1:
        raise LabkitError(f"got {name}={share!r}; write a share above 0 and up to 1, such as 0.45")


def evenly(depth: int, ratio: float) -> SubLayers:
    """Where a search begins: `ratio` of the sub-layers between the first and the last layer, spread evenly."""
    check_share(ratio, "ratio")
    inner = depth - 2
    if inner < 1:
        raise LabkitError(f"a search keeps the first and the last of the {depth} layers; name what to skip")
    total = max(1, round(ratio * 2 * inner))
    spread = lambda count: tuple(1 + (2 * i + 1) * inner // (2 * count) for i in range(count))  # noqa: E731
    return SubLayers(spread(total // 2), spread(total - total // 2))


def neighbour(skipped: SubLayers, depth: int, random: Random) -> SubLayers:
    """As many sub-layers, up to three of them others; the first and the last layer are never skipped."""
    inside = [(kind, i) for i in range(1, depth - 1) for kind in ("attention", "mlp")]
    now = [(kind, i) for kind, i in inside if i in getattr(skipped, kind)]
    free = [one for one in inside if one not in now]
    if not now or not free:
        return skipped
    moves = random.randint(1, min(3, len(now), len(free)))
    gone, come = random.sample(now, moves), random.sample(free, moves)
    kept = [one for one in now if one not in gone] + come
    outside = [(kind, i) for kind in ("attention", "mlp") for i in getattr(skipped, kind) if (kind, i) not in inside]
    layers = lambda kind: tuple(i for k, i in kept + outside if k == kind)  # noqa: E731
    return SubLayers(layers("attention"), layers("mlp"))
