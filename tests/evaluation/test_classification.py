"""Streaming metrics against a float64 numpy reference, torchmetrics, and the properties they must have."""

import copy
import doctest

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import jaccard_score
from torchmetrics.functional.classification import multiclass_calibration_error

import shiftmend.evaluation.classification
from shiftmend.errors import DataError
from shiftmend.evaluation.classification import ClassificationMetrics, Scores
from shiftmend.evaluation.regression import RegressionMetrics
from shiftmend.evaluation.restoration import RestorationDistance, restoration_distance
from shiftmend.utils import devices

SCALARS = ("accuracy", "ece", "mce", "nll", "brier")


def reference(logits: np.ndarray, labels: np.ndarray, bins: int = 10) -> dict[str, float]:
    """Every score from its definition, one bin after the other."""
    shifted = np.exp(logits - logits.max(axis=1, keepdims=True))
    probabilities = shifted / shifted.sum(axis=1, keepdims=True)
    confidence = probabilities.max(axis=1)
    hits = logits.argmax(axis=1) == labels
    rows = np.arange(len(labels))
    ece, mce = 0.0, 0.0
    for index in range(bins):
        inside = (confidence > index / bins) & (confidence <= (index + 1) / bins)
        if inside.any():
            gap = abs(hits[inside].mean() - confidence[inside].mean())
            ece += inside.mean() * gap
            mce = max(mce, gap)
    return {
        "accuracy": hits.mean(),
        "ece": ece,
        "mce": mce,
        "nll": -np.log(probabilities[rows, labels]).mean(),
        "brier": ((probabilities - np.eye(logits.shape[1])[labels]) ** 2).sum(axis=1).mean(),
    }


