"""Target-supervised: training with labels of the target. An upper bound for comparison, not an adaptation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from shiftmend.engine.method import Activations, Network, Objective, ReadActivations, Stage, check_decay
from shiftmend.errors import AdaptationError
from shiftmend.methods.prediction import Prediction
from shiftmend.profiles import fingerprints
from shiftmend.profiles.profile import Profile


def _class_numbers(given: Any) -> Tensor:
    """Convert labels to a new int64 tensor on the CPU."""
    try:
        labels = given.detach().cpu().clone() if isinstance(given, Tensor) else torch.from_numpy(np.array(given))
    except (TypeError, ValueError) as error:
        kind = f"an array of {given.dtype}" if isinstance(given, np.ndarray) else f"a {type(given).__name__}"
        raise AdaptationError(f"Expected labels to be one class number a sample, got {kind}.") from error
    if labels.ndim != 1 or labels.is_floating_point() or labels.is_complex() or len(labels) == 0:
        kind = str(labels.dtype).removeprefix("torch.")
        raise AdaptationError(f"Expected labels to be one class number a sample, got {kind} {list(labels.shape)}.")
    labels = labels.long()
    if bool((labels < 0).any()):
        raise AdaptationError(f"Expected labels to be class numbers from 0, got {int(labels.min())}.")
    return labels


@dataclass(frozen=True, kw_only=True, eq=False)
class TargetSupervised(Prediction):
    """Supervised training of all parameters on labelled target data, with dropout: an upper bound for other methods.

    This is the only method that takes labels: one per sample, in the order of the data. Benchmarks train it on 80 % of
    the target and score it on another 10 %.
    """

    name: ClassVar[str] = "target-supervised"
    online: ClassVar[bool] = False
    by_sample: ClassVar[bool] = True
    takes_labels: ClassVar[bool] = True
    dropout: ClassVar[bool] = True
    minimises_entropy: ClassVar[bool] = True
    labels: Tensor
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "labels", _class_numbers(self.labels))
        check_decay(self.weight_decay, "the weight decay")

    def stages(self, network: Network, profile: Profile | None) -> list[Stage]:
        rate = self.rate(network)
        return [Stage("all parameters", self.epochs, rate, network.all_parameters, self.weight_decay)]

    def targets(self, network: Network, read: ReadActivations) -> Tensor:
        return self.labels

    def objective(self, profile: Profile | None, device: torch.device) -> Objective:
        highest = int(self.labels.max())

        def losses(activations: Activations) -> dict[str, Tensor]:
            logits = self.logits(activations).float()
            if highest >= logits.shape[1]:
                raise AdaptationError(
                    f"Expected labels below {logits.shape[1]}, the number of classes of the model, got {highest}. "
                    "Check the numbering of the classes."
                )
            if len(logits) != len(activations["targets"]):
                raise AdaptationError(
                    f"Expected one prediction a sample, got {len(logits)} for {len(activations['targets'])}. Try fr or "
                    "bufr, or your own training loop."
                )
            return {"labels": functional.cross_entropy(logits, activations["targets"])}

        return losses

    def hyperparameters(self) -> dict[str, Any]:
        """Return the hyper-parameters for a manifest, with a digest in place of the labels."""
        own = {"epochs": self.epochs, "learning_rate": self.learning_rate, "weight_decay": self.weight_decay}
        return own | {"momentum": self.momentum, "labels_sha256": fingerprints.digest(self.labels)}
