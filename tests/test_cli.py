"""The command line on the real model, and its refusals."""

import argparse
import io
import json
import logging
import re
import subprocess
import sys

import families
import pytest
import torch
from conftest import missing
from letters import tokenizer

import labkit
from labkit import LabkitError, cli
from labkit.bench import bench
from labkit.cli import main, parser, read_prompt_files


def run(capsys, *words):
    code = main(list(words))
    out = capsys.readouterr()
    return code, out.out, out.err


@pytest.mark.smollm2
def test_demo(capsys, tmp_path):
    picture = tmp_path / "demo.png"
    code, out, _ = run(capsys, "demo", "--max-new-tokens", "6", "--picture", str(picture))
    assert code == 0 and picture.read_bytes().startswith(b"\x89PNG")
    for words in ("strategy", "same text", "Plain()", "PromptLookup(", "EarlyExit(exit=24", str(picture), "[code-01]"):
        assert words in out
    code, out, _ = run(capsys, "demo", "--model", "tiny", "--max-new-tokens", "4", "--picture", str(picture), "--json")
    found = json.loads(out)
    assert code == 0 and [e["same_text"] for e in found["entries"]] == ["yes"] * 3 and found["machine"]["torch"]


@pytest.mark.smollm2
def test_generate(capsys):
    code, out, _ = run(
        capsys, "generate", "What is the capital of France?", "--drafter", "DraftModel('smollm2-135m', max_draft=2)",
        "--max-new-tokens", "8",
    )  # fmt: skip
    assert code == 0 and "The capital of France is Paris" in out and "100% of" in out
    code, out, _ = run(capsys, "generate", "Once upon", "--raw", "--temperature", "0.8", "--seed", "3",
                       "--early-exit", "29", "--max-new-tokens", "4", "--json")  # fmt: skip
    found = json.loads(out)
    assert code == 0 and len(found["tokens"][0]) == 4 and not found["lossless"] and found["settings"]["seed"] == 3


@pytest.mark.smollm2
def test_bench(capsys, tmp_path, monkeypatch, caplog):
    file, steps = tmp_path / "bench.json", []
    monkeypatch.setattr("labkit.cli.tqdm", lambda given, **how: steps.extend(given) or iter(steps))
    logging.getLogger("transformers").addHandler(caplog.handler)
    from transformers.generation import utils

    utils.logger.warning_once.cache_clear()
    code, out, err = run(
        capsys, "bench", "--drafters", "EarlyExit(24, max_draft=2)", "PromptLookup()", "--prompts", "editing",
        "--per-set", "1", "--max-new-tokens", "6", "--json", str(file),
    )  # fmt: skip
    found = json.loads(file.read_text())
    names = [row["name"] for row in found["rows"]]
    assert code == 0 and "transformers generate" in names and "eta" in out and len(steps) == 1
    assert not err and "generation_config" not in caplog.text
    assert "transformers assistant_early_exit=24, num_assistant_tokens=2" in names
    assert all(row["same_text"] == 1 for row in found["rows"]) and found["command"].startswith("labkit bench")
    exit = next(row for row in found["rows"] if row["name"].startswith("EarlyExit"))
    assert "noise" in out or all(row.get("loop_efficiency", 0) <= 1 for row in found["rows"])
    assert exit["host_copies_per_round"] == 1 and exit["loop_efficiency"] > 0 and exit["c"] > 0 and exit["v"] > 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("generate", "x", "--model", "no/such"), "no/such"),
        (("fetch", "nothing"), "nothing"),
        (("bench", "--model", "no/such", "--drafter", "Plain()"), "no/such"),
    ],
)
def test_refusals(capsys, words, message):
    code, out, err = run(capsys, *words)
    assert code == 2 and message in err and not out


def test_a_bench_takes_prompts_of_all_shipped_sets(monkeypatch):
    seen = []

    def stop(lab, prompts, *args, **kwargs):
        seen.extend(prompts)
        raise LabkitError("enough")

    for name, instead in (("load", lambda *a, **k: None), ("as_ids", lambda lab, prompts: prompts), ("bench", stop)):
        monkeypatch.setattr(cli, name, instead)
    assert cli.main(["bench", "--per-set", "2"]) == 2
    assert [prompt["task"] for prompt in seen] == [name for name in cli.prompt_sets() for _ in range(2)]
    assert len(cli.prompt_sets()) == 7


