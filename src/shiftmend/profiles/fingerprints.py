"""Fingerprints of a model and a summary of its inputs, to detect that a profile does not belong to them."""

from __future__ import annotations

import functools
import hashlib
import itertools
import sys
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor, nn

from shiftmend.errors import DataError, ShiftmendError
from shiftmend.introspection.model_state import full_state_dict
from shiftmend.stats.histograms import RangeTracker
from shiftmend.stats.moments import MAX_CHANNELS
from shiftmend.utils.devices import split_rows
from shiftmend.utils.gpu_sharing import is_sharing_gpu
from shiftmend.utils.tensor_tree import Inputs, TensorTree

MAX_SUMMARISED_INPUTS = 4096
"""Number of samples that a summary of the inputs is made from."""


MAX_BACKGROUND_BYTES = 1 << 30
"""Largest data to hash in a background thread, which takes a second or two."""


def architecture(model: nn.Module) -> str:
    """Compute the SHA-256 over names and shapes of the parameters."""
    lines = (f"{name}:{tuple(p.shape)}" for name, p in sorted(model.named_parameters()))
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def weights(model: nn.Module) -> str:
    """Compute the SHA-256 over names and values of parameters and buffers."""
    digest = hashlib.sha256()
    for name, value in sorted(full_state_dict(model).items()):
        if value.layout != torch.strided:
            raise ShiftmendError(
                f"Expected a model of dense tensors, got {name!r}, which is sparse and cannot be saved. Register it "
                "with persistent=False."
            )
        digest.update(name.encode())
        digest.update(tensor_bytes(value))
    return digest.hexdigest()


def tensor_bytes(value: Tensor) -> memoryview:
    """Return the bytes of a tensor of any dtype, without a copy if it is contiguous on the CPU."""
    flat = value.detach().to("cpu").resolve_conj().resolve_neg().contiguous().reshape(-1)
    return memoryview(flat.view(torch.uint8).numpy()) if flat.numel() else memoryview(b"")  # type: ignore[arg-type]


def _is_number(value: Any) -> bool:
    """Tell whether a value is a finite JSON number; bool does not count."""
    return type(value) in (int, float) and abs(value) <= sys.float_info.max


def digest(values: Inputs) -> str:
    """Compute the SHA-256 over shape, type and values, in parts, so that nothing large is copied."""
    if isinstance(values, TensorTree):
        lines = (f"{name}:{digest(leaf)}" for name, leaf in values.named_leaves)
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()
    result = hashlib.sha256(f"{tuple(values.shape)} {values.dtype}".encode())
    for part in split_rows(values):
        result.update(tensor_bytes(part))
    return result.hexdigest()


def start_digest(values: Inputs) -> Callable[[], str]:
    """Start to compute `digest` in a thread; return a function that waits for the result.

    Hashing releases the global interpreter lock, so the caller can continue. Large data, and data of threads that share
    a GPU, are hashed only when the result is requested; otherwise a forgotten thread would keep the data alive after an
    error.
    """
    if values.nbytes > MAX_BACKGROUND_BYTES or is_sharing_gpu():
        return functools.partial(digest, values)
    # The data may still be on their way to the device, on the CUDA stream of this thread.
    stream = torch.cuda.current_stream(values.device) if values.is_cuda else None

    def run() -> str:
        with torch.cuda.stream(stream):
            return digest(values)

    executor = ThreadPoolExecutor(1, "shiftmend-digest")
    waiting = executor.submit(run)
    executor.shutdown(wait=False)
    return waiting.result


