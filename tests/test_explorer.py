"""Explorers driven as a page drives them, by setting traits: who wins, what ends, what is shown, what stays behind."""

import gc
import subprocess
import sys
import threading
import time

import families
import ipywidgets
import letters
import pytest
from matplotlib.figure import Figure

import labkit
import labkit.view
from labkit import EarlyExit, LabkitError, Plain
from labkit.session import Session
from labkit.trace import Generation
from labkit.view import explorer as shared
from labkit.view.outcome import Foretold, Outcome
from labkit.view.worker import Job, worker_of


@pytest.fixture(scope="module")
def lab():
    return letters.lab()


class Slow(Plain):
    """Plain decoding at 20 rounds a second."""

    def propose(self, state, context):
        time.sleep(0.05)
        return super().propose(state, context)


class Broken(Plain):
    def propose(self, state, context):
        raise RuntimeError("<b>no draft today</b>")


STRATEGIES = {"slow": lambda exit, max_draft: Slow(), "broken": lambda exit, max_draft: Broken()}


@pytest.fixture
def ex(lab):
    made = labkit.view.exit_layer(lab, "ab ab", max_new_tokens=12, strategies=STRATEGIES)
    yield made
    made.close()
    assert not worker_of(lab).waiting


def test_shows_a_measured_run(ex, lab):
    result = ex.wait(30)
    assert result.same_text and result.generation.tokens == lab.generate("ab ab", max_new_tokens=12).tokens
    assert ex.exit.max == lab.backbone.depth - 1 and ex.exit.min == 1
    assert (
        ex.status.value.count("done") == 1
        and f"{result.speedup:.2f}x" in ex.table.value
        and "replayed" in ex.table.value
    )
    assert "labkit-strip" in ex.strip.value and bytes(ex.image.value).startswith(b"\x89PNG") and ex.history == [result]
    assert ex.image.layout.visibility == "visible"
    hooks = {
        name for w in vars(ex).values() if isinstance(w, ipywidgets.Widget) for name in getattr(w, "_dom_classes", ())
    }
    assert {"labkit-run", "labkit-cancel", "labkit-exit", "labkit-status", "labkit-strip", "labkit-table"} <= hooks
    for control in ex.controls():
        assert control.tooltip and control.description and getattr(control, "continuous_update", False) is False
    assert ex.box.layout.min_height and "application/vnd.jupyter.widget-view+json" in ex._repr_mimebundle_()


@pytest.mark.parametrize("exit", [1, 2, 3])
@pytest.mark.parametrize("max_draft", [1, 3])
def test_the_replayed_rounds_are_the_measured_ones(ex, exit, max_draft):
    ex.auto.value = False
    ex.exit.value, ex.max_draft.value = exit, max_draft
    result = ex.run(30)
    assert result.settings["exit"] == exit
    assert [r.accepted[0] for r in result.generation.rounds] == result.replayed.accepted


def test_the_slider_shows_the_replay_at_once(ex):
    ex.wait(30)
    for exit in (3, 1, 2):
        seen = []
        ex.table.observe(lambda change: seen.append((time.perf_counter(), change["new"])), "value")
        began = time.perf_counter()
        ex.known = type(ex.known)((k, v) for k, v in ex.known.items() if k[0] != "run")  # so that it must be measured
        ex.exit.value = exit
        assert time.perf_counter() - began < 0.05  # the callback only queues
        ex.wait(30)
        ex.table.unobserve_all()
        when, what = seen[0]
        assert (
            when - began < 0.1 and f"replayed: exit {exit}" in what and "tokens/s" in what and "EarlyExit" not in what
        )
        assert "EarlyExit" in seen[-1][1]


def test_the_latest_request_wins(ex):
    ex.wait(30)
    ex.strategy.value = "slow"
    time.sleep(0.1)
    before = len(ex.history)
    for exit in (1, 2, 3, 1, 2, 3):
        ex.exit.value = exit
    ex.strategy.value = "EarlyExit"
    result = ex.wait(30)
    assert result.settings["strategy"] == "EarlyExit" and result.settings["exit"] == 3
    assert [r.settings["strategy"] for r in ex.history[before:]] == ["EarlyExit"]


def test_cancel_ends_within_a_second(ex):
    ex.wait(30)
    ex.count.value = 60
    ex.wait(30)
    ex.strategy.value = "slow"
    time.sleep(0.8)
    assert "running" in ex.status.value and not ex.stop.disabled and 0 < ex.progress.value < 1
    began = time.perf_counter()
    ex.stop.click()
    result = ex.wait(5)
    assert time.perf_counter() - began < 1 and "cancelled" in ex.status.value
    assert result.settings["strategy"] == "EarlyExit"  # the last that ended
    time.sleep(0.2)
    assert "cancelled" in ex.status.value and worker_of(ex.lab).running is None


