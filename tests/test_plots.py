"""Pictures: every number is one of to_pandas(), every axis says its unit, nothing is cut, and no pyplot."""

import sys
from types import SimpleNamespace

import letters
import pytest
import torch
from looks import readable

import labkit
from labkit import EarlyExit, LabkitError, Plain
from labkit.view import acceptance, cost_bars, curves, heatmap, pareto, speedup
from labkit.view.depth_explorer import by_layer
from labkit.view.exit_explorer import Foretold
from labkit.view.heatmap import COLOURS, short
from labkit.view.plots import by_position, costs, wilson
from labkit.view.speed import by_exit

pd = pytest.importorskip("pandas")


@pytest.fixture(scope="module")
def table():
    return letters.lab().compare(letters.TEXTS, [EarlyExit(2, 3), EarlyExit(3, 5)], max_new_tokens=14)


@pytest.fixture(scope="module")
def outs(table):
    return table.generations[repr(EarlyExit(2, 3))]


def checked(figure):
    """Drawn without warnings; axes with units at 10 points; nothing outside the figure; readable, light or dark."""
    assert figure._repr_png_().startswith(b"\x89PNG") and "matplotlib.pyplot" not in sys.modules
    renderer = figure.canvas.get_renderer()
    for axes in figure.axes:
        assert axes.get_ylabel() and (axes.get_xlabel() or axes.get_label() == "<colorbar>")
        ticks = [tick.label1 for axis in (axes.xaxis, axes.yaxis) for tick in axis._update_ticks()]  # those in sight
        titles = [axes.title, axes._left_title]
        for text in [axes.xaxis.label, axes.yaxis.label, *ticks, *axes.texts, *titles]:
            if text.get_text() and text.get_visible():
                box = text.get_window_extent(renderer)
                inside = box.x0 >= -1 and box.y0 >= -1 and box.x1 <= figure.bbox.x1 + 1 and box.y1 <= figure.bbox.y1 + 1
                assert inside, text.get_text()
        assert all(label.get_size() == 10 for label in (axes.xaxis.label, axes.yaxis.label) if label.get_text())
    return readable(figure)


def test_acceptance_is_what_the_tables_say(outs):
    bars, places = checked(acceptance(outs)).axes
    rounds = pd.concat([out.to_pandas("round") for out in outs])
    rounds = rounds[rounds.drafted > 0]
    heights = {round(bar.get_x() + 0.4): bar.get_height() for bar in bars.patches}
    assert {k: n for k, n in heights.items() if n} == rounds.accepted.value_counts().to_dict()
    assert f"mean {rounds.accepted.mean():.2f}" in bars.get_title(loc="left")
    tokens = pd.concat([out.to_pandas("token") for out in outs])
    judged = tokens[tokens.kind.isin(["accepted", "rejected"])]
    share = judged.groupby("depth").kind.apply(lambda kind: (kind == "accepted").mean())
    assert list(places.lines[0].get_ydata()) == pytest.approx(share.tolist())
    assert [int(text.get_text()) for text in places.texts] == judged.groupby("depth").size().tolist()
    hits, of = zip(*by_position(outs).values(), strict=True)
    assert sum(hits) / sum(of) == pytest.approx(
        sum(o.accepted for o in outs) / sum(o.accepted + o.rejections for o in outs)
    )


def test_the_interval():
    assert wilson(0, 10) == pytest.approx((0, 0.2775), abs=1e-3) and wilson(8, 10) == pytest.approx(
        (0.490, 0.943), abs=1e-3
    )


def test_nothing_drafted_is_explained(table):
    with pytest.raises(LabkitError, match="nothing was drafted"):
        acceptance(table.generations[repr(Plain())])
    with pytest.raises(LabkitError, match=r"add labkit.Plain"):
        pareto({"only": table.generations[repr(EarlyExit(2, 3))]})


