"""`adapt`: adapt a model to unlabelled target data."""

from __future__ import annotations

import logging
import os
from typing import Any

import numpy as np
import torch
from torch import nn

from shiftmend.accelerate.precision import nothing_cached
from shiftmend.adaptation.auto import CandidateNames, adapt_auto, estimate_one, mark, read_both
from shiftmend.adaptation.learning_rates import best_rate, with_rate
from shiftmend.adaptation.result import Adaptation
from shiftmend.adaptation.run import Settings, Task, check_compile, prepare, run_method
from shiftmend.engine import checkpoint as checkpoints
from shiftmend.engine.method import Method, check_positive
from shiftmend.engine.trainer import Keep, OnEpoch
from shiftmend.errors import AdaptationError
from shiftmend.inputs.feed import Preprocess
from shiftmend.introspection.blocks import BlockNames
from shiftmend.introspection.outputs import Entry
from shiftmend.methods import method as make_method
from shiftmend.profiles.profile import Profile
from shiftmend.utils.processes import of_first_process, world_size
from shiftmend.utils.progress import Progress
from shiftmend.verification.harm import describe_harm, find_answers, find_harm
from shiftmend.verification.reading import Reading

logger = logging.getLogger(__name__)
logger.addFilter(of_first_process)

AUTO = "auto"
"""The method name that lets `adapt` choose among several candidates."""


@torch.inference_mode(False)
@nothing_cached()
def adapt(
    model: nn.Module,
    target: Any,
    profile: Profile | str | os.PathLike[str] | None = None,
    method: str | Method | type[Method] = "auto",
    *,
    candidates: CandidateNames | None = None,
    calibrate: bool = True,
    batch_size: int | None = None,
    seed: int = 0,
    preprocess: Preprocess | None = None,
    blocks: BlockNames | None = None,
    output: Entry = None,
    device: str | torch.device = "auto",
    autocast: bool | torch.dtype = False,
    resident: bool = True,
    capture: bool = True,
    compile: bool = False,
    keep: Keep | None = None,
    on_epoch: OnEpoch | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
    progress: Progress = None,
    **options: Any,
) -> Adaptation:
    """Adapt a copy of a model to unlabelled target inputs; the caller's model is not touched.

    While adapting, BatchNorm layers are in train mode and everything else is in eval mode (no dropout), as in the
    reference implementation. The method decides which parameters are trained: `requires_grad` of `model` is ignored
    during training and restored on the result. Ctrl-C returns the state after the last complete epoch.

    In a process group, every process calls `adapt` with the same model and the same data, and gets the same result.
    Each process computes its part of every batch, `batch_size` counts the samples of all processes together, and Ctrl-C
    stops all of them.

    Args:
        model: Any `nn.Module`. Inputs in a dict are passed by name, and those in a tuple in order.
        target: A tensor, an array, a data frame, a dict of arrays, a `Dataset` or a `DataLoader`, of inputs or of
            (inputs, anything). Nothing but the inputs reaches the method. Columns of a data frame are found by name.
        profile: The source's profile, or the name of its file. Some methods do without.
        method: Name, class or instance of a method. `"auto"` tries several candidates and returns the one that is
            estimated best. The untouched model is one of them.
        candidates: For `"auto"`: methods to try. By default those that were rehearsed; without a rehearsal, input
            matching, AdaBN, FR, BUFR and BUFR-IM.
        calibrate: Whether to divide the logits of the returned model by a temperature, so that its mean confidence
            equals its estimated accuracy. Predictions do not change. Without a valid estimate, the temperature that
            calibrates the model at home is used. Needs a profile that was rehearsed with labels. The untouched model is
            never calibrated.
        batch_size: Samples per batch. The default is 256, or the batch size of a `DataLoader`. With `epochs="auto"`,
            fewer than 500 samples form one batch. If batches of the default size exceed the memory of a GPU, they are
            halved before the first step until they fit.
        seed: Seed of the order of the batches and of all other random numbers.
        preprocess: Function that is applied to each batch of inputs on the device, before the model.
        blocks: Names of modules, or groups of names, that BUFR unfreezes one after the other.
        output: Entry of a tuple or dict that is the model's output.
        device: Device to compute on. `"auto"` is the accelerator that holds the model, else CUDA if available, else the
            CPU.
        autocast: True runs the network in bfloat16. A dtype (`torch.bfloat16`, `torch.float16`) chooses another.
        resident: Whether data that fits into the device's memory is kept there.
        capture: On CUDA, whether training steps on resident data are captured as a CUDA graph and replayed. That is
            many times faster for small networks, and results agree up to rounding. Steps that cannot be captured run
            eagerly.
        compile: Whether captured steps are compiled by `torch.compile` first. Compiling takes 15 seconds or more for
            each set of trained layers, and makes the steps of a large network about 20 % faster.
        keep: `"last"` returns the state after the last epoch. `"selected"` returns the state of the best epoch, chosen
            without labels by the verification slices. Either way, the result names that epoch (`selected`). The default
            is `"selected"` with `epochs="auto"`, and `"last"` with a fixed number of epochs.
        on_epoch: Function that is called as `on_epoch(model, row)` before the first epoch and after each epoch. With
            `epochs="auto"`, it is called after each round of steps.
        checkpoint: Path of a checkpoint file. A run that was killed resumes from this file if it is started again with
            the same arguments.
        progress: Whether to show a progress bar; None shows one on a terminal.
        **options: Hyper-parameters of the method, e.g. `learning_rate=0.1`. If `learning_rate` is a list, one run is
            made with each rate, and the best run, chosen without labels by the verification slices, is returned.

    Returns:
        The adapted model with its estimated accuracy before and after, its history, its verification and a manifest.

    Raises:
        ShiftmendError: If the model, the data, the profile or an option cannot be used; the message says which.
        DivergedError: If the loss or a weight is no longer finite. The attribute `adaptation` of the error holds the
            state after the last good epoch.

    Example:
        >>> import torch, shiftmend
        >>> _ = torch.manual_seed(0)
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 2)).eval()
        >>> source, target = torch.randn(200, 4), torch.randn(200, 4) + 1
        >>> profile = shiftmend.profile(model, source)
        >>> result = shiftmend.adapt(model, target, profile, "fr", epochs=2)
        >>> result.manifest["status"]
        'finished'
    """
    settings = Settings(
        batch_size=batch_size,
        seed=seed,
        preprocess=preprocess,
        blocks=blocks,
        output=output,
        device=device,
        autocast=autocast,
        resident=resident,
        capture=capture,
        compile=compile,
        keep=keep,
        on_epoch=on_epoch,
        checkpoint=checkpoint,
        progress=progress,
    )
    rates = options.get("learning_rate")
    if isinstance(rates, np.ndarray):
        rates = options["learning_rate"] = rates.tolist()
    if method == AUTO:
        return _adapt_auto(model, target, profile, settings, candidates, calibrate, options)
    if candidates is not None:
        raise AdaptationError(
            f"Expected candidates only beside the method 'auto', got the method {method!r}. Leave one of the two out."
        )
    if not isinstance(rates, list | tuple):
        alone, fits = make_method(method, **options), checkpoints.data_fits(checkpoint)
        task = prepare(model, target, profile, alone, settings, fits)
        result = run_method(task, alone, check_compile(settings, task, alone))
        mark(result)
        changed, readings = _is_changed(result), _read_if_useful(task, alone, result)
        if readings and task.profile is not None and task.profile.rehearsal is not None:
            estimate_one(task, alone, result, readings, calibrate=calibrate, output=output)
        return _warn(task, result, readings) if changed else result
    if profile is None:
        raise AdaptationError(
            "Expected a profile of the source, which chooses among several learning rates, got none. Pass profile=, "
            "or one learning rate."
        )
    if not rates:
        raise AdaptationError(
            "Expected at least one learning rate, got an empty list. Name one, or leave learning_rate out."
        )
    for rate in rates:
        check_positive(rate, "every learning rate")
    methods = {rate: make_method(method, **options | {"learning_rate": rate}) for rate in map(float, rates)}
    first = next(iter(methods.values()))
    fits = checkpoints.data_fits(*(with_rate(settings, rate).checkpoint for rate in methods))
    task = prepare(model, target, profile, first, settings, fits)
    result = best_rate(
        rates,
        lambda rate, own, before: run_method(task, methods[rate], own, before),
        check_compile(settings, task, first),
        entropy_may_decide=not first.minimises_entropy,
    )
    return _warn(task, result, _read_if_useful(task, first, result)) if _is_changed(result) else result


