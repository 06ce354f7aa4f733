"""How fast, held against its own ideal: strategies, the plain loop and transformers' generate in one process.

Speeds are sums over prompts (tokens / seconds); the quartiles are over single runs. Speed-up and loop efficiency
compare decoding without prefill; the comparison with transformers includes prefill on both sides.
"""

import json
import logging
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from labkit import compare, views
from labkit.costs import work_seconds
from labkit.doctor import machine
from labkit.drafters import EarlyExit, Plain, PromptLookup
from labkit.errors import LabkitError
from labkit.lab import Lab
from labkit.protocol import Drafter, Work
from labkit.session import Session
from labkit.trace import Generation


@dataclass
class Contestant:
    """One way to generate: a labkit strategy, or transformers' own (`drafter` None)."""

    name: str
    run: Callable[[list[int]], tuple[list[int], float, float, int]]
    """ids -> new tokens, seconds with prefill, decoding seconds (0 if unknown), rounds."""
    drafter: Drafter | None = None
    tokens: list[list[int]] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    decoding: list[float] = field(default_factory=list)
    rounds: list[int] = field(default_factory=list)
    outs: list[Generation] = field(default_factory=list)

    def race(self, ids: list[int]) -> None:
        """Run once and keep the figures."""
        tokens, seconds, decoding, rounds = self.run(ids)
        self.tokens.append(tokens)
        self.seconds.append(seconds)
        self.decoding.append(decoding)
        self.rounds.append(rounds)

    @property
    def speed(self) -> float:
        """Tokens per second over all runs, prefill included."""
        return sum(map(len, self.tokens)) / sum(self.seconds)

    @property
    def decoding_speed(self) -> float:
        """Tokens per second of decoding alone."""
        return sum(map(len, self.tokens)) / sum(self.decoding)


def ours(lab: Lab, name: str, drafter: Drafter, max_new_tokens: int) -> Contestant:
    """A labkit strategy."""

    def run(ids: list[int]):
        out = lab.generate(ids, drafter, max_new_tokens=max_new_tokens)
        contestant.outs.append(out)
        return out.tokens[0], out.seconds, out.seconds - out.prefill_seconds, len(out.rounds)

    contestant = Contestant(name, run, drafter)
    return contestant


def theirs(lab: Lab, name: str, max_new_tokens: int, **arguments: Any) -> Contestant:
    """Transformers' generate; rounds are the calls of the model's last layer."""
    last = views.layers_of(views.find_decoder(lab.model))[-1]
    model: Any = lab.model

    def run(ids: list[int]):
        calls = []
        hook = last.register_forward_hook(lambda *_: calls.append(1))
        given = torch.tensor([ids], device=lab.backbone.device)
        try:
            with assistant_settings(lab.model, arguments.get("num_assistant_tokens")):
                began = time.perf_counter()
                out = model.generate(
                    given, attention_mask=torch.ones_like(given), do_sample=False, max_new_tokens=max_new_tokens,
                    **{k: v for k, v in arguments.items() if k != "num_assistant_tokens"},
                )  # fmt: skip
                new = out[0, len(ids) :].tolist()
                seconds = time.perf_counter() - began
        finally:
            hook.remove()
        return new, seconds, 0.0, len(calls)

    return Contestant(name, run)


@contextmanager
def assistant_settings(model, draft_tokens: int | None) -> Iterator[None]:
    """What transformers reads from the model's generation config and not from the call, for a like comparison."""
    # Its assisted decoding warns of how it calls itself, which nobody here can change.
    config, logger = model.generation_config, logging.getLogger("transformers.generation.utils")
    other = lambda record: "Passing `generation_config` together" not in record.getMessage()  # noqa: E731
    wanted = dict(
        num_assistant_tokens=draft_tokens, num_assistant_tokens_schedule="constant", assistant_confidence_threshold=0
    )
    before = {name: getattr(config, name, None) for name in wanted}
    logger.addFilter(other)
    try:
        if draft_tokens is not None:
            for name, value in wanted.items():
                setattr(config, name, value)
        yield
    finally:
        logger.removeFilter(other)
        for name, value in before.items():
            setattr(config, name, value)


def rivals(lab: Lab, drafters: Sequence[Drafter], max_new_tokens: int) -> list[Contestant]:
    """Transformers' generate, plain and as each strategy that it has too."""
    found = [theirs(lab, "transformers generate", max_new_tokens)]
    for drafter in drafters:
        if (
            isinstance(drafter, EarlyExit)
            and drafter == EarlyExit(drafter.exit, drafter.max_draft)
            and (drafter.exits.fixed and drafter.exit != lab.backbone.depth)
        ):
            name = f"transformers assistant_early_exit={drafter.exit}, num_assistant_tokens={drafter.max_draft}"
            found.append(theirs(lab, name, max_new_tokens, assistant_early_exit=drafter.exit,
                                num_assistant_tokens=drafter.max_draft))  # fmt: skip
        if isinstance(drafter, PromptLookup):
            name = f"transformers prompt_lookup_num_tokens={drafter.max_draft}"
            found.append(theirs(lab, name, max_new_tokens, prompt_lookup_num_tokens=drafter.max_draft,
                                max_matching_ngram_size=drafter.ngram))  # fmt: skip
    return found