def random_batch(samples: int, classes: int, scale: float = 3.0, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits that are right more often than not, so that bins differ in accuracy."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(classes, (samples,), generator=generator)
    logits = scale * torch.randn(samples, classes, generator=generator)
    logits[torch.arange(samples), labels] += scale / 2
    return logits, labels


def score(logits: torch.Tensor, labels: torch.Tensor, bins: int = 10) -> Scores:
    metrics = ClassificationMetrics(bins)
    metrics.update(logits, labels)
    return metrics.compute()


def assert_same(left: Scores, right: Scores, tolerance: float = 1e-12) -> None:
    assert left.samples == right.samples
    for name in SCALARS:
        assert getattr(left, name) == pytest.approx(getattr(right, name), rel=tolerance, abs=tolerance), name
    for ours, theirs in zip(left.reliability, right.reliability, strict=True):
        assert ours.count == theirs.count
        if not ours.count:
            continue
        assert ours.confidence == pytest.approx(theirs.confidence, rel=tolerance, abs=tolerance)
        assert ours.accuracy == pytest.approx(theirs.accuracy, rel=tolerance, abs=tolerance)


batches = st.tuples(st.integers(2, 60), st.integers(2, 12), st.floats(0.1, 30), st.integers(0, 2**31))


@pytest.mark.parametrize("bins", [1, 7, 10, 15])
@pytest.mark.parametrize(("classes", "scale"), [(2, 1.0), (10, 3.0), (47, 0.3), (10, 60.0)])
def test_scores_equal_numpy(classes: int, scale: float, bins: int) -> None:
    logits, labels = random_batch(500, classes, scale)
    scores = score(logits, labels, bins)
    expected = reference(logits.double().numpy(), labels.numpy(), bins)
    assert scores.samples == 500
    for name in SCALARS:
        assert getattr(scores, name) == pytest.approx(expected[name], rel=1e-10, abs=1e-12), name


@pytest.mark.parametrize(("norm", "name"), [("l1", "ece"), ("max", "mce")])
@pytest.mark.parametrize(("classes", "scale"), [(2, 1.0), (10, 2.0), (100, 4.0)])
def test_calibration_equals_torchmetrics(classes: int, scale: float, norm: str, name: str) -> None:
    logits, labels = random_batch(2000, classes, scale, seed=1)
    theirs = multiclass_calibration_error(logits, labels, num_classes=classes, n_bins=10, norm=norm)
    assert getattr(score(logits, labels), name) == pytest.approx(theirs.item(), abs=2e-6)


def test_likelihood_equals_cross_entropy() -> None:
    logits, labels = random_batch(300, 10)
    expected = torch.nn.functional.cross_entropy(logits.double(), labels).item()
    assert score(logits, labels).nll == pytest.approx(expected, rel=1e-12)


def test_a_case_worked_by_hand() -> None:
    # Confidences 0.9 (right), 0.9 (wrong), 0.6 (right): gaps 0.4 with weight 2/3, 0.4 with weight 1/3.
    logits = torch.tensor([[0.9, 0.1], [0.9, 0.1], [0.4, 0.6]], dtype=torch.float64).log()
    scores = score(logits, torch.tensor([0, 1, 1]))
    assert scores.accuracy == pytest.approx(2 / 3)
    assert scores.ece == pytest.approx(0.4)
    assert scores.mce == pytest.approx(0.4)
    assert scores.nll == pytest.approx(-(np.log(0.9) + np.log(0.1) + np.log(0.6)) / 3)
    assert scores.brier == pytest.approx((2 * 0.01 + 2 * 0.81 + 2 * 0.16) / 3)


@pytest.mark.parametrize(("classes", "bins", "edge_bin"), [(10, 10, 0), (5, 10, 1), (2, 10, 4), (25, 25, 0)])
def test_confidence_on_an_edge_belongs_to_the_lower_bin(classes: int, bins: int, edge_bin: int) -> None:
    # Equal logits give a confidence of exactly 1/classes: 0.1, 0.2, 0.5 and 0.04, which float32 rounds down.
    scores = score(torch.full((3, classes), 1.7), torch.zeros(3, dtype=torch.long), bins)
    counts = [entry.count for entry in scores.reliability]
    assert counts[edge_bin] == 3
    assert sum(counts) == 3
    assert scores.reliability[edge_bin].confidence == pytest.approx(1 / classes, rel=1e-15)


def test_certainty_belongs_to_the_last_bin() -> None:
    scores = score(torch.tensor([[900.0, 0.0, -900.0], [0.0, -torch.inf, -torch.inf]]), torch.tensor([0, 0]))
    assert scores.reliability[-1].count == 2
    assert (scores.accuracy, scores.ece, scores.mce, scores.nll, scores.brier) == (1, 0, 0, 0, 0)


def test_reliability_table() -> None:
    logits, labels = random_batch(400, 10, scale=1.5)
    scores = score(logits, labels)
    confidence, predicted = logits.double().softmax(1).max(1)
    assert len(scores.reliability) == 10
    for index, entry in enumerate(scores.reliability):
        assert (entry.lower, entry.upper) == (index / 10, (index + 1) / 10)
        inside = (confidence > entry.lower) & (confidence <= entry.upper)
        assert entry.count == inside.sum()
        if entry.count:
            assert entry.confidence == pytest.approx(confidence[inside].mean().item())
            assert entry.accuracy == pytest.approx((predicted == labels)[inside].double().mean().item())
        else:
            assert entry.confidence is None
            assert entry.accuracy is None
    # No confidence among 10 classes can lie below 0.1.
    assert scores.reliability[0].count == 0


@pytest.mark.slow
@settings(deadline=None, max_examples=60)
@given(batches, st.data())
def test_merged_halves_equal_the_whole(batch: tuple[int, int, float, int], data: st.DataObject) -> None:
    samples, classes, scale, seed = batch
    logits, labels = random_batch(samples, classes, scale, seed)
    cut = data.draw(st.integers(0, samples))
    left, right = ClassificationMetrics(), ClassificationMetrics()
    left.update(logits[:cut], labels[:cut])
    right.update(logits[cut:], labels[cut:])
    unchanged = copy.deepcopy(right)
    left.merge(right)
    assert_same(left.compute(), score(logits, labels))
    if cut < samples:
        assert right.compute() == unchanged.compute()


@pytest.mark.slow
@settings(deadline=None, max_examples=60)
@given(batches)
def test_order_does_not_matter(batch: tuple[int, int, float, int]) -> None:
    samples, classes, scale, seed = batch
    logits, labels = random_batch(samples, classes, scale, seed)
    order = torch.randperm(samples, generator=torch.Generator().manual_seed(seed))
    assert_same(score(logits[order], labels[order]), score(logits, labels))


@pytest.mark.slow
@settings(deadline=None, max_examples=100)
@given(batches, st.integers(1, 20))
def test_bounds(batch: tuple[int, int, float, int], bins: int) -> None:
    samples, classes, scale, seed = batch
    scores = score(*random_batch(samples, classes, scale, seed), bins)
    assert 0 <= scores.ece <= scores.mce + 1e-12
    assert scores.mce <= 1 + 1e-12
    assert 0 <= scores.accuracy <= 1
    assert scores.nll >= 0
    assert 0 <= scores.brier <= 2 + 1e-12
    assert sum(entry.count for entry in scores.reliability) == samples


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_precisions_are_scored_as_the_numbers_they_are(dtype: torch.dtype) -> None:
    logits, labels = random_batch(400, 10)
    logits = logits.to(dtype)
    expected = reference(logits.double().numpy(), labels.numpy())
    with torch.autocast("cpu", torch.bfloat16):
        scores = score(logits, labels)
    for name in SCALARS:
        assert getattr(scores, name) == pytest.approx(expected[name], rel=1e-10, abs=1e-12), name


@pytest.mark.slow
def test_many_batches_do_not_lose_digits() -> None:
    logits, labels = random_batch(50, 10)
    metrics = ClassificationMetrics()
    for _ in range(400):
        metrics.update(logits, labels)
    scores, once = metrics.compute(), score(logits, labels)
    assert scores.samples == 20_000
    for name in SCALARS:
        assert getattr(scores, name) == pytest.approx(getattr(once, name), rel=1e-12), name


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8, torch.int64, torch.uint16])
def test_labels_of_any_whole_type(dtype: torch.dtype) -> None:
    logits, labels = random_batch(40, 10)
    assert score(logits, labels.to(dtype)) == score(logits, labels)


