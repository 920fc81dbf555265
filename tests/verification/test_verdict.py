from __future__ import annotations

import dataclasses
import logging
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from worlds import sensors
from zoo import ZOO

import shiftmend
from shiftmend.errors import DataError, ProfileError
from shiftmend.profiles.rehearsal import Rehearsal, RehearsedShift
from shiftmend.stats.divergences import divergence, sampling_floor
from shiftmend.stats.histograms import Bins, soft_histogram
from shiftmend.stats.slices import Projector
from shiftmend.verification.estimate import Limits, learn_limits
from shiftmend.verification.signals import Tally, sample_positions
from shiftmend.verification.verdict import FAILED, RESTORED, Verification, chance_of


@pytest.mark.parametrize(
    ("excess", "verdict"),
    [
        (0.0, "restored"),
        (RESTORED * 0.85, "restored"),
        (RESTORED * 1.15, "partly restored"),
        (FAILED * 1.06, "not restored"),
    ],
)
def test_verdicts(excess: float, verdict: str) -> None:
    assert Verification(0.001 + excess, 0.001, 5000).verdict == verdict


@pytest.mark.parametrize(
    ("divergence", "floor", "verdict"),
    [
        (RESTORED, 0.0, "partly restored"),
        (FAILED, 0.0, "not restored"),
        (0.0080, 0.008, "restored"),  # lies between 0 and 0.0040
        (0.0091, 0.008, "undecided"),  # 0 and 0.0051: nothing, or a little
        (0.0139, 0.008, "partly restored"),  # 0.0019 and 0.0099
        (0.0145, 0.008, "undecided"),  # 0.0025 and 0.0105: all three are possible
        (0.0175, 0.008, "partly restored"),  # 0.0055 and 0.0135: at least partly
        (0.0221, 0.008, "not restored"),  # 0.0101 and 0.0181
        (0.0010, 0.02, "undecided"),  # so few are never called restored
        (0.0340, 0.02, "undecided"),  # 0.0040 and 0.0240
        (0.0399, 0.02, "partly restored"),  # 0.0099 and 0.0299
        (0.0401, 0.02, "not restored"),
    ],
)
def test_a_verdict_is_what_holds_for_all_that_a_sample_leaves_possible(
    divergence: float, floor: float, verdict: str
) -> None:
    judged = Verification(divergence, floor, 200)
    assert judged.verdict == verdict
    assert ("too few samples" in str(judged)) == (verdict == "undecided")


@pytest.mark.parametrize(
    ("divergence", "floor", "verdict"),
    [
        (0.0049, 0.008, "restored"),
        (0.0051, 0.008, "undecided"),
        (0.0085, 0.008, "partly restored"),
        (0.0120, 0.008, "undecided"),
        (0.0131, 0.008, "partly restored"),
        (0.0181, 0.008, "not restored"),
    ],
)
def test_of_what_a_model_was_adapted_to_chance_may_have_been_fitted(
    divergence: float, floor: float, verdict: str
) -> None:
    assert Verification(divergence, floor, 470, adapted=True).verdict == verdict


@given(st.floats(0, 0.2), st.floats(0, 0.2), st.floats(0, 0.1), st.booleans())
def test_a_verdict_never_gets_better_with_a_larger_divergence(
    one: float, other: float, floor: float, adapted: bool
) -> None:
    """Undecided is anything between what it lies between."""
    ranks = {"restored": {0}, "partly restored": {1}, "not restored": {2}, "undecided": {0, 1, 2}}
    near, far = (Verification(value, floor, 100, adapted=adapted) for value in sorted((one, other)))
    assert min(ranks[near.verdict]) <= max(ranks[far.verdict])
    for judged in (near, far):
        restored, failed = judged.limits
        low, high = judged.bounds
        assert 0 <= low <= high <= judged.divergence
        assert (judged.verdict == "restored") == (judged.divergence < restored)
        assert (judged.verdict == "not restored") == (judged.divergence >= failed)


