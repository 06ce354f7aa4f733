"""Modules that were trained to draft: not in training mode, and not for another target of equal width."""

import families
import pytest
import torch
from scripted import shaken
from torch import nn

import labkit
from labkit import EarlyExit, Fallback, Heads, LabkitError, Plain
from labkit.heads import (
    Affine,
    DraftVocabulary,
    ExitClassifier,
    Kangaroo,
    load_adapter,
    load_draft_head,
    save_adapter,
    trained,
)

PROMPTS = [[3, 14, 15, 9], [8]]


@pytest.fixture(scope="module")
def lab():
    return labkit.Lab(families.tiny("llama"))


@pytest.fixture(scope="module")
def other():
    return labkit.Lab(families.tiny("llama", seed=1))


def linear(out=32):
    return nn.Linear(32, out, dtype=torch.float64)


class OwnDropout(nn.Module):
    """By a function, as transformers' modules do."""

    def __init__(self):
        super().__init__()
        self.dropout_rate = 0.1

    def forward(self, x):
        return nn.functional.dropout(x, self.dropout_rate, self.training)


MOVING = {
    "adapter": (lambda m: ({"drafter": EarlyExit(2, adapter=m)}), lambda: nn.Sequential(linear(), nn.Dropout(0.5))),
    "own dropout": (lambda m: ({"drafter": EarlyExit(2, adapter=m)}), OwnDropout),
    "head": (lambda m: ({"drafter": EarlyExit(2, head=m)}), lambda: nn.Sequential(nn.Dropout(0.1), linear(61))),
    "in a draft vocabulary": (
        lambda m: {"drafter": EarlyExit(2, head=DraftVocabulary(m, range(4), 61).train(m.training))},
        lambda: nn.Sequential(nn.Dropout(0.1), linear(4)),
    ),
    "rule": (lambda m: {"drafter": EarlyExit(labkit.classifier(m))}, lambda: nn.Sequential(linear(1), nn.Dropout(0.1))),
    "lossy": (lambda m: {"early_exit": labkit.classifier(m)}, lambda: nn.Sequential(linear(1), nn.Dropout(0.1))),
    "member": (
        lambda m: {"drafter": Fallback(Plain(), EarlyExit(2, adapter=m))}, lambda: nn.Sequential(nn.Dropout(0.1), linear())
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MOVING)
def test_a_module_that_draws_in_training_mode_is_refused(lab, name):
    make, module = MOVING[name]
    made = module()
    with pytest.raises(LabkitError, match=r"is in training mode, where its \w+ changes its output; call eval\(\)"):
        lab.generate(PROMPTS, max_new_tokens=4, **make(made))
    lab.generate(PROMPTS, max_new_tokens=4, **make(made.eval()))


def test_a_training_mode_that_changes_nothing_is_taken(lab):
    lab.generate(PROMPTS, EarlyExit(2, adapter=nn.Sequential(nn.Dropout(0.0), linear())), max_new_tokens=4)


def test_statistics_are_not_learnt_by_the_way(lab):
    norm = nn.BatchNorm1d(32, dtype=torch.float64)
    with pytest.raises(LabkitError, match="its BatchNorm1d changes"):
        lab.generate(PROMPTS, EarlyExit(labkit.classifier(nn.Sequential(norm, linear(1)))), max_new_tokens=4)
    assert norm.num_batches_tracked == 0


def test_heads_and_draft_models_in_training_mode(lab):
    heads = labkit.MLPSpeculator(32, 61, 2, 24, dtype=torch.float64)
    heads.add_module("noise", nn.Dropout(0.5))
    with pytest.raises(LabkitError, match="drafting MLPSpeculator is in training mode"):
        lab.generate(PROMPTS, Heads(heads), max_new_tokens=4)
    model = families.tiny("llama", layers=2)
    drafter = labkit.DraftModel(model)
    model.train()
    with pytest.raises(LabkitError, match=r"training mode.*call model\.eval\(\)"):
        lab.generate(PROMPTS, drafter, max_new_tokens=4)


def saved(lab, folder, kind):
    """Arguments of generate with what is loaded from `folder`."""
    if kind == "heads":
        heads = shaken(labkit.MLPSpeculator(32, 61, 2, 24, dtype=torch.float64))
        labkit.save_heads(heads, folder, lab)
        return lambda **how: {"drafter": Heads(labkit.load_heads(folder, lab, **how))}
    adapter, head = {"affine": Affine(32), "kangaroo": Kangaroo.like(lab)}.get(kind), None
    if kind == "head":
        adapter, head = nn.Identity(), DraftVocabulary.reduced(32, range(9), 61)
    save_adapter(ExitClassifier(32) if adapter is None else adapter, folder, lab, 2, head=head)
    load = lambda **how: load_adapter(folder, lab, **how)  # noqa: E731
    return {
        "head": lambda **how: {"drafter": EarlyExit(2, head=load_draft_head(folder, lab, **how))},
        "rule": lambda **how: {"drafter": EarlyExit(labkit.classifier(load(**how)))},
        "lossy": lambda **how: {"early_exit": labkit.classifier(load(**how))},
    }.get(kind, lambda **how: {"drafter": EarlyExit(2, adapter=load(**how))})


@pytest.mark.parametrize("kind", ["affine", "kangaroo", "head", "rule", "lossy", "heads"])
def test_what_was_loaded_for_another_target_is_refused(lab, other, kind, tmp_path):
    make = saved(lab, tmp_path / "made", kind)
    lab.generate(PROMPTS, max_new_tokens=4, **make())
    with pytest.raises(LabkitError, match=r"the \w+ \w+ was trained for a target whose head.*again with check=False"):
        other.generate(PROMPTS, max_new_tokens=4, **make())
    other.generate(PROMPTS, max_new_tokens=4, **make(check=False))


def test_a_model_is_hashed_once_until_its_head_changes(monkeypatch, tmp_path):
    lab, hashed, whole = labkit.Lab(families.tiny("llama", seed=3)), [], trained.head_hash
    make = saved(lab, tmp_path / "made", "affine")
    options = make()
    monkeypatch.setattr(trained, "head_hash", lambda given: hashed.append(1) or whole(given))
    for _ in range(3):
        lab.generate(PROMPTS, max_new_tokens=4, **options)
    labkit.Lab(lab.model).generate(PROMPTS, max_new_tokens=4, **options)
    assert len(hashed) == 1
    with torch.no_grad():
        lab.model.get_output_embeddings().weight.mul_(2)
    with pytest.raises(LabkitError, match="trained for a target"):
        lab.generate(PROMPTS, max_new_tokens=4, **options)
    assert len(hashed) == 2
