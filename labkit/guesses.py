"""What drafts would say at every place of a text that is known: one forward pass, compared with the text."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import pad

from labkit.drafters.lookup import Index
from labkit.errors import LabkitError
from labkit.layers import session_of, states_of
from labkit.prompts import one_text
from labkit.trace import Generation

CHUNK = 64
"""Positions that go through the layers, and have logits, at a time."""
NONE, BEHIND = -1, -2
"""No guess, and no text: they are not equal."""
NEUTRAL: dict[str, tuple] = {
    "temperature": (None, 0), "do_sample": (None, False), "repetition_penalty": (None, 1), "bad_words_ids": (None,),
    "no_repeat_ngram_size": (None, 0), "min_new_tokens": (None, 0), "logits_processor": (None,),
    "top_k": (None, 0), "top_p": (None, 1), "min_p": (None, 0), "typical_p": (None, 1),
}  # fmt: skip
"""Settings under which a run's text is the target's plain greedy one."""


@dataclass(frozen=True, eq=False)
class Guesses:
    """What one source would draft from each place of one text, while all before it is right.

    tokens: its guesses (-1: none). offered: how many it makes. q: its probability of each. runs: how many of them are
    right in a row. p: an exit layer's first guess from each place in the target's law.
    """

    tokens: Int[Tensor, "places guesses"]
    offered: list[int]
    q: Float[Tensor, "places guesses"]
    runs: list[int]
    p: Float[Tensor, "places"] | None = None

    @classmethod
    def of(cls, tokens: Tensor, text: Tensor, offered: list[int], q: Tensor, p: Tensor | None = None) -> "Guesses":
        """Compared with the generated part of the text, (places,)."""
        agree = tokens == _seen_ahead(text, BEHIND, tokens.shape[1])
        return cls(tokens, offered, q, agree.int().cumprod(-1).sum(-1).tolist(), p)

    def lengths(self, max_draft: int, threshold: float | None) -> list[int]:
        """Of the drafts from each place: at most max_draft, ended behind a token of a probability below `threshold`."""
        stop = [max_draft] * len(self.offered)
        if threshold is not None:
            unsure = (self.q < threshold).int()
            stop = torch.where(unsure.any(-1), unsure.argmax(-1) + 1, max_draft).tolist()
        return [min(o, s, max_draft) for o, s in zip(self.offered, stop, strict=True)]


@dataclass(frozen=True)
class Text:
    """A text to be replayed: `ids`, generated from place `begin` on, with room for `room` new tokens."""

    ids: list[int]
    begin: int
    room: int


def read_texts(lab: Any, given: Any) -> list[Text]:
    """A Generation's rows, or one text in any form of a prompt, or a list of these."""
    several = isinstance(given, list | tuple) and not all(isinstance(x, int | Mapping) for x in given)
    found = []
    for one in given if several else [given]:
        if isinstance(one, Generation):
            _check_greedy(one)
            for row in range(len(one.prompts)):
                ids, begin = one_text(lab, one, row)
                found.append(Text(ids, begin, max(one.settings["max_new_tokens"], len(ids) - begin)))
        else:
            ids, begin = one_text(lab, one)
            if len(ids) < 2:
                raise LabkitError(f"a text of {len(ids)} token has nothing to replay; give 2 tokens or more")
            found.append(Text(ids, begin, len(ids) - begin))
    return found


def _check_greedy(out: Generation) -> None:
    unlike = [name for name, neutral in NEUTRAL.items() if out.settings.get(name) not in neutral]
    if out.settings.get("temperature") == 0:
        unlike = [name for name in unlike if name not in ("top_k", "top_p", "min_p", "typical_p")]
    if unlike or not out.lossless:
        why = ", ".join(f"{name}={out.settings[name]!r}" for name in unlike) or "a lossy target"
        raise LabkitError(
            f"the Generation has {why}, and a replay is exact for greedy text only; generate without it, or give the "
            "token ids (out.prompts[0] + out.tokens[0]) to replay them as if they were the target's own"
        )


