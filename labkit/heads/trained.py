"""Whether what was trained to draft is fit for a target: the target that it was trained for, and its mode."""

import hashlib
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from labkit.errors import LabkitError
from labkit.exits import classifier

HASH = "labkit_target_head"
_KNOWN: WeakKeyDictionary[nn.Module, tuple[Any, str]] = WeakKeyDictionary()
"""Of each model: its head weights' identity and version, and their hash, which takes seconds for a large one."""


@torch.inference_mode()
def head_hash(lab: Any) -> str:
    """Of the target's head weights, rounded to bfloat16, so that a target loaded in another dtype has the same."""
    digest = hashlib.sha256()
    weight = lab.backbone.model.get_output_embeddings().weight
    for rows in (weight.full_tensor() if hasattr(weight, "full_tensor") else weight).split(4096):
        digest.update(rows.to(torch.bfloat16).cpu().contiguous().view(torch.int16).numpy().tobytes())
    return "sha256:" + digest.hexdigest()


def model_hash(lab: Any) -> str:
    """Of all the target's weights, rounded to bfloat16: a target loaded in another dtype has the same."""
    digest = hashlib.sha256()
    for key, value in sorted(lab.model.named_parameters()):
        digest.update(key.encode())
        for rows in value.reshape(-1).split(1 << 22):
            digest.update(rows.to(torch.bfloat16).cpu().view(torch.int16).numpy().tobytes())
    return "sha256:" + digest.hexdigest()


def check_target(asked: Any, ours: str, what: str, instead: str) -> None:
    """Raise LabkitError unless the two hashes are one."""
    if asked != ours:
        raise LabkitError(
            f"{what} for a target whose head has the hash {asked}, and this one has {ours}; load the "
            f"target that it is for, or {instead}"
        )


def check_trained(part: Any, session: Any, name: str) -> None:
    """Raise LabkitError for a module in a mode in which it draws or learns, or one loaded for another target.

    session: anything with the `backbone` of the target. Who was loaded by labkit remembers its target as `target_head`.
    """
    for inner in part.modules() if isinstance(part, nn.Module) else ():
        if inner.training and _acts(inner):
            raise LabkitError(
                f"the {name} {type(part).__name__} is in training mode, where its {type(inner).__name__} changes its "
                "output; call eval() on it first"
            )
    asked = getattr(part, "target_head", None)
    if isinstance(asked, str):
        what = f"the {name} {type(part).__name__} was trained"
        check_target(asked, _known_hash(session), what, "load it again with check=False")


def check_classifier(rule: Any, session: Any) -> None:
    """The same for the module of an exit rule, if it has one."""
    if isinstance(rule, classifier):
        check_trained(rule.module, session, "classifier")


def _acts(part: nn.Module) -> bool:
    """Whether training mode changes what it computes: batch statistics, or a dropout under any name."""
    rates = [x for key, x in vars(part).items() if (key == "p" or "drop" in key) and isinstance(x, int | float)]
    return isinstance(part, _BatchNorm | nn.RReLU) or any(rate > 0 for rate in rates if not isinstance(rate, bool))


def _known_hash(session: Any) -> str:
    model = session.backbone.model
    weight: Tensor = model.get_output_embeddings().weight
    state = id(weight), None if weight.is_inference() else weight._version
    if model not in _KNOWN or _KNOWN[model][0] != state:
        _KNOWN[model] = state, head_hash(session)
    return _KNOWN[model][1]
