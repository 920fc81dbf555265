"""`adapt`: from what the user has to a run, and back to what the user gets. It knows no method and no benchmark."""

from __future__ import annotations

import hashlib
import logging
import os
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from shiftmend import checkpoints, fingerprints
from shiftmend.adaptations import Adaptation, environment
from shiftmend.adapting import LeftAlone, batch_norms, plain_copy, refuse_shared, settle
from shiftmend.blocks import Names, split
from shiftmend.dice import rolled
from shiftmend.distributed import of_first_process, same_everywhere, world_size
from shiftmend.errors import AdaptationError
from shiftmend.feeds import Feed, Preprocess
from shiftmend.given import Given
from shiftmend.halves import nothing_cached
from shiftmend.layouts import channels_last
from shiftmend.loop import Run
from shiftmend.methods import Method, Network
from shiftmend.methods import method as make_method
from shiftmend.methods.contract import facts_of, stages_of, taps_of
from shiftmend.profiles import Profile
from shiftmend.progress import Progress
from shiftmend.rates import best_rate, check_rates, with_rate
from shiftmend.settings import Keep, OnEpoch, Settings
from shiftmend.taps import Entry, Tap
from shiftmend.tracing import check_takes_each, trace
from shiftmend.verification import Verification

logger = logging.getLogger(__name__)
logger.addFilter(of_first_process)


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
    same_everywhere(str(manifest["source_weights"]), "model", place)
    same_everywhere(str(manifest["target"]), "target data", place)
    try:
        run = Run(network, feed, profile, method, stages, taps, settings, manifest, before)
        same_everywhere(run.name, "run (profile, method, options, or whether the data fits into memory)", place)
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
