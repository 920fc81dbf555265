"""What do shiftmend and the tools of each field achieve between real instruments, and how far off is what is told?

    python benchmarks/real_instruments.py --data-root DATA --page docs/results/real-instruments.md
    python benchmarks/real_instruments.py --data-root DATA --rows twin-gas --seeds 0 1
    python benchmarks/real_instruments.py --data-root DATA --parts auto --profiles FOLDER --workers 15 --time-limit 12

Nothing is simulated here but the rehearsal. `ROWS` lists the benchmarks: `tablets` (two near-infrared spectrometers, a
regression), `twin-gas` (five boards of gas sensors), `phone-watch` (two motion sensors at two places of the body). A
small network is trained at one device, its home, and meets another, its site, with samples or people that it has never
seen. Each cell, a home with a site and a seed, has one score for each column: methods of shiftmend by themselves,
`auto` with a rehearsed profile, and what the field uses. A cell that is in the file of results is not measured again,
so the script can be stopped at any time. A home with its sites takes from one to six minutes on one core; `--workers`
measures several at once, one process each. `--profiles` keeps rehearsed profiles, which another rule of `auto` can use.
"""

from __future__ import annotations

import argparse
import copy
import functools
import itertools
import logging
import math
import multiprocessing
import queue
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.signal import savgol_filter
from sklearn.cross_decomposition import PLSRegression
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import cross_val_predict
from torch import Tensor, nn
from torch.nn import functional

import shiftmend
from bench_models import RowFile
from shiftmend.adaptation.result import environment
from shiftmend.engine.method import Activations, Objective
from shiftmend.methods.bufr import BUFR
from shiftmend.methods.fr import FR
from shiftmend.profiles.rehearsal import name_candidate
from shiftmend.research.calibration_transfer import (
    direct_standardisation,
    piecewise_direct_standardisation,
    slope_and_bias,
)
from shiftmend.utils.files import write_atomically

KEY = ("data", "home", "site", "seed", "part")
PARTS = ("alone", "auto")
"""Rows of a cell: columns that need no rehearsal, and `auto`."""
MATCHERS = ("match-mean", "match-moments", "match-histogram")
METHODS = ("source-only", *MATCHERS, "coral", "neo", "adabn", "bnm", "fr", "match-fr", "bufr", "bufr-im")
"""Methods of shiftmend that are measured by themselves, with a profile that was not rehearsed."""
SUPERVISED = ("target-supervised", "pds", "ds", "slope-and-bias", "pls + pds", "pls + ds", "pls + slope-and-bias")
"""Columns that have seen labels or transfer samples of the site."""
TRANSFER_SAMPLES = 20
PDS_COMPONENTS, PDS_HALF_WIDTH = 2, 5
"""Usual settings of PDS. Chosen by the error of left-out spectra they do worse: noise makes most of that error."""
TABLETS_AT_HOME, TABLETS_TRAINED = 300, 200
"""Tablets of home, and those of them that the network is trained on; the others are at the site."""
OUTLYING = 6.0
"""Robust deviations of the error beyond which a tablet does not rehearse."""
PEOPLE_TRAINED, PEOPLE_AT_HOME = 14, 4
"""People whose windows train the network, and rehearse; the others are at the site."""
MAX_WINDOWS = 400
"""Windows that rehearse, and that a site has, drawn at random."""

SPECTROMETERS, BOARDS, WEARABLES = ("1", "2"), ("B1", "B2", "B3", "B4", "B5"), ("sp", "sw")

Row = dict[str, Any]
Pair = tuple[Tensor, Tensor]
Floats = NDArray[np.floating[Any]]


@dataclass
class Home:
    """A home with its sites: a network to train, its data, and the same samples as transfer standards at the site.

    Inputs are standardised by the trained samples, and quantities by their mean and deviation; `unit` is the latter.
    """

    name: str
    seed: int
    model: nn.Module
    training: Mapping[str, Any]
    trained: Pair
    held_out: Pair
    sites: Mapping[str, Pair]
    unit: float = 1.0
    transfer: Mapping[str, tuple[Tensor, Tensor, Tensor]] = field(default_factory=dict)
    """Spectra of the transfer samples at home and at a site, and their answers, by site."""
    left_out: int = 0
    """Samples of home that do not rehearse."""
    groups: Sequence[Any] | None = None
    """Group of each sample that rehearses, e.g. a person; None if samples are independent."""

    @property
    def is_regression(self) -> bool:
        return self.trained[1].is_floating_point()

    def score(self, outputs: Tensor | Floats, answers: Tensor) -> float:
        """Return the root mean squared error in the unit of the answers, or the mean recall of the classes."""
        told = torch.as_tensor(np.asarray(outputs)) if not isinstance(outputs, Tensor) else outputs
        if self.is_regression:
            return self.unit * float((told.view_as(answers) - answers).square().mean().sqrt())
        classes = told.argmax(1) if told.ndim == 2 else told
        return fmean(float((classes[answers == one] == one).double().mean()) for one in answers.unique())


# ---- alignment by what moves the output


