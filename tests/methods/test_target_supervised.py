"""The upper bound: the one method that is given labels."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import json
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from worlds import sensors
from zoo import ZOO

import shiftmend
from shiftmend.engine.method import Network
from shiftmend.errors import AdaptationError
from shiftmend.methods.target_supervised import TargetSupervised

CPU = torch.device("cpu")


def adapt(**options: Any) -> shiftmend.Adaptation:
    world = sensors()
    given = {"labels": world.labels, "epochs": 1, "learning_rate": 0.01, "progress": False}
    return shiftmend.adapt(world.model, world.target, None, "target-supervised", **(given | options))


def test_the_loss_against_numpy() -> None:
    logits, labels = 3 * torch.randn(40, 5), torch.randint(0, 5, (40,))
    terms = TargetSupervised(labels=labels).objective(None, CPU)({"logits": logits, "targets": labels})
    v = logits.double().numpy()
    expected = np.mean([np.log(np.exp(row).sum()) - row[label] for row, label in zip(v, labels.numpy(), strict=True)])
    assert set(terms) == {"labels"}
    assert float(terms["labels"]) == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
def test_it_reaches_a_high_accuracy_and_trains_everything() -> None:
    world = sensors()
    result = adapt(epochs=30)
    assert world.accuracy(world.model) < 0.75
    assert world.accuracy(result.model) > 0.98
    before = dict(world.model.named_parameters())
    same = {name for name, value in result.model.named_parameters() if torch.equal(value, before[name])}
    assert same <= {"0.bias"}  # BatchNorm behind it takes every constant away; the classifier, 6, moves too
    assert result.history[-1].losses["labels"] < result.history[1].losses["labels"]


@pytest.mark.slow
def test_labels_belong_to_the_samples_in_their_order() -> None:
    """Labels that are learnt by heart, from samples that do not show them, show each sample got which."""
    torch.manual_seed(0)
    inputs, labels = torch.randn(24, 40), torch.randint(0, 2, (24,))
    model = nn.Sequential(nn.Linear(40, 40), nn.ReLU(), nn.Linear(40, 2)).eval()
    for order in (torch.arange(24), torch.randperm(24)):
        result = shiftmend.adapt(
            model, inputs[order], None, "target-supervised", labels=labels[order], epochs=60, learning_rate=0.05,
            batch_size=6, progress=False,
        )  # fmt: skip
        with torch.no_grad():
            assert torch.equal(result.model(inputs).argmax(1), labels)


class Halves(nn.Module):
    """Notes in which mode it ran while gradients were on, with what became of ones behind dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.5)
        self.dropped: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            self.dropped.append(float((self.dropout(torch.ones(2000)) == 0).float().mean()))
        return x


@pytest.mark.parametrize(("name", "share"), [("target-supervised", 0.5), ("shot-im", 0.0)])
def test_dropout_is_on_for_it_alone(name: str, share: float) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), Halves(), nn.Linear(8, 3)).eval()
    options = {"labels": torch.randint(0, 3, (60,))} if name == "target-supervised" else {}
    model[2].dropped.clear()
    result = shiftmend.adapt(model, torch.randn(60, 4), None, name, epochs=2, batch_size=30, progress=False, **options)
    assert len(result.model[2].dropped) == 4
    assert result.model[2].dropped == pytest.approx([share] * 4, abs=0.06)
    assert not result.model.training
    assert not result.model[2].dropout.training