@pytest.mark.slow
@pytest.mark.parametrize("samples", [200, 470, 940])
@pytest.mark.parametrize("shift", [0.0, 0.1, 0.15])
def test_the_divergence_of_many_samples_lies_within_the_bounds_that_few_give(samples: int, shift: float) -> None:
    generator = torch.Generator().manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 2))
    with torch.no_grad():
        model[0].weight.copy_(torch.eye(64))
        model[0].bias.zero_()
    mixed = torch.randn(64, 64, generator=generator) / 8
    made = shiftmend.profile(model, torch.randn(40_000, 64, generator=generator) @ mixed)
    away = torch.randn(40_000, 64, generator=generator) @ mixed + shift * torch.randn(64, generator=generator)

    def of(features: torch.Tensor) -> Verification:
        tally = Tally(made)
        tally.update({"features": features, "logits": model[1](features).detach()}, len(features))
        return tally.verification()

    true = of(away).divergence
    parts = [of(part).bounds for part in away[: 40 * samples].split(samples)]
    assert len(parts) == 40
    assert sum(low <= true <= high for low, high in parts) >= 38


@pytest.mark.slow
def test_home_is_restored_and_a_shift_is_not() -> None:
    case = ZOO["signal"]
    model = case.model()
    made = shiftmend.profile(model, case.inputs(3000))
    assert shiftmend.verify(model, case.inputs(2000, seed=9), made).verdict == "restored"
    away = shiftmend.verify(model, case.inputs(2000, seed=9) * 2 + 1, made)
    assert away.verdict == "not restored"
    assert str(away) == f"not restored (slices {away.divergence:.4f}, by chance about {away.floor:.4f})"


def test_slices_see_what_marginals_cannot() -> None:
    """Units shuffled against each other keep every marginal and lose the joint distribution."""
    generator = torch.Generator().manual_seed(0)
    base = torch.randn(4000, 1, generator=generator)
    features = torch.cat([base, base + 0.1 * torch.randn(4000, 1, generator=generator), -base], 1)
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 2))
    with torch.no_grad():
        model[0].weight.copy_(torch.eye(3))
        model[0].bias.zero_()
    made = shiftmend.profile(model, features)
    shuffled = torch.stack([column[torch.randperm(4000, generator=generator)] for column in features.T], 1)
    home = made.taps["features"]
    marginal = float(home.mean_divergence(home.count(shuffled)))
    judged = shiftmend.verify(model, shuffled, made)
    assert marginal < 1e-5
    assert judged.verdict == "not restored"
    assert shiftmend.verify(model, features, made, batch_size=1000).divergence < 1e-6


@pytest.mark.slow
def test_marginals_see_what_slices_cannot() -> None:
    """A sum of many coins is distributed as one of many dice: slices that look as at home are not enough."""
    generator = torch.Generator().manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(300, 300), torch.nn.Linear(300, 2))
    with torch.no_grad():
        model[0].weight.copy_(torch.eye(300))
        model[0].bias.zero_()
    dice = 3**0.5 * (2 * torch.rand(16_000, 300, generator=generator) - 1)
    coins = torch.randint(0, 2, (8000, 300), generator=generator) * 2.0 - 1
    made = shiftmend.profile(model, dice[:8000])
    at_home, away = shiftmend.verify(model, dice[8000:], made), shiftmend.verify(model, coins, made)
    assert at_home.verdict == "restored"
    assert away.divergence < 2 * at_home.divergence < RESTORED
    home = made.taps["features"]
    single = home.mean_divergence(home.count(coins)) + made.taps["logits"].divergence(model[1](coins).detach())
    assert away.marginals == pytest.approx(float(single), rel=1e-4)
    assert away.verdict == "partly restored"
    assert str(away).endswith(f"by chance about {away.floor:.4f}, but marginals {away.marginals:.4f})")
    assert "marginals" not in str(at_home)


@pytest.mark.parametrize(
    ("marginals", "adapted", "strayed"),
    [
        (None, False, False),
        (0.0, False, False),
        (0.0129, False, False),  # of which chance may be 2 x 1.5 x 0.001, and the rest is below 2 x 0.005
        (0.0131, False, True),
        (0.0119, True, False),  # of what was adapted to, 2 x 0.001
        (0.0121, True, True),
    ],
)
def test_nothing_is_restored_whose_marginals_are_certainly_not_at_home(
    marginals: float | None, adapted: bool, strayed: bool
) -> None:
    judged = Verification(0.002, 0.001, 5000, adapted=adapted, marginals=marginals)
    assert judged.strayed is strayed
    assert judged.verdict == ("partly restored" if strayed else "restored")
    assert Verification(0.0, 0.0, 5000, marginals=2 * RESTORED).strayed  # from there on


