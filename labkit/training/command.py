"""`labkit train NAME`: a command for every recipe, made from the recipe's signature and the text that explains it."""

import argparse
import inspect
import os
import shlex
import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from labkit.lab import load
from labkit.training.adapters import exit_adapter
from labkit.training.folder import ALWAYS, Trained
from labkit.training.layerskip import layerskip
from labkit.training.medusa import medusa
from labkit.training.mlp_speculator import mlp_speculator

RECIPES: tuple[Callable[..., Trained], ...] = (layerskip, mlp_speculator, medusa, exit_adapter)
"""`labkit train` knows these, by their names with a dash. One that takes `lab` first trains something for a target."""

TARGET = ("model", "device", "dtype")
"""Options that say which target is loaded; a recipe's own one of the same name becomes `--train-NAME`."""

KINDS: dict[type, tuple[str, Any]] = {int: ("N", int), float: ("X", float), str: ("TEXT", str)}
"""By the type of a default: how an option's value is shown, and read."""


class Recipe(NamedTuple):
    """A recipe taken apart: what it does, and what explains each of its arguments."""

    run: Callable[..., Trained]
    text: str
    explained: dict[str, str]
    parameters: Mapping[str, inspect.Parameter]

    @property
    def name(self) -> str:
        """On the command line."""
        return self.run.__name__.replace("_", "-")

    @property
    def takes_lab(self) -> bool:
        """Whether it trains something for a target that is loaded first."""
        return "lab" in self.parameters

    def spelling(self, name: str) -> str:
        """An argument's name among the options."""
        return f"train_{name}" if self.takes_lab and name in TARGET else name


def read_recipe(run: Callable[..., Trained]) -> Recipe:
    """A recipe's docstring: its first paragraph says what it does, and a line `name: text` explains each argument."""
    text, _, lines = (inspect.getdoc(run) or "").partition("\n\n")
    explained = dict(line.split(": ", 1) for line in lines.splitlines() if ": " in line)
    return Recipe(run, text, explained, inspect.signature(run).parameters)


def add_recipes(train: argparse.ArgumentParser, target: Callable[[Callable], None]) -> None:
    """A command for every recipe; target(add) adds the options of the target to those that want one."""
    commands = train.add_subparsers(dest="recipe", required=True, metavar="NAME", help="what to train:")
    for recipe in map(read_recipe, RECIPES):
        sub = commands.add_parser(
            recipe.name, help=recipe.text, description=recipe.text, usage=f"{train.prog} {recipe.name} FOLDER [options]"
        )
        sub.set_defaults(run=lambda args, recipe=recipe: train_recipe(recipe, args))
        if recipe.takes_lab:
            target(sub.add_argument)
        for parameter in recipe.parameters.values():
            if parameter.name == "out":
                sub.add_argument("out", metavar="FOLDER", help=_safe(recipe.explained.get("out", "")))
            elif parameter.name != "lab":
                _add_option(sub, recipe, parameter)


def _add_option(sub: argparse.ArgumentParser, recipe: Recipe, parameter: inspect.Parameter) -> None:
    name, default = recipe.spelling(parameter.name), parameter.default
    text, option = _safe(recipe.explained.get(parameter.name, "")), "--" + name.replace("_", "-")
    if isinstance(default, bool):
        said = "on a terminal" if name == "progress" else "yes" if default else "no"
        given = sub.add_argument(option, action=argparse.BooleanOptionalAction, help=f"{text} (default: {said})")
        given.default = None if name == "progress" else default  # set here: else some Pythons say it once more
        return
    metavar, read = KINDS.get(type(default), KINDS[str])
    shown = text if default is None else f"{text} (default: %(default)s)"
    sub.add_argument(option, type=read, default=default, metavar=metavar, help=shown)


def _safe(text: str) -> str:
    return text.replace("%", "%%")


def train_recipe(recipe: Recipe, args: argparse.Namespace) -> None:
    """Run it, and print where the result is and how good it is. KeyboardInterrupt says what to write to go on."""
    options = {name: getattr(args, recipe.spelling(name)) for name in recipe.parameters if name not in ("lab", "out")}
    if options.get("progress", False) is None:
        options["progress"] = sys.stderr.isatty()
    try:
        lab = [load(args.model, device=args.device, dtype=args.dtype)] if recipe.takes_lab else []
        done = recipe.run(*lab, args.out, **options)
    except KeyboardInterrupt as stop:
        said = str(stop).partition(";")[0] or "stopped"
        again = shlex.join(["labkit", *args.argv])
        raise KeyboardInterrupt(f"{said}; to go on from the last checkpoint, write the same again: {again}") from stop
    if os.environ.get("RANK", "0") == "0":
        print(f"result: {done.result}\n{table(done.last)}")


def table(row: Mapping[str, float]) -> str:
    """An evaluation: figures of the whole in lines, those that exist for every layer in one table."""
    row = {name: value for name, value in row.items() if name not in ALWAYS[1:]}
    layers = {name: value for name, value in row.items() if name.rpartition("_")[2].isdecimal()}
    names = list(dict.fromkeys(name.rpartition("_")[0] for name in layers))
    tabled = len(names) > 1
    lines = [f"{_label(name)}: {value:g}" for name, value in row.items() if not (tabled and name in layers)]
    if tabled:
        cells = [["layer", *map(_label, names)]]
        for layer in dict.fromkeys(name.rpartition("_")[2] for name in layers):
            found = [layers.get(f"{name}_{layer}") for name in names]
            cells.append([layer, *("" if value is None else f"{value:.3f}" for value in found)])
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines += ["", *("  ".join(map(str.rjust, line, widths)) for line in cells)]
    return "\n".join(lines)


def _label(name: str) -> str:
    return {"agree": "agreement"}.get(name, name.replace("_", " "))
