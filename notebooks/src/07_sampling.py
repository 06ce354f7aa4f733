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
# # With sampling, is it still the same distribution?
#
# A greedy text can be compared token by token. A sampled one is a draw, so that the question is about its law: does the
# model with a draft produce each text as often as the model alone? Here it is asked of many seeds.

# %%
import os
from collections import Counter

import numpy as np
import pandas as pd
import torch

import labkit
from labkit.doctor import doctor

print(doctor().splitlines()[0])

# %% tags=["parameters"]
MODEL = "tiny"
DEVICE = "cpu"
QUICK = os.environ.get("LABKIT_QUICK") == "1"

# %% [markdown]
# ## The law, exactly
#
# Sampling is limited to the 4 likeliest tokens. Two new tokens then have 16 possible values, and their probabilities
# can be written down from five forward passes.

# %%
lab = labkit.load(MODEL, device=DEVICE, dtype="float32")  # a coarser one would round the law itself
prompt = "import os\nimport sys\n\n\ndef main():\n    "
ids = lab.tokenizer(prompt).input_ids
choices = 4


@torch.inference_mode()
def next_law(ids):
    """The probabilities of the next token."""
    best = lab.model(torch.tensor([ids], device=lab.model.device)).logits[0, -1].double().topk(choices)
    return dict(zip(best.indices.tolist(), best.values.softmax(-1).tolist(), strict=True))


law = pd.Series({(a, b): p * q for a, p in next_law(ids).items() for b, q in next_law([*ids, a]).items()})
pd.DataFrame({"text": [repr(lab.decode(pair)) for pair in law.index], "probability": law.round(3).values}).head(6)

# %% [markdown]
# ## Many seeds
#
# Each strategy writes the two tokens for many seeds: a batch of equal prompts gets a seed for each row. The
# *total variation* between what was counted and the law is half of the sum of the absolute differences: 0 for equal
# laws, 1 for laws that share nothing. It is not 0 even for a perfect sampler, because counts are random. How large it
# is then, we learn by drawing from the law itself: that is the noise band.

# %%
draws = 500 if QUICK else 2000


def counted(drafter, acceptance):
    """How often each pair was written."""
    found = Counter()
    for first in range(0, draws, 250):
        options = dict(temperature=1.0, top_k=choices, max_new_tokens=3, seed=first, eos_token_id=None)
        out = lab.generate([ids] * 250, drafter, acceptance=acceptance, **options)
        found.update((row[0], row[1]) for row in out.tokens)
    return found


def distance(found):
    """The total variation between counts and the law."""
    return sum(abs(found.get(pair, 0) / draws - p) for pair, p in law.items()) / 2 + sum(
        count for pair, count in found.items() if pair not in law.index
    ) / (2 * draws)


random = np.random.default_rng(0)
perfect = random.multinomial(draws, law.values / law.sum(), size=2000) / draws
low, high = np.quantile(abs(perfect - law.values).sum(1) / 2, [0.001, 0.999])
print(f"A perfect sampler is between {low:.4f} and {high:.4f} from the law, in 998 of 1000 experiments.")

# %% [markdown]
# `Match` (the default) and `Rejection` are lossless. `Typical` is not: it keeps whatever the model finds likely enough.
# It is here to show that the measurement can tell. For that the draft has to be wrong often, but not always: the exit
# is the first one that is right about every other time.

# %%
told = labkit.replay(lab, lab.generate(prompt, max_new_tokens=48), ngram=False, max_draft=2)
exit_layer = next((e for e in told.sources if told.rounds(e, 2).alpha >= 0.5), told.sources[-1])
early = labkit.EarlyExit(exit_layer, max_draft=2)
runs = {
    "plain": (None, labkit.Match()),
    "early exit, Match": (early, labkit.Match()),
    "early exit, Rejection": (early, labkit.Rejection()),
    "early exit, Typical (lossy)": (early, labkit.Typical()),
}
counts = {name: counted(*run) for name, run in runs.items()}
table = pd.DataFrame({"total variation": {name: distance(found) for name, found in counts.items()}})
table["like a perfect sampler"] = ["yes" if low <= d <= high else "no" for d in table["total variation"]]
table.round(4)

# %% [markdown]
# ## One text for each seed
#
# `Match` gives more than an equal law. The noise of each place belongs to the seed, and draft and model use the same.
# So a seed has *one* text, whatever drafts it: a change of strategy changes the time and nothing else.

# %%
several = [None, early, labkit.PromptLookup(), labkit.Union(early, labkit.PromptLookup())]
outs = [lab.generate(prompt, d, temperature=0.8, seed=11, max_new_tokens=24 if QUICK else 64) for d in several]
print(outs[0].text)
pd.DataFrame(
    [(o.settings["drafter"], len(o.rounds), o.tokens == outs[0].tokens) for o in outs],
    columns=["drafter", "rounds", "same text"],
)

# %%
lossless = table.index[:3]
assert (table.loc[lossless, "like a perfect sampler"] == "yes").all(), "a lossless strategy changed the law"
assert table["like a perfect sampler"].iloc[3] == "no", "the measurement cannot tell a lossy rule from a lossless one"
assert all(o.tokens == outs[0].tokens for o in outs), "a seed has more than one text"
print("Match and Rejection keep the law, Typical does not; a seed has one text under four strategies.")
print("07_sampling: done")
