"""All that a model holds, by name: copied, put back, and ready for a file.

A model's own `state_dict` may leave tensors out or rename them, as one of adapters does; a run cannot go by it.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from pathlib import Path

import safetensors.torch
import torch
from torch import Tensor, nn

from shiftmend.errors import ShiftmendError
from shiftmend.utils.devices import is_writable


def trainable(parameter: Tensor) -> bool:
    """Whether it can be trained; whole numbers cannot, nor those of 8 bits, which torch does not reckon with."""
    return (parameter.is_floating_point() and parameter.element_size() > 1) or parameter.is_complex()


def held(model: nn.Module) -> dict[str, Tensor]:
    """All weights and statistics, but for sparse buffers, which no training changes."""
    return {
        name: tensor.detach()
        for name, _, tensor in _places(model)
        if not tensor.is_meta and tensor.layout == torch.strided
    }


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Copies of them, made by a few kernels."""
    own = held(model)
    copies = {name: torch.empty_like(value) for name, value in own.items()}
    for dtype in {value.dtype for value in own.values()}:  # in one list, some versions of torch mistake their types
        alike = [name for name, value in own.items() if value.dtype == dtype]
        torch._foreach_copy_([copies[name] for name in alike], [own[name] for name in alike])
    return copies


def put_back(model: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Give a model the values that `tensors_of` had copied, in the same memory wherever they fit there."""
    with torch.no_grad():
        for name, module, tensor in _places(model):
            value, own = tensors.get(name), name.rpartition(".")[2]
            if value is None:
                continue
            if tensor.shape == value.shape and is_writable(tensor):
                tensor.copy_(value)
            elif own in module._buffers:
                module._buffers[own] = value.to(tensor.device, copy=True)


def whole_state(model: nn.Module) -> dict[str, Tensor]:
    """The tensors of a model's `state_dict`, and those that one of its own leaves out."""
    state = {name: value for name, value in model.state_dict().items() if isinstance(value, Tensor)}
    missing = {
        name: tensor.detach()
        for name, module, tensor in _places(model)
        if name not in state and name.rpartition(".")[2] not in module._non_persistent_buffers_set
    }
    there = {_memory(value) for value in state.values()} if missing else set()  # under another name
    return state | {name: tensor for name, tensor in missing.items() if _memory(tensor) not in there}


def as_file(tensors: dict[str, Tensor], metadata: dict[str, str] | None = None) -> bytes:
    """The content of a safetensors file, which holds nearly every kind of number."""
    try:
        return safetensors.torch.save(tensors, metadata)
    except KeyError as error:
        name, tensor = next((name, tensor) for name, tensor in tensors.items() if tensor.dtype == error.args[0])
        raise ShiftmendError(
            f"{name!r} holds numbers of the type {str(tensor.dtype).removeprefix('torch.')}, which a safetensors file "
            "cannot; convert them before the model is adapted, e.g. complex128 to complex64, or by dequantize()"
        ) from error


def save_tensors(place: Path, tensors: dict[str, Tensor], metadata: dict[str, str] | None = None) -> None:
    """Write a safetensors file from where the tensors lie: as bytes they would be in memory twice more.

    `place` is one of `files.replacing`: what is there is replaced, be it a device.
    """
    packed = _packed(tensors)
    check_types(packed)
    try:
        safetensors.torch.save_file(packed, place, metadata)
    except safetensors.SafetensorError as error:
        raise OSError(errno.EIO, str(error)) from error


def _packed(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """With copies of those that share memory, wholly or in part, or lie in it otherwise than a safetensors file can."""
    seen: set[int] = set()
    result = {}
    for name, given in tensors.items():
        value = given.resolve_conj().resolve_neg().contiguous()
        memory = value.untyped_storage().data_ptr()
        result[name] = value.clone() if memory in seen else value
        seen.add(memory)
    return result


def check_types(tensors: dict[str, Tensor]) -> None:
    """Refuse what `as_file` would, before any work is lost: the smallest tensor of each type is tried."""
    by_size = sorted(tensors, key=lambda name: -tensors[name].numel())
    one_each = {tensors[name].dtype: name for name in by_size}
    as_file(_packed({name: tensors[name] for name in one_each.values()}))


def _memory(tensor: Tensor) -> int:
    return tensor.data_ptr() if tensor.layout == torch.strided else id(tensor)


def _places(model: nn.Module) -> Iterator[tuple[str, nn.Module, Tensor]]:
    """Every parameter and buffer, with its name and the module that has it."""
    for path, module in model.named_modules():
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None:
                yield f"{path}.{name}" if path else name, module, tensor
