"""Two processes against one. They are started once, work through every function below that is called `two_...`, and
leave their tensors in a file each; the tests compare those with what one process finds on the joined batches."""

from __future__ import annotations

import copy
import datetime
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import Tensor, nn
from torch.nn import functional

from shiftmend.distributed import batch_norm as joined_batch_norm
from shiftmend.distributed import collectives as distributed
from shiftmend.distributed.batch_norm import synchronised
from shiftmend.errors import AdaptationError
from shiftmend.stats.divergences import psi
from shiftmend.stats.histograms import Bins, soft_histogram

Tensors = dict[str, Tensor]

pytestmark = pytest.mark.skipif(
    not (dist.is_available() and dist.is_gloo_available()), reason="this torch has no gloo to talk between processes"
)

WORLD = 2
TIMEOUT = datetime.timedelta(seconds=30)
EXACT = {"rtol": 1e-10, "atol": 1e-12}


class NormThenActivate(nn.BatchNorm2d):
    """A BatchNorm with a forward of its own, as libraries of image models have them."""

    def forward(self, input: Tensor) -> Tensor:
        values = functional.batch_norm(
            input, self.running_mean, self.running_var, self.weight, self.bias, self.training
        )
        return values.relu()


NORMS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "1d": (lambda: nn.BatchNorm1d(3), ()),
    "1d with length": (lambda: nn.BatchNorm1d(3, eps=0.1), (4,)),
    "2d": (lambda: nn.BatchNorm2d(3, momentum=0.3), (2, 3)),
    "3d": (lambda: nn.BatchNorm3d(3), (2, 1, 2)),
    "cumulative": (lambda: nn.BatchNorm2d(3, momentum=None), (2, 2)),
    "not affine": (lambda: nn.BatchNorm2d(3, affine=False), (2, 2)),
    "not tracking": (lambda: nn.BatchNorm2d(3, track_running_stats=False), (2, 2)),
    "neither": (lambda: nn.BatchNorm1d(3, affine=False, track_running_stats=False), ()),
    "synchronised by torch": (lambda: nn.SyncBatchNorm(3), (2, 2)),
    "with an activation": (lambda: NormThenActivate(3), (2, 2)),
}
CUTS = ((5, 2), (1, 6), (4, 3))
"""How three batches of seven are shared: never equally."""


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def norm_of(kind: str) -> nn.Module:
    module = NORMS[kind][0]().double().train()
    for seed, parameter in enumerate(module.parameters()):
        parameter.data = drawn(3, seed=seed)
    return module


def through_norm(module: nn.Module, kind: str, part: Callable[[Tensor, tuple[int, int]], Tensor]) -> Tensors:
    """Three batches, forward and backward. Channels have very different means: that is where variances cancel."""
    found: Tensors = {}
    offsets = torch.tensor([0.0, 1e4, -30.0], dtype=torch.float64).view(3, *[1] * len(NORMS[kind][1]))
    for batch, cut in enumerate(CUTS):
        whole = drawn(7, 3, *NORMS[kind][1], seed=batch) + offsets
        values = part(whole, cut).requires_grad_()
        result = module(values)
        (result * part(drawn(*whole.shape, seed=10 + batch), cut)).tanh().sum().backward()
        assert values.grad is not None
        found |= {f"{batch}.result": result.detach(), f"{batch}.gradient": values.grad}
    return found | {name: value.clone() for name, value in module.state_dict().items()}


def own_part(whole: Tensor, cut: tuple[int, int]) -> Tensor:
    return whole.split(list(cut))[distributed.rank()].clone()


def two_norms() -> Tensors:
    found: Tensors = {}
    for kind in NORMS:
        module = norm_of(kind)
        with synchronised(module):
            parts = through_norm(module, kind, own_part)
        assert "forward" not in module.__dict__
        distributed.sum_gradients(module.parameters())
        parts |= {f"gradient of {name}": p.grad for name, p in module.named_parameters() if p.grad is not None}
        found |= {f"{kind}.{name}": value for name, value in parts.items()}
    return found


