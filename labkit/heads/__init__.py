"""Drafting heads: nn.Modules that predict several later tokens from the target's hidden state, and their files."""

from labkit.heads.adapter_files import load_adapter, load_draft_head, save_adapter
from labkit.heads.adapters import Adapter, Affine, DraftVocabulary, ExitClassifier, Kangaroo
from labkit.heads.files import load_heads, save_heads
from labkit.heads.medusa import Medusa
from labkit.heads.mlp_speculator import MLPSpeculator
from labkit.heads.shard import shard_heads
from labkit.heads.trees import best_tree, head_accuracies

__all__ = [
    "Adapter",
    "Affine",
    "DraftVocabulary",
    "ExitClassifier",
    "Kangaroo",
    "MLPSpeculator",
    "Medusa",
    "best_tree",
    "head_accuracies",
    "load_adapter",
    "load_draft_head",
    "load_heads",
    "save_adapter",
    "save_heads",
    "shard_heads",
]
