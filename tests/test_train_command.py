"""`labkit train NAME`: options out of a recipe's signature, an end that can be read, an interrupt that says what to do."""

import inspect
import os
import shlex
import signal
from pathlib import Path
from typing import Any

import families
import pytest

import labkit
from labkit import LabkitError
from labkit.cli import main, parser
from labkit.training import command, layerskip
from labkit.training.command import RECIPES, read_recipe, table
from labkit.training.folder import Trained

pytestmark = pytest.mark.usefixtures("few_objects")


def run(capsys, *words):
    code = main([str(word) for word in words])
    out = capsys.readouterr()
    return code, out.out, out.err


@pytest.fixture
def words(tmp_path):
    """A command that trains for eight steps."""
    (tmp_path / "text").mkdir()
    for i in range(24):
        (tmp_path / "text" / f"{i:02}.txt").write_text("".join(f"{k} " for k in range(i, i + 40)))
    options = (
        f"--corpus {tmp_path / 'text'} --held-out 0.3 --layers 3 --width 16 --heads 2 --kv-heads 1 --inner 24 "
        "--vocab 270 --tokens 512 --batch 4 --length 16 --rotation 2 --eval-every 4 --eval-rows 4 --save-every 4 "
        "--dtype float32 --device cpu"
    )
    return ["train", "layerskip", str(tmp_path / "run"), *options.split()]


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.__name__)
def test_every_argument_is_an_option(recipe):
    """It is explained by a line of the docstring, read by the type of its default, and given on by its name."""
    told = read_recipe(recipe)
    asked = [name for name in inspect.signature(recipe).parameters if name != "lab"]
    assert sorted(told.explained) == sorted(asked) and told.text.endswith(".")
    args = vars(parser().parse_args(["train", told.name, "here"]))
    for name, parameter in told.parameters.items():
        if name not in ("lab", "out", "progress"):
            assert args[told.spelling(name)] == parameter.default, name
    assert args["out"] == "here" and args["progress"] is None


def test_layerskip_from_the_command_line(capsys, words):
    code, out, err = run(capsys, *words)
    lines = out.splitlines()
    assert code == 0 and not err and lines[:2] == [f"result: {words[2]}/trained", "step: 8"]
    assert lines[3].split("  ")[-1] == "tokens per round" and lines[3].split()[:5] == [
        "layer", "loss", "agreement", "overlap", "alpha",
    ]  # fmt: skip
    assert [line.split()[0] for line in lines[4:]] == ["1", "2", "3"] and len({len(line) for line in lines[3:]}) == 1
    assert lines[6].split()[2:] == ["1.000", "1.000", "1.000", "5.000"]
    assert run(capsys, *words) == (0, out, "")
    code, out, err = run(capsys, *words, "--lr", "0.1", "--no-exits")
    assert code == 2 and not out and "other settings (exits, schedule.lr)" in err


