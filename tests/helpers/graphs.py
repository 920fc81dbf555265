"""CUDA graphs without a GPU: what a capture records is run again, on the very same memory, and nothing else is.

Like a real one, such a graph keeps what was made while it was captured, and only knows where everything else lies: it
finds out, as a real one would not, if that has been freed.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from shiftmend.accelerate import cuda_graphs as captures
from shiftmend.engine.step import Steps
from shiftmend.passes import evaluation_pass


class FreedError(Exception):
    """A graph was replayed that reads what is no longer there."""


class Outside:
    """A tensor that was there before the capture: where it lies, but no reference to it."""

    def __init__(self, tensor: Tensor) -> None:
        self.storage = StorageWeakRef(tensor.untyped_storage())
        self.dtype, self.form = tensor.dtype, (tensor.storage_offset(), tensor.shape, tensor.stride())

    def tensor(self) -> Tensor:
        storage = torch.UntypedStorage._new_with_weak_ptr(self.storage.cdata)
        if storage is None:
            raise FreedError
        return torch.empty(0, dtype=self.dtype).set_(storage, *self.form)  # type: ignore[no-any-return]


class Graph(TorchDispatchMode):
    """Records what is computed inside."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, list[Tensor]]] = []
        self.own: dict[int, Tensor] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_floating_point():  # others are indices
            raise RuntimeError(f"{func} waits for the device, which a capture does not permit")
        given = {_place(tensor) for tensor in tree_leaves((args, kwargs)) if isinstance(tensor, Tensor)}
        result = func(*args, **(kwargs or {}))
        every = [tensor for tensor in tree_leaves(result) if isinstance(tensor, Tensor)]
        made = [tensor.detach() for tensor in every if _place(tensor) not in given]  # the tensor itself may be turned
        self.own |= {_place(tensor): tensor for tensor in made}
        self.calls.append((func, self._known(args), self._known(kwargs or {}), made))
        return result

    def _known(self, given: Any) -> Any:
        known = lambda tensor: tensor.detach() if _place(tensor) in self.own else Outside(tensor)  # noqa: E731
        return tree_map_only(Tensor, known, given)

    @torch.no_grad()
    def replay(self) -> None:
        for func, args, kwargs, made in self.calls:
            args, kwargs = tree_map_only(Outside, Outside.tensor, (args, kwargs))
            result = [tensor for tensor in tree_leaves(func(*args, **kwargs)) if isinstance(tensor, Tensor)]
            given = {_place(tensor) for tensor in tree_leaves((args, kwargs)) if isinstance(tensor, Tensor)}
            for place, value in zip(made, [one for one in result if _place(one) not in given], strict=True):
                place.copy_(value)


def _place(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def recorded(run: Callable[[], Any], device: torch.device, warm_up: int) -> tuple[Graph, Any]:
    """In the place of `captures._record`: what a capture makes holds nothing before it is replayed."""
    for _ in range(warm_up):
        run()
    graph = Graph()
    try:
        with captures.refuse_host_randomness(), graph:
            result = run()
    finally:
        for tensor in graph.own.values():
            if tensor.is_floating_point():
                tensor.fill_(torch.nan)
    return graph, result


def captured_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on steps and passes are captured on a CPU as well."""
    monkeypatch.setattr(captures, "_record", recorded)
    monkeypatch.setattr(captures, "_end_capture", lambda device: None)
    monkeypatch.setattr(
        captures, "_host_rng_states", random.getstate
    )  # what torch draws here, it would draw on the device
    monkeypatch.setattr(evaluation_pass, "worth_capturing", lambda inputs: True)
    monkeypatch.setattr(
        Steps, "_can_be_captured", lambda self: None not in (self.objective, self.optimiser, self.feed.inputs)
    )
