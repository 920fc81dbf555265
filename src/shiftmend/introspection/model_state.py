"""The tensors of a model by name: copy, restore, move to a device, and save.

A model's own `state_dict` may leave tensors out or rename them, e.g. with adapters. So snapshots read the parameters
and buffers directly.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import safetensors.torch
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from shiftmend.errors import ShiftmendError
from shiftmend.utils.devices import device_of


def is_trainable(parameter: Tensor) -> bool:
    """Tell whether gradients can train a parameter. Integers and 8-bit floats cannot be trained."""
    return (parameter.is_floating_point() and parameter.element_size() > 1) or parameter.is_complex()


def is_writable(tensor: Tensor) -> bool:
    """Tell whether a tensor can be written in place.

    Sparse tensors, tensors on `meta`, tensors made in inference mode, and expanded ones cannot.
    """
    dense = tensor.layout == torch.strided and not tensor.is_meta and not tensor.is_inference()
    return dense and all(stride > 0 or size < 2 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def find_owners(model: nn.Module) -> list[str]:
    """List the modules that own parameters; a parametrised layer does, its helper modules do not.

    A `ParameterList` never runs by itself, so the module that holds it counts as well.
    """
    lists = (nn.ParameterList, nn.ParameterDict)
    return [
        name
        for name, module in model.named_modules()
        if "parametrizations" not in name.split(".")
        and (
            module._parameters
            or is_parametrized(module)
            or any(isinstance(child, lists) for child in module.children())
        )
    ]


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and buffers of a model by name, detached but not copied.

    Sparse tensors and tensors on `meta` are left out. A tensor that two modules share appears under both names; a
    module that is registered twice appears under its first name only.
    """
    return {
        name: tensor.detach()
        for name, _, tensor in _walk(model)
        if not tensor.is_meta and tensor.layout == torch.strided
    }


def snapshot(model: nn.Module) -> dict[str, Tensor]:
    """Copy all parameters and buffers, in a few kernels."""
    own = named_tensors(model)
    copies = {name: torch.empty_like(value) for name, value in own.items()}
    # One list with several dtypes confuses some versions of torch.
    for dtype in {value.dtype for value in own.values()}:
        alike = [name for name, value in own.items() if value.dtype == dtype]
        torch._foreach_copy_([copies[name] for name in alike], [own[name] for name in alike])
    return copies


def restore(model: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Restore the values of a `snapshot`, in place where possible."""
    with torch.no_grad():
        for name, module, tensor in _walk(model):
            value, own = tensors.get(name), name.rpartition(".")[2]
            if value is None:
                continue
            if tensor.shape == value.shape and is_writable(tensor):
                tensor.copy_(value)
            elif own in module._buffers:
                module._buffers[own] = value.to(tensor.device, copy=True)


def full_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """Return the `state_dict` of a model, together with the tensors that it leaves out."""
    state = {name: value for name, value in model.state_dict().items() if isinstance(value, Tensor)}
    missing = {
        name: tensor.detach()
        for name, module, tensor in _walk(model)
        if name not in state and name.rpartition(".")[2] not in module._non_persistent_buffers_set
    }
    # The state dict may refer to the same memory under another name.
    present = {_address(value) for value in state.values()} if missing else set()
    return state | {name: tensor for name, tensor in missing.items() if _address(tensor) not in present}


@contextmanager
def on_device(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Move a model to a device inside the block; afterwards all buffers have their former values."""
    home = device_of(model)
    owned = [(module._buffers, name, buffer) for module in model.modules() for name, buffer in module._buffers.items()]
    kept = [buffer.detach().clone() if buffer is not None and is_writable(buffer) else None for _, _, buffer in owned]
    try:
        if home != device:
            model.to(device)
        yield
    finally:
        if home != device:
            model.to(home)
        with torch.no_grad():
            for (buffers, name, buffer), before in zip(owned, kept, strict=True):
                buffers[name] = buffer
                if buffer is not None and before is not None and not torch.equal(buffer, before):
                    buffer.copy_(before)


def save_tensors(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str] | None = None) -> None:
    """Write a safetensors file without a copy of all tensors in memory.

    `path` should come from `files.replacing`, because an existing file is overwritten.
    """
    packed = _pack(tensors)
    check_types(packed)
    try:
        safetensors.torch.save_file(packed, path, metadata)
    except safetensors.SafetensorError as error:
        raise OSError(errno.EIO, str(error)) from error


def check_types(tensors: dict[str, Tensor]) -> None:
    """Raise `ShiftmendError` if safetensors cannot store the dtype of a tensor; one tensor of each dtype is tried."""
    by_size = sorted(tensors, key=lambda name: -tensors[name].numel())
    smallest = {tensors[name].dtype: name for name in by_size}
    for dtype, name in smallest.items():
        try:
            safetensors.torch.save(_pack({name: tensors[name]}))
        except KeyError as error:
            raise ShiftmendError(
                f"Expected tensors that safetensors can store, got {name!r} of type "
                f"{str(dtype).removeprefix('torch.')}. Convert it before adapting, e.g. to complex64, or by "
                "dequantize()."
            ) from error


def _pack(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copy tensors that share memory, or whose memory layout a safetensors file cannot hold."""
    seen: set[int] = set()
    result = {}
    for name, given in tensors.items():
        value = given.resolve_conj().resolve_neg().contiguous()
        memory = value.untyped_storage().data_ptr()
        result[name] = value.clone() if memory in seen else value
        seen.add(memory)
    return result


def _address(tensor: Tensor) -> int:
    return tensor.data_ptr() if tensor.layout == torch.strided else id(tensor)


def _walk(model: nn.Module) -> Iterator[tuple[str, nn.Module, Tensor]]:
    """Yield every parameter and buffer with its name and the module that owns it."""
    for path, module in model.named_modules():
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None:
                yield f"{path}.{name}" if path else name, module, tensor
