"""What a round costs and what it leaves behind: copies to the host, allocations, layer calls, the user's model."""

import copy
import functools
import gc
import sys
from collections import Counter
from pathlib import Path

import families
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scripted import RandomTree, Replay, accepted_lengths, reference
from torch.overrides import TorchFunctionMode
from transformers import StoppingCriteria

import labkit
from labkit import (
    AtMost,
    Drafter,
    DraftModel,
    EarlyExit,
    Heads,
    Plain,
    PromptLookup,
    SkipLayers,
    Union,
    Until,
    decoding,
    never,
)
from labkit.heads import Affine, DraftVocabulary, Kangaroo
from labkit.lab import _Run

PROMPTS = [[3, 14, 15, 9, 26, 5, 35], [8], [58, 9, 7, 9, 3, 2, 3, 8, 4, 6, 2, 6]]
COUNT = 30
LABKIT = str(Path(labkit.__file__).parent)


@functools.cache
def lab_of(family: str, **kwargs) -> labkit.Lab:
    return labkit.Lab(families.tiny(family, **kwargs))


@functools.cache
def text_of(family: str, prompt: tuple[int, ...], count: int) -> list[int]:
    return reference(lab_of(family).model, list(prompt), count)


@functools.cache
def small_model():
    return families.tiny("llama", seed=9, layers=2)


def texts(family: str = "llama", prompts=PROMPTS, count: int = COUNT) -> list[list[int]]:
    return [text_of(family, tuple(prompt), count) for prompt in prompts]


@functools.cache
def some_heads():
    heads = labkit.MLPSpeculator(32, 61, 3, 24, dtype=torch.float64)
    for parameter in heads.parameters():
        torch.nn.init.normal_(parameter, std=0.4, generator=torch.Generator().manual_seed(3))
    return heads


STRATEGIES = {
    "Plain": lambda prompts, texts: Plain(),
    "PromptLookup": lambda prompts, texts: PromptLookup(ngram=2, max_draft=3),
    "EarlyExit": lambda prompts, texts: EarlyExit(2, max_draft=3),
    "EarlyExit (share=False)": lambda prompts, texts: EarlyExit(2, max_draft=3, share=False),
    "DraftModel": lambda prompts, texts: DraftModel(small_model(), max_draft=3),
    "SkipLayers": lambda prompts, texts: SkipLayers((1,), (2,), max_draft=3),
    "Heads (chain)": lambda prompts, texts: Heads(some_heads(), top_k=(1, 1, 1)),
    "Heads (product tree)": lambda prompts, texts: Heads(some_heads(), top_k=(3, 2, 2), candidates=4),
    "Heads (fixed tree)": lambda prompts, texts: Heads(some_heads(), tree=[(0,), (1,), (0, 0), (0, 1), (1, 0)]),
    "window": lambda prompts, texts: EarlyExit(2, 3, kv=labkit.Window(1, 3)),
    "top keys": lambda prompts, texts: EarlyExit(2, 3, kv=labkit.TopK(3)),
    "affine adapter": lambda prompts, texts: EarlyExit(2, 3, adapter=Affine(32, torch.float64)),
    "Kangaroo": lambda prompts, texts: EarlyExit(2, 3, adapter=Kangaroo(32, 4, dtype=torch.float64)),
    "draft vocabulary": lambda prompts, texts: EarlyExit(
        2, 3, head=DraftVocabulary(torch.nn.Linear(32, 30, dtype=torch.float64), range(30), 61)
    ),
    "chain": lambda prompts, texts: Replay(prompts, texts, 4, accepted_lengths(4)),
    "trees": lambda prompts, texts: RandomTree(prompts, texts, taps=(1, -1)),
    "Union": lambda prompts, texts: Union(EarlyExit(2, 3), Heads(some_heads(), top_k=(3, 2, 2), candidates=4)),
    "Until(never)": lambda prompts, texts: AtMost(3, Until(never, EarlyExit(2, max_draft=4))),
}
every_strategy = pytest.mark.parametrize("strategy", STRATEGIES)


