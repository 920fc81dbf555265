from __future__ import annotations

import copy
import math
from collections import OrderedDict
from io import BytesIO

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

import shiftmend
from shiftmend.errors import ShiftmendError
from shiftmend.stats.histograms import Bins
from shiftmend.stats.stats_layer import StatsLayer


def sample(count: int = 300, units: int = 4, seed: int = 0) -> Tensor:
    return torch.randn(count, units, generator=torch.Generator().manual_seed(seed)) * 2 + 1


def collected(values: Tensor, layer: StatsLayer | None = None, batch: int = 64) -> StatsLayer:
    """A layer that has seen the values in two passes."""
    layer = layer or StatsLayer(values.shape[1])
    for mode in ("range", "counts"):
        layer.track(mode)
        for part in values.split(batch):
            layer(part)
    return layer


def test_passes_its_input_through_in_every_mode() -> None:
    values = sample()
    layer = StatsLayer(4)
    for mode in ("off", "range", "counts", "align"):
        assert layer.track(mode)(values) is values
    assert layer.track("off") is layer


def test_counts_and_ranges_against_numpy() -> None:
    values = sample()
    layer = collected(values)
    x = values.double().numpy()
    low, high = x.min(0), x.max(0)
    np.testing.assert_allclose(layer.low.numpy(), low, rtol=1e-7)
    np.testing.assert_allclose(layer.high.numpy(), high, rtol=1e-7)
    assert int(layer.samples) == 300
    logits = ((x - low) / (high - low))[..., None] * np.arange(1, 11)
    logits = (logits - np.concatenate([[0], (np.arange(9) / 8).cumsum()])) / 0.01
    weight = np.exp(logits - logits.max(-1, keepdims=True))
    expected = (weight / weight.sum(-1, keepdims=True)).sum(0)
    np.testing.assert_allclose(layer.counts.numpy(), expected, atol=300 * 1e-4)


@pytest.mark.parametrize("bins", [Bins(), Bins(8, "paper"), Bins(8, "reference", 0.05)], ids=str)
def test_the_same_numbers_as_a_profile(bins: Bins) -> None:
    torch.manual_seed(0)
    layers = OrderedDict(
        below=nn.Sequential(nn.Linear(5, 8), nn.ReLU()),
        stats=StatsLayer(8, bins),
        head=nn.Linear(8, 3),
        after=StatsLayer(3, bins),
    )
    model = nn.Sequential(layers).eval()
    inputs = torch.randn(500, 5)
    made = shiftmend.profile(model, inputs, batch_size=100, bins=bins, head="head", progress=False)
    with torch.no_grad():
        for mode in ("range", "counts"):
            for layer in (layers["stats"], layers["after"]):
                layer.track(mode)
            for batch in inputs.split(100):
                model(batch)
    for layer, name in ((layers["stats"], "features"), (layers["after"], "logits")):
        mine, theirs = layer.histogram(), made.taps[name]
        assert torch.equal(mine.low, theirs.low)
        assert torch.equal(mine.high, theirs.high)
        torch.testing.assert_close(mine.counts, theirs.counts, rtol=1e-6, atol=1e-5)
        assert (mine.samples, mine.bins) == (theirs.samples, theirs.bins)


def test_the_loss_is_the_mean_divergence_of_the_last_batch() -> None:
    layer = collected(sample())
    target = sample(seed=1) * 1.5
    layer.track("align")
    layer(sample(seed=2))
    layer(target)
    stored = layer.histogram()
    p = stored.counts.double().numpy() / 300
    q = stored.count(target).double().numpy()
    each = ((p - q) * (np.log(p + 1e-8) - np.log(q + 1e-8))).sum(1)
    np.testing.assert_allclose(float(layer.loss()), each.mean() / math.log(10), rtol=1e-4)
    np.testing.assert_allclose(float(layer.loss("symmetric-kl")), each.mean() / 2, rtol=1e-4)
    for kind in ("psi", "symmetric-kl", "kl-source-target", "kl-target-source"):
        assert torch.equal(layer.loss(kind), stored.mean_divergence(stored.count(target), kind))
    layer(sample())
    assert float(layer.loss()) < 1e-6


def test_constant_units_take_no_part_in_the_loss() -> None:
    values = sample()
    values[:, 2] = 5.0
    layer = collected(values)
    moved = values.clone()
    moved[:, 2] += 100
    layer.track("align")(moved)
    assert float(layer.loss()) < 1e-6


