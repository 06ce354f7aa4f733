"""What `generate` can be asked for: transformers' spellings, checked at the door."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from labkit.acceptance import Match
from labkit.drafters import EarlyExit, Plain, PromptLookup
from labkit.errors import LabkitError, check_flag, nearest
from labkit.protocol import Acceptance, Drafter

MODEL_DEFAULT = "model's own"
"""`eos_token_id`'s default: what the model's generation config (or tokenizer) says. None means no EOS."""

FOREIGN = ("min_length", "suppress_tokens", "begin_suppress_tokens", "sequence_bias", "forced_bos_token_id",
           "forced_eos_token_id", "exponential_decay_length_penalty", "guidance_scale", "watermarking_config",
           "stop_strings", "max_time")  # fmt: skip
"""What transformers would apply from a generation config in greedy decoding, and labkit does not."""


@dataclass(frozen=True)
class Options:
    """The arguments of `Lab.generate` besides prompt and drafter; its help shows this text.

    Options, all by name, with their defaults. Decoding is greedy unless do_sample=True, a temperature above 0, top_k,
    top_p, min_p or typical_p asks for sampling; of the model's generation config, the penalties and ends are taken
    over, as in transformers' greedy decoding, and the sampling settings are not.

    max_new_tokens=64: the most tokens to generate in each row.
    do_sample=None: True draws tokens, False chooses the likeliest; None: as the other arguments ask.
    temperature=None: divides the logits before drawing; 0 is greedy.
    top_k=None: draw from the so many likeliest tokens only.
    top_p=None: draw from the likeliest tokens that have this probability together.
    min_p=None: draw from tokens of at least this share of the likeliest one's probability.
    typical_p=None: draw from the tokens closest to the law's entropy that have this probability together.
    repetition_penalty=None: above 1, makes tokens that have occurred less likely.
    no_repeat_ngram_size=None: no sequence of so many tokens occurs twice.
    bad_words_ids=None: lists of token ids that must not be generated.
    min_new_tokens=None: no end token before so many new ones.
    seed=0: of the draws; row b has seed + b. Or one int for each row: a prompt with its seed has one text.
    acceptance=None: labkit.Match() if None; labkit.Rejection(), or the lossy labkit.Typical().
    early_exit=None: decode with the first so many layers only, or where a rule lets each token leave (lossy).
    exit_layers=None: the depths at which that rule is tested; None: all.
    eos_token_id=the model's own: the id, or ids, that end a row; None: none does.
    stop_strings=None: a string, or several, that end a row once generated.
    logits_processor=None: a transformers LogitsProcessor, or several, applied to draft and target alike.
    stopping_criteria=None: a transformers StoppingCriteria, or several.
    streamer=None: a transformers streamer, fed the tokens of the one prompt.
    attention_mask=None: which ids of padded prompts are real, as a tokenizer returns it.
    assistant_early_exit=None: transformers' spelling of drafter=EarlyExit(assistant_early_exit).
    num_assistant_tokens=None: that one's max_draft; 4 if None.
    prompt_lookup_num_tokens=None: transformers' spelling of drafter=PromptLookup(max_draft=prompt_lookup_num_tokens).
    max_matching_ngram_size=None: that one's ngram; 2 if None.
    """

    max_new_tokens: int = 64
    do_sample: bool | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    typical_p: float | None = None
    repetition_penalty: float | None = None
    no_repeat_ngram_size: int | None = None
    bad_words_ids: list[list[int]] | None = None
    min_new_tokens: int | None = None
    seed: int | Sequence[int] = 0
    acceptance: Acceptance | None = None
    early_exit: Any = None
    exit_layers: Sequence[int] | None = None
    eos_token_id: Any = MODEL_DEFAULT
    stop_strings: str | list[str] | None = None
    logits_processor: Any = None
    stopping_criteria: Any = None
    streamer: Any = None
    attention_mask: Any = None
    assistant_early_exit: int | None = None
    num_assistant_tokens: int | None = None
    prompt_lookup_num_tokens: int | None = None
    max_matching_ngram_size: int | None = None

    @classmethod
    def of(cls, arguments: dict[str, Any]) -> "Options":
        """Check the names, naming the nearest to an unknown one, and the combinations."""
        known = [field.name for field in fields(cls)]
        for name in arguments:
            if name not in known:
                if name == "assistant_model":
                    raise LabkitError(
                        "generate has no assistant_model; write drafter=labkit.DraftModel(assistant_model)"
                    )
                near = nearest(name, [*known, "drafter", "prompt"])
                raise LabkitError(f"generate has no argument {name!r}{near}. All: {', '.join(known)}")
        options = cls(**arguments)
        if isinstance(options.max_new_tokens, bool) or not isinstance(options.max_new_tokens, int):
            raise LabkitError(
                f"got max_new_tokens={options.max_new_tokens!r}; needed is an int of at least 1, write 64"
            )
        if options.do_sample is not None:
            check_flag(options.do_sample, "do_sample", "generate")
        if options.do_sample is False and options.sampling_asked:
            raise LabkitError(
                f"do_sample=False contradicts {options.sampling_asked}; leave out one (temperature=0 is greedy)"
            )
        if options.do_sample and options.temperature == 0:
            raise LabkitError(
                "do_sample=True contradicts temperature=0; write a temperature above 0, or do_sample=False"
            )
        if options.exit_layers is not None and not callable(options.early_exit):
            raise LabkitError(
                f"exit_layers={options.exit_layers!r} says where a rule is tested, and "
                f"early_exit={options.early_exit!r} is none; write for example early_exit=labkit.confidence(0.9), or "
                "leave exit_layers out"
            )
        if options.acceptance is not None and not isinstance(options.acceptance, Acceptance):
            raise LabkitError(
                f"acceptance={options.acceptance!r}; write labkit.Match(), labkit.Rejection() or labkit.Typical()"
            )
        return options

    def completed(self, generation_config: Any) -> "Options":
        """With the penalties that the model's generation config prescribes, greedy or not, where none were given."""
        foreign = [name for name in FOREIGN if getattr(generation_config, name, None)]
        if foreign:
            raise LabkitError(
                f"the model's generation config has {', '.join(foreign)}, which labkit does not apply; set it to None "
                "(model.generation_config), or give its processor as logits_processor and then set it to None"
            )
        names = ("repetition_penalty", "no_repeat_ngram_size", "bad_words_ids", "min_new_tokens")
        given = {name: getattr(generation_config, name, None) for name in names if getattr(self, name) is None}
        return replace(self, **{name: value for name, value in given.items() if value is not None})

    @property
    def sampling_asked(self) -> dict[str, Any]:
        """The arguments that ask for sampling."""
        neutral = {
            "temperature": 1 if self.do_sample is False else 0,
            "top_k": 0,
            "top_p": 1,
            "min_p": 0,
            "typical_p": 1,
        }
        values = {name: getattr(self, name) for name in neutral}
        return {name: value for name, value in values.items() if value not in (None, 0, neutral[name])}

    @property
    def sampling(self) -> bool:
        """Whether tokens are drawn rather than chosen."""
        return bool(self.do_sample) or (bool(self.sampling_asked) and self.temperature != 0)

    @property
    def rule(self) -> Acceptance:
        """The acceptance rule."""
        return self.acceptance or Match()

    def drafter(self, given: Drafter | None) -> Drafter:
        """The strategy asked for, in labkit's spelling or in transformers'."""
        exit, lookup = self.assistant_early_exit, self.prompt_lookup_num_tokens
        asked = [name for name, value in (("drafter", given), ("assistant_early_exit", exit),
                                          ("prompt_lookup_num_tokens", lookup)) if value is not None]  # fmt: skip
        if len(asked) > 1:
            raise LabkitError(f"got {' and '.join(asked)}; ask for one strategy")
        for name, value, needs in (("num_assistant_tokens", self.num_assistant_tokens, exit),
                                   ("max_matching_ngram_size", self.max_matching_ngram_size, lookup)):  # fmt: skip
            if value is not None and needs is None:
                raise LabkitError(f"{name}={value} has no effect; write drafter=labkit.EarlyExit(exit, max_draft=…), "
                                  "or give assistant_early_exit / prompt_lookup_num_tokens too")  # fmt: skip
        if exit is not None:
            return EarlyExit(exit, max_draft=4 if self.num_assistant_tokens is None else self.num_assistant_tokens)
        if lookup is not None:
            ngram = 2 if self.max_matching_ngram_size is None else self.max_matching_ngram_size
            return PromptLookup(ngram=ngram, max_draft=lookup)
        if given is not None and not isinstance(given, Drafter):
            raise LabkitError(
                f"drafter={repr(given)[:60]} is not a draft strategy; write for example labkit.EarlyExit(12)"
            )
        return given or Plain()

    def record(self) -> dict[str, Any]:
        """The settings as plain values, for the result."""
        plain = (int, float, str, bool, list, tuple, type(None))
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value if isinstance(value, plain) else repr(value)[:200] for name, value in values.items()}
