"""Trees of heads: the best one, settings that cannot be, accuracies of heads, two constructions."""

import itertools
import math
import re

import families
import pytest
import torch
from golden import made, target

import labkit
from labkit import Heads, LabkitError, best_tree
from labkit.heads.trees import FixedTree, ProductTree


def test_best_tree():
    accuracies = [[0.6, 0.2, 0.1], [0.5, 0.3, 0.05]]
    assert best_tree(accuracies, 4) == [(0,), (1,), (0, 0), (0, 1)]
    assert best_tree([[0.1, 0.7], [0.5, 0.5]], 2) == [(1,), (1, 0)]  # ranks need not be in order of merit
    whole = best_tree(accuracies, 12)
    assert len(whole) == len(set(whole)) == 12

    def value(tree):
        return sum(math.prod(accuracies[level][rank] for level, rank in enumerate(choice)) for choice in tree)

    every = [(i,) for i in range(3)] + [(i, j) for i in range(3) for j in range(3)]
    for nodes in range(1, 6):  # against all trees
        trees = [t for t in itertools.combinations(every, nodes) if all(c[:-1] in t for c in t if len(c) > 1)]
        assert value(best_tree(accuracies, nodes)) == pytest.approx(max(map(value, trees)))
    for bad in (0, 13, True):
        with pytest.raises(LabkitError):
            best_tree(accuracies, bad)


BAD_SETTINGS = {  # settings, and words of the message
    "deeper than the heads": ({"top_k": (1, 1, 1, 1)}, "n_predict=3"),
    "a tree deeper than the heads": ({"tree": [(0,), (0, 0), (0, 0, 0), (0, 0, 0, 0)]}, "4 levels deep"),
    "a rank beyond top-k": ({"tree": [(0,), (3,)], "top_k": (3, 1, 1)}, "takes rank 3 at level 0"),
    "duplicate siblings": ({"tree": [(0,), (1,), (0,)]}, "more than once"),
    "an orphan": ({"tree": [(0,), (1, 0)]}, "without its parent (1,)"),
    "too many candidates": ({"top_k": (2, 2), "candidates": 5}, "has 1 .. 4 paths"),
    "top_k 0": ({"top_k": (0, 1)}, "top_k=(0, 1)"),
    "an empty tree": ({"tree": []}, "write choices"),
    "tree and candidates": ({"tree": [(0,)], "candidates": 2}, "leave out one"),
}


@pytest.mark.parametrize("bad", BAD_SETTINGS)
def test_bad_settings(bad):
    settings, message = BAD_SETTINGS[bad]
    with pytest.raises(LabkitError, match=re.escape(message)):
        Heads(made("mlp"), **settings)


def test_wrong_heads_for_the_target():
    with pytest.raises(LabkitError, match="width 24"):
        target(48, 131).generate([1, 2], Heads(made("mlp", width=24)), max_new_tokens=3)


@pytest.mark.parametrize("swap", [lambda lab, heads: (heads, lab), lambda lab, heads: (lab.model, heads)])
def test_head_accuracies_with_other_arguments(swap):
    lab = target(48, 131)
    heads = labkit.MLPSpeculator(48, 131, 2, 24)
    with pytest.raises(LabkitError, match=r"write head_accuracies\(lab, heads, texts\)"):
        labkit.head_accuracies(*swap(lab, heads), [[1, 2, 3, 4, 5]])


def test_head_accuracies():
    lab = labkit.Lab(families.tiny("llama"))
    heads = made("mlp", lab.backbone.head_width, lab.backbone.vocab, dtype=lab.backbone.dtype)
    text = torch.randint(0, lab.backbone.vocab, (40,), generator=torch.Generator().manual_seed(1)).tolist()
    rates = labkit.head_accuracies(lab, heads, [text], ranks=lab.backbone.vocab)
    assert all(sum(row) == pytest.approx(1) for row in rates)  # the true token has some rank
    out = lab.model(torch.tensor([text[:-1]]), output_hidden_states=True).hidden_states[-1]
    rows = len(text) - 1 - heads.count
    logits = heads(out[:, :rows], torch.tensor([text[1:]]))
    for head in range(heads.count):
        top = logits[head, 0].argmax(-1)
        want = (top == torch.tensor(text[2 + head : 2 + head + rows])).float().mean().item()
        assert rates[head][0] == pytest.approx(want)
    assert best_tree([row[:5] for row in rates], 8)


def test_fixed_tree_equals_the_product_it_spans():
    """The same nodes from both constructions, for heads that look at tokens."""
    heads = made("mlp")
    state, token = torch.randn(2, 1, 48), torch.tensor([[3], [77]])
    choices = [(i,) for i in range(3)] + [(i, j) for i in range(3) for j in range(2)]
    fixed = FixedTree(heads, choices, token.device).draft(state, token, 2)
    product = ProductTree(heads, (3, 2), 6, token).draft(state, token, 2)

    def paths(draft, row):
        found = {-1: ()}
        for node, (t, p) in enumerate(zip(draft.tokens[row].tolist(), draft.parents[row].tolist(), strict=True)):
            found[node] = (*found[p], t)
        return set(found.values())

    for row in range(2):
        assert paths(fixed, row) == paths(product, row)
