"""FR with free class shares: mends a device where classes have other shares, and does no harm where none changed."""

from __future__ import annotations

import copy

import pytest
import torch
from rehearsed_world import draw, rehearsed, trained
from torch import nn

import shiftmend
from shiftmend.errors import AdaptationError
from shiftmend.methods.fr_shares import FRShares, _collect, _draw_batches, _Mixture

SKEWED = (0.7, 0.2, 0.1, 0.0)


@pytest.mark.slow
@pytest.mark.parametrize("is_shifted", [True, False])
def test_other_shares_do_not_mislead(is_shifted: bool) -> None:
    model, _ = trained()
    site = draw(1000, 21, SKEWED)
    before = site.accuracy(model)
    if is_shifted:
        site = type(site)(0.4 * site.inputs + torch.linspace(1, -1, 8), site.labels)
    free, plain = (
        shiftmend.adapt(model, site.inputs, rehearsed(), method, progress=False, **options)  # type: ignore[arg-type]
        for method, options in (("fr-shares", {}), ("adabn", {}))
    )
    assert site.accuracy(free.model) > before - 0.05
    assert site.accuracy(free.model) > site.accuracy(plain.model) + 0.02
    assert free.after is not None
    assert plain.after is not None
    assert free.after.divergence < plain.after.divergence, "compared with home for the shares that were found"


@pytest.mark.slow
def test_only_normalisation_layers_change() -> None:
    model, _ = trained()
    state = copy.deepcopy(model.state_dict())
    site = draw(300, 22, SKEWED)
    result = shiftmend.adapt(model, site.inputs + 1, rehearsed(), FRShares(steps=5), calibrate=False, progress=False)
    found = result.model.state_dict()
    changed = {name for name, value in found.items() if name not in state or not torch.equal(value, state[name])}
    mapped = {"shiftmend_input_scale", "shiftmend_input_offset"}
    assert {"1.weight", "1.bias"} <= changed
    assert changed <= {"1.weight", "1.bias", "1.running_mean", "1.running_var", "1.num_batches_tracked"} | mapped
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert all(parameter.requires_grad and parameter.grad is None for parameter in result.model.parameters())
    again = shiftmend.adapt(model, site.inputs + 1, rehearsed(), FRShares(steps=5), calibrate=False, progress=False)
    assert all(
        torch.equal(one, other)
        for one, other in zip(result.model.state_dict().values(), again.model.state_dict().values(), strict=True)
    )


def test_what_it_needs_is_said() -> None:
    model, profile = trained()
    with pytest.raises(AdaptationError, match="rehearse"):
        shiftmend.adapt(model, draw(50, 1).inputs, profile, "fr-shares", progress=False)
    with pytest.raises(AdaptationError, match="steps"):
        FRShares(steps=0)
    with pytest.raises(AdaptationError, match="rate"):
        FRShares(share_rate=-1)
    for shares in ((), (0.0, 0.0), (1.0, -0.1), (float("nan"),)):
        with pytest.raises(AdaptationError, match="shares"):
            FRShares(shares=shares)
    with pytest.raises(AdaptationError, match="one for each class"):
        shiftmend.adapt(model, draw(50, 1).inputs, rehearsed(), FRShares(shares=(0.5, 0.5)), progress=False)


@pytest.mark.parametrize("best", range(3))
def test_the_start_that_ends_closest_to_home_is_kept(best: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = trained()
    starts: list[tuple[bool, bool]] = []

    def train(self: FRShares, own: nn.Module, inputs: torch.Tensor, profile: shiftmend.Profile) -> float:
        layer, scale = own.get_submodule("1"), own.get_buffer("shiftmend_input_scale")
        starts.append((layer.training, bool((scale != 1).any())))
        with torch.no_grad():
            own.get_parameter("1.bias").fill_(len(starts))
        return 0.1 if len(starts) == best + 1 else float("nan") if len(starts) == 1 else 0.5

    monkeypatch.setattr(FRShares, "_train", train)
    site = draw(100, 23, SKEWED)
    result = shiftmend.adapt(model, 2 * site.inputs, rehearsed(), "fr-shares", calibrate=False, progress=False)
    assert starts == [(False, False), (True, False), (False, True)]
    assert torch.equal(result.model.get_parameter("1.bias"), torch.full((16,), best + 1.0))
    assert bool((result.model.get_buffer("shiftmend_input_scale") != 1).any()) == (best == 2)


def test_known_shares_are_not_trained() -> None:
    mixture = _Mixture(rehearsed(), torch.device("cpu"), (6.0, 3.0, 1.0, 0.0))
    assert not mixture.scores.requires_grad
    assert torch.allclose(mixture.shares, torch.tensor([0.6, 0.3, 0.1, 0.0]), atol=1e-5)
    assert _Mixture(rehearsed(), torch.device("cpu")).scores.requires_grad


def test_many_inputs_are_thinned_out_evenly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shiftmend.methods.fr_shares.MAX_KEPT_VALUES", 100)
    numbers = torch.arange(1000.0).unsqueeze(1)
    kept = _collect(iter(numbers.split(37))).flatten()
    assert 40 <= len(kept) <= 100
    assert torch.equal(kept.diff(), torch.full((len(kept) - 1,), float(kept[1] - kept[0])))


def test_every_sample_comes_before_any_comes_again() -> None:
    rows = torch.cat([*_draw_batches(600, 7, torch.Generator().manual_seed(0))])
    assert len(rows) == 7 * 256
    assert torch.equal(rows[:600].sort().values, torch.arange(600))
    assert next(_draw_batches(30, 1, torch.Generator())).tolist().__len__() == 30


def test_networks_without_normalisation_stay_as_they_came() -> None:
    network = nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 4))
    assert FRShares().stages(type("Bare", (), {"model": network})(), None) == []
