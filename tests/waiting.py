"""Modes that notice where the host waits for the device; on a CPU nothing does, so the calls themselves are seen."""

import sys

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


def caller(depth: int = 2) -> tuple[str, int]:
    """File and line of the nearest frame outside torch and this class: who called the torch function."""
    frame = sys._getframe(depth)
    while "/torch/" in frame.f_code.co_filename or frame.f_code.co_name == "__torch_function__":
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_lineno


TO_HOST = {
    *("tolist", "item", "cpu", "numpy", "nonzero", "argwhere", "masked_select", "unique", "is_nonzero", "equal"),
    *("__bool__", "__int__", "__float__", "__index__", "__complex__", "__array__", "__contains__", "allclose"),
    *("bincount", "unique_consecutive", "_local_scalar_dense"),
}


def selects_by_mask(index) -> bool:
    parts = index if isinstance(index, tuple | list) else (index,)
    return any(isinstance(x, torch.Tensor) and x.dtype in (torch.bool, torch.uint8) for x in parts)


class HostCopies(TorchFunctionMode):
    """Records where the host waits for the device; on a CPU nothing does, so the calls themselves are counted."""

    def __init__(self, ignore=("scripted.py",)):
        super().__init__()
        self.seen, self.ignore = [], ignore

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        waits = name in TO_HOST or (name in ("where",) and len(args) == 1)
        waits |= name in ("__getitem__", "__setitem__") and selects_by_mask(args[1])
        waits |= name == "repeat_interleave" and isinstance(
            args[1] if len(args) > 1 else kwargs.get("repeats"), torch.Tensor
        )
        waits |= name == "to" and "cpu" in [x for x in (*args[1:], kwargs.get("device")) if isinstance(x, str)]
        if waits and not caller()[0].endswith(self.ignore):
            self.seen.append((name, *caller()))
        return func(*args, **kwargs)
