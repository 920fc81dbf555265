"""The benchmarks, against tables of the published facts that are written out here, and on small files."""

from __future__ import annotations

import gzip
import json
import os
import sys
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from data_layouts import python2_pickle, random_images, rng, write_idx, write_png
from torch import Tensor

from shiftmend import shifts
from shiftmend.errors import DataError
from shiftmend.inputs.images import Split
from shiftmend.methods import METHODS
from shiftmend.research.bench import published
from shiftmend.research.bench.benchmark import CLEAN, Benchmark, FewShot, Offline, Online, Rehearsed, Setting
from shiftmend.research.bench.recipes import AUGMENTATIONS, Recipe, build_untrained
from shiftmend.research.bench.resources import identify_data
from shiftmend.research.bench.suite import BENCHMARKS, find, list_problems, mnist_m
from shiftmend.research.bench.suite.usps import enlarge
from shiftmend.research.datasets.digits import EMNIST_SHIFTS, emnist, mnist

PUBLISHED = [name for name in BENCHMARKS if name not in ("digits", "usps")]

OURS = ("fr-sliced", "bufr-sliced")
"""Rows that nobody has published; their rates are those of the methods that they vary."""

TO_THE_LETTER = ("fr-paper", "bufr-paper")
"""Rows with the loss as the paper writes it; published are figures of the released code alone."""

OWN_METHODS = {"bufr-im", "match-mean", "match-moments", "match-histogram", "neo", "coral", "fr-shares", "match-fr"}
PUBLISHED_METHODS = set(METHODS) - OWN_METHODS
"""Methods of the paper and of its reference implementation."""

# ---- facts of the paper and of its reference implementation: rate, epochs (AdaBN: passes), and what else there is

TARGET: dict[str, dict[str, dict[str, tuple[Any, ...]]]] = {
    "mnist-c": {
        "offline": {
            "pl": (0.01, 150),
            "shot-im": (0.1, 150),
            "shot": (0.01, 30, {"weight": 0.1}),
            "fr": (0.1, 150),
            "bufr": (1.0, 30, {"decay": 1.5}),
            "fr-sliced": (0.1, 150),
            "bufr-sliced": (1.0, 30, {"decay": 1.5}),
            "target-supervised": (0.1, 150),
        }
    },
    "emnist-da": {
        "offline": {
            "pl": (0.01, 150),
            "shot-im": (0.1, 150),
            "shot": (0.1, 150, {"weight": 0.1}),
            "bnm": (0.01, 150),
            "bnm-im": (0.01, 150, {"weight": 10.0}),
            "full-gauss": (0.001, 150),
            "fr": (1.0, 150),
            "bufr": (1.0, 30, {"decay": 1.5}),
            "fr-sliced": (1.0, 150),
            "bufr-sliced": (1.0, 30, {"decay": 1.5}),
            "fr-paper": (0.01, 150),
            "bufr-paper": (0.01, 30, {"decay": 1.5}),
            "target-supervised": (0.1, 150),
        }
    },
    "cifar-10-c": {
        "offline": {
            "pl": (1e-3, 150),
            "shot-im": (1e-3, 150),
            "tent": (1e-3, 150),
            "fr": (1e-3, 150),
            "fr-features": (1e-3, 150, {"align": ("features",)}),
            "fr-one-sided": (1e-3, 150, {"divergence": "kl-target-source"}),
            "bufr": (0.1, 30, {"decay": 5.0}),
            "fr-sliced": (1e-3, 150),
            "bufr-sliced": (0.1, 30, {"decay": 5.0}),
            "target-supervised": (1e-3, 150, {"weight_decay": 5e-4}),
        },
        "online": {"shot-im": (1e-3,), "tent": (1e-3,), "fr": (1e-2,)},
    },
    "camelyon17": {
        "offline": {
            "pl": (1e-4, 15),
            "shot-im": (1e-4, 15),
            "fr": (1e-5, 15),
            "bufr": (1e-5, 15, {"decay": 5.0}),
        }
    },
    "visda-c": {
        "offline": {
            "shot": (1e-4, 15, {"weight": 0.3}),
            "fr": (1e-4, 15),
            "bufr": (1e-4, 3, {"decay": 5.0}),
        }
    },
}
TARGET["mnist-m"] = {"offline": TARGET["mnist-c"]["offline"] | {"shot": (0.1, 30, {"weight": 0.1})}}
TARGET["cifar-100-c"] = {
    "offline": TARGET["cifar-10-c"]["offline"],
    "online": {"shot-im": (1e-3,), "tent": (1e-2,), "fr": (1e-1,)},
}
FEW_SHOT = {"emnist-da": (5, 10, 20, 50), "camelyon17": (5, 10, 50, 500)}
BATCH = {
    "mnist-c": 256,
    "mnist-m": 256,
    "emnist-da": 256,
    "cifar-10-c": 200,
    "cifar-100-c": 200,
    "camelyon17": 200,
    "visda-c": 64,
}
# network, classes, rate, epochs, weight decay, batch, augmentation, schedule
SOURCE = {
    "mnist-c": ("digit-cnn", 10, 0.1, 150, 0.0, 256, "rotate-10", "cosine"),
    "mnist-m": ("digit-cnn", 10, 0.1, 150, 0.0, 256, "rotate-10", "cosine"),
    "emnist-da": ("digit-cnn", 47, 0.1, 150, 0.0, 256, "none", "cosine"),
    "cifar-10-c": ("resnet18-cifar", 10, 0.1, 200, 5e-4, 128, "crop-flip", "cosine"),
    "cifar-100-c": ("resnet18-cifar", 100, 0.1, 200, 5e-4, 128, "crop-flip-rotate-15", "cosine"),
    "camelyon17": ("resnet18", 2, 0.01, 10, 1e-3, 128, "none", "cosine"),
    "visda-c": ("resnet101", 12, 1e-3, 15, 0.0, 64, "crop-flip", "inverse"),
}
IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
NORMALISED = {
    "mnist-c": ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5)),
    "mnist-m": ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5)),
    "emnist-da": ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5)),
    "cifar-10-c": ((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)),
    "cifar-100-c": ((0.50708, 0.48655, 0.44092), (0.26733, 0.25644, 0.27615)),
    "camelyon17": IMAGENET,
    "visda-c": IMAGENET,
}
SHIFTS = {
    "mnist-c": "brightness canny_edges dotted_line fog glass_blur impulse_noise motion_blur rotate scale shear "
    "shot_noise spatter stripe translate zigzag",
    "mnist-m": "mnist-m",
    "emnist-da": "bricks crystals dotted_line fog gaussian_blur grass impulse_noise inverse oranges shot_noise sky "
    "stripe zigzag",
    "cifar-10-c": "brightness contrast defocus_blur elastic_transform fog frost gaussian_blur gaussian_noise "
    "glass_blur impulse_noise jpeg_compression motion_blur pixelate saturate shot_noise snow spatter speckle_noise "
    "zoom_blur",
    "camelyon17": "hospital-0 hospital-1 hospital-2 hospital-4",
}
SHIFTS["cifar-100-c"] = SHIFTS["cifar-10-c"]
GROUPS = {
    "mnist-c": {"without translate": 14},
    "emnist-da": {"without backgrounds": 8, "severe": 1, "mild": 1},
}


