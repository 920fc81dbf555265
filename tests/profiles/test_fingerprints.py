from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from shiftmend.errors import ShiftmendError
from shiftmend.introspection.model_state import full_state_dict
from shiftmend.profiles import fingerprints
from shiftmend.profiles.fingerprints import (
    InputSummary,
    architecture,
    digest,
    start_digest,
    tensor_bytes,
    weights,
)
from shiftmend.stats.histograms import RangeTracker
from shiftmend.utils.devices import VALUES_PER_PART


def network(width: int = 8, name: str = "first") -> nn.Module:
    torch.manual_seed(0)
    layers = OrderedDict([(name, nn.Conv2d(3, width, 3)), ("norm", nn.BatchNorm2d(width)), ("last", nn.Linear(4, 2))])
    return nn.Sequential(layers)


# --- models ----------------------------------------------------------------------------------------------------------


def test_architecture_is_names_and_shapes_and_nothing_else() -> None:
    model = network()
    print_ = architecture(model)
    assert len(print_) == 64
    assert architecture(network()) == print_
    assert architecture(network(width=9)) != print_
    assert architecture(network(name="second")) != print_
    assert architecture(nn.Sequential(OrderedDict([*model.named_children(), ("more", nn.Linear(1, 1))]))) != print_
    with torch.no_grad():
        model.get_parameter("first.weight").add_(1)
    model.get_buffer("norm.running_mean").add_(1)
    assert architecture(model.train()) == architecture(model.half()) == print_
    # transposed: as many numbers, another shape
    assert architecture(nn.Linear(2, 3)) != architecture(nn.Linear(3, 2))


def test_weights_follow_every_number() -> None:
    model = network()
    print_ = weights(model)
    assert weights(network()) == print_
    for name in model.state_dict():
        changed = network()
        with torch.no_grad():
            changed.state_dict()[name].view(-1)[0] += 1
        assert weights(changed) != print_, name
    assert weights(network(name="second")) != print_
    swapped = network()
    with torch.no_grad():
        mean, bias = swapped.get_buffer("norm.running_mean"), swapped.get_parameter("norm.bias")
        mean += 1
        print_ = weights(swapped)
        mean -= 1
        bias += 1
    assert weights(swapped) != print_  # the same numbers under other names


class Partial(nn.Sequential):
    """Leaves some of its weights out of its state dict, and calls others otherwise."""

    def state_dict(self, *args: Any, **options: Any) -> dict[str, Any]:
        return {"conv": self.first.weight.detach(), "version": 3}


def test_a_state_dict_of_ones_own_hides_no_weights() -> None:
    model = network()
    ordinary = model.state_dict()
    assert full_state_dict(model).keys() == ordinary.keys()
    print_ = weights(Partial(OrderedDict(model.named_children())))
    for name, value in ordinary.items():
        changed = Partial(OrderedDict(network().named_children()))
        state = full_state_dict(changed)
        assert state.keys() == ordinary.keys() - {"first.weight"} | {"conv"}
        state["conv" if name == "first.weight" else name].view(-1)[0] += 1
        assert weights(changed) != print_, name
        assert value.shape == state["conv" if name == "first.weight" else name].shape


def test_sparse_weights_are_refused_with_what_to_do() -> None:
    model = network()
    model.register_buffer("graph", torch.eye(3).to_sparse(), persistent=False)
    weights(model)
    model.register_buffer("edges", torch.eye(3).to_sparse())
    with pytest.raises(ShiftmendError, match=r"^'edges' of the model is a sparse tensor, .* with persistent=False$"):
        weights(model)


def test_weights_do_not_depend_on_memory_or_modes() -> None:
    model = network()
    print_ = weights(model)
    assert weights(model.eval()) == print_
    assert weights(model.requires_grad_(False)) == print_
    assert weights(model.to(memory_format=torch.channels_last)) == print_
    assert not model.get_parameter("first.weight").is_contiguous()
    transposed = network()
    last = transposed.get_submodule("last")
    last.weight = nn.Parameter(last.weight.detach().T.contiguous().T)
    assert not last.weight.is_contiguous()
    assert weights(transposed) == print_


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_weights_do_not_depend_on_the_device() -> None:
    assert weights(network().cuda()) == weights(network())


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.bool, torch.int64, torch.uint8], ids=str
)
def test_bytes_of_tensors_of_any_kind(dtype: torch.dtype) -> None:
    values = torch.tensor([[0, 1, 2], [3, 4, 5]]).to(dtype)
    assert len(tensor_bytes(values)) == 6 * values.element_size()
    assert tensor_bytes(values.T) == tensor_bytes(values.T.contiguous()) != tensor_bytes(values) or dtype == torch.bool
    assert tensor_bytes(values[:0]) == b""
    assert tensor_bytes(values[0, 1]) == tensor_bytes(values.reshape(-1)[1:2])
    if dtype != torch.bfloat16:
        assert tensor_bytes(values) == values.numpy().tobytes()