def test_cost_bars_add_up(table):
    [axes] = checked(cost_bars(table)).axes
    for at, outs in enumerate(table.generations.values()):
        row = [bar for bar in axes.patches if round(bar.get_y() + 0.33) == at]
        runs = pd.concat([out.to_pandas("run") for out in outs])
        ends = max(bar.get_x() + bar.get_width() for bar in row)
        assert ends == pytest.approx(1000 * runs.seconds.sum() / runs.new_tokens.sum())
        parts = dict(zip(costs(outs), row, strict=True))
        for part, name in (
            ("draft", "draft_ms"),
            ("verify", "verify_ms"),
            ("accept", "accept_ms"),
            ("cache", "commit_ms"),
        ):
            assert parts[part].get_width() == pytest.approx(runs[name].sum() / runs.new_tokens.sum())


def test_pareto(table):
    [axes] = checked(pareto(table)).axes
    points = {
        line.get_label().split()[0]: line.get_xydata()[0].tolist()
        for line in axes.lines
        if line.get_label()[0] in "123"
    }
    assert points["1"] == [1.0, 1.0]
    for number, (name, outs) in enumerate(table.generations.items(), 1):
        runs = pd.concat([out.to_pandas("run") for out in outs])
        assert points[str(number)][1] == pytest.approx(runs.new_tokens.sum() / runs.row_rounds.sum())


def test_speedup_tells_replayed_from_measured():
    surface = pd.DataFrame(
        [(e, g, 0.5 + e / 10 + g / 20) for e in (1, 2, 3) for g in (1, 2, 4, 6, 8)],
        columns=["exit_layer", "max_draft", "predicted_speedup"],
    )
    measured = pd.DataFrame(
        [(2, 1, 0.8, 0.7, 0.95, 0.6, 0.3, 1.1)],
        columns="exit_layer max_draft speedup speedup_q1 speedup_q3 alpha c v".split(),
    )
    figure = checked(speedup(surface, measured, "cpu, float32, $1$ thread"))
    [axes] = figure.axes
    lines = {line.get_label(): line for line in axes.lines}
    assert lines["γ = 1, replayed"].get_ydata().tolist() == pytest.approx([0.65, 0.75, 0.85])
    assert lines["γ = 1, bound"].get_ydata().tolist() == pytest.approx([1.6 / 1.4])
    assert lines["γ = 1, replayed"].get_markerfacecolor() == "white" and any(
        t.get_text() == "slower" for t in axes.texts
    )
    assert {"γ = 1", "replayed", "measured (median, quartiles)", "bound from α, c, v"} <= {
        text.get_text() for text in figure.legends[0].get_texts()
    }
    with pytest.raises(LabkitError, match="no column 'predicted_speedup'"):
        speedup(measured)


def test_speedup_takes_what_replay_and_sweep_give(recwarn):
    lab, lengths = letters.lab(), (1, 3)
    plain = lab.generate(letters.TEXTS[0], max_new_tokens=14)
    surface = labkit.replay(lab, plain, max_draft=3).surface(lambda source, length: (0.4, 1.1), thresholds=[None, 0.5])
    grid = [EarlyExit(e, k) for e in (1, 3) for k in lengths] + [labkit.PromptLookup(max_draft=3)]
    measured = labkit.sweep(lab, letters.TEXTS[0], grid, max_new_tokens=14, repeats=2).to_pandas()
    assert measured.exit_layer.isna().sum() == 2 and surface.exit_layer.isna().any()  # plain decoding and n-grams
    [axes] = checked(speedup(surface, measured, max_drafts=lengths)).axes
    dots = {box.get_label(): box.lines[0].get_xydata().tolist() for box in axes.containers}
    lines = {line.get_label(): line.get_xydata().tolist() for line in axes.lines}
    for length in lengths:
        real = measured[(measured.max_draft == length) & measured.exit_layer.notna()]
        assert dots[f"γ = {length}, measured"] == real[["exit_layer", "speedup"]].to_numpy(float).tolist()
        part = surface[(surface.max_draft == length) & surface.exit_layer.notna()]
        best = part.groupby("exit_layer").predicted_speedup.max()
        assert [y for _, y in lines[f"γ = {length}, replayed"]] == best.tolist()
        whole = part[part.threshold.isna()]
        bound = [sum(a**k for k in range(length + 1)) / (length * 0.4 + 1.1) for a in whole.alpha]
        assert [y for _, y in lines[f"γ = {length}, bound"]] == pytest.approx(bound, rel=1e-6)
    assert not recwarn.list, recwarn.list[0].message