@dataclass(frozen=True, kw_only=True)
class FRByHead(FR):
    """FR whose features count by how far each moves the output, instead of alike."""

    name: ClassVar[str] = "fr-by-head"
    weights: tuple[float, ...]

    def objective(self, profile: shiftmend.Profile | None, device: torch.device) -> Objective:
        return align_by_head(self, profile, device)


@dataclass(frozen=True, kw_only=True)
class BUFRByHead(BUFR):
    """BUFR whose features count by how far each moves the output, instead of alike."""

    name: ClassVar[str] = "bufr-by-head"
    weights: tuple[float, ...]

    def objective(self, profile: shiftmend.Profile | None, device: torch.device) -> Objective:
        return align_by_head(self, profile, device)


def align_by_head(method: FRByHead | BUFRByHead, profile: shiftmend.Profile | None, device: torch.device) -> Objective:
    assert profile is not None
    weights = torch.tensor(method.weights, device=device)
    features, logits = (profile.taps[name].to(device) for name in ("features", "logits"))

    def losses(activations: Activations) -> dict[str, Tensor]:
        apart = features.divergence_per_unit(features.count(activations["features"]))
        return {"features": (weights * apart).sum(), "logits": logits.divergence(activations["logits"])}

    return losses


def weigh_features(model: nn.Module, profile: shiftmend.Profile) -> tuple[float, ...]:
    """Return weights of the features that add up to 1: size of the head's weights times the deviation at home."""
    *_, head = (module for module in model.modules() if isinstance(module, nn.Linear))
    moved = head.weight.detach().abs().mean(0) * profile.gaussian.variance.sqrt() * profile.taps["features"].usable
    return tuple((moved / moved.sum()).tolist())


# ---- the benchmarks


def standardise(inputs: Tensor, trained: Tensor, axes: tuple[int, ...] = (0,)) -> Tensor:
    centre, deviation = inputs[trained].mean(axes, keepdim=True), inputs[trained].std(axes, keepdim=True)
    return (inputs - centre) / (deviation + 1e-6)


def train(model: nn.Module, data: Pair, epochs: int, batch_size: int, rate: float) -> nn.Module:
    inputs, answers = data
    loss = functional.mse_loss if answers.is_floating_point() else functional.cross_entropy
    optimiser = torch.optim.Adam(model.parameters(), lr=rate, weight_decay=1e-3)
    model.train()
    for _ in range(epochs):
        for index in torch.randperm(len(inputs)).split(batch_size):
            if len(index) > 3:
                optimiser.zero_grad()
                loss(model(inputs[index]), answers[index]).backward()
                optimiser.step()
    return model.eval()


def make_perceptron(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(
        *(nn.Linear(inputs, 32), nn.BatchNorm1d(32), nn.ReLU()),
        *(nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, outputs)),
    )


def open_spectrometer(
    root: Path,
    seed: int,
    home: str,
    answer: str = "assay",
    official: bool = False,
    preprocess: str = "",
    clean: bool = True,
) -> Home:
    """Train at one of two spectrometers; the other is its site."""
    data = np.load(root / "instruments" / "nir_tablets.npz")
    spectra = torch.tensor(preprocess_spectra(data["x"], preprocess))
    answers = torch.tensor(data["y"])[:, [("weight", "hardness", "assay").index(answer)]]
    if official:
        parts = [np.unique(data["sample"][data["split"] == name]) for name in ("calibrate", "validate", "test")]
    else:
        order = np.random.default_rng(seed).permutation(np.unique(data["sample"]))
        parts = np.split(order, [TABLETS_TRAINED, TABLETS_AT_HOME])
    own, other = int(home), 3 - int(home)
    find = functools.partial(_find, data, "sample")
    torch.manual_seed(seed)
    trained, held_out, there = find(own, parts[0]), find(own, parts[1]), find(other, parts[2])
    scaled = standardise(spectra, trained)
    centre, unit = answers[trained].mean(), answers[trained].std()
    wanted = (answers - centre) / unit
    training = {"epochs": 100, "batch_size": 16, "rate": 3e-3}
    model = train(make_perceptron(spectra.shape[1], 1), (scaled[trained], wanted[trained]), **training)
    with torch.no_grad():
        errors = (model(scaled[held_out]) - wanted[held_out]).abs()[:, 0]
    kept = held_out[errors <= OUTLYING * 1.4826 * errors.median()] if clean else held_out
    standards = np.random.default_rng(seed).permutation(parts[0])[:TRANSFER_SAMPLES]
    both = find(own, standards), find(other, standards)
    return Home(
        home,
        seed,
        model,
        training,
        (scaled[trained], wanted[trained]),
        (scaled[kept], wanted[kept]),
        {str(other): (scaled[there], wanted[there])},
        float(unit),
        {str(other): (scaled[both[0]], scaled[both[1]], wanted[both[0]])},
        len(held_out) - len(kept),
    )


def preprocess_spectra(spectra: Floats, how: str) -> Floats:
    """Return spectra after `snv` (each has mean 0 and deviation 1), `derivative` (Savitzky and Golay), or both."""
    if "snv" in how:
        spectra = (spectra - spectra.mean(1, keepdims=True)) / spectra.std(1, keepdims=True)
    if "derivative" in how:
        spectra = savgol_filter(spectra, 15, 2, deriv=1, axis=1)
    return np.ascontiguousarray(spectra, dtype=np.float32)


