"""What happens where classes have other shares than at home, behind the same device and behind another?

    python benchmarks/label_shift.py digits mnist --data-root DATA --device cpu --workers 16
    python benchmarks/label_shift.py emnist-da mnist-to-usps usps-to-mnist cifar-10-c --data-root DATA --models MODELS
    python benchmarks/label_shift.py --page docs/results/other-shares.md

A model is rehearsed on held-out images of home. Sites are drawn from further images without replacement, with class
shares of their own, behind the same device or behind another. At each of them: the untouched model; `fr-shares`, which
finds the shares; the same method given the true shares, which no site knows; FR with the profile for the true shares;
and what `adapt` returns without options, with its estimate. The row *as at home* is data of home's shares and of the
same size. `mnist` is a small network at half resolution; the others are the networks of the benchmarks, taken from
`--models` as `shiftmend bench run` leaves them, and trained if they are missing. Rehearsals and sites run in
`--workers` processes, and a run that was cut off goes on. BUFR is no candidate: a rehearsal with it takes an hour on
one core.
"""

from __future__ import annotations

import argparse
import functools
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import shiftmend
from bench_models import RowFile, labels_of, open_benchmark
from shiftmend import shifts
from shiftmend.adaptation.result import environment
from shiftmend.inputs.images import Split
from shiftmend.methods.fr_shares import FRShares
from shiftmend.profiles.fingerprints import weights
from shiftmend.profiles.profile import Profile
from shiftmend.profiles.rehearsal import name_candidate, tell_truth
from shiftmend.profiles.shares import reweight
from shiftmend.rehearsal.label_shifts import AS_AT_HOME, KINDS, draw_places, draw_shares
from shiftmend.research.datasets import digits
from shiftmend.research.datasets.partitions import halves
from shiftmend.utils.devices import resolve_device
from shiftmend.utils.files import write_atomically

KEY = ("world", "device", "case", "seed")
CASES = (AS_AT_HOME, *KINDS)
SAME = "same"
CANDIDATES = ("match-moments", "adabn", "fr-shares", "fr")
HOME_SAMPLES = 3000
MNIST_DEVICES: dict[str, tuple[str, int | None]] = {
    "brightness": ("mnist-c/brightness", None),
    "stripe": ("emnist-da/stripe", None),
    "contrast": ("cifar-c/contrast", 5),
    "impulse noise": ("cifar-c/impulse_noise", 5),
    "oranges": ("emnist-da/oranges", None),
}
UNMENDABLE = ("oranges", "bricks")
"""Devices that scales and offsets inside a network do not mend."""

Row = dict[str, Any]
Place = tuple[str, str, str, int]


@dataclass(frozen=True)
class Plan:
    """Devices, cases and seeds of a world, and the samples of a site at most."""

    devices: tuple[str, ...]
    samples: int
    cases: tuple[str, ...] = CASES
    seeds: tuple[int, ...] = (0, 1, 2)
    home_samples: int = HOME_SAMPLES
    method: FRShares = field(default_factory=FRShares)


WORLDS = {
    "digits": Plan(("brightness", "stripe", "oranges"), 400, seeds=(123, 234, 345)),
    "mnist": Plan(tuple(MNIST_DEVICES), 2000),
    "emnist-da": Plan(
        ("stripe", "gaussian_blur", "impulse_noise", "fog", "bricks"), 2000, seeds=(678, 123, 234), home_samples=4700
    ),
    "mnist-to-usps": Plan(("usps",), 2000, seeds=(123, 234, 345)),
    "usps-to-mnist": Plan(("mnist",), 2000, seeds=(123, 234, 345)),
    "cifar-10-c": Plan(
        ("contrast", "gaussian_noise", "defocus_blur"),
        1000,
        (AS_AT_HOME, "dirichlet 1", "tail 100", "half missing"),
        (789,),
        method=FRShares(steps=200),
    ),
}


class Network(nn.Sequential):
    """Three convolutions and a hidden layer, all with BatchNorm; images `[N, 1, 14, 14]`."""

    def __init__(self, classes: int) -> None:
        def block(inputs: int, outputs: int, stride: int) -> nn.Module:
            convolution = nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1)
            return nn.Sequential(convolution, nn.BatchNorm2d(outputs), nn.ReLU())

        hidden = nn.Sequential(nn.Flatten(), nn.Linear(48 * 16, 96), nn.BatchNorm1d(96), nn.ReLU())
        super().__init__(block(1, 16, 2), block(16, 32, 2), block(32, 48, 1), hidden, nn.Linear(96, classes))


