"""Recipes: their rates against PyTorch's and the formula, their digests, and what is refused."""

from __future__ import annotations

import dataclasses
import json
import math
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Generator, Tensor, nn

from shiftmend.errors import DataError
from shiftmend.research.bench.recipes import AUGMENTATIONS, Recipe, crop, flip, learning_rate_at, rotate

TINY = {"classes": 3, "width": 4, "image_size": 12}
OTHERS: dict[str, Any] = {
    "network": "resnet18-cifar",
    "options": TINY | {"classes": 4},
    "epochs": 3,
    "learning_rate": 0.2,
    "momentum": 0.8,
    "weight_decay": 1e-4,
    "batch_size": 65,
    "label_smoothing": 0.1,
    "augmentation": "rotate-10",
    "schedule": "inverse",
    "pretrained": "weights.safetensors",
    "nesterov": True,
    "autocast": True,
}


def recipe(**changes: Any) -> Recipe:
    return Recipe(**({"network": "digit-cnn", "options": TINY, "epochs": 2, "batch_size": 64} | changes))


def test_cosine_is_pytorchs_and_constant_within_an_epoch() -> None:
    plan = recipe(epochs=7, learning_rate=0.3)
    optimiser = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, 7)
    for epoch in range(7):
        rates = {learning_rate_at(plan, epoch * 5 + step, 5) for step in range(5)}
        assert len(rates) == 1
        assert rates.pop() == pytest.approx(optimiser.param_groups[0]["lr"], rel=1e-9)
        optimiser.step()
        schedule.step()
    assert learning_rate_at(plan, 35, 5) == pytest.approx(0, abs=1e-12)


def test_inverse_schedule_falls_with_every_step() -> None:
    plan = recipe(epochs=4, learning_rate=0.2, schedule="inverse")
    rates = [learning_rate_at(plan, step, 5) for step in range(20)]
    np.testing.assert_allclose(rates, 0.2 * (1 + 10 * np.arange(20) / 20) ** -0.75, rtol=1e-12)
    assert rates[0] == 0.2


def test_digest_changes_with_every_field_and_fact() -> None:
    assert set(OTHERS) == {field.name for field in dataclasses.fields(Recipe)}
    changed = [recipe(**{name: value}) for name, value in OTHERS.items()]
    digests = {plan.digest() for plan in (recipe(), *changed)}
    digests |= {recipe().digest({"data": name}) for name in ("a", "b")}
    assert len(digests) == len(OTHERS) + 3
    assert all(len(digest) == 16 and set(digest) <= set("0123456789abcdef") for digest in digests)


def test_equal_recipes_are_one() -> None:
    first = recipe(options={"classes": 3, "width": 4}, learning_rate=1)
    second = recipe(options={"width": 4, "classes": 3}, learning_rate=1.0)
    assert first == second
    assert len({first, second}) == 1
    assert first.digest({"a": 1, "b": 2}) == second.digest({"b": 2, "a": 1})
    assert Recipe(**json.loads(json.dumps(first.facts()))) == first == pickle.loads(pickle.dumps(first))
    assert dataclasses.replace(first, epochs=9) != first


def test_a_recipe_keeps_its_own_options() -> None:
    options = dict(TINY)
    plan = recipe(options=options)
    options["classes"] = 99
    assert plan.options["classes"] == 3


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("network", "vgg", "one of digit-cnn"),
        ("augmentation", "mixup", "one of none, rotate-10"),
        ("schedule", "step", "one of cosine, inverse"),
    ],
)
def test_unknown_names_are_refused(name: str, value: Any, expected: str) -> None:
    with pytest.raises(DataError, match=rf"{name}.*{expected}"):
        recipe(**{name: value})


def test_what_is_off_does_not_change_a_recipe() -> None:
    assert "autocast" not in recipe().facts()
    assert recipe(autocast=True).facts()["autocast"] is True
    assert recipe(autocast=True).digest() != recipe().digest()


# ---- Batched augmentations against one image at a time in numpy, and rotation against Pillow


def seeded(seed: int = 0) -> Generator:
    return Generator().manual_seed(seed)


def picture(count: int = 6, channels: int = 3, height: int = 12, width: int = 9, dtype: str = "uint8") -> Tensor:
    """No pixel is 0, so that whatever is 0 afterwards came from outside."""
    values = torch.randint(1, 256, (count, channels, height, width), generator=seeded(99))
    return values.to(getattr(torch, dtype))


def turned(image: np.ndarray, angle: float) -> tuple[np.ndarray, np.ndarray]:
    """One image counter-clockwise by `angle` radians in float64, and which pixels came from within 1e-4 of an edge
    between two others, where float32 may round to either."""
    _, height, width = image.shape
    result, close = np.zeros_like(image), np.zeros((height, width), dtype=bool)
    for row in range(height):
        for column in range(width):
            x, y = column + 0.5 - width / 2, row + 0.5 - height / 2
            source_x = math.cos(angle) * x - math.sin(angle) * y + width / 2
            source_y = math.sin(angle) * x + math.cos(angle) * y + height / 2
            close[row, column] = any(abs(value - round(value)) < 1e-4 for value in (source_x, source_y))
            i, j = math.floor(source_y), math.floor(source_x)
            if 0 <= i < height and 0 <= j < width:
                result[:, row, column] = image[:, i, j]
    return result, close


