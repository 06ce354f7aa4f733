"""The output law of Match and Rejection, exactly and by counting; and both against the walk in plain Python."""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_noise import NoSync, bound, chi_square
from torch import Tensor

from labkit.acceptance import PLACES, Match, Rejection
from labkit.draft import Draft
from labkit.noise import Noise, Salt
from labkit.protocol import Acceptance, Verdict

CPU = torch.device("cpu")
VOCAB, PROMPT = 5, 3


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Thousands of small operations: a second thread only makes them wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


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


SMALL = [name for name, tree in TREES.items() if len(tree) <= 4]


@pytest.mark.parametrize("name", SMALL)
def test_the_reference_has_the_exact_law(name):
    """Enumeration proves the rule that the code is compared with below, to rounding."""
    models = MODELS["different"]
    torch.testing.assert_close(exact_law(models, TREES[name]), plain_law(models), rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", LIARS)
def test_a_wrong_law_biases_the_reference(name):
    models = MODELS["different"]
    assert (exact_law(models, LIARS[name]) - plain_law(models)).abs().sum() > 0.02


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


def expected_verdict(draft: Draft, scores: Tensor, row: int, path: list[int], target: list[int], own: int) -> dict:
    """A row's verdict as protocol.py words it."""
    tokens, parents = draft.tokens[row].tolist(), draft.parents[row].tolist()
    p = scores[row].double().softmax(-1).tolist()
    end, pad = path[-1] if path else -1, draft.depth - len(path)
    probability = [p[1 + end][own], *(p[1 + up][x] for up, x in zip(parents, tokens, strict=True))]
    return {
        "path": path + [-1] * pad,
        "accepted": len(path),
        "tokens": [tokens[i] for i in path] + [own] + [0] * pad,
        "target": [own if i == end else t for i, t in enumerate(target, -1)],
        "p": pytest.approx(probability, rel=1e-4, abs=1e-7),
    }


def row_of(verdict: Verdict, row: int) -> dict:
    return {name: getattr(verdict, name)[row].tolist() for name in Verdict.__dataclass_fields__}


def same(one: Verdict, other: Verdict, at: slice = slice(None)) -> bool:
    """Whether two verdicts are equal to the last bit, the second one in rows `at`."""
    return all(getattr(one, name).equal(getattr(other, name)[at]) for name in Verdict.__dataclass_fields__)


flag, size = st.booleans(), st.integers(0, 8)
drafts = given(seed=st.integers(0, 2**32), nodes=size, vocab=st.integers(2, 6), chain=flag, silent=flag)
steady = settings(max_examples=80, deadline=None, derandomize=True, database=None)


@drafts
@steady
def test_match_equals_the_plain_walk(seed, nodes, vocab, chain, silent):
    draft, scores = random_draft(seed, nodes, vocab, chain=chain)
    noise, n = Noise.of(seed, 16, silent=silent, device=CPU), torch.arange(16) + 2
    verdict = Match()(draft, scores, noise, n, round=3)
    for row, parents in enumerate(draft.parents.tolist()):
        at = torch.tensor([[2 + row, *(2 + row + level + 1 for level in levels(parents))]])
        gumbel = 0 if silent else Noise(noise.seeds[row : row + 1], False).gumbel(at, vocab, Salt.TARGET)[0]
        target = (scores[row] + gumbel).argmax(-1).tolist()
        path, fits = [], [-1]
        while fits:
            path.append(node := fits[0])
            proposed = draft.valid[row] & (draft.parents[row] == node) & (draft.tokens[row] == target[1 + node])
            fits = proposed.nonzero().flatten().tolist()
        path, own = path[1:], target[1 + node]
        assert row_of(verdict, row) == expected_verdict(draft, scores, row, path, target, own)


@drafts
@steady
def test_rejection_equals_the_plain_walk(seed, nodes, vocab, chain, silent):
    draft, scores = random_draft(seed, nodes, vocab, chain=chain)
    noise, n, round = Noise.of(seed, 16, silent=silent, device=CPU), torch.arange(16) + 2, seed % 7
    verdict = Rejection()(draft, scores, noise, n, round)
    best = scores.argmax(-1)
    laws = torch.nn.functional.one_hot(best, vocab) if silent else scores.softmax(-1)
    for row, parents in enumerate(draft.parents.tolist()):
        tokens, one = draft.tokens[row], Noise(noise.seeds[row : row + 1], silent)
        chosen = torch.nn.functional.one_hot(tokens, vocab)
        q = torch.where(draft.drawn[row, :, None], draft.probs[row], chosen).tolist()
        places = torch.arange(round * PLACES, round * PLACES + nodes + 1)[None]
        luck = one.uniform(places, Salt.ACCEPT)[0].tolist()
        seen = [parent if valid else -2 for parent, valid in zip(parents, draft.valid[row].tolist(), strict=True)]
        judged = outcomes(laws[row].tolist(), tokens.tolist(), seen, q, lambda i, p, q, u=luck: float(u[i] * q < p))
        ((_, path, law),) = judged
        gumbel = 0 if silent else one.gumbel(places[:, :1], vocab, Salt.RESIDUAL)[0, 0]
        own = (torch.tensor(law).log() + gumbel).argmax(-1).item()
        assert row_of(verdict, row) == expected_verdict(draft, scores, row, path, best[row].tolist(), own)


@pytest.mark.parametrize("rule", [Match(), Rejection()], ids=repr)
def test_a_row_is_judged_alone(rule):
    draft, scores = random_draft(5, 7, 6)
    noise, n = Noise.of(9, 16, silent=False, device=CPU), torch.arange(16) + 2
    whole = rule(draft, scores, noise, n, 2)
    for b in range(16):
        at = slice(b, b + 1)
        mine = {name: getattr(draft, name)[at] for name in ("tokens", "parents", "valid", "drawn", "probs")}
        alone = replace(draft, **mine)
        assert same(rule(alone, scores[at], Noise(noise.seeds[at], False), n[at], 2), whole, at)


# -- the law of the real thing, by counting -----------------------------------------------------------------

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


def sampled(rule: Acceptance, models, tree: Tree, ragged: bool = False, of: type[Noise] = Noise) -> float:
    tokens = generate(rule, models, tree, of(torch.arange(ROWS) - ROWS // 2, False), 2, ragged)
    return misfit(tokens, plain_law(models))


@pytest.mark.parametrize("rule", [Match(), Rejection()], ids=repr)
@pytest.mark.parametrize("tree", TREES)
def test_law_for_every_tree(rule, tree):
    assert sampled(rule, MODELS["different"], TREES[tree]) < 1


@pytest.mark.parametrize("rule", [Match(), Rejection()], ids=repr)
@pytest.mark.parametrize("tree", ["chain of 3", "binary tree", "drawn before chosen"])
@pytest.mark.parametrize("models", [name for name in MODELS if name != "different"])
def test_law_for_every_pair_of_models(rule, tree, models):
    assert sampled(rule, MODELS[models], TREES[tree]) < 1


@pytest.mark.parametrize("rule", [Match(), Rejection()], ids=repr)
def test_law_of_rows_that_propose_fewer(rule):
    assert sampled(rule, MODELS["different"], TREES["binary tree"], ragged=True) < 1


@pytest.mark.parametrize("name", LIARS)
def test_the_count_finds_a_wrong_law(name):
    assert sampled(Rejection(), MODELS["different"], LIARS[name]) > 1
    assert sampled(Match(), MODELS["different"], LIARS[name]) < 1, "Match takes no notice of the draft's law"


class OneSalt(Noise):
    """Draft draws and residual draws from the same noise: what Rejection must not do."""

    def gumbel(self, at, vocab, salt):
        return super().gumbel(at, vocab, Salt.TARGET)


class OnePlace(Noise):
    """The same noise at every position."""

    def gumbel(self, at, vocab, salt):
        return super().gumbel(torch.zeros_like(at), vocab, salt)


def test_the_count_finds_repeated_noise():
    assert sampled(Match(), MODELS["different"], TREES["chain of 1"], of=OnePlace) > 1


def test_the_count_finds_shared_noise():
    assert sampled(Rejection(), MODELS["different"], TREES["chain of 1"], of=OneSalt) > 1


class ByPosition(Rejection):
    """Noise that belongs to the position: a discarded draw comes back in the next round."""

    def _places(self, n, round):
        return n[:, None]


def after_a_controller(rule: Rejection) -> float:
    """A drafter that proposes again exactly when the token behind the rejected one was its favourite."""
    target, draft = MODELS["different"][0], table(2)[:1].expand(VOCAB, -1)
    favourite, rows = target[0].argmax(), torch.arange(ROWS)
    noise, n, last = Noise(rows, False), torch.full((ROWS,), PROMPT), torch.zeros(ROWS, dtype=torch.long)
    first = grow(TREES["chain of 2"], draft, last, lambda level: rule.draft_noise(noise, n, 0, level, VOCAB))
    verdict = rule(first, target[torch.cat([last[:, None], first.tokens], 1)], noise, n, 0)
    last, n = verdict.tokens[:, 0], n + 1
    second = grow(TREES["chain of 1"], draft, last, lambda level: rule.draft_noise(noise, n, 1, level, VOCAB))
    second.valid.logical_and_((first.tokens[:, 1] == favourite)[:, None])
    after = rule(second, target[torch.cat([last[:, None], second.tokens], 1)], noise, n, 1)
    tokens = torch.stack([last, torch.where(verdict.accepted > 0, verdict.tokens[:, 1], after.tokens[:, 0])], 1)
    return misfit(tokens, plain_law(MODELS["different"]))


def test_a_discarded_draw_does_not_come_back():
    assert after_a_controller(Rejection()) < 1
    assert after_a_controller(ByPosition()) > 1


# -- Match: the text belongs to the seed --------------------------------------------------------------------


@pytest.mark.parametrize("silent", [True, False], ids=["greedy", "sampling"])
@pytest.mark.parametrize("models", MODELS)
def test_match_gives_one_text_for_every_drafter(models, silent):
    noise = Noise.of(7, 40, silent=silent, device=CPU)
    plain = generate(Match(), MODELS[models], [], noise, 12)
    for name, tree in {**TREES, **LIARS}.items():
        assert generate(Match(), MODELS[models], tree, noise, 12, ragged=True).equal(plain), name
    alone = generate(Match(), MODELS[models], TREES["binary tree"], Noise.of(7 + 33, 1, silent=silent, device=CPU), 12)
    assert alone.equal(plain[33:34])


def test_greedy_is_one_rule():
    """At zero temperature both rules are the same, and follow the best token."""
    noise = Noise.of(0, 1, silent=True, device=CPU)
    for models in MODELS.values():
        text, last = [], 0
        for _ in range(9):
            text.append(last := models[0][last].argmax().item())
        for rule, tree in itertools.product((Match(), Rejection()), TREES.values()):
            assert generate(rule, models, tree, noise, 9).tolist() == [text]
            assert rule.draft_noise(noise, torch.tensor([4]), 0, 0, VOCAB) is None
    draft, scores = random_draft(3, 6, 4)
    noise, n = Noise.of(0, 16, silent=True, device=CPU), torch.arange(16)
    assert same(Match()(draft, scores, noise, n, 0), Rejection()(draft, scores, noise, n, 0))


def test_shared_noise_agrees_often():
    """At least (1 - TV) / (1 + TV) of single drafted tokens are accepted (Daliri et al.); unshared noise gives less."""
    noise, n, last = Noise(torch.arange(ROWS), False), torch.full((ROWS,), PROMPT), torch.zeros(ROWS, dtype=torch.long)
    slack = 5 * math.sqrt(0.25 / ROWS)
    for name in ("different", "hot", "both cut", "the same"):
        models = MODELS[name]
        p, q = (scores[0].double().softmax(-1) for scores in models)
        distance = 0.5 * (p - q).abs().sum().item()
        least, rate = (1 - distance) / (1 + distance), {}
        for rule in (Match(), Rejection()):
            noise_at = lambda level, rule=rule: rule.draft_noise(noise, n, 0, level, VOCAB)  # noqa: E731
            draft = grow(TREES["chain of 1"], models[1], last, noise_at)
            scores = models[0][torch.cat([last[:, None], draft.tokens], 1)]
            rate[rule] = Match()(draft, scores, noise, n, 0).accepted.double().mean().item()
        assert rate[Match()] > least - slack
        assert abs(rate[Rejection()] - (p * q).sum().item()) < slack
        if name != "both cut":  # there the bound lies below the p·q of unshared noise, and tells nothing
            assert rate[Rejection()] < least - slack
    assert rate[Match()] == least == 1 and rate[Rejection()] < 0.9, "the two models were the same"


def test_whose_noise():
    """Match's belongs to the position and is the target's own; Rejection's to the round, and to the draft alone."""
    noise, n = Noise.of(4, 2, silent=False, device=CPU), torch.tensor([6, 9])
    for level in range(3):
        match = Match().draft_noise(noise, n, 0, level, 7)
        assert match.equal(Match().draft_noise(noise, n + level, 5, 0, 7))
        assert match.equal(noise.gumbel(n[:, None] + level, 7, Salt.TARGET)[:, 0])
        rejection = Rejection().draft_noise(noise, n, 1, level, 7)
        assert rejection.equal(Rejection().draft_noise(noise, n + 1, 1, level, 7))
        assert not rejection.equal(Rejection().draft_noise(noise, n, 2, level, 7))
        assert not rejection.equal(Rejection().draft_noise(noise, n, 1, level + 1, 7))


# -- the edges ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("silent", [True, False], ids=["greedy", "sampling"])
@pytest.mark.parametrize("rule", [Match(), Rejection()], ids=repr)
def test_every_accepted_length(rule, silent):
    """Row j of a chain of 5 is wrong at node j (row 5 nowhere): exactly j tokens stay, then the target's own."""
    nodes, vocab = 5, 11
    text = torch.arange(1, nodes + 2)
    scores = torch.full((nodes + 1, 1 + nodes, vocab), -math.inf if silent else -200.0)
    scores.scatter_(2, text.expand(nodes + 1, -1)[..., None], 0.0)
    tokens = text[:nodes].repeat(nodes + 1, 1)
    tokens[range(nodes), range(nodes)] = 9
    noise = Noise.of(3, nodes + 1, silent=silent, device=CPU)
    verdict = rule(Draft.chain(tokens), scores, noise, torch.arange(nodes + 1) + 1, 0)
    assert verdict.accepted.tolist() == list(range(nodes + 1))
    for row in range(nodes + 1):
        assert verdict.path[row].tolist() == [*range(row), *[-1] * (nodes - row)]
        assert verdict.tokens[row].tolist() == [*text[: row + 1].tolist(), *[0] * (nodes - row)]
        assert verdict.target[row].tolist() == text.tolist()
        assert verdict.p[row, 1:].tolist() == [float(i != row) for i in range(nodes)] and verdict.p[row, 0] == 1


@pytest.mark.parametrize("silent", [True, False], ids=["greedy", "sampling"])
@pytest.mark.parametrize("rule", [Match(), Rejection()], ids=repr)
def test_nothing_proposed(rule, silent):
    """An empty draft, and a draft with no valid node, are one step of plain decoding."""
    noise, n = Noise.of(3, 4, silent=silent, device=CPU), torch.tensor([1, 2, 3, 4])
    scores = 2 * torch.randn(4, 4, 9, generator=torch.Generator().manual_seed(0))
    empty = rule(Draft.empty(n[:, None]), scores[:, :1], noise, n, 0)
    assert empty.path.shape == (4, 0) and empty.tokens.shape == (4, 1) and empty.accepted.tolist() == [0] * 4
    assert empty.target.equal(empty.tokens)
    torch.testing.assert_close(empty.p, scores[:, 0].softmax(-1).gather(1, empty.tokens))
    invalid = Draft.chain(scores[:, :3].argmax(-1), valid=torch.zeros(4, 3, dtype=torch.bool))
    verdict = rule(invalid, scores, noise, n, 0)
    assert verdict.accepted.tolist() == [0] * 4 and verdict.tokens[:, :1].equal(empty.tokens)
    assert (verdict.path == -1).all() and (verdict.tokens[:, 1:] == 0).all()


def test_without_probs_every_node_counts_as_chosen():
    draft, scores = random_draft(8, 6, 4)
    noise, n = Noise.of(3, 16, silent=False, device=CPU), torch.arange(16)
    chosen = replace(draft, drawn=torch.zeros_like(draft.drawn))
    without = replace(draft, probs=None)
    assert same(Rejection()(chosen, scores, noise, n, 0), Rejection()(without, scores, noise, n, 0))
    assert not same(Rejection()(draft, scores, noise, n, 0), Rejection()(without, scores, noise, n, 0))


def test_equal_laws_are_always_accepted():
    """p = q to the last bit, cold and hot: no division by an empty residual, no rejection."""
    for temperature in (1e-3, 1.0, 2.0):
        scores = table(1, temperature)[0].expand(1000, 2, VOCAB)
        noise, n = Noise.of(0, 1000, silent=False, device=CPU), torch.ones(1000, dtype=torch.long)
        token = (scores[:, 0] + Rejection().draft_noise(noise, n, 0, 0, VOCAB)).argmax(-1)
        draft = Draft.chain(token[:, None], drawn=True, probs=scores[:, :1].softmax(-1))
        verdict = Rejection()(draft, scores, noise, n, 0)
        assert verdict.accepted.eq(1).all() and verdict.p.isfinite().all()


def test_a_residual_without_mass():
    """If a rejection leaves nothing of p (here q is 1.5 p: a rounding, magnified), p itself is drawn."""
    scores = table(1)[0].expand(ROWS, 2, VOCAB)
    law, token = scores[0, 0].double().softmax(-1), torch.full((ROWS, 1), 2)
    draft = Draft.chain(token, drawn=True, probs=1.5 * scores[:, :1].softmax(-1))
    verdict = Rejection()(draft, scores, Noise(torch.arange(ROWS), False), torch.ones_like(token[:, 0]), 0)
    rejected = verdict.tokens[verdict.accepted == 0, 0]
    assert abs(len(rejected) / ROWS - 1 / 3) < 0.01
    assert chi_square(rejected.bincount(minlength=VOCAB), len(rejected) * law) < bound(VOCAB - 1)


@pytest.mark.parametrize("silent", [True, False], ids=["greedy", "sampling"])
@pytest.mark.parametrize("chain", [True, False], ids=["chain", "tree"])
@pytest.mark.parametrize("rule", [Match(), Rejection()], ids=repr)
def test_no_sync_and_no_default_device(rule, chain, silent):
    """Nothing waits for the host, and nothing is made on a default device; on "meta" there are no data to look at."""
    draft, scores = random_draft(4, 6, 5, chain=chain)
    noise, n = Noise.of(0, 16, silent=silent, device=CPU), torch.arange(16)
    before = torch.get_rng_state()
    with NoSync(), torch.device("meta"):
        verdict = rule(draft, scores, noise, n, 1)
        rule.draft_noise(noise, n, 1, 2, 5)
    assert verdict.tokens.device == CPU and torch.get_rng_state().equal(before)
    far = {name: getattr(draft, name).to("meta") for name in ("tokens", "parents", "valid", "drawn", "probs")}
    away = replace(draft, **far)
    judged = rule(away, scores.to("meta"), Noise(noise.seeds.to("meta"), silent), n.to("meta"), 1)
    for name in Verdict.__dataclass_fields__:
        assert getattr(judged, name).shape == getattr(verdict, name).shape
        assert getattr(judged, name).dtype == getattr(verdict, name).dtype
