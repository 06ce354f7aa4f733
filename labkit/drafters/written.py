"""A strategy written as in Python, `EarlyExit(24, max_draft=2)`: parsed as literals, never evaluated."""

import ast
import difflib

from labkit.drafters.early_exit import EarlyExit
from labkit.drafters.lookup import PromptLookup
from labkit.drafters.model import DraftModel
from labkit.drafters.plain import Plain
from labkit.drafters.skip import SkipLayers
from labkit.errors import LabkitError
from labkit.protocol import Drafter

STRATEGIES: dict[str, type[Drafter]] = {
    cls.__name__: cls for cls in (Plain, PromptLookup, DraftModel, EarlyExit, SkipLayers)
}


def read_strategy(text: str, load=None) -> Drafter:
    """The drafter that `text` describes; `load(name)` opens a model named in it as a string.

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
        near = difflib.get_close_matches(name.id, STRATEGIES, 1, 0.0)[0]
        raise LabkitError(f"no strategy is called {name.id!r}; the nearest is {near}. All: {', '.join(STRATEGIES)}")
    given, named = (call.args, call.keywords) if isinstance(call, ast.Call) else ([], [])
    try:
        values = [ast.literal_eval(value) for value in given]
        keywords = {str(word.arg): ast.literal_eval(word.value) for word in named}
    except (ValueError, TypeError) as error:
        raise LabkitError(f"{text!r} has an argument that is not a literal; {example}") from error
    if STRATEGIES[name.id] is DraftModel and load is not None:
        values = [load(value) if isinstance(value, str) else value for value in values]
        keywords = {word: load(v) if word == "model" and isinstance(v, str) else v for word, v in keywords.items()}
    try:
        return STRATEGIES[name.id](*values, **keywords)
    except TypeError as error:
        raise LabkitError(f"{text!r}: {error}; {example}") from error
