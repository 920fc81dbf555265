from __future__ import annotations

import dataclasses
import logging
import math
import weakref
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from same_profiles import same
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from zoo import SMALL, ZOO, hooks

import shiftmend
from shiftmend.errors import DataError, ProfileError, TapError
from shiftmend.inputs.feed import Feed
from shiftmend.introspection.taps import Tap, attach_taps
from shiftmend.profiles import collect as profiling
from shiftmend.profiles.serialize import problems
from shiftmend.stats.gaussians import FullGaussian, MarginalGaussian
from shiftmend.stats.histograms import Bins
from shiftmend.utils.progress import Bar


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALL)
def test_profiles_every_kind_of_model_and_leaves_it_as_it_was(name: str) -> None:
    case = ZOO[name]
    model = case.model()
    model.train()
    if len(list(model.children())) > 1:
        next(model.children()).eval()
    modes = [m.training for m in model.modules()]
    state = {k: v.clone() for k, v in model.state_dict().items()}
    made = shiftmend.profile(model, case.inputs(), output=case.output, progress=False)
    assert made.taps["features"].units == case.features
    assert made.taps["logits"].units == case.outputs
    assert made.taps["features"].samples == 64
    assert problems(made) == []
    assert [m.training for m in model.modules()] == modes
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())


def test_counts_and_ranges_are_those_of_the_activations() -> None:
    case = ZOO["tabular"]
    model, inputs = case.model(), case.inputs(100)
    made = shiftmend.profile(model, inputs, batch_size=32)
    with torch.no_grad():
        features = model[:5](inputs).double().numpy()
    low, high = features.min(0), features.max(0)
    usable = high > low
    np.testing.assert_allclose(made.taps["features"].low.numpy(), low, rtol=1e-6)
    np.testing.assert_allclose(made.taps["features"].high.numpy(), high, rtol=1e-6)
    np.testing.assert_allclose(made.mean.numpy(), features.mean(0), rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(made.deviation.numpy(), features.std(0), rtol=1e-5, atol=1e-7)
    x = (features - low)[:, usable] / (high - low)[usable]
    cuts = np.arange(9) / 8
    logits = (x[..., None] * np.arange(1, 11) - np.concatenate([[0], cuts.cumsum()])) / 0.01
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    expected = (weights / weights.sum(-1, keepdims=True)).sum(0)
    np.testing.assert_allclose(made.taps["features"].counts.numpy()[usable], expected, atol=2e-3)
    assert made.unusable["features"] == int((~usable).sum())


def test_slices_are_histograms_of_projected_standardised_features() -> None:
    case = ZOO["signal"]
    model, inputs = case.model(), case.inputs(200)
    made = shiftmend.profile(model, inputs)
    part = made.slices["verification"]
    assert part.histogram.units == 128
    with torch.no_grad():
        features = model[:8](inputs).double()
    usable = made.taps["features"].usable
    standard = torch.where(usable, (features - made.mean) / made.deviation.clamp_min(1e-30), 0.0)
    from shiftmend.stats.slices import random_directions

    directions = random_directions(128, 16, part.seed).double() * usable
    directions /= directions.norm(dim=1, keepdim=True)
    expected = standard @ directions.T
    torch.testing.assert_close(part.projector(features.float()).double(), expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(part.histogram.low.double(), expected.amin(0), atol=1e-4, rtol=1e-4)


@pytest.mark.slow
def test_one_pass_and_three_passes_give_the_same() -> None:
    case = ZOO["paper-cnn"]
    model, inputs = case.model(), case.inputs(100)
    kept = shiftmend.profile(model, inputs, batch_size=16)
    streamed = shiftmend.profile(model, inputs, batch_size=16, keep_bytes=0)
    assert same(kept, streamed)


def test_the_network_runs_once_if_its_features_fit() -> None:
    case = ZOO["tabular"]
    model = case.model()
    calls: list[int] = []
    handle = model.register_forward_hook(lambda m, a, o: calls.append(len(o)))
    # With larger batches, further passes would look for stale statistics of BatchNorm.
    shiftmend.profile(model, case.inputs(96), batch_size=24)
    once = sum(calls)
    shiftmend.profile(model, case.inputs(96), batch_size=24, keep_bytes=0)
    handle.remove()
    assert once < 2 * 96 < sum(calls) - once


def test_loaders_with_labels_and_tensors_give_the_same() -> None:
    case = ZOO["tabular"]
    model, inputs = case.model(), case.inputs(70)
    loader = DataLoader(TensorDataset(inputs, torch.arange(70)), batch_size=32)
    assert same(shiftmend.profile(model, loader), shiftmend.profile(model, inputs, batch_size=32))


def test_presets_store_what_they_say() -> None:
    case = ZOO["tabular"]
    made = {p: shiftmend.profile(case.model(), case.inputs(), preset=p) for p in ("reference", "paper", "sliced")}
    assert {p: m.taps["features"].counts.shape[1] for p, m in made.items()} == {
        "reference": 10,
        "paper": 8,
        "sliced": 10,
    }
    assert made["sliced"].slices["alignment"].histogram.units == 512
    assert made["sliced"].slices["alignment"].seed != made["sliced"].slices["verification"].seed
    assert "alignment" not in made["reference"].slices


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["reference", "paper", "sliced"])
def test_bins_are_softer_without_batch_norm_unless_they_are_named(preset: str) -> None:
    inputs = torch.randn(64, 3)
    for norm, temperature in ((nn.Identity(), 0.05), (nn.LayerNorm(4), 0.05), (nn.BatchNorm1d(4), 0.01)):
        model = nn.Sequential(nn.Linear(3, 4), norm, nn.ReLU(), nn.Linear(4, 2)).eval()
        assert shiftmend.profile(model, inputs, preset=preset).bins.temperature == temperature
        assert shiftmend.profile(model, inputs, preset=preset, bins=Bins(temperature=0.2)).bins.temperature == 0.2


def test_slices_that_verify_are_sharp_however_soft_the_rest_is(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, inputs = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)), torch.randn(500, 3)
    sharp, soft = (
        shiftmend.profile(model, inputs, preset="sliced", bins=Bins(temperature=temperature))
        for temperature in (0.01, 0.3)
    )
    soft.save(tmp_path / "soft")
    for one in (soft, shiftmend.Profile.load(tmp_path / "soft"), shiftmend.profile(model, inputs, like=soft)):
        judge, aligned = one.slices["verification"].histogram, one.slices["alignment"].histogram
        assert (judge.bins.temperature, aligned.bins.temperature) == (0.01, 0.3)
        assert torch.equal(judge.counts, sharp.slices["verification"].histogram.counts)
        assert not torch.allclose(aligned.counts, sharp.slices["alignment"].histogram.counts, atol=0.1)
        away = shiftmend.verify(model, inputs + 0.5, one)
        assert away.divergence == shiftmend.verify(model, inputs + 0.5, sharp).divergence


