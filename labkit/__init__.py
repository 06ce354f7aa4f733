"""labkit: speculative decoding on real Hugging Face models, in one loop that one can look into."""

import logging

from labkit.acceptance import Match, Rejection
from labkit.backbone import Backbone
from labkit.compare import Comparison
from labkit.decoding import Round
from labkit.draft import Draft, Partial
from labkit.drafters import DraftModel, EarlyExit, Plain, PromptLookup
from labkit.errors import LabkitError
from labkit.lab import Lab, Token, load
from labkit.loading import fetch
from labkit.protocol import Context, Drafter
from labkit.session import Session
from labkit.trace import Generation

logging.getLogger("labkit").addHandler(logging.NullHandler())

__all__ = [
    "Backbone",
    "Comparison",
    "Context",
    "Draft",
    "DraftModel",
    "Drafter",
    "EarlyExit",
    "Generation",
    "Lab",
    "LabkitError",
    "Match",
    "Partial",
    "Plain",
    "PromptLookup",
    "Rejection",
    "Round",
    "Session",
    "Token",
    "fetch",
    "load",
]