def cancelled_after(ex, seconds, limit_s=1.0):
    """Presses Cancel; how long it took until the worker did nothing any more."""
    time.sleep(seconds)
    assert "running" in ex.status.value and worker_of(ex.lab).running is ex.job
    began = time.perf_counter()
    ex.stop.click()
    assert "cancelled" in ex.status.value  # at once
    ex.wait(30)
    assert time.perf_counter() - began < limit_s and ex.history == [] and "cancelled" in ex.status.value
    ex.close()


@pytest.mark.parametrize("kind", ["exit_layer", "layer_explorer", "strategy_builder"])
def test_cancel_ends_a_long_prefill(kind, lab, monkeypatch):
    """A model that takes three milliseconds a token and layer range, and a prompt of 900: it is not waited for."""
    long = labkit.Lab(lab.model, lab.tokenizer)
    long.backbone.limit = 2000
    run = type(long.backbone).run

    def slow(self, x, start, stop, *rest):
        time.sleep(0.003 * x.shape[1])
        return run(self, x, start, stop, *rest)

    monkeypatch.setattr(type(long.backbone), "run", slow)
    cancelled_after(getattr(labkit.view, kind)(long, "ab" * 450), 0.3)


@pytest.mark.smollm2
@pytest.mark.parametrize("kind", ["exit_layer", "layer_explorer"])
@pytest.mark.parametrize("after", [0.5, 1.5])
def test_cancel_ends_a_long_prefill_of_a_real_model(smollm2, kind, after):
    cancelled_after(getattr(labkit.view, kind)(smollm2, [*range(1000, 2000)]), after)


@pytest.mark.smollm2
def test_the_replay_of_a_real_model_is_shown_at_once(smollm2):
    ex = labkit.view.exit_layer(smollm2, "def area(width, height):\n", max_new_tokens=48)
    ex.wait(120)
    for exit in (29, 20, 5):
        seen = []
        ex.strip.observe(lambda change, seen=seen: seen.append(time.perf_counter()), "value")
        began = time.perf_counter()
        ex.exit.value = exit
        ex.wait(120)
        ex.strip.unobserve_all()
        assert seen[0] - began < 0.1 and f"replayed: exit {exit}" in ex.table.value
        result = ex.result
        assert [r.accepted[0] for r in result.generation.rounds] == result.replayed.accepted
    ex.close()


def test_one_pass_foretells_every_exit(ex, monkeypatch):
    """The model's own forward is not called; a slider's move runs nothing but what is measured."""
    ex.wait(30)
    calls = []
    monkeypatch.setattr(shared, "measured", lambda lab, prompt, drafter, *rest: ex.result.generation)
    run = type(ex.lab.backbone).run
    monkeypatch.setattr(type(ex.lab.backbone), "run", lambda *given: calls.append(given) or run(*given))
    model = type(ex.lab.model)
    forward = model.forward

    def whole(self, input_ids=None, **how):
        calls.extend([] if input_ids is None else ["a forward of the whole model"])
        return forward(self, input_ids=input_ids, **how)

    monkeypatch.setattr(model, "forward", whole)
    ex.exit.value, ex.max_draft.value = 3, 7
    assert ex.wait(30).replayed is not None and "replayed: exit 3, max_draft 7" in ex.table.value and not calls
    ex.count.value = 5
    ex.wait(30)
    assert len(calls) == 5  # of a new text: embeddings and four layers, once


def test_what_is_foretold_is_what_was_drafted(ex):
    """Each accepted and rejected token, with its probabilities in the draft's law and in the target's."""
    ex.auto.value = False
    ex.exit.value, ex.max_draft.value = 2, 4
    result = ex.run(30)
    told = ex.known[next(key for key in ex.known if key[0] == "replay")].generation(2, 4)
    tell = lambda out: [p for p in out.pieces() if p.kind != "unjudged"]  # noqa: E731
    for one, other in zip(tell(told), tell(result.generation), strict=True):
        assert (one.kind, one.token, one.text, one.exit_layer if one.node is not None else 2) == (
            other.kind, other.token, other.text, 2)  # fmt: skip
        if one.node is not None:
            assert one.draft_probability == pytest.approx(other.draft_probability, abs=1e-5)
            assert one.target_probability == pytest.approx(other.target_probability, abs=1e-5)


def test_an_error_is_shown_and_raised_again(ex):
    ex.wait(30)
    ex.strategy.value = "broken"
    with pytest.raises(RuntimeError, match="no draft today"):
        ex.wait(30)
    assert "error: RuntimeError: &lt;b&gt;no draft today" in ex.status.value and "Traceback" in ex.status.value
    assert "<b>no" not in ex.status.value and "labkit-strip" not in ex.strip.value
    assert ex.image.layout.visibility == "hidden"  # an empty picture shows as a broken one
    with pytest.raises(RuntimeError):
        ex.wait(30)
    ex.strategy.value = "EarlyExit"
    assert ex.wait(30).same_text and "error" not in ex.status.value


