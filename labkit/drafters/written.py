"""A strategy written as in Python, `Union(EarlyExit(24, 2), PromptLookup())`: names and literals, never evaluated."""

import ast
import difflib
from collections.abc import Callable
from typing import Any

from labkit.drafters.adaptive import Adaptive
from labkit.drafters.chain import below
from labkit.drafters.combine import Fallback, Union
from labkit.drafters.early_exit import EarlyExit
from labkit.drafters.kv import Full, TopK, Window
from labkit.drafters.lookup import PromptLookup
from labkit.drafters.model import DraftModel
from labkit.drafters.plain import Plain
from labkit.drafters.shorter import AtMost, Until
from labkit.errors import LabkitError
from labkit.exits import confidence, decaying, margin, saturation
from labkit.protocol import Drafter, never

STRATEGIES: dict[str, type[Drafter]] = {
    cls.__name__: cls for cls in (Plain, PromptLookup, DraftModel, EarlyExit, Fallback, Union, AtMost, Until, Adaptive)
}
PARTS: dict[str, Callable] = {
    part.__name__: part for part in (never, below, confidence, margin, saturation, decaying, Full, TopK, Window)
}
EXAMPLE = "write for example 'EarlyExit(24, max_draft=2)'"


def read_strategy(text: str, load: Callable[[str], Any] | None = None) -> Drafter:
    """The drafter that `text` describes; `load(name)` opens a model named in it as a string.

    Raises LabkitError for anything but known names (strategies, rules, stops, kv) with literal arguments.
    """
    try:
        found = _read(ast.parse(text.strip(), mode="eval").body, text, load, outermost=True)
    except SyntaxError as error:
        raise LabkitError(f"{text!r} is not a strategy ({error.msg}); {EXAMPLE}") from error
    if not isinstance(found, Drafter):
        raise LabkitError(f"{text!r} is not a strategy; {EXAMPLE}")
    return found


def _read(node: ast.expr, text: str, load: Callable[[str], Any] | None, outermost: bool = False) -> Any:
    """A literal, a list of these, or a known name with such arguments."""
    if isinstance(node, ast.List | ast.Tuple) and not outermost:
        items = [_read(item, text, load) for item in node.elts]
        return items if isinstance(node, ast.List) else tuple(items)
    name = node.func if isinstance(node, ast.Call) else node
    if not isinstance(name, ast.Name):
        try:
            return ast.literal_eval(node)
        except (ValueError, TypeError) as error:
            raise LabkitError(f"{text!r} has an argument that is not a literal; {EXAMPLE}") from error
    known = STRATEGIES if outermost else STRATEGIES | PARTS
    if name.id not in known:
        if name.id.startswith("__"):
            raise LabkitError(f"{text!r} has an argument that is not a literal; {EXAMPLE}")
        near = difflib.get_close_matches(name.id, known, 1, 0.0)[0]
        raise LabkitError(f"no strategy is called {name.id!r}; the nearest is {near}. All: {', '.join(known)}")
    made = known[name.id]
    if made is never:
        return made
    given, named = (node.args, node.keywords) if isinstance(node, ast.Call) else ([], [])
    values = [_read(value, text, load) for value in given]
    keywords = {str(word.arg): _read(word.value, text, load) for word in named}
    if made is DraftModel and load is not None:
        values = [load(value) if isinstance(value, str) else value for value in values]
        keywords = {word: load(v) if word == "model" and isinstance(v, str) else v for word, v in keywords.items()}
    try:
        return made(*values, **keywords)
    except TypeError as error:
        raise LabkitError(f"{text!r}: {error}; {EXAMPLE}") from error