def as_published(facts: tuple[Any, ...], method: str) -> dict[str, Any]:
    rate, *rest = facts
    epochs = "epochs_per_block" if method == "bufr" else "epochs"
    more = rest[1] if len(rest) > 1 else {}
    return {"learning_rate": rate, **({epochs: rest[0]} if rest else {}), **more}


@pytest.mark.parametrize("name", PUBLISHED)
def test_rates_and_epochs_are_the_published_ones(name: str) -> None:
    benchmark = find(name)
    for protocol, rows in TARGET[name].items():
        found = dict(benchmark.settings[protocol])
        assert found.pop("source-only") == Setting("source-only")
        assert found.pop("adabn") == Setting("adabn", {} if protocol == "online" else {"passes": 2})
        assert set(found) == set(rows)
        for row, facts in rows.items():
            method = row.partition("-")[0] if row.startswith(("fr-", "bufr-")) else row
            source, preset = "shot" if row == "shot" else "plain", "reference"
            preset = "sliced" if row in OURS else "paper" if row in TO_THE_LETTER else preset
            assert found[row] == Setting(method, as_published(facts, method), source, preset), row


@pytest.mark.parametrize("name", PUBLISHED)
def test_protocols_are_the_published_ones(name: str) -> None:
    benchmark = find(name)
    shots = {f"few-shot-{n}": n for n in FEW_SHOT.get(name, ())}
    own = {protocol for protocol, found in benchmark.protocols.items() if isinstance(found, Rehearsed)}
    assert set(benchmark.protocols) - own == {"offline", *shots, *(["online"] if "cifar" in name else [])}
    offline = benchmark.protocols["offline"]
    assert isinstance(offline, Offline)
    assert (offline.batch_size, offline.temperature) == (BATCH[name], 0.01)
    # MNIST's images to adapt to and to score on are two sets; elsewhere the supervised bound divides one
    assert offline.supervised_parts == (None if name.startswith("mnist") else (0.8, 0.1, 0.1))
    for protocol, number in shots.items():
        found = benchmark.protocols[protocol]
        assert isinstance(found, FewShot)
        batch = 235 if name == "emnist-da" else min(2 * number, 200)
        assert (found.per_class, found.batch_size, found.temperature) == (number, batch, 0.01)
        for row, setting in benchmark.settings[protocol].items():
            assert setting == benchmark.settings["offline"][row]
    if "cifar" in name:
        online = benchmark.protocols["online"]
        assert isinstance(online, Online)
        assert (online.batch_size, online.temperature) == (200, 0.05)
    assert benchmark.seeds == (123, 234, 345, 456, 567)


@pytest.mark.parametrize("name", [*PUBLISHED, "usps"])
def test_how_often_and_how_exactly_is_as_documented(name: str) -> None:
    """Nothing of this is published, but it decides what a figure is."""
    for protocol, found in find(name).protocols.items():
        if protocol in ("online", "rehearsed"):
            often = 1
        elif protocol.startswith("few-shot") and name == "emnist-da":
            often = 30
        else:
            often = 10 if "cifar" in name else 5
        assert found.score_every == often
        assert found.autocast == (protocol != "online" and name not in ("camelyon17", "visda-c"))


@pytest.mark.parametrize("name", PUBLISHED)
def test_source_models_are_trained_as_published(name: str) -> None:
    benchmark = find(name)
    network, classes, rate, epochs, decay, batch, augmentation, schedule = SOURCE[name]
    plain = Recipe(
        network=network,
        options={"classes": classes},
        epochs=epochs,
        learning_rate=rate,
        momentum=0.9,
        weight_decay=decay,
        batch_size=batch,
        augmentation=augmentation,
        schedule=schedule,
        nesterov=False,
        pretrained="weights/resnet101-imagenet.safetensors" if name == "visda-c" else None,
        autocast="cifar" in name,
    )
    expected = {"plain": plain}
    if network == "digit-cnn":
        normed = {"classes": classes, "weight_norm": True}
        expected["shot"] = replace(plain, label_smoothing=0.1, options=normed)
    if name == "visda-c":
        smooth = replace(plain, label_smoothing=0.1)
        expected |= {"plain-balanced": plain, "plain-scratch": replace(plain, pretrained=None), "shot": smooth}
        expected |= {"shot-balanced": smooth, "shot-scratch": replace(smooth, pretrained=None)}
    assert benchmark.sources == expected


