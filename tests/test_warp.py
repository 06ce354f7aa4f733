"""Every row of warped scores equals transformers' processors applied, one by one, to that row's exact history."""

import math
from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_processors import FULL, Recorder
from torch import Tensor
from transformers.generation import logits_process as lp
from waiting import NoSync

from labkit.draft import Draft
from labkit.errors import LabkitError
from labkit.warp import REFUSED, STATELESS, VALIDATING, Warp, build_processors

VOCAB, LONGEST = 9, 8
END = torch.tensor([1, 4], device="cpu")


class HotTopK(lp.TopKLogitsWarper):
    """A subclass of a stateless one that does look at the history."""

    def __call__(self, input_ids, scores):
        return super().__call__(input_ids, scores / (1 + input_ids.shape[1]))


KINDS: dict[str, Callable[[], lp.LogitsProcessor]] = {
    "temperature": lambda: lp.TemperatureLogitsWarper(0.7),
    "top_k": lambda: lp.TopKLogitsWarper(3),
    "top_p": lambda: lp.TopPLogitsWarper(0.6),
    "min_p": lambda: lp.MinPLogitsWarper(0.2),
    "typical": lambda: lp.TypicalLogitsWarper(0.5),
    "epsilon": lambda: lp.EpsilonLogitsWarper(0.1),
    "eta": lambda: lp.EtaLogitsWarper(0.3, device="cpu"),
    "top_h": lambda: lp.TopHLogitsWarper(0.4),
    "suppress": lambda: lp.SuppressTokensLogitsProcessor([2, 5], device="cpu"),
    "normalise": lp.LogitNormalization,
    "inf_nan": lp.InfNanRemoveLogitsProcessor,
    "repetition": lambda: lp.RepetitionPenaltyLogitsProcessor(1.7),
    "no_repeat": lambda: lp.NoRepeatNGramLogitsProcessor(2),
    "bad_words": lambda: lp.NoBadWordsLogitsProcessor([[3], [2, 5], [1, 0, 7]], END),
    "bias": lambda: lp.SequenceBiasLogitsProcessor([[[3], 2.0], [[2, 5], -3.0]]),
    "min_length": lambda: lp.MinLengthLogitsProcessor(6, END),
    "min_new": lambda: lp.MinNewTokensLengthLogitsProcessor(2, 4, END),
    "forced_end": lambda: lp.ForcedEOSTokenLogitsProcessor(7, END),
    "forced_begin": lambda: lp.ForcedBOSTokenLogitsProcessor(2),
    "decay": lambda: lp.ExponentialDecayLengthPenalty((2, 1.5), END, 3),
    "begin": lambda: lp.SuppressTokensAtBeginLogitsProcessor([2, 5], 5, device="cpu"),
    "user's own": Recorder,
    "subclass": lambda: HotTopK(3),
}
ALL = ("repetition", "temperature", "no_repeat", "top_k", "user's own", "top_p", "normalise")


@st.composite
def rounds(draw, chain: bool | None = None):
    """(scores, tokens, lengths, draft): a random draft behind random committed tokens, batch 1 to 3, nodes 0 to 6."""
    make = torch.Generator("cpu").manual_seed(draw(st.integers(0, 2**32)))
    batch, nodes = draw(st.integers(1, 3)), draw(st.integers(0, 6))
    ids = lambda *shape: torch.randint(VOCAB, shape, generator=make, device="cpu")  # noqa: E731
    lengths = draw(st.lists(st.integers(1, LONGEST), min_size=batch, max_size=batch))
    scores = 3 * torch.randn(batch, 1 + nodes, VOCAB, generator=make, dtype=torch.float64, device="cpu")
    drafted = ids(batch, nodes)
    if draw(st.booleans()) if chain is None else chain:
        draft = Draft.chain(drafted)
    else:
        parents = [[draw(st.integers(-1, node - 1)) for node in range(nodes)] for _ in range(batch)]
        draft = tree(drafted, parents)
    return scores, ids(batch, LONGEST + 1), lengths, draft


