"""Pictures and explorers: the only place that imports matplotlib or ipywidgets."""

from labkit.view.picture import demo_picture, token_strip
from labkit.view.strip import strip

__all__ = ["demo_picture", "strip", "token_strip"]
