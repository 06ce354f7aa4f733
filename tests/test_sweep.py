"""Sweeps: every run a row at once, resumed where it was, and measured beside plain runs."""

import dataclasses
import json
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import families
import pytest
import torch
from letters import TEXTS, lab

import labkit
from labkit import EarlyExit, Heads, LabkitError, Medusa, Plain, PromptLookup
from labkit.sweep import BASELINE, Sweep, fingerprint, quartiles, sweep

GRID = [EarlyExit(2, 3), PromptLookup(2, 3)]
NAMES = [BASELINE, *map(repr, GRID)]


def run(grid=GRID, prompts=TEXTS[:2], repeats=2, count=5, **more):
    return sweep(lab(), prompts, grid, max_new_tokens=count, repeats=repeats, progress=iter, **more)


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@dataclass(frozen=True)
class Faulty(Plain):
    """Raises from its `good`-th generation on."""

    good: int
    error: type = RuntimeError

    def begin(self, session):
        STARTED.append(1)
        if len(STARTED) > self.good:
            raise self.error("out of luck")
        return session


STARTED = []


@pytest.fixture(autouse=True)
def anew():
    STARTED.clear()


@pytest.fixture
def generated(monkeypatch):
    """The drafters of all runs, in order."""
    seen, generate = [], labkit.Lab.generate

    def watched(self, prompt, drafter=None, **options):
        seen.append((repr(drafter), options["max_new_tokens"]))
        return generate(self, prompt, drafter, **options)

    monkeypatch.setattr(labkit.Lab, "generate", watched)
    return seen


def test_rows_and_figures(generated, tmp_path):
    found = run(path=tmp_path / "s.jsonl")
    assert len(found.rows) == 3 * 2 * 2 == len(lines(tmp_path / "s.jsonl")) and found.errors == []
    measured = [name for name, count in generated if count == 5 and name in NAMES][3:]  # three warm up
    assert measured[::3] == [NAMES[0]] * 4 and measured[1] != measured[4]
    table, runs = found.to_pandas(), found.to_pandas("run")
    assert table.name.tolist() == NAMES and table.runs.tolist() == [4, 4, 4] and table.same_text.tolist() == [4, 4, 4]
    assert table.exit_layer.tolist()[1] == 2 and table.max_draft.tolist()[1:] == [3, 3]
    for at, name in enumerate(NAMES):
        mine = runs[runs.name == name]
        speeds = mine.tokens_per_second.tolist()
        line = table.iloc[at]
        low, middle, high = statistics.quantiles(speeds, n=4, method="inclusive")
        assert (line.tokens_per_second_q1, line.tokens_per_second, line.tokens_per_second_q3) == (low, middle, high)
        assert line.speedup == statistics.median(mine.speedup) > 0
        assert line.tokens_per_round == mine.new_tokens.sum() / mine["rounds"].sum()
    assert table.tokens_per_round[0] == 1 and (runs[runs.name == BASELINE].speedup == 1).all()
    out = lab().generate(TEXTS[0], GRID[0], max_new_tokens=5)
    row = next(r for r in found.rows if r["name"] == NAMES[1] and r["prompt"] == 0)
    assert (row["drafted"], row["accepted"], row["rounds"]) == (out.drafted, out.accepted, len(out.rounds))
    assert row["weights"].startswith("sha256:") and row["dtype"] == "float64" and row["threads"] == 1
    assert Sweep.load(tmp_path / "s.jsonl").to_pandas().equals(table) and "12 runs of 3" in repr(found)
    assert quartiles([]) == [None] * 3 and quartiles([2.0]) == [2.0] * 3


def test_nothing_is_measured_twice(generated, tmp_path):
    path = tmp_path / "s.jsonl"
    first = run(path=path)
    generated.clear()
    again = run(path=path)
    assert again.rows == first.rows and generated == []
    more = run({"mine": GRID[0], "new": EarlyExit(3, 1)}, path=path)
    real = [name for name, count in generated if count == 5]
    assert real.count(repr(GRID[0])) == 0 and real.count(repr(EarlyExit(3, 1))) == 4 + 1
    assert [r["tokens_per_second"] for r in more.rows if r["name"] == "mine"] == [
        r["tokens_per_second"] for r in first.rows if r["name"] == repr(GRID[0])
    ]
    for other in ({"count": 6}, {"repeats": 3}, {"prompts": TEXTS[1:3]}):
        generated.clear()
        run(path=path, **other)
        assert generated, other
    generated.clear()
    sweep(
        labkit.Lab(families.tiny("llama", seed=5)),
        [[1, 2]],
        GRID,
        max_new_tokens=5,
        repeats=1,
        path=path,
        progress=iter,
    )
    assert len(generated) == 3 + 3


