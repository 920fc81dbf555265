"""Our step in float32 and in bfloat16, with channels after and before the picture."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from speed.steps import Workload, ours, scene, time_step, workloads
from speed.timing import Table, Timing

LAYOUTS = {"NCHW": torch.contiguous_format, "channels last": torch.channels_last}


PRECISIONS = {"float32": False, "bfloat16": True}
"""Names of the precisions; True has autocast on."""


COMBINATIONS = [(precision, layout) for precision in PRECISIONS for layout in LAYOUTS]


@dataclass(frozen=True)
class PrecisionTime:
    """Seconds a step of ours in one precision and one layout."""

    workload: Workload
    precision: str
    layout: str
    time: Timing
    device: str
    """The type of the device, such as `cuda`."""

    def facts(self) -> dict[str, Any]:
        return asdict(self) | {"images": self.workload.batch / self.time.median}


def measure(device: torch.device, repeats: int) -> Iterator[PrecisionTime]:
    for work in workloads(device):
        for precision, layout in COMBINATIONS:
            yield precision_time(work, precision, layout, device, repeats)


def precision_time(work: Workload, precision: str, layout: str, device: torch.device, repeats: int) -> PrecisionTime:
    stage = scene(work, device, LAYOUTS[layout])
    time = time_step(stage, ours(stage), autocast=PRECISIONS[precision], repeats=repeats)
    return PrecisionTime(work, precision, layout, time, device.type)


def table(rows: Sequence[PrecisionTime]) -> Table:
    found: dict[str, list[PrecisionTime]] = {}
    for row in rows:
        found.setdefault(f"{row.workload.name}, batch {row.workload.batch}", []).append(row)
    titles = ("milliseconds a step of ours", *(f"{precision}, {layout}" for precision, layout in COMBINATIONS))
    lines, notes = [], []
    for name, times in found.items():
        lines.append((name, *(row.time.milliseconds for row in times)))
        first, best = times[0], min(times, key=lambda row: row.time.median)
        gain = f", {first.time.median / best.time.median:.2f} times as fast as {first.precision}, {first.layout}"
        notes.append(f"{name}: best in {best.precision}, {best.layout}{gain if best is not first else ''}")
    if any(row.device == "cuda" for row in rows):
        facts = tensor_float()
        notes.append(
            f"float32: convolutions {_as(facts['tf32_convolutions'])}, matrix products {_as(facts['tf32_products'])}"
        )
    return Table(titles, lines, tuple(notes))


def tensor_float() -> dict[str, bool]:
    """Tell where float32 is run as TF32, which keeps 10 bits behind the point only, on GPUs that have such units."""
    return {
        "tf32_convolutions": torch.backends.cudnn.allow_tf32,
        "tf32_products": torch.backends.cuda.matmul.allow_tf32,
    }


def _as(tensor_float: bool) -> str:
    return "run as TF32 where the GPU has it" if tensor_float else "in full"
