"""What one pass over the target tells of a model without labels."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from rehearsed_world import draw, make_record, trained
from torch import Tensor, nn

from shiftmend.inputs.feed import Feed
from shiftmend.profiles.rehearsal import Rehearsal
from shiftmend.verification import reading as reading_module
from shiftmend.verification.reading import (
    READ_SIGNALS,
    Reading,
    add_agreements,
    agree,
    as_class_logits,
    measure_outputs,
    read,
)
from shiftmend.verification.signals import observe
from shiftmend.verification.verdict import Verification

HOME = make_record(shares=torch.tensor([0.4, 0.3, 0.2, 0.1]), confusion=torch.zeros(0, 0), temperature=1.5)


def quantities() -> Rehearsal:
    return replace(
        HOME,
        task="quantities",
        shares=torch.empty(0),
        output_mean=torch.tensor([1.0, -2.0]),
        output_deviation=torch.tensor([2.0, 0.5]),
    )


def make_reading(answers: Tensor) -> Reading:
    return Reading({}, answers, answers, Verification(0.1, 0.01, len(answers)), len(answers))


def test_a_reading_holds_the_outputs_of_all_samples_and_the_divergences_of_verify() -> None:
    model, profile = trained()
    site = draw(300, 7)
    feed = Feed(site.inputs + 0.5, batch_size=64)
    found = read(model, feed, profile)
    with torch.no_grad():
        logits = model(site.inputs + 0.5)
    torch.testing.assert_close(found.outputs, logits, rtol=1e-4, atol=1e-5)
    assert found.answers.tolist() == logits.argmax(1).tolist()
    assert found.samples == 300
    seen = observe(model, feed, profile).verification
    assert seen is not None
    assert found.signals["slices"] == pytest.approx(seen.divergence, rel=1e-5)
    assert found.signals["marginals"] == pytest.approx(seen.marginals, rel=1e-5)
    assert found.verification.verdict == seen.verdict
    assert not model.training


def test_signals_that_compare_with_home_need_a_rehearsal() -> None:
    model, profile = trained()
    feed = Feed(draw(300, 7).inputs)
    bare, full = read(model, feed, profile), read(model, feed, profile, HOME)
    assert set(bare.signals) == {"slices", "marginals", "outside", "confidence", "certainty", "nuclear norm"}
    assert set(full.signals) == set(READ_SIGNALS) - {"spread", "offset"}


def test_signals_are_those_of_logits_divided_by_the_temperature_of_home() -> None:
    logits = 4 * torch.randn(200, 4, generator=torch.Generator().manual_seed(1))
    found = measure_outputs(logits, HOME).signals
    confidence = (logits / 1.5).softmax(1).amax(1)
    assert found["confidence"] == pytest.approx(float(confidence.mean()), rel=1e-5)
    above = float((confidence >= HOME.thresholds[0]).double().mean())
    assert found["confidence above threshold"] == pytest.approx(above)
    entropy = -torch.special.entr((logits / 1.5).softmax(1)).sum(1)
    assert found["certainty"] == pytest.approx(float(entropy.mean()), rel=1e-5)
    assert found["certainty above threshold"] == pytest.approx(float((entropy >= HOME.thresholds[1]).double().mean()))


def test_another_order_of_the_classes_shows() -> None:
    """Answers with the shares of home have no skew, and the same answers of permuted classes have one."""
    classes = torch.arange(4).repeat_interleave(torch.tensor([40, 30, 20, 10]))
    logits = 9.0 * torch.eye(4)[classes]
    right, permuted = measure_outputs(logits, HOME), measure_outputs(logits.flip(1), HOME)
    assert right.signals["skew"] < 0.01
    assert permuted.signals["skew"] > 0.25
    assert right.signals["transported confidence"] == pytest.approx(right.signals["confidence"], abs=0.02)
    assert permuted.signals["transported confidence"] < permuted.signals["confidence"] - 0.2
    assert permuted.answers.tolist() == [3 - label for label in classes.tolist()]


def test_the_temperature_in_a_head_is_taken_out_again() -> None:
    model, profile = trained()
    feed = Feed(draw(300, 7).inputs)
    cooled = nn.Sequential(*list(model[:-1]), nn.Linear(16, 4)).eval()
    with torch.no_grad():
        cooled[-1].weight.copy_(model[-1].weight / 3)
        cooled[-1].bias.copy_(model[-1].bias / 3)
    plain, undone = read(model, feed, profile, HOME), read(cooled, feed, profile, HOME, temperature=3.0)
    torch.testing.assert_close(undone.outputs, plain.outputs, rtol=1e-4, atol=1e-4)
    for name, value in plain.signals.items():
        assert undone.signals[name] == pytest.approx(value, rel=1e-3, abs=1e-4), name


def test_a_single_logit_is_that_of_the_second_class() -> None:
    logits = torch.tensor([[2.0], [-1.0], [0.5]])
    both = as_class_logits(logits)
    np.testing.assert_allclose(both.softmax(1)[:, 1], torch.sigmoid(logits[:, 0]), rtol=1e-6)
    binary = replace(HOME, shares=torch.tensor([0.5, 0.5]), temperature=1.0)
    found = measure_outputs(logits, binary)
    assert found.answers.tolist() == [1, 0, 1]
    assert found.signals["confidence"] == pytest.approx(float(torch.sigmoid(logits.abs()).mean()))


def test_quantities_are_compared_with_mean_and_deviation_of_home() -> None:
    outputs = torch.tensor([[1.0, 0.0], [5.0, 0.0], [3.0, 1.5], [3.0, -1.5]])
    found = measure_outputs(outputs, quantities())
    assert found.answers is outputs
    deviations = outputs.numpy().std(0)
    assert found.signals["spread"] == pytest.approx(np.mean(deviations / [2.0, 0.5]))
    assert found.signals["offset"] == pytest.approx(np.mean([(3 - 1) / 2, (0 + 2) / 0.5]))


def test_outputs_that_are_no_numbers_have_no_signals() -> None:
    broken = torch.full((5, 4), math.nan)
    assert measure_outputs(broken, HOME).signals == {}
    assert measure_outputs(broken[:, :2], quantities()).signals == {}


def test_too_many_outputs_are_thinned(monkeypatch: pytest.MonkeyPatch) -> None:
    model, profile = trained()
    feed = Feed(draw(300, 7).inputs, batch_size=100)
    whole = read(model, feed, profile, HOME)
    monkeypatch.setattr(reading_module, "MAX_KEPT_VALUES", 300)
    thin = read(model, feed, profile, HOME)
    assert len(thin.outputs) == 75
    torch.testing.assert_close(thin.outputs, torch.cat([part[::4] for part in whole.outputs.split(100)]))
    assert thin.samples == 300
    assert thin.signals["slices"] == whole.signals["slices"]


def test_agreement_is_the_share_of_equal_answers() -> None:
    one, other = make_reading(torch.tensor([0, 1, 2, 2])), make_reading(torch.tensor([0, 1, 1, 2]))
    assert agree(one, other) == 0.75
    assert agree(one, make_reading(torch.tensor([0, 1]))) is None
    joined = add_agreements({"a": one, "b": other})
    assert joined["a"] == {"agreement with b": 0.75}
    assert joined["b"] == {"agreement with a": 0.75}


def test_agreement_of_quantities_is_a_negative_distance_in_deviations_of_home() -> None:
    one, other = torch.zeros(3, 2), torch.tensor([[2.0, 0.5], [2.0, 0.5], [0.0, 0.0]])
    joined = add_agreements({"a": make_reading(one), "b": make_reading(other)}, quantities())
    assert joined["a"]["agreement with b"] == pytest.approx(-math.sqrt(4 / 6))
    assert agree(make_reading(one), make_reading(one)) == 0
