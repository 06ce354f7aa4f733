"""Whether memory grows over 2,000 tokens on SmolLM2-135M: python data/results/memory.py FILE."""

import sys

import labkit
from labkit.bench import write_json
from labkit.doctor import machine
from labkit.lab import _Run

COUNT, MARKS = 2000, (10, 80, 160, 320, 720, 1120, 1520, 1920)


def anonymous_mb() -> float:
    """Memory of this process that is not mapped from a file (Linux)."""
    with open("/proc/self/status") as status:
        return int(next(line for line in status if line.startswith("RssAnon")).split()[1]) / 1024


lab = labkit.load("smollm2-135m", device="cpu")
rows = []
for drafter in (labkit.Plain(), labkit.PromptLookup(), labkit.EarlyExit(24, max_draft=2)):
    run = _Run(lab, "Once upon a time", drafter, {"max_new_tokens": COUNT, "eos_token_id": None})
    marks, tokens = [], 0
    for happened in run.rounds():
        tokens += len(happened.tokens[0])
        del happened
        if len(marks) < len(MARKS) and tokens >= MARKS[len(marks)]:
            marks.append({"tokens": tokens, "anonymous_mb": round(anonymous_mb(), 1)})
    rows.append({"name": repr(drafter), "cache_mb": round(run.session.cache.nbytes / 2**20, 1), "marks": marks})
    print(rows[-1], flush=True)
result = {"machine": machine(lab.backbone), "command": f"python data/results/memory.py {sys.argv[1]}", "rows": rows}
write_json(result, sys.argv[1])
