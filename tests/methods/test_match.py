from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from worlds import sensors

import shiftmend
from shiftmend.errors import AdaptationError, DataError
from shiftmend.introspection.input_map import KNOTS, OFFSET, SCALE, SHIFTS, load_adapted_state
from shiftmend.stats.moments import Moments
from shiftmend.stats.quantiles import LEVELS, MAX_UNITS, Quantiles

METHODS = ("match-mean", "match-moments")


class Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU())
        self.head = nn.Linear(6, 4)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.body(inputs.float()).mean((2, 3)))


def reference(source: Tensor, target: Tensor, scales: bool) -> np.ndarray:
    """The target matched to the source by numpy, in float64, along axis 1."""
    home, away = source.double().numpy(), target.double().numpy()
    axes = tuple(axis for axis in range(home.ndim) if axis != 1)
    gain = home.std(axes, ddof=1, keepdims=True) / away.std(axes, ddof=1, keepdims=True) if scales else 1.0
    return (away - away.mean(axes, keepdims=True)) * gain + home.mean(axes, keepdims=True)


@pytest.mark.parametrize("method", METHODS)
def test_tables_are_matched_column_by_column(method: str) -> None:
    world = sensors()
    result = shiftmend.adapt(world.model, world.target, world.profile(), method, progress=False)
    expected = torch.from_numpy(reference(world.source, world.target, method == "match-moments")).float()
    with torch.no_grad():
        torch.testing.assert_close(result.model(world.target), world.model(expected), rtol=1e-4, atol=1e-4)
    assert result.manifest["method"]["name"] == method
    assert [row.block for row in result.history] == ["", "inputs"]
    assert result.history[1].signals["slices"] < result.history[0].signals["slices"]
    assert result.after is not None
    again = shiftmend.verify(result.model, world.target, world.profile(), progress=False)
    assert again.divergence == pytest.approx(result.after.divergence)
    for name, tensor in world.model.state_dict().items():
        assert torch.equal(result.model.state_dict()[name], tensor), "weights and BatchNorm stay as they were"


def test_matching_mends_gains_and_offsets() -> None:
    world = sensors()
    result = shiftmend.adapt(world.model, world.target, world.profile(), "match-moments", progress=False)
    assert world.accuracy(result.model) > world.accuracy(world.model) + 0.2


@pytest.mark.parametrize("method", METHODS)
def test_images_are_matched_channel_by_channel_behind_preprocess(method: str) -> None:
    model = Images().eval()
    source = torch.randint(0, 200, (40, 3, 8, 8), dtype=torch.uint8)
    target = source // 2 + torch.tensor([0, 20, 90], dtype=torch.uint8).view(3, 1, 1)

    def scaled(images: Tensor) -> Tensor:
        return images.float() / 255

    profile = shiftmend.profile(model, source, preprocess=scaled, progress=False)
    loader = DataLoader(TensorDataset(target, torch.zeros(40)), batch_size=16)
    result = shiftmend.adapt(model, loader, profile, method, preprocess=scaled, progress=False)
    expected = reference(scaled(source), scaled(target), method == "match-moments")
    with torch.no_grad():
        found, wanted = result.model(scaled(target)), model(torch.from_numpy(expected).float())
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    assert getattr(result.model, SCALE).shape == (3, 1, 1)
    with pytest.raises(AdaptationError, match=r"uint8.*preprocess"):
        shiftmend.adapt(model, target, profile, method, progress=False)


def test_long_rows_are_matched_as_a_whole() -> None:
    model = nn.Sequential(nn.Linear(5000, 4), nn.ReLU(), nn.Linear(4, 2)).eval()
    source = torch.randn(30, 5000)
    profile = shiftmend.profile(model, source, progress=False)
    result = shiftmend.adapt(model, 3 * source + 2, profile, "match-moments", progress=False)
    assert getattr(result.model, SCALE).item() == pytest.approx(1 / 3, rel=1e-4)
    with torch.no_grad():
        torch.testing.assert_close(result.model(3 * source + 2), model(source), rtol=1e-3, atol=1e-4)