@pytest.mark.parametrize(
    ("prompt", "words"), [("", "is empty"), ("A" * 500, "shorten the prompt|write max_new_tokens")]
)
def test_bad_prompts_are_explained(ex, prompt, words):
    ex.wait(30)
    ex.prompt.value = prompt
    with pytest.raises(LabkitError, match=words):
        ex.wait(30)
    assert "error: LabkitError" in ex.status.value


def test_another_model_moves_the_end_of_the_slider(lab):
    short = labkit.Lab(families.tiny("llama", layers=2), letters.tokenizer())
    ex = labkit.view.exit_layer(short, "ab", max_new_tokens=6)
    assert ex.wait(30).same_text and (ex.exit.min, ex.exit.max) == (1, 1)
    before = len(ex.history)
    ex.use(lab)
    assert ex.wait(30).same_text and ex.exit.max == 3 and len(ex.history) == before + 1
    ex.use(short)
    assert ex.wait(30).settings["exit"] == 1 and ex.exit.max == 1 and len(ex.history) == before + 2
    ex.close()


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("kind", ["exit_layer", "layer_explorer", "strategy_builder"])
def test_few_layers_and_bad_prompts(kind, layers):
    short = labkit.Lab(families.tiny("llama", layers=layers), letters.tokenizer())
    ex = getattr(labkit.view, kind)(short, "ab", max_new_tokens=6)
    assert ex.wait(30) is not None and "done" in ex.status.value and "<td" in ex.table.value
    if kind != "layer_explorer":
        assert ex.result.same_text and (ex.exit.min, ex.exit.max) == (1, 1)
    assert ("This model has one layer" in ex.table.value) == (kind == "exit_layer" and layers == 1)
    for prompt, words in (
        ("", "is empty; give at least one token"),
        ("A" * 500, "128 positions; shorten the prompt by"),
    ):
        ex.prompt.value = prompt
        with pytest.raises(LabkitError, match=words):
            ex.wait(30)
        assert f"error: LabkitError: {'prompt 0' if not prompt else 'a prompt of 500'}" in ex.status.value
        assert ex.table.value == "" and bytes(ex.image.value) == b""
    ex.prompt.value = "a"
    assert ex.wait(30) is not None and "error" not in ex.status.value
    ex.close()


def nothing(exit, max_draft):
    raise RuntimeError("not made today")


@pytest.mark.parametrize(
    ("strategies", "words"),
    [
        ([1], r"got strategies=\[1\]; write"),
        ({"mine": 3}, r"got strategies\['mine'\]=3; give"),
        ({"mine": lambda exit: Plain()}, r"cannot be called with \(exit, max_draft\)"),
    ],
)
def test_bad_strategies_are_refused(lab, strategies, words):
    with pytest.raises(LabkitError, match=words):
        labkit.view.exit_layer(lab, "ab", strategies=strategies)


@pytest.mark.parametrize(
    ("maker", "words"), [(nothing, "not made today"), (lambda exit, max_draft: "EarlyExit", "is not a draft strategy")]
)
def test_strategies_that_are_not_made_are_explained(lab, maker, words):
    ex = labkit.view.exit_layer(lab, "ab", max_new_tokens=6, strategies={"mine": maker})
    ex.wait(30)
    ex.strategy.value = "mine"
    with pytest.raises((LabkitError, RuntimeError), match=words):
        ex.wait(30)
    assert words in ex.status.value and "error: " in ex.status.value
    ex.close()


def test_settings_are_measured_once_unless_run_is_pressed(ex):
    first = ex.wait(30)
    ex.exit.value = 3
    ex.wait(30)
    ex.exit.value = first.settings["exit"]
    assert ex.wait(30).generation is first.generation and "cached" in ex.status.value
    ex.go.click()
    assert ex.wait(30).generation is not first.generation and "done" in ex.status.value
    ex.pin.click()
    assert "Pinned" in ex.pins.value and ex.pinned == [ex.result]


def test_sampling_and_no_auto_run(ex):
    ex.wait(30)
    ex.auto.value = False
    ex.temperature.value, ex.seed.value = 1.0, 3
    assert len(ex.history) == 1
    result = ex.run(30)
    assert result.same_text and result.replayed is None and "replayed" not in ex.table.value


def test_a_prompt_of_ids(lab):
    ex = labkit.view.exit_layer(lab, [3, 4, 5], max_new_tokens=6)
    assert ex.wait(30).generation.prompts == [[3, 4, 5]] and ex.prompt.disabled
    ex.close()


