"""What a generation gives back: the text, and what happened in every round."""

import functools
import html
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from labkit.decoding import PHASES, Round
from labkit.errors import LabkitError
from labkit.pieces import Piece, Texts, pieces_of, spell_out
from labkit.saved import pandas, read_result, write_result
from labkit.spelling import Spelling

KIND, VERSION = "generation", 1


@dataclass(frozen=True)
class Generation:
    """A finished generation.

    text: the new text; a string for one prompt, a list for a list, None without a tokenizer. tokens: the new ids
    of each row, EOS included. prompts: the ids each row started from. rounds: what happened, round by round.
    reasons: why each row ended ("length", "eos", "stop", "criteria"). settings: what the run used. lossless:
    whether the text is the target's own. seconds: wall time, prefill included. spelling, told: where `texts` come from.
    """

    text: str | list[str] | None
    tokens: list[list[int]]
    prompts: list[list[int]]
    rounds: list[Round]
    reasons: list[str | None]
    settings: Mapping[str, Any]
    lossless: bool
    seconds: float
    prefill_seconds: float
    spelling: Spelling = field(default_factory=Spelling, repr=False, compare=False)
    told: Texts | None = field(default=None, repr=False, compare=False)

    @functools.cached_property
    def texts(self) -> Texts:
        """The texts of all its tokens; computed when first asked for."""
        return self.told or spell_out(self.spelling, self.prompts, self.rounds)

    @property
    def prompt_text(self) -> list[str]:
        """Each row's prompt as text, special tokens included."""
        return self.texts.whole

    def pieces(self, row: int = 0) -> list[Piece]:
        """What happened in one row, token by token: each round's drafted tokens, then the target's own."""
        if not 0 <= row < len(self.prompts):
            raise LabkitError(f"got row={row!r}; this generation has rows 0 to {len(self.prompts) - 1}")
        found, begin, texts = [], len(self.prompts[row]), self.texts
        for number, happened in enumerate(self.rounds):
            depth = self.settings.get("depth")
            found += pieces_of(happened, row, number, begin - 1, texts, depth)
            begin += len(happened.tokens[row])
        return found

    def to_pandas(self, level: str = "token") -> Any:
        """A table with one line a token ("token": see Piece), a row's round ("round"), or for all of it ("run")."""
        if level not in ("token", "round", "run"):
            raise LabkitError(f'got level={level!r}; write "token", "round" or "run"')
        pd = pandas()
        if level == "run":
            return pd.DataFrame([self.figures()])
        if level == "token":
            lines = [asdict(piece) for row in range(len(self.prompts)) for piece in self.pieces(row)]
            table = pd.DataFrame(lines, columns=[f.name for f in fields(Piece)])
            whole = dict.fromkeys(("node", "exit_layer"), "Int64")
            return table.astype(whole | dict.fromkeys(("draft_probability", "target_probability"), "float64"))
        columns = "row round drafted accepted rejected committed".split() + [f"{phase}_ms" for phase in PHASES]
        lines = [
            [row, number, len(r.drafted[row]), r.accepted[row], int(r.rejected[row]), len(r.tokens[row]),
             *(1000 * r.seconds[row][phase] for phase in PHASES)]
            for row in range(len(self.prompts)) for number, r in enumerate(self.rounds) if r.tokens[row]
        ]  # fmt: skip
        return pd.DataFrame(lines, columns=columns)

    def figures(self) -> dict[str, Any]:
        """Every figure and setting by name."""
        names = "new_tokens row_rounds drafted accepted rejections tokens_per_round acceptance_rate alpha".split()
        names += "tokens_per_second seconds prefill_seconds lossless".split()
        phases = {f"{phase}_ms": 1000 * value for phase, value in self.phase_seconds.items()}
        return {"rounds": len(self.rounds)} | {name: getattr(self, name) for name in names} | phases | {**self.settings}

    def save(self, path: Any) -> None:
        """Write all of it, with the texts of its tokens, to one JSON file (compressed if its name ends in .gz)."""
        content = {f.name: getattr(self, f.name) for f in fields(self) if f.compare}
        content |= {"settings": {**self.settings}, "rounds": [asdict(r) for r in self.rounds]}
        write_result(path, KIND, VERSION, content | {"told": asdict(self.texts)})

    @classmethod
    def load(cls, path: Any) -> "Generation":
        """What `save` wrote; no model is needed to look at it."""
        found = read_result(path, KIND, VERSION)
        try:
            values = {f.name: found[f.name] for f in fields(cls) if f.compare}
            values |= {"rounds": [Round(**r) for r in found["rounds"]], "told": Texts(**found["told"])}
        except (KeyError, TypeError) as error:
            raise LabkitError(f"{str(path)!r} lacks parts of a generation ({error}); save it again") from error
        return cls(**values)

    @property
    def drafted(self) -> int:
        """Drafted tokens, over all rows."""
        return sum(len(row) for r in self.rounds for row in r.drafted)

    @property
    def accepted(self) -> int:
        """Accepted drafted tokens, over all rows."""
        return sum(sum(r.accepted) for r in self.rounds)

    @property
    def rejections(self) -> int:
        """Rounds in which the target turned a drafted token down, over all rows."""
        return sum(sum(r.rejected) for r in self.rounds)

    @property
    def row_rounds(self) -> int:
        """Rounds in which a row was still running, over all rows."""
        return sum(bool(row) for r in self.rounds for row in r.tokens)

    @property
    def new_tokens(self) -> int:
        """Committed tokens, over all rows."""
        return sum(len(row) for row in self.tokens)

    @property
    def tokens_per_round(self) -> float:
        """Tokens per round (tau), the target's own included; plain decoding has 1."""
        return self.new_tokens / max(1, self.row_rounds)

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted / drafted tokens; None if nothing was drafted."""
        return self.accepted / self.drafted if self.drafted else None

    @property
    def alpha(self) -> float | None:
        """Conditional acceptance: accepted / (accepted + rounds that rejected one); None if nothing was judged."""
        judged = self.accepted + self.rejections
        return self.accepted / judged if judged else None

    @property
    def tokens_per_second(self) -> float:
        """New tokens of all rows per second of wall time, prefill included."""
        return self.new_tokens / self.seconds

    @property
    def phase_seconds(self) -> dict[str, float]:
        """Seconds by phase, over all rounds."""
        shared = [next(filter(None, r.seconds)) for r in self.rounds]
        return {phase: sum(seconds[phase] for seconds in shared) for phase in PHASES}

    def summary(self) -> str:
        """The figures in one line."""
        rate = (
            "" if self.acceptance_rate is None else f", {self.acceptance_rate:.0%} of {self.drafted} drafted accepted"
        )
        return (
            f"{self.settings['drafter']}: {self.new_tokens} tokens in {len(self.rounds)} rounds, "
            f"{self.tokens_per_round:.2f} tokens per round{rate}, {self.tokens_per_second:.1f} tokens/s"
            f"{'' if self.lossless else ' (lossy: ' + ', '.join(self.settings['lossy']) + ')'}"
        )

    def __str__(self) -> str:
        texts = [self.text] if isinstance(self.text, str) else self.text or [str(row) for row in self.tokens]
        return "\n".join([*texts, f"[{self.summary()}]"])

    def __repr__(self) -> str:
        return f"Generation({self.summary()})"

    def _repr_html_(self) -> str:
        texts = [self.text] if isinstance(self.text, str) else self.text or [str(row) for row in self.tokens]
        style = "white-space:pre-wrap;font-family:monospace"
        shown = "".join(f'<div style="{style}">{html.escape(text)}</div>' for text in texts)
        return f"{shown}<p><em>{html.escape(self.summary())}</em></p>"
