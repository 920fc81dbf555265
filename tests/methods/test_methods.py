from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from torch import nn
from worlds import sensors
from zoo import ZOO

import shiftmend
from shiftmend.engine.method import Network
from shiftmend.errors import AdaptationError
from shiftmend.introspection.blocks import split_blocks
from shiftmend.introspection.trace import trace
from shiftmend.methods import METHODS, method
from shiftmend.methods.bufr import BUFR
from shiftmend.methods.fr import FR


def network(name: str) -> Network:
    case = ZOO[name]
    model = case.model()
    return Network(model, split_blocks(model, trace(model, case.inputs(2), output=case.output)))


def test_source_only_changes_nothing() -> None:
    world = sensors()
    result = shiftmend.adapt(world.model, world.target, world.profile(), "source-only")
    assert all(
        torch.equal(a, b)
        for a, b in zip(result.model.state_dict().values(), world.model.state_dict().values(), strict=True)
    )
    assert result.before == result.after
    assert len(result.history) == 1


def test_source_only_and_adabn_take_any_model_without_a_profile() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Softmax(1))
    for name in ("source-only", "adabn"):
        result = shiftmend.adapt(model, torch.randn(50, 3), method=name, progress=False)
        assert result.after is None


def test_adabn_averages_the_statistics_of_all_batches() -> None:
    world = sensors()
    result = shiftmend.adapt(
        world.model, world.target, world.profile(), "adabn", batch_size=100, seed=3, progress=False
    )
    means, variances = [], []
    hidden = world.model[0](world.target).detach().double().numpy()
    for epoch in (1, 2):
        order = torch.randperm(600, generator=torch.Generator().manual_seed(3 * 1_000_003 + epoch)).numpy()
        for start in range(0, 600, 100):
            part = hidden[order[start : start + 100]]
            means.append(part.mean(0))
            variances.append(part.var(0, ddof=1))
    np.testing.assert_allclose(result.model[1].running_mean.numpy(), np.mean(means, 0), atol=1e-5)
    np.testing.assert_allclose(result.model[1].running_var.numpy(), np.mean(variances, 0), rtol=1e-4)
    assert result.model[1].momentum == 0.1
    assert torch.equal(result.model[0].weight, world.model[0].weight)


def test_statistics_that_overflow_are_blamed_on_the_inputs_since_nothing_is_trained() -> None:
    world = sensors()
    with pytest.raises(AdaptationError, match=r"epoch 1 \(statistics\)"):
        shiftmend.adapt(world.model, world.target * 1e25, None, "adabn", progress=False)


@pytest.mark.slow
def test_adabn_without_batch_norm_is_the_identity_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    world = sensors(norm=False)
    result = shiftmend.adapt(world.model, world.target, world.profile(), "adabn")
    shiftmend.stream(world.model, world.profile(), "adabn").step(world.target)
    assert torch.equal(result.model(world.target), world.model(world.target))
    assert caplog.text.count("adabn has nothing to change in this model") == 2


@pytest.mark.slow
def test_fr_trains_everything_below_the_head_at_the_published_rates() -> None:
    world = sensors()
    profile = world.profile()
    cnn, resnet = network("paper-cnn"), network("resnet18")
    (stage,) = FR().stages(cnn, profile)
    assert (stage.epochs, stage.learning_rate, len(stage.parameters)) == (150, 1.0, 14)
    (stage,) = FR().stages(resnet, profile)
    assert stage.learning_rate == 0.001
    assert not any(name.startswith("fc.") for name in stage.parameters)


@pytest.mark.slow
def test_other_networks_get_a_careful_default() -> None:
    profile = sensors().profile()
    names = ("signal", "tabular", "no-norm", "vit")
    for made, layerwise, staged in ((FR(), 3e-3, 1e-3), (BUFR(), 1e-2, 3e-3)):
        rates = {name: made.stages(network(name), profile)[0].learning_rate for name in names}
        assert rates == pytest.approx({**dict.fromkeys(names, layerwise), "vit": staged})


