"""Models, profiles and data for cells: made once, found again, never mistaken for others."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from data_layouts import random_images, write_png
from small_worlds import BENCHMARK, SETTINGS, load_source, load_target

import shiftmend
from shiftmend.engine import checkpoint as checkpoints
from shiftmend.errors import DataError
from shiftmend.inputs.images import Split
from shiftmend.profiles import fingerprints
from shiftmend.profiles.profile import Profile
from shiftmend.research.bench import resources as sources
from shiftmend.research.bench import resources as workshop
from shiftmend.research.bench.benchmark import Benchmark, Setting, Source, Target
from shiftmend.research.bench.resources import Shelf, Workshop, in_memory, inputs_of, labelled
from shiftmend.research.datasets.streamed import ImageFiles


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bench")
    fresh(folder).profile("plain", 1, 0.01)
    return folder


def fresh(home: Path, benchmark: Benchmark = BENCHMARK) -> Workshop:
    return Workshop(benchmark, home, None, "cpu")


def forbid(monkeypatch: pytest.MonkeyPatch, module: Any, name: str) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError(f"{name} was called again")

    monkeypatch.setattr(module, name, refuse)


def profiles(home: Path) -> list[Path]:
    return sorted((home / "profiles").iterdir())


@pytest.mark.slow
def test_another_workshop_finds_model_and_profile_on_the_disk(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, path = fresh(home).model("plain", 1)
    made = fresh(home).profile("plain", 1, 0.01)
    forbid(monkeypatch, sources, "train")
    forbid(monkeypatch, shiftmend, "profile")
    other = fresh(home)
    again, same_path = other.model("plain", 1)
    assert same_path == path
    assert path.parent == home / "sources"
    assert again is not first
    assert fingerprints.weights(again) == fingerprints.weights(first) == made.weights
    assert other.profile("plain", 1, 0.01).to_bytes() == made.to_bytes()
    assert other.model("plain", 1)[0] is again


def test_the_profile_is_that_of_the_model_on_what_is_profiled(home: Path) -> None:
    shop = fresh(home)
    model, _ = shop.model("plain", 1)
    found = shop.profile("plain", 1, 0.05)
    by_hand = shiftmend.profile(
        model,
        load_source("plain", None).profiled.images,
        bins=replace(shiftmend.profiles.presets.preset("reference").bins, temperature=0.05),
        preprocess=BENCHMARK.preprocess,
        progress=False,
    )
    assert found.bins.temperature == 0.05
    assert found.taps["features"].counts.shape == (8, 10)  # eight units; eight inner and two outer bins
    assert found.gaussian.kind == "marginal-gaussian"
    for name, tap in by_hand.taps.items():
        assert torch.allclose(found.taps[name].counts, tap.counts, atol=1e-3), name


@pytest.mark.slow
@pytest.mark.parametrize("damage", ["cut short", "empty", "of another model"])
def test_a_bad_profile_is_made_again(tmp_path: Path, damage: str) -> None:
    shop = fresh(tmp_path)
    good = shop.profile("plain", 1, 0.01).to_bytes()
    (file,) = profiles(tmp_path)
    if damage == "of another model":  # as after a source model was deleted and trained again on a GPU
        model, path = shop.model("plain", 1)
        path.unlink()
        with torch.no_grad():
            model.head.weight.mul_(1.001)
        sources._write(path, model, {"digest": path.stem.split("-")[-2]}, 1)
        remade = fresh(tmp_path).profile("plain", 1, 0.01)
        assert remade.weights == fingerprints.weights(model)
        assert remade.to_bytes() != good
    else:
        file.write_bytes(good[: len(good) // 2] if damage == "cut short" else b"")
        assert fresh(tmp_path).profile("plain", 1, 0.01).to_bytes() == good
    assert profiles(tmp_path) == [file]
    assert Profile.load(file).samples == 256


@pytest.mark.slow
def test_a_full_covariance_is_kept_where_a_method_needs_it(tmp_path: Path) -> None:
    table = {"offline": SETTINGS | {"full-gauss": Setting("full-gauss")}}
    benchmark = replace(BENCHMARK, settings=table)
    assert fresh(tmp_path, benchmark).profile("plain", 1, 0.01).gaussian.kind == "full-gaussian"
    assert fresh(tmp_path).profile("plain", 1, 0.01).gaussian.kind == "marginal-gaussian"
    assert len(profiles(tmp_path)) == 2


@pytest.mark.slow
def test_every_preset_has_a_profile_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shop = fresh(tmp_path)
    usual, sliced, paper = (shop.profile("plain", 1, 0.05, name) for name in ("reference", "sliced", "paper"))
    assert shop.profile("plain", 1, 0.05).to_bytes() == usual.to_bytes()
    assert [one.preset for one in (usual, sliced, paper)] == ["reference", "sliced", "paper"]
    assert {one.bins.temperature for one in (usual, sliced, paper)} == {0.05}
    assert [one.taps["features"].counts.shape[1] for one in (usual, sliced, paper)] == [10, 10, 8]
    assert set(sliced.slices) == {"verification", "alignment"}
    assert set(usual.slices) == set(paper.slices) == {"verification"}
    by_hand = shiftmend.profile(
        shop.model("plain", 1)[0],
        load_source("plain", None).profiled.images,
        preset="sliced",
        bins=replace(shiftmend.profiles.presets.preset("sliced").bins, temperature=0.05),
        preprocess=BENCHMARK.preprocess,
        progress=False,
    )
    counts = [one.slices["alignment"].histogram.counts for one in (sliced, by_hand)]
    assert torch.allclose(*counts, atol=1e-3)
    # who knows nothing of presets wrote, and looks for, a file without one in its name
    identity = sources.identity(load_source("plain", None).profiled, BENCHMARK.preprocess)
    tail = f"marginal-{checkpoints.identify(identity)}.safetensors"
    stem = shop.model("plain", 1)[1].stem
    expected = [f"{stem}-0.05-{part}{tail}" for part in ("", "paper-", "sliced-")]
    assert [file.name for file in profiles(tmp_path)] == sorted(expected)
    forbid(monkeypatch, shiftmend, "profile")
    assert fresh(tmp_path).profile("plain", 1, 0.05, "sliced").to_bytes() == sliced.to_bytes()


@pytest.mark.slow
def test_presets_that_take_turns_are_read_once(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = {"offline": SETTINGS | {"fr-sliced": replace(SETTINGS["fr"], preset="sliced")}}
    for preset in ("reference", "sliced"):
        for source in ("plain", "shot"):
            fresh(home).profile(source, 1, 0.01, preset)
    loads: list[Path] = []
    load = Profile.load
    monkeypatch.setattr(Profile, "load", lambda file: (loads.append(file), load(file))[1])
    shop = fresh(home, replace(BENCHMARK, settings=table))
    for _ in range(3):
        for source in ("plain", "shot"):
            for preset in ("reference", "sliced"):
                shop.profile(source, 1, 0.01, preset)
    assert len(loads) == len(set(loads)) == 4


@pytest.mark.slow
def test_nothing_is_mixed_up(tmp_path: Path) -> None:
    shop = fresh(tmp_path)
    asked = [("plain", 1), ("shot", 1), ("plain", 2), ("plain", 1), ("shot", 1)]
    seen = {}
    for source, seed in asked:
        model, path = shop.model(source, seed)
        profile = shop.profile(source, seed, 0.01)
        weights = fingerprints.weights(model)
        assert profile.weights == weights
        assert seen.setdefault((source, seed), (weights, path, profile.to_bytes())) == (
            weights,
            path,
            profile.to_bytes(),
        )
        soft = shop.profile(source, seed, 0.05)
        assert soft.bins.temperature == 0.05
        assert profile.bins.temperature == 0.01
    assert len({weights for weights, _, _ in seen.values()}) == 3
    assert len(profiles(tmp_path)) == 6
    for shift in ("dim", "inverse", "dim", "clean"):
        expected, found = load_target(shift, None), shop.target(shift)
        assert torch.equal(found.score.images, expected.score.images), shift
        assert found.score.name == expected.score.name


def test_what_takes_turns_is_read_once(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Methods alternate between the plain source model and SHOT's."""
    calls: list[str] = []

    def counted(what: str, function: Any) -> Any:
        return lambda *given, **named: (calls.append(what), function(*given, **named))[1]

    monkeypatch.setattr(sources, "obtain", counted("model", sources.obtain))
    benchmark = replace(
        BENCHMARK,
        load_source=counted("source", load_source),
        load_target=counted("target", load_target),
    )
    shop = fresh(home, benchmark)
    for shift in ("dim", "inverse"):
        for source in ("plain", "shot", "plain"):
            shop.model(source, 1)
            shop.profile(source, 1, 0.01)
            shop.target(shift)
    assert calls.count("model") == 2
    assert calls.count("target") == 2
    assert calls.count("source") <= 3


