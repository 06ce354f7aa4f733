"""What is trained for an exit, on disk: config.json and safetensors, tied to the target and exit it is for."""

import json
import os
from pathlib import Path
from typing import Any

from torch import nn

from labkit.errors import LabkitError, check_lab
from labkit.heads.adapters import Affine, DraftVocabulary, ExitClassifier, Kangaroo
from labkit.heads.files import fill, write_checkpoint
from labkit.heads.stored import Stored
from labkit.heads.trained import HASH, check_target, head_hash
from labkit.shipped import comes_with_labkit

SETTINGS: dict[type, tuple[str, ...]] = {
    Affine: ("width",), Kangaroo: ("width", "heads", "kv_heads", "head_dim", "rope_theta", "eps"),
    ExitClassifier: ("width",), nn.Identity: (),
}  # fmt: skip
KINDS = {kind.__name__: kind for kind in SETTINGS}
WEIGHTS, HEAD, HEAD_TOKENS = "adapter.safetensors", "draft_head.", "draft_head.tokens"


def save_adapter(adapter: Any, folder: Any, lab: Any, exit: int, *, head: DraftVocabulary | None = None) -> Path:
    """Write an adapter (Affine, Kangaroo, ExitClassifier, or nn.Identity) with the exit layer that it is for.

    head: a draft-vocabulary head that was trained with it, made by `DraftVocabulary.reduced`. A hash of the target's
    head is stored and checked by `load_adapter`.
    """
    kind = type(adapter)
    check_lab(lab, "save_adapter(adapter, folder, lab, exit=2)")
    if kind not in SETTINGS or not isinstance(folder, str | os.PathLike):
        raise LabkitError(
            f"got a {kind.__name__}, folder={folder!r}; write save_adapter(adapter, folder, lab, exit=2) "
            f"for an adapter of {', '.join(KINDS)}"
        )
    if kind is not nn.Identity:
        adapter.check(lab.backbone.width)
    lab.backbone.check_exit(exit)
    config = {"labkit_adapter": kind.__name__, "exit": exit, **{key: getattr(adapter, key) for key in SETTINGS[kind]}}
    config |= {"base_model_name_or_path": lab.model.config.name_or_path, HASH: head_hash(lab)}
    tensors = {key: value.detach().contiguous() for key, value in adapter.named_parameters()}
    if head is not None:
        if not isinstance(head, DraftVocabulary) or head.settings is None:
            raise LabkitError("got head=… that DraftVocabulary.reduced did not make; save its state_dict yourself")
        config["draft_head"] = head.settings
        tensors |= {HEAD + key: value.detach().contiguous() for key, value in head.state_dict().items()}
    if not tensors:
        raise LabkitError("got nn.Identity() without a head: there is nothing to save")
    return write_checkpoint(Path(folder), WEIGHTS, tensors, config)


def load_adapter(folder: Any, lab: Any, *, check: bool = True) -> Any:
    """The adapter that `save_adapter` wrote, on the target's device and in its dtype; `.exit` is the layer it is for.

    Raises LabkitError for one that was trained for another target, and so does a run with another one later;
    `check=False` ignores both.
    """
    config, stored = _open(folder, lab, check)
    kind = KINDS[config["labkit_adapter"]]
    if kind is nn.Identity:
        made: Any = nn.Identity()
    else:
        made = kind(**{key: config[key] for key in SETTINGS[kind]}, dtype=lab.backbone.dtype, device="meta")
        made.check(lab.backbone.width)
        stored.select({key: key for key in stored.shapes if not key.startswith(HEAD)})
        fill(made, stored, lab.backbone.model.get_output_embeddings().weight.device)
    made.exit, made.target_head = config["exit"], config[HASH] if check else None
    return made.eval().requires_grad_(False)


def load_draft_head(folder: Any, lab: Any, *, check: bool = True) -> DraftVocabulary:
    """The draft-vocabulary head that was saved with an adapter: `EarlyExit(2, adapter=load_adapter(…), head=…)`."""
    config, stored = _open(folder, lab, check)
    if "draft_head" not in config:
        raise LabkitError(f"{str(folder)!r} holds an adapter without a draft head; leave head= out")
    where: Any = {"dtype": lab.backbone.dtype, "device": lab.backbone.model.get_output_embeddings().weight.device}
    tokens = stored.read(HEAD_TOKENS)
    made = DraftVocabulary.reduced(lab.backbone.width, tokens, lab.backbone.vocab, **config["draft_head"], **where)
    stored.select({key: key.removeprefix(HEAD) for key in stored.shapes if key.startswith(HEAD) and key != HEAD_TOKENS})
    fill(made, stored, where["device"])
    made.target_head = config[HASH] if check else None
    return made.eval().requires_grad_(False)


def _open(folder: Any, lab: Any, check: bool) -> tuple[dict[str, Any], Stored]:
    """The checked config and the tensors, none of them read yet."""
    check_lab(lab, "load_adapter(folder, lab)")
    if not isinstance(folder, str | os.PathLike):
        raise LabkitError(f"got folder={folder!r}; write load_adapter(folder, lab)")
    folder = comes_with_labkit(folder) or Path(folder)
    try:
        config = json.loads((folder / "config.json").read_text())
        missing = [key for key in SETTINGS[KINDS[config["labkit_adapter"]]] if key not in config]
        config["exit"] = int(config["exit"])
        if missing:
            raise KeyError(missing[0])
        stored = Stored([folder / WEIGHTS])
    except LabkitError:
        raise
    except Exception as error:
        raise LabkitError(
            f"{str(folder)!r} holds no adapter that labkit wrote ({type(error).__name__}: {error}); give a folder that "
            "labkit.heads.save_adapter made"
        ) from error
    lab.backbone.check_exit(config["exit"])
    if check:
        check_target(config.get(HASH), head_hash(lab), f"{folder} was trained", "write check=False")
    return config, stored