@pytest.mark.slow
def test_bufr_published_schedules() -> None:
    profile = sensors().profile()
    cnn = BUFR(epochs_per_block=30).stages(network("paper-cnn"), profile)
    np.testing.assert_allclose([s.learning_rate for s in cnn], [1, 0.6667, 0.4444, 0.2963], atol=1e-4)
    resnet = BUFR(epochs_per_block=30).stages(network("resnet18"), profile)
    np.testing.assert_allclose([s.learning_rate for s in resnet], [0.1, 0.02, 0.004, 0.0008, 0.00016])
    assert [s.epochs for s in resnet] == [30] * 5
    sizes = [len(s.parameters) for s in resnet]
    assert sizes == sorted(sizes)
    assert all(set(a.parameters) < set(b.parameters) for a, b in itertools.pairwise(resnet))
    constant = BUFR(learning_rate=0.5, decay=1.0, epochs_per_block=3).stages(network("paper-cnn"), profile)
    assert {(s.learning_rate, s.epochs) for s in constant} == {(0.5, 3)}


def test_blocks_that_end_by_themselves_take_larger_steps_unless_a_rate_is_given() -> None:
    profile = sensors().profile()
    cnn = BUFR().stages(network("paper-cnn"), profile)
    np.testing.assert_allclose([s.learning_rate for s in cnn], [2, 1.3333, 0.8889, 0.5926], atol=1e-4)
    resnet = BUFR().stages(network("resnet18"), profile)
    np.testing.assert_allclose([s.learning_rate for s in resnet], [0.1, 0.04, 0.016, 0.0064, 0.00256])
    assert {(s.epochs, s.settles) for s in (*cnn, *resnet)} == {(30, True)}
    given = BUFR(learning_rate=0.5, decay=5.0).stages(network("paper-cnn"), profile)
    np.testing.assert_allclose([s.learning_rate for s in given], [0.5, 0.1, 0.02, 0.004])


def test_many_blocks_keep_the_published_total_decay() -> None:
    profile = sensors().profile()
    model = nn.Sequential(*(nn.Linear(6, 6) for _ in range(12)), nn.Linear(6, 2))
    many = Network(model, split_blocks(model, trace(model, torch.randn(2, 6))))
    rates = [stage.learning_rate for stage in BUFR(epochs_per_block=30).stages(many, profile)]
    assert len(rates) == 12
    assert rates[0] / rates[-1] == pytest.approx(1.5**3)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)) for _ in range(8)), nn.Linear(6, 2))
    staged = Network(model, split_blocks(model, trace(model, torch.randn(2, 6))))
    rates = [stage.learning_rate for stage in BUFR(epochs_per_block=30).stages(staged, profile)]
    assert len(rates) == 8
    assert rates[0] / rates[-1] == pytest.approx(5.0**4)


def reference_terms(world, profile, kind: str, reduction: str) -> dict[str, float]:  # type: ignore[no-untyped-def]
    """The loss of equation (2) in numpy, float64, from the stored counts."""
    total = profile.bins.total
    cuts = np.arange(total - 1) / (total - 2)
    offsets = np.concatenate([[0], -cuts.cumsum()])
    features = world.model[:6](world.target).detach()
    terms = {}
    for name, values in (("features", features), ("logits", world.model[6](features).detach())):
        home = profile.taps[name]
        low, high = home.low.double().numpy(), home.high.double().numpy()
        keep = high - low > 1e-4 * np.maximum(abs(low), abs(high))
        x = ((values.double().numpy() - low) / np.where(keep, high - low, 1))[:, keep]
        logits = (x[..., None] * np.arange(1, total + 1) + offsets) / 0.01
        mass = np.exp(logits - logits.max(-1, keepdims=True))
        q = (mass / mass.sum(-1, keepdims=True)).mean(0)
        p = (home.counts.double().numpy() / home.samples)[keep]
        pq = (p * np.log((p + 1e-8) / (q + 1e-8))).sum(1)
        qp = (q * np.log((q + 1e-8) / (p + 1e-8))).sum(1)
        in_bins = math.log(total)
        per_unit = {"psi": (pq + qp) / in_bins, "symmetric-kl": (pq + qp) / 2, "kl-target-source": qp / in_bins}[kind]
        terms[name] = per_unit.mean() if reduction == "mean" else per_unit.sum()
    return terms


@pytest.mark.parametrize(
    ("preset", "kind", "reduction"),
    [("reference", None, "mean"), ("paper", None, "sum"), ("reference", "kl-target-source", "mean")],
)
def test_the_loss_against_numpy(preset: str, kind: str | None, reduction: str) -> None:
    world = sensors()
    profile = world.profile(preset)
    objective = FR(divergence=kind).objective(profile, torch.device("cpu"))  # type: ignore[arg-type]
    with torch.no_grad():
        features = world.model[:6](world.target)
        got = objective({"features": features, "logits": world.model[6](features)})
    default = {"reference": "psi", "paper": "symmetric-kl"}[preset]
    expected = reference_terms(world, profile, kind or default, reduction)
    assert set(got) == set(expected)
    for name, value in expected.items():
        assert float(got[name]) == pytest.approx(value, rel=1e-4)


