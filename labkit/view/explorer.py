"""What all explorers share: controls that only queue, a worker that answers by setting traits, cancel, errors."""

import html
import sys
import threading
import time
import traceback
import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import ipywidgets as widgets

from labkit.compare import as_html
from labkit.lab import Lab
from labkit.protocol import Drafter
from labkit.view.outcome import HEADING, Outcome, Pace, measured
from labkit.view.worker import Job, worker_of

KEPT = 32
"""Results that an explorer remembers."""
MIN_HEIGHT = "480px"
PRESETS = {
    "code": "def area(width, height):\n",
    "class": "class Point:\n    def __init__(self, x, y):\n",
    "sentence": "The first thing to know about language models is",
    "list": "1, 2, 3, 4, 5, 6, 7,",
}
_shown: "weakref.WeakSet[Explorer]" = weakref.WeakSet()


def origin() -> tuple[str, str] | None:
    """The notebook cell that runs now, and its run; None outside a notebook."""
    shell: Any = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    message = shell.get_parent() if hasattr(shell, "get_parent") else {}
    cell = (message.get("metadata") or {}).get("cellId")
    return (cell, message["header"]["msg_id"]) if cell else None


def labelled(kind: type, label: str, tip: str, hook: str = "", **how: Any) -> Any:
    """A control with a label that fits, a tooltip, and a class to find it by."""
    if "continuous_update" in kind.class_trait_names():
        how["continuous_update"] = False
    made = kind(description=label, tooltip=tip, style={"description_width": "112px"},
                layout=widgets.Layout(width="330px"), **how)  # fmt: skip
    return made.add_class(hook) if hook else made


def picture(hook: str, **layout: Any) -> Any:
    """Room for a PNG, in which nothing is seen as long as there is none."""
    place = widgets.Layout(visibility="hidden", max_width="100%", margin="8px 0 0 0",
                           object_fit="contain", object_position="left top", **layout)  # fmt: skip
    made = widgets.Image(format="png", layout=place).add_class(hook)
    made.observe(lambda change: setattr(place, "visibility", "visible" if change["new"] else "hidden"), "value")
    return made


