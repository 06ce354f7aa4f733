"""Published formats' golden heads, random heads, and targets that fit them."""

import json
from pathlib import Path

import families
import torch
import transformers as hf
from safetensors.torch import load_file

import labkit
from labkit import Medusa, MLPSpeculator

GOLDEN = Path(__file__).parent / "data" / "golden"
SPECULATORS = ("untied", "tied_scaled", "sharded_fp16")


def target(width, vocab, seed=0):
    """A tiny target of the golden heads' width and vocabulary."""
    settings = families.COMMON | {"hidden_size": width, "vocab_size": vocab, "num_hidden_layers": 2}
    return labkit.Lab(families.build(hf.LlamaConfig, settings, seed, dtype=torch.float32, attn_implementation="sdpa"))


def golden(name):
    folder = GOLDEN / "mlp_speculator" / name
    config = json.loads((folder / "config.json").read_text())
    return folder, config, load_file(folder / "expected.safetensors")


def made(kind, width=48, vocab=131, **kwargs):
    torch.manual_seed(0)
    if kind.startswith("mlp"):
        heads = MLPSpeculator(width, vocab, 3, 24, tie=kind == "mlp tied", scale_input=True, top_k=(3, 2, 2),
                              candidates=4, **kwargs)  # fmt: skip
    else:
        heads = Medusa(width, vocab, 3, 2, **kwargs)
    for parameter in heads.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return heads
