"""The battery: every device on every kind of input, and the choice of devices and strengths."""

from __future__ import annotations

import itertools
import pickle
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import fft, ndimage
from torch import Tensor

from shiftmend.errors import DataError
from shiftmend.inputs.digits import enlarged_digits
from shiftmend.rehearsal import devices as functions
from shiftmend.rehearsal.battery import (
    PlannedShift,
    SimulatedDevice,
    from_functions,
    list_devices,
    plan_battery,
)
from shiftmend.utils.devices import VALUES_PER_PART


def pictures() -> Tensor:
    """Make smooth colour pictures, uint8 `[12, 3, 32, 24]`, which use the full range in every channel."""
    coarse = torch.rand(12, 3, 8, 6, generator=torch.Generator().manual_seed(0))
    smooth = torch.nn.functional.interpolate(coarse, size=(32, 24), mode="bilinear")
    low, high = smooth.amin((0, 2, 3), keepdim=True), smooth.amax((0, 2, 3), keepdim=True)
    return ((smooth - low) / (high - low) * 255).round().to(torch.uint8)


def waves() -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(30, 3, 120, generator=generator).cumsum(-1) * 0.3 + torch.tensor([5.0, 0.0, -40.0])[:, None]


def features() -> Tensor:
    generator = torch.Generator().manual_seed(2)
    return torch.randn(200, 16, generator=generator) * torch.logspace(-2, 3, 16) + 7


def spectra() -> Tensor:
    generator = torch.Generator().manual_seed(3)
    place = torch.arange(50.0)
    centre = 15 + 20 * torch.rand(100, 1, generator=generator)
    return torch.exp(-(((place - 25) / 15) ** 2)) + torch.exp(-(((place - centre) / 5) ** 2))


INPUTS: dict[str, Tensor] = {
    "digits": enlarged_digits(28).images[:12],
    "colour": pictures(),
    "normalised": pictures().float() / 100 - torch.tensor([1.0, 0.5, 3.0])[:, None, None],
    "two channels": pictures()[:, :2].double(),
    "signals": waves(),
    "one channel": waves()[:, :1],
    "features": features(),
    "spectra": spectra(),
    "half": waves().half(),
}
CASES = [
    pytest.param(inputs, device, id=f"{name}-{device.name}")
    for name, inputs in INPUTS.items()
    for device in list_devices(inputs)
]


def find(inputs: Tensor, name: str) -> Callable[[Tensor, float, int], Tensor]:
    return next(device.apply for device in list_devices(inputs) if device.name == name)


def distance(one: Tensor, other: Tensor) -> float:
    return float((one.double() - other.double()).square().mean())


@pytest.mark.parametrize(("inputs", "device"), CASES)
def test_devices_keep_the_form_and_grow_with_strength(inputs: Tensor, device: SimulatedDevice) -> None:
    before = inputs.clone()
    shifted = {strength: device.apply(inputs, strength, 5) for strength in (1e-3, 0.25, 0.5, 1.0)}
    for result in shifted.values():
        assert (result.shape, result.dtype, result.device) == (inputs.shape, inputs.dtype, inputs.device)
        assert result.isfinite().all()
    assert torch.equal(inputs, before)
    assert torch.equal(device.apply(inputs, 0.5, 5), shifted[0.5])
    moved = [distance(inputs, result) for result in shifted.values()]
    # Sizes that do not divide the side, tiles that are alike and a clock beyond the correlation are no exact order.
    slack = 1.3 if device.family in ("resolution", "shuffling", "clock", "timing", "shift") else 1.01
    assert all(less <= slack * more + 1e-12 for less, more in itertools.pairwise(moved)), moved
    assert moved[-1] > 0
    if device.family != "shuffling":
        assert moved[0] < 0.1 * moved[-1]


