"""The target's states on texts, computed once and kept on disk in shards: what heads and adapters learn from."""

import hashlib
import json
import os
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.utils.data import Dataset

from labkit.data import PADDING, continuations, rows_hash
from labkit.errors import LabkitError
from labkit.heads.trained import model_hash
from labkit.session import HEAD_INPUT, Session

INDEX = "index.json"
SHARD_ROWS = 32


class Source(ABC):
    """Rows of tokens, made shard by shard: `count` rows of `length`, PADDING behind the shorter ones."""

    count: int
    length: int
    name: dict[str, Any]
    """What makes these rows these rows; a cache of others is refused."""

    @abstractmethod
    def rows(self, lab: Any, start: int, stop: int) -> tuple[Int[Tensor, "rows length"], Sequence[int]]:
        """Rows start .. stop-1, and for each the place of the first token that is the target's own (1 in a text)."""


@dataclass(frozen=True)
class TextRows(Source):
    """A text as it is."""

    tokens: Int[Tensor, "rows length"]

    @property
    def count(self) -> int:  # type: ignore
        """Rows of text."""
        return len(self.tokens)

    @property
    def length(self) -> int:  # type: ignore
        """Of every row."""
        return self.tokens.shape[1]

    @property
    def name(self) -> dict[str, Any]:  # type: ignore
        """The hash of the tokens."""
        return {"kind": "text", "tokens": rows_hash(self.tokens)}

    def rows(self, lab, start, stop):
        """A slice."""
        return self.tokens[start:stop], [1] * (stop - start)


@dataclass(frozen=True)
class OwnRows(Source):
    """The target's own continuations of prompts, drawn at `temperature` (0 = greedy), prompt i with seed + i."""

    prompts: tuple[tuple[int, ...], ...]
    new_tokens: int = 256
    temperature: float = 1.0
    seed: int = 0

    @property
    def count(self) -> int:  # type: ignore
        """One a prompt."""
        return len(self.prompts)

    @property
    def length(self) -> int:  # type: ignore
        """Of the longest prompt with its continuation."""
        return max(len(prompt) for prompt in self.prompts) + self.new_tokens

    @property
    def name(self) -> dict[str, Any]:  # type: ignore
        """Prompts and settings."""
        prompts = hashlib.sha256(repr(self.prompts).encode()).hexdigest()
        return {"kind": "own", "prompts": "sha256:" + prompts, "new_tokens": self.new_tokens,
                "temperature": self.temperature, "seed": self.seed}  # fmt: skip

    def rows(self, lab, start, stop):
        """Generated when asked for."""
        some = self.prompts[start:stop]
        made = continuations(
            lab,
            some,
            max_new_tokens=self.new_tokens,
            temperature=self.temperature,
            seed=self.seed + start,
            batch=len(some),
        )
        full = made.new_full((len(some), self.length), PADDING)
        full[:, : made.shape[1]] = made
        return full, [len(prompt) for prompt in some]


