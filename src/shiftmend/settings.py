"""How an adaptation is run, whatever the method: the keywords of `shiftmend.adapt`, checked."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import nn

from shiftmend.adaptations import Epoch
from shiftmend.blocks import Names
from shiftmend.errors import AdaptationError
from shiftmend.feeds import Preprocess
from shiftmend.progress import Progress
from shiftmend.taps import Entry

Keep = Literal["last", "selected"]
OnEpoch = Callable[[nn.Module, Epoch], None]
"""Called with the model, in eval mode, and its row of the history: before anything is done, and after each epoch.

The model is the one at work: weights of its convolutions may lie in memory with the channels innermost.
"""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """See `shiftmend.adapt` for what they mean."""

    batch_size: int | None
    seed: int
    preprocess: Preprocess | None
    blocks: Names | None
    output: Entry
    device: str | torch.device
    autocast: bool
    resident: bool
    capture: bool
    compile: bool
    keep: Keep
    on_epoch: OnEpoch | None
    checkpoint: str | os.PathLike[str] | None
    progress: Progress

    def __post_init__(self) -> None:
        if self.keep not in get_args(Keep):
            raise AdaptationError(f"keep must be 'last' or 'selected', got {self.keep!r}")
        given: Any = self.seed
        if isinstance(given, bool) or not isinstance(given, int | np.integer):
            raise AdaptationError(f"the seed must be a whole number, got {given!r}")
        object.__setattr__(self, "seed", int(given))  # numpy's do not fit into a manifest
