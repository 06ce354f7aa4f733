"""When does the model know: what each layer would say along a text, as a picture and one position as a table."""

from typing import Any

import ipywidgets as widgets

from labkit.compare import as_html
from labkit.layers import Layers, layers
from labkit.view.explorer import Explorer, labelled, picture
from labkit.view.figures import BLUE, ORANGE, POINTS, Picture, plain_axes, png
from labkit.view.heatmap import COLOURS, MOST_POSITIONS, heatmap
from labkit.view.letters import visible
from labkit.view.worker import Job

HEADING = ["layer", "next token", "probability", "entropy, nats", "rank of the last layer's", "cosine to layer below"]


def by_layer(found: Layers) -> Picture:
    """How sure each layer is on the mean, and how often it already says what the last one says."""
    figure = Picture(8.4, 2.8)
    depth = list(range(1, found.depth + 1))
    axes = plain_axes(figure, "layer (layers run)", "mean probability", 121)
    axes.plot(
        depth, found.top_probability.float().mean(1).tolist(), color=BLUE, marker="o", ms=4, label="its own token"
    )
    axes.plot(depth, found.final_probability.float().mean(1).tolist(), color=ORANGE, marker="s", ms=4, ls="--",
              label="the last layer's token")  # fmt: skip
    axes.set_ylim(0, 1)
    axes.legend(fontsize=POINTS - 1, frameon=False)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes = plain_axes(figure, "first layer that agrees for good", "positions", 122)
    axes.bar(depth, [int((found.first_agreeing == layer).sum()) for layer in depth], color=BLUE)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.yaxis.get_major_locator().set_params(integer=True)
    return figure


class LayerExplorer(Explorer):
    """Colour, positions and one position as controls; heat map, confidence by layer, and every layer at that position.

    `result` is a Layers, of the prompt and the tokens that plain decoding adds to it. Arguments as in Explorer.
    """

    def __init__(self, lab: Any, prompt: Any = None, *, max_new_tokens: int = 16, **how: Any):
        self.count = labelled(widgets.IntSlider, "New tokens", "Generated behind the prompt", "labkit-count",
                              min=0, max=max(64, max_new_tokens), value=max_new_tokens)  # fmt: skip
        self.colour = labelled(widgets.Dropdown, "Colour", "What colours show", "labkit-colour", options=list(COLOURS))
        self.first = labelled(widgets.IntSlider, "First position", "Where the picture begins", "labkit-first",
                              min=0, max=0, value=0)  # fmt: skip
        self.place = labelled(widgets.IntSlider, "Position", "Whose layers the table shows", "labkit-position",
                              min=0, max=0, value=0)  # fmt: skip
        self.image, self.curves = (picture(f"labkit-{part}", min_height="160px") for part in ("image", "curves"))
        super().__init__(lab, prompt, **how)
        self.pin.layout.display = "none"

    def inputs(self) -> list[Any]:
        """The controls whose change makes a run."""
        return [self.prompt, self.count, self.colour, self.first, self.place]

    def pictures(self) -> list[Any]:
        """What stands below the table."""
        return [self.image, self.curves]

    def settings(self) -> dict[str, Any]:
        """The values of the controls, copied."""
        prompt = self.text()
        return {"prompt": prompt if isinstance(prompt, str) else list(prompt), "max_new_tokens": self.count.value,
                "colour": self.colour.value, "first": self.first.value, "place": self.place.value}  # fmt: skip

    def clear(self) -> None:
        """Take off results that are not those of the settings: the run failed."""
        self.table.value = ""
        self.image.value = self.curves.value = b""

    def answer(self, job: Job, settings: dict[str, Any], again: bool) -> tuple[Any, str]:
        """Layers of prompt and plain continuation, known or computed; then the picture of them."""
        asked = (str(settings["prompt"]), settings["max_new_tokens"])
        found, known = self.remember(asked, lambda: self._layers(job, settings), again)
        job.check()
        last = len(found.texts) - 1
        self.quiet = True  # the controls follow the text: no run of their own
        try:
            self.first.max, self.place.max = last, last
        finally:
            self.quiet = False
        first, place = min(settings["first"], last), min(settings["place"], last)
        share = lambda tensor, layer: f"{tensor[layer, place].item():.3f}"  # noqa: E731
        rows = [
            [str(layer + 1), visible(found.top_text[layer][place]), share(found.top_probability, layer),
             share(found.entropy, layer), str(found.final_rank[layer, place].item()), share(found.cosine, layer)]
            for layer in reversed(range(found.depth))
        ]  # fmt: skip
        behind = visible("".join(found.texts[max(0, place - 7) : place + 1]))
        note = (
            f"behind “{behind}” (position {place}): the last layer's token from layer {found.first_agreeing[place]} on"
        )
        self.table.value = as_html([HEADING, *rows], [note])
        drawn, _ = self.remember(
            ("heat", asked, settings["colour"], first),
            lambda: png(heatmap(found, settings["colour"], first, min(first + MOST_POSITIONS, last + 1))), again,
        )  # fmt: skip
        job.check()
        self.image.value = drawn
        self.curves.value = self.remember(("curves", asked), lambda: png(by_layer(found)), again)[0]
        return found, "cached" if known and not again else ""

    def _layers(self, job: Job, settings: dict[str, Any]) -> Layers:
        if not settings["max_new_tokens"]:
            return layers(self.lab, settings["prompt"])
        options = {"max_new_tokens": settings["max_new_tokens"]}
        return layers(self.lab, self.measure(job, settings["prompt"], None, options))