def open_board(root: Path, seed: int, home: str) -> Home:
    """Train at one of five boards; half of its replicates train, and the other half rehearses."""
    data = np.load(root / "instruments" / "twin_gas.npz")
    inputs, answers = torch.tensor(data["x"]), torch.tensor(data["y"]).long()
    torch.manual_seed(seed)
    own = data["board"] == home
    replicates = np.random.default_rng(seed).permutation(np.unique(data["replicate"][own]))
    halves = np.split(replicates, 2)
    trained, held_out = (torch.from_numpy(np.flatnonzero(own & np.isin(data["replicate"], half))) for half in halves)
    scaled = standardise(inputs, trained)
    training = {"epochs": 60, "batch_size": 16, "rate": 1e-2}
    model = train(make_perceptron(inputs.shape[1], 4), (scaled[trained], answers[trained]), **training)
    places = {site: torch.from_numpy(np.flatnonzero(data["board"] == site)) for site in BOARDS if site != home}
    given = [(scaled[part], answers[part]) for part in (trained, held_out)]
    sites = {site: (scaled[there], answers[there]) for site, there in places.items()}
    return Home(home, seed, model, training, given[0], given[1], sites)


def open_wearable(root: Path, seed: int, home: str) -> Home:
    """Train with phone or watch; the other device, and the own one, meet people that the network has never seen."""
    data = np.load(root / "instruments" / "har_phone_watch.npz")
    inputs, answers = torch.tensor(data["x"].astype(np.float32)), torch.tensor(data["y"]).long()
    order = np.random.default_rng(seed).permutation(sorted(set(data["subject"])))
    groups = np.split(order, [PEOPLE_TRAINED, PEOPLE_TRAINED + PEOPLE_AT_HOME])
    torch.manual_seed(seed)
    trained, held_out = (_find(data, "subject", home, group) for group in groups[:2])
    held_out = held_out[torch.randperm(len(held_out))[:MAX_WINDOWS]]
    scaled = standardise(inputs, trained, (0, 2))
    model = nn.Sequential(
        *(nn.Conv1d(6, 16, 5, 2, 2), nn.BatchNorm1d(16), nn.ReLU()),
        *(nn.Conv1d(16, 32, 5, 2, 2), nn.BatchNorm1d(32), nn.ReLU()),
        *(nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 5)),
    )
    training = {"epochs": 8, "batch_size": 64, "rate": 3e-3}
    train(model, (scaled[trained], answers[trained]), **training)
    sites = {}
    for site in WEARABLES:
        there = _find(data, "subject", site, groups[2])
        there = there[torch.randperm(len(there))[:MAX_WINDOWS]]
        sites[site] = scaled[there], answers[there]
    given = [(scaled[part], answers[part]) for part in (trained, held_out)]
    people = data["subject"][held_out.numpy()].tolist()
    return Home(home, seed, model, training | {"epochs": 4}, given[0], given[1], sites, groups=people)


def _find(data: Any, name: str, device: Any, chosen: Sequence[Any] | Floats) -> Tensor:
    """Return the places of what a device has measured, of chosen samples or people."""
    return torch.from_numpy(np.flatnonzero((data["device"] == device) & np.isin(data[name], chosen)))


@dataclass(frozen=True)
class Benchmark:
    """One benchmark of the page: its devices, how to open one as a home, and its baseline of the field."""

    title: str
    devices: tuple[str, ...]
    open_home: Callable[[Path, int, str], Home]
    text: str
    baseline: str = ""
    unit: str = "accuracy in percent"
    meets_itself: bool = False
    """Whether the home is one of its sites, with other people."""

    def list_sites(self, home: str) -> list[str]:
        return [device for device in self.devices if device != home or self.meets_itself]


