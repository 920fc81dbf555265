"""The source of the GPU's kernels, run on the CPU and held against float64: no GPU is needed, but a C++ compiler is."""

from __future__ import annotations

import ctypes
import math
import shutil
import subprocess
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from shiftmend.stats import histograms
from shiftmend.stats.cuda import kernels
from shiftmend.stats.divergences import EPSILON
from shiftmend.stats.histograms import Bins

COMPILER = shutil.which("g++")
pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs g++")
Floats = NDArray[np.float32]
ARGUMENTS = {
    "partial_counts": "vffF iiif",
    "finish": "fffFFF iiifff",
    "gradients": "vffffV iiiff",
    "fused": "vfffFV iifffff",
}


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., ctypes.CDLL]:
    """A library with the kernels as functions `run_NAME(across, parts, arguments...)`."""
    folder = tmp_path_factory.mktemp("kernels")
    source = resources.files("shiftmend.stats.cuda").joinpath("kernels.cu").read_text(encoding="utf-8")
    (folder / "source.cpp").write_text(
        '#include "kernels_on_cpu.hpp"\n' + source + "".join(_wrapper(*item) for item in ARGUMENTS.items())
    )

    def built(total: int, window: int, columns: int, warps: int, kind: str = "FLOAT32") -> ctypes.CDLL:
        given = {"TOTAL": total, "WINDOW": window, "COLUMNS": columns, "WARPS": warps, "AHEAD": 2}
        library = folder / f"{'-'.join(map(str, given.values()))}-{kind}.so"
        if not library.exists():
            assert COMPILER is not None
            options = [f"-D{name}={value}" for name, value in given.items()]
            command = [COMPILER, "-std=c++20", "-O1", "-w", "-shared", "-fPIC", "-pthread", f"-D{kind}", *options]
            include = f"-I{Path(__file__).parent}"
            subprocess.run([*command, include, "-o", str(library), str(folder / "source.cpp")], check=True)
        return ctypes.CDLL(str(library))

    return built


def _wrapper(name: str, arguments: str) -> str:
    types = {"v": "const Value*", "V": "Value*", "f": "const float*", "F": "float*"}
    pointers, numbers = arguments.split()
    kinds = [types[letter] for letter in pointers] + [{"i": "int", "f": "float"}[letter] for letter in numbers]
    given = [f"{kind} a{index}" for index, kind in enumerate(kinds)]
    names = ", ".join(f"a{index}" for index in range(len(kinds)))
    return (
        f'extern "C" void run_{name}(int across, int parts, {", ".join(given)}) '
        f"{{ on_all_threads(across, parts, [=] {{ {name}({names}); }}); }}\n"
    )


def launch(library: ctypes.CDLL, name: str, across: int, parts: int, *arguments: Any) -> None:
    converted: list[Any] = [across, parts]
    for argument in arguments:
        if isinstance(argument, np.ndarray):
            assert argument.flags.c_contiguous
            converted.append(argument.ctypes.data_as(ctypes.c_void_p))
        else:
            converted.append(ctypes.c_float(argument) if isinstance(argument, float) else argument)
    getattr(library, f"run_{name}")(*converted)


def world(samples: int, units: int, bins: Bins) -> tuple[Floats, Floats, Floats, Floats]:
    """Values inside and outside of their ranges, and counts at home; the first unit is not usable."""
    generator = np.random.default_rng(samples * units)
    low = generator.normal(size=units).astype(np.float32)
    scale = (1 / generator.uniform(0.5, 2, size=units)).astype(np.float32)
    values = (low + generator.uniform(-0.4, 1.4, size=(samples, units)) / scale).astype(np.float32)
    scale[0] = 0
    source = generator.dirichlet(np.ones(bins.total), size=units).astype(np.float32)
    return values, low, scale, source


