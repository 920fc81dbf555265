"""`rehearse`."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shiftmend.cli import options as opt
from shiftmend.cli.options import block_names, choose_columns, entry, gather, say
from shiftmend.cli.profile import New, check_key, check_place, summarise
from shiftmend.cli.verify import check_labels
from shiftmend.errors import ShiftmendError
from shiftmend.utils.checks import counted
from shiftmend.utils.json import dumps

if TYPE_CHECKING:
    from concurrent.futures import Executor

    from torch import nn

    from shiftmend.cli.loading import Data

logger = logging.getLogger(__name__)


def rehearse(
    model: opt.Model,
    data: opt.Data,
    profile: opt.ProfileFile,
    out: New,
    weights: opt.Weights = None,
    model_option: opt.Options = None,
    shifts: Annotated[int | None, typer.Option(help="Number of simulated shifts; 12, or 9 with --quick.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Leave out the slowest methods and the small size.")] = False,
    candidates: opt.Candidates = None,
    extend: Annotated[
        bool, typer.Option("--extend", help="Keep the profile's rehearsal and add the candidates that it lacks.")
    ] = False,
    site_size: Annotated[int | None, typer.Option(help="Number of samples at the sites, if known.")] = None,
    battery: Annotated[
        str | None,
        typer.Option(help="Simulated devices of your own: file.py:NAME of a dict or list of functions on inputs."),
    ] = None,
    checkpoint: Annotated[
        Path | None, typer.Option(help="Checkpoint file, written after each shift; a killed rehearsal resumes from it.")
    ] = None,
    workers: Annotated[int, typer.Option(min=1, help="Number of processes that run the simulated shifts.")] = 1,
    block: opt.Blocks = None,
    output_entry: opt.Output = None,
    label: opt.Label = None,
    classes: opt.Classes = None,
    quantity: opt.Quantities = None,
    group: opt.Group = None,
    drop: opt.Drop = None,
    where: opt.Where = None,
    size: opt.Size = None,
    channels: opt.Channels = None,
    mean: opt.Mean = "0.5",
    std: opt.Deviation = "0.5",
    batch_size: opt.MaybeBatch = None,
    seed: Annotated[int, typer.Option(help="Seed of the drawn samples and simulated devices.")] = 0,
    device: opt.Device = "auto",
    autocast: Annotated[bool, typer.Option(help="Run the network in bfloat16.")] = False,
    allow_pickle: opt.Pickle = False,
    ignore_label: opt.Ignore = None,
    sign: opt.Sign = None,
    trust: opt.Trust = None,
    as_json: opt.Json = False,
) -> None:
    """Simulate other devices at home and adapt the model to each, so that sites can estimate their accuracy.

    The data must be held-out data from home, on which the model was not trained. Labels are used if there are any.
    Without labels, scores compare with the model's own predictions on the unshifted data. The profile is not changed; a
    new one is written. Pass the same options as sites will pass to `adapt`.
    """
    import shiftmend
    from shiftmend.cli.loading import load_battery, load_candidates

    check_place(out, weights)
    check_key(sign)
    named = load_candidates(candidates)
    devices = None if battery is None else load_battery(battery)
    home = shiftmend.Profile.load(profile, trust=trust)
    choice = choose_columns(label, classes, quantity, drop, where, home, group)
    net, given, preprocess = gather(model, weights, model_option, allow_pickle, data, size, channels, mean, std, choice)
    home.check_architecture(net)
    check_labels(net, given, preprocess, output_entry, device, ignore_label)
    if workers > 1:
        _check_sendable(net, named)
    if not as_json and not extend:
        number = shifts if devices is None else len(devices)
        say(_announce(net, given, home, number, named, site_size, quick, workers))
    with _processes(workers) as executor:
        made = shiftmend.rehearse(
            net,
            given.inputs if given.labels is None else (given.inputs, given.labels),
            home,
            battery=devices,
            shifts=shifts,
            candidates=named,
            extend=extend,
            site_size=site_size,
            quick=quick,
            groups=given.groups or None,
            batch_size=batch_size,
            preprocess=preprocess,
            blocks=block_names(block),
            output=entry(output_entry),
            ignore_label=ignore_label,
            device=device,
            autocast=autocast,
            seed=seed,
            checkpoint=checkpoint,
            executor=executor,
        )
    made.save(out, sign=sign)
    if as_json:
        print(dumps(summarise(made, out)))
    else:
        say(f"{made.rehearsal}\nwritten to {out} ({out.stat().st_size:,} bytes)")


def _announce(
    model: nn.Module,
    given: Data,
    profile: Any,
    shifts: int | None,
    candidates: list[Any] | None,
    site_size: int | None,
    quick: bool,
    workers: int,
) -> str:
    """Describe in one line what will be done, how long it will take, and what `--quick` would leave out."""
    from shiftmend.adaptation.auto import CANDIDATES, choose_usual, list_candidates
    from shiftmend.rehearsal import rehearse as library

    samples = min(len(given.inputs), library.MAX_SAMPLES)
    sizes = library.choose_sizes(samples, site_size, quick)
    usual = library.QUICK_SHIFTS if quick else library.DEFAULT_SHIFTS
    number = usual if shifts is None else shifts
    default = library.QUICK_CANDIDATES if quick else CANDIDATES
    methods = list_candidates(choose_usual(default, profile, model) if candidates is None else candidates, profile)
    # The unshifted data are rehearsed as well.
    length = max(1, math.ceil((number + 1) * sum(sizes) / samples))
    labels = "with their labels" if given.labels is not None else "without labels"
    shared = f", shared by {workers} processes" if workers > 1 else ""
    saved = [] if candidates else [name for name in CANDIDATES if name not in library.QUICK_CANDIDATES]
    saved += ["the small size"] if len(sizes) > 1 else []
    saved += [counted(number - library.QUICK_SHIFTS, "shift")] if shifts is None else []
    remark = f"; --quick leaves out {', '.join(saved)}" if saved and not quick else ""
    return (
        f"{counted(number, 'simulated shift')} x {counted(len(sizes), 'size')} x "
        f"{counted(len(methods), 'candidate')} on {counted(samples, 'sample')} {labels}: about as long as "
        f"{counted(length, 'adaptation')}{shared}{remark}"
    )


def _check_sendable(*parts: Any) -> None:
    """Check that model and methods can be pickled for other processes, so that the rehearsal does not fail later."""
    import pickle

    from shiftmend.utils.python_files import describe_error, user_code

    def refuse(error: BaseException) -> ShiftmendError:
        return ShiftmendError(
            f"Expected a model and methods that can be sent to other processes, got {describe_error(error)}. Use "
            "--workers 1."
        )

    with user_code(refuse):
        pickle.dumps(parts)


@contextmanager
def _processes(number: int) -> Iterator[Executor | None]:
    """Start worker processes that share the cores, or yield None if `number` is 1."""
    if number == 1:
        yield None
        return
    import multiprocessing
    from concurrent.futures import ProcessPoolExecutor
    from concurrent.futures.process import BrokenProcessPool

    import torch

    threads = max(1, torch.get_num_threads() // number)
    pool = ProcessPoolExecutor(
        number,
        # A forked process cannot use CUDA.
        mp_context=multiprocessing.get_context("spawn"),
        initializer=torch.set_num_threads,
        initargs=(threads,),
    )
    try:
        yield pool
    except BrokenProcessPool as error:
        raise ShiftmendError(
            "A process of the rehearsal died, perhaps for lack of memory. Use fewer --workers, or 1."
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)
