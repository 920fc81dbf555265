"""`adapt`: from what the user has to a run, and back to what the user gets. It knows no method and no benchmark."""

from __future__ import annotations

import functools
import hashlib
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from shiftmend.accelerate.bf16 import nothing_cached
from shiftmend.accelerate.memory_format import channels_last
from shiftmend.adaptation.result import Adaptation, environment
from shiftmend.distributed.collectives import check_same, warn_without_process_group
from shiftmend.engine import checkpoint as checkpoints
from shiftmend.engine.history import Choice
from shiftmend.engine.method import Method, Network, check_positive, facts_of, stages_of, taps_of
from shiftmend.engine.modes import refuse_shared, settle
from shiftmend.engine.settings import Keep, OnEpoch, Settings
from shiftmend.engine.trainer import Run
from shiftmend.errors import AdaptationError, DivergedError
from shiftmend.inputs.feed import Feed, Preprocess
from shiftmend.introspection.blocks import Names, split
from shiftmend.introspection.modes import batch_norms
from shiftmend.introspection.outputs import Entry
from shiftmend.introspection.taps import Tap
from shiftmend.introspection.trace import trace
from shiftmend.introspection.validate import LeftAlone, check_takes_each, plain_copy, refuse_broken, unwrap
from shiftmend.methods import METHODS
from shiftmend.methods import method as make_method
from shiftmend.profiles import fingerprints
from shiftmend.profiles.fingerprints import InputSummary
from shiftmend.profiles.profile import Profile, as_profile
from shiftmend.utils.devices import resolve_device, room_on
from shiftmend.utils.processes import of_first_process, world_size
from shiftmend.utils.progress import Progress
from shiftmend.utils.rng import rolled
from shiftmend.verification.verdict import Verification

logger = logging.getLogger(__name__)
logger.addFilter(of_first_process)


@dataclass(frozen=True)
class Given:
    model: nn.Module
    profile: Profile | None
    feed: Feed

    @staticmethod
    def of(
        model: nn.Module,
        target: Any,
        profile: Profile | str | os.PathLike[str] | None,
        method: Method,
        settings: Settings,
        fits: bool | None = None,
    ) -> Given:
        """Nothing is read for a method that cannot be run.

        `fits`: whether an earlier process, of which this one takes up a run, found room for what a loader gives. Kept
        data is stepped through in another order than a stream, so that is no longer a matter of what is free now.
        """
        warn_without_process_group()
        facts_of(method)  # refuses what is no method
        if world_size() > 1 and not method.several_processes:
            able = ", ".join(name for name, kind in METHODS.items() if kind.several_processes)
            raise AdaptationError(
                f"{method.name} works in one process only, and these are {world_size()}: its loss needs the whole of a "
                f"batch; use one process, or one of {able}"
            )
        model = unwrap(model)
        profile = fitting_profile(profile, model, method)
        refuse_broken(model)
        place = resolve_device(settings.device, model)
        limit = None if fits is None else 2 * room_on(place) if fits else 0  # room is less than half of what is free
        feed = Feed(
            target,
            batch_size=settings.batch_size,
            device=place,
            preprocess=settings.preprocess,
            resident=settings.resident,
            limit=limit,
            what="target data",
        )
        if feed.one_sided:
            logger.warning(
                "the target data streams in a fixed order: if it is sorted, batches are one-sided; use shuffle=True"
            )
        return Given(model, profile, feed)

    @functools.cached_property
    def summary(self) -> InputSummary:
        """Of the target's inputs; when it is first asked for, what the source's inputs were not like is warned of."""
        found = InputSummary.from_batches(self.feed.batches())
        if self.profile is not None:
            self.profile.check_inputs(found)
        return found


def fitting_profile(
    profile: Profile | str | os.PathLike[str] | None, model: nn.Module, method: Method
) -> Profile | None:
    """The profile, read if a file is named, and checked: it fits the model, and is there if the method needs one."""
    profile = None if profile is None else as_profile(profile)
    if profile is None and method.needs_profile:
        raise AdaptationError(f"method {method.name!r} needs a profile of the source: make one with shiftmend.profile")
    if profile is not None:
        missing = [name for name in taps_of(method, profile) if name not in profile.taps]
        if missing:
            raise AdaptationError(f"the profile has no tap {missing[0]!r}; it has {', '.join(profile.taps)}")
        profile.check_architecture(model)
        profile.check_weights(model)
    return profile


def check_rates(rates: Sequence[float]) -> None:
    if not rates:
        raise AdaptationError("the list of learning rates is empty; name at least one, or leave it out")
    for rate in rates:
        check_positive(rate, "every learning rate")


