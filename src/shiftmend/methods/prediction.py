"""Base class of methods that use predictions only: entropies and information maximisation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from shiftmend.engine.method import Activations, Method, Network, check_epochs, check_positive
from shiftmend.errors import AdaptationError
from shiftmend.profiles.profile import Profile

EPSILON = 1e-5
"""Added to every probability inside a logarithm, as in the reference implementation."""


def entropy(probabilities: Tensor) -> Tensor:
    """Return the entropy over the last axis, in nats."""
    return -(probabilities * torch.log(probabilities + EPSILON)).sum(-1)


def information_maximisation(logits: Tensor) -> Tensor:
    """Return the mean entropy of the predictions minus the entropy of their mean.

    Minimising this loss makes each prediction confident while using all classes.
    """
    probabilities = torch.softmax(logits.float(), dim=1)
    return entropy(probabilities).mean() - entropy(probabilities.mean(0))


@dataclass(frozen=True, kw_only=True)
class Prediction(Method):
    """A method whose loss needs class logits, trained for `epochs` epochs at a constant rate.

    A learning rate of None takes the one published for the network, or 0.001.
    """

    epochs: int = 150
    learning_rate: float | None = None
    default_rate: ClassVar[float] = 1e-3

    def __post_init__(self) -> None:
        super().__post_init__()
        check_epochs(self.epochs, "epochs")
        check_positive(self.learning_rate, "the learning rate", optional=True)

    def taps(self, profile: Profile | None) -> tuple[str, ...]:
        return ("logits",)

    def rate(self, network: Network) -> float:
        """Return the learning rate: the given one, else the one published for the network, else 0.001."""
        return self.learning_rate or network.published(self.name) or self.default_rate

    def logits(self, activations: Activations) -> Tensor:
        """Return the class logits of the batch.

        Raises:
            AdaptationError: If the model has one output instead of one for each class.
        """
        logits = activations["logits"]
        if logits.shape[1] < 2:
            raise AdaptationError(
                f"Expected a classifier for {self.name}, got a model with one output. Use fr or bufr."
            )
        return logits