def test_more_taps() -> None:
    case = ZOO["signal"]
    made = shiftmend.profile(case.model(), case.inputs(10), taps={"first": "0"})
    assert made.taps["first"].samples == 10 * 30
    assert made.taps["first"].units == 8


def test_dead_and_constant_units_are_counted(caplog: pytest.LogCaptureFixture) -> None:
    case = ZOO["tabular"]
    model = case.model()
    with torch.no_grad():
        model[3].weight[:4] = 0
        model[3].bias[:2] = -1.0  # dead behind the ReLU
        model[3].bias[2:4] = 2.5  # constant, not zero
    with caplog.at_level(logging.INFO):
        made = shiftmend.profile(model, case.inputs())
    assert made.unusable["features"] >= 4
    assert "constant on the source" in caplog.text
    assert "constant and left out" in repr(made)
    result = shiftmend.adapt(model, case.inputs(seed=3), made, "fr", epochs=2, learning_rate=0.01, progress=False)
    assert all(np.isfinite(row.loss) for row in result.history[1:])


def test_bad_input_is_one_sentence() -> None:
    case = ZOO["tabular"]
    model = case.model()
    with pytest.raises(DataError, match="empty"):
        shiftmend.profile(model, torch.zeros(0, 7))
    with pytest.raises(DataError, match="NaN"):
        shiftmend.profile(model, torch.full((4, 7), torch.nan))
    with pytest.raises(ProfileError, match="varied samples"):
        shiftmend.profile(model, case.inputs(1))
    with pytest.raises(shiftmend.ShiftmendError, match="preset"):
        shiftmend.profile(model, case.inputs(), preset="best")
    with pytest.raises(TapError, match="head"):
        shiftmend.profile(nn.Sequential(model, nn.Softmax(1)), case.inputs())
    broken = case.model()
    with torch.no_grad():
        broken[0].weight[0, 0] = torch.nan
    with pytest.raises(ProfileError, match="NaN"):
        shiftmend.profile(broken, case.inputs())


