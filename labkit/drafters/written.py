"""A strategy written as in Python, `Union(EarlyExit(24, 2), PromptLookup())`: names and literals, never evaluated."""

import ast
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from labkit.drafters.adaptive import Adaptive
from labkit.drafters.chain import below
from labkit.drafters.combine import Fallback, Union
from labkit.drafters.early_exit import EarlyExit
from labkit.drafters.heads import Heads
from labkit.drafters.kv import Full, TopK, Window
from labkit.drafters.lookup import PromptLookup
from labkit.drafters.model import DraftModel
from labkit.drafters.on_the_fly import OnTheFly
from labkit.drafters.plain import Plain
from labkit.drafters.shorter import AtMost, Until
from labkit.drafters.skip import SkipLayers
from labkit.errors import LabkitError, nearest
from labkit.exits import classifier, confidence, decaying, margin, saturation
from labkit.protocol import Drafter, never

STRATEGIES: dict[str, type[Drafter]] = {
    cls.__name__: cls
    for cls in (Plain, PromptLookup, DraftModel, EarlyExit, SkipLayers, Heads, Fallback, Union, AtMost, Until, Adaptive)
}
PARTS: dict[str, Callable] = {
    part.__name__: part
    for part in (never, below, confidence, margin, saturation, classifier, decaying, Full, TopK, Window, OnTheFly)
}
EXAMPLE = "write for example 'EarlyExit(24, max_draft=2)'"
EXIT_EXAMPLE = "write a number of layers, or for example 'confidence(0.9)'"
Opener = Callable[[str], Any]


def read_strategy(text: str, openers: Mapping[str, Opener] | None = None) -> Drafter:
    """The drafter that `text` describes.

    openers: what opens an argument of that name where it is a string: the `model` of DraftModel, the `heads` of Heads,
    the `adapter` and `head` of EarlyExit, the `module` of classifier.
    Raises LabkitError for anything but known names (strategies, rules, stops, kv) with literal arguments.
    """
    reader = _Reader(text, openers or {}, "a strategy", EXAMPLE)
    found = reader.read(reader.parsed(), outermost=True)
    if not isinstance(found, Drafter):
        raise LabkitError(f"{text!r} is not a strategy; {EXAMPLE}")
    return found


def read_early_exit(text: str, openers: Mapping[str, Opener] | None = None) -> Any:
    """The number of layers or the rule that `text` describes, for `early_exit`; openers as in `read_strategy`."""
    reader = _Reader(text, openers or {}, "an exit", EXIT_EXAMPLE)
    found: Any = reader.read(reader.parsed())
    if isinstance(found, bool) or not (isinstance(found, int) or callable(found)):
        raise LabkitError(f"{text!r} is no exit; {EXIT_EXAMPLE}")
    return found


class _Reader:
    """Reads one text; its errors name it."""

    def __init__(self, text: str, openers: Mapping[str, Opener], what: str, example: str):
        self.text, self.openers, self.what, self.example = text, openers, what, example

    def parsed(self) -> ast.expr:
        """The text as Python's syntax."""
        try:
            return ast.parse(self.text.strip(), mode="eval").body
        except SyntaxError as error:
            raise LabkitError(f"{self.text!r} is not {self.what} ({error.msg}); {self.example}") from error

    def read(self, node: ast.expr, outermost: bool = False) -> Any:
        """A literal, a list of these, or a known name with such arguments."""
        if isinstance(node, ast.List | ast.Tuple) and not outermost:
            items = [self.read(item) for item in node.elts]
            return items if isinstance(node, ast.List) else tuple(items)
        name = node.func if isinstance(node, ast.Call) else node
        if not isinstance(name, ast.Name) or name.id.startswith("__"):
            try:
                return ast.literal_eval(node)
            except (ValueError, TypeError) as error:
                what = f"is not {self.what}" if outermost else "has an argument that is not a literal"
                raise LabkitError(f"{self.text!r} {what}; {self.example}") from error
        known = STRATEGIES if outermost else STRATEGIES | PARTS
        if name.id not in known:
            kind = "strategy" if outermost else "strategy, rule or kv"
            raise LabkitError(f"no {kind} is called {name.id!r}{nearest(name.id, known)}. All: {', '.join(known)}")
        if name.id == "never":
            return never
        given, named = (node.args, node.keywords) if isinstance(node, ast.Call) else ([], [])
        return self.make(known[name.id], [self.read(x) for x in given], {str(w.arg): self.read(w.value) for w in named})

    def make(self, made: Callable, values: list, keywords: dict[str, Any]) -> Any:
        """Call it, with models and modules that are named by a string opened."""
        try:
            bound = inspect.signature(made).bind(*values, **keywords)
        except TypeError as error:
            raise LabkitError(f"{self.text!r}: {error}; {self.example}") from error
        for word, opener in self.openers.items():
            if isinstance(bound.arguments.get(word), str):
                bound.arguments[word] = opener(bound.arguments[word])
        return made(*bound.args, **bound.kwargs)