def two_norms_left_alone() -> Tensors:
    """In eval mode nothing is joined; a forward that somebody has put on the layer is used, and is there afterwards."""
    module = norm_of("2d").eval()
    patched = norm_of("2d")
    plain = patched.forward
    patched.forward = lambda values: 2 * plain(values)  # type: ignore[method-assign]
    kept = patched.forward
    values = own_part(drawn(7, 3, 2, 2), (5, 2))
    with synchronised(nn.Sequential(module, patched)):
        evaluated, doubled = module(values), patched(values)
    assert patched.__dict__["forward"] is kept
    with pytest.raises(KeyError), synchronised(module):
        raise KeyError
    assert "forward" not in module.__dict__
    return {"evaluated": evaluated, "doubled": doubled.detach()}


def network() -> nn.Module:
    generator = torch.Generator().manual_seed(3)
    layers = [nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(16, 3)]
    layers += [nn.BatchNorm1d(3), nn.Linear(3, 2)]
    model = nn.Sequential(*layers).double()
    for parameter in model.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) / 2
    return model.train()


def trained(model: nn.Module) -> Tensors:
    """Six steps that align histograms of the output with fixed ones, the way a method would."""
    device = next(model.parameters()).device
    optimiser = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    home = torch.tensor([[0.1] * 10, [0.05] * 5 + [0.15] * 5], dtype=torch.float64, device=device)
    low, high = home.new_full((2,), -2.0), home.new_full((2,), 3.0)
    losses = []
    with synchronised(model):
        for step in range(6):
            output = model(distributed.local_part(drawn(11, 2, 4, 4, seed=step)).to(device))
            counts = soft_histogram(output, low, high, Bins(temperature=0.1))
            loss = psi(home, distributed.reduce_mean(counts, len(output))).mean()
            optimiser.zero_grad()
            (loss / distributed.world_size()).backward()
            distributed.sum_gradients(model.parameters())
            optimiser.step()
            losses.append(loss.detach())
    return {"losses": torch.stack(losses), **model.state_dict()}


def two_trained() -> Tensors:
    return trained(network())