def shrink(images: Tensor) -> Tensor:
    """Scale bytes to -1 to 1, and average 2 x 2 pixels."""
    return nn.functional.avg_pool2d(images.float() / 127.5 - 1, 2)


@dataclass(frozen=True)
class Options:
    """What every process needs to open a world."""

    root: Path | None
    models: Path
    profiles: Path
    device: str
    end: float | None


@dataclass(frozen=True)
class World:
    """A trained model, images of home to rehearse on, and images from which sites are drawn, by device."""

    model: nn.Module
    profile: Callable[[], Profile]
    home: tuple[Tensor, Tensor]
    load_pool: Callable[[str], tuple[Tensor, Tensor]]
    preprocess: Callable[[Tensor], Tensor]
    batch_size: int | None
    file: Path
    manifest: Row


@functools.lru_cache(1)
def open_world(name: str, seed: int, options: Options) -> World:
    """Train or read the source model of a world, and load its images."""
    opened = _open_mnist(seed, options) if name == "mnist" else _open_benchmark(name, seed, options)
    model, profile, home, load_pool, preprocess, batch_size = opened
    model = model.cpu()  # Other processes get the model by pickling.
    versions = {key: value for key, value in environment(resolve_device(options.device)).items() if key != "platform"}
    manifest = {"environment": versions, "world": name, "seed": seed, "weights_sha256": weights(model)}
    manifest |= {"home_samples": len(home[1]), "candidates": list(CANDIDATES), "steps": WORLDS[name].method.steps}
    file = options.profiles / f"{name}-{seed}-{weights(model)[:8]}.profile"
    pool = functools.lru_cache(1)(load_pool)
    return World(model, profile, home, pool, preprocess, batch_size, file, manifest)


def _open_mnist(seed: int, options: Options) -> tuple[Any, ...]:
    split = digits.mnist("train", options.root)
    assert split.labels is not None
    order = torch.randperm(len(split.labels), generator=torch.Generator().manual_seed(seed))
    images, labels = split.images[order], split.labels[order].long()
    source, end = 10_000, 10_000 + HOME_SAMPLES
    torch.manual_seed(seed)
    model = Network(10)
    optimiser = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9, weight_decay=5e-4)
    for _ in range(4):
        for rows in torch.randperm(source).split(128):
            optimiser.zero_grad()
            nn.functional.cross_entropy(model(shrink(images[rows])), labels[rows]).backward()
            optimiser.step()
    model.eval()

    def profile() -> Profile:
        return shiftmend.profile(model, images[:source], preprocess=shrink, device=options.device, progress=False)

    def load_pool(device: str) -> tuple[Tensor, Tensor]:
        # Shifts are made of a tenth of the images at a time, when a site is drawn.
        return images[end:], labels[end:]

    return model, profile, (images[source:end], labels[source:end]), load_pool, shrink, None


def _open_benchmark(name: str, seed: int, options: Options) -> tuple[Any, ...]:
    is_usps = name.endswith(("-to-usps", "-to-mnist"))
    given = open_benchmark("usps" if is_usps else name, options.models, options.root, options.device, may_train=True)
    resources, protocol = given.resources, given.protocol
    source = f"plain-{name.split('-to-')[0]}" if is_usps else "plain"
    model, _ = resources.model(source, seed)
    clean = resources.source(source).test
    assert isinstance(clean, Split)
    home, away = halves(labels_of(clean))
    home = home[: WORLDS[name].home_samples]

    def load_pool(device: str) -> tuple[Tensor, Tensor]:
        if device == SAME:
            return clean.images[away], labels_of(clean)[away].long()
        target = given.benchmark.load_target(name if is_usps else device, options.root).adapt
        assert isinstance(target, Split)
        rows = torch.arange(len(labels_of(target))) if is_usps else away
        return target.images[rows], labels_of(target)[rows].long()

    return (
        model,
        lambda: resources.profile(source, seed, protocol.temperature).to(torch.device("cpu")),
        (clean.images[home], labels_of(clean)[home].long()),
        load_pool,
        given.benchmark.preprocess,
        protocol.batch_size,
    )


