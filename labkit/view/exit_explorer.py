"""Which layer should I exit at: drag, see what would have been accepted at once, then what was measured."""

from collections.abc import Callable, Mapping
from typing import Any

import ipywidgets as widgets

from labkit.compare import as_html
from labkit.drafters import EarlyExit, Plain, PromptLookup
from labkit.errors import LabkitError, check_callable
from labkit.protocol import Drafter
from labkit.view.explorer import Explorer, labelled, picture
from labkit.view.figures import png
from labkit.view.outcome import HEADING, Foretold, Outcome
from labkit.view.speed import by_exit
from labkit.view.strip import strip
from labkit.view.worker import Job

Maker = Callable[..., Drafter]
STRATEGIES: dict[str, Maker] = {
    "EarlyExit": lambda exit, max_draft: EarlyExit(exit, max_draft),
    "EarlyExit, nothing shared": lambda exit, max_draft: EarlyExit(exit, max_draft, share=False),
    "PromptLookup": lambda exit, max_draft: PromptLookup(2, max_draft),
    "Plain": lambda exit, max_draft: Plain(),
}
ONE_LAYER = "This model has one layer: an exit behind it runs the whole model, so that a draft saves nothing."


class ExitLayerExplorer(Explorer):
    """Strategy, exit layer, draft length and sampling as controls; the strip, the figures and a picture by exit layer.

    strategies: further ones by name, each a function (exit, max_draft) -> Drafter. Other arguments as in Explorer.
    """

    def __init__(self, lab: Any, prompt: Any = None, *, strategies: Mapping[str, Maker] | None = None,
                 max_new_tokens: int = 64, **how: Any):  # fmt: skip
        if not isinstance(strategies, Mapping | None):
            raise LabkitError(
                f'got strategies={strategies!r}; write {{"name": a function (exit, max_draft) -> Drafter}}'
            )
        self.strategies = {**STRATEGIES, **(strategies or {})}
        for name, maker in self.strategies.items():
            check_callable(maker, f"strategies[{name!r}]", "exit, max_draft", "give (exit, max_draft) -> Drafter")
        most = max(1, lab.backbone.depth - 1)
        self.strategy = labelled(widgets.Dropdown, "Strategy", "What drafts", options=list(self.strategies))
        self.exit = labelled(widgets.IntSlider, "Exit layer", "Draft with the first so many layers", "labkit-exit",
                             min=1, max=most, value=max(1, most // 2))  # fmt: skip
        self.max_draft = labelled(widgets.IntSlider, "Draft length γ", "Tokens drafted in a round", "labkit-max-draft",
                                  min=1, max=16, value=4)  # fmt: skip
        self.count = labelled(widgets.IntSlider, "New tokens", "max_new_tokens: the most tokens to generate",
                              min=1, max=max(256, max_new_tokens), value=max_new_tokens)  # fmt: skip
        self.temperature = labelled(widgets.FloatSlider, "Temperature", "0 is greedy decoding",
                                    min=0.0, max=2.0, step=0.1, value=0.0)  # fmt: skip
        self.seed = labelled(widgets.BoundedIntText, "Seed", "Of the draws, above temperature 0", min=0, max=2**31 - 1)
        self.strip = widgets.HTML(layout=widgets.Layout(min_height="140px")).add_class("labkit-strip")
        self.image = picture("labkit-image", height="260px")
        super().__init__(lab, prompt, **how)

    def inputs(self) -> list[Any]:
        """The controls whose change makes a run."""
        return [self.prompt, self.strategy, self.exit, self.max_draft, self.count, self.temperature, self.seed]

    def pictures(self) -> list[Any]:
        """What stands below the table."""
        return [self.strip, self.image]

    def settings(self) -> dict[str, Any]:
        """The values of the controls, copied."""
        prompt = self.text()
        return {
            "prompt": prompt if isinstance(prompt, str) else list(prompt), "strategy": self.strategy.value,
            "exit": self.exit.value, "max_draft": self.max_draft.value, "max_new_tokens": self.count.value,
            "temperature": self.temperature.value, "seed": self.seed.value,
        }  # fmt: skip

    def fit(self) -> None:
        """The slider ends below the model's last layer."""
        self.exit.max = max(1, self.lab.backbone.depth - 1)

    def clear(self) -> None:
        """Take off results that are not those of the settings: the run failed."""
        self.table.value = self.strip.value = ""
        self.image.value = b""

    def answer(self, job: Job, settings: dict[str, Any], again: bool) -> tuple[Any, str]:
        """Replayed at once where plain decoding is known, then measured."""
        lab, exit, max_draft = self.lab, settings["exit"], settings["max_draft"]
        options = {name: settings[name] for name in ("max_new_tokens", "temperature", "seed")}
        asked = (str(settings["prompt"]), *options.values())
        drafter = self.strategies[settings["strategy"]](exit, max_draft)
        plain, _ = self.remember(("plain", asked), lambda: self.measure(job, settings["prompt"], None, options))
        replayed = None
        if isinstance(drafter, EarlyExit) and options["temperature"] == 0 and 0 < exit < lab.backbone.depth:
            foretold, _ = self.remember(("replay", asked), lambda: Foretold(lab, plain))
            replayed = foretold.rounds(exit, max_draft)
            job.check()
            self.table.value = as_html([HEADING, foretold.row(exit, max_draft)], [])
            self.strip.value = strip(foretold.generation(exit, max_draft))._repr_html_()
        key = (asked, repr(drafter))
        out, known = self.remember(("run", key), lambda: self.measure(job, settings["prompt"], drafter, options), again)
        outcome = Outcome(settings, out, plain, replayed)
        job.check()
        rows = [outcome.cells(), Outcome(settings, plain, plain).cells()]
        rows += [] if replayed is None else [foretold.row(exit, max_draft)]
        self.table.value = as_html([HEADING, *rows], [ONE_LAYER] if lab.backbone.depth == 1 else [])
        self.strip.value = strip(out)._repr_html_()
        if replayed is not None:
            key = ("picture", asked, exit, max_draft)
            drawn, _ = self.remember(key, lambda: png(by_exit(foretold, exit, max_draft)))
            job.check()
            self.image.value = drawn
        return outcome, "cached" if known and not again else ""
