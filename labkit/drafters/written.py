"""A strategy written as in Python, `EarlyExit(24, max_draft=2)`: parsed as literals, never evaluated."""

import ast
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from labkit.drafters.early_exit import EarlyExit
from labkit.drafters.heads import Heads
from labkit.drafters.lookup import PromptLookup
from labkit.drafters.model import DraftModel
from labkit.drafters.plain import Plain
from labkit.errors import LabkitError, nearest
from labkit.protocol import Drafter

STRATEGIES: dict[str, type[Drafter]] = {
    cls.__name__: cls for cls in (Plain, PromptLookup, DraftModel, EarlyExit, Heads)
}
Opener = Callable[[str], Any]


def read_strategy(text: str, openers: Mapping[str, Opener] | None = None) -> Drafter:
    """The drafter that `text` describes.

    `openers["model"]` and `openers["heads"]` open what DraftModel and Heads are given as a string.
    Raises LabkitError for anything but a known strategy's name with literal arguments.
    """
    example = "write for example 'EarlyExit(24, max_draft=2)'"
    try:
        call = ast.parse(text.strip(), mode="eval").body
    except SyntaxError as error:
        raise LabkitError(f"{text!r} is not a strategy ({error.msg}); {example}") from error
    name = call.func if isinstance(call, ast.Call) else call
    if not isinstance(name, ast.Name):
        raise LabkitError(f"{text!r} is not a strategy; {example}")
    if name.id not in STRATEGIES:
        near = nearest(name.id, STRATEGIES)
        raise LabkitError(f"no strategy is called {name.id!r}{near}. All: {', '.join(STRATEGIES)}")
    given, named = (call.args, call.keywords) if isinstance(call, ast.Call) else ([], [])
    try:
        values = [ast.literal_eval(value) for value in given]
        keywords = {str(word.arg): ast.literal_eval(word.value) for word in named}
    except (ValueError, TypeError) as error:
        raise LabkitError(f"{text!r} has an argument that is not a literal; {example}") from error
    try:
        bound = inspect.signature(STRATEGIES[name.id]).bind(*values, **keywords)
    except TypeError as error:
        raise LabkitError(f"{text!r}: {error}; {example}") from error
    for word, opener in (openers or {}).items():
        if isinstance(bound.arguments.get(word), str):
            bound.arguments[word] = opener(bound.arguments[word])
    return STRATEGIES[name.id](*bound.args, **bound.kwargs)
