"""The prompts that heads for a chat model learn on."""

import json
import re
from pathlib import Path

import pytest

from labkit.training import asked
from labkit.training.asked import KINDS, instructions

PROMPTS = Path(__file__).parents[1] / "data" / "prompts"


def form(template: str) -> re.Pattern[str]:
    """What a template's filled forms look like."""
    return re.compile(
        "".join(".+" if part.startswith("{") else re.escape(part) for part in re.split(r"({\w+})", template)), re.S
    )


@pytest.fixture(scope="module")
def some() -> list[str]:
    return instructions(70)


def test_the_kinds_come_in_turn(some):
    assert len(set(some)) == 70
    for at, prompt in enumerate(some):
        assert any(form(template).fullmatch(prompt) for template in KINDS[at % len(KINDS)]), prompt
        assert not re.search(r"\{(topic|code|passage|name|new|misspelt)\}", prompt)


def test_a_seed_has_one_list(some):
    assert instructions(70) == some and instructions(30) == some[:30]
    assert instructions(70, seed=1) != some


def test_nothing_of_the_measured_prompts_is_learnt(some):
    """No eight words in a row of a prompt in data/prompts."""
    lines = [line for path in PROMPTS.glob("*.jsonl") for line in path.read_text().splitlines()]
    measured = {gram for line in lines for gram in grams(json.loads(line)["prompt"])}
    templates = {
        gram for kind in KINDS for template in kind for gram in grams(template.replace("{code}", "python def"))
    }
    learnt = {gram for prompt in instructions(700) for gram in grams(prompt)} - templates
    assert len(measured) > 1000 and not measured & learnt


def grams(text: str, length: int = 8) -> set[tuple[str, ...]]:
    words = re.findall(r"\w+", text.lower())
    return {tuple(words[at : at + length]) for at in range(len(words) - length + 1)}


def test_misspelt_text_differs_in_swapped_letters():
    text = "several ordinary sentences without anything special, written several times over again"
    wrong = asked._misspelt(text, asked.random.Random(3))
    changed = [(a, b) for a, b in zip(text.split(" "), wrong.split(" "), strict=True) if a != b]
    assert changed and all(sorted(a) == sorted(b) for a, b in changed)
