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
# # How do MLP heads compare, and how are they trained?
#
# A *head* is a small network that reads the model's last state and guesses the tokens behind the next one. Two kinds
# are compared here, and beside them an exit layer, bare and with an *adapter* that was trained to read it. The model
# checks all of them, so the text stays the same; what differs is how often they are right, and what they cost.

# %%
import os
import tempfile
from pathlib import Path

import pandas as pd

import labkit
import labkit.view
from labkit import EarlyExit, Heads
from labkit.costs import measure_costs
from labkit.doctor import doctor
from labkit.heads.adapter_files import load_adapter
from labkit.shipped import comes_with_labkit
from labkit.training.adapters import exit_adapter
from labkit.training.medusa import medusa
from labkit.training.mlp_speculator import mlp_speculator

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
][: 1 if QUICK else 3]
new_tokens = 32 if QUICK else 64

# %% [markdown]
# ## Three drafts
#
# - **MLPSpeculator**: one small recurrent network; each guess sees the guess before it.
# - **Medusa**: a network for each place; none sees what the others guess.
# - **Kangaroo's adapter**: one attention layer on the states of an exit layer.
#
# They belong to one model: `tiny` has some that come with labkit. For another model they are first trained here for a
# few steps (with SmolLM2 that takes minutes on a CPU), so that everything below runs, with drafts that are not good
# yet.