def caller(depth: int = 2) -> tuple[str, int]:
    """File and line of the nearest frame outside torch and this class: who called the torch function."""
    frame = sys._getframe(depth)
    while "/torch/" in frame.f_code.co_filename or frame.f_code.co_name == "__torch_function__":
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_lineno


# -- copies to the host ---------------------------------------------------------------------------------

TO_HOST = {
    *("tolist", "item", "cpu", "numpy", "nonzero", "argwhere", "masked_select", "unique", "is_nonzero", "equal"),
    *("__bool__", "__int__", "__float__", "__index__", "__complex__", "__array__", "__contains__", "allclose"),
    *("bincount", "unique_consecutive", "_local_scalar_dense"),
}


def selects_by_mask(index) -> bool:
    parts = index if isinstance(index, tuple | list) else (index,)
    return any(isinstance(x, torch.Tensor) and x.dtype in (torch.bool, torch.uint8) for x in parts)


class HostCopies(TorchFunctionMode):
    """Records where the host waits for the device; on a CPU nothing does, so the calls themselves are counted."""

    def __init__(self, ignore=("scripted.py",)):
        super().__init__()
        self.seen, self.ignore = [], ignore

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        waits = name in TO_HOST or (name in ("where",) and len(args) == 1)
        waits |= name in ("__getitem__", "__setitem__") and selects_by_mask(args[1])
        waits |= name == "repeat_interleave" and isinstance(
            args[1] if len(args) > 1 else kwargs.get("repeats"), torch.Tensor
        )
        waits |= name == "to" and "cpu" in [x for x in (*args[1:], kwargs.get("device")) if isinstance(x, str)]
        if waits and not caller()[0].endswith(self.ignore):
            self.seen.append((name, *caller()))
        return func(*args, **kwargs)


def copies_per_round(monkeypatch, family, prompts, drafter, count=COUNT, **options):
    """Where each round waited, and the generation."""
    mode, rounds, whole = HostCopies(), [], decoding.play_round

    def play_round(*args):
        before = len(mode.seen)
        happened = whole(*args)
        rounds.append(mode.seen[before:])
        return happened

    monkeypatch.setattr(decoding, "play_round", play_round)
    with mode:
        out = lab_of(family).generate(prompts, drafter, max_new_tokens=count, **options)
    return rounds, out


@every_strategy
@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2"])
@pytest.mark.parametrize("options", [{}, {"temperature": 0.8, "top_p": 0.9}], ids=["greedy", "sampled"])
def test_one_copy_to_the_host_in_each_round(monkeypatch, strategy, family, options):
    drafter = STRATEGIES[strategy](PROMPTS, texts(family))
    rounds, out = copies_per_round(monkeypatch, family, PROMPTS, drafter, **options)
    assert len(rounds) == len(out.rounds) > 3
    assert [len(waits) for waits in rounds] == [1] * len(rounds), rounds[0]
    assert {name for waits in rounds for name, *_ in waits} == {"tolist"}
    assert out.settings["host_copies"] == len(rounds)


@every_strategy
def test_one_copy_under_rejection_too(monkeypatch, strategy):
    drafter = STRATEGIES[strategy](PROMPTS, texts())
    options = {"temperature": 0.8, "acceptance": labkit.Rejection()}
    rounds, _ = copies_per_round(monkeypatch, "llama", PROMPTS, drafter, **options)
    assert [len(waits) for waits in rounds] == [1] * len(rounds), rounds[0]


def test_waiting_is_counted():
    """The counter sees every way of waiting that it claims to see."""
    x = torch.tensor([1, 0, 1])
    ways = [
        x.tolist, x[0].item, x.cpu, x.numpy, x.nonzero, lambda: bool(x[0]), lambda: int(x[0]), lambda: float(x[0]),
        lambda: [1, 2][x[0]], lambda: x[x > 0], lambda: x.to("cpu"), lambda: x.to(device="cpu"), lambda: torch.where(x > 0),
        lambda: x.unique(), lambda: 1 if x.any() else 0, lambda: torch.equal(x, x), lambda: x.masked_select(x > 0),
        lambda: x.clone().__setitem__(x > 0, 7), lambda: x.repeat_interleave(x),
    ]  # fmt: skip
    for way in ways:
        with HostCopies() as mode:
            way()
        assert mode.seen, way
    with HostCopies() as mode:
        x[0], x[:2], x[x.long().clamp(0, 1)], torch.where(x > 0, x, 0), x.to(torch.float32), x + 1, x.gather(0, x)
    assert not mode.seen


