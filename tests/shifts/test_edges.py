"""Canny edges against a slow reference that follows scikit-image's description, pixel by pixel."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import ndimage

from shiftmend.shifts.mnist_c import canny


def canny_by_loop(image: np.ndarray) -> np.ndarray:
    """float64 `[H, W]` in [0, 1]: blur with border compensation, Sobel, interpolated suppression, hysteresis."""
    inside = ndimage.gaussian_filter(np.ones_like(image), 1.0, mode="constant")
    smooth = ndimage.gaussian_filter(image, 1.0, mode="constant") / inside
    right, down = ndimage.sobel(smooth, axis=1), ndimage.sobel(smooth, axis=0)
    size = np.hypot(right, down)
    height, width = image.shape
    peak = np.zeros(image.shape, bool)
    for i in range(1, height - 1):
        for j in range(1, width - 1):
            if size[i, j] == 0:
                continue
            # A step of one pixel along the longer component of the gradient, and its fraction along the other.
            longer = max(abs(right[i, j]), abs(down[i, j]))
            step_right, step_down = right[i, j] / longer, down[i, j] / longer
            values = []
            for sign in (1, -1):
                x, y = sign * step_right, sign * step_down
                if abs(y) >= abs(x):
                    row, side = i + round(y), int(np.sign(x))
                    values.append((1 - abs(x)) * size[row, j] + abs(x) * size[row, j + side])
                else:
                    column, side = j + round(x), int(np.sign(y))
                    values.append((1 - abs(y)) * size[i, column] + abs(y) * size[i + side, column])
            peak[i, j] = all(value <= size[i, j] for value in values)
    weak, strong = peak & (size >= 0.1), peak & (size >= 0.2)
    labels, _ = ndimage.label(weak, np.ones((3, 3)))
    kept = np.unique(labels[strong])
    return np.isin(labels, kept[kept > 0])


def blobs(count: int, seed: int, contrast: float = 1.0) -> np.ndarray:
    random = np.random.default_rng(seed)
    fields = ndimage.gaussian_filter(random.normal(size=(count, 28, 28)), (0, 2, 2))
    return contrast * np.clip(fields * 8, 0, 1)


@pytest.mark.parametrize("contrast", [1.0, 0.3, 0.1])
def test_canny_matches_reference(contrast):
    images = blobs(12, seed=3, contrast=contrast)
    found = canny(torch.from_numpy(images)).numpy()
    expected = np.stack([canny_by_loop(image) for image in images])
    # Magnitudes that are equal by symmetry may fall to either side of a comparison.
    assert (found != expected).mean() < 5e-4
    assert expected.any()


def test_weak_edges_stay_only_where_joined_to_strong_ones():
    # Two steps apart, one faint and one clear; the faint one alone is no edge.
    image = torch.zeros(1, 28, 28, dtype=torch.float64)
    image[:, :, 20:] += 0.5
    image[:, :, 6:] += 0.04
    columns = canny(image)[0].any(dim=0).nonzero().squeeze(1)
    assert columns.tolist() in ([19], [20], [19, 20])


def test_faint_edges_alone_give_nothing():
    image = torch.zeros(1, 28, 28, dtype=torch.float64)
    image[:, 10:20, 10:20] = 0.04
    assert not canny(image).any()


def test_flat_images_have_no_edges():
    assert not canny(torch.full((2, 28, 28), 0.7, dtype=torch.float64)).any()
