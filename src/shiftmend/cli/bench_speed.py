"""`bench speed`: how fast this machine adapts, as ratios measured in one run."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from shiftmend.cli.bench_options import Json, columns, print_json, say, show

SIZES = ((256, 128), (4096, 128), (16_384, 512), (65_536, 512))


def speed(
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, ...")] = "auto",
    repeats: Annotated[int, typer.Option(help="Measurements of each; medians are shown.", min=1)] = 5,
    as_json: Json = False,
) -> None:
    """Steps of adaptation beside a plain loop and beside supervised training, and the soft histogram alone."""
    import torch

    from shiftmend.adaptations import environment
    from shiftmend.bench import speed as measuring
    from shiftmend.devices import resolve_device

    place = resolve_device(device)
    gpu = place.type == "cuda"
    dtype = torch.bfloat16 if gpu else torch.float32
    peak = measuring.matrix_throughput(place, dtype)
    steps = [measuring.step_times(work, place, repeats) for work in measuring.workloads(place)]
    histograms = [measuring.histogram_times(*size, place) for size in (SIZES if gpu else SIZES[:3])]
    growth = measuring.growth(place)
    if as_json:
        print_json(
            {
                "environment": environment(place),
                "matrix_throughput": peak,
                "steps": [
                    asdict(row) | {"ratio": row.ratio, "speedup": row.speedup, "images": row.images} for row in steps
                ],
                "histograms": [asdict(row) for row in histograms],
                "growth": [{"what": what, "factor": factor, **asdict(time)} for what, factor, time in growth],
            }
        )
        return
    facts = environment(place)
    say(f"{facts['device']}, torch {facts['torch']}, shiftmend {facts['shiftmend']}; medians (lowest to highest)\n")
    table = columns("milliseconds a step", "plain loop", "ours", "supervised", "ours / supervised", "plain / ours")
    for row in steps:
        times = (row.eager.milliseconds, row.ours.milliseconds, row.supervised.milliseconds)
        table.add_row(row.workload.name, *times, f"{row.ratio:.3f}", f"{row.speedup:.1f}")
    show(table)
    for row in steps:
        share = 100 * row.flops / row.ours.median / peak
        chip = f", {share:.0f} % of the {peak / 1e12:.3g} TFLOP/s of a matrix product"
        memory = f", {row.peak_memory / 2**20:.0f} MiB at most" if gpu else ""
        say(f"{row.workload.name}: {row.images:,.0f} images a second{chip if gpu else ''}{memory}")
    say("")
    table = columns("soft histogram, ms", "softmax", "ours", "one read", "softmax / ours", "error")
    for line in histograms:
        times = (line.naive.milliseconds, line.ours.milliseconds, line.read.milliseconds)
        name = f"{line.samples:,} x {line.units}"
        table.add_row(name, *times, f"{line.naive.median / line.ours.median:.1f}", f"{line.error:.0e}")
    show(table)
    say("")
    table = columns("divergence, forward and backward, ms", "x 1", "x 2", "x 4", "x 8")
    for what in dict.fromkeys(what for what, _, _ in growth):
        table.add_row(what, *(time.milliseconds for other, _, time in growth if other == what))
    show(table)