_TABLETS = (
    "655 pharmaceutical tablets before two near-infrared spectrometers (IDRC 2002 shootout). The device "
    "shift: detector, lamp and wavelength axis differ a little from instrument to instrument. Whoever moves a "
    "calibration from the laboratory's spectrometer to that of the production line sees it."
)
ROWS = {
    "tablets": Benchmark(
        "tablets, assay",
        SPECTROMETERS,
        open_spectrometer,
        f"{_TABLETS} 200 tablets train at home and up to 100 others rehearse; 355 others are at the site. Tablets "
        "whose error at home exceeds six robust deviations do not rehearse, as the field leaves outliers out of a "
        "calibration, and do not count at home. All tablets of the site count.",
        "pls",
        "root mean squared error of the assay, mg",
    ),
    "tablets-all": Benchmark(
        "tablets, assay, outliers rehearse",
        SPECTROMETERS,
        functools.partial(open_spectrometer, clean=False),
        "The same, but nothing is left out of the rehearsal.",
        "pls",
        "root mean squared error of the assay, mg",
    ),
    "tablets-official": Benchmark(
        "tablets, assay, official split",
        SPECTROMETERS,
        functools.partial(open_spectrometer, official=True),
        "The split of the shootout: 155 tablets train, 40 rehearse, 460 are at the site. Answers are distributed "
        "otherwise in each part (deviation of the assay 21.9, 2.4 and 15.7), which no method of this page can know.",
        "pls",
        "root mean squared error of the assay, mg",
    ),
    "tablets-snv-derivative": Benchmark(
        "tablets, assay, SNV and first derivative",
        SPECTROMETERS,
        functools.partial(open_spectrometer, preprocess="snv derivative"),
        "The first benchmark with the preprocessing of the field: each spectrum to mean 0 and deviation 1, then the "
        "first derivative (Savitzky and Golay, 15 points).",
        "pls",
        "root mean squared error of the assay, mg",
    ),
    "tablets-weight": Benchmark(
        "tablets, weight",
        SPECTROMETERS,
        functools.partial(open_spectrometer, answer="weight"),
        "The weight of the same tablets, which spectra tell less well.",
        "pls",
        "root mean squared error of the weight, mg",
    ),
    "tablets-hardness": Benchmark(
        "tablets, hardness",
        SPECTROMETERS,
        functools.partial(open_spectrometer, answer="hardness"),
        "The hardness of the same tablets, which spectra hardly tell: a constant guess has 1.3.",
        "pls",
        "root mean squared error of the hardness",
    ),
    "twin-gas": Benchmark(
        "twin-gas",
        BOARDS,
        open_board,
        "Five equally built boards of eight metal-oxide gas sensors tell four gases apart (UCI 361). The device shift: "
        "no two such sensors have the same baseline and sensitivity. Whoever builds a second device, or replaces a "
        "sensor, sees it. Half of a board's replicates train and the other half rehearses (80 and 80, or 40 and 40); "
        "all samples of another board are at the site.",
        "logistic",
    ),
    "phone-watch": Benchmark(
        "phone-watch",
        WEARABLES,
        open_wearable,
        "Windows of accelerometer and gyroscope of 23 people who carried a phone (`sp`) and a watch (`sw`), five "
        "activities. The device shift is one of place, too: what the wrist does, a pocket does not see. Whoever "
        "brings an app from phones to watches meets it. Fourteen people train, four rehearse, five others are at the "
        "site, with at most 400 windows each. Scores are balanced accuracies, since half of the windows is walking.",
        unit="balanced accuracy in percent",
        meets_itself=True,
    ),
}


# ---- measuring


def measure_alone(home: Home, site: str, baseline: str, profile: shiftmend.Profile) -> Row:
    """Score all columns at one site that need no rehearsal."""
    inputs, answers = home.sites[site]
    scores = {}
    # BUFR-IM needs classes.
    methods: dict[str, Any] = {name: name for name in METHODS if name != "bufr-im" or not home.is_regression}
    if home.is_regression:
        weights = weigh_features(home.model, profile)
        methods |= {"fr, by head": FRByHead(weights=weights), "bufr, by head": BUFRByHead(weights=weights)}
    for name, method in methods.items():
        result = shiftmend.adapt(home.model, inputs, profile, method, seed=home.seed, progress=False)
        scores[name] = home.score(_run(result.model, inputs), answers)
    scores["target-supervised"] = supervise(home, inputs, answers)
    if site in home.transfer:
        scores |= transfer(home, site, lambda spectra: _run(home.model, torch.as_tensor(spectra).float()).numpy(), "")
    if baseline:
        scores |= measure_baseline(home, site, baseline)
    at_home = home.score(_run(home.model, home.held_out[0]), home.held_out[1])
    scores = {name: round(value, 4) for name, value in ({"at home": at_home} | scores).items()}
    return {"samples": len(inputs), "scores": scores}


def _run(model: nn.Module, inputs: Tensor) -> Tensor:
    with torch.no_grad():
        return model(inputs)


def measure_auto(home: Home, site: str, profile: shiftmend.Profile) -> Row:
    """Mend by `auto` with a rehearsed profile, and set what was told beside the truth, in the estimate's metric."""
    inputs, answers = home.sites[site]
    started = time.perf_counter()
    result = shiftmend.adapt(home.model, inputs, profile, seed=home.seed, progress=False)
    seconds = time.perf_counter() - started
    truth = [_tell_truth(model, inputs, answers) for model in (home.model, result.model)]
    estimate = result.estimate
    assert estimate is not None
    assert estimate.before is not None
    assert estimate.after is not None
    return {
        "scores": {"auto": round(home.score(_run(result.model, inputs), answers), 4)},
        "chosen": result.manifest["method"]["name"],
        "reason": result.reason,
        "true_before": round(truth[0], 4),
        "true_after": round(truth[1], 4),
        "before": estimate.before.to_json(),
        "after": estimate.after.to_json(),
        "signals": {name: round(value, 4) for name, value in result.candidates[0].signals.items()},
        "rehearsed": len(home.held_out[0]),
        "left_out": home.left_out,
        "seconds": round(seconds, 2),
    }


def _tell_truth(model: nn.Module, inputs: Tensor, answers: Tensor) -> float:
    scores = shiftmend.evaluate(model, (inputs, answers), progress=False)
    return scores.accuracy if isinstance(scores, shiftmend.Scores) else scores.root_mean_square_error