def test_models_without_parameters_have_a_fingerprint() -> None:
    assert architecture(nn.ReLU()) == weights(nn.ReLU()) == hashlib.sha256(b"").hexdigest()


# --- inputs ----------------------------------------------------------------------------------------------------------


def photographs(count: int = 300, seed: int = 0) -> Tensor:
    """Smooth random colour images in [0, 1], reddish as many photographs are."""
    generator = torch.Generator().manual_seed(seed)
    coarse = torch.randn(count, 3, 5, 5, generator=generator) + torch.tensor([0.3, 0.0, -0.5])[:, None, None]
    smooth = nn.functional.interpolate(coarse, size=16, mode="bilinear")
    return torch.sigmoid(2 * smooth)


def summary(inputs: Tensor) -> InputSummary:
    return InputSummary.from_batches(inputs.split(64))


HOME = summary(photographs())


def test_summary_against_numpy() -> None:
    images = photographs()
    values = images.double().numpy()
    assert HOME.shape == (3, 16, 16)
    assert HOME.dtype == "float32"
    assert HOME.low == float(images.min())
    assert HOME.high == float(images.max())
    np.testing.assert_allclose(HOME.mean, values.mean((0, 2, 3)), atol=1e-6)
    np.testing.assert_allclose(HOME.deviation, values.std((0, 2, 3)), atol=1e-6)


@pytest.mark.parametrize("shape", [(7,), (), (200, 4), (17, 5, 5)])
def test_where_channels_are_not_few_one_number_describes_all(shape: tuple[int, ...]) -> None:
    inputs = torch.randn(50, *shape)
    found = summary(inputs)
    assert found.shape == shape
    np.testing.assert_allclose(found.mean, [inputs.double().mean().item()], atol=1e-6)
    np.testing.assert_allclose(found.deviation, [inputs.double().std(correction=0).item()], atol=1e-6)


def test_signals_are_described_by_channel() -> None:
    inputs = torch.randn(50, 2, 100) + torch.tensor([0.0, 5.0])[:, None]
    np.testing.assert_allclose(summary(inputs).mean, inputs.double().mean((0, 2)).numpy(), atol=1e-6)


def test_only_so_many_samples_are_looked_at() -> None:
    seen: list[int] = []

    def batches():  # type: ignore[no-untyped-def]
        for number in range(10):
            seen.append(number)
            yield torch.full((30, 2), float(number))

    found = InputSummary.from_batches(batches(), most=70)
    assert seen == [0, 1, 2]
    assert found.high == 2.0
    np.testing.assert_allclose(found.mean, [(0 * 30 + 1 * 30 + 2 * 10) / 70], atol=1e-6)


def test_samples_together_against_numpy() -> None:
    torch.manual_seed(0)
    first, second = torch.rand(40, 3, 5, 5), 2 + 3 * torch.rand(60, 3, 5, 5)
    found = InputSummary.mix([summary(first), summary(second)], [40, 60])
    both = torch.cat([first, second]).double().numpy()
    assert (found.low, found.high) == (pytest.approx(both.min()), pytest.approx(both.max()))
    np.testing.assert_allclose(found.mean, both.mean((0, 2, 3)), atol=1e-5)
    np.testing.assert_allclose(found.deviation, both.std((0, 2, 3)), atol=1e-5)
    grey = summary(torch.rand(10, 1, 5, 5))
    assert InputSummary.mix([grey, summary(first)], [1, 1]) == grey


def test_json_and_back() -> None:
    for inputs in (photographs(), torch.zeros(3, 2), torch.arange(6), (photographs() * 255).to(torch.uint8)):
        found = summary(inputs)
        assert InputSummary.from_json(json.loads(json.dumps(found.to_json()))) == found
    named = replace(HOME, columns=("1100", "T/°C"))
    stored = json.loads(json.dumps(named.to_json()))
    assert InputSummary.from_json(stored) == named
    # Files without names are as they were before there were names.
    assert "columns" not in HOME.to_json()
    bad = [stored | {"columns": names} for names in ("ab", [1], ["a", "a"], None)]
    for wrong in (None, [], {}, {"shape": [3]}, "text", stored | {"more": 1}, *bad):
        with pytest.raises(ShiftmendError, match="description of its inputs"):
            InputSummary.from_json(wrong)


@pytest.mark.slow
def test_another_normalisation_is_noticed() -> None:
    images = photographs(seed=1)
    mean, deviation = (
        torch.tensor([0.485, 0.456, 0.406])[:, None, None],
        torch.tensor([0.229, 0.224, 0.225])[:, None, None],
    )
    versions = {
        "[0, 1]": images,
        "[0, 255]": images * 255,
        "[-1, 1]": images * 2 - 1,
        "[-0.5, 0.5]": images - 0.5,
        "ImageNet": (images - mean) / deviation,
    }
    for at_home, home in versions.items():
        for here, target in versions.items():
            found = summary(home).differences(summary(target))
            if at_home == here:
                assert found == []
            else:
                assert len(found) == 1, (at_home, here)
                assert "another normalisation" in found[0]