@pytest.mark.parametrize("name", ["colour", "digits"])
def test_uint8_and_float_agree_within_a_level(name: str) -> None:
    whole = INPUTS[name]
    for device, other in zip(list_devices(whole), list_devices(whole.double() / 255), strict=True):
        for strength in (0.3, 1.0):
            expected = other.apply(whole.double() / 255, strength, 2) * 255
            # A threshold between two levels, the draws of photons and rounding to steps may fall either way.
            apart = (device.apply(whole, strength, 2).double() - expected).abs()
            tolerated = 0.02 if device.family in ("noise", "compression", "inversion") else 0
            assert float((apart > 0.51).double().mean()) <= tolerated, device.name


def test_float_images_stay_in_their_range_at_home() -> None:
    images = INPUTS["normalised"]
    low, high = images.amin((0, 2, 3), keepdim=True), images.amax((0, 2, 3), keepdim=True)
    for device in list_devices(images):
        shifted = device.apply(images, 1.0, 0)
        assert (shifted >= low - 1e-5).all(), device.name
        assert (shifted <= high + 1e-5).all(), device.name


@pytest.mark.parametrize("name", INPUTS)
def test_enough_devices_and_families(name: str) -> None:
    devices = list_devices(INPUTS[name])
    assert len(devices) >= 12
    assert len({device.family for device in devices}) >= 10
    assert len({device.name for device in devices}) == len(devices)
    assert len({device.family for device in devices if not device.mendable}) >= 2


def test_colour_needs_channels_and_columns_need_neighbours() -> None:
    assert "colour" not in {device.family for device in list_devices(INPUTS["digits"])}
    assert "channels" not in {device.family for device in list_devices(INPUTS["one channel"])}
    assert "smoothing" not in {device.family for device in list_devices(features()[:, :2])}
    for device in list_devices(features()[:, :1]):
        assert device.apply(features()[:, :1], 1.0, 0).shape == (200, 1)


