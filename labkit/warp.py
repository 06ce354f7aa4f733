"""Logits processors for a whole draft at once: each row of scores sees the history that it would see in `generate`."""

import math
from collections.abc import Collection, Sequence
from operator import index
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers.generation import logits_process as hf

from labkit.draft import Draft
from labkit.errors import LabkitError

STATELESS = frozenset(
    {
        hf.TemperatureLogitsWarper,
        hf.TopKLogitsWarper,
        hf.TopPLogitsWarper,
        hf.MinPLogitsWarper,
        hf.TypicalLogitsWarper,
        hf.EpsilonLogitsWarper,
        hf.EtaLogitsWarper,
        hf.TopHLogitsWarper,
        hf.SuppressTokensLogitsProcessor,
        hf.LogitNormalization,
        hf.InfNanRemoveLogitsProcessor,
    }
)
"""Exactly these types look at nothing but a row's own scores. A subclass may look at more."""

VALIDATING = frozenset({hf.EtaLogitsWarper, hf.TopHLogitsWarper})
"""Stateless, but torch.distributions checks its argument on the host: a sync, and counted."""

_NO_ENCODER = "it reads an encoder's input, and labkit decodes with decoder-only models"
_NO_AUDIO = "it belongs to an audio model's own decoding"
_TWO_PASSES = "it needs a second forward pass of the model for each token, which a draft does not have"
_KEEPS_STATE = "it keeps random state from call to call, and a draft is judged in another order than it is written"
REFUSED = (
    (
        hf.PrefixConstrainedLogitsProcessor,
        "it is told a row's index in the batch; write a LogitsProcessor of your own that looks at input_ids only",
    ),
    (hf.UnbatchedClassifierFreeGuidanceLogitsProcessor, _TWO_PASSES),
    (hf.ClassifierFreeGuidanceLogitsProcessor, _TWO_PASSES),
    (hf.DiaClassifierFreeGuidanceLogitsProcessor, _TWO_PASSES),
    (hf.WatermarkLogitsProcessor, _KEEPS_STATE),
    (hf.SynthIDTextWatermarkLogitsProcessor, _KEEPS_STATE),
    (hf.WhisperTimeStampLogitsProcessor, _NO_AUDIO),
    (hf.WhisperNoSpeechDetection, _NO_AUDIO),
    (hf.BarkEosPrioritizerLogitsProcessor, _NO_AUDIO),
    (hf.DiaEOSChannelFilterLogitsProcessor, _NO_AUDIO),
    (hf.DiaEOSDelayPatternLogitsProcessor, _NO_AUDIO),
    (hf.AlternatingCodebooksLogitsProcessor, _NO_AUDIO),
    (hf.EncoderRepetitionPenaltyLogitsProcessor, _NO_ENCODER),
    (hf.EncoderNoRepeatNGramLogitsProcessor, _NO_ENCODER),
)


class Warp:
    """Turns logits into the scores that are sampled from, alike for the draft's law and the target's.

    `per_row` has one list of processors for each row of the batch, equal but for what depends on the prompt (the
    prompt's length). A processor in STATELESS is one batched call; any other is called once for each row and node,
    on the exact history `(1, length)`. `syncs` counts the calls in which one of those ran, or one in VALIDATING.
    """

    def __init__(self, per_row: Sequence[Sequence[Any]]):
        if not per_row:
            raise LabkitError("got no lists of processors; write one for each row of the batch, Warp([[]]) at least")
        for row, processors in enumerate(per_row):
            if [type(p) for p in processors] != [type(p) for p in per_row[0]]:
                got, first = ([type(p).__name__ for p in x] for x in (processors, per_row[0]))
                raise LabkitError(f"got processors {got} for row {row} and {first} for row 0; write the same kinds")
        self._steps = [_step(column) for column in zip(*per_row, strict=True)]
        self._batch = len(per_row)
        self._histories_needed = any(len(step) > 1 or type(step[0]) not in STATELESS for step in self._steps)
        self._waits = self._histories_needed or any(type(step[0]) in VALIDATING for step in self._steps)
        self.syncs = 0

    def __call__(
        self,
        scores: Float[Tensor, "batch rows vocab"],
        tokens: Int[Tensor, "batch slots"],
        lengths: Sequence[int],
        drafted: Int[Tensor, "batch nodes"],
        draft: Draft | None = None,
    ) -> Float[Tensor, "batch rows vocab"]:
        """Warped float32 scores; the caller's `scores` stay as they are.

        With `draft`, row 0 follows the `lengths[b]` committed `tokens` and row 1 + i the path down to node i.
        Without, there is one row, which follows the committed tokens and all that is `drafted`. A tree under a
        processor with a history costs one copy of `parents` to the host; a chain costs none.
        """
        if scores.shape[0] != self._batch:
            raise LabkitError(f"got scores for {scores.shape[0]} rows, but processors for {self._batch}")
        self.syncs += self._waits
        warped = scores.to(torch.float32, copy=self._histories_needed)
        histories = _histories(tokens, lengths, drafted, draft) if self._histories_needed else []
        for step in self._steps:
            if type(step[0]) in STATELESS:
                warped = step[0](drafted, warped.flatten(0, 1)).reshape(warped.shape)
            else:
                _one_by_one(step, histories, warped)
        return warped


