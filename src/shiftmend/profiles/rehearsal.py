"""`Rehearsal`: scores and signals of simulated shifts. It is stored in the profile.

A cell is one simulated shift at one sample size, adapted by one candidate: its score (known at home only) and its
signals (known at a site as well). The record stores the cells; `verification/estimate.py` fits maps to them.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from shiftmend.errors import ProfileError
from shiftmend.stats.statistics import read_whole_number
from shiftmend.utils.checks import counted
from shiftmend.utils.json import dumps

Task = Literal["classes", "quantities"]
UNTOUCHED = "source-only"
"""Name of the candidate that leaves the model untouched."""

METRICS = {
    ("classes", True): "accuracy",
    ("classes", False): "agreement",
    ("quantities", True): "rmse",
    ("quantities", False): "deviation",
}
"""Names of the scores, by task and whether there were labels. Without labels, the model's own predictions on clean
inputs replace them."""

MAX_CLASSES = 64
"""Largest number of classes for which the confusion matrix is stored."""

_TENSORS = {
    "scores": 3,
    "values": 4,
    "home_mean": 2,
    "home_deviation": 2,
    "estimates": 3,
    "scales": 3,
    "chosen": 2,
    "shares": 1,
    "confusion": 2,
    "output_mean": 1,
    "output_deviation": 1,
    "group_deviation": 2,
    "cluster_centres": 2,
}
"""Tensors of a record by name, with their numbers of dimensions."""

BY_CLASS = ("features", "logits", "slices")
"""Histograms that a record may hold per class: of both taps, and of the verification slices."""
_PREFIX = "by_class."
_GROUPED: dict[str, Any] = {"groups": 0, "design_effect": 1.0, "answer_design_effect": 1.0}
"""What files of earlier versions lack, with its values there."""


@dataclass(frozen=True)
class RehearsedShift:
    """A simulated device at one strength; devices of one family have similar effects."""

    name: str
    family: str
    strength: float


LOSS_OF_A_DEVICE = 0.03
"""Loss of accuracy of the untouched model, at the class shares of home, from which on a device counts as changed."""
OTHER_PATIENTS = 0.1
"""Total variation of the class shares from which on patients count as others."""
MIN_SITES_TOLD = 4
"""Sites of other class shares that have to be foreseen at home before any other is told."""
UNEXPLAINED_MARGIN = 0.9
"""Share of the least that a simulated device left unexplained by class shares which another device may leave."""
CHANGES = ("neither", "device", "patients", "both")


@dataclass(frozen=True)
class RehearsedSite:
    """A site that was drawn from home: with class shares of its own, behind a simulated device or that of home.

    Attributes:
        device: Name of the simulated shift; `none` is the device of home.
        kind: Kind of the class shares.
        samples: Samples of the site.
        distance: Total variation between its class shares and those of home.
        loss: Loss of the untouched model behind the device, at the class shares of home.
        told: What `auto` would have told: one of `CHANGES`; None if it would have told nothing.
        chosen: Name of the candidate that it would have kept.
        score: True score of that candidate.
        estimate: What it would have told of the score; None if nothing.
        unexplained: Share of its divergence from home that other class shares do not explain, where the untouched model
            is as certain as at home but of other classes; None elsewhere.
        share_errors: Error of an estimate beyond its interval, in each unit of `distance`, for candidates that leave
            class shares free and could be told.
    """

    device: str
    kind: str
    samples: int
    distance: float
    loss: float
    told: str | None
    chosen: str
    score: float
    estimate: float | None
    unexplained: float | None = None
    share_errors: Mapping[str, float] = field(default_factory=dict)

    @property
    def truth(self) -> str | None:
        """One of `CHANGES`; None in the grey zone, below a limit but above a third or a half of it."""
        return tell_truth(self.loss, self.distance)


def tell_truth(loss: float, distance: float) -> str | None:
    """Return what changed: device, patients, both or neither; None in the grey zone below the limits of each.

    Args:
        loss: Loss of the untouched model behind the device, at the class shares of home.
        distance: Total variation between the class shares of the site and those of home.

    Example:
        >>> tell_truth(0.3, 0.0), tell_truth(0.0, 0.2), tell_truth(0.02, 0.2)
        ('device', 'patients', None)
    """
    device, patients = loss >= LOSS_OF_A_DEVICE, distance >= OTHER_PATIENTS
    if (not device and loss > LOSS_OF_A_DEVICE / 3) or (not patients and distance > OTHER_PATIENTS / 2):
        return None
    return CHANGES[device + 2 * patients]


@dataclass(frozen=True, eq=False)
class Rehearsal:
    """Scores and signals of simulated shifts, by candidate; made by `shiftmend.rehearse`.

    In shapes, F is the number of shifts, S of sample sizes, C of candidates and G of signals. NaN marks missing values.

    Attributes:
        task: `"classes"` or `"quantities"`.
        labelled: Whether home data had labels. If not, scores compare with the model's own predictions on clean inputs.
        samples: Number of held-out home samples.
        sizes: Rehearsed sample sizes, in ascending order.
        score: Score of the untouched model on unshifted home data.
        temperature: Temperature that calibrates the untouched model at home; 1 for quantities.
        thresholds: Thresholds of confidence and of negative entropy at which the share of home samples above equals the
            score.
        candidates: Names of the candidates. The first one is the untouched model.
        methods: Name and hyper-parameters of each candidate.
        signals: Names of the signals.
        shifts: The simulated shifts.
        scores: Scores `[F, S, C]`.
        values: Signals `[F, S, C, G]`.
        home_mean: Mean of the untouched model's signals on unshifted home data of each size, `[S, G]`.
        home_deviation: Standard deviation of these signals between draws of that size, `[S, G]`.
        estimates: Estimates made without the shift's own family, `[F, S, C + 1]`; the last entry is for the candidate
            that `auto` would have chosen.
        scales: Difficulty of each estimate, with which its interval widens, `[F, S, C + 1]`.
        chosen: Index of the candidate that `auto` would have chosen, `[F, S]`.
        shares: Share of each class among the predictions at home, `[classes]`; empty for quantities.
        confusion: Counts by true class (rows) and predicted class (columns); empty for more than 64 classes, and for
            quantities.
        output_mean: Mean of each output at home, `[outputs]`; empty for classes.
        output_deviation: Standard deviation of each output at home, `[outputs]`; empty for classes.
        settings: Options of `adapt` in the rehearsal, such as the batch size.
        by_class: Histograms of the untouched model at home for each true class, or for each cluster of a regression,
            uint8 `[classes, units, bins]` by name (`BY_CLASS`). Each row is scaled so that its largest count is 255.
            Empty if the file would be too large.
        cluster_centres: Centres of clusters of the home samples, in the space of the verification slices, followed by
            the share of samples in each cluster: `[clusters, slices + 1]`. Empty for classes.
        error_kurtosis: Kurtosis of the errors at home: 3 if they are normal, far more if a few samples make most of the
            squared error. Quantities only; 3 for classes, and for files of earlier versions.
        sites: Sites of other class shares that were drawn at home; empty without histograms of the classes, and for
            files of earlier versions.
        groups: Number of groups that the home samples came in, such as patients; 0 for independent samples.
        group_deviation: As `home_deviation`, between draws of whole groups; `[0, 0]` without groups.
        design_effect: Factor by which groups raise the variance of the score.
        answer_design_effect: Factor by which they raise the variance of the shares of the predicted classes.
    """

    task: Task
    labelled: bool
    samples: int
    sizes: tuple[int, ...]
    score: float
    temperature: float
    thresholds: tuple[float, float]
    candidates: tuple[str, ...]
    methods: Mapping[str, Mapping[str, Any]]
    signals: tuple[str, ...]
    shifts: tuple[RehearsedShift, ...]
    scores: Tensor
    values: Tensor
    home_mean: Tensor
    home_deviation: Tensor
    estimates: Tensor
    scales: Tensor
    chosen: Tensor
    shares: Tensor = field(default_factory=lambda: torch.empty(0))
    confusion: Tensor = field(default_factory=lambda: torch.empty(0, 0))
    output_mean: Tensor = field(default_factory=lambda: torch.empty(0))
    output_deviation: Tensor = field(default_factory=lambda: torch.empty(0))
    settings: Mapping[str, Any] = field(default_factory=dict)
    error_kurtosis: float = 3.0
    by_class: Mapping[str, Tensor] = field(default_factory=dict)
    sites: tuple[RehearsedSite, ...] = ()
    groups: int = 0
    design_effect: float = 1.0
    answer_design_effect: float = 1.0
    group_deviation: Tensor = field(default_factory=lambda: torch.empty(0, 0))
    cluster_centres: Tensor = field(default_factory=lambda: torch.empty(0, 0))

    @property
    def label_shares(self) -> Tensor:
        """Share of each true class at home, `[classes]`; of each predicted class without a confusion matrix.

        For a regression, the share of each cluster.
        """
        if self.cluster_centres.numel():
            shares = self.cluster_centres[:, -1].double()
            return shares / shares.sum()
        counts = self.confusion.double().sum(1) if self.confusion.numel() else self.shares.double()
        return counts / counts.sum()

    def class_histograms(self, name: str) -> Tensor:
        """Return the histograms of each class, float64 `[classes, units, bins]`, with rows that add up to 1.

        Args:
            name: One of `BY_CLASS`.
        """
        counts = self.by_class[name].double()
        return counts / counts.sum(2, keepdim=True).clamp_min(1)

    def home_level(self, signal: str, samples: int) -> float:
        """Return the mean of a signal on unshifted, held-out home data of that size; NaN if home did not have it.

        The mean is linear in 1 / n through the smallest and the largest size, since chance adds a term of that order.
        """
        if signal not in self.signals:
            return math.nan
        means, sizes = self.home_mean[:, self.signals.index(signal)].double().tolist(), self.sizes
        if len(sizes) == 1:
            return float(means[0])
        slope = (means[0] - means[-1]) / (1 / sizes[0] - 1 / sizes[-1])
        return float(means[-1] + slope * (1 / samples - 1 / sizes[-1]))

    @property
    def metric(self) -> str:
        """Name of the score: accuracy, agreement, rmse or deviation."""
        return METRICS[self.task, self.labelled]

    @property
    def higher_is_better(self) -> bool:
        """True for accuracy and agreement, False for errors."""
        return self.task == "classes"

    @property
    def families(self) -> tuple[str, ...]:
        """Families of the shifts, each once, in order of appearance."""
        return tuple(dict.fromkeys(shift.family for shift in self.shifts))

    @property
    def mean_error(self) -> float:
        """Mean absolute error of estimated scores at home. Each estimate left out rehearsals of its own family."""
        truth = self.chosen_scores()
        return float((self.estimates[..., -1] - truth).abs().nanmean())

    def chosen_scores(self) -> Tensor:
        """Return the true scores `[F, S]` of the candidates that `auto` would have chosen."""
        return self.scores.gather(2, self.chosen.long().clamp_min(0).unsqueeze(2)).squeeze(2)

    def find_share_error(self, candidate: str) -> float | None:
        """Return how much wider an interval has to be, in each unit of the distance between class shares.

        It is the largest error beyond an interval of all sites at home that could be told; None if these are too few.

        Args:
            candidate: Name of a candidate that leaves class shares free.
        """
        errors = [site.share_errors[candidate] for site in self.sites if candidate in site.share_errors]
        return max(errors) if len(errors) >= MIN_SITES_TOLD else None

    def find_farthest_shares(self) -> float | None:
        """Return the largest distance between class shares that was rehearsed behind another device; None if none was.

        Behind the device of home, a candidate that leaves class shares free begins near the right ones.
        """
        return max((site.distance for site in self.sites if site.device != self.shifts[0].name), default=0.0) or None

    def find_unexplained_limit(self, most: float, without: str | None = None) -> float:
        """Return how much divergence from home may be left unexplained by other class shares.

        Every simulated device that made the model certain of other classes left more.

        Args:
            most: The limit where no device left less.
            without: Name of a device that does not count, as if nobody had rehearsed it.
        """
        devices = [site for site in self.sites if site.loss >= LOSS_OF_A_DEVICE and site.device != without]
        left = [site.unexplained for site in devices if site.unexplained is not None]
        return min([most, *(UNEXPLAINED_MARGIN * one for one in left)])

    def index(self, candidate: str) -> int:
        """Return the index of a candidate.

        Raises:
            ProfileError: If the candidate was not rehearsed.
        """
        if candidate not in self.candidates:
            raise ProfileError(
                f"Expected a candidate that was rehearsed ({', '.join(self.candidates)}), got {candidate!r}. Rehearse "
                "with candidates=[...]."
            )
        return self.candidates.index(candidate)

    def find_differences(self, method: Mapping[str, Any]) -> list[str]:
        """List how a method differs from the rehearsed method of the same name, one sentence each.

        Args:
            method: Name and hyper-parameters of the method, as in a manifest.
        """
        rehearsed = self.methods.get(method["name"])
        if rehearsed is None:
            return []
        changed = [name for name, value in method.items() if dumps(value) != dumps(rehearsed.get(name))]
        return [f"{method['name']} was rehearsed with another {changed[0]}"] if changed else []

    def to_file(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Convert the record for a profile's file: facts as JSON, and float32 tensors by name; signals are float16."""
        plain = ("task", "labelled", "samples", "score", "temperature", "error_kurtosis", *_GROUPED)
        facts = {name: getattr(self, name) for name in plain} | {
            "sizes": list(self.sizes),
            "thresholds": list(self.thresholds),
            "candidates": list(self.candidates),
            "methods": {name: dict(method) for name, method in self.methods.items()},
            "signals": list(self.signals),
            "shifts": [[shift.name, shift.family, shift.strength] for shift in self.shifts],
            "settings": dict(self.settings),
            "sites": [[getattr(site, one.name) for one in fields(site)] for site in self.sites],
        }
        tensors = {name: getattr(self, name).float().cpu() for name in _TENSORS}
        tensors |= {f"{_PREFIX}{name}": counts.cpu() for name, counts in self.by_class.items()}
        return facts, tensors | {"values": tensors["values"].half()}

    @staticmethod
    def from_file(facts: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Rehearsal:
        """Undo `to_file`; refuse anything inconsistent, since a file may come from anywhere.

        Raises:
            ProfileError: If an entry is of the wrong kind or size.
        """
        names = {one.name for one in fields(Rehearsal)} - set(_TENSORS) - {"by_class"}
        if isinstance(facts, dict):
            facts = {"error_kurtosis": 3.0, "sites": []} | _GROUPED | facts
        by_class = {name.removeprefix(_PREFIX): one for name, one in tensors.items() if name.startswith(_PREFIX)}
        tensors = {name: one for name, one in tensors.items() if not name.startswith(_PREFIX)}
        if by_class and (
            set(by_class) != set(BY_CLASS)
            or any(one.ndim != 3 or one.dtype != torch.uint8 for one in by_class.values())
            or any(one.dtype == torch.uint8 for one in tensors.values())
        ):
            raise ProfileError("the histograms of its classes are not those of features, logits and slices")
        tensors = {name: torch.empty(0, 0) for name in ("group_deviation", "cluster_centres")} | tensors
        if not isinstance(facts, dict) or set(facts) != names or set(tensors) != set(_TENSORS):
            raise ProfileError("the description of its rehearsal has missing or unknown entries")
        if any(tensors[name].ndim != number for name, number in _TENSORS.items()):
            raise ProfileError("its rehearsal has tensors with another number of dimensions")
        lists = ("sizes", "thresholds", "candidates", "signals", "shifts", "sites")
        if not all(isinstance(facts[name], list) for name in lists):
            raise ProfileError("its rehearsal has entries that are no lists")
        if facts["task"] not in get_args(Task) or type(facts["labelled"]) is not bool:
            raise ProfileError("its rehearsal has an unknown task")
        texts = (*facts["candidates"], *facts["signals"], *(text for shift in facts["shifts"] for text in shift[:2]))
        if not all(isinstance(text, str) and len(text) <= 200 and text.isprintable() for text in texts):
            raise ProfileError("its rehearsal has names that are no text")
        plain = (facts[name] for name in ("score", "temperature", "error_kurtosis", *_GROUPED))
        numbers = [*plain, *facts["thresholds"], *(shift[2] for shift in facts["shifts"])]
        if not all(type(number) in (int, float) and math.isfinite(number) for number in numbers):
            raise ProfileError("its rehearsal has entries that are no finite numbers")
        if facts["temperature"] <= 0 or len(facts["thresholds"]) != 2:
            raise ProfileError("its rehearsal has no valid temperature or thresholds")
        methods = facts["methods"]
        if list(methods) != facts["candidates"] or not all(isinstance(one, dict) for one in methods.values()):
            raise ProfileError("its rehearsal does not describe each candidate")
        if not isinstance(facts["settings"], dict):
            raise ProfileError("its rehearsal has no valid settings")
        record = Rehearsal(
            task=facts["task"],
            labelled=facts["labelled"],
            samples=read_whole_number(facts["samples"], "the number of rehearsed samples"),
            sizes=tuple(read_whole_number(size, "a rehearsed size") for size in facts["sizes"]),
            score=float(facts["score"]),
            temperature=float(facts["temperature"]),
            thresholds=(float(facts["thresholds"][0]), float(facts["thresholds"][1])),
            candidates=tuple(facts["candidates"]),
            methods=methods,
            signals=tuple(facts["signals"]),
            shifts=tuple(RehearsedShift(name, family, float(strength)) for name, family, strength in facts["shifts"]),
            settings=facts["settings"],
            by_class=by_class,
            sites=tuple(_read_site(site, facts["candidates"]) for site in facts["sites"]),
            error_kurtosis=float(facts["error_kurtosis"]),
            groups=read_whole_number(facts["groups"], "the number of groups at home", least=0),
            design_effect=float(facts["design_effect"]),
            answer_design_effect=float(facts["answer_design_effect"]),
            **{name: tensors[name].float() for name in _TENSORS},
        )
        if problem := record.find_problem():
            raise ProfileError(f"its rehearsal is not valid: {problem}")
        return record

    def find_problem(self) -> str | None:
        """Return a description of what is wrong with sizes or numbers of the record; None if nothing is."""
        shifts, sizes, candidates, signals = (
            len(one) for one in (self.shifts, self.sizes, self.candidates, self.signals)
        )
        classes, outputs = len(self.shares), len(self.output_mean)
        shapes = {
            "scores": (shifts, sizes, candidates),
            "values": (shifts, sizes, candidates, signals),
            "home_mean": (sizes, signals),
            "home_deviation": (sizes, signals),
            "estimates": (shifts, sizes, candidates + 1),
            "scales": (shifts, sizes, candidates + 1),
            "chosen": (shifts, sizes),
            "confusion": (classes, classes) if self.confusion.numel() else self.confusion.shape,
            "output_deviation": (outputs,),
            "group_deviation": (sizes, signals) if self.groups else (0, 0),
        }
        clusters = len(self.cluster_centres)
        if any(len(counts) != (classes or clusters) for counts in self.by_class.values()):
            return "its histograms are not of as many classes as its shares"
        if self.by_class and not (self.confusion.numel() or clusters):
            return "it has histograms of classes but no confusion matrix"
        if bool(clusters) != bool(self.by_class and not classes):
            return "it has clusters without histograms, or of classes"
        for name, shape in shapes.items():
            if tuple(getattr(self, name).shape) != tuple(shape):
                return f"{name} should be of shape {list(shape)}, got {list(getattr(self, name).shape)}"
        classified = self.task == "classes"
        both = torch.cat([self.scores.flatten(), torch.tensor([self.score])])
        # A candidate may have failed in a cell, but the untouched model may not.
        known = (
            self.scores[:, :, :1],
            self.shares,
            self.confusion,
            self.output_mean,
            self.output_deviation,
            self.chosen,
            self.cluster_centres,
        )
        deviations = (self.home_deviation, self.group_deviation, self.output_deviation)
        positive = (*deviations, self.confusion, self.shares, self.scales, both, self.cluster_centres[:, -1:])
        found = {
            f"its candidates are {', '.join(self.candidates)}, expected {UNTOUCHED} first and each name once": (
                self.candidates[:1] != (UNTOUCHED,) or len(set(self.candidates)) < candidates
            ),
            "it names a signal twice": len(set(self.signals)) < signals,
            "it has no shifts, or its sizes are not in order": (
                not shifts or not sizes or list(self.sizes) != sorted(set(self.sizes))
            ),
            "its class shares do not fit its task": classified == (classes < 2) or classified == (outputs > 0),
            "its class shares do not add up to 1": classified and not abs(float(self.shares.sum()) - 1) < 1e-3,
            "it has an accuracy outside of 0 to 1": classified and bool((both > 1).any()),
            "it has infinite entries": any(bool(getattr(self, name).isinf().any()) for name in _TENSORS),
            "it has entries that are NaN": any(bool(tensor.isnan().any()) for tensor in known),
            "it has entries that are negative": any(bool((tensor < 0).any()) for tensor in positive),
            "the kurtosis of its errors is below 1": not self.error_kurtosis >= 1,
            "a design effect is below 1": not min(self.design_effect, self.answer_design_effect) >= 1,
            "it names candidates that it does not have": bool(
                ((self.chosen < 0) | (self.chosen >= candidates) | (self.chosen != self.chosen.round())).any()
            ),
        }
        return next((words for words, wrong in found.items() if wrong), None)

    def __str__(self) -> str:
        return describe(self)


def _read_site(values: Any, candidates: Sequence[str]) -> RehearsedSite:
    """Make a site of what a file holds, which may come from anywhere."""
    if not isinstance(values, list) or len(values) != len(fields(RehearsedSite)):
        raise ProfileError("its rehearsal has a site with missing or unknown entries")
    site = RehearsedSite(*values)
    errors = site.share_errors
    optional = [number for number in (site.estimate, site.unexplained) if number is not None]
    numbers = (site.distance, site.loss, site.score, *optional)
    is_valid = (
        all(isinstance(text, str) and len(text) <= 200 and text.isprintable() for text in (site.device, site.kind))
        and all(type(number) in (int, float) and math.isfinite(number) for number in numbers)
        and (site.told is None or site.told in CHANGES)
        and site.chosen in candidates
        and type(site.samples) is int
        and isinstance(errors, dict)
        and all(name in candidates for name in errors)
        and all(type(error) in (int, float) and 0 <= error < math.inf for error in errors.values())
    )
    if not is_valid:
        raise ProfileError("its rehearsal has a site that is not valid")
    return site


def round_signals(values: Tensor) -> Tensor:
    """Round signals to the three digits that a file stores; sampling noise is larger than that."""
    largest = torch.finfo(torch.float16).max
    return values.clamp(-largest, largest).half().float()


def empty_estimates(record: Rehearsal) -> Rehearsal:
    """Return the record with empty estimates."""
    shape = (len(record.shifts), len(record.sizes), len(record.candidates) + 1)
    nothing = torch.full(shape, math.nan)
    return replace(record, estimates=nothing, scales=nothing, chosen=torch.zeros(shape[:2]))


def name_candidate(name: str) -> str:
    """Return the display name of a candidate; `source-only` is shown as untouched."""
    return "untouched" if name == UNTOUCHED else name


def format_score(value: float, task: Task) -> str:
    """Format a score: accuracy in percent, an error in its own unit."""
    if math.isnan(value):
        return "-"
    return f"{100 * value:.1f} %" if task == "classes" else f"{value:.4g}"


def describe(record: Rehearsal) -> str:
    """Describe a rehearsal as a table: each shift with its scores and estimates.

    Args:
        record: The rehearsal. The table shows the scores of the largest size.
    """
    names = [name_candidate(name) for name in record.candidates]
    head = ["shift", "family", "strength", *names, "auto takes", "estimated", "true"]
    rows = []
    for place, shift in enumerate(record.shifts):
        number = int(record.chosen[place, -1])
        truth, guess = float(record.scores[place, -1, number]), float(record.estimates[place, -1, -1])
        scores = [format_score(float(value), record.task) for value in record.scores[place, -1]]
        strength = f"{shift.strength:.2f}" if shift.strength else ""
        both = [format_score(value, record.task) for value in (guess, truth)]
        rows.append([shift.name, shift.family, strength, *scores, names[number], *both])
    # The first row is home itself.
    simulated = sum(shift.family != "none" for shift in record.shifts)
    source = "with labels" if record.labelled else "without labels: scores compare with its own clean answers"
    at_home = format_score(record.score, record.task)
    unit = " points" if record.task == "classes" else ""
    error = (100 if record.task == "classes" else 1) * record.mean_error
    lines = [
        f"Rehearsal of {simulated} simulated shifts on {record.samples:,} samples from home, {source}",
        f"  {record.metric} at home {at_home}; sizes {', '.join(f'{size:,}' for size in record.sizes)}",
        *_describe_groups(record),
        *_tabulate(head, rows, left={0, 1, len(head) - 3}),
        f"  mean error of the estimate, made without the family of the shift: {error:.3g}{unit}",
        *_describe_sites(record.sites),
    ]
    return "\n".join(lines)


def _describe_groups(record: Rehearsal) -> list[str]:
    if not record.groups:
        return []
    alone = counted(max(1, round(record.samples / record.design_effect)), "independent sample")
    return [f"  the samples come in {record.groups:,} groups and say as much about the score as {alone}"]


def _describe_sites(sites: Sequence[RehearsedSite]) -> list[str]:
    """Return lines on how often it was told right what changed, at sites that were drawn from home."""
    if not sites:
        return []
    lines = []
    for truth in CHANGES:
        own = [site.told for site in sites if site.truth == truth]
        right, nothing = own.count(truth), own.count(None)
        if own:
            lines.append([truth, str(len(own)), str(right), str(len(own) - right - nothing), str(nothing)])
    grey = sum(site.truth is None for site in sites)
    head = ["what changed", "sites", "told right", "told wrong", "not told"]
    errors = [abs(site.estimate - site.score) for site in sites if site.estimate is not None and site.distance > 0.05]
    mean = 100 * sum(errors) / max(1, len(errors))
    told = f"; accuracy told of {len(errors)} with other class shares, mean error {mean:.3g} points" if errors else ""
    return [
        "  device or patients, told of sites drawn at home without the family of the device:",
        *("  " + line for line in _tabulate(head, lines, left={0})),
        f"    {grey} more changed too little to count as any of these{told}",
    ]


def _tabulate(head: Sequence[str], rows: Sequence[Sequence[str]], left: Collection[int]) -> list[str]:
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
    return [
        "  "
        + "  ".join(
            text.ljust(width) if column in left else text.rjust(width)
            for column, (text, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in (head, *rows)
    ]