class States(Dataset):
    """Rows of cached states: {"tokens" (length,), "begin" (), "depth_E" (length - 1, width) for every depth E}.

    Row t of a depth is the state of token t. Only the shards' headers stay open: the cache may be larger than memory.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.index: dict[str, Any] = json.loads((folder / INDEX).read_text())
        self._open: dict[int, Any] = {}

    def __len__(self) -> int:
        return self.index["source"]["rows"]

    def __getitem__(self, at: int) -> dict[str, Tensor]:
        shard, row = divmod(at, self.index["shard_rows"])
        if shard not in self._open:
            self._open[shard] = safe_open(_shard(self.folder, shard), framework="pt")
        file = self._open[shard]
        return {name: file.get_slice(name)[row] for name in file.keys()}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open": {}}  # an open file cannot go to a worker process


def cache_states(
    lab: Any,
    source: Source,
    folder: Any,
    depths: Sequence[int],
    *,
    batch: int = 4,
    dtype: torch.dtype = torch.bfloat16,
    progress: Callable[[int], Any] | None = None,
) -> States:
    """Run the target over the rows, and keep its states at `depths` (-1 = what the head reads) in `folder`.

    Shards that are there already, of the same target and rows, are kept: an interrupted run goes on. progress is told
    the rows done. Raises LabkitError for a folder that holds states of another target, other rows, depths or dtype.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    index = {
        "target": model_hash(lab), "source": {**source.name, "rows": source.count, "length": source.length},
        "depths": sorted(depths), "dtype": str(dtype), "shard_rows": SHARD_ROWS, "width": lab.backbone.width,
    }  # fmt: skip
    _claim(folder, index)
    for shard in range(-(-source.count // SHARD_ROWS)):
        start, stop = shard * SHARD_ROWS, min(source.count, (shard + 1) * SHARD_ROWS)
        path = _shard(folder, shard)
        if not _whole(path, stop - start):
            tokens, begins = source.rows(lab, start, stop)
            made = _run(lab, tokens, depths, batch, dtype)
            made |= {"tokens": tokens.to(torch.int32), "begin": torch.tensor(begins, dtype=torch.int32)}
            with tempfile.TemporaryDirectory(dir=folder, prefix=".part-") as part:
                try:
                    save_file(made, Path(part, path.name))
                except (OSError, SafetensorError) as error:
                    raise LabkitError(
                        f"shard {shard} of the states could not be written to {folder} ({error}); free some space and "
                        "run the same again: the shards before it are kept"
                    ) from error
                os.replace(Path(part, path.name), path)
        if progress is not None:
            progress(stop)
    return States(folder)


@torch.inference_mode()
def _run(lab: Any, tokens: Tensor, depths: Sequence[int], batch: int, dtype: torch.dtype) -> dict[str, Tensor]:
    width = lab.backbone.head_width
    made = {
        name(depth): torch.zeros(
            (len(tokens), tokens.shape[1] - 1, width if depth == HEAD_INPUT else lab.backbone.width), dtype=dtype
        )
        for depth in depths
    }
    for at in range(0, len(tokens), batch):
        rows = [[token for token in row if token != PADDING] for row in tokens[at : at + batch].tolist()]
        session = Session(lab.backbone, len(rows), tokens.shape[1], tuple(depths))
        session.prefill(rows)
        for depth in depths:
            tap = session.cache.taps[depth]
            if tap is None:
                continue
            for row, ids in enumerate(rows):
                made[name(depth)][at + row, : len(ids) - 1] = tap[row, : len(ids) - 1].to("cpu", dtype)
    return made


def name(depth: int) -> str:
    """The key of a depth's states."""
    return f"depth_{depth}"


@torch.inference_mode()
def _claim(folder: Path, index: dict[str, Any]) -> None:
    path = folder / INDEX
    if path.exists():
        try:
            there = json.loads(path.read_text())
        except ValueError as error:
            raise LabkitError(f"{path} is not JSON ({error}); remove {folder} to compute the states anew") from error
        unlike = sorted(k for k in {*there, *index} if there.get(k) != index.get(k))
        if unlike:
            which = "another target" if "target" in unlike else f"another {' and '.join(unlike)}"
            raise LabkitError(
                f"{folder} holds states of {which}: it says { ({k: there.get(k) for k in unlike}) }, and needed are "
                f"{ ({k: index.get(k) for k in unlike}) }; name another folder, or remove this one"
            )
        return
    part = path.with_suffix(".part")
    part.write_text(json.dumps(index, indent=1) + "\n")
    os.replace(part, path)


def _shard(folder: Path, number: int) -> Path:
    return folder / f"states-{number:05}.safetensors"


def _whole(path: Path, rows: int) -> bool:
    try:
        with safe_open(path, framework="pt") as file:
            return file.get_slice("tokens").get_shape()[0] == rows
    except (OSError, SafetensorError):
        return False
