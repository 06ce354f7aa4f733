"""The draft strategies: one file each, and the parts that they share."""

from labkit.drafters.adaptive import Adaptive
from labkit.drafters.chain import below
from labkit.drafters.combine import Fallback, Union
from labkit.drafters.early_exit import EarlyExit
from labkit.drafters.heads import Heads
from labkit.drafters.kv import Full, TopK, Window
from labkit.drafters.lookup import PromptLookup
from labkit.drafters.model import DraftModel
from labkit.drafters.plain import Plain
from labkit.drafters.shorter import AtMost, Until

__all__ = ["Adaptive", "AtMost", "DraftModel", "EarlyExit", "Fallback", "Full", "Heads", "Plain", "PromptLookup",
           "TopK", "Union", "Until", "Window", "below"]  # fmt: skip
