"""Toy models and trees of drafts, the walk of rejection in plain Python with its exact law, and counts of what is drawn."""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence

import torch
from counts import bound, chi_square
from torch import Tensor

from labkit.draft import Draft
from labkit.noise import Noise
from labkit.protocol import Acceptance, Verdict

CPU = torch.device("cpu")
VOCAB, PROMPT = 5, 3


# -- toy models: the law of the next token depends on the last one ------------------------------------------


def table(seed: int, temperature: float = 1.0) -> Tensor:
    """Scores `(VOCAB, VOCAB)` of the next token after each token."""
    return torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(seed)) / temperature


def nucleus(scores: Tensor, keep: int) -> Tensor:
    """Only the best `keep` tokens, as top-k and top-p leave them."""
    return scores.masked_fill(scores < scores.topk(keep).values[:, -1:], -math.inf)


MODELS = {  # name: scores of the target and of the draft
    "different": (table(1), table(2)),
    "the same": (table(1), table(1)),
    "target cut": (nucleus(table(1), 2), table(2)),
    "both cut": (nucleus(table(1), 3), nucleus(table(2), 2)),
    "cold": (table(1, 1e-3), table(2, 1e-3)),
    "cold draft": (table(1), table(2, 1e-3)),
    "cold target": (table(1, 1e-3), table(2)),
    "hot": (table(1, 2.0), table(2, 2.0)),
}


# -- toy drafters: a tree is a list of (parent, how the node's token comes about) ---------------------------

Tree = Sequence[tuple[int, str]]
TREES: dict[str, Tree] = {
    "nothing": [],
    "chain of 1": [(-1, "drawn")],
    "chain of 2": [(-1, "drawn"), (0, "drawn")],
    "chain of 3": [(-1, "drawn"), (0, "drawn"), (1, "drawn")],
    "lookup chain": [(-1, "chosen"), (0, "chosen")],
    "drawn, then looked up": [(-1, "drawn"), (0, "chosen"), (1, "drawn")],
    "three distinct siblings": [(-1, "distinct")] * 3,
    "three siblings with duplicates": [(-1, "drawn")] * 3,
    "binary tree": [(-1, "distinct"), (-1, "distinct"), (0, "distinct"), (0, "distinct"), (1, "distinct")],
    "chosen before drawn": [(-1, "chosen"), (-1, "drawn"), (1, "drawn"), (0, "drawn")],
    "drawn before chosen": [(-1, "drawn"), (-1, "chosen"), (0, "chosen"), (0, "distinct")],
    "the favourite again and again": [(-1, "drawn"), (-1, "best"), (-1, "best"), (1, "drawn")],
}
LIARS: dict[str, Tree] = {
    "argmax token with the softmax law": [(-1, "argmax as drawn")],
    "distinct siblings with the plain law": [(-1, "distinct as drawn")] * 2,
}
HONEST = {how: how for how in ("drawn", "distinct", "chosen", "best")}  # the last two are argmax tokens
TRUTH = HONEST | {"argmax as drawn": "best", "distinct as drawn": "distinct"}
CLAIM = HONEST | {"argmax as drawn": "drawn", "distinct as drawn": "drawn"}


def law_of(how: str, q: Tensor, earlier: Sequence[Tensor]) -> Tensor:
    """The law of a node's token, given the tokens of its earlier siblings; no mass where there is no token left."""
    for token in earlier if how in ("distinct", "chosen") else ():
        q = q.scatter(-1, token[..., None], 0)
    if how in ("chosen", "best"):
        return torch.zeros_like(q).scatter(-1, q.argmax(-1, keepdim=True), 1)
    return q / q.sum(-1, keepdim=True).clamp_min(1e-300)


def siblings(tree: Tree, node: int) -> list[int]:
    """Earlier siblings of a node."""
    return [i for i in range(node) if tree[i][0] == tree[node][0]]


def levels(parents: Sequence[int]) -> list[int]:
    level: list[int] = []
    for parent in parents:
        level.append(0 if parent < 0 else level[parent] + 1)
    return level