class BareSteps:
    """Times bare `Backbone.run` and head calls, outside the loop, at one context length."""

    def __init__(self, lab: Lab, ids: Sequence[int], drafters: Mapping[str, Drafter]):
        self.lab, depth = lab, lab.backbone.depth
        self.plain = [Work(0, depth, 1, head=1)]
        self.work = {name: d.work(depth) for name, d in drafters.items()}
        self.times: dict[str, list[tuple[float, float]]] = {name: [] for name in self.work}
        self.plain_times: list[float] = []
        most = 2 + max([d.scratch for d in drafters.values()], default=0)
        backbones = {id(w.backbone): w.backbone for pair in self.work.values() for part in pair for w in part}
        taps = sorted({depth for drafter in drafters.values() for depth in drafter.taps})
        self.sessions = {None: Session(lab.backbone, 1, len(ids) + most, taps)}
        self.sessions |= {b: Session(b, 1, len(ids) + most) for b in backbones.values() if b is not None}
        with torch.inference_mode():
            for session in self.sessions.values():
                session.prefill([ids])

    def measure(self) -> None:
        """Time every strategy's work once, and a plain step beside it."""
        for name, (draft, verify) in self.work.items():
            self.plain_times.append(self._time(self.plain))
            self.times[name].append((self._time(draft), self._time(verify)))

    def _time(self, works: Sequence[Work]) -> float:
        return sum(work_seconds(self.sessions[work.backbone], work) for work in works)

    def costs(self, name: str, draft_tokens: int) -> tuple[float, float]:
        """C (one drafted token) and v (one verification), in plain steps: medians."""
        step = statistics.median(self.plain_times)
        draft, verify = (statistics.median(part) for part in zip(*self.times[name], strict=True))
        return draft / max(1, draft_tokens) / step, verify / step


