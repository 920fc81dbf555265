"""The 19 corruptions of CIFAR-10-C and CIFAR-100-C at 5 severities, regenerated as batched tensor functions.

They follow the published generator of Hendrycks and Dietterich (2019) in its distribution, not in its random
numbers, which were never seeded: results are "CIFAR-C style", not the official files. Lengths are in pixels
of 32 x 32 images.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from shiftmend.shifts.base import Shift
from shiftmend.shifts.cifar_c.blur import defocus_blur, gaussian_blur, glass_blur, motion_blur, zoom_blur
from shiftmend.shifts.cifar_c.digital import (
    brightness,
    contrast,
    elastic_transform,
    jpeg_compression,
    pixelate,
    saturate,
)
from shiftmend.shifts.cifar_c.noise import gaussian_noise, impulse_noise, shot_noise, speckle_noise
from shiftmend.shifts.cifar_c.spatter import spatter
from shiftmend.shifts.cifar_c.weather import fog, frost, snow

__all__ = ["SHIFTS"]


def _shift(
    function: Callable[..., Tensor],
    names: str,
    *severities: tuple[float | str, ...],
    summary: str,
    random: bool = True,
    texture: str | None = None,
) -> Shift:
    return Shift(
        name=f"cifar-c/{function.__name__}",
        function=function,
        severities=tuple(dict(zip(names.split(), values, strict=True)) for values in severities),
        default=5,
        summary=summary,
        random=random,
        texture=texture,
    )


# In the order of the benchmark's own tables; the last four are its extra corruptions.
_ALL = (
    _shift(
        gaussian_noise,
        "deviation",
        *[(0.04,), (0.06,), (0.08,), (0.09,), (0.10,)],
        summary="normal noise",
    ),
    _shift(
        shot_noise,
        "photons",
        *[(500,), (250,), (100,), (75,), (50,)],
        summary="Poisson noise of few photons",
    ),
    _shift(
        impulse_noise,
        "amount",
        *[(0.01,), (0.02,), (0.03,), (0.05,), (0.07,)],
        summary="black and white values (salt and pepper)",
    ),
    _shift(
        defocus_blur,
        "radius sigma",
        *[(0.3, 0.4), (0.4, 0.5), (0.5, 0.6), (1.0, 0.2), (1.5, 0.1)],
        summary="blur with a disk",
        random=False,
    ),
    _shift(
        glass_blur,
        "sigma passes",
        *[(0.05, 1), (0.25, 1), (0.4, 1), (0.25, 2), (0.4, 2)],
        summary="pixels displaced as by frosted glass",
    ),
    _shift(
        motion_blur,
        "radius sigma",
        *[(6, 1.0), (6, 1.5), (6, 2.0), (8, 2.0), (9, 2.5)],
        summary="one-sided smear in a random direction",
    ),
    _shift(
        zoom_blur,
        "copies",
        *[(7,), (12,), (16,), (21,), (26,)],
        summary="mean of growing enlargements",
        random=False,
    ),
    _shift(
        snow,
        "mean deviation zoom_factor threshold radius sigma keep",
        (0.10, 0.2, 1.00, 0.60, 8, 3.0, 0.95),
        (0.10, 0.2, 1.00, 0.50, 10, 4.0, 0.90),
        (0.15, 0.3, 1.75, 0.55, 10, 4.0, 0.90),
        (0.25, 0.3, 2.25, 0.60, 12, 6.0, 0.85),
        (0.30, 0.3, 1.25, 0.65, 14, 12.0, 0.80),
        summary="streaks of snow over a whitened picture",
    ),
    _shift(
        frost,
        "image_weight frost_weight",
        *[(1.0, 0.2), (1.0, 0.3), (0.9, 0.4), (0.85, 0.4), (0.75, 0.45)],
        summary="photographs of frost mixed in",
        texture="frost",
    ),
    _shift(
        fog,
        "strength decay",
        *[(0.2, 3.0), (0.5, 3.0), (0.75, 2.5), (1.0, 2.0), (1.5, 1.75)],
        summary="a cloud texture mixed in",
    ),
    _shift(
        brightness,
        "shift",
        *[(0.05,), (0.1,), (0.15,), (0.2,), (0.3,)],
        summary="brighter in the HSV colour space",
        random=False,
    ),
    _shift(
        contrast,
        "factor",
        *[(0.75,), (0.5,), (0.4,), (0.3,), (0.15,)],
        summary="pulled towards the mean colour",
        random=False,
    ),
    _shift(
        elastic_transform,
        "alpha sigma jitter",
        *[(0.0, 0.0, 2.56), (1.6, 6.4, 2.24), (2.56, 1.92, 1.92), (3.2, 1.28, 1.6), (3.2, 0.96, 0.96)],
        summary="a random affine map and local displacements",
    ),
    _shift(
        pixelate,
        "factor",
        *[(0.95,), (0.9,), (0.85,), (0.75,), (0.65,)],
        summary="shrunk and enlarged into blocks",
        random=False,
    ),
    _shift(
        jpeg_compression,
        "quality",
        *[(80,), (65,), (58,), (50,), (40,)],
        summary="JPEG artefacts",
        random=False,
    ),
    _shift(
        speckle_noise,
        "deviation",
        *[(0.06,), (0.10,), (0.12,), (0.16,), (0.20,)],
        summary="normal noise in proportion to brightness",
    ),
    _shift(
        gaussian_blur,
        "sigma",
        *[(0.4,), (0.6,), (0.7,), (0.8,), (1.0,)],
        summary="Gaussian blur",
        random=False,
    ),
    _shift(
        spatter,
        "liquid mean deviation sigma threshold",
        ("water", 0.62, 0.1, 0.7, 0.70),
        ("water", 0.65, 0.1, 0.8, 0.70),
        ("water", 0.65, 0.3, 1.0, 0.69),
        ("mud", 0.65, 0.1, 0.7, 0.69),
        ("mud", 0.65, 0.1, 0.5, 0.68),
        summary="drops of water or mud on the lens",
    ),
    _shift(
        saturate,
        "factor shift",
        *[(0.3, 0.0), (0.1, 0.0), (1.5, 0.0), (2.0, 0.1), (2.5, 0.2)],
        summary="paler or stronger colours",
        random=False,
    ),
)

SHIFTS: dict[str, Shift] = {shift.name: shift for shift in _ALL}
