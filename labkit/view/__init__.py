"""Pictures and explorers: the only place that imports matplotlib or ipywidgets."""

import importlib
from typing import TYPE_CHECKING, Any

from labkit.view.curves import curves
from labkit.view.heatmap import heatmap
from labkit.view.picture import demo_picture, token_strip
from labkit.view.plots import acceptance, cost_bars, pareto
from labkit.view.speed import speedup
from labkit.view.strip import strip

if TYPE_CHECKING:
    from labkit.view.builder import StrategyBuilder
    from labkit.view.depth_explorer import LayerExplorer
    from labkit.view.exit_explorer import ExitLayerExplorer

__all__ = [
    "ExitLayerExplorer",
    "LayerExplorer",
    "StrategyBuilder",
    "acceptance",
    "cost_bars",
    "curves",
    "demo_picture",
    "exit_layer",
    "heatmap",
    "layer_explorer",
    "pareto",
    "speedup",
    "strategy_builder",
    "strip",
    "token_strip",
]
_EXPLORERS = {
    "ExitLayerExplorer": "exit_explorer",
    "LayerExplorer": "depth_explorer",
    "StrategyBuilder": "builder",
}


def exit_layer(lab: Any, prompt: Any = None, **how: Any) -> "ExitLayerExplorer":
    """An explorer of exit layers: see ExitLayerExplorer."""
    from labkit.view.exit_explorer import ExitLayerExplorer

    return ExitLayerExplorer(lab, prompt, **how)


def layer_explorer(lab: Any, prompt: Any = None, **how: Any) -> "LayerExplorer":
    """An explorer of what each layer says: see LayerExplorer."""
    from labkit.view.depth_explorer import LayerExplorer

    return LayerExplorer(lab, prompt, **how)


def strategy_builder(lab: Any, prompt: Any = None, **how: Any) -> "StrategyBuilder":
    """An explorer of strategies and their parts: see StrategyBuilder."""
    from labkit.view.builder import StrategyBuilder

    return StrategyBuilder(lab, prompt, **how)


def __getattr__(name: str) -> Any:
    """The explorers' classes, whose ipywidgets are imported when one is used."""
    if name not in _EXPLORERS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"labkit.view.{_EXPLORERS[name]}"), name)
