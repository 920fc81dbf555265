from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from same_profiles import same
from torch import Tensor, nn
from worlds import sensors
from zoo import ZOO

import shiftmend
from shiftmend.errors import ProfileError, TapError
from shiftmend.profiles import serialize as profile_files
from shiftmend.profiles.profile import Profile
from shiftmend.profiles.serialize import problems
from shiftmend.stats.gaussians import FullGaussian
from shiftmend.stats.histograms import Bins


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["reference", "paper", "sliced"])
def test_merged_halves_equal_the_whole(preset: str) -> None:
    case = ZOO["signal"]
    model, inputs = case.model(), case.inputs(128)
    whole = shiftmend.profile(model, inputs, preset=preset)
    halves = [shiftmend.profile(model, part, like=whole) for part in inputs.split(50)]
    merged = halves[0]
    for half in halves[1:]:
        merged = merged.merge(half)
    for name, tap in whole.taps.items():
        assert merged.taps[name].samples == 128
        torch.testing.assert_close(merged.taps[name].counts, tap.counts, atol=1e-4, rtol=1e-5)
    for name, part in whole.slices.items():
        torch.testing.assert_close(merged.slices[name].histogram.counts, part.histogram.counts, atol=1e-4, rtol=1e-5)
    assert problems(merged) == []


def test_inputs_of_other_sizes_merge() -> None:
    """Each position counts, however many an input has."""
    pooled = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3)).eval()
    large, small = torch.randn(70, 1, 8, 8), torch.randn(31, 1, 5, 5)
    first = shiftmend.profile(pooled, large, taps={"early": "0"})
    second = shiftmend.profile(pooled, small, like=first)
    merged, both = first.merge(second), shiftmend.profile(pooled, [large, small], like=first)
    assert merged.taps["early"].samples == both.taps["early"].samples == 70 * 36 + 31 * 9
    torch.testing.assert_close(merged.taps["early"].counts, both.taps["early"].counts, atol=1e-3, rtol=1e-5)
    for made in (merged, Profile.mixture([first, second], [1, 2])):
        assert problems(made) == []
        assert made.inputs.sizes == ("1", "any", "any")


def test_profiles_of_other_ranges_do_not_merge() -> None:
    case = ZOO["signal"]
    model = case.model()
    first, second = (shiftmend.profile(model, case.inputs(64, seed=s)) for s in (1, 2))
    with pytest.raises(ProfileError, match="like="):
        first.merge(second)
    with pytest.raises(ProfileError, match="profiles of one model"):
        first.merge(shiftmend.profile(model, case.inputs(), preset="paper"))


@pytest.mark.slow
def test_size_of_a_cifar_resnet_profile() -> None:
    case = ZOO["resnet18"]
    made = shiftmend.profile(case.model(), case.inputs(32))
    assert len(made.to_bytes()) <= 48 * 1024


def test_save_load_round_trip_and_summary(tmp_path) -> None:  # type: ignore[no-untyped-def]
    case = ZOO["dict"]
    made = shiftmend.profile(case.model(), case.inputs(), output="logits", preset="sliced", taps={"deep": "encoder.0"})
    made.save(tmp_path / "a.profile.safetensors")
    back = Profile.load(tmp_path / "a.profile.safetensors")
    assert same(made, back)
    assert made.to_bytes() == back.to_bytes() == (tmp_path / "a.profile.safetensors").read_bytes()
    assert (back.specs, back.preset, back.inputs, back.library) == (made.specs, made.preset, made.inputs, made.library)
    features = torch.randn(5, case.features)
    for name in made.slices:
        assert torch.equal(back.slices[name].projector(features), made.slices[name].projector(features))
    assert repr(made) == repr(back)
    assert "64 source samples" in repr(back)


@pytest.mark.parametrize(
    ("made", "undone"), [(torch.log, torch.exp), (lambda inputs: inputs * 1e300, lambda inputs: inputs / 1e300)]
)
def test_infinite_and_enormous_inputs_come_back_from_a_file(
    tmp_path: Path, made: Callable[[Tensor], Tensor], undone: Callable[[Tensor], Tensor]
) -> None:
    class Undoing(torch.nn.Sequential):
        def forward(self, inputs: Tensor) -> Tensor:
            return super().forward(undone(inputs))

    model = Undoing(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2)).double()
    profile = shiftmend.profile(model, torch.randn(20, 3, dtype=torch.float64).relu(), preprocess=made)
    profile.save(tmp_path / "p")
    assert Profile.load(tmp_path / "p").inputs == profile.inputs