def test_the_bar_of_a_bench_is_for_terminals(capsys):
    """One line that is written over, and nothing in a log file."""
    lab = labkit.Lab(families.tiny("llama"))
    from labkit.cli import bar

    bench(lab, [[3, 1], [4]], [labkit.PromptLookup()], max_new_tokens=4, repeats=2, progress=bar)
    assert capsys.readouterr() == ("", "")
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    bench(lab, [[3, 1], [4]], [labkit.PromptLookup()], max_new_tokens=4, repeats=2, progress=lambda s: bar(s, terminal))
    assert "4/4" in terminal.getvalue() and terminal.getvalue().count("\n") <= 1


LINES = {
    "not json": (b"{oops", "not JSON"),
    "no prompt": (b'{"text": "x"}', "has no prompt"),
    "not text": (bytes([255, 254]), "cannot be read"),
}


@pytest.mark.parametrize("fault", LINES)
def test_prompt_files(tmp_path, fault):
    content, message = LINES[fault]
    (tmp_path / "mine.jsonl").write_bytes(content)
    with pytest.raises(LabkitError, match=message):
        read_prompt_files([str(tmp_path / "mine.jsonl")])
    with pytest.raises(LabkitError, match="cannot be read"):
        read_prompt_files([str(tmp_path)])
    (tmp_path / "mine.jsonl").write_text('{"prompt": "a"}\n\n{"id": "b-7", "prompt": "b"}\n')
    assert [p["id"] for p in read_prompt_files([str(tmp_path / "mine.jsonl")])] == ["mine-01", "b-7"]


@pytest.mark.parametrize("words", [("bench", "--json"), ("demo", "--picture")], ids=str)
def test_places_are_asked_for_before_the_work(capsys, tmp_path, words, monkeypatch):
    monkeypatch.setattr("labkit.cli.load", lambda *args, **kwargs: pytest.fail("the model was loaded first"))
    for path, message in ((tmp_path, "is a folder"), (tmp_path / "no" / "x.png", "there is no folder")):
        code, _, err = run(capsys, *words, str(path))
        assert code == 2 and message in err
    assert words[0] != "demo" or run(capsys, *words, str(tmp_path / "x.foo"))[0] == 2


@pytest.mark.parametrize(
    ("drafter", "message"),
    [
        ("Earlyexit(2)", "the nearest is 'EarlyExit'"),
        ("Medusa(2)", "no strategy is called 'Medusa'. All: Plain, PromptLookup, DraftModel, EarlyExit, Ski"),
        ("EarlyExit(99)", "exit=99"),
        ("EarlyExit(2, max_draft=0)", "max_draft=0"),
        ("EarlyExit(__import__('os'))", "not a literal"),
    ],
)
def test_bad_strategies(capsys, drafter, message):
    code, _, err = run(
        capsys, "generate", "x", "--model", "tiny", "--device", "cpu", "--drafter", drafter, "--max-new-tokens", "2"
    )
    assert code == 2 and message in err


def options(top=None, name=""):
    """Every option of every command, by command and spelling."""
    for action in (top or parser())._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command, sub in action.choices.items():
                yield from options(sub, f"{name} {command}".strip())
        elif action.dest != "help":
            yield name, action


def test_every_option_is_explained_with_its_default():
    for command, action in options():
        assert action.help, (command, action.dest)
        if action.option_strings and action.nargs != 0:
            assert "default" in action.help, (command, action.dest)
            assert action.default in (None, []) or "%(default)s" in action.help, (command, action.dest)
        if action.nargs == 0 and "--no-" in " ".join(action.option_strings):
            assert re.search(r"\(default: (yes|no|on a terminal)\)$", action.help), (command, action.dest)
    found = {(command, action.dest) for command, action in options()}
    assert {("demo", "drafters"), ("bench", "drafters"), ("generate", "drafters")} <= found
    assert ("train layerskip", "compile") in found
    shown = run_help("generate")
    assert "(default: smollm2-135m)" in shown and "(default: 64)" in shown


