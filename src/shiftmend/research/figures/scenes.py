"""A benchmark's cell staged again, for figures that look into models: a store holds numbers, not adapted models."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

import shiftmend
from shiftmend.adaptation.result import Adaptation
from shiftmend.engine.history import Epoch
from shiftmend.errors import DataError
from shiftmend.inputs.feed import Preprocess
from shiftmend.profiles.profile import Profile
from shiftmend.research.bench.benchmark import Images, Setting, Target
from shiftmend.research.bench.plan import choose, settings_of
from shiftmend.research.bench.resources import Resources, inputs_of
from shiftmend.research.bench.suite import find


@dataclass
class Scene:
    """The source model of a seed, its profile, and the data of both sides."""

    workshop: Resources
    model: nn.Module
    profile: Profile
    source: Images
    target: Target
    shift: str
    seed: int
    protocol: str
    adapted: dict[str, Adaptation] = field(default_factory=dict)

    @property
    def preprocess(self) -> Preprocess:
        return self.workshop.benchmark.preprocess

    @property
    def device(self) -> torch.device:
        return self.workshop.device

    def adapt(self, method: str, profile: Profile | None = None, **changes: Any) -> Adaptation:
        """Adapt as the benchmark does, but for `changes` of the method's options."""
        benchmark = self.workshop.benchmark
        setting, protocol = settings_of(benchmark, self.protocol)[method], benchmark.protocols[self.protocol]
        if setting.source != "plain":
            raise DataError(
                f"{method} starts from a source model of its own, which this figure cannot set beside others"
            )
        if setting.preset != (profile or self.profile).preset:
            if profile is not None:
                raise DataError(
                    f"{method} has the preset {setting.preset}, but this figure a profile of its own with the preset "
                    f"{profile.preset}; name a row without a preset"
                )
            home = benchmark.source_for(setting, self.shift)
            profile = self.workshop.profile(home, self.seed, protocol.temperature, setting.preset)
        return shiftmend.adapt(
            self.model,
            inputs_of(self.target.adapt),
            profile or self.profile,
            setting.method,
            batch_size=protocol.batch_size,
            autocast=protocol.in_bfloat16(self.device),
            seed=self.seed,
            preprocess=self.preprocess,
            device=self.device,
            **{**setting.options, **changes},
        )

    def models(self) -> dict[str, nn.Module]:
        return {name: result.model for name, result in self.adapted.items()}


def stage(
    benchmark: str,
    folder: Path,
    shift: str,
    methods: Sequence[str] = (),
    *,
    seed: int | None = None,
    root: Path | None = None,
    device: str = "auto",
    protocol: str = "offline",
) -> Scene:
    """Take source model and profile from the folder of a run (or make them), and adapt again with each method."""
    found = find(benchmark)
    (name,) = choose([shift], found.shifts, "shift", found.name)
    settings = settings_of(found, protocol)
    wanted = choose(list(methods), settings, "method", f"{found.name}, {protocol}") if methods else []
    number = found.seeds[0] if seed is None else seed
    workshop = Resources(found, folder, root, device)
    home = found.source_for(Setting("source-only"), name)
    model, _ = workshop.model(home, number)
    profile = workshop.profile(home, number, found.protocols[protocol].temperature)
    source = workshop.source(home).profiled
    scene = Scene(workshop, model, profile, source, workshop.target(name), name, number, protocol)
    scene.adapted = {method: scene.adapt(method) for method in wanted}
    return scene


def after_each_block(scene: Scene, method: str, profile: Profile) -> Mapping[str, nn.Module]:
    """The model after the first block was restored, and after all of them."""
    states: dict[str, nn.Module] = {}

    def note(model: nn.Module, row: Epoch) -> None:
        if row.block:
            states[row.block] = copy.deepcopy(model)

    last = scene.adapt(method, profile, on_epoch=note).model
    first = next(iter(states))
    return {f"after {first}": states[first], "after all": last} if len(states) > 1 else {"after adapting": last}
