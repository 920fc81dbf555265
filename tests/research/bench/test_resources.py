"""Models, profiles and data for cells: made once, found again, never mistaken for others."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.torch
import torch
from data_layouts import random_images, write_png
from small_worlds import BENCHMARK, SETTINGS, load_source, load_target
from torch import Tensor, nn

import shiftmend
from shiftmend.engine import checkpoint as checkpoints
from shiftmend.errors import DataError
from shiftmend.inputs.images import Split
from shiftmend.inputs.images import signed as preprocess
from shiftmend.profiles import fingerprints
from shiftmend.profiles.presets import PRESETS
from shiftmend.profiles.profile import Profile
from shiftmend.research.analysis.comparisons import compare
from shiftmend.research.analysis.correlations import restoration_and_calibration, signals_and_accuracy
from shiftmend.research.bench import recipes, training
from shiftmend.research.bench import resources as sources
from shiftmend.research.bench.benchmark import Benchmark, Cell, Result, Setting, Source, Target
from shiftmend.research.bench.cell import run_cell
from shiftmend.research.bench.plan import plan
from shiftmend.research.bench.recipes import Recipe
from shiftmend.research.bench.rendering import Format, render
from shiftmend.research.bench.resources import (
    Cache,
    Resources,
    decode,
    get_source_model,
    identify_data,
    inputs_of,
    labelled,
)
from shiftmend.research.bench.store import Store
from shiftmend.research.bench.tables import per_shift, summary
from shiftmend.research.bench.training import train
from shiftmend.research.datasets.streamed import ImageFiles


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bench")
    fresh(folder).profile("plain", 1, 0.01)
    return folder


def fresh(home: Path, benchmark: Benchmark = BENCHMARK) -> Resources:
    return Resources(benchmark, home, None, "cpu")


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
        sources._write_model(path, model, {"digest": path.stem.split("-")[-2]}, 1)
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
    known = sources.identify_data(load_source("plain", None).profiled, BENCHMARK.preprocess)
    tail = f"marginal-{checkpoints.identify(known)}.safetensors"
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

    monkeypatch.setattr(sources, "get_source_model", counted("model", sources.get_source_model))
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

    one = Cache(1)
    for number in range(3):
        one.get("thing", number, Large)
        assert len(alive) == 1
    two = Cache(2)
    made: list[int] = []
    for number in (0, 1, 0, 2, 0, 1):  # 1 had to go for 2, because 0 was asked for later
        two.get("pair", number, lambda number=number: made.append(number))  # type: ignore[misc]
    assert made == [0, 1, 2, 1]


def test_threads_that_share_a_shelf_make_nothing_twice() -> None:
    shelf = Cache(4)
    made: list[int] = []

    def make(number: int) -> int:
        time.sleep(0.02)
        made.append(number)
        return number

    with ThreadPoolExecutor(8) as pool:
        numbers = [index % 3 for index in range(24)]
        found = list(pool.map(lambda number: shelf.get("thing", number, lambda: make(number)), numbers))
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
    whole = decode(images, 1 << 20)
    assert isinstance(whole, Split)
    assert torch.equal(whole.images, torch.stack([images[index][0] for index in range(5)]))
    expected = random_images(12, 12, 12, 3, seed=5)[[3, 1, 1, 11, 0]].transpose(0, 3, 1, 2)
    assert np.array_equal(whole.images.numpy(), expected)
    assert torch.equal(whole.labels, images.labels)
    assert (whole.name, whole.classes) == (images.name, images.classes)


def test_what_does_not_fit_or_changes_stays_in_files(tmp_path: Path) -> None:
    images = files(tmp_path)
    size = 12 * 3 * 12 * 12
    assert isinstance(decode(images, size), Split)
    assert decode(images, size - 1) is images
    assert decode(files(tmp_path, size=None), 1 << 30) is not None
    unsized, random = files(tmp_path, size=None), files(tmp_path, transform=lambda image: image)
    assert decode(unsized, 1 << 30) is unsized
    assert decode(random, 1 << 30) is random


@pytest.mark.slow
def test_workers_decode_many(tmp_path: Path) -> None:
    few = files(tmp_path, 4)
    many = few.take(torch.arange(2100) % 4)
    whole = decode(many, 1 << 30, workers=2)
    assert isinstance(whole, Split)
    assert torch.equal(whole.images, decode(few, 1 << 20).images[torch.arange(2100) % 4])


@pytest.mark.slow
def test_files_are_decoded_once_for_all_epochs_and_for_the_profile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    images = files(tmp_path / "images", 60)
    reads: list[int] = []
    item = ImageFiles.__getitem__
    monkeypatch.setattr(ImageFiles, "__getitem__", lambda self, index: (reads.append(index), item(self, index))[1])
    monkeypatch.setattr(sources.os, "cpu_count", lambda: 1)
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
    assert not Resources(BENCHMARK, tmp_path, None, "cpu", compile=True).compile


def test_data_of_another_form_is_one_sentence(home: Path) -> None:
    with pytest.raises(DataError, match="Target"):
        fresh(home, replace(BENCHMARK, load_target=lambda shift, root: None)).target("dark")  # type: ignore


# ---- Source models on disk: found again, never mistaken for another, never half written

RECIPE = Recipe(
    network="digit-cnn",
    options={"classes": 2, "width": 4, "image_size": 10},
    epochs=2,
    batch_size=32,
    weight_decay=1e-4,
)


def data() -> Split:
    images = torch.randint(256, (96, 1, 10, 10), generator=torch.Generator().manual_seed(1))
    return Split(images.to(torch.uint8), torch.arange(96) % 2, "noise")


def got(home: Path, recipe: Recipe = RECIPE, seed: int = 7, **changes: Any) -> tuple[nn.Module, Path]:
    return get_source_model(
        home, recipe, seed, changes.get("data") or data(), preprocess, device="cpu", tick=changes.get("tick")
    )


def same(first: nn.Module, second: nn.Module) -> bool:
    ours, theirs = first.state_dict(), second.state_dict()
    return list(ours) == list(theirs) and all(torch.equal(ours[name], theirs[name]) for name in ours)


def no_training(*_: Any, **__: Any) -> nn.Module:
    raise AssertionError("trained again")


def test_trains_once_and_gives_the_same_model_ever_after(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ticks: list[None] = []
    first, path = got(tmp_path, tick=lambda: ticks.append(None))
    assert len(ticks) == 2
    assert same(first, train(RECIPE, data(), preprocess, seed=7, device="cpu"))

    monkeypatch.setattr(sources, "train", no_training)
    state = torch.get_rng_state()
    second, again = got(tmp_path)
    assert again == path
    assert second is not first
    assert same(first, second)
    images = preprocess(data().images)
    with torch.no_grad():
        assert torch.equal(first(images), second(images))
    assert not any(module.training for module in second.modules())
    assert torch.equal(torch.get_rng_state(), state)


def test_shots_weight_normalised_head_is_kept(tmp_path: Path) -> None:
    shot = dataclasses.replace(RECIPE, options=dict(RECIPE.options) | {"weight_norm": True}, label_smoothing=0.1)
    first, path = got(tmp_path, shot)
    assert "head.parametrizations.weight.original1" in first.state_dict()
    assert same(first, got(tmp_path, shot)[0])
    assert path != got(tmp_path)[1]


def test_the_file_says_what_it_is(tmp_path: Path) -> None:
    _, path = got(tmp_path)
    digest = RECIPE.digest(identify_data(data(), preprocess))
    assert path == tmp_path / "sources" / f"digit-cnn-{digest}-7.safetensors"
    assert [file.name for file in path.parent.iterdir()] == [path.name]
    with safetensors.safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    assert Recipe(**json.loads(metadata["recipe"])) == RECIPE
    assert metadata["seed"] == "7"
    assert metadata["data"] == "noise"
    assert metadata["shiftmend"] == shiftmend.__version__
    assert metadata["torch"] == torch.__version__


@pytest.mark.slow
def test_other_recipes_seeds_and_data_are_other_files(tmp_path: Path) -> None:
    split = data()
    assert split.labels is not None
    dimmer = dataclasses.replace(split, images=split.images - (split.images > 128).to(torch.uint8))
    paths = {
        got(tmp_path)[1],
        got(tmp_path, seed=8)[1],
        got(tmp_path, dataclasses.replace(RECIPE, label_smoothing=0.1))[1],
        got(tmp_path, data=dataclasses.replace(split, name="other"))[1],
        got(tmp_path, data=split.take(torch.arange(95)))[1],
        got(tmp_path, data=dataclasses.replace(split, labels=1 - split.labels))[1],
        got(tmp_path, data=dimmer)[1],
        get_source_model(tmp_path, RECIPE, 7, split, lambda images: preprocess(images) * 1.001, device="cpu")[1],
    }
    assert len(paths) == 8
    assert set((tmp_path / "sources").iterdir()) == paths


def test_a_function_of_another_name_is_the_same_preprocessing() -> None:
    def renamed(images: Tensor) -> Tensor:
        return preprocess(images)

    assert identify_data(data(), renamed) == identify_data(data(), preprocess)


def test_a_preprocessing_may_flatten_images_and_must_keep_their_number() -> None:
    black, white = identify_data(data(), lambda images: images.flatten(1) / 255)["preprocess"][2]
    assert (black, white) == ([0.0] * 100, [1.0] * 100)
    with pytest.raises(DataError, match="tensor of two inputs"):
        identify_data(data(), lambda images: None)  # type: ignore[arg-type, return-value]
    with pytest.raises(DataError, match="tensor of two inputs"):
        identify_data(data(), lambda images: images[:1])


def test_image_files_are_known_by_name_number_and_labels(tmp_path: Path) -> None:
    def listing(**changes: Any) -> ImageFiles:
        facts = {"files": ["a.png", "b.png"], "labels": torch.tensor([0, 1]), "name": "pair"} | changes
        return ImageFiles(tmp_path, classes=("no", "yes"), size=(10, 10), **facts)

    same_again = [identify_data(listing(), preprocess) for _ in range(2)]
    assert same_again[0] == same_again[1]
    for changes in (
        {"name": "other"},
        {"labels": torch.tensor([1, 0])},
        {"files": ["a.png"], "labels": torch.tensor([0])},
    ):
        assert identify_data(listing(**changes), preprocess) != same_again[0]


def damaged(path: Path, how: str) -> None:
    whole = path.read_bytes()
    if how == "empty":
        path.write_bytes(b"")
    elif how == "cut short":
        path.write_bytes(whole[: len(whole) // 2])
    elif how == "a bit flipped":
        path.write_bytes(whole[:-9] + bytes([whole[-9] ^ 1]) + whole[-8:])
    elif how == "another network":
        safetensors.torch.save_file({"conv1.weight": torch.zeros(1)}, path)
    elif how == "no description":
        safetensors.torch.save_file(safetensors.torch.load(whole), path)
    else:  # a folder
        path.unlink()
        path.mkdir()


@pytest.mark.slow
@pytest.mark.parametrize(
    "how",
    ["empty", "cut short", "a bit flipped", "another network", "no description", "a folder"],
)
def test_a_damaged_file_is_named_and_can_be_deleted(how: str, tmp_path: Path) -> None:
    model, path = got(tmp_path)
    damaged(path, how)
    with pytest.raises(DataError, match=r"digit-cnn-[0-9a-f]{16}-7\.safetensors.*damaged"):
        got(tmp_path)
    if how != "a folder":
        path.unlink()
        assert same(got(tmp_path)[0], model)


def test_a_renamed_file_is_foreign(tmp_path: Path) -> None:
    _, path = got(tmp_path, seed=7)
    _, other = got(tmp_path, seed=8)
    path.replace(other)
    with pytest.raises(DataError, match=r"-8\.safetensors.*something else"):
        got(tmp_path, seed=8)


def test_a_killed_training_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "SECONDS_BETWEEN_CHECKPOINTS", 0)

    class Killed(Exception):
        pass

    def kill() -> None:
        raise Killed

    with pytest.raises(Killed):
        got(tmp_path, tick=kill)
    (left,) = (tmp_path / "sources").iterdir()
    assert left.suffix == ".checkpoint"
    model, path = got(tmp_path)
    assert same(model, train(RECIPE, data(), preprocess, seed=7, device="cpu"))
    assert list(path.parent.iterdir()) == [path]


def test_a_second_training_of_the_same_model_leaves_the_checkpoint_of_the_first_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training, "SECONDS_BETWEEN_CHECKPOINTS", 0)
    epochs: list[int] = []

    def second() -> None:
        (left,) = (tmp_path / "sources").glob("*.checkpoint")
        half = left.with_name(f".{left.name}.a1b2c3_4.partial")
        half.touch()
        written = left.stat().st_mtime_ns
        got(tmp_path, tick=lambda: epochs.append(left.stat().st_mtime_ns - written))
        half.unlink()  # is still there

    model, path = got(tmp_path, tick=second)
    assert epochs == [0, 0]
    assert same(model, train(RECIPE, data(), preprocess, seed=7, device="cpu"))
    assert list(path.parent.iterdir()) == [path]


def test_the_first_to_finish_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if, on a GPU, another process had meanwhile trained the same model to slightly different weights."""
    other, path = got(tmp_path)
    with torch.no_grad():
        other.head.bias += 1e-3
    elsewhere = path.rename(tmp_path / "elsewhere")
    with safetensors.safe_open(elsewhere, framework="pt") as file:
        facts = {key: file.metadata()[key] for key in ("digest", "recipe", "data")}

    def slow(*args: Any, **options: Any) -> nn.Module:
        model = train(*args, **options)
        sources._write_model(path, other, facts, 7)
        return model

    monkeypatch.setattr(sources, "train", slow)
    assert same(got(tmp_path)[0], other)


