"""SHOT: its pseudo-labels against a slow loop in numpy, and that each sample gets its own."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from worlds import sensors
from zoo import ZOO

import shiftmend
from shiftmend.engine.method import Network, ReadActivations
from shiftmend.errors import AdaptationError
from shiftmend.methods.shot import SHOT, centroid_labels

CPU = torch.device("cpu")


def softmax(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(logits - logits.max(1, keepdims=True))
    return weights / weights.sum(1, keepdims=True)


def labels_in_numpy(embedding: np.ndarray, logits: np.ndarray) -> tuple[np.ndarray, float]:
    """The labels, sample by sample and class by class; and by how much the closest decision was won."""
    p = softmax(logits.astype(np.float64))
    points = [np.append(row, 1.0) / np.linalg.norm(np.append(row, 1.0)) for row in embedding.astype(np.float64)]
    classes = sorted({int(row.argmax()) for row in p})
    weights, margin = p, np.inf
    for _ in range(2):
        centroids = {}
        for c in classes:
            total = sum(weights[:, c])
            if total > 0:
                centroids[c] = sum(w * x for w, x in zip(weights[:, c], points, strict=True)) / (total + 1e-8)
        labels = []
        for x in points:
            near = sorted(((x @ m / np.linalg.norm(m), c) for c, m in centroids.items()), reverse=True)
            labels.append(near[0][1])
            if len(near) > 1:
                margin = min(margin, near[0][0] - near[1][0])
        weights = np.eye(p.shape[1])[labels]
    return np.array(labels), margin


@pytest.mark.slow
@given(st.integers(0, 300), st.integers(2, 7), st.integers(1, 6), st.floats(0.2, 5))
def test_labels_against_a_slow_loop(seed: int, classes: int, units: int, certainty: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    embedding = torch.randn(40, units, generator=generator) + torch.randn(units, generator=generator)
    logits = certainty * embedding @ torch.randn(units, classes, generator=generator)
    expected, margin = labels_in_numpy(embedding.numpy(), logits.numpy())
    got = centroid_labels(embedding, logits)
    assert got.dtype == torch.int64
    if margin > 1e-5:  # in float32 a closer decision can go either way
        np.testing.assert_array_equal(got.numpy(), expected)
    else:
        assert (got.numpy() == expected).mean() > 0.9


@pytest.mark.usefixtures("other_default_dtype")
def test_labels_do_not_depend_on_the_precision_that_is_usual_elsewhere() -> None:
    embedding = torch.tensor([[1.0, 0.0], [0.9, 0.1], [0.0, 1.0], [0.2, 0.8]], dtype=torch.float32)
    assert centroid_labels(embedding, 5 * embedding).tolist() == [0, 0, 1, 1]


def test_classes_without_a_prediction_get_no_sample() -> None:
    embedding = torch.randn(50, 4)
    logits = embedding @ torch.randn(4, 6)
    logits[:, [1, 4]] = logits.amin() - 1  # likely enough to have a centroid, never the likeliest
    labels = centroid_labels(embedding, logits)
    assert not set(labels.tolist()) & {1, 4}
    expected, _ = labels_in_numpy(embedding.numpy(), logits.numpy())
    np.testing.assert_array_equal(labels.numpy(), expected)
    assert centroid_labels(embedding, logits[:, :1]).tolist() == [0] * 50
    assert centroid_labels(embedding[:1], logits[:1]).tolist() == [int(logits[0].argmax())]


def test_a_cluster_that_empties_is_left_out() -> None:
    """Class 1 is predicted for one sample, but its centroid, weighed by probabilities, lies nearest to none."""
    embedding = torch.tensor([[3.0, 0.0], [3.0, 0.2], [3.0, -0.2], [-3.0, 0.1], [-3.0, 0.0], [-3.0, -0.1], [3.0, 0.1]])
    p = torch.tensor([[0.80, 0.19, 0.01]] * 3 + [[0.01, 0.19, 0.80]] * 3 + [[0.33, 0.34, 0.33]])
    logits = p.log()
    first = nearest_once(embedding, p)
    assert 1 not in first
    assert int(p[6].argmax()) == 1
    labels = centroid_labels(embedding, logits)
    assert labels.tolist() == [0, 0, 0, 2, 2, 2, 0]
    expected, _ = labels_in_numpy(embedding.numpy(), logits.numpy())
    np.testing.assert_array_equal(labels.numpy(), expected)


def test_a_cluster_that_emptied_attracts_nobody() -> None:
    """Its centroid is zero: nearer, by cosine, than all others to a sample that lies on the far side of each."""
    embedding = torch.tensor([[8, -3], [6, 2], [-6, -7], [8, 9], [-8, 3], [-1, 6], [5, 8], [1, 3]]).float()
    logits = torch.tensor(
        [[1, 2, 1], [-1, -1, 1], [-2, -1, 1], [2, -2, 2], [-1, -1, 0], [1, 1, -2], [0, -1, -2], [2, -1, 1]]
    ).float()
    p = torch.softmax(logits / 2, 1)
    assert int(p[0].argmax()) == 1
    assert 1 not in nearest_once(embedding, p)
    assert centroid_labels(embedding, logits / 2).tolist() == [2, 2, 2, 0, 0, 0, 0, 0]
    expected, margin = labels_in_numpy(embedding.numpy(), logits.numpy() / 2)
    assert margin > 1e-4
    assert expected.tolist() == [2, 2, 2, 0, 0, 0, 0, 0]


def nearest_once(embedding: Tensor, p: Tensor) -> list[int]:
    points = np.hstack([embedding.double().numpy(), np.ones((len(embedding), 1))])
    points /= np.linalg.norm(points, axis=1, keepdims=True)
    centroids = p.double().numpy().T @ points
    return list((points @ (centroids / np.linalg.norm(centroids, axis=1, keepdims=True)).T).argmax(1))


@pytest.mark.slow
@given(st.permutations(range(30)))
def test_labels_belong_to_samples_and_not_to_places(order: list[int]) -> None:
    generator = torch.Generator().manual_seed(1)
    embedding = torch.randn(30, 3, generator=generator)
    logits = 2 * embedding @ torch.randn(3, 4, generator=generator)
    labels = centroid_labels(embedding, logits)
    assert len(set(labels.tolist())) > 2
    assert torch.equal(centroid_labels(embedding[order], logits[order]), labels[order])


@pytest.mark.slow
@given(st.integers(0, 100), st.floats(0.05, 2))
def test_the_loss_against_numpy(seed: int, weight: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(50, 5, generator=generator)
    targets = torch.randint(0, 5, (50,), generator=generator)
    p = softmax(logits.double().numpy())

    def entropy(q: np.ndarray) -> np.ndarray:
        return -(q * np.log(q + 1e-5)).sum(-1)

    terms = SHOT(weight=weight).objective(None, CPU)({"logits": logits, "targets": targets})
    assert float(terms["logits"]) == pytest.approx(entropy(p).mean() - entropy(p.mean(0)), abs=2e-5)
    chosen = p[np.arange(50), targets.numpy()]
    assert float(terms["pseudo-labels"]) == pytest.approx(-weight * np.log(chosen).mean(), rel=1e-4)
    assert set(terms) == {"logits", "pseudo-labels"}


def test_its_hyperparameters_are_those_of_the_reference_implementation() -> None:
    made = SHOT()
    assert (made.weight, made.momentum, made.epochs) == (0.1, 0.9, 150)
    assert made.hyperparameters() == {"epochs": 150, "learning_rate": None, "weight": 0.1, "momentum": 0.9}
    assert made.rate(Network(ZOO["paper-cnn"].model(), ())) == 0.1
    assert made.rate(Network(sensors().model, ())) == 1e-3
    for bad in (0, -1, float("nan"), "much"):
        with pytest.raises(AdaptationError, match="weight of the pseudo-labels"):
            SHOT(weight=bad)


# --- in the engine ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Watched(SHOT):
    """Notes the labels of each epoch, and the logits and targets of each batch."""

    numbered: bool = False
    labels: list[Tensor] = field(default_factory=list, compare=False)
    batches: list[tuple[Tensor, Tensor]] = field(default_factory=list, compare=False)

    def targets(self, network: Network, look: ReadActivations) -> Tensor:
        made = super().targets(network, look)
        self.labels.append(made)
        return torch.arange(len(made)) % 3 if self.numbered else made

    def objective(self, profile, device):  # type: ignore[no-untyped-def]
        losses = super().objective(profile, device)

        def noted(activations):  # type: ignore[no-untyped-def]
            self.batches.append((activations["logits"].detach(), activations["targets"]))
            return losses(activations)

        return noted

    def hyperparameters(self) -> dict[str, object]:
        return {}


@pytest.mark.parametrize("numbered", [True, False])
def test_each_batch_gets_the_labels_of_its_own_samples(numbered: bool) -> None:
    """Batches are shuffled; a label that was looked up by its place in the batch would belong to another sample."""
    world = sensors(norm=False)
    spy = Watched(epochs=2, learning_rate=1e-30, numbered=numbered)
    shiftmend.adapt(world.model, world.target, None, spy, batch_size=100, progress=False)
    assert [len(logits) for logits, _ in spy.batches] == [100] * 12
    with torch.no_grad():
        whole = world.model(world.target)
    labels = torch.arange(600) % 3 if numbered else spy.labels[0]
    moved = 0
    for number, (logits, targets) in enumerate(spy.batches):
        which = torch.cdist(logits, whole).argmin(1)  # the weights do not move: the logits say each samples these are
        torch.testing.assert_close(logits, whole[which])
        assert torch.equal(targets, labels[which])
        moved += int(not torch.equal(targets, labels[100 * (number % 6) :][:100]))
    assert moved == 12


def test_labels_are_made_in_eval_mode_from_what_the_head_reads_and_anew_each_epoch() -> None:
    world = sensors()
    spy = Watched(epochs=3, learning_rate=0.01)
    seen: list[nn.Module] = []
    shiftmend.adapt(
        world.model, world.target, None, spy, progress=False, on_epoch=lambda m, _: seen.append(copy.deepcopy(m))
    )
    assert len(spy.labels) == 3
    for model, labels in zip(seen, spy.labels, strict=False):
        with torch.no_grad():
            embedding = model[:6](world.target)
            expected, margin = labels_in_numpy(embedding.numpy(), model[6](embedding).numpy())
        assert margin > 1e-7
        assert (labels.numpy() == expected).mean() > 0.995
    assert not torch.equal(spy.labels[0], spy.labels[2])


def test_permuting_the_target_permutes_the_labels() -> None:
    world = sensors()
    order = torch.randperm(600)
    labels = []
    for target in (world.target, world.target[order]):
        spy = Watched(epochs=1, learning_rate=1e-30)
        shiftmend.adapt(world.model, target, None, spy, progress=False)
        labels.append(spy.labels[0])
    assert len(set(labels[0].tolist())) > 1
    assert torch.equal(labels[0][order], labels[1])


def changed(result: nn.Module, model: nn.Module) -> set[str]:
    return {
        name
        for (name, ours), theirs in zip(result.named_parameters(), model.parameters(), strict=True)
        if not torch.equal(ours, theirs)
    }


@pytest.mark.slow
def test_it_trains_all_but_the_head() -> None:
    world = sensors()
    result = shiftmend.adapt(world.model, world.target, None, "shot", epochs=1, learning_rate=0.01, progress=False)
    assert {name.split(".")[0] for name in changed(result.model, world.model)} == {"0", "1", "4"}
    assert set(result.history[1].losses) == {"logits", "pseudo-labels"}

    case = ZOO["paper-cnn"]
    model = case.model()
    result = shiftmend.adapt(model, case.inputs(), None, "shot", epochs=1, batch_size=32, progress=False)
    names = {name for name, _ in model.named_parameters()}
    assert {name for name in names if not name.startswith("head.")} == changed(result.model, model)
    assert {"bn4.weight", "bn4.bias"} <= changed(result.model, model)  # behind the features, before the head


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.middle, self.head = nn.Embedding(5, 4), nn.Linear(4, 4), nn.Linear(4, 5)
        self.head.weight = self.table.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.middle(self.table(tokens).mean(1)).tanh())


def test_what_the_head_shares_with_other_layers_stays_as_it_is() -> None:
    model, tokens = Tied(), torch.randint(5, (64, 3))
    result = shiftmend.adapt(model, tokens, None, "shot", epochs=1, learning_rate=0.1, progress=False)
    assert changed(result.model, model) == {"middle.weight", "middle.bias"}


@pytest.mark.slow
def test_clusters_are_looked_for_where_the_model_says() -> None:
    case = ZOO["paper-cnn"]
    model = case.model()
    spy = Watched(epochs=1, learning_rate=1e-30)
    shiftmend.adapt(model, case.inputs(), None, spy, batch_size=32, progress=False)
    caught = {}
    handle = model.bn4.register_forward_hook(lambda module, read, wrote: caught.update(bn4=wrote.detach()))
    with torch.no_grad():
        logits = model(case.inputs())
    handle.remove()
    assert torch.equal(spy.labels[0], centroid_labels(caught["bn4"], logits))


@pytest.mark.slow
def test_it_mends_a_simple_shift() -> None:
    world = sensors()
    result = shiftmend.adapt(world.model, world.target, None, "shot", epochs=15, learning_rate=0.01, progress=False)
    assert world.accuracy(world.model) < 0.75
    assert world.accuracy(result.model) > 0.95


def test_what_it_cannot_do_is_one_sentence() -> None:
    world = sensors()
    with pytest.raises(AdaptationError, match=r"stream.*shot.*one of"):
        shiftmend.stream(world.model, None, "shot")
    streamed = list(world.target.split(100))
    with pytest.raises(AdaptationError, match="each sample"):
        shiftmend.adapt(world.model, streamed, None, "shot", epochs=1, resident=False, progress=False)
    regressor = ZOO["regressor"]
    with pytest.raises(AdaptationError, match="a classifier for shot"):
        shiftmend.adapt(regressor.model(), regressor.inputs(), None, "shot", epochs=1, progress=False)


class Two(nn.Module):
    """Its embedding has two rows a sample."""

    shiftmend_embedding = "body"

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Conv1d(2, 4, 1)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).flatten(1))


def test_an_embedding_of_other_samples_is_one_sentence() -> None:
    with pytest.raises(AdaptationError, match=r"40 .*for 20.*shiftmend_embedding"):
        shiftmend.adapt(Two(), torch.randn(20, 2, 2), None, "shot", epochs=1, progress=False)
