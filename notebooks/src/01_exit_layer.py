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
# # Which layer should I exit at?
#
# A draft from few layers is cheap and often wrong. One from many layers is right more often and costs almost as much as
# the model. Somewhere between them is the best layer, if there is one. Here you look for it by hand, and then measure.

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
prompt = "class Point:\n    def __init__(self, x, y):\n        self.x = x\n"
new_tokens = 32 if QUICK else 64

# %% [markdown]
# ## By hand
#
# Move the slider of the exit layer. What would have been accepted is replayed at once, from one pass over the plain
# text; then the run is measured. `Cancel` stops it between two rounds, `Pin` keeps a line to compare with.

# %%
explorer = labkit.view.exit_layer(lab, prompt, max_new_tokens=new_tokens)
explorer

# %% [markdown]
# What to see: the marks of the strip turn from struck to underlined as the exit goes up, and the tokens per round with
# them. The speed-up does not follow all the way, because each drafted token costs more.
#
# ## By measurement
#
# All exits in one table, on a few prompts, each in turn with plain decoding. Two runs at once would disturb each other,
# so the explorer's comes to its end first.

# %%
outcome = explorer.wait(300)
depth = lab.backbone.depth
exits = range(2, depth, 4 if QUICK else max(1, depth // 12))
prompts = [prompt, 'def read_lines(path):\n    """Return the lines of a file."""\n'][: 1 if QUICK else 2]
table = lab.compare(prompts, [labkit.EarlyExit(e, max_draft=3) for e in exits], max_new_tokens=new_tokens)
table

# %% [markdown]
# ## Acceptance and cost
#
# `tokens per round` is what a draft wins. `layers drafted per token` is what it costs in work: each of three drafted
# tokens reads the exit's layers, and the check reads the rest for all of them in one go.

# %%
measured = pd.DataFrame(
    {
        "exit layer": list(exits),
        "acceptance rate": [e.acceptance_rate for e in table.entries[1:]],
        "tokens per round": [e.tokens_per_round for e in table.entries[1:]],
        "layers drafted per token": [3 * x / e.tokens_per_round for x, e in zip(exits, table.entries[1:], strict=True)],
        "speed-up": [e.speedup for e in table.entries[1:]],
    }
).set_index("exit layer")
measured.round(2)

# %% [markdown]
# Notebook 04 asks the same of draft lengths, and says what a round has to yield to be worth its price.

# %%
best = measured["speed-up"].idxmax()
assert not any("DIFFERENT" in entry.same_text for entry in table.entries), "a draft changed the text"
print(
    f"Best of the exits measured: layer {best} of {depth}, {measured.loc[best, 'speed-up']:.2f} times plain decoding."
)
print("01_exit_layer: done")