def test_the_old_goes_before_the_new_is_made() -> None:
    alive: list[int] = []

    class Large:
        def __init__(self) -> None:
            alive.append(1)

        def __del__(self) -> None:
            alive.pop()

    one = Shelf(1)
    for number in range(3):
        one.keep("thing", number, Large)
        assert len(alive) == 1
    two = Shelf(2)
    made: list[int] = []
    for number in (0, 1, 0, 2, 0, 1):  # 1 had to go for 2, because 0 was asked for later
        two.keep("pair", number, lambda number=number: made.append(number))  # type: ignore[misc]
    assert made == [0, 1, 2, 1]


def test_threads_that_share_a_shelf_make_nothing_twice() -> None:
    shelf = Shelf(4)
    made: list[int] = []

    def make(number: int) -> int:
        time.sleep(0.02)
        made.append(number)
        return number

    with ThreadPoolExecutor(8) as pool:
        numbers = [index % 3 for index in range(24)]
        found = list(pool.map(lambda number: shelf.keep("thing", number, lambda: make(number)), numbers))
    assert found == numbers
    assert sorted(made) == [0, 1, 2]


def test_the_same_images_stay_the_same_object(home: Path) -> None:
    """So that a set that is both adapted to and scored on is held, and recognised, as one."""
    shop = fresh(home)
    both = shop.target("dim")
    assert both.adapt is both.score
    assert both.clean is not both.score
    apart = shop.target("apart")
    assert apart.adapt is not apart.score


