"""Copies of all that a model holds, put back, and what goes into a file."""

from __future__ import annotations

from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import nn

from shiftmend.engine.modes import is_finite
from shiftmend.errors import ShiftmendError
from shiftmend.introspection.model_state import (
    check_types,
    full_state_dict,
    is_writable,
    on_device,
    restore,
    save_tensors,
    snapshot,
)
from shiftmend.research.networks import build

CPU = torch.device("cpu")
DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")],
    ),
]


@pytest.mark.parametrize("device", DEVICES)
def test_copies_have_the_values_and_types_of_what_they_are_copies_of(device: str) -> None:
    model = nn.Sequential(build("digit-cnn", classes=3, width=4), nn.Linear(3, 2).half()).to(device)
    with torch.no_grad():
        for number, value in enumerate(model.state_dict().values()):
            value.copy_(torch.arange(value.numel(), device=device).view_as(value) % 50 + number)
    copies = snapshot(model)
    state = model.state_dict()
    assert list(copies) == list(state)
    assert len({value.dtype for value in state.values()}) == 3
    for name, value in state.items():
        assert copies[name].dtype == value.dtype
        assert torch.equal(copies[name], value)
        assert copies[name].data_ptr() != value.data_ptr()
        assert not copies[name].requires_grad


class Adapter(nn.Module):
    """Its state dict holds the adapter alone, and it loads nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.adapter = nn.Linear(2, 3), nn.Linear(3, 3)
        self.register_buffer("calls", torch.zeros(1), persistent=False)
        self.register_buffer("one", torch.ones(1).expand(4))
        self.register_buffer("seen", torch.zeros(1, 2))
        self.register_buffer("nothing", None)
        self.register_buffer("graph", torch.eye(3).to_sparse(), persistent=False)
        self.register_buffer("later", torch.empty(2, device="meta"), persistent=False)

    def state_dict(self) -> dict[str, torch.Tensor]:  # type: ignore[override]
        return {name: value.detach() for name, value in self.named_parameters() if name.startswith("adapter.")}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:  # type: ignore[override]
        raise AssertionError("the model's own way to load a state cannot be relied on")


def test_what_is_put_back_is_all_that_was_there_whatever_the_state_dict_says() -> None:
    model = Adapter()
    before = snapshot(model)
    places = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 1
    model.calls += 1
    model.one, model.seen = torch.zeros(1).expand(4), torch.zeros(5, 2)  # as some models do in each pass
    restore(model, before)
    now = dict(model.named_parameters()) | dict(model.named_buffers())
    assert now.keys() == before.keys() | {"graph", "later"}
    assert all(torch.equal(now[name], before[name]) for name in before)
    model.seen += 1
    assert not before["seen"].any()  # the copy stays a copy
    assert {name: parameter.data_ptr() for name, parameter in model.named_parameters()} == places
    model.base.weight.data[0, 0] = torch.nan
    assert not is_finite(model, before)
    model.base.bias = nn.Parameter(torch.zeros(5))
    restore(model, before)
    assert torch.equal(model.base.bias, torch.zeros(5))  # of another shape: there is nothing to put back
    assert not dict(model.base.named_buffers())


def test_what_a_state_dict_leaves_out_is_added_sparse_tensors_too() -> None:
    model = Adapter()
    model.register_buffer("edges", torch.eye(3).to_sparse())
    parts = {"base.weight", "base.bias", "adapter.weight", "adapter.bias", "one", "seen", "edges"}
    assert full_state_dict(model).keys() == parts


@pytest.mark.filterwarnings("ignore:Sparse CSR")
def test_what_cannot_be_written_to() -> None:
    assert is_writable(torch.ones(3, 1))
    assert is_writable(torch.ones(()).expand(1))
    assert not is_writable(torch.ones(3, 1).expand(3, 2))
    assert not is_writable(torch.eye(3).to_sparse())
    assert not is_writable(torch.eye(3).to_sparse_csr())
    assert not is_writable(torch.empty(3, device="meta"))
    with torch.inference_mode():
        made = torch.ones(3)
    assert not is_writable(made)


def test_numbers_that_no_file_holds_are_named() -> None:
    good = {"weight": torch.ones(2), "waves": torch.ones(2, dtype=torch.complex64)}
    check_types(good)
    with pytest.raises(ShiftmendError, match=r"'finer' .*complex128"):
        check_types(good | {"finer": torch.ones(2, dtype=torch.complex128)})


def test_types_are_checked_of_tensors_that_share_memory_too() -> None:
    weight = torch.ones(2)
    check_types({"weight": weight, "bits": weight.view(torch.int32)})
    with pytest.raises(ShiftmendError, match=r"'finer'.*complex128"):
        check_types({"weight": weight, "finer": torch.ones(2, dtype=torch.complex128)})


def test_a_file_is_written_from_where_the_tensors_lie(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weight, channels_last = torch.rand(3, 4), torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last)
    given = {"weight": weight, "tied": weight, "row": weight[1], "turned": weight.T, "last": channels_last}
    given["bits"], given["negative"] = weight.view(torch.int32), torch.tensor([1 + 2j]).conj().imag
    written: list[dict[str, torch.Tensor]] = []
    save = safetensors.torch.save_file
    monkeypatch.setattr(safetensors.torch, "save_file", lambda t, *rest: (written.append(t), save(t, *rest)))
    save_tensors(tmp_path / "file", given, {"a": "b"})
    assert written[0]["weight"].data_ptr() == weight.data_ptr()
    found = safetensors.torch.load_file(tmp_path / "file")
    assert found.keys() == given.keys()
    assert all(torch.equal(found[name], value) for name, value in given.items())
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


def test_a_file_that_cannot_be_written_is_an_error_of_the_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise safetensors.SafetensorError("No space left on device")

    monkeypatch.setattr(safetensors.torch, "save_file", full)
    with pytest.raises(OSError, match="No space left") as error:
        save_tensors(tmp_path / "file", {"weight": torch.ones(2)})
    assert error.value.strerror == "No space left on device"
    assert not [*tmp_path.iterdir()]


def test_a_model_is_moved_for_the_length_of_a_block_also_if_it_fails() -> None:
    model = nn.Linear(2, 2)
    moves: list[torch.device] = []
    model.to = lambda place: moves.append(place)  # type: ignore[method-assign, assignment]
    with on_device(model, CPU):
        pass
    assert moves == []
    with pytest.raises(KeyError), on_device(model, torch.device("meta")):
        raise KeyError
    assert moves == [torch.device("meta"), CPU]


class Counts(nn.Module):
    """Writes into one buffer and replaces another whenever it runs; others can be neither written nor compared."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("more", torch.zeros(()).expand(1))
        self.register_buffer("learnt", torch.zeros(1, requires_grad=True))
        self.register_buffer("last", torch.zeros(3))
        self.register_buffer("nothing", None)
        self.register_buffer("unknown", torch.full((1,), torch.nan).expand(4))
        self.register_buffer("graph", torch.eye(3).to_sparse())
        self.register_buffer("empty", torch.empty(3, device="meta"), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.more += 1
        self.learnt.data += 1
        self.last = x.mean(0)
        return x


def test_buffers_that_change_in_forward_are_as_before() -> None:
    model = Counts()
    before = dict(model._buffers)
    with on_device(model, CPU):
        model(torch.ones(2, 3))
        assert model.calls == 1
    assert all(model._buffers[name] is value for name, value in before.items())
    assert model.calls == model.more == model.learnt == 0
    assert torch.equal(model.last, torch.zeros(3))
    assert model.last._version == 0  # not written to: a graph that holds it can still be run backward
