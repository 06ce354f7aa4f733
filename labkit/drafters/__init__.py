"""The draft strategies: one file each, and the parts that they share."""

from labkit.drafters.chain import below
from labkit.drafters.early_exit import EarlyExit
from labkit.drafters.heads import Heads
from labkit.drafters.kv import Full, TopK, Window
from labkit.drafters.lookup import PromptLookup
from labkit.drafters.model import DraftModel
from labkit.drafters.plain import Plain

__all__ = ["DraftModel", "EarlyExit", "Full", "Heads", "Plain", "PromptLookup", "TopK", "Window", "below"]