def test_needs_no_gradient_and_mixes_with_inference_mode() -> None:
    logits, labels = random_batch(20, 3)
    metrics = ClassificationMetrics()
    with torch.inference_mode():
        metrics.update(logits, labels)
    metrics.update(logits.requires_grad_(), labels)
    assert metrics.compute().samples == 40
    assert metrics._sums is not None
    assert not metrics._sums.requires_grad


@pytest.mark.parametrize("kind", ["classification", "regression", "restoration"])
def test_update_and_merge_never_read_from_the_device(kind: str) -> None:
    # A tensor on "meta" has no values, so any attempt to read one fails.
    def gather() -> ClassificationMetrics | RegressionMetrics | RestorationDistance:
        numbers = torch.empty(8, 4, device="meta")
        if kind == "classification":
            classification = ClassificationMetrics()
            for _ in range(2):
                classification.update(numbers, torch.empty(8, dtype=torch.long, device="meta"))
            return classification
        stream = RegressionMetrics() if kind == "regression" else RestorationDistance()
        for _ in range(2):
            stream.update(numbers[:, :1], numbers[:, 1:2])
        return stream

    stream = gather()
    stream.merge(gather())
    assert stream._sums is not None
    assert stream._sums.device.type == "meta"
    assert stream._samples == 32


