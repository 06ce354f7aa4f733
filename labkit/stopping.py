"""Where each row's text ends: a host mirror that goes through every round's new tokens one by one."""

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.generation.stopping_criteria import StoppingCriteria, StopStringCriteria

from labkit.errors import LabkitError


class Stopping:
    """The new tokens of each row, cut where transformers' `generate` would have stopped.

    A text ends with its end token, with the token that completes a stop string or satisfies a criterion, or with
    its `max_new_tokens`-th token. Criteria see every prefix, a CPU tensor `(1, length)` with the prompt in it, and
    no scores. For each row: `output` (the new tokens), `history` (prompt and new tokens), `lengths` (of those), `done`,
    `reason` ("eos", "stop", "criteria", "length": the first of these that holds; None while it goes on), `room` (new
    tokens still allowed, 0 when done).
    """

    def __init__(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: Any,
        eos_ids: Collection[int] = (),
        criteria: Sequence[StoppingCriteria] = (),
    ):
        if not isinstance(max_new_tokens, int) or isinstance(max_new_tokens, bool) or max_new_tokens < 1:
            raise LabkitError(f"got max_new_tokens={max_new_tokens!r}; needed is a whole number from 1; write 64")
        self.history: list[list[int]] = [list(prompt) for prompt in prompts]
        self._begins = [len(prompt) for prompt in prompts]
        self.done = [False for _ in prompts]
        self.reason: list[str | None] = [None for _ in prompts]
        self.room = [max_new_tokens for _ in prompts]
        self._eos, self._criteria = frozenset(eos_ids), tuple(criteria)
        self._texts = [_text(prompt, max_new_tokens) for prompt in prompts] if self._criteria else []

    @property
    def output(self) -> list[list[int]]:
        """The new tokens of each row."""
        return [text[begin:] for text, begin in zip(self.history, self._begins, strict=True)]

    @property
    def lengths(self) -> list[int]:
        """The length of each row's text, prompt included."""
        return [len(text) for text in self.history]

    @property
    def max_room(self) -> int:
        """The most new tokens that any unfinished row may still get."""
        return max(self.room, default=0)

    def trim(self, blocks: Sequence[Sequence[int]]) -> list[int]:
        """How many of each row's new tokens to keep: none in a row that was done.

        If a criterion raises, nothing has changed for any row.
        """
        ends = [self._end(row, block) for row, block in zip(range(len(self.done)), blocks, strict=True)]
        for row, (block, (keep, reason)) in enumerate(zip(blocks, ends, strict=True)):
            self.history[row] += block[:keep]
            self.reason[row] = reason
            self.done[row] = reason is not None
            self.room[row] = 0 if self.done[row] else self.room[row] - keep
        return [keep for keep, _ in ends]

    def _end(self, row: int, block: Sequence[int]) -> tuple[int, str | None]:
        if self.done[row]:
            return 0, self.reason[row]
        for count, token in enumerate(block, 1):
            # As in generate, every criterion is asked about every prefix, the last one included.
            reasons = self._asked(row, count, token) if self._criteria else set()
            reasons |= {"eos"} if token in self._eos else set()
            reasons |= {"length"} if count == self.room[row] else set()
            for reason in ("eos", "stop", "criteria", "length"):
                if reason in reasons:
                    return count, reason
        return len(block), None

    def _asked(self, row: int, count: int, token: int) -> set[str]:
        """Why the criteria would stop behind `token`, the row's `count`-th new one in this round."""
        length = len(self.history[row]) + count
        text = self._texts[row]
        text[0, length - 1] = token
        met = [criterion for criterion in self._criteria if _holds(criterion(text[:, :length], None))]  # type: ignore
        return {"stop" if isinstance(criterion, StopStringCriteria) else "criteria" for criterion in met}


def _text(prompt: Sequence[int], room: int) -> Tensor:
    text = torch.zeros((1, len(prompt) + room), dtype=torch.long, device="cpu")
    text[0, : len(prompt)] = torch.tensor(list(prompt), dtype=torch.long, device="cpu")
    return text


def _holds(answer: Any) -> bool:
    """A criterion answers with a tensor `(1,)`, or, if it is old, with a bool."""
    return bool(answer.any()) if isinstance(answer, Tensor) else bool(answer)


def eos_ids(value: Any) -> frozenset[int]:
    """The end tokens, as a set, from whatever a generation config holds: None, an id, several, or a tensor."""
    if value is None:
        return frozenset()
    ids = value.flatten().tolist() if isinstance(value, Tensor) else value
    ids: list[Any] = list(ids) if isinstance(ids, Collection) and not isinstance(ids, str) else [ids]
    if not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
        raise LabkitError(f"got end tokens {value!r}; needed are token ids; write an int, a list of ints or None")
    return frozenset(ids)


def stop_string_criteria(tokenizer: Any, stop_strings: Any) -> StoppingCriteria:
    """Stops behind the token that completes one of `stop_strings`, wherever in the tokens they begin and end."""
    several = isinstance(stop_strings, Collection) and not isinstance(stop_strings, str)
    strings: list[Any] = list(stop_strings) if several else [stop_strings]
    if not strings or not all(isinstance(string, str) and string for string in strings):
        raise LabkitError(f"got stop_strings={stop_strings!r}; needed are strings of a character or more; write None")
    if tokenizer is None:
        raise LabkitError(f"got stop_strings={stop_strings!r} but no tokenizer; write tokenizer=…, the model's own")
    try:
        with torch.device("cpu"):  # the criterion makes its tables on the default device
            return StopStringCriteria(tokenizer, strings)
    except ValueError as error:
        raise LabkitError(f"got stop_strings={stop_strings!r}, which this tokenizer does not fit: {error}") from error