def supervise(home: Home, inputs: Tensor, answers: Tensor) -> float:
    """Train on with the labels of one half of the site and predict the other half, and the other way round."""
    torch.manual_seed(home.seed)
    halves = torch.randperm(len(inputs)).chunk(2)
    outputs = _run(home.model, inputs)
    for own, other in (halves, halves[::-1]):
        model = train(copy.deepcopy(home.model), (inputs[own], answers[own]), **home.training)
        outputs[other] = _run(model, inputs[other])
    return home.score(outputs, answers)


def transfer(home: Home, site: str, predict: Callable[[Floats], Floats], prefix: str) -> dict[str, float]:
    """Score PDS, DS, and slope and bias, by the transfer samples of a site."""
    (inputs, answers), standards = home.sites[site], [one.numpy() for one in home.transfer[site]]
    at_home, at_site = standards[:2]
    maps = {
        "pds": piecewise_direct_standardisation(at_home, at_site, PDS_COMPONENTS, PDS_HALF_WIDTH),
        "ds": direct_standardisation(at_home, at_site, TRANSFER_SAMPLES),
    }
    scores = {name: home.score(predict(found(inputs.numpy())), answers) for name, found in maps.items()}
    slope, bias = slope_and_bias(predict(standards[1]).ravel(), standards[2].ravel())
    scores["slope-and-bias"] = home.score(slope * predict(inputs.numpy()) + bias, answers)
    return {prefix + name: score for name, score in scores.items()}


def measure_baseline(home: Home, site: str, name: str) -> dict[str, float]:
    """Score the model of the field, trained on the same samples, with and without input matching."""
    inputs, answers = (one.numpy() for one in home.trained)
    if name == "pls":
        tried = [PLSRegression(number, scale=False) for number in range(4, 21, 4)]
        errors = [float(np.square(cross_val_predict(one, inputs, answers, cv=5) - answers).mean()) for one in tried]
        fitted = tried[int(np.argmin(errors))].fit(inputs, answers)
    else:
        fitted = LogisticRegression(max_iter=2000).fit(inputs, answers)

    def predict(given: Floats) -> Floats:
        return np.asarray(fitted.predict(given), dtype=answers.dtype)

    there, wanted = home.sites[site][0].numpy(), home.sites[site][1]
    moved = there - there.mean(0) + inputs.mean(0)
    spread = there.std(0)
    scaled = (there - there.mean(0)) * inputs.std(0) / np.where(spread > 0, spread, 1) + inputs.mean(0)
    given = {name: there, f"{name} + match-mean": moved, f"{name} + match-moments": scaled}
    scores = {column: home.score(predict(values), wanted) for column, values in given.items()}
    if site in home.transfer:
        scores |= transfer(home, site, predict, f"{name} + ")
    return scores


@dataclass(frozen=True)
class Job:
    """A home with the parts and sites that are not measured yet."""

    name: str
    home: str
    seed: int
    missing: tuple[tuple[str, str], ...]


def list_jobs(names: Sequence[str], seeds: Sequence[int], parts: Sequence[str], file: RowFile) -> Iterator[Job]:
    """Yield what is not in the file yet."""
    for seed, name in itertools.product(seeds, names):
        for home in ROWS[name].devices:
            every = itertools.product(parts, ROWS[name].list_sites(home))
            missing = tuple((part, site) for part, site in every if not file.has(name, home, site, seed, part))
            if missing:
                yield Job(name, home, seed, missing)


def measure(job: Job, root: Path, profiles: Path | None = None) -> Iterator[tuple[tuple[Any, ...], Row]]:
    """Yield key and values of each missing row of a home."""
    benchmark = ROWS[job.name]
    home = benchmark.open_home(root, job.seed, job.home)
    profile = shiftmend.profile(home.model, home.trained[0], gaussian="full", progress=False)
    rehearsed: dict[int, shiftmend.Profile] = {}
    for part, site in job.missing:
        if part == "auto":
            # A rehearsal cannot draw sites that are larger than home.
            size = min(len(home.sites[site][0]), len(home.held_out[0]))
            stored = None if profiles is None else profiles / f"{job.name}-{job.home}-{job.seed}-{size}.profile"
            if size not in rehearsed:
                rehearsed[size] = rehearse(home, profile, size, stored)
            found = measure_auto(home, site, rehearsed[size])
        else:
            found = measure_alone(home, site, benchmark.baseline, profile)
        yield (job.name, job.home, site, job.seed, part), found


def rehearse(home: Home, profile: shiftmend.Profile, size: int, stored: Path | None) -> shiftmend.Profile:
    """Rehearse a home for sites of a size, unless that was done for the same network."""
    if stored is not None and stored.exists():
        found = shiftmend.Profile.load(stored)
        found.check_weights(home.model)
        return found
    options: dict[str, Any] = {"site_size": size, "groups": home.groups, "seed": home.seed, "progress": False}
    found = shiftmend.rehearse(home.model, home.held_out, profile, **options)
    if stored is not None:
        stored.parent.mkdir(parents=True, exist_ok=True)
        found.save(stored)
    return found


