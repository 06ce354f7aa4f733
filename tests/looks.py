"""What a figure looks like on a page: its image laid over white and over JupyterLab's dark ground."""

import io
from collections import Counter

import numpy as np
from matplotlib.colors import to_rgb
from matplotlib.text import Text
from PIL import Image

from labkit.view.figures import luminance

PAGES = ("#FFFFFF", "#111111")


def on_page(figure, page):
    """The figure's image as a page of that colour shows it."""
    image = Image.open(io.BytesIO(figure._repr_png_())).convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", image.size, page), image).convert("RGB")


def contrast(one, other):
    """WCAG 2: from 1 to 21."""
    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


def readable(figure):
    """Its corners are the page's, its ground no glaring white; all letters have 4.5 : 1 on what lies behind them."""
    for page in PAGES:
        shown = on_page(figure, page)
        wide, high = shown.size
        for x, y in ((0, 0), (wide - 1, 0), (0, high - 1), (wide - 1, high - 1)):
            assert shown.getpixel((x, y)) == tuple(round(255 * c) for c in to_rgb(page)), "the corners are not round"
        ground = shown.getpixel((wide // 2, 4))
        assert 0.5 < luminance([c / 255 for c in ground]) < 0.95, ground
        seen = 0
        for text in figure.findobj(Text):
            box = text.get_window_extent()
            x0, x1, y0, y1 = (round(v) for v in (box.x0, box.x1, high - box.y1, high - box.y0))
            shows = text.get_visible() and text.get_text().strip() and 0 <= x0 < x1 <= wide and 0 <= y0 < y1 <= high
            if not shows or (text.axes is not None and not text.axes.axison and text not in text.axes.texts):
                continue
            letters = np.asarray(shown.crop((x0, y0, x1, y1))).reshape(-1, 3)
            [(behind, _)] = Counter(map(tuple, letters.tolist())).most_common(1)
            found = contrast(text.get_color(), [c / 255 for c in behind])
            assert found >= 4.5, (text.get_text(), text.get_color(), behind, found)
            seen += 1
        assert seen > 3
    return figure