def test_a_profile_says_what_it_holds() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, 1))
    with torch.no_grad():
        model[0].bias.copy_(torch.tensor([9.0, -9.0, 9.0, -9.0]))  # two units that are silent on all of the source
    inputs = torch.linspace(-1, 1, 3000).reshape(1000, 3)
    made = shiftmend.profile(model, inputs, progress=False)
    assert made.unusable == {"features": 2, "logits": 0}
    assert repr(made).splitlines() == [
        f"Profile of 1,000 source samples, preset 'reference', shiftmend {shiftmend.__version__}",
        "  bins        8 inner + 2 outer, temperature 0.05",
        "  inputs      [3] float32 in [-1, 1]",
        "  features    4 units at '2:input', 2 constant and left out",
        "  logits      1 unit at '2'",
        "  moments     marginal-gaussian of the features",
        "  slices      128 for verification",
        f"  model       architecture {made.architecture[:12]}, weights {made.weights[:12]}",
        "  rehearsal   none; try shiftmend.rehearse(model, held_out, profile)",
    ]


def test_the_profile_notices_another_model(caplog: pytest.LogCaptureFixture) -> None:
    case = ZOO["tabular"]
    made = shiftmend.profile(case.model(), case.inputs())
    with pytest.raises(ProfileError, match="other layers"):
        shiftmend.adapt(ZOO["signal"].model(), ZOO["signal"].inputs(), made)
    shiftmend.adapt(case.model(seed=5), case.inputs(), made, "source-only")
    assert "not those that the profile was made with" in caplog.text


@pytest.mark.slow
def test_other_preprocessing_is_noticed(caplog: pytest.LogCaptureFixture) -> None:
    case = ZOO["paper-cnn"]
    images = torch.rand(64, 3, 28, 28)
    made = shiftmend.profile(case.model(), images)
    shiftmend.adapt(case.model(), images * 255, made, "source-only")
    assert "another normalisation" in caplog.text
    caplog.clear()
    shiftmend.adapt(case.model(), 1 - images, made, "source-only")  # an inverted image is a shift, not a mistake
    assert "preprocessing" not in caplog.text


def test_profiles_of_other_weights_do_not_merge() -> None:
    case = ZOO["tabular"]
    first = shiftmend.profile(case.model(), case.inputs())
    with pytest.raises(ProfileError, match="profiles of one model"):
        first.merge(shiftmend.profile(case.model(seed=1), case.inputs(), like=first))


def test_a_profile_that_could_not_be_loaded_again_is_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    case = ZOO["tabular"]
    made = shiftmend.profile(case.model(), case.inputs(), bins=Bins(temperature=np.float32(0.01)))
    made.to_bytes()
    monkeypatch.setattr(profile_files, "MAX_BYTES", 1000)
    with pytest.raises(ProfileError, match="loaded again"):
        made.to_bytes()


@pytest.mark.parametrize("gaussian", ["marginal", "full"])
def test_merged_gaussians_equal_the_whole(gaussian: str) -> None:
    case = ZOO["signal"]
    model, inputs = case.model(), case.inputs(128)
    whole = shiftmend.profile(model, inputs, gaussian=gaussian)
    first, second, third = (shiftmend.profile(model, part, like=whole) for part in inputs.split(50))
    for merged in (first.merge(second).merge(third), third.merge(first).merge(second)):
        assert (merged.gaussian.kind, merged.gaussian.samples) == (whole.gaussian.kind, 128)
        torch.testing.assert_close(merged.gaussian.mean, whole.gaussian.mean, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(merged.gaussian.variance, whole.gaussian.variance, rtol=1e-4, atol=1e-7)
        if isinstance(whole.gaussian, FullGaussian):
            torch.testing.assert_close(merged.gaussian.covariance, whole.gaussian.covariance, rtol=1e-3, atol=1e-6)
        assert same(profile_files.decode(merged.to_bytes()), merged)


def test_a_full_profile_does_not_merge_with_a_marginal_one() -> None:
    case = ZOO["signal"]
    model, inputs = case.model(), case.inputs(64)
    full, marginal = (shiftmend.profile(model, inputs, gaussian=kind) for kind in ("full", "marginal"))
    for one, other in ((full, marginal), (marginal, full)):
        with pytest.raises(ProfileError, match="profiles of one model"):
            one.merge(other)


def test_a_profile_merges_with_one_in_a_file(tmp_path: Path) -> None:
    case = ZOO["signal"]
    model = case.model()
    first = shiftmend.profile(model, case.inputs(64, seed=1))
    second = shiftmend.profile(model, case.inputs(64, seed=2), like=first)
    second.save(tmp_path / "second.profile")
    for named in (tmp_path / "second.profile", str(tmp_path / "second.profile")):
        assert same(first.merge(named), first.merge(second))
    with pytest.raises(ProfileError, match=r"merged.*got a dict"):
        first.merge({})  # type: ignore[arg-type]
    with pytest.raises(ProfileError, match=r"nowhere\.profile"):
        first.merge(tmp_path / "nowhere.profile")


@pytest.mark.parametrize("wrong", [None, 3, "", [], b"file"])
def test_what_names_no_file_is_refused(wrong: object) -> None:
    profile = shiftmend.profile(ZOO["tabular"].model(), ZOO["tabular"].inputs(), progress=False)
    with pytest.raises(ProfileError, match=r"name.*file to write"):
        profile.save(wrong)  # type: ignore[arg-type]
    with pytest.raises(ProfileError, match=r"name.*for the profile"):
        Profile.load(wrong)  # type: ignore[arg-type]


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    profile = shiftmend.profile(ZOO["tabular"].model(), ZOO["tabular"].inputs(), progress=False)
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ProfileError, match=r"file/inside.*another file"):
        profile.save(tmp_path / "file" / "inside")
    with pytest.raises(ProfileError, match=r"written.*folder"):
        profile.save(tmp_path)
    assert [path.read_text() for path in tmp_path.iterdir()] == ["mine"]