def test_gradients_reach_the_layers_below_and_only_those() -> None:
    torch.manual_seed(0)
    below, layer, above = nn.Linear(5, 4), StatsLayer(4), nn.Linear(4, 2)
    model = nn.Sequential(below, layer, above)
    inputs = torch.randn(400, 5)
    with torch.no_grad():
        for mode in ("range", "counts"):
            layer.track(mode)
            model(inputs)
    layer.track("align")
    model(inputs * 1.5 + 0.5)
    loss = layer.loss()
    loss.backward()
    assert below.weight.grad is not None
    assert bool(torch.isfinite(below.weight.grad).all())
    assert float(below.weight.grad.abs().sum()) > 0
    assert above.weight.grad is None
    assert [buffer.requires_grad for buffer in layer.buffers()] == [False] * 5


@pytest.mark.slow
def test_descending_the_loss_restores_the_features() -> None:
    torch.manual_seed(0)
    below, layer = nn.Linear(3, 4), StatsLayer(4)
    inputs = torch.randn(1000, 3)
    with torch.no_grad():
        collected(below(inputs), layer, 1000)
    layer.track("align")
    shifted = inputs + torch.tensor([0.5, -0.5, 0.3])
    optimiser = torch.optim.SGD(below.parameters(), lr=0.3, momentum=0.9)
    losses = []
    for _ in range(60):
        layer(below(shifted))
        loss = layer.loss()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(float(loss.detach()))
    assert losses[0] > 0.05
    assert losses[-1] < losses[0] / 20


@pytest.mark.parametrize("way", ["torch.save", "safetensors"])
def test_statistics_ride_along_in_the_state_dict(way: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), StatsLayer(4), nn.Linear(4, 2))
    with torch.no_grad():
        for mode in ("range", "counts"):
            model[1].track(mode)
            model(sample())
    if way == "torch.save":
        buffer = BytesIO()
        torch.save(model.state_dict(), buffer)
        buffer.seek(0)
        state = torch.load(buffer, weights_only=True)
    else:
        state = safetensors.torch.load(safetensors.torch.save(model.state_dict()))
    fresh = nn.Sequential(nn.Linear(4, 4), StatsLayer(4), nn.Linear(4, 2))
    fresh.load_state_dict(state)
    own = {name for name in state if name.startswith("1.")}
    assert own == {"1.counts", "1.cut", "1.high", "1.low", "1.samples"}
    for one in (model, fresh):
        one[1].track("align")
        one(sample(seed=1))
    assert torch.equal(fresh[1].loss(), model[1].loss())
    assert fresh[1].histogram().samples == 300


def test_a_copy_can_be_made_at_any_time() -> None:
    model = nn.Sequential(nn.Linear(4, 4), StatsLayer(4), nn.Linear(4, 2))
    with torch.no_grad():
        for mode in ("range", "counts"):
            model[1].track(mode)
            model(sample())
    model[1].track("align")
    model(sample(seed=1))
    expected = model[1].loss()
    twin = copy.deepcopy(model)
    assert torch.equal(model[1].loss(), expected)  # the original still has its batch
    assert twin[1].mode == "align"
    assert torch.equal(twin[1].counts, model[1].counts)
    with pytest.raises(ShiftmendError, match="a batch to compare"):
        twin[1].loss()
    twin(sample(seed=1))
    assert torch.equal(twin[1].loss(), expected)
    twin[1].track("range")
    assert int(model[1].samples) == 300  # nothing is shared
    buffer = BytesIO()
    torch.save(model, buffer)


@pytest.mark.parametrize("inplace", [False, True])
def test_layers_that_work_in_place_may_stand_around_it(inplace: bool) -> None:
    def results(inplace: bool) -> tuple[Tensor, ...]:
        torch.manual_seed(0)
        layer, behind = StatsLayer(6), StatsLayer(6)
        relus = [nn.ReLU(inplace=inplace) for _ in range(2)]
        model = nn.Sequential(nn.Linear(4, 6), relus[0], nn.Linear(6, 6), layer, relus[1], behind, nn.Linear(6, 2))
        with torch.no_grad():
            for mode in ("range", "counts"):
                layer.track(mode)
                behind.track(mode)
                model(sample())
        layer.track("align")
        behind.track("align")
        model(sample(seed=1) * 2)
        loss = layer.loss() + behind.loss()
        loss.backward()
        assert bool((layer.low < 0).any())  # from before the second ReLU
        return layer.counts, behind.counts, loss, model[0].weight.grad

    for ours, reference in zip(results(inplace), results(False), strict=True):
        torch.testing.assert_close(ours, reference)