# ---- images in files


def files(folder: Path, count: int = 12, size: tuple[int, int] | None = (12, 12), **more: Any) -> ImageFiles:
    pixels = random_images(count, 12, 12, 3, seed=5)
    for index, image in enumerate(pixels):
        write_png(folder / f"{index}.png", image)
    names = [f"{index}.png" for index in range(count)]
    return ImageFiles(folder, names, torch.arange(count) % 3, "patches", ("a", "b", "c"), size=size, **more)


def test_decoding_once_gives_what_decoding_each_gives(tmp_path: Path) -> None:
    images = files(tmp_path).take(torch.tensor([3, 1, 1, 11, 0]))
    whole = in_memory(images, 1 << 20)
    assert isinstance(whole, Split)
    assert torch.equal(whole.images, torch.stack([images[index][0] for index in range(5)]))
    expected = random_images(12, 12, 12, 3, seed=5)[[3, 1, 1, 11, 0]].transpose(0, 3, 1, 2)
    assert np.array_equal(whole.images.numpy(), expected)
    assert torch.equal(whole.labels, images.labels)
    assert (whole.name, whole.classes) == (images.name, images.classes)


def test_what_does_not_fit_or_changes_stays_in_files(tmp_path: Path) -> None:
    images = files(tmp_path)
    size = 12 * 3 * 12 * 12
    assert isinstance(in_memory(images, size), Split)
    assert in_memory(images, size - 1) is images
    assert in_memory(files(tmp_path, size=None), 1 << 30) is not None
    unsized, random = files(tmp_path, size=None), files(tmp_path, transform=lambda image: image)
    assert in_memory(unsized, 1 << 30) is unsized
    assert in_memory(random, 1 << 30) is random


@pytest.mark.slow
def test_workers_decode_many(tmp_path: Path) -> None:
    few = files(tmp_path, 4)
    many = few.take(torch.arange(2100) % 4)
    whole = in_memory(many, 1 << 30, workers=2)
    assert isinstance(whole, Split)
    assert torch.equal(whole.images, in_memory(few, 1 << 20).images[torch.arange(2100) % 4])


@pytest.mark.slow
def test_files_are_decoded_once_for_all_epochs_and_for_the_profile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    images = files(tmp_path / "images", 60)
    reads: list[int] = []
    item = ImageFiles.__getitem__
    monkeypatch.setattr(ImageFiles, "__getitem__", lambda self, index: (reads.append(index), item(self, index))[1])
    monkeypatch.setattr(workshop.os, "cpu_count", lambda: 1)
    benchmark = replace(
        BENCHMARK,
        load_source=lambda source, root: Source(load_source(source, root).train, images, images),
        load_target=lambda shift, root: Target(images, images),
    )
    shop = fresh(tmp_path / "home", benchmark)
    target = shop.target("dim")
    assert len(reads) == 60
    assert target.adapt is target.score
    assert isinstance(target.score, Split)
    profile = shop.profile("plain", 1, 0.01)
    assert profile.samples == 60
    assert len(reads) == 120


def test_inputs_and_labels_of_both_kinds(tmp_path: Path) -> None:
    whole, images = load_source("plain", None).train, files(tmp_path)
    assert inputs_of(whole) is whole.images
    assert labelled(whole)[0] is whole.images
    assert labelled(whole)[1] is whole.labels
    assert inputs_of(images) is images
    assert labelled(images) is images


def test_missing_data_are_an_error_of_the_data(tmp_path: Path) -> None:
    def absent(*_: Any) -> Source:
        raise DataError("file x is missing")

    shop = fresh(tmp_path, replace(BENCHMARK, load_source=absent, load_target=absent))
    for ask in (lambda: shop.model("plain", 1), lambda: shop.profile("plain", 1, 0.01), lambda: shop.target("dim")):
        with pytest.raises(DataError, match="file x is missing"):
            ask()
    shop.benchmark = BENCHMARK
    assert len(shop.target("dim").score) == 100  # a failure is not kept


def test_nothing_is_compiled_for_a_cpu(tmp_path: Path) -> None:
    assert not Workshop(BENCHMARK, tmp_path, None, "cpu", compile=True).compile


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (None, "gave None for 'dark', expected a Target of Splits"),
        (Target(torch.zeros(2), torch.zeros(2)), "`adapt` of the Target for 'dark' is a Tensor, expected a Split"),  # type: ignore[arg-type]
    ],
)
def test_data_of_another_form_is_one_sentence(home: Path, given: Any, sentence: str) -> None:
    with pytest.raises(DataError, match=sentence):
        fresh(home, replace(BENCHMARK, load_target=lambda shift, root: given)).target("dark")