def test_curves_of_a_run():
    rows = [{"step": s, "tokens": 8 * s, "seconds": s / 2, "loss": 9 - s / 10} for s in (10, 20, 25)]
    for at, step in enumerate((12, 25), 1):
        judged = {"head_1": 0.2 * at, "head_2": 0.1 * at, "alpha": 0.3, "tokens_per_round": 1 + at}
        rows.append({"step": step, "tokens": 8 * step, "seconds": step / 2, **judged})
    loss, heads = checked(curves(SimpleNamespace(curves=rows), "head")).axes
    assert loss.lines[0].get_xydata().tolist() == [[10, 8], [20, 7], [25, 6.5]]
    assert {line.get_label(): line.get_xydata().tolist() for line in heads.lines} == {
        "head 1": [[12, 0.2], [25, 0.4]], "head 2": [[12, 0.1], [25, 0.2]]}  # fmt: skip
    assert checked(curves(rows)).axes[1].lines[0].get_ydata().tolist() == [2, 3]
    with pytest.raises(LabkitError, match="evaluations of this run have loss, head_1, head_2, alpha"):
        curves(rows, "agree")


NASTY = ["$x$", "\n    ", "漢字", "<b>", "e\u0301", "\0", "שלום", "👩‍👩‍👧", "averylongtoken", ""]


@pytest.mark.parametrize("colour", COLOURS)
def test_heatmap(colour, recwarn):
    values = torch.rand(4, 10)
    layers = SimpleNamespace(
        texts=NASTY, top_text=[NASTY[::-1]] * 4, top_probability=values, entropy=values * 8,
        final_rank=1 + (values * 900).long(), first_agreeing=torch.tensor([1, 2, 3, 4, 4, 3, 2, 1, 1, 4]),
    )  # fmt: skip
    figure = checked(heatmap(layers, colour))
    axes = figure.axes[0]
    shown = {"probability": values, "entropy": values * 8, "rank": layers.final_rank}[colour]
    assert torch.equal(torch.from_numpy(axes.images[0].get_array().data.copy()), shown.float())
    assert [round(frame.get_y() + 0.46) for frame in axes.patches] == layers.first_agreeing.tolist()
    assert not any(text.get_parse_math() for text in [*axes.texts, *axes.get_xticklabels()])
    assert [text.get_text() for text in axes.texts][:10] == [short(text) for text in NASTY[::-1]]
    assert not recwarn.list, recwarn.list[0].message
    part = heatmap(layers, colour, 2, 5)
    assert part.axes[0].images[0].get_array().shape == (4, 3)
    for wrong in ({"colour": "red"}, {"start": 10}, {"start": 3, "stop": 3}):
        with pytest.raises(LabkitError, match="got"):
            heatmap(layers, **wrong)


def test_heatmap_of_a_model():
    layers = labkit.layers(letters.lab(), letters.TEXTS[2])
    axes = checked(heatmap(layers)).axes[0]
    told = layers.to_pandas().pivot(index="layer", columns="position", values="top_probability")
    assert axes.images[0].get_array().data == pytest.approx(told.iloc[:, :16].to_numpy())
    checked(by_layer(layers))


def test_by_exit(table):
    foretold = Foretold(letters.lab(), table.generations[repr(Plain())][0])
    [axes] = checked(by_exit(foretold, 2, 3)).axes
    assert axes.lines[0].get_ydata()[1] == foretold.rounds(2, 3).tokens_per_round
