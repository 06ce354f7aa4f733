"""What the README shows runs as written."""

import re
from pathlib import Path

import pytest

README = (Path(__file__).parent.parent / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.S)


def test_two_commands():
    assert len(re.findall(r"<!-- (demo|test) -->\n```bash\npython3 -m venv [^\n]*\n```", README)) == 2
    assert README.count("```bash") == 2


@pytest.mark.smollm2
def test_example(capsys):
    exec(compile(BLOCKS[0], "README.md", "exec"), {})
    shown = capsys.readouterr().out
    assert "The capital of France is Paris." in shown and "tokens/round" in shown


def test_write_your_own(tmp_path):
    import families

    import labkit

    names: dict = {"__name__": "readme"}
    exec(compile(BLOCKS[1], "README.md", "exec"), names)
    lab = labkit.Lab(families.tiny("llama"))
    prompts = [[3, 1, 4], [5]]
    out = lab.generate(prompts, names["RepeatLast"](), max_new_tokens=12)
    assert out.drafted > 0 and out.tokens == lab.generate(prompts, max_new_tokens=12).tokens
