from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import private
import shiftmend
from bench_models import RowFile
from shiftmend.profiles import privacy

MANIFEST = {"environment": {"device": "cpu", "torch": "2"}, "weights_sha256": "0" * 64}


def test_an_attack_that_always_knows_has_the_whole_advantage_and_a_guess_has_none() -> None:
    rng = np.random.default_rng(0)
    perfect = private.measure_advantage(torch.ones(400), torch.zeros(400), rng)
    assert perfect == {"advantage": 1.0, "auc": 1.0, "certain": 1.0}
    guess = private.measure_advantage(*torch.rand(2, 4000, generator=torch.Generator().manual_seed(0)), rng)
    assert abs(guess["advantage"]) < 0.05
    assert guess["auc"] == pytest.approx(0.5, abs=0.02)


def test_extremes_tell_who_was_at_home() -> None:
    torch.manual_seed(0)
    model = private.build_network().eval()
    home, others = torch.rand(2, 60, 1, 14, 14)
    with torch.no_grad():
        taps = [(model[:-1](images), model(images)) for images in (home, others)]
    asked = tuple(torch.cat(parts) for parts in zip(*taps, strict=True))
    profile = shiftmend.profile(model, home, progress=False)
    scores = private.attack(profile, asked, taps[1])
    assert scores["extremes"][:60].min() >= 0
    assert scores["extremes"][60:].min() < 0
    assert scores["all"][:60].mean() > scores["all"][60:].mean()


def test_noise_from_a_file_is_scaled_and_paid_for(tmp_path: Path) -> None:
    drawn = np.random.default_rng(0).normal(0, private.NOISE_SCALE, 5000).astype(np.int32)
    np.savez(tmp_path / "noise.npz", noise=drawn, epsilons=np.array([1.0]), rhos=np.array([0.02]))
    with private.use_noise(tmp_path / "noise.npz"):
        assert privacy.find_rho(1.0, 1e-6) == 0.02
        noisy, rho = privacy.add_noise(torch.zeros(12_000, dtype=torch.int64), 10.0, 1e6)
    assert rho == pytest.approx(100 / 2e12)
    assert float(noisy.double().std()) == pytest.approx(1e6, rel=0.05)


def test_the_page_has_what_was_measured(tmp_path: Path) -> None:
    accuracy = RowFile(None, private.ACCURACY)
    for epsilon, value in ((private.EXACT, 0.9), (1.0, 0.895)):
        row = {"accuracy": value, "samples": 1000, "noise": 5.0, "histograms": 3, "verdict": "restored"}
        accuracy.add(("mnist", "stripe", "fr", epsilon, 0, 0), row, MANIFEST)
    membership = RowFile(None, private.MEMBERSHIP)
    membership.add((1000, private.EXACT, "extremes", 0), {"advantage": 0.25, "auc": 0.6, "certain": 0.1}, MANIFEST)
    page = private.write_page(accuracy, membership)
    assert "| mnist | `fr` | – | – | 0.50 (worst 0.50, 1 run) | – |" in page
    assert "| stripe | `fr` | 90.0 | – | – | 89.5 | – |" in page
    assert "+0.250" in page