def test_sums_live_where_they_are_wanted_or_where_the_first_batch_lay() -> None:
    told, first = RestorationDistance(device="meta"), RestorationDistance()
    first.update(torch.empty(4, 3, device="meta"), torch.empty(4, 3, device="meta"))
    for distance in (told, first):
        distance.update(torch.zeros(4, 3), torch.ones(4, 3))
        assert distance._sums is not None
        assert distance._sums.device.type == "meta"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_update_does_not_wait_and_scores_are_the_same() -> None:
    logits, labels = random_batch(400, 10)
    on_device = logits.cuda()
    metrics = ClassificationMetrics()
    metrics.update(on_device, labels.cuda())
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        metrics.update(on_device, labels)
    finally:
        torch.cuda.set_sync_debug_mode(mode)
    metrics.merge(ClassificationMetrics())
    again = ClassificationMetrics(device="cpu")
    again.update(on_device, labels)
    again.merge(metrics)
    expected = score(logits, labels)
    for name in SCALARS:
        assert getattr(metrics.compute(), name) == pytest.approx(getattr(expected, name), rel=1e-9)
        assert getattr(again.compute(), name) == pytest.approx(getattr(expected, name), rel=1e-9)


@pytest.mark.parametrize(
    ("logits", "labels", "message"),
    [
        (torch.zeros(4, 3), torch.zeros(5, dtype=torch.long), r"4 class numbers.*int64 \[5\]"),
        (torch.zeros(4, 3), torch.zeros(4, 1, dtype=torch.long), r"4 class numbers.*\[4, 1\]"),
        (torch.zeros(4, 3), torch.zeros(4), r"4 class numbers.*float32 \[4\]"),
        (torch.zeros(4, 3), torch.zeros(4) + 0j, r"4 class numbers.*complex64 \[4\]"),
        (torch.zeros(4, 0), torch.zeros(4, dtype=torch.long), r"logits.*\[4, 0\].*quantities"),
        (torch.tensor(0.0), torch.zeros(1, dtype=torch.long), r"logits.*\[\]"),
        (torch.zeros(4, 3, 2), torch.zeros(4, dtype=torch.long), r"logits.*\[4, 3, 2\]"),
        (torch.zeros(4, 3, dtype=torch.long), torch.zeros(4, dtype=torch.long), r"floating-point.*int64"),
    ],
)
def test_refuses_what_does_not_fit(logits: torch.Tensor, labels: torch.Tensor, message: str) -> None:
    metrics = ClassificationMetrics()
    with pytest.raises(DataError, match=message):
        metrics.update(logits, labels)
    with pytest.raises(DataError, match="no samples"):
        metrics.compute()


@pytest.mark.parametrize("shape", [(50,), (50, 1)])
def test_a_single_output_is_the_logit_of_class_one(shape: tuple[int, ...]) -> None:
    generator = np.random.default_rng(0)
    outputs, labels = 3 * generator.normal(size=50), generator.integers(0, 2, 50)
    metrics = ClassificationMetrics()
    metrics.update(torch.from_numpy(outputs).reshape(shape), torch.from_numpy(labels))
    found = metrics.compute()
    probability = 1 / (1 + np.exp(-outputs))
    assert found.accuracy == pytest.approx(((outputs > 0) == labels).mean())
    assert found.nll == pytest.approx(-np.log(np.where(labels == 1, probability, 1 - probability)).mean(), rel=1e-6)
    beyond = ClassificationMetrics()
    beyond.update(torch.zeros(shape), torch.full((50,), 2))
    with pytest.raises(DataError, match="label"):
        beyond.compute()


@pytest.mark.parametrize("bad", [-1, 3, 2**40])
def test_labels_out_of_range_are_raised_by_compute(bad: int) -> None:
    metrics = ClassificationMetrics()
    metrics.update(torch.randn(4, 3), torch.tensor([0, bad, 2, bad]))
    metrics.update(torch.randn(4, 3), torch.tensor([0, 1, 2, 0]))
    with pytest.raises(DataError, match=r"^2 of 8.*floating-point"):
        metrics.compute()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_logits_that_are_no_numbers_are_raised_by_compute(bad: float) -> None:
    logits, labels = random_batch(6, 3)
    logits[4, 1] = bad
    metrics = ClassificationMetrics()
    metrics.update(logits, labels)
    with pytest.raises(DataError, match=r"^1 of 6.*logits"):
        metrics.compute()


def test_nothing_to_score() -> None:
    metrics = ClassificationMetrics()
    with pytest.raises(DataError, match="no samples"):
        metrics.compute()
    metrics.update(torch.zeros(0, 3), torch.zeros(0, dtype=torch.long))
    with pytest.raises(DataError, match="no samples"):
        metrics.compute()


