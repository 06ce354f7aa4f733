"""Head checkpoints as they are published: recognised by their names, loaded strictly, tensor by tensor, in place."""

import json
import os
import pickle
import re
import struct
import tempfile
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from labkit.errors import LabkitError, check_lab
from labkit.heads.adapters import DraftVocabulary
from labkit.heads.medusa import Medusa
from labkit.heads.mlp_speculator import MLPSpeculator
from labkit.heads.shard import mesh_of, shard_heads
from labkit.heads.stored import Layout, Stored, find_files, find_folder, recognise, some
from labkit.heads.trained import HASH, check_target, head_hash
from labkit.heads.trees import check_pair

SIZES = {"emb_dim": 1, "vocab_size": 1, "n_predict": 1, "inner_dim": 0, "n_candidates": 1}
DRAFT_TOKENS = "labkit_draft_tokens"
"""The part of the vocabulary that Medusa V2 heads were trained for; other software ignores it and uses all of it."""
FLAGS = ("tie_weights", "scale_input")


def load_heads(source: Any, lab: Any, *, dtype: Any = None, check: bool = True) -> nn.Module:
    """Load MLPSpeculator or Medusa heads for `lab` from a folder or a hub id, in any published layout.

    The heads come to the device of the target's head, in the target's compute dtype or in `dtype`; they never take
    its quantisation. Raises LabkitError for a checkpoint that is incomplete, holds more, or fits another target;
    `check=False` ignores a stored hash of another target's head. For a target split by a `tp_plan` the heads are split
    over the same devices. Returns an MLPSpeculator or a Medusa.
    """
    folder = find_folder(source)
    check_lab(lab, "load_heads(source, lab)")
    if isinstance(dtype, str):
        dtype = getattr(torch, dtype, None)
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise LabkitError(f"got dtype={dtype!r}; write a floating-point one, such as torch.float16")
    try:
        return _load(folder, lab, dtype, check)
    except LabkitError:
        raise
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RuntimeError, EOFError, struct.error,
            pickle.UnpicklingError, SafetensorError) as error:  # fmt: skip
        said = str(error).splitlines()[0][:200] if str(error) else ""
        raise LabkitError(
            f"{folder} holds no readable checkpoint of heads ({type(error).__name__}: {said}); fetch it "
            "again, or check its config.json"
        ) from error


def _load(folder: Path, lab: Any, dtype: torch.dtype | None, check: bool) -> nn.Module:
    config = json.loads((folder / "config.json").read_text()) if (folder / "config.json").exists() else {}
    if not isinstance(config, dict):
        raise LabkitError(f"config.json of {folder} holds a {type(config).__name__}; needed is an object")
    stored = Stored(find_files(folder))
    layout = recognise(stored, config, set(lab.model.state_dict()), folder)
    backbone = lab.backbone
    where = {"device": "meta", "dtype": dtype or backbone.dtype}
    if layout is Layout.MLP_SPECULATOR:
        heads = _speculator(config, stored, where)
    else:
        heads = _medusa(config, stored, layout, where, backbone)
    _check_pair(heads, lab)
    if check and HASH in config:
        check_target(config[HASH], head_hash(lab), f"{folder} was made", "write check=False")
        heads.target_head = config[HASH]
    fill(heads, stored, backbone.model.get_output_embeddings().weight.device)
    heads, mesh = heads.eval().requires_grad_(False), mesh_of(backbone.model)
    return heads if mesh is None else shard_heads(heads, mesh)


