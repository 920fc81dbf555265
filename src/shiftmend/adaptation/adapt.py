"""`adapt`: from a model, data and a profile to an adapted model."""

from __future__ import annotations

import functools
import hashlib
import logging
import math
import os
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch
from torch import Tensor, nn

from shiftmend.accelerate.memory_format import channels_last
from shiftmend.accelerate.precision import Precision, cast_at_once, nothing_cached
from shiftmend.adaptation.result import Adaptation, environment
from shiftmend.distributed.collectives import check_same, warn_without_process_group
from shiftmend.engine import checkpoint as checkpoints
from shiftmend.engine.batch_size import fit_batch_size, make_trial_step
from shiftmend.engine.history import Choice
from shiftmend.engine.method import (
    Method,
    Network,
    Stage,
    check_positive,
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
from shiftmend.introspection.taps import Tap
from shiftmend.introspection.trace import Trace, trace
from shiftmend.introspection.validate import check_model, copy_model, unwrap
from shiftmend.methods import METHODS
from shiftmend.methods import method as make_method
from shiftmend.profiles import fingerprints
from shiftmend.profiles.fingerprints import InputSummary
from shiftmend.profiles.profile import Profile, as_profile
from shiftmend.utils.checks import brief, check_function, counted, is_whole
from shiftmend.utils.devices import max_resident_bytes, resolve_device
from shiftmend.utils.files import as_path
from shiftmend.utils.processes import of_first_process, world_size
from shiftmend.utils.progress import Progress, progress_bar
from shiftmend.utils.rng import isolate_rng
from shiftmend.verification.signals import SignalReader, observe
from shiftmend.verification.verdict import Verification

logger = logging.getLogger(__name__)
logger.addFilter(of_first_process)

PRECISIONS = (torch.bfloat16, torch.float16)
"""Types that autocast may run a network in."""


@torch.inference_mode(False)
@nothing_cached()
def adapt(
    model: nn.Module,
    target: Any,
    profile: Profile | str | os.PathLike[str] | None = None,
    method: str | Method | type[Method] = "bufr",
    *,
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

    BatchNorm uses and updates batch statistics in every layer while everything else is in eval mode (no dropout), as
    in the reference implementation. The method decides what is trained: flags that freeze layers of `model` are not
    heeded, but come back on the result. Ctrl-C returns the state after the last whole epoch.

    In a process group every process calls this with the same model and the same data and gets the same result. Each
    process runs its share of every batch, `batch_size` is that of all together, and Ctrl-C ends them all.

    Args:
        model: Any `nn.Module` that is called with one tensor.
        target: A tensor, an array, a `Dataset` or a `DataLoader`, of inputs or of (inputs, anything). Nothing but the
            inputs reaches the method.
        profile: The source's profile, or the name of its file. Some methods do without.
        method: Name, class or instance of a method.
        batch_size: Samples in a batch; 256, or what a loader brings along. In a schedule that ends by itself, fewer
            than 500 samples are one batch. Batches of 256 that do not fit into the memory of a GPU are halved before
            the first step, until they do.
        seed: Decides the order of the batches, and whatever else is random.
        preprocess: Called with each batch on the device, before the model.
        blocks: BlockNames of modules, or groups of them, that BUFR unfreezes one after the other.
        output: Entry of a tuple or dict that is the model's output.
        device: Where to compute; `"auto"` is the model's accelerator, else CUDA if there is one, else the CPU.
        autocast: True runs the network in bfloat16. A dtype (`torch.bfloat16`, `torch.float16`) chooses another.
        resident: Whether data that fits is kept on the device.
        capture: On CUDA, whether steps over resident data are replayed as a CUDA graph: many times faster for small
            networks, and equal but for rounding. What cannot be captured runs eagerly.
        compile: Whether captured steps are compiled by `torch.compile` first. That takes a quarter of a minute or more
            for each set of trained layers, and makes steps of a large network a fifth faster.
        keep: `"last"` returns the state after the last epoch, `"selected"` that of the epoch which the verification
            slices prefer. The number of that epoch is in the result either way. None is `"selected"` for a schedule
            that ends by itself (`epochs="auto"`), and `"last"` for a fixed number of epochs.
        on_epoch: Called as `on_epoch(model, row)` before the first and after each epoch; in a schedule that ends by
            itself, after each round of steps.
        checkpoint: A file. A killed run with the same arguments goes on from it.
        progress: True shows a progress bar, False does not, None does so on a terminal.
        **options: Hyper-parameters of the method, e.g. `learning_rate=0.1`. Of a list of learning rates, the run that
            the verification slices prefer is returned.

    Returns:
        The adapted model with its history, its verification before and after, and a manifest.

    Raises:
        ShiftmendError: If the model, the data, the profile or an option cannot be used; the message says which.
        DivergedError: If the loss or a weight is no longer finite. Its `adaptation` is what had been reached.

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
    settings = _Settings(
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
    if not isinstance(rates, list | tuple):
        alone, fits = make_method(method, **options), checkpoints.data_fits(checkpoint)
        task = _prepare(model, target, profile, alone, settings, fits)
        return _warn(_run(task, alone, _check_compile(settings, task, alone)))
    if profile is None:
        raise AdaptationError("several learning rates need a judge between them: a profile of the source")
    if not rates:
        raise AdaptationError("the list of learning rates is empty; name at least one, or leave it out")
    for rate in rates:
        check_positive(rate, "every learning rate")
    methods = {rate: make_method(method, **options | {"learning_rate": rate}) for rate in map(float, rates)}
    first = next(iter(methods.values()))
    fits = checkpoints.data_fits(*(_with_rate(settings, rate).checkpoint for rate in methods))
    task = _prepare(model, target, profile, first, settings, fits)
    return _warn(
        best_rate(
            rates,
            lambda rate, own, before: _run(task, methods[rate], own, before),
            _check_compile(settings, task, first),
            entropy_may_decide=not first.minimises_entropy,
        )
    )


@dataclass(frozen=True, kw_only=True)
class _Settings:
    """The keywords of `adapt`, checked."""

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
            raise AdaptationError(f"keep must be 'last' or 'selected', got {brief(self.keep)}")
        if not is_whole(self.seed):
            raise AdaptationError(f"the seed must be a whole number, got {brief(self.seed)}")
        object.__setattr__(self, "seed", int(self.seed))  # Numbers of numpy do not fit into a manifest.
        flags = ("resident", "capture", "compile")
        for name in flags if isinstance(self.autocast, torch.dtype) else ("autocast", *flags):
            given: Any = getattr(self, name)
            if not isinstance(given, bool | np.bool_):  # The text "False" would count as true.
                raise AdaptationError(f"{name} must be True or False, got {brief(given)}")
            object.__setattr__(self, name, bool(given))
        if isinstance(self.autocast, torch.dtype) and self.autocast not in PRECISIONS:
            raise AdaptationError(f"autocast must be True, False, bfloat16 or float16, got {self.autocast}")
        check_function(self.on_epoch, "on_epoch", "model, row")
        if self.checkpoint is not None:
            as_path(self.checkpoint, "checkpoint", AdaptationError)

    @property
    def precision(self) -> torch.dtype | None:
        """Type that the network runs in; None is that of its weights."""
        if isinstance(self.autocast, torch.dtype):
            return self.autocast
        return torch.bfloat16 if self.autocast else None


@dataclass(frozen=True)
class _Task:
    """A model, its profile and data, read and checked once, however many runs follow."""

    model: nn.Module
    profile: Profile | None
    feed: Feed
    wait_for_digest: Callable[[], str | None]
    """Returns the fingerprint of the target's inputs, None of a stream; it is computed in the background."""

    @functools.cached_property
    def summary(self) -> InputSummary:
        """Summary of the target's inputs; its first use warns if they differ from the source's."""
        found = InputSummary.from_batches(self.feed.batches(self.feed.inference_batch_size))
        if self.profile is not None:
            self.profile.check_inputs(found)
        return found


def _prepare(
    model: nn.Module,
    target: Any,
    profile: Profile | str | os.PathLike[str] | None,
    method: Method,
    settings: _Settings,
    fits: bool | None = None,
) -> _Task:
    """Read and check what an adaptation is given; nothing is read for a method that cannot be run.

    `fits` says whether an earlier process, whose run is resumed, found room for what a loader gives. Kept data is
    stepped through in another order than a stream, so memory that is free now must not decide again.
    """
    warn_without_process_group()
    describe_method(method)
    if world_size() > 1 and not method.several_processes:
        able = ", ".join(name for name, kind in METHODS.items() if kind.several_processes)
        raise AdaptationError(
            f"{method.name} works in one process only, and these are {world_size()}: its loss needs the whole of a "
            f"batch; use one process, or one of {able}"
        )
    model = unwrap(model, trained=True)
    profile = check_profile(profile, model, method)
    place = resolve_device(settings.device, model)
    # Twice the limit is still less than what is free.
    limit = None if fits is None else 2 * max_resident_bytes(place) if fits else 0
    feed = Feed(
        target,
        batch_size=settings.batch_size,
        device=place,
        preprocess=settings.preprocess,
        resident=settings.resident,
        limit=limit,
        what="target data",
    )
    if feed.never_shuffles:
        logger.warning(
            "the target data streams in a fixed order: if it is sorted, batches are one-sided; use shuffle=True"
        )
    digest = (lambda: None) if feed.inputs is None else fingerprints.start_digest(feed.inputs)
    return _Task(model, profile, feed, digest)


def check_profile(profile: Profile | str | os.PathLike[str] | None, model: nn.Module, method: Method) -> Profile | None:
    """Return the profile, read if a file is named; raise if it does not fit the model, or the method lacks one."""
    profile = None if profile is None else as_profile(profile)
    if profile is None and method.needs_profile:
        raise AdaptationError(f"method {method.name!r} needs a profile of the source: make one with shiftmend.profile")
    if profile is not None:
        missing = [name for name in read_taps(method, profile) if name not in profile.taps]
        if missing:
            raise AdaptationError(f"the profile has no tap {missing[0]!r}; it has {', '.join(profile.taps)}")
        profile.check_architecture(model)
        profile.check_weights(model)
    return profile


def _check_compile(settings: _Settings, task: _Task, method: Method) -> _Settings:
    """Switch `compile` off, with a warning, where it has no effect."""
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


def _run(task: _Task, method: Method, settings: _Settings, before: Verification | None = None) -> Adaptation:
    """Adapt a fresh copy of the model once.

    `before` is what another run has found of the same model on the same data.
    """
    adapted = copy_model(task.model).to(task.feed.device)
    specs = task.profile.specs if task.profile else None
    found: Trace | None = None

    def probe() -> None:
        """Run the model once: what shows that the model takes the inputs shows its taps and blocks, too."""
        nonlocal found
        samples = task.feed.examples(2)
        if method.trains:
            found = trace(adapted, samples[0], taps=specs, output=settings.output, original=task.model)
        if not method.trains or len(samples) > 1:
            check_model(adapted, samples, output=settings.output, original=task.model)

    with isolate_rng(task.feed.device, probe) as draws:
        try:
            summary = task.summary  # Not earlier: inputs that the model refuses need no other remark.
            # A model that draws random numbers does not return the same twice.
            returned = None if found is None or draws else found.returned
            channels_last(adapted, task.feed.first(2), settings.output, returned)
            network, taps = _divide(adapted, found, task.profile, method, settings.blocks)
            return _train(task, network, taps, method, settings, summary, before)
        finally:
            make_ordinary(adapted, task.model)


def _train(
    task: _Task,
    network: Network,
    taps: dict[str, Tap],
    method: Method,
    settings: _Settings,
    summary: InputSummary,
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
        # Memory that is free now must not decide again for a run that is resumed.
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
            if world_size() > 1:  # The others may be elsewhere: nothing can be asked of them any more.
                raise
            trainer.restore()
            status = "interrupted"
            epochs = counted(trainer.epochs, "epoch")
            logger.warning("interrupted after %s; this is the state reached then", epochs)
        except DivergedError as error:
            error.adaptation = _finish(trainer, manifest, settings, before, "diverged", started)
            raise
        return _finish(trainer, manifest, settings, before, status, started)


def _verify_before(trainer: Trainer, profile: Profile | None, output: Entry) -> Verification | None:
    if profile is None:
        return None
    trainer.show_pass("verification before")
    if trainer.signals.sees_all and not trainer.history:
        # The first row of the history takes the same look at the same model.
        before = trainer.signals.look_ahead().verification
    else:
        before = observe(trainer.model, trainer.feed, profile, output).verification
    if not trainer.history and trainer.stages and before is not None and before.verdict == "restored":
        logger.warning("the features are %s before anything is done: training may do harm", before)
    return before


def _finish(
    trainer: Trainer,
    manifest: dict[str, Any],
    settings: _Settings,
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
    except KeyboardInterrupt:  # The work is done; only its judgement is missing.
        if world_size() > 1:
            raise
        after = None
        logger.warning("the last verification was interrupted; ask shiftmend.verify for it")
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
            name: asdict(value) | {"verdict": value.verdict}
            for name, value in (("before", before), ("after", after))
            if value is not None
        },
        "adapted_weights": adapted,
        **({"compile": trainer.compile} if settings.compile else {}),  # Asked for, and it may not have worked.
    }
    return Adaptation(model, trainer.history, manifest, before, after, selected)


def _begin_manifest(
    task: _Task,
    method: Method,
    settings: _Settings,
    network: Network,
    stages: list[Stage],
    summary: InputSummary,
) -> dict[str, Any]:
    """Return the part of the manifest that is known before training."""
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
    """Return a stage for the manifest; `settles` only where it does."""
    facts = {name: value for name, value in asdict(stage).items() if name not in ("parameters", "settles", "searches")}
    return facts | ({"settles": True} if stage.settles else {})


def _identify(manifest: dict[str, Any], stages: list[Stage], feed: Feed) -> str:
    """Return a name for everything that decides how a run goes, by which a checkpoint knows its run."""
    facts = {key: value for key, value in manifest.items() if key != "environment"}
    facts |= {"trained": [stage.parameters for stage in stages], "seen": fingerprints.digest(feed.first(64))}
    return checkpoints.identify(facts)


def _rate_origin(method: Method) -> str | None:
    if not hasattr(method, "learning_rate"):
        return None
    return "given" if method.learning_rate is not None else "default, not tuned"


def _refuse_unfit(method: Method, feed: Feed, normalises: bool, profile: Profile | None) -> None:
    """Raise if a method cannot work with this data, before anything is trained; `normalises`: BatchNorm is moved."""
    size = feed.epoch_batch_size or min(feed.batch_size, feed.samples)
    smallest = method.smallest_batch(profile)
    if smallest > 2 and size < smallest:
        raise AdaptationError(f"batches of {size} are too small for {method.name}; it needs at least {smallest}")
    if size < max(2 if normalises else 1, smallest):
        one = "one target sample is" if feed.samples < 2 else "a batch size of one is"
        purpose = "adapt BatchNorm with" if normalises else f"be a distribution that {method.name} can learn from"
        raise AdaptationError(f"{one} too few to {purpose}; use at least two, better 256")
    if size < world_size():
        raise AdaptationError(
            f"batches of {size} cannot be shared by {world_size()} processes, each of "
            "which needs at least one sample; use larger batches or fewer processes"
        )
    if method.by_sample and not feed.resident:
        raise AdaptationError(
            f"{method.name} must know which sample is which, and streamed data does not say; pass a tensor, or data "
            "of one size that fits into memory"
        )
    if method.takes_labels and not feed.keeps_order:
        raise AdaptationError(
            f"{method.name} takes labels in the order of the samples, and this loader shuffles them; use shuffle=False"
        )


def examine(
    model: nn.Module, sample: Tensor, profile: Profile | None, method: Method, blocks: BlockNames | None, output: Entry
) -> tuple[Network, dict[str, Tap]]:
    """Find blocks and taps of a model, if the method trains something; other methods take any model."""
    if not method.trains:
        return Network(model, ()), {}
    found = trace(model, sample, taps=profile.specs if profile else None, output=output)
    return _divide(model, found, profile, method, blocks)


def _divide(
    model: nn.Module, found: Trace | None, profile: Profile | None, method: Method, blocks: BlockNames | None
) -> tuple[Network, dict[str, Tap]]:
    """Divide a traced model into blocks and find the taps that a method reads; without a trace there are none."""
    if found is None:
        return Network(model, ()), {}
    names = read_taps(method, profile)
    missing = [name for name in names if name not in found.taps]
    if missing:
        raise AdaptationError(f"there is no tap {missing[0]!r} without a profile, only {', '.join(found.taps)}")
    network = Network(model, split_blocks(model, found, blocks), found.taps, found.head)
    return network, {name: found.taps[name] for name in names}


def _warn(result: Adaptation) -> Adaptation:
    """Log what is wrong with the returned run; runs that were not chosen are passed over."""
    before, after = result.before, result.after
    if before is not None and after is not None and after.verdict != "restored" and result.manifest["stages"]:
        if after.excess > before.excess:
            logger.warning("verification got worse: before %s, after %s", before, after)
        else:
            logger.warning("verification after adapting: %s", after)
    return result


def _with_rate(settings: _Settings, rate: float) -> _Settings:
    """Give the run with this learning rate its own checkpoint."""
    if settings.checkpoint is None:
        return settings
    return replace(settings, checkpoint=f"{os.fspath(settings.checkpoint)}.rate-{rate!r}")


def best_rate(
    rates: Sequence[float],
    attempt: Callable[[float, _Settings, Verification | None], Adaptation],
    settings: _Settings,
    *,
    entropy_may_decide: bool = True,
) -> Adaptation:
    """Run once for each learning rate and return the run whose kept epoch the verification slices prefer.

    The untouched model is the same for all of them: what the first run finds of it is given to the others.
    """
    chosen: Adaptation | None = None
    before: Verification | None = None
    choice: Choice | None = None
    tried: list[dict[str, Any]] = []
    stopped = False
    for rate in map(float, rates):
        try:
            result = attempt(rate, _with_rate(settings, rate), before)
            before = result.before
        except DivergedError as error:
            before = error.adaptation.before
            tried.append({"learning_rate": rate, "failed": str(error)})
            last_error = error
            continue
        stopped = result.interrupted
        if not result.history:  # Interrupted before anything was seen of the model.
            chosen = chosen or result
            break
        kept = result.kept
        tried.append(
            {
                "learning_rate": rate,
                "epoch": kept.epoch,
                "verification": kept.verification,
                "entropy": kept.signals.get("entropy"),
            }
            | ({"interrupted": True} if stopped else {})
        )
        if choice is None:
            choice = Choice(entropy_may_decide=entropy_may_decide)
        if choice.consider(kept):
            chosen = result
        if stopped:
            break
    if chosen is None:
        raise last_error
    if stopped:
        chosen.manifest["status"] = "interrupted"
        if chosen is not result:
            logger.warning("kept is what an earlier learning rate gave, %g", chosen.manifest["method"]["learning_rate"])
    chosen.manifest["learning_rate_chosen"] = "by the verification slices"
    chosen.manifest["learning_rates_tried"] = tried
    return chosen