def with_rate(settings: Settings, rate: float) -> Settings:
    """Those of the run with this learning rate: it has a checkpoint of its own."""
    if settings.checkpoint is None:
        return settings
    return replace(settings, checkpoint=f"{os.fspath(settings.checkpoint)}.rate-{rate!r}")


def best_rate(
    rates: Sequence[float],
    attempt: Callable[[float, Settings, Verification | None], Adaptation],
    settings: Settings,
    *,
    entropy_may_decide: bool = True,
) -> Adaptation:
    """One run for each learning rate; the one whose kept epoch the verification slices prefer is the result.

    The model as it came is the same for all of them: what the first finds of it is given to the others.
    """
    chosen: Adaptation | None = None
    before: Verification | None = None
    choice: Choice | None = None
    tried: list[dict[str, Any]] = []
    stopped = False
    for rate in map(float, rates):
        try:
            result = attempt(rate, with_rate(settings, rate), before)
            before = result.before
        except DivergedError as error:
            before = error.adaptation.before
            tried.append({"learning_rate": rate, "failed": str(error)})
            last_error = error
            continue
        stopped = result.interrupted
        if not result.history:  # interrupted before anything was seen of it
            chosen = chosen or result
            break
        kept = result.kept
        tried.append(
            {"learning_rate": rate, "epoch": kept.epoch, "verification": kept.verification, "entropy": kept.entropy}
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
    blocks: Names | None = None,
    output: Entry = None,
    device: str | torch.device = "auto",
    autocast: bool = False,
    resident: bool = True,
    capture: bool = True,
    compile: bool = False,
    keep: Keep = "last",
    on_epoch: OnEpoch | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
    progress: Progress = None,
    **options: Any,
) -> Adaptation:
    """Adapt a copy of `model` to unlabelled `target` inputs; the caller's model is not touched.

    `target` is a tensor, an array, a `Dataset` or a `DataLoader`, of inputs or of (inputs, anything); nothing but the
    inputs reaches the method. `options` are the method's hyper-parameters, e.g. `learning_rate=0.1`. BatchNorm uses
    and updates batch statistics in every layer while everything else is in eval mode (no dropout), as in the
    reference implementation. What is trained is up to the method: flags that freeze layers of `model` are not heeded,
    but come back on the result. Ctrl-C returns the state after the last whole epoch. With `checkpoint`, a killed run
    goes on where it was.

    The result is the state after the last epoch, or with `keep="selected"` that of the epoch which the verification
    slices prefer (see `selection.py`); its number is in the result either way. A list of learning rates gives the
    run that is preferred in the same way. `on_epoch(model, row)` is called before the first and after each epoch.

    On CUDA, data that stays on the device is stepped through by a captured graph, which is many times faster for small
    networks and equal but for rounding; what cannot be captured runs eagerly, as does everything with `capture=False`.
    `compile` has the captured steps compiled by `torch.compile` first: a quarter of a minute or more for each set of
    trained layers, for steps of a large network that are a fifth faster. `autocast` runs the network in bfloat16.

    In a process group every process calls this with the same model and the same data and gets the same result; each
    runs its share of every batch, `batch_size` is that of all together, and Ctrl-C ends them all.
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
    if not isinstance(rates, list | tuple):
        alone, fits = make_method(method, **options), checkpoints.data_fits(checkpoint)
        given = Given.of(model, target, profile, alone, settings, fits)
        return _remarked(_once(given, alone, _heeded(settings, given, alone)))
    if profile is None:
        raise AdaptationError("several learning rates need a judge between them: a profile of the source")
    check_rates(rates)
    methods = {rate: make_method(method, **options | {"learning_rate": rate}) for rate in map(float, rates)}
    first = next(iter(methods.values()))
    fits = checkpoints.data_fits(*(with_rate(settings, rate).checkpoint for rate in methods))
    given = Given.of(model, target, profile, first, settings, fits)
    return _remarked(
        best_rate(
            rates,
            lambda rate, own, before: _once(given, methods[rate], own, before),
            _heeded(settings, given, first),
            entropy_may_decide=not first.minimises_entropy,
        )
    )


def _remarked(result: Adaptation) -> Adaptation:
    """What is returned, and a warning of what is wrong with it; runs that were not chosen are passed over."""
    before, after = result.before, result.after
    if before is not None and after is not None and after.verdict != "restored" and result.manifest["stages"]:
        if after.excess > before.excess:
            logger.warning("verification got worse: before %s, after %s", before, after)
        else:
            logger.warning("verification after adapting: %s", after)
    return result


def _once(given: Given, method: Method, settings: Settings, before: Verification | None = None) -> Adaptation:
    model, feed, place = given.model, given.feed, given.feed.device
    adapted = plain_copy(model).to(place)

    def check() -> None:
        with LeftAlone(model, adapted):
            check_takes_each(adapted, feed.kinds(2), settings.output)

    with rolled(place, check):
        return _checked(given, adapted, method, settings, before)


def _checked(
    given: Given, adapted: nn.Module, method: Method, settings: Settings, before: Verification | None
) -> Adaptation:
    """`_once` with a copy that takes the data."""
    model, profile, feed = given.model, given.profile, given.feed
    place = feed.device
    summary = given.summary  # not before: of inputs that the model refuses there is nothing more to say
    channels_last(adapted, feed.first(2), settings.output)
    network, taps = examine(adapted, feed.first(2), profile, method, settings.blocks, settings.output)
    stages = stages_of(method, network, profile)
    refuse_shared(model, adapted, stages)
    _refuse_unfit(method, feed, bool(stages) and bool(batch_norms(adapted)), profile)
    manifest = {
        "method": facts_of(method),
        "stages": [{k: v for k, v in asdict(stage).items() if k != "parameters"} for stage in stages],
        "preset": profile.preset if profile else None,
        "learning_rate_chosen": _how_chosen(method),
        "seed": settings.seed,
        "batch_size": feed.size,
        "blocks": [list(block.modules) for block in network.blocks],
        "resident": feed.resident,
        "target": {"samples": feed.samples, "sha256": _data_digest(feed), **summary.to_json()},
        "profile_sha256": hashlib.sha256(profile.to_bytes()).hexdigest() if profile else None,
        "source_weights": fingerprints.weights(model),
        "autocast": settings.autocast,
        **({"compile": True} if settings.compile else {}),
        "kept": settings.keep,
        "environment": {**environment(place), "world_size": world_size()},
    }
    check_same(str(manifest["source_weights"]), "model", place)
    check_same(str(manifest["target"]), "target data", place)
    try:
        run = Run(network, feed, profile, method, stages, taps, settings, manifest, before)
        check_same(run.name, "run (profile, method, options, or whether the data fits into memory)", place)
        return run.go()
    finally:
        settle(adapted, model)


def _heeded(settings: Settings, given: Given, method: Method) -> Settings:
    """Without `compile` where it has no effect."""
    works = settings.compile and method.trains and _can_be_compiled(given.model, given.feed, settings.capture)
    return replace(settings, compile=works)


def _can_be_compiled(model: nn.Module, feed: Feed, capture: bool) -> bool:
    """Whether `compile` has an effect; if not, why is logged."""
    if any(hasattr(module, "_orig_mod") for module in model.modules()):
        logger.warning(
            "compile has no effect: a part of the model is compiled by itself, and runs uncompiled meanwhile"
        )
        return False
    captured = capture and feed.inputs is not None and feed.inputs.is_cuda and world_size() == 1
    if not captured:
        logger.warning(
            "compile has no effect: only captured steps are compiled, of one process, on CUDA and with data that fits "
            "there"
        )
    return captured


def _refuse_unfit(method: Method, feed: Feed, normalises: bool, profile: Profile | None) -> None:
    """Refuse data that this method cannot work with, before anything is trained; `normalises`: BatchNorm is moved."""
    size = feed.size or min(feed.batch_size, feed.samples)
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
    if method.takes_labels and not feed.ordered:
        raise AdaptationError(
            f"{method.name} takes labels in the order of the samples, and this loader shuffles them; use shuffle=False"
        )


def _how_chosen(method: Method) -> str | None:
    """Where the learning rate came from, for methods that have one."""
    if not hasattr(method, "learning_rate"):
        return None
    return "given" if method.learning_rate is not None else "default, not tuned"


def examine(
    model: nn.Module, sample: Tensor, profile: Profile | None, method: Method, blocks: Names | None, output: Entry
) -> tuple[Network, dict[str, Tap]]:
    """Blocks and taps are looked for only where the method trains something: source-only and AdaBN take any model."""
    if not method.trains:
        return Network(model, ()), {}
    found = trace(model, sample, taps=profile.specs if profile else None, output=output)
    names = taps_of(method, profile)
    missing = [name for name in names if name not in found.taps]
    if missing:
        raise AdaptationError(f"there is no tap {missing[0]!r} without a profile, only {', '.join(found.taps)}")
    network = Network(model, split(model, found, blocks), found.taps, found.head)
    return network, {name: found.taps[name] for name in names}


def _data_digest(feed: Feed) -> str | None:
    """SHA-256 over the data as it came; a stream has none."""
    return None if feed.inputs is None else fingerprints.digest(feed.inputs)