def rehearse(name: str, seed: int, options: Options, executor: Executor | None) -> None:
    """Rehearse a world, unless that was done; a rehearsal that was killed goes on."""
    world = open_world(name, seed, options)
    if world.file.exists():
        return
    world.file.parent.mkdir(parents=True, exist_ok=True)
    own = WORLDS[name].method
    shiftmend.rehearse(
        world.model,
        world.home,
        world.profile(),
        candidates=[own if candidate == own.name else candidate for candidate in CANDIDATES],
        preprocess=world.preprocess,
        batch_size=world.batch_size,
        device=options.device,
        checkpoint=world.file.with_suffix(".json"),
        executor=executor,
        progress=False,
    ).save(world.file)


def draw_site(world: World, profile: Profile, place: Place) -> tuple[Tensor, Tensor]:
    """Draw the samples of a site without replacement, and send them through its device."""
    name, device, case, seed = place
    record = profile.rehearsal
    assert record is not None
    images, labels = world.load_pool(device)
    rng = np.random.default_rng([seed, CASES.index(case)])
    shares = draw_shares(case, record.label_shares.numpy(), rng)
    rows = draw_places(labels, shares, WORLDS[name].samples, rng)
    images, labels = images[rows], labels[rows]
    if name == "mnist" and device != SAME:
        shift, severity = MNIST_DEVICES[device]
        images = shifts.apply(shift, images, severity=severity, seed=seed)[:, :1]
    return images, labels


def measure(place: Place, options: Options) -> tuple[Row, Row] | None:
    """Adapt to one site in every way; None if the time is over."""
    if options.end is not None and time.time() > options.end:
        return None
    name, device, _, seed = place
    logging.getLogger("shiftmend").setLevel(logging.ERROR)
    started = time.perf_counter()
    world = open_world(name, seed, options)
    profile = Profile.load(world.file)
    record = profile.rehearsal
    assert record is not None
    home, own = record.label_shares, WORLDS[name].method
    images, labels = draw_site(world, profile, place)
    truth = labels.bincount(minlength=len(home)).double() / len(labels)
    common: Row = {"preprocess": world.preprocess, "device": options.device, "progress": False}

    def adapt(method: Any, by: Profile, **more: Any) -> shiftmend.Adaptation:
        return shiftmend.adapt(
            world.model, images, by, method, seed=seed, calibrate=False, batch_size=world.batch_size, **common, **more
        )

    def score(model: nn.Module, inputs: Tensor = images, answers: Tensor = labels) -> float:
        scores = shiftmend.evaluate(model, (inputs, answers), **common)
        assert isinstance(scores, shiftmend.Scores)
        return round(scores.accuracy, 4)

    def measure_shares(model: nn.Module) -> float:
        found = shiftmend.shares(model, images, profile, **common)
        return round(float((torch.tensor(found.values) - truth).abs().sum()) / 2, 4)

    candidates = [own if candidate == own.name else candidate for candidate in CANDIDATES]
    result = adapt("auto", profile, candidates=candidates)
    # `auto` returns the very model that the named method does.
    free = result if result.manifest["method"]["name"] == own.name else adapt(own, profile)
    assert result.estimate is not None
    loss = record.score - score(world.model, *draw_site(world, profile, (name, device, AS_AT_HOME, seed)))
    skewed = float((truth - home).abs().sum()) / 2
    known = FRShares(steps=own.steps, shares=tuple(truth.tolist()))
    row = {
        "samples": len(labels),
        "skew": round(skewed, 4),
        "device_loss": round(loss, 4),
        "untouched": score(world.model),
        "fr, true shares": score(adapt("fr", reweight(profile, truth)).model),
        "true shares": score(adapt(known, profile).model),
        "fr-shares": score(free.model),
        "auto": score(result.model),
        "chosen": result.manifest["method"]["name"],
        "before": result.estimate.before.to_json() if result.estimate.before else None,
        "after": result.estimate.after.to_json() if result.estimate.after else None,
        "shares_error": {"untouched": measure_shares(world.model), "fr-shares": measure_shares(free.model)},
        "told": result.changed,
        "truth": tell_truth(loss, skewed) or "grey",
        "seconds": round(time.perf_counter() - started, 1),
    }
    return row, world.manifest


