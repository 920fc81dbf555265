"""What happens where classes have other shares than at home, behind the same device and behind another?

    python benchmarks/other_shares.py mnist --data-root DATA --seeds 0 --page docs/results/other-shares.md
    python benchmarks/other_shares.py emnist --data-root DATA
    python benchmarks/other_shares.py usps --data-root DATA

A small BatchNorm network is trained on MNIST or EMNIST at half resolution, profiled, and rehearsed on held-out images.
Sites are drawn from further images without replacement, with class shares of their own, behind the same device or
behind another. At each of them: the untouched model; FR with the profile of home, and with the profile for the true
shares, which no site knows; `fr-shares`, which finds them; and what `adapt` returns without options, with its estimate.
`usps` takes the model of MNIST to USPS as it is, another device and other shares at once. A run that was cut off goes
on. BUFR is no candidate here, because a rehearsal with it takes an hour on one core.
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import shiftmend
from bench_models import RowFile
from shiftmend import shifts
from shiftmend.adaptation.result import environment
from shiftmend.profiles.fingerprints import weights
from shiftmend.profiles.profile import Profile
from shiftmend.profiles.rehearsal import name_candidate
from shiftmend.profiles.shares import reweight
from shiftmend.research.datasets import digits
from shiftmend.utils.files import write_atomically

KEY = ("world", "device", "case", "seed")
CASES = (
    "as at home",
    "dirichlet-10",
    "dirichlet-1",
    "dirichlet-0.1",
    "tail-10",
    "tail-100",
    "one missing",
    "half missing",
)
DEVICES: dict[str, tuple[str, int | None] | None] = {
    "same": None,
    "brightness": ("mnist-c/brightness", None),
    "stripe": ("emnist-da/stripe", None),
    "contrast": ("cifar-c/contrast", 5),
    "impulse noise": ("cifar-c/impulse_noise", 5),
    "oranges": ("emnist-da/oranges", None),
}
CANDIDATES = ("match-moments", "adabn", "fr-shares", "fr")
SITE_SAMPLES = 2000
LOSS_OF_A_DEVICE = 0.03
"""Loss of the untouched model, at home's shares, from which on a device counts as changed."""
SHARES_OF_OTHER_PATIENTS = 0.1
"""Total variation of the class shares from which on patients count as others."""
WORLDS = {"mnist": (digits.mnist, 10), "emnist": (digits.emnist, 47), "usps": (digits.mnist, 10)}

Row = dict[str, Any]


class Network(nn.Sequential):
    """Three convolutions and a hidden layer, all with BatchNorm; images `[N, 1, 14, 14]`."""

    def __init__(self, classes: int) -> None:
        def block(inputs: int, outputs: int, stride: int) -> nn.Module:
            convolution = nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1)
            return nn.Sequential(convolution, nn.BatchNorm2d(outputs), nn.ReLU())

        hidden = nn.Sequential(nn.Flatten(), nn.Linear(48 * 16, 96), nn.BatchNorm1d(96), nn.ReLU())
        super().__init__(block(1, 16, 2), block(16, 32, 2), block(32, 48, 1), hidden, nn.Linear(96, classes))


def preprocess(images: Tensor) -> Tensor:
    """Scale bytes to -1 to 1, and average 2 x 2 pixels."""
    return nn.functional.avg_pool2d(images.float() / 127.5 - 1, 2)


@dataclass(frozen=True)
class World:
    """A trained model with its rehearsed profile, and images from which sites are drawn."""

    model: nn.Module
    profile: Profile
    images: Tensor
    labels: Tensor
    manifest: Row