def expected(
    values: NDArray[Any], low: Floats, scale: Floats, source: Floats, bins: Bins
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """Counts, divergences and the derivative of the divergences' sum, from softmax and autograd in float64."""
    leaf = torch.tensor(values, dtype=torch.float64, requires_grad=True)
    unit = (leaf - torch.tensor(low).double()) * torch.tensor(scale).double()
    counts = histograms.soft_assignment(unit, bins).mean(0)
    distance = torch.log(torch.tensor(source).double() + EPSILON) - torch.log(counts + EPSILON)
    per_unit = ((torch.tensor(source).double() - counts) * distance).sum(1) / math.log(bins.total)
    usable = torch.tensor(scale) > 0
    per_unit = torch.where(usable, per_unit, 0.0)
    per_unit.sum().backward()
    assert leaf.grad is not None
    return counts.detach().numpy(), per_unit.detach().numpy(), leaf.grad.numpy()


def geometry(bins: Bins) -> tuple[float, float]:
    return kernels.width_log2(bins), 1 / bins.temperature


CASES = [
    # samples, units, columns, bins: sharp and soft, units that fill no block, one unit, fewer samples than threads
    (40, 7, 4, Bins(8)),
    (3, 5, 4, Bins(30)),
    (50, 33, 32, Bins(8, temperature=0.05)),
    (33, 1, 1, Bins(4, temperature=0.5)),
    (70, 3, 2, Bins(1)),
    (21, 9, 8, Bins(40, "paper", 0.02)),
]


@pytest.mark.slow
@pytest.mark.parametrize(("samples", "units", "columns", "bins"), CASES)
def test_fused(build: Callable[..., ctypes.CDLL], samples: int, units: int, columns: int, bins: Bins) -> None:
    values, low, scale, source = world(samples, units, bins)
    _, per_unit, gradient = expected(values, low, scale, source, bins)
    result, slopes = np.full(units, np.nan, np.float32), np.full_like(values, np.nan)
    library = build(bins.total, kernels.window(bins), columns, 2)
    sharp, sharpness = geometry(bins)
    forward = 1 / math.log(bins.total)
    launch(
        library, "fused", math.ceil(units / columns), 1,
        values, low, scale, source, result, slopes, samples, units, sharp, sharpness, forward, forward, EPSILON,
    )  # fmt: skip
    np.testing.assert_allclose(result, per_unit, rtol=1e-3, atol=1e-5)
    np.testing.assert_allclose(slopes, gradient, atol=2e-3 * np.abs(gradient).max() + 1e-9)
    assert result[0] == 0
    assert not slopes[:, 0].any()


@pytest.mark.slow
@pytest.mark.parametrize(("samples", "units", "columns", "bins"), CASES)
@pytest.mark.parametrize("parts", [1, 3])
def test_in_parts(
    build: Callable[..., ctypes.CDLL], samples: int, units: int, columns: int, bins: Bins, parts: int
) -> None:
    values, low, scale, source = world(samples, units, bins)
    counts, per_unit, gradient = expected(values, low, scale, source, bins)
    library = build(bins.total, kernels.window(bins), columns, 2)
    across, each = math.ceil(units / columns), math.ceil(samples / parts)
    sharp, sharpness = geometry(bins)
    partial = np.full((parts, bins.total, units), np.nan, np.float32)
    launch(library, "partial_counts", across, parts, values, low, scale, partial, samples, units, each, sharp)
    found = np.full((units, bins.total), np.nan, np.float32)
    launch(
        library, "finish", across, 1, partial, scale, None, found, None, None, samples, units, parts, 0.0, 0.0, EPSILON
    )
    np.testing.assert_allclose(found, counts, rtol=1e-4, atol=1e-9)
    result, by_count = np.full(units, np.nan, np.float32), np.full_like(source, np.nan)
    weight = 1 / math.log(bins.total)
    launch(
        library, "finish", across, 1,
        partial, scale, source, None, result, by_count, samples, units, parts, weight, weight, EPSILON,
    )  # fmt: skip
    np.testing.assert_allclose(result, per_unit, rtol=1e-3, atol=1e-5)
    upstream = np.linspace(-1, 1, units).astype(np.float32)
    slopes = np.full_like(values, np.nan)
    launch(
        library, "gradients", across, parts,
        values, low, scale, by_count, upstream, slopes, samples, units, each, sharp, sharpness,
    )  # fmt: skip
    np.testing.assert_allclose(slopes, gradient * upstream, atol=2e-3 * np.abs(gradient).max() + 1e-9)
    plain = np.full_like(values, np.nan)
    launch(
        library, "gradients", across, parts,
        values, low, scale, by_count, None, plain, samples, units, each, sharp, sharpness,
    )  # fmt: skip
    np.testing.assert_allclose(plain * upstream, slopes, rtol=1e-5, atol=1e-7)


@pytest.mark.slow
def test_nan_comes_out_and_infinity_lies_in_an_outer_bin(build: Callable[..., ctypes.CDLL]) -> None:
    bins = Bins(8)
    values, low, scale, _ = world(40, 4, bins)
    values[3, 1], values[5, 2], values[7, 3] = np.nan, np.inf, -np.inf
    partial = np.zeros((1, bins.total, 4), np.float32)
    library = build(bins.total, 1, 4, 2)
    launch(library, "partial_counts", 1, 1, values, low, scale, partial, 40, 4, 40, kernels.width_log2(bins))
    assert np.isnan(partial[0, :, 1]).any()
    assert np.isfinite(partial[0][:, [0, 2, 3]]).all()
    np.testing.assert_allclose(partial[0][:, [0, 2, 3]].sum(0), 40, rtol=1e-5)
    values[5, 2], values[7, 3] = 1e9, -1e9
    again = np.zeros_like(partial)
    launch(library, "partial_counts", 1, 1, values, low, scale, again, 40, 4, 40, kernels.width_log2(bins))
    np.testing.assert_allclose(again[0][:, [2, 3]], partial[0][:, [2, 3]], rtol=1e-6)


@pytest.mark.slow
def test_bfloat16_is_read_and_rounded_as_torch_does(build: Callable[..., ctypes.CDLL]) -> None:
    bins = Bins(8)
    values, low, scale, source = world(37, 6, bins)
    half = torch.tensor(values).bfloat16()
    _, per_unit, gradient = expected(half.double().numpy(), low, scale, source, bins)
    result, slopes = np.empty(6, np.float32), np.zeros((37, 6), np.uint16)
    sharp, sharpness = geometry(bins)
    library = build(bins.total, kernels.window(bins), 4, 2, "BFLOAT16")
    launch(
        library, "fused", 2, 1, half.view(torch.uint16).numpy(), low, scale, source, result, slopes, 37, 6,
        sharp, sharpness, 1 / math.log(bins.total), 1 / math.log(bins.total), EPSILON,
    )  # fmt: skip
    np.testing.assert_allclose(result, per_unit, rtol=1e-3, atol=1e-5)
    got = torch.tensor(slopes).view(torch.bfloat16).double().numpy()
    np.testing.assert_allclose(got, gradient, rtol=2**-8, atol=2e-3 * np.abs(gradient).max())


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.01, 0.05])
@pytest.mark.parametrize("where", [0.0, 1.0, 0.5, 3 / 8, 0.31])
def test_units_that_give_one_value_only(build: Callable[..., ctypes.CDLL], where: float, temperature: float) -> None:
    """As a dead ReLU does, at the very edge of a bin: other bins hold nothing but what this one leaves them."""
    bins = Bins(8, temperature=temperature)
    _, _, _, source = world(30, 2, bins)
    values = np.full((30, 2), where, np.float32)
    low, scale = np.zeros(2, np.float32), np.ones(2, np.float32)
    counts, per_unit, gradient = expected(values, low, scale, source, bins)
    library = build(bins.total, kernels.window(bins), 4, 2)
    sharp, sharpness = geometry(bins)
    partial = np.zeros((1, bins.total, 2), np.float32)
    launch(library, "partial_counts", 1, 1, values, low, scale, partial, 30, 2, 30, sharp)
    np.testing.assert_allclose(partial[0].T / 30, counts, rtol=1e-4, atol=1e-10)
    result, slopes = np.empty(2, np.float32), np.empty_like(values)
    weight = 1 / math.log(bins.total)
    launch(
        library, "fused", 1, 1,
        values, low, scale, source, result, slopes, 30, 2, sharp, sharpness, weight, weight, EPSILON,
    )  # fmt: skip
    np.testing.assert_allclose(result, per_unit, rtol=1e-4)
    np.testing.assert_allclose(slopes, gradient, atol=5e-3 * np.abs(gradient).max())