def test_constant_columns_are_only_shifted() -> None:
    world = sensors()
    source, target = world.source.clone(), world.target.clone()
    source[:, 0], target[:, 1] = 0.1, 7.3
    profile = shiftmend.profile(world.model, source, progress=False)
    result = shiftmend.adapt(world.model, target, profile, "match-moments", progress=False)
    scale, offset = getattr(result.model, SCALE), getattr(result.model, OFFSET)
    assert scale[:2].tolist() == [1, 1]
    assert (scale[2:] != 1).all()
    assert (7.3 + offset[1]).item() == pytest.approx(source[:, 1].mean().item(), abs=1e-5)


@pytest.mark.parametrize("method", METHODS)
def test_saved_weights_are_loaded_with_their_map(method: str, tmp_path: Path) -> None:
    world = sensors()
    result = shiftmend.adapt(world.model, world.target, world.profile(), method, progress=False)
    result.save(tmp_path)
    fresh = copy.deepcopy(world.model)
    load_adapted_state(fresh, load_file(tmp_path / "model.safetensors"))
    with torch.no_grad():
        assert torch.equal(fresh(world.target), result.model(world.target))
        assert torch.equal(copy.deepcopy(fresh)(world.target), fresh(world.target))


def test_matching_again_replaces_the_map_and_other_methods_go_on_from_it() -> None:
    world = sensors()
    profile = world.profile()
    first = shiftmend.adapt(world.model, world.target, profile, "match-mean", progress=False)
    second = shiftmend.adapt(first.model, world.target, profile, "match-moments", progress=False)
    alone = shiftmend.adapt(world.model, world.target, profile, "match-moments", progress=False)
    with torch.no_grad():
        assert torch.equal(second.model(world.target), alone.model(world.target))
    trained = shiftmend.adapt(alone.model, world.target, profile, "fr", epochs=1, progress=False)
    assert torch.equal(getattr(trained.model, SCALE), getattr(alone.model, SCALE))


def test_a_finished_run_is_taken_up_from_its_checkpoint(tmp_path: Path) -> None:
    world = sensors()
    options = {"checkpoint": tmp_path / "run", "progress": False}
    first = shiftmend.adapt(world.model, world.target, world.profile(), "match-moments", **options)
    again = shiftmend.adapt(world.model, world.target, world.profile(), "match-moments", **options)
    assert torch.equal(getattr(first.model, SCALE), getattr(again.model, SCALE))
    assert len(again.history) == 2


@pytest.mark.parametrize("method", METHODS)
def test_what_cannot_be_matched_is_refused(method: str) -> None:
    world = sensors()
    profile = world.profile()
    old = replace(profile, statistics={n: s for n, s in profile.statistics.items() if n != "inputs"})
    with pytest.raises(AdaptationError, match="Profile the source again"):
        shiftmend.adapt(world.model, world.target, old, method, progress=False)
    with pytest.raises(AdaptationError, match="Expected a profile"):
        shiftmend.adapt(world.model, world.target, None, method, progress=False)
    moments = Moments(torch.zeros(3), torch.ones(3), 10)
    without = {n: s for n, s in profile.statistics.items() if n != "inputs.quantiles"}
    other = replace(profile, statistics={**without, "inputs": moments})
    with pytest.raises(AdaptationError, match="3 channels or columns"):
        shiftmend.adapt(world.model, world.target, other, method, progress=False)
    with pytest.raises(AdaptationError, match="stream"):
        shiftmend.stream(world.model, profile, method)


def test_older_profiles_mix_with_newer_ones() -> None:
    world = sensors()
    new = world.profile()
    old = replace(new, statistics={n: s for n, s in new.statistics.items() if not n.startswith("inputs")})
    assert "inputs.quantiles" not in old.merge(new).statistics
    assert "inputs.quantiles" in new.merge(new).statistics
    assert "inputs" not in old.merge(new).statistics
    assert "inputs" not in new.merge(old).statistics
    both = new.merge(new).statistics["inputs"]
    assert isinstance(both, Moments)
    torch.testing.assert_close(both.mean, world.source.mean(0))
    assert shiftmend.Profile.mixture([new, new], [1, 3]).statistics["inputs"].samples == 600 * 16 // 10


GRID = (np.arange(33) + 0.5) / 33


