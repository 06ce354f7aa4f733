"""Pictures and explorers: the only place that imports matplotlib or ipywidgets."""

from typing import TYPE_CHECKING, Any

from labkit.view.heatmap import heatmap
from labkit.view.picture import demo_picture, token_strip
from labkit.view.plots import acceptance, cost_bars, pareto
from labkit.view.speed import speedup
from labkit.view.strip import strip

if TYPE_CHECKING:
    from labkit.view.exit_explorer import ExitLayerExplorer

__all__ = [
    "ExitLayerExplorer",
    "acceptance",
    "cost_bars",
    "demo_picture",
    "exit_layer",
    "heatmap",
    "pareto",
    "speedup",
    "strip",
    "token_strip",
]
_EXPLORERS = {"ExitLayerExplorer": "exit_explorer"}


def exit_layer(lab: Any, prompt: Any = None, **how: Any) -> "ExitLayerExplorer":
    """An explorer of exit layers: see ExitLayerExplorer."""
    return __getattr__("ExitLayerExplorer")(lab, prompt, **how)


def __getattr__(name: str) -> Any:
    """The explorers' classes, whose ipywidgets are imported when one is used."""
    if name not in _EXPLORERS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"labkit.view.{_EXPLORERS[name]}"), name)