def test_an_interrupted_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(DataError, match=r"sources/\S+\.safetensors.*No space"):
        got(tmp_path)
    assert list((tmp_path / "sources").iterdir()) == []


@pytest.mark.slow
def test_two_processes_at_once_agree(tmp_path: Path) -> None:
    script = (
        "import sys; sys.path[:0] = sys.argv[2:]\n"
        "from pathlib import Path; from test_resources import got; from shiftmend.profiles import fingerprints\n"
        "print(fingerprints.weights(got(Path(sys.argv[1]))[0]))"
    )
    arguments = [
        sys.executable,
        "-c",
        script,
        str(tmp_path),
        str(Path(__file__).parent),
        str(Path(__file__).parents[2] / "helpers"),
    ]
    running = [subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    answers = [process.communicate(timeout=120)[0].strip() for process in running]
    assert [process.returncode for process in running] == [0, 0]
    model, path = got(tmp_path)
    assert answers == [shiftmend.profiles.fingerprints.weights(model)] * 2
    assert list(path.parent.iterdir()) == [path]


def test_weights_are_not_taken_for_a_network_whose_code_has_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def perceptron(activation: type[nn.Module]) -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(300, 8), activation(), nn.Linear(8, 2))

    monkeypatch.setitem(recipes.MODELS, "own", lambda: perceptron(nn.ReLU))
    recipe = Recipe(network="own", epochs=1, batch_size=32)
    first, _ = got(tmp_path, recipe)
    second, path = got(tmp_path, recipe)
    assert same(first, second)
    kept = path.read_bytes()
    monkeypatch.setitem(recipes.MODELS, "own", lambda: perceptron(nn.Tanh))
    with pytest.raises(DataError, match="network has changed"):
        got(tmp_path, recipe)
    assert path.read_bytes() == kept