def run(
    jobs: Sequence[Job], root: Path, file: RowFile, workers: int, seconds: float, profiles: Path | None = None
) -> None:
    """Measure jobs by processes of one thread each, and write each row as it comes, until the time is over."""
    context = multiprocessing.get_context("spawn")
    waiting, found = context.Queue(), context.Queue()
    for job in jobs:
        waiting.put(job)
    for _ in range(workers):
        waiting.put(None)
    shared = waiting, found, root, profiles
    processes = [context.Process(target=_work, args=shared, daemon=True) for _ in range(workers)]
    for process in processes:
        process.start()
    end = time.monotonic() + seconds
    try:
        while time.monotonic() < end:
            try:
                row = found.get(timeout=1)
            except queue.Empty:
                if not any(process.is_alive() for process in processes):
                    break
                continue
            if isinstance(row, str):
                print(row, flush=True)
            else:
                print(describe(file.add(*row, _facts())), flush=True)
    finally:
        for process in processes:
            process.terminate()


def _work(waiting: Any, found: Any, root: Path, profiles: Path | None) -> None:
    prepare_process()
    while (job := waiting.get()) is not None:
        try:
            for row in measure(job, root, profiles):
                found.put(row)
        except Exception as error:
            # One home that fails must not end the others.
            found.put(f"{job.name} {job.home}, seed {job.seed} failed: {error!r}")


def prepare_process() -> None:
    logging.getLogger("shiftmend").setLevel(logging.ERROR)
    torch.set_num_threads(1)


def _facts() -> Row:
    versions = environment(torch.device("cpu"))
    return {"environment": {name: value for name, value in versions.items() if name != "platform"}}


def describe(row: Row) -> str:
    scores = ", ".join(f"{name_candidate(name)} {value:.3f}" for name, value in row["scores"].items())
    return f"{row['data']} {row['home']} to {row['site']}, seed {row['seed']}: {scores} {row.get('chosen', '')}"


# ---- the page


def gather(rows: Sequence[Row], data: str) -> dict[tuple[str, str], dict[int, dict[str, float]]]:
    """Return the scores of a benchmark by direction, seed and column."""
    found: dict[tuple[str, str], dict[int, dict[str, float]]] = {}
    for row in rows:
        if row["data"] == data:
            scores = found.setdefault((row["home"], row["site"]), {}).setdefault(row["seed"], {})
            scores |= {name_candidate(name): value for name, value in row["scores"].items()}
    return found


def compare(cells: Mapping[int, Mapping[str, float]], column: str, other: str) -> tuple[float, float, int] | None:
    """Return the mean difference between two columns, its standard error over seeds, and the number of seeds."""
    differences = [scores[column] - scores[other] for scores in cells.values() if {column, other} <= set(scores)]
    if not differences:
        return None
    error = stdev(differences) / math.sqrt(len(differences)) if len(differences) > 1 else math.nan
    return fmean(differences), error, len(differences)


def average_directions(found: Mapping[tuple[str, str], Mapping[int, Mapping[str, float]]]) -> dict[int, Row]:
    """Return, for each seed, the mean over directions of each column that all directions have."""
    means: dict[int, Row] = {}
    for seed in sorted({seed for cells in found.values() for seed in cells}):
        cells = [cells[seed] for cells in found.values() if seed in cells]
        columns = [name for name in cells[0] if all(name in cell for cell in cells)] if len(cells) == len(found) else []
        means[seed] = {name: fmean(cell[name] for cell in cells) for name in columns}
    return {seed: row for seed, row in means.items() if row}


def tabulate(rows: Sequence[Row], data: str) -> list[str]:
    """Write a line for each column: its mean, and the paired difference from the untouched model."""
    found, lower = gather(rows, data), data.startswith("tablets")
    overall = average_directions(found)
    directions = [*found] if len(found) <= 4 else []
    columns = list(dict.fromkeys(name for cells in found.values() for cell in cells.values() for name in cell))
    heads = [f"{home} to {site}" for home, site in directions]
    lines = [
        "| | " + " | ".join([*heads, "all directions", "against untouched", "seeds", "cells better, worse"]) + " |",
        "|" + "---|" * (len(heads) + 5),
    ]
    for name in columns:
        every = [cell for cells in found.values() for cell in cells.values() if name in cell]
        values = [_mean_of(found[one], name) for one in directions] + [_mean_of(overall, name)]
        entries = [_show(value, lower) for value in values]
        against = compare(overall, name, "untouched")
        shown = "–"
        if against is not None and name not in ("untouched", "at home"):
            shown = f"{_show(against[0], lower, sign=True)} ± {_show(against[1], lower)}"
        gains = [(cell["untouched"] - cell[name]) * (1 if lower else -1) for cell in every if "untouched" in cell]
        count = "–" if name in ("untouched", "at home") else f"{sum(g > 0 for g in gains)}, {sum(g < 0 for g in gains)}"
        mark = f"*{name}*" if name in SUPERVISED else name
        seeds = len({seed for cells in found.values() for seed, cell in cells.items() if name in cell})
        lines.append(f"| {mark} | " + " | ".join([*entries, shown, str(seeds), count]) + " |")
    return lines


