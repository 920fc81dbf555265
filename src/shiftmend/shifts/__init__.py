"""Shifts: named, seeded transformations that turn source images into target images.

Images are uint8 `[N, C, H, W]`, on the CPU or a GPU, and so is the result. `SHIFTS` holds all shifts by name.

Example:
    >>> import torch
    >>> from shiftmend import shifts
    >>> images = torch.zeros(2, 1, 28, 28, dtype=torch.uint8)
    >>> shifts.apply("emnist-da/fog", images, seed=1).shape
    torch.Size([2, 1, 28, 28])
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from shiftmend.errors import DataError
from shiftmend.shifts import cifar_c, emnist_da, mnist, sensor
from shiftmend.shifts.base import Shift, check_images, check_signals
from shiftmend.shifts.textures import Folder, load
from shiftmend.utils.checks import brief, check_seed
from shiftmend.utils.devices import sum_dtype

__all__ = ["SHIFTS", "Shift", "apply", "apply_in_portions", "find"]
SHIFTS: dict[str, Shift] = {
    **emnist_da.SHIFTS,
    **mnist.SHIFTS,
    **cifar_c.SHIFTS,
    **sensor.SHIFTS,
}

# A shift can need 50 bytes for each value, so large sets are shifted in portions. Random numbers depend on the size of
# the portions, which therefore has to stay the same for images up to the size of CIFAR's.
MAX_IMAGES = 2000
MAX_VALUES = MAX_IMAGES * 3 * 32 * 32


def find(name: str) -> Shift:
    """Find a shift by name.

    Args:
        name: A name from `SHIFTS`, e.g. "emnist-da/fog".

    Returns:
        The shift.

    Raises:
        DataError: If there is no such shift. The message suggests similar names.

    Example:
        >>> find("emnist-da/fog").name
        'emnist-da/fog'
    """
    if name in SHIFTS:
        return SHIFTS[name]
    same_end = [known for known in SHIFTS if known.rpartition("/")[2] == name.rpartition("/")[2]]
    near = same_end or difflib.get_close_matches(name, SHIFTS, n=3, cutoff=0.5)
    groups = sorted({known.partition("/")[0] for known in SHIFTS})
    hint = f"Try {' or '.join(near)}" if near else f"Names begin with {', '.join(groups)}"
    raise DataError(f"Expected the name of a shift, got {name!r}. {hint}.")


def apply(
    name: str,
    images: Tensor,
    *,
    severity: int | None = None,
    seed: int = 0,
    textures: Folder = None,
    **overrides: Any,
) -> Tensor:
    """Apply a shift to images, or to signals.

    The same seed gives the same result for the same images on the same kind of device. The random numbers of an image
    depend on its place in the batch, so shift a whole set in one call.

    Args:
        name: A name from `SHIFTS`, e.g. "emnist-da/fog".
        images: uint8 `[N, C, H, W]`; floating-point signals `[N, C, L]` for shifts called `signal/...`.
        severity: From 1; by default that of the published set.
        seed: Seed of the random draws.
        textures: Folder of pictures for shifts that need some; see `shiftmend.shifts.textures`.
        overrides: Single parameters that replace those of the severity, e.g. `isotropic=True`.

    Returns:
        The shifted images, uint8 `[N, C', H, W]` (or signals), on the device of `images`.

    Raises:
        DataError: If the shift, a parameter or the images are not what the shift takes.

    Example:
        >>> apply("emnist-da/inverse", torch.zeros(2, 1, 28, 28, dtype=torch.uint8)).unique()
        tensor([255], dtype=torch.uint8)
    """
    options: dict[str, Any] = {"severity": severity, "seed": seed, "textures": textures}
    return torch.cat(list(apply_in_portions(name, images, **options, **overrides)))


def apply_in_portions(
    name: str,
    images: Tensor,
    *,
    severity: int | None = None,
    seed: int = 0,
    textures: Folder = None,
    **overrides: Any,
) -> Iterator[Tensor]:
    """Yield the result of `apply` in portions, in order, for sets too large to fit into memory twice.

    Args:
        name: A name from `SHIFTS`.
        images: uint8 `[N, C, H, W]`, or signals `[N, C, L]`.
        severity: From 1; by default that of the published set.
        seed: Seed of the random draws.
        textures: Folder of pictures for shifts that need some.
        overrides: Single parameters that replace those of the severity.

    Yields:
        The next images, shifted.

    Raises:
        DataError: As for `apply`.

    Example:
        >>> images = torch.zeros(2500, 1, 28, 28, dtype=torch.uint8)
        >>> [len(portion) for portion in apply_in_portions("emnist-da/inverse", images)]
        [2000, 500]
    """
    shift = find(name)
    (check_signals if shift.domain == "signal" else check_images)(images)
    if len(images) == 0:
        raise DataError(f"Expected at least one of the {shift.domain}s to apply {name} to, got none.")
    parameters = {**shift.parameters(severity), **overrides}
    _check_parameters(shift, overrides)
    check_seed(seed)
    place = images.device
    # Most shifts compute in float64, which some devices do not have.
    if sum_dtype(place) != torch.float64:
        options: dict[str, Any] = {"severity": severity, "seed": seed, "textures": textures}
        yield from (part.to(place) for part in apply_in_portions(name, images.cpu(), **options, **overrides))
        return
    if shift.texture is not None:
        parameters["textures"] = [picture.to(place) for picture in load(shift.texture, textures)]
    generator = torch.Generator(place).manual_seed(int(seed))
    for portion in images.split(max(1, min(MAX_IMAGES, MAX_VALUES // max(1, images[0].numel())))):
        yield shift.function(portion, generator=generator, **parameters)


def _check_parameters(shift: Shift, overrides: dict[str, Any]) -> None:
    """Refuse parameters that the shift does not have."""
    known = set(inspect.signature(shift.function).parameters) - {"images", "signals", "generator", "textures"}
    if unknown := sorted(set(overrides) - known):
        accepted = ", ".join(sorted(known)) or "it has none"
        raise DataError(f"Expected parameters of {shift.name} ({accepted}), got {', '.join(unknown)}.")
    if shift.severities is sensor.STRENGTHS and not 0 <= overrides.get("strength", 0) <= 1:
        raise DataError(f"Expected a strength from 0 to 1 for {shift.name}, got {brief(overrides['strength'])}.")