def test_features_whose_variance_is_no_number_are_refused_before_they_are_saved() -> None:
    model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3))
    with torch.no_grad():
        model[0].weight[:2] *= 1e25
        model[1].weight *= 1e-25
    with pytest.raises(ProfileError, match=r"1e19.*'features'.*2 units"):
        shiftmend.profile(model, torch.randn(50, 6))


def test_hooks_never_stay() -> None:
    case = ZOO["tabular"]
    model = case.model()
    shiftmend.profile(model, case.inputs())
    with attach_taps(model, {}):
        pass
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_too_many_features_for_slices_are_refused_before_a_file_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shiftmend.profiles.collect.MAX_WEIGHTS", 1000)
    case = ZOO["tabular"]
    with pytest.raises(ProfileError, match=r"128 slices, got 16"):
        shiftmend.profile(case.model(), case.inputs())


def test_features_that_hardly_vary_are_refused() -> None:
    class Stiff(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.head = nn.Linear(6, 8), nn.Linear(8, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.a(x) * 1e-3 + 1e3)

    with pytest.raises(ProfileError, match=r"'features'.*constant"):
        shiftmend.profile(Stiff(), torch.randn(200, 6))


def test_like_keeps_the_seed_of_the_slices_and_takes_nothing_beside_it() -> None:
    from shiftmend.profiles.serialize import decode
    from shiftmend.stats.slices import Projector, Slices

    case = ZOO["tabular"]
    model, inputs = case.model(), case.inputs(300)
    made = shiftmend.profile(model, inputs)
    own = made.slices["verification"]
    projector = Projector.build(made.mean, made.deviation, made.taps["features"].usable, 128, 7)
    slices = {"slices.verification": Slices(own.histogram, 7, projector)}
    other = dataclasses.replace(made, statistics={**made.statistics, **slices})
    again = shiftmend.profile(model, inputs, like=other)
    before = shiftmend.verify(model, inputs, again).divergence
    assert shiftmend.verify(model, inputs, decode(again.to_bytes())).divergence == pytest.approx(before, abs=1e-6)
    for beside in ({"preset": "paper"}, {"bins": Bins()}, {"taps": {"a": "0"}}):
        with pytest.raises(ProfileError, match="like="):
            shiftmend.profile(model, inputs, like=made, **beside)


def test_arrays_of_doubles_are_taken_as_numpy_gives_them() -> None:
    case = ZOO["tabular"]
    inputs = case.inputs()
    assert same(shiftmend.profile(case.model(), inputs), shiftmend.profile(case.model(), inputs.double().numpy()))


# --- the Gaussian of the features ------------------------------------------------------------------------------------


def test_the_gaussian_is_that_of_the_features() -> None:
    case = ZOO["tabular"]
    model, inputs = case.model(), case.inputs(100)
    with torch.no_grad():
        features = model[:5](inputs).double().numpy()
    marginal, full = (shiftmend.profile(model, inputs, gaussian=kind, batch_size=32) for kind in ("marginal", "full"))
    assert isinstance(marginal.gaussian, MarginalGaussian)
    assert isinstance(full.gaussian, FullGaussian)
    np.testing.assert_allclose(marginal.gaussian.variance, features.var(0, ddof=1), rtol=1e-5, atol=1e-10)
    np.testing.assert_allclose(full.gaussian.covariance, np.cov(features.T), rtol=1e-4, atol=1e-7)
    for made in (marginal, full):
        assert made.gaussian.samples == 100
        np.testing.assert_allclose(made.gaussian.mean, features.mean(0), rtol=1e-5, atol=1e-7)
        assert f"moments     {made.gaussian.kind} of the features" in repr(made)
    assert isinstance(shiftmend.profile(model, inputs).gaussian, MarginalGaussian)  # a few kilobytes, unless asked
    others = {**full.statistics, "gaussian": marginal.gaussian}
    assert same(marginal, dataclasses.replace(full, statistics=others))  # everything else is as without


def test_a_full_gaussian_does_not_depend_on_passes() -> None:
    case = ZOO["signal"]
    model, inputs = case.model(), case.inputs(90)
    one, three = (
        shiftmend.profile(model, inputs, gaussian="full", batch_size=32, keep_bytes=room) for room in (1 << 30, 0)
    )
    assert torch.equal(one.gaussian.covariance, three.gaussian.covariance)


def test_other_kinds_of_gaussian_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    case = ZOO["tabular"]
    model, inputs = case.model(), case.inputs()
    with pytest.raises(ProfileError, match=r"marginal, full.*'diagonal'"):
        shiftmend.profile(model, inputs, gaussian="diagonal")
    with pytest.raises(ProfileError, match=r"gaussian beside like="):
        shiftmend.profile(model, inputs, gaussian="full", like=shiftmend.profile(model, inputs))
    monkeypatch.setattr("shiftmend.profiles.collect.MOST_CORRELATED", 15)
    with pytest.raises(ProfileError, match=r"15 features.*covariance, got 16"):
        shiftmend.profile(model, inputs, gaussian="full")


def test_like_may_name_a_file(tmp_path: Path) -> None:
    case = ZOO["signal"]
    model = case.model()
    first = shiftmend.profile(model, case.inputs(64, seed=1))
    first.save(tmp_path / "first.profile")
    expected = shiftmend.profile(model, case.inputs(64, seed=2), like=first)
    for named in (tmp_path / "first.profile", str(tmp_path / "first.profile")):
        assert same(shiftmend.profile(model, case.inputs(64, seed=2), like=named), expected)
    with pytest.raises(ProfileError, match="other layers"):
        shiftmend.profile(
            torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2)), torch.randn(20, 3), like=first
        )
    with pytest.raises(ProfileError, match=r"like=.*Tensor"):
        shiftmend.profile(model, case.inputs(), like=case.inputs())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"bins": 10}, "bins.*got 10"),
        ({"bins": 0}, "bins.*got 0"),
        ({"preset": ""}, r"preset.*reference.*''"),
        ({"preset": ["paper"]}, r"preset.*\['paper'\]"),
        ({"taps": ["0"]}, r"taps.*\['0'\]"),
        ({"keep_bytes": None}, r"keep_bytes.*got None"),
        ({"keep_bytes": float("nan")}, r"keep_bytes.*got nan"),
        ({"preprocess": "normalise"}, "preprocess.*'normalise'"),
        ({"device": ["cpu"]}, "is available here"),
        ({"gaussian": np.array(["full", "full"])}, r"Gaussian.*ndarray"),
    ],
)
def test_arguments_of_the_wrong_kind_are_one_sentence(wrong: dict[str, object], sentence: str) -> None:
    case = ZOO["tabular"]
    model = case.model()
    with pytest.raises(shiftmend.ShiftmendError, match=sentence):
        shiftmend.profile(model, case.inputs(), **wrong)  # type: ignore[arg-type]
    assert hooks(model) == 0