@pytest.mark.parametrize("name", PUBLISHED)
def test_images_are_normalised_as_published(name: str) -> None:
    mean, deviation = (np.array(values)[None, :, None, None] for values in NORMALISED[name])
    images = random_images(2, 3, 5, 4)
    seen = find(name).preprocess(torch.from_numpy(images))
    np.testing.assert_allclose(seen.numpy(), (images / 255 - mean) / deviation, rtol=1e-4, atol=1e-5)
    if SOURCE[name][0] == "digit-cnn":
        grey = torch.from_numpy(images[:, :1])
        assert torch.equal(find(name).preprocess(grey), find(name).preprocess(grey.repeat(1, 3, 1, 1)))


@pytest.mark.parametrize("name", SHIFTS)
def test_shifts_and_groups(name: str) -> None:
    benchmark = find(name)
    assert benchmark.shifts == tuple(SHIFTS[name].split())
    assert {group: len(members) for group, members in benchmark.groups.items()} == GROUPS.get(name, {})
    if name == "emnist-da":
        assert benchmark.groups["severe"] == ("sky",)
        assert benchmark.groups["mild"] == ("shot_noise",)
        left_out = {"bricks", "crystals", "grass", "oranges", "sky"}
        assert set(benchmark.groups["without backgrounds"]) == set(benchmark.shifts) - left_out
    if name == "mnist-c":
        assert "translate" not in benchmark.groups["without translate"]


@pytest.mark.parametrize("name", PUBLISHED)
def test_every_published_cell_has_its_name_here(name: str) -> None:
    """Else it would be missing beside ours for want of a common name."""
    benchmark = find(name)
    rows = {*benchmark.shifts, *benchmark.groups, "all", *benchmark.clean_sets}
    others = {"dann", "uda-ss"}  # quoted by the paper, run by nobody here
    tables = json.loads((resources.files("shiftmend.research.bench") / "paper" / f"{name}.json").read_text())
    for source in ("paper", "paper-elsewhere", "re-run"):
        for protocol, metrics in tables.get(source, {}).items():
            if protocol == "few-shot-400":  # all there are: that is the offline table
                continue
            for metric, methods in metrics.items():
                assert set(methods) - others <= set(benchmark.settings[protocol]), (source, protocol)
                for method, figures in methods.items():
                    assert set(figures) <= rows, (source, protocol, method)
                    for shift in figures:
                        assert published.figure(name, protocol, metric, method, shift, source) is not None


@pytest.mark.parametrize("name", PUBLISHED)
def test_every_row_here_is_published_somewhere(name: str) -> None:
    benchmark = find(name)
    where = {"mnist-m": "mnist-m", "visda-c": "photographs"}.get(name, "all")
    for protocol, settings in benchmark.settings.items():
        if isinstance(benchmark.protocols[protocol], Rehearsed):
            continue
        for method in settings:
            figure = published.figure(name, protocol, "accuracy", method, where)
            ours_alone = name == "emnist-da" and protocol.startswith("few-shot") and method == "adabn"
            assert (figure is None) == (ours_alone or method in (*OURS, *TO_THE_LETTER)), (protocol, method)
    assert published.figure(name, "offline", "accuracy", "source-only", CLEAN) is not None


@pytest.mark.parametrize("name", BENCHMARKS)
def test_every_definition_adds_up(name: str) -> None:
    benchmark = find(name)
    assert benchmark.name == name
    assert list(list_problems(benchmark)) == []
    assert benchmark.title


@pytest.mark.slow
def test_every_network_can_be_built() -> None:
    recipes = {
        json.dumps([recipe.network, recipe.options]): recipe
        for name in BENCHMARKS
        for recipe in find(name).sources.values()
    }
    assert len(recipes) == 10
    for recipe in recipes.values():
        network = build_untrained(recipe)
        head = [layer for layer in network.modules() if isinstance(layer, torch.nn.Linear)][-1]
        assert head.out_features == recipe.options["classes"]


# ---- finding


def test_unknown_names_get_suggestions() -> None:
    with pytest.raises(DataError, match=r"'cifar-10'.*Try cifar-10-c"):
        find("cifar-10")
    with pytest.raises(DataError, match=r"Try emnist-da"):
        find("emnist")
    with pytest.raises(DataError, match=r"or file\.py:NAME"):
        find("zzz")


