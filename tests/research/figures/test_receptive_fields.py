from __future__ import annotations

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from shiftmend.errors import TapError
from shiftmend.research.figures.receptive_fields import Field, first_convolution, receptive_field
from shiftmend.research.networks import build

SIDES = (49, 51)
"""Of the image: three layers of the largest kernel and stride leave enough of it for a fourth."""


def seen(layers: nn.Module, image: Tensor, row: int, column: int) -> list[slice] | None:
    """What a position depends on, by its gradient: an independent answer. Rows and columns of the image, if any."""
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
    found = seen(layers, image, row, column)
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
    assert receptive_field(model, "conv1", sample) == Field((5, 5), (2, 2), (-2, -2), (14, 14))
    assert receptive_field(model, "conv2", sample) == Field((9, 9), (4, 4), (-6, -6), (8, 8))


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
    with pytest.raises(TapError, match="'around' below it breaks the plain chain"):
        receptive_field(Block(2), "last", sample)