SHAPES = {
    "map [N, C, H, W]": ((10, 4, 5, 6), 1, (0, 2, 3, 1)),
    "signal [N, C, L]": ((10, 4, 30), 1, (0, 2, 1)),
    "tokens [N, T, C]": ((10, 30, 4), -1, (0, 1, 2)),
    "tokens [N, T, C], axis 2": ((10, 30, 4), 2, (0, 1, 2)),
    "volume [N, C, D, H, W]": ((5, 4, 3, 4, 5), 1, (0, 2, 3, 4, 1)),
    "flat [N, C]": ((300, 4), 1, (0, 1)),
    "flat [N, C], axis -1": ((300, 4), -1, (0, 1)),
}


@pytest.mark.parametrize("name", SHAPES)
def test_each_position_is_a_sample_of_its_channel(name: str) -> None:
    shape, axis, to_rows = SHAPES[name]
    scale = torch.tensor([1.0, 10.0, 100.0, 1000.0])
    values = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    values = (values.movedim(axis, -1) * scale).movedim(-1, axis)
    layer = StatsLayer(4, channel_axis=axis)
    for mode in ("range", "counts"):
        assert layer.track(mode)(values) is values
    rows = values.numpy().transpose(to_rows).reshape(-1, 4)
    assert int(layer.samples) == len(rows) == 300
    np.testing.assert_array_equal(layer.low.numpy(), rows.min(0))
    np.testing.assert_array_equal(layer.high.numpy(), rows.max(0))
    assert torch.equal(layer.counts, collected(torch.from_numpy(rows), batch=300).counts)
    layer.track("align")(values)
    assert float(layer.loss()) < 1e-6


def test_one_number_per_sample_is_one_unit() -> None:
    layer = StatsLayer(1)
    for mode in ("range", "counts"):
        layer.track(mode)(torch.linspace(0, 1, 50))
    assert int(layer.samples) == 50
    assert (float(layer.low), float(layer.high)) == (0, 1)


@pytest.mark.slow
def test_batches_do_not_matter() -> None:
    whole = collected(sample(), batch=300)
    for batch in (1, 7, 299):
        parts = collected(sample(), batch=batch)
        assert torch.equal(parts.low, whole.low)
        assert torch.equal(parts.high, whole.high)
        assert int(parts.samples) == 300
        torch.testing.assert_close(parts.counts, whole.counts, rtol=1e-5, atol=1e-3)


def test_tracking_again_starts_anew() -> None:
    layer = collected(sample() * 100)
    collected(sample(), layer)
    fresh = collected(sample())
    for ours, theirs in zip(layer.buffers(), fresh.buffers(), strict=True):
        assert torch.equal(ours, theirs)
    layer.track("counts")
    assert not bool(layer.counts.any())
    assert torch.equal(layer.low, fresh.low)  # the range stays


def test_a_histogram_once_taken_does_not_change() -> None:
    layer = collected(sample())
    taken = layer.histogram()
    counts, low = taken.counts.clone(), taken.low.clone()
    layer.track("range")
    assert torch.equal(taken.counts, counts)
    assert torch.equal(taken.low, low)


def test_off_tracks_nothing() -> None:
    layer = collected(sample())
    counts = layer.counts.clone()
    layer.track("off")(sample() * 100)
    assert torch.equal(layer.counts, counts)
    assert StatsLayer(4)(torch.randn(3, 9)).shape == (3, 9)  # not even the number of units


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_inputs_of_any_precision(dtype: torch.dtype) -> None:
    values = sample().to(dtype)
    layer = collected(values)
    assert layer.counts.dtype == torch.float32
    torch.testing.assert_close(layer.counts, collected(values.float()).counts, rtol=1e-4, atol=1e-2)
    layer.track("align")(values)
    assert float(layer.loss()) < 1e-5