class Explorer:
    """Controls on the left, results on the right. Show it by making it a cell's last expression.

    lab: what runs. prompt: text, or token ids. presets: further prompts by name. `result` is the latest Outcome,
    `history` those before and it, `wait()` blocks until the latest request is answered and raises what it raised,
    `run()` asks and waits, `close()` ends it. Running the cell again closes the explorer that it showed before.
    """

    def __init__(self, lab: Lab, prompt: Any = None, *, presets: Mapping[str, str] | None = None):
        self.lab, self.given = lab, prompt
        self.result: Any = None
        self.history: list[Any] = []
        self.pinned: list[Outcome] = []
        self.job: Job | None = None
        self.closed = self.quiet = False
        self.known: OrderedDict[Any, Any] = OrderedDict()
        self.lock = threading.Lock()
        self.origin = origin()
        self._close_older()
        self._build_common({**({"given": prompt} if isinstance(prompt, str) else {}), **(presets or PRESETS)})
        left = widgets.VBox([*self.controls(), self.auto, widgets.HBox([self.go, self.stop, self.pin])])
        left.layout = widgets.Layout(width="350px", flex="0 0 auto")
        right = widgets.VBox([self.status, self.progress, self.table, *self.pictures(), self.pins])
        right.layout = widgets.Layout(flex="1 1 0", min_height=MIN_HEIGHT, min_width="0", padding="0 0 0 16px")
        self.box = widgets.HBox([left, right], layout=widgets.Layout(min_height=MIN_HEIGHT, width="100%"))
        for control in self.inputs():
            control.observe(self._changed, "value")
        self.preset.observe(self._chosen, "value")
        self.go.on_click(lambda _: self.request(again=True))
        self.stop.on_click(lambda _: self.cancel())
        self.pin.on_click(lambda _: self.pin_result())
        _shown.add(self)
        self.request()

    # -- what a kind of explorer says -----------------------------------------------------------------------

    def inputs(self) -> list[Any]:
        """The controls whose change makes a run."""
        raise NotImplementedError

    def controls(self) -> list[Any]:
        """All controls, in order."""
        return [self.preset, *self.inputs()]

    def pictures(self) -> list[Any]:
        """What stands below the table."""
        raise NotImplementedError

    def settings(self) -> dict[str, Any]:
        """The values of the controls, copied."""
        raise NotImplementedError

    def answer(self, job: Job, settings: dict[str, Any], again: bool) -> tuple[Any, str]:
        """Do the work in the worker, and show it: the result and the last status."""
        raise NotImplementedError

    def clear(self) -> None:
        """Take off results that are not those of the settings: the run failed."""
        self.table.value = ""

    # -- asking ---------------------------------------------------------------------------------------------

    def request(self, again: bool = False) -> None:
        """Queue a run with the controls as they stand; `again` measures anew."""
        if self.closed:
            return
        settings, me = self.settings(), weakref.ref(self)

        def work(job: Job) -> None:
            if (explorer := me()) is not None:
                explorer._work(job, settings, again)

        self.job = worker_of(self.lab).submit(self, work)
        self.stop.disabled = False

    def cancel(self) -> None:
        """End the run that is going on, before the model runs once more."""
        worker_of(self.lab).cancel(self)
        if self.job is not None and self.job.cancelled.is_set():
            self._say("cancelled")
            self.stop.disabled = True

    def run(self, timeout: float | None = None) -> Any:
        """Measure with the controls as they stand, wait, and return the result."""
        self.request(again=True)
        return self.wait(timeout)

    def wait(self, timeout: float | None = None) -> Any:
        """The result of the latest request; raises what it raised, or TimeoutError after `timeout` seconds."""
        end = None if timeout is None else time.monotonic() + timeout
        while (job := self.job) is not None:
            if not job.done.wait(None if end is None else max(0.0, end - time.monotonic())):
                raise TimeoutError(f"no result after {timeout} s; ex.cancel() ends the run")
            if job is self.job:
                if job.error is not None:
                    raise job.error
                break
        return self.result

    def close(self) -> None:
        """Cancel what runs and take the explorer off the page."""
        if not self.closed:
            self.closed = True
            worker_of(self.lab).cancel(self)
            for control in [*self.inputs(), self.preset]:
                control.unobserve_all()
            parts: list[Any] = [self.box]
            while parts:
                part = parts.pop()
                parts += getattr(part, "children", ())
                part.close()
            _shown.discard(self)

    def use(self, lab: Lab) -> None:
        """Go on with another model: one run."""
        worker_of(self.lab).cancel(self)
        self.lab = lab
        self.known.clear()
        self.quiet = True
        try:
            self.fit()
        finally:
            self.quiet = False
        self.request()

    def fit(self) -> None:
        """Adjust controls to the model."""

    # -- working, in the worker's thread --------------------------------------------------------------------

    def _work(self, job: Job, settings: dict[str, Any], again: bool) -> None:
        began = time.perf_counter()
        self.progress.value = 0.0
        self._say("running", job)
        try:
            result, how = self.answer(job, settings, again)
            job.check()
        except Exception as error:
            if not job.cancelled.is_set():
                details = "".join(traceback.format_exception(error))
                self._say(f"error: {type(error).__name__}: {error}", job, details)
                self.clear()
                self.stop.disabled = True
            raise
        self.result = result
        self.history = [*self.history, result][-KEPT:]
        self.progress.value = 1.0
        self._say(how or f"done {time.perf_counter() - began:.1f} s", job)
        self.stop.disabled = True

    def remember(self, key: Any, make: Callable[[], Any], again: bool = False) -> tuple[Any, bool]:
        """What was made for this key before, or is made now; and whether it was known."""
        if key in self.known and not again:
            self.known.move_to_end(key)
            return self.known[key], True
        self.known[key] = make()
        while len(self.known) > KEPT:
            self.known.popitem(last=False)
        return self.known[key], False

    def measure(self, job: Job, prompt: Any, drafter: Drafter | None, options: dict[str, Any]) -> Any:
        """Generate; progress and status tell how far it is."""
        pace, most = Pace(), options["max_new_tokens"]

        def progress(tokens: int) -> None:
            if pace.due():
                self.progress.value = tokens / most
                self._say(f"running {tokens}/{most}, {drafter or 'plain decoding'}", job)

        return measured(self.lab, prompt, drafter, options, progress)

    def _say(self, words: str, job: Job | None = None, details: str = "") -> None:
        """Set the status, unless the job was overtaken meanwhile."""
        with self.lock:
            if self.closed or (job is not None and job.cancelled.is_set()):
                return
            edge = "#D55E00" if details else "#0072B2"
            more = f"<details><summary>details</summary><pre>{html.escape(details)}</pre></details>" if details else ""
            self.status.value = (
                f'<div role="status" style="border-left:4px solid {edge};padding-left:8px;overflow-wrap:anywhere">'
                f"{html.escape(words)}{more}</div>"
            )

    # -- the page -------------------------------------------------------------------------------------------

    def _build_common(self, presets: Mapping[str, str]) -> None:
        text = self.given if isinstance(self.given, str) else next(iter(presets.values()))
        ids = self.given is not None and not isinstance(self.given, str)
        self.preset = labelled(widgets.Dropdown, "Preset", "Prompts to start from", options=list(presets.items()),
                               value=next((v for v in presets.values() if v == text), None), disabled=ids)  # fmt: skip
        self.prompt = labelled(widgets.Textarea, "Prompt", "What the model goes on from", "labkit-prompt", rows=4,
                               value="(token ids)" if ids else text, disabled=ids)  # fmt: skip
        self.auto = labelled(widgets.Checkbox, "Run on change", "Run whenever a control changes", value=True)
        button = lambda words, tip, hook, **how: widgets.Button(  # noqa: E731
            description=words, tooltip=tip, layout=widgets.Layout(width="96px"), **how
        ).add_class(hook)
        self.go = button("Run", "Measure again with these settings", "labkit-run", button_style="primary")
        self.stop = button("Cancel", "End the run", "labkit-cancel", disabled=True)
        self.pin = button("Pin", "Keep this result below, to compare", "labkit-pin")
        self.status = widgets.HTML().add_class("labkit-status")
        self.progress = widgets.FloatProgress(min=0, max=1, layout=widgets.Layout(width="100%", height="10px"))
        self.table = widgets.HTML().add_class("labkit-table")
        self.pins = widgets.HTML().add_class("labkit-pins")

    def text(self) -> Any:
        """The prompt: as given if ids, else as written."""
        return self.prompt.value if self.given is None or isinstance(self.given, str) else self.given

    def pin_result(self) -> None:
        """Keep the latest result in a table below."""
        if isinstance(self.result, Outcome):
            self.pinned = [*self.pinned, self.result][-KEPT:]
            self.pins.value = "<b>Pinned</b>" + as_html([HEADING, *(one.cells() for one in self.pinned)], [])

    def _changed(self, change: Any) -> None:
        if self.auto.value and not self.quiet:
            self.request()

    def _chosen(self, change: Any) -> None:
        if change["new"] is not None:
            self.prompt.value = change["new"]

    def _close_older(self) -> None:
        """An explorer that an earlier run of this cell showed: n-fold observers otherwise."""
        for other in list(_shown):
            here, there = self.origin, other.origin
            same = (
                here[0] == there[0] and here[1] != there[1]
                if here and there
                else here is there and other.lab is self.lab and other.given == self.given
            )
            if type(other) is type(self) and same:
                other.close()

    def _repr_mimebundle_(self, **how: Any) -> Any:
        return self.box._repr_mimebundle_(**how)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.lab}, result={getattr(self.result, 'name', self.result)})"