OWN = """
from dataclasses import replace
from shiftmend.research.bench.benchmark import Setting
from shiftmend.research.bench.suite.digits import BENCHMARK
from shiftmend.research.bench.benchmark import Offline

MINE = replace(BENCHMARK, name="mine")
TABLE = {"offline": {"fr": Setting("fr")}}
PROTOCOLS = {"offline": Offline()}
"""


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("", "to define a Benchmark called OTHER"),
        ("OTHER = 3", "to define a Benchmark called OTHER"),
        ("import nothing_of_the_kind", "could not be run: ModuleNotFoundError"),
        ("def (", "could not be run: SyntaxError"),
        (
            "OTHER = replace(MINE, groups={'bad': ('snow',)})",
            "group 'bad' has the shift 'snow', expected some of bright",
        ),
        ("OTHER = replace(MINE, protocols=PROTOCOLS)", "expected settings for each protocol"),
        (
            "TABLE['offline']['x'] = Setting('frr')\nOTHER = replace(MINE, protocols=PROTOCOLS, settings=TABLE)",
            "got 'frr'",
        ),
        (
            "TABLE['offline']['x'] = Setting('fr', {'rate': 1})\n"
            "OTHER = replace(MINE, protocols=PROTOCOLS, settings=TABLE)",
            "got 'rate'",
        ),
        (
            "TABLE['offline']['x'] = Setting('fr', preset='slices')\n"
            "OTHER = replace(MINE, protocols=PROTOCOLS, settings=TABLE)",
            "'x' of protocol 'offline' has the preset 'slices', expected one of reference, paper, sliced",
        ),
        (
            "TABLE['offline']['bound'] = Setting('target-supervised')\n"
            "OTHER = replace(MINE, protocols=PROTOCOLS, settings=TABLE)",
            "'bound' of protocol 'offline' sees labels: expected a name that begins with 'target-supervised'",
        ),
        ("OTHER = replace(MINE, source_for=lambda setting, shift: 'other')", "starts from 'other', expected one of"),
        ("OTHER = replace(MINE, shifts='snow')", "shifts is 'snow', expected a tuple"),
        ("OTHER = replace(MINE, shifts=('fog', 'fog'))", "expected each name once"),
        ("OTHER = replace(MINE, shifts=('fog', 'clean'))", "without 'clean'"),
        ("OTHER = replace(MINE, seeds=1)", "seeds is 1, expected a tuple"),
    ],
)
def test_a_broken_file_is_one_sentence(tmp_path: Path, code: str, message: str) -> None:
    file = tmp_path / "own.py"
    file.write_text(OWN + code)
    with pytest.raises(DataError) as caught:
        find(f"{file}:OTHER")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert str(file) in str(caught.value)


def test_a_file_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.path", [*sys.path])
    file = tmp_path / "own.py"
    (tmp_path / "beside_it.py").write_text("")
    file.write_text(f"import beside_it\n{OWN}")
    mine = find(f"{file}:MINE")
    assert isinstance(mine, Benchmark)
    assert mine.name == "mine"
    with pytest.raises(DataError, match=r"absent\.py, which is missing"):
        find(f"{tmp_path}/absent.py:X")


# ---- data, from small files in their official layouts


def numbered(count: int, side: int = 28) -> np.ndarray:
    """Images that say in their first two pixels which they are."""
    images = random_images(count, side, side)
    images[:, 0, 0], images[:, 0, 1] = np.arange(count) % 256, np.arange(count) // 256
    return images


def numbers(images: Tensor) -> list[int]:
    return (images[:, 0, 0, 0].int() + 256 * images[:, 0, 0, 1].int()).tolist()


TRAIN, TEST = 6_040, 30


def lay_out_mnist(root: Path) -> dict[str, np.ndarray]:
    labels = {"train": rng(1).integers(0, 10, TRAIN), "t10k": rng(2).integers(0, 10, TEST)}
    for stem, values in labels.items():
        write_idx(root / f"MNIST/raw/{stem}-images-idx3-ubyte", numbered(len(values)))
        write_idx(root / f"MNIST/raw/{stem}-labels-idx1-ubyte", values)
    return labels


def no_leak(root: Path, benchmark: Benchmark) -> list[int]:
    """Which images the source model is trained on; it must not be tested on them."""
    source = benchmark.load_source("plain", root)
    assert isinstance(source.train, Split)
    trained = numbers(source.train.images)
    assert len(set(trained)) == len(trained)
    assert source.train.name != source.test.name
    return trained


def test_mnist_c_from_the_published_files_and_made_again(tmp_path: Path) -> None:
    labels, benchmark = lay_out_mnist(tmp_path), find("mnist-c")
    trained = no_leak(tmp_path, benchmark)
    assert len(trained) == TRAIN - 6_000
    source = benchmark.load_source("plain", tmp_path)
    assert source.profiled is source.train
    assert source.train.labels.tolist() == labels["train"][trained].tolist()
    assert (len(source.test), source.test.name) == (TEST, "mnist-test")

    assert benchmark.origin("stripe", tmp_path) == "regenerated"
    assert benchmark.origin(CLEAN, tmp_path) == "published"
    again = benchmark.load_target("stripe", tmp_path)
    assert (len(again.adapt), len(again.score)) == (len(trained), TEST)
    middle = (slice(None), slice(None), slice(None), slice(7, 21))  # which stripe leaves alone
    assert torch.equal(again.adapt.images[middle], source.train.images[middle])
    assert torch.equal(again.score.images[middle], again.clean.images[middle])
    assert torch.equal(again.score.labels, again.clean.labels)
    assert again.adapt.labels.tolist() == source.train.labels.tolist()
    assert "made again" in again.score.name
    noisy = benchmark.load_target("impulse_noise", tmp_path)  # one fixed draw: no recipe would tell another apart
    for made_again, clean in ((noisy.adapt, source.train), (noisy.score, source.test)):
        assert torch.equal(made_again.images, shifts.apply("mnist-c/impulse_noise", clean.images, seed=2022))

    for split, count, values in (("train", TRAIN, labels["train"]), ("test", TEST, labels["t10k"])):
        folder = tmp_path / "mnist_c/stripe"
        folder.mkdir(parents=True, exist_ok=True)
        np.save(folder / f"{split}_images.npy", numbered(count)[..., None])
        np.save(folder / f"{split}_labels.npy", values)
    assert benchmark.origin("stripe", tmp_path) == "published"
    assert benchmark.origin("fog", tmp_path) == "regenerated"
    there = benchmark.load_target("stripe", tmp_path)
    assert numbers(there.adapt.images) == trained  # the shifted versions of the very images it was trained on
    assert numbers(there.score.images) == numbers(there.clean.images) == list(range(TEST))
    assert torch.equal(there.score.labels, there.clean.labels)
    assert there.score.name == "mnist-c-stripe-test"
    clean = benchmark.load_target(CLEAN, tmp_path)
    assert clean.adapt is clean.score is clean.clean
    assert clean.score.name == "mnist-test"