def run_help(command):
    return " ".join(parser_of(command).format_help().split())


def parser_of(command):
    (commands,) = [action for action in parser()._actions if isinstance(action, argparse._SubParsersAction)]
    return commands.choices[command]


@pytest.mark.parametrize("command", ["bench", "demo"])
@pytest.mark.parametrize(
    "words",
    [
        ("--drafters", "A", "B"),
        ("--drafter", "A", "--drafter", "B"),
        ("--drafter", "A", "B"),
        ("--drafters", "A", "--drafter", "B"),
    ],
    ids=" ".join,
)
def test_drafters_have_two_spellings(command, words):
    assert parser().parse_args([command, *words]).drafters == ["A", "B"]
    assert parser().parse_args([command]).drafters == []


def test_generate_takes_its_prompt_behind_a_drafter():
    for words in (("--drafter", "A", "text"), ("text", "--drafter", "A"), ("--drafters", "A", "text")):
        args = parser().parse_args(["generate", *words])
        assert (args.prompt, args.drafters) == ("text", ["A"])


def test_heads_are_read_with_the_lab_of_the_command(monkeypatch, capsys, tmp_path):
    """The folder named in the strategy is loaded for the model that the command loaded."""
    lab = labkit.Lab(families.tiny("llama"))
    heads = labkit.MLPSpeculator(32, 61, 3, 24, dtype=torch.float64)
    for number, parameter in enumerate(heads.parameters()):
        torch.nn.init.normal_(parameter, std=0.4, generator=torch.Generator().manual_seed(number))
    folder = str(labkit.save_heads(heads, tmp_path / "heads", lab))
    monkeypatch.setattr("labkit.cli.load", lambda *args, **kwargs: lab)
    monkeypatch.setattr("labkit.cli.as_ids", lambda lab, prompts: [[3, 1, 4]])
    strategy = f"Heads({folder!r}, top_k=(1, 1, 1))"
    code, out, _ = run(capsys, "bench", "--prompts", "editing", "--per-set", "1", "--max-new-tokens", "8", "--drafters",
                       strategy, f"Heads(heads={folder!r}, tree=[(0,), (1,), (0, 0)])")  # fmt: skip
    assert code == 0 and "Heads(MLPSpeculator, top_k=(1, 1, 1), candidates=1)" in out
    assert "Heads(MLPSpeculator, tree of 3 nodes)" in out
    code, _, err = run(capsys, "bench", "--prompts", "editing", "--drafters", f"Heads({str(tmp_path / 'no')!r})")
    assert code == 2 and "neither a folder nor a hub id" in err


def parts_in(folder, lab):
    """An adapter, a classifier and a draft head, on disk."""
    makers = {"adapter": labkit.heads.Kangaroo.like(lab), "rule": labkit.heads.ExitClassifier(32)}
    for name, module in makers.items():
        labkit.heads.save_adapter(module, folder / name, lab, 2)
    head = labkit.heads.DraftVocabulary.reduced(32, range(9), 61)
    labkit.heads.save_adapter(torch.nn.Identity(), folder / "head", lab, 2, head=head)
    return {name: str(folder / name) for name in (*makers, "head")}


