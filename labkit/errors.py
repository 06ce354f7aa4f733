"""The one exception that labkit raises on purpose, and the suggestion that its messages make."""

import difflib
from collections.abc import Iterable


class LabkitError(ValueError):
    """Bad input: the message says what was got, what is needed and what to write instead."""


def nearest(name: str, known: Iterable[str]) -> str:
    """The end of a message: "; the nearest is 'seed'", or nothing if no known name is much like this one."""
    by_letters = {one.lower(): one for one in known}
    found = difflib.get_close_matches(name.lower(), by_letters, 1, 0.6)
    return f"; the nearest is {by_letters[found[0]]!r}" if found else ""