@pytest.mark.parametrize("dtype", ["uint8", "float32", "float64"])
@pytest.mark.parametrize("degrees", [10, 15, 180])
def test_rotation_equals_one_image_at_a_time(degrees: float, dtype: str) -> None:
    images = picture(dtype=dtype)
    angles = np.radians(degrees) * (2 * torch.rand(len(images), generator=seeded(3)).numpy().astype(np.float64) - 1)
    rotated = rotate(images, degrees, seeded(3))
    assert rotated.dtype == images.dtype
    for one, image, angle in zip(rotated.numpy(), images.numpy(), angles, strict=True):
        expected, close = turned(image, angle)
        assert close.mean() < 0.02
        np.testing.assert_array_equal(one[:, ~close], expected[:, ~close])


def test_rotation_equals_pillows() -> None:
    from PIL import Image

    images = picture(8, 1, 28, 28)
    angles = 30 * (2 * torch.rand(8, generator=seeded(5)).double() - 1)
    rotated = rotate(images, 30, seeded(5))
    for one, image, angle in zip(rotated, images, angles.tolist(), strict=True):
        expected = np.array(Image.fromarray(image[0].numpy()).rotate(angle))
        assert (one[0].numpy() == expected).mean() > 0.998


@pytest.mark.slow
def test_rotation_is_uniform_between_the_bounds_and_about_the_centre() -> None:
    size = 101
    image = torch.zeros(1, 1, size, size)
    image[..., size // 2, size // 2] = 1
    image[..., size // 2, -5] = 2
    rotated = rotate(image.expand(400, -1, -1, -1), 10, seeded())
    assert (rotated[:, 0, size // 2, size // 2] == 1).all()
    found = [(one == 2).nonzero()[0] - size // 2 for one in rotated[:, 0] if (one == 2).any()]
    angles = np.array([math.degrees(math.atan2(-int(down), int(right))) for down, right in found])
    assert len(angles) > 250  # nearest-neighbour drops a lone pixel now and then
    assert np.abs(angles).max() <= 10.9
    assert np.abs(angles).max() > 9
    assert abs(angles.mean()) < 1
    assert angles.std() == pytest.approx(20 / math.sqrt(12), rel=0.1)


def test_no_degrees_change_nothing() -> None:
    for height, width in ((12, 9), (28, 28), (7, 7)):
        images = picture(height=height, width=width)
        assert torch.equal(rotate(images, 0, seeded()), images)


@pytest.mark.slow
@given(
    padding=st.integers(0, 5),
    height=st.integers(1, 9),
    width=st.integers(1, 9),
    channels=st.integers(1, 3),
    seed=st.integers(0, 1000),
)
def test_crop_equals_one_image_at_a_time(padding: int, height: int, width: int, channels: int, seed: int) -> None:
    images = picture(5, channels, height, width)
    draws = seeded(seed)
    top, left = (
        np.floor(torch.rand(5, generator=draws).numpy().astype(np.float64) * (2 * padding + 1)).astype(int)
        for _ in range(2)
    )
    cropped = crop(images, padding, seeded(seed))
    for one, image, i, j in zip(cropped.numpy(), images.numpy(), top, left, strict=True):
        padded = np.pad(image, ((0, 0), (padding, padding), (padding, padding)))
        np.testing.assert_array_equal(one, padded[:, i : i + height, j : j + width])


def test_crop_reaches_every_place_equally_often() -> None:
    image = torch.zeros(1, 1, 9, 9)
    image[..., 4, 4] = 1
    cropped = crop(image.expand(8100, -1, -1, -1), 4, seeded())
    assert (cropped.sum((1, 2, 3)) == 1).all()
    counts = cropped.sum((0, 1))
    assert counts.min() > 60  # 100 expected, with a deviation of 10
    assert counts.max() < 140


def test_flip_equals_one_image_at_a_time() -> None:
    images = picture(40)
    mirrored = torch.rand(40, generator=seeded(2)).numpy() < 0.5
    assert 10 < mirrored.sum() < 30
    expected = np.stack([image[:, :, ::-1] if m else image for image, m in zip(images.numpy(), mirrored, strict=True)])
    np.testing.assert_array_equal(flip(images, seeded(2)).numpy(), expected)


def test_named_augmentations_are_these_in_this_order() -> None:
    images = picture(10, 3, 32, 32)
    draws = seeded(7)
    cifar10 = flip(crop(images, 4, draws), draws)
    cifar100 = rotate(cifar10, 15, draws)
    expected = {
        "none": images,
        "rotate-10": rotate(images, 10, seeded(7)),
        "crop-flip": cifar10,
        "crop-flip-rotate-15": cifar100,
    }
    assert set(AUGMENTATIONS) == set(expected)
    for name, augment in AUGMENTATIONS.items():
        assert torch.equal(augment(images, seeded(7)), expected[name]), name
    assert not torch.equal(cifar10, images)
    assert not torch.equal(cifar100, cifar10)


@pytest.mark.parametrize("name", sorted(AUGMENTATIONS))
def test_draws_from_the_generator_alone_and_leaves_its_input(name: str) -> None:
    images = picture(10)
    before, state = images.clone(), torch.get_rng_state()
    first, again = (AUGMENTATIONS[name](images, seeded(1)) for _ in range(2))
    other = AUGMENTATIONS[name](images, seeded(2))
    assert torch.equal(first, again)
    assert torch.equal(first, other) == (name == "none")
    assert torch.equal(images, before)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", sorted(AUGMENTATIONS))
def test_a_gpu_gives_the_same_from_the_same_draws(name: str) -> None:
    images = picture(64, 3, 32, 32)
    here, there = AUGMENTATIONS[name](images, seeded(1)), AUGMENTATIONS[name](images.cuda(), seeded(1))
    assert there.is_cuda
    assert (here == there.cpu()).double().mean() > 0.999  # a cosine may differ in its last bit
