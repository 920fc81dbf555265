"""One run of one method: check the arguments of `adapt`, train a copy of the model, complete the manifest."""

from __future__ import annotations

import functools
import hashlib
import logging
import math
import os
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch
from torch import nn

from shiftmend.accelerate.memory_format import channels_last
from shiftmend.accelerate.precision import Precision, cast_at_once
from shiftmend.adaptation.result import Adaptation, environment
from shiftmend.distributed.collectives import check_same, warn_without_process_group
from shiftmend.engine import checkpoint as checkpoints
from shiftmend.engine.batch_size import fit_batch_size, make_trial_step
from shiftmend.engine.method import (
    Method,
    Network,
    Stage,
    describe_method,
    plan_stages,
    read_taps,
)
from shiftmend.engine.modes import make_ordinary
from shiftmend.engine.schedule import SMALL_TARGET, plan_rounds
from shiftmend.engine.trainer import VERIFIED_PER_EPOCH, Keep, OnEpoch, Trainer
from shiftmend.errors import AdaptationError, DivergedError
from shiftmend.inputs.feed import Feed, Preprocess
from shiftmend.introspection.blocks import BlockNames, split_blocks
from shiftmend.introspection.model_state import restore
from shiftmend.introspection.modes import find_batch_norms
from shiftmend.introspection.outputs import Entry
from shiftmend.introspection.taps import Tap, attach_taps
from shiftmend.introspection.trace import Trace, trace
from shiftmend.introspection.validate import check_model, copy_model, unwrap
from shiftmend.methods import METHODS
from shiftmend.profiles import fingerprints
from shiftmend.profiles.fingerprints import Summary
from shiftmend.profiles.profile import Profile, as_profile
from shiftmend.utils.checks import brief, check_function, counted, is_whole
from shiftmend.utils.devices import max_resident_bytes, release_cached_memory, resolve_device
from shiftmend.utils.files import as_path
from shiftmend.utils.processes import of_first_process, world_size
from shiftmend.utils.progress import Progress, progress_bar
from shiftmend.utils.rng import isolate_rng
from shiftmend.utils.tensor_tree import Inputs
from shiftmend.verification.signals import SignalReader, observe
from shiftmend.verification.verdict import Verification

logger = logging.getLogger(__name__)
logger.addFilter(of_first_process)

PRECISIONS = (torch.bfloat16, torch.float16)
"""Data types that autocast accepts."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Keyword arguments of `adapt`, validated."""

    batch_size: int | None
    seed: int
    preprocess: Preprocess | None
    blocks: BlockNames | None
    output: Entry
    device: str | torch.device
    autocast: bool | torch.dtype
    resident: bool
    capture: bool
    compile: bool
    keep: Keep | None
    on_epoch: OnEpoch | None
    checkpoint: str | os.PathLike[str] | None
    progress: Progress

    def __post_init__(self) -> None:
        if self.keep is not None and self.keep not in [*get_args(Keep)]:
            raise AdaptationError(f"Expected keep to be 'last' or 'selected', got {brief(self.keep)}.")
        if not is_whole(self.seed):
            raise AdaptationError(f"Expected the seed to be a whole number, got {brief(self.seed)}.")
        object.__setattr__(self, "seed", int(self.seed))  # NumPy numbers cannot be written as JSON.
        flags = ("resident", "capture", "compile")
        for name in flags if isinstance(self.autocast, torch.dtype) else ("autocast", *flags):
            given: Any = getattr(self, name)
            if not isinstance(given, bool | np.bool_):  # The text "False" would count as true.
                raise AdaptationError(f"Expected {name} to be True or False, got {brief(given)}.")
            object.__setattr__(self, name, bool(given))
        if isinstance(self.autocast, torch.dtype) and self.autocast not in PRECISIONS:
            raise AdaptationError(
                f"Expected autocast to be True, False, torch.bfloat16 or torch.float16, got {self.autocast}."
            )
        check_function(self.on_epoch, "on_epoch", "model, row")
        if self.checkpoint is not None:
            as_path(self.checkpoint, "checkpoint", AdaptationError)

    @property
    def precision(self) -> torch.dtype | None:
        """Data type of autocast; None runs the network without autocast."""
        if isinstance(self.autocast, torch.dtype):
            return self.autocast
        return torch.bfloat16 if self.autocast else None


