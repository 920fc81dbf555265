"""How a method is run and scored. A protocol is stamped into the manifest of every result obtained under it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import torch

from shiftmend.errors import DataError


@dataclass(frozen=True, kw_only=True)
class Protocol:
    """What all protocols say: the batch, and the temperature of the profile's bins."""

    kind: ClassVar[str]
    batch_size: int = 256
    temperature: float = 0.01
    score_every: int = 1
    """Epochs between two looks at the labels; the first, the last and the selected state are always scored."""
    autocast: bool = False
    """Adapt offline in bfloat16 on a GPU, with the looks after each epoch; scores, the signals of a cell and profiles
    are taken in full precision."""

    def __post_init__(self) -> None:
        for name in ("batch_size", "score_every", "temperature", "per_class"):
            value = getattr(self, name, 1)
            if not value > 0 or (name != "temperature" and not isinstance(value, int)):
                raise DataError(f"{name} of a protocol must be a positive number, whole if it counts, got {value!r}")

    def in_bfloat16(self, device: torch.device) -> bool:
        """Whether to adapt so there: a CPU gains nothing by it."""
        return self.autocast and device.type == "cuda"

    def facts(self) -> dict[str, Any]:
        """What decides a result; a switch that is off is left out, as if there were none."""
        return {"kind": self.kind} | {name: value for name, value in asdict(self).items() if value is not False}


@dataclass(frozen=True, kw_only=True)
class Offline(Protocol):
    """Many passes over the target data; scored afterwards, in most benchmarks on that same data.

    The supervised method is trained on the first of three random parts and scored on the last; `supervised_parts=None`
    is for benchmarks that score on other data than they adapt to.
    """

    kind: ClassVar[str] = "offline"
    supervised_parts: tuple[float, ...] | None = (0.8, 0.1, 0.1)


@dataclass(frozen=True, kw_only=True)
class FewShot(Offline):
    """As offline, but from `per_class` target images of each class; scored on everything."""

    kind: ClassVar[str] = "few-shot"
    per_class: int


@dataclass(frozen=True, kw_only=True)
class Online(Protocol):
    """One pass in the order of the files; every batch is predicted before it is learnt from.

    The calibration error is taken over the whole stream; the mean over batches, which small batches bias upwards,
    stands beside it because the reference implementation reports it.
    """

    kind: ClassVar[str] = "online"
    batch_size: int = 200
    temperature: float = 0.05

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.autocast:
            raise DataError("online protocols know no autocast: predictions are made while adapting; leave it out")