def test_a_waiting_drafter_is_found(monkeypatch):
    class Peeks(Plain):
        def propose(self, state, context):
            assert int(context.n[0]) == context.lengths[0]
            return super().propose(state, context)

    rounds, _ = copies_per_round(monkeypatch, "llama", PROMPTS, Peeks(), count=6)
    assert [len(waits) for waits in rounds] == [2] * 6


def test_a_processor_that_waits_is_declared(monkeypatch):
    out = copies_per_round(monkeypatch, "llama", PROMPTS, EarlyExit(2, 3), no_repeat_ngram_size=3)[1]
    assert out.settings["host_copies"] > len(out.rounds)


# -- allocations ----------------------------------------------------------------------------------------


class Allocations(TorchFunctionMode):
    """Per round: the largest result of every cat in labkit's own frames, and the clones there."""

    def __init__(self):
        super().__init__()
        self.cats, self.clones = [Counter()], []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        out, name = func(*args, **(kwargs or {})), getattr(func, "__name__", "")
        if name in ("cat", "concat", "stack", "hstack", "vstack", "clone", "deepcopy", "__deepcopy__", "resize_"):
            where = caller()
            if where[0].startswith(LABKIT):
                if name in ("cat", "concat", "stack", "hstack", "vstack"):
                    self.cats[-1][where] = max(self.cats[-1][where], out.numel())
                else:
                    self.clones.append((name, *where))
        return out


def roomy(strategy, count=COUNT):
    """A strategy whose shapes are the same in every round that has room for a whole draft."""
    return STRATEGIES[strategy](PROMPTS, texts(count=count))


@every_strategy
def test_nothing_grows(monkeypatch, strategy):
    copied, lab = [], lab_of("llama")
    count, drafter = 60, roomy(strategy, 60)
    monkeypatch.setattr(copy, "deepcopy", lambda *args, **kwargs: copied.append(args))
    run = _Run(lab, PROMPTS, drafter, {"max_new_tokens": count})
    pointers = []
    with Allocations() as mode:
        for _ in run.rounds():
            full = run.stop.max_room > drafter.nodes + 1
            mode.cats.append(Counter())
            layers = run.session.cache.layers
            taps = [tap for tap in run.session.cache.taps.values()]
            held = [x for layer in layers for x in (layer.keys, layer.values)] + taps + [run.session.tokens]
            pointers.append([(x.data_ptr(), x.shape) for x in held])
            assert full or run.stop.max_room <= drafter.nodes + 1
    assert copied == [] and mode.clones == []
    assert all(there == pointers[0] for there in pointers)
    first = mode.cats[1]
    if strategy != "trees":  # a random tree has another depth in each round, and its packet another size
        assert first and all(size <= first[where] for later in mode.cats[2:] for where, size in later.items())


def test_growing_is_noticed():
    class Hoards(Plain):
        def begin(self, session):
            return {"session": session, "kept": session.tokens[:, :1]}

        def propose(self, state, context):
            state["kept"] = torch.cat([state["kept"], context.tokens[:, :1]], 1)
            return super().propose(state, context)

    run = _Run(lab_of("llama"), PROMPTS, Hoards(), {"max_new_tokens": 12})
    live = [live_bytes() for _ in run.rounds()]
    assert len(set(live[1:])) > 1


