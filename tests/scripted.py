"""Drafters whose guesses are known beforehand, a reference decoder, and the cache invariant."""

import functools
import itertools
from dataclasses import dataclass

import torch
from transformers import DynamicCache

from labkit.draft import Draft
from labkit.protocol import Context, Drafter


@torch.inference_mode()
def reference(model, prompt, count):
    """Greedy decoding by a full forward for every token: no cache, no labkit."""
    ids = list(prompt)
    for _ in range(count):
        logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1]
        ids.append(int(logits.float().argmax()))
    return ids[len(prompt) :]


@functools.lru_cache(maxsize=32)
@torch.inference_mode()
def written(model, cache_name, ids):
    """What a plain forward over `ids` writes: of every layer keys and values, and the stream at every depth."""
    cache = DynamicCache()
    out = model(input_ids=torch.tensor([ids]), use_cache=True, output_hidden_states=True, **{cache_name: cache})
    return [x for layer in cache.layers for x in (layer.keys[0], layer.values[0])], [h[0] for h in out.hidden_states]


def committed(session):
    """Of every row: how many tokens it has, and a copy of slots 0 .. n-2 of every layer, and of every tap by depth."""
    assert session.n.tolist() == session.lengths
    found = []
    for row, n in enumerate(session.lengths):
        layers = [x[row, :, : n - 1].clone() for layer in session.cache.layers for x in (layer.keys, layer.values)]
        found.append((n, layers, {d: tap[row, : n - 1].clone() for d, tap in session.cache.taps.items() if n > 1}))
    return found


def assert_written(session, rows, tolerance):
    """The rows that `committed` found, now or earlier, are as a plain forward over the committed tokens leaves them.

    By causality the same forward serves all earlier moments, and every strategy that writes the same text.
    """
    backbone = session.backbone
    for text, n, (before, layers, taps) in zip(session.tokens.tolist(), session.lengths, rows, strict=True):
        if before < 2:
            continue
        buffers, stream = written(backbone.model, backbone._cache_name, tuple(text[: n - 1]))
        pairs = [(x, y[:, : before - 1]) for x, y in zip(layers, buffers[: len(layers)], strict=True)]
        for ours, theirs in pairs + [(x, stream[depth][: before - 1]) for depth, x in taps.items()]:
            assert ours.shape == theirs.shape
            assert ((ours - theirs).abs() <= tolerance * (1 + theirs.abs())).all(), (ours - theirs).abs().max()


def assert_invariant(session, tolerance=1e-9):
    """Slots 0 .. n-2 of every layer and tap hold what a plain forward over the committed tokens writes."""
    assert_written(session, committed(session), tolerance)


@dataclass(frozen=True)
class Replay(Drafter):
    """Proposes each row's known continuation, `length` tokens, wrong from place `wrong[round % len]` on."""

    prompts: list
    texts: list
    length: int = 4
    wrong: tuple = (99,)
    taps: tuple = ()

    @property
    def nodes(self):
        return self.length

    def propose(self, state, context: Context) -> Draft:
        count = context.length(self.length)
        rows = []
        for row, n in enumerate(context.lengths):
            at = n - len(self.prompts[row])
            guess = (list(self.texts[row]) + [0] * count)[at : at + count]
            place = self.wrong[context.round % len(self.wrong)]
            rows.append([t if i < place else (t + 1) % 61 for i, t in enumerate(guess)])
        tokens = torch.tensor(rows, dtype=torch.long, device=context.n.device).view(len(rows), count)
        return Draft.chain(tokens)


