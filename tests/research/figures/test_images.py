"""Patches and receptive fields against what a filter really sees."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from shiftmend.errors import DataError, TapError
from shiftmend.inputs.feed import Feed
from shiftmend.research.figures.images import (
    ReceptiveField,
    cut_patch,
    draw_patches,
    find_strongest,
    first_convolution,
    measure_divergence,
    receptive_field,
)
from shiftmend.research.networks import build

# ---- patches


def test_patches_are_cut_with_nothing_outside_the_image() -> None:
    image = torch.arange(48.0).reshape(1, 6, 8)
    field = ReceptiveField((3, 3), (2, 2), (-1, -1), (4, 5))
    padded = np.pad(image[0].double().numpy(), 3, constant_values=np.nan)
    for row in range(4):
        for column in range(5):
            top, left = 2 * row - 1 + 3, 2 * column - 1 + 3
            expected = padded[top : top + 3, left : left + 3]
            assert np.array_equal(cut_patch(image, field, row, column)[..., 0], expected, equal_nan=True)
    outside = cut_patch(image, ReceptiveField((2, 2), (1, 1), (-4, 0), (9, 9)), 0, 0)
    assert np.isnan(outside).all()


def edge_filter() -> nn.Module:
    """Make a layer whose filter 1 looks for light above dark; filter 0 is zero."""
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
    found = find_strongest(edge_filter(), Feed(images, batch_size=7), scaled, "0", 1, count=5)
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
    assert measure_divergence(values, values) == pytest.approx(0, abs=1e-6)
    assert 0 < measure_divergence(values, values + 20) < measure_divergence(values, values + 100)


def test_what_is_drawn(images: Tensor) -> None:
    model = edge_filter()
    darker = images // 2
    figure = draw_patches(model, images, darker, model, number=1, count=3, preprocess=scaled, device="cpu")
    axes = np.array(figure.axes).reshape(2, 3)
    titles = [axis.get_title() for axis in axes[0]]
    assert titles == ["source", "target before adapting", "target after adapting"]
    assert [len(axis.images) for axis in axes[0]] == [3, 3, 3]
    found = find_strongest(model, Feed(darker), scaled, "0", 1, count=3)
    shown = axes[0, 1].images[0].get_array()
    inside = np.isfinite(found.patches[0, ..., 0])
    assert np.array_equal(shown[..., 3] > 0, inside)
    assert np.allclose(shown[..., 0][inside], found.patches[0, ..., 0][inside], atol=1e-3)
    steps = axes[1, 1].patches[1].get_data()
    counts = np.histogram(found.values.numpy(), steps.edges)[0]
    assert np.allclose(steps.values, counts / counts.sum())
    home = find_strongest(model, Feed(images), scaled, "0", 1, count=3).values
    assert axes[1, 1].get_title() == f"divergence {measure_divergence(home, found.values):.2f}"
    assert "filter 1 of 0" in figure.get_suptitle()


def test_wrong_input_is_one_sentence(images: Tensor) -> None:
    model = edge_filter()
    options = {"preprocess": scaled, "device": "cpu"}
    with pytest.raises(DataError, match="filters 0 to 1"):
        draw_patches(model, images, images, number=2, **options)
    with pytest.raises(DataError, match="varies"):
        draw_patches(model, images, images, number=0, **options)
    with pytest.raises(TapError, match="2-D convolution"):
        draw_patches(model, images, images, layer="3", **options)
    with pytest.raises(TapError, match="no 2-D convolution"):
        draw_patches(nn.Sequential(nn.Flatten(), nn.Linear(64, 2)), images, images, **options)


# ---- receptive fields


SIDES = (49, 51)
"""Sides of the image: large enough for four layers of the largest kernel and stride."""


def seen_window(layers: nn.Module, image: Tensor, row: int, column: int) -> list[slice] | None:
    """Find the rows and columns of the image that a position depends on, by its gradient."""
    image = image.clone().requires_grad_()
    layers(image)[0, :, row, column].sum().backward()
    assert image.grad is not None
    touched = image.grad[0].abs().sum(0) > 0
    if not bool(touched.any()):
        return None
    found = [touched.any(axis).nonzero().flatten() for axis in (1, 0)]
    return [slice(int(places[0]), int(places[-1]) + 1) for places in found]


layer_kinds = st.one_of(
    st.builds(
        lambda k, s, p, d: nn.Conv2d(1, 1, k, s, p, d),
        st.tuples(st.integers(1, 3), st.integers(1, 4)),
        st.integers(1, 2),
        st.integers(0, 2),
        st.integers(1, 2),
    ),
    st.builds(lambda k: nn.Conv2d(1, 1, k, padding="same"), st.integers(1, 4)),
    st.builds(lambda k, s: nn.AvgPool2d(k, s), st.integers(1, 3), st.integers(1, 2)),
    st.builds(lambda: nn.Softplus()),
)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Using padding=.same.")
@settings(max_examples=60)
@example(kinds=[nn.Conv2d(1, 1, 2, padding="same"), nn.Conv2d(1, 1, 1, padding=2)], at=(0.0, 0.0))
@given(kinds=st.lists(layer_kinds, max_size=3), at=st.tuples(st.floats(0, 1), st.floats(0, 1)))
def test_receptive_fields_are_where_gradients_are(kinds: list[nn.Module], at: tuple[float, float]) -> None:
    layers = nn.Sequential(*kinds, nn.Conv2d(1, 1, 2)).double()
    with torch.no_grad():
        for parameter in layers.parameters():
            parameter.fill_(0.3)  # nothing cancels, so every pixel in the window has a gradient
    image = torch.rand(1, 1, *SIDES, dtype=torch.float64)
    field = receptive_field(layers, str(len(kinds)), image)
    row, column = (round(share * (size - 1)) for share, size in zip(at, field.positions, strict=True))
    corners = [field.start[axis] + field.step[axis] * place for axis, place in enumerate((row, column))]
    expected = [
        slice(max(0, corner), min(size, corner + width))
        for corner, width, size in zip(corners, field.size, SIDES, strict=True)
    ]
    found = seen_window(layers, image, row, column)
    windows = zip(corners, field.size, SIDES, strict=True)
    if all(corner >= 0 and corner + width <= size for corner, width, size in windows):
        assert found == expected
    elif found is not None:
        # at the border, gaps of dilation and the padding of inner layers leave out parts of the window, or all of it
        for part, whole in zip(found, expected, strict=True):
            assert whole.start <= part.start < part.stop <= whole.stop
    assert field.positions == tuple(layers(image).shape[-2:])


def test_the_first_layer_of_the_papers_network() -> None:
    model = build("digit-cnn", classes=10, width=4)
    sample = torch.zeros(2, 3, 28, 28)
    assert first_convolution(model, sample) == "conv1"
    assert receptive_field(model, "conv1", sample) == ReceptiveField((5, 5), (2, 2), (-2, -2), (14, 14))
    assert receptive_field(model, "conv2", sample) == ReceptiveField((9, 9), (4, 4), (-6, -6), (8, 8))


def test_a_plain_residual_block_is_seen_through_and_a_strided_one_is_not() -> None:
    class Block(nn.Module):
        def __init__(self, stride: int) -> None:
            super().__init__()
            self.stem, self.inner = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 4, 3, stride, 1)
            self.around = nn.Conv2d(4, 4, 1, stride) if stride > 1 else nn.Identity()
            self.last = nn.Conv2d(4, 2, 3)

        def forward(self, x: Tensor) -> Tensor:
            x = self.stem(x)
            return self.last(self.inner(x) + self.around(x)).mean((2, 3))

    sample = torch.rand(1, 1, 12, 12)
    assert receptive_field(Block(1), "last", sample).size == (7, 7)
    with pytest.raises(TapError, match="around"):
        receptive_field(Block(2), "last", sample)
