"""Label shifts of a rehearsal: sites of other class shares, behind the device of home and behind simulated ones.

A site is drawn from the samples of home without replacement. Alone, a label shift takes forward passes only. Together
with a simulated device, every candidate adapts. Each site is then judged as `auto` would judge it, by a rehearsal that
never saw the family of its device. That tells how often *device, patients, both or neither* is right, and how far
estimates for other class shares are off.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shiftmend.adaptation.auto import (
    FAR_SHARES,
    find_loss,
    finds_home_shares,
    forces_shares,
    is_mended,
    may_replace,
    tell_change,
)
from shiftmend.methods import METHODS
from shiftmend.profiles.rehearsal import OTHER_PATIENTS, UNTOUCHED, Rehearsal, RehearsedSite
from shiftmend.verification.estimate import Estimator
from shiftmend.verification.reading import MAX_UNEXPLAINED

KINDS = (
    "dirichlet 1",
    "tail 10",
    "half missing",
    "dirichlet 10",
    "tail 100",
    "one missing",
    "dirichlet 0.1",
)
"""Kinds of class shares, of which neighbours differ most."""
AS_AT_HOME = "as at home"
HOME_DRAWS = 20
"""Draws of home itself, which count false alarms."""
LABEL_SHIFTS = 14
"""Label shifts behind the device of home."""
MIXED_KINDS = ("dirichlet 1", "tail 10", "half missing", "tail 100")
"""Kinds that come together with simulated devices: milder ones say little of errors, extreme ones leave few samples."""
MAX_MIXED = 7
"""Label shifts together with simulated devices at most; three for each four simulated shifts."""
MIN_SITE_SAMPLES = 50

Cell = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True, eq=False)
class PlannedSite:
    """A site of a rehearsal: its samples, and the simulated shift in front of it by number, 0 for none."""

    kind: str
    shift: int
    places: Tensor
    distance: float


def draw_shares(kind: str, home: NDArray[np.float64], rng: np.random.Generator) -> NDArray[np.float64]:
    """Draw the class shares of a kind.

    Args:
        kind: One of `KINDS`, or `AS_AT_HOME`. The number of a tail is the ratio between its ends.
        home: Share of each class at home, `[classes]`.
        rng: Decides the shares, and which classes are rare or missing.

    Returns:
        Shares `[classes]`, adding up to 1.

    Example:
        >>> sorted(draw_shares("tail 10", np.full(2, 0.5), np.random.default_rng(0)).round(3).tolist())
        [0.091, 0.909]
    """
    order, wanted = rng.permutation(len(home)), home.copy()
    name, _, number = kind.partition(" ")
    if name == "dirichlet":
        wanted = rng.dirichlet(np.full(len(home), float(number)))
    elif name == "tail":
        wanted[order] = np.geomspace(1, 1 / float(number), len(home))
    elif name in ("one", "half"):
        wanted[order[: 1 if name == "one" else len(home) // 2]] = 0
    return np.asarray(wanted / wanted.sum())


def draw_places(labels: Tensor, shares: NDArray[np.float64], size: int, rng: np.random.Generator) -> Tensor:
    """Draw samples of the given class shares without replacement: `size`, or as many as the scarcest class allows.

    Args:
        labels: Class of each sample, `[N]`.
        shares: Wanted share of each class, `[classes]`.
        size: Samples to draw at most.
        rng: Decides which samples are drawn.

    Returns:
        Places of the samples, in order.

    Example:
        >>> labels = torch.tensor([0, 0, 0, 1, 1, 1])
        >>> labels[draw_places(labels, np.array([0.75, 0.25]), 6, np.random.default_rng(0))].tolist()
        [0, 0, 0, 1]
    """
    members = [np.flatnonzero(labels.cpu().numpy() == number) for number in range(len(shares))]
    most = min(len(own) / share for own, share in zip(members, shares, strict=True) if share > 0)
    size = min(size, int(most))
    drawn = [rng.permutation(own)[: round(share * size)] for own, share in zip(members, shares, strict=True)]
    return torch.from_numpy(np.sort(np.concatenate(drawn)))


def plan_sites(labels: Tensor, record: Rehearsal, mendable: Sequence[bool], seed: int) -> list[PlannedSite]:
    """Choose the sites of a rehearsal: samples drawn from home, and the simulated device that they are measured with.

    Args:
        labels: Class of each sample at home, `[N]`.
        record: The rehearsal, of which class shares and simulated shifts are read.
        mendable: Whether adapting can make up for each shift of `record.shifts`. The first stands for no shift.
        seed: Seed of the draws.

    Returns:
        First `HOME_DRAWS` draws without a shift, then `LABEL_SHIFTS` draws of other class shares. At most `MAX_MIXED`
        sites of other class shares with a simulated device follow. Mendable devices come first, and among them one of
        each family. A site has at most half of the samples; sites of fewer than `MIN_SITE_SAMPLES` are left out.
    """
    home, half = record.label_shares.numpy(), len(labels) // 2
    every = list(range(1, len(record.shifts)))
    first = {shift.family: number for number, shift in reversed([*enumerate(record.shifts)])}.values()
    order = sorted(every, key=lambda number: (not mendable[number], number not in first, number))
    mixed = order[: min(MAX_MIXED, 3 * len(every) // 4)]
    wanted = [(AS_AT_HOME, 0)] * HOME_DRAWS
    wanted += [(KINDS[number % len(KINDS)], 0) for number in range(LABEL_SHIFTS)]
    wanted += [(MIXED_KINDS[number % len(MIXED_KINDS)], shift) for number, shift in enumerate(mixed)]
    sites = []
    for number, (kind, shift) in enumerate(wanted):
        rng = np.random.default_rng([seed, number])
        if kind == AS_AT_HOME:
            places = torch.from_numpy(np.sort(rng.permutation(len(labels))[:half]))
        else:
            places = draw_places(labels, draw_shares(kind, home, rng), half, rng)
        if len(places) >= MIN_SITE_SAMPLES:
            sites.append(PlannedSite(kind, shift, places, _measure_distance(labels[places.to(labels.device)], home)))
    return sites


def _measure_distance(labels: Tensor, home: NDArray[np.float64]) -> float:
    """Return the total variation between the shares of labels and those of home."""
    own = np.bincount(labels.cpu().numpy(), minlength=len(home)) / len(labels)
    return float(np.abs(own - home).sum() / 2)


def judge_sites(
    whole: Estimator, sites: Sequence[tuple[PlannedSite, Cell]], free: Collection[str]
) -> tuple[RehearsedSite, ...]:
    """Tell of each site what `auto` would have told, without what was rehearsed with the family of its device.

    Args:
        whole: The estimator of the whole rehearsal.
        sites: Sites, and what candidates reached there, as `run_job` returns it.
        free: Candidates that leave class shares free.

    Returns:
        The sites for the record.
    """
    record = whole.record
    known = {family: whole.leave_out(family) for family in record.families}

    def find_estimator(site: PlannedSite) -> Estimator:
        return known[record.shifts[site.shift].family] if site.shift else whole

    # Intervals and limits need all sites, so that sites are judged when all of them are measured.
    measured = [_measure(find_estimator(site), site, cell, free) for site, cell in sites]
    for estimator in (whole, *known.values()):
        estimator.record = replace(record, sites=tuple(measured))
    every = zip(measured, sites, strict=True)
    return tuple(_judge(find_estimator(site), one, cell, free) for one, (site, cell) in every)


def _measure(estimator: Estimator, site: PlannedSite, cell: Cell, free: Collection[str]) -> RehearsedSite:
    """Return a site of which nothing was told yet."""
    record, samples, untouched = estimator.record, len(site.places), cell[UNTOUCHED]
    errors: dict[str, float] = {}
    for name in free if site.distance >= OTHER_PATIENTS else ():
        if name in cell and name in record.candidates and math.isfinite(cell[name]["score"]):
            one = cell[name]
            error = estimator.measure_share_error(name, one["signals"], samples, one["score"], one["distance"])
            errors |= {} if error is None else {name: round(error, 4)}
    return RehearsedSite(
        record.shifts[site.shift].name,
        site.kind,
        samples,
        round(site.distance, 4),
        round(record.score - float(record.scores[site.shift, -1, 0]) if site.shift else 0.0, 4),
        None,
        UNTOUCHED,
        round(untouched["score"], 4),
        None,
        round(untouched["unexplained"], 4) if _has_skew(estimator, untouched, samples) else None,
        errors,
    )


def _has_skew(estimator: Estimator, untouched: Mapping[str, Any], samples: int) -> bool:
    return estimator.has_other_shares(untouched["signals"], samples, torch.tensor(untouched["answers"]))


def _judge(estimator: Estimator, site: RehearsedSite, cell: Cell, free: Collection[str]) -> RehearsedSite:
    """Return a site with what `auto` would have told of it."""
    record, untouched = estimator.record, cell[UNTOUCHED]
    if estimator.is_at_home(untouched["signals"], site.samples):
        return replace(site, told="neither", estimate=round(record.score, 4))
    left = site.unexplained
    if left is not None and left <= record.find_unexplained_limit(MAX_UNEXPLAINED, site.device):
        if untouched["expected"] is None:
            return site
        return replace(site, told="patients", estimate=round(untouched["expected"], 4))
    readings = {
        name: one["signals"]
        for name, one in cell.items()
        if name in record.candidates and (name == UNTOUCHED or estimator.check_distance(one["distance"]) is None)
    }
    estimates = {
        name: estimator.estimate(name, signals, site.samples, chosen=True, distance=cell[name]["distance"])
        for name, signals in readings.items()
    }
    only = None
    if left is not None:
        fixed = [name for name in readings if METHODS[name].maps_inputs and not METHODS[name].trains]
        tried = [name for name in dict.fromkeys([*free, *fixed]) if name in readings]
        only = [UNTOUCHED]
        for name in tried:
            if may_replace(name, estimates[name], readings[name], untouched["free"], record, site.samples):
                only.append(name)
        if any(finds_home_shares(name, estimates[name], readings[name], untouched["free"], record) for name in tried):
            only, left = None, None
    found = [name for name in free if name in cell and cell[name]["distance"] > FAR_SHARES]
    is_far = any(is_mended(cell[name]["signals"], untouched["free"]) for name in found)
    forcing = [name for name in readings if is_far and forces_shares(METHODS[name])]
    name = estimator.choose(readings, site.samples, free, only, forcing)
    value = estimates[name].value if name != UNTOUCHED or left is None else None
    return replace(
        site,
        told=None
        if name == UNTOUCHED
        else tell_change(cell[name]["beyond"], site.samples, record, find_loss(estimates[name], record)),
        chosen=name,
        score=round(cell[name]["score"], 4),
        estimate=None if value is None else round(value, 4),
    )