@dataclass(frozen=True)
class InputSummary:
    """A summary of the inputs of a model: shape, type, range, and moments of each channel.

    It changes with the normalisation and the order of channels.
    """

    shape: tuple[int, ...]
    """Shape of a sample; 0 for sizes that differ between batches, such as the length of sequences."""
    dtype: str
    low: float
    high: float
    mean: tuple[float, ...]
    deviation: tuple[float, ...]
    columns: tuple[str, ...] = ()
    """Names of the columns of a table, before preprocessing; empty if the inputs have no names."""

    @staticmethod
    def from_batches(batches: Iterable[Tensor], most: int = MAX_SUMMARISED_INPUTS) -> InputSummary:
        """Summarise the first `most` samples of batches `[N, ...]`, per channel if axis 1 has few entries.

        Infinite values, and values beyond float32, count as the largest float32, because JSON has no infinity. NaN is
        refused: the data have been checked, so preprocessing must have produced it.
        """
        summing = _Summing(most)
        for batch in batches:
            summing.add(batch)
            if summing.seen >= most:
                break
        return summing.finish()

    @property
    def sizes(self) -> tuple[str, ...]:
        """Size of each axis of a sample as text, and "any" if batches differ in the size."""
        return tuple(str(size) if size else "any" for size in self.shape)

    def describe(self) -> str:
        """Describe shape, type and range in one line."""
        return f"{_as_list(self.sizes)} {self.dtype} in [{self.low:.3g}, {self.high:.3g}]"

    def has_shape(self, shape: Sequence[int]) -> bool:
        """Tell whether samples may have this shape."""
        return len(shape) == len(self.shape) and all(
            own == size or 0 in (own, size) for own, size in zip(self.shape, shape, strict=True)
        )

    @staticmethod
    def mix(parts: Sequence[InputSummary], sizes: Sequence[float]) -> InputSummary:
        """Combine summaries of inputs, weighted by their sizes; return the first if their types differ."""
        first = parts[0]
        if len({(part.dtype, len(part.mean), len(part.shape)) for part in parts}) > 1:
            return first
        shares = torch.tensor(sizes, dtype=torch.float64, device="cpu") / sum(sizes)
        means, deviations = (
            torch.tensor(rows, dtype=torch.float64, device="cpu")
            for rows in zip(*((p.mean, p.deviation) for p in parts), strict=True)
        )
        mean = shares @ means
        deviation = (shares @ (deviations.square() + (means - mean).square())).sqrt()
        return replace(
            first,
            shape=functools.reduce(_common_shape, (part.shape for part in parts)),
            low=min(part.low for part in parts),
            high=max(part.high for part in parts),
            mean=tuple(round(value, 6) for value in mean.tolist()),
            deviation=tuple(round(value, 6) for value in deviation.tolist()),
        )

    def to_json(self) -> dict[str, Any]:
        """Return the summary as JSON."""
        return {name: value for name, value in asdict(self).items() if name != "columns" or value}

    @staticmethod
    def from_json(data: Any) -> InputSummary:
        """Undo `to_json`; refuse anything malformed, since the data may come from any file."""
        names = [field.name for field in fields(InputSummary) if field.name != "columns"]
        if not isinstance(data, dict) or sorted(data.keys() - {"columns"}) != sorted(names):
            raise ShiftmendError(f"the description of its inputs should have the entries {', '.join(names)}")
        shape, mean, deviation, columns = data["shape"], data["mean"], data["deviation"], data.get("columns", [])
        fits = (
            isinstance(data["dtype"], str)
            and data["dtype"].isidentifier()
            and all(isinstance(part, list) for part in (shape, mean, deviation))
            and all(type(size) is int and size >= 0 for size in shape)
            and all(_is_number(value) for value in (data["low"], data["high"], *mean, *deviation))
            and data["low"] <= data["high"]
            and len(mean) == len(deviation) > 0
            and min(deviation) >= 0
            and isinstance(columns, list)
            and all(isinstance(name, str) for name in columns)
            and len(set(columns)) == len(columns)
        )
        if not fits:
            raise ShiftmendError("the description of its inputs has entries of the wrong kind")
        low, high = float(data["low"]), float(data["high"])
        return InputSummary(
            tuple(shape),
            data["dtype"],
            low,
            high,
            tuple(map(float, mean)),
            tuple(map(float, deviation)),
            tuple(columns),
        )

    def differences(self, target: Summary) -> list[str]:
        """List signs that the target is preprocessed differently from the source, one sentence each.

        A new device also changes the inputs, so none of the signs is certain; they are reasons to check.
        """
        if not isinstance(target, InputSummary):
            return [f"they are {_name_parts(target)}, at the source they were {_name_parts(self)}"]
        found = []
        if target.dtype != self.dtype:
            found.append(f"they are {target.dtype}, at the source they were {self.dtype}")
        own, home = target.sizes, self.sizes
        if len(own) != len(home) or not replace(self, shape=self.shape[:1]).has_shape(target.shape[:1]):
            found.append(f"their shape is {_as_list(own)}, at the source it was {_as_list(home)}")
            return found
        if not self.has_shape(target.shape):
            found.append(f"their size is {_as_list(own[1:])}, at the source it was {_as_list(home[1:])}: scaled?")
        span = max(self.high - self.low, 1e-12)
        outside = max(self.low - target.low, target.high - self.high) / span
        covered = (target.high - target.low) / span
        if outside > 0.25 or covered < 0.55:
            found.append(
                f"their values lie in [{target.low:.3g}, {target.high:.3g}], at the source in "
                f"[{self.low:.3g}, {self.high:.3g}]: another normalisation?"
            )
        elif len(self.mean) == 3 and len(target.mean) == 3:
            as_is = sum(abs(a - b) for a, b in zip(self.mean, target.mean, strict=True))
            flipped = sum(abs(a - b) for a, b in zip(self.mean, reversed(target.mean), strict=True))
            if as_is > 0.05 * span and flipped < 0.25 * as_is:
                found.append("their channels fit the source better in reverse order: BGR instead of RGB?")
        return found


