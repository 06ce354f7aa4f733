"""The tokens of a generation in the order of events, with their texts."""

from collections.abc import Sequence
from dataclasses import dataclass

from labkit.decoding import Round
from labkit.spelling import Spelling


@dataclass(frozen=True)
class Texts:
    """Texts of a generation's tokens, enough to look at it without the model.

    whole: each row's prompt. prompts: its tokens' texts. drafted, tokens, target: of those fields of every round.
    """

    whole: list[str]
    prompts: list[list[str]]
    drafted: list[list[list[str]]]
    tokens: list[list[list[str]]]
    target: list[list[list[str]]]


@dataclass(frozen=True)
class Piece:
    """A drafted token, or the token that the target itself committed at a round's end.

    node, parent: its place in the draft and its parent's (-1 = the pending token); node is None for the target's own
    token, and parent then the last accepted one. depth: its distance from the pending token, from 1. position: in the
    text, prompt included. kind: "accepted", "rejected" (the target turned it down), "unjudged" (its parent was not
    accepted, an earlier sibling was, or the text ended before it), "target". target_token: what the target says in
    this place. exit_layer: how many layers it was read after (None if not from the target). The times are its round's.
    """

    row: int
    round: int
    node: int | None
    parent: int
    depth: int
    position: int
    token: int
    text: str
    kind: str
    draft_probability: float | None
    target_probability: float | None
    target_token: int
    target_text: str
    exit_layer: int | None
    draft_ms: float
    verify_ms: float
    accept_ms: float
    commit_ms: float


def spell_out(spelling: Spelling, prompts: Sequence[Sequence[int]], rounds: Sequence[Round]) -> Texts:
    """The texts of all tokens, each behind what it was drafted or committed behind."""
    found = Texts([spelling.whole(prompt) for prompt in prompts], [spelling.texts(p) for p in prompts], [], [], [])
    history = [list(prompt) for prompt in prompts]
    for happened in rounds:
        drafted, tokens, target = [], [], []
        for row, line in enumerate(history):
            behind = [line]  # what each row of the verification stands behind, the pending token first
            for token, parent in zip(happened.drafted[row], happened.parents[row], strict=True):
                behind.append([*behind[1 + parent][-40:], token])
            after = [behind[1 + parent] for parent in happened.parents[row]]
            drafted.append([spelling.text(b, t) for b, t in zip(after, happened.drafted[row], strict=True)])
            target.append([spelling.text(b, t) for b, t in zip(behind, happened.target[row], strict=False)])
            tokens.append(spelling.texts(happened.tokens[row], line))
            line += happened.tokens[row]
        for part, new in ((found.drafted, drafted), (found.tokens, tokens), (found.target, target)):
            part.append(new)
    return found


def pieces_of(happened: Round, row: int, number: int, pending: int, texts: Texts, layers: int | None) -> list[Piece]:
    """One row's pieces of round `number`; `pending` is its pending token's position, `layers` the target's."""
    if not happened.tokens[row]:
        return []
    drafted, parents, path = happened.drafted[row], happened.parents[row], happened.path[row]
    q, exits, target, left = happened.q[row], happened.exit[row], happened.target[row], happened.left[row]
    says, accepted = texts.target[number][row], happened.accepted[row]
    clock = {f"{phase}_ms": 1000 * value for phase, value in happened.seconds[row].items()}
    end, depths, found = path[-1] if path else -1, [0], []
    chosen = {parents[node]: node for node in path}  # children are tried in order: those behind the chosen one are not
    for node, (token, parent) in enumerate(zip(drafted, parents, strict=True)):
        depths.append(depths[1 + parent] + 1)
        judged = happened.rejected[row] if parent == end else node < chosen.get(parent, 0)
        kind = "accepted" if node in path else "rejected" if judged else "unjudged"
        found.append(Piece(
            row, number, node, parent, depths[-1], pending + depths[-1], token,
            texts.drafted[number][row][node], kind, q[node] if q else None, happened.p[row][node],
            target[1 + parent], says[1 + parent], (exits[node] or None) if exits else None, **clock,
        ))  # fmt: skip
    if len(happened.tokens[row]) > accepted:
        token, text, depth = happened.tokens[row][accepted], texts.tokens[number][row][accepted], accepted + 1
        layer = left[accepted] if left else layers
        found.append(Piece(row, number, None, end, depth, pending + depth, token, text, "target", None,
                           happened.own[row], token, text, layer, **clock))  # fmt: skip
    return found
