"""Strategies measured over prompts, every run a row on disk at once: interrupted, it goes on where it was."""

import hashlib
import json
import logging
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from types import CodeType, FunctionType, SimpleNamespace
from typing import Any

from torch import nn
from tqdm.auto import tqdm

from labkit.compare import named
from labkit.decoding import PHASES
from labkit.doctor import machine
from labkit.drafters import Plain
from labkit.errors import LabkitError
from labkit.heads.trained import model_hash
from labkit.prompts import read_prompts
from labkit.protocol import Drafter
from labkit.saved import append_row, pandas, read_rows

VERSION = 1
BASELINE = "Plain()"
SPREAD = ("tokens_per_second", "speedup")


@dataclass(frozen=True)
class Sweep:
    """Measured runs: `rows`, one a strategy, prompt and repeat, with the plain run beside it in `speedup`.

    A row has key, name, exit_layer, max_draft, prompt, repeat, and either error (what the strategy raised) or figures:
    new_tokens, seconds, prefill_seconds, tokens_per_second (prefill included), speedup (decoding alone, over the plain
    run just before), rounds, drafted, accepted, rejections, same_text, milliseconds by phase; then the machine.
    """

    rows: list[dict[str, Any]]

    @classmethod
    def load(cls, path: Any) -> "Sweep":
        """The rows that a sweep has written so far."""
        if not Path(path).exists():
            raise LabkitError(f"there is no file {str(path)!r}; give the path that the sweep was given")
        return cls(list(read_rows(Path(path), "sweep", VERSION).values()))

    @property
    def errors(self) -> list[dict[str, Any]]:
        """The rows of runs that raised."""
        return [row for row in self.rows if row["error"]]

    def __repr__(self) -> str:
        names = {row["name"] for row in self.rows}
        return f"Sweep({len(self.rows)} runs of {len(names)} strategies, {len(self.errors)} errors)"

    def summary(self) -> list[dict[str, Any]]:
        """One line a strategy: medians, with quartiles _q1 and _q3, over its runs; counts are pooled."""
        lines = []
        for name in dict.fromkeys(row["name"] for row in self.rows):
            mine = [row for row in self.rows if row["name"] == name]
            done = [row for row in mine if not row["error"]]
            line = {key: mine[0][key] for key in ("name", "exit_layer", "max_draft")}
            line |= {"runs": len(done), "errors": len(mine) - len(done)}
            for figure in SPREAD:
                values = [row[figure] for row in done if row[figure] is not None]
                for ending, value in zip(("_q1", "", "_q3"), quartiles(values), strict=True):
                    line[figure + ending] = value
            total = {key: sum(row[key] for row in done) for key in
                     ("new_tokens", "rounds", "drafted", "accepted", "rejections", "same_text")}  # fmt: skip
            judged = total["accepted"] + total["rejections"]
            line["tokens_per_round"] = total["new_tokens"] / total["rounds"] if done else None
            line["acceptance_rate"] = total["accepted"] / total["drafted"] if total["drafted"] else None
            line["alpha"] = total["accepted"] / judged if judged else None
            line["same_text"] = total["same_text"]
            for phase in PHASES:
                line[f"{phase}_ms"] = sum(row[f"{phase}_ms"] for row in done) / total["rounds"] if done else None
            lines.append(line)
        return lines

    def to_pandas(self, level: str = "strategy") -> Any:
        """A table with one line a strategy (see summary; milliseconds are a round's), or a run ("run")."""
        if level not in ("strategy", "run"):
            raise LabkitError(f'got level={level!r}; write "strategy" or "run"')
        lines = self.summary() if level == "strategy" else self.rows
        return pandas().DataFrame(lines).astype({"exit_layer": "Int64", "max_draft": "Int64"})


def quartiles(values: Sequence[float]) -> list[float | None]:
    """First quartile, median, third quartile; None of nothing."""
    if len(values) < 2:
        return [*(values or [None])] * 3
    return list(statistics.quantiles(values, n=4, method="inclusive"))


