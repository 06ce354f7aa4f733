"""labkit: speculative decoding on real Hugging Face models, in one loop that one can look into."""

import logging

from labkit.acceptance import Match, Rejection, Typical
from labkit.backbone import Backbone
from labkit.calibration import calibrate
from labkit.draft import Draft, Partial
from labkit.drafters import (
    Adaptive,
    AtMost,
    DraftModel,
    EarlyExit,
    Fallback,
    Heads,
    Plain,
    PromptLookup,
    SkipLayers,
    TopK,
    Union,
    Until,
    Window,
    below,
    search_skips,
)
from labkit.errors import LabkitError
from labkit.exits import classifier, confidence, margin, saturation
from labkit.heads import Medusa, MLPSpeculator, best_tree, head_accuracies, load_heads, save_heads
from labkit.lab import Lab, load
from labkit.layers import layers
from labkit.loading import fetch
from labkit.lossy import agreement
from labkit.protocol import Context, Drafter, never
from labkit.replay import replay
from labkit.session import Session
from labkit.sweep import sweep
from labkit.trace import Generation

logging.getLogger("labkit").addHandler(logging.NullHandler())

__all__ = [
    "Adaptive",
    "AtMost",
    "Backbone",
    "Context",
    "Draft",
    "DraftModel",
    "Drafter",
    "EarlyExit",
    "Fallback",
    "Generation",
    "Heads",
    "Lab",
    "LabkitError",
    "MLPSpeculator",
    "Match",
    "Medusa",
    "Partial",
    "Plain",
    "PromptLookup",
    "Rejection",
    "Session",
    "SkipLayers",
    "TopK",
    "Typical",
    "Union",
    "Until",
    "Window",
    "agreement",
    "below",
    "best_tree",
    "calibrate",
    "classifier",
    "confidence",
    "fetch",
    "head_accuracies",
    "layers",
    "load",
    "load_heads",
    "margin",
    "never",
    "replay",
    "saturation",
    "save_heads",
    "search_skips",
    "sweep",
]
