"""What this machine is, and what is missing on it."""

import datetime
import importlib.util
import platform
from pathlib import Path
from typing import Any

import torch
import transformers

from labkit.backbone import Backbone
from labkit.loading import SHIPPED, cache_folder

EXTENSIONS = ("avx2", "avx512f", "avx512_bf16", "amx_tile", "amx_bf16")


def machine(backbone: Backbone | None = None) -> dict[str, Any]:
    """What stands beside every measured figure: device, matrix extensions, threads, versions, date."""
    name, flags, info = platform.processor(), "", Path("/proc/cpuinfo")
    if info.exists():
        lines = {
            key.strip(): value.strip() for key, _, value in (x.partition(":") for x in info.read_text().splitlines())
        }
        name, flags = lines.get("model name", name), lines.get("flags", "")
    found = {
        "date": datetime.date.today().isoformat(), "device": name,
        "extensions": [x for x in EXTENSIONS if x in flags.split()], "threads": torch.get_num_threads(),
        "torch": torch.__version__, "transformers": transformers.__version__, "python": platform.python_version(),
    }  # fmt: skip
    if backbone is not None:
        found["model"] = Path(backbone.model.config.name_or_path or type(backbone.model).__name__).name
        found["dtype"] = str(backbone.dtype).removeprefix("torch.")
        if backbone.device.type == "cuda":
            found["device"] = torch.cuda.get_device_name(backbone.device)
    return found


def doctor() -> str:
    """One line on what labkit runs on, one on each shipped model, one for whatever is missing, with its cure."""
    m = machine()
    cuda = torch.cuda.get_device_name() if torch.cuda.is_available() else "no CUDA"
    lines = [f"labkit on {m['device']} ({', '.join(m['extensions']) or 'no AMX or AVX'}, {m['threads']} threads), "
             f"{cuda}; torch {m['torch']}, transformers {m['transformers']}, Python {m['python']}"]  # fmt: skip
    for name in SHIPPED:
        there = (cache_folder() / name).exists()
        lines.append(f"fetched: {name}, in {cache_folder() / name}" if there else
                     f"missing: {name} in {cache_folder()}; run: labkit fetch {name}")  # fmt: skip
    for package, extra in (("gguf", "smollm2"), ("ipywidgets", "notebook"), ("jupyterlab", "notebook")):
        if importlib.util.find_spec(package) is None:
            lines.append(f"missing: {package}; run in labkit's folder: pip install -e '.[{extra}]'")
    return "\n".join(lines)
