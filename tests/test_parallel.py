"""Tensor parallel: target and heads split over two processes give the text of one."""

import json
import subprocess
import sys
from pathlib import Path

import families
import pytest
import torch
import transformers as hf

import labkit
from labkit import Heads, Medusa, MLPSpeculator, load_heads, save_heads

PROMPTS = [[3, 14, 15, 9, 26, 5], [8, 1, 2]]
SETTINGS = {
    "speculator": [{"top_k": (1, 1, 1)}, {"top_k": (3, 2, 2), "candidates": 4}],
    "tied": [{"top_k": (3, 2, 2), "candidates": 4}],
    "medusa": [{"tree": [(0,), (1,), (0, 0), (0, 1), (1, 0)]}],
}
WORKER = """
import json, sys
sys.path.insert(0, sys.argv[1])
import torch
torch.set_num_threads(1)
import torch.distributed as dist
from torch.distributed.tensor import DTensor
import transformers as hf
import labkit
from test_parallel import PROMPTS, SETTINGS, texts

model = hf.AutoModelForCausalLM.from_pretrained(sys.argv[2] + "/target", tp_plan="auto", dtype=torch.float32)
lab = labkit.Lab(model.eval())
heads = {name: labkit.load_heads(f"{sys.argv[2]}/{name}", lab) for name in SETTINGS}
split = {name: sum(isinstance(p, DTensor) for p in module.parameters()) for name, module in heads.items()}
found = texts(lab, heads)
with open(f"{sys.argv[2]}/found-{dist.get_rank()}.json", "w") as file:
    json.dump({"texts": found, "split": split, "target": type(model.lm_head.weight).__name__}, file)
dist.destroy_process_group()
"""


def texts(lab, heads):
    """Greedy and sampled texts of every strategy."""
    drafters = [labkit.Plain(), labkit.EarlyExit(2, 2)]
    drafters += [Heads(heads[name], **settings) for name, several in SETTINGS.items() for settings in several]
    return [
        lab.generate(PROMPTS, drafter, max_new_tokens=10, **options).tokens
        for drafter in drafters
        for options in ({}, {"temperature": 0.7, "seed": 5})
    ]


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch was built without distributed")
def test_two_processes_give_the_text_of_one(tmp_path):
    settings = families.COMMON | {"num_key_value_heads": 2, "vocab_size": 62, "num_hidden_layers": 4}
    model = families.build(hf.LlamaConfig, settings, 0, dtype=torch.float32, attn_implementation="sdpa")
    model.save_pretrained(tmp_path / "target")
    lab = labkit.Lab(model)
    made = {
        "speculator": MLPSpeculator(32, 62, 3, 24),
        "tied": MLPSpeculator(32, 62, 3, 24, tie=True, scale_input=True),
        "medusa": Medusa(32, 62, 3, 1),
    }
    for name, heads in made.items():
        for parameter in heads.parameters():
            torch.nn.init.normal_(parameter, std=0.4, generator=torch.Generator().manual_seed(1))
        save_heads(heads, tmp_path / name, lab)
    want = texts(lab, {name: load_heads(tmp_path / name, lab) for name in made})
    assert all(text == want[i % 2] for i, text in enumerate(want))  # drafter-invariant
    (tmp_path / "worker.py").write_text(WORKER)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*launch, str(tmp_path / "worker.py"), str(Path(__file__).parent), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    for rank in (0, 1):
        found = json.loads((tmp_path / f"found-{rank}.json").read_text())
        assert found["target"] == "DTensor" and found["split"] == {"speculator": 6, "tied": 2, "medusa": 3}
        assert found["texts"] == want