def bench(
    lab: Lab,
    prompts: Sequence[Sequence[int]],
    drafters: Sequence[Drafter],
    *,
    max_new_tokens: int = 64,
    repeats: int = 1,
    progress: Callable[[list], Iterable] = iter,
) -> dict[str, Any]:
    """Run plain, every strategy and transformers' counterparts, interleaved; figures as plain values.

    prompts: rows of token ids. progress: wraps the steps, as tqdm does. Returns {"machine", "settings", "rows"}; see
    `report` for the text form.
    """
    if not prompts:
        raise LabkitError("got no prompts to measure on; give at least one")
    if repeats < 1 or max_new_tokens < 1:
        raise LabkitError(f"got repeats={repeats} and max_new_tokens={max_new_tokens}; needed are at least 1 of each")
    strategies = compare.named([Plain(), *(d for d in drafters if not isinstance(d, Plain))])
    contestants = [ours(lab, name, d, max_new_tokens) for name, d in strategies.items()]
    contestants += rivals(lab, list(strategies.values()), max_new_tokens)
    middle = statistics.median_low(sorted(map(len, prompts)))
    ids = list(next(p for p in prompts if len(p) == middle))
    bare = BareSteps(lab, [*ids, *[ids[-1]] * (max_new_tokens // 2)], strategies)
    for contestant in contestants:
        contestant.run(ids)
        contestant.outs.clear()
    bare._time(bare.plain)
    for repeat, number in progress([(r, n) for r in range(repeats) for n in range(len(prompts))]):
        shift = (number + repeat) % len(contestants)
        for contestant in [*contestants[shift:], *contestants[:shift]]:
            contestant.race(list(prompts[number]))
        bare.measure()
    rows = [_row(lab, c, contestants, bare, [list(p) for _ in range(repeats) for p in prompts]) for c in contestants]
    settings = {"prompts": len(prompts), "max_new_tokens": max_new_tokens, "repeats": repeats}
    return {"machine": machine(lab.backbone), "settings": settings, "rows": rows}


def _row(
    lab: Lab, contestant: Contestant, all_: Sequence[Contestant], bare: BareSteps, prompts: Sequence
) -> dict[str, Any]:
    plain, generate = all_[0], next(c for c in all_ if c.name == "transformers generate")
    parted = compare.differences(lab.backbone, prompts, generate.tokens, contestant.tokens)
    speeds = [len(t) / s for t, s in zip(contestant.tokens, contestant.seconds, strict=True)]
    low, middle, high = statistics.quantiles(speeds, n=4, method="inclusive") if len(speeds) > 1 else [speeds[0]] * 3
    row: dict[str, Any] = {
        "name": contestant.name, "tokens_per_second": contestant.speed, "quartiles": [low, middle, high],
        "over_transformers_generate": contestant.speed / generate.speed,
        "tokens_per_round": sum(map(len, contestant.tokens)) / sum(contestant.rounds),
        "same_text": len(prompts) - len(parted), "texts": len(prompts), "differences": [asdict(d) for d in parted],
    }  # fmt: skip
    if contestant.drafter is None:
        return row
    outs, step = contestant.outs, statistics.median(bare.plain_times)
    accepted, drafted = sum(o.accepted for o in outs), sum(o.drafted for o in outs)
    judged = accepted + sum(o.rejections for o in outs)
    speedup = contestant.decoding_speed / plain.decoding_speed
    row |= {"decoding_tokens_per_second": contestant.decoding_speed, "speedup": speedup}
    row |= {"host_copies_per_round": sum(o.settings["host_copies"] for o in outs) / sum(contestant.rounds)}
    phases = {phase: sum(o.phase_seconds[phase] for o in outs) for phase in outs[0].phase_seconds}
    row["phase_share"] = {phase: value / sum(phases.values()) for phase, value in phases.items()}
    if contestant is plain:
        return row | {"loop_efficiency": step * plain.decoding_speed, "step_seconds": step}
    most = max(1, contestant.drafter.nodes)
    c, v = bare.costs(contestant.name, most)
    exits = Counter(layer for o in outs for r in o.rounds for row in r.exit for layer in row if layer)
    said: dict[str, Any] = {
        "drafted_per_round": drafted / sum(o.row_rounds for o in outs),
        "acceptance_rate": accepted / max(1, drafted), "alpha": accepted / max(1, judged),
        "draft_steps_in_loop": phases["draft"] / max(1, drafted) / step, "exits": dict(sorted(exits.items())),
    }  # fmt: skip
    said |= {key: outs[-1].settings[key] for key in outs[-1].settings if key.startswith("kv_bytes")}
    if not bare.work[contestant.name][1]:  # what a rule will do is not known beforehand
        return row | said
    # A round in which no row drafted is a plain step; the others cost gamma c + v.
    drafting = sum(any(r.drafted) for o in outs for r in o.rounds) / sum(contestant.rounds)
    gamma = drafted / sum(o.row_rounds for o in outs) if c else 0.0
    ideal = row["tokens_per_round"] / (gamma * c + drafting * v + 1 - drafting)
    ideals = {"drafting_rounds": drafting, "c": c, "v": v, "ideal_speedup": ideal, "loop_efficiency": speedup / ideal}
    return row | said | ideals


def report(result: dict[str, Any]) -> str:
    """The figures as a table with the machine above it."""
    m, s = result["machine"], result["settings"]
    head = (f"{m['model']}, {m['dtype']}, {m['device']} ({', '.join(m['extensions'])}), {m['threads']} threads, "
            f"torch {m['torch']}, transformers {m['transformers']}, {m['date']}\n"
            f"{s['prompts']} prompts x {s['repeats']}, {s['max_new_tokens']} new tokens, tokens/s with prefill, "
            "speed-up and eta without")  # fmt: skip
    titles = ",tokens/s,median [quartiles],/ generate,speed-up,tau,acc. rate,alpha,c,v,ideal,eta,same text".split(",")
    lines: list[list[str]] = [list(titles)]
    for row in result["rows"]:
        cell = lambda name, row=row: f"{row[name]:.2f}" if name in row else "–"  # noqa: E731
        (low, middle, high), ties = row["quartiles"], sum(d["near_tie"] for d in row["differences"])
        same = f"{row['same_text']}/{row['texts']}" + (f" ({ties} near-tie)" if ties else "")
        lines.append([row["name"], f"{row['tokens_per_second']:.1f}", f"{middle:.1f} [{low:.1f}, {high:.1f}]",
                      cell("over_transformers_generate"), cell("speedup"),
                      cell("tokens_per_round"), cell("acceptance_rate"), cell("alpha"), cell("c"), cell("v"),
                      cell("ideal_speedup"), cell("loop_efficiency"), same])  # fmt: skip
    widths = [max(len(line[i]) for line in lines) for i in range(len(titles))]
    shown = ["  ".join(x.ljust(w) for x, w in zip(line, widths, strict=True)).rstrip() for line in lines]
    count = s["prompts"] * s["repeats"] * s["max_new_tokens"]
    if count < 256 and any(row.get("loop_efficiency", 0) > 1 for row in result["rows"]):
        shown.append(f"{count} tokens of each strategy are too few to measure: an eta above 1 is noise")
    return "\n".join([head, *shown])


def write_json(result: dict[str, Any], path: str | Path) -> None:
    """Write a result whole or not at all."""
    path = Path(path)
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(result, indent=1) + "\n")
    part.replace(path)