def test_refuses_to_mix() -> None:
    metrics = ClassificationMetrics()
    metrics.update(*random_batch(4, 3))
    with pytest.raises(DataError, match=r"\[5\] after \[3\]"):
        metrics.update(*random_batch(4, 5))

    assert metrics.compute().samples == 4


@pytest.mark.parametrize("ignored", [None, 255, 2])
def test_dense_labels_have_an_iou_that_equals_sklearn(ignored: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(devices.VALUES_PER_PART, "cpu", 35)  # seven positions of five classes
    logits, labels = torch.randn(6, 5, 4, 3), torch.randint(0, 3, (6, 4, 3))
    logits[:, 4] = -9  # neither there nor predicted
    if ignored is not None:
        labels[0] = ignored
    metrics, half = ClassificationMetrics(ignore_label=ignored), ClassificationMetrics(ignore_label=ignored)
    metrics.update(logits[:3], labels[:3])
    half.update(logits[3:], labels[3:])
    metrics.merge(half)
    scores = metrics.compute()
    kept = labels != (-1 if ignored is None else ignored)
    expected = jaccard_score(labels[kept], logits.argmax(1)[kept], labels=[0, 1, 2, 3], average=None)
    assert scores.iou == pytest.approx((*expected[:2], None if ignored == 2 else expected[2], expected[3], None))
    known = [one for one in scores.iou if one is not None]
    assert scores.mean_iou == pytest.approx(np.mean(known))
    assert f"mean_iou {100 * np.mean(known):.1f} %" in str(scores)
    assert score(*random_batch(9, 3)).iou == ()


def test_docstring_example() -> None:
    results = doctest.testmod(shiftmend.evaluation.classification)
    assert results.attempted >= 3
    assert results.failed == 0


def test_restoration_distance_equals_numpy() -> None:
    random = np.random.default_rng(0)
    source, adapted = random.normal(size=(2, 50, 128))
    total = 0.0
    for image in range(50):
        total += np.abs(source[image] - adapted[image]).sum() / 128
    expected = total / 50
    assert restoration_distance(torch.from_numpy(source), torch.from_numpy(adapted)) == pytest.approx(expected)
    assert restoration_distance(torch.from_numpy(source), torch.from_numpy(source)) == 0


@pytest.mark.slow
@settings(deadline=None, max_examples=40)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=5), st.integers(0, 2**31))
def test_restoration_distance_streams(sizes: list[int], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    source, adapted = torch.randn(2, sum(sizes), 3, 2, 2, generator=generator).half()
    parts = [RestorationDistance(), RestorationDistance()]
    batches = zip(source.split(sizes), adapted.split(sizes), strict=True)
    for index, (left, right) in enumerate(batches):
        parts[index % 2].update(left, right)
    parts[0].merge(parts[1])
    expected = (source.double() - adapted.double()).abs().mean().item()
    assert parts[0].compute() == pytest.approx(expected, rel=1e-12)
    assert restoration_distance(source, adapted) == pytest.approx(expected, rel=1e-12)


def test_restoration_distance_refuses() -> None:
    with pytest.raises(DataError, match=r"\[4, 8\].*\[4, 1\]"):
        restoration_distance(torch.zeros(4, 8), torch.zeros(4, 1))
    with pytest.raises(DataError, match=r"features.*\[4\]"):
        restoration_distance(torch.zeros(4), torch.zeros(4))
    with pytest.raises(DataError, match=r"features.*\[4, 0\]"):
        restoration_distance(torch.zeros(4, 0), torch.zeros(4, 0))
    with pytest.raises(DataError, match="no samples"):
        restoration_distance(torch.zeros(0, 8), torch.zeros(0, 8))
    with pytest.raises(DataError, match=r"2 of 3.*features"):
        restoration_distance(torch.zeros(3, 2), torch.tensor([[torch.inf, torch.nan], [0.0, 0.0], [0.0, torch.nan]]))
