"""An emulated device `away`: its tensors lie on the CPU, but it refuses what Apple's `mps` refuses or gets wrong.

It refuses float64, also in copies to the host; copies in the background, which may read memory that is freed by then;
and work on tensors of two devices. The device is registered for a whole process, so the test starts one of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend

NAME = "away"
CPU = torch.device("cpu")
aten = torch.ops.aten
WIDE = (torch.float64, torch.complex128)
COPIES = (aten._to_copy.default, aten.copy_.default, aten._copy_from.default)
TAKES_INDICES = (aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default)
HALVED = ("linear", "conv2d", "matmul")


class Backend(_DummyBackendModule):
    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16]


class Away(Tensor):
    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> Away:
        return Tensor._make_wrapper_subclass(
            cls, inner.shape, inner.stride(), inner.storage_offset(), dtype=inner.dtype, device=torch.device(NAME, 0)
        )

    def __init__(self, inner: Tensor) -> None:
        self.inner = inner

    def __getitem__(self, key: Any) -> Tensor:
        return Tensor.__getitem__(self, torch.tensor(key) if isinstance(key, list) else key)

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.inner.untyped_storage()

    def data_ptr(self) -> int:
        return self.inner.data_ptr()

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        if id(self) not in memo:
            new = Away(self.inner.detach().clone())
            parameter = isinstance(self, nn.Parameter)
            memo[id(self)] = nn.Parameter(new, self.requires_grad) if parameter else new
        found: Tensor = memo[id(self)]
        return found

    @property
    def data(self) -> Tensor:
        return Tensor.data.__get__(self)

    @data.setter
    def data(self, value: Away) -> None:
        Tensor.data.__set__(self, value)
        self.inner = value.inner

    @classmethod
    def __torch_dispatch__(cls, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(operator, args, kwargs or {})

    __torch_function__ = torch._C._disabled_torch_function_impl


def run(operator: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run an operator on the CPU, or refuse it as the device would."""
    given = tree_leaves((args, kwargs))
    tensors = [part for part in given if isinstance(part, Tensor)]
    away = [part for part in tensors if isinstance(part, Away)]
    kinds = [part.type for part in given if isinstance(part, torch.device)]
    lands = NAME in kinds or (bool(away) and "cpu" not in kinds)
    if operator in COPIES:
        lands = isinstance(args[0], Away) if len(tensors) > 1 else lands
        between = len(away) == 1 if len(tensors) > 1 else lands != bool(away)
        if between and (kwargs.get("non_blocking") or args[2:] == (True,)):
            raise RuntimeError("a copy in the background")
        if between and (kwargs.get("dtype") in WIDE or any(part.dtype in WIDE for part in tensors)):
            raise TypeError("a copy from or to float64")
    elif away and operator not in TAKES_INDICES and any(part.ndim for part in tensors if not isinstance(part, Away)):
        raise RuntimeError(f"{operator} of tensors on two devices")
    owners = {id(part.inner): part for part in away}

    def inside(part: Any) -> Any:
        return part.inner if isinstance(part, Away) else CPU if isinstance(part, torch.device) else part

    def outside(part: Any) -> Any:
        if not isinstance(part, Tensor) or id(part) in owners:
            return owners.get(id(part), part)
        if lands and part.dtype in WIDE:
            raise TypeError(f"{operator} gives float64")
        return Away(part) if lands else part

    result = tree_map(outside, operator(*tree_map(inside, args), **tree_map(inside, kwargs)))
    for part in away:
        if (part.shape, part.stride()) != (part.inner.shape, part.inner.stride()):
            with torch._C._DisableTorchDispatch():
                Tensor.data.__set__(part, Away(part.inner))
    return return_and_correct_aliasing(operator, args, kwargs, result) if lands and away else result


def register() -> list[torch.library.Library]:
    """Register the device; the libraries that are returned must be kept."""
    _setup_privateuseone_for_python_backend(NAME, Backend())
    every, single = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")
    every.fallback(lambda operator, *args, **kwargs: run(operator, args, kwargs), "PrivateUse1")
    every.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    for name, operator in (
        ("empty.memory_format", aten.empty.memory_format),
        ("empty_strided", aten.empty_strided.default),
        ("arange", aten.arange.default),
        ("arange.start", aten.arange.start),
        ("arange.start_step", aten.arange.start_step),
    ):
        single.impl(name, _forward(operator), "PrivateUse1")
    for name in HALVED:
        single.impl(name, _in_bfloat16(getattr(aten, name).default), "AutocastPrivateUse1")
    torch.tensor = _made_here_first(torch.tensor)
    return [every, single]


def _forward(operator: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: run(operator, args, kwargs)


def _in_bfloat16(operator: Any) -> Callable[..., Any]:
    def half(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast(NAME, enabled=False):
            floats = tree_map(lambda part: part.bfloat16() if isinstance(part, Tensor) else part, args)
            return operator(*floats, **kwargs)

    return half


def _made_here_first(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Make tensors on the CPU first, since torch would make them on the device by ways of its own."""

    def made(*args: Any, device: Any = None, **kwargs: Any) -> Tensor:
        value = make(*args, **kwargs)
        return value if device is None else value.to(device)

    return made