def match_histograms(source: np.ndarray, target: np.ndarray, inputs: np.ndarray, step: int) -> np.ndarray:
    """Map one column by its quantiles with numpy, in float64; the target's quantiles must all differ."""
    away, home = (np.quantile(values, GRID, method="hazen")[::step] for values in (target, source))
    slope = (home[-1] - home[0]) / (away[-1] - away[0])
    mapped = np.interp(inputs, away, home)
    mapped = np.where(inputs < away[0], home[0] + slope * (inputs - away[0]), mapped)
    return np.where(inputs > away[-1], home[-1] + slope * (inputs - away[-1]), mapped)


def see_inputs(model: nn.Module, inputs: Tensor) -> Tensor:
    """What the first layer of a model reads."""
    seen: list[Tensor] = []
    handle = model[0].register_forward_pre_hook(lambda _, args: seen.append(args[0]))  # type: ignore[index, operator]
    with torch.no_grad():
        model(inputs)
    handle.remove()
    return seen[0]


@pytest.mark.parametrize(("samples", "step"), [(600, 1), (200, 2), (70, 4), (40, 8), (20, 16), (5, 16)])
def test_curves_are_those_of_numpy_and_few_values_have_fewer_knots(samples: int, step: int) -> None:
    world = sensors()
    target = world.target[:samples].sign() * world.target[:samples].abs().pow(1.5)
    result = shiftmend.adapt(world.model, target, world.profile(), "match-histogram", progress=False)
    found = see_inputs(result.model, 3 * target)
    for column in range(6):
        source, away, wide = (values[:, column].double().numpy() for values in (world.source, target, 3 * target))
        expected = match_histograms(source, away, wide, step)
        np.testing.assert_allclose(found[:, column], expected, rtol=1e-3, atol=1e-3)
    order = target[:, 0].argsort()
    assert (see_inputs(result.model, target)[order, 0].diff() >= -1e-5).all(), "a curve rises"
    assert len([name for name in result.model.state_dict() if "shiftmend" in name]) == 2


def test_histograms_mend_what_is_not_linear() -> None:
    world = sensors()
    bent = (world.target / 3).sinh()
    profile = world.profile()
    scores = {}
    for method in ("match-moments", "match-histogram"):
        result = shiftmend.adapt(world.model, bent, profile, method, progress=False)
        assert result.after is not None
        scores[method] = result.after.divergence
    assert scores["match-histogram"] < 0.5 * scores["match-moments"]


def test_curves_of_images_and_of_inputs_as_a_whole() -> None:
    for shape in ((60, 3, 6, 6), (60, 20, 6)):
        model = nn.Sequential(nn.Flatten(), nn.Linear(int(np.prod(shape[1:])), 8), nn.ReLU(), nn.Linear(8, 2)).eval()
        source = torch.randn(shape)
        profile = shiftmend.profile(model, source, progress=False)
        result = shiftmend.adapt(model, source.exp(), profile, "match-histogram", progress=False)
        found, units = see_inputs(result.model, source.exp()), 3 if len(shape) == 4 else 1
        assert getattr(result.model, KNOTS).shape == (units, LEVELS)
        for unit in range(units):
            part = (slice(None), unit) if units > 1 else ...
            home = source[part].flatten().double().numpy()
            expected = match_histograms(home, np.exp(home), np.exp(home), 1)
            np.testing.assert_allclose(found[part].flatten(), expected, rtol=1e-3, atol=1e-3)


def test_constant_columns_and_single_samples_are_only_shifted() -> None:
    world = sensors(norm=False)
    source, target = world.source.clone(), world.target.clone()
    source[:, 0], target[:, 1] = 0.1, 7.3
    profile = shiftmend.profile(world.model, source, progress=False)
    model = shiftmend.adapt(world.model, target, profile, "match-histogram", progress=False).model
    found = see_inputs(model, target)
    middle = target[:, 0].quantile(0.5)
    torch.testing.assert_close(found[:, 0], target[:, 0] - middle + 0.1, rtol=1e-3, atol=0.02)
    torch.testing.assert_close(found[:, 1], source[:, 1].quantile(0.5).expand(600), rtol=1e-3, atol=0.02)
    alone = shiftmend.adapt(world.model, target[:1], profile, "match-histogram", progress=False).model
    shifts = see_inputs(alone, target) - target
    torch.testing.assert_close(shifts, shifts[:1].expand_as(shifts), rtol=1e-4, atol=1e-4)


