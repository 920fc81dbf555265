from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import Tensor, nn

from shiftmend.introspection.input_map import (
    OFFSET,
    SCALE,
    attach_input_map,
    detach_input_map,
    has_input_map,
    load_adapted_state,
    set_input_map,
)
from shiftmend.introspection.taps import Tap, attach_taps


def make_model() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 2)).eval()


SCALES, OFFSETS = torch.tensor([2.0, 0.5, 1.0]).view(3, 1, 1), torch.tensor([0.0, 1.0, -1.0]).view(3, 1, 1)


@pytest.fixture
def inputs() -> Tensor:
    return torch.randn(5, 3, 8, 8)


def test_the_model_sees_mapped_inputs_and_keeps_its_names(inputs: Tensor) -> None:
    model = make_model()
    plain = copy.deepcopy(model)
    attach_input_map(model, SCALES, OFFSETS)
    assert torch.equal(model(inputs), plain(inputs * SCALES + OFFSETS))
    assert [name for name, _ in model.named_modules()] == [name for name, _ in plain.named_modules()]
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in plain.named_parameters()]
    assert len(model) == len(plain)
    assert torch.equal(model(input=inputs), model(inputs)), "the first input may be given by name"


def test_another_map_replaces_the_first_and_detaching_leaves_nothing(inputs: Tensor) -> None:
    model = make_model()
    plain = copy.deepcopy(model)
    attach_input_map(model, SCALES, OFFSETS)
    attach_input_map(model, 3 * SCALES, OFFSETS)
    assert torch.equal(model(inputs), plain(3 * inputs * SCALES + OFFSETS))
    place = getattr(model, SCALE).data_ptr()
    set_input_map(model, SCALES, -OFFSETS)
    assert getattr(model, SCALE).data_ptr() == place
    assert torch.equal(model(inputs), plain(inputs * SCALES - OFFSETS))
    detach_input_map(model)
    assert not has_input_map(model)
    assert not model._forward_pre_hooks
    assert model.state_dict().keys() == plain.state_dict().keys()


def test_copies_and_files_keep_the_map(inputs: Tensor) -> None:
    model = make_model()
    attach_input_map(model, SCALES, OFFSETS)
    expected = model(inputs)
    other = copy.deepcopy(model)
    set_input_map(other, -SCALES, OFFSETS)
    assert torch.equal(model(inputs), expected), "a copy has a map of its own"
    attach_input_map(other, SCALES, OFFSETS)
    assert len(other._forward_pre_hooks) == 1
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=False)(inputs), expected)
    exported = torch.export.export(model, (inputs,)).module()
    assert torch.allclose(exported(inputs), expected)


def test_hooks_of_another_process_do_not_take_the_place_of_the_map(
    inputs: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model()
    attach_input_map(model, SCALES, OFFSETS)
    expected = model(inputs)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    [number] = model._forward_pre_hooks
    # A new process counts its hooks from the beginning.
    monkeypatch.setattr(torch.utils.hooks.RemovableHandle, "next_id", number)
    loaded = torch.load(file, weights_only=False)
    with attach_taps(loaded, {"whole": Tap("whole", "", "input")}) as recorder:
        assert torch.equal(loaded(inputs), expected)
        recorder.read()
    assert torch.equal(loaded(inputs), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_inputs_keep_their_type(dtype: torch.dtype, inputs: Tensor) -> None:
    model = make_model().to(dtype)
    attach_input_map(model, SCALES, OFFSETS)
    assert model(inputs.to(dtype)).dtype == dtype


def test_saved_weights_bring_their_map_along(inputs: Tensor) -> None:
    model, fresh = make_model(), make_model()
    attach_input_map(model, SCALES, OFFSETS)
    load_adapted_state(fresh, model.state_dict())
    assert torch.equal(fresh(inputs), model(inputs))
    assert torch.equal(getattr(fresh, OFFSET), OFFSETS)
    plain = make_model()
    load_adapted_state(fresh, plain.state_dict())
    assert torch.equal(fresh(inputs), plain(inputs)), "weights without a map take the map away"
    with pytest.raises(RuntimeError, match="Missing"):
        load_adapted_state(nn.Sequential(nn.Linear(2, 2)), {SCALE: SCALES, OFFSET: OFFSETS})