def list_places(name: str, seeds: Sequence[int]) -> list[Place]:
    plan = WORLDS[name]
    every = [(name, device, case, seed) for seed in seeds for device in (SAME, *plan.devices) for case in plan.cases]
    # The mixtures that all worlds have come first, if the time runs out.
    return sorted(every, key=lambda place: seeds.index(place[3]))


def run(names: Sequence[str], seeds: Sequence[int] | None, options: Options, out: Path, workers: int) -> None:
    files = {name: RowFile(out / f"{name}.json", KEY) for name in names}
    methods = "spawn" if options.device != "cpu" else "fork"
    with ProcessPoolExecutor(workers, get_context(methods), torch.set_num_threads, (1,)) as pool:
        for name in names:
            for seed in seeds or WORLDS[name].seeds:
                if options.end is not None and time.time() > options.end:
                    return
                started = time.time()
                rehearse(name, seed, options, pool if workers > 1 else None)
                print(f"{name}, seed {seed}: ready after {time.time() - started:.0f} s", flush=True)
                missing = [place for place in list_places(name, [seed]) if not files[name].has(*place)]
                waiting = {pool.submit(measure, place, options): place for place in missing}
                for future in as_completed(waiting):
                    if (found := future.result()) is not None:
                        print(describe(files[name].add(waiting[future], *found)), flush=True)


# ---- the page


def _percent(value: float) -> str:
    return f"{100 * value:.1f}"


def _format(estimate: Row | None) -> str:
    if estimate is None or estimate["value"] is None:
        return "–"
    ends = "" if estimate["low"] is None else f" ({_percent(estimate['low'])} to {_percent(estimate['high'])})"
    return f"{_percent(estimate['value'])}{ends}"


def describe(row: Row) -> str:
    return (
        f"{row['world']}, {row['device']}, {row['case']}, seed {row['seed']}: untouched {_percent(row['untouched'])}, "
        f"true shares {_percent(row['true shares'])}, fr-shares {_percent(row['fr-shares'])}, "
        f"auto {_percent(row['auto'])} by {row['chosen']}, told {_format(row['after'])}, {row['told']} "
        f"({row['truth']}), {row['seconds']:.0f} s"
    )


INTRODUCTION = """# Other class shares

Made by `benchmarks/label_shift.py` from the rows in `results/label-shift` and from nothing else. Sites are drawn with
class shares of their own, behind the device of home and behind others. *Skew* is the total variation of the shares
from home. *Unknown* is `fr-shares`, *true shares* the same method given the shares that no site knows, *FR* is FR with
the profile for them. *Balanced* is `fr-shares` on data with home's shares, of the same size where classes allow it.
*Told* is the accuracy that `adapt` tells of what it returns. *Shares off* is the total variation of estimated shares
from the true ones, by the model of `fr-shares`. Candidates are the untouched model, match-moments, AdaBN, FR and
`fr-shares`. EMNIST is rebuilt, CIFAR-10-C regenerated. All rows are from before two rules of `auto`: no candidate for
shares farther from home than any that were rehearsed, and candidates that force the shares of home have to be clearly
better where others were found.
"""


def write_page(rows: Sequence[Row]) -> str:
    lines = [INTRODUCTION]
    worlds = list(dict.fromkeys(row["world"] for row in rows))
    for world in worlds:
        lines += [f"## {world}", "", *_summarise([row for row in rows if row["world"] == world])]
    for world in worlds:
        own = [row for row in rows if row["world"] == world]
        balanced = {(row["device"], row["seed"]): row["fr-shares"] for row in own if row["case"] == AS_AT_HOME}
        lines += [
            f"<details><summary>{world}: every site</summary>",
            "",
            "| device | classes | seed | samples | skew | untouched | unknown | true shares | FR | balanced | auto "
            "| by | told | what changed | true | shares off |",
            "|" + "---|" * 16,
        ]
        for row in sorted(own, key=lambda row: (row["device"], row["seed"], CASES.index(row["case"]))):
            even = balanced.get((row["device"], row["seed"]))
            lines.append(
                f"| {row['device']} | {row['case']} | {row['seed']} | {row['samples']} | {row['skew']:.2f} | "
                f"{_percent(row['untouched'])} | {_percent(row['fr-shares'])} | {_percent(row['true shares'])} | "
                f"{_percent(row['fr, true shares'])} | {'–' if even is None else _percent(even)} | "
                f"{_percent(row['auto'])} | {name_candidate(row['chosen'])} | {_format(row['after'])} | "
                f"{row['told'] or 'not told'} | {row['truth']} | {row['shares_error']['fr-shares']:.3f} |"
            )
        lines += ["", "</details>", ""]
    return "\n".join(lines)


