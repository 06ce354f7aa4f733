"""What every layer would say at every position of a text, and how sure it would be."""

import functools
import itertools
from dataclasses import dataclass, fields
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from labkit.errors import LabkitError
from labkit.prompts import one_text
from labkit.saved import pandas, read_result, write_result
from labkit.session import Session
from labkit.spelling import Spelling

KIND, VERSION = "layers", 1
TABLE = "top_token top_probability entropy final_rank final_probability next_probability cosine kl".split()


@dataclass(frozen=True, eq=False)
class Layers:
    """Layer l (row l - 1) at position t of a text: the law of token t + 1, read after l layers by the model's own head.

    tokens, texts: of the text. top_token, top_probability, top_text: the layer's most probable token. top_tokens,
    top_probabilities: its several best. entropy: of its law, in nats. final_rank, final_probability: in its law, of the
    token that the last layer puts first (rank 1 = first). next_probability: of the text's own next token (NaN at the
    end). cosine: of the layer's state to the one before it. kl: KL(last layer's law || its law), in nats.
    """

    tokens: list[int]
    texts: list[str]
    top_text: list[list[str]]
    top_token: Int[Tensor, "layers positions"]
    top_probability: Float[Tensor, "layers positions"]
    top_tokens: Int[Tensor, "layers positions top"]
    top_probabilities: Float[Tensor, "layers positions top"]
    entropy: Float[Tensor, "layers positions"]
    final_rank: Int[Tensor, "layers positions"]
    final_probability: Float[Tensor, "layers positions"]
    next_probability: Float[Tensor, "layers positions"]
    cosine: Float[Tensor, "layers positions"]
    kl: Float[Tensor, "layers positions"]
    model: str = ""

    @property
    def depth(self) -> int:
        """The number of layers."""
        return len(self.top_token)

    @functools.cached_property
    def first_agreeing(self) -> Int[Tensor, "positions"]:
        """The first layer from which on the top token is the last layer's for good."""
        agree = self.top_token == self.top_token[-1]
        return self.depth + 1 - agree.flip(0).long().cumprod(0).sum(0)

    def __repr__(self) -> str:
        return f"Layers({self.depth} layers, {len(self.tokens)} positions of {self.model})"

    def to_pandas(self) -> Any:
        """A table with one line a layer (from 1) and position; agrees: layer >= first_agreeing."""
        places, depth = len(self.tokens), self.depth
        columns: dict[str, Any] = {
            "layer": [layer for layer in range(1, depth + 1) for _ in range(places)],
            "position": [*range(places)] * depth, "token": self.tokens * depth, "text": self.texts * depth,
            "top_text": [text for line in self.top_text for text in line],
        }  # fmt: skip
        columns |= {name: getattr(self, name).flatten().numpy() for name in TABLE}
        agrees = torch.arange(1, depth + 1)[:, None] >= self.first_agreeing
        return pandas().DataFrame(columns | {"agrees": agrees.flatten().numpy()})

    def save(self, path: Any) -> None:
        """Write all of it to one JSON file (compressed if its name ends in .gz)."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        content = {
            name: {"dtype": str(x.dtype).removeprefix("torch."), "values": x.tolist()} if isinstance(x, Tensor) else x
            for name, x in values.items()
        }
        write_result(path, KIND, VERSION, content)

    @classmethod
    def load(cls, path: Any) -> "Layers":
        """What `save` wrote; no model is needed to look at it."""
        found = read_result(path, KIND, VERSION)
        try:
            values = {f.name: found[f.name] for f in fields(cls)}
            made: dict[str, Any] = {
                name: torch.tensor(x["values"], dtype=getattr(torch, x["dtype"])) if isinstance(x, dict) else x
                for name, x in values.items()
            }
            return cls(**made)
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise LabkitError(f"{str(path)!r} lacks parts of layers ({error}); save them again") from error


def layers(lab: Any, text_or_result: Any, *, chunk: int = 64, top: int = 5, row: int = 0) -> Layers:
    """What every layer of the lab's model says at every position of a text, through the model's own norm and head.

    text_or_result: text, token ids, chat messages, or a Generation, whose row `row` is taken with its prompt. chunk:
    positions computed at a time; at most chunk x vocabulary probabilities are held at once. top: how many best tokens
    are kept. Raises LabkitError for an empty text, or one longer than the model's positions.
    """
    for name, value in (("chunk", chunk), ("top", top)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise LabkitError(f"got {name}={value!r}; write an int of at least 1")
    ids, _ = one_text(lab, text_or_result, row)
    parts = list(_parts(lab, ids, chunk, min(top, lab.backbone.vocab)))
    whole: dict[str, Any] = {name: torch.cat([part[name] for part in parts], 1) for name in parts[0]}
    spelling = Spelling(lab.tokenizer)
    text = functools.cache(lambda place, token: spelling.text(ids[max(0, place - 40) : place + 1], token))
    said = [[text(place, token) for place, token in enumerate(line)] for line in whole["top_token"].tolist()]
    name = lab.model.config.name_or_path or type(lab.model).__name__
    return Layers(tokens=ids, texts=spelling.texts(ids), top_text=said, model=name, **whole)


def _parts(lab: Any, ids: list[int], chunk: int, top: int):
    session = session_of(lab.backbone, ids)
    for first in range(0, len(ids), chunk):
        yield _part(session, first, min(chunk, len(ids) - first), top)


@torch.inference_mode()
def session_of(backbone: Any, ids: list[int]) -> Session:
    """A session that has committed a text and run none of it."""
    session = Session(backbone, 1, len(ids))
    session.tokens[0, : len(ids)] = torch.tensor(ids, device=session.tokens.device)
    session.follow(session.n + len(ids), [len(ids)])
    return session


@torch.inference_mode()
def states_of(session: Session, first: int, count: int) -> list[Float[Tensor, "1 rows width"]]:
    """Positions first .. first+count-1 at every depth from 0 on; those before them must have been run."""
    given = session.tokens[:, first : first + count]
    rows = session.chain(first + 1 - session.lengths[0], count)
    states = [session.run(given, 0, 0, rows)]
    for layer in range(session.backbone.depth):
        states.append(session.run(states[-1] if layer else given, layer, layer + 1, rows))
    return states


@torch.inference_mode()
def _part(session: Session, first: int, count: int, top: int) -> dict[str, Tensor]:
    """Positions first .. first+count-1, in the slots behind those that earlier parts have written."""
    backbone, end = session.backbone, max(session.lengths)
    states = states_of(session, first, count)
    final = _law(backbone, states[-1])
    best = final.argmax(-1, keepdim=True)
    follows = session.tokens[0, first + 1 : first + count + 1, None]  # behind the end is whatever slot there is
    known = torch.arange(first, first + count, device=follows.device) < end - 1
    found: dict[str, list[Tensor]] = {name: [] for name in [*TABLE, "top_tokens", "top_probabilities"]}
    for before, state in itertools.pairwise(states):
        law = final if state is states[-1] else _law(backbone, state)
        probs, own = law.exp(), law.argmax(-1, keepdim=True)
        several = law.topk(top)
        at = {"top_token": own, "final_probability": best, "next_probability": follows, "top_probability": own}
        values = {name: probs.gather(1, index)[:, 0] for name, index in at.items()}
        values |= {"top_token": own[:, 0], "entropy": torch.special.entr(probs).sum(-1), "top_tokens": several.indices}
        values |= {"final_rank": 1 + (law > law.gather(1, best)).sum(-1), "top_probabilities": several.values.exp()}
        values["next_probability"] = values["next_probability"].where(known, torch.nan)
        values["kl"] = _divergence(final, law)
        values["cosine"] = torch.cosine_similarity(state[0].to(law), before[0].to(law), -1)
        for name, value in values.items():
            found[name].append(value.cpu())
    return {name: torch.stack(values) for name, values in found.items()}


def _law(backbone: Any, state: Float[Tensor, "1 rows width"]) -> Float[Tensor, "rows vocab"]:
    logits = backbone.head(state)[0].to(backbone.device)
    return (logits if logits.dtype == torch.float64 else logits.float()).log_softmax(-1)


def _divergence(one: Float[Tensor, "rows vocab"], other: Float[Tensor, "rows vocab"]) -> Float[Tensor, "rows"]:
    """KL(one || other) of log-laws; 0 ln 0 is 0."""
    weight = one.exp()
    return (weight * (one - other)).where(weight > 0, 0).sum(-1).clamp_min(0)
