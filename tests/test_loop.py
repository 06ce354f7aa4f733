"""What a round runs: layer calls, rows that do not notice each other, strategies of one's own, any run at all."""

import functools

import families
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from roster import COUNT, PROMPTS, STRATEGIES, every_strategy, lab_of, small_model, texts
from scripted import RandomTree, Replay, accepted_lengths
from transformers import StoppingCriteria

import labkit
from labkit import (
    Drafter,
    DraftModel,
    EarlyExit,
    Plain,
    PromptLookup,
    decoding,
)

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
def test_rows_do_not_notice_each_other(strategy, family, batch, request):
    """Each row as if alone, though each ends at an EOS of its own time."""
    if family != "llama":
        request.getfixturevalue("unshaped")
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
