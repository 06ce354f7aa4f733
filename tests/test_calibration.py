"""Learn-then-Test keeps its level, and finds the loosest threshold of rules, depths and drafters."""

import math
from fractions import Fraction

import families
import pytest
import torch
from calm import COUNT, PROMPTS, lab_of, never

import labkit
from labkit import LabkitError, agreement, calibrate, calibration
from labkit.calibration import Calibration, hoeffding, hoeffding_bentkus, passing
from labkit.compare import differences

# -- p-values -----------------------------------------------------------------------------------------------


def test_hoeffding_by_hand():
    assert hoeffding(0.1, 70, 0.2) == pytest.approx(math.exp(-1.4)) == pytest.approx(0.2465969639)
    assert hoeffding(0.2, 70, 0.2) == hoeffding(0.9, 70, 0.2) == 1


@pytest.mark.parametrize("n", [1, 7, 70])
@pytest.mark.parametrize("tolerance", [Fraction(1, 20), Fraction(1, 3), Fraction(9, 10)])
def test_hoeffding_bentkus_by_fractions(n, tolerance):
    for wrong in range(n + 1):
        mean = Fraction(wrong, n)
        tail = sum(math.comb(n, k) * tolerance**k * (1 - tolerance) ** (n - k) for k in range(wrong + 1))
        entropy = sum(float(a) * math.log(a / b) for a, b in ((mean, tolerance), (1 - mean, 1 - tolerance)) if a)
        wanted = 1 if mean >= tolerance else min(1, math.exp(-n * entropy), math.e * tail)
        found = hoeffding_bentkus(float(mean), n, float(tolerance))
        assert found == pytest.approx(wanted, rel=1e-9)
        assert found <= hoeffding(float(mean), n, float(tolerance)) + 1e-12
        if wrong and mean < tolerance:  # between two counts Bentkus takes the higher
            assert hoeffding_bentkus(float(mean) - 0.4 / n, n, float(tolerance)) <= found


@pytest.mark.parametrize("bound", [hoeffding, hoeffding_bentkus])
@pytest.mark.parametrize("tolerance", [0.05, 0.3])
def test_p_values_are_valid(bound, tolerance):
    """At the edge of the null, where the risk is a coin of just that bias, P(p <= u) <= u: summed exactly."""
    n = 40
    law = [math.comb(n, k) * tolerance**k * (1 - tolerance) ** (n - k) for k in range(n + 1)]
    found = [bound(k / n, n, tolerance) for k in range(n + 1)]
    for u in (0.01, 0.05, 0.1, 0.3, 0.7):
        assert sum(w for w, p in zip(law, found) if p <= u) <= u
    wrong = [bound(k / n, 50 * n, tolerance) for k in range(n + 1)]  # as if tokens, fifty a prompt, were the unit
    assert any(sum(w for w, p in zip(law, wrong) if p <= u) > u for u in (0.01, 0.05, 0.1, 0.3))


# -- fixed-order testing ------------------------------------------------------------------------------------


def test_fixed_order():
    assert passing([0.01, 0.05, 0.2, 0.001], 0.1) == 2
    assert passing([0.2, 0.01], 0.1) == 0 and passing([0.1, 0.1], 0.1) == 2


def test_the_level_holds_and_picking_the_best_breaks_it():
    """Thirty thresholds whose true risk is just too high: any that is kept is a false promise."""
    generator, n, tolerance, level, trials = torch.Generator().manual_seed(0), 60, 0.2, 0.1, 2000
    risk = tolerance + 1e-9
    draws = (torch.rand((trials, 30, n), generator=generator) < risk).double().mean(-1)
    p = [[hoeffding_bentkus(mean, n, tolerance) for mean in row] for row in draws.tolist()]
    ordered = sum(passing(row, level) > 0 for row in p) / trials
    picked = sum(min(row) <= level for row in p) / trials
    assert 0 < ordered <= level
    assert picked > 2 * level


def test_the_level_holds_where_risks_rise():
    """Risks of one prompt depend on one another, and rise with the threshold: the kept one is good often enough."""
    generator, n, tolerance, level, trials = torch.Generator().manual_seed(1), 60, 0.2, 0.1, 2000
    true = torch.tensor([0.05, 0.1, 0.15, 0.2 + 1e-9, 0.3])
    coins = torch.rand((trials, 1, n), generator=generator)
    means = (coins < true[:, None]).double().mean(-1).tolist()
    kept = [passing([hoeffding_bentkus(m, n, tolerance) for m in row], level) for row in means]
    assert sum(at > 3 for at in kept) / trials <= level
    assert sum(at >= 1 for at in kept) / trials > 0.9  # and it is of use


# -- calibrate ------------------------------------------------------------------------------------------------