class _Summing:
    """Sums over the first samples of one tensor, for its summary."""

    def __init__(self, most: int) -> None:
        self.most, self.seen = most, 0
        # One tracker per number of channels, which may differ between batches of sequences.
        self._trackers: dict[int, RangeTracker] = {}
        self._shape: tuple[int, ...] | None = None
        self._dtype = ""
        self._nans: list[Tensor] = []

    def add(self, batch: Tensor) -> None:
        sizes, shape = tuple(batch.shape[1:]), self._shape
        self._shape = sizes if shape is None or len(shape) != len(sizes) else _common_shape(shape, sizes)
        self._dtype = self._dtype or str(batch.dtype).removeprefix("torch.")
        for part in split_rows(batch[: self.most - self.seen]):
            values = (torch.view_as_real(part) if part.is_complex() else part).float()
            self._nans.append(values.isnan().any())
            values = values.nan_to_num()
            by_channel = values.ndim > 2 and values.shape[1] <= MAX_CHANNELS
            rows = values.movedim(1, -1).flatten(0, -2) if by_channel else values.reshape(-1, 1)
            self._trackers.setdefault(rows.shape[1], RangeTracker()).update(rows)
        self.seen += len(batch)

    def finish(self) -> InputSummary:
        assert self._shape is not None, "feeds refuse empty data"
        if bool(torch.stack(self._nans).any()):
            raise DataError("Expected preprocess to return numbers, got NaN for finite inputs. Check preprocess.")
        trackers = [*self._trackers.values()]
        mean, deviation = _combine_moments(trackers)
        return InputSummary(
            self._shape,
            self._dtype,
            min(float(tracker.low.min()) for tracker in trackers),
            max(float(tracker.high.max()) for tracker in trackers),
            tuple(round(value, 6) for value in mean.tolist()),
            tuple(round(value, 6) for value in deviation.tolist()),
        )