def _mean_of(cells: Mapping[int, Mapping[str, float]], name: str) -> float:
    values = [cell[name] for cell in cells.values() if name in cell]
    return fmean(values) if values else math.nan


def _show(value: float, lower: bool, sign: bool = False) -> str:
    if math.isnan(value):
        return "–"
    plus = "+" if sign else ""
    return f"{value:{plus}.2f}" if lower else f"{100 * value:{plus}.1f}"


def judge_auto(rows: Sequence[Row], data: str) -> Iterator[str]:
    """Say in which directions `auto` misses what was asked of it: no harm, and as good as the best input matcher."""
    found, lower = gather(rows, data), data.startswith("tablets")
    known = {
        one: cells for one, cells in found.items() if any({"auto", "untouched"} <= set(cell) for cell in cells.values())
    }
    if not known:
        yield "`auto` was not measured."
        return
    sign = -1 if lower else 1
    harmed, behind = [], []
    for (home, site), cells in known.items():
        own = {seed: cell for seed, cell in cells.items() if {"auto", "untouched"} <= set(cell)}
        against = compare(own, "auto", "untouched")
        assert against is not None
        margin = 0.0 if math.isnan(against[1]) else against[1]
        if sign * against[0] < -margin:
            harmed.append(f"{home} to {site} ({_show(against[0], lower, sign=True)})")
        best = max(MATCHERS, key=lambda name: sign * _mean_of(own, name))
        errors = [value if lower else 1 - value for value in (_mean_of(own, "auto"), _mean_of(own, best))]
        if errors[0] > 1.02 * errors[1]:
            behind.append(
                f"{home} to {site} ({_show(_mean_of(own, 'auto'), lower)}; {best} {_show(_mean_of(own, best), lower)})"
            )
    number = len(known)
    yield (
        f"`auto` is worse than the untouched model by more than the paired standard error in {len(harmed)} of {number} "
        f"directions{': ' + ', '.join(harmed) if harmed else ''}."
    )
    yield (
        f"Its error exceeds that of the best input matcher of the direction, chosen with labels, by more than 2 % in "
        f"{len(behind)} of {number}{': ' + ', '.join(behind) if behind else ''}."
    )


def judge_weights(rows: Sequence[Row], data: str) -> Iterator[str]:
    """Say what weighing the features by the head changes, paired over seeds."""
    overall = average_directions(gather(rows, data))
    for name in ("fr", "bufr"):
        if (found := compare(overall, f"{name}, by head", name)) is not None:
            yield f"`{name}` by head against plain `{name}`: {found[0]:+.2f} ± {found[1]:.2f}, {found[2]} seeds."


def judge_estimates(rows: Sequence[Row], data: str) -> Iterator[str]:
    """Say how many numbers were told, how far off they were, and how many intervals contained the truth."""
    own = [row for row in rows if row["data"] == data and row["part"] == "auto"]
    if not own:
        return
    for name in ("before", "after"):
        told = [row for row in own if row[name]["reliable"]]
        line = f"Told a number {name} mending: {len(told)} of {len(own)} times"
        if told:
            pairs = [(row[name]["value"], row[f"true_{name}"]) for row in told]
            relative = data.startswith("tablets")
            errors = [abs(value - truth) / (truth if relative else 1) for value, truth in pairs]
            held = [
                row[name]["low"] <= row[f"true_{name}"] <= row[name]["high"]
                for row in told
                if row[name]["low"] is not None
            ]
            unit = "% of the error" if relative else "points of accuracy"
            line += f"; off by {100 * fmean(errors):.1f} {unit} on average; "
            line += f"{sum(held)} of {len(held)} intervals contain the truth"
        ranges = [row for row in own if row[name]["value"] is None and row[name]["low"] is not None]
        if ranges:
            held = [row[name]["low"] <= row[f"true_{name}"] <= row[name]["high"] for row in ranges]
            line += f". Ranges without a number: {len(ranges)}; {sum(held)} contain the truth"
        yield line + "."
    chosen = [name_candidate(row["chosen"]) for row in own]
    counts = ", ".join(
        f"{name} {chosen.count(name)}" for name in sorted(sorted(set(chosen)), key=chosen.count, reverse=True)
    )
    yield f"`auto` took: {counts}."
    reasons = [reason for row in own for reason in row["after"]["reasons"]]
    kinds = {
        "too wide": "too much open",
        "unlike all that was rehearsed": "outside of what",
        "other classes": "other classes",
    }
    counted = {name: sum(words in reason for reason in reasons) for name, words in kinds.items()}
    if reasons:
        yield "Not told after mending, by reason: " + ", ".join(f"{name} {n}" for name, n in counted.items() if n) + "."


TABLETS_TARGET_MG = 4.3
"""Error of the assay that `auto` should reach from the first spectrometer to the second."""
UNSUPERVISED = (*METHODS[1:], "logistic", "logistic + match-mean", "logistic + match-moments")
"""Competitors of `auto` between gas boards."""