def sweep(
    lab: Any,
    prompts: Any,
    grid: Sequence[Drafter] | Mapping[str, Drafter],
    *,
    max_new_tokens: int = 64,
    repeats: int = 3,
    path: Any = None,
    progress: Callable[[list], Iterable] | None = None,
) -> Sweep:
    """Run every strategy of a grid on every prompt `repeats` times, greedily, each round of them behind a plain run.

    prompts: one prompt or a list, as in Lab.generate. grid: strategies, or a mapping from names to them. path: a JSONL
    file; each run is appended to it as soon as it is done, and runs that are in it already (of the same weights,
    strategy, prompt, settings, device and versions) are not done again. progress: wraps the steps, as tqdm does
    (default: tqdm's bar). A strategy that raises has a row with its error, and the others go on: see Sweep.errors.
    """
    for name, value in (("max_new_tokens", max_new_tokens), ("repeats", repeats)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise LabkitError(f"got {name}={value!r}; write an int of at least 1")
    strategies = _strategies(grid)
    ids = read_prompts(prompts, None, lab.tokenizer, lab.backbone.vocab).rows
    if (longest := max(map(len, ids))) + max_new_tokens > lab.backbone.limit:
        raise LabkitError(
            f"a prompt of {longest} tokens and max_new_tokens={max_new_tokens} need more than the model's "
            f"{lab.backbone.limit} positions; shorten one of them"
        )
    lab.backbone.check_unchanged()
    where = {key: value for key, value in machine(lab.backbone).items() if key not in ("date", "extensions")}
    shared = {"weights": model_hash(lab), "max_new_tokens": max_new_tokens, **where}
    prints = {name: fingerprint(drafter) for name, drafter in strategies.items()}

    def key(name: str, prompt: int, repeat: int) -> str:
        words = json.dumps([shared, prints[name], ids[prompt], repeat], sort_keys=True)
        return hashlib.sha256(words.encode()).hexdigest()[:32]

    file = None if path is None else Path(path)
    known = {} if file is None or not file.exists() else read_rows(file, "sweep", VERSION, mend=True)
    known = {name: row for name, row in known.items() if not row["error"]}
    places = [(prompt, repeat) for repeat in range(repeats) for prompt in range(len(ids))]
    missing = {place: [n for n in strategies if key(n, *place) not in known] for place in places}
    for name in {name for names in missing.values() for name in names} | {BASELINE} if any(missing.values()) else ():
        _run(lab, ids[0], strategies[name], min(8, max_new_tokens))  # warms up
    steps = [place for place in places if missing[place]]
    for number, (prompt, repeat) in enumerate((progress or _bar)(steps)):
        others = [name for name in missing[prompt, repeat] if name != BASELINE]
        shift = number % max(1, len(others))
        plain = None
        for name in [BASELINE, *others[shift:], *others[:shift]]:
            drafter = strategies[name]
            row = {"labkit": "sweep", "version": VERSION, "key": key(name, prompt, repeat), "name": name,
                   "exit_layer": _int(drafter, "exit"), "max_draft": _int(drafter, "max_draft"),
                   "prompt": prompt, "repeat": repeat, "error": None}  # fmt: skip
            figures = _run(lab, ids[prompt], drafter, max_new_tokens)
            tokens = figures.pop("tokens", None)
            if name == BASELINE:
                plain = None if tokens is None else (tokens, figures["decoding"])
            if tokens is not None:
                speed = lambda ids, seconds: len(ids) / seconds if seconds > 0 else None  # noqa: E731
                mine, other = speed(tokens, figures.pop("decoding")), plain and speed(*plain)
                figures["speedup"] = mine / other if mine and other else None
                figures["same_text"] = bool(plain and tokens == plain[0])
            row |= {**figures, **shared}
            known[row["key"]] = row
            if file is not None:
                append_row(file, row)
    found = []
    for prompt, repeat in places:
        found += [{**known[key(n, prompt, repeat)], "name": n, "prompt": prompt} for n in strategies]
    return Sweep(found)


def _run(lab: Any, ids: list[int], drafter: Drafter, count: int) -> dict[str, Any]:
    """One run's figures, or its error."""
    try:
        out = lab.generate(ids, drafter, max_new_tokens=count)
    except Exception as error:  # a strategy may raise whatever it likes, and must not cost the others their rows
        logging.getLogger("labkit").warning("%r raised %s: %s", drafter, type(error).__name__, error)
        return {"error": f"{type(error).__name__}: {error}"}
    names = "new_tokens seconds prefill_seconds tokens_per_second drafted accepted rejections".split()
    figures = {name: getattr(out, name) for name in names} | {"rounds": out.row_rounds, "reason": out.reasons[0]}
    figures |= {f"{phase}_ms": 1000 * value for phase, value in out.phase_seconds.items()}
    return {**figures, "tokens": out.tokens[0], "decoding": out.seconds - out.prefill_seconds}


def fingerprint(thing: Any) -> Any:
    """What makes a strategy this strategy: its class and settings, and the weights of the modules in it."""
    name = f"{type(thing).__module__}.{type(thing).__qualname__}"
    if is_dataclass(thing) and not isinstance(thing, type):
        return [name, {f.name: fingerprint(getattr(thing, f.name)) for f in fields(thing)}]
    model = thing if isinstance(thing, nn.Module) else getattr(thing, "model", None)
    if isinstance(model, nn.Module):
        return [name, repr(model), model_hash(SimpleNamespace(model=model))]
    if isinstance(thing, list | tuple):
        return [fingerprint(one) for one in thing]
    if isinstance(thing, FunctionType):  # whose text form has an address; one within another may be any of several
        if "<" not in thing.__qualname__:
            return [thing.__module__, thing.__qualname__]
        code, cells = thing.__code__, [fingerprint(cell.cell_contents) for cell in thing.__closure__ or ()]
        constants = [repr(x) for x in code.co_consts if not isinstance(x, CodeType)]
        return [thing.__module__, thing.__qualname__, code.co_code.hex(), list(code.co_names), constants, cells]
    return repr(thing)


def _strategies(grid: Any) -> dict[str, Drafter]:
    given = grid.values() if isinstance(grid, Mapping) else [grid] if isinstance(grid, Drafter) else grid
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise LabkitError(f"got grid={grid!r}; write a list such as [labkit.EarlyExit(12)], or a mapping from names")
    wrong = [one for one in given if not isinstance(one, Drafter)]
    if wrong:
        raise LabkitError(
            f"the grid has {repr(wrong[0])[:60]}, which is not a draft strategy; write labkit.EarlyExit(12)"
        )
    found = dict(grid) if isinstance(grid, Mapping) else named(list(given))
    if not found:
        raise LabkitError("got an empty grid; give at least one strategy")
    if not isinstance(found.get(BASELINE, Plain()), Plain):
        raise LabkitError(
            f"the grid calls {found[BASELINE]!r} {BASELINE!r}, which is the baseline's name; write another"
        )
    first: dict[str, Drafter] = {BASELINE: Plain()}
    return first | found


def _int(drafter: Drafter, name: str) -> int | None:
    value = getattr(drafter, name, None)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _bar(steps: list) -> Iterable:
    return tqdm(steps, desc="sweep", unit="prompt", disable=None)