def tree(drafted: Tensor, parents: Sequence[Sequence[int]]) -> Draft:
    parents = torch.tensor(parents, dtype=torch.long, device="cpu").view_as(drafted)
    valid = torch.ones_like(drafted, dtype=torch.bool)
    return Draft(drafted, parents, valid, ~valid, depth=drafted.shape[1], is_chain=False)


def history(tokens: Tensor, lengths: Sequence[int], draft: Draft, b: int, row: int) -> list[int]:
    """The definition: the committed tokens and the path down to the node."""
    path, node = [], row - 1
    while node >= 0:
        path.append(draft.tokens[b, node].item())
        node = draft.parents[b, node].item()
    return tokens[b, : lengths[b]].tolist() + path[::-1]


def expected(names: Sequence[str], scores, tokens, lengths, draft) -> Tensor:
    out = torch.empty(scores.shape, dtype=torch.float32, device="cpu")
    for b in range(scores.shape[0]):
        processors = lp.LogitsProcessorList([KINDS[name]() for name in names])
        for row in range(scores.shape[1]):
            ids = torch.tensor([history(tokens, lengths, draft, b, row)], device="cpu")
            out[b, row] = processors(ids, scores[b, row : row + 1].to(torch.float32, copy=True))[0]
    return out


def warp_of(names: Sequence[str], batch: int) -> Warp:
    return Warp([[KINDS[name]() for name in names] for _ in range(batch)])