def _step(column: Sequence[Any]) -> Sequence[Any]:
    """One place in the lists, for all rows: the processor itself if it is stateless, else one for each row."""
    for kind, why in REFUSED:
        if isinstance(column[0], kind):
            raise LabkitError(f"got {type(column[0]).__name__}, which cannot run on a draft: {why}; leave it out")
    if type(column[0]) not in STATELESS:
        return column
    for row, other in enumerate(column):
        if not _same(column[0], other):
            name = type(other).__name__
            raise LabkitError(f"got another {name} for row {row} than for row 0; write the same settings for all rows")
    return column[:1]


def _same(one: Any, other: Any) -> bool:
    mine, theirs = vars(one), vars(other)
    return one is other or all(
        torch.equal(value, theirs[name]) if isinstance(value, Tensor) else value == theirs[name]
        for name, value in mine.items()
    )


def _histories(tokens: Tensor, lengths: Sequence[int], drafted: Tensor, draft: Draft | None) -> list[list[Tensor]]:
    """For each row of the batch and each row of its scores, the `(1, length)` ids that came before."""
    wholes = [torch.cat([tokens[b : b + 1, :n], drafted[b : b + 1]], 1) for b, n in enumerate(lengths)]
    if draft is None:
        return [[whole] for whole in wholes]
    if draft.is_chain:
        return [
            [whole[:, : n + row] for row in range(1 + draft.nodes)] for whole, n in zip(wholes, lengths, strict=True)
        ]
    histories = [[whole[:, :n]] for whole, n in zip(wholes, lengths, strict=True)]
    for b, parents in enumerate(draft.parents.tolist()):
        for node, parent in enumerate(parents):
            histories[b].append(torch.cat([histories[b][1 + parent], drafted[b : b + 1, node : node + 1]], 1))
    return histories


def _one_by_one(processors: Sequence[Any], histories: list[list[Tensor]], warped: Tensor) -> None:
    """One call for each row and node, in place: `warped` is labkit's own, and so a user's processor may write too."""
    for b, processor in enumerate(processors):
        for row, history in enumerate(histories[b]):
            mine = warped[b, row : row + 1]
            got = processor(history, mine)
            if not isinstance(got, Tensor) or got.shape != mine.shape:
                what = tuple(got.shape) if isinstance(got, Tensor) else got
                raise LabkitError(f"{type(processor).__name__} returned {what}; return the scores, {tuple(mine.shape)}")
            mine.copy_(got)


Setting = Any
"""As the user wrote it; what cannot be meant is refused here."""


