"""The one exception that labkit raises on purpose, and what many of its callers ask of their arguments."""

import difflib
import inspect
from collections.abc import Iterable
from typing import Any


class LabkitError(ValueError):
    """Bad input: the message says what was got, what is needed and what to write instead."""


def nearest(name: str, known: Iterable[str]) -> str:
    """The end of a message: "; the nearest is 'seed'", or nothing if no known name is much like this one."""
    by_letters = {one.lower(): one for one in known}
    found = difflib.get_close_matches(name.lower(), by_letters, 1, 0.6)
    return f"; the nearest is {by_letters[found[0]]!r}" if found else ""


def check_count(value: Any, name: str, owner: str) -> None:
    """Raise LabkitError unless `value` is an int of at least 1."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        none = value == 0 and name in ("max_draft", "k") and not isinstance(value, bool)
        instead = "; Plain() drafts nothing" if none else ""
        raise LabkitError(f"{owner} got {name}={value!r}; it must be an int of at least 1{instead}")


def check_flag(value: Any, name: str, owner: str) -> None:
    """Raise LabkitError unless `value` is True or False: every other word would count as one of them."""
    if not isinstance(value, bool):
        raise LabkitError(f"{owner} got {name}={value!r}; write {name}=True or {name}=False")


def check_seed(value: Any, owner: str) -> None:
    """Raise LabkitError unless `value` is an int."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise LabkitError(f"{owner} got seed={value!r}; write an int, such as seed=0")


def check_lab(lab: Any, call: str) -> None:
    """Raise LabkitError unless `lab` is a Lab; `call` says how it is given, such as "agreement(lab, prompts, 12)"."""
    if not hasattr(lab, "backbone"):
        got = repr(lab) if lab is None or isinstance(lab, str) else f"a {type(lab).__name__}"
        raise LabkitError(
            f"got {got} for a Lab; write {call} with lab = labkit.load(name), or labkit.Lab(model, tokenizer)"
        )


def check_callable(given: Any, name: str, arguments: str, instead: str) -> None:
    """Raise LabkitError unless `given` can be called with such arguments ("drawn, level"), before it ever is."""
    if not callable(given):
        raise LabkitError(f"got {name}={given!r}; {instead}")
    try:
        inspect.signature(given).bind(*arguments.split(", "))
    except TypeError as error:
        asked = f"which cannot be called with ({arguments}): {error}"
        raise LabkitError(f"got {name}={given!r}, {asked}; {instead}") from error
    except ValueError:  # built in, without a signature
        return