def test_interrupted_and_resumed(generated, tmp_path):
    path = tmp_path / "s.jsonl"
    grid = {"faulty": Faulty(3, KeyboardInterrupt), "exit": GRID[0]}
    with pytest.raises(KeyboardInterrupt):
        run(grid, path=path)
    kept = lines(path)
    assert len(kept) >= 2 * 2 + 1 and all(row["error"] is None for row in kept)
    path.write_bytes(path.read_bytes() + b'{"labkit": "sweep", "vers')  # it died while writing
    assert len(Sweep.load(path).rows) == len(kept)
    STARTED.clear()
    generated.clear()
    found = run(grid, path=path)
    assert len(found.rows) == 3 * 4 and found.errors == []
    assert [name for name, _ in generated].count(repr(grid["faulty"])) == 1 + 2
    assert lines(path)[: len(kept)] == kept


def test_a_failing_strategy_is_a_row_and_costs_no_other(tmp_path, caplog):
    path = tmp_path / "s.jsonl"
    found = run({"faulty": Faulty(3), "exit": GRID[0]}, path=path)
    assert len(found.rows) == 12 and len(found.errors) == 2 and "out of luck" in caplog.text
    assert {row["error"] for row in found.errors} == {"RuntimeError: out of luck"}
    table = found.to_pandas().set_index("name")
    assert table.errors.to_dict() == {BASELINE: 0, "faulty": 2, "exit": 0} and table.runs["exit"] == 4
    broken = run({"wrong": EarlyExit(9, 2)}, path=path)
    assert [row["error"].split(":")[0] for row in broken.errors] == ["LabkitError"] * 4
    assert broken.to_pandas().set_index("name").tokens_per_second.isna().to_dict() == {BASELINE: False, "wrong": True}
    STARTED[:] = []
    assert len(run({"faulty": Faulty(3), "exit": GRID[0]}, path=path).errors) == 0  # errors are tried again


def test_fingerprints_see_weights_and_not_addresses():
    heads = [Medusa(32, 61, 2, dtype=torch.float64) for _ in range(3)]
    heads[1].heads[0][0].linear.bias.data += 1
    one, other, same = (fingerprint(Heads(h)) for h in heads)
    assert one != other
    heads[2].load_state_dict(heads[0].state_dict())
    assert fingerprint(Heads(heads[2])) == one
    assert fingerprint(EarlyExit(2)) != fingerprint(EarlyExit(2, stop=labkit.below(0.5))) != fingerprint(EarlyExit(3))
    rules = [lambda drawn, level, t=t: drawn.q < t for t in (0.1,)] + [
        (lambda t: lambda drawn, level: drawn.q < t)(t) for t in (0.1, 0.2)
    ]
    assert len({str(fingerprint(EarlyExit(2, stop=rule))) for rule in rules}) == 3
    small = labkit.DraftModel(families.tiny("llama", seed=9, layers=2))
    assert "sha256" in str(fingerprint(small)) != str(fingerprint(dataclasses.replace(small, max_draft=2)))
    code = "from labkit import *; from labkit.sweep import fingerprint; print(fingerprint(EarlyExit(2, stop=below(.5))), fingerprint(EarlyExit(3)))"
    there = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(labkit.__file__).parents[1]
    )
    assert there.stdout.strip() == f"{fingerprint(EarlyExit(2, stop=labkit.below(0.5)))} {fingerprint(EarlyExit(3))}"


def test_bad_input(tmp_path):
    path = tmp_path / "s.jsonl"
    good = json.dumps({"labkit": "sweep", "version": 1, "key": "a"})
    for grid, more, words in (
        ([], {}, "empty grid"), ("EarlyExit", {}, "write a list"), (3, {}, "write a list"), ([3], {}, "not a draft strategy"),
        ({BASELINE: GRID[0]}, {}, "the baseline's name"), (GRID, {"repeats": 0}, "got repeats=0"),
        (GRID, {"count": 0}, "got max_new_tokens=0"), (GRID, {"prompts": []}, "empty list of prompts"),
        (GRID, {"prompts": [""]}, "prompt 0 is empty"), (GRID, {"prompts": [[1] * 127]}, "128 positions"),
        (GRID, {"path": tmp_path}, "cannot be read"), (GRID, {"path": tmp_path / "no" / "s.jsonl"}, "make its folder first"),
    ):  # fmt: skip
        with pytest.raises(LabkitError, match=words):
            run(grid, **more)
    for content, words in ((good + "\n[1]\n", "line 2 .* no row of a sweep"), ("no\n", "line 1 .* not JSON"),
                           (good.replace("1", "7") + "\n", "version 7, and this labkit writes version 1")):  # fmt: skip
        path.write_text(content)
        with pytest.raises(LabkitError, match=words):
            run(path=path)
        assert path.read_text() == content
    with pytest.raises(LabkitError, match="there is no file"):
        Sweep.load(tmp_path / "none")
    with pytest.raises(LabkitError, match="got level='round'"):
        run(repeats=1).to_pandas("round")
    assert len(run(GRID[0], prompts="ab", repeats=1).rows) == 2