@pytest.fixture
def interruptible():
    """As at a terminal; the processes that share a suite's tests ignore interrupts."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("when", ["while it trains", "before it does"])
def test_an_interrupt_says_how_to_go_on(capsys, words, monkeypatch, when):
    judge = layerskip.judge

    def kill(*args):
        os.kill(os.getpid(), signal.SIGINT)
        return judge(*args)

    with monkeypatch.context() as patch:
        patch.setattr(*((layerskip, "judge", kill) if "while" in when else (layerskip.data, "named", kill)))
        code, out, err = run(capsys, *words)
    said = "stopped after step 4" if "while" in when else "stopped"
    again = "to go on from the last checkpoint, write the same again: "
    assert code == 130 and not out and err.startswith(f"labkit train: {said}; {again}")
    written = shlex.split(err.removeprefix(f"labkit train: {said}; {again}"))
    assert written == ["labkit", *words]
    assert run(capsys, *written[1:])[0] == 0
    kept = (Path(words[2]) / "provenance.json").read_text()
    assert f'"resumed_at_step": {4 if "while" in when else 0}' in kept


def pretend(
    lab: Any, out: Any, *, steps: int = 3, tie: bool = True, prompts: Any = None, dtype: Any = "bfloat16",
    progress: bool = True,
) -> Trained:  # fmt: skip
    """Pretend to train a draft
    for a target.

    out: the run's folder
    steps: to train, 100 % of them
    tie: share weights
    prompts: a file: one prompt a line; default: none
    dtype: of the computation
    progress: show a bar
    """
    row = {"step": 3, "tokens": 9, "seconds": 0.1, "head_1": 0.5, "head_2": 0.25, "alpha": 0.4}
    pretend.given, pretend.shows = (lab, out, steps, tie, prompts, dtype), progress
    return Trained(out, f"{out}/trained", [row, {"step": 3, "tokens": 9, "seconds": 0.1, "loss": 1.0}])


def test_a_recipe_for_a_target(capsys, monkeypatch):
    """The target is loaded as by the other commands; the recipe's own options of the same names are spelt otherwise."""
    lab, asked = labkit.Lab(families.tiny("llama", layers=2)), []
    monkeypatch.setattr(command, "RECIPES", (pretend,))
    monkeypatch.setattr(command, "load", lambda *args, **named: asked.append((args, named)) or lab)
    code, out, err = run(capsys, "train", "pretend", "here", "--no-tie", "--steps", "7", "--dtype", "float64")
    assert code == 0 and not err and pretend.given == (lab, "here", 7, False, None, "bfloat16")
    assert asked == [(("tiny",), {"device": None, "dtype": "float64"})]
    assert out == "result: here/trained\nstep: 3\nhead 1: 0.5\nhead 2: 0.25\nalpha: 0.4\n"
    run(
        capsys,
        "train",
        "pretend",
        "here",
        "--model",
        "m",
        "--device",
        "cpu",
        "--train-dtype",
        "float32",
        "--prompts",
        "p",
    )
    assert asked[1] == (("m",), {"device": "cpu", "dtype": None}) and pretend.given[3:] == (True, "p", "float32")
    with pytest.raises(SystemExit):
        parser().parse_args(["train", "pretend", "--help"])
    shown = " ".join(capsys.readouterr().out.split())
    assert "Pretend to train a draft for a target." in shown and "to train, 100 % of them (default: 3)" in shown
    assert "a file: one prompt a line; default: none" in shown and shown.count("(default: yes)") == 1


def test_a_bar_on_a_terminal_only(capsys, monkeypatch):
    monkeypatch.setattr(command, "RECIPES", (pretend,))
    monkeypatch.setattr(command, "load", lambda *args, **named: None)
    cases = [(True, [], True), (False, [], False), (True, ["--no-progress"], False), (False, ["--progress"], True)]
    for isatty, options, shown in cases:
        monkeypatch.setattr("sys.stderr.isatty", lambda isatty=isatty: isatty)
        run(capsys, "train", "pretend", "x", *options)
        assert pretend.shows is shown


def test_processes_print_once(capsys, monkeypatch):
    monkeypatch.setattr(command, "RECIPES", (pretend,))
    monkeypatch.setattr(command, "load", lambda *args, **named: None)
    for rank, lines in (("1", 0), ("0", 5)):
        monkeypatch.setenv("RANK", rank)
        assert len(run(capsys, "train", "pretend", "here")[1].splitlines()) == lines


def test_tables():
    row = {
        "step": 5,
        "tokens": 1,
        "seconds": 2.0,
        "bare": 0.5,
        "loss_1": 3.25,
        "loss_2": 12.5,
        "tokens_per_round_2": 2.0,
    }
    assert table(row) == (
        "step: 5\nbare: 0.5\n\n"
        "layer    loss  tokens per round\n"
        "    1   3.250                  \n"
        "    2  12.500             2.000"
    )  # fmt: skip
    assert table({}) == ""


def test_mistakes(capsys, words):
    assert run(capsys, *words, "--corpus", "absent")[::2] == (
        2,
        "labkit train: got 'absent', which is no file or folder; write the path of a text\n",
    )
    for wrong in (["train"], ["train", "nothing", "x"], [*words, "--layers", "many"], ["train", "layerskip"]):
        with pytest.raises(SystemExit) as stop:
            main(wrong)
        assert stop.value.code == 2
    assert "invalid int value: 'many'" in capsys.readouterr().err
    with pytest.raises(LabkitError, match="too few to hold out"):
        layerskip.layerskip("x", corpus=words[4], held_out=0.001)


def test_other_commands_end_on_an_interrupt_too(capsys, monkeypatch):
    def stop():
        raise KeyboardInterrupt

    monkeypatch.setattr("labkit.cli.doctor", stop)
    assert run(capsys, "doctor") == (130, "", "labkit doctor: interrupted\n")
