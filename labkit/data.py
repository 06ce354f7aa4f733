"""Text to train on and to measure with, without a network: `labkit.data.standard_library()` and friends."""

import ast
import hashlib
import importlib.util
import sysconfig
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from labkit.errors import LabkitError
from labkit.prompts import read_prompts

LEFT_OUT = ("site-packages", "dist-packages", "test", "tests", "idle_test", "idlelib", "__pycache__")
END = "<|end|>"
PADDING = -1
"""Stands behind the end of a row that is shorter than its neighbours; no token."""


@dataclass(frozen=True)
class Document:
    """A text and the name of the file that it came from."""

    name: str
    text: str


@dataclass(frozen=True)
class Corpus:
    """Documents, in the order of their names. what: it is called so in messages."""

    documents: tuple[Document, ...]
    what: str = field(default="the corpus", compare=False)

    def __post_init__(self):
        if not any(document.text for document in self.documents):
            raise LabkitError("got a corpus without any text; name files or folders that hold some")

    @property
    def size_bytes(self) -> int:
        """Of all texts in UTF-8."""
        return sum(len(document.text.encode()) for document in self.documents)

    @property
    def hash(self) -> str:
        """Of all names and texts."""
        digest = hashlib.sha256()
        for document in self.documents:
            for part in (document.name, document.text):
                digest.update(len(encoded := part.encode()).to_bytes(8, "little") + encoded)
        return "sha256:" + digest.hexdigest()

    def split(self, held_out: float = 0.05) -> tuple["Corpus", "Corpus"]:
        """(to train on, held out), whole files each; a file's side depends on its name and `held_out` alone."""
        if not isinstance(held_out, float) or not 0 < held_out < 1:
            raise LabkitError(f"got held_out={held_out!r}; write a share between 0 and 1")
        sides: tuple[list[Document], list[Document]] = ([], [])
        for document in self.documents:
            number = int.from_bytes(hashlib.sha256(document.name.encode()).digest()[:8], "big") / 2**64
            sides[number < held_out].append(document)
        if not sides[0] or not sides[1]:
            raise LabkitError(
                f"{len(self.documents)} files are too few to hold out {held_out:.0%} of them; give more files, or "
                "cut a text into several"
            )
        return Corpus(tuple(sides[0]), "the text to train on"), Corpus(tuple(sides[1]), "the held-out text")

    def rows(self, tokenizer: Any, length: int) -> Int[Tensor, "rows length"]:
        """All texts as one stream of tokens, an end token behind each document, cut into rows of `length`.

        The last, shorter row is left out. Raises LabkitError if there is less than one row.
        """
        end = tokenizer.eos_token_id
        if end is None:
            raise LabkitError("the tokenizer has no eos_token, which must stand between documents; set one")
        stream = [id for ids in _encoded(tokenizer, self.documents) for id in (*ids, end)]
        count = len(stream) // length
        if not count:
            raise LabkitError(f"{self.what} has {len(stream)} tokens, and one row needs {length}; give more text")
        return torch.tensor(stream[: count * length], dtype=torch.long, device="cpu").view(count, length)


def _encoded(tokenizer: Any, documents: Sequence[Document]) -> Iterator[list[int]]:
    """Each text's ids; a text longer than the model's positions is no reason to warn, since rows are cut anyway."""
    for at in range(0, len(documents), 64):
        texts = [document.text for document in documents[at : at + 64]]
        yield from tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]


def standard_library(*, docstrings: bool = False) -> Corpus:
    """The sources of Python's standard library without its tests and idlelib; or its docstrings only.

    They are there with every Python and differ a little between versions: `.hash` says which text it was.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    found = text_files([root], endings=(".py",), without=LEFT_OUT)
    if not docstrings:
        return found
    made = (Document(document.name, "\n\n".join(_docstrings(document.text))) for document in found.documents)
    return Corpus(tuple(document for document in made if document.text))


def package(*names: str) -> Corpus:
    """The Python sources of installed packages: code of other authors than the standard library's."""
    found: list[Document] = []
    for name in names:
        try:
            spec = importlib.util.find_spec(name)
        except (ImportError, ValueError):  # its parent is not there, or it is empty
            spec = None
        paths: list[Any] = [None] if spec is None else list(spec.submodule_search_locations or [spec.origin])
        if not all(path and (Path(path).is_dir() or path.endswith(".py")) for path in paths):
            raise LabkitError(f"got {name!r}, which is no installed package with Python sources; write one's name")
        texts = text_files(paths, endings=(".py",), without=LEFT_OUT).documents
        found += [Document(f"{name}/{document.name}", document.text) for document in texts]
    return Corpus(tuple(sorted(found, key=lambda document: document.name)))


