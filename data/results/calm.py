"""Lossy decoding with exit rules on SmolLM2-135M, and two calibrations: python data/results/calm.py FILE.

Two prompts of every set, 24 new tokens. `calibrate` says how far each threshold agrees with the full model and how deep
it goes; then every rule decodes the same three prompts, interleaved with plain decoding (tokens/s without prefill).
One thread, so that whatever else runs on the machine disturbs little.
"""

import sys

import torch

import labkit
from labkit.bench import write_json
from labkit.cli import as_ids, read_prompt_files
from labkit.doctor import machine

COUNT, LAYERS, TARGET, TIMED = 24, (18, 21, 24, 27), 0.7, 3
RULES = {
    "confidence": (labkit.confidence, LAYERS, (0.99, 0.95, 0.9, 0.7)),
    "margin": (labkit.margin, LAYERS, (0.99, 0.9, 0.5)),
    "saturation": (labkit.saturation, LAYERS, (0.985, 0.98, 0.97)),
    "first layers": (int, None, (29, 27, 24)),
}


def show(text: str) -> None:
    """Progress and results as they come."""
    print(text, flush=True)


def plain(found: labkit.calibration.Calibration) -> dict:
    """A calibration as plain values."""
    names = ("threshold", "target", "confidence", "measure", "prompts", "hoeffding_cost", "allowed", "reachable")
    rows = [{"threshold": t.threshold, "risk": t.risk, "p_value": t.p_value, "gives": t.gives, "risks": t.risks}
            for t in found.tested]  # fmt: skip
    return {name: getattr(found, name) for name in names} | {"tested": rows, "text": str(found).splitlines()}


def speeds(runs: dict[str, dict], prompts: list) -> dict[str, float]:
    """Tokens per second without prefill, over all prompts; the ways take turns."""
    tokens, seconds = dict.fromkeys(runs, 0), dict.fromkeys(runs, 0.0)
    for options in runs.values():
        lab.generate(prompts[0], max_new_tokens=2, **options)
    for number, prompt in enumerate(prompts):
        ways = list(runs.items())
        for name, options in ways[number % len(ways) :] + ways[: number % len(ways)]:
            out = lab.generate(prompt, max_new_tokens=COUNT, eos_token_id=None, **options)
            tokens[name] += out.new_tokens
            seconds[name] += out.seconds - out.prefill_seconds
    return {name: tokens[name] / seconds[name] for name in runs}


torch.set_num_threads(1)
lab = labkit.load("smollm2-135m", device="cpu", dtype=torch.float32)
names = ("arithmetic", "chat", "code", "editing", "question_answering", "summarising", "translation")
prompts = as_ids(lab, [prompt for name in names for prompt in read_prompt_files([name])[:2]])
settings = {"prompts": len(prompts), "max_new_tokens": COUNT, "exit_layers": LAYERS, "timed_prompts": TIMED}
result = {"machine": machine(lab.backbone), "command": f"python data/results/calm.py {sys.argv[1]}",
          "settings": settings, "agreement": {}}  # fmt: skip
runs: dict[str, dict] = {"plain": {}}
for name, (make, layers, thresholds) in RULES.items():
    found = labkit.calibrate(
        lab, prompts, make, thresholds, target=TARGET, exit_layers=layers, max_new_tokens=COUNT, progress=show
    )
    show(f"{name}\n{found}")
    result["agreement"][name] = plain(found)
    runs |= {f"{name} {t}": dict(early_exit=make(t), exit_layers=layers) for t in (thresholds[0], thresholds[-1])}
result["tokens_per_second"] = speeds(runs, [prompts[at] for at in (0, 4, 8)][:TIMED])
show(str(result["tokens_per_second"]))
found = labkit.calibrate(
    lab, prompts, lambda t: labkit.EarlyExit(27, 2, stop=labkit.below(t)), (0.9, 0.5), target=0.3, max_new_tokens=COUNT
)
show(f"EarlyExit(27, 2, stop=below(t))\n{found}")
result["acceptance"] = {"EarlyExit(27, 2, stop=below(threshold))": plain(found)}
write_json(result, sys.argv[1])