@pytest.mark.parametrize("names", [*([name] for name in KINDS), ALL, ALL[::-1], []], ids=str)
@settings(max_examples=20, deadline=None)
@given(case=rounds())
def test_rows_equal_processors_on_exact_histories(names, case):
    scores, tokens, lengths, draft = case
    for given_scores in (scores, scores.float()):
        before = given_scores.clone()
        got = warp_of(names, len(lengths))(given_scores, tokens, lengths, draft.tokens, draft)
        assert got.dtype == torch.float32
        assert torch.equal(given_scores, before)
        torch.testing.assert_close(got, expected(names, scores, tokens, lengths, draft), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", ["top_p", "repetition", "no_repeat", "min_new", "user's own"])
@settings(max_examples=10, deadline=None)
@given(case=rounds(chain=True))
def test_a_draft_step_equals_the_last_row_of_its_verification(name, case):
    scores, tokens, lengths, draft = case
    whole = warp_of([name], len(lengths))(scores, tokens, lengths, draft.tokens, draft)
    for level in range(1 + draft.nodes):
        step = warp_of([name], len(lengths))(
            scores[:, level : level + 1], tokens, lengths, draft.tokens[:, :level].contiguous()
        )
        torch.testing.assert_close(step, whole[:, level : level + 1], rtol=1e-6, atol=1e-6)


@settings(max_examples=30, deadline=None)
@given(case=rounds())
def test_a_users_processor_sees_every_exact_history_once(case):
    scores, tokens, lengths, draft = case
    recorders = [Recorder() for _ in lengths]
    Warp([[r] for r in recorders])(scores, tokens, lengths, draft.tokens, draft)
    for b, recorder in enumerate(recorders):
        assert recorder.seen == [history(tokens, lengths, draft, b, row) for row in range(1 + draft.nodes)]


def test_each_row_has_its_own_prompt_length():
    scores, tokens = torch.zeros(2, 1, VOCAB), torch.zeros(2, 9, dtype=torch.long)
    per_row = [[lp.MinNewTokensLengthLogitsProcessor(n, 2, END)] for n in (4, 1)]
    got = Warp(per_row)(scores, tokens, [4, 4], tokens[:, :0])
    assert got[0, 0, 1] == -math.inf and got[1, 0, 1] == 0


class Counting(NoSync):
    """Counts where NoSync raises. A move to the device that the scores are on is none."""

    def __init__(self):
        super().__init__()
        self.syncs = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        try:
            return super().__torch_function__(func, types, args, kwargs)
        except AssertionError:
            self.syncs += func is not Tensor.to
            return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", KINDS)
def test_calls_that_wait_for_the_device_are_counted(name, monkeypatch):
    # torch.compile, once used anywhere in the process, turns the validation of distributions off
    monkeypatch.setattr(torch.distributions.Distribution, "_validate_args", True)
    scores, drafted = torch.randn(2, 4, VOCAB), torch.randint(VOCAB, (2, 3))
    tokens, draft = torch.randint(VOCAB, (2, 9)), Draft.chain(drafted)
    warp, kind = warp_of([name], 2), type(KINDS[name]())
    with Counting() as waits:
        warp(scores, tokens, [5, 3], drafted, draft)
        warp(scores[:, :1], tokens, [5, 3], drafted)
    assert (waits.syncs > 0) <= (warp.syncs == 2)
    assert warp.syncs == (0 if kind in STATELESS - VALIDATING else 2)
    assert waits.syncs > 0 or kind not in VALIDATING


def test_histories_of_a_chain_need_no_copy_and_of_a_tree_one():
    scores, drafted = torch.randn(1, 4, VOCAB), torch.randint(VOCAB, (1, 3))
    warp, tokens = Warp([[lambda ids, scores: scores + ids.shape[1]]]), torch.randint(VOCAB, (1, 9))
    for draft, lengths, copies in (
        (Draft.chain(drafted), [5.0, 6, 7, 8], 0),
        (tree(drafted, [[-1, -1, 0]]), [5.0, 6, 6, 7], 1),
    ):
        with Counting() as waits:
            got = warp(scores, tokens, [5], drafted, draft) - scores
        torch.testing.assert_close(got[0, :, 0], torch.tensor(lengths))
        assert waits.syncs == copies
    assert warp.syncs == 2


@pytest.mark.parametrize("kind", [kind for kind, _ in REFUSED], ids=lambda kind: kind.__name__)
def test_what_cannot_run_on_a_draft_is_refused(kind):
    for refused in (kind, type("Mine", (kind,), {})):
        processor = object.__new__(refused)
        with pytest.raises(LabkitError, match=f"got {refused.__name__}, which cannot run on a draft: it "):
            Warp([[lp.TemperatureLogitsWarper(0.5), processor]])


def test_every_processor_of_transformers_is_known():
    """One that a later version adds lands among those with a history, which is always right, unless it keeps state."""
    known = {type(make()) for make in KINDS.values()} | {kind for kind, _ in REFUSED} | {lp.LogitsProcessor}
    theirs = {x for x in vars(lp).values() if isinstance(x, type) and issubclass(x, lp.LogitsProcessor)}
    assert theirs <= known
    assert STATELESS <= known


def test_rows_that_do_not_fit_together_are_refused():
    half, one = lp.TemperatureLogitsWarper(0.5), lp.TemperatureLogitsWarper(0.9)
    suppress = [lp.SuppressTokensLogitsProcessor(ids, device="cpu") for ids in ([1], [2])]
    for per_row in ([], [[half], []], [[half], [lp.TopKLogitsWarper(2)]], [[half], [one]], [[s] for s in suppress]):
        with pytest.raises(LabkitError, match="write"):
            Warp(per_row)
    step = torch.zeros(1, 1, VOCAB), torch.zeros(1, 9).long(), [1], torch.zeros(1, 0).long()
    with pytest.raises(LabkitError, match="scores for 1 rows, but processors for 2"):
        Warp([[], []])(*step)
    for wrong in (None, torch.zeros(VOCAB)):
        with pytest.raises(LabkitError, match="return the scores"):
            Warp([[lambda ids, scores, wrong=wrong: wrong]])(*step)


def test_a_default_device_does_not_matter():
    scores, drafted = torch.randn(1, 4, VOCAB), torch.randint(VOCAB, (1, 3))
    tokens = torch.randint(VOCAB, (1, 9))
    draft = tree(drafted, [[-1, -1, 0]])
    run = lambda: Warp([build_processors(**FULL, sampling=True)])(scores, tokens, [5], drafted, draft)  # noqa: E731
    plain = run()
    torch.set_default_device("meta")
    try:
        assert torch.equal(plain, run())
    finally:
        torch.set_default_device(None)
