"""The search for a learning rate leaves no trace, repeats itself, and finds rates that mend."""

from __future__ import annotations

import copy
import datetime
import json
import math
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from worlds import World, sensors

from shiftmend.adaptation.run import examine
from shiftmend.engine import rate_search
from shiftmend.engine.method import Stage, plan_stages
from shiftmend.engine.rate_search import RateSearch, choose_rate, find_rate
from shiftmend.inputs.feed import Feed
from shiftmend.introspection.modes import find_batch_norms
from shiftmend.methods import method as make_method


class Replacing(nn.Module):
    """A layer that puts a new tensor in the place of its buffer in every step, and draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, values: Tensor) -> Tensor:
        self.seen = self.seen + 1
        return values + 1e-6 * torch.rand_like(values)


def prepare(
    model: nn.Module,
    source: Any,
    world: World,
    method: str = "fr",
    batch_size: int = 100,
    resident: bool = True,
    stage: Stage | None = None,
) -> dict[str, Any]:
    profile, chosen = world.profile(), make_method(method)
    feed = Feed(source, batch_size=batch_size, resident=resident)
    network, taps = examine(model, feed.first(2), profile, chosen, None, None)
    stage = stage or plan_stages(chosen, network, profile)[0]
    objective = chosen.objective(profile, feed.device)
    return {"feed": feed, "taps": taps, "objective": objective, "method": chosen, "stage": stage}


def search(model: nn.Module, source: Any, world: World, **options: Any) -> RateSearch:
    own = {name: options.pop(name) for name in ("precision", "seed", "factors") if name in options}
    return find_rate(model, **prepare(model, source, world, **options), **own)


def fresh(world: World) -> nn.Module:
    return copy.deepcopy(world.model)


def curves(*last: float, steps: int = rate_search.STEPS) -> list[list[float]]:
    """Losses that are 1 at first, and these values in the judged steps."""
    early = steps - rate_search.JUDGED_STEPS
    return [[1.0] * early + [value] * rate_search.JUDGED_STEPS for value in last]


UNTOUCHED = [1.0] * rate_search.STEPS


@pytest.mark.parametrize("method", ["fr", "bufr"])
@pytest.mark.parametrize("norm", [True, False])
def test_the_model_is_the_same_afterwards_bit_by_bit(method: str, norm: bool) -> None:
    world = sensors(norm)
    model = fresh(world)
    [dropout] = [index for index, layer in enumerate(model) if isinstance(layer, nn.Dropout)]  # type: ignore[arg-type]
    model[dropout] = Replacing()  # type: ignore[operator]
    model[0].weight.requires_grad_(False)
    kept = model[0].bias.grad = torch.ones_like(model[0].bias)  # type: ignore[union-attr]
    model[1].train()
    for layer in find_batch_norms(model):
        layer.momentum = None
    stage = Stage("all", 1, 0.003, tuple(name for name, _ in model.named_parameters()))
    prepared = prepare(model, world.target, world, method, stage=stage)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    places = {name: value.data_ptr() for name, value in model.state_dict(keep_vars=True).items()}
    modes = [module.training for module in model.modules()]
    generator = torch.default_generator.get_state()
    find_rate(model, **prepared)
    after = model.state_dict(keep_vars=True)
    assert all(torch.equal(before[name], value) for name, value in after.items())
    assert {name: value.data_ptr() for name, value in after.items()} == places
    assert [module.training for module in model.modules()] == modes
    assert torch.equal(torch.default_generator.get_state(), generator)
    assert [parameter.requires_grad for parameter in model.parameters()].count(False) == 1
    assert model[0].bias.grad is kept
    assert all(layer.momentum is None for layer in find_batch_norms(model))


def test_a_failure_leaves_no_trace_either() -> None:
    world = sensors()
    model = fresh(world)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    prepared = prepare(model, world.target, world)
    inner, calls = prepared["objective"], []

    def breaks(activations: Any) -> Any:
        calls.append(1)
        if len(calls) > 20:
            raise RuntimeError("broken")
        return inner(activations)

    with pytest.raises(RuntimeError, match="broken"):
        find_rate(model, **prepared | {"objective": breaks})
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert not model.training
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_the_same_seed_gives_the_same_and_another_seed_other_batches() -> None:
    world = sensors()
    first, again = (search(fresh(world), world.target, world, seed=3) for _ in range(2))
    assert first == again
    assert search(fresh(world), world.target, world, seed=4).losses != first.losses


def test_every_candidate_meets_the_same_batches_and_the_same_random_numbers() -> None:
    world = sensors()
    found = search(fresh(world), world.target, world, factors=(1.0, 1.0))
    assert found.losses[0] == found.losses[1]


@pytest.mark.parametrize("norm", [True, False])
def test_candidates_that_hardly_move_have_the_loss_of_the_untouched_model(norm: bool) -> None:
    world = sensors(norm)
    found = search(fresh(world), world.target, world, factors=(1e-12,))
    assert found.losses[0] == pytest.approx(found.start, rel=1e-4)


def test_a_streamed_target_serves_as_well() -> None:
    world = sensors()
    loader = DataLoader(TensorDataset(world.target), batch_size=100)
    streamed = search(fresh(world), loader, world, resident=False)
    assert streamed.rate in streamed.rates
    assert all(map(math.isfinite, streamed.losses))


@pytest.mark.parametrize("norm", [True, False])
def test_a_tiny_target_is_one_full_batch_used_again_and_again(norm: bool) -> None:
    world = sensors(norm)
    found = search(fresh(world), world.target[:40], world)
    assert found.steps == rate_search.STEPS
    assert found.losses[0] < found.start
    part = rate_search.ONE_BATCH if norm else 1.0
    assert any(found.rate == pytest.approx(part * rate) for rate in found.rates)
    assert ("one batch" in found.reason) == norm


def test_batches_that_do_not_fit_are_fewer(monkeypatch: pytest.MonkeyPatch) -> None:
    world = sensors()
    feed = Feed(world.target, batch_size=100)
    assert len(rate_search._hold_batches(feed, 0)) == 6
    monkeypatch.setattr(rate_search, "MAX_HELD_BYTES", 2 * 100 * 6 * 4)
    assert len(rate_search._hold_batches(feed, 0)) == 2
    monkeypatch.setattr(rate_search, "MAX_HELD_BYTES", 1)
    assert len(rate_search._hold_batches(feed, 0)) == 1


def test_progress_is_not_shown_meanwhile() -> None:
    world = sensors()
    feed, seen = Feed(world.target, batch_size=100), []
    feed.on_batch = seen.append
    rate_search._hold_batches(feed, 0)
    assert not seen
    assert feed.on_batch == seen.append


def test_the_forward_pass_runs_in_the_precision_of_training() -> None:
    world = sensors()
    entered: list[int] = []

    def precision() -> Any:
        entered.append(1)
        return nullcontext()

    found = search(fresh(world), world.target, world, precision=precision)
    assert len(entered) == (1 + len(found.rates)) * found.steps


def choose(rates: list[float], losses: list[list[float]], changes: list[float] | None = None) -> RateSearch:
    return choose_rate(0.01, rates, losses, changes or [0.01] * len(rates), UNTOUCHED)


def test_the_smallest_rate_with_most_of_the_gain_is_chosen() -> None:
    found = choose([0.001, 0.01, 0.1, 1.0], curves(0.9, 0.35, 0.2, 3.0))
    assert found.rate == 0.01
    assert found.start == 1.0
    assert found.losses == pytest.approx((0.9, 0.35, 0.2, 3.0))
    assert "0.1" in found.reason


def test_rates_that_change_the_weights_much_neither_win_nor_set_the_mark() -> None:
    found = choose([0.001, 0.01, 0.1], curves(0.9, 0.7, 0.1), [0.01, 0.05, 0.4])
    assert found.rate == 0.01
    assert found.changes == (0.01, 0.05, 0.4)
    assert choose([0.001, 0.01, 0.1], curves(0.9, 0.7, 0.1)).rate == 0.1


def test_losses_are_compared_with_those_of_the_same_batches() -> None:
    noise = [1.0, 5.0] * (rate_search.STEPS // 2)
    losses = [[value - gain for value in noise] for gain in (0.1, 0.4, 0.4, -0.5)]
    assert choose_rate(0.01, [1.0, 2.0, 3.0, 4.0], losses, [0.0] * 4, noise).rate == 2.0


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_rate_that_diverges_is_never_chosen(bad: float) -> None:
    found = choose([0.001, 0.01], curves(0.5, bad), [0.01, bad])
    assert found.rate == 0.001
    assert found.losses[1] == math.inf
    stored = json.loads(json.dumps(found.to_json(), allow_nan=False))
    assert (stored["losses"], stored["changes"]) == ([0.5, None], [0.01, None])


@pytest.mark.parametrize("losses", [(1.0, 1.2), (1.01, 0.97), (math.nan, math.nan)])
def test_where_small_rates_gain_nothing_a_tenth_of_the_default_is_taken(
    losses: tuple[float, float],
) -> None:
    found = choose([0.002, 0.03], curves(*losses))
    assert found.rate == pytest.approx(0.001)
    assert "default" in found.reason


def test_where_no_gain_is_noticeable_the_largest_rate_in_proportion_is_taken() -> None:
    rates = [0.001, 0.003, 0.01, 0.03]
    assert choose(rates, curves(0.999, 0.997, 0.99, 0.97)).rate == 0.03
    assert choose(rates, curves(0.999, 0.997, 0.993, 0.99)).rate == 0.01
    # Behind a rate that overshoots none is looked at.
    assert choose(rates, curves(0.999, 0.9995, 0.99, 0.97)).rate == 0.001
    assert "proportion" in choose(rates, curves(0.999, 0.997, 0.99, 0.97)).reason


def test_batchnorm_forgives_a_larger_change_of_the_weights() -> None:
    rates, losses, changes = [0.001, 0.01], curves(0.999, 0.99), [0.01, 0.12]
    assert choose_rate(0.01, rates, losses, changes, UNTOUCHED).rate == 0.001
    assert choose_rate(0.01, rates, losses, changes, UNTOUCHED, normalised=True).rate == 0.01


def test_where_every_rate_changes_the_weights_much_a_tenth_of_the_default_is_taken() -> None:
    assert choose([0.002, 0.03], curves(0.5, 0.2), [0.2, 0.5]).rate == pytest.approx(0.001)


def test_a_loss_that_is_not_finite_from_the_start_still_gives_a_rate() -> None:
    lost = [math.nan] * rate_search.STEPS
    found = choose_rate(0.01, [0.001], [lost], [math.nan], lost)
    assert found.rate == pytest.approx(0.001)
    assert found.to_json()["start"] is None


def test_the_change_is_a_share_of_the_norm_of_the_trained_weights() -> None:
    before = [torch.tensor([3.0, 0.0]), torch.tensor([4.0])]
    after = [nn.Parameter(torch.tensor([3.0, 0.3])), nn.Parameter(torch.tensor([4.4]))]
    assert float(rate_search._relative_change(after, before)) == pytest.approx(0.1)
    nothing = [torch.zeros(2)]
    assert float(rate_search._relative_change([nn.Parameter(torch.ones(2))], nothing)) == pytest.approx(2**0.5)


def test_a_wild_default_is_corrected() -> None:
    """From a default a thousand times too large, the search comes back to rates that lower the loss."""
    world = sensors(False)
    model = fresh(world)
    names = tuple(name for name, _ in model.named_parameters() if not name.startswith("5."))
    factors = tuple(10.0**power for power in range(-6, 1))
    found = search(model, world.target, world, stage=Stage("all", 1, 3.0, names), factors=factors)
    assert found.rate <= 0.03
    assert found.losses[found.rates.index(found.rate)] < found.start


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("norm", [True, False])
def test_a_gpu_finds_the_same_and_keeps_the_model_too(norm: bool) -> None:
    world, device = sensors(norm), torch.device("cuda", 0)
    model = fresh(world).to(device)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.cuda.get_rng_state(device)
    profile, chosen = world.profile().to(device), make_method("fr")
    feed = Feed(world.target, batch_size=100, device=device)
    network, taps = examine(model, feed.first(2), profile, chosen, None, None)
    stage = plan_stages(chosen, network, profile)[0]
    found = find_rate(model, feed, taps, chosen.objective(profile, device), chosen, stage)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert torch.equal(torch.cuda.get_rng_state(device), state)
    expected = search(fresh(world), world.target, world)
    assert found.rates == expected.rates
    assert found.rate in found.rates
    # Batches are drawn by the generator of the device, so losses are alike, not equal.
    assert found.start == pytest.approx(expected.start, rel=0.1)


def _search_in_group(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/meeting",
        rank=rank,
        world_size=2,
        timeout=datetime.timedelta(seconds=60),
    )
    try:
        world = sensors()
        found = search(fresh(world), world.target, world)
        Path(folder, f"{rank}.json").write_text(json.dumps(found.to_json()))
    finally:
        dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.skipif(not (dist.is_available() and dist.is_gloo_available()), reason="this torch has no gloo")
def test_two_processes_find_the_same_as_one(tmp_path: Path) -> None:
    torch.multiprocessing.spawn(_search_in_group, (str(tmp_path),), 2)
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    assert first == second
    world = sensors()
    alone = search(fresh(world), world.target, world)
    assert first["rate"] == alone.rate
    assert first["losses"] == pytest.approx(alone.losses, rel=1e-3)
