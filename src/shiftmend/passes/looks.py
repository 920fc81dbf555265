"""What some modules of a model give for every sample, in eval mode: what a method labels samples by."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext

import torch
from torch import Tensor, nn

from shiftmend.accelerate.bf16 import Precision
from shiftmend.accelerate.cuda_graphs import captured_call, worth_capturing
from shiftmend.inputs.feed import Feed
from shiftmend.introspection.modes import preserve_modes
from shiftmend.introspection.taps import Tap, attach_taps
from shiftmend.utils.rng import reseed


class Looker:
    """Takes such a look again and again; on CUDA, where the samples are small, captured as a graph.

    A captured look follows weights that change in their place, and writes into the tensors of the look before.
    """

    def __init__(self, model: nn.Module, feed: Feed, precision: Precision = nullcontext, capture: bool = False) -> None:
        self.model, self.feed, self.precision = model, feed, precision
        inputs = feed.inputs
        self.capture = capture and inputs is not None and worth_capturing(inputs)
        self._taps: dict[str, Tap] = {}
        self._again: Callable[[], dict[str, Tensor]] | None = None

    def __call__(self, taps: Mapping[str, Tap]) -> dict[str, Tensor]:
        reseed(0)
        if self.capture and self._taps != taps:
            self._taps = dict(taps)
            self._again = captured_call(lambda: self._look(taps), self.model, self.feed.device)
            self.capture = self._again is not None
        return self._again() if self._again is not None else self._look(taps)

    def _look(self, taps: Mapping[str, Tap]) -> dict[str, Tensor]:
        seen: dict[str, list[Tensor]] = {name: [] for name in taps}
        with torch.no_grad(), preserve_modes(self.model), attach_taps(self.model, taps) as recorder:
            self.model.eval()
            for batch in self.feed.batches(self.feed.inference_batch_size):
                with self.precision():
                    self.model(batch)
                for name, values in recorder.read().items():
                    seen[name].append(values)
        return {name: torch.cat(parts) for name, parts in seen.items()}
