from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from same_profiles import same
from torch import Tensor, nn
from typer.testing import CliRunner

import shiftmend
from shiftmend.cli import app
from shiftmend.errors import ProfileError
from shiftmend.profiles import privacy
from shiftmend.profiles import serialize as profile_files
from shiftmend.profiles.privacy import ONE, Budget, EvenCounter, Guarantee, Privacy, SoftCounter
from shiftmend.profiles.profile import Profile
from shiftmend.stats.histograms import Bins
from shiftmend.verification.verdict import judge


def make_model() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 3)).eval()


def draw(samples: int = 4000, seed: int = 0) -> Tensor:
    return torch.randn(samples, 6, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def spent(monkeypatch: pytest.MonkeyPatch) -> list[tuple[float, float]]:
    """Replace the noise of OpenDP by none at all; return sensitivity and scale of each release."""
    seen: list[tuple[float, float]] = []

    def add_noise(values: Tensor, sensitivity: float, scale: float) -> tuple[Tensor, float]:
        assert values.dtype == torch.int64
        seen.append((sensitivity, scale))
        return values, sensitivity**2 / (2 * scale**2)

    monkeypatch.setattr(privacy, "add_noise", add_noise)
    monkeypatch.setattr(privacy, "find_rho", lambda epsilon, delta: 100.0 * epsilon)
    return seen


# --- one sample changes each histogram by one at most ---------------------------------------------------------------


@pytest.mark.parametrize("positions", [1, 7])
@pytest.mark.parametrize("kind", ["grid", "even", "soft", "softer"])
def test_a_sample_adds_at_most_one_to_each_histogram(kind: str, positions: int) -> None:
    rng = torch.Generator().manual_seed(1)
    values = torch.randn(positions, 5, generator=rng) * torch.tensor([1e-6, 1e-2, 1.0, 1e3, 1e9])
    values[0, 2] = 0.0
    low, high = torch.tensor([0.0, -1, -1, -10, 0]), torch.tensor([1.0, 1, 1, 10, 2])

    def count(rows: Tensor) -> Tensor:
        counter: Any
        if kind == "grid":
            counter = privacy.GridCounter()
        elif kind == "even":
            counter = EvenCounter(low, high, Bins(4))
        else:
            counter = SoftCounter(low, high, Bins(4, temperature=0.01 if kind == "soft" else 0.7))
        counter.update(rows, positions)
        return counter.counts

    others = torch.randn(3 * positions, 5, generator=rng)
    change = count(torch.cat([others, values])) - count(others)
    assert change.min() >= 0
    assert (change.sum(1) <= ONE).all()
    assert (change.sum(1) > 0.999 * ONE).all()


def test_answers_of_a_sample_add_at_most_one_to_each_row() -> None:
    found = privacy._count_answers(torch.tensor([[50.0, 0.0, 0.0]]), 1)
    assert found[0].tolist() == [ONE, 0, 0]
    assert found.sum(1).max() <= ONE


def test_releases_pay_for_their_histograms_and_never_exceed_the_budget(spent: list[tuple[float, float]]) -> None:
    made = shiftmend.profile(make_model(), draw(), private=Privacy(0.02), progress=False)
    units = {"taps": 8 + 3, "inputs": 6, "slices": 128, "answers": 2}
    rows = [8 + 3 + 6, sum(units.values()) - 128, 128, 128]
    assert [sensitivity for sensitivity, _ in spent] == pytest.approx([ONE * math.sqrt(number) for number in rows])
    assert sum(s**2 / (2 * scale**2) for s, scale in spent) == pytest.approx(2.0)
    assert made.privacy is not None
    assert made.privacy.histograms == sum(units.values())
    assert made.privacy.noise == pytest.approx(spent[1][1] / ONE)
    assert spent[1][1] == pytest.approx(spent[3][1])  # as much noise in slices as in bins


def test_an_overdrawn_budget_is_refused(spent: list[tuple[float, float]]) -> None:
    budget = Budget(Privacy(0.01))
    counts = {"one": torch.zeros(1, 4, dtype=torch.int64)}
    budget.release(counts, 1.0)
    with pytest.raises(ProfileError, match="spend"):
        budget.release(counts, 0.7)


# --- nothing else comes from data -----------------------------------------------------------------------------------


def test_every_entry_of_a_profile_is_accounted_for(spent: list[tuple[float, float]]) -> None:
    """A new field or statistic has to be made private, left out, or shown to depend on no data; then add it here."""
    private = {"statistics", "mean", "deviation", "inputs", "inputs_seen"}
    of_model_or_settings = {"specs", "preset", "architecture", "weights", "library"}
    left_out = {"rehearsal", "shares"}
    assert {field.name for field in dataclasses.fields(Profile)} == (
        private | of_model_or_settings | left_out | {"privacy"}
    )
    exact = shiftmend.profile(make_model(), draw(), progress=False)
    made = shiftmend.profile(make_model(), draw(), private=Privacy(), progress=False)
    assert made.rehearsal is None
    assert made.statistics.keys() == exact.statistics.keys()
    assert sorted(exact.statistics) == [
        "answers",
        "gaussian",
        "inputs",
        "inputs.quantiles",
        "slices.verification",
        "tap.features",
        "tap.logits",
    ]


def test_two_data_sets_with_the_same_released_counts_give_the_same_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every stored number is a function of released counts: the same counts from other data give the same bytes."""
    released: list[Tensor] = []

    def record(values: Tensor, sensitivity: float, scale: float) -> tuple[Tensor, float]:
        released.append(values)
        return values, 0.0

    def replay(values: Tensor, sensitivity: float, scale: float) -> tuple[Tensor, float]:
        return released.pop(0), 0.0

    model = make_model()
    monkeypatch.setattr(privacy, "find_rho", lambda epsilon, delta: 100.0)
    monkeypatch.setattr(privacy, "add_noise", record)
    first = shiftmend.profile(model, draw(), private=Privacy(), progress=False)
    monkeypatch.setattr(privacy, "add_noise", replay)
    second = shiftmend.profile(model, 3 * draw(500, seed=9) + 2, private=Privacy(), progress=False)
    assert first.to_bytes() == second.to_bytes()


def test_a_single_outlier_leaves_no_trace(spent: list[tuple[float, float]]) -> None:
    data = draw()
    data[0] = 1000.0
    privately = Privacy(0.0001 * 50)
    made = shiftmend.profile(make_model(), data, private=privately, progress=False)
    assert made.inputs.high < 10  # type: ignore[union-attr]
    assert made.taps["features"].high.max() < 50
    assert made.statistics["inputs.quantiles"].tensors()["values"].max() < 10


# --- without noise, a private profile is an ordinary one ------------------------------------------------------------


def test_without_noise_and_over_the_same_ranges_histograms_are_those_of_an_ordinary_profile(
    spent: list[tuple[float, float]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(privacy, "find_rho", lambda epsilon, delta: 1e16)
    model, data = make_model(), draw()
    exact = shiftmend.profile(model, data, progress=False)
    ranges = {name: (tap.low - 1e-3, tap.high + 1e-3) for name, tap in exact.taps.items()}
    made = shiftmend.profile(model, data, private=Privacy(ranges=ranges), progress=False)
    assert made.samples == 4000
    for name, tap in exact.taps.items():
        own = made.taps[name]
        expected = own.count(model[:4](data) if name == "features" else model(data)) * tap.samples
        np.testing.assert_allclose(own.counts, expected.detach(), atol=0.1)
    np.testing.assert_allclose(made.mean, exact.mean, atol=0.05)
    np.testing.assert_allclose(made.deviation, exact.deviation, rtol=0.15)
    shares, own_shares = (one.statistics["answers"].tensors() for one in (exact, made))
    np.testing.assert_allclose(own_shares["shares"], shares["shares"], atol=1e-4)
    np.testing.assert_allclose(own_shares["confidence"], shares["confidence"], atol=1e-4)
    moments, own_moments = (one.statistics["inputs"].tensors() for one in (exact, made))
    np.testing.assert_allclose(own_moments["mean"], moments["mean"], atol=0.02)
    np.testing.assert_allclose(own_moments["variance"], moments["variance"], atol=0.1)
    quantiles, own_quantiles = (one.statistics["inputs.quantiles"].tensors()["values"] for one in (exact, made))
    np.testing.assert_allclose(own_quantiles[:, 2:-2], quantiles[:, 2:-2], atol=0.08)


def test_positions_of_a_feature_map_count_in_equal_parts(spent: list[tuple[float, float]]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 1)).eval()
    made = shiftmend.profile(model, torch.rand(300, 1, 6, 6), private=Privacy(), progress=False)
    assert made.samples == 300
    assert made.taps["features"].samples == 300 * 16
    assert profile_files.problems(made) == []


def test_several_inputs_have_summaries_of_their_own(spent: list[tuple[float, float]]) -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Linear(6, 8), nn.Linear(8, 3)

        def forward(self, left: Tensor, right: Tensor) -> Tensor:
            return self.head(self.body(torch.cat([left, right], 1)).relu())

    torch.manual_seed(0)
    data = {"left": draw()[:, :2], "right": 10 * draw()[:, :4]}
    made = shiftmend.profile(Two(), data, private=Privacy(), progress=False)
    assert made.inputs.parts["right"].high > made.inputs.parts["left"].high  # type: ignore[union-attr]
    assert same(profile_files.decode(made.to_bytes()), made)


# --- post-processing ------------------------------------------------------------------------------------------------


def test_ranges_hold_the_significant_cells() -> None:
    counter = privacy.GridCounter()
    values = torch.stack(
        [torch.linspace(0, 3, 1000), torch.linspace(-1, 0.5, 1000), torch.zeros(1000), torch.linspace(-3, -0.1, 1000)],
        1,
    )
    values[0] = 5e8  # a single sample is not significant
    counter.update(values, 1)
    low, high = privacy.find_ranges(counter.counts.double() / ONE, 1.0)
    assert low[:3].tolist() == [0.0, -1.0, 0.0]
    assert 3 <= high[0] < 3.6
    assert high[1:].tolist() == [0.5, 0.0, 0.0]
    assert -3.6 < low[3] <= -3


@pytest.mark.parametrize("noise", [0.1, 20.0, 1e4])
def test_denoised_histograms_are_valid(noise: float) -> None:
    counts = torch.tensor([[1000.0, 0, 50, 0]]).double() + noise * torch.tensor([[0.5, -8, 1, -40]])
    shares = privacy.denoise(counts, noise)
    assert (shares > 0).all()
    assert shares.sum(1).tolist() == pytest.approx([1.0])
    if noise < 1:
        np.testing.assert_allclose(shares[0], [1000 / 1050, 0, 50 / 1050, 0], atol=1e-3)


def test_a_denoised_count_is_the_mean_of_those_it_may_have_been() -> None:
    grid = np.linspace(0, 100, 1_000_001)
    for noisy in (-6.0, 0.0, 5.0):
        weight = np.exp(-0.5 * ((grid - noisy) / 2) ** 2)
        reference = (grid * weight).sum() / weight.sum()
        found = privacy.denoise(torch.tensor([[noisy, 1e6]]).double(), 2.0)
        assert float(found[0, 0] / found[0, 1]) * 1e6 == pytest.approx(reference, rel=1e-3)


def test_noise_widens_what_counts_as_chance(spent: list[tuple[float, float]]) -> None:
    assert privacy.effective_samples(5000, 0.0, 10) == pytest.approx(5000)
    exact = shiftmend.profile(make_model(), draw(), progress=False)
    promise = Guarantee(1.0, 1e-6, 50.0, 100)
    noisy = dataclasses.replace(exact, privacy=promise)
    assert judge(0.1, None, 1000, noisy).floor > judge(0.1, None, 1000, exact).floor


# --- the promise ----------------------------------------------------------------------------------------------------


def test_the_promise_is_stored_shown_and_read_again(spent: list[tuple[float, float]], tmp_path: Path) -> None:
    made = shiftmend.profile(make_model(), draw(), private=Privacy(0.5, 1e-7), progress=False)
    assert "epsilon 0.5" in str(made)
    assert "not private" in str(made)
    made.save(tmp_path / "home.profile")
    read = Profile.load(tmp_path / "home.profile")
    assert read.privacy == made.privacy
    shown = CliRunner().invoke(app, ["inspect", str(tmp_path / "home.profile")]).output
    assert "epsilon 0.5, delta 1e-07" in shown
    listed = json.loads(CliRunner().invoke(app, ["inspect", str(tmp_path / "home.profile"), "--json"]).output)
    assert listed["privacy"]["epsilon"] == 0.5
    assert listed["privacy"]["neighbours"] == "one sample added or removed"


@pytest.mark.parametrize(
    "change",
    [
        {"epsilon": -1.0},
        {"delta": 1.0},
        {"noise": "none"},
        {"histograms": 1.5},
        {"neighbours": "one person"},
        {"more": 1},
        {"epsilon": True},
    ],
)
def test_a_forged_promise_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ProfileError, match="privacy"):
        Guarantee.from_json(Guarantee(1.0, 1e-6, 10.0, 5).to_json() | change)


def test_a_promise_beside_numbers_that_are_not_private_is_refused() -> None:
    full = shiftmend.profile(make_model(), draw(100), gaussian="full", progress=False)
    forged = dataclasses.replace(full, privacy=Guarantee(1.0, 1e-6, 10.0, 5))
    assert any("privacy" in problem for problem in profile_files.problems(forged))


def test_a_private_profile_is_not_rehearsed(spent: list[tuple[float, float]]) -> None:
    made = shiftmend.profile(make_model(), draw(), private=Privacy(), progress=False)
    with pytest.raises(ProfileError, match="not private"):
        shiftmend.rehearse(make_model(), draw(100), made, quick=True, progress=False)


def test_merged_budgets_add_up_and_an_exact_part_ends_the_promise(spent: list[tuple[float, float]]) -> None:
    model = make_model()
    first = shiftmend.profile(model, draw(), private=Privacy(0.1), progress=False)
    spent.clear()
    second = shiftmend.profile(model, draw(seed=1), like=first, private=Privacy(0.2, ranges={"inputs": (-4, 4)}))
    assert len(spent) == 2  # nothing is spent on ranges that are known
    both = first.merge(second)
    assert both.privacy is not None
    assert both.privacy.epsilon == pytest.approx(0.3)
    assert both.privacy.delta == pytest.approx(2e-6)
    assert same(profile_files.decode(both.to_bytes()), both)
    exact = shiftmend.profile(model, draw(seed=1), like=first, progress=False)
    assert first.merge(exact).privacy is None


def test_what_would_break_the_promise_is_refused(spent: list[tuple[float, float]]) -> None:
    model, data = make_model(), draw(100)
    exact = shiftmend.profile(model, data, progress=False)
    for options, word in (
        ({"gaussian": "full"}, "full"),
        ({"like": exact}, "like="),
        ({"private": 1.0}, "Privacy"),
        ({"private": Privacy(ranges={"nowhere": (0, 1)})}, "nowhere"),
        ({"private": Privacy(ranges={"inputs": (1, 0)})}, "lowest"),
        ({"private": Privacy(ranges={"inputs": ([0, 0], [1, 1])})}, "6 units"),
    ):
        with pytest.raises(ProfileError, match=word):
            shiftmend.profile(model, data, **({"private": Privacy()} | options), progress=False)  # type: ignore[arg-type]


@pytest.mark.parametrize("given", [{"epsilon": 0}, {"epsilon": math.inf}, {"delta": 0}, {"ranges": {"inputs": 3}}])
def test_a_budget_out_of_range_is_refused(given: dict[str, Any]) -> None:
    with pytest.raises(ProfileError, match="Expected"):
        Privacy(**given)


def test_too_much_noise_is_said(spent: list[tuple[float, float]], caplog: pytest.LogCaptureFixture) -> None:
    ranges = {"features": (0, 2), "logits": (-2, 2), "inputs": (-3, 3)}
    shiftmend.profile(make_model(), draw(300), private=Privacy(0.01, 0.01, ranges), progress=False)
    assert "noise" in caplog.text
    assert "delta" in caplog.text


def test_the_command_takes_a_budget_and_ranges(spent: list[tuple[float, float]], tmp_path: Path) -> None:
    np.save(tmp_path / "home.npy", draw(500).numpy())
    (tmp_path / "net.py").write_text(
        "from torch import nn\ndef make():\n    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))\n"
    )
    command = ["profile", f"{tmp_path}/net.py:make", "--data", f"{tmp_path}/home.npy", "-o", f"{tmp_path}/home.profile"]
    alone = CliRunner().invoke(app, [*command, "--range", "inputs=-4,4"])
    assert alone.exit_code != 0
    ran = CliRunner().invoke(app, [*command, "--private", "2", "--range", "inputs=-4,4"])
    assert ran.exit_code == 0, ran.output
    read = Profile.load(tmp_path / "home.profile")
    assert read.privacy is not None
    assert read.privacy.epsilon == 2
    assert read.inputs.high == 4  # type: ignore[union-attr]


# --- OpenDP ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def opendp() -> Any:
    return pytest.importorskip("opendp.prelude")


@pytest.mark.slow
def test_noise_and_budget_are_those_of_opendp(opendp: Any) -> None:
    noisy, rho = privacy.add_noise(torch.full((4000,), 7 << 30), ONE * 5.0, ONE * 3.0)
    assert rho == pytest.approx(25 / 18)
    off = (noisy.double() / ONE - 7).numpy()
    assert abs(off.mean()) < 5 * 3 / math.sqrt(4000)
    assert off.std() == pytest.approx(3.0, rel=0.06)
    # A rho of zero-concentrated privacy keeps epsilon = rho + 2 sqrt(rho ln(1 / delta)); OpenDP's conversion is better.
    for epsilon in (0.5, 1.0, 8.0):
        rho = privacy.find_rho(epsilon, 1e-6)
        simple = (math.sqrt(math.log(1e6) + epsilon) - math.sqrt(math.log(1e6))) ** 2
        assert simple < rho < 2 * simple


@pytest.mark.slow
def test_a_private_profile_of_many_samples_is_close_to_an_exact_one(opendp: Any) -> None:
    model, data = make_model(), draw(30_000)
    made = shiftmend.profile(model, data, private=Privacy(1.0), progress=False)
    assert made.samples == pytest.approx(30_000, rel=0.01)
    found = shiftmend.verify(model, draw(3000, seed=5), made, progress=False)
    assert found.verdict == "restored"
    again = shiftmend.profile(model, data, private=Privacy(1.0), progress=False)
    assert not same(made, again)
