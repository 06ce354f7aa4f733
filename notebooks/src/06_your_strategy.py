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
# # How do I write a strategy of my own, and use my model?
#
# A strategy is a frozen dataclass with one method, `propose`. It sees the text so far and returns a draft. The loop
# verifies it, so that a bad strategy can cost time, but cannot change the text.

# %%
import os
from dataclasses import dataclass

import torch

import labkit
from labkit import Context, Draft, Drafter, LabkitError
from labkit.doctor import doctor

print(doctor().splitlines()[0])

# %% tags=["parameters"]
MODEL = "tiny"
DEVICE = "cpu"
QUICK = os.environ.get("LABKIT_QUICK") == "1"

# %% [markdown]
# The model is loaded in double precision. Then two texts that differ are an error, never rounding.

# %%
lab = labkit.load(MODEL, device=DEVICE, dtype="float64")
prompt = "class Point:\n    def __init__(self, x, y):\n        self.x = x\n"
new_tokens = 24 if QUICK else 64

# %% [markdown]
# ## The strategy
#
# The guess: what followed the last token when it occurred before will follow it again. `tokens` holds a row of ids for
# each text of the batch, of which the first `n` are written; `length` says how many levels still fit. Everything is
# done for all rows at once, and nothing is copied to the host. A row that has no guess marks its nodes as not valid.


# %%
@dataclass(frozen=True)
class LastTime(Drafter):
    """Draft what followed the last token the last time."""

    max_draft: int = 4

    @property
    def nodes(self) -> int:
        return self.max_draft

    def propose(self, state, context: Context) -> Draft:
        tokens, n = context.tokens, context.n[:, None]
        place = torch.arange(tokens.shape[1], device=tokens.device)
        before = (tokens == tokens.gather(1, n - 1)) & (place < n - 1)
        found = torch.where(before, place, -1).amax(1, keepdim=True)  # -1: nowhere
        take = found + 1 + place[: context.length(self.max_draft)]
        return Draft.chain(tokens.gather(1, take.clamp_max(tokens.shape[1] - 1)), valid=(found >= 0) & (take < n))


lab.compare(prompt, [LastTime(), labkit.PromptLookup(max_draft=4)], max_new_tokens=new_tokens)

# %% [markdown]
# ## The check
#
# A strategy conforms if it never changes the text: greedy or sampled, alone or in a batch of unlike lengths, with much
# room or with room for one token only. Sampling has one text too, because the target draws with noise that belongs to
# the seed and the place, whatever was drafted.


# %%
def conforms(lab, drafter):
    """Whether a strategy leaves the text alone, case by case."""
    batch = [prompt, "import os\n\n\n\n", prompt + "        self.y = y\n"]
    cases = {
        "greedy": (prompt, dict(max_new_tokens=new_tokens)),
        "sampled": (prompt, dict(max_new_tokens=new_tokens, temperature=1.0, seed=7)),
        "a batch": (batch, dict(max_new_tokens=new_tokens)),
        "a batch, sampled": (batch, dict(max_new_tokens=new_tokens, temperature=1.0, seed=7)),
        "room for one token": (prompt, dict(max_new_tokens=1)),
        "room for two tokens": (prompt, dict(max_new_tokens=2)),
    }
    plain = {name: lab.generate(text, **options).tokens for name, (text, options) in cases.items()}
    return {
        name: lab.generate(text, drafter, **options).tokens == plain[name] for name, (text, options) in cases.items()
    }


verdict = conforms(lab, LastTime())
verdict

# %% [markdown]
# ## A deliberate error, and its cure
#
# This one guesses that the text goes on with the token before the last one, if the last two differ. Where they do not,
# it writes -1, as one would in a list. The loop stops at once, and says which strategy was wrong and how.


# %%
@dataclass(frozen=True)
class Alternate(Drafter):
    """Draft the token before the last, where the last two differ."""

    nodes = 1

    def propose(self, state, context: Context) -> Draft:
        n, wanted = context.n[:, None], context.length(self.nodes)
        last, earlier = context.tokens.gather(1, n - 1), context.tokens.gather(1, (n - 2).clamp_min(0))
        return Draft.chain(torch.where(last != earlier, earlier, -1)[:, :wanted])


try:
    conforms(lab, Alternate())
    message = ""
except LabkitError as error:
    message = str(error)
print(message)

# %% [markdown]
# A draft has one fixed shape for the whole batch. Rows that propose less say so with `valid`, and put any id there.


# %%
@dataclass(frozen=True)
class Cured(Alternate):
    """The same, with a guess that is marked as none."""

    def propose(self, state, context: Context) -> Draft:
        n, wanted = context.n[:, None], context.length(self.nodes)
        last, earlier = context.tokens.gather(1, n - 1), context.tokens.gather(1, (n - 2).clamp_min(0))
        return Draft.chain(earlier[:, :wanted], valid=(last != earlier)[:, :wanted])


cured = conforms(lab, Cured())
cured

# %% [markdown]
# ## Your model
#
# `labkit.Lab` takes any causal model of transformers, with or without a tokenizer. It is probed first: a model that
# labkit cannot run exactly is refused with the reason. Here is one with random weights; a prompt is then a list of ids.

# %%
from transformers import LlamaConfig, LlamaForCausalLM

config = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4)
mine = labkit.Lab(LlamaForCausalLM(config).double().eval())
mine.compare([1, 2, 3, 1, 2, 3], [LastTime(), labkit.EarlyExit(2)], max_new_tokens=new_tokens)

# %%
assert all(verdict.values()) and all(cured.values()) and "Alternate" in message
print(f"LastTime conforms in {len(verdict)} of {len(verdict)} cases; the error named its strategy, and the cure holds.")
print("06_your_strategy: done")