@pytest.mark.slow
def test_mnist_m_in_its_forms(tmp_path: Path) -> None:
    labels, benchmark = lay_out_mnist(tmp_path), find("mnist-m")
    trained = no_leak(tmp_path, benchmark)
    assert benchmark.origin("mnist-m", tmp_path) == "rebuilt"
    stand_in = benchmark.load_target("mnist-m", tmp_path)
    assert stand_in.score.name.endswith("made again with stand-ins")
    assert (len(stand_in.adapt), len(stand_in.score), len(stand_in.clean)) == (len(trained), TEST, TEST)
    assert stand_in.score.images.shape[1] == 3

    write_png(tmp_path / "BSDS500/images/train/100075.jpg", random_images(1, 40, 50, 3)[0])
    assert benchmark.origin("mnist-m", tmp_path) == "rebuilt"  # on a part of the photographs
    blended = benchmark.load_target("mnist-m", tmp_path)
    for blend, before in ((blended.adapt, stand_in.adapt), (blended.score, stand_in.score)):
        assert blend.name.endswith("made again with the pictures in train")
        assert not torch.equal(blend.images, before.images)
        assert torch.equal(blend.labels, before.labels)
    for number in range(199):
        (tmp_path / f"BSDS500/images/train/{number}.jpg").touch()
    assert benchmark.origin("mnist-m", tmp_path) == "regenerated"
    (tmp_path / "BSDS500/images/train/mine.png").touch()
    assert benchmark.origin("mnist-m", tmp_path) == "rebuilt"  # on one more

    archive = {"train": np.stack([numbered(TRAIN)] * 3, 3), "test": np.stack([numbered(TEST)] * 3, 3)}
    (tmp_path / "MNISTM").mkdir()
    (tmp_path / "MNISTM/keras_mnistm.pkl.gz").write_bytes(gzip.compress(python2_pickle(archive), 1))
    assert benchmark.origin("mnist-m", tmp_path) == "published"
    there = benchmark.load_target("mnist-m", tmp_path)
    assert numbers(there.adapt.images) == trained
    assert numbers(there.score.images) == numbers(there.clean.images)
    assert there.adapt.labels.tolist() == labels["train"][trained].tolist()


