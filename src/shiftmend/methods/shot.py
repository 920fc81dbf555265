"""SHOT (Liang et al., 2020): information maximisation, and pseudo-labels from the nearest class centroid."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from shiftmend.engine.method import Activations, Network, Objective, ReadActivations, Stage, check_positive
from shiftmend.errors import AdaptationError
from shiftmend.methods.prediction import Prediction, information_maximisation
from shiftmend.profiles.profile import Profile


def centroid_labels(embedding: Tensor, logits: Tensor) -> Tensor:
    """Assign each sample to the class of the nearest centroid by cosine distance.

    A constant 1 is appended to each embedding, which is then normalised to unit length. The first centroids are means
    weighted by the predicted probabilities. The second centroids are means of the samples nearest to each first one,
    and each sample gets the class of the nearest second centroid. Classes that are predicted for no sample, or whose
    first centroid is nearest to none, get no sample.

    Args:
        embedding: Embeddings `[N, D]`.
        logits: Logits `[N, K]` of K classes.

    Returns:
        Classes `[N]`, int64.
    """
    probabilities = torch.softmax(logits.float(), dim=1)
    points = functional.normalize(functional.pad(embedding.float(), (0, 1), value=1.0), dim=1)
    classes = probabilities.shape[1]
    present = functional.one_hot(probabilities.argmax(1), classes).sum(0) > 0
    labels = _nearest(points, probabilities, present)
    assigned = functional.one_hot(labels, classes).to(points.dtype)
    return _nearest(points, assigned, present & (assigned.sum(0) > 0))


def _nearest(points: Tensor, weights: Tensor, allowed: Tensor) -> Tensor:
    centroids = (weights.T @ points) / (weights.sum(0)[:, None] + 1e-8)
    similarity = points @ functional.normalize(centroids, dim=1).T
    return similarity.masked_fill(~allowed, -torch.inf).argmax(1)


@dataclass(frozen=True, kw_only=True)
class SHOT(Prediction):
    """Information maximisation plus `weight` times the cross-entropy to centroid pseudo-labels.

    Pseudo-labels are computed in eval mode before each epoch (see `centroid_labels`). All parameters except the head's
    are trained, including those of a BatchNorm in front of the head. The model needs at least two outputs.

    Defaults follow the code of the BUFR paper: a constant learning rate, momentum without Nesterov, no weight decay,
    `weight` 0.1. There is one difference: the paper's code assigns pseudo-labels to the wrong images on MNIST-C and
    MNIST-M.

    The original SHOT decays the learning rate, and sets `weight` to 0.1 for digits and 0.3 for photographs. It also
    requires a source model with a weight-normalised head, trained with label smoothing 0.1. Here any classifier works.
    """

    name: ClassVar[str] = "shot"
    online: ClassVar[bool] = False
    by_sample: ClassVar[bool] = True
    minimises_entropy: ClassVar[bool] = True
    weight: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self.weight, "the weight of the pseudo-labels")

    def stages(self, network: Network, profile: Profile | None) -> list[Stage]:
        return [Stage("all but the head", self.epochs, self.rate(network), network.below_head)]

    def targets(self, network: Network, read: ReadActivations) -> Tensor:
        seen = read({"embedding": network.embedding, "logits": network.taps["logits"]})
        if len(seen["embedding"]) != len(seen["logits"]):
            raise AdaptationError(
                f"Expected one embedding a prediction, got {len(seen['embedding'])} from {network.embedding} for "
                f"{len(seen['logits'])}. Name another module in `shiftmend_embedding`."
            )
        return centroid_labels(seen["embedding"], self.logits(seen))

    def objective(self, profile: Profile | None, device: torch.device) -> Objective:
        def losses(activations: Activations) -> dict[str, Tensor]:
            logits = self.logits(activations).float()
            labelled = functional.cross_entropy(logits, activations["targets"])
            return {"logits": information_maximisation(logits), "pseudo-labels": self.weight * labelled}

        return losses