@pytest.fixture
def young_objects():
    """What is older than the test is left out of gc.collect and gc.get_objects: seconds become milliseconds."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def live_bytes() -> int:
    gc.collect()
    storages = {}
    for thing in gc.get_objects():
        if issubclass(type(thing), torch.Tensor) and thing.layout == torch.strided and thing.device.type != "meta":
            storage = thing.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


@every_strategy
@pytest.mark.parametrize(
    "options", [{}, {"temperature": 0.8, "acceptance": labkit.Rejection()}], ids=["Match", "Rejection"]
)
def test_live_memory_is_constant_after_the_second_round(strategy, options, young_objects):
    drafter = roomy(strategy)
    run = _Run(lab_of("llama"), PROMPTS, drafter, {"max_new_tokens": COUNT, **options})
    live = []
    for happened in run.rounds():
        if run.stop.max_room <= drafter.nodes + 1:
            break
        nodes = max(len(row) for row in happened.drafted)  # a lookup without a match is another shape of round
        del happened
        live.append((nodes if strategy == "PromptLookup" else 0, live_bytes()))
    assert len(live) > 3
    if strategy == "trees":  # a tree of another depth has another path
        assert max(size for _, size in live[1:]) - min(size for _, size in live[1:]) < 4096
    else:
        assert len(set(live[1:])) == len({nodes for nodes, _ in live[1:]}), live


# -- the default device ---------------------------------------------------------------------------------


@every_strategy
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.8, "top_k": 9, "top_p": 0.9, "min_p": 0.01, "typical_p": 0.9},
        {"temperature": 0.8, "acceptance": labkit.Rejection()},
        {"repetition_penalty": 1.3, "min_new_tokens": 4, "eos_token_id": 5, "bad_words_ids": [[7], [1, 2]]},
    ],
    ids=["greedy", "sampled", "rejection", "processors"],
)
def test_the_default_device_plays_no_part(strategy, options):
    lab, prompts = labkit.Lab(families.tiny("gemma3")), PROMPTS
    drafter = STRATEGIES[strategy](prompts, texts("gemma3"))
    want = lab.generate(prompts, drafter, max_new_tokens=12, **options).tokens
    fresh = labkit.Lab(families.tiny("gemma3"))
    torch.set_default_device("meta")
    try:
        got = fresh.generate(prompts, drafter, max_new_tokens=12, **options).tokens
    finally:
        torch.set_default_device(None)
    assert got == want


@pytest.mark.parametrize("family", ["llama", "gpt2", "gpt_oss", "gemma2"])
def test_early_exit_on_the_default_device(family):
    lab = labkit.Lab(families.tiny(family))
    torch.set_default_device("meta")
    try:
        out = lab.generate(PROMPTS, EarlyExit(2, 3), max_new_tokens=6, early_exit=3)
    finally:
        torch.set_default_device(None)
    assert out.tokens == lab.generate(PROMPTS, max_new_tokens=6, early_exit=3).tokens


# -- layer calls ----------------------------------------------------------------------------------------


def rows_by_layer(lab, drafter, prompts, count, **options):
    """For each round with room for a whole draft: for every layer, the rows of each of its calls."""
    calls: list[dict] = []
    layers = lab.backbone._layers

    def note(index, module, args, kwargs, output):
        hidden = args[0] if args else kwargs["hidden_states"]
        calls[-1].setdefault(index, []).append(hidden.shape[1])

    hooks = [
        layer.register_forward_hook(functools.partial(note, i), with_kwargs=True) for i, layer in enumerate(layers)
    ]
    whole = decoding.play_round

    def play_round(*args):
        full = args[6].max_room > drafter.nodes
        calls.append({})
        happened = whole(*args)
        if not full:
            calls.pop()
        return happened

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decoding, "play_round", play_round)
        calls.append({})
        out = lab.generate(prompts, drafter, max_new_tokens=count, **options)
    for hook in hooks:
        hook.remove()
    return calls[1:], out


@pytest.mark.parametrize("prompts", [PROMPTS[:1], PROMPTS], ids=["one", "ragged"])
@pytest.mark.parametrize("gamma", [1, 4])
@pytest.mark.parametrize("exit", [1, 2, 4])
def test_layers_below_the_exit_run_once_a_token(prompts, gamma, exit):
    rounds, out = rows_by_layer(lab_of("llama"), EarlyExit(exit, gamma), prompts, 20)
    below, above = [1] * (gamma + 1), [gamma + 1]
    assert rounds and all(
        calls == {i: below if i < exit else above for i in range(4) if i < exit or exit < 4} for calls in rounds
    )
    assert out.tokens == [text[:20] for text in texts(prompts=prompts)]


def test_the_ablation_runs_them_twice():
    rounds, _ = rows_by_layer(lab_of("llama"), EarlyExit(2, 3, share=False), PROMPTS, 20)
    assert rounds and all(calls == {0: [1] * 3 + [4], 1: [1] * 3 + [4], 2: [4], 3: [4]} for calls in rounds)


def test_verification_is_one_pass():
    rounds, _ = rows_by_layer(lab_of("llama"), Plain(), PROMPTS, 12)
    assert rounds and all(calls == {i: [1] for i in range(4)} for calls in rounds)


def test_a_lookup_without_a_match_is_a_plain_step():
    rounds, out = rows_by_layer(lab_of("llama"), PromptLookup(2, 3), [[5, 6, 7, 5, 6]], 20)
    wanted = [1 + len(r.drafted[0]) for r in out.rounds]
    assert {1, 4} <= set(wanted)
    assert rounds == [{i: [rows] for i in range(4)} for rows in wanted[: len(rounds)]]


def test_a_cut_target_leaves_its_upper_layers_alone():
    rounds, _ = rows_by_layer(lab_of("llama"), EarlyExit(1, 3), PROMPTS, 12, early_exit=3)
    assert rounds and all(calls == {0: [1] * 4, 1: [4], 2: [4]} for calls in rounds)


def test_a_draft_model_runs_two_rows_then_one():
    target, small = lab_of("llama"), labkit.Lab(small_model())
    calls = []
    hook = small.backbone._layers[0].register_forward_hook(lambda m, args, out: calls.append(args[0].shape[1]))
    rounds, _ = rows_by_layer(target, DraftModel(small, 3), PROMPTS, 20)
    hook.remove()
    assert calls[1 : 1 + 3 * len(rounds)] == [2, 1, 1] * len(rounds)  # the first call is its prefill
    assert all(per_layer == {i: [4] for i in range(4)} for per_layer in rounds)


# -- batches --------------------------------------------------------------------------------------------


@every_strategy
@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("batch", [1, 2, 5])
def test_rows_do_not_notice_each_other(strategy, family, batch):
    """Each row as if alone, though each ends at an EOS of its own time."""
    prompts = families.prompts(5, seed=3)[:batch]
    whole = texts(family, prompts, 20)
    ends = sorted({text[4 + 3 * i] for i, text in enumerate(whole)})
    want = [cut(text, ends)[0] for text in whole]
    drafter = STRATEGIES[strategy](prompts, whole)
    out = lab_of(family).generate(prompts, drafter, max_new_tokens=20, eos_token_id=ends)
    assert out.tokens == want
    for prompt, text in zip(prompts, whole, strict=True):
        alone = STRATEGIES[strategy]([prompt], [text])
        single = lab_of(family).generate(prompt, alone, max_new_tokens=20, eos_token_id=ends)
        assert single.tokens == [out.tokens[prompts.index(prompt)]]
    for happened in out.rounds:  # a finished row says nothing more
        for kept, drafted, target in zip(happened.tokens, happened.drafted, happened.target, strict=True):
            assert kept or (drafted == [] and target == [])


def cut(text, ends):
    """The text up to its first EOS, and the reason why it ends."""
    at = next((i for i, token in enumerate(text) if token in ends), None)
    return (list(text), "length") if at is None else (text[: at + 1], "eos")


# -- the user's model -----------------------------------------------------------------------------------


def fingerprint(model):
    """Everything of a model that a library could have left changed."""
    state = {name: (x.data_ptr(), x.dtype, x.shape, x._version) for name, x in model.state_dict(keep_vars=True).items()}
    modules = {
        name: (id(m), type(m), m.training, "forward" in vars(m), sorted(m._modules), sorted(vars(m)),
               [len(v) for k, v in sorted(vars(m).items()) if k.endswith("_hooks")],
               id(getattr(m, "config", None)))
        for name, m in model.named_modules()
    }  # fmt: skip
    grads = [p.requires_grad for p in model.parameters()]
    return state, modules, grads, model.config.to_dict(), model.generation_config.to_dict(), id(model.forward.__func__)


class Boom(Exception):
    pass


class RaisingCriterion(StoppingCriteria):
    def __call__(self, input_ids, scores, **kwargs):
        if input_ids.shape[1] > 10:
            raise Boom
        return torch.zeros(1, dtype=torch.bool)


def raising_processor(input_ids, scores):
    if input_ids.shape[1] > 10:
        raise Boom
    return scores


class RaisingDrafter(EarlyExit):
    def propose(self, state, context):
        draft = super().propose(state, context)
        if context.round == 2:
            raise Boom
        return draft


class RaisingStreamer:
    def __init__(self):
        self.count = 0

    def put(self, value):
        self.count += 1
        if self.count == 5:
            raise Boom

    def end(self):
        raise AssertionError("never reached")


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2"])
def test_the_model_is_never_changed(family):
    model = families.tiny(family)
    before = fingerprint(model)
    lab = labkit.Lab(model)
    want = texts(family)
    for strategy in STRATEGIES.values():
        assert lab.generate(PROMPTS, strategy(PROMPTS, want), max_new_tokens=COUNT).tokens == want
        lab.generate(PROMPTS, strategy(PROMPTS, want), max_new_tokens=9, early_exit=3, temperature=1.0)
    assert fingerprint(model) == before
    assert reference(model, PROMPTS[0], COUNT) == want[0]


@every_strategy
@pytest.mark.parametrize(
    "options",
    [
        {"stopping_criteria": [RaisingCriterion()]},
        {"logits_processor": [raising_processor]},
        {"streamer": RaisingStreamer},
        {"drafter": RaisingDrafter(2, 3)},
    ],
    ids=["criterion", "processor", "streamer", "drafter"],
)
def test_nothing_is_left_behind_after_an_error(strategy, options):
    lab, want = lab_of("llama"), texts()
    before = fingerprint(lab.model)
    options = {name: value() if isinstance(value, type) else value for name, value in options.items()}
    drafter = options.pop("drafter", None) or STRATEGIES[strategy](PROMPTS[:1], want[:1])
    with pytest.raises(Boom):
        lab.generate(PROMPTS[0], drafter, max_new_tokens=COUNT, **options)
    assert fingerprint(lab.model) == before
    assert not torch.is_inference_mode_enabled() and torch.is_grad_enabled()
    after = lab.generate(PROMPTS, STRATEGIES[strategy](PROMPTS, want), max_new_tokens=COUNT)
    assert after.tokens == want


def test_a_settings_object_serves_many_runs_at_once():
    """Strategies hold settings only: two interleaved runs of one object do not meet."""
    lab, want = lab_of("llama"), texts()
    drafter = EarlyExit(2, 3)
    streams = [lab.stream(prompt, drafter, max_new_tokens=COUNT) for prompt in PROMPTS]
    got = [[] for _ in PROMPTS]
    for tokens in zip(*streams, strict=True):
        for row, token in zip(got, tokens, strict=True):
            row.append(token.id)
    assert got == want


def test_a_drafter_needs_only_nodes_and_propose():
    class Mine(Drafter):
        nodes = 2

        def propose(self, state, context):
            count = context.length(2)
            return labkit.Draft.chain(torch.full((len(context.lengths), count), 7))

    assert lab_of("llama").generate(PROMPTS, Mine(), max_new_tokens=COUNT).tokens == texts()


class Fork(Drafter):
    """Two wrong tokens, and between them the model's own next two: built by Draft.tree, the same in every row."""

    nodes = 4

    def __init__(self, parents):
        self.parents = parents

    def propose(self, state, context):
        if context.length(2) < 2:
            return labkit.Draft.empty(context.tokens)
        tokens = []
        for text, prompt, n in zip(texts(), PROMPTS, context.lengths, strict=True):
            a, b = [*text, 0, 0][n - len(prompt) :][:2]
            tokens.append([(a + 1) % 61, a, (a + 2) % 61, b])
        return labkit.Draft.tree(torch.tensor(tokens), self.parents, depth=2)