def test_so_few_samples_that_a_profile_tells_them_are_remarked(caplog: pytest.LogCaptureFixture) -> None:
    case = ZOO["tabular"]
    model, inputs = case.model(), case.inputs(64)
    whole = shiftmend.profile(model, inputs, progress=False)
    shiftmend.profile(model, inputs[:10], like=whole, progress=False)
    assert caplog.messages == []
    one = shiftmend.profile(model, inputs[:1], like=whole, progress=False)
    assert caplog.messages == [
        "A profile of only 1 sample nearly reveals the inputs. Do not pass it on if they are confidential."
    ]
    with torch.no_grad(), attach_taps(model, whole.specs) as recorder:
        model(inputs[:1])
        torch.testing.assert_close(one.gaussian.mean, recorder.read()["features"][0])


class Averages(nn.Module):
    """Keeps a moving average of its features, in eval mode too."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.head = nn.Linear(6, 8), nn.Linear(8, 3)
        self.register_buffer("average", torch.zeros(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.encoder(x).relu()
        self.average = 0.9 * self.average + 0.1 * hidden.detach().mean(0)
        return self.head(hidden)


def test_a_model_that_changes_its_buffers_is_left_as_it_was(caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    model, inputs = Averages(), torch.randn(400, 6)
    profile = shiftmend.profile(model, inputs)
    shiftmend.verify(model, inputs, profile)
    shiftmend.evaluate(model, (inputs, torch.zeros(400, dtype=torch.long)))
    assert torch.equal(model.average, torch.zeros(8))
    shiftmend.adapt(model, inputs, profile, "source-only", progress=False)
    assert "not those that the profile was made with" not in caplog.text


class Spectra(nn.Module):
    """Complex readings and weights, real features."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 12, dtype=torch.complex64)
        self.second, self.head = nn.Linear(12, 8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.second(self.first(x).abs()).relu())


