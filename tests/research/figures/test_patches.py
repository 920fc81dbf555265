from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from shiftmend.errors import DataError, TapError
from shiftmend.inputs.feed import Feed
from shiftmend.research.figures import patches
from shiftmend.research.figures.receptive_fields import Field


def test_patches_are_cut_with_nothing_outside_the_image() -> None:
    image = torch.arange(48.0).reshape(1, 6, 8)
    field = Field((3, 3), (2, 2), (-1, -1), (4, 5))
    padded = np.pad(image[0].double().numpy(), 3, constant_values=np.nan)
    for row in range(4):
        for column in range(5):
            top, left = 2 * row - 1 + 3, 2 * column - 1 + 3
            expected = padded[top : top + 3, left : left + 3]
            assert np.array_equal(patches.cut(image, field, row, column)[..., 0], expected, equal_nan=True)
    outside = patches.cut(image, Field((2, 2), (1, 1), (-4, 0), (9, 9)), 0, 0)
    assert np.isnan(outside).all()


def edge_filter() -> nn.Module:
    """Filter 1 looks for light above dark; filter 0 sees nothing."""
    model = nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.LazyLinear(2))
    model(torch.zeros(2, 1, 8, 8))
    with torch.no_grad():
        model[0].weight.zero_()
        model[0].bias.zero_()
        model[0].weight[1, 0, 0], model[0].weight[1, 0, 2] = 1, -1
    return model.eval()


@pytest.fixture
def images() -> Tensor:
    return torch.randint(0, 256, (30, 1, 8, 8), dtype=torch.uint8)


def scaled(raw: Tensor) -> Tensor:
    return raw.float() / 255


def test_the_strongest_patches_are_those_of_a_search_by_hand(images: Tensor) -> None:
    found = patches.strongest(edge_filter(), Feed(images, batch_size=7), scaled, "0", 1, count=5)
    kernel = torch.tensor([[1.0] * 3, [0.0] * 3, [-1.0] * 3]).reshape(1, 1, 3, 3)
    maps = functional.conv2d(images.double() / 255, kernel.double(), padding=1)[:, 0].numpy()
    assert found.peaks == pytest.approx(sorted(maps.max((1, 2)), reverse=True)[:5], abs=1e-5)
    assert np.allclose(np.sort(found.values.numpy()), np.sort(maps.ravel()), atol=1e-5)
    image = int(maps.max((1, 2)).argmax())
    row, column = np.unravel_index(maps[image].argmax(), (8, 8))
    padded = np.pad(images[image, 0].double().numpy() / 255, 1, constant_values=np.nan)
    expected = padded[row : row + 3, column : column + 3]
    assert np.allclose(found.patches[0, ..., 0], expected, equal_nan=True)


def test_divergence_is_none_for_the_same_and_grows(images: Tensor) -> None:
    values = images.float().flatten()
    assert patches.divergence(values, values) == pytest.approx(0, abs=1e-6)
    assert 0 < patches.divergence(values, values + 20) < patches.divergence(values, values + 100)


def test_what_is_drawn(images: Tensor) -> None:
    model = edge_filter()
    darker = images // 2
    figure = patches.draw(model, images, darker, model, number=1, count=3, preprocess=scaled, device="cpu")
    axes = np.array(figure.axes).reshape(2, 3)
    titles = [axis.get_title() for axis in axes[0]]
    assert titles == ["source", "target before adapting", "target after adapting"]
    assert [len(axis.images) for axis in axes[0]] == [3, 3, 3]
    found = patches.strongest(model, Feed(darker), scaled, "0", 1, count=3)
    shown = axes[0, 1].images[0].get_array()
    inside = np.isfinite(found.patches[0, ..., 0])
    assert np.array_equal(shown[..., 3] > 0, inside)
    assert np.allclose(shown[..., 0][inside], found.patches[0, ..., 0][inside], atol=1e-3)
    steps = axes[1, 1].patches[1].get_data()
    counts = np.histogram(found.values.numpy(), steps.edges)[0]
    assert np.allclose(steps.values, counts / counts.sum())
    home = patches.strongest(model, Feed(images), scaled, "0", 1, count=3).values
    assert axes[1, 1].get_title() == f"divergence {patches.divergence(home, found.values):.2f}"
    assert "filter 1 of 0" in figure.get_suptitle()


def test_wrong_input_is_one_sentence(images: Tensor) -> None:
    model = edge_filter()
    options = {"preprocess": scaled, "device": "cpu"}
    with pytest.raises(DataError, match="filters 0 to 1, got 2"):
        patches.draw(model, images, images, number=2, **options)
    with pytest.raises(DataError, match="one and the same value"):
        patches.draw(model, images, images, number=0, **options)
    with pytest.raises(TapError, match="'3' is no 2-D convolution of the model; its 2-D convolutions are '0'"):
        patches.draw(model, images, images, layer="3", **options)
    with pytest.raises(DataError, match="3 images, too few for 4 patches"):
        patches.draw(model, images, images[:3], number=1, **options)
    with pytest.raises(DataError, match="at least one of as many"):
        patches.draw(model, images, images, count=0, **options)
    with pytest.raises(TapError, match="no 2-D convolution runs"):
        patches.draw(nn.Sequential(nn.Flatten(), nn.Linear(64, 2)), images, images, **options)
