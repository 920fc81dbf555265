"""The class of all shifts, and the checks of what they are applied to."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from shiftmend.errors import DataError
from shiftmend.utils.checks import brief, is_whole, kind


@dataclass(frozen=True)
class Shift:
    """A named, seeded change of images, or of signals where `domain` says so, as another device would make it.

    `function(images, generator=..., **parameters)` takes uint8 `[N, C, H, W]` on any device and returns
    uint8 `[N, C', H, W]`; the generator lives on the device of the images. `severities[s - 1]` holds the
    parameters of severity `s`, so everything a shift does can be read off its entry.
    """

    name: str
    function: Callable[..., Tensor]
    severities: tuple[Mapping[str, Any], ...]
    default: int
    summary: str
    random: bool = True
    texture: str | None = None
    domain: Literal["image", "signal"] = "image"

    def parameters(self, severity: int | None = None) -> Mapping[str, Any]:
        """Return the keyword arguments of a severity, by default of the published one."""
        level = self.default if severity is None else severity
        if not is_whole(level) or not 1 <= level <= len(self.severities):
            raise DataError(
                f"Expected a severity from 1 to {len(self.severities)} for {self.name}, got {brief(level)}."
            )
        return self.severities[level - 1]


def check_signals(signals: Tensor) -> None:
    """Refuse anything but a batch of one-dimensional signals."""
    _check_tensor(signals)
    if not signals.is_floating_point() or signals.ndim != 3 or signals.shape[-1] < 2:
        dtype = str(signals.dtype).removeprefix("torch.")
        raise DataError(f"Expected floating-point signals [N, C, L], got {dtype} {list(signals.shape)}.")


def check_images(images: Tensor) -> None:
    """Refuse anything but a batch of 8-bit images."""
    _check_tensor(images)
    if images.dtype != torch.uint8 or images.ndim != 4 or images.shape[1] not in (1, 3) or 0 in images.shape[2:]:
        raise DataError(
            f"Expected uint8 images [N, 1 or 3, H, W], got {str(images.dtype).removeprefix('torch.')} "
            f"{list(images.shape)}."
        )


def _check_tensor(given: Any) -> None:
    if not isinstance(given, Tensor):
        advice = " Try torch.from_numpy(images)." if isinstance(given, np.ndarray) else ""
        raise DataError(f"Expected a tensor to shift, got {kind(given)}.{advice}")