@pytest.mark.slow
@pytest.mark.filterwarnings("error")
def test_complex_inputs_and_weights(tmp_path) -> None:  # type: ignore[no-untyped-def]
    torch.manual_seed(0)
    model, inputs = Spectra(), torch.randn(600, 6, dtype=torch.complex64)
    profile = shiftmend.profile(model, inputs)
    assert profile.inputs.low == pytest.approx(float(torch.view_as_real(inputs).min()))
    result = shiftmend.adapt(model, 2j * inputs, profile, "bufr", epochs_per_block=5, progress=False)
    assert result.manifest["blocks"] == [["first"], ["second"]]
    assert result.before is not None
    assert result.after is not None
    assert result.after.divergence < result.before.divergence / 2
    result.save(tmp_path)
    model.load_state_dict(safetensors.torch.load_file(tmp_path / "model.safetensors"))
    assert torch.equal(model.first.weight, result.model.first.weight)
    with pytest.raises(TapError, match=r"'early'.*'first'.*complex"):
        shiftmend.profile(model, inputs, taps={"early": "first"})
    inputs[3, 0] = complex(0, math.nan)
    with pytest.raises(DataError, match=r"infinity.*sample 3 "):
        shiftmend.profile(model, inputs)


def test_a_preprocess_that_makes_nan_is_what_is_named() -> None:
    model, inputs = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)), torch.randn(64, 4)
    home = shiftmend.profile(model, inputs, progress=False)
    for use in (
        lambda: shiftmend.profile(model, inputs, preprocess=torch.log, progress=False),
        lambda: shiftmend.adapt(model, inputs, home, preprocess=torch.log, progress=False),
        lambda: shiftmend.verify(model, inputs, home, preprocess=torch.log),
    ):
        with pytest.raises(DataError, match="preprocess to return numbers"):
            use()


def test_conjugates_which_torch_computes_only_when_they_are_read() -> None:
    torch.manual_seed(0)
    model, inputs = Spectra(), torch.randn(100, 6, dtype=torch.complex64).conj()
    model.register_buffer("window", torch.ones(6, dtype=torch.complex64).conj())
    result = shiftmend.adapt(model, inputs, method="source-only", progress=False)
    read = shiftmend.adapt(model, inputs.resolve_conj(), method="source-only", progress=False)
    assert result.manifest["target"] == read.manifest["target"]


@pytest.mark.parametrize(("room", "held"), [(39 * 40, 0), (40 * 40, 1)])
def test_what_will_not_fit_is_not_kept_from_the_first_batch_on(room: int, held: int) -> None:
    model = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2))
    specs = {"features": Tap("features", "2", "input"), "logits": Tap("logits", "2")}
    feed = Feed(torch.randn(40, 3), batch_size=10)
    seen: list[weakref.ref[torch.Tensor]] = []
    there: list[bool] = []

    def update(samples: dict[str, torch.Tensor]) -> None:
        there.append(bool(seen) and seen[0]() is not None)
        seen.append(weakref.ref(samples["features"]))

    profiling._Passes(model, feed, specs, room, Bar()).run(update)
    assert there[2] == held