def open_world(name: str, root: Path, seed: int, folder: Path) -> World:
    """Train, profile and rehearse; a rehearsal that was killed goes on."""
    load, classes = WORLDS[name]
    split = load("train", root)
    assert split.labels is not None
    order = torch.randperm(len(split.labels), generator=torch.Generator().manual_seed(seed))
    images, labels = split.images[order], split.labels[order].long()
    source, held_out = (10_000, 3000) if classes == 10 else (30_000, 6000)
    torch.manual_seed(seed)
    model = Network(classes)
    optimiser = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9, weight_decay=5e-4)
    for _ in range(4):
        for rows in torch.randperm(source).split(128):
            optimiser.zero_grad()
            nn.functional.cross_entropy(model(preprocess(images[rows])), labels[rows]).backward()
            optimiser.step()
    model.eval()
    # USPS has the model of MNIST, so that one rehearsal serves both.
    path = folder / f"{'mnist' if name == 'usps' else name}-{seed}-{weights(model)[:8]}.profile"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        profile = shiftmend.profile(model, images[:source], preprocess=preprocess, progress=False)
        home = images[source : source + held_out], labels[source : source + held_out]
        shiftmend.rehearse(
            model,
            home,
            profile,
            candidates=CANDIDATES,
            preprocess=preprocess,
            checkpoint=path.with_suffix(".json"),
            progress=False,
        ).save(path)
    versions = {key: value for key, value in environment(torch.device("cpu")).items() if key != "platform"}
    manifest = {"environment": versions, "world": name, "seed": seed, "weights_sha256": weights(model)}
    manifest |= {"source_samples": source, "home_samples": held_out, "candidates": list(CANDIDATES)}
    return World(model, Profile.load(path), images[source + held_out :], labels[source + held_out :], manifest)