def two_sums() -> Tensors:
    """Each process asks another question of the sum, and of the gradient of the gradient."""
    rank = distributed.rank()
    values = drawn(4, 3, seed=rank).t().requires_grad_()
    before = values.detach().clone()
    total = distributed.all_sum(values)
    assert torch.equal(values, before)
    (gradient,) = torch.autograd.grad(((rank + 1) * total.sin()).sum(), values, create_graph=True)
    (second,) = torch.autograd.grad((gradient * gradient).sum(), values)
    single = torch.ones(2, dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        reduced = distributed.all_sum(single)
    assert torch.equal(single, torch.ones(2))
    return {"total": total.detach(), "gradient": gradient.detach(), "second": second, "single": reduced}


def two_means() -> Tensors:
    values = own_part(drawn(7, 3), (5, 2)).requires_grad_()
    mean = distributed.reduce_mean(values.square().mean(0), len(values))
    (mean.exp().sum() / WORLD).backward()
    assert values.grad is not None
    return {"mean": mean.detach(), "gradient": values.grad}


def two_gradients() -> Tensors:
    parameters = [
        nn.Parameter(torch.zeros(2, 3, 4, 4)),
        nn.Parameter(torch.zeros(3, dtype=torch.float64)),
        nn.Parameter(torch.zeros(5)),
        nn.Parameter(torch.zeros(())),
    ]
    for seed, parameter in enumerate(parameters):
        if seed != 2:
            grad = drawn(*parameter.shape, seed=10 * distributed.rank() + seed).to(parameter.dtype)
            parameter.grad = grad.to(memory_format=torch.channels_last) if grad.ndim == 4 else grad
    distributed.sum_gradients(parameters)
    assert parameters[2].grad is None
    return {str(index): p.grad for index, p in enumerate(parameters) if p.grad is not None}


def two_statistics() -> Tensors:
    values = own_part(drawn(7, 3) + 1e6, (5, 2))
    squares = (values - values.mean(0)).square().sum(0)
    count, mean, squares = distributed.reduce_moments(len(values), values.mean(0), squares)
    low, high = values.amin(0), values.amax(0)
    if distributed.rank() == 1:
        low[2] = high[2] = torch.nan
    low, high = distributed.reduce_range(low, high)
    return {"count": count, "mean": mean, "squares": squares, "low": low, "high": high}


def two_halves() -> Tensors:
    """Half precision, as under autocast: float32 parameters, bfloat16 values."""
    module = nn.BatchNorm2d(3).train()
    whole = drawn(8, 3, 2, 2).bfloat16()
    values = distributed.local_part(whole).clone().requires_grad_()
    with synchronised(module), torch.autocast("cpu", dtype=torch.bfloat16):
        result = module(values)
    (result.float() * distributed.local_part(drawn(8, 3, 2, 2, seed=1)).float()).sum().backward()
    assert values.grad is not None
    assert module.weight.grad is not None
    return {
        "result": result.detach(),
        "gradient": values.grad,
        "to weight": module.weight.grad,
        "mean": module.running_mean,
    }


def two_agree() -> Tensors:
    distributed.check_same("equal", "weights")
    with pytest.raises(AdaptationError, match="same data"):
        distributed.check_same(f"of process {distributed.rank()}", "data")
    with pytest.raises(AdaptationError, match=r"2 processes.*batch of 1"):
        distributed.local_part(torch.zeros(1))
    facts = [distributed.rank(), distributed.world_size(), int(distributed.is_distributed())]
    return {"facts": torch.tensor(facts), "share": distributed.local_part(torch.arange(7))}


def two_trained_on_cuda() -> Tensors:
    return {name: value.cpu() for name, value in trained(network().cuda()).items()}


CHECKS: list[Callable[[], Tensors]] = [
    two_norms,
    two_norms_left_alone,
    two_trained,
    two_sums,
    two_means,
    two_gradients,
    two_statistics,
    two_halves,
    two_agree,
]


def work(rank: int, folder: str, checks: list[Callable[[], Tensors]]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=WORLD, timeout=TIMEOUT
    )
    try:
        with distributed.all_processes():
            found = {f"{check.__name__}.{name}": value for check in checks for name, value in check().items()}
        packed = {name: value.clone(memory_format=torch.contiguous_format) for name, value in found.items()}
        safetensors.torch.save_file(packed, f"{folder}/{rank}.safetensors")
    finally:
        dist.destroy_process_group()


def in_two_processes(folder: Path, checks: list[Callable[[], Tensors]]) -> list[Tensors]:
    torch.multiprocessing.spawn(work, (str(folder), checks), WORLD)
    return [safetensors.torch.load_file(folder / f"{rank}.safetensors") for rank in range(WORLD)]


@pytest.fixture(scope="module")
def everything(tmp_path_factory: pytest.TempPathFactory) -> list[Tensors]:
    return in_two_processes(tmp_path_factory.mktemp("processes"), CHECKS)


@pytest.fixture
def found(everything: list[Tensors]) -> Callable[[Callable[[], Tensors]], list[Tensors]]:
    """What each process found in one of the checks."""

    def of(check: Callable[[], Tensors]) -> list[Tensors]:
        prefix = f"{check.__name__}."
        return [{k.removeprefix(prefix): v for k, v in own.items() if k.startswith(prefix)} for own in everything]

    return of


Found = Callable[[Callable[[], Tensors]], list[Tensors]]


@pytest.mark.slow
@pytest.mark.parametrize("kind", NORMS)
def test_batch_norm_over_two_processes_is_that_of_the_joined_batch(found: Found, kind: str) -> None:
    module: Any = norm_of(kind)
    expected = through_norm(module, kind, lambda whole, cut: whole.clone())
    expected |= {f"gradient of {name}": p.grad for name, p in module.named_parameters() if p.grad is not None}
    first, second = (
        {k.removeprefix(f"{kind}."): v for k, v in own.items() if k.startswith(f"{kind}.")} for own in found(two_norms)
    )
    assert first.keys() == expected.keys()
    assert len(first) >= 6
    for name, value in expected.items():
        if name.endswith((".result", ".gradient")):
            joined = torch.cat([first[name], second[name]])
        else:  # parameters, statistics, and gradients once they are summed
            joined = first[name]
            assert torch.equal(joined, second[name]), name
        assert joined.dtype == value.dtype
        # a mean of 1e4 costs four digits of the normalised values, in one process as in two
        torch.testing.assert_close(joined, value, rtol=1e-9, atol=1e-9, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.slow
def test_gradients_through_joined_statistics_against_finite_differences(found: Found) -> None:
    """Against nothing of torch's: the normalised values written out, in numpy."""
    whole = drawn(7, 3).numpy() + np.array([0.0, 1e4, -30.0])
    weight, bias, factor = drawn(3, seed=0).numpy(), drawn(3, seed=1).numpy(), drawn(7, 3, seed=10).numpy()

    def loss(values: np.ndarray) -> float:
        centred = values - values.mean(0)
        normal = centred / np.sqrt((centred**2).mean(0) + 1e-5)
        return float(np.tanh((normal * weight + bias) * factor).sum())

    expected = np.zeros_like(whole)
    for place in np.ndindex(*whole.shape):
        step = np.zeros_like(whole)
        step[place] = 1e-4
        expected[place] = (loss(whole + step) - loss(whole - step)) / 2e-4
    gradient = torch.cat([own["1d.0.gradient"] for own in found(two_norms)])
    np.testing.assert_allclose(gradient.numpy(), expected, atol=1e-6)
    assert np.abs(expected).max() > 0.01


@pytest.mark.slow
def test_layers_in_eval_mode_or_with_another_forward(found: Found) -> None:
    whole = drawn(7, 3, 2, 2)
    module = norm_of("2d")
    expected = 2 * module(whole).detach()
    evaluated = norm_of("2d").eval()(whole).detach()
    own = found(two_norms_left_alone)
    torch.testing.assert_close(torch.cat([part["doubled"] for part in own]), expected, **EXACT)
    torch.testing.assert_close(torch.cat([part["evaluated"] for part in own]), evaluated, **EXACT)


@pytest.mark.slow
def test_training_in_two_processes_is_training_in_one(found: Found) -> None:
    expected = trained(network())
    first, second = found(two_trained)
    assert first.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(first[name], second[name]), name
        torch.testing.assert_close(first[name], value, rtol=1e-9, atol=1e-11)
    assert expected["losses"][-1] < expected["losses"][0]
    assert not torch.equal(expected["0.weight"], network().state_dict()["0.weight"])


@pytest.mark.slow
def test_sum_over_processes(found: Found) -> None:
    x, y = (drawn(4, 3, seed=rank).t().numpy() for rank in range(WORLD))

    def asked(total: np.ndarray) -> np.ndarray:
        return 1 * np.sin(total) + 2 * np.sin(total)  # the two losses, together

    step = 1e-5
    slope = (asked(x + y + step) - asked(x + y - step)) / (2 * step)
    for own in found(two_sums):
        np.testing.assert_allclose(own["total"].numpy(), x + y, rtol=1e-14)
        np.testing.assert_allclose(own["gradient"].numpy(), slope, atol=1e-9)
        # gradient = 3 cos(x + y) on either process; both square it: d/dx 2 (3 cos)^2
        np.testing.assert_allclose(own["second"].numpy(), -36 * np.cos(x + y) * np.sin(x + y), atol=1e-12)
        assert own["single"].dtype == torch.float32
        assert own["single"].tolist() == [2.0, 2.0]


@pytest.mark.slow
def test_mean_over_unequal_processes(found: Found) -> None:
    whole = drawn(7, 3).numpy()
    mean = (whole**2).mean(0)
    own = found(two_means)
    for part in own:
        np.testing.assert_allclose(part["mean"].numpy(), mean, rtol=1e-14)
    gradient = torch.cat([part["gradient"] for part in own]).numpy()
    np.testing.assert_allclose(gradient, np.exp(mean) * 2 * whole / 7, rtol=1e-13)


@pytest.mark.slow
def test_sum_of_gradients(found: Found) -> None:
    for own in found(two_gradients):
        assert sorted(own) == ["0", "1", "3"]
        for name, value in own.items():
            index = int(name)
            dtype = torch.float64 if index == 1 else torch.float32
            parts = [drawn(*value.shape, seed=10 * rank + index).to(dtype).numpy() for rank in range(WORLD)]
            assert value.dtype == dtype
            np.testing.assert_array_equal(value.numpy(), parts[0] + parts[1])


@pytest.mark.slow
def test_statistics_of_all_samples(found: Found) -> None:
    whole = (drawn(7, 3) + 1e6).numpy()
    first, second = found(two_statistics)
    for own in (first, second):
        assert own["count"] == 7
        np.testing.assert_allclose(own["mean"].numpy(), whole.mean(0), rtol=1e-15)
        np.testing.assert_allclose(own["squares"].numpy(), whole.var(0) * 7, rtol=1e-8)
        np.testing.assert_array_equal(own["low"][:2].numpy(), whole.min(0)[:2])
        np.testing.assert_array_equal(own["high"][:2].numpy(), whole.max(0)[:2])
        assert own["low"][2].isnan()
        assert own["high"][2].isnan()
    assert torch.equal(first["mean"], second["mean"])
    assert torch.equal(first["squares"], second["squares"])


@pytest.mark.slow
def test_half_precision(found: Found) -> None:
    module = nn.BatchNorm2d(3).train()
    whole = drawn(8, 3, 2, 2).bfloat16().requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        result = module(whole)
    (result.float() * drawn(8, 3, 2, 2, seed=1).float()).sum().backward()
    own = found(two_halves)
    joined = {name: torch.cat([part[name] for part in own]) for name in ("result", "gradient")}
    torch.testing.assert_close(joined["result"], result.detach())  # dtype included
    torch.testing.assert_close(joined["gradient"], whole.grad)
    torch.testing.assert_close(sum(part["to weight"] for part in own), module.weight.grad)
    torch.testing.assert_close(own[0]["mean"], module.running_mean)


@pytest.mark.slow
def test_who_is_who(found: Found) -> None:
    first, second = found(two_agree)
    assert first["facts"].tolist() == [0, 2, 1]
    assert second["facts"].tolist() == [1, 2, 1]
    assert first["share"].tolist() == [0, 1, 2, 3]
    assert second["share"].tolist() == [4, 5, 6]


@pytest.fixture(params=["no process group", "a group of one"])
def alone(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[None]:
    if request.param == "no process group":
        yield
        return
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1, timeout=TIMEOUT)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("alone")
def test_alone_nothing_changes() -> None:
    values = drawn(7, 3)
    assert (distributed.is_distributed(), distributed.rank(), distributed.world_size()) == (False, 0, 1)
    assert distributed.all_sum(values) is values
    assert distributed.reduce_mean(values, 7) is values
    assert torch.equal(distributed.local_part(values), values)
    distributed.check_same("anything", "data")
    low, high = distributed.reduce_range(values.amin(0), values.amax(0))
    assert torch.equal(low, values.amin(0))
    assert torch.equal(high, values.amax(0))
    count, mean, squares = distributed.reduce_moments(7, values[0], values[1])
    assert count == 7
    assert torch.equal(mean, values[0])
    assert torch.equal(squares, values[1])
    parameter = nn.Parameter(values)
    parameter.grad = values.clone()
    distributed.sum_gradients([parameter])
    assert torch.equal(parameter.grad, values)
    module = norm_of("2d")
    reference = copy.deepcopy(module)
    with synchronised(module):
        assert "forward" not in module.__dict__
        assert torch.equal(module(drawn(7, 3, 2, 2)), reference(drawn(7, 3, 2, 2)))
    assert torch.equal(module.running_var, reference.running_var)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_two_processes_on_one_gpu(tmp_path: Path) -> None:
    expected = trained(network())
    first, second = in_two_processes(tmp_path, [two_trained_on_cuda])
    for name, value in expected.items():
        found = [own[f"two_trained_on_cuda.{name}"] for own in (first, second)]
        assert torch.equal(*found), name
        torch.testing.assert_close(found[0], value, rtol=1e-8, atol=1e-10)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available() or not dist.is_nccl_available(), reason="no CUDA device with nccl")
def test_nccl_without_waiting_for_the_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One GPU makes a group of one; it is told that it is not alone, so that its collectives run."""
    torch.cuda.set_device(0)
    expected = trained(network())
    dist.init_process_group("nccl", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1, timeout=TIMEOUT)
    try:
        monkeypatch.setattr(distributed, "is_distributed", lambda: True)
        monkeypatch.setattr(joined_batch_norm, "is_distributed", lambda: True)
        distributed.check_same("equal", "weights", torch.device("cuda"))
        with pytest.raises(AdaptationError, match=r"'gloo'.*CPU"):
            distributed.check_same("equal", "weights", torch.device("cpu"))
        found = trained(network().cuda())
        model = network().cuda()
        values = drawn(11, 2, 4, 4).cuda()
        torch.cuda.set_sync_debug_mode("error")
        with synchronised(model):
            distributed.reduce_mean(model(values), 11).sum().backward()
        distributed.sum_gradients(model.parameters())
    finally:
        torch.cuda.set_sync_debug_mode("default")
        dist.destroy_process_group()
    for name, value in expected.items():
        torch.testing.assert_close(found[name].cpu(), value, rtol=1e-8, atol=1e-10)


def test_blocks_that_overlap_end_with_the_last_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """As those of lanes do, which give up their turn inside."""
    monkeypatch.setattr(distributed, "world_size", lambda: WORLD)
    one, other = distributed.all_processes(), distributed.all_processes()
    one.__enter__()
    other.__enter__()
    one.__exit__(None, None, None)
    assert distributed.is_distributed()
    other.__exit__(None, None, None)
    assert not distributed.is_distributed()


def test_processes_that_are_done_wait_for_each_other_and_those_that_fail_do_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One that left while the other still wrote its files aborted at times, and the other was killed."""
    calls: list[str] = []
    for name in ("init_process_group", "barrier", "destroy_process_group"):
        monkeypatch.setattr(distributed.dist, name, lambda *_, name=name: calls.append(name))
    monkeypatch.setenv("WORLD_SIZE", "2")
    with distributed.torchrun_process_group():
        calls.append("work")
    assert calls == ["init_process_group", "work", "barrier", "destroy_process_group"]
    calls.clear()
    with pytest.raises(KeyError), distributed.torchrun_process_group():
        raise KeyError
    assert calls == ["init_process_group", "destroy_process_group"]


def test_a_process_group_without_a_backend_for_the_device_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_backend_config", lambda: "cuda:nccl")
    monkeypatch.setattr(dist, "get_backend", lambda: "nccl")
    distributed._check_backend("cuda")
    with pytest.raises(AdaptationError, match="tensors on cpu"):
        distributed._check_backend("cpu")


def test_a_batch_too_small_joins_the_one_before_it_only_where_samples_are_of_one_size(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in (("is_distributed", True), ("world_size", 3), ("rank", 0)):
        monkeypatch.setattr(distributed, name, lambda value=value: value)
    assert [part.shape for part in distributed.local_parts([torch.zeros(6, 5), torch.zeros(2, 5)])] == [(3, 5)]
    with pytest.raises(AdaptationError, match=r"3 processes.*batch of 2"):
        list(distributed.local_parts([torch.zeros(6, 5), torch.zeros(2, 7)]))


GROUP_OF_ONE = """
import sys
import weakref
from shiftmend import adapt
import torch.distributed as dist

dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=0, world_size=1)
import torch._dynamo  # as an optimiser does

group = weakref.ref(dist.group.WORLD)
assert group() is not None
dist.destroy_process_group()
assert group() is None
"""


@pytest.mark.slow
def test_nothing_keeps_a_process_group_that_was_destroyed(tmp_path: Path) -> None:
    """Its threads were there at exit, and one that waited for Python then aborted the process."""
    command = [sys.executable, "-c", GROUP_OF_ONE, str(tmp_path / "meeting")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