def list_targets(rows: Sequence[Row]) -> Iterator[str]:
    """Yield what was asked for, what was reached, and on how many cells."""
    cells = [cell for cell in gather(rows, "tablets").get(("1", "2"), {}).values() if "auto" in cell]
    wish = f"tablets, assay, 1 to 2: at most {TABLETS_TARGET_MG} mg by `auto`"
    if cells:
        reached = fmean(cell["auto"] for cell in cells)
        others = {name: fmean(cell[name] for cell in cells) for name in ("at home", "target-supervised")}
        yield (
            f"{wish}. {_judge(reached <= TABLETS_TARGET_MG)}: {reached:.2f}, {_count(cells)}. Held-out tablets have "
            f"{others['at home']:.2f} at home without outliers, and a network with labels of the "
            f"site {others['target-supervised']:.2f}."
        )
    else:
        yield f"{wish}. Not measured."
    every = [cell for cells in gather(rows, "twin-gas").values() for cell in cells.values() if "auto" in cell]
    wish = "twin-gas: `auto` above every unsupervised competitor"
    if every:
        # Rows of earlier versions lack the columns that came later.
        rivals = [name for name in UNSUPERVISED if all(name in cell for cell in every)]
        means = {name: fmean(cell[name] for cell in every) for name in ("auto", *rivals)}
        best = max(rivals, key=lambda name: means[name])
        met = _judge(means["auto"] > means[best])
        yield f"{wish}. {met}: {100 * means['auto']:.1f}, {best} {100 * means[best]:.1f}, {_count(every)}."
    else:
        yield f"{wish}. Not measured."
    if not any(row["data"] == "phone-watch" and row["part"] == "auto" for row in rows):
        yield "phone to watch and back: better than untouched, or said before harm is done. Not measured."
    told = [row for row in rows if row["part"] == "auto"]
    yield (
        "Estimates: off by at most 10 % of an error or 3 points of accuracy, at least 70 % told. Told after mending: "
        f"{sum(row['after']['reliable'] for row in told)} of {len(told)}; the rest stands with each benchmark."
    )


def _judge(met: bool) -> str:
    return "Met" if met else "Missed"


def _count(cells: Sequence[Any]) -> str:
    return "one cell" if len(cells) == 1 else f"mean of {len(cells)} cells"


INTRODUCTION = (
    "Made by `python benchmarks/real_instruments.py --page` from `results/real-instruments.json`, and the notes below "
    "from `docs/results/notes/real-instruments.md`. Nothing is simulated here but the rehearsal. Small networks are "
    "trained at one device, their home, and meet another, their site, with samples or people that they have never "
    "seen. Figures are means over seeds; a seed draws the split and the network. *Against untouched* is the paired "
    "difference, averaged over directions, with its standard error over seeds. Columns in italics have seen labels or "
    "transfer samples of the site: `target-supervised` half of its labels in turn; PDS, DS, and slope and bias 20 "
    "samples that both devices have measured. `by head` weighs the features by how far they move the output. A column "
    "with fewer seeds than others has its mean over those alone, so means of such columns do not compare."
)


def write_page(rows: Sequence[Row], notes: str) -> str:
    lines = [
        "# Real instruments",
        "",
        *_wrap(INTRODUCTION),
        "",
        "## Targets",
        "",
        *(line for target in list_targets(rows) for line in _wrap(f"- {target}", "  ")),
        "",
        *notes.strip().splitlines(),
        "",
    ]
    for name, benchmark in ROWS.items():
        if not any(row["data"] == name for row in rows):
            continue
        lines += [f"## {benchmark.title}", "", *_wrap(benchmark.text), "", f"Scores: {benchmark.unit}.", ""]
        lines += [*tabulate(rows, name), ""]
        for sentence in (*judge_weights(rows, name), *judge_auto(rows, name), *judge_estimates(rows, name)):
            lines += [*_wrap(f"- {sentence}", "  ")]
        lines.append("")
    return "\n".join(lines)


def _wrap(text: str, indent: str = "") -> list[str]:
    return textwrap.wrap(text, 118, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-root", type=Path, default=Path("data"))
    parser.add_argument("--rows", nargs="*", choices=ROWS, default=list(ROWS))
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2, 3, 4])
    parser.add_argument("--parts", nargs="*", choices=PARTS, default=list(PARTS))
    parser.add_argument("--out", type=Path, default=Path("results/real-instruments.json"))
    parser.add_argument("--page", type=Path, help="write the page from what was measured, and measure nothing")
    parser.add_argument("--notes", type=Path, default=Path("docs/results/notes/real-instruments.md"))
    parser.add_argument("--profiles", type=Path, help="folder where rehearsed profiles are kept")
    parser.add_argument("--workers", type=int, default=1, help="processes, of one thread each")
    parser.add_argument("--time-limit", type=float, default=math.inf, metavar="MINUTES", help="stop after that long")
    options = parser.parse_args(arguments)
    prepare_process()
    file = RowFile(options.out, KEY)
    if options.page is not None:
        notes = options.notes.read_text() if options.notes.exists() else ""
        write_atomically(options.page, write_page(file.rows, notes).encode())
        return
    jobs = [*list_jobs(options.rows, options.seeds, options.parts, file)]
    run(jobs, options.data_root, file, options.workers, 60 * options.time_limit, options.profiles)


if __name__ == "__main__":
    main()
