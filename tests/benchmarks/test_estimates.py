"""The script that measures estimates: sites, calibration, jobs of several processes."""

from __future__ import annotations

import math
import pickle

import numpy as np
import pytest
import torch

import estimates
from bench_models import TimeUp, _call
from estimates import FEW_SAMPLES, TEMPERATURES, find_calibration, make_site, measure_auroc
from shiftmend.research.datasets.partitions import halves


def test_auroc_counts_pairs() -> None:
    rng = np.random.default_rng(0)
    # Few values, so that there are ties.
    confidence, correct = rng.integers(0, 8, 60) / 8, rng.random(60) < 0.7
    pairs = [(right > wrong) + (right == wrong) / 2 for right in confidence[correct] for wrong in confidence[~correct]]
    assert measure_auroc(confidence, correct) == pytest.approx(np.mean(pairs))
    assert math.isnan(measure_auroc(confidence, np.ones(60, bool)))


def test_calibration_is_read_where_confidence_equals_the_estimate() -> None:
    confidence = np.linspace(0.99, 0.2, len(TEMPERATURES))
    measured = {"confidence": confidence.tolist(), "ece": np.abs(confidence - 0.7).tolist()}
    found = find_calibration(measured, 1.0, 0.75, 0.7)["ece"]
    assert found["estimate"] == pytest.approx(0.05, abs=1e-3)
    assert found["oracle"] == pytest.approx(0.0, abs=0.02)
    assert found["raw"] == found["home"]
    # Without an estimate the temperature of home stays; figures that were not stored are left out.
    withheld = find_calibration(measured, 2.0, None, 0.7)
    assert withheld["ece"]["estimate"] == withheld["ece"]["home"]
    assert "auroc" not in withheld


def test_few_samples_are_scored_on_others(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = torch.arange(100)
    monkeypatch.setattr(estimates, "load_scored", lambda *given: (numbers.view(-1, 1, 1, 1), numbers % 10))
    home, place = halves(numbers % 10)
    assert not set(home.tolist()) & set(place.tolist())
    site = make_site("digits", f"{FEW_SAMPLES} samples/1", None, place, 0)
    assert site.others is not None
    seen, scored = (set(images.flatten().tolist()) for images in (site.images, site.others[0]))
    assert len(seen) == FEW_SAMPLES
    assert seen | scored == set(place.tolist())
    assert not seen & scored


def test_jobs_begin_only_within_the_time_limit() -> None:
    job = pickle.dumps((max, (1, 2), {}))
    assert _call(job, math.inf) == 2
    with pytest.raises(TimeUp):
        _call(job, 0.0)
