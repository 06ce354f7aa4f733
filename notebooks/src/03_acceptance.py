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
# # Which tokens are rejected, and why?
#
# An acceptance rate is one number for many tokens. Here it is taken apart: by round, by place in
# the draft, and by token.

# %%
import os

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
new_tokens = 48 if QUICK else 160

# %% [markdown]
# ## A draft to look at
#
# The exit should be right often, but not always: the first layer whose guesses are accepted with a chance of one half.
# One pass over the plain text tells which one that is.

# %%
told = labkit.replay(lab, lab.generate(prompt, max_new_tokens=new_tokens), ngram=False, max_draft=4)
exit_layer = next((e for e in told.sources if told.rounds(e, 4).alpha >= 0.5), told.sources[-1])
out = lab.generate(prompt, labkit.EarlyExit(exit_layer, max_draft=4), max_new_tokens=new_tokens)
out

# %% [markdown]
# ## The text, token by token
#
# Most rejections stand where a name or a string begins; what only completes a word is nearly always accepted.

# %%
labkit.view.strip(out)

# %% [markdown]
# ## By round, and by place in the draft
#
# On the left, how many of the drafted tokens were accepted in each round. A mean of two may be two in every round, or
# none in half of the rounds and four in the others; the second calls for a draft that knows when to stop.
#
# On the right, the share of judged tokens that was accepted. Only tokens whose predecessors were all accepted are
# judged, so later places have fewer of them, and wider intervals.

# %%
labkit.view.acceptance(out)

# %% [markdown]
# ## The worst tokens
#
# Those of which the draft was surest, and wrong. Beside each stands what the model said instead. Where the model gave
# the drafted token nearly as much probability, it was a matter of taste; where it gave none, the early layers were
# wrong.

# %%
tokens = out.to_pandas(level="token")
judged = tokens[tokens["kind"].isin(["accepted", "rejected"])]
rejected = tokens[tokens["kind"] == "rejected"].sort_values("draft_probability", ascending=False)
worst = rejected[["round", "text", "draft_probability", "target_probability", "target_text"]].head(10)
worst.round(3)

# %% [markdown]
# ## Does the draft know?
#
# If an accepted token has on average a higher draft probability than a rejected one, a stop rule can use that:
# `Until(below(0.5), …)` ends the draft behind a token of which the draft itself was not sure.

# %%
sure = judged.groupby("kind")["draft_probability"].describe()[["count", "mean", "25%", "50%", "75%"]]
sure = sure.reindex(["accepted", "rejected"])
sure.round(2)

# %%
assert len(tokens[tokens["kind"] == "accepted"]) == out.accepted and len(judged) <= out.drafted
print(f"{out.accepted} of {out.drafted} drafted tokens accepted; draft probability {sure.loc['accepted', 'mean']:.2f}")
print(f"for accepted tokens and {sure.loc['rejected', 'mean']:.2f} for rejected ones.")
print("03_acceptance: done")
