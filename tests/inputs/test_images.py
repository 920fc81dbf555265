"""Sets of 8-bit images, and how they become the inputs of a network."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import shiftmend
from shiftmend.cli.loading import Normalisation
from shiftmend.errors import DataError
from shiftmend.inputs.images import Split, per_channel, signed, standardised
from shiftmend.research.networks import build

IMAGES = torch.zeros(4, 1, 2, 2, dtype=torch.uint8)
MEAN, DEVIATION = (0.4914, 0.4822, 0.4465), (0.2471, 0.2435, 0.2616)


def pictures(channels: int = 3) -> Tensor:
    shape = (6, channels, 32, 32)
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("preprocess", [standardised(MEAN, DEVIATION), Normalisation(MEAN, DEVIATION)])
def test_standardised_against_numpy(preprocess: Any) -> None:
    images = pictures()
    before = images.clone()
    mean, deviation = (np.asarray(values).reshape(1, 3, 1, 1) for values in (MEAN, DEVIATION))
    expected = (images.numpy().astype(np.float64) / 255 - mean) / deviation
    np.testing.assert_allclose(preprocess(images).numpy(), expected, rtol=1e-5, atol=1e-6)
    assert torch.equal(images, before)


@pytest.mark.parametrize("channels", [1, 3])
def test_signed_images_have_three_channels_in_minus_one_to_one(channels: int) -> None:
    images = pictures(channels)
    expected = np.broadcast_to(images.numpy().astype(np.float64) / 127.5 - 1, (6, 3, 32, 32))
    np.testing.assert_allclose(signed(images).numpy(), expected, rtol=1e-5, atol=1e-6)


def test_numbers_of_channels_are_made_once() -> None:
    like = torch.zeros(1)
    with torch.inference_mode():
        first = per_channel(MEAN, like)
    assert per_channel(MEAN, like) is first
    assert not first.is_inference()
    assert per_channel(MEAN, like.double()).dtype == torch.float64


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_nothing_is_brought_to_a_gpu_batch_by_batch(caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    model, preprocess = build("resnet18-cifar", classes=10), standardised(MEAN, DEVIATION)
    images = torch.randint(0, 256, (400, 3, 32, 32), dtype=torch.uint8)
    profile = shiftmend.profile(model, images, preprocess=preprocess, device="cuda", progress=False)
    with caplog.at_level("INFO", "shiftmend"):
        shiftmend.adapt(
            model, images, profile, "fr", epochs=1, batch_size=200, preprocess=preprocess, device="cuda", progress=False
        )
    assert "not captured" not in caplog.text


def test_take_keeps_order_and_names() -> None:
    images = torch.arange(4, dtype=torch.uint8).reshape(4, 1, 1, 1)
    split = Split(images, torch.tensor([0, 1, 2, 1]), "set", ("a", "b", "c"))
    part = split.take(torch.tensor([3, 0, 3]), "part")
    assert part.images.flatten().tolist() == [3, 0, 3]
    assert part.labels is not None
    assert part.labels.tolist() == [1, 0, 1]
    assert (part.name, part.classes, len(part)) == ("part", ("a", "b", "c"), 3)
    assert repr(split).endswith(", 3 classes")
    rest = Split(images, None, "unlabelled").take(torch.tensor([1]))
    assert repr(rest) == f"unlabelled: 1 image {list(images.shape[1:])}, without labels"
    assert (rest.labels, rest.name) == (None, "unlabelled")


@pytest.mark.parametrize(
    ("images", "labels", "message"),
    [
        (IMAGES.float(), None, "uint8"),
        (IMAGES[:, 0], None, r"\[N, C, H, W\]"),
        (IMAGES[:0], None, "at least one image"),
        (IMAGES, torch.zeros(3, dtype=torch.int64), "4 images"),
        (IMAGES, torch.zeros(4), "int64"),
        (IMAGES, torch.tensor([0, 1, 2, 0]), "Expected 0 to 1"),
        (IMAGES, torch.tensor([0, -1, 1, 0]), "Expected 0 to 1"),
    ],
)
def test_what_is_no_set_of_images_is_refused(images: torch.Tensor, labels: torch.Tensor | None, message: str) -> None:
    with pytest.raises(DataError, match=message):
        Split(images, labels, "set", ("a", "b"))


def test_labels_of_a_set_without_class_names_are_any_class_numbers() -> None:
    assert len(Split(IMAGES, torch.tensor([0, 1, 8, 0]), "set")) == 4
    with pytest.raises(DataError, match="got -1"):
        Split(IMAGES, torch.tensor([0, -1, 8, 0]), "set")