@dataclass(frozen=True)
class RandomTree(Drafter):
    """A random tree in each row: true continuations hidden among wrong tokens, some nodes invalid."""

    prompts: list
    texts: list
    size: int = 7
    seed: int = 0
    vocab: int = 61
    taps: tuple = ()

    @property
    def nodes(self):
        return self.size

    def propose(self, state, context: Context) -> Draft:
        generator = torch.Generator(device="cpu").manual_seed(self.seed * 1000 + context.round)
        number = lambda below: int(torch.randint(below, (), generator=generator, device="cpu"))  # noqa: E731
        if context.max_room <= 1:
            return Draft.empty(context.tokens)
        tokens, parents, valid, deepest = [], [], [], 1
        for row, n in enumerate(context.lengths):
            level, true, row_tokens, row_parents, row_valid = {-1: -1}, {-1: True}, [], [], []
            for node in range(self.size):
                parent = max(number(node + 1) - 1 for _ in range(2))
                if level[parent] + 2 >= context.max_room:
                    parent = -1
                level[node] = level[parent] + 1
                at = n - len(self.prompts[row]) + level[node]
                right = true[parent] and number(3) > 0 and at < len(self.texts[row])
                token = self.texts[row][at] if right else number(self.vocab)
                true[node] = true[parent] and at < len(self.texts[row]) and token == self.texts[row][at]
                row_tokens.append(token)
                row_parents.append(parent)
                row_valid.append((parent < 0 or row_valid[parent]) and number(8) > 0)
                deepest = max(deepest, level[node] + 1)
            tokens.append(row_tokens)
            parents.append(row_parents)
            valid.append(row_valid)
        device = context.n.device
        tokens = torch.tensor(tokens, device=device)
        return Draft(
            tokens=tokens,
            parents=torch.tensor(parents, device=device),
            valid=torch.tensor(valid, device=device),
            drawn=torch.zeros_like(tokens, dtype=torch.bool),
            depth=deepest,
            is_chain=False,
        )


def watched(lab, prompt, drafter, tolerance=1e-9, **options):
    """Generate, asserting that the invariant held after every round."""
    from labkit.lab import _Run

    run = _Run(lab, prompt, drafter, options)
    rounds, found = [], []
    for happened in run.rounds():
        found.append(committed(run.session))
        rounds.append(happened)
    for rows in found:
        assert_written(run.session, rows, tolerance)
    return run.result(rounds)


def accepted_lengths(length):
    """Every accepted length 0 .. length, in an order that meets each after each."""
    return tuple(itertools.chain.from_iterable(itertools.permutations(range(length + 1), 2)))


def shaken(module, scale=0.3):
    """The float64 module with every weight off its initial value."""
    generator = torch.Generator(device="cpu").manual_seed(5)
    for parameter in module.parameters():
        parameter.data += scale * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    return module


@torch.inference_mode()
def states(lab, ids):
    """The residual stream at every depth of a plain forward over `ids`, the last one behind the norm."""
    return lab.model(input_ids=torch.tensor([ids]), output_hidden_states=True).hidden_states


def drafted(out):
    """(prefix, token, exit) of every drafted token of chains, its prefix with all that was drafted before it."""
    for row, prompt in enumerate(out.prompts):
        text = list(prompt)
        for happened in out.rounds:
            for place, (token, exit) in enumerate(zip(happened.drafted[row], happened.exit[row], strict=True)):
                yield [*text, *happened.drafted[row][:place]], token, exit
            text += happened.tokens[row]


@dataclass(frozen=True)
class Drawing(Drafter):
    """A chain drawn (or, greedily, chosen) from a table `(vocab, vocab)` of scores after each token; heeds no stop."""

    scores: torch.Tensor
    length: int = 2
    greedy: bool = False
    silent_after: tuple = ()

    @property
    def nodes(self):
        return self.length

    def propose(self, state, context: Context) -> Draft:
        last = begin = context.tokens.gather(1, context.n[:, None] - 1)[:, 0]
        tokens, laws, q = last[:, None][:, :0], [], []
        for _ in range(context.length(self.length)):
            logits = self.scores[last]
            drawn = context.draw(logits, tokens)
            last = logits.argmax(-1) if self.greedy else drawn.token
            tokens = torch.cat([tokens, last[:, None]], 1)
            laws.append(drawn.probs)
            q.append(logits.softmax(-1).gather(1, last[:, None])[:, 0])
        valid = torch.ones_like(tokens, dtype=torch.bool)
        for token in self.silent_after:
            valid &= (begin != token)[:, None]
        drawn = not self.greedy and laws[0] is not None
        return Draft.chain(
            tokens, valid, drawn=drawn, probs=torch.stack(laws, 1) if drawn else None, q=torch.stack(q, 1)
        )
