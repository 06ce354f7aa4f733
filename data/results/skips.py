"""How well sets of skipped sub-layers draft, and what they cost: python data/results/skips.py FILE.

For each ratio a set is searched on the first prompt of a few kinds, and measured on the second. On the fly: a set that
is searched while decoding. A draft of which nothing is skipped (the self-draft) stands beside them.

Found on two cores of a CPU, 2026-12-02: no set pays. A draft token must cost less the less of it is accepted; with a
tenth of the inner sub-layers skipped it costs 0.93 of a plain step and 0.82 of the tokens are accepted (alpha), with
0.45 it costs 0.68 and alpha is 0.36: 0.83 to 0.59 of plain decoding's speed. The head and the kept layers remain.
Searching on the fly adds two forwards over 50 rows every second round, more than 32 new tokens can pay back.
"""

import sys
import time

import labkit
from labkit.bench import bench, report, write_json
from labkit.cli import as_ids, read_prompt_files
from labkit.drafters import OnTheFly

RATIOS, STEPS, COUNT, MAX_DRAFT = (0.1, 0.2, 0.3, 0.45), 30, 32, 2

lab = labkit.load("smollm2-135m", device="cpu")
names = ("arithmetic", "chat", "code", "translation")
search_on, measure_on = (as_ids(lab, [read_prompt_files([name])[at] for name in names]) for at in (0, 1))
found, searches = [], []
for ratio in RATIOS:
    began = time.perf_counter()
    best = labkit.search_skips(lab, search_on, ratio=ratio, steps=STEPS, seed=0, max_new_tokens=COUNT)
    found.append(best)
    searches.append({
        "ratio": ratio, "attention": best.attention, "mlp": best.mlp, "score_of_even_set": best.history[0],
        "score": best.score, "history": best.history, "steps": STEPS, "seconds": time.perf_counter() - began,
    })  # fmt: skip
    print(
        f"ratio {ratio}: agreement {best.history[0]:.3f} -> {best.score:.3f}, {best.attention}, {best.mlp}", flush=True
    )
drafters = [labkit.SkipLayers(max_draft=MAX_DRAFT), *(best.drafter(MAX_DRAFT) for best in found)]
drafters += [labkit.SkipLayers(max_draft=MAX_DRAFT, search=OnTheFly(every=2, ratio=0.1))]
result = bench(lab, measure_on, drafters, max_new_tokens=COUNT)
result["searches"] = searches
result["command"] = "python data/results/skips.py " + sys.argv[1]
print(report(result))
write_json(result, sys.argv[1])
