"""What every corruption promises at every severity, and the table of constants as a whole."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from shiftmend.errors import DataError
from shiftmend.shifts.base import Shift
from shiftmend.shifts.cifar_c import SHIFTS

OFFICIAL_ORDER = [
    *["gaussian_noise", "shot_noise", "impulse_noise"],
    *["defocus_blur", "glass_blur", "motion_blur", "zoom_blur"],
    *["snow", "frost", "fog", "brightness"],
    *["contrast", "elastic_transform", "pixelate", "jpeg_compression"],
    *["speckle_noise", "gaussian_blur", "spatter", "saturate"],
]
DRAWING_NOTHING = {
    *["defocus_blur", "zoom_blur", "gaussian_blur"],
    *["brightness", "contrast", "pixelate", "jpeg_compression", "saturate"],
}
COLOUR_ONLY = {"snow", "frost", "brightness", "spatter", "saturate"}
# The published generator's own constants, severity 1 to 5, in the order in which it names them.
PUBLISHED: dict[str, tuple[Any, ...]] = {
    "gaussian_noise": (0.04, 0.06, 0.08, 0.09, 0.10),
    "shot_noise": (500, 250, 100, 75, 50),
    "impulse_noise": (0.01, 0.02, 0.03, 0.05, 0.07),
    "defocus_blur": ((0.3, 0.4), (0.4, 0.5), (0.5, 0.6), (1, 0.2), (1.5, 0.1)),
    "glass_blur": ((0.05, 1), (0.25, 1), (0.4, 1), (0.25, 2), (0.4, 2)),
    "motion_blur": ((6, 1), (6, 1.5), (6, 2), (8, 2), (9, 2.5)),
    "zoom_blur": tuple(len(np.arange(1, end, 0.01)) for end in (1.06, 1.11, 1.16, 1.21, 1.26)),
    "snow": (
        (0.1, 0.2, 1, 0.6, 8, 3, 0.95),
        (0.1, 0.2, 1, 0.5, 10, 4, 0.9),
        (0.15, 0.3, 1.75, 0.55, 10, 4, 0.9),
        (0.25, 0.3, 2.25, 0.6, 12, 6, 0.85),
        (0.3, 0.3, 1.25, 0.65, 14, 12, 0.8),
    ),
    "frost": ((1, 0.2), (1, 0.3), (0.9, 0.4), (0.85, 0.4), (0.75, 0.45)),
    "fog": ((0.2, 3), (0.5, 3), (0.75, 2.5), (1, 2), (1.5, 1.75)),
    "brightness": (0.05, 0.1, 0.15, 0.2, 0.3),
    "contrast": (0.75, 0.5, 0.4, 0.3, 0.15),
    "elastic_transform": tuple(
        tuple(32 * share for share in shares)
        for shares in ((0, 0, 0.08), (0.05, 0.2, 0.07), (0.08, 0.06, 0.06), (0.1, 0.04, 0.05), (0.1, 0.03, 0.03))
    ),
    "pixelate": (0.95, 0.9, 0.85, 0.75, 0.65),
    "jpeg_compression": (80, 65, 58, 50, 40),
    "speckle_noise": (0.06, 0.1, 0.12, 0.16, 0.2),
    "gaussian_blur": (0.4, 0.6, 0.7, 0.8, 1),
    "spatter": (
        ("water", 0.62, 0.1, 0.7, 0.7, 0.5),
        ("water", 0.65, 0.1, 0.8, 0.7, 0.5),
        ("water", 0.65, 0.3, 1, 0.69, 0.5),
        ("mud", 0.65, 0.1, 0.7, 0.69, 0.6),
        ("mud", 0.65, 0.1, 0.5, 0.68, 0.6),
    ),
    "saturate": ((0.3, 0), (0.1, 0), (1.5, 0), (2, 0.1), (2.5, 0.2)),
}
CELLS = [(shift, severity) for shift in SHIFTS.values() for severity in range(1, 6)]


def cell_name(value: Any) -> str:
    return value.name.removeprefix("cifar-c/") if isinstance(value, Shift) else str(value)


def smooth_images(count: int, seed: int = 0) -> Tensor:
    """Colour images with large and small structures, none of them grey."""
    coarse = torch.rand(count, 3, 8, 8, generator=torch.Generator().manual_seed(seed))
    fine = torch.nn.functional.interpolate(coarse, size=32, mode="bilinear")
    return (fine * 255).to(torch.uint8)


def apply(shift: Shift, severity: int, images: Tensor, seed: int = 0) -> Tensor:
    arguments = dict(shift.parameters(severity))
    if shift.texture:
        draws = torch.Generator().manual_seed(1)
        arguments["textures"] = [
            torch.randint(0, 256, (3, 40 + 7 * i, 45), generator=draws, dtype=torch.uint8) for i in range(6)
        ]
    generator = torch.Generator(images.device).manual_seed(seed)
    return shift.function(images, generator=generator, **arguments)


def test_names_come_in_the_official_order() -> None:
    assert list(SHIFTS) == [f"cifar-c/{name}" for name in OFFICIAL_ORDER]
    assert all(shift.name == name for name, shift in SHIFTS.items())


def test_every_entry_is_complete() -> None:
    for shift in SHIFTS.values():
        name = cell_name(shift)
        assert len(shift.severities) == 5
        assert shift.default == 5
        assert shift.summary
        assert shift.random == (name not in DRAWING_NOTHING)
        assert shift.texture == ("frost" if name == "frost" else None)


@pytest.mark.parametrize("name", OFFICIAL_ORDER)
def test_constants_are_the_published_ones(name: str) -> None:
    shift = SHIFTS[f"cifar-c/{name}"]
    rows = [tuple(parameters.values()) for parameters in shift.severities]
    if name == "spatter":  # what it softens an edge or lightens by is a default here, one for each liquid
        options = {key: option.default for key, option in inspect.signature(shift.function).parameters.items()}
        by_liquid = {"water": options["strength"], "mud": options["edge_sigma"]}
        rows = [(*row, by_liquid[row[0]]) for row in rows]
    expected = [row if isinstance(row, tuple) else (row,) for row in PUBLISHED[name]]
    assert rows == [tuple(pytest.approx(v) if name == "elastic_transform" else v for v in row) for row in expected]


@pytest.mark.slow
@pytest.mark.parametrize(("shift", "severity"), CELLS, ids=cell_name)
def test_seeded_and_safe(shift: Shift, severity: int) -> None:
    images = smooth_images(3)
    before = images.clone()
    shifted = apply(shift, severity, images)
    assert torch.equal(images, before), "the input was changed"
    assert shifted.dtype == torch.uint8
    assert shifted.shape == images.shape
    assert shifted.is_contiguous()
    assert not torch.equal(shifted, images)
    assert torch.equal(apply(shift, severity, images), shifted), "the same seed gave another result"
    assert torch.equal(apply(shift, severity, images, seed=1), shifted) != shift.random


@pytest.mark.parametrize("shift", SHIFTS.values(), ids=cell_name)
def test_one_image_and_none(shift: Shift) -> None:
    for severity in (1, 5):
        assert apply(shift, severity, smooth_images(1)).shape == (1, 3, 32, 32)
        assert apply(shift, severity, smooth_images(0)).shape == (0, 3, 32, 32)


@pytest.mark.parametrize("shift", SHIFTS.values(), ids=cell_name)
def test_images_of_a_batch_are_treated_alike_and_drawn_apart(shift: Shift) -> None:
    images = smooth_images(1).expand(6, -1, -1, -1)
    shifted = apply(shift, 5, images)
    equal = all(torch.equal(shifted[0], other) for other in shifted[1:])
    assert equal != shift.random


@pytest.mark.parametrize("shift", SHIFTS.values(), ids=cell_name)
def test_other_sizes(shift: Shift) -> None:
    images = smooth_images(2)[..., 3:27, :30]
    assert apply(shift, 5, images).shape == images.shape


@pytest.mark.parametrize("shift", SHIFTS.values(), ids=cell_name)
def test_grey_images(shift: Shift) -> None:
    images = smooth_images(2)[:, :1]
    if cell_name(shift) in COLOUR_ONLY:
        with pytest.raises(DataError, match="3 channels"):
            apply(shift, 5, images)
    else:
        assert apply(shift, 5, images).shape == images.shape


@pytest.mark.parametrize("shift", SHIFTS.values(), ids=cell_name)
def test_floating_point_images_are_refused(shift: Shift) -> None:
    with pytest.raises(DataError, match="uint8"):
        apply(shift, 5, smooth_images(2).float())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("shift", "severity"), CELLS, ids=cell_name)
def test_on_the_graphics_card(shift: Shift, severity: int) -> None:
    images = smooth_images(500)
    here = apply(shift, severity, images).float()
    there = apply(shift, severity, images.cuda())
    assert there.is_cuda
    there = there.cpu().float()
    if shift.random:
        # Another generator, so only the distribution is the same.
        change, other = (here - images).abs().mean().item(), (there - images).abs().mean().item()
        assert other == pytest.approx(change, rel=0.1, abs=0.3)
    else:
        # The last bit of a device's arithmetic may tip a truncation.
        assert (here - there).abs().max() <= 1
        assert (here != there).float().mean() < 0.02