def test_mnist_m_in_folders_has_no_clean_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Folders are sorted by digit, MNIST is not: image by image they have nothing to do with each other."""
    lay_out_mnist(tmp_path)
    for digit in range(10):
        write_png(tmp_path / f"MNISTM/train/{digit}/0.png", random_images(1, 28, 28, 3)[0])
        write_png(tmp_path / f"MNISTM/test/{digit}/0.png", random_images(1, 28, 28, 3)[0])
    monkeypatch.setattr(mnist_m, "source_part", lambda train: train)  # which takes more than 6,000
    target = find("mnist-m").load_target("mnist-m", tmp_path)
    assert find("mnist-m").origin("mnist-m", tmp_path) == "published"
    assert target.clean is None
    assert len(target.score) == 10


def lay_out_usps(root: Path) -> dict[str, np.ndarray]:
    (root / "USPS").mkdir()
    arrays = {f"x_{split}": random_images(count, 16, 16, seed=count) for split, count in (("train", 21), ("test", 12))}
    arrays |= {f"y_{split}": rng(7).integers(0, 10, len(arrays[f"x_{split}"])) for split in ("train", "test")}
    np.savez(root / "USPS/usps.npz", **arrays)
    return arrays


def test_usps_and_mnist_each_way(tmp_path: Path) -> None:
    benchmark, arrays = find("usps"), lay_out_usps(tmp_path)
    lay_out_mnist(tmp_path)
    train, test = mnist("train", tmp_path), mnist("test", tmp_path)

    there = benchmark.load_target("mnist-to-usps", tmp_path)
    assert (there.adapt.name, there.score.name) == ("usps-train, 28 x 28", "usps-test, 28 x 28")
    assert there.adapt.labels.tolist() == arrays["y_train"].tolist()
    assert there.score.labels.tolist() == arrays["y_test"].tolist()
    back = benchmark.load_target("usps-to-mnist", tmp_path)
    assert torch.equal(back.adapt.images, train.images)
    assert torch.equal(back.score.images, test.images)
    assert there.clean is back.clean is None  # nobody wrote the same digits for both
    assert {images.images.shape[1:] for target in (there, back) for images in (target.adapt, target.score)} == {
        (1, 28, 28)
    }
    clean = benchmark.load_target(CLEAN, tmp_path)
    assert clean.adapt is clean.score is clean.clean
    assert torch.equal(clean.score.images, test.images)

    for name in ("plain", "shot"):
        setting = benchmark.settings["offline"]["shot" if name == "shot" else "fr-sliced"]
        sources = [benchmark.source_for(setting, shift) for shift in (*benchmark.shifts, CLEAN)]
        assert sources == [f"{name}-mnist", f"{name}-usps", f"{name}-mnist"]
        digits, envelopes = (benchmark.load_source(source, tmp_path) for source in sources[:2])
        assert digits.profiled is digits.train
        assert envelopes.profiled is envelopes.train
        assert torch.equal(digits.test.images, clean.score.images)
        assert torch.equal(envelopes.train.images, there.adapt.images)
        assert torch.equal(envelopes.test.images, there.score.images)
        # a folder of results that has MNIST-C's source models has these
        shared = find("mnist-c")
        recipes = [
            (one.sources[source], one.load_source(source, tmp_path).train, one.preprocess)
            for one, source in ((benchmark, f"{name}-mnist"), (shared, name))
        ]
        digests = [recipe.digest(identify_data(images, preprocess)) for recipe, images, preprocess in recipes]
        assert digests[0] == digests[1]
        assert benchmark.sources[f"{name}-usps"] == shared.sources[name]
    assert {benchmark.origin(shift, tmp_path) for shift in (*benchmark.shifts, CLEAN)} == {"published"}


def bilinear(images: np.ndarray) -> np.ndarray:
    """From 16 to 28, in whole numbers: pixel i lies at ((i + 1/2) 16 / 28 - 1/2), which is (8 i - 3) / 14."""
    place = np.clip(8 * np.arange(28) - 3, 0, 15 * 14)
    low, above = place // 14, place % 14
    weights = np.zeros((28, 16), dtype=np.int64)
    weights[np.arange(28), low] += 14 - above
    weights[np.arange(28), np.minimum(low + 1, 15)] += above
    return np.einsum("ij,njk,lk->nil", weights, images.astype(np.int64), weights)  # 196 times the grey level


def test_usps_is_enlarged_exactly(tmp_path: Path) -> None:
    images = random_images(60, 16, 16, seed=3)
    images[0], images[1] = 0, 255
    large = enlarge(Split(torch.from_numpy(images[:, None]), None, "few"))
    exact = bilinear(images)
    whole, rest = exact // 196, exact % 196
    assert (rest == 98).sum() > 100  # halves, which go to the even neighbour
    rounded = whole + ((rest > 98) | ((rest == 98) & (whole % 2 == 1)))
    assert torch.equal(large.images[:, 0], torch.from_numpy(rounded).to(torch.uint8))
    assert set(large.images[0].unique().tolist()) == {0}
    assert set(large.images[1].unique().tolist()) == {255}


def test_usps_has_every_method_with_the_nearest_settings() -> None:
    found = dict(find("usps").settings["offline"])
    assert {setting.method for setting in found.values()} == PUBLISHED_METHODS
    assert set(found) == {*PUBLISHED_METHODS, *OURS}
    published_for_mnist = find("mnist-c").settings["offline"]
    for row, setting in published_for_mnist.items():
        assert found.pop(row) == setting, row
    for row in ("bnm", "bnm-im"):
        assert found.pop(row) == find("emnist-da").settings["offline"][row]
    there, here = find("emnist-da").settings["offline"]["full-gauss"].options, found.pop("full-gauss").options
    assert here == there | {"learning_rate": pytest.approx(there["learning_rate"] / 10)}
    assert found == {"tent": find("cifar-10-c").settings["offline"]["tent"]}
    offline = find("usps").protocols["offline"]
    assert isinstance(offline, Offline)
    assert offline.supervised_parts is None  # what is adapted to and what is scored on are two sets
    assert find("usps").seeds == (123, 234, 345)
    assert not published.is_published("usps")


@pytest.mark.data
@pytest.mark.skipif(not os.environ.get("SHIFTMEND_DATA"), reason="SHIFTMEND_DATA is not set")
def test_usps_from_the_real_files() -> None:
    benchmark = find("usps")
    for shift, sizes in (
        ("mnist-to-usps", (7_291, 2_007)),
        ("usps-to-mnist", (60_000, 10_000)),
        (CLEAN, (10_000,) * 2),
    ):
        try:
            target = benchmark.load_target(shift, None)
        except DataError as error:
            if "is missing" in str(error):
                pytest.skip(str(error))
            raise
        assert (len(target.adapt), len(target.score)) == sizes
        for images in (target.adapt, target.score):
            assert images.images.shape[1:] == (1, 28, 28)
            grey = images.images.float().mean(0)[0]
            assert grey[10:18, 10:18].mean() > 2 * grey[[0, -1]].mean()  # white ink on black paper, in both
            assert len(images.labels.unique()) == 10
    counts = benchmark.load_source("plain-usps", None).train.labels.bincount()
    assert counts[0] > 2 * counts[8]  # as the module says


def test_emnist_da_from_the_published_files_and_made_again(tmp_path: Path) -> None:
    benchmark = find("emnist-da")
    train = np.repeat([0, 46], 2_003)
    test = rng(4).integers(0, 47, TEST)
    for stem, values in (("train", train), ("test", test)):
        stored = numbered(len(values)).transpose(0, 2, 1)  # the release has them lying on their side
        write_idx(tmp_path / f"EMNIST/raw/emnist-balanced-{stem}-images-idx3-ubyte", stored)
        write_idx(tmp_path / f"EMNIST/raw/emnist-balanced-{stem}-labels-idx1-ubyte", values)
    trained = no_leak(tmp_path, benchmark)
    assert trained == [*range(2_000), *range(2_003, 4_003)]  # the first 2,000 of each class
    assert benchmark.source_remark(tmp_path).startswith("EMNIST, rebuilt: not the official Balanced split (its train")
    source = benchmark.load_source("shot", tmp_path)
    assert source.profiled is source.train
    assert len(source.test) == TEST

    assert {benchmark.origin(shift, tmp_path) for shift in ("bricks", "crystals", "grass", "oranges", "sky")} == {
        "rebuilt"
    }
    rest = set(EMNIST_SHIFTS) - {"bricks", "crystals", "grass", "oranges", "sky"}
    assert {benchmark.origin(shift, tmp_path) for shift in rest} == {"regenerated"}
    clean = benchmark.load_target(CLEAN, tmp_path)
    assert clean.adapt is clean.score is clean.clean
    assert torch.equal(clean.score.images, source.test.images)
    inverse = benchmark.load_target("inverse", tmp_path)
    assert inverse.adapt is inverse.score
    assert torch.equal(inverse.score.images, 255 - emnist("test", tmp_path).images)
    assert torch.equal(inverse.score.labels, inverse.clean.labels)
    sky = benchmark.load_target("sky", tmp_path)
    assert sky.score.name.endswith("with stand-ins")
    write_png(tmp_path / "textures/sky.png", random_images(1, 60, 60, 3)[0])
    other = benchmark.load_target("sky", tmp_path)
    assert other.score.name.endswith("with the pictures in textures")
    assert not torch.equal(other.score.images, sky.score.images)
    assert benchmark.load_target("inverse", tmp_path).score.name == inverse.score.name

    pictures = random_images(94, 28, 28)
    for shift in ("sky", "identity"):
        for place, image in enumerate(pictures):
            colour = np.stack([255 - image] * 3, 2) if shift == "sky" else image
            write_png(tmp_path / f"EMNIST/{shift}/test/{place // 2}/{place % 2}.png", colour)
        assert benchmark.origin("sky", tmp_path) == "published"
        there = benchmark.load_target("sky", tmp_path)
        assert there.adapt is there.score
        assert there.score.labels.tolist() == [place // 2 for place in range(94)]
        assert torch.equal(there.score.images[:, 0], torch.from_numpy(255 - pictures))
        if shift == "sky":
            assert there.clean is None  # the test set itself is in another order
    assert torch.equal(there.clean.images[:, 0], torch.from_numpy(pictures))
    assert torch.equal(there.clean.labels, there.score.labels)
    assert benchmark.origin("stripe", tmp_path) == "regenerated"


CIFAR_TRAIN = 1_010
"""More than are augmented at once."""


def lay_out_cifar(root: Path, name: str) -> None:
    pixels = {"train": random_images(CIFAR_TRAIN, 3072, seed=1), "test": random_images(40, 3072, seed=2)}
    labels = {split: (np.arange(len(images)) % 10).astype(np.uint8)[:, None] for split, images in pixels.items()}
    if name == "cifar-10-c":
        folder = root / "cifar-10-batches-bin"
        folder.mkdir()
        records = np.concatenate([labels["train"], pixels["train"]], 1)
        for number, batch in enumerate(np.split(records, 5), 1):
            (folder / f"data_batch_{number}.bin").write_bytes(batch.tobytes())
        (folder / "test_batch.bin").write_bytes(np.concatenate([labels["test"], pixels["test"]], 1).tobytes())
    else:
        folder = root / "cifar-100-binary"
        folder.mkdir()
        for split in pixels:
            coarse = np.zeros_like(labels[split])
            record = np.concatenate([coarse, labels[split], pixels[split]], 1)
            (folder / f"{split}.bin").write_bytes(record.tobytes())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["cifar-10-c", "cifar-100-c"])
def test_cifar_c_from_the_published_files_and_made_again(tmp_path: Path, name: str) -> None:
    benchmark = find(name)
    lay_out_cifar(tmp_path, name)
    source = benchmark.load_source("plain", tmp_path)
    pixels = torch.from_numpy(random_images(CIFAR_TRAIN, 3072, seed=1))
    assert torch.equal(source.train.images, pixels.view(-1, 3, 32, 32))
    assert len(source.test) == 40
    # the profile is made from augmented images, as published: the same ones at every call
    assert torch.equal(source.profiled.labels, source.train.labels)
    changed = (source.profiled.images != source.train.images).flatten(1).any(1)
    assert changed.float().mean() > 0.9
    assert torch.equal(benchmark.load_source("plain", tmp_path).profiled.images, source.profiled.images)
    augment = AUGMENTATIONS[benchmark.sources["plain"].augmentation]
    generator = torch.Generator().manual_seed(2022)
    by_hand = [augment(part, generator) for part in (source.train.images[:1000], source.train.images[1000:])]
    assert torch.equal(source.profiled.images, torch.cat(by_hand))

    assert benchmark.origin("fog", tmp_path) == "regenerated"
    assert benchmark.origin("frost", tmp_path) == "rebuilt"
    clean = benchmark.load_target(CLEAN, tmp_path)
    assert clean.adapt is clean.score is clean.clean
    assert torch.equal(clean.score.images, source.test.images)
    again = benchmark.load_target("contrast", tmp_path)
    assert again.adapt is again.score
    assert torch.equal(again.score.labels, again.clean.labels)
    spread = again.score.images.float().std() / again.clean.images.float().std()
    assert 0.14 < spread < 0.16  # severity 5 leaves 0.15 of the contrast

    folder = tmp_path / name.upper()
    folder.mkdir()
    stored = np.lib.format.open_memmap(folder / "fog.npy", "w+", np.uint8, (50_000, 32, 32, 3))
    stored[40_000:, 0, 0, 0] = np.arange(10_000) % 251 + 1
    stored.flush()
    np.save(folder / "labels.npy", np.tile(np.arange(10_000) % 10, 5))
    assert benchmark.origin("fog", tmp_path) == "published"
    assert benchmark.origin("snow", tmp_path) == "regenerated"
    there = benchmark.load_target("fog", tmp_path)
    assert there.adapt is there.score
    assert there.score.images[:, 0, 0, 0].tolist() == (np.arange(10_000) % 251 + 1).tolist()  # the last fifth
    assert there.score.name == f"{name}-fog-5"
    assert there.score.labels[:12].tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 1]


def lay_out_camelyon(root: Path, per_hospital: int = 20) -> None:
    base = root / "CAMELYON17/camelyon17_v1.0"
    rows = [",patient,node,x_coord,y_coord,tumor,slide,center,split"]
    for hospital in range(5):
        for number in range(per_hospital):
            slide = f"patient_{hospital:03d}_node_0"
            write_png(base / f"patches/{slide}/patch_{slide}_x_{number}_y_0.png", random_images(1, 96, 96, 3)[0])
            rows.append(f"{len(rows) - 1},{hospital:03d},0,{number},0,{number % 2},0,{hospital},0")
    (base / "metadata.csv").write_text("\n".join(rows) + "\n")


def paths(images: Any) -> list[str]:
    return [str(images.path(index)) for index in range(len(images))]


@pytest.mark.slow
def test_camelyon_is_trained_on_a_part_and_profiled_on_the_whole_hospital(tmp_path: Path) -> None:
    benchmark = find("camelyon17")
    lay_out_camelyon(tmp_path)
    source = benchmark.load_source("plain", tmp_path)
    assert (len(source.train), len(source.profiled), len(source.test)) == (16, 20, 2)
    train, test, whole = map(paths, (source.train, source.test, source.profiled))
    assert not set(train) & set(test)
    assert set(train) | set(test) < set(whole)
    assert all("patient_003" in path for path in whole)
    order = torch.randperm(20, generator=torch.Generator().manual_seed(0))
    assert train == [whole[place] for place in sorted(order[:16].tolist())]
    assert test == [whole[place] for place in sorted(order[18:].tolist())]
    for number in (0, 1, 2, 4):
        target = benchmark.load_target(f"hospital-{number}", tmp_path)
        assert target.adapt is target.score
        assert target.clean is None
        assert len(target.score) == 20
        assert all(f"patient_{number:03d}" in path for path in paths(target.score))
        assert benchmark.origin(f"hospital-{number}", tmp_path) == "published"
    assert paths(benchmark.load_target(CLEAN, tmp_path).score) == test


def lay_out_visda(root: Path) -> None:
    for split, counts in (("train", (20, 10)), ("validation", (4, 8))):
        lines = []
        for label, count in enumerate(counts):
            for number in range(count):
                write_png(root / f"VisDA-C/{split}/{label}/{number}.png", np.full((8, 9, 3), label * 9, np.uint8))
                lines.append(f"{label}/{number}.png {label}")
        (root / f"VisDA-C/{split}/image_list.txt").write_text("\n".join(lines) + "\n")


@pytest.mark.slow
def test_visda_variants_take_their_own_source(tmp_path: Path) -> None:
    benchmark = find("visda-c")
    lay_out_visda(tmp_path)
    usual, even, scratch = benchmark.shifts
    plain, shot = benchmark.settings["offline"]["fr"], benchmark.settings["offline"]["shot"]
    assert [benchmark.source_for(plain, shift) for shift in (usual, even, scratch, CLEAN)] == [
        "plain",
        "plain-balanced",
        "plain-scratch",
        "plain",
    ]
    assert [benchmark.source_for(shot, shift) for shift in (usual, even, scratch)] == [
        "shot",
        "shot-balanced",
        "shot-scratch",
    ]
    for source, per_class in (("plain", None), ("plain-scratch", None), ("shot-balanced", (9_900, 1_100))):
        data = benchmark.load_source(source, tmp_path)
        assert not set(paths(data.train)) & set(paths(data.test)), source
        assert len(set(paths(data.train))) == 27
        assert data.profiled is data.train
        if per_class is None:
            assert (len(data.train), len(data.test)) == (27, 3)
        else:
            assert data.train.labels.bincount().tolist() == [per_class[0]] * 2
            assert data.test.labels.bincount().tolist() == [per_class[1]] * 2
        assert data.train.size == (224, 224)
    assert benchmark.load_target(usual, tmp_path).score.labels.bincount().tolist() == [4, 8]
    assert benchmark.load_target(even, tmp_path).score.labels.bincount().tolist() == [3_500, 3_500]
    assert benchmark.load_target(scratch, tmp_path).score.labels.bincount().tolist() == [4, 8]
    assert benchmark.load_target(usual, tmp_path).clean is None
    assert paths(benchmark.load_target(CLEAN, tmp_path).score) == paths(benchmark.load_source("plain", tmp_path).test)
    assert benchmark.origin(usual, tmp_path) == "published"


def test_digits_need_no_files() -> None:
    benchmark = find("digits")
    source = benchmark.load_source("plain", None)
    assert (len(source.train), len(source.test)) == (900, 897)
    joined = torch.cat([source.train.images, source.test.images]).flatten(1)
    assert len(joined.unique(dim=0)) > 1_780  # nothing is on both sides; a few digits of the set look alike
    for shift in (*benchmark.shifts, CLEAN):
        target = benchmark.load_target(shift, None)
        assert benchmark.origin(shift, None) == "own"
        assert target.adapt is target.score
        assert torch.equal(target.score.labels, source.test.labels)
        assert torch.equal(target.clean.images, source.test.images)
        assert torch.equal(target.score.images, target.clean.images) == (shift == CLEAN)
    assert {setting.method for setting in benchmark.settings["offline"].values()} == PUBLISHED_METHODS


@pytest.mark.parametrize("name", [*PUBLISHED, "usps"])
def test_missing_data_are_one_sentence_that_names_the_file(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    benchmark = find(name)
    for load in (
        *(lambda root, source=source: benchmark.load_source(source, root) for source in benchmark.sources),
        *(lambda root, shift=shift: benchmark.load_target(shift, root) for shift in (benchmark.shifts[0], CLEAN)),
    ):
        with pytest.raises(DataError) as caught:
            load(tmp_path)
        text = str(caught.value)
        assert str(tmp_path) in text
        assert "which is missing" in text
        assert "fetch" in text
        assert "\n" not in text
        monkeypatch.delenv("SHIFTMEND_DATA", raising=False)
        with pytest.raises(DataError, match="SHIFTMEND_DATA"):
            load(None)
    for shift in (*benchmark.shifts, CLEAN):
        assert benchmark.origin(shift, None) in ("published", "regenerated", "rebuilt")  # quick, and never an error
