"""The draft strategies: one file each, and the parts that they share."""

from labkit.drafters.adaptive import Adaptive
from labkit.drafters.chain import below
from labkit.drafters.combine import Fallback, Union
from labkit.drafters.early_exit import EarlyExit
from labkit.drafters.heads import Heads
from labkit.drafters.kv import Full, TopK, Window
from labkit.drafters.lookup import PromptLookup
from labkit.drafters.model import DraftModel
from labkit.drafters.on_the_fly import OnTheFly
from labkit.drafters.plain import Plain
from labkit.drafters.shorter import AtMost, Until
from labkit.drafters.skip import SkipLayers
from labkit.drafters.skip_search import FoundSkips, search_skips

__all__ = [
    "Adaptive",
    "AtMost",
    "DraftModel",
    "EarlyExit",
    "Fallback",
    "FoundSkips",
    "Full",
    "Heads",
    "OnTheFly",
    "Plain",
    "PromptLookup",
    "SkipLayers",
    "TopK",
    "Union",
    "Until",
    "Window",
    "below",
    "search_skips",
]