@dataclass(frozen=True)
class Task:
    """A validated model, profile and feed, shared by all runs of one call."""

    model: nn.Module
    profile: Profile | None
    feed: Feed
    wait_for_digest: Callable[[], str | None]
    """Function that returns the fingerprint of the target inputs, or None for streamed data."""

    @functools.cached_property
    def summary(self) -> Summary:
        """Summary of the target inputs. Its first use logs a warning if they differ from the source's."""
        found = fingerprints.summarise(self.feed.batches(self.feed.inference_batch_size))
        if self.profile is not None:
            self.profile.check_inputs(found)
        return found


def prepare(
    model: nn.Module,
    target: Any,
    profile: Profile | str | os.PathLike[str] | None,
    method: Method,
    settings: Settings,
    fits: bool | None = None,
) -> Task:
    """Validate model, data and profile for an adaptation. No data are read if the method cannot run.

    `fits` says whether the data of a loader fitted into memory in the run that is resumed; None for a new run. Resident
    data are visited in another order than streamed data, so a resumed run must not decide anew by the memory that is
    free now.
    """
    warn_without_process_group()
    describe_method(method)
    if world_size() > 1 and not method.several_processes:
        able = ", ".join(name for name, kind in METHODS.items() if kind.several_processes)
        raise AdaptationError(
            f"Expected one process for {method.name}, whose loss needs whole batches, got {world_size()}. Use one "
            f"process, or one of {able}."
        )
    model = unwrap(model, trained=True)
    profile = check_profile(profile, model, method)
    place = resolve_device(settings.device, model)
    # Twice the limit is still less than the free memory.
    limit = None if fits is None else 2 * max_resident_bytes(place) if fits else 0
    feed = Feed(
        target,
        batch_size=settings.batch_size,
        device=place,
        preprocess=settings.preprocess,
        resident=settings.resident,
        limit=limit,
        columns=() if profile is None else profile.inputs.columns,
        what="target data",
    )
    if feed.never_shuffles:
        logger.warning("The target data comes in a fixed order. If it is sorted, batches are biased. Try shuffle=True.")
    digest = (lambda: None) if feed.inputs is None else fingerprints.start_digest(feed.inputs)
    return Task(model, profile, feed, digest)


def check_profile(profile: Profile | str | os.PathLike[str] | None, model: nn.Module, method: Method) -> Profile | None:
    """Load the profile if a path is given; raise if it does not fit the model, or the method lacks one."""
    profile = None if profile is None else as_profile(profile)
    if profile is None and method.needs_profile:
        raise AdaptationError(
            f"Expected a profile of the source, which {method.name!r} needs, got none. Make one with shiftmend.profile."
        )
    if profile is not None:
        missing = [name for name in read_taps(method, profile) if name not in profile.taps]
        if missing:
            raise AdaptationError(
                f"Expected a profile with the tap {missing[0]!r}, got one with {', '.join(profile.taps)}. Profile the "
                "source again with this tap."
            )
        profile.check_architecture(model)
        profile.check_weights(model)
    return profile


def check_compile(settings: Settings, task: Task, method: Method) -> Settings:
    """Turn `compile` off, with a warning, where it has no effect."""
    if not (settings.compile and method.trains):
        return replace(settings, compile=False)
    reason = ""
    if any(hasattr(module, "_orig_mod") for module in task.model.modules()):
        reason = "a part of the model is compiled by itself, and runs uncompiled meanwhile"
    elif not (settings.capture and _on_cuda(task.feed) and world_size() == 1):
        reason = "only captured steps are compiled, of one process, on CUDA and with data that fits there"
    if reason:
        logger.warning("compile has no effect: %s", reason)
    return replace(settings, compile=not reason)


def _on_cuda(feed: Feed) -> bool:
    return feed.inputs is not None and feed.inputs.is_cuda


