"""What every shift in the dictionary promises."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from shiftmend import shifts
from shiftmend.errors import DataError
from shiftmend.shifts import SHIFTS, apply
from shiftmend.shifts.base import Shift

IMAGE_SHIFTS = [name for name, shift in SHIFTS.items() if shift.domain == "image"]
GLYPH_SHIFTS = [name for name in IMAGE_SHIFTS if not name.startswith(("cifar-c/", "sensor/"))]


@pytest.fixture(scope="module")
def images() -> torch.Tensor:
    """Five images that digits and colour shifts take alike: soft rings, three equal channels."""
    rows, columns = torch.meshgrid(torch.arange(28.0), torch.arange(28.0), indexing="ij")
    centres = torch.linspace(10, 17, 5)[:, None, None]
    radius = torch.hypot(rows - centres, columns - 13.5)
    rings = torch.exp(-((radius - 7) ** 2) / 6).mul(255).to(torch.uint8)
    return rings[:, None].repeat(1, 3, 1, 1)


@pytest.mark.slow
@pytest.mark.parametrize("name", IMAGE_SHIFTS)
def test_seeded_and_input_untouched(name, images):
    before = images.clone()
    first = apply(name, images, seed=1)
    assert first.dtype == torch.uint8
    assert first.shape == images.shape
    assert torch.equal(images, before)
    state = torch.get_rng_state()
    assert torch.equal(apply(name, images, seed=1), first)
    assert torch.equal(torch.get_rng_state(), state)
    other = apply(name, images, seed=2)
    assert torch.equal(other, first) is not SHIFTS[name].random


@pytest.mark.slow
@pytest.mark.parametrize("name", IMAGE_SHIFTS)
def test_one_image(name, images):
    assert apply(name, images[:1]).shape == images[:1].shape


@pytest.mark.slow
@pytest.mark.parametrize("name", GLYPH_SHIFTS)
def test_glyph_shifts_change_something_at_every_severity(name, images):
    grey = images[:, :1].contiguous()
    for severity in range(1, len(SHIFTS[name].severities) + 1):
        shifted = apply(name, grey, severity=severity)
        assert shifted.shape[1] == (3 if SHIFTS[name].texture else 1)
        changed = not torch.equal(shifted, grey)
        assert changed is not name.endswith("/identity")


def test_entries_are_whole():
    for name, shift in SHIFTS.items():
        assert isinstance(shift, Shift)
        assert shift.name == name
        assert 1 <= shift.default <= len(shift.severities)
        assert shift.summary
    groups = [name.partition("/")[0] for name in SHIFTS]
    assert {group: groups.count(group) for group in groups} == {
        "emnist-da": 14,
        "mnist-c": 16,
        "mnist-m": 1,
        "cifar-c": 19,
        "sensor": 10,
        "signal": 5,
    }


@pytest.mark.parametrize("name", ["emnist-da/dotted_line", "mnist-m"])
def test_chunks_are_drawn_from_one_generator(name, images, monkeypatch):
    grey = images[:, :1].repeat(2, 1, 1, 1)
    monkeypatch.setattr(shifts, "MAX_IMAGES", 4)
    shifted = apply(name, grey, seed=3)
    assert shifted.shape[0] == 10
    generator = torch.Generator().manual_seed(3)
    parameters = {"textures": shifts.load("photographs")} if name == "mnist-m" else {}
    parts = [SHIFTS[name].function(part, generator=generator, **parameters) for part in grey.split(4)]
    assert torch.equal(shifted, torch.cat(parts))
    assert not torch.equal(shifted[:4], shifted[5:9])


def test_a_portion_has_2000_images():
    """Of other portions a set that was made again would be another one."""
    glyphs = torch.zeros(2001, 1, 8, 8, dtype=torch.uint8)
    generator = torch.Generator().manual_seed(3)
    dotted = SHIFTS["emnist-da/dotted_line"].function
    parts = [dotted(glyphs[:2000], generator=generator), dotted(glyphs[2000:], generator=generator)]
    assert torch.equal(apply("emnist-da/dotted_line", glyphs, seed=3), torch.cat(parts))


@pytest.mark.parametrize(("side", "most"), [(32, 2000), (224, 40), (1600, 1)])
def test_large_images_come_in_small_portions(side, most, monkeypatch):
    sizes = []

    def look(images, *, generator):
        sizes.append(len(images))
        return images

    monkeypatch.setitem(SHIFTS, "own", Shift("own", look, ({},), 1, "nothing"))
    apply("own", torch.zeros(1, 3, 1, 1, dtype=torch.uint8).expand(most + 1, 3, side, side))
    assert sizes == [most, 1]


def test_non_square_images():
    wide = torch.zeros(2, 1, 20, 32, dtype=torch.uint8)
    wide[:, :, 5:15, 8:24] = 200
    for name in GLYPH_SHIFTS:
        assert apply(name, wide).shape[-2:] == (20, 32), name


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (torch.zeros(2, 1, 28, 28), "float32"),
        (torch.zeros(1, 28, 28, dtype=torch.uint8), r"\[1, 28, 28\]"),
        (torch.zeros(2, 2, 28, 28, dtype=torch.uint8), r"\[2, 2, 28, 28\]"),
        (torch.zeros(0, 1, 28, 28, dtype=torch.uint8), "at least one"),
        (
            np.zeros((2, 1, 28, 28), np.uint8),
            r"ndarray.*from_numpy",
        ),
        (["a.png"], "got a list"),
    ],
)
def test_wrong_images(wrong, message):
    with pytest.raises(DataError, match=message):
        apply("emnist-da/stripe", wrong)


@pytest.mark.parametrize("name", ["cifar-c/fog", "cifar-c/gaussian_blur", "sensor/resolution"])
def test_images_without_a_pixel_are_refused(name):
    with pytest.raises(DataError, match=r"\[2, 3, 0, 28\]"):
        apply(name, torch.zeros(2, 3, 0, 28, dtype=torch.uint8))


@pytest.mark.parametrize("severity", [0, 6, -1, "5", 1.5, [1], True])
def test_wrong_severity(severity, images):
    with pytest.raises(DataError, match="from 1 to 5"):
        apply("emnist-da/fog", images, severity=severity)


@pytest.mark.parametrize(
    ("name", "suggestion"),
    [
        ("emnist-da/brick", "Try emnist-da/bricks"),
        ("fog", "emnist-da/fog or mnist-c/fog or cifar-c/fog"),
        ("mnistm", "mnist-m"),
        ("cifar-10-c/snow", "cifar-c/snow"),
        ("???", "Names begin with cifar-c, emnist-da"),
    ],
)
def test_unknown_name_gets_suggestions(name, suggestion, images):
    with pytest.raises(DataError, match="name of a shift") as caught:
        apply(name, images)
    assert suggestion in str(caught.value)


def test_unknown_parameter_is_named(images):
    with pytest.raises(DataError, match=r"blur.*isotropic, sigma"):
        apply("emnist-da/gaussian_blur", images, blur=3)
    with pytest.raises(DataError, match=r"has none.*sigma"):
        apply("emnist-da/stripe", images, sigma=3)


@pytest.mark.parametrize("strength", [1.5, -0.1, float("nan")])
def test_a_strength_is_from_0_to_1(strength, images):
    with pytest.raises(DataError, match=r"strength.*sensor/gamma"):
        apply("sensor/gamma", images, strength=strength)


def test_override_replaces_one_parameter(images):
    a = apply("emnist-da/gaussian_blur", images, severity=1, sigma=4.0)
    assert torch.equal(a, apply("emnist-da/gaussian_blur", images, severity=4))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", IMAGE_SHIFTS)
def test_gpu(name, images):
    on_gpu = apply(name, images.cuda(), seed=1)
    assert on_gpu.is_cuda
    assert torch.equal(apply(name, images.cuda(), seed=1), on_gpu)
    if not SHIFTS[name].random:
        difference = (on_gpu.cpu().int() - apply(name, images, seed=1).int()).abs()
        if name.startswith(("cifar-c/", "sensor/")):
            # Sums in another order may fall to the other side of a truncation.
            assert difference.max() <= 1
        else:
            assert difference.max() == 0


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"seed": None}, r"seed.*got None"),
        ({"seed": 0.5}, r"seed.*0\.5"),
        ({"seed": 2**64}, r"seed.*18446744073709551616"),
        ({"seed": -(2**63) - 1}, r"seed.*-9223372036854775809"),
        ({"name": "emnist-da/bricks", "textures": 3}, "textures.*got 3"),
    ],
)
def test_arguments_of_the_wrong_kind_are_one_sentence(wrong, message, images):
    with pytest.raises(DataError, match=message):
        apply(**{"name": "emnist-da/stripe", "images": images, **wrong})


def test_numbers_of_numpy_are_taken(images):
    given = apply("emnist-da/fog", images, severity=np.int64(2), seed=np.int64(3))
    assert torch.equal(given, apply("emnist-da/fog", images, severity=2, seed=3))