def test_ablations_leave_out_what_they_say() -> None:
    world = sensors()
    result = shiftmend.adapt(
        world.model,
        world.target,
        world.profile(),
        "fr",
        epochs=1,
        learning_rate=0.1,
        align=("features",),
        progress=False,
    )
    assert set(result.history[1].losses) == {"features"}


@pytest.mark.slow
def test_the_sliced_preset_aligns_slices_that_do_not_judge() -> None:
    world = sensors()
    profile = world.profile("sliced")
    result = shiftmend.adapt(
        world.model, world.target, profile, "fr", epochs=30, learning_rate=0.1, align=("logits",), progress=False
    )
    assert set(result.history[1].losses) == {"logits", "slices"}
    assert result.history[-1].losses["slices"] < result.history[1].losses["slices"] / 2
    assert result.after.divergence < result.before.divergence


def test_the_weight_of_the_slices_is_a_factor_of_their_term() -> None:
    world = sensors()
    profile = world.profile("sliced")
    with torch.no_grad():
        features = world.model[:6](world.target)
        seen = {"features": features, "logits": world.model[6](features)}
        one, three = (FR(slice_weight=w).objective(profile, torch.device("cpu"))(seen) for w in (1.0, 3.0))
    expected = float(profile.slices["alignment"].divergence(features))
    assert float(one["slices"]) == pytest.approx(expected, rel=1e-5)
    assert float(three["slices"]) == pytest.approx(3 * expected, rel=1e-5)
    assert (three["features"], three["logits"]) == (one["features"], one["logits"])


@pytest.mark.parametrize(
    ("name", "options", "sentence"),
    [
        ("bufr", {"epochs_per_block": 0}, r"epochs_per_block.*whole number"),
        ("bufr", {"decay": 0.0}, r"decay.*positive.*0\.0"),
        ("fr", {"epochs": 1.5}, r"epochs.*whole number"),
        ("fr", {"learning_rate": math.inf}, r"learning rate.*got inf"),
        ("fr", {"align": ()}, "align to name taps"),
        ("fr", {"align": 3}, r"name taps.*3"),
        ("fr", {"align": ("features", 3)}, "align to name taps"),
        ("tent", {"learning_rate": 0.0}, r"learning rate.*0\.0"),
        ("bnm-im", {"weight": 0.0}, r"moments.*positive.*0\.0"),
        ("adabn", {"passes": 0}, r"passes.*got 0"),
    ],
)
def test_options_that_mean_nothing_are_refused(name: str, options: dict[str, object], sentence: str) -> None:
    with pytest.raises(AdaptationError, match=sentence):
        method(name, **options)


@pytest.mark.slow
def test_the_paper_preset_translates_the_published_rate() -> None:
    world = sensors()
    profile = world.profile("paper")
    (stage,) = FR().stages(network("paper-cnn"), profile)
    units = profile.taps["features"].usable_count
    assert stage.learning_rate == pytest.approx(2 / (math.log(10) * units))


@pytest.mark.slow
def test_fr_on_a_model_without_normalisation() -> None:
    world = sensors(norm=False)
    result = shiftmend.adapt(world.model, world.target, world.profile(), "fr", epochs=60, progress=False)
    assert result.history[1].learning_rate == pytest.approx(0.003)
    assert world.accuracy(world.model) < 0.75
    assert world.accuracy(result.model) > 0.9


def test_methods_by_name() -> None:
    assert list(METHODS) == [
        "source-only",
        "match-mean",
        "match-moments",
        "match-histogram",
        "neo",
        "coral",
        "adabn",
        "pl",
        "shot-im",
        "shot",
        "tent",
        "bnm",
        "bnm-im",
        "full-gauss",
        "fr",
        "fr-shares",
        "match-fr",
        "bufr",
        "bufr-im",
        "target-supervised",
    ]
    made = method("bufr", epochs_per_block=5)
    assert method(made) is made
    with pytest.raises(AdaptationError, match="make the method with"):
        method(made, decay=2.0)
    with pytest.raises(AdaptationError, match="no options"):
        method("source-only", epochs=3)