@given(st.floats(0, 0.2), st.floats(0, 0.05), st.floats(0, 1), st.booleans())
def test_marginals_take_back_what_is_restored_and_nothing_else(
    divergence: float, floor: float, marginals: float, adapted: bool
) -> None:
    without, judged = (Verification(divergence, floor, 100, adapted=adapted, marginals=m) for m in (None, marginals))
    assert judged.verdict == without.verdict or (without.verdict, judged.verdict) == ("restored", "partly restored")
    assert ("but marginals" in str(judged)) == (judged.verdict != without.verdict)


def test_what_chance_does_not_explain() -> None:
    assert Verification(0.01, 0.004, 500).excess == pytest.approx(0.006)
    assert Verification(0.003, 0.004, 500).excess == 0
    for worst in (float("nan"), float("inf")):
        assert Verification(worst, 0.004, 500).excess == float("inf")
        assert Verification(worst, 0.004, 500).bounds == (float("inf"), float("inf"))


@pytest.mark.slow
def test_outputs_that_are_nan_are_not_restored_however_the_features_look() -> None:
    case = ZOO["signal"]
    model, inputs = case.model(), case.inputs(3000)
    made = shiftmend.profile(model, inputs)
    head = model.get_submodule(made.specs["logits"].module)
    with torch.no_grad():
        head.bias[0] = float("nan")
    judged = shiftmend.verify(model, inputs, made)
    assert judged.divergence < 1e-6
    assert judged.verdict == "not restored"
    assert str(judged).endswith("but outputs are NaN)")


