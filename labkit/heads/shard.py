"""Heads over several devices: wide matrices split by vocabulary, as a `tp_plan` of transformers splits the target."""

from typing import Any

from torch import nn


def mesh_of(target: Any) -> Any:
    """The device mesh over which the target's head is split; None if it is whole."""
    return getattr(target.get_output_embeddings().weight, "device_mesh", None)


def shard_heads(heads: nn.Module, mesh: Any) -> nn.Module:
    """Split embeddings and output layers by vocabulary over `mesh`, in place; every rank gets whole logits.

    The small projections and ResBlocks stay whole on each rank. Run it in every process, under torchrun.
    """
    # Not at import: it is slow, and some builds of torch lack it.
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    plan: dict[str, Any] = {}
    for name, module in heads.named_modules():  # a tied module comes once
        if isinstance(module, nn.Embedding):
            plan[name] = RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate())
        elif isinstance(module, nn.Linear) and module.out_features == getattr(heads, "vocab", None):
            plan[name] = ColwiseParallel(output_layouts=Replicate())
    return parallelize_module(heads, mesh, plan)