def text_files(paths: Iterable[Any], *, endings: Sequence[str] = (), without: Sequence[str] = ()) -> Corpus:
    """The UTF-8 text of files, and of all files in folders whose names end so and that lie in no folder of `without`.

    Names are relative to the folder named. Files in folders that are not UTF-8 are left out; a file named itself that
    cannot be read raises LabkitError.
    """
    if isinstance(paths, str | Path):
        paths = [paths]
    found: list[Document] = []
    for path in map(Path, paths):
        inside = path.is_dir()
        if not inside and not path.is_file():
            raise LabkitError(f"got {str(path)!r}, which is no file or folder; write the path of a text")
        for file in sorted(path.rglob("*")) if inside else [path]:
            name = str(file.relative_to(path)) if inside else file.name
            if inside and (not file.is_file() or set(file.relative_to(path).parts) & set(without)):
                continue
            if inside and endings and not file.name.endswith(tuple(endings)):
                continue
            try:
                found.append(Document(name, file.read_text(encoding="utf-8")))
            except (UnicodeDecodeError, OSError) as error:
                if not inside:
                    raise LabkitError(f"{str(file)!r} cannot be read as UTF-8 text ({error})") from error
    return Corpus(tuple(sorted(found, key=lambda document: document.name)))


def named(source: Any) -> Corpus:
    """A corpus by name: "stdlib", "stdlib-docstrings", "package:NAME", else a file or folder; a Corpus is itself."""
    if isinstance(source, Corpus):
        return source
    if not isinstance(source, str | Path):
        raise LabkitError(f"got corpus={source!r}; write 'stdlib', 'stdlib-docstrings', 'package:NAME' or a path")
    if source == "stdlib":
        return standard_library()
    if source == "stdlib-docstrings":
        return standard_library(docstrings=True)
    if str(source).startswith("package:"):
        return package(*str(source).removeprefix("package:").split(","))
    return text_files([source])


def continuations(
    lab: Any,
    prompts: Sequence[Any],
    *,
    max_new_tokens: int = 256,
    temperature: float = 1.0,
    seed: int = 0,
    batch: int = 8,
    progress: Any = None,
    **options: Any,
) -> Int[Tensor, "rows length"]:
    """The target's own continuations of prompts: prompt and new tokens of each in a row, PADDING behind shorter ones.

    temperature: 0 = greedy. Prompt i is continued with seed + i, whatever the batch. progress: called with every
    batch's number of prompts done. Other options are those of `lab.generate`.
    """
    if isinstance(prompts, str) or not len(prompts) or batch < 1:
        raise LabkitError(f"got prompts={prompts!r}, batch={batch}; give a list of at least one, and batch from 1 on")
    rows: list[list[int]] = []
    for at in range(0, len(prompts), batch):
        some = list(prompts[at : at + batch])
        seeds = [seed + at + i for i in range(len(some))]
        # A prompt cut from a text may begin or end with the end token, which often is the pad token too: it is meant.
        read = read_prompts(
            some, None, None if all(isinstance(one[0], int) for one in some) else lab.tokenizer, lab.backbone.vocab
        ).rows
        mask = [[1] * len(row) for row in read]
        out = lab.generate(
            read, max_new_tokens=max_new_tokens, temperature=temperature, seed=seeds, attention_mask=mask, **options
        )
        rows += [list(prompt) + new for prompt, new in zip(out.prompts, out.tokens, strict=True)]
        if progress is not None:
            progress(len(rows))
    return padded(rows)


def padded(rows: Sequence[Sequence[int]]) -> Int[Tensor, "rows length"]:
    """Rows of ids of any lengths as one tensor, PADDING behind the shorter ones."""
    longest = max(len(row) for row in rows)
    return torch.tensor([[*row, *[PADDING] * (longest - len(row))] for row in rows], device="cpu")


def rows_hash(rows: Int[Tensor, "rows length"]) -> str:
    """Of tokens: what states and heads were made from."""
    shape = str(tuple(rows.shape)).encode()
    return "sha256:" + hashlib.sha256(shape + rows.cpu().contiguous().numpy().tobytes()).hexdigest()


def train_tokenizer(corpus: Corpus, vocab: int = 4096) -> Any:
    """A byte-level BPE tokenizer of `vocab` tokens with one special token, `<|end|>`, learnt from a corpus."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    alphabet = pre_tokenizers.ByteLevel.alphabet()
    if vocab <= len(alphabet):
        raise LabkitError(f"got vocab={vocab}; a byte-level tokenizer needs more than {len(alphabet)}")
    engine: Any = Tokenizer(models.BPE())
    engine.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    engine.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab, special_tokens=[END], initial_alphabet=sorted(alphabet), show_progress=False
    )
    engine.train_from_iterator((document.text for document in corpus.documents), trainer)
    return PreTrainedTokenizerFast(tokenizer_object=engine, eos_token=END, pad_token=END)


def _docstrings(source: str) -> list[str]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(source)
    except SyntaxError:
        return []
    holders = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    texts = (ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, holders))
    return [text for text in texts if text]
