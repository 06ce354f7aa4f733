"""What the README shows runs as written."""

import json
import re
from pathlib import Path

from labkit.bench import report

README = (Path(__file__).parent.parent / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.S)


def test_two_commands():
    assert len(re.findall(r"<!-- (demo|test) -->\n```bash\npython3 -m venv [^\n]*\n```", README)) == 2
    assert README.count("```bash") == 2


def without_speeds(text):
    """Tokens per second, and the speed-up behind it, are the machine's."""
    text = re.sub(r"[\d.]+ tokens/s\]", "# tokens/s]", text)
    return re.sub(r" +[\d.]+ +[\d.]+x", " #", text).strip()


def test_example_prints_what_it_says(capsys):
    exec(compile(BLOCKS[0], "README.md", "exec"), {})
    (said,) = re.findall(r"<!-- output -->\n```text\n(.*?)```", README, re.S)
    assert without_speeds(capsys.readouterr().out) == without_speeds(said)


def test_measured_tables_are_generated():
    found = re.findall(r"<!-- measured (\S+) -->\n```text\n(.*?)```", README, re.S)
    assert found
    for file, shown in found:
        result = json.loads((Path(__file__).parent.parent / file).read_text())
        assert shown.strip() == report(result) and "noise" not in shown
        result["settings"]["prompts"] = 1
        assert report(result).endswith("64 tokens of each strategy are too few to measure: an eta above 1 is noise")


def test_write_your_own():
    import families

    import labkit

    names: dict = {"__name__": "readme"}
    exec(compile(next(b for b in BLOCKS if "class RepeatLast" in b), "README.md", "exec"), names)
    lab = labkit.Lab(families.tiny("llama"))
    exec(compile(next(b for b in BLOCKS if "class LastTwo" in b), "README.md", "exec"), names)
    prompts = [[3, 1, 4], [5]]
    plain = lab.generate(prompts, max_new_tokens=12).tokens
    names["EarlyExit"] = labkit.EarlyExit
    exec(compile(next(b for b in BLOCKS if "def sure" in b), "README.md", "exec"), names)
    out = lab.generate(prompts, names["drafter"], max_new_tokens=12)
    assert out.tokens == plain and {e for r in out.rounds for row in r.exit for e in row} == {2, 3, 4}
    for strategy in ("RepeatLast", "LastTwo"):
        out = lab.generate(prompts, names[strategy](), max_new_tokens=12)
        assert out.drafted > 0 and out.tokens == plain
    assert out.rounds[0].parents == [[-1, -1, 0, 1]] * 2 and out.rounds[0].drafted == [[4, 1, 1, 4], [5] * 4]


def test_combinations_are_read_as_they_are_shown():
    from labkit.drafters.written import read_strategy

    names: dict = {}
    exec(compile(next(b for b in BLOCKS if "Adaptive(" in b), "README.md", "exec"), names)
    assert read_strategy(repr(names["drafter"])) == names["drafter"]
    shown = re.findall(r'--drafters "([^"]+)"', README)
    assert shown and all(read_strategy(text) for text in shown)
