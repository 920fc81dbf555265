"""`verify` with a rehearsed profile: the estimate of a model, of which it must be known how it was adapted."""

from __future__ import annotations

import copy

import pytest
import torch
from rehearsed_world import Site, draw, rehearsed, trained
from torch import Tensor, nn

import shiftmend
from shiftmend.adaptation.result import Adaptation
from shiftmend.errors import DataError
from shiftmend.verification.estimate import Estimate

pytestmark = pytest.mark.slow


def verify(model: nn.Module, inputs: Tensor, **options: object) -> Estimate:
    found = shiftmend.verify(model, inputs, rehearsed(), batch_size=500, progress=False, **options)  # type: ignore[arg-type]
    assert found.estimate is not None
    assert found.to_json()["estimate"]["reliable"] == found.estimate.reliable
    return found.estimate


@pytest.fixture(scope="module")
def mended() -> tuple[Site, Adaptation]:
    clean = draw(500, 12)
    site = Site(clean.inputs + torch.linspace(-2, 2, 8), clean.labels)
    return site, shiftmend.adapt(trained()[0], site.inputs, rehearsed(), batch_size=500, progress=False)


def test_the_returned_model_has_the_estimate_that_the_result_had(mended: tuple[Site, Adaptation]) -> None:
    """Agreement with other candidates is not seen here, so other signals may lead."""
    site, result = mended
    assert "temperature" in result.manifest["calibration"]
    assert result.estimate is not None
    assert result.estimate.after is not None
    found = verify(result.model, site.inputs)
    assert found.reliable
    assert found.value == pytest.approx(result.estimate.after.value, abs=0.02)
    for adaptation in (result, result.manifest):
        assert verify(result.model, site.inputs, adaptation=adaptation) == found


def test_a_copy_with_the_same_weights_is_known_by_its_manifest_alone(mended: tuple[Site, Adaptation]) -> None:
    site, result = mended
    unmarked = copy.deepcopy(result.model)
    del unmarked.shiftmend_adaptation
    unknown = verify(unmarked, site.inputs)
    assert not unknown.reliable
    assert unknown.withheld is None
    assert "not known how" in str(unknown)
    assert "adaptation=" in str(unknown)
    assert verify(unmarked, site.inputs, adaptation=result) == verify(result.model, site.inputs)


def test_the_model_of_the_profile_is_untouched() -> None:
    model, _ = trained()
    site = draw(500, 14)
    found = verify(model, site.inputs)
    _, low, high = found.withheld or (found.value, found.low, found.high)
    assert low is not None
    assert high is not None
    assert low <= site.accuracy(model) <= high
    assert "not known" not in str(found)


def test_a_few_labels_narrow_the_estimate(mended: tuple[Site, Adaptation]) -> None:
    site, result = mended
    few = site.inputs[:60], site.labels[:60]
    found = verify(result.model, site.inputs, labelled=few)
    plain = verify(result.model, site.inputs)
    with torch.no_grad():
        correct = int((result.model(few[0]).argmax(1) == few[1]).sum())
    assert found == plain.with_labels(correct, 60)
    assert found.labelled is not None
    assert found.labelled[0] == pytest.approx(correct / 60)
    with pytest.raises(DataError, match="class numbers"):
        verify(result.model, site.inputs, labelled=(few[0], torch.randn(60, 4)))


def test_a_profile_that_was_not_rehearsed_gives_no_estimate() -> None:
    model, profile = trained()
    found = shiftmend.verify(model, draw(500, 14).inputs, profile, progress=False)
    assert found.estimate is None
    assert "estimate" not in found.to_json()
