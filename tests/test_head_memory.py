"""What heads weigh: their parameters, loading, a generation, a quantised target."""

import subprocess
import sys
from pathlib import Path

import families
import pytest
import torch
import transformers as hf
from golden import made, target
from safetensors.torch import load_file

import labkit
from labkit import Heads, MLPSpeculator, load_heads, save_heads


class Int8(torch.nn.Module):
    """A linear layer stored in 8 bits, as weight-only quantisation leaves it."""

    def __init__(self, linear):
        super().__init__()
        scale = linear.weight.abs().amax(1, keepdim=True) / 127
        self.register_buffer("scale", scale)
        self.register_buffer("weight", (linear.weight / scale).round().to(torch.int8))

    def forward(self, x):
        """The layer's product, in the input's dtype."""
        return x @ (self.weight * self.scale).to(x.dtype).T


@pytest.mark.parametrize("kind", ["mlp", "medusa"])
def test_heads_do_not_take_the_targets_quantisation(tmp_path, kind):
    lab = target(48, 131)
    for layer in lab.model.model.layers:
        for name, module in [*layer.named_modules()]:
            if isinstance(module, torch.nn.Linear):
                layer.set_submodule(name, Int8(module))
    lab = labkit.Lab(lab.model)
    save_heads(made(kind), tmp_path / "heads", lab)
    heads = load_heads(tmp_path / "heads", lab)
    assert {x.dtype for x in heads.parameters()} == {lab.backbone.dtype}
    assert not [m for m in heads.modules() if isinstance(m, Int8)]
    out = lab.generate([[1, 2, 3]], Heads(heads), max_new_tokens=12)
    assert out.tokens == lab.generate([[1, 2, 3]], max_new_tokens=12).tokens


LOADING = """
import sys, threading
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from golden import target
from labkit import load_heads

def anonymous_bytes():  # memory of this process that is not mapped from a file
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith("RssAnon")).split()[1])

lab = target(64, 20000)
before, peak, over = anonymous_bytes(), [0], threading.Event()

def sample():
    while not over.wait(0.001):
        peak[0] = max(peak[0], anonymous_bytes() - before)

watcher = threading.Thread(target=sample)
watcher.start()
heads = load_heads(sys.argv[2], lab)
over.set()
watcher.join()
print(sum(p.numel() * p.element_size() for p in heads.parameters()), peak[0])
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads Linux's /proc")
@pytest.mark.parametrize("file", ["model.safetensors", "pytorch_model.bin"])
def test_loading_allocates_once(tmp_path, file):
    """float16 on disk, float32 in place: at most one tensor's worth beside the heads themselves."""
    heads = MLPSpeculator(64, 20000, 3, 256, dtype=torch.float16)
    save_heads(heads, tmp_path)
    if file.endswith(".bin"):
        torch.save(load_file(tmp_path / "model.safetensors"), tmp_path / file)
        (tmp_path / "model.safetensors").unlink()
    command = [sys.executable, "-c", LOADING, str(Path(__file__).parent), str(tmp_path)]
    size, peak = map(int, subprocess.run(command, capture_output=True, text=True, check=True).stdout.split())
    assert size == sum(p.numel() * 4 for p in heads.parameters())
    assert 0.5 * size < peak < size + 20000 * 256 * 4


def test_live_memory_formula_of_published_shapes():
    """formats.md's parameter counts, on the meta device."""

    def count(heads):
        return sum(p.numel() for p in heads.parameters())

    d, m, v, n = 4096, 3072, 128256, 4
    untied = MLPSpeculator(d, v, n, m, device="meta")
    assert count(untied) == 2 * n * v * m + d * m + (n - 1) * m * m + 2 * n * m
    d, m, v, n = 8192, 8192, 32000, 4
    tied = MLPSpeculator(d, v, n, 0, tie=True, scale_input=True, device="meta")
    assert count(tied) == 2 * v * m + d * m + m * m + 2 * m


def test_live_memory_of_a_published_shape(live_bytes):
    """llama-160m-accelerator's heads: after the first round nothing grows."""
    from labkit.lab import _Run

    settings = families.COMMON | {"hidden_size": 768, "vocab_size": 32000, "num_hidden_layers": 1}
    lab = labkit.Lab(families.build(hf.LlamaConfig, settings, dtype=torch.float32, attn_implementation="sdpa"))
    heads = MLPSpeculator(768, 32000, 3, 1024, top_k=(5, 3, 2), candidates=5).requires_grad_(False)
    assert sum(p.numel() for p in heads.parameters()) == 2 * 3 * 32000 * 1024 + 768 * 1024 + 2 * 1024**2 + 6 * 1024
    run, live = _Run(lab, [5, 9, 2], Heads(heads), {"max_new_tokens": 12}), []
    for happened in run.rounds():
        if run.stop.max_room > heads.count:
            live.append(live_bytes())
        del happened
    assert len(live) > 4 and max(live[1:]) - min(live[1:]) < 4096  # a tree of another depth has another path
