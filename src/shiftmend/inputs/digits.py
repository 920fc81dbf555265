"""Handwritten digits that ship with the package, for the demo, the examples and the tests.

`digits.npz` beside this file holds the 1,797 images of scikit-learn's `load_digits`: the test part of "Optical
Recognition of Handwritten Digits" by E. Alpaydin and C. Kaynak (1998), UCI Machine Learning Repository, CC BY 4.0.
scikit-learn distributes its copy under the BSD 3-Clause licence.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from shiftmend.inputs.images import Split

DIGITS = tuple("0123456789")
LEVELS = 16
"""Grey levels above black in the stored images."""

FAINT = 0.3
"""Level below which pixels are set to black, because enlarging blurs ink over the background."""


def load_digits() -> tuple[Tensor, Tensor]:
    """Load the digits as published, in the order of their writers.

    Returns:
        Images, float32 `[1797, 1, 8, 8]` from 0 (paper) to 1 (ink), and labels, int64 `[1797]`.

    >>> images, labels = load_digits()
    >>> images.shape, labels[:5].tolist()
    (torch.Size([1797, 1, 8, 8]), [0, 1, 2, 3, 4])
    """
    with np.load(Path(__file__).with_name("digits.npz"), allow_pickle=False) as archive:
        images, labels = torch.from_numpy(archive["images"]), torch.from_numpy(archive["labels"])
    return images.float().unsqueeze(1) / LEVELS, labels.long()


def enlarged_digits(size: int = 28) -> Split:
    """Enlarge the digits to uint8 `[1797, 1, size, size]`.

    >>> enlarged_digits(28)
    digits: 1,797 images [1, 28, 28], 10 classes
    """
    images, labels = load_digits()
    large = torch.nn.functional.interpolate(images, size=size, mode="bicubic").clamp(0, 1)
    large = large.where(large > FAINT, 0.0)
    return Split((large * 255).to(torch.uint8), labels, "digits", DIGITS)
