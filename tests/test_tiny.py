"""The model that comes with labkit, its heads and its adapter: they open, they are lossless, and they do what is stated."""

import json
from pathlib import Path

import pytest

import labkit
from labkit import EarlyExit, Heads, data, load_heads
from labkit.heads.adapter_files import load_adapter
from labkit.training.early_exit_loss import LayerSkip, judge

DATA = Path(__file__).parents[1] / "data"
STATED = json.loads((DATA / "results" / "tiny.json").read_text())["texts"]["standard library, held out"]
ROWS, LENGTH = 16, 1024


@pytest.fixture(scope="module")
def lab():
    return labkit.load("tiny", device="cpu", dtype="float32")


@pytest.fixture(scope="module")
def rows(lab):
    """The rows that the stated figures are of; on another Python its library is another text."""
    corpus = data.standard_library().split(0.05)[1]
    if corpus.hash != STATED["hash"]:
        pytest.skip("the figures are stated for another version of Python's standard library")
    found = corpus.rows(lab.tokenizer, LENGTH)
    return found[:: max(1, len(found) // ROWS)][:ROWS]


def drafters(lab):
    return {
        "EarlyExit(2, max_draft=3)": EarlyExit(2, max_draft=3),
        "EarlyExit(4, max_draft=3)": EarlyExit(4, max_draft=3),
        "EarlyExit(2, adapter=kangaroo, max_draft=3)": EarlyExit(
            2, adapter=load_adapter("tiny/kangaroo", lab), max_draft=3
        ),
        "Heads(mlp-speculator)": Heads(load_heads("tiny/mlp-speculator", lab)),
        "Heads(medusa)": Heads(load_heads("tiny/medusa", lab)),
    }


def test_all_of_it_opens_and_is_lossless(lab):
    prompts = ["def fibonacci(n):\n", "import os\n\n\nclass "]
    plain = lab.generate(prompts, max_new_tokens=24)
    for name, drafter in drafters(lab).items():
        out = lab.generate(prompts, drafter, max_new_tokens=24)
        assert out.tokens == plain.tokens and out.accepted, name


def test_it_is_small_enough_to_ship():
    assert sum(path.stat().st_size for path in (DATA / "tiny").rglob("*") if path.is_file()) <= 25e6


def test_the_losses_that_are_stated(lab, rows):
    found = judge(LayerSkip(lab.model, steps=1).eval(), rows[:8])
    whole = judge(LayerSkip(lab.model, steps=1).eval(), rows[8:])
    for layer, loss in STATED["loss"].items():
        assert (found[f"loss_{layer}"] + whole[f"loss_{layer}"]) / 2 == pytest.approx(loss, abs=0.01), layer
    assert STATED["loss"]["12"] < STATED["loss"]["4"] - 0.1


def test_the_acceptance_that_is_stated(lab, rows):
    """On half of the prompts."""
    for name, drafter in drafters(lab).items():
        (stated,) = (run for run in STATED["runs"] if run["drafter"] == name and run["temperature"] == 0)
        outs = [lab.generate(row[:64].tolist(), drafter, max_new_tokens=128, eos_token_id=None) for row in rows[::2]]
        accepted, rejected = (sum(getattr(out, figure) for out in outs) for figure in ("accepted", "rejections"))
        assert accepted / (accepted + rejected) == pytest.approx(stated["alpha"], abs=0.1), name