@torch.inference_mode()
def guess(
    lab: Any, text: Text, exits: Sequence[int], heads: Mapping[str, Any], ngram: int, most: int
) -> dict[Any, Guesses]:
    """What each source would draft, at most `most` tokens, from every place of the generated part of a text."""
    ids, begin, backbone = text.ids, text.begin, lab.backbone
    places, found = len(ids) - begin, {}
    session = session_of(backbone, ids)
    says, normed = {exit: ([], [], []) for exit in exits}, []
    for first in range(0, len(ids) - 1, CHUNK):
        count = min(CHUNK, len(ids) - 1 - first)
        states = states_of(session, first, count)
        skip = max(0, begin - 1 - first)  # position begin - 1 says what comes at place begin
        final = _law(backbone, states[-1][:, skip:] if exits else states[-1][:, :0])
        for exit in exits if skip < count else ():
            best = _law(backbone, states[exit][:, skip:]).max(-1)
            p = final.gather(1, best.indices[:, None])[:, 0]
            for part, values in zip(says[exit], (best.indices, best.values, p), strict=True):
                part.append(values.cpu())
        if heads:
            normed.append(backbone.norm(states[-1])[:, max(0, begin - 2 - first) :])
    text_ids = torch.tensor(ids[begin:], dtype=torch.long)
    for exit, (tokens, *laws) in says.items():
        tokens = _seen_ahead(torch.cat([*tokens, text_ids[:0]]), NONE, most)
        q, p = (torch.cat([*part, torch.zeros(0)]) for part in laws)
        found[exit] = Guesses.of(tokens, text_ids, [most] * places, _seen_ahead(q, 1.0, most), p)
    if ngram:
        found["ngram"] = _lookup(ids, begin, ngram, most)
    for name, module in heads.items():
        found[name] = _heads(module, torch.cat(normed, 1), session.tokens[0, : len(ids)], begin, most)
    return found


def _law(backbone: Any, states: Tensor) -> Float[Tensor, "rows vocab"]:
    return backbone.head(states)[0].float().softmax(-1)


def _seen_ahead(one: Tensor, behind: Any, most: int) -> Tensor:
    """(places,) -> (places, most): what is said for a place does not depend on where the round began."""
    return pad(one, (0, most - 1), value=behind).unfold(0, most, 1) if len(one) else one[:, None].expand(0, most)


def _lookup(ids: list[int], begin: int, ngram: int, most: int) -> Guesses:
    index = Index()
    guessed = [index.continuation(ids[:place], ngram, most) for place in range(begin, len(ids))]
    tokens = torch.tensor([[*line, *[NONE] * (most - len(line))] for line in guessed], dtype=torch.long).view(-1, most)
    return Guesses.of(
        tokens, torch.tensor(ids[begin:], dtype=torch.long), [*map(len, guessed)], torch.ones(tokens.shape)
    )


def _heads(module: Any, normed: Tensor, ids: Tensor, begin: int, most: int) -> Guesses:
    """A chain of all heads: from place n on, the state of token n - 2, the pending token n - 1, and those drafted."""
    count = min(most, module.count)
    first = max(begin, 2)
    places, late = len(ids) - begin, first - begin
    states = normed[:, : len(ids) - first]
    tokens, q = torch.full((places, count), NONE), torch.ones((places, count))
    if states.shape[1]:
        known = pad(ids, (0, count))[None]
        current = module.start(states)
        for head in range(count):
            given = known[:, first - 1 + head :][:, : states.shape[1], None].to(current.device)
            current = module.step(head, current, given)
            probs = module.logits(head, current)[0].float().softmax(-1).max(-1)
            tokens[late:, head], q[late:, head] = probs.indices.cpu(), probs.values.cpu()
    return Guesses.of(tokens, ids[begin:].cpu(), [0] * late + [count] * (places - late), q)
