"""Prompts to draw a chat model's own continuations from, without a network: templates, filled at random.

They are of the kinds that data/prompts/ measures on, and share no text with those.
"""

import ast
import random
import re
import textwrap
from collections.abc import Callable

from labkit import data

TOPICS = """
photosynthesis; tides; the Roman aqueducts; compound interest; insomnia; bees; bicycle gears; black holes; bread
making; bridges; the Silk Road; chess openings; cholesterol; clouds; coffee; comets; composting; concrete; coral
reefs; cotton; democracy; desalination; dinosaurs; earthquakes; electric cars; elephants; email etiquette; evolution;
fermentation; first aid; fog; fractions; glaciers; glass; gravity; guitars; hay fever; hiking boots; hospital hygiene;
hurricanes; inflation; insulation; jazz; job interviews; kidneys; kites; knitting; lasers; lightning; lighthouses;
maps; marathon training; meditation; migration of birds; minimum wage; mirrors; money for students; mountains;
mushrooms; noise; oceans; olive oil; opera; origami; owls; painting a room; paper; passwords; pensions; photography;
pianos; plastic; plumbing; poetry; potatoes; prime numbers; printing; probability; public libraries; rainbows;
recycling; renting a flat; rice; rivers; robots; rockets; sailing; salt; satellites; school uniforms; seasons; sharks;
shyness; silk; sleep; snow; soil; solar panels; sourdough; spiders; steam engines; stress; sugar; sundials; swimming;
taxes; tea; teeth; telescopes; tomatoes; town planning; trains; trees; vaccines; volcanoes; volunteering; walking to
work; water filters; weaving; whales; wheat; wind turbines; wine; wolves; wool; working from home; yoga; zero
""".replace("\n", " ").split(";")
PEOPLE = (
    "Ana Ben Carla Dmitri Elif Femi Grace Hugo Ines Jamal Keiko Lars Mina Noor Omar Priya Quinn Rosa Sven Tara".split()
)
THINGS = "apples books candles eggs envelopes lemons marbles pencils plates shirts stamps tickets tiles towels".split()
LANGUAGES = "French German Spanish Italian Portuguese Dutch".split()
CHAT = (
    "Explain {topic} to a ten-year-old.", "Give me five tips about {topic}.",
    "What should a beginner know about {topic}?",
    "Write a short poem about {topic}.", "Write a friendly message to {person} about {topic}.",
    "I am giving a talk on {topic} next week. Suggest an outline.", "Tell me a short story about {person} and {topic}.",
    "What are common mistakes with {topic}, and how can I avoid them?", "Compare {topic} and {other}.",
    "Make a plan for a weekend workshop on {topic}.",
)  # fmt: skip
QUESTIONS = (
    "What is the most important fact about {topic}? Answer in two sentences.", "Why does {topic} matter?",
    "Who first studied {topic}, and when?", "How does {topic} work? Keep it brief.",
    "Is {topic} connected with {other}? Explain.", "Name three things that most people do not know about {topic}.",
)  # fmt: skip
ARITHMETIC = (
    "{person} has {a} {things} and buys {b} more. Then {c} are given away. How many are left?",
    "What is {a} + {b}? Show the steps.", "Calculate {a} * {d} step by step.",
    "What is {big} - {a}? Explain each step.", "A box holds {d} {things}. How many {things} are in {c} boxes?",
    "{person} reads {c} pages a day. How long do {big} pages take?", "What is {p} percent of {big}?",
    "Split {big} {things} equally among {d} people. How many are left over?",
)  # fmt: skip
CODE = (
    "Write a Python function `{name}`. Its docstring is: {doc}", "Explain what this Python code does.\n\n{code}",
    "Add comments to this Python code.\n\n{code}", "Write a test for this Python function.\n\n{code}",
    "What could go wrong in this function?\n\n{code}",
)  # fmt: skip
EDITING = (
    "Rename `{variable}` to `{new}` everywhere in this code. Return the whole code and change nothing else.\n\n{code}",
    "Return this text with every sentence on a line of its own.\n\n{passage}",
    "Correct the spelling of this text and return all of it.\n\n{misspelt}",
)  # fmt: skip
SUMMARISING = ("Summarise the following text in two sentences.\n\n{passage}", "What is this text about?\n\n{passage}")
TRANSLATION = ("Translate into {language}: {sentence}", "Translate the following text into {language}.\n\n{passage}")
KINDS = (CHAT, QUESTIONS, ARITHMETIC, CODE, EDITING, SUMMARISING, TRANSLATION)


def instructions(count: int, seed: int = 0) -> list[str]:
    """`count` different prompts, the seven kinds in turn, from lists here and the standard library's sources."""
    draw = random.Random(seed)
    functions, passages = _functions(), _passages()
    found: dict[str, None] = {}
    while len(found) < count:
        template = draw.choice(KINDS[len(found) % len(KINDS)])
        name, doc, code, variable = draw.choice(functions)
        passage = draw.choice(passages)
        fields: dict[str, Callable[[], object]] = {
            "topic": lambda: draw.choice(TOPICS).strip(), "other": lambda: draw.choice(TOPICS).strip(),
            "person": lambda: draw.choice(PEOPLE), "things": lambda: draw.choice(THINGS),
            "language": lambda: draw.choice(LANGUAGES), "a": lambda: draw.randint(12, 99),
            "b": lambda: draw.randint(12, 99), "c": lambda: draw.randint(3, 11), "d": lambda: draw.randint(3, 25),
            "p": lambda: draw.choice((5, 10, 15, 20, 25, 40)), "big": lambda: draw.randint(110, 990),
        }  # fmt: skip
        filled = {key: make() for key, make in fields.items()}
        filled |= {"name": name, "doc": doc, "code": f"```python\n{code}\n```", "variable": variable,
                   "new": f"new_{variable}", "passage": passage, "sentence": re.split(r"(?<=\.)\s", passage)[0],
                   "misspelt": _misspelt(passage, draw)}  # fmt: skip
        found[template.format(**filled)] = None
    return list(found)


def _functions() -> list[tuple[str, str, str, str]]:
    """(name, first line of the docstring, source, a local name) of short documented functions."""
    found = []
    for document in data.standard_library().documents:
        try:
            tree = ast.parse(document.text)
        except SyntaxError:
            continue
        lines = document.text.split("\n")
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and (doc := ast.get_docstring(node)) and 5 < len(node.body) + 4 < 30:
                source = textwrap.dedent("\n".join(lines[node.lineno - 1 : node.end_lineno]))
                locals_ = [n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)]
                if locals_ and 5 <= source.count("\n") <= 22:
                    found.append((node.name, doc.splitlines()[0], source, locals_[0]))
    return found


def _passages() -> list[str]:
    """Paragraphs of prose out of docstrings."""
    found = []
    for document in data.standard_library(docstrings=True).documents:
        for paragraph in document.text.split("\n\n"):
            text = " ".join(paragraph.split())
            prose = re.fullmatch(r"[A-Z][\w ,;:'()\-/\"]{40,}\..*", text)
            if prose and 160 <= len(text) <= 700 and text.count(". ") >= 1 and not re.search(r"[=>{}<|]|\.\.", text):
                found.append(text)
    return found


def _misspelt(text: str, draw: random.Random) -> str:
    """Every tenth word or so with two letters swapped."""
    words = text.split(" ")
    for at, word in enumerate(words):
        if len(word) > 4 and word.isalpha() and draw.random() < 0.15:
            i = draw.randrange(1, len(word) - 2)
            words[at] = word[:i] + word[i + 1] + word[i] + word[i + 2 :]
    return " ".join(words)