def _speculator(config: Mapping, stored: Stored, where: dict) -> MLPSpeculator:
    needed = ("emb_dim", "vocab_size", "n_predict")
    absent = [name for name in needed if name not in config]
    if absent:
        raise LabkitError(f"config.json of an MLPSpeculator lacks {', '.join(absent)}; it has {some(config)}")
    for name, value in config.items():
        if name in SIZES and (type(value) is not int or value < SIZES[name]):
            raise LabkitError(f"config.json has {name}: {value!r}; needed is a whole number from {SIZES[name]}")
        if name in FLAGS and type(value) is not bool:
            raise LabkitError(f"config.json has {name}: {value!r}; needed is true or false")
    heads = MLPSpeculator(
        config["emb_dim"], config["vocab_size"], config["n_predict"], config.get("inner_dim", 0),
        tie=config.get("tie_weights", False), scale_input=config.get("scale_input", False),
        top_k=config.get("top_k_tokens_per_head"), candidates=config.get("n_candidates", 1), **where,
    )  # fmt: skip
    if heads.tie:
        _drop_copies(stored, heads)
    return heads


def _drop_copies(stored: Stored, heads: nn.Module) -> None:
    """A tied file may hold a shared tensor n times: the copies must be equal, and one is kept."""
    first_names = {parameter: name for name, parameter in heads.named_parameters()}
    kept: dict[str, str] = {}  # by the name it is wanted under
    for name, parameter in heads.named_parameters(remove_duplicate=False):
        if name in stored.shapes:
            one = kept.setdefault(first_names[parameter], name)
            if one != name and not torch.equal(stored.read(one), stored.read(name)):
                raise LabkitError(f"tie_weights is true, but {one} and {name} differ; they must be one tensor")
    known = {name for name, _ in heads.named_parameters(remove_duplicate=False)}
    others = {name: name for name in stored.shapes if name not in known}
    stored.select({name: wanted for wanted, name in kept.items()} | others)


def _medusa(config: Mapping, stored: Stored, layout: Layout, where: dict, backbone: Any) -> Medusa:
    if layout is Layout.MEDUSA_VLLM:
        layers = 1 + max(int(m[1]) for name in stored.shapes if (m := re.match(r"blocks\.\d+\.layers\.(\d+)", name)))
        stored.select({name: _from_vllm(name, layers) for name in stored.shapes})
    parts = [name.split(".") for name in stored.shapes]
    count = 1 + max(int(part[0]) for part in parts)
    linears = [int(part[1]) for part in parts if part[2] == "linear"]
    layers = 1 + max(linears, default=-1)
    own = [name for name in stored.shapes if ".linear." not in name]
    stated, stated_layers = config.get("medusa_num_heads", count), config.get("medusa_num_layers", layers)
    if stated > count or stated_layers != layers:
        raise LabkitError(
            f"config.json states {stated} heads of {stated_layers} layers, and the file holds {count} of {layers}"
        )
    if stated < count:
        warnings.warn(f"config.json states {stated} heads, the file holds {count}: taking {count}", stacklevel=3)
    shape = stored.shapes[own[0]] if own else (backbone.vocab, next(iter(stored.shapes.values()))[0])
    heads = Medusa(
        shape[1], shape[0], count, layers, base=None if own else target_head(backbone, config.get(DRAFT_TOKENS)),
        bias=any(name.endswith(".bias") for name in stored.shapes), **where,
    )  # fmt: skip
    stored.select({name: f"heads.{name}" for name in stored.shapes})
    return heads


def target_head(backbone: Any, tokens: Any = None) -> Callable[[Tensor], Tensor]:
    """The target's own head path, for heads without an output layer (Medusa V2); any dtype in.

    tokens: only these rows of the head, as a DraftVocabulary: for a small model most of a head's time is its output.
    """
    if tokens is None:
        return lambda hidden: backbone.logits(hidden.to(backbone.dtype))
    weight = backbone.model.get_output_embeddings().weight
    rows = nn.Linear(weight.shape[1], len(tokens), bias=False, device="meta")
    kept = DraftVocabulary(rows, tokens, backbone.vocab).to_empty(device=weight.device)
    kept.tokens.copy_(torch.as_tensor(tokens))
    rows.weight = nn.Parameter(weight.detach()[kept.tokens], requires_grad=False)
    return kept


def _from_vllm(name: str, layers: int) -> str:
    kind, head, *rest = name.split(".")
    return f"{head}.{rest[1]}.linear.{rest[2]}" if kind == "blocks" else f"{head}.{layers}.weight"


