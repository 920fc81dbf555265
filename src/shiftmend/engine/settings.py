"""How an adaptation is run, whatever the method: the keywords of `shiftmend.adapt`, checked."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import nn

from shiftmend.engine.history import Epoch
from shiftmend.errors import AdaptationError
from shiftmend.inputs.feed import Preprocess
from shiftmend.introspection.blocks import BlockNames
from shiftmend.introspection.outputs import Entry
from shiftmend.utils.checks import brief, check_function, is_whole
from shiftmend.utils.files import as_path
from shiftmend.utils.progress import Progress

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
    blocks: BlockNames | None
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
        if not isinstance(self.keep, str) or self.keep not in get_args(Keep):
            raise AdaptationError(f"keep must be 'last' or 'selected', got {brief(self.keep)}")
        if not is_whole(self.seed):
            raise AdaptationError(f"the seed must be a whole number, got {brief(self.seed)}")
        object.__setattr__(self, "seed", int(self.seed))  # numpy's do not fit into a manifest
        for name in ("autocast", "resident", "capture", "compile"):
            given: Any = getattr(self, name)
            if not isinstance(given, bool | np.bool_):  # the text "False" would be taken for true
                raise AdaptationError(f"{name} must be True or False, got {brief(given)}")
            object.__setattr__(self, name, bool(given))
        check_function(self.on_epoch, "on_epoch", "model, row")
        if self.checkpoint is not None:
            as_path(self.checkpoint, "checkpoint", AdaptationError)