def test_weight_decay_is_applied_as_sgd_does_it() -> None:
    """One step on one batch without dropout or BatchNorm: w - rate (gradient + decay w), for all parameters."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).eval()
    inputs, labels = torch.randn(50, 4), torch.randint(0, 3, (50,))
    rate, decay = 0.1, 0.3
    twin = copy.deepcopy(model)
    nn.functional.cross_entropy(twin(inputs), labels).backward()
    result = shiftmend.adapt(
        model, inputs, None, "target-supervised", labels=labels, epochs=1, learning_rate=rate, weight_decay=decay,
        progress=False,
    )  # fmt: skip
    for ours, theirs in zip(result.model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs - rate * (theirs.grad + decay * theirs))
    assert result.manifest["stages"][0]["weight_decay"] == decay


def test_its_manifest_holds_the_digest_of_the_labels_and_no_label(tmp_path) -> None:  # type: ignore[no-untyped-def]
    world = sensors()
    labels = torch.full((600,), 2)
    labels[::2] = 1
    result = adapt(labels=labels)
    facts = result.manifest["method"]
    assert set(facts) == {"name", "epochs", "learning_rate", "weight_decay", "momentum", "labels_sha256"}
    assert len(facts["labels_sha256"]) == 64
    result.save(tmp_path)
    text = (tmp_path / "manifest.json").read_text()
    assert json.loads(text)["method"] == facts
    assert "1, 2, 1" not in " ".join(text.split())
    assert adapt(labels=labels.tolist()).manifest["method"] == facts  # in whatever form they came
    assert adapt(labels=labels.numpy().astype(np.uint8)).manifest["method"] == facts
    assert adapt(labels=world.labels).manifest["method"]["labels_sha256"] != facts["labels_sha256"]
    assert facts["labels_sha256"] != hashlib.sha256(b"").hexdigest()


@pytest.mark.parametrize("dtype", ["uint8", "int16", "int32", "int64", "uint16", "uint32", "uint64"])
def test_labels_of_any_whole_type(dtype: str) -> None:
    labels = TargetSupervised(labels=np.array([0, 2, 1], dtype=dtype)).labels
    assert labels.dtype == torch.int64
    assert labels.tolist() == [0, 2, 1]


def test_labels_are_copied() -> None:
    given = np.array([0, 1, 2])
    for own in (given, torch.from_numpy(given)):
        made = TargetSupervised(labels=own)
        before = made.hyperparameters()
        own[0] = 2
        assert made.labels.tolist() == [0, 1, 2]
        assert made.hyperparameters() == before
        own[0] = 0
    assert TargetSupervised(labels=given[::-1]).labels.tolist() == [2, 1, 0]


@pytest.mark.parametrize(
    ("labels", "words"),
    [
        (torch.tensor([0.0, 1.0]), r"class number.*float32 \[2\]"),
        (np.array([0.5]), r"class number.*float64 \[1\]"),
        (torch.zeros(4, 3, dtype=torch.long), r"class number.*int64 \[4, 3\]"),
        (torch.tensor(3), r"class number.*int64 \[\]"),
        ([], r"class number.*float64 \[0\]"),
        (torch.zeros(0, dtype=torch.long), r"class number.*int64 \[0\]"),
        (["cat", "dog"], "class number.*a list"),
        (np.array(["cat"]), "class number.*an array of <U3"),
        ([[1, 2], [3]], "class number.*a list"),
        (None, "class number.*a NoneType"),
        ([0, -1, 2], r"class numbers.*-1"),
    ],
    ids=repr,
)
def test_labels_that_are_none_are_one_sentence(labels: Any, words: str) -> None:
    with pytest.raises(AdaptationError, match=words) as caught:
        adapt(labels=labels)
    assert "\n" not in str(caught.value)


def test_labels_that_do_not_fit_are_one_sentence() -> None:
    world = sensors()
    with pytest.raises(AdaptationError, match="599 for 600"):
        adapt(labels=world.labels[:-1])
    with pytest.raises(AdaptationError, match="1200 for 600"):
        adapt(labels=world.labels.repeat(2))
    with pytest.raises(AdaptationError, match=r"labels below 3.*got 3"):
        adapt(labels=torch.where(torch.arange(600) == 599, 3, world.labels))
    with pytest.raises(AdaptationError, match="Expected 'labels'"):
        shiftmend.adapt(world.model, world.target, None, "target-supervised")
    with pytest.raises(AdaptationError, match=r"stream"):
        shiftmend.stream(world.model, None, "target-supervised", labels=world.labels)
    loader = DataLoader(TensorDataset(world.target), batch_size=100)
    with pytest.raises(AdaptationError, match="each sample"):
        shiftmend.adapt(
            world.model, loader, None, "target-supervised", labels=world.labels, resident=False, progress=False
        )
    regressor = ZOO["regressor"]
    with pytest.raises(AdaptationError, match="Expected a classifier"):
        shiftmend.adapt(
            regressor.model(), regressor.inputs(), None, "target-supervised", labels=[0] * 64, progress=False
        )


def test_a_model_with_several_answers_a_sample_is_refused() -> None:
    model, images = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Conv2d(4, 3, 1)), torch.randn(20, 1, 8, 8)
    with pytest.raises(AdaptationError, match="720 for 20"):
        shiftmend.adapt(model, images, None, "target-supervised", labels=torch.zeros(20, dtype=torch.long), epochs=1)


@pytest.mark.parametrize("decay", [-1e-3, float("nan"), float("inf"), "5e-4", True, None])
def test_impossible_weight_decays_are_one_sentence(decay: Any) -> None:
    with pytest.raises(AdaptationError, match=r"weight decay.*0"):
        TargetSupervised(labels=[0], weight_decay=decay)


def test_published_rates() -> None:
    made = TargetSupervised(labels=[0])
    assert made.rate(Network(ZOO["paper-cnn"].model(), ())) == 0.1
    assert made.rate(Network(sensors().model, ())) == 1e-3
    assert (made.momentum, made.weight_decay, made.epochs) == (0.9, 0.0, 150)


def test_same_seed_same_result_whatever_the_global_generator_does() -> None:
    before = torch.random.get_rng_state()
    one, other = adapt(epochs=2, seed=1), adapt(epochs=2, seed=1)
    assert torch.equal(one.model[0].weight, other.model[0].weight)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_a_shuffling_loader_cannot_mix_the_labels_up() -> None:
    world = sensors()
    loader = DataLoader(TensorDataset(world.target), batch_size=100, shuffle=True)
    right = None
    with contextlib.suppress(AdaptationError):  # it may refuse such a loader, but not learn from other labels
        result = shiftmend.adapt(
            world.model, loader, None, "target-supervised", labels=world.labels, epochs=20, learning_rate=0.01,
            progress=False,
        )  # fmt: skip
        right = world.accuracy(result.model)
    assert right is None or right > 0.9