def test_a_profile_checks_the_model_inside_a_wrapper_and_refuses_what_is_none() -> None:
    case = ZOO["tabular"]
    model = case.model()
    profile = shiftmend.profile(model, case.inputs(), progress=False)
    profile.check_architecture(torch.nn.DataParallel(model))
    for check in (profile.check_architecture, profile.check_weights):
        with pytest.raises(TapError, match=r"model.*nn\.Module, got a dict"):
            check({})
    assert profile.to("cpu").taps["features"].low.device == torch.device("cpu")
    with pytest.raises(shiftmend.ShiftmendError, match=r"available.*'nowhere'"):
        profile.to("nowhere")


# --- mixtures --------------------------------------------------------------------------------------------------------


def classes(samples: int = 240) -> tuple[torch.nn.Module, list[torch.Tensor]]:
    """A model, and inputs of two kinds: the second half is far from the first, where some units are silent."""
    case = ZOO["signal"]
    inputs = case.inputs(samples)
    return case.model(), [inputs[: samples // 3], inputs[samples // 3 :] * 2 + 1]


@pytest.mark.parametrize("gaussian", ["marginal", "full"])
def test_a_mixture_has_the_distributions_of_its_parts_in_the_given_shares(gaussian: str) -> None:
    model, (few, many) = classes()
    whole = shiftmend.profile(model, torch.cat([few, many]), preset="sliced", gaussian=gaussian)
    parts = [shiftmend.profile(model, inputs, like=whole) for inputs in (few, many)]
    mixed = Profile.mixture(parts, [9, 1])
    size = round(1 / (0.9**2 / 80 + 0.1**2 / 160))
    assert mixed.samples == size
    assert "\n  mixture     90 %, 10 %\n" in repr(mixed)
    assert "mixture" not in repr(whole)
    assert problems(mixed) == []
    for histograms in ([one.taps[name] for one in (mixed, *parts)] for name in ("features", "logits")):
        rows, *own = ((one.counts / one.samples).double().numpy() for one in histograms)
        np.testing.assert_allclose(rows, 0.9 * own[0] + 0.1 * own[1], atol=1e-6)
    for name in mixed.slices:
        rows, *own = ((one.slices[name].histogram.counts / one.samples).double().numpy() for one in (mixed, *parts))
        np.testing.assert_allclose(rows, 0.9 * own[0] + 0.1 * own[1], atol=1e-6)
    mean = 0.9 * parts[0].gaussian.mean + 0.1 * parts[1].gaussian.mean
    torch.testing.assert_close(mixed.gaussian.mean, mean, rtol=1e-5, atol=1e-6)
    assert same(profile_files.decode(mixed.to_bytes()), mixed)


def test_parts_in_their_own_shares_are_the_whole() -> None:
    model, inputs = classes()
    whole = shiftmend.profile(model, torch.cat(inputs))
    parts = [shiftmend.profile(model, one, like=whole) for one in inputs]
    for mixed in (Profile.mixture(parts, [80, 160]), Profile.mixture(parts, [1 / 3, 2 / 3]), parts[0].merge(parts[1])):
        assert mixed.samples == 240
        for name, tap in whole.taps.items():
            torch.testing.assert_close(mixed.taps[name].counts, tap.counts, rtol=1e-4, atol=1e-3)
        assert (mixed.inputs.low, mixed.inputs.high) == (whole.inputs.low, whole.inputs.high)
        assert mixed.inputs.mean == pytest.approx(whole.inputs.mean, abs=1e-4)
        assert mixed.inputs.deviation == pytest.approx(whole.inputs.deviation, abs=1e-4)
    assert Profile.mixture(parts, [80, 160]).merge(parts[0]).shares == ()  # no longer in the shares that were given


def test_a_share_of_nothing_leaves_a_part_out(tmp_path: Path) -> None:
    model, inputs = classes()
    whole = shiftmend.profile(model, torch.cat(inputs))
    parts = [shiftmend.profile(model, one, like=whole) for one in inputs]
    for number, part in enumerate(parts):
        part.save(tmp_path / f"{number}.profile")
    files = [tmp_path / "0.profile", str(tmp_path / "1.profile")]
    for shares, part in (((1, 0), parts[0]), ((0, 1), parts[1])):
        mixed = Profile.mixture(files, [5 * share for share in shares])
        assert same(mixed, part)
        assert mixed.inputs == part.inputs
        assert mixed.shares == shares


def test_units_that_are_silent_for_a_class_are_no_fault_of_its_profile(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.ReLU(), torch.nn.Linear(6, 2))
    with torch.no_grad():
        model[0].weight[0] = torch.tensor([1.0, 0, 0, 0])
        model[0].bias[0] = -1
    inputs = torch.rand(200, 4)
    inputs[100:, 0] += 1
    whole = shiftmend.profile(model, inputs, gaussian="full")
    silent = shiftmend.profile(model, inputs[:100], like=whole)
    assert (silent.gaussian.variance == 0)[whole.taps["features"].usable].any()
    silent.save(tmp_path / "silent.profile")
    assert same(Profile.load(tmp_path / "silent.profile"), silent)
    for method in ("bnm", "full-gauss"):
        adapted = shiftmend.adapt(model, inputs, silent, method, epochs=1, batch_size=50, progress=False)
        assert all(np.isfinite(loss) for row in adapted.history for loss in row.losses.values())


def test_a_class_may_have_one_sample(tmp_path: Path) -> None:
    model, inputs = classes()
    whole = shiftmend.profile(model, torch.cat(inputs), gaussian="full")
    parts = [shiftmend.profile(model, one, like=whole) for one in (inputs[0], inputs[1][:1])]
    parts[1].save(tmp_path / "rare.profile")
    mixed = Profile.mixture([parts[0], tmp_path / "rare.profile"], [80, 1])
    together = shiftmend.profile(model, torch.cat([inputs[0], inputs[1][:1]]), like=whole)
    assert mixed.samples == together.samples == 81
    torch.testing.assert_close(mixed.gaussian.mean, together.gaussian.mean)
    torch.testing.assert_close(mixed.gaussian.covariance, together.gaussian.covariance)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "shares",
    [
        [1],
        [1, 2, 3],
        [0, 0],
        [-1, 2],
        [float("nan"), 1],
        [float("inf"), 1],
        ["a", "b"],
        3,
        None,
        {0: 0.9, 1: 0.1},
        {9, 1},
        "91",
    ],
)
def test_impossible_shares_are_refused(shares: object) -> None:
    made = shiftmend.profile(ZOO["tabular"].model(), ZOO["tabular"].inputs())
    with pytest.raises(ProfileError, match="2 numbers"):
        Profile.mixture([made, made], shares)  # type: ignore[arg-type]


def test_what_is_no_list_of_profiles_is_no_mixture(tmp_path: Path) -> None:
    made = shiftmend.profile(ZOO["tabular"].model(), ZOO["tabular"].inputs())
    for given in (made, "home.profile", 3):
        with pytest.raises(ProfileError, match="list of profiles"):
            Profile.mixture(given, [1])  # type: ignore[arg-type]
    with pytest.raises(ProfileError, match=r"part 2.*int"):
        Profile.mixture([made, 3], [1, 1])  # type: ignore[list-item]
    with pytest.raises(ProfileError, match="0 numbers"):
        Profile.mixture([], [])
    other = shiftmend.profile(ZOO["tabular"].model(seed=1), ZOO["tabular"].inputs())
    with pytest.raises(ProfileError, match="profiles of one model"):
        Profile.mixture([made, other], [1, 1])


def test_a_profile_that_was_looked_at_in_inference_mode_can_be_adapted_to() -> None:
    world = sensors()
    first = world.profile()
    with torch.inference_mode():
        second = shiftmend.profile(world.model, world.source, like=first)
        assert shiftmend.verify(world.model, world.source, first).divergence < 1e-4
        merged = first.merge(second)
        assert "features" in repr(merged)
    for profile in (first, merged):
        result = shiftmend.adapt(world.model, world.target, profile, "fr", epochs=1, progress=False)
        assert result.manifest["status"] == "finished"