def test_many_equal_inputs_take_the_middle_of_home() -> None:
    source, target = torch.rand(500, 2), torch.rand(500, 2) + 2
    source[:400], target[:300] = 0, 2
    model = nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 2)).eval()
    profile = shiftmend.profile(model, source, progress=False)
    result = shiftmend.adapt(model, target, profile, "match-histogram", progress=False)
    assert see_inputs(result.model, target[:300]).abs().max() < 1e-6


def test_curves_are_saved_copied_and_replaced(tmp_path: Path) -> None:
    world = sensors()
    profile = world.profile()
    result = shiftmend.adapt(world.model, world.target, profile, "match-histogram", progress=False)
    result.save(tmp_path)
    fresh = copy.deepcopy(world.model)
    load_adapted_state(fresh, load_file(tmp_path / "model.safetensors"))
    with torch.no_grad():
        assert torch.equal(fresh(world.target), result.model(world.target))
        assert torch.equal(copy.deepcopy(fresh)(world.target), fresh(world.target))
        exported = torch.export.export(result.model, (world.target,)).module()
        torch.testing.assert_close(exported(world.target), fresh(world.target))
        assert fresh.double()(world.target.double()).dtype == torch.float64
    linear = shiftmend.adapt(result.model, world.target, profile, "match-moments", progress=False)
    assert not hasattr(linear.model, KNOTS)
    curved = shiftmend.adapt(linear.model, world.target, profile, "match-histogram", progress=False)
    assert not hasattr(curved.model, SCALE)
    assert torch.equal(getattr(curved.model, SHIFTS), getattr(result.model, SHIFTS))


def test_histograms_that_cannot_be_matched_are_refused() -> None:
    world = sensors()
    profile = world.profile()
    old = replace(profile, statistics={n: s for n, s in profile.statistics.items() if n != "inputs.quantiles"})
    assert shiftmend.adapt(world.model, world.target, old, "match-moments", progress=False).after is not None
    with pytest.raises(AdaptationError, match="Profile the source again"):
        shiftmend.adapt(world.model, world.target, old, "match-histogram", progress=False)
    quantiles = Quantiles(torch.zeros(3, LEVELS), 10)
    without = {n: s for n, s in profile.statistics.items() if n != "inputs"}
    other = replace(profile, statistics={**without, "inputs.quantiles": quantiles})
    with pytest.raises(AdaptationError, match="3 channels or columns"):
        shiftmend.adapt(world.model, world.target, other, "match-histogram", progress=False)
    wide = nn.Sequential(nn.Linear(MAX_UNITS + 1, 4), nn.ReLU(), nn.Linear(4, 2)).eval()
    spectra = torch.randn(20, MAX_UNITS + 1)
    with pytest.raises(AdaptationError, match="match-moments"):
        shiftmend.adapt(
            wide, spectra, shiftmend.profile(wide, spectra, progress=False), "match-histogram", progress=False
        )


@pytest.mark.parametrize("method", ["match-moments", "match-histogram", "neo", "coral"])
def test_inputs_that_are_not_finite_are_refused(method: str) -> None:
    world = sensors()
    profile = shiftmend.profile(world.model, world.source, gaussian="full", progress=False)
    target = world.target.clone()
    target[7, 2] = torch.nan
    with pytest.raises(DataError, match="NaN"):
        shiftmend.adapt(world.model, target, profile, method, progress=False)
    with pytest.raises(AdaptationError, match=r"finite inputs|finite features"):
        shiftmend.adapt(world.model, world.target, profile, method, preprocess=lambda x: x / (x < 12), progress=False)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_captured_passes_see_the_map() -> None:
    world = sensors()
    expected = shiftmend.adapt(world.model, world.target, world.profile(), "match-moments", device="cpu")
    found = shiftmend.adapt(world.model, world.target, world.profile(), "match-moments", device="cuda")
    for ours, theirs in zip(found.history, expected.history, strict=True):
        assert ours.signals["slices"] == pytest.approx(theirs.signals["slices"], rel=1e-3)
