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
# # Do combinations beat their parts?
#
# Strategies nest. `Fallback(a, b)` asks `b` where `a` has no guess, `Union(a, b)` has both guesses checked at once,
# `Until(stop, a)` ends a draft early, and `Adaptive` chooses each round by what it has seen. Each is taken apart here:
# an *ablation* leaves one part out at a time.

# %%
import os

import pandas as pd

import labkit
import labkit.view
from labkit import Adaptive, EarlyExit, Fallback, PromptLookup, Union, Until, below
from labkit.doctor import doctor

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
    "import os\nimport sys\n\n\ndef main():\n",
][: 2 if QUICK else 3]
new_tokens = 32 if QUICK else 96

# %% [markdown]
# ## Parts and wholes
#
# The parts first, then what is made of them. All run on the same prompts, in turn with plain decoding.

# %%
exit_layer = lab.backbone.depth * 5 // 12
look, early = PromptLookup(max_draft=4), EarlyExit(exit_layer, max_draft=4)
strategies = {
    "look": look,
    "early": early,
    "early, until unsure": Until(below(0.5), early),
    "look, else early": Fallback(look, early),
    "look, else early until unsure": Fallback(look, Until(below(0.5), early)),
    "both in one tree": Union(early, look),
    "the best so far": Adaptive([look, early]),
}
table = lab.compare(prompts, list(strategies.values()), max_new_tokens=new_tokens)

entries = pd.DataFrame(
    [(e.tokens_per_round, e.acceptance_rate, e.tokens_per_second, e.speedup, e.same_text) for e in table.entries],
    columns=["tokens per round", "acceptance rate", "tokens/s", "speed-up", "same text"],
    index=["plain", *strategies],
)
entries.round(2)

# %% [markdown]
# ## What each part adds
#
# For a combination to be worth it, it has to beat the *best* of its parts, not their mean. Two figures say why it does
# or does not. Tokens per round can hardly fall when a part is added; the speed-up can, because every part costs time.

# %%
parts = {
    "early, until unsure": ["early"],
    "look, else early": ["look", "early"],
    "look, else early until unsure": ["look", "early, until unsure"],
    "both in one tree": ["look", "early"],
    "the best so far": ["look", "early"],
}
speed, per_round = entries["speed-up"], entries["tokens per round"]
gains = pd.DataFrame(
    {
        "tokens per round, over the best part": {w: per_round[w] - per_round[p].max() for w, p in parts.items()},
        "speed-up, over the best part": {w: speed[w] - speed[p].max() for w, p in parts.items()},
    }
)
gains.round(2)

# %% [markdown]
# ## By hand
#
# Put one together: the form is how the parts are joined, the sliders are the parts' own settings. Each change is
# measured, the whole beside its parts and plain decoding; the strip is the whole's, and the bars say what it costs.
# `Pin` keeps a line to compare with; below the table the strategy is written in Python.

# %%
builder = labkit.view.strategy_builder(lab, prompts[0], max_new_tokens=new_tokens)
builder

# %% [markdown]
# What to see: set *Stop below* to 0.5. The draft ends where it is unsure; its acceptance rate rises, tokens per round
# fall a little, and the part of the bar that is called *draft* gets shorter.

# %%
outcome = builder.wait(300)
assert not entries["same text"].str.contains("DIFFERENT").any(), "a combination changed the text"
winners = gains.index[gains["speed-up, over the best part"] > 0]
print(f"{len(winners)} of {len(gains)} combinations beat the best of their parts: {', '.join(winners) or 'none'}.")
print("05_compose: done")
