"""The interface of a method: what it trains, in which order, and its loss on a batch of activations.

Users may write their own methods. The second half of this module checks what a method returns before it is used:
otherwise a misspelt parameter name would train nothing, and the result would look like any other.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor, nn, optim
from torch.nn.modules.batchnorm import _BatchNorm

from shiftmend.errors import AdaptationError
from shiftmend.introspection.blocks import Block
from shiftmend.introspection.model_state import is_trainable
from shiftmend.introspection.taps import Tap
from shiftmend.profiles.profile import Profile
from shiftmend.utils.checks import brief, is_real, kind
from shiftmend.utils.json import dumps
from shiftmend.utils.processes import of_first_process
from shiftmend.utils.tensor_tree import Inputs

logger = logging.getLogger(__name__)
logger.addFilter(of_first_process)

AUTO: Literal["auto"] = "auto"
"""Number of epochs that the run determines by itself."""
Epochs = int | Literal["auto"]

Activations = Mapping[str, Tensor]
"""Activations `[samples, units]` of one batch, by tap."""
Objective = Callable[[Activations], dict[str, Tensor]]
"""Function from the activations of one batch to named terms, whose sum is minimised."""
ReadActivations = Callable[[Mapping[str, Tap]], dict[str, Tensor]]
"""Function that runs the model over the whole target in eval mode and returns the activations at taps, in order of
samples."""


@dataclass(frozen=True)
class Network:
    """A model as a method sees it: its blocks from bottom to top, its taps and the name of its head."""

    model: nn.Module
    blocks: tuple[Block, ...]
    taps: Mapping[str, Tap] = field(default_factory=dict)
    head: str = ""

    @property
    def below_features(self) -> tuple[str, ...]:
        """Names of the parameters of all blocks: everything except the classifier."""
        return tuple(name for block in self.blocks for name in block.parameters)

    @property
    def below_head(self) -> tuple[str, ...]:
        """Names of all parameters outside the last layer, except those that it shares with other layers."""
        every = self.model.named_parameters(remove_duplicate=False)
        of_head = {id(parameter) for name, parameter in every if name.startswith(f"{self.head}.")}
        return tuple(
            name
            for name, parameter in self.model.named_parameters()
            if is_trainable(parameter) and id(parameter) not in of_head
        )

    @property
    def all_parameters(self) -> tuple[str, ...]:
        """Names of all parameters that can be trained."""
        return tuple(name for name, parameter in self.model.named_parameters() if is_trainable(parameter))

    @property
    def embedding(self) -> Tap:
        """Tap at which classes form clusters: `shiftmend_embedding` of the model, or the input of its head."""
        return Tap.parse("embedding", getattr(self.model, "shiftmend_embedding", f"{self.head}:input"))

    @property
    def layerwise(self) -> bool:
        """True if no block has more than one layer with weights, as in the CNN of the BUFR paper.

        Normalisation layers do not count. A ResNet is not layerwise, because each of its stages is one block.
        """
        return all(block.layers <= 1 for block in self.blocks)

    @property
    def batch_normalised(self) -> bool:
        """True if the model has BatchNorm, which makes layers insensitive to their scale."""
        return any(isinstance(module, _BatchNorm) for module in self.model.modules())

    def published(self, name: str) -> float | None:
        """Return the learning rate published for this network, from its attribute `shiftmend_rates`."""
        rates: Mapping[str, float] = getattr(self.model, "shiftmend_rates", {})
        return rates.get(name)


@dataclass(frozen=True)
class Stage:
    """A part of training with a fixed set of trained parameters.

    Attributes:
        name: Name of the stage in histories and messages.
        epochs: Number of epochs; the largest number if the stage settles.
        learning_rate: Learning rate of the optimiser.
        parameters: Names of the trained parameters. If there are none, batches only run forward.
        weight_decay: Weight decay of the optimiser.
        settles: Whether the stage ends as soon as its loss stops falling (see `engine/schedule.py`).
        searches: Whether the learning rate is only a starting point for a search before the first stage (see
            `engine/rate_search.py`). The rates of later stages are scaled by the same factor.
    """

    name: str
    epochs: int
    learning_rate: float = 0.0
    parameters: tuple[str, ...] = ()
    weight_decay: float = 0.0
    settles: bool = False
    searches: bool = False


@dataclass(frozen=True, kw_only=True)
class Method:
    """Base class of methods. Subclasses are frozen dataclasses, whose fields are the hyper-parameters."""

    name: ClassVar[str]
    adapts: ClassVar[bool] = True
    """Whether the method changes the model; False for the untouched baseline."""
    trains: ClassVar[bool] = True
    """Whether the method uses gradients; a method without gradients accepts any model."""
    needs_profile: ClassVar[bool] = False
    needs_covariance: ClassVar[bool] = False
    """Whether the profile must hold the covariance of the features (`gaussian="full"`)."""
    momentum: ClassVar[float] = 0.9
    online: ClassVar[bool] = True
    """Whether the method supports streams: it has one stage and needs no pass over all samples beforehand."""
    by_sample: ClassVar[bool] = False
    """Whether the loss reads `activations["targets"]`, one entry per sample; see `targets`."""
    several_processes: ClassVar[bool] = False
    """Whether several processes may adapt together, because the loss combines results of all parts of a batch."""
    takes_labels: ClassVar[bool] = False
    reads_inputs: ClassVar[bool] = False
    """Whether the method adapts in one pass over the inputs without training; see `begin` and `adapt_to_inputs`."""
    frees_shares: ClassVar[bool] = False
    """Whether the method allows other class shares at the target. Its result is then compared with home reweighted to
    the shares that the model predicts there."""
    maps_inputs: ClassVar[bool] = False
    """Whether the method maps the inputs, which must then be one tensor."""
    for_tables: ClassVar[bool] = False
    """Whether `auto` tries the method for tables and spectra alone."""
    layers: ClassVar[tuple[type[nn.Module], ...]] = ()
    """Kinds of layers that the method changes; empty if it can change any. `auto` skips it for models without them."""
    dropout: ClassVar[bool] = False
    """Whether dropout is active during training; on a stream it never is."""
    minimises_entropy: ClassVar[bool] = False
    """Whether the method makes predictions confident by itself, so that confidence does not indicate success."""
    slow: ClassVar[bool] = False
    """Whether a quick rehearsal leaves the method out."""
    bottom_up: ClassVar[bool] = False
    """Whether the method restores the lowest layers first."""
    refining: ClassVar[tuple[str, ...]] = ()
    """Names of stages that refine what earlier ones restored. They may move the features slightly away from home, so
    the verification slices do not choose among their epochs; see `history.Choice`."""

    def __post_init__(self) -> None:
        """Convert NumPy numbers to Python numbers, which can be written into a manifest."""
        for entry in fields(self):
            value = getattr(self, entry.name)
            if isinstance(value, np.generic):
                object.__setattr__(self, entry.name, value.item())

    def stages(self, network: Network, profile: Profile | None) -> list[Stage]:
        """Return the stages of training, in order; an empty list leaves the model untouched."""
        raise NotImplementedError

    def objective(self, profile: Profile | None, device: torch.device) -> Objective | None:
        """Return the loss function for a device; None for methods that only run forward."""
        return None

    def objective_of(self, stage: Stage, profile: Profile | None, device: torch.device) -> Objective | None:
        """Return the loss function of a stage. Override this if stages differ in their loss."""
        return self.objective(profile, device)

    def taps(self, profile: Profile | None) -> tuple[str, ...]:
        """Return the taps whose activations the objective reads."""
        return ()

    def smallest_batch(self, profile: Profile | None) -> int:
        """Return the smallest number of inputs in a batch for which the loss is meaningful."""
        return 1

    def targets(self, network: Network, read: ReadActivations) -> Tensor:
        """Return one entry per sample, computed before each epoch; only for methods with `by_sample`."""
        raise NotImplementedError

    def begin(self, model: nn.Module, sample: Inputs, profile: Profile | None) -> None:
        """Add the buffers that `adapt_to_inputs` will set, without an effect yet; `sample` is a small batch."""

    def adapt_to_inputs(self, model: nn.Module, batches: Iterable[Inputs], profile: Profile | None) -> None:
        """Read all `batches` once, then set parameters and buffers of `model` in place.

        Called only if `reads_inputs` is True. `profile` is None if the method does not need one.
        """
        raise NotImplementedError

    def make_optimiser(self, parameters: list[nn.Parameter], stage: Stage) -> optim.Optimizer:
        """Return the optimiser of a stage: SGD with momentum. Override this for another optimiser of `torch.optim`."""
        fused = all(parameter.is_cuda and parameter.is_floating_point() for parameter in parameters)
        return optim.SGD(
            parameters,
            lr=stage.learning_rate,
            momentum=self.momentum,
            weight_decay=stage.weight_decay,
            fused=fused or None,
        )

    @contextmanager
    def prepared(self, model: nn.Module) -> Iterator[None]:
        """Change the model for the duration of the adaptation, beyond training; not used on a stream."""
        yield

    def hyperparameters(self) -> dict[str, Any]:
        """Return the hyper-parameters for the manifest."""
        return asdict(self) | {"momentum": self.momentum}


def has_one_sample_per_input(names: Iterable[str], profile: Profile | None) -> bool:
    """Return whether one of the taps gives one sample per input, so that a single input has no distribution.

    In a feature map, each position is a sample, and one image may be enough.
    """
    return profile is not None and any(
        profile.taps[name].samples == profile.inputs_seen for name in names if name in profile.taps
    )


def check_epochs(value: int | str, what: str, *, may_settle: bool = False) -> None:
    """Raise `AdaptationError` unless `value` is a whole number of at least 1.

    With `may_settle`, `"auto"` is allowed, too. `what` names the setting in the message.
    """
    if may_settle and value == AUTO:
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        other = f" or {AUTO!r}" if may_settle else ""
        raise AdaptationError(f"Expected {what} to be a whole number of at least 1{other}, got {value!r}.")


def check_positive(value: Any, what: str, *, optional: bool = False) -> None:
    """Raise unless a value is a positive, finite number, or None if `optional`."""
    if optional and value is None:
        return
    if not (is_real(value) and 0 < value < float("inf")):
        raise AdaptationError(f"Expected {what} to be a positive number, got {value!r}.")


def check_decay(value: Any, what: str) -> None:
    """Raise unless a value is a finite number of at least 0."""
    if not (is_real(value) and 0 <= value < float("inf")):
        raise AdaptationError(f"Expected {what} to be a number of at least 0, got {value!r}.")


def describe_method(method: Method) -> dict[str, Any]:
    """Return the name and hyper-parameters of a method for a manifest."""
    name: Any = getattr(method, "name", None)
    if not isinstance(name, str) or not name:
        raise AdaptationError(
            f'Expected class {type(method).__name__} to have a name, got none. Add name: ClassVar[str] = "..." to it.'
        )
    try:
        facts = {"name": name, **method.hyperparameters()}
        dumps(facts, name)
    except (TypeError, ValueError) as error:
        raise AdaptationError(
            f"Expected hyperparameters() of {name} to return numbers, text and lists for the manifest, got others "
            f"({error}). Return a dict of such."
        ) from error
    return facts


def read_taps(method: Method, profile: Profile | None) -> tuple[str, ...]:
    """Return the names of the taps that a method reads, validated."""
    names: Any = method.taps(profile)
    if not isinstance(names, tuple | list) or not all(isinstance(name, str) for name in names):
        raise AdaptationError(
            f'Expected taps() of {method.name} to return names, e.g. ("features",), got {brief(names)}.'
        )
    return tuple(names)


def plan_stages(method: Method, network: Network, profile: Profile | None) -> list[Stage]:
    """Return the stages of a method, validated against the parameters of the model."""
    given: Any = method.stages(network, profile)
    if not isinstance(given, list | tuple) or not all(isinstance(stage, Stage) for stage in given):
        raise AdaptationError(f"Expected stages() of {method.name} to return a list of Stage, got {brief(given)}.")
    if not given and method.adapts:
        logger.warning("%s has nothing to change in this model, which stays as it is", method.name)
    every = network.model.named_parameters(remove_duplicate=False)  # A shared parameter has several names.
    known = {name for name, parameter in every if is_trainable(parameter)}
    for stage in given:
        where = f"stage {stage.name!r} of {method.name}"
        check_epochs(stage.epochs, f"the epochs of {where}")
        names: Any = stage.parameters
        unknown = [name for name in names if name not in known] if isinstance(names, tuple | list) else [names]
        if unknown:
            raise AdaptationError(
                f"Expected {where} to train parameters of the model by name, got {brief(unknown[0])}. Try names of "
                "named_parameters(), e.g. network.below_features."
            )
        if names:
            check_positive(stage.learning_rate, f"the learning rate of {where}")
            check_decay(stage.weight_decay, f"the weight decay of {where}")
    return list(given)


def check_objective(objective: Any, method: Method, stages: list[Stage]) -> None:
    """Raise if a method trains parameters but has no loss."""
    if not callable(objective) and (objective is not None or any(stage.parameters for stage in stages)):
        raise AdaptationError(
            f"Expected objective() of {method.name} to return a function from activations to terms of the loss, got "
            f"{brief(objective)}."
        )


def compute_loss(objective: Objective, activations: Activations, stage: str) -> tuple[dict[str, Tensor], Tensor]:
    """Compute the terms of the loss on a batch, and their sum."""
    try:
        terms: Any = objective(activations)
    except KeyError as error:
        [name, *_] = error.args or ("",)
        if name not in ("features", "logits", "targets") or name in activations:
            raise
        remedy = "Set by_sample in the method" if name == "targets" else "Name that tap in taps()"
        raise AdaptationError(
            f"Expected the loss of {stage!r} to read only what its method asks for, got {name!r}. {remedy}."
        ) from error
    if not isinstance(terms, Mapping) or not terms:
        given = kind(terms) if not isinstance(terms, Mapping) else "nothing"
        raise AdaptationError(
            f"Expected the loss of {stage!r} to return terms by name, e.g. {{'features': loss}}, got {given}."
        )
    for name, term in terms.items():
        if not isinstance(term, Tensor) or term.ndim > 0 or not term.is_floating_point():
            form = f"{str(term.dtype).removeprefix('torch.')} {list(term.shape)}" if isinstance(term, Tensor) else ""
            raise AdaptationError(
                f"Expected term {name!r} of the loss of {stage!r} to be one floating-point number, got "
                f"{form or brief(term)}. Try loss.mean()."
            )
    total: Tensor = functools.reduce(torch.add, terms.values())
    if not total.requires_grad:
        raise AdaptationError(
            f"Expected a loss of {stage!r} with a gradient, got none. Try a forward pass without no_grad, detach or "
            "reentrant checkpoints."
        )
    return dict(terms), total
