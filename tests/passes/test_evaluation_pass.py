"""What modules give for every sample."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from worlds import sensors

from shiftmend.inputs.feed import Feed
from shiftmend.introspection.taps import Tap
from shiftmend.passes.evaluation_pass import ActivationReader

FEATURES, LOGITS = Tap.parse("features", "4"), Tap.parse("logits", "6")


@pytest.mark.parametrize("batch_size", [7, 1000])
def test_every_sample_is_seen_once_in_order_in_eval_mode_and_nothing_changes(batch_size: int) -> None:
    world = sensors()
    expected = world.model[:5](world.target).detach()
    model = copy.deepcopy(world.model).train()
    before = copy.deepcopy(model.state_dict())
    look = ActivationReader(model, Feed(world.target, batch_size=batch_size))
    seen = look({"features": FEATURES})
    assert list(seen) == ["features"]
    torch.testing.assert_close(seen["features"], expected)
    assert not seen["features"].requires_grad
    assert all(module.training for module in model.modules())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_the_network_runs_in_the_precision_asked_for() -> None:
    world = sensors()
    precision = functools.partial(torch.autocast, "cpu", torch.bfloat16)
    seen = ActivationReader(world.model, Feed(world.target, batch_size=100), precision)({"features": FEATURES})[
        "features"
    ]
    full = world.model[:5](world.target).detach()
    assert seen.dtype == torch.bfloat16
    torch.testing.assert_close(seen.float(), full, rtol=0.05, atol=0.1)
    assert not torch.equal(seen.float(), full)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_captured_look_follows_weights_and_taps() -> None:
    world, device = sensors(), torch.device("cuda", 0)
    model = copy.deepcopy(world.model).to(device).eval()
    feed = Feed(world.target, batch_size=16, device=device)
    captured, plain = ActivationReader(model, feed, capture=True), ActivationReader(model, feed)
    for factor, taps in ((1.0, {"features": FEATURES}), (0.9, {"features": FEATURES}), (1.1, {"logits": LOGITS})):
        with torch.no_grad():
            for weight in model.parameters():
                weight.mul_(factor)
        seen, expected = captured(taps), plain(taps)
        assert captured._pass._replay is not None
        assert seen.keys() == expected.keys()
        for name, values in expected.items():
            torch.testing.assert_close(seen[name], values)