def grow(tree: Tree, scores: Tensor, last: Tensor, noise_at: Callable[[int], Tensor | int]) -> Draft:
    """The draft that a tree proposes after the token `last` in every row.

    Distinct siblings are the best of one noise (Gumbel top-k), as are nodes of one level with different parents;
    siblings that may repeat need noise of their own.
    """
    level, rows = levels([parent for parent, _ in tree]), len(last)
    tokens, laws, valid = [], [], []
    for node, (parent, how) in enumerate(tree):
        q = scores.double().softmax(-1)[last if parent < 0 else tokens[parent]]
        earlier = [tokens[i] for i in siblings(tree, node)]
        law = law_of(TRUTH[how], q, earlier)
        place = 64 + node if earlier and TRUTH[how] == "drawn" else level[node]
        tokens.append((law.log() + noise_at(place)).argmax(-1))
        laws.append(law_of(CLAIM[how], q, earlier))
        valid.append((law.sum(-1) > 0.5) & (valid[parent] if parent >= 0 else True))
    empty = torch.zeros(rows, 0)
    return Draft(
        tokens=torch.stack(tokens, 1) if tree else empty.long(),
        parents=torch.tensor([parent for parent, _ in tree], dtype=torch.long).expand(rows, -1),
        valid=torch.stack(valid, 1) if tree else empty.bool(),
        drawn=torch.tensor([CLAIM[how] in ("drawn", "distinct") for _, how in tree], dtype=torch.bool).expand(rows, -1),
        probs=torch.stack(laws, 1).float() if tree else None,
        depth=max(level, default=-1) + 1,
        is_chain=[parent for parent, _ in tree] == list(range(-1, len(tree) - 1)),
    )


def generate(
    rule: Acceptance, models: tuple[Tensor, Tensor], tree: Tree, noise: Noise, count: int, ragged: bool = False
) -> Tensor:
    """`count` tokens in every row, by rounds, as the loop does it; `ragged` cuts row b to b mod (nodes + 1) nodes."""
    target, draft = models
    rows, depth = len(noise.seeds), max(levels([parent for parent, _ in tree]), default=-1) + 1
    out, written = torch.zeros(rows, count + depth + 1, dtype=torch.long), torch.zeros(rows, dtype=torch.long)
    for round in itertools.count():
        last = torch.where(written > 0, out.gather(1, (written - 1).clamp_min(0)[:, None])[:, 0], 0)
        n = PROMPT + written
        noise_at = lambda level: 0 if noise.silent else rule.draft_noise(noise, n, round, level, VOCAB)  # noqa: E731
        proposal = grow(tree, draft, last, noise_at)
        if ragged:
            proposal.valid.logical_and_(torch.arange(len(tree)) < (torch.arange(rows) % (len(tree) + 1))[:, None])
        verdict = rule(proposal, target[torch.cat([last[:, None], proposal.tokens], 1)], noise, n, round)
        out.scatter_(1, written[:, None] + torch.arange(depth + 1), verdict.tokens)
        written = (written + verdict.accepted + 1).clamp_max(count)
        if written.min() == count:
            return out[:, :count]


# -- the walk in plain Python -------------------------------------------------------------------------------


def residual(p: Sequence[float], q: Sequence[float]) -> list[float]:
    left = [max(0.0, a - b) for a, b in zip(p, q, strict=True)]
    return [x / sum(left) for x in left] if sum(left) > 0 else list(p)


Judged = Iterator[tuple[float, list[int], list[float]]]


def outcomes(p, tokens, parents, q, chance: Callable[[int, float, float], float]) -> Judged:
    """All ways in which a draft can be judged: probability, accepted path, and the law of the token after it.

    p[0] is the law after the pending token, p[1 + i] that after node i; q[i] the law that node i was drawn from;
    `chance(i, p, q)` the probability of accepting node i, whose token has these probabilities.
    """

    def onwards(law, waiting) -> Judged:
        if not waiting:
            yield 1.0, [], law
            return
        node, *others = waiting
        accept = chance(node, law[tokens[node]], q[node][tokens[node]])
        if accept > 0:
            for weight, path, end in onwards(p[1 + node], [i for i, parent in enumerate(parents) if parent == node]):
                yield accept * weight, [node, *path], end
        if accept < 1:
            for weight, path, end in onwards(residual(law, q[node]), others):
                yield (1 - accept) * weight, path, end

    return onwards(p[0], [i for i, parent in enumerate(parents) if parent == -1])


