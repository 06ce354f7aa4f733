"""Do combinations beat their parts: put a strategy together, and measure it beside what it is made of."""

from typing import Any

import ipywidgets as widgets

from labkit.compare import as_html
from labkit.drafters import AtMost, EarlyExit, Fallback, Plain, PromptLookup, Union, Window, below
from labkit.drafters.kv import Full
from labkit.protocol import Drafter, never
from labkit.view.explorer import Explorer, labelled, picture
from labkit.view.figures import png
from labkit.view.outcome import HEADING, Outcome
from labkit.view.plots import cost_bars
from labkit.view.strip import strip
from labkit.view.worker import Job

FORMS = {
    "early exit": "exit",
    "prompt lookup": "lookup",
    "lookup, else exit": "fallback",
    "exit, else lookup": "fallback back",
    "both in one tree": "union",
    "plain decoding": "plain",
}


def parts(settings: dict[str, Any]) -> tuple[Drafter, list[Drafter]]:
    """The strategy that the controls describe, and the parts that it is made of."""
    stop = below(settings["stop"]) if settings["stop"] > 0 else never
    kv = Window(4, settings["window"]) if settings["window"] else Full()
    exit = EarlyExit(settings["exit"], settings["max_draft"], settings["share"], stop=stop, kv=kv)
    lookup = PromptLookup(settings["ngram"], settings["lookup"])
    made: dict[str, tuple[Drafter, list[Drafter]]] = {
        "exit": (exit, []), "lookup": (lookup, []), "fallback": (Fallback(lookup, exit), [lookup, exit]),
        "fallback back": (Fallback(exit, lookup), [exit, lookup]), "union": (Union(lookup, exit), [lookup, exit]),
        "plain": (Plain(), []),
    }  # fmt: skip
    whole, members = made[settings["form"]]
    if settings["at_most"] and not isinstance(whole, Plain):
        whole, members = AtMost(settings["at_most"], whole), [whole, *members]
    return whole, members


class StrategyBuilder(Explorer):
    """Form, early exit, lookup and limits as controls; the whole strategy beside its parts, its code, and its costs.

    `result` is the whole strategy's Outcome, `ablation` those of its parts. Arguments as in Explorer.
    """

    def __init__(self, lab: Any, prompt: Any = None, *, max_new_tokens: int = 48, **how: Any):
        most, slider = max(1, lab.backbone.depth - 1), widgets.IntSlider
        self.form = labelled(widgets.Dropdown, "Strategy", "How the parts are put together", "labkit-form",
                             options=list(FORMS.items()), value="fallback")  # fmt: skip
        self.exit = labelled(slider, "Exit layer", "Draft with so many layers", "labkit-exit", min=1, max=most,
                             value=max(1, most // 2))  # fmt: skip
        self.max_draft = labelled(
            slider, "Exit draft γ", "Tokens the early exit drafts a round", min=1, max=16, value=4
        )
        self.stop_below = labelled(widgets.FloatSlider, "Stop below", "End a draft at a less probable token; 0: never",
                                   min=0.0, max=0.95, step=0.05, value=0.0)  # fmt: skip
        self.share = labelled(widgets.Checkbox, "Share work", "Verify from its states", value=True)
        self.window = labelled(slider, "Window", "Recent tokens the draft may read; 0: all", min=0, max=256, value=0)
        self.ngram = labelled(
            slider, "n-gram", "Tokens that must match to look up what followed", min=1, max=6, value=2
        )
        self.lookup = labelled(slider, "Lookup draft γ", "Tokens a lookup drafts a round", min=1, max=16, value=6)
        self.at_most = labelled(slider, "At most", "Tokens drafted a round, whoever drafts; 0: no limit", min=0, max=16)
        self.count = labelled(slider, "New tokens", "The most tokens to generate", min=1,
                              max=max(256, max_new_tokens), value=max_new_tokens)  # fmt: skip
        self.code = widgets.HTML().add_class("labkit-code")
        self.strip = widgets.HTML(layout=widgets.Layout(min_height="140px")).add_class("labkit-strip")
        self.image = picture("labkit-image", min_height="160px")
        self.ablation: list[Outcome] = []
        super().__init__(lab, prompt, **how)

    def inputs(self) -> list[Any]:
        """The controls whose change makes a run."""
        return [self.prompt, self.form, self.exit, self.max_draft, self.stop_below, self.share, self.window, self.ngram,
                self.lookup, self.at_most, self.count]  # fmt: skip

    def pictures(self) -> list[Any]:
        """What stands below the table."""
        return [self.code, self.strip, self.image]

    def settings(self) -> dict[str, Any]:
        """The values of the controls, copied."""
        prompt = self.text()
        return {"prompt": prompt if isinstance(prompt, str) else list(prompt), "form": self.form.value,
                "exit": self.exit.value, "max_draft": self.max_draft.value, "stop": self.stop_below.value,
                "share": self.share.value, "window": self.window.value, "ngram": self.ngram.value,
                "lookup": self.lookup.value, "at_most": self.at_most.value,
                "max_new_tokens": self.count.value}  # fmt: skip

    def fit(self) -> None:
        """The slider ends below the model's last layer."""
        self.exit.max = max(1, self.lab.backbone.depth - 1)

    def clear(self) -> None:
        """Take off results that are not those of the settings: the run failed."""
        self.table.value = self.strip.value = self.code.value = ""
        self.image.value = b""

    def answer(self, job: Job, settings: dict[str, Any], again: bool) -> tuple[Any, str]:
        """Plain decoding, the whole, then its parts, each shown as soon as it is measured."""
        whole, members = parts(settings)
        options = {"max_new_tokens": settings["max_new_tokens"]}
        asked, all_known = (str(settings["prompt"]), *options.values()), True
        plain, _ = self.remember(("plain", asked), lambda: self.measure(job, settings["prompt"], None, options))
        code = f"lab.generate(prompt, {whole}, max_new_tokens={options['max_new_tokens']})"
        self.code.value = as_html([["in Python"], [code]], [])
        found: list[Outcome] = []
        for drafter in [whole, *members]:
            out, known = self.remember(
                ("run", asked, repr(drafter)),
                lambda drafter=drafter: self.measure(job, settings["prompt"], drafter, options), again,
            )  # fmt: skip
            job.check()
            all_known &= known
            found.append(Outcome(settings, out, plain))
            rows = [outcome.cells() for outcome in found]
            self.table.value = as_html([HEADING, *rows, Outcome(settings, plain, plain).cells()], [])
            if drafter is whole:
                self.strip.value = strip(out)._repr_html_()
        named = {outcome.name: outcome.generation for outcome in [*found, Outcome(settings, plain, plain)]}
        drawn = png(cost_bars(named))
        job.check()
        self.image.value, self.ablation = drawn, found[1:]
        return found[0], "cached" if all_known and not again else ""
