"""The text of a single token in its place, bytes of unfinished characters included."""

import codecs
import functools
import re
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

PARTIAL = "\N{REPLACEMENT CHARACTER}"
CONTEXT = 16
"""Tokens before it that a token's text may depend on: a character has at most four bytes."""
MOST_KNOWN = 4096
BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Spelling:
    """Texts of token ids; without a tokenizer a token's text is its id.

    text: decode(before + token) minus decode(before), special tokens by their names. A token that ends inside a
    character shows the bytes that it has of it, such as "<E2>"; the token that completes it shows the character.
    """

    def __init__(self, tokenizer: Any = None):
        self.tokenizer = tokenizer
        self._known: dict[tuple[int, ...], str] = {}

    def whole(self, ids: Sequence[int]) -> str:
        """The text of all of them; ids with spaces between them without a tokenizer."""
        return " ".join(map(str, ids)) if self.tokenizer is None else self._decoded(tuple(ids))

    def text(self, before: Sequence[int], token: int) -> str:
        """Of `token` behind `before`."""
        if self.tokenizer is None:
            return str(token)
        own = self._bytes(token)
        if own is not None:
            return _behind_bytes(b"".join(self._bytes(t) or self._decoded((t,)).encode() for t in before[-4:]), own)
        known = tuple(before[-CONTEXT:])
        old, new = self._decoded(known), self._decoded((*known, token))
        if new.startswith(old):
            return new[len(old) :]
        return new[len(start) :] if new.startswith(start := old.rstrip(PARTIAL)) else self._decoded((token,))

    def texts(self, ids: Sequence[int], before: Sequence[int] = ()) -> list[str]:
        """Of each of `ids`, one after the other."""
        line = [*before[-CONTEXT:], *ids]
        first = len(line) - len(ids)
        return [self.text(line[max(0, at - CONTEXT) : at], line[at]) for at in range(first, len(line))]

    def _decoded(self, ids: tuple[int, ...]) -> str:
        if ids not in self._known:
            if len(self._known) >= MOST_KNOWN:
                self._known.clear()
            text = self.tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
            self._known[ids] = text
        return self._known[ids]

    def _bytes(self, token: int) -> bytes | None:
        """The bytes of a token that is no whole text by itself, in a byte-level vocabulary or one with byte tokens."""
        piece = self.tokenizer.convert_ids_to_tokens(token)
        if not isinstance(piece, str):
            return None
        if found := BYTE.fullmatch(piece):
            return bytes([int(found[1], 16)])
        letters = _byte_letters()
        if PARTIAL in self._decoded((token,)) and all(x in letters for x in piece):
            return bytes(letters[x] for x in piece)
        return None


def _behind_bytes(before: bytes, own: bytes) -> str:
    """The characters that `own` completes or brings whole, and its other bytes as hex."""
    pending = before[_complete(before) :]
    data = pending + own
    cut = _complete(data)
    if cut >= len(pending):
        with suppress(UnicodeDecodeError):
            return data[:cut].decode() + _hex(data[cut:])
    return own.decode(errors=HEX)


def _hex(data: bytes) -> str:
    return "".join(f"<{byte:02X}>" for byte in data)


HEX = "labkit-hex"
codecs.register_error(HEX, lambda e: (_hex(e.object[e.start : e.end]), e.end))  # type: ignore


def _complete(data: bytes) -> int:
    """How many bytes come before the unfinished character, or the byte that fits nowhere, at the end of `data`."""
    for at in range(len(data) - 1, max(-1, len(data) - 5), -1):
        if data[at] & 0xC0 != 0x80:
            try:
                data[at:].decode()
            except UnicodeDecodeError:
                return at
            return len(data)
    return max(0, len(data) - 4)


@functools.cache
def _byte_letters() -> dict[str, int]:
    """GPT-2's letters for bytes, which byte-level vocabularies are written in."""
    seen = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in seen]
    return {chr(byte): byte for byte in seen} | {chr(256 + at): byte for at, byte in enumerate(rest)}
