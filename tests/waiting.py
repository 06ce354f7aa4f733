"""Modes that notice where the host waits for the device; on a CPU nothing does, so the calls themselves are seen."""

import torch
from torch.overrides import TorchFunctionMode, resolve_name


class NoSync(TorchFunctionMode):
    """Raises on whatever would make a GPU wait for the host, or give a tensor a size that depends on its data."""

    banned = frozenset(
        "item tolist cpu numpy nonzero argwhere masked_select unique unique_consecutive equal allclose is_nonzero "
        "bincount __bool__ __int__ __float__ __index__ __contains__ __array__".split()
    )

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name = (resolve_name(func) or func.__name__).rsplit(".", 1)[-1]
        index = args[1] if name in ("__getitem__", "__setitem__") else ()
        masked = any(isinstance(i, torch.Tensor) for i in (index if isinstance(index, tuple) else (index,)))
        searched = name == "where" and len(args) + len(kwargs or {}) == 1
        moved = name == "to" and any(str(a) == "cpu" for a in [*args[1:], *(kwargs or {}).values()])
        assert not (name in self.banned or masked or searched or moved), f"{name} in a round"
        return func(*args, **(kwargs or {}))