def run_method(task: Task, method: Method, settings: Settings, before: Verification | None = None) -> Adaptation:
    """Adapt a fresh copy of the model once.

    `before` is the verification of the untouched model, if an earlier run on the same data computed it.
    """
    adapted = copy_model(task.model).to(task.feed.device)
    specs = task.profile.specs if task.profile else None
    found: Trace | None = None

    def probe() -> None:
        """Run the model once, to check that it accepts the inputs and to find its taps and blocks."""
        nonlocal found
        samples = task.feed.examples(2)
        if method.trains:
            found = trace(adapted, samples[0], taps=specs, output=settings.output, original=task.model)
        if found is None and task.profile is not None and len(samples) == 1:
            with attach_taps(adapted, task.profile.specs) as recorder:
                check_model(adapted, samples, output=settings.output, original=task.model)
                task.profile.check_units({name: values.shape[1] for name, values in recorder.read().items()})
        elif found is None or len(samples) > 1:
            check_model(adapted, samples, output=settings.output, original=task.model)
        if task.profile is not None and found is not None:
            task.profile.check_units(found.units)

    with isolate_rng(task.feed.device, probe) as draws:
        try:
            summary = task.summary  # After the probe: no warning if the model refuses them.
            # A model that draws random numbers returns another output each time, so the traced one is no reference.
            returned = None if found is None or draws else found.returned
            channels_last(adapted, task.feed.first(2), settings.output, returned)
            network, taps = _divide(adapted, found, task.profile, method, settings.blocks)
            return _train(task, network, taps, method, settings, summary, before)
        finally:
            make_ordinary(adapted, task.model)
            if settings.capture and method.trains:
                release_cached_memory(task.feed.device)


def _train(
    task: Task,
    network: Network,
    taps: dict[str, Tap],
    method: Method,
    settings: Settings,
    summary: Summary,
    before: Verification | None,
) -> Adaptation:
    adapted, feed, place = network.model, task.feed, task.feed.device
    stages = plan_stages(method, network, task.profile)
    if settings.keep is None:
        settings = replace(settings, keep="selected" if any(stage.settles for stage in stages) else "last")
    assert settings.keep is not None
    profile = None if task.profile is None else task.profile.to(place)
    precision: Precision = nullcontext
    if settings.precision is not None:
        precision = functools.partial(cast_at_once, adapted, place, settings.precision)
    few = feed.may_resize and feed.batch_size < (feed.known_samples or math.inf) < SMALL_TARGET
    if few and any(stage.settles for stage in stages):
        feed.resize(feed.samples)
    if feed.may_resize and stages:
        # A resumed run keeps its batch size, whatever memory is free now.
        if (stored := checkpoints.stored_batch_size(settings.checkpoint)) is not None:
            feed.resize(stored)
        else:
            trial = make_trial_step(adapted, profile, method, stages, taps, precision)
            fit_batch_size(feed, trial, max(2, method.smallest_batch(profile)))
    _refuse_unfit(method, feed, bool(stages) and bool(find_batch_norms(adapted)), task.profile)
    manifest = _begin_manifest(task, method, settings, network, stages, summary)
    check_same(str(manifest["source_weights"]), "model", place)
    check_same(str(manifest["target"]), "target data", place)
    signals = SignalReader(
        adapted,
        feed,
        profile,
        settings.output,
        limit=VERIFIED_PER_EPOCH,
        capture=settings.capture,
        precision=precision,
        logits=taps.get("logits"),
    )
    trainer = Trainer(
        network,
        feed,
        profile,
        method,
        stages,
        taps,
        signals,
        run=_identify(manifest, stages, feed),
        seed=settings.seed,
        keep=settings.keep,
        on_epoch=settings.on_epoch,
        checkpoint=None if settings.checkpoint is None else Path(settings.checkpoint),
        precision=precision,
        capture=settings.capture,
        compile=settings.compile,
    )
    check_same(trainer.run, "run (profile, method, options, or whether the data fits into memory)", place)
    total = sum(plan_rounds(stage, feed.steps_per_epoch).at_most for stage in stages)
    with trainer.hold_checkpoint(), progress_bar(settings.progress, method.name, total) as trainer.bar:
        started, status = time.perf_counter(), "finished"
        trainer.load_checkpoint()
        try:
            if before is None:
                before = _verify_before(trainer, profile, settings.output)
            trainer.fit()
        except KeyboardInterrupt:
            if world_size() > 1:  # The other processes may be elsewhere: call no collective.
                raise
            trainer.restore()
            status = "interrupted"
            epochs = counted(trainer.epochs, "epoch")
            logger.warning("interrupted after %s; returning the state reached by then", epochs)
        except DivergedError as error:
            error.adaptation = _finish(trainer, manifest, settings, before, "diverged", started)
            raise
        return _finish(trainer, manifest, settings, before, status, started)