def exact_law(models: tuple[Tensor, Tensor], tree: Tree) -> Tensor:
    """The joint law of the first two tokens by enumeration of all drafts and decisions."""
    p, q = (scores.double().softmax(-1) for scores in models)
    joint = torch.zeros(VOCAB, VOCAB, dtype=torch.float64)
    parents = [parent for parent, _ in tree]
    for tokens in itertools.product(range(VOCAB), repeat=len(tree)):
        given, weight, claims = [torch.tensor(t) for t in tokens], 1.0, []
        for node, (parent, how) in enumerate(tree):
            after, earlier = q[tokens[parent] if parent >= 0 else 0], [given[i] for i in siblings(tree, node)]
            weight *= law_of(TRUTH[how], after, earlier)[tokens[node]].item()
            claims.append(law_of(CLAIM[how], after, earlier).tolist())
        if weight == 0:
            continue
        laws = [p[0].tolist(), *(p[token].tolist() for token in tokens)]
        for chance, path, end in outcomes(laws, tokens, parents, claims, lambda _, px, qx: min(1.0, px / qx)):
            if len(path) > 1:
                joint[tokens[path[0]], tokens[path[1]]] += weight * chance
            elif path:
                joint[tokens[path[0]]] += weight * chance * torch.tensor(end, dtype=p.dtype)
            else:
                joint += weight * chance * torch.tensor(end, dtype=p.dtype)[:, None] * p
    return joint


def plain_law(models: tuple[Tensor, Tensor]) -> Tensor:
    p = models[0].double().softmax(-1)
    return p[0][:, None] * p


def random_draft(seed: int, nodes: int, vocab: int, batch: int = 16, chain: bool = False) -> tuple[Draft, Tensor]:
    """Another tree in every row, with invalid, drawn and chosen nodes, and the target's scores."""
    g = torch.Generator().manual_seed(seed)
    rand = lambda *shape: torch.rand(*shape, generator=g)  # noqa: E731
    parents = (rand(batch, nodes) * torch.arange(1, nodes + 1)).long() - 1
    if chain:
        parents = torch.arange(-1, nodes - 1).expand(batch, -1)
    valid = rand(batch, nodes) < 0.85
    for node in range(nodes):
        up = parents[:, node, None]
        valid[:, node] &= (valid.gather(1, up.clamp_min(0)) | (up < 0))[:, 0]
    depth = max((max(levels(row)) + 1 for row in parents.tolist() if row), default=0)
    draft = Draft(
        tokens=(rand(batch, nodes) * vocab).long(),
        parents=parents,
        valid=valid,
        drawn=rand(batch, nodes) < 0.6,
        probs=(2 * torch.randn(batch, nodes, vocab, generator=g)).softmax(-1),
        depth=depth if chain else depth + seed % 2,  # a drafter may declare more levels than it fills
        is_chain=chain,
    )
    scores = 2 * torch.randn(batch, 1 + nodes, vocab, generator=g)
    scores[..., 1:].masked_fill_(rand(batch, 1 + nodes, vocab - 1) < 0.2, -math.inf)
    return draft, scores


def same(one: Verdict, other: Verdict, at: slice = slice(None)) -> bool:
    """Whether two verdicts are equal to the last bit, the second one in rows `at`."""
    return all(getattr(one, name).equal(getattr(other, name)[at]) for name in Verdict.__dataclass_fields__)


# -- the law of what is drawn, by counting -------------------------------------------------------------------

ROWS = 50_000


def misfit(tokens: Tensor, law: Tensor) -> float:
    """How far counts of the first two tokens are from their law, in units of the bound; 1 or less is a pass.

    Impossible pairs count as infinitely far. The bound is passed by chance with probability 1e-7; a run has about
    40 of them, and the seeds are fixed. Cells with fewer than 5 expected are pooled.
    """
    counts = (tokens[:, 0] * VOCAB + tokens[:, 1]).bincount(minlength=VOCAB**2)
    expected = law.flatten() * len(tokens)
    if counts[expected == 0].sum() > 0:
        return math.inf
    rare = expected < 5
    if counts[rare].sum() > 5 + expected[rare].sum() + 10 * expected[rare].sum().sqrt():
        return math.inf
    return chi_square(counts[~rare], expected[~rare]) / bound(int((~rare).sum()))
