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
from labkit.doctor import doctor

print(doctor().splitlines()[0])

# %% tags=["parameters"]
MODEL = "tiny"
DEVICE = "cpu"
QUICK = os.environ.get("LABKIT_QUICK") == "1"

# %%
lab = labkit.load(MODEL, device=DEVICE)
prompt = 'def parse_args(argv=None):\n    """Parse the command line."""\n    parser = argparse.ArgumentParser('
new_tokens = 32 if QUICK else 96

# %% [markdown]
# ## Measured
#
# A grid of exit layers and draft lengths, each in turn with plain decoding.

# %%
depth = lab.backbone.depth
exits = [depth // 3, depth // 2] if QUICK else [depth // 4, depth // 3, depth * 5 // 12, depth // 2, depth * 2 // 3]
lengths = [2, 4] if QUICK else [1, 2, 4, 6]
settings = [(e, k) for e in exits for k in lengths]
comparison = lab.compare(prompt, [labkit.EarlyExit(e, max_draft=k) for e, k in settings], max_new_tokens=new_tokens)
measured = pd.DataFrame(
    [
        (e, k, entry.tokens_per_round, entry.speedup)
        for (e, k), entry in zip(settings, comparison.entries[1:], strict=True)
    ],
    columns=["exit layer", "γ", "tokens per round", "speed-up"],
)
measured.pivot(index="exit layer", columns="γ", values="speed-up").round(2)

# %% [markdown]
# ## Where the time goes
#
# Milliseconds for each new token, by part of the work. A draft that is accepted makes all parts shorter; a draft that
# is rejected is pure cost. This is why many accepted tokens can still be slow.

# %%
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
# The price of a round, taken from the run itself, is also the number of tokens that a round must yield to break even.

# %%
plain = comparison.generations["Plain()"][0]
step = sum(plain.phase_seconds.values()) / plain.row_rounds
runs = [outs[0] for name, outs in comparison.generations.items() if name != "Plain()"]
measured["to break even"] = [sum(run.phase_seconds.values()) / run.row_rounds / step for run in runs]
measured.round(2)

# %%
best = measured.loc[measured["speed-up"].idxmax()]
assert all(entry.same_text == "yes" for entry in comparison.entries), "a draft changed the text"
print(f"Best: exit {best['exit layer']:.0f}, γ = {best['γ']:.0f}: {best['speed-up']:.2f} times plain decoding,")
print(f"with {best['tokens per round']:.2f} tokens per round where {best['to break even']:.2f} are needed.")
print("04_speedup: done")