@pytest.mark.parametrize("rows", [1, len(PROMPTS)])
def test_a_tree_of_ones_own(rows):
    out = lab_of("llama").generate(
        PROMPTS, Fork(torch.tensor([[-1, -1, -1, 1]]).expand(rows, -1)), max_new_tokens=COUNT
    )
    assert out.tokens == texts()
    assert all(happened.accepted == [2] * len(PROMPTS) for happened in out.rounds[:-1])
    assert out.rounds[0].path == [[1, 3]] * len(PROMPTS)


# -- everything at once ---------------------------------------------------------------------------------

LONG = 24


def strategies_for(gamma, exit, seed):
    places = accepted_lengths(gamma)
    return {
        "Plain": lambda p, t: Plain(),
        "PromptLookup": lambda p, t: PromptLookup(1 + seed % 4, gamma),
        "EarlyExit": lambda p, t: EarlyExit(exit, gamma, share=seed % 3 > 0),
        "DraftModel": lambda p, t: DraftModel(small_model(), gamma),
        "chain": lambda p, t: Replay(p, t, gamma, places[seed % len(places) :] + places),
        "trees": lambda p, t: RandomTree(p, t, gamma + 2, seed),
    }


class StopAt(StoppingCriteria):
    """Ends a text at a token of a residue class, once it is long enough."""

    def __init__(self, residue, length):
        self.residue, self.length = residue, length

    def __call__(self, input_ids, scores, **kwargs):
        return torch.tensor([input_ids.shape[1] >= self.length and int(input_ids[0, -1]) % 7 == self.residue])


