"""The draft strategies: one file each."""

from labkit.drafters.early_exit import EarlyExit
from labkit.drafters.heads import Heads
from labkit.drafters.lookup import PromptLookup
from labkit.drafters.model import DraftModel
from labkit.drafters.plain import Plain

__all__ = ["DraftModel", "EarlyExit", "Heads", "Plain", "PromptLookup"]
