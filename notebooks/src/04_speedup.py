# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#       format_version: '1.3'
#       jupytext_version: 1.19.6
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # When is it faster?
#
# A round of γ drafted tokens costs γ times the price `c` of a draft and once the price `v` of a check, both in plain
# steps. It yields some number of tokens. The draft pays if that number is larger than `γ c + v`.

# %%
import os

import pandas as pd

import labkit
import labkit.view
from labkit.costs import measure_costs
from labkit.doctor import doctor, machine

print(doctor().splitlines()[0])

# %% tags=["parameters"]
MODEL = "tiny"
DEVICE = "cpu"
QUICK = os.environ.get("LABKIT_QUICK") == "1"

# %%
lab = labkit.load(MODEL, device=DEVICE)
prompts = [
    'def parse_args(argv=None):\n    """Parse the command line."""\n    parser = argparse.ArgumentParser(',
    "class Point:\n    def __init__(self, x, y):\n        self.x = x\n",
]
new_tokens = 32 if QUICK else 64

# %% [markdown]
# ## The prices
#
# Layers and head are timed by themselves, with nothing else going on. `c` rises with the exit layer. `v` rises with the
# draft length where the machine is busy with each row, as a CPU is; on a GPU it hardly does.

# %%
depth = lab.backbone.depth
costs = measure_costs(lab)
exits = [depth // 3, depth * 2 // 3] if QUICK else [depth // 6, depth // 3, depth // 2, depth * 2 // 3]
lengths = [2, 4] if QUICK else [1, 2, 4]
prices = pd.DataFrame(
    {f"v, γ = {k}": [costs(e, k)[1] for e in exits] for k in lengths}, index=pd.Index(exits, name="exit layer")
)
prices.insert(0, "c", [costs(e, 1)[0] for e in exits])
prices.round(2)

# %% [markdown]
# ## What would happen, everywhere
#
# The greedy text is the same whatever drafts it. So one pass over it tells what every exit layer would have guessed at
# every place, and thus every round of every draft length. Times the prices, that is the speed-up of the whole grid,
# without decoding once more.

# %%
plain = [lab.generate(prompt, max_new_tokens=new_tokens) for prompt in prompts]
surface = labkit.replay(lab, plain, max_draft=8, ngram=False).surface(costs, thresholds=[None])
surface.pivot(index="exit_layer", columns="max_draft", values="predicted_speedup").round(2)

# %% [markdown]
# ## What does happen
#
# Part of the grid is run: each strategy in turn with plain decoding, on each prompt, more than once.

# %%
grid = [labkit.EarlyExit(e, max_draft=k) for e in exits for k in lengths]
runs = labkit.sweep(lab, prompts, grid, max_new_tokens=new_tokens, repeats=1 if QUICK else 2)
measured = runs.to_pandas()
measured[["exit_layer", "max_draft", "speedup_q1", "speedup", "speedup_q3", "tokens_per_round", "alpha"]].round(2)

# %% [markdown]
# Both on one chart. Hollow marks are foretold, full ones with bars are measured. The dashed line is what α, c and v
# alone would give, if every drafted token were accepted with the same chance α. Measured below foretold is time that
# the loop takes besides the model; points that scatter are a machine that does other things too.

# %%
where = machine(lab.backbone)
caption = f"{where['model']}, {where['device']}, {where['dtype']}, {where['threads']} threads"
caption += f"; exit {exits[0]}: c {costs(exits[0], 1)[0]:.2f}, v {costs(exits[0], 4)[1]:.2f} (γ = 4)"
labkit.view.speedup(surface, measured, caption, max_drafts=lengths)

# %% [markdown]
# ## Where the time goes
#
# Milliseconds for each new token, by part of the work: the exit that was foretold to be the best, a deeper one, and a
# draft that costs nothing. A draft that is accepted makes all parts shorter; a draft that is rejected is pure cost.
# This is why many accepted tokens can still be slow.

# %%
best = surface.loc[surface["predicted_speedup"].idxmax()]
foretold = labkit.EarlyExit(int(best["exit_layer"]), max_draft=int(best["max_draft"]))
deep = labkit.EarlyExit(depth - 2, max_draft=4)
comparison = lab.compare(prompts, [foretold, deep, labkit.PromptLookup(max_draft=4)], max_new_tokens=new_tokens)
labkit.view.cost_bars(comparison)

# %% [markdown]
# ## Tokens per round against the price of a round
#
# Points above the line of speed-up 1 are faster than plain decoding. To get there, a strategy must rise faster than it
# moves to the right.

# %%
labkit.view.pareto(comparison)

# %% [markdown]
# ## What would be needed
#
# The price of a round, taken from the runs themselves, is also the number of tokens that a round must yield to break
# even.

# %%
price = measured[[name for name in measured if name.endswith("_ms")]].sum(axis=1)
measured["to break even"] = price / price[measured["exit_layer"].isna()].iloc[0]
needed = measured[["exit_layer", "max_draft", "tokens_per_round", "to break even", "speedup"]].dropna()
needed.round(2)

# %%
fastest = needed.loc[needed["speedup"].idxmax()]
assert not runs.errors and not any("DIFFERENT" in entry.same_text for entry in comparison.entries)
print(f"Foretold: {foretold}, {best['predicted_speedup']:.2f} times plain decoding.")
print(f"Measured: exit {fastest['exit_layer']:.0f}, γ = {fastest['max_draft']:.0f}: {fastest['speedup']:.2f} times,")
print(f"with {fastest['tokens_per_round']:.2f} tokens per round where {fastest['to break even']:.2f} are needed.")
print("04_speedup: done")