def expected(prompt, text, room, ends, criterion):
    """What plain decoding token by token keeps, and why it ends."""
    for count, token in enumerate(text[:room], 1):
        if token in ends:
            return text[:count], "eos"
        if criterion is not None and bool(criterion(torch.tensor([prompt + text[:count]]), None)):
            return text[:count], "criteria"
    return text[:room], "length"


POOL = families.prompts(8, seed=11)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    family=st.sampled_from(["llama", "gemma3"]),
    prompts=st.lists(st.sampled_from(POOL), min_size=1, max_size=4),
    gamma=st.integers(1, 7),
    exit=st.integers(1, 4),
    name=st.sampled_from(["Plain", "PromptLookup", "EarlyExit", "DraftModel", "chain", "trees"]),
    seed=st.integers(0, 50),
    room=st.integers(1, LONG),
    ends=st.none() | st.lists(st.integers(0, 60), max_size=6),
    stop=st.none() | st.tuples(st.integers(0, 6), st.integers(1, 30)),
    cut_rule=st.sampled_from([None, labkit.Rejection()]),
)
def test_any_run_is_plain_decoding(family, prompts, gamma, exit, name, seed, room, ends, stop, cut_rule):
    whole = texts(family, prompts, LONG)
    criterion = None if stop is None else StopAt(*stop)
    want = [expected(p, t, room, ends or [], criterion) for p, t in zip(prompts, whole, strict=True)]
    out = lab_of(family).generate(
        prompts, strategies_for(gamma, exit, seed)[name](prompts, whole), max_new_tokens=room, eos_token_id=ends,
        stopping_criteria=None if criterion is None else [criterion], acceptance=cut_rule,
    )  # fmt: skip
    assert list(zip(out.tokens, out.reasons, strict=True)) == [(list(t), why) for t, why in want]
    assert out.new_tokens == sum(len(t) for t, _ in want)
    for row, text in enumerate(out.tokens):
        assert [t for happened in out.rounds for t in happened.tokens[row]] == text
