"""Source models on disk: found again, never mistaken for another, never half written."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn

import shiftmend
from shiftmend.errors import DataError
from shiftmend.inputs.images import Split
from shiftmend.inputs.images import signed as preprocess
from shiftmend.research.bench import recipes, training
from shiftmend.research.bench import resources as sources
from shiftmend.research.bench.recipes import Recipe
from shiftmend.research.bench.resources import identity, obtain
from shiftmend.research.bench.training import train
from shiftmend.research.datasets.streamed import ImageFiles

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
    return obtain(home, recipe, seed, changes.get("data") or data(), preprocess, device="cpu", tick=changes.get("tick"))


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
    digest = RECIPE.digest(identity(data(), preprocess))
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
        obtain(tmp_path, RECIPE, 7, split, lambda images: preprocess(images) * 1.001, device="cpu")[1],
    }
    assert len(paths) == 8
    assert set((tmp_path / "sources").iterdir()) == paths


def test_a_function_of_another_name_is_the_same_preprocessing() -> None:
    def renamed(images: Tensor) -> Tensor:
        return preprocess(images)

    assert identity(data(), renamed) == identity(data(), preprocess)


def test_a_preprocessing_may_flatten_images_and_must_keep_their_number() -> None:
    black, white = identity(data(), lambda images: images.flatten(1) / 255)["preprocess"][2]
    assert (black, white) == ([0.0] * 100, [1.0] * 100)
    with pytest.raises(DataError, match="preprocess gave None for two images, expected a tensor of two inputs"):
        identity(data(), lambda images: None)  # type: ignore[arg-type, return-value]
    with pytest.raises(DataError, match=r"preprocess gave \[1, 1, 10, 10\] for two images"):
        identity(data(), lambda images: images[:1])


def test_image_files_are_known_by_name_number_and_labels(tmp_path: Path) -> None:
    def listing(**changes: Any) -> ImageFiles:
        facts = {"files": ["a.png", "b.png"], "labels": torch.tensor([0, 1]), "name": "pair"} | changes
        return ImageFiles(tmp_path, classes=("no", "yes"), size=(10, 10), **facts)

    same_again = [identity(listing(), preprocess) for _ in range(2)]
    assert same_again[0] == same_again[1]
    for changes in (
        {"name": "other"},
        {"labels": torch.tensor([1, 0])},
        {"files": ["a.png"], "labels": torch.tensor([0])},
    ):
        assert identity(listing(**changes), preprocess) != same_again[0]


def damaged(path: Path, how: str) -> None:
    whole = path.read_bytes()
    if how == "empty":
        path.write_bytes(b"")
    elif how == "cut short":
        path.write_bytes(whole[: len(whole) // 2])
    elif how == "a bit flipped":
        path.write_bytes(whole[:-9] + bytes([whole[-9] ^ 1]) + whole[-8:])
    elif how == "unreadable answers":
        path.write_bytes(whole.replace(b'"answers":"[', b'"answers":"{'))
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
    ["empty", "cut short", "a bit flipped", "unreadable answers", "another network", "no description", "a folder"],
)
def test_a_damaged_file_is_named_and_can_be_deleted(how: str, tmp_path: Path) -> None:
    model, path = got(tmp_path)
    damaged(path, how)
    with pytest.raises(
        DataError, match=r"digit-cnn-[0-9a-f]{16}-7\.safetensors is damaged or foreign.*delete it to train"
    ):
        got(tmp_path)
    if how != "a folder":
        path.unlink()
        assert same(got(tmp_path)[0], model)


def test_a_renamed_file_is_foreign(tmp_path: Path) -> None:
    _, path = got(tmp_path, seed=7)
    _, other = got(tmp_path, seed=8)
    path.replace(other)
    with pytest.raises(DataError, match=r"-8\.safetensors is damaged or foreign \(it was written for something else\)"):
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
        sources._write(path, other, facts, 7)
        return model

    monkeypatch.setattr(sources, "train", slow)
    assert same(got(tmp_path)[0], other)


def test_an_interrupted_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(DataError, match=r"sources/\S+\.safetensors cannot be written \(No space left on device\)"):
        got(tmp_path)
    assert list((tmp_path / "sources").iterdir()) == []


@pytest.mark.slow
def test_two_processes_at_once_agree(tmp_path: Path) -> None:
    script = (
        "import sys; sys.path[:0] = sys.argv[2:]\n"
        "from pathlib import Path; from test_sources import got; from shiftmend.profiles import fingerprints\n"
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
    with pytest.raises(DataError, match=r"the code of its network has changed.*delete it to train again"):
        got(tmp_path, recipe)
    assert path.read_bytes() == kept
