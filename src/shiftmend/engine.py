"""The one adaptation loop: data, modes, optimiser, history, checkpoints. It knows no method and no benchmark."""

from __future__ import annotations

import copy
import hashlib
import logging
import os
import time
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.nn.modules.batchnorm import _BatchNorm

from shiftmend import checkpoints, fingerprints
from shiftmend.adaptations import Adaptation, Epoch, environment
from shiftmend.blocks import Block, Names, split
from shiftmend.devices import device_of, resolve_device
from shiftmend.errors import AdaptationError
from shiftmend.feeds import Feed, Preprocess
from shiftmend.fingerprints import InputSummary
from shiftmend.methods import Method, Network, Objective, Stage
from shiftmend.methods import method as make_method
from shiftmend.profiles import Profile
from shiftmend.progress import Progress, progress_bar
from shiftmend.taps import Entry, Tap, check_takes, tapped, trace, unwrap
from shiftmend.verification import Verification, verify_feed

logger = logging.getLogger(__name__)

VERIFIED_PER_EPOCH = 4096
"""Target samples behind the verification of each epoch; before and after adapting it is all of them."""


class DivergedError(AdaptationError):
    """The loss became NaN or infinite. `adaptation` holds the state after the last good epoch."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.adaptation: Adaptation


def adapt(
    model: nn.Module,
    target: Any,
    profile: Profile | str | os.PathLike[str] | None = None,
    method: str | Method = "bufr",
    *,
    batch_size: int | None = None,
    seed: int = 0,
    preprocess: Preprocess | None = None,
    blocks: Names | None = None,
    output: Entry = None,
    device: str | torch.device = "auto",
    autocast: bool = False,
    resident: bool = True,
    checkpoint: str | os.PathLike[str] | None = None,
    progress: Progress = None,
    **options: Any,
) -> Adaptation:
    """Adapt a copy of `model` to unlabelled `target` inputs; the caller's model is not touched.

    `target` is a tensor, an array, a `Dataset` or a `DataLoader`, of inputs or of (inputs, anything); nothing but the
    inputs reaches the method. `options` are the method's hyper-parameters, e.g. `learning_rate=0.1`. BatchNorm uses
    and updates batch statistics in every layer while everything else is in eval mode (no dropout), as in the
    reference implementation. Ctrl-C returns what there is. With `checkpoint`, a killed run goes on where it was.
    """
    chosen = make_method(method, **options)
    if isinstance(profile, str | os.PathLike):
        profile = Profile.load(profile)
    if profile is None and chosen.needs_profile:
        raise AdaptationError(f"method {chosen.name!r} needs a profile of the source: make one with shiftmend.profile")
    model = unwrap(model)
    place = resolve_device(device, model)
    if profile is not None:
        profile.check_architecture(model)
        profile.check_weights(model)
    feed = Feed(
        target,
        batch_size=batch_size,
        device=place,
        preprocess=preprocess,
        resident=resident,
        what="target data",
    )
    summary = InputSummary.of(feed.batches())
    if profile is not None:
        profile.check_inputs(summary)
    adapted = _copy(model).to(place)
    check_takes(adapted, feed.first(2))
    network = _network(adapted, feed, profile, chosen, blocks, output)
    stages = chosen.stages(network, profile)
    if stages and feed.samples < 2 and _batch_norms(adapted):
        raise AdaptationError("one target sample is too few to adapt BatchNorm with; bring at least two, better 256")
    manifest = {
        "method": {"name": chosen.name, **chosen.hyperparameters()},
        "stages": [{k: v for k, v in asdict(stage).items() if k != "parameters"} for stage in stages],
        "preset": profile.preset if profile else None,
        "learning_rate_chosen": "given" if getattr(chosen, "learning_rate", None) else "default, not tuned",
        "seed": seed,
        "batch_size": min(feed.batch_size, feed.samples),
        "target": {"samples": feed.samples, "sha256": _data_digest(feed), **summary.to_json()},
        "profile_sha256": hashlib.sha256(profile.to_bytes()).hexdigest() if profile else None,
        "source_weights": fingerprints.weights(model),
        "autocast": autocast,
        "environment": environment(place),
    }
    run = _Run(adapted, feed, profile, chosen, stages, seed, autocast, checkpoint, manifest, progress)
    try:
        return run.go()
    finally:
        adapted.eval().to(device_of(model))
        for ours, theirs in zip(adapted.parameters(), model.parameters(), strict=True):
            ours.requires_grad_(theirs.requires_grad)
            ours.grad = None


def _copy(model: nn.Module) -> nn.Module:
    try:
        return copy.deepcopy(model)
    except Exception as error:
        raise AdaptationError(f"the model cannot be copied ({error}), and the caller's own is never changed") from error


def _batch_norms(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if isinstance(module, _BatchNorm)]


def _network(
    model: nn.Module, feed: Feed, profile: Profile | None, method: Method, blocks: Names | None, output: Entry
) -> Network:
    """Blocks are looked for only where the method trains something: source-only and AdaBN take any model."""
    found: tuple[Block, ...] = ()
    if method.needs_profile and profile is not None:
        found = split(model, trace(model, feed.first(2), taps=profile.specs, output=output), blocks)
    return Network(model, found)


def _data_digest(feed: Feed) -> str | None:
    """SHA-256 over a spread of at most 256 samples: tells two sets apart without reading everything."""
    if feed.inputs is None:
        return None
    spread = feed.inputs[:: max(1, len(feed.inputs) // 256)]
    return hashlib.sha256(fingerprints.tensor_bytes(spread)).hexdigest()


class _Run:
    """One adaptation under way."""

    def __init__(
        self,
        model: nn.Module,
        feed: Feed,
        profile: Profile | None,
        method: Method,
        stages: list[Stage],
        seed: int,
        autocast: bool,
        checkpoint: str | os.PathLike[str] | None,
        manifest: dict[str, Any],
        progress: Progress,
    ) -> None:
        self.model, self.feed, self.profile, self.method = model, feed, profile, method
        self.stages, self.seed, self.autocast, self.progress = stages, seed, autocast, progress
        self.path = Path(checkpoint) if checkpoint is not None else None
        self.manifest = manifest
        self.name = checkpoints.identify({k: v for k, v in manifest.items() if k != "environment"})
        self.history: list[Epoch] = []
        self.before: Verification | None = None

    def go(self) -> Adaptation:
        started = time.perf_counter()
        resumed = checkpoints.load(self.path, self.name) if self.path is not None else None
        self.before = self._verify()
        status = "finished"
        with self.method.prepared(self.model):
            try:
                self._all_stages(resumed)
            except KeyboardInterrupt:
                status = "interrupted"
                logger.warning("interrupted after %d epochs; this is the state reached", len(self.history) - 1)
            except DivergedError as error:
                error.adaptation = self._result("diverged", started)
                raise
        return self._result(status, started)

    def _result(self, status: str, started: float) -> Adaptation:
        self.model.eval()
        after = self.before if status == "finished" and not self.stages else self._verify()
        if self.before is not None and after is not None and self.stages:
            if after.excess > self.before.excess:
                logger.warning("verification got worse: before %s, after %s", self.before, after)
            elif after.verdict != "restored":
                logger.warning("the features are %s", after)
        self.manifest |= {
            "status": status,
            "epochs": self.history[-1].epoch if self.history else 0,
            "seconds": round(time.perf_counter() - started, 3),
            "verification": {
                name: asdict(value) | {"verdict": value.verdict}
                for name, value in (("before", self.before), ("after", after))
                if value is not None
            },
            "adapted_weights": fingerprints.weights(self.model),
        }
        return Adaptation(self.model, self.history, self.manifest, self.before, after)

    def _verify(self, most: int | None = None) -> Verification | None:
        return verify_feed(self.model, self.feed, self.profile, most) if self.profile is not None else None

    def _all_stages(self, resumed: checkpoints.Checkpoint | None) -> None:
        before = self.before.divergence if self.before else None
        self.history = resumed.history if resumed else [Epoch(0, "", 0.0, {}, before, 0.0)]
        if resumed is not None:
            self.model.load_state_dict(resumed.state)
            logger.info("going on from %s after epoch %d", self.path, self.history[-1].epoch)
        objective = self.method.objective(self.profile, self.feed.device)
        taps = {name: self.profile.specs[name] for name in self.method.taps(self.profile)} if self.profile else {}
        total = sum(stage.epochs for stage in self.stages)
        with progress_bar(self.progress, self.method.name, total) as bar:
            bar.advance(self.history[-1].epoch)
            for index, stage in enumerate(self.stages):
                if resumed is not None and index < resumed.stage:
                    continue
                optimiser = self._optimiser(stage)
                done = 0
                if resumed is not None and index == resumed.stage:
                    done = resumed.epoch
                    self._restore_momentum(optimiser, resumed.momentum)
                for epoch in range(done, stage.epochs):
                    self._epoch(stage, optimiser, objective, taps)
                    if self.path is not None:
                        checkpoints.save(self.path, self.name, index, epoch + 1, self.history, self.model, optimiser)
                    bar.advance(1, f"{stage.name}  {_note(self.history[-1])}")

    def _optimiser(self, stage: Stage) -> optim.SGD | None:
        """A fresh optimiser over what the stage trains; nothing else requires a gradient."""
        wanted = set(stage.parameters)
        trained = []
        for name, parameter in self.model.named_parameters():
            parameter.requires_grad_(name in wanted)
            parameter.grad = None
            if name in wanted:
                trained.append(parameter)
        return optim.SGD(trained, lr=stage.learning_rate, momentum=self.method.momentum) if trained else None

    def _restore_momentum(self, optimiser: optim.SGD | None, momentum: dict[str, Tensor]) -> None:
        if optimiser is not None:
            for name, parameter in self.model.named_parameters():
                if name in momentum:
                    kept = torch.empty_like(parameter).copy_(momentum[name])  # in the parameter's memory format
                    optimiser.state[parameter]["momentum_buffer"] = kept.detach()

    def _epoch(
        self, stage: Stage, optimiser: optim.SGD | None, objective: Objective | None, taps: dict[str, Tap]
    ) -> None:
        number = self.history[-1].epoch + 1
        started = time.perf_counter()
        good = {name: value.clone() for name, value in self.model.state_dict().items()}
        self.model.eval()
        for module in _batch_norms(self.model):
            module.train()
        sums: dict[str, Tensor] = {}
        batches = 0
        trains = optimiser is not None and objective is not None
        with tapped(self.model, taps) as recorder, torch.set_grad_enabled(trains):
            for batch in self.feed.epoch(self.seed, number):
                with self._precision():
                    self.model(batch)
                activations = recorder.read()
                batches += 1
                if optimiser is None or objective is None:
                    continue
                terms = objective(activations)
                optimiser.zero_grad(set_to_none=True)
                torch.stack(list(terms.values())).sum().backward()
                optimiser.step()
                for name, term in terms.items():
                    sums[name] = sums.get(name, torch.zeros_like(term)) + term.detach()
        self.model.eval()
        losses = {name: float(value) / batches for name, value in sums.items()}
        if not all(map(_finite, losses.values())) or not self._finite_state():
            self.model.load_state_dict(good)
            raise DivergedError(
                f"the loss of {self.method.name} became NaN or infinite in epoch {number} ({stage.name}, learning rate "
                f"{stage.learning_rate:g}); lower the learning rate. The error's `adaptation` is the last good state"
            )
        verified = self._verify(VERIFIED_PER_EPOCH)
        self.history.append(
            Epoch(
                number,
                stage.name,
                stage.learning_rate,
                losses,
                verified.divergence if verified else None,
                round(time.perf_counter() - started, 4),
            )
        )

    def _precision(self) -> Any:
        if not self.autocast:
            return nullcontext()
        return torch.autocast(device_type=self.feed.device.type, dtype=torch.bfloat16)

    def _finite_state(self) -> bool:
        """One answer for all weights and statistics: a loss can stay finite over weights that are not."""
        flags = [torch.isfinite(value).all() for value in self.model.state_dict().values() if value.is_floating_point()]
        return bool(torch.stack(flags).all()) if flags else True


def _finite(value: float) -> bool:
    return value - value == 0.0


def _note(row: Epoch) -> str:
    loss = "" if row.loss is None else f"loss {row.loss:.4f}"
    return loss if row.verification is None else f"{loss}  slices {row.verification:.4f}"