# ---- Rows whose profile has another preset than the usual one: from the cell to the table

ONLINE = BENCHMARK.settings["online"]
MIXED = replace(
    BENCHMARK,
    settings=dict(BENCHMARK.settings)
    | {
        "offline": SETTINGS
        | {f"{name}-sliced": replace(SETTINGS[name], preset="sliced") for name in ("fr", "bufr")}
        | {"fr-paper": replace(SETTINGS["fr"], preset="paper")},
        "online": dict(ONLINE) | {"fr-sliced": replace(ONLINE["fr"], preset="sliced")},
    },
)
ROWS = ["source-only", "fr", "bufr", "fr-sliced", "bufr-sliced"]


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Resources:
    return Resources(MIXED, tmp_path_factory.mktemp("bench"), None, "cpu")


@pytest.fixture(scope="module")
def results(shop: Resources) -> list[Result]:
    found = [run_cell(shop, cell) for cell in plan(MIXED, methods=ROWS, shifts=["dim", "inverse"])]
    assert [result.error for result in found] == [None] * (2 * 2 * len(ROWS))
    return found


def cell_of(row: str, protocol: str = "offline") -> Cell:
    (found,) = plan(MIXED, protocol, methods=[row], shifts=["dim"], seeds=[1])
    return found


def by_hand(shop: Resources, preset: str, temperature: float) -> shiftmend.Profile:
    return shiftmend.profile(
        shop.model("plain", 1)[0],
        load_source("plain", None).profiled.images,
        preset=preset,
        bins=replace(PRESETS[preset].bins, temperature=temperature),
        batch_size=512,
        preprocess=MIXED.preprocess,
        progress=False,
    )