def test_wrong_use_is_one_clear_error() -> None:
    layer = StatsLayer(4)
    with pytest.raises(ShiftmendError, match=r"off, range.*'train'"):
        layer.track("train")  # type: ignore[arg-type]
    for mode in ("counts", "align"):
        with pytest.raises(ShiftmendError, match=f"before mode '{mode}'"):
            layer.track(mode)  # type: ignore[arg-type]
    layer.track("range")
    with pytest.raises(ShiftmendError, match="ranges before mode"):
        layer.track("counts")  # no pass in between
    layer.track("range")(sample())
    with pytest.raises(ShiftmendError, match="counts before mode"):
        layer.track("align")
    layer.track("counts")
    with pytest.raises(ShiftmendError, match="counts before mode"):
        layer.track("align")
    layer(sample())
    with pytest.raises(ShiftmendError, match="a batch to compare"):
        layer.loss()
    layer.track("align")
    with pytest.raises(ShiftmendError, match="a batch to compare"):
        layer.loss()
    with pytest.raises(ShiftmendError, match=r"4 units.*axis 1.*\[10, 5\]"):
        layer(torch.randn(10, 5))
    with pytest.raises(ShiftmendError, match=r"axis -1.*got 7"):
        StatsLayer(4, channel_axis=-1).track("range")(torch.randn(2, 4, 7))
    assert layer.mode == "align"


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_numbers_that_are_none_are_noticed(bad: float) -> None:
    values = sample()
    values[100, 2] = bad
    layer = StatsLayer(4).track("range")
    for part in values.split(64):
        layer(part)
    with pytest.raises(ShiftmendError, match=r"infinity in 1 unit"):
        layer.track("counts")


def test_a_number_that_is_none_in_the_second_pass_is_noticed() -> None:
    values = sample()
    layer = StatsLayer(4).track("range")
    layer(values)
    values[100, 2] = float("nan")
    layer.track("counts")(values)
    with pytest.raises(ShiftmendError, match="NaN, got 1 unit"):
        layer.track("align")


def test_a_network_in_half_precision_keeps_its_statistics_in_full() -> None:
    """Half precision counts up to 2048, bfloat16 up to 256; then one more sample changes nothing."""
    model = nn.Sequential(nn.Linear(4, 4), StatsLayer(4), nn.Linear(4, 2)).bfloat16()
    with pytest.raises(ShiftmendError, match="bfloat16"):
        model[1].track("range")
    model[1].float()
    with torch.no_grad():
        for mode in ("range", "counts"):
            model[1].track(mode)
            for _ in range(20):
                model(sample().bfloat16())
    np.testing.assert_allclose(model[1].counts.sum(1).numpy(), 6000, rtol=1e-5)


def test_what_it_prints_says_what_it_is() -> None:
    assert repr(StatsLayer(4, Bins(8, "paper"))) == "StatsLayer(units=4, bins=8, layout=paper, mode=off)"


def test_counts_are_not_loaded_into_other_bins() -> None:
    layer = StatsLayer(3)
    for mode in ("range", "counts"):
        layer.track(mode)(torch.randn(50, 3))
    with pytest.raises(RuntimeError, match=r"\[8\.0, 0\.01\].*\[8\.0, 0\.05\]"):
        StatsLayer(3, Bins(temperature=0.05)).load_state_dict(layer.state_dict())
    StatsLayer(3).load_state_dict(layer.state_dict())
    older = layer.state_dict() | {"cut": torch.tensor([8, 0.01], dtype=torch.float64)}
    StatsLayer(3).load_state_dict(older)
    StatsLayer(3).bfloat16().load_state_dict(layer.bfloat16().state_dict())


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"units": 0}, r"units.*got 0"),
        ({"units": -3}, "got -3"),
        ({"units": "3"}, "got '3'"),
        ({"bins": 10}, "bins.*got 10"),
        ({"bins": []}, r"bins.*got \[\]"),
        ({"channel_axis": "last"}, "axis 'last'"),
        ({"channel_axis": 0}, "axis 0"),
    ],
)
def test_a_layer_of_nonsense_is_not_made(wrong: dict[str, object], sentence: str) -> None:
    with pytest.raises(ShiftmendError, match=sentence):
        StatsLayer(**{"units": 3, **wrong})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("batch", "sentence"),
    [
        (torch.zeros(()), r"3 units.*\[\]"),
        (torch.zeros(0, 3), r"3 units.*\[0, 3\]"),
        (torch.zeros(4, 3), r"3 units.*\[4, 3\]"),
    ],
)
def test_a_batch_that_cannot_be_tracked_is_refused(batch: Tensor, sentence: str) -> None:
    layer = StatsLayer(3, channel_axis=2).track("range")
    with pytest.raises(ShiftmendError, match=sentence):
        layer(batch)
