"""Split any model into blocks: the steps of bottom-up unfreezing."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from shiftmend.errors import AdaptationError
from shiftmend.introspection.model_state import find_owners, is_trainable
from shiftmend.introspection.trace import Trace
from shiftmend.utils.checks import brief

logger = logging.getLogger(__name__)


BlockNames = Sequence[str | Sequence[str]]
"""Names of modules, or groups of such names."""

NEARLY_ALL = 0.8
"""Share of the layers from which on a module is a backbone, which is split, rather than one of its stages."""

_EXPECTED = "names of modules, or groups of them, e.g. ['conv1', ['layer1', 'layer2']]"


@dataclass(frozen=True)
class Block:
    """One step of unfreezing: a title, its modules and their parameters."""

    name: str
    modules: tuple[str, ...]
    parameters: tuple[str, ...]
    layers: int
    """Number of layers with a weight matrix or kernel; normalisation does not count."""


def split_blocks(model: nn.Module, trace: Trace, names: BlockNames | None = None) -> tuple[Block, ...]:
    """Split the modules below the features into blocks, in running order. The head is in no block.

    `names`, or the model's attribute `shiftmend_blocks`, gives the modules of each block. Otherwise blocks follow the
    order in which modules first run: the modules before the repeated stages are the stem, each stage or layer of their
    container is a block, and normalisation belongs to the layer before it.
    """
    below = _find_parameters_below(model, trace)
    if trace.uncalled:
        logger.warning(
            "Parameters of %s stay fixed, because the model never calls the module that holds them. Call it in forward "
            "or move the parameters to the module that uses them.",
            " and ".join(map(repr, trace.uncalled)),
        )
    if not below:
        raise AdaptationError(
            "Expected parameters below the features to adapt, got none. Try a later layer as tap 'features'."
        )
    if isinstance(names, str):
        names = [names]
    given = names if names is not None else getattr(model, "shiftmend_blocks", None)
    kernels = _find_kernels(model, list(below))
    if given is not None:
        groups = _group_by_names(model, given, below)
    else:
        groups = _group_by_stages(model, list(below), kernels)
        if len(groups) > 1 and not kernels.intersection(groups[0]):
            # Tokens alone form no block.
            groups = [groups[0] + groups[1], *groups[2:]]
    return tuple(_make_block(model, group, below, kernels) for group in groups if group)


def _find_parameters_below(model: nn.Module, trace: Trace) -> dict[str, tuple[str, ...]]:
    """Return the parameters below the features by the module that runs them, in running order.

    A module that is used without being called, such as the projection inside attention, belongs to the nearest called
    module above it. Parameters that are shared with a head, or with anything after the features, must stay fixed and
    are left out.
    """
    ran = set(trace.order)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    first_names = dict(model.named_parameters())
    behind = {id(parameters[name]) for name in trace.beside}
    owned: dict[str, list[str]] = {name: [] for name in trace.extractor}
    for owner in find_owners(model):
        mine = [name for name, p in parameters.items() if _owner_of(name) == owner and is_trainable(p)]
        runner = owner
        while runner not in ran and runner:
            runner = runner.rpartition(".")[0]
        if runner in owned:
            owned[runner] += [name for name in mine if name in first_names]
        else:
            behind.update(id(parameters[name]) for name in mine)
    return {
        runner: kept
        for runner, names in owned.items()
        if (kept := tuple(name for name in names if id(parameters[name]) not in behind))
    }


def _owner_of(parameter: str) -> str:
    """Return the module that owns a parameter; helper modules of a parametrisation belong to their layer."""
    path = parameter.split(".")
    end = path.index("parametrizations") if "parametrizations" in path else len(path) - 1
    return ".".join(path[:end])


def _group_by_names(model: nn.Module, names: BlockNames, below: dict[str, tuple[str, ...]]) -> list[list[str]]:
    modules = dict(model.named_modules())
    groups: list[list[str]] = []
    taken: set[str] = set()
    if not isinstance(names, list | tuple):
        raise AdaptationError(f"Expected blocks to be {_EXPECTED}, got {brief(names)}.")
    for entry in names:
        wanted = [entry] if isinstance(entry, str) else entry
        if not isinstance(wanted, list | tuple) or not all(isinstance(name, str) for name in wanted):
            raise AdaptationError(f"Expected each block to be {_EXPECTED}, got {brief(entry)}.")
        group = []
        for name in wanted:
            if name not in modules:
                raise AdaptationError(
                    f"Expected a block to name a module of the model, got {name!r}. See `shiftmend blocks`."
                )
            inside = [owner for owner in below if _is_inside(owner, name)]
            if not inside:
                raise AdaptationError(
                    f"Expected a block with parameters below the features, got {name!r}, which has none. See "
                    "`shiftmend blocks`."
                )
            if taken & set(inside):
                raise AdaptationError(f"Expected each module in one block, got {name!r} twice. Leave it out of one.")
            taken.update(inside)
            group += inside
        groups.append(group)
    if not groups:
        raise AdaptationError("Expected at least one block, got an empty list. Name a module, or leave blocks out.")
    return groups


def _is_inside(name: str, ancestor: str) -> bool:
    return ancestor == "" or name == ancestor or name.startswith(f"{ancestor}.")


def _group_by_stages(model: nn.Module, running: list[str], kernels: frozenset[str], level: str = "") -> list[list[str]]:
    """Cut between the children of `level`; go down into a child that holds nearly all layers, or is a list.

    A child with at least two layers is a stage. Layers before the first stage are the stem. A layer after a stage is a
    block. A module without a kernel, such as normalisation or tokens, joins the layer before it. The entries of a
    `ModuleList` or `ModuleDict` are stages of their own: the layers of an encoder, or the way down of a U-Net.
    The first group may have no kernel: it joins the layer before `level`, if there is one.
    """
    modules = dict(model.named_modules())
    children: dict[str, list[str]] = {}
    for owner in running:
        children.setdefault(_child(owner, level), []).append(owner)
    sizes = {name: len(kernels.intersection(inside)) for name, inside in children.items()}
    stages = [name for name, size in sizes.items() if size > 1]
    blocks: list[list[str]] = []
    in_stem = bool(stages)
    for name, inside in children.items():
        if name in stages:
            # A backbone below a large decoder is no stage, but the third of four stages may hold most layers.
            most = len(stages) == 1 or sizes[name] > NEARLY_ALL * sum(sizes.values())
            go_down = most or _is_list(modules, inside) or _is_plain_chain(modules, name, inside, kernels)
            first, *others = _group_by_stages(model, inside, kernels, name) if go_down else [inside]
            if blocks and not kernels.intersection(first):
                blocks[-1] += first
            else:
                blocks.append(first)
            blocks += others
            in_stem = False
        elif blocks and (in_stem or not sizes[name] or not kernels.intersection(blocks[-1])):
            blocks[-1] += inside
        else:
            blocks.append(list(inside))
    return blocks


def _child(owner: str, level: str) -> str:
    """Return the direct child of `level` that holds the owner of a parameter, or `level` itself if it is the owner."""
    if owner == level:
        return level
    rest = owner[len(level) + 1 :] if level else owner
    first = rest.partition(".")[0]
    return f"{level}.{first}" if level else first


def _find_kernels(model: nn.Module, running: list[str]) -> frozenset[str]:
    return frozenset(name for name in running if _has_kernel(model.get_submodule(name), name, running))


def _has_kernel(module: nn.Module, name: str, running: list[str]) -> bool:
    """Tell whether a module has a weight matrix or kernel; normalisation and containers of running layers do not."""
    if "Norm" in type(module).__name__ or any(other != name and _is_inside(other, name) for other in running):
        return False
    weight = getattr(module, "weight", None)
    own = [weight] if weight is not None else list(module._parameters.values())
    return any(parameter is not None and parameter.ndim > 1 for parameter in own)


def _is_list(modules: dict[str, nn.Module], inside: list[str]) -> bool:
    """Tell whether the smallest container of some modules is a list or dict of modules, without a forward of its own.

    A dense block of torchvision is a `ModuleDict` with a forward pass, and one stage.
    """
    return type(modules[_common_parent(inside)]) in (nn.ModuleList, nn.ModuleDict)


def _common_parent(names: list[str]) -> str:
    """Return the name of the smallest module that contains all of these; a single name is its own."""
    common = []
    for parts in zip(*(name.split(".") for name in names), strict=False):
        if len(set(parts)) > 1:
            break
        common.append(parts[0])
    return ".".join(common)


def _is_plain_chain(modules: dict[str, nn.Module], name: str, inside: list[str], kernels: frozenset[str]) -> bool:
    """Tell whether a container is a sequence of three or more single layers, each of which is then a block."""
    children: dict[str, list[str]] = {}
    for owner in inside:
        children.setdefault(_child(owner, name), []).append(owner)
    single = all(len(kernels.intersection(part)) <= 1 for part in children.values())
    return isinstance(modules[name], nn.Sequential | nn.ModuleList) and single and len(kernels.intersection(inside)) > 2


def _make_block(
    model: nn.Module, group: list[str], below: dict[str, tuple[str, ...]], kernels: frozenset[str]
) -> Block:
    parameters = tuple(parameter for owner in group for parameter in below[owner])
    others = {name for name, _ in model.named_parameters()}.difference(parameters)
    broken = {name[:end] for name in others for end, letter in enumerate(name) if letter == "."}
    return Block(
        name=_make_title(group, broken),
        modules=tuple(group),
        parameters=parameters,
        layers=len(kernels.intersection(group)),
    )


def _make_title(group: list[str], broken: set[str]) -> str:
    """Return a readable name: the common parent if the group is all of it, else the largest modules inside.

    `broken` are the modules with parameters outside the group.
    """
    if len(group) == 1:
        return group[0] or "(own parameters)"
    parent = _common_parent(group)
    if parent and parent not in broken:
        return parent
    shown = list(dict.fromkeys(_find_largest(name, broken) for name in group))
    return " + ".join(shown) if len(shown) <= 3 else f"{shown[0]} ... {shown[-1]}"


def _find_largest(name: str, broken: set[str]) -> str:
    """Return the largest module around a module that is not broken; of a broken one, only its own parameters count."""
    if not name or name in broken:
        return f"{name} (own parameters)".lstrip()
    while (parent := name.rpartition(".")[0]) and parent not in broken:
        name = parent
    return name