# %%
steps = 20 if QUICK else 80
folder = tempfile.TemporaryDirectory()
how = dict(corpus="package:asyncio", held_out=0.2, text_rows=4 * steps, length=128, batch=4, lr=0.002)
how |= dict(eval_rows=8, prompt_tokens=32, new_tokens=48, eval_every=steps // 4, save_every=steps)
recipes = {
    "mlp-speculator": lambda out: mlp_speculator(lab, out, text_steps=steps, own_steps=0, **how),
    "medusa": lambda out: medusa(lab, out, text_steps=steps, own_steps=0, **how),
    "kangaroo": lambda out: exit_adapter(lab, out, steps=steps, **how),
}
came = {name: comes_with_labkit(f"{MODEL}/{name}") for name in recipes}
places = {name: came[name] or train(Path(folder.name, name)).result for name, train in recipes.items()}

mlp, med = (labkit.load_heads(places[name], lab) for name in ("mlp-speculator", "medusa"))
adapter = load_adapter(places["kangaroo"], lab)
print("They come with labkit." if all(came.values()) else f"They were trained here, for {steps} steps.")

# %% [markdown]
# ## How they compare
#
# All draft three tokens in a row: a *chain*. The bare exit is the one that the adapter reads.

# %%
drafts = {
    "MLPSpeculator": Heads(mlp, top_k=(1, 1, 1)),
    "Medusa": Heads(med, top_k=(1, 1, 1)),
    "bare exit": EarlyExit(adapter.exit, max_draft=3),
    "exit with adapter": EarlyExit(adapter.exit, max_draft=3, adapter=adapter),
}
table = lab.compare(prompts, list(drafts.values()), max_new_tokens=new_tokens)
table

# %% [markdown]
# Tokens per round say how good a draft is, the speed-up says whether it is worth its price. The bars show the price:
# the part called *draft* is what heads, exit or adapter take of each new token. Heads run no layer of the model, so
# that they may be wrong more often than an exit and still be as fast.

# %%
labkit.view.cost_bars(table)

# %% [markdown]
# ## Acceptance by head
#
# Head 1 guesses the token behind the next one, head 2 the one behind that. On the left, how many guesses of a round
# were kept. On the right, each head by itself: of its guesses that were judged, those that were right.

# %%
labkit.view.acceptance(table.generations[repr(drafts["MLPSpeculator"])])

# %% [markdown]
# Often the right token is not a head's first choice, but its second or third. `head_accuracies` counts that, on texts
# that the model wrote itself. All that stands right of the first column is what a chain leaves and a tree can take.

# %%
others = ["class Stack:\n    def __init__(self):\n        self.items = []\n", "def read_lines(path):\n    "]
own = [lab.generate(text, max_new_tokens=2 * new_tokens) for text in others]
texts = [out.prompts[0] + out.tokens[0] for out in own]
accuracies = {"MLPSpeculator": labkit.head_accuracies(lab, mlp, texts, ranks=4)}
accuracies["Medusa"] = labkit.head_accuracies(lab, med, texts, ranks=4)
rows = {(name, f"head {i}"): row for name, rates in accuracies.items() for i, row in enumerate(rates, 1)}
pd.DataFrame.from_dict(rows, orient="index", columns=[f"choice {rank}" for rank in range(1, 5)]).round(3)

# %% [markdown]
# ## Chain or tree?
#
# A *product tree* takes the best 4, 3 and 2 guesses of the three heads, and keeps the 12 likeliest paths. A *fixed
# tree* has the same shape in every round; `best_tree` chooses it by the accuracies above, here with 6 nodes, twice as
# many as the chain. All nodes of a tree are checked in one pass.

# %%
shapes = {}
for name, heads in (("MLPSpeculator", mlp), ("Medusa", med)):
    shapes[name, "chain"] = Heads(heads, top_k=(1, 1, 1))
    shapes[name, "fixed tree"] = Heads(heads, tree=labkit.best_tree(accuracies[name], 6))
    shapes[name, "product tree"] = Heads(heads, top_k=(4, 3, 2), candidates=12)
trees = lab.compare(prompts, list(shapes.values()), max_new_tokens=new_tokens)
pd.DataFrame(
    [(d.nodes, e.tokens_per_round, e.speedup) for d, e in zip(shapes.values(), trees.entries[1:], strict=True)],
    columns=["nodes, at most", "tokens per round", "speed-up"],
    index=pd.MultiIndex.from_tuples(shapes),
).round(2)

# %% [markdown]
# A tree has more tokens per round than the chain, and its check takes longer. On a GPU a check of a few more nodes
# costs next to nothing; on a CPU each node costs. So the same tree may pay on one and not on the other.
#
# ## How long a chain?
#
# Nothing has to be run again for that: what the heads would say at every place of the plain text is known after one
# pass (`labkit.replay`). With the measured prices of a guess and of a check, the speed-up follows.

# %%
plain = table.generations["Plain()"]
step = sum(sum(out.phase_seconds.values()) for out in plain) / sum(out.row_rounds for out in plain)
price = {}
for name in ("MLPSpeculator", "Medusa"):
    outs = table.generations[repr(drafts[name])]
    price[name] = sum(out.phase_seconds["draft"] for out in outs) / sum(out.drafted for out in outs) / step
told = labkit.replay(lab, plain, exits=[adapter.exit], heads={"MLPSpeculator": mlp, "Medusa": med}, max_draft=3)
surface = told.surface(measure_costs(lab, drafts={"ngram": 0.0, **price}), thresholds=[None])
surface = surface.rename(columns={"tokens_per_round": "tokens per round", "predicted_speedup": "speed-up"})
surface.pivot(index="source", columns="max_draft", values=["tokens per round", "speed-up"]).round(2)

# %% [markdown]
# `max_draft` is the length. The number among the sources is the exit layer; `ngram` is prompt lookup, which needs no
# training at all.
#
# ## How they are trained
#
# The model itself never changes. Its last states are computed once and kept; then a head learns to say the text's own
# tokens from them. A real run has two stages: first on text, then on what the model itself writes, because that is what
# a draft has to foretell. Here is a little of the first one.

# %%
run = mlp_speculator(lab, Path(folder.name, "mlp-speculator"), text_steps=steps, own_steps=0, **how)
labkit.view.curves(run, "head")

# %% [markdown]
# On the right, how often each head says the model's own token, on files that it has not learnt from; it is told the
# tokens before, which in a run it has to guess. The heads are a folder, and load like any others:

# %%
brief = labkit.load_heads(run.result, lab)
after = labkit.replay(lab, plain, exits=[], ngram=False, heads={"here": brief, "from above": mlp}, max_draft=3)
print(f"{after.tokens_per_round('here', 3):.2f} tokens per round after {steps} steps,")
print(f"{after.tokens_per_round('from above', 3):.2f} with those compared above.")

# %% [markdown]
# From a shell it is the same recipe, with the same arguments:

# %%
options = {"text_steps": steps, "own_steps": 0, **how}
words = [f"--{name.replace('_', '-')} {value}" for name, value in options.items()]
print(f"labkit train mlp-speculator runs/mlp --model {MODEL}", *words)

# %% [markdown]
# Left to its defaults, it learns for 2,000 steps on text and 1,000 on the model's own writing. `labkit train medusa`
# and `labkit train exit-adapter` go the same way. `labkit bench` takes the result:
# `--drafters "Heads('runs/mlp/stage2/trained', top_k=(1, 1, 1))"`. The commands that made the heads of `tiny` are in
# `data/tiny/README.md`; each took some minutes on a CPU.

# %%
measured = {e.name: e.tokens_per_round for e in table.entries}
for name in ("MLPSpeculator", "Medusa"):
    assert abs(told.tokens_per_round(name, 3) - measured[repr(drafts[name])]) < 0.05, "replayed is not what was run"
assert not any("DIFFERENT" in e.same_text for e in [*table.entries, *trees.entries]), "a draft changed the text"
losses = [row["loss"] for row in run.curves if "loss" in row]
assert losses[-1] < losses[0], "nothing was learnt"
best = max(trees.entries[1:], key=lambda entry: entry.tokens_per_round)
print(f"Most tokens per round of the heads: {best.name}, {best.tokens_per_round:.2f}.")
print("08_heads: done")
