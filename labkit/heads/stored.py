"""What a folder of published heads holds: its files, its tensors by name, and which layout the names have."""

import json
import os
import re
from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from labkit.errors import LabkitError
from labkit.shipped import comes_with_labkit

WEIGHTS = ("model.safetensors", "medusa_lm_head.safetensors", "pytorch_model.bin", "medusa_lm_head.pt")
PREFIXES = ("speculator.", "medusa_head.")
ARCTIC = re.compile(r"(forget|input|output|cell)_(emb|proj|ln)|ArcticLSTM")


class Layout(Enum):
    """The forms in which heads are published: the names that all of a file's tensors have."""

    MLP_SPECULATOR = r"(emb|proj|head|ln)\.\d+\.(weight|bias)"
    MEDUSA = r"\d+\.\d+\.(linear\.)?(weight|bias)"
    MEDUSA_VLLM = r"blocks\.\d+\.layers\.\d+\.(weight|bias)|lm_heads\.\d+\.weight"


class Stored:
    """The tensors of a checkpoint by name, none of them loaded yet: `shapes[name]`, `read(name)`."""

    def __init__(self, files: Iterable[Path]):
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._read: dict[str, Callable[[], Tensor]] = {}
        for file in files:
            if file.suffix == ".safetensors":
                opened = safe_open(file, framework="pt", device="cpu")
                for name in opened.keys():
                    self.shapes[name] = tuple(opened.get_slice(name).get_shape())
                    self._read[name] = lambda name=name, opened=opened: opened.get_tensor(name)
            else:
                for name, tensor in _unpickled(file).items():
                    self.shapes[name], self._read[name] = tuple(tensor.shape), lambda tensor=tensor: tensor

    def read(self, name: str) -> Tensor:
        """One tensor, mapped from its file."""
        return self._read[name]()

    def select(self, names: Mapping[str, str]) -> None:
        """Keep the tensors `names[stored] = wanted` only, under their wanted names."""
        self.shapes = {new: self.shapes[old] for old, new in names.items()}
        self._read = {new: self._read[old] for old, new in names.items()}


def _unpickled(file: Path) -> dict[str, Tensor]:
    try:
        found = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except RuntimeError:  # written before torch 1.6: not mappable
        found = torch.load(file, map_location="cpu", weights_only=True)
    return {name: value for name, value in found.items() if isinstance(value, Tensor)}


def find_folder(source: Any) -> Path:
    """A folder that holds the checkpoint: the one given, or the hub's copy of it."""
    if not isinstance(source, str | os.PathLike):
        raise LabkitError(f"got {source!r}; give a folder or a hub id")
    if (ours := comes_with_labkit(source)) is not None:
        return ours
    path = Path(source).expanduser()
    if path.is_dir():
        return path
    if path.exists():
        raise LabkitError(f"{str(source)!r} is a file; give the folder that holds it and its config.json")
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(str(source), allow_patterns=["*.json", "*.safetensors", "*.bin", "*.pt"]))
    except Exception as error:
        raise LabkitError(
            f"{str(source)!r} is neither a folder nor a hub id that can be fetched ({type(error).__name__}); "
            "write a folder with config.json and the weights, or an id such as ibm-fms/llama3-8b-accelerator"
        ) from error


def find_files(folder: Path) -> list[Path]:
    """The weight files: those of an index, one with a usual name, or all safetensors there are."""
    for index in sorted(folder.glob("*.index.json")):
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        absent = [name for name in names if not (folder / name).exists()]
        if absent:
            raise LabkitError(f"{index.name} lists {', '.join(absent)}, which {folder} does not hold; fetch it whole")
        return [folder / name for name in names]
    for name in WEIGHTS:
        if (folder / name).exists():
            return [folder / name]
    found = [*sorted(folder.glob("*.safetensors")), *sorted(folder.glob("*.bin")), *sorted(folder.glob("*.pt"))]
    if not found:
        raise LabkitError(f"{folder} holds no weights; needed is one of {', '.join(WEIGHTS)}, or shards with an index")
    return found


def recognise(stored: Stored, config: Mapping, target: set[str], folder: Path) -> Layout:
    """Which layout the names have; afterwards `stored` holds the heads' tensors only, without a prefix."""
    names = list(stored.shapes)
    kinds = config.get("architectures") or []
    if ARCTIC.search(" ".join([*names, *([kinds] if isinstance(kinds, str) else map(str, kinds))])):
        raise LabkitError(f"{folder} is Arctic's LSTM speculator, which labkit does not run")
    kept = {}
    for name in names:
        at = max((name.find(prefix) + len(prefix) for prefix in PREFIXES if prefix in name), default=0)
        if at or name not in target:
            kept[name] = name[at:]
    if any(name != new for name, new in kept.items()):  # inside a merged model: the rest must be the target's
        merged = [n for n in names if kept.get(n) == n and re.match(r"(model|transformer|lm_head|base_model)\b", n)]
        for name in merged:
            del kept[name]
    stored.select(kept)
    for layout in Layout:
        fits = [name for name in stored.shapes if re.fullmatch(layout.value, name)]
        if not fits:
            continue
        extra = sorted(set(stored.shapes) - set(fits))
        if extra:
            raise LabkitError(f"{folder} holds {len(fits)} tensors of {layout.name} heads and others: {some(extra)}")
        return layout
    raise LabkitError(
        f"{folder} holds no heads that labkit knows: architectures {kinds or 'absent'}, model_type "
        f"{config.get('model_type', 'absent')!r}, tensors {some(names)}; needed are MLPSpeculator's or Medusa's names"
    )


def some(names: Iterable[str]) -> str:
    """The first few names, for a message."""
    names = list(names)
    return ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")