def build_processors(
    *,
    sampling: bool,
    temperature: Setting = None,
    top_k: Setting = None,
    top_p: Setting = None,
    min_p: Setting = None,
    typical_p: Setting = None,
    repetition_penalty: Setting = None,
    no_repeat_ngram_size: Setting = None,
    bad_words_ids: Setting = None,
    min_new_tokens: Setting = None,
    prompt_length: int,
    eos_ids: Collection[int],
    extra: Sequence[Any] | None = None,
    device: torch.device | str,
) -> list[Any]:
    """The processors of one row, transformers' own, in the order in which its `generate` applies them.

    The neutral values of `generate` (temperature 1, top_k 0, ...) add none. Without `sampling`, temperature, top_k,
    top_p, min_p and typical_p are checked but add none, as there. An `extra` processor takes the place of the one
    of its type among the penalties; the others come behind the penalties and before the temperature.
    """
    greedy = not sampling  # which is often written temperature=0
    _check(
        "temperature",
        temperature,
        lambda x: x > 0 or (greedy and x == 0),
        "a number of 0 or more",
        "temperature=0 for greedy",
    )
    _check("top_k", top_k, lambda x: x >= 0, "a whole number from 1", "top_k=50, or 0 for no limit", whole=True)
    _check("top_p", top_p, lambda x: 0 <= x <= 1, "a number from 0 to 1", "top_p=0.9, or 1.0 for no limit")
    _check("min_p", min_p, lambda x: 0 <= x <= 1, "a number from 0 to 1", "min_p=0.05, or None for no limit")
    _check("typical_p", typical_p, lambda x: 0 < x <= 1, "a number from 0 to 1", "typical_p=0.9, or 1.0 for no limit")
    _check("repetition_penalty", repetition_penalty, lambda x: x > 0, "a number above 0", "1.3, or 1.0 for none")
    _check("no_repeat_ngram_size", no_repeat_ngram_size, lambda x: x >= 0, "a whole number", "3, or 0", whole=True)
    _check("min_new_tokens", min_new_tokens, lambda x: x >= 0, "a whole number", "min_new_tokens=8, or 0", whole=True)
    eos = torch.tensor(sorted(eos_ids), dtype=torch.long, device="cpu")
    defaults: list[Any] = []
    if repetition_penalty is not None and repetition_penalty != 1:
        defaults.append(hf.RepetitionPenaltyLogitsProcessor(float(repetition_penalty)))
    if no_repeat_ngram_size:
        defaults.append(hf.NoRepeatNGramLogitsProcessor(no_repeat_ngram_size))
    if bad_words_ids is not None:
        defaults.append(hf.NoBadWordsLogitsProcessor(_bad_words(bad_words_ids, eos_ids), eos))
    if min_new_tokens and len(eos):
        defaults.append(hf.MinNewTokensLengthLogitsProcessor(prompt_length, min_new_tokens, eos.to(device)))
    extra = list(extra or [])
    processors = [next((x for x in extra if type(x) is type(default)), default) for default in defaults]
    for processor in extra:
        if processor not in processors:
            processors.append(processor)
    if not sampling:
        return processors
    if temperature is not None and temperature != 1:
        processors.append(hf.TemperatureLogitsWarper(float(temperature)))
    if top_k:
        processors.append(hf.TopKLogitsWarper(top_k))
    if top_p is not None and top_p < 1:
        processors.append(hf.TopPLogitsWarper(float(top_p)))
    if min_p is not None:
        processors.append(hf.MinPLogitsWarper(float(min_p)))
    if typical_p is not None and typical_p < 1:
        processors.append(hf.TypicalLogitsWarper(float(typical_p)))
    return processors


def _check(name: str, value: Any, holds: Any, needed: str, write: str, *, whole: bool = False) -> None:
    number = isinstance(value, int if whole else int | float) and not isinstance(value, bool)
    if value is not None and not (number and math.isfinite(value) and holds(value)):
        raise LabkitError(f"got {name}={value!r}; needed is {needed}; write {write}")


def _bad_words(words: Setting, eos_ids: Collection[int]) -> list[list[int]]:
    try:
        lists = [[index(token) for token in word] for word in words]
        good = all(word and min(word) >= 0 for word in lists)
    except TypeError:
        good, lists = False, []
    if not good or not lists:
        raise LabkitError(f"got bad_words_ids={words!r}; needed are lists of token ids; write [[id, id], [id]] or None")
    if all(len(word) == 1 and word[0] in eos_ids for word in lists):
        raise LabkitError(f"got bad_words_ids={words!r}, end tokens only, which are never bad; write min_new_tokens=…")
    return lists
