"""Texts of single tokens, and signs for what would not be seen in them."""

import html
import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

PARTIAL = "\N{REPLACEMENT CHARACTER}"
CONTEXT = 4
"""Committed tokens before the last whole character that a tokenizer may look at (spaces, joined words)."""
SIGNS = {" ": ("·", "space"), "\n": ("⏎", "line break"), "\t": ("→", "tab"), "\r": ("␍", "return")}


def _byte_letters() -> dict[str, int]:
    """The letters in which byte-level vocabularies write bytes."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + at): byte for at, byte in enumerate(rest)}


BYTE_LETTERS = _byte_letters()


@dataclass(frozen=True)
class Spelled:
    """A token's share of the text, and what to show for it instead where it ends inside a character."""

    text: str
    instead: str = ""


class Speller:
    """Texts of tokens in their place: decode(prefix + token) minus decode(prefix). Without a tokenizer, ids."""

    def __init__(self, tokenizer: Any):
        self.tokenizer = tokenizer

    def decode(self, ids: Sequence[int]) -> str:
        """Text with special tokens."""
        if self.tokenizer is None:
            return "".join(f"{token} " for token in ids)
        return self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def spell(self, ids: Sequence[int]) -> list[Spelled]:
        """The tokens of a whole text: their texts in a row are its text."""
        found, walk = [], Walk(self)
        for at, token in enumerate(ids):
            found.append(walk.step(token, at == len(ids) - 1))
        return found

    def hexes(self, token: int) -> str:
        """The bytes of a token, such as ‹E2 82›."""
        name = str(self.tokenizer.convert_ids_to_tokens(token)) if self.tokenizer is not None else str(token)
        if byte := re.fullmatch(r"<0x([0-9A-Fa-f]{2})>", name):
            return f"‹{byte[1].upper()}›"
        if all(letter in BYTE_LETTERS for letter in name):
            return f"‹{bytes(BYTE_LETTERS[letter] for letter in name).hex(' ').upper()}›"
        return f"‹{name.encode('utf-8', 'replace').hex(' ').upper()}›"


class Walk:
    """One text, token by token; `aside` looks at a token that is not taken.

    Texts are exact where decoding goes on as it began; a decoder that spoils whole characters because of a bad byte
    behind them (ByteFallback) has its bad bytes shown, and the characters too.
    """

    def __init__(self, speller: Speller):
        self.speller = speller
        self.recent: list[int] = []  # what is decoded; recent[:whole] has come out as text
        self.whole = 0
        self.ends = [0]  # places in `recent` between whole characters

    def aside(self, token: int) -> Spelled:
        """What the token would add here."""
        return self._added(token, last=True)

    def step(self, token: int, last: bool = False) -> Spelled:
        """What the token adds; the last one brings along what never became a character."""
        found = self._added(token, last)
        self.recent.append(token)
        if not found.instead or last:
            ends = [*self.ends[-CONTEXT:], len(self.recent)]
            self.ends = [end - ends[0] for end in ends]
            self.recent, self.whole = self.recent[ends[0] :], self.ends[-1]
        return found

    def _added(self, token: int, last: bool) -> Spelled:
        decode = self.speller.decode
        before, text = decode(self.recent[: self.whole]), decode([*self.recent, token])
        new = text[len(before) :] if text.startswith(before) else text[len(before.rstrip(PARTIAL)) :]
        if new.endswith(PARTIAL):
            return Spelled(new if last else "", self.speller.hexes(token))
        return Spelled(new)


def _sign(letter: str, alone: bool) -> tuple[str, str] | None:
    """What stands for a letter that would not be seen, and its name; None for a letter that is seen."""
    if letter in SIGNS:
        return SIGNS[letter]
    kind = unicodedata.category(letter)
    if ord(letter) < 32:
        return chr(0x2400 + ord(letter)), f"U+{ord(letter):04X}"
    joins = letter in "\u200c\u200d" or 0xFE00 <= ord(letter) <= 0xFE0F or 0xE0020 <= ord(letter) <= 0xE007F
    if (kind in ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp", "Zs") or joins) and not (joins and not alone):
        return f"⟨U+{ord(letter):04X}⟩", f"U+{ord(letter):04X}"
    return None


def signs(text: str) -> list[tuple[str, str | None]]:
    """What to show, letter by letter: (itself, None), or (a sign, the name of what it stands for).

    A combining mark at the start gets a circle to stand on; joiners stay between the emoji that they join.
    """
    found: list[tuple[str, str | None]] = []
    for at, letter in enumerate(text):
        sign = _sign(letter, alone=(at in (0, len(text) - 1) and not 0xFE00 <= ord(letter) <= 0xFE0F) or len(text) == 1)
        if sign is None and at == 0 and unicodedata.combining(letter):
            found.append(("\N{DOTTED CIRCLE}", ""))
        found.append(sign or (letter, None))
    return found


def visible(text: str) -> str:
    """Text in which nothing is hidden, on one line."""
    return "".join(shown for shown, _ in signs(text))


def as_html(text: str, breaks: bool) -> str:
    """Text for a page: escaped, with signs, and with a real break behind each line break if `breaks`.

    A dollar or a backslash stands in a tag of its own, so that a notebook finds no formula.
    """
    parts = []
    for shown, name in signs(text):
        if name is None:
            parts.append(f"<span>{shown}</span>" if shown in "$\\" else html.escape(shown))
        else:
            parts.append(
                f'<span class="labkit-sign" aria-label="{html.escape(name)}" style="opacity:.45">{shown}</span>'
            )
            parts.append("<br>" if breaks and name == "line break" else "")
    return "".join(parts)
