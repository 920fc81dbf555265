"""The GPU kernels against float64 on the CPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from shiftmend.errors import ShiftmendError
from shiftmend.stats import divergences, histograms
from shiftmend.stats.cuda import kernels, nvrtc
from shiftmend.stats.histograms import Bins

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


class OnGPU:
    """As much of a CUDA tensor as is asked before a kernel is chosen."""

    is_cuda, dtype, ndim, shape, device = True, torch.float32, 2, (4, 3), torch.device("cuda", 0)

    def numel(self) -> int:
        return 12


def case(samples: int, units: int, bins: Bins) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(samples + units)
    low = torch.randn(units, generator=generator)
    high = low + 0.5 + torch.rand(units, generator=generator)
    high[0] = low[0]  # a unit that was constant
    spread = torch.rand(samples, units, generator=generator) * 1.6 - 0.3
    values = low + (high - low) * spread
    home = histograms.soft_histogram(low + (high - low) * spread.square().clamp(0, 1), low, high, bins)
    return values, low, high, home


@pytest.mark.gpu
@gpu
@pytest.mark.parametrize("samples", [2, 37, 256, 2048, 2049, 6000])
@pytest.mark.parametrize("temperature", [0.01, 0.05, 0.3])
@pytest.mark.parametrize("count", [1, 8, 30])
def test_counts_divergences_and_slopes_against_float64(samples: int, temperature: float, count: int) -> None:
    bins = Bins(count, "reference", temperature)
    values, low, high, home = case(samples, 19, bins)
    scale = histograms.inverse_range(low, high)
    on = [tensor.cuda() for tensor in (values, low, scale, home)]
    exact = values.double().requires_grad_()
    counts = histograms.soft_histogram(exact, low.double(), high.double(), bins)
    got = kernels.soft_histogram(*on[:3], bins)
    np.testing.assert_allclose(got[1:].cpu(), counts[1:].detach(), rtol=1e-3, atol=1e-8)
    weights = torch.rand(19, generator=torch.Generator().manual_seed(1))
    for kind in divergences.DIVERGENCES:
        exact.grad = None
        expected = divergences.divergence(home.double(), counts, kind)
        (expected[1:] * weights[1:]).sum().backward(retain_graph=True)
        leaf = on[0].clone().requires_grad_()
        per_unit = kernels.divergence(leaf, *on[1:], bins, kind)
        (per_unit * weights.cuda()).sum().backward()
        assert float(per_unit[0].detach()) == 0
        np.testing.assert_allclose(per_unit[1:].cpu().detach(), expected[1:].detach(), rtol=2e-3, atol=2e-5)
        assert float(leaf.grad[:, 0].abs().max()) == 0
        largest = float(exact.grad.abs().max())
        if largest > 1e-6:  # with two samples far from every cut there is no slope to speak of
            np.testing.assert_allclose(leaf.grad.cpu() / largest, exact.grad / largest, atol=2e-3)


@pytest.mark.gpu
@gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_values_are_binned_in_full_precision(dtype: torch.dtype) -> None:
    values, low, high, _ = case(300, 11, Bins())
    half = values.to("cuda", dtype)
    got = kernels.soft_histogram(half, low.cuda(), histograms.inverse_range(low, high).cuda(), Bins())
    expected = histograms.soft_histogram(half.double().cpu(), low.double(), high.double(), Bins())
    np.testing.assert_allclose(got[1:].cpu(), expected[1:], atol=1e-5)


@pytest.mark.gpu
@gpu
@pytest.mark.parametrize("samples", [100, 5000])
def test_nan_stays_nan(samples: int) -> None:
    values, low, high, home = (tensor.cuda() for tensor in case(samples, 5, Bins()))
    values[3, 2] = torch.nan
    per_unit = kernels.divergence(values, low, histograms.inverse_range(low, high), home, Bins())
    assert per_unit.isnan().tolist() == [False, False, True, False, False]


@pytest.mark.gpu
@gpu
def test_sums_do_not_depend_on_the_order_of_execution() -> None:
    values, low, high, _ = (tensor.cuda() for tensor in case(50_000, 70, Bins()))
    scale = histograms.inverse_range(low, high)
    first = kernels.soft_histogram(values, low, scale, Bins())
    assert all(torch.equal(first, kernels.soft_histogram(values, low, scale, Bins())) for _ in range(5))


@pytest.mark.gpu
@gpu
def test_tables_on_another_device_and_of_another_size() -> None:
    values, low, high, home = case(50, 7, Bins())
    there = values.cuda()
    counts = histograms.soft_histogram(there, low, high, Bins())  # they are brought along
    np.testing.assert_allclose(counts[1:].cpu(), histograms.soft_histogram(values, low, high, Bins())[1:], atol=1e-5)
    scale = histograms.inverse_range(low, high)
    with pytest.raises(ShiftmendError, match=r"low.*on cpu.*cuda:0"):
        kernels.divergence(there, low, scale, home, Bins())
    with pytest.raises(ShiftmendError, match="source is"):
        kernels.divergence(there, low.cuda(), scale.cuda(), home[:5].cuda(), Bins())


@pytest.mark.gpu
@gpu
@pytest.mark.parametrize("samples", [100, 5000])
def test_small_slopes_survive_float16(samples: int) -> None:
    values, low, high, home = (tensor.cuda() for tensor in case(samples, 5, Bins()))
    scale, grads = histograms.inverse_range(low, high), []
    for dtype in (torch.float16, torch.float32):
        leaf = values.half().to(dtype).requires_grad_()
        (kernels.divergence(leaf, low, scale, home, Bins(), "psi", 1e-3).sum() * 65536).backward()
        assert leaf.grad is not None
        grads.append(leaf.grad.float())
    torch.testing.assert_close(grads[0], grads[1], rtol=2e-3, atol=1e-4)


@pytest.mark.gpu
@gpu
def test_backward_in_a_thread_of_its_own_and_first_use_while_capturing() -> None:
    bins = Bins(11, temperature=0.02)  # of which nothing is compiled yet
    values, low, high, _ = (tensor.cuda() for tensor in case(300, 6, bins))
    scale, weights = histograms.inverse_range(low, high), torch.rand(6, bins.total, device="cuda")
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        captured = kernels.soft_histogram(values, low, scale, bins)
    graph.replay()
    leaf = values.clone().requires_grad_()
    counts = kernels.soft_histogram(leaf, low, scale, bins)
    counts.backward(weights)
    torch.testing.assert_close(captured, counts.detach())
    exact = values.double().cpu().requires_grad_()
    histograms.soft_histogram(exact, low.double().cpu(), high.double().cpu(), bins).backward(weights.double().cpu())
    assert leaf.grad is not None
    assert exact.grad is not None
    np.testing.assert_allclose(
        leaf.grad[:, 1:].cpu(), exact.grad[:, 1:], atol=2e-3 * float(exact.grad[:, 1:].abs().max())
    )


def test_what_the_kernels_do_not_take_goes_another_way() -> None:
    assert not kernels.supports(torch.zeros(4, 4), Bins())  # not on a GPU
    values, low, high, _ = case(50, 7, Bins())
    assert histograms.soft_histogram(values, low, high, Bins()).shape == (7, 10)


def hellinger(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    return (p.sqrt() - q.sqrt()).square().sum(-1)


def test_a_divergence_without_kl_weights_takes_the_generic_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_can_compile", lambda device: True)
    monkeypatch.setitem(divergences.DIVERGENCES, "hellinger", divergences.Divergence(hellinger))
    assert kernels.supports(OnGPU(), Bins())  # type: ignore[arg-type]
    for kind, entry in divergences.DIVERGENCES.items():
        assert kernels.supports(OnGPU(), Bins(), kind) == (entry.kl_weights is not None)  # type: ignore[arg-type]
    assert not kernels.supports(OnGPU(), Bins(), "hellinger")  # type: ignore[arg-type]
    assert not kernels.supports(OnGPU(), Bins(), "unknown")  # type: ignore[arg-type]
    values, low, high, home = case(50, 7, Bins())
    source = histograms.Histogram(home, low, high, 1, Bins())
    expected = hellinger(home, source.count(values))[1:].mean()  # the first unit is constant
    torch.testing.assert_close(source.divergence(values, "hellinger"), expected)


@pytest.mark.gpu
@gpu
def test_a_divergence_without_kl_weights_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(divergences.DIVERGENCES, "hellinger", divergences.Divergence(hellinger))
    values, low, high, home = case(50, 7, Bins())
    source = histograms.Histogram(home, low, high, 1, Bins())
    there = source.to(torch.device("cuda", 0)).divergence(values.cuda(), "hellinger")
    torch.testing.assert_close(there.cpu(), source.divergence(values, "hellinger"), rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("other_default_dtype")
def test_what_the_kernels_write_into_is_float32_as_they_take_it_to_be(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[torch.dtype] = []

    def launch(self: object, name: str, parts: int, *arguments: object) -> None:
        seen.extend(argument.dtype for argument in arguments if isinstance(argument, torch.Tensor))

    monkeypatch.setattr(kernels._Grid, "launch", launch)
    monkeypatch.setattr(kernels, "multiprocessors", lambda device: 1)
    values, low, scale, source = (torch.zeros(size, dtype=torch.float32) for size in ((6, 3), (3,), (3,), (3, 10)))
    kernels._counts(values, low, scale, Bins())
    kernels._run_fused(values, low, scale, source, Bins(), (1.0, 1.0))
    kernels._run_in_parts(values, low, scale, source, Bins(), (1.0, 1.0))
    assert set(seen) == {torch.float32}


def test_without_a_compiler_there_is_no_error_and_one_message(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        raise nvrtc.CompilationError("the driver is too old")

    monkeypatch.setattr(kernels, "_compile", refuse)
    kernels._can_compile.cache_clear()
    try:
        for _ in range(2):
            assert not kernels._can_compile(torch.device("cuda", 0))
    finally:
        kernels._can_compile.cache_clear()
    assert [record.getMessage() for record in caplog.records] == [
        "soft histograms run without CUDA kernels and take longer: the driver is too old"
    ]


def test_what_goes_wrong_on_the_device_is_no_reason_to_do_without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels._can_compile.cache_clear()

    def refuse(*_: object) -> None:
        raise nvrtc.DriverError("CUDA: out of memory")

    try:
        with monkeypatch.context() as patch:
            patch.setattr(kernels, "_compile", refuse)
            with pytest.raises(nvrtc.DriverError, match="out of memory"):
                kernels._can_compile(torch.device("cuda", 0))
        monkeypatch.setattr(kernels, "_compile", lambda *_: None)
        assert kernels._can_compile(torch.device("cuda", 0))  # asked again, since nothing was kept
    finally:
        kernels._can_compile.cache_clear()


@pytest.mark.skipif(torch.version.cuda is not None, reason="is about a torch without CUDA")
def test_a_torch_without_cuda_has_no_compiler() -> None:
    with pytest.raises(nvrtc.CompilationError, match="no CUDA compiler"):
        nvrtc._library()
