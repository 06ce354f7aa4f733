"""Trimming block by block keeps what going token by token keeps, and what transformers' `generate` keeps."""

import pytest
import torch
import transformers as hf
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers.generation.stopping_criteria import MaxLengthCriteria, StoppingCriteria

from labkit.errors import LabkitError
from labkit.stopping import Stopping, eos_ids, stop_string_criteria

MERGES = [("a", "b"), ("b", "a"), (" ", "c"), ("b", "c"), ("bc", "d"), ("d", " "), ("ab", "a"), ("c", " "), ("d", "é")]
PIECES = [*"abcdef é", *(left + right for left, right in MERGES)]
"""Token i is this text; many strings can be written in several ways."""


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Thousands of small operations: a second thread only makes them wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def tokenizer() -> hf.PreTrainedTokenizerFast:
    backend = Tokenizer(models.BPE({piece: i for i, piece in enumerate(PIECES)}, MERGES))
    backend.decoder = decoders.Fuse()
    return hf.PreTrainedTokenizerFast(tokenizer_object=backend)


@pytest.fixture(scope="module")
def llama() -> hf.LlamaForCausalLM:
    torch.manual_seed(0)
    shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = hf.LlamaConfig(vocab_size=len(PIECES), bos_token_id=None, eos_token_id=None, pad_token_id=0, **shape)
    model = hf.LlamaForCausalLM(config).eval()
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=1.0)  # large enough for a text that does not repeat one token
    return model


def blocks_of(text: list[int], cuts: list[int]) -> list[list[int]]:
    """`text` in blocks of the given sizes, the last size again and again."""
    blocks, sizes = [], iter(cuts)
    while text:
        size = next(sizes, cuts[-1])
        blocks.append(text[:size])
        text = text[size:]
    return blocks


def run(stop: Stopping, text: list[int], cuts: list[int], row: int = 0) -> Stopping:
    for block in blocks_of(text, cuts):
        before = list(stop.output[row])
        [keep] = stop.trim([block])
        assert stop.output[row] == before + block[:keep]
        if stop.done[row]:
            break
    return stop


def state(stop: Stopping) -> tuple:
    return stop.output, stop.done, stop.reason, stop.lengths, stop.room, stop.max_room


class Sum(StoppingCriteria):
    """Stops where the sum of all ids is a multiple of `by`; records what it was shown."""

    def __init__(self, by: int, answer=lambda yes: torch.tensor([yes], device="cpu")):
        self.by, self.answer, self.seen = by, answer, []

    def __call__(self, input_ids, scores, **kwargs):
        assert scores is None and input_ids.device.type == "cpu" and input_ids.dtype == torch.long
        self.seen.append(input_ids.tolist())
        return self.answer(input_ids.sum().item() % self.by == 0)


class Faulty(Sum):
    def __call__(self, input_ids, scores, **kwargs):
        if super().__call__(input_ids, scores).item():
            raise RuntimeError("a user's mistake")
        return False


texts = st.lists(st.integers(0, 9), min_size=1, max_size=14)
partitions = st.lists(st.integers(1, 5), min_size=1, max_size=8)


@settings(max_examples=200, deadline=None)
@given(texts, partitions, st.sets(st.integers(0, 9), max_size=3), st.integers(1, 16), st.integers(2, 30), st.booleans())
def test_any_partition_keeps_the_same_tokens(text, cuts, eos, room, by, asked):
    prompt = [7, 3]
    criteria = lambda: [Sum(by), MaxLengthCriteria(11)] if asked else []  # noqa: E731
    whole, single = criteria(), criteria()
    stop = run(Stopping([prompt], room, eos, whole), text, cuts)
    alone = run(Stopping([prompt], room, eos, single), text, [1])
    assert state(stop) == state(alone)
    if asked:
        assert whole[0].seen == single[0].seen
    # and by the definition
    ends = [i for i, t in enumerate(text, 1) if t in eos or i == room]
    ends += [i for i in range(1, len(text) + 1) if asked and ((10 + sum(text[:i])) % by == 0 or 2 + i >= 11)]
    assert stop.output == [text[: min(ends, default=len(text))]]
    assert stop.done == [bool(ends)] and stop.lengths == [2 + len(stop.output[0])]
    assert stop.room == [0 if ends else room - len(text)] == [stop.max_room]


def test_reasons_and_their_order():
    met = Sum(1)
    for eos, criteria, room, reason in (
        ({5}, [met], 1, "eos"),
        ((), [met], 1, "criteria"),
        ((), [], 1, "length"),
        ((), [Sum(100)], 2, None),
        ({6}, [], 2, None),
    ):
        stop = Stopping([[1]], room, eos, criteria)
        assert stop.trim([[5]]) == [1] and stop.reason == [reason] and stop.done == [reason is not None]
    assert met.seen == [[[1, 5]], [[1, 5]]], "a criterion sees the end token too, as in generate"


@pytest.mark.parametrize(
    "answer", [bool, lambda yes: torch.tensor(yes), lambda yes: torch.tensor([[yes]])], ids=["bool", "scalar", "matrix"]
)
def test_criteria_may_answer_with_a_tensor_or_a_bool(answer):
    assert run(Stopping([[1]], 9, (), [Sum(6, answer)]), [2, 2, 1, 4], [3]).output == [[2, 2, 1]]