@pytest.mark.slow
@pytest.mark.parametrize("where", [-100.0, -1.0, -0.3, 1.3, 50.0])
def test_far_outside_there_is_no_slope(build: Callable[..., ctypes.CDLL], where: float) -> None:
    bins = Bins(8)
    source = np.full((2, bins.total), 0.1, np.float32)
    values, low, scale = np.full((30, 2), where, np.float32), np.zeros(2, np.float32), np.ones(2, np.float32)
    result, slopes = np.empty(2, np.float32), np.empty_like(values)
    sharp, sharpness = geometry(bins)
    launch(
        build(bins.total, kernels.window(bins), 4, 2), "fused", 1, 1,
        values, low, scale, source, result, slopes, 30, 2, sharp, sharpness, 1.0, 1.0, EPSILON,
    )  # fmt: skip
    assert np.isfinite(result).all()
    assert np.abs(slopes).max() < 1e-5


@pytest.mark.parametrize("temperature", [1e-9, 1e-3, 0.01, 0.05, 0.3, 2.0, 1e30])
@pytest.mark.parametrize("count", [1, 8, 30, 100])
def test_the_window_leaves_out_nothing_that_counts(temperature: float, count: int) -> None:
    bins = Bins(count, temperature=temperature)
    reach = kernels.window(bins)
    assert 1 <= reach < bins.total
    grid = torch.linspace(-0.5, 1.5, 64 * bins.inner + 1, dtype=torch.float64)
    shares = histograms.soft_assignment(grid, bins)
    cut = (grid * bins.inner).round().clamp(0, bins.inner)
    place = torch.arange(bins.total) - cut.unsqueeze(1)
    outside = torch.where((place < 1 - reach) | (place > reach), shares, 0.0)
    assert float(outside.max()) <= math.exp(-kernels.NEGLIGIBLE_LOGIT)


@pytest.mark.slow
def test_very_sharp_and_very_soft_bins(build: Callable[..., ctypes.CDLL]) -> None:
    for temperature in (1e-7, 50.0):
        bins = Bins(8, temperature=temperature)
        values, low, scale, _ = world(40, 3, bins)
        scale[0] = 1
        counts = histograms.soft_assignment(
            (torch.tensor(values).double() - torch.tensor(low)) * torch.tensor(scale), bins
        ).mean(0)
        partial = np.zeros((1, bins.total, 3), np.float32)
        library = build(bins.total, kernels.window(bins), 4, 2)
        launch(library, "partial_counts", 1, 1, values, low, scale, partial, 40, 3, 40, kernels.width_log2(bins))
        np.testing.assert_allclose(partial[0].T / 40, counts, atol=1e-6)
