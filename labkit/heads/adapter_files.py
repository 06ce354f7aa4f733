"""Exit adapters on disk: config.json and one safetensors file, tied to the target and exit they were trained for."""

import json
import os
from pathlib import Path
from typing import Any

from labkit.errors import LabkitError
from labkit.heads.adapters import Adapter, Affine, Kangaroo
from labkit.heads.files import HASH, fill, head_hash, write_checkpoint
from labkit.heads.stored import Stored

KINDS: dict[str, type] = {"Affine": Affine, "Kangaroo": Kangaroo}
SETTINGS = {"Affine": ("width",), "Kangaroo": ("width", "heads", "kv_heads", "head_dim", "rope_theta", "eps")}
WEIGHTS = "adapter.safetensors"


def save_adapter(adapter: Any, folder: Any, lab: Any, exit: int) -> Path:
    """Write an Affine or Kangaroo adapter with the exit layer, and a hash of the target's head, that it is for."""
    kind = type(adapter).__name__
    if kind not in KINDS or not isinstance(folder, str | os.PathLike) or not hasattr(lab, "backbone"):
        raise LabkitError(
            f"got a {kind}, folder={folder!r}, lab={lab!r}; write save_adapter(adapter, folder, lab, exit=2) for an "
            f"adapter of {' or '.join(KINDS)}"
        )
    adapter.check(lab.backbone.width)
    lab.backbone.check_exit(exit)
    config = {"labkit_adapter": kind, "exit": exit, **{name: getattr(adapter, name) for name in SETTINGS[kind]}}
    config |= {"base_model_name_or_path": lab.model.config.name_or_path, HASH: head_hash(lab)}
    tensors = {name: value.detach().contiguous() for name, value in adapter.named_parameters()}
    return write_checkpoint(Path(folder), WEIGHTS, tensors, config)


def load_adapter(folder: Any, lab: Any, *, check: bool = True) -> Adapter:
    """The adapter that `save_adapter` wrote, on the target's device and in its dtype; `.exit` is the layer it is for.

    Raises LabkitError for one that was trained for another target; `check=False` ignores that.
    """
    if not isinstance(folder, str | os.PathLike) or not hasattr(lab, "backbone"):
        raise LabkitError(f"got folder={folder!r}, lab={lab!r}; write load_adapter(folder, lab)")
    folder = Path(folder)
    try:
        config = json.loads((folder / "config.json").read_text())
        kind = config["labkit_adapter"]
        made = KINDS[kind](**{name: config[name] for name in SETTINGS[kind]}, dtype=lab.backbone.dtype, device="meta")
        exit, stored = int(config["exit"]), Stored([folder / WEIGHTS])
    except LabkitError:
        raise
    except Exception as error:
        raise LabkitError(
            f"{str(folder)!r} holds no adapter that labkit wrote ({type(error).__name__}: {error}); give a folder that "
            "labkit.heads.save_adapter made"
        ) from error
    made.check(lab.backbone.width)
    lab.backbone.check_exit(exit)
    if check and config.get(HASH) != (ours := head_hash(lab)):
        raise LabkitError(
            f"{folder} was trained for a target whose head has the hash {config.get(HASH)}, and this one has {ours}; "
            "load the target that it was trained for, or write check=False"
        )
    fill(made, stored, lab.backbone.model.get_output_embeddings().weight.device)
    made.exit = exit
    return made.eval().requires_grad_(False)