@pytest.mark.parametrize("name", INPUTS)
def test_a_device_is_the_same_for_every_portion(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = INPUTS[name]
    drawn = ("noise", "drift", "hum", "drop-outs", "baseline")
    devices = [device for device in list_devices(inputs) if device.family not in drawn]
    whole = [device.apply(inputs, 0.7, 3) for device in devices]
    monkeypatch.setitem(VALUES_PER_PART, "cpu", 2 * inputs[0].numel())
    for device, expected in zip(devices, whole, strict=True):
        torch.testing.assert_close(device.apply(inputs, 0.7, 3), expected, msg=device.name)


def test_seeds_draw_other_devices() -> None:
    for name in ("digits", "signals", "features"):
        random = [
            d.name
            for d in list_devices(INPUTS[name])
            if distance(d.apply(INPUTS[name], 0.6, 0), d.apply(INPUTS[name], 0.6, 1))
        ]
        assert {"noise"} < set(random)


def test_devices_can_be_sent_to_another_process() -> None:
    device = list_devices(INPUTS["colour"])[0]
    again = pickle.loads(pickle.dumps(PlannedShift(device, 0.5)))
    assert torch.equal(again(INPUTS["colour"]), device.apply(INPUTS["colour"], 0.5, 0))


def test_constant_columns_stay() -> None:
    table = torch.cat((features(), torch.full((200, 1), 3.0)), dim=1)
    for device in list_devices(table):
        torch.testing.assert_close(device.apply(table, 1.0, 0)[:, -1], table[:, -1], msg=device.name)


# Against other implementations


def test_compression_against_scipy() -> None:
    images = torch.rand(2, 1, 16, 24, generator=torch.Generator().manual_seed(0)).double()
    images[0, 0, 0, :2] = torch.tensor([0.0, 1.0])
    steps = np.array(functions.JPEG_STEPS) * (0.1 * 1000**0.5) / 255
    expected = np.empty((2, 16, 24))
    for image, result in zip(images[:, 0].numpy() - 0.5, expected, strict=True):
        for row in range(0, 16, 8):
            for column in range(0, 24, 8):
                coded = fft.dctn(image[row : row + 8, column : column + 8], norm="ortho")
                result[row : row + 8, column : column + 8] = fft.idctn(np.round(coded / steps) * steps, norm="ortho")
    shifted = find(images, "compression")(images, 0.5, 0)[:, 0].numpy()
    np.testing.assert_allclose(shifted, np.clip(expected + 0.5, 0, 1), atol=1e-9)


def test_rotation_by_a_right_angle_and_translation() -> None:
    square = INPUTS["digits"].double() / 255
    turned = find(square, "rotation")(square, 1.0, 0)
    ways = [torch.rot90(square, way, (-2, -1)) for way in (1, -1)]
    assert min(distance(turned, way) for way in ways) < 1e-12
    moved = functions.translate(square, 0.5, torch.Generator().manual_seed(0), functions.ImageHome.measure(square))
    angle = 2 * np.pi * float(torch.rand((), generator=torch.Generator().manual_seed(0)))
    by = 0.2 * 28 * np.array([np.sin(angle), np.cos(angle)])
    for picture, result in zip(square[:, 0].numpy(), moved[:, 0].numpy(), strict=True):
        expected = ndimage.shift(np.pad(picture, 20), -by, order=1)[20:-20, 20:-20]
        np.testing.assert_allclose(result, expected, atol=1e-5)


@pytest.mark.parametrize("level", [0.0, 0.3, 1.0])
def test_geometry_continues_a_uniform_background(level: float) -> None:
    images = torch.full((4, 3, 20, 20), level)
    images[:, :, 8:12, 8:12] = torch.rand(4, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    for name in ("translation", "rotation", "smaller"):
        shifted = find(images, name)(images, 0.6, 0)
        corners = torch.stack([shifted[..., row, column] for row in (0, -1) for column in (0, -1)])
        torch.testing.assert_close(corners, torch.full_like(corners, level))


def test_smoothing_against_scipy() -> None:
    signals = waves().double()
    width = 0.2 * (0.08 * 120 / 0.2) ** 0.8
    expected = ndimage.gaussian_filter1d(signals.numpy(), width, mode="reflect", truncate=8)
    np.testing.assert_allclose(find(signals, "smoothed")(signals, 0.8, 0).numpy(), expected, atol=1e-4)
    table = spectra().double()
    width = 0.2 * (5 / 0.2) ** 0.5
    expected = ndimage.gaussian_filter1d(table.numpy(), width, mode="reflect", truncate=8)
    np.testing.assert_allclose(find(table, "smoothed columns")(table, 0.5, 0).numpy(), expected, atol=1e-4)


def test_inversions_at_full_strength() -> None:
    digits, signals, table = INPUTS["digits"], waves().double(), features().double()
    assert torch.equal(find(digits, "inverted")(digits, 1.0, 0), 255 - digits)
    mean = signals.mean((0, 2), keepdim=True)
    torch.testing.assert_close(find(signals, "inverted polarity")(signals, 1.0, 0), 2 * mean - signals)
    torch.testing.assert_close(find(table, "inverted columns")(table, 1.0, 0), 2 * table.mean(0) - table)


def test_saturation_cuts_at_quantiles() -> None:
    table = torch.arange(1001.0)[:, None].repeat(1, 4)
    shifted = find(table, "saturation")(table, 0.5, 0)
    torch.testing.assert_close(shifted, table.clamp(max=525), atol=1.0, rtol=0)


def test_shuffled_columns_only_exchange() -> None:
    table = torch.randn(50, 10).double()
    values = (table - table.mean(0)) / table.std(0, unbiased=False)
    mixed = find(table, "shuffled columns")(table, 1.0, 0)
    mixed = (mixed - table.mean(0)) / table.std(0, unbiased=False)
    nearest = torch.cdist(mixed.T, values.T).argmin(1)
    assert sorted(nearest.tolist()) == list(range(10))
    assert (nearest != torch.arange(10)).all()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", INPUTS)
def test_devices_are_the_same_on_a_gpu(name: str) -> None:
    inputs = INPUTS[name]
    drawn = ("noise", "drift", "hum", "drop-outs", "baseline")
    for device, other in zip(list_devices(inputs), list_devices(inputs.cuda()), strict=True):
        shifted = other.apply(inputs.cuda(), 0.7, 1)
        assert (shifted.device.type, shifted.dtype, shifted.shape) == ("cuda", inputs.dtype, inputs.shape)
        if device.family not in drawn:
            apart = (shifted.cpu().double() - device.apply(inputs, 0.7, 1).double()).abs()
            close = apart <= (1 if not inputs.is_floating_point() else 2e-3 * float(inputs.double().std()))
            assert float(close.double().mean()) > 0.98, device.name


# What there is to list


@pytest.mark.parametrize(
    "wrong",
    [
        torch.zeros(4, 12, dtype=torch.int64),
        torch.zeros(4),
        torch.zeros(4, 3, 8, 8, 8),
        torch.zeros(4, 2, 16, dtype=torch.complex64),
        torch.zeros(4, 3, 8, 8, dtype=torch.bool),
        torch.zeros(4, 2, 16, dtype=torch.int16),
        torch.zeros(0, 3, 8, 8),
    ],
    ids=lambda wrong: f"{wrong.dtype}-{wrong.ndim}",
)
def test_other_inputs_are_refused(wrong: Tensor) -> None:
    with pytest.raises(DataError, match=r"images, signals or tables.*battery="):
        list_devices(wrong)


def test_the_kind_can_be_given() -> None:
    flat, rows = waves()[:, 0], waves()
    for inputs, devices in ((flat, list_devices(flat, "signal")), (rows, list_devices(rows, "table"))):
        for device in devices:
            assert device.apply(inputs, 0.5, 0).shape == inputs.shape
    assert "hum" in {device.name for device in list_devices(flat, "signal")}
    with pytest.raises(DataError, match="images, signals"):
        list_devices(features(), "image")


def dim(inputs: Tensor) -> Tensor:
    return inputs.mul_(0.5)


def test_own_functions() -> None:
    plan = from_functions(
        [dim, ("lamp/off", torch.zeros_like), lambda inputs: inputs + 1, ("lamp/on", torch.ones_like)]
    )
    assert [(shift.family, shift.name) for shift in plan] == [
        ("dim", "dim"),
        ("lamp", "off"),
        ("function 3", "function 3"),
        ("lamp", "on"),
    ]
    inputs = torch.ones(2, 3)
    assert torch.equal(plan[0](inputs), torch.full((2, 3), 0.5))
    assert torch.equal(inputs, torch.ones(2, 3))
    assert [shift.name for shift in from_functions({"a": dim, "b": dim})] == ["a", "b"]


@pytest.mark.parametrize("wrong", [[], {}, [dim, dim], [("a", dim), ("a", torch.neg)]])
def test_functions_need_names_of_their_own(wrong: Any) -> None:
    with pytest.raises(DataError, match="different names"):
        from_functions(wrong)


@pytest.mark.parametrize("function", [lambda x: x[:1], lambda x: x.double(), lambda x: x.numpy()])
def test_functions_keep_shape_and_dtype(function: Any) -> None:
    with pytest.raises(DataError, match="keep shape and dtype"):
        from_functions({"odd": function})[0](torch.ones(2, 3))


# The choice


def make_devices(families: int, each: int = 1, unmendable: int = 2, steepness: float = 1.0) -> list[SimulatedDevice]:
    """Make devices that add to the inputs what they take off the score."""

    def add(inputs: Tensor, strength: float, seed: int) -> Tensor:
        return inputs + strength**steepness

    made = [
        SimulatedDevice(f"{family}.{number}", str(family), add) for family in range(families) for number in range(each)
    ]
    return made + [SimulatedDevice(f"bad {n}", f"bad {n}", add, mendable=False) for n in range(unmendable)]


class Score:
    """A score that falls from 0.9 to 0.1 as inputs move from 0 to 1; counts how often it was asked for."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, inputs: Tensor) -> float:
        self.calls += 1
        return 0.9 - 0.8 * float(inputs.mean().clamp(0, 1))


@pytest.mark.parametrize("steepness", [0.5, 1.0, 3.0])
def test_scores_spread_from_unharmed_to_ruined(steepness: float) -> None:
    inputs, score = torch.zeros(3, 4), Score()
    plan = plan_battery(inputs, make_devices(12, steepness=steepness), score)
    assert score.calls <= 1 + 5 * 12
    scores = sorted(score(shift(inputs)) for shift in plan)
    expected = [0.9 - 0.8 * (step + 0.5) / 12 for step in reversed(range(12))]
    assert np.abs(np.array(scores) - expected).max() < 0.1
    assert sum(found < 0.9 - 0.8 * 2 / 3 for found in scores) >= 3
    unmendable = [score(shift(inputs)) for shift in plan if not shift.device.mendable]
    assert len(unmendable) == 2
    assert max(unmendable) < 0.5


@settings(max_examples=40, deadline=None)
@given(
    families=st.integers(1, 15),
    each=st.integers(1, 3),
    unmendable=st.integers(0, 3),
    size=st.integers(1, 40),
    seed=st.integers(0, 99),
)
def test_families_come_in_turn(families: int, each: int, unmendable: int, size: int, seed: int) -> None:
    devices = make_devices(families, each, unmendable)
    plan = plan_battery(torch.zeros(2, 2), devices, Score(), size=size, seed=seed)
    assert plan == plan_battery(torch.zeros(2, 2), devices, Score(), size=size, seed=seed)
    assert len(plan) == size
    assert len({(shift.name, shift.strength) for shift in plan}) == size
    assert all(0 < shift.strength <= 1 for shift in plan)
    counts = Counter(shift.family for shift in plan)
    assert len(counts) == min(size, families + unmendable)
    assert max(counts.values()) - min(counts.values()) <= 1
    assert sum(not shift.device.mendable for shift in plan) >= min(round(size / 6), unmendable)


def test_a_device_without_effect_is_kept_at_full_strength() -> None:
    devices = [*make_devices(3, unmendable=0), SimulatedDevice("idle", "idle", lambda inputs, strength, seed: inputs)]
    plan = plan_battery(torch.zeros(2, 2), devices, Score(), size=4)
    assert [shift.strength for shift in plan if shift.name == "idle"] == [1.0]
    assert all(Score()(shift(torch.zeros(2, 2))) < 0.9 for shift in plan if shift.name != "idle")


def test_unmendable_devices_without_effect_give_way() -> None:
    idle = SimulatedDevice("idle", "idle", lambda inputs, strength, seed: inputs, mendable=False)
    plan = plan_battery(torch.zeros(2, 2), [*make_devices(4, unmendable=0), idle, *make_devices(0)], Score(), size=6)
    assert [shift.name for shift in plan if not shift.device.mendable][-1] == "bad 0"


def test_a_score_that_is_no_number_is_ruin() -> None:
    def score(inputs: Tensor) -> float:
        level = float(inputs.mean())
        return float("nan") if level > 0.6 else -(level**2) * 100

    for ruined in (None, -10.0):
        plan = plan_battery(torch.zeros(2, 2), make_devices(6), score, size=8, ruined=ruined)
        assert len(plan) == 8
        if ruined is None:
            assert all(np.isfinite(score(shift(torch.zeros(2, 2)))) for shift in plan)


def test_harm_beyond_a_ruined_model_does_not_count() -> None:
    def score(inputs: Tensor) -> float:
        return -1000 * float(inputs.mean())

    plan = plan_battery(torch.zeros(2, 2), make_devices(10), score, size=12, ruined=-100.0)
    mild = [shift for shift in plan if score(shift(torch.zeros(2, 2))) > -100]
    assert len(mild) >= 6


def test_an_empty_battery_is_refused() -> None:
    with pytest.raises(DataError, match="list_devices"):
        plan_battery(torch.zeros(2, 2), [], Score())
