"""The forms in which a prompt may be given, brought to rows of token ids."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any

import torch

from labkit.errors import LabkitError
from labkit.trace import Generation


@dataclass(frozen=True)
class Prompts:
    """Rows of ids without padding, and whether the caller gave one prompt (not a list)."""

    rows: list[list[int]]
    single: bool


def read_prompts(prompt: Any, attention_mask: Any, tokenizer: Any, vocab: int) -> Prompts:
    """Text, chat messages, ids (list, tensor, or a tokenizer's output with its attention mask), or a list of these."""
    if isinstance(prompt, Mapping) and "input_ids" in prompt:
        attention_mask = prompt.get("attention_mask") if attention_mask is None else attention_mask
        prompt = prompt["input_ids"]
    if isinstance(prompt, torch.Tensor):
        prompt = prompt.tolist()
    if attention_mask is not None:
        attention_mask = _mask(attention_mask)
    single = _is_one(prompt)
    given: list[Any] = [prompt] if single else list(prompt)
    if not given:
        raise LabkitError("got an empty list of prompts; give at least one prompt")
    rows = [_ids(one, tokenizer) for one in given]
    if attention_mask is None and all(_is_sequence_of_ids(one) for one in given):
        _check_padding(rows, getattr(tokenizer, "pad_token_id", None))
    if attention_mask is not None:
        masks = [attention_mask] if attention_mask and not isinstance(attention_mask[0], list) else attention_mask
        if [len(m) for m in masks] != [len(row) for row in rows]:
            raise LabkitError(
                f"attention_mask has rows of {[len(m) for m in masks]} entries, the prompts {[len(r) for r in rows]} "
                "ids; give the mask that the tokenizer returned with these ids"
            )
        rows = [
            [token for token, real in zip(row, mask, strict=True) if real]
            for row, mask in zip(rows, masks, strict=True)
        ]
    for index, row in enumerate(rows):
        if not row:
            raise LabkitError(f"prompt {index} is empty; give at least one token (such as the tokenizer's bos token)")
        if not (0 <= min(row) and max(row) < vocab):
            outside = next(token for token in row if not 0 <= token < vocab)
            raise LabkitError(f"prompt {index} has token id {outside}, but the model's vocabulary has {vocab} tokens")
    return Prompts(rows, single)


def one_text(lab: Any, given: Any, row: int = 0) -> tuple[list[int], int]:
    """One text's ids, and how many were given and not generated: a Generation's row, or any form of one prompt."""
    lab.backbone.check_unchanged()
    if isinstance(given, Generation):
        if isinstance(row, bool) or not isinstance(row, int) or not 0 <= row < len(given.prompts):
            raise LabkitError(f"got row={row!r}; this generation has rows 0 to {len(given.prompts) - 1}")
        ids, begin = [*given.prompts[row], *given.tokens[row]], len(given.prompts[row])
        read_prompts(ids, None, None, lab.backbone.vocab)
    else:
        rows = read_prompts(given, None, lab.tokenizer, lab.backbone.vocab).rows
        if len(rows) > 1:
            raise LabkitError(f"got {len(rows)} texts; give one text, or one Generation")
        ids, begin = rows[0], 1
    if len(ids) > lab.backbone.limit:
        most = lab.backbone.limit
        raise LabkitError(f"a text of {len(ids)} tokens is longer than the model's {most} positions; give a part of it")
    return ids, begin


def _mask(given: Any) -> list:
    """An attention mask as lists: from lists, a tensor, or an array."""
    try:
        return [*torch.as_tensor(given, device="cpu").tolist()]
    except (TypeError, ValueError, RuntimeError):
        if isinstance(given, Sequence) and all(isinstance(row, Sequence) for row in given):
            return [list(row) for row in given]
        raise LabkitError(
            f"got attention_mask of type {type(given).__name__}; give the mask that the tokenizer returned with the ids"
        ) from None


def _is_sequence_of_ids(prompt: Any) -> bool:
    return isinstance(prompt, torch.Tensor) or (isinstance(prompt, Sequence) and all(_is_id(token) for token in prompt))


def _check_padding(rows: Sequence[Sequence[int]], pad: int | None) -> None:
    """Raise LabkitError if rows of one length look padded and no mask says what is prompt."""
    padded = pad is not None and any(row and pad in (row[0], row[-1]) for row in rows)
    if padded and len(rows) > 1 and len({len(row) for row in rows}) == 1:
        raise LabkitError(
            f"prompts of ids begin or end with the pad token {pad} and no attention_mask came; give the tokenizer's "
            "whole output (or attention_mask=…, ones where the pad token is meant)"
        )


def _is_one(prompt: Any) -> bool:
    if isinstance(prompt, str):
        return True
    if not isinstance(prompt, Sequence):
        raise LabkitError(
            f"got a prompt of type {type(prompt).__name__}; "
            "write text, a list of chat messages, token ids, or a list of these"
        )
    return len(prompt) > 0 and (_is_id(prompt[0]) or (isinstance(prompt[0], Mapping) and "input_ids" not in prompt[0]))


def _is_id(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _ids(prompt: Any, tokenizer: Any) -> list[int]:
    if isinstance(prompt, Mapping) and "input_ids" in prompt:
        rows = read_prompts(prompt, None, tokenizer, 1 << 62).rows
        if len(rows) > 1:
            raise LabkitError(f"one of several prompts holds {len(rows)} rows; give each prompt by itself")
        return rows[0]
    if isinstance(prompt, torch.Tensor):
        prompt = prompt.tolist()
    if not isinstance(prompt, str) and isinstance(prompt, Sequence) and all(_is_id(token) for token in prompt):
        return [int(token) for token in prompt]
    if tokenizer is None:
        raise LabkitError("a text prompt needs a tokenizer; give token ids, or labkit.Lab(model, tokenizer)")
    if isinstance(prompt, str):
        return list(tokenizer(prompt)["input_ids"])
    if isinstance(prompt, Sequence) and all(isinstance(message, Mapping) for message in prompt):
        if getattr(tokenizer, "chat_template", None) is None:
            raise LabkitError("the tokenizer has no chat template; give the prompt as text")
        try:
            whole = tokenizer.apply_chat_template(list(prompt), add_generation_prompt=True, return_dict=True)
        except Exception as error:  # templates raise whatever they like
            raise LabkitError(
                f"the tokenizer's chat template does not take these messages ({type(error).__name__}: {error}); "
                "write {'role': 'user', 'content': 'text'}"
            ) from error
        return list(whole["input_ids"])
    held = sorted({type(x).__name__ for x in prompt}) if isinstance(prompt, Sequence) else "no tokens"
    raise LabkitError(
        f"got a prompt of type {type(prompt).__name__} holding {held}; "
        "write text, chat messages ({'role': …, 'content': …}), or token ids"
    )