@dataclass(frozen=True)
class TreeSummary:
    """Summaries of several inputs, by name."""

    parts: dict[str, InputSummary]

    @property
    def columns(self) -> tuple[str, ...]:
        """Column names, which several inputs do not have."""
        return ()

    @property
    def sizes(self) -> tuple[str, ...]:
        """Name and shape of each input as text, without the batch axis, such as `"image [3, 32, 32]"`."""
        return tuple(f"{name} {_as_list(part.sizes)}" for name, part in self.parts.items())

    def describe(self) -> str:
        """Describe the inputs in one line: name, shape without the batch axis, dtype, and range of values of each."""
        return ", ".join(f"{name} {part.describe()}" for name, part in self.parts.items())

    def differences(self, target: Summary) -> list[str]:
        """List signs that the target is preprocessed differently from the source, one sentence each."""
        if not isinstance(target, TreeSummary) or sorted(target.parts) != sorted(self.parts):
            return [f"they are {_name_parts(target)}, at the source they were {_name_parts(self)}"]
        return [
            f"in {name!r} {difference}"
            for name, part in self.parts.items()
            for difference in part.differences(target.parts[name])
        ]

    def to_json(self) -> dict[str, Any]:
        """Return the summaries as JSON."""
        return {"parts": {name: part.to_json() for name, part in self.parts.items()}}


Summary = InputSummary | TreeSummary
"""A summary of inputs of either kind."""


def summarise(batches: Iterable[Inputs], most: int = MAX_SUMMARISED_INPUTS) -> Summary:
    """Summarise the first `most` samples of batches. A model with several inputs gets a summary of each input."""
    batches = iter(batches)
    first = next(batches)
    if not isinstance(first, TensorTree):
        return InputSummary.from_batches(itertools.chain([first], batches), most)  # type: ignore[arg-type]
    parts = {name: _Summing(most) for name in first.names}
    seen = 0
    for batch in itertools.chain([first], batches):
        assert isinstance(batch, TensorTree)
        for name, leaf in batch.named_leaves:
            parts[name].add(leaf)
        seen += len(batch)
        if seen >= most:
            break
    return TreeSummary({name: part.finish() for name, part in parts.items()})


def mix_summaries(parts: Sequence[Summary], sizes: Sequence[float]) -> Summary:
    """Combine summaries of several sets of inputs, weighted by their sizes. Return the first if their kinds differ."""
    first = parts[0]
    single = [part for part in parts if isinstance(part, InputSummary)]
    if len(single) == len(parts):
        return InputSummary.mix(single, sizes)
    several = [part for part in parts if isinstance(part, TreeSummary) and isinstance(first, TreeSummary)]
    if len(several) < len(parts) or len({tuple(part.parts) for part in several}) > 1:
        return first
    names = several[0].parts
    return TreeSummary({name: InputSummary.mix([part.parts[name] for part in several], sizes) for name in names})


def read_summary(data: Any) -> Summary:
    """Undo `to_json` of either kind; refuse anything malformed, since the data may come from any file."""
    if not isinstance(data, dict) or set(data) != {"parts"}:
        return InputSummary.from_json(data)
    parts = data["parts"]
    if not isinstance(parts, dict) or not parts:
        raise ShiftmendError("the description of its inputs has entries of the wrong kind")
    return TreeSummary({name: InputSummary.from_json(part) for name, part in parts.items()})


def _name_parts(summary: Summary) -> str:
    return ", ".join(map(repr, summary.parts)) if isinstance(summary, TreeSummary) else "one tensor"


def _common_shape(first: tuple[int, ...], second: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(size if size == other else 0 for size, other in zip(first, second, strict=True))


def _combine_moments(trackers: Sequence[RangeTracker]) -> tuple[Tensor, Tensor]:
    """Compute mean and standard deviation of each channel, or of all values if the number of channels differs."""
    if len(trackers) == 1:
        return trackers[0].mean, trackers[0].deviation
    counts, means, squares = (
        torch.cat(parts)
        for parts in zip(*((torch.full_like(t.mean, t.samples), t.mean, t.squares) for t in trackers), strict=True)
    )
    mean = (counts * means).sum() / counts.sum()
    spread = (squares + counts * (means - mean).square()).sum() / counts.sum()
    return mean.view(1), spread.sqrt().view(1)


def _as_list(sizes: Sequence[str]) -> str:
    return f"[{', '.join(sizes)}]"