def _check_pair(heads: Any, lab: Any) -> None:
    check_pair(heads, lab.backbone)
    if lab.tokenizer is not None and len(lab.tokenizer) > heads.vocab:
        raise LabkitError(f"the tokenizer has {len(lab.tokenizer)} tokens, and the heads know {heads.vocab}")


def fill(heads: nn.Module, stored: Stored, device: torch.device) -> None:
    """Put every tensor in its place: checked first, then one at a time, so that nothing is allocated twice."""
    wanted = dict(heads.named_parameters())
    missing, extra = sorted(set(wanted) - set(stored.shapes)), sorted(set(stored.shapes) - set(wanted))
    odd = [
        f"{name} is {stored.shapes[name]}, needed {tuple(parameter.shape)}"
        for name, parameter in wanted.items()
        if name in stored.shapes and stored.shapes[name] != tuple(parameter.shape)
    ]
    faults = [f"missing {some(missing)}"] * bool(missing) + [f"not expected {some(extra)}"] * bool(extra) + odd[:6]
    if faults:
        raise LabkitError(f"the checkpoint does not fit {type(heads).__name__} as configured: {'; '.join(faults)}")
    for name, parameter in wanted.items():
        loaded = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
        loaded.copy_(stored.read(name))
        owner, _, key = name.rpartition(".")
        heads.get_submodule(owner).register_parameter(key, nn.Parameter(loaded, requires_grad=False))


def save_heads(heads: Any, folder: Any, lab: Any = None) -> Path:
    """Write heads as they are published: config.json and one safetensors file, whole or not at all.

    With `lab`, the name of the target and the hash of its head are stored, and checked by `load_heads`.
    """
    if lab is not None:
        check_lab(lab, "save_heads(heads, folder, lab)")
    if not isinstance(folder, str | os.PathLike):
        raise LabkitError(f"got folder={folder!r}; write save_heads(heads, folder, lab)")
    if isinstance(heads, MLPSpeculator):
        name, prefix = "model.safetensors", "speculator."
        config: dict[str, Any] = {
            "architectures": ["MLPSpeculatorPreTrainedModel"], "model_type": "mlp_speculator",
            "emb_dim": heads.width, "inner_dim": heads.inner, "vocab_size": heads.vocab, "n_predict": heads.count,
            "top_k_tokens_per_head": list(heads.top_k), "n_candidates": heads.candidates,
            "tie_weights": heads.tie, "scale_input": heads.scale_input,
        }  # fmt: skip
    elif isinstance(heads, Medusa):
        name, prefix = "medusa_lm_head.safetensors", ""
        config = {"medusa_num_heads": heads.count, "medusa_num_layers": heads.layers}
        config |= {} if heads.base is None else {"version": "2"}
        config |= {DRAFT_TOKENS: heads.base.tokens.tolist()} if isinstance(heads.base, DraftVocabulary) else {}
    else:
        raise LabkitError(f"got a {type(heads).__name__}; save_heads writes MLPSpeculator and Medusa heads")
    tensors = {
        prefix + key.removeprefix("heads."): value.detach().contiguous() for key, value in heads.named_parameters()
    }
    config["torch_dtype"] = str(next(iter(tensors.values())).dtype).removeprefix("torch.")
    if lab is not None:
        _check_pair(heads, lab)
        config |= {"base_model_name_or_path": lab.model.config.name_or_path, HASH: head_hash(lab)}
    return write_checkpoint(Path(folder), name, tensors, config)


def write_checkpoint(folder: Path, name: str, tensors: dict[str, Tensor], config: dict[str, Any]) -> Path:
    """Write config.json and one safetensors file, whole or not at all."""
    if folder.exists() and not folder.is_dir():
        raise LabkitError(f"{folder} is a file; give a folder to write config.json and {name} into")
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".part-") as part:
        save_file(tensors, Path(part) / name, metadata={"format": "pt"})
        (Path(part) / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        os.replace(Path(part) / name, folder / name)
        os.replace(Path(part) / "config.json", folder / "config.json")
    return folder
