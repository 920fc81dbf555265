"""What every corruption promises at every severity, and the table of constants as a whole."""

from __future__ import annotations

from typing import Any

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
