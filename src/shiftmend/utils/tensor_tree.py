"""Inputs of models that take several tensors: a dict or tuple of tensors that behaves like one tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor


class TensorTree:
    """Tensors in a dict or tuple, possibly nested, with one entry per sample along the first axis.

    `len`, indexing, `clone` and `to` work as for a tensor, so code that does no arithmetic on inputs handles both
    kinds. `value` is what the model is called with.

    Example:
        >>> tree = TensorTree({"ids": torch.zeros(4, 7), "mask": torch.ones(4, 7)})
        >>> len(tree), tree.names, tree[:2].value["mask"].shape
        (4, ('ids', 'mask'), torch.Size([2, 7]))
    """

    __slots__ = ("value",)

    def __init__(self, value: Mapping[str, Any] | tuple[Any, ...]) -> None:
        self.value = value

    def map(self, function: Callable[[Tensor], Tensor]) -> TensorTree:
        """Apply a function to each tensor."""
        return TensorTree(_map(self.value, function))

    @property
    def named_leaves(self) -> list[tuple[str, Tensor]]:
        """The tensors with their paths, such as `"ids"`, `"0"` or `"camera.left"`."""
        return [*_walk(self.value, "")]

    @property
    def names(self) -> tuple[str, ...]:
        """The paths of the tensors."""
        return tuple(name for name, _ in self.named_leaves)

    @property
    def leaves(self) -> list[Tensor]:
        """The tensors."""
        return [leaf for _, leaf in self.named_leaves]

    def with_leaves(self, leaves: Iterable[Tensor]) -> TensorTree:
        """Return the same structure with other tensors, in the order of `leaves`."""
        others = iter(leaves)
        return self.map(lambda leaf: next(others))

    def __repr__(self) -> str:
        return f"TensorTree({describe_samples(self)}, samples={len(self)})"

    def __len__(self) -> int:
        return len(self.leaves[0])

    def __getitem__(self, where: Any) -> TensorTree:
        return self.map(lambda leaf: leaf[where])

    def index_select(self, axis: int, index: Tensor) -> TensorTree:
        return self.map(lambda leaf: leaf.index_select(axis, index))

    def tensor_split(self, sections: int) -> list[TensorTree]:
        columns = [leaf.tensor_split(sections) for leaf in self.leaves]
        return [self.with_leaves(parts) for parts in zip(*columns, strict=True)]

    def clone(self) -> TensorTree:
        return self.map(Tensor.clone)

    def detach(self) -> TensorTree:
        return self.map(Tensor.detach)

    def cpu(self) -> TensorTree:
        return self.map(Tensor.cpu)

    def to(self, *args: Any, **options: Any) -> TensorTree:
        return self.map(lambda leaf: leaf.to(*args, **options))

    def numel(self) -> int:
        return sum(leaf.numel() for leaf in self.leaves)

    @property
    def nbytes(self) -> int:
        return sum(leaf.nbytes for leaf in self.leaves)

    @property
    def device(self) -> torch.device:
        return self.leaves[0].device

    @property
    def is_cuda(self) -> bool:
        return self.leaves[0].is_cuda


Inputs: TypeAlias = "Tensor | TensorTree"
"""A batch of inputs: one tensor `[N, ...]`, or several of them."""


def unwrap_inputs(inputs: Inputs) -> Any:
    """Return inputs in the user's form: a tensor, a dict or a tuple."""
    return inputs.value if isinstance(inputs, TensorTree) else inputs


def wrap_inputs(value: Any) -> Inputs:
    """Undo `unwrap_inputs`; lengths are not checked here."""
    return value if isinstance(value, Tensor | TensorTree) else TensorTree(value)


def list_leaves(inputs: Inputs) -> list[tuple[str, Tensor]]:
    """List the tensors of inputs with their paths; a single tensor has an empty path."""
    return inputs.named_leaves if isinstance(inputs, TensorTree) else [("", inputs)]


def sample_shape(inputs: Inputs) -> tuple[Any, ...]:
    """Return the shape of a sample, or shapes by name for several inputs; batches must share it to be joined."""
    if isinstance(inputs, TensorTree):
        return tuple((name, tuple(leaf.shape[1:])) for name, leaf in inputs.named_leaves)
    return tuple(inputs.shape[1:])


def describe_samples(inputs: Inputs) -> str:
    """Describe shape and type of a sample in words, for messages."""
    if isinstance(inputs, TensorTree):
        return ", ".join(f"{name} {_describe(leaf)}" for name, leaf in inputs.named_leaves)
    return f"shape {list(inputs.shape[1:])} and type {str(inputs.dtype).removeprefix('torch.')}"


def concatenate(parts: Sequence[Inputs]) -> Inputs:
    """Concatenate batches along their first axis."""
    first = parts[0]
    if not isinstance(first, TensorTree):
        return torch.cat(parts)  # type: ignore[arg-type]
    columns = zip(*(part.leaves for part in parts if isinstance(part, TensorTree)), strict=True)
    return first.with_leaves(torch.cat(column) for column in columns)


def _describe(leaf: Tensor) -> str:
    return f"{list(leaf.shape[1:])} {str(leaf.dtype).removeprefix('torch.')}"


def _map(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, Mapping):
        return {name: _map(part, function) for name, part in value.items()}
    return tuple(_map(part, function) for part in value)


def _walk(value: Any, path: str) -> Iterable[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield path, value
        return
    entries = value.items() if isinstance(value, Mapping) else enumerate(value)
    for name, part in entries:
        yield from _walk(part, f"{path}.{name}" if path else str(name))