def test_another_order_of_channels_is_noticed() -> None:
    images = photographs(seed=1)
    for home, target in ((images, images.flip(1)), (images.flip(1), images), (images * 255, images.flip(1) * 255)):
        found = summary(home).differences(summary(target))
        assert len(found) == 1
        assert "BGR instead of RGB" in found[0]


def test_another_type_or_shape_is_noticed() -> None:
    images = photographs(seed=1)
    assert "float64" in HOME.differences(summary(images.double()))[0]
    bytes_ = HOME.differences(summary((images * 255).to(torch.uint8)))
    assert len(bytes_) == 2
    assert "uint8" in bytes_[0]
    for other in (images[:, :1], images.movedim(1, -1), images.flatten(1), images[:, :, None]):
        found = HOME.differences(summary(other))
        assert len(found) == 1
        assert "shape" in found[0]
    assert HOME.differences(summary(images[:, :, 2:-2, 4:-4])) == [
        f"their size is [{images.shape[2] - 4}, {images.shape[3] - 8}], at the source it was {list(images.shape[2:])}: "
        "scaled?"
    ]


def noisy(images: Tensor) -> Tensor:
    return (images + 0.08 * torch.randn(images.shape, generator=torch.Generator().manual_seed(0))).clamp(0, 1)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_what_a_new_device_does_is_not_taken_for_another_preprocessing(seed: int) -> None:
    """These are shifts that adapting is for: a warning at each of them would soon be read by nobody."""
    images = photographs(seed=seed)
    grey = images.mean(1, keepdim=True).expand(-1, 3, -1, -1)
    shifts = {
        "identical": images,
        "other samples": photographs(seed=seed + 10),
        "inverted": 1 - images,
        "fog": images * 0.6 + 0.4,
        "brighter": (images + 0.3).clamp(0, 1),
        "darker": images * 0.7,
        "less contrast": (images - 0.5) * 0.6 + 0.5,
        "noise": noisy(images),
        "grey": grey,
        "tinted": images * torch.tensor([0.8, 0.9, 1.0])[:, None, None],
        "blurred": nn.functional.avg_pool2d(images, 3, 1, 1, count_include_pad=False),
        "few samples": images[:20],
    }
    for name, target in shifts.items():
        assert HOME.differences(summary(target)) == [], name


def test_constant_inputs_do_not_break_the_comparison() -> None:
    flat = summary(torch.zeros(4, 3, 2, 2))
    assert "normalisation" in flat.differences(summary(torch.ones(4, 3, 2, 2)))[0]


@pytest.mark.parametrize("shape", [(20, 3, 4, 4), (20, 7)])
def test_inputs_are_summarised_a_part_at_a_time(shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    whole = InputSummary.from_batches([values])
    monkeypatch.setitem(VALUES_PER_PART, "cpu", 3 * values[0].numel())
    update = RangeTracker.update
    rows: list[int] = []
    monkeypatch.setattr(RangeTracker, "update", lambda self, part: (rows.append(part.numel()), update(self, part)))
    assert InputSummary.from_batches([values]) == whole
    assert rows == [size * values[0].numel() for size in (3, 3, 3, 3, 3, 3, 2)]


def test_sizes_that_vary_between_batches_are_any() -> None:
    torch.manual_seed(0)
    batches = [torch.randn(5, length, 2) + length for length in (10, 14, 30)]  # the last has too many for channels
    summary = InputSummary.from_batches(batches)
    every = torch.cat([batch.flatten() for batch in batches]).double()
    assert (summary.shape, summary.sizes) == ((0, 2), ("any", "2"))
    assert summary.mean[0] == pytest.approx(every.mean().item(), abs=1e-5)
    assert summary.deviation[0] == pytest.approx(every.std(unbiased=False).item(), abs=1e-5)
    assert InputSummary.from_json(json.loads(json.dumps(summary.to_json()))) == summary
    assert summary.differences(InputSummary.from_batches(batches[1:])) == []
    assert summary.differences(InputSummary.from_batches([batches[1], batches[2].repeat(2, 1, 1)])) == []
    assert InputSummary.from_batches(batches[:1]).differences(summary)[0].startswith("their values")
    assert summary.differences(InputSummary.from_batches([batches[0][..., :1]]))[0] == (
        "their size is [1], at the source it was [2]: scaled?"
    )


@pytest.mark.parametrize("limit", [0, 1 << 30])
def test_a_digest_in_the_background_is_the_same(limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fingerprints, "MAX_BACKGROUND_BYTES", limit)
    values = torch.randn(64, 3, 4, 4)
    waiting = start_digest(values)
    assert waiting() == waiting() == digest(values)
    assert waiting() != start_digest(values + 1)()