def draw_shares(case: str, home: np.ndarray[Any, Any], rng: np.random.Generator) -> np.ndarray[Any, Any]:
    """Return the class shares of a case."""
    classes = len(home)
    order, wanted = rng.permutation(classes), home.copy()
    if case.startswith("dirichlet-"):
        wanted = rng.dirichlet(np.full(classes, float(case.partition("-")[2])))
    elif case.startswith("tail-"):
        wanted[order] = np.geomspace(1, 1 / float(case.partition("-")[2]), classes)
    elif case == "one missing":
        wanted[order[0]] = 0
    elif case == "half missing":
        wanted[order[: classes // 2]] = 0
    return wanted / wanted.sum()


def draw_site(world: World, case: str, seed: int) -> tuple[Tensor, Tensor]:
    """Draw samples without replacement; classes that run out give fewer."""
    record = world.profile.rehearsal
    assert record is not None
    rng = np.random.default_rng([seed, CASES.index(case)])
    shares = draw_shares(case, record.label_shares.numpy(), rng)
    members = [rng.permutation(np.flatnonzero(world.labels.numpy() == k)) for k in range(len(shares))]
    places = np.concatenate([own[: round(share * SITE_SAMPLES)] for own, share in zip(members, shares, strict=True)])
    rows = torch.from_numpy(rng.permutation(places))
    return world.images[rows], world.labels[rows]


def measure(world: World, images: Tensor, labels: Tensor, seed: int, at_home: float) -> Row:
    """Adapt in every way; `at_home` is the accuracy of the untouched model behind this device at home's shares."""
    record = world.profile.rehearsal
    assert record is not None
    home = record.label_shares
    truth = labels.bincount(minlength=len(home)).double() / len(labels)

    def adapt(method: str, profile: Profile) -> shiftmend.Adaptation:
        return shiftmend.adapt(
            world.model, images, profile, method, preprocess=preprocess, seed=seed, calibrate=False, progress=False
        )

    def score(model: nn.Module) -> float:
        scores = shiftmend.evaluate(model, (images, labels), preprocess=preprocess, progress=False)
        assert isinstance(scores, shiftmend.Scores)
        return round(scores.accuracy, 4)

    def measure_shares(model: nn.Module) -> float:
        found = shiftmend.shares(model, images, world.profile, preprocess=preprocess, progress=False)
        return round(float((torch.tensor(found.values) - truth).abs().sum()) / 2, 4)

    result = adapt("auto", world.profile)
    free = adapt("fr-shares", world.profile)
    assert result.estimate is not None
    loss, skewed = record.score - at_home, float((truth - home).abs().sum()) / 2
    return {
        "samples": len(labels),
        "skew": round(skewed, 4),
        "device_loss": round(loss, 4),
        "untouched": score(world.model),
        "fr": score(adapt("fr", world.profile).model),
        "known shares": score(adapt("fr", reweight(world.profile, truth)).model),
        "fr-shares": score(free.model),
        "auto": score(result.model),
        "chosen": result.manifest["method"]["name"],
        "before": result.estimate.before.to_json() if result.estimate.before else None,
        "after": result.estimate.after.to_json() if result.estimate.after else None,
        "shares_error": {"untouched": measure_shares(world.model), "fr-shares": measure_shares(free.model)},
        "told": result.changed,
        "truth": tell_truth(loss, skewed),
    }


def tell_truth(loss: float, skewed: float) -> str:
    """Return what changed: device, patients, both or neither; `grey` between the two limits of each."""
    device = loss >= LOSS_OF_A_DEVICE
    patients = skewed >= SHARES_OF_OTHER_PATIENTS
    if (not device and loss > LOSS_OF_A_DEVICE / 3) or (not patients and skewed > SHARES_OF_OTHER_PATIENTS / 2):
        return "grey"
    return {(True, True): "both", (True, False): "device", (False, True): "patients", (False, False): "neither"}[
        device, patients
    ]


def run(options: argparse.Namespace, file: RowFile) -> None:
    for seed in options.seeds:
        world = open_world(options.world, options.data_root, seed, options.profiles)
        if options.world == "usps":
            if not file.has("usps", "usps", "as it is", seed):
                split = digits.usps("test", options.data_root)
                assert split.labels is not None
                row = measure(world, _pad(split.images), split.labels.long(), seed, 0.0)
                print(describe(file.add(("usps", "usps", "as it is", seed), row, world.manifest)), flush=True)
            continue
        for device in options.devices:
            shift = DEVICES[device]
            losses: float | None = None
            for case in options.cases:
                if file.has(options.world, device, case, seed):
                    continue
                if losses is None:
                    images, labels = draw_site(world, "as at home", seed)
                    shifted = _apply(shift, images, seed)
                    scores = shiftmend.evaluate(world.model, (shifted, labels), preprocess=preprocess, progress=False)
                    assert isinstance(scores, shiftmend.Scores)
                    losses = scores.accuracy
                images, labels = draw_site(world, case, seed)
                row = measure(world, _apply(shift, images, seed), labels, seed, losses)
                print(describe(file.add((options.world, device, case, seed), row, world.manifest)), flush=True)


def _pad(images: Tensor) -> Tensor:
    """Bring images of USPS to 28 x 28 pixels."""
    if images.shape[-1] == 28:
        return images
    enlarged = nn.functional.interpolate(images.float(), size=(20, 20), mode="bilinear", antialias=True)
    return nn.functional.pad(enlarged, (4, 4, 4, 4)).round().clamp(0, 255).byte()


def _apply(shift: tuple[str, int | None] | None, images: Tensor, seed: int) -> Tensor:
    if shift is None:
        return images
    shifted = shifts.apply(shift[0], images, severity=shift[1], seed=seed)
    return shifted[:, :1]


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
        f"fr {_percent(row['fr'])}, known {_percent(row['known shares'])}, fr-shares {_percent(row['fr-shares'])}, "
        f"auto {_percent(row['auto'])} by {row['chosen']}, told {_format(row['after'])}, {row['told']} ({row['truth']})"
    )


# ---- the page


def write_page(rows: Sequence[Row]) -> str:
    lines = [
        "# Other class shares",
        "",
        "Made by `benchmarks/other_shares.py` from `results/other-shares.json` and from nothing else.",
        "A small BatchNorm network on MNIST, or on EMNIST (rebuilt), at half resolution; 2,000 images at a site where",
        "there are as many. *Known shares* is FR with the profile for the true shares, which no site knows. *Skew* is",
        "the total variation of the class shares from home. *Shares off* is that of the estimated shares from the true",
        "ones, by the model that `fr-shares` returns. A number in *told* is the accuracy that `adapt` tells of what it",
        "returns. Candidates are the untouched model, match-moments, AdaBN, FR and `fr-shares`.",
        "Rows of impulse noise were measured before `auto` asked whether shares explain the features; two of its seven",
        "sites with other shares would not be told now.",
        "",
        *_summarise(rows),
    ]
    for world in dict.fromkeys(row["world"] for row in rows):
        own = [row for row in rows if row["world"] == world]
        lines += [
            f"## {world}, seeds {', '.join(map(str, sorted({row['seed'] for row in own})))}",
            "",
            "| device | classes | seed | skew | untouched | fr | known shares | fr-shares | auto | by | told "
            "| what changed | true | shares off |",
            "|" + "---|" * 14,
        ]
        lines += [
            f"| {row['device']} | {row['case']} | {row['seed']} | {row['skew']:.2f} | {_percent(row['untouched'])} | "
            f"{_percent(row['fr'])} | {_percent(row['known shares'])} | {_percent(row['fr-shares'])} | "
            f"{_percent(row['auto'])} | {name_candidate(row['chosen'])} | {_format(row['after'])} | "
            f"{row['told'] or 'cannot be told'} | {row['truth']} | {row['shares_error']['fr-shares']:.3f} |"
            for row in own
        ]
        lines.append("")
    return "\n".join(lines)


def _summarise(rows: Sequence[Row]) -> list[str]:
    """Return the targets and what was measured."""
    drawn = [row for row in rows if row["world"] != "usps"]
    alone = [row for row in drawn if row["device"] == "same"]
    mendable = [row for row in drawn if row["device"] not in ("same", "oranges")]
    lost = max(row["untouched"] - row["auto"] for row in alone)
    worst = max(row["untouched"] - row["auto"] for row in drawn)
    behind = [row["known shares"] - row["fr-shares"] for row in mendable]
    told = [row for row in drawn if row["after"] is not None and row["after"]["value"] is not None]
    errors = [abs(row["after"]["value"] - row["auto"]) for row in told]
    held = [
        row["after"]["low"] <= row["auto"] <= row["after"]["high"] for row in told if row["after"]["low"] is not None
    ]
    clear = [row for row in drawn if row["truth"] != "grey"]
    answered = [row for row in clear if row["told"] is not None]
    right = [row["told"] == row["truth"] for row in answered]
    lines = ["| figure | aim | measured |", "|---|---|---|"]
    lines.append(
        f"| `fr-shares` less FR with known shares, points, devices that it can mend | -1 or more | mean "
        f"{-100 * mean(behind):+.1f}, worst {-100 * max(behind):+.1f} ({len(behind)} sites) |"
    )
    only = f"{max(0.0, 100 * lost):.1f} ({len(alone)} sites)"
    lines.append(f"| largest loss of `auto` where only the shares changed, points | 1 | {only} |")
    lines.append(f"| largest loss of `auto` anywhere, points | – | {max(0.0, 100 * worst):.1f} ({len(drawn)} sites) |")
    for world, aim in (("mnist", 0.05), ("emnist", 0.10)):
        off = [
            row["shares_error"]["fr-shares"]
            for row in (*alone, *mendable)
            if row["world"] == world and row["case"] == "dirichlet-1"
        ]
        if off:
            lines.append(
                f"| shares off after mending, {world}, Dirichlet 1 | {aim:.2f} | mean {mean(off):.3f}, largest "
                f"{max(off):.3f} ({len(off)}) |"
            )
    lines.append(
        f"| device, patients, both or neither, told right | 90 % | {sum(right)} of {len(right)} that were answered; "
        f"{len(clear) - len(answered)} were not, {len(drawn) - len(clear)} are grey |"
    )
    lines.append(
        f"| error of the accuracy that is told, points; told | 3; 70 % | {100 * mean(errors):.1f}, largest "
        f"{100 * max(errors):.1f}; {len(told)} of {len(drawn)}; {sum(held)} of {len(held)} intervals hold |"
    )
    return [*lines, ""]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("world", choices=WORLDS)
    parser.add_argument("--data-root", type=Path)
    parser.add_argument("--seeds", type=int, nargs="*", default=[0])
    parser.add_argument("--devices", nargs="*", default=list(DEVICES), choices=DEVICES)
    parser.add_argument("--cases", nargs="*", default=list(CASES), choices=CASES)
    parser.add_argument("--profiles", type=Path, default=Path("bench/other-shares"), help="rehearsed profiles lie here")
    parser.add_argument("--out", type=Path, default=Path("results/other-shares.json"))
    parser.add_argument("--page", type=Path)
    options = parser.parse_args(arguments)
    logging.getLogger("shiftmend").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    file = RowFile(options.out, KEY)
    run(options, file)
    if options.page is not None:
        write_atomically(options.page, write_page(file.rows).encode())


if __name__ == "__main__":
    main()
