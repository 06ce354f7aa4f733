"""Pictures: the only place that imports matplotlib."""

from labkit.view.picture import demo_picture, token_strip

__all__ = ["demo_picture", "token_strip"]
