"""What a method gives is checked before it is used: a method may be anybody's own, and a slip must not pass for a run.

Without this, a misspelt parameter would train nothing, and the result would look like any other.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from shiftmend.errors import AdaptationError
from shiftmend.introspection.blocks import Block
from shiftmend.introspection.model_state import trainable
from shiftmend.introspection.taps import Tap
from shiftmend.profiles.profile import Profile
from shiftmend.utils.checks import brief, is_real, kind
from shiftmend.utils.json import dumps
from shiftmend.utils.processes import of_first_process

Activations = Mapping[str, Tensor]


Objective = Callable[[Activations], dict[str, Tensor]]
"""Turns the activations of one batch into named terms, whose sum is minimised."""


Look = Callable[[Mapping[str, Tap]], dict[str, Tensor]]
"""Runs the network over the whole target in eval mode and gives what the taps saw, in the order of the samples. The
next look may write into the same tensors."""


@dataclass(frozen=True)
class Network:
    """What a method may know about a model: its bottom-up blocks, its taps, and the model for what else it needs."""

    model: nn.Module
    blocks: tuple[Block, ...]
    taps: Mapping[str, Tap] = field(default_factory=dict)
    head: str = ""

    @property
    def below_features(self) -> tuple[str, ...]:
        """Parameters of all blocks: everything but the classifier."""
        return tuple(name for block in self.blocks for name in block.parameters)

    @property
    def below_head(self) -> tuple[str, ...]:
        """Parameters of everything but the last layer, and what it shares: with those between the features and it."""
        every = self.model.named_parameters(remove_duplicate=False)
        of_head = {id(parameter) for name, parameter in every if name.startswith(f"{self.head}.")}
        return tuple(
            name
            for name, parameter in self.model.named_parameters()
            if trainable(parameter) and id(parameter) not in of_head
        )

    @property
    def embedding(self) -> Tap:
        """Where classes form clusters: what the model names in `shiftmend_embedding`, or what its head reads."""
        return Tap.parse("embedding", getattr(self.model, "shiftmend_embedding", f"{self.head}:input"))

    @property
    def layerwise(self) -> bool:
        """Every block is one single layer, as in the paper's CNN; in a ResNet a block is a stage."""
        return all(block.layers <= 1 for block in self.blocks)

    @property
    def batch_normalised(self) -> bool:
        """Has BatchNorm, which forgives large steps: it undoes what they do to the scale of a layer."""
        return any(isinstance(module, _BatchNorm) for module in self.model.modules())

    def published(self, name: str) -> float | None:
        """A rate that was published for this very network, which it carries in `shiftmend_rates`."""
        rates: Mapping[str, float] = getattr(self.model, "shiftmend_rates", {})
        return rates.get(name)


@dataclass(frozen=True)
class Stage:
    """A stretch of epochs with one set of trained parameters; without any, batches only run forward."""

    name: str
    epochs: int
    learning_rate: float = 0.0
    parameters: tuple[str, ...] = ()
    weight_decay: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Method:
    """One way to adapt. Subclasses are frozen dataclasses: their fields are the hyper-parameters."""

    name: ClassVar[str]
    trains: ClassVar[bool] = True
    """Whether gradients are involved at all; what does not train takes any model."""
    adapts: ClassVar[bool] = True
    """False for the method that leaves every model as it is."""
    needs_profile: ClassVar[bool] = False
    needs_covariance: ClassVar[bool] = False
    """Needs a profile with the covariance of the features: `profile(gaussian="full")`."""
    momentum: ClassVar[float] = 0.9
    online: ClassVar[bool] = True
    """Whether it can learn from a stream: one stage, and nothing to know of the samples beforehand."""
    by_sample: ClassVar[bool] = False
    """Whether its loss reads `activations["targets"]`: something known of each sample, see `targets`."""
    several_processes: ClassVar[bool] = False
    """Whether several processes may adapt together: its loss joins what it computes from their shares of a batch."""
    takes_labels: ClassVar[bool] = False
    dropout: ClassVar[bool] = False
    """Whether dropout is on while it trains; on a stream it never is."""
    minimises_entropy: ClassVar[bool] = False
    """Whether it makes predictions certain by itself, so that their certainty says nothing about its success."""

    def __post_init__(self) -> None:
        """Numbers of numpy are as good as Python's, but cannot be written into a manifest."""
        for entry in fields(self):
            value = getattr(self, entry.name)
            if isinstance(value, np.generic):
                object.__setattr__(self, entry.name, value.item())

    def stages(self, network: Network, profile: Profile | None) -> list[Stage]:
        """What to train, in order; none at all leaves the model as it is."""
        raise NotImplementedError

    def objective(self, profile: Profile | None, device: torch.device) -> Objective | None:
        """The loss, ready on the device; None for methods that only run forward."""
        return None

    def taps(self, profile: Profile | None) -> tuple[str, ...]:
        """Taps whose activations the objective reads."""
        return ()

    def smallest_batch(self, profile: Profile | None) -> int:
        """Inputs that a batch must hold for its loss to mean anything."""
        return 1

    def targets(self, network: Network, look: Look) -> Tensor:
        """One entry a sample, made anew before each epoch; only for methods that are `by_sample`."""
        raise NotImplementedError

    @contextmanager
    def prepared(self, model: nn.Module) -> Iterator[None]:
        """Change the model for the length of the adaptation, beyond what is trained; not on a stream."""
        yield

    def hyperparameters(self) -> dict[str, Any]:
        return asdict(self) | {"momentum": self.momentum}