def _verify_before(trainer: Trainer, profile: Profile | None, output: Entry) -> Verification | None:
    if profile is None:
        return None
    trainer.show_pass("verification before")
    if trainer.signals.sees_all and not trainer.history:
        # The first row of the history verifies the same model on the same data.
        before = trainer.signals.look_ahead().verification
    else:
        before = observe(trainer.model, trainer.feed, profile, output).verification
    if not trainer.history and trainer.stages and before is not None and before.verdict == "restored":
        logger.warning("the features are %s before adapting: training may do harm", before)
    return before


def _finish(
    trainer: Trainer,
    manifest: dict[str, Any],
    settings: Settings,
    before: Verification | None,
    status: str,
    started: float,
) -> Adaptation:
    """Put the kept state into the model, verify it, and complete the manifest."""
    model = trainer.model
    model.eval()
    if trainer.selected:
        restore(model, trainer.selected)
    selected = trainer.choice.kept.epoch if trainer.choice.kept is not None else 0
    kept = selected if trainer.selected else trainer.epochs
    trainer.show_pass("verification after")
    after = before
    try:
        if trainer.profile is not None and (kept > 0 or after is None):
            found = observe(model, trainer.feed, trainer.profile, settings.output).verification
            after = None if found is None else replace(found, adapted=kept > 0)
    except KeyboardInterrupt:  # Training is complete, and an interrupt here only loses the verification.
        if world_size() > 1:
            raise
        after = None
        logger.warning("the last verification was interrupted; try shiftmend.verify")
    adapted = fingerprints.weights(model)
    check_same(adapted, "adapted model", trainer.feed.device)
    if trainer.search is not None:
        manifest |= {"learning_rate_chosen": "by a search", "learning_rate_search": trainer.search}
    manifest |= {
        "stages": [_describe_stage(stage) for stage in trainer.stages],
        "status": status,
        "selected_epoch": selected,
        "epochs": trainer.epochs,
        "steps": trainer.history[-1].steps if trainer.history else 0,
        "seconds": round(time.perf_counter() - started, 3),
        "seconds_in_epochs": round(sum(row.seconds for row in trainer.history), 3),
        "verified_per_epoch": min(VERIFIED_PER_EPOCH, trainer.feed.samples),
        "verification": {
            name: value.to_json() for name, value in (("before", before), ("after", after)) if value is not None
        },
        "adapted_weights": adapted,
        **({"compile": trainer.compile} if settings.compile else {}),  # Compiling may have failed.
    }
    return Adaptation(model, trainer.history, manifest, before, after, selected)


def _begin_manifest(
    task: Task,
    method: Method,
    settings: Settings,
    network: Network,
    stages: list[Stage],
    summary: Summary,
) -> dict[str, Any]:
    """Build the entries of an adaptation's manifest that are known before training.

    Wait for the digest of the target data. `_finish` adds the results, and updates the stages and the origin of the
    learning rate.
    """
    feed, profile = task.feed, task.profile
    reduced = settings.autocast if isinstance(settings.autocast, bool) else str(settings.precision)
    return {
        "method": describe_method(method),
        "stages": [_describe_stage(stage) for stage in stages],
        "preset": profile.preset if profile else None,
        "learning_rate_chosen": _rate_origin(method),
        "seed": settings.seed,
        "batch_size": feed.epoch_batch_size,
        **({"batch_size_reduced_from": feed.reduced_from} if feed.reduced_from is not None else {}),
        "blocks": [list(block.modules) for block in network.blocks],
        "resident": feed.resident,
        "target": {"samples": feed.samples, "sha256": task.wait_for_digest(), **summary.to_json()},
        "profile_sha256": hashlib.sha256(profile.to_bytes()).hexdigest() if profile else None,
        "source_weights": fingerprints.weights(task.model),
        "autocast": reduced,
        **({"compile": True} if settings.compile else {}),
        "kept": settings.keep,
        "environment": {**environment(feed.device), "world_size": world_size()},
    }