def test_exits_of_every_kind(monkeypatch, capsys, tmp_path):
    """Modules are named by their folders, and a rule is written as in a strategy."""
    lab = labkit.Lab(families.tiny("llama"), tokenizer())
    folders = parts_in(tmp_path, lab)
    monkeypatch.setattr("labkit.cli.load", lambda *args, **kwargs: lab)

    def made(*words):
        code, out, err = run(capsys, "generate", "Hello", "--raw", "--max-new-tokens", "6", "--json", *words)
        assert code == 0, err
        return json.loads(out)

    want = made()["tokens"]
    for strategy, shown in (
        (f"EarlyExit(2, adapter={folders['adapter']!r})", "adapter=Kangaroo"),
        (f"EarlyExit(2, head={folders['head']!r})", "head=DraftVocabulary"),
        (f"EarlyExit(classifier({folders['rule']!r}, 0.4), 3)", "classifier(module=ExitClassifier("),
    ):
        found = made("--drafter", strategy)
        assert found["tokens"] == want and shown in found["settings"]["drafter"]
    for rule in ("2", "confidence(0.05)", "confidence(decaying(0.9))", f"classifier({folders['rule']!r})"):
        found = made("--early-exit", rule)
        assert not found["lossless"] and rule.split("(")[0] in str(found["settings"]["early_exit"])
    found = made("--early-exit", "margin(0.0)", "--exit-layers", "1,3")
    assert found["settings"]["exit_layers"] == [1, 3]
    by_hand = lab.generate("Hello", max_new_tokens=6, early_exit=labkit.margin(0.0), exit_layers=(1, 3))
    assert found["tokens"] == by_hand.tokens != want


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--early-exit", "0.9"), "'0.9' is no exit; write a number of layers, or for example 'confidence(0.9)'"),
        (("--early-exit", "True"), "'True' is no exit"),
        (("--early-exit", "EarlyExit(2)"), "'EarlyExit(2)' is no exit"),
        (("--early-exit", "confidnce(0.9)"), "the nearest is 'confidence'"),
        (("--early-exit", "confidence(0.9"), "is not an exit ("),
        (("--early-exit", "confidence"), "'confidence': missing a required argument: 'threshold'; write a number"),
        (("--early-exit", "never"), "early_exit=<function never"),
        (("--early-exit", "9"), "early_exit=9"),
        (("--early-exit", "0"), "early_exit=0"),
        (("--early-exit", ""), "'' is not an exit ("),
        (("--early-exit", "2", "--exit-layers", "1"), "exit_layers=(1,) says where a rule is tested"),
        (("--exit-layers", "1"), "early_exit=None is none"),
        (("--early-exit", "classifier('no/such')"), "'no/such' holds no adapter that labkit wrote"),
        (("--drafter", "EarlyExit(2, adapter='no/such')"), "'no/such' holds no adapter that labkit wrote"),
    ],
)
def test_exits_that_are_none(monkeypatch, capsys, words, message):
    lab = labkit.Lab(families.tiny("llama"), tokenizer())
    monkeypatch.setattr("labkit.cli.load", lambda *args, **kwargs: lab)
    code, _, err = run(capsys, "generate", "Hello", "--raw", "--max-new-tokens", "2", *words)
    assert code == 2 and message in err


def test_exit_layers_are_written_with_commas(capsys):
    with pytest.raises(SystemExit):
        parser().parse_args(["generate", "x", "--exit-layers", "1;2"])
    assert "got '1;2'; write depths with commas, such as 18,24" in capsys.readouterr().err


def test_doctor_names_what_is_missing(capsys, monkeypatch, tmp_path):
    """The cures work in a checkout: labkit is on no package index."""
    monkeypatch.setenv("LABKIT_CACHE", str(tmp_path))
    monkeypatch.setattr("labkit.doctor.importlib.util.find_spec", lambda name: None)
    code, out, _ = run(capsys, "doctor")
    lines = out.splitlines()[1:]
    assert code == 0 and lines[0] == f"missing: smollm2-135m in {tmp_path}; run: labkit fetch smollm2-135m"
    assert lines[1] == "missing: gguf; run in labkit's folder: pip install -e '.[smollm2]'"
    assert len(lines) == 4 and all("pip install -e '.[notebook]'" in line for line in lines[2:])


def test_doctor_and_module(capsys):
    code, out, _ = run(capsys, "doctor")
    assert code == 0 and "torch" in out and "labkit-specdec" not in out
    if missing("smollm2") is None:
        assert re.search(r"^fetched: smollm2-135m, in .*smollm2-135m$", out, re.M)
    shown = subprocess.run([sys.executable, "-m", "labkit", "--help"], capture_output=True, text=True)
    assert shown.returncode == 0 and "demo" in shown.stdout
