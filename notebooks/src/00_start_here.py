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
# # What is speculative decoding, and does it work here?
#
# A language model writes one token for each pass through all of its layers. Speculative decoding lets something
# cheap *draft* a few tokens, and the model checks them all in a single pass. It keeps those that it would have
# written itself. So the text stays the same, and the number of passes falls.

# %%
import os

import labkit
import labkit.view
from labkit.doctor import doctor

print(doctor().splitlines()[0])

# %% [markdown]
# Change `MODEL` to `"smollm2-135m"`, a folder or a hub id, and `DEVICE` to `"cuda"`, and run all cells again.

# %% tags=["parameters"]
MODEL = "tiny"
DEVICE = "cpu"
QUICK = os.environ.get("LABKIT_QUICK") == "1"

# %% [markdown]
# ## Plain decoding
#
# The model that comes with labkit is very small and has read only Python. It continues a file.

# %%
lab = labkit.load(MODEL, device=DEVICE)
prompt = 'def parse_args(argv=None):\n    """Parse the command line."""\n    parser = argparse.ArgumentParser('
new_tokens = 32 if QUICK else 96

plain = lab.generate(prompt, max_new_tokens=new_tokens)
plain

# %% [markdown]
# ## The same with a draft
#
# `EarlyExit` drafts with the first layers of the model itself: no second model, no training. Here four tokens are
# guessed after the first five twelfths of the layers. The remaining layers then check the four together.

# %%
exit_layer = lab.backbone.depth * 5 // 12
drafted = lab.generate(prompt, labkit.EarlyExit(exit_layer, max_draft=4), max_new_tokens=new_tokens)
drafted

# %% [markdown]
# The text is the same, and with `tiny` it took fewer rounds. A *round* is one draft and one check; it always adds one
# token of the model's own, so that it never gives less than plain decoding. (The early layers of an ordinary model,
# such as SmolLM2, are hardly ever right; then the rounds are as many. Notebook 01 looks for a better exit.)
#
# ## What happened, token by token
#
# Accepted guesses are underlined, rejected ones are struck through, and the model's own tokens stand in bold with a
# double line. Point at a token to see how sure the draft was, and how sure the model.

# %%
labkit.view.strip(drafted)

# %% [markdown]
# ## Is it faster?
#
# That depends on how often the guesses are right, and on what they cost. `compare` runs several strategies on the same
# prompt, in turn with plain decoding. `PromptLookup` guesses that what followed the last three tokens before will
# follow again; such a guess costs next to nothing.

# %%
strategies = [
    labkit.PromptLookup(max_draft=4),
    labkit.EarlyExit(exit_layer, max_draft=2),
    labkit.EarlyExit(exit_layer, max_draft=4),
]
table = lab.compare(prompt, strategies, max_new_tokens=new_tokens)
table

# %% [markdown]
# "Same text: yes" is checked, not assumed: the tokens are compared with those of plain decoding. A speed-up below 1
# is a strategy that costs more than it saves. Many accepted tokens are no guarantee: notebook 04 explains why.
#
# ## Which layer?
#
# Move the slider. The picture changes at once, from one recorded pass; the measured run follows.

# %%
explorer = labkit.view.exit_layer(lab, prompt, max_new_tokens=new_tokens)
explorer

# %% [markdown]
# Notebook 01 goes on from here.

# %%
assert not any("DIFFERENT" in entry.same_text for entry in table.entries), "a draft changed the text"
print(f"The same {drafted.new_tokens} tokens in {len(drafted.rounds)} rounds instead of {len(plain.rounds)}.")
print("00_start_here: done")