def test_fifty_updates_leave_nothing_behind(ex, live_bytes, unshaped):
    ex.wait(30)

    def update(count):
        for at in range(count):
            ex.exit.value, ex.max_draft.value = 1 + at % 3, 1 + at % 16
            ex.wait(30)
        held, kinds = live_bytes(), (Generation, Outcome, Session, Job, Foretold, ipywidgets.Widget, Figure)
        live = gc.get_objects()
        return held, [sum(isinstance(thing, kind) for thing in live) for kind in kinds]

    before, threads = update(48), threading.active_count()  # all that it may keep is kept by then
    after = update(50)
    assert after[0] <= before[0] * 1.05
    assert all(a <= b for a, b in zip(after[1], before[1], strict=True)), (before, after)
    assert after[1][0] <= 2 * shared.KEPT and after[1][2:5] == [0, 1, 1] and after[1][-1] == 0
    assert threading.active_count() <= threads and len(ex.known) <= shared.KEPT and len(ex.history) <= shared.KEPT


def test_running_a_cell_again_closes_the_old_explorer(lab, monkeypatch):
    made = lambda: labkit.view.exit_layer(lab, "ab", max_new_tokens=4)  # noqa: E731
    monkeypatch.setattr(shared, "origin", lambda: ("cell 1", "run 1"))
    first, beside = made(), made()
    assert not first.closed  # two in one run of a cell
    monkeypatch.setattr(shared, "origin", lambda: ("cell 2", "run 2"))
    other = made()
    assert not first.closed and not beside.closed
    monkeypatch.setattr(shared, "origin", lambda: ("cell 1", "run 3"))
    again = made()
    assert first.closed and beside.closed and not other.closed
    assert first.box.comm is None and first.exit.comm is None
    assert again.wait(30).same_text
    assert len(worker_of(lab).waiting) == 0 and sum(t.name == "labkit-worker" for t in threading.enumerate()) <= 2
    for one in (other, again):
        one.close()
    again.request()  # of a closed one: nothing
    assert again.wait(5)


@pytest.mark.parametrize("kind", ["exit_layer", "layer_explorer", "strategy_builder"])
def test_a_cell_can_be_run_twice(kind, lab):
    for _ in range(2):
        ex = getattr(labkit.view, kind)(lab, "ab", max_new_tokens=4)
        ex.wait(30)
        ex.close()


def test_pictures_do_without_ipywidgets():
    code = "import sys, labkit.view\nassert 'ipywidgets' not in sys.modules and 'matplotlib.pyplot' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        labkit.view.nothing
    assert issubclass(labkit.view.ExitLayerExplorer, shared.Explorer) and EarlyExit


def test_layer_explorer(lab):
    ex = labkit.view.layer_explorer(lab, "ab ab", max_new_tokens=8)
    found = ex.wait(60)
    assert len(found.texts) == 13 and ex.place.max == ex.first.max == 12
    assert ex.table.value.count("<tr>") == 1 + lab.backbone.depth and bytes(ex.image.value).startswith(b"\x89PNG")
    assert f"{found.top_probability[3, 0].item():.3f}" in ex.table.value
    before = bytes(ex.image.value)
    ex.place.value = 5
    assert (
        ex.wait(60) is found and "cached" in ex.status.value and f"{found.entropy[0, 5].item():.3f}" in ex.table.value
    )
    ex.colour.value = "rank"
    ex.wait(60)
    assert bytes(ex.image.value) != before
    count = len(ex.history)
    ex.prompt.value = "a"
    assert len(ex.wait(60).texts) == 9 and ex.place.max == 8 and len(ex.history) == count + 1
    ex.prompt.value = ""
    with pytest.raises(LabkitError, match="empty"):
        ex.wait(30)
    assert "error" in ex.status.value and ex.table.value == ""
    ex.close()


def test_strategy_builder(lab):
    ex = labkit.view.strategy_builder(lab, "ab ab ab", max_new_tokens=12)
    result = ex.wait(60)
    assert result.same_text and [o.name.split("(")[0] for o in ex.ablation] == ["PromptLookup", "EarlyExit"]
    assert result.name in ex.code.value.replace("&#x27;", "'") and ex.table.value.count("<tr>") == 5
    for form in ("exit", "lookup", "fallback back", "union", "plain"):
        ex.form.value = form
        assert ex.wait(60).same_text, form
    ex.auto.value = False
    ex.form.value, ex.at_most.value, ex.stop_below.value, ex.window.value, ex.share.value = "fallback", 2, 0.5, 8, False
    result = ex.run(60)
    assert result.name.startswith("AtMost(2") or "AtMost" in result.name
    assert result.same_text and len(ex.ablation) == 3
    ex.close()