def _adapt_auto(
    model: nn.Module,
    target: Any,
    profile: Profile | str | os.PathLike[str] | None,
    settings: Settings,
    candidates: CandidateNames | None,
    calibrate: bool,
    options: dict[str, Any],
) -> Adaptation:
    if options:
        raise AdaptationError(
            f"Expected options only beside a single method, got {next(iter(options))!r} beside 'auto'. Name the "
            "method, e.g. 'bufr', or pass candidates=[BUFR(...)]."
        )
    untouched, fits = make_method("source-only"), checkpoints.data_fits(settings.checkpoint)
    task = prepare(model, target, profile, untouched, settings, fits)
    return adapt_auto(task, settings, candidates, calibrate=calibrate)


def _is_changed(result: Adaptation) -> bool:
    """Return whether the weights of the returned model differ from those of the given one."""
    return bool(result.manifest["adapted_weights"] != result.manifest["source_weights"])


def _read_if_useful(task: Task, method: Method, result: Adaptation) -> dict[str, Reading]:
    """Read the signals of the untouched and the adapted model, if an estimate or a check for harm needs them."""
    if task.profile is None or world_size() > 1:
        return {}
    judges_answers = _is_changed(result) and not result.interrupted and find_answers(task.profile) is not None
    return read_both(task, method, result) if judges_answers or task.profile.rehearsal is not None else {}


def _warn(task: Task, result: Adaptation, readings: dict[str, Reading]) -> Adaptation:
    """Log the warnings of the returned run only, not those of runs that were not chosen."""
    if task.profile is None:
        return result
    both = tuple(readings.values())
    estimates = (None, None) if result.estimate is None else (result.estimate.before, result.estimate.after)
    harm = find_harm(
        task.profile, (result.before, result.after), (both[0], both[1]) if len(both) == 2 else None, estimates
    )
    if harm:
        result.harm = tuple(harm)
        result.manifest["harm"] = harm
        logger.warning("%s", describe_harm(harm, is_rehearsed=task.profile.rehearsal is not None))
    elif result.after is not None and result.after.verdict != "restored" and result.manifest["stages"]:
        logger.warning("verification after adapting: %s", result.after)
    return result
