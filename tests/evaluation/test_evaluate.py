"""Scores of a model, once and again."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from graphs import captured_without_a_gpu
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from worlds import sensors

import shiftmend
from shiftmend.engine.history import Epoch
from shiftmend.errors import DataError
from shiftmend.evaluation.classification import ClassificationMetrics
from shiftmend.evaluation.evaluate import Scorer
from shiftmend.inputs.feed import Feed


class Column(nn.Module):
    """Predicts the sum of a row."""

    def forward(self, x: Tensor) -> Tensor:
        return x.sum(1, keepdim=True)


def test_scores_count_what_is_right() -> None:
    world = sensors()
    scores = shiftmend.evaluate(world.model, (world.target, world.labels))
    with torch.no_grad():
        right = world.model.eval()(world.target).argmax(1) == world.labels
    assert scores.accuracy == pytest.approx(float(right.double().mean()))
    assert scores.samples == len(world.labels)


def test_a_model_is_scored_in_eval_mode_without_a_graph_and_left_as_it_was() -> None:
    world = sensors()
    model, seen = copy.deepcopy(world.model).train(), set()
    model.register_forward_hook(lambda module, _, made: seen.add((module.training, made.requires_grad)))
    scored = shiftmend.evaluate(model, (world.target / 2, world.labels), preprocess=lambda inputs: inputs * 2)
    assert scored == shiftmend.evaluate(world.model, (world.target, world.labels))
    assert seen == {(False, False)}
    assert all(module.training for module in model)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_what_is_deployed_is_scored_too() -> None:
    world = sensors()
    model, example = world.model.eval(), world.target[:2]
    exported = torch.export.export(model, (example,), dynamic_shapes=({0: torch.export.Dim.DYNAMIC},))
    expected = shiftmend.evaluate(model, (world.target, world.labels))
    for deployed in (torch.jit.script(model), torch.jit.trace(model, example), exported.module()):
        assert shiftmend.evaluate(deployed, (world.target, world.labels)) == expected


def test_fractional_labels_are_regression() -> None:
    inputs = torch.tensor([[1.0, 2.0], [0.5, 0.5], [2.0, -1.0]])
    scores = shiftmend.evaluate(Column(), (inputs, torch.tensor([3.0, 1.0, 3.0])), classes=["of", "no", "use"])
    assert scores.mean_absolute_error == pytest.approx(2 / 3)


def test_several_quantities_and_maps_of_them() -> None:
    inputs = torch.randn(40, 3, generator=torch.Generator().manual_seed(0))
    model = nn.Linear(3, 2)
    with torch.no_grad():
        wanted = model(inputs) + torch.tensor([0.5, -2.0])
    scores = shiftmend.evaluate(model, (inputs, wanted), batch_size=16)
    assert [one.mean_absolute_error for one in scores.quantities] == pytest.approx([0.5, 2.0], rel=1e-5)
    assert scores.mean_absolute_error == pytest.approx(1.25, rel=1e-5)
    images, depth = torch.randn(4, 1, 5, 6, generator=torch.Generator().manual_seed(0)), nn.Conv2d(1, 1, 1)
    with torch.no_grad():
        far = depth(images)[:, 0] + 0.25
    scores = shiftmend.evaluate(depth, (images, far))  # labels without the axis of the one quantity
    assert (scores.samples, scores.quantities) == (4 * 5 * 6, ())
    assert scores.mean_absolute_error == pytest.approx(0.25, rel=1e-5)


def test_labels_count_as_many_classes_as_the_model_knows() -> None:
    world = sensors()
    scored = (world.target, world.labels)
    assert shiftmend.evaluate(world.model, scored, classes=["a", "b", "c"]) == shiftmend.evaluate(world.model, scored)
    with pytest.raises(DataError, match=r"3 classes.* 2"):
        shiftmend.evaluate(world.model, scored, classes=["a", "b"])
    one = (torch.randn(4, 2), torch.tensor([0, 1, 1, 0]))  # a single output tells two classes apart
    assert shiftmend.evaluate(Column(), one, classes=["no", "yes"]).samples == 4
    with pytest.raises(DataError, match=r"2 classes.* 1"):
        shiftmend.evaluate(Column(), one, classes=["yes"])


def test_without_labels_there_is_nothing_to_score() -> None:
    world = sensors()
    with pytest.raises(DataError, match=r"labels.*'label' or"):
        shiftmend.evaluate(world.model, world.target)
    with pytest.raises(DataError, match=r"got shape \[5\]"):
        shiftmend.evaluate(world.model, (world.target[:, :5], world.labels))


def test_a_scorer_sees_the_model_as_it_is_now() -> None:
    world = sensors()
    model = copy.deepcopy(world.model)
    batches = list(zip(world.target.split(64), world.labels.split(64), strict=True))
    scorer = Scorer(model, Feed(batches, resident=False), capture=True)
    assert scorer() == shiftmend.evaluate(world.model, (world.target, world.labels), batch_size=64)
    with torch.no_grad():
        for weight in model.parameters():
            weight.zero_()
    assert scorer().nll == pytest.approx(math.log(3))  # all classes alike
    assert scorer() == shiftmend.evaluate(model, (world.target, world.labels), batch_size=64)


def test_an_evaluator_reads_its_data_once_and_scores_any_model() -> None:
    world, reads = sensors(), []

    class Counted(TensorDataset):
        def __getitem__(self, index: int) -> Any:
            reads.append(index)
            return super().__getitem__(index)

    score = shiftmend.Evaluator(Counted(world.target, world.labels), batch_size=64, progress=False)
    assert not reads
    for factor in (1.0, 0.5, -1.0):
        model = copy.deepcopy(world.model)
        with torch.no_grad():
            model[-1].weight.mul_(factor)
        expected = shiftmend.evaluate(model, (world.target, world.labels), batch_size=64, progress=False)
        assert score(model) == score(model) == expected
    assert len(reads) == len(world.target)


def test_an_evaluator_captures_from_the_second_call_on(monkeypatch: pytest.MonkeyPatch) -> None:
    world = sensors()
    model, data = copy.deepcopy(world.model), (world.target, world.labels)

    def expected(model: nn.Module) -> Any:
        return shiftmend.evaluate(copy.deepcopy(model), data, batch_size=64, progress=False)

    captured_without_a_gpu(monkeypatch)
    score, eager = (shiftmend.Evaluator(data, batch_size=64, capture=may, progress=False) for may in (True, False))
    replayed = []
    for factor in (1.0, 1.0, 0.5, -1.0):
        with torch.no_grad():
            model[-1].weight.mul_(factor)
        assert score(model) == eager(model) == expected(model)
        replayed.append(score._scorer is not None and score._scorer._pass._replay is not None)
        assert eager._scorer is not None
        assert eager._scorer._pass._replay is None
    assert replayed == [False, True, True, True]
    # New tensors in the place of old ones: the graph would go on reading the old.
    model[-1].weight = nn.Parameter(model[-1].weight.detach() * -0.5)
    assert score(model) == expected(model)
    assert score(model) == expected(model)
    assert score(world.model) == expected(world.model)


def test_an_evaluator_follows_an_adaptation(monkeypatch: pytest.MonkeyPatch) -> None:
    world, found, wanted = sensors(), [], []
    data = (world.target, world.labels)
    captured_without_a_gpu(monkeypatch)
    score = shiftmend.Evaluator(data, batch_size=64, progress=False)

    def look(model: nn.Module, row: Epoch) -> None:
        found.append(score(model))
        wanted.append(shiftmend.evaluate(model, data, batch_size=64, progress=False))

    result = shiftmend.adapt(
        world.model, world.target, world.profile(), "fr", epochs=3, learning_rate=0.1, on_epoch=look, progress=False
    )
    found.append(score(result.model))
    wanted.append(shiftmend.evaluate(result.model, data, batch_size=64, progress=False))
    assert [one.accuracy for one in found] == [one.accuracy for one in wanted]
    assert [one.nll for one in found] == pytest.approx([one.nll for one in wanted])
    assert len({one.nll for one in found}) > 3


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_an_evaluator_follows_an_adaptation_on_a_gpu() -> None:
    world, found, wanted = sensors(), [], []
    data, options = (world.target, world.labels), {"batch_size": 64, "device": "cuda", "progress": False}
    score = shiftmend.Evaluator(data, **options)

    def look(model: nn.Module, row: Epoch) -> None:
        found.append(score(model))
        wanted.append(shiftmend.evaluate(model, data, **options))

    shiftmend.adapt(world.model, world.target, world.profile(), "fr", device="cuda", on_epoch=look, progress=False)
    assert len(found) > 3
    assert score._scorer is not None
    assert score._scorer._pass._replay is not None
    assert [one.accuracy for one in found] == [one.accuracy for one in wanted]
    assert [one.nll for one in found] == pytest.approx([one.nll for one in wanted], rel=1e-5)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_captured_scores_follow_the_weights_too() -> None:
    world, device = sensors(), torch.device("cuda", 0)
    model = copy.deepcopy(world.model).to(device).eval()
    scorer = Scorer(model, Feed((world.target, world.labels), batch_size=64, device=device), capture=True)
    for factor in (1.0, 0.8, -1.0):
        with torch.no_grad():
            for weight in model.parameters():
                weight.mul_(factor)
        expected = shiftmend.evaluate(model, (world.target, world.labels), batch_size=64, device=device)
        noise = [torch.full((size,), 1 << 40, device=device) for size in (64, 512, 4096) for _ in range(20)]
        seen = scorer()
        assert scorer._pass._replay is not None
        assert seen.accuracy == expected.accuracy
        assert (seen.ece, seen.nll, seen.brier) == pytest.approx((expected.ece, expected.nll, expected.brier), rel=1e-5)
        del noise


def test_labels_of_a_classifier_that_are_no_whole_numbers_get_advice() -> None:
    world = sensors()
    with pytest.raises(DataError, match="whole numbers"):
        shiftmend.evaluate(world.model, (world.target, world.labels.float()))
    with pytest.raises(DataError, match=r"argmax.*one-hot"):
        shiftmend.evaluate(world.model, (world.target, torch.eye(3)[world.labels]))


def test_a_segmentation_is_scored_position_by_position() -> None:
    torch.manual_seed(0)
    model, images = nn.Conv2d(1, 3, 1), torch.randn(4, 1, 5, 6)
    with torch.no_grad():
        logits = model(images)
    labels = logits.argmax(1)
    labels[:, 0] = (labels[:, 0] + 1) % 3
    scores = shiftmend.evaluate(model, (images, labels))
    assert scores.samples == 4 * 5 * 6
    assert scores.accuracy == pytest.approx(1 - 1 / 5)
    assert scores.nll == pytest.approx(float(nn.functional.cross_entropy(logits, labels)), rel=1e-5)
    with pytest.raises(DataError, match=r"\[4, 1, 5, 6\]"):
        shiftmend.evaluate(model, (images, labels.unsqueeze(1)))
    with pytest.raises(DataError, match=r"\[4, 2, 5\].*movedim"):
        shiftmend.evaluate(nn.Linear(6, 3), (torch.randn(4, 2, 5, 6), labels[:, :2, :5]))
    with pytest.raises(DataError, match="floating-point logits"):
        shiftmend.evaluate(model, (images, labels[:, 0, 0]))


@pytest.mark.parametrize("void", [255, -1, 1])
def test_positions_of_the_ignored_label_count_in_no_score(void: int) -> None:
    torch.manual_seed(0)
    model, images, labels = nn.Conv2d(1, 3, 1), torch.randn(4, 1, 5, 6), torch.randint(0, 3, (4, 5, 6))
    labels[:, 1] = void
    images[0, 0, 1, 0] = 1e38  # overflows to NaN in the softmax where nothing is asked
    model.weight.data *= 1e3
    scores = shiftmend.evaluate(model, (images, labels), ignore_label=void, batch_size=2)
    kept = labels.flatten() != void
    with torch.no_grad():
        logits = model(images).movedim(1, -1).flatten(0, 2)[kept]
    alone = ClassificationMetrics()
    alone.update(logits, labels.flatten()[kept])
    expected = alone.compute()
    assert scores.samples == int(kept.sum())
    assert [scores.accuracy, scores.ece, scores.mce, scores.nll, scores.brier] == pytest.approx(
        [expected.accuracy, expected.ece, expected.mce, expected.nll, expected.brier], rel=1e-12
    )
    assert [one.count for one in scores.reliability] == [one.count for one in expected.reliability]


def test_labels_that_mark_no_class_have_to_be_named() -> None:
    model, images = nn.Conv2d(1, 3, 1), torch.randn(4, 1, 5, 6)
    labels = torch.zeros(4, 5, 6, dtype=torch.uint8)
    labels[0, 0] = 255
    with pytest.raises(DataError, match=r"6 of.*to 2.*ignore_label"):
        shiftmend.evaluate(model, (images, labels))
    with pytest.raises(DataError, match=r"6 of 120.*label"):
        shiftmend.evaluate(model, (images, labels), ignore_label=-1)
    with pytest.raises(DataError, match=r"all 120.*ignore_label"):
        shiftmend.evaluate(model, (images, 0 * labels), ignore_label=0)
    with pytest.raises(DataError, match=r"ignore_label=0.*float32"):
        shiftmend.evaluate(Column(), (torch.randn(4, 2), torch.randn(4)), ignore_label=0)
    for nonsense in (True, 1.0, "255", 2**70):
        with pytest.raises(DataError, match=r"whole number.*ignore_label"):
            shiftmend.evaluate(model, (images, labels), ignore_label=nonsense)


def test_several_labels_a_sample_are_refused_and_zeros_and_ones_remarked_upon(caplog: pytest.LogCaptureFixture) -> None:
    world = sensors()
    several = torch.randint(0, 2, (len(world.target), 3))
    with pytest.raises(DataError, match="several classes"):
        shiftmend.evaluate(world.model, (world.target, several))
    with pytest.raises(DataError, match="several classes"):
        shiftmend.evaluate(world.model, (world.target, several.float()))
    assert not caplog.messages
    assert isinstance(shiftmend.evaluate(Column(), (world.target, several[:, 0].float())), shiftmend.RegressionScores)
    assert "all 0 or 1" in caplog.text


def test_a_lone_sample_at_the_end_of_a_stream_is_normalised_with_those_before_it() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4, track_running_stats=False), nn.Linear(4, 3))
    inputs, labels = torch.randn(9, 2), torch.randint(0, 3, (9,))
    streamed = Feed(list(zip(inputs.split(4), labels.split(4), strict=True)), resident=False)
    assert Scorer(model, streamed)() == shiftmend.evaluate(model, (inputs, labels), batch_size=4)
    with pytest.raises(DataError, match="at least two samples"):
        shiftmend.evaluate(model, (inputs[:1], labels[:1]))
