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
# # When does the model know?
#
# Every layer can be read as if it were the last: its state goes through the model's own head, and gives a next token
# and a probability. So one can see from which layer on the answer no longer changes, and whether the model is sure by
# then.

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
prompt = "class Point:\n    def __init__(self, x, y):\n        self.x = x\n"
out = lab.generate(prompt, max_new_tokens=24 if QUICK else 96)
layers = labkit.layers(lab, out)
layers

# %% [markdown]
# ## Layer by position
#
# Each cell shows the token that a layer puts first, and the colour how much probability it gives it. The frame marks
# the layer from which on that token is the final one for good.

# %%
labkit.view.heatmap(layers)

# %% [markdown]
# ## Layer by layer
#
# The share of positions at which a layer already says the final token, how sure it is, and how far its law is from the
# final one (KL, in nats).

# %%
table = layers.to_pandas()
by_layer = table.groupby("layer")[["agrees", "top_probability", "final_probability", "entropy", "kl"]].mean()
by_layer.round(2)

# %% [markdown]
# ## Is a sure layer right?
#
# One layer, its positions sorted by its own probability. In a calibrated layer both columns are alike. Where the
# share that is right falls behind the probability, the layer is too sure, and a rule such as `confidence(0.9)` leaves
# too early.

# %%
exit_layer = lab.backbone.depth * 5 // 12
final = table[table["layer"] == lab.backbone.depth].set_index("position")["top_text"]
early = table[table["layer"] == exit_layer].set_index("position")
early = early.assign(right=early["top_text"] == final)
bins = early.groupby((early["top_probability"] * 4).astype(int).clip(upper=3) / 4)
calibration = bins.agg(positions=("right", "size"), probability=("top_probability", "mean"), right=("right", "mean"))
calibration.rename_axis("probability from").round(2)

# %%
first = float(layers.first_agreeing.float().mean())
assert by_layer["agrees"].is_monotonic_increasing and by_layer["agrees"].iloc[-1] == 1
print(f"On average the token is settled after {first:.1f} of {layers.depth} layers;")
print(f"layer {exit_layer} is right at {early['right'].mean():.0%} of the positions.")
print("02_layer_confidence: done")