def test_features_that_are_not_finite_are_never_called_restored() -> None:
    assert Verification(float("nan"), 0.001, 10_000).verdict == "not restored"
    assert Verification(float("inf"), 0.02, 100).verdict == "not restored"

    class Logs(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.head = torch.nn.Linear(3, 4), torch.nn.Linear(4, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(torch.log(self.a(x).relu() + (x[:, :1] > -50).float()))

    model = Logs()
    made = shiftmend.profile(model, torch.rand(200, 3))
    assert shiftmend.verify(model, torch.full((50, 3), -100.0), made).verdict == "not restored"


def test_features_that_are_no_numbers_are_said_to_be_so_and_no_learning_rate_is_blamed() -> None:
    world = sensors()
    profile, inputs = world.profile(), torch.zeros_like(world.target)
    found = shiftmend.verify(world.model, inputs, profile, preprocess=torch.log)  # minus infinity
    assert str(found) == "not restored (the features are NaN or infinite)"
    with pytest.raises(shiftmend.DivergedError, match="before anything"):
        shiftmend.adapt(world.model, inputs, profile, "fr", epochs=1, preprocess=torch.log, progress=False)


@pytest.mark.slow
def test_positions_of_a_feature_map_do_not_count_as_so_many_samples() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(1, 4, 3, padding=1), torch.nn.ReLU(), torch.nn.Conv2d(4, 4, 1), torch.nn.ReLU(),
        torch.nn.Conv2d(4, 2, 1)
    )  # fmt: skip
    images = torch.rand(300, 1, 1, 1) + 0.1 * torch.rand(300, 1, 16, 16)
    made = shiftmend.profile(model, images)
    assert made.samples == 300
    assert made.taps["features"].samples == 300 * 256
    judged = shiftmend.verify(model, images[:4], made)
    assert judged.samples == 4
    assert judged.verdict == "undecided"
    larger = images[:4].repeat(1, 1, 3, 3)  # another device may have more pixels, which are no more samples
    found = shiftmend.verify(model, larger, made)
    assert (found.samples, found.floor) == (4, judged.floor)
    result = shiftmend.adapt(model, larger, made, "fr", epochs=1, learning_rate=1e-6, progress=False)
    assert (result.after.samples, result.after.floor) == (4, judged.floor)
    stream = shiftmend.stream(model, made, learning_rate=1e-6)
    stream.step(larger)
    assert (stream.verification.samples, stream.verification.floor) == (4, judged.floor)


def chosen_positions(each: int, inputs: int, before: int = 0) -> np.ndarray:
    """Which rows of each input are taken."""
    rows = sample_positions(torch.arange(each * inputs).unsqueeze(1), inputs, before).view(inputs, -1).numpy()
    return rows - each * np.arange(inputs)[:, None]


@pytest.mark.parametrize("each", [257, 1024, 9216, 50_000])
def test_sample_positions_of_each_input_follow_the_sequence_written_out(each: int) -> None:
    g = 1.32471795724474602596
    got = chosen_positions(each, 40, before=7)
    for one, row in enumerate(got):
        expected = [(j + (j / g + (one + 7) / g**2) % 1) * each / 256 for j in range(256)]
        assert np.abs(row + 0.5 - expected).max() < 0.51  # the row that each lies in, but for rounding
    assert np.array_equal(got, np.concatenate([chosen_positions(each, 15, before=7), chosen_positions(each, 25, 22)]))


def test_positions_come_from_everywhere() -> None:
    rows = chosen_positions(32 * 32, 1000)
    assert min(len({*row % 32}) for row in rows) == 32  # every input has all columns
    times = np.bincount(rows.flatten(), minlength=1024)
    assert times.min() > 240
    assert times.max() < 260


@pytest.mark.parametrize(("rows", "inputs"), [(3, 3), (768, 3), (1537, 3), (2, 3)])
def test_few_positions_are_counted_as_they_are(rows: int, inputs: int) -> None:
    """Up to 256 of each, and where it cannot be told which input a row belongs to."""
    values = torch.rand(rows, 2)
    assert sample_positions(values, inputs, 5) is values


@pytest.mark.slow
@pytest.mark.parametrize("fixed", [False, True])
@pytest.mark.parametrize("shift", [0.0, 0.05, 0.3])
def test_sample_positions_tell_what_all_would(fixed: bool, shift: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where each has a value of its own at every site, as before a camera that does not move."""
    generator = torch.Generator().manual_seed(0)
    scene = torch.randn(1, 2, 24, 24, generator=generator)
    noise = 0.2 if fixed else 1.0
    home, away = (
        fixed * scene
        + noise * torch.randn(count, 2, 1, 1, generator=generator)
        + 0.1 * torch.randn(count, 2, 24, 24, generator=generator)
        for count in (300, 200)
    )
    model = torch.nn.Sequential(torch.nn.Conv2d(2, 2, 1), torch.nn.Conv2d(2, 2, 1))
    with torch.no_grad():
        model[0].weight.copy_(torch.eye(2)[..., None, None])
        model[0].bias.zero_()
    made = shiftmend.profile(model, home)
    part = shiftmend.verify(model, away + shift, made)
    batched = shiftmend.verify(model, away + shift, made, batch_size=33)
    stream = shiftmend.stream(model, made, "source-only")
    for batch in (away + shift).split(50):
        stream.step(batch)
    monkeypatch.setattr("shiftmend.verification.signals.POSITIONS", 1 << 20)
    every = shiftmend.verify(model, away + shift, made)
    assert part.divergence != every.divergence
    assert abs(part.divergence - every.divergence) < every.floor / 50
    assert (part.verdict, part.floor) == (every.verdict, every.floor)
    assert batched.divergence == pytest.approx(part.divergence, rel=1e-4)
    assert stream.verification.divergence == pytest.approx(part.divergence, rel=1e-4)


def test_verification_leaves_the_model_alone() -> None:
    case = ZOO["signal"]
    model = case.model().train()
    made = shiftmend.profile(model, case.inputs())
    state = {k: v.clone() for k, v in model.state_dict().items()}
    judged = shiftmend.verify(model, case.inputs(40, seed=3), made, batch_size=8)
    assert model.training
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())
    assert judged.divergence == pytest.approx(shiftmend.verify(model.eval(), case.inputs(40, seed=3), made).divergence)


def test_what_cannot_be_verified_is_refused() -> None:
    case = ZOO["signal"]
    made = shiftmend.profile(case.model(), case.inputs())
    with pytest.raises(ProfileError, match="other layers"):
        shiftmend.verify(ZOO["tabular"].model(), ZOO["tabular"].inputs(), made)
    with pytest.raises(DataError, match=r"shape \[3, 64\]"):
        shiftmend.verify(case.model(), torch.randn(20, 3, 64), made)


def test_the_profile_may_be_named_by_its_file(tmp_path: Path) -> None:
    case = ZOO["signal"]
    model = case.model()
    made = shiftmend.profile(model, case.inputs())
    made.save(tmp_path / "file.profile")
    expected = shiftmend.verify(model, case.inputs(seed=3), made)
    for named in (tmp_path / "file.profile", str(tmp_path / "file.profile")):
        found = shiftmend.verify(model, case.inputs(seed=3), named)
        assert found.divergence == pytest.approx(expected.divergence, abs=1e-6)
        assert (found.samples, found.source_samples) == (expected.samples, expected.source_samples)
    with pytest.raises(ProfileError, match=r"profile.*got an int"):
        shiftmend.verify(model, case.inputs(), 7)  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize(("source", "target"), [(100, 3000), (3000, 100)])
def test_what_is_undecided_says_how_many_there_are(source: int, target: int) -> None:
    case = ZOO["signal"]
    model = case.model()
    found = shiftmend.verify(model, case.inputs(target, seed=9), shiftmend.profile(model, case.inputs(source)))
    assert found.verdict == "undecided"
    assert (found.samples, found.source_samples) == (target, source)
    assert f"too few samples ({source} in the profile, {target} of the target) to tell" in str(found)


def test_the_sample_sizes_that_the_documentation_calls_too_few() -> None:
    def verdict(source: int, target: int) -> str:
        floor = sampling_floor(Bins(), source, target)
        return Verification(floor, floor, target, source).verdict

    many = 1_000_000
    assert verdict(many, 390) == verdict(390, many) == verdict(780, 780) == "undecided"
    assert verdict(many, 400) == verdict(400, many) == verdict(800, 800) == "restored"


@pytest.mark.slow
@pytest.mark.parametrize("units", [1, 2, 4, 32])
def test_how_seldom_chance_is_outside_the_stated_bounds(units: int) -> None:
    """Two samples of one long-tailed distribution, again and again; the slices of few features are much the same."""
    generator = torch.Generator().manual_seed(0)
    least, most = chance_of(units)
    floor, outside, draws = sampling_floor(Bins(), 1000, 1000), 0, 60
    for _ in range(draws):
        source, target = (torch.empty(1000, units).exponential_(generator=generator) for _ in range(2))
        varied = torch.ones(units, dtype=torch.bool)
        slices = Projector.build(source.mean(0), source.std(0), varied, count=128, seed=1)
        low, high = slices(source).amin(0), slices(source).amax(0)
        home, away = (soft_histogram(slices(values), low, high, Bins()) for values in (source, target))
        outside += not least * floor < float(divergence(home, away).mean()) < most * floor
    assert outside / draws <= 0.1


def test_what_chance_explains_depends_on_how_many_features_vary_if_they_are_few() -> None:
    def bounds(units: int | None, adapted: bool) -> tuple[float, float]:
        return Verification(0.03, 0.01, 300, adapted=adapted, units=units).bounds

    for many in (None, 0, 3, 512):
        assert bounds(many, False) == pytest.approx((0.015, 0.025))
        assert bounds(many, True) == pytest.approx((0.02, 0.03))
    assert bounds(1, False) == pytest.approx((0.0075, 0.028))
    assert bounds(1, True) == pytest.approx((0.0095, 0.03))
    assert bounds(2, False) == pytest.approx((0.011, 0.027))


def test_features_that_do_not_vary_are_not_among_those_that_chance_is_told_from() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.ReLU(), torch.nn.Linear(3, 2))
    with torch.no_grad():
        model[0].weight.copy_(torch.eye(3))
        model[0].bias.copy_(torch.tensor([0.0, -9.0, -9.0]))  # two are always off
    made = shiftmend.profile(model, torch.rand(500, 3))
    found = shiftmend.verify(model, torch.rand(400, 3), made)
    assert found.units == 1
    online = shiftmend.stream(model, made, "source-only")
    online.step(torch.rand(400, 3))
    assert online.verification is not None
    assert online.verification.units == 1


def test_inputs_of_another_normalisation_are_warned_of_as_in_adapt(caplog: pytest.LogCaptureFixture) -> None:
    case = ZOO["signal"]
    model, inputs = case.model(), case.inputs(200)
    made = shiftmend.profile(model, inputs)

    def warnings() -> list[str]:
        found = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING and "preproc" in r.getMessage()]
        caplog.clear()
        return found

    shiftmend.adapt(model, inputs * 255, made, "source-only", progress=False)
    expected = warnings()
    shiftmend.verify(model, inputs * 255, made)
    assert warnings() == expected
    assert len(expected) == 1
    assert "another normalisation?" in expected[0]
    shiftmend.verify(model, inputs, made)
    assert warnings() == []


def test_a_mended_model_is_verified_without_a_word_about_its_weights(caplog: pytest.LogCaptureFixture) -> None:
    case = ZOO["signal"]
    made = shiftmend.profile(case.model(), case.inputs(200))
    shiftmend.verify(case.model(seed=5), case.inputs(200), made)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.slow
def test_batches_with_more_positions_weigh_as_much_as_in_the_profile() -> None:
    """Of long inputs some positions are drawn, of short ones none: the same data must still agree with itself."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Conv1d(1, 8, 3, padding=1), torch.nn.ReLU(), torch.nn.Conv1d(8, 4, 1)).eval()
    short, long = torch.randn(40, 1, 100), 2 * torch.randn(30, 1, 1000)
    profile = shiftmend.profile(net, [short, long])
    assert shiftmend.verify(net, [short, long], profile).divergence < 1e-3
    online = shiftmend.stream(net, profile, "source-only")
    for batch in (short, long):
        online.step(batch)
    assert online.verification is not None
    assert online.verification.divergence < 1e-3
    with pytest.raises(DataError, match="of one sample"):
        online.step(long[0])


def rehearsed(slices: list[float], scores: list[float], *, sizes: tuple[int, ...] = (1000,)) -> Rehearsal:
    """Return a record of one candidate whose accuracy at home is 0.9, with marginals of twice the slices."""
    count, home = len(slices), torch.zeros(len(sizes), 2)
    cells = torch.tensor([[value, 2 * value] for value in slices])
    by_size = torch.stack([cells * 1000 / size for size in sizes], 1)
    empty = torch.zeros(count, len(sizes), 2)
    return Rehearsal(
        task="classes",
        labelled=True,
        samples=1000,
        sizes=sizes,
        score=0.9,
        temperature=1.0,
        thresholds=(0.5, -0.5),
        candidates=("source-only",),
        methods={"source-only": {}},
        signals=("slices", "marginals"),
        shifts=tuple(RehearsedShift(f"shift {place}", f"family {place}", 1.0) for place in range(count)),
        scores=torch.tensor(scores)[:, None, None].expand(count, len(sizes), 1),
        values=by_size[:, :, None],
        home_mean=home,
        home_deviation=home,
        estimates=empty,
        scales=empty,
        chosen=empty[..., 0],
    )


def test_limits_are_those_between_good_and_poor_models_at_home() -> None:
    record = rehearsed([0.01, 0.03, 0.05, 0.2, 0.4], [0.9, 0.88, 0.83, 0.5, 0.3])
    limits = learn_limits(record, "source-only", 1000)
    assert limits is not None
    assert (limits.restored, limits.failed, limits.marginals) == pytest.approx((0.033, 0.2, 0.066))
    for slices, verdict in ((0.03, "restored"), (0.05, "partly restored"), (0.21, "not restored")):
        judged = Verification(slices, 0.001, 1000, marginals=0.05).judge_by(record, "source-only")
        assert judged.verdict == verdict
        assert Verification(slices, 0.001, 1000).verdict == "not restored"  # by the fixed thresholds


def test_without_labels_at_the_site_a_poor_model_close_to_home_lowers_the_limit() -> None:
    between = rehearsed([0.01, 0.02, 0.04, 0.3], [0.9, 0.4, 0.88, 0.2])
    limits = learn_limits(between, "source-only", 1000)
    assert limits is not None
    assert (limits.restored, limits.failed) == pytest.approx((0.011, 0.044))
    closest = learn_limits(rehearsed([0.01, 0.02], [0.4, 0.9]), "source-only", 1000)
    assert closest is not None
    assert closest.restored == 0
    judged = Verification(0.005, 0.001, 1000, learnt=closest)
    assert judged.verdict == "partly restored"
    assert "as much" in str(judged)


def test_limits_hold_for_methods_and_sizes_that_were_rehearsed() -> None:
    record = rehearsed([0.01, 0.3], [0.9, 0.4], sizes=(100, 10_000))
    between, small, large = (learn_limits(record, "source-only", samples) for samples in (1000, 100, 10_000))
    assert between is not None
    assert small is not None
    assert large is not None
    assert between.restored == pytest.approx((small.restored + large.restored) / 2)
    assert learn_limits(record, "bufr", 1000) is None
    assert learn_limits(record, None, 1000) is None
    assert learn_limits(record, "source-only", 40) is None
    assert learn_limits(record, "source-only", 10**6) is None
    assert learn_limits(rehearsed([0.1, 0.3], [0.6, 0.4]), "source-only", 1000) is None  # none was good


def test_marginals_of_good_models_at_home_are_the_limit_of_marginals() -> None:
    judged = Verification(0.01, 0.001, 1000, marginals=0.05, learnt=Limits(0.02, 0.1, 0.06))
    assert judged.verdict == "restored"
    assert dataclasses.replace(judged, marginals=0.07).verdict == "partly restored"
    assert dataclasses.replace(judged, divergence=float("nan")).verdict == "not restored"
    assert judged.to_json()["limits"] == {"restored": 0.02, "failed": 0.1, "marginals": 0.06}
