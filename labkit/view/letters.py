"""Signs for what would not be seen in a text, and its letters for a page."""

import html
import unicodedata

SIGNS = {" ": ("·", "space"), "\n": ("⏎", "line break"), "\t": ("→", "tab"), "\r": ("␍", "return")}


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