def _describe_stage(stage: Stage) -> dict[str, Any]:
    """Describe a stage for the manifest; `settles` is listed only if it is true."""
    facts = {name: value for name, value in asdict(stage).items() if name not in ("parameters", "settles", "searches")}
    return facts | ({"settles": True} if stage.settles else {})


def _identify(manifest: dict[str, Any], stages: list[Stage], feed: Feed) -> str:
    """Hash everything that determines a run, so that a checkpoint can be matched to its run."""
    facts = {key: value for key, value in manifest.items() if key != "environment"}
    # The digest identifies the data; their statistics are rounded differently on another CPU.
    facts["target"] = {key: manifest["target"][key] for key in ("samples", "sha256")}
    facts |= {"trained": [stage.parameters for stage in stages], "seen": fingerprints.digest(feed.first(64))}
    return checkpoints.identify(facts)


def _rate_origin(method: Method) -> str | None:
    if not hasattr(method, "learning_rate"):
        return None
    return "given" if method.learning_rate is not None else "default, not tuned"


def _refuse_unfit(method: Method, feed: Feed, normalises: bool, profile: Profile | None) -> None:
    """Raise if a method cannot work with this data. `normalises` says that the method updates BatchNorm statistics."""
    size = feed.epoch_batch_size or min(feed.batch_size, feed.samples)
    smallest = method.smallest_batch(profile)
    if smallest > 2 and size < smallest:
        raise AdaptationError(
            f"Expected batches of at least {smallest} samples for {method.name}, got {size}. Use a larger batch_size."
        )
    if size < max(2 if normalises else 1, smallest):
        purpose = "BatchNorm" if normalises else method.name
        given = "one target sample" if feed.samples < 2 else "a batch size of one"
        raise AdaptationError(f"Expected at least two samples a batch for {purpose}, got {given}. Use 256 or more.")
    if size < world_size():
        raise AdaptationError(
            f"Expected at least one sample for each of {world_size()} processes, got batches of {size}. Use larger "
            "batches or fewer processes."
        )
    if method.by_sample and not feed.resident:
        raise AdaptationError(
            f"Expected data that fits into memory, since {method.name} keeps a label for each sample, got a stream. "
            "Pass a tensor or smaller data."
        )
    if method.takes_labels and not feed.keeps_order:
        raise AdaptationError(
            f"Expected samples in the order of their labels for {method.name}, got a loader that shuffles. Use "
            "shuffle=False."
        )


def examine(
    model: nn.Module, sample: Inputs, profile: Profile | None, method: Method, blocks: BlockNames | None, output: Entry
) -> tuple[Network, dict[str, Tap]]:
    """Find blocks and taps of a model. A method that trains nothing needs neither and accepts any model."""
    if not method.trains:
        return Network(model, ()), {}
    found = trace(model, sample, taps=profile.specs if profile else None, output=output)
    return _divide(model, found, profile, method, blocks)


def _divide(
    model: nn.Module, found: Trace | None, profile: Profile | None, method: Method, blocks: BlockNames | None
) -> tuple[Network, dict[str, Tap]]:
    """Divide a traced model into blocks and find the taps that a method reads; return neither without a trace."""
    if found is None:
        return Network(model, ()), {}
    names = read_taps(method, profile)
    missing = [name for name in names if name not in found.taps]
    if missing:
        raise AdaptationError(
            f"Expected one of the taps {', '.join(found.taps)}, got {missing[0]!r}. Pass a profile with that tap."
        )
    network = Network(model, split_blocks(model, found, blocks), found.taps, found.head)
    return network, {name: found.taps[name] for name in names}