def _summarise(rows: Sequence[Row]) -> list[str]:
    """Return the aims and what was measured, of one world."""
    alone = [row for row in rows if row["device"] == SAME]
    mendable = [row for row in rows if row["device"] not in (SAME, *UNMENDABLE)]
    told = [row for row in rows if row["after"] is not None and row["after"]["value"] is not None]
    errors = [abs(row["after"]["value"] - row["auto"]) for row in told]
    ends = [row for row in told if row["after"]["low"] is not None]
    held = [row["after"]["low"] <= row["auto"] <= row["after"]["high"] for row in ends]
    clear = [row for row in rows if row["truth"] != "grey"]
    answered = [row for row in clear if row["told"] is not None]
    right = [row["told"] == row["truth"] for row in answered]
    off = [row["shares_error"]["fr-shares"] for row in (*alone, *mendable) if row["case"] == "dirichlet 1"]
    lines = ["| figure | aim | measured |", "|---|---|---|"]
    for name, words in (("true shares", "the same method given the true shares"), ("fr, true shares", "FR given them")):
        apart = [row["fr-shares"] - row[name] for row in mendable]
        if apart:
            lines.append(
                f"| unknown shares less {words}, points | -1 or more | mean {100 * mean(apart):+.1f}, worst "
                f"{100 * min(apart):+.1f}; {sum(one >= -0.01 for one in apart)} of {len(apart)} within 1 |"
            )
    for name, own in (("where only the shares changed", alone), ("anywhere", rows)):
        if own:
            lost = max(0.0, max(row["untouched"] - row["auto"] for row in own))
            lines.append(f"| largest loss of `auto` {name}, points | 1 | {100 * lost:.1f} ({len(own)} sites) |")
    if off:
        aim = 0.1 if rows[0]["world"] == "emnist-da" else 0.05
        lines.append(
            f"| shares off after mending, Dirichlet 1 | {aim:.2f} | mean {mean(off):.3f}, largest {max(off):.3f} |"
        )
    lines.append(
        f"| device, patients, both or neither | 90 % | {sum(right)} of {len(right)} that were answered right; "
        f"{len(clear) - len(answered)} not answered, {len(rows) - len(clear)} in the grey zone |"
    )
    if errors:
        lines.append(
            f"| error of the accuracy that is told, points; told | 3; 70 % | {100 * mean(errors):.1f}, largest "
            f"{100 * max(errors):.1f}; {len(told)} of {len(rows)}; {sum(held)} of {len(held)} intervals hold |"
        )
    return [*lines, ""]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("worlds", nargs="*", choices=[*WORLDS, []], help="none makes the page alone")
    parser.add_argument("--data-root", type=Path)
    parser.add_argument("--models", type=Path, default=Path("bench"), help="folder with source models of benchmarks")
    parser.add_argument("--seeds", type=int, nargs="*")
    parser.add_argument("--profiles", type=Path, default=Path("bench/label-shift"), help="rehearsed profiles lie here")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--time-limit", type=float, metavar="MINUTES", help="no site begins after so long")
    parser.add_argument("--out", type=Path, default=Path("results/label-shift"))
    parser.add_argument("--page", type=Path)
    given = parser.parse_args(arguments)
    logging.getLogger("shiftmend").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    end = None if given.time_limit is None else time.time() + 60 * given.time_limit
    device = str(resolve_device(given.device))
    options = Options(given.data_root, given.models, given.profiles, device, end)
    run(given.worlds, given.seeds, options, given.out, given.workers)
    if given.page is not None:
        rows = [row for name in WORLDS for row in RowFile(given.out / f"{name}.json", KEY).rows]
        write_atomically(given.page, write_page(rows).encode())


if __name__ == "__main__":
    main()