def test_calibrating_exits():
    lab, prompts, told = lab_of(), families.prompts(20), []
    options = dict(max_new_tokens=COUNT, exit_layers=(2, 3))
    found = calibrate(lab, prompts, labkit.confidence, [1.0, 0.9, 0.5], target=0.7, progress=told.append, **options)
    assert len(told) == 3 and found.measure == "agreement" and found.prompts == 20
    for row in found.tested:
        one = agreement(lab, prompts, labkit.confidence(row.threshold), **options)
        assert row.risks == [1 - share for share in one.shares] and row.gives == one.depth
        assert row.risk == pytest.approx(1 - one.mean)
        assert row.p_value == hoeffding_bentkus(row.risk, 20, 1 - 0.7)
    kept = passing([row.p_value for row in found.tested], 1 - 0.9)
    assert 0 < kept < 3 and found.threshold == [1.0, 0.9, 0.5][kept - 1]
    shown = str(found).splitlines()
    assert shown[0].split()[0] == "threshold" and len(shown) == 2 + 3 + 2 and "yes" in shown[2]
    assert f"{found.threshold!r} is kept: agreement of at least 0.7" in shown[5] and "90% confidence" in shown[5]
    assert found._repr_html_().count("<tr>") == 4


def test_calibrating_numbers_of_layers():
    found = calibrate(
        lab_of(), families.prompts(12), lambda exit: exit, [4, 3], target=0.7, max_new_tokens=COUNT, bound=hoeffding
    )
    assert [row.gives for row in found.tested] == [4, 3] and found.tested[0].p_value == hoeffding(0, 12, 1 - 0.7)


def test_calibrating_a_drafter():
    lab, prompts = lab_of(), families.prompts(8)
    make = lambda ngram: labkit.PromptLookup(ngram=ngram, max_draft=3)  # noqa: E731
    found = calibrate(lab, prompts, make, [9, 1], target=0.3, max_new_tokens=COUNT)
    assert found.measure == "acceptance rate"
    for row in found.tested:
        outs = [lab.generate(prompt, make(row.threshold), max_new_tokens=COUNT) for prompt in prompts]
        assert row.risks == [1 - out.acceptance_rate if out.drafted else 0.0 for out in outs]
        assert row.gives == pytest.approx(sum(o.new_tokens for o in outs) / sum(len(o.rounds) for o in outs))
    assert found.tested[1].risk > 0


def test_nothing_drafted_wastes_nothing():
    found = calibrate(lab_of(), PROMPTS, lambda t: labkit.Plain(), [1], target=0.3, max_new_tokens=4)
    assert found.tested[0].risks == [0.0] * 3 and found.tested[0].gives == 1


def example(risks, target=0.8, bound=hoeffding, confidence=0.9):
    tested = [calibration.Tested(t, r, bound(sum(r) / len(r), len(r), 1 - target), 3.0) for t, r in enumerate(risks)]
    kept = passing([row.p_value for row in tested], 1 - confidence)
    return Calibration(kept - 1 if kept else None, target, confidence, "agreement", tested, bound)


def test_what_prompts_cost():
    found = example([[0.0] * 70])
    assert found.hoeffding_cost == pytest.approx(0.1282, abs=1e-4)
    assert found.allowed == pytest.approx(0.2 - 0.12825, abs=2e-4)
    assert "with 70 prompts Hoeffding at 90% costs ±0.13" in str(found) and "up to 0.072 passes" in str(found)
    sharper = example([[0.0] * 70], bound=hoeffding_bentkus)
    assert sharper.allowed > found.allowed


def test_what_would_have_been_reachable():
    found = example([[0.25] * 70, [0.0] * 70])
    assert found.threshold is None and found.reachable == pytest.approx(1 - 0.25 - 0.12825, abs=2e-4)
    assert "no threshold is kept" in str(found) and f"target={found.reachable:.4g}" in str(found)
    for slack, kept in ((-1e-4, 0), (2e-4, None)):
        assert example([[0.25] * 70], target=found.reachable + slack).threshold == kept
    assert example([[1.0] * 70]).reachable is None and "no target would" in str(example([[1.0] * 70]))


def test_too_few_prompts_for_any_risk():
    found = example([[0.0] * 5], target=0.9)
    assert found.threshold is None and found.allowed is None
    assert "give at least 116" in str(found)  # ln(10) / (2 * 0.1^2) = 115.1
    assert example([[0.0] * 116], target=0.9).threshold == 0 and example([[0.0] * 115], target=0.9).threshold is None


# -- bad input ----------------------------------------------------------------------------------------------


def tried(make=labkit.confidence, thresholds=(0.9,), prompts=PROMPTS, target=0.8, **options):
    return lambda: calibrate(lab_of(), prompts, make, thresholds, target=target, max_new_tokens=4, **options)


def asked(**options):
    return lambda: lab_of().generate([1, 2], max_new_tokens=4, **options)


def shapeless(layer, before, after, logits, step):
    return torch.ones(1, 1, dtype=torch.bool)