def distributed_over_inputs(names: Iterable[str], profile: Profile | None) -> bool:
    """Whether a tap among these gives one sample an input, so that one input has no distribution.

    Of a feature map each position is a sample, and one image may be enough.
    """
    return profile is not None and any(
        profile.taps[name].samples == profile.inputs_seen for name in names if name in profile.taps
    )


def check_epochs(value: int, what: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise AdaptationError(f"{what} must be a whole number of at least 1, got {value!r}")


def check_positive(value: Any, what: str, *, optional: bool = False) -> None:
    if optional and value is None:
        return
    if not (is_real(value) and 0 < value < float("inf")):
        raise AdaptationError(f"{what} must be a positive number, got {value!r}")


def check_decay(value: Any, what: str) -> None:
    if not (is_real(value) and 0 <= value < float("inf")):
        raise AdaptationError(f"{what} must be a number of at least 0, got {value!r}")


logger = logging.getLogger(__name__)


logger.addFilter(of_first_process)


def facts_of(method: Method) -> dict[str, Any]:
    """Name and hyper-parameters, for a manifest."""
    name: Any = getattr(method, "name", None)
    if not isinstance(name, str) or not name:
        raise AdaptationError(
            f'the class {type(method).__name__} has no name; give it one: name: ClassVar[str] = "..."'
        )
    try:
        facts = {"name": name, **method.hyperparameters()}
        dumps(facts, name)
    except (TypeError, ValueError) as error:
        raise AdaptationError(
            f"the hyper-parameters of {name} cannot be written into a manifest ({error}); expected numbers, text and "
            "lists: let `hyperparameters` return a dict of such"
        ) from error
    return facts


def taps_of(method: Method, profile: Profile | None) -> tuple[str, ...]:
    names: Any = method.taps(profile)
    if not isinstance(names, tuple | list) or not all(isinstance(name, str) for name in names):
        raise AdaptationError(f'`taps` of {method.name} gave {brief(names)}, expected a tuple of names: ("features",)')
    return tuple(names)


def stages_of(method: Method, network: Network, profile: Profile | None) -> list[Stage]:
    """The stages of a method, if they can be run as they stand."""
    given: Any = method.stages(network, profile)
    if not isinstance(given, list | tuple) or not all(isinstance(stage, Stage) for stage in given):
        raise AdaptationError(f"`stages` of {method.name} gave {brief(given)}, expected a list of Stage")
    if not given and method.name != "source-only":
        logger.warning("%s finds nothing to change in this model, which stays as it came", method.name)
    every = network.model.named_parameters(remove_duplicate=False)  # a shared one may go by either name
    known = {name for name, parameter in every if trainable(parameter)}
    for stage in given:
        where = f"stage {stage.name!r} of {method.name}"
        check_epochs(stage.epochs, f"the epochs of {where}")
        names: Any = stage.parameters
        unknown = [name for name in names if name not in known] if isinstance(names, tuple | list) else [names]
        if unknown:
            raise AdaptationError(
                f"{where} trains {brief(unknown[0])}, which is no parameter of the model that can be trained; expected "
                "a tuple of names as in named_parameters, e.g. network.below_features"
            )
        if names:
            check_positive(stage.learning_rate, f"the learning rate of {where}")
            check_decay(stage.weight_decay, f"the weight decay of {where}")
    return list(given)


def check_objective(objective: Any, method: Method, stages: list[Stage]) -> None:
    """A method that trains parameters must have a loss."""
    if not callable(objective) and (objective is not None or any(stage.parameters for stage in stages)):
        raise AdaptationError(
            f"`objective` of {method.name} gave {brief(objective)}, expected a function from activations to named "
            "terms of the loss, since it trains parameters"
        )


def loss_of(objective: Objective, activations: Activations, what: str) -> tuple[dict[str, Tensor], Tensor]:
    """The terms of the loss on a batch, and their sum."""
    try:
        terms: Any = objective(activations)
    except KeyError as error:
        [name, *_] = error.args or ("",)
        if name not in ("features", "logits", "targets") or name in activations:
            raise
        unsaid = "no method has without `by_sample`" if name == "targets" else "its method does not name in `taps`"
        raise AdaptationError(f"the loss of {what!r} reads {name!r}, which {unsaid}") from error
    if not isinstance(terms, Mapping) or not terms:
        given = kind(terms) if not isinstance(terms, Mapping) else "nothing"
        raise AdaptationError(f"the loss of {what!r} gave {given}, expected its terms by name: {{'features': loss}}")
    for name, term in terms.items():
        if not isinstance(term, Tensor) or term.ndim > 0 or not term.is_floating_point():
            form = f"{str(term.dtype).removeprefix('torch.')} {list(term.shape)}" if isinstance(term, Tensor) else ""
            raise AdaptationError(
                f"term {name!r} of the loss of {what!r} is {form or brief(term)}, expected a tensor of one "
                "floating-point number, e.g. loss.mean()"
            )
    total: Tensor = functools.reduce(torch.add, terms.values())
    if not total.requires_grad:
        raise AdaptationError(
            f"what the loss reads does not depend on the parameters of {what!r}: the model cuts the gradient off "
            "(no_grad, detach or a reentrant checkpoint in its forward?), or the loss does"
        )
    return dict(terms), total
