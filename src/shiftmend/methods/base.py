"""What a method is: what it trains, in which order, and its loss on a batch of activations."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from shiftmend.blocks import Block
from shiftmend.checks import is_real
from shiftmend.errors import AdaptationError
from shiftmend.profiles import Profile
from shiftmend.taps import Tap
from shiftmend.tracing import trainable

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
    needs_profile: ClassVar[bool] = False
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