BAD = {
    "no prompts": (tried(prompts=[]), "empty list of prompts; give at least one"),
    "prompts of no kind": (tried(prompts=None), "prompt of type NoneType; write text"),
    "no thresholds": (tried(thresholds=[]), r"got thresholds=\[\]; write a list from strict to loose"),
    "one threshold": (tried(thresholds=0.9), "got thresholds=0.9; write a list"),
    "a set of thresholds": (tried(thresholds={0.9, 0.8}), "got thresholds=.*write a list"),
    "target 1": (tried(target=1), "got target=1; needed is a number between 0 and 1, write target=0.9"),
    "target text": (tried(target="0.9"), "got target='0.9'; needed is"),
    "target nan": (tried(target=math.nan), "got target=nan; needed is"),
    "confidence 0": (tried(confidence=0), "got confidence=0; needed is a number between 0 and 1, write"),
    "confidence in percent": (tried(confidence=90), "got confidence=90; needed is"),
    "make is a rule's name": (tried(make="confidence"), "got make='confidence'; write a function of a threshold"),
    "make returns None": (tried(make=lambda t: None), r"make\(0.9\) returned None; needed is a drafter"),
    "make returns True": (tried(make=lambda t: True), r"make\(0.9\) returned True; needed is"),
    "make returns a class": (tried(make=lambda t: labkit.confidence), r"early_exit=.*a rule such as labkit.confidence\(0.9\)"),
    "make returns both": (
        tried(make=lambda t: labkit.PromptLookup() if t == 1 else 2, thresholds=[1, 2]), "drafters for some.*one at a time"
    ),
    "threshold out of range": (tried(thresholds=[1.5]), r"got confidence\(1.5\); the threshold is a number from 0 to 1"),
    "bound": (tried(bound="hoeffding"), "got bound='hoeffding'; write labkit.calibration.hoeffding or"),
    "a bound that says text": (tried(bound=lambda m, n, t: "0.1"), "bound .* returned '0.1'; needed is a p-value from 0 to 1; write"),
    "a bound above 1": (tried(bound=lambda m, n, t: 1.5), "returned 1.5; needed is a p-value"),
    "a bound of two": (tried(bound=lambda m, n: 0.1), r"bound=.*cannot be called with \(mean, prompts, tolerance\)"),
    "progress None": (tried(progress=None), "got progress=None; write a function of a text, such as print, or leave it out"),
    "progress of nothing": (tried(progress=lambda: None), r"progress=.*cannot be called with \(text\)"),
    "a rule of one argument": (asked(early_exit=lambda layer: True), r"early_exit=.*cannot be called with \(layer, hid"),
    "the last is too deep": (tried(make=int, thresholds=[4, 9]), "early_exit=9.*4 layers; write an int from 1 to 4"),
    "exit_layers of a drafter": (tried(make=lambda t: labkit.PromptLookup(), exit_layers=(1,)), "exit_layers=.*is none; write"),
    "a rule of the wrong shape": (tried(make=lambda t: shapeless), r"returned \(1, 1\), torch.bool at layer 1; needed is"),
    "agreement with nothing": (lambda: agreement(lab_of(), PROMPTS, None), "got early_exit=None; write a number of layers"),
    "early_exit text": (asked(early_exit="9"), r"early_exit='9'.*write an int from 1 to 4.*rule such as labkit.confidence"),
    "early_exit -1": (asked(early_exit=-1), "early_exit=-1, but.*write an int from 1 to 4"),
    "early_exit a class": (asked(early_exit=labkit.margin), r"early_exit=.*write a layer's number, or a rule such as labkit"),
    "exit_layers alone": (asked(exit_layers=(1, 2)), r"exit_layers=\(1, 2\).*early_exit=None is none; write.*confidence"),
    "exit_layers and a number": (asked(early_exit=2, exit_layers=(1,)), "early_exit=2 is none; write"),
    "exit_layers text": (asked(early_exit=never, exit_layers="12"), "got exit_layers='12'; write depths from 1 to 4"),
    "exit_layers too deep": (asked(early_exit=never, exit_layers=(1, 9)), r"got exit_layers=\(1, 9\) with 9; the target has"),
    "a rule that answers with a number": (
        asked(early_exit=lambda *a: 1.0), "returned 1.0 at layer 1; needed is a tensor of shape"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_explained(name):
    call, message = BAD[name]
    with pytest.raises(LabkitError, match=f"(?s){message}"):
        call()


@pytest.mark.smollm2
def test_on_the_real_model(smollm2):
    """The full depth agrees but for near-ties, and a rule that is never sure enough reads every token at the top."""
    ids = smollm2.tokenizer("The capital of France is")["input_ids"]
    strict = dict(early_exit=labkit.margin(1.0), exit_layers=(24, 27), max_new_tokens=16)
    plain, out = smollm2.generate(ids, max_new_tokens=16), smollm2.generate(ids, **strict)
    assert all(d.near_tie for d in differences(smollm2.backbone, [ids], plain.tokens, out.tokens))
    found = agreement(smollm2, [ids], labkit.confidence(0.9), exit_layers=(24, 27), max_new_tokens=16)
    assert 0 < found.mean <= 1 and 24 <= found.depth < 30