@pytest.mark.slow
@pytest.mark.parametrize(("row", "preset"), [("fr-sliced", "sliced"), ("bufr-sliced", "sliced"), ("fr-paper", "paper")])
def test_a_cell_adapts_with_the_profile_of_its_preset(shop: Resources, row: str, preset: str) -> None:
    result = run_cell(shop, cell_of(row))
    setting = MIXED.settings["offline"][row]
    expected = shiftmend.adapt(
        shop.model("plain", 1)[0],
        load_target("dim", None).adapt.images,
        by_hand(shop, preset, 0.01),
        setting.method,
        batch_size=32,
        seed=1,
        preprocess=MIXED.preprocess,
        progress=False,
        **setting.options,
    )
    assert result.error is None
    assert result.manifest["preset"] == preset
    assert result.manifest["adapted_weights"] == expected.manifest["adapted_weights"]
    usual = run_cell(shop, cell_of(setting.method))
    assert usual.manifest["preset"] == "reference"
    assert usual.manifest["adapted_weights"] != result.manifest["adapted_weights"]
    assert usual.manifest["source_weights"] == result.manifest["source_weights"]


@pytest.mark.slow
def test_a_stream_has_the_profile_of_its_preset_too(shop: Resources, monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[shiftmend.Profile] = []
    stream = shiftmend.stream

    def noted(model: Any, profile: shiftmend.Profile, *given: Any, **named: Any) -> Any:
        used.append(profile)
        return stream(model, profile, *given, **named)

    monkeypatch.setattr(shiftmend, "stream", noted)
    sliced, usual = (run_cell(shop, cell_of(row, "online")) for row in ("fr-sliced", "fr"))
    assert [sliced.error, usual.error] == [None, None]
    assert [(profile.preset, profile.bins.temperature) for profile in used] == [("sliced", 0.05), ("reference", 0.05)]
    assert [sliced.manifest["preset"], usual.manifest["preset"]] == ["sliced", "reference"]
    assert sliced.last != usual.last


def test_a_failed_cell_says_its_preset_as_well(tmp_path: Path) -> None:
    def absent(*_: Any) -> Any:
        raise DataError("file x is missing")

    broken = Resources(replace(MIXED, load_source=absent), tmp_path, None, "cpu")
    result = run_cell(broken, cell_of("fr-sliced"))
    assert result.error == "file x is missing"
    assert result.manifest["preset"] == "sliced"


@pytest.mark.slow
def test_old_results_stay_and_new_rows_are_what_is_missing(tmp_path: Path, results: list[Result]) -> None:
    """A store that was filled when the benchmark had no such rows."""
    with Store(tmp_path / "results.sqlite") as store:
        for result in results:
            if not result.cell.method.endswith("-sliced"):
                store.record(result)
        known = store.cells()
    before = plan(BENCHMARK, methods=["source-only", "fr", "bufr"], shifts=["dim", "inverse"])
    assert set(known) == set(before)
    todo = [cell for cell in plan(MIXED, methods=ROWS, shifts=["dim", "inverse"]) if cell not in known]
    assert {cell.method for cell in todo} == {"fr-sliced", "bufr-sliced"}
    assert len(todo) == 8


def test_rows_are_compared_like_methods(results: list[Result]) -> None:
    rows = {row.shift: row for row in compare(results, "fr-sliced", "fr")}
    assert set(rows) == {"dim", "inverse", None}
    accuracy = {
        (result.cell.method, result.cell.shift, result.cell.seed): result.last.accuracy  # type: ignore[union-attr]
        for result in results
    }
    for shift in ("dim", "inverse"):
        differences = [accuracy["fr-sliced", shift, seed] - accuracy["fr", shift, seed] for seed in (1, 2)]
        assert rows[shift].pairs == 2
        assert rows[shift].difference == pytest.approx(np.mean(differences))
    restoration = restoration_and_calibration(results)
    assert set(restoration.means) == set(ROWS)
    assert restoration.places == 4
    assert signals_and_accuracy(results)["slices"].overall.points == len(results)


@pytest.mark.parametrize("format", ["terminal", "markdown", "html", "latex"])
@pytest.mark.parametrize("make", [summary, per_shift])
def test_rows_stand_in_every_table(results: list[Result], format: Format, make: Any) -> None:
    table = make(results, benchmark="small", protocol="offline", methods=ROWS, shifts=["dim", "inverse"])
    text = render(table, format, width=200)
    mean = 100 * np.mean([result.last.accuracy for result in results if result.cell.method == "bufr-sliced"])
    for row in ROWS:
        assert row in text
    assert f"{mean:.1f} " in text