def test_an_end_token_inside_a_block_ends_the_text():
    stop = Stopping([[1, 2], [3], [4, 4, 4]], 5, {0, 9})
    assert stop.trim([[5, 6], [5, 0, 9, 6], [9]]) == [2, 2, 1]
    assert stop.trim([[7, 7, 7, 7, 7], [8, 8], [8]]) == [3, 0, 0]
    assert stop.output == [[5, 6, 7, 7, 7], [5, 0], [9]]
    assert (stop.lengths, stop.reason, stop.max_room) == ([7, 3, 4], ["length", "eos", "eos"], 0)
    assert Stopping([], 5).max_room == 0


def test_max_room_is_that_of_unfinished_rows():
    stop = Stopping([[1], [1]], 9, {0})
    assert stop.trim([[0], [5, 5]]) == [1, 2]
    assert (stop.room, stop.max_room) == ([0, 7], 7)
    with pytest.raises(ValueError, match="zip"):
        stop.trim([[5]])


def test_a_raising_criterion_changes_nothing():
    stop = Stopping([[1], [1]], 9, (), [faulty := Faulty(8)])
    stop.trim([[2], [2]])
    before = repr(state(stop))
    with pytest.raises(RuntimeError, match="a user's mistake"):
        stop.trim([[2, 2], [2, 3, 1]])  # the first row alone would have been fine
    assert repr(state(stop)) == before
    faulty.seen.clear()
    assert stop.trim([[4, 4], [6]]) == [2, 1]
    assert faulty.seen == [[[1, 2, 4]], [[1, 2, 4, 4]], [[1, 2, 6]]], "nothing is left of the block that raised"


def test_criteria_see_a_view_of_one_buffer():
    class Where(Sum):
        def __call__(self, input_ids, scores, **kwargs):
            self.seen.append(input_ids.data_ptr())
            return False

    run(Stopping([[1, 2]], 20, (), [where := Where(1)]), list(range(20)), [3])
    assert len(where.seen) == 20 and len(set(where.seen)) == 1


# -- stop strings, against generate -------------------------------------------------------------------------


def generated(llama, prompt: list[int], **arguments) -> list[int]:
    ids = torch.tensor([prompt])
    out = llama.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=16, **arguments)
    return out[0, len(prompt) :].tolist()


PROMPT = [3, 9, 0, 5]


def test_every_short_window_as_a_stop_string(llama, tokenizer):
    text = generated(llama, PROMPT)
    assert len(set(text)) > 4
    strings = {"".join(PIECES[t] for t in text[i : i + n]) for n in (1, 2, 3) for i in range(len(text) - n + 1)}
    inside = {"".join(PIECES[t] for t in text[i : i + 4])[1:-1] for i in range(len(text))} - {""}
    for string in sorted(strings | inside):
        theirs = generated(llama, PROMPT, stop_strings=[string], tokenizer=tokenizer)
        criterion = stop_string_criteria(tokenizer, string)
        for cuts in ([1], [2], [3, 1, 4], [5], [13]):
            stop = run(Stopping([PROMPT], 16, (), [criterion]), text, cuts)
            assert stop.output == [theirs], (string, cuts)
            assert stop.reason == ["stop"]


@settings(max_examples=30, deadline=None)
@given(st.lists(st.text("abcdé ", min_size=1, max_size=4), min_size=1, max_size=3), partitions, st.integers(0, 13))
def test_any_stop_strings_and_any_partition(llama, tokenizer, strings, cuts, eos):
    text = generated(llama, PROMPT)
    theirs = generated(llama, PROMPT, stop_strings=strings, tokenizer=tokenizer, eos_token_id=eos)
    stop = run(Stopping([PROMPT], 16, {eos}, [stop_string_criteria(tokenizer, strings)]), text, cuts)
    assert stop.output == [theirs]


def test_a_default_device_does_not_matter(tokenizer):
    torch.set_default_device("meta")
    try:
        stop = Stopping([[3, 9]], 9, eos_ids([5]), [stop_string_criteria(tokenizer, "abé"), Sum(1000)])
        assert run(stop, [2, 8, 3, 0, 1, 7, 4], [4]).output == [[2, 8, 3, 0, 1, 7]]
    finally:
        torch.set_default_device(None)


# -- what is handed in --------------------------------------------------------------------------------------


def test_end_tokens_in_every_form():
    forms = [(None, set()), (3, {3}), ([3, 1, 3], {1, 3}), (torch.tensor([2, 1]), {1, 2}), (torch.tensor(4), {4})]
    for value, ids in [*forms, ((), set()), ({5}, {5}), (frozenset(), set())]:
        assert eos_ids(value) == ids and isinstance(eos_ids(value), frozenset)
    for value in ("2", ["2"], 1.5, [1.5], True, torch.tensor(0.5)):
        with pytest.raises(LabkitError, match=r"got end tokens .*; write"):
            eos_ids(value)


def test_bad_arguments_are_refused(tokenizer):
    for room in (0, -1, 1.5, True, None, "8"):
        with pytest.raises(LabkitError, match=r"got max_new_tokens=.*; write"):
            Stopping([[1]], room)
    for strings in ("", [], ["a", ""], [1], None, 3):
        with pytest.raises(LabkitError, match=r"got stop_strings=.*; write"):
            stop_string_criteria(tokenizer, strings)
    with pytest.raises(LabkitError, match="no tokenizer; write tokenizer="):
        stop_string_criteria(None, "a")
    with pytest.raises(LabkitError, match="does not fit"):
        stop_string_criteria(tokenizer, "☃")
