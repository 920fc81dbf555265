"""What is seen of a model without labels, against numpy in float64."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from worlds import sensors
from zoo import ZOO

import shiftmend
from shiftmend.inputs.feed import Feed
from shiftmend.verification.signals import SignalReader, class_logits, observe


def certainty_in_numpy(logits: np.ndarray) -> tuple[float, float]:
    """Mean entropy and confidence of logits `[N, classes]`."""
    entropies, confidences = [], []
    for row in logits.astype(np.float64):
        weights = np.exp(row - row.max())
        p = weights / weights.sum()
        entropies.append(-sum(value * math.log(value) for value in p if value > 0))
        confidences.append(p.max())
    return float(np.mean(entropies)), float(np.mean(confidences))


def marginals_in_numpy(values: np.ndarray, home: shiftmend.stats.statistics.Histogram) -> float:
    """Mean over units of (KL + KL) / ln 10 between soft histograms of 10 bins."""
    low, high = home.low.double().numpy(), home.high.double().numpy()
    cuts = np.arange(9) / 8
    offsets = np.concatenate([[0], -cuts.cumsum()])
    x = (values.astype(np.float64) - low) / (high - low)
    scores = (x[..., None] * np.arange(1, 11) + offsets) / 0.01
    mass = np.exp(scores - scores.max(-1, keepdims=True))
    q = (mass / mass.sum(-1, keepdims=True)).mean(0)
    p = home.counts.double().numpy() / home.samples
    each = ((p - q) * np.log((p + 1e-8) / (q + 1e-8))).sum(1) / math.log(10)
    return float(each.mean())


@pytest.mark.parametrize("batch_size", [64, 600])
def test_all_signals_against_numpy(batch_size: int) -> None:
    world = sensors()
    profile = world.profile()
    seen = observe(world.model, Feed(world.target, batch_size=batch_size), profile)
    with torch.no_grad():
        features = world.model[:6](world.target)
        logits = world.model[6](features)
    assert profile.unusable == {"features": 0, "logits": 0}  # what the sums in numpy take for granted
    assert (seen.get("entropy"), seen.get("confidence")) == pytest.approx(certainty_in_numpy(logits.numpy()), rel=1e-5)
    expected = marginals_in_numpy(features.numpy(), profile.taps["features"])
    expected += marginals_in_numpy(logits.numpy(), profile.taps["logits"])
    assert seen.get("marginals") == pytest.approx(expected, rel=5e-3)
    assert seen.verification == shiftmend.verify(world.model, world.target, profile, batch_size=batch_size)


def test_a_part_of_the_data_is_the_same_part_each_time() -> None:
    world = sensors()
    profile, feed = world.profile(), Feed(world.target)
    part = torch.cat(list(feed.subset(100, seed=0)))
    assert len(part) == 100
    seen = observe(world.model, feed, profile, limit=100)
    assert seen == observe(world.model, feed, profile, limit=100)
    assert seen.verification is not None
    assert seen.verification.samples == 100
    whole = observe(world.model, Feed(part), profile)
    assert (seen.get("entropy"), seen.get("marginals")) == pytest.approx(
        (whole.get("entropy"), whole.get("marginals")), rel=1e-5
    )
    assert seen.verification.divergence == pytest.approx(whole.verification.divergence, rel=1e-5)


def test_without_a_profile_there_is_certainty_alone() -> None:
    world = sensors()
    seen, beside = (observe(world.model, Feed(world.target), profile) for profile in (None, world.profile()))
    assert (seen.verification, seen.get("marginals")) == (None, None)
    assert (seen.get("entropy"), seen.get("confidence")) == (
        beside.get("entropy"),
        beside.get("confidence"),
    )


def test_one_output_is_no_class() -> None:
    case = ZOO["regressor"]
    model = case.model()
    seen = observe(model, Feed(case.inputs()), shiftmend.profile(model, case.inputs(), progress=False))
    assert (seen.get("entropy"), seen.get("confidence")) == (None, None)
    assert seen.verification is not None
    assert seen.get("marginals") == pytest.approx(0, abs=1e-5)
    column = nn.Linear(5, 1)
    assert observe(column, Feed(case.inputs()), None).get("entropy") is None


@pytest.mark.parametrize("name", ["tuple", "dict"])
def test_several_outputs_must_be_told_apart(name: str) -> None:
    case = ZOO[name]
    model = case.model()
    profile = shiftmend.profile(model, case.inputs(), output=case.output, progress=False)
    without = observe(model, Feed(case.inputs()), profile)
    named = observe(model, Feed(case.inputs()), profile, case.output)
    # An entry called `logits` is the output without being named.
    assert (without.get("entropy") is None) == (name == "tuple")
    assert without.verification == named.verification
    with torch.no_grad():
        logits = model(case.inputs())[case.output]
    assert (named.get("entropy"), named.get("confidence")) == pytest.approx(
        certainty_in_numpy(logits.numpy()), rel=1e-5
    )


class Whole(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        assert not torch.is_grad_enabled()  # a look builds no graph
        return x.long()


def test_whole_numbers_are_no_logits() -> None:
    assert observe(Whole(), Feed(torch.randn(8, 3)), None).get("entropy") is None


def test_classes_of_feature_maps_and_of_tokens() -> None:
    dense = nn.Sequential(nn.Conv2d(1, 4, 1), nn.ReLU(), nn.Conv2d(4, 3, 1)).eval()
    inputs = torch.randn(10, 1, 2, 5)
    seen = observe(dense, Feed(inputs), shiftmend.profile(dense, inputs, progress=False))
    with torch.no_grad():
        maps = dense(inputs).permute(0, 2, 3, 1).reshape(-1, 3).numpy()
    assert (seen.get("entropy"), seen.get("confidence")) == pytest.approx(certainty_in_numpy(maps), rel=1e-5)
    alone = observe(dense, Feed(inputs), None)
    assert (alone.get("entropy"), alone.get("confidence")) == (
        seen.get("entropy"),
        seen.get("confidence"),
    )

    tokens = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)).eval()
    inputs = torch.randn(40, 5, 4)
    seen = observe(tokens, Feed(inputs), shiftmend.profile(tokens, inputs, progress=False))
    with torch.no_grad():
        each = tokens(inputs).reshape(-1, 3).numpy()
    assert (seen.get("entropy"), seen.get("confidence")) == pytest.approx(certainty_in_numpy(each), rel=1e-5)


@pytest.mark.parametrize(
    ("shape", "axis", "classes", "brought"),
    [
        ((5, 2), 1, None, (5, 2)),  # two classes are classes
        ((5, 2, 3, 4), -1, None, (5, 4, 2, 3)),
        ((5, 3), 2, None, (5, 3)),  # fewer axes than the tap has
        ((5, 3), -3, None, (5, 3)),
        ((5, 3), -2, 5, (5, 3)),  # that would be the samples, of which there happen to be as many
        ((5, 2, 3, 4), -1, 4, (5, 4, 2, 3)),
        ((5, 2, 3, 4), -1, 2, (5, 2, 3, 4)),  # transposed behind the head
        ((5, 2, 3, 4), -1, 7, (5, 4, 2, 3)),
        ((5, 4, 3, 4), -1, 4, (5, 4, 4, 3)),  # both might be: the tap decides
    ],
)
def test_classes_are_brought_to_the_first_axis_behind_the_samples(
    shape: tuple[int, ...], axis: int, classes: int | None, brought: tuple[int, ...]
) -> None:
    logits = class_logits(torch.randn(shape), None, axis, classes)
    assert logits is not None
    assert logits.shape == brought


class Tokens(nn.Module):
    def __init__(self, transposed: bool) -> None:
        super().__init__()
        self.below, self.head, self.transposed = nn.Linear(3, 8), nn.Linear(8, 4), transposed

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.below(x).relu())
        return logits.mT if self.transposed else logits


@pytest.mark.parametrize("profiled", [True, False])
@pytest.mark.parametrize("transposed", [True, False])
def test_predictions_of_tokens_are_over_classes_wherever_they_stand(transposed: bool, profiled: bool) -> None:
    model, inputs = Tokens(transposed), torch.randn(20, 7, 3)
    profile = shiftmend.profile(model, inputs) if profiled else None
    result = shiftmend.adapt(model, inputs, profile, "pl", epochs=1, progress=False)
    with torch.no_grad():
        logits = model.head(model.below(inputs).relu()).reshape(-1, 4).numpy()
    first = result.history[0]
    assert (first.signals["entropy"], first.signals["confidence"]) == pytest.approx(
        certainty_in_numpy(logits), rel=1e-5
    )


class Fixed(nn.Module):
    def __init__(self, logits: Tensor) -> None:
        super().__init__()
        self.logits = logits

    def forward(self, x: Tensor) -> Tensor:
        return self.logits[: len(x)]


def test_certain_and_impossible_classes_have_no_entropy_of_their_own() -> None:
    masked = torch.tensor([[0.0, 0.0, -torch.inf], [1e4, 0.0, -1e4]])
    seen = observe(Fixed(masked), Feed(torch.zeros(2, 1)), None)
    assert seen.get("entropy") == pytest.approx(math.log(2) / 2)
    assert seen.get("confidence") == pytest.approx(0.75)
    even = observe(Fixed(torch.zeros(7, 5)), Feed(torch.zeros(7, 1)), None)
    assert (even.get("entropy"), even.get("confidence")) == pytest.approx((math.log(5), 0.2))


def test_looking_changes_nothing() -> None:
    case = ZOO["tabular"]
    model = case.model()
    profile = shiftmend.profile(model, case.inputs(), progress=False)
    model.train()
    model[3].eval()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    seen = observe(model, Feed(case.inputs()), profile)
    assert [module.training for module in model] == [True, True, True, False, True, True]
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert seen == observe(model.eval(), Feed(case.inputs()), profile)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("most", [None, 100, 100_000])
def test_a_captured_look_follows_the_weights_and_survives_other_work(most: int | None) -> None:
    world, device = sensors(), torch.device("cuda", 0)
    model, profile = copy.deepcopy(world.model).to(device).eval(), world.profile()
    feed = Feed(world.target, device=device)
    watch = SignalReader(model, feed, profile, limit=most, capture=True)
    for factor in (1.0, 0.9, 1.3):
        with torch.no_grad():
            for weight in model.parameters():
                weight.mul_(factor)
        # would overwrite memory that the graph reads and nobody holds
        noise = [torch.full((size,), 1 << 40, device=device) for size in (100, 512, 1024, 4096) for _ in range(20)]
        seen, expected = watch(), observe(model, feed, profile, limit=most)
        assert watch._pass._replay is not None
        assert seen.verification is not None
        assert expected.verification is not None
        assert seen.verification.divergence == pytest.approx(expected.verification.divergence, rel=1e-5)
        assert seen.get("marginals") == pytest.approx(expected.get("marginals"), rel=1e-5)
        assert (seen.get("entropy"), seen.get("confidence")) == pytest.approx(
            (expected.get("entropy"), expected.get("confidence")), rel=1e-5
        )
        del noise
