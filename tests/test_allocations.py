"""A round makes nothing that grows."""

import copy
import inspect
from collections import Counter
from pathlib import Path

import pytest
import torch
from roster import COUNT, PROMPTS, STRATEGIES, every_strategy, lab_of, texts
from torch.overrides import TorchFunctionMode
from waiting import caller

import labkit
from labkit import Plain
from labkit.exits import lent
from labkit.lab import _Run

pytestmark = pytest.mark.usefixtures("unshaped")
LABKIT = str(Path(labkit.__file__).parent)


LENT = (inspect.getsourcefile(lent), inspect.getsourcelines(lent)[1] + len(inspect.getsourcelines(lent)[0]) - 1)


class Allocations(TorchFunctionMode):
    """Per round: the largest result of every cat in labkit's own frames, and the copies there but those lent to rules.

    A rule is lent the states, or the law, of one token of each row at a time: `lent` is the largest of those.
    """

    def __init__(self):
        super().__init__()
        self.cats, self.clones, self.lent = [Counter()], [], 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        out, name = func(*args, **(kwargs or {})), getattr(func, "__name__", "")
        copied = name in ("clone", "deepcopy", "__deepcopy__", "resize_") or (
            name == "to" and (kwargs or {}).get("copy")
        )
        if copied or name in ("cat", "concat", "stack", "hstack", "vstack"):
            where = caller()
            if where[0].startswith(LABKIT):
                if not copied:
                    self.cats[-1][where] = max(self.cats[-1][where], out.numel())
                elif where == LENT:
                    self.lent = max(self.lent, out.numel())
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
    width = max(lab.backbone.width, lab.backbone.vocab)
    assert copied == [] and mode.clones == [] and mode.lent <= len(PROMPTS) * width
    assert all(there == pointers[0] for there in pointers)
    first = mode.cats[1]
    if strategy != "trees":  # a random tree has another depth in each round, and its packet another size
        assert first and all(size <= first[where] for later in mode.cats[2:] for where, size in later.items())


def test_growing_is_noticed(live_bytes):
    class Hoards(Plain):
        def begin(self, session):
            return {"session": session, "kept": session.tokens[:, :1]}

        def propose(self, state, context):
            state["kept"] = torch.cat([state["kept"], context.tokens[:, :1]], 1)
            return super().propose(state, context)

    run = _Run(lab_of("llama"), PROMPTS, Hoards(), {"max_new_tokens": 12})
    live = [live_bytes() for _ in run.rounds()]
    assert len(set(live[1:])) > 1


@every_strategy
@pytest.mark.parametrize(
    "options", [{}, {"temperature": 0.8, "acceptance": labkit.Rejection()}], ids=["Match", "Rejection"]
)
def test_live_memory_is_constant_after_the_second_round(strategy, options, live_bytes):
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
