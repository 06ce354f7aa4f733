"""Token trees from heads: the pruned product tree, the fixed tree, and choosing a tree by measured accuracy."""

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from labkit.draft import Draft
from labkit.errors import LabkitError, check_lab
from labkit.session import HEAD_INPUT, Session


class ProductTree:
    """Every head's best `top_k[i]` tokens after every earlier choice, pruned to the most confident whole paths.

    The leaves lie in two buffers made once, `(batch, leaves, heads)`; each level writes its column.
    """

    def __init__(self, heads: Any, top_k: Sequence[int], candidates: int, like: Int[Tensor, "batch *rest"]):
        self.heads, self.top_k, self.most = heads, tuple(top_k), candidates
        self.tokens = like.new_zeros((like.shape[0], math.prod(self.top_k), len(self.top_k)))
        self.log_q = torch.zeros_like(self.tokens, dtype=torch.float32)

    def candidates(
        self, state: Float[Tensor, "batch 1 width"], token: Int[Tensor, "batch 1"], count: int
    ) -> tuple[Int[Tensor, "batch candidates"], Int[Tensor, "batch candidates heads"]]:
        """The best leaves and their tokens by the first `count` heads, most confident first; ties in rank order."""
        top_k = self.top_k[:count]
        leaves = math.prod(top_k)
        beams, last, score = 1, token[:, :, None], 0.0
        current = self.heads.start(state)
        for head, k in enumerate(top_k):
            current = self.heads.step(head, current, last)
            best = self.heads.logits(head, current).float().log_softmax(-1).topk(k)
            shape = (token.shape[0], beams, k)
            last, values = best.indices.to(token.device).expand(shape), best.values.to(token.device).expand(shape)
            beams *= k
            fork = (beams // k, k, leaves // beams)
            self.tokens[:, :leaves, head].unflatten(1, fork).copy_(last[..., None])
            self.log_q[:, :leaves, head].unflatten(1, fork).copy_(values[..., None])
            score = (values if head == 0 else score[:, :, None] + values).flatten(1)  # type: ignore
        assert isinstance(score, Tensor)
        order = score.sort(dim=-1, descending=True, stable=True).indices[:, : min(self.most, leaves)]
        return order, self.tokens[:, :leaves, :count].gather(1, order[:, :, None].expand(-1, -1, count))

    def draft(self, state: Float[Tensor, "batch 1 width"], token: Int[Tensor, "batch 1"], count: int) -> Draft:
        """The candidates as a tree, shared prefixes merged in each row; nodes level by level."""
        order, tokens = self.candidates(state, token, count)
        leaves = math.prod(self.top_k[:count])
        log_q = self.log_q[:, :leaves, :count].gather(1, order[:, :, None].expand(-1, -1, count))
        if order.shape[1] == 1:
            return Draft.chain(tokens[:, 0], q=log_q[:, 0].exp())
        batch, sizes = token.shape[0], tree_sizes(self.top_k[:count], self.most)
        nodes = token.new_zeros((batch, sum(sizes)))
        parents, valid = torch.full_like(nodes, -1), torch.zeros_like(nodes, dtype=torch.bool)
        q = torch.zeros_like(nodes, dtype=torch.float32)
        above, offset = torch.full_like(order, -1), 0
        column = torch.arange(order.shape[1], device=order.device)
        for level, size in enumerate(sizes):
            prefix = order // math.prod(self.top_k[level + 1 : count])
            first = (prefix[:, :, None] == prefix[:, None]).long().argmax(-1)  # argmax takes the first
            slot = offset + ((first == column).cumsum(-1) - 1).gather(1, first)
            nodes.scatter_(1, slot, tokens[:, :, level])
            parents.scatter_(1, slot, above)
            q.scatter_(1, slot, log_q[:, :, level].exp())
            valid.scatter_(1, slot, torch.ones_like(valid[:, : slot.shape[1]]))
            above, offset = slot, offset + size
        return Draft(nodes, parents, valid, torch.zeros_like(valid), depth=count, is_chain=False, q=q)


def tree_sizes(top_k: Sequence[int], candidates: int) -> list[int]:
    """The most nodes that `candidates` paths of a product tree have at each level."""
    return [min(candidates, math.prod(top_k[: level + 1])) for level in range(len(top_k))]


@dataclass(frozen=True)
class _Level:
    """Nodes of one level: `beams` of the level above that have children; each node's beam, rank and parent node."""

    beams: Tensor
    beam: Tensor
    rank: Tensor
    parents: Tensor
    ranks: int


class FixedTree:
    """A tree given as choices, the rank taken at each depth, the same in every row: `(0,), (0, 0), (1,)`."""

    def __init__(self, heads: Any, choices: Sequence[tuple[int, ...]], device: torch.device):
        self.heads, self.levels = heads, []
        choices = sorted(choices, key=lambda choice: (len(choice), choice))
        place = {(): -1, **{choice: index for index, choice in enumerate(choices)}}
        above: list[tuple[int, ...]] = [()]
        for depth in range(1, 1 + max(map(len, choices))):
            here = [choice for choice in choices if len(choice) == depth]
            beams = [choice for choice in above if any(child[:-1] == choice for child in here)]
            made = [
                [above.index(choice) for choice in beams],
                [beams.index(choice[:-1]) for choice in here],
                [choice[-1] for choice in here],
                [place[choice[:-1]] for choice in here],
            ]
            tensors = [torch.tensor(x, device="cpu").to(device) for x in made]
            self.levels.append(_Level(*tensors, ranks=1 + max(made[2])))
            above = here

    def draft(self, state: Float[Tensor, "batch 1 width"], token: Int[Tensor, "batch 1"], count: int) -> Draft:
        """The tree's first `count` levels, filled in."""
        found, device = [], token.device
        current, beam, last = self.heads.start(state), None, token
        for head, level in enumerate(self.levels[:count]):
            if current.shape[1] > 1 and beam is not None:  # a state for each beam, not one for all
                current = current[:, beam[level.beams]]
            current = self.heads.step(head, current, last[:, level.beams, None])
            best = self.heads.logits(head, current).float().log_softmax(-1).topk(level.ranks)
            shape = (token.shape[0], level.beams.shape[0], level.ranks)
            last = best.indices.to(device).expand(shape)[:, level.beam, level.rank]
            found.append((last, best.values.to(device).expand(shape)[:, level.beam, level.rank], level.parents))
            beam = level.beam
        tokens, log_q, parents = (torch.cat(part, -1) for part in zip(*found, strict=True))
        valid = torch.ones_like(tokens, dtype=torch.bool)
        return Draft(
            tokens, parents.expand_as(tokens), valid, torch.zeros_like(valid),
            depth=min(count, len(self.levels)), is_chain=False, q=log_q.exp(),
        )  # fmt: skip

    def nodes(self, count: int) -> int:
        """Nodes in the first `count` levels."""
        return sum(level.beam.shape[0] for level in self.levels[:count])


def check_pair(heads: Any, backbone: Any) -> None:
    """Raise LabkitError unless heads and target have one width and one vocabulary."""
    width, vocab = backbone.head_width, backbone.vocab
    if heads.width != width:
        raise LabkitError(f"the heads read states of width {heads.width}, and the target's head reads {width}")
    if heads.vocab != vocab:
        raise LabkitError(f"the heads have a vocabulary of {heads.vocab} tokens, and the target's has {vocab}")


def check_choices(choices: Sequence[Any], heads: int, limits: Sequence[int]) -> None:
    """Raise LabkitError unless the choices are a tree of at most `heads` levels with ranks below `limits`."""
    given = [tuple(choice) if isinstance(choice, Sequence) else () for choice in choices]
    if not given or any(not choice for choice in given):
        raise LabkitError(f"got tree={given!r}; write choices such as [(0,), (0, 0), (1,)]")
    twice = sorted({choice for choice in given if given.count(choice) > 1})
    if twice:
        raise LabkitError(f"the tree has {twice[0]} more than once; siblings must differ")
    deepest = max(given, key=len)
    if len(deepest) > heads:
        raise LabkitError(f"the tree's choice {deepest} is {len(deepest)} levels deep, and there are {heads} heads")
    for choice in given:
        for level, rank in enumerate(choice):
            if isinstance(rank, bool) or not isinstance(rank, int) or not 0 <= rank < limits[level]:
                raise LabkitError(
                    f"the choice {choice} takes rank {rank!r} at level {level}; needed is 0 .. {limits[level] - 1}"
                )
        if len(choice) > 1 and choice[:-1] not in given:
            raise LabkitError(f"the tree has {choice} without its parent {choice[:-1]}; add that")


def best_tree(accuracies: Any, nodes: Any) -> list[tuple[int, ...]]:
    """The choices of the tree of `nodes` nodes with the most accepted tokens to expect.

    accuracies[i][r]: how often head i's token of rank r is the right one (see `head_accuracies`). Greedy: the next
    node is the one that is reached and right most often, and it is exact, as no node beats its parent. Source: Medusa.
    """
    try:
        rows = [list(map(float, row)) for row in accuracies]
    except (TypeError, ValueError) as error:
        raise LabkitError(f"got accuracies={accuracies!r}; write a row of shares for each head") from error
    if isinstance(nodes, bool) or not isinstance(nodes, int) or nodes < 1 or not rows or not all(rows):
        raise LabkitError(f"got nodes={nodes!r} for {len(rows)} heads; needed are at least one of each")
    if any(not 0 <= rate <= 1 for row in rows for rate in row):
        raise LabkitError("accuracies are shares from 0 to 1, a row for each head and a column for each rank")
    most = sum(math.prod(len(row) for row in rows[: depth + 1]) for depth in range(len(rows)))
    if nodes > most:
        raise LabkitError(f"got nodes={nodes}, and a tree of these heads and ranks has {most} at most")
    ranked = [sorted(range(len(row)), key=lambda rank, row=row: (-row[rank], rank)) for row in rows]
    heap: list[tuple[float, tuple[int, ...]]] = [(-rows[0][ranked[0][0]], (0,))]
    chosen: list[tuple[int, ...]] = []

    def offer(value: float, at: tuple[int, ...]) -> None:
        heapq.heappush(heap, (-value * rows[len(at) - 1][ranked[len(at) - 1][at[-1]]], at))

    values: dict[tuple[int, ...], float] = {(): 1.0}
    while len(chosen) < nodes:
        negative, at = heapq.heappop(heap)
        chosen.append(at)
        values[at] = -negative
        if len(at) < len(rows):
            offer(-negative, (*at, 0))
        if at[-1] + 1 < len(rows[len(at) - 1]):
            offer(values[at[:-1]], (*at[:-1], at[-1] + 1))
    named = [tuple(ranked[level][place] for level, place in enumerate(at)) for at in chosen]
    return sorted(named, key=lambda choice: (len(choice), choice))


@torch.inference_mode()
def head_accuracies(lab: Any, heads: Any, texts: Any, ranks: Any = 10) -> list[list[float]]:
    """How often head i's token of rank r is the text's own: `[head][rank]`, each text in one teacher-forced pass.

    texts: strings or rows of token ids; the target's own generations tell what a run will accept.
    """
    verbs = ("count", "start", "step", "logits")
    check_lab(lab, "head_accuracies(lab, heads, texts)")
    if not all(hasattr(heads, verb) for verb in verbs):
        got = type(heads).__name__
        raise LabkitError(f"got a {got}, needed are heads; write head_accuracies(lab, heads, texts)")
    backbone = lab.backbone
    if isinstance(texts, str) or not isinstance(texts, Sequence):
        raise LabkitError("got one text; give a list of them")
    if isinstance(ranks, bool) or not isinstance(ranks, int) or not 1 <= ranks <= backbone.vocab:
        raise LabkitError(f"got ranks={ranks!r}; needed is a number from 1 to {backbone.vocab}")
    check_pair(heads, backbone)
    hits = torch.zeros((heads.count, ranks), device="cpu")
    places = 0
    for text in texts:
        if isinstance(text, str) and lab.tokenizer is None:
            raise LabkitError("a text needs a tokenizer; give rows of token ids, or labkit.Lab(model, tokenizer)")
        ids = list(lab.tokenizer(text)["input_ids"]) if isinstance(text, str) else list(text)
        if ids and not 0 <= min(ids) <= max(ids) < backbone.vocab:
            raise LabkitError(f"a text has ids {min(ids)} .. {max(ids)}; the vocabulary has {backbone.vocab} tokens")
        rows = len(ids) - 1 - heads.count
        if rows < 1:
            continue
        session = Session(lab.backbone, 1, len(ids), (HEAD_INPUT,))
        session.prefill([ids])
        tap = session.cache.taps[HEAD_INPUT]
        assert tap is not None
        current, given = heads.start(tap[:, :rows]), session.tokens
        for head in range(heads.count):
            current = heads.step(head, current, given[:, 1 + head : 1 + head + rows, None])
            best = heads.logits(head, current).topk(ranks).indices.to(given.device)
            hits[head] += (best == given[:, 2 + head : 2 + head + rows, None]).sum((0, 1)).cpu()
        places += rows
    if places == 0:
        raise LabkitError(f"got no text longer than {heads.count + 1} tokens to measure {heads.count} heads on")
    return (hits / places).tolist()
