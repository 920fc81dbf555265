from __future__ import annotations

import copy
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.utils.data import Dataset
from worlds import sensors
from zoo import ZOO

import shiftmend
from shiftmend.engine import checkpoint as checkpoints
from shiftmend.engine.history import Epoch
from shiftmend.errors import AdaptationError, ShiftmendError
from shiftmend.introspection.model_state import snapshot
from shiftmend.utils import sealing

OPTIONS = {"method": "bufr", "epochs_per_block": 6, "learning_rate": 0.1, "batch_size": 100, "progress": False}

SCRIPT = """
import sys, time
import torch
torch.set_num_threads(1)
import shiftmend
model, target = torch.load({world!r}, weights_only=False)
profile = shiftmend.Profile.load({profile!r})
slow = {slow!r}
def preprocess(x):
    time.sleep(slow)
    return x
result = shiftmend.adapt(model, target, profile, checkpoint={checkpoint!r}, preprocess=preprocess, **{options!r})
result.save({out!r})
"""


def command(tmp_path: Path, name: str, slow: float = 0.0) -> list[str]:
    """Model, data and profile come from files: made anew, each process would round them in its own way."""
    world, profile = tmp_path / "world.pt", tmp_path / "profile.safetensors"
    if not world.exists():
        torch.save((sensors().model, sensors().target), world)
        sensors().profile().save(profile)
    paths = {"checkpoint": tmp_path / f"{name}.ckpt", "world": world, "profile": profile, "out": tmp_path / name}
    text = SCRIPT.format(slow=slow, options=OPTIONS, **{key: str(path) for key, path in paths.items()})
    return [sys.executable, "-c", text]


def test_a_checkpoint_holds_weights_momentum_and_what_would_be_kept(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
    optimiser = torch.optim.SGD(model[0].parameters(), lr=0.1, momentum=0.9)
    model(torch.randn(5, 2)).sum().backward()
    optimiser.step()
    kept = {name: value + 1 for name, value in model.state_dict().items()}
    history = [
        Epoch(0, "", 0.0, {}, 0.0, {"slices": 0.5}),
        Epoch(1, "first", 0.1, {"features": 0.25}, 1.5, {"entropy": 0.75}),
    ]
    checkpoints.save(tmp_path / "c", "run", 1, 2, history, model, optimiser, kept)
    found = checkpoints.load(tmp_path / "c", "run")
    assert found is not None
    assert (found.stage, found.epoch, found.history) == (1, 2, history)
    buffers = {f"0.{name}": optimiser.state[p]["momentum_buffer"] for name, p in model[0].named_parameters()}
    for ours, theirs in (
        (found.model, model.state_dict()),
        ({name: state["momentum_buffer"] for name, state in found.optimiser.items()}, buffers),
        (found.selected, kept),
    ):
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert checkpoints.load(tmp_path / "elsewhere", "run") is None


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs a system that tells what is mapped")
def test_a_checkpoint_that_was_read_is_let_go(tmp_path: Path) -> None:
    """Windows replaces no file that is still mapped into memory: a run that went on could not save any more."""
    checkpoints.save(tmp_path / "c", "run", 0, 1, [], torch.nn.Linear(100, 100), None)
    found = checkpoints.load(tmp_path / "c", "run")
    assert found is not None
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()


def test_a_checkpoint_holds_complex_numbers_of_any_width(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 3)
    for dtype in (torch.complex64, torch.complex128):
        waves = torch.randn(3, dtype=dtype).conj()
        model.register_buffer(str(dtype).removeprefix("torch."), waves, persistent=False)
    checkpoints.save(tmp_path / "c", "run", 0, 1, [], model, None, snapshot(model))
    found = checkpoints.load(tmp_path / "c", "run")
    assert found is not None
    own = dict(model.named_parameters()) | dict(model.named_buffers())
    assert found.model.keys() == found.selected.keys() == own.keys()
    for name, value in found.model.items():
        assert value.dtype == own[name].dtype
        assert torch.equal(value, own[name])
        assert torch.equal(found.selected[name], own[name])


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor", "ignore:TypedStorage is deprecated")
def test_numbers_that_no_checkpoint_holds_are_refused_before_the_first_epoch(tmp_path: Path) -> None:
    world, seen = sensors(), list[int]()
    model = copy.deepcopy(world.model)
    model.register_buffer("steps", torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8))
    profile = shiftmend.profile(model, world.source, progress=False)
    options = OPTIONS | {"on_epoch": lambda _, row: seen.append(row.epoch)}
    with pytest.raises(ShiftmendError, match=r"'steps'.*qint8.*dequantize"):
        shiftmend.adapt(model, world.target, profile, checkpoint=tmp_path / "c", **options)
    assert not seen
    assert not (tmp_path / "c").exists()


@pytest.mark.slow
def test_a_run_killed_without_warning_ends_as_if_nothing_had_happened(tmp_path: Path) -> None:
    checkpoint = tmp_path / "run.ckpt"
    process = subprocess.Popen(command(tmp_path, "run", slow=0.02))
    seen: set[int] = set()
    deadline = time.monotonic() + 60
    while len(seen) < 4 and time.monotonic() < deadline and process.poll() is None:  # a few epochs, then no mercy
        if checkpoint.exists():
            seen.add(checkpoint.stat().st_mtime_ns)
        time.sleep(0.002)
    os.kill(process.pid, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL, "the run was over before it could be killed"
    assert checkpoint.exists()
    assert not (tmp_path / "run").exists()

    for name in ("run", "whole"):
        subprocess.run(command(tmp_path, name), check=True)
    resumed, whole = (load_file(tmp_path / name / "model.safetensors") for name in ("run", "whole"))
    assert resumed.keys() == whole.keys()
    assert all(torch.equal(resumed[name], value) for name, value in whole.items())
    assert not list(tmp_path.glob("*.partial"))


class Stop(Exception):
    pass


AUTO = {"method": "bufr", "learning_rate": 0.1, "batch_size": 100, "progress": False}
"""Blocks that end by themselves."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "epochs"),
    [
        *((OPTIONS, epochs) for epochs in (1, 5, 6, 7, 11)),
        *((AUTO, rounds) for rounds in (1, 4, "block", -1)),
        # The rate that was searched is taken up, too.
        *((AUTO | {"learning_rate": None}, rounds) for rounds in (1, "block")),
    ],
)
def test_resuming_after_any_epoch_is_bit_identical(
    tmp_path: Path, options: dict[str, Any], epochs: int | str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also exactly between two blocks, where the optimiser is a fresh one."""
    world = sensors()
    profile = world.profile()
    whole = shiftmend.adapt(world.model, world.target, profile, **options)
    blocks = [row.block for row in whole.history[1:]]
    epochs = blocks.count(blocks[0]) if epochs == "block" else len(blocks) if epochs == -1 else epochs
    from shiftmend.engine import checkpoint as checkpoints

    original, saved = checkpoints.save, []

    def counted(*args: object) -> None:
        original(*args)  # type: ignore[arg-type]
        saved.append(1)
        if len(saved) == epochs:
            raise Stop

    monkeypatch.setattr(checkpoints, "save", counted)
    with pytest.raises(Stop):
        shiftmend.adapt(world.model, world.target, profile, checkpoint=tmp_path / "c", **options)
    monkeypatch.setattr(checkpoints, "save", original)
    resumed = shiftmend.adapt(world.model, world.target, profile, checkpoint=tmp_path / "c", **options)
    for name, value in whole.model.state_dict().items():
        assert torch.equal(resumed.model.state_dict()[name], value), name
    assert resumed.manifest.get("learning_rate_search") == whole.manifest.get("learning_rate_search")
    assert resumed.manifest["stages"] == whole.manifest["stages"]
    assert [row.losses for row in resumed.history] == [row.losses for row in whole.history]
    assert [row.verification for row in resumed.history] == [row.verification for row in whole.history]


@pytest.mark.slow
def test_channels_last_models_are_saved_and_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = ZOO["paper-cnn"]
    model = case.model().to(memory_format=torch.channels_last)
    profile = shiftmend.profile(model, case.inputs(128))
    options = {"method": "fr", "epochs": 3, "learning_rate": 0.1, "progress": False}
    whole = shiftmend.adapt(model, case.inputs(64), profile, **options)
    shiftmend.adapt(model, case.inputs(64), profile, checkpoint=tmp_path / "c", **options)
    again = shiftmend.adapt(model, case.inputs(64), profile, checkpoint=tmp_path / "c", **options)
    again.save(tmp_path / "out")
    assert torch.equal(whole.model.conv2.weight, again.model.conv2.weight)


@pytest.mark.slow
def test_a_finished_run_is_not_run_again(tmp_path: Path) -> None:
    world = sensors()
    first = shiftmend.adapt(world.model, world.target, world.profile(), checkpoint=tmp_path / "c", **OPTIONS)
    second = shiftmend.adapt(world.model, world.target, world.profile(), checkpoint=tmp_path / "c", **OPTIONS)
    assert [row.seconds for row in first.history] == [row.seconds for row in second.history]
    assert torch.equal(first.model[0].weight, second.model[0].weight)


@pytest.mark.slow
def test_adabn_resumes_too(tmp_path: Path) -> None:
    world = sensors()
    whole = shiftmend.adapt(world.model, world.target, world.profile(), "adabn", progress=False)
    for _ in range(2):
        again = shiftmend.adapt(
            world.model, world.target, world.profile(), "adabn", checkpoint=tmp_path / "c", progress=False
        )
        assert torch.equal(again.model[1].running_var, whole.model[1].running_var)


@pytest.mark.slow
def test_checkpoints_of_other_runs_are_refused(tmp_path: Path) -> None:
    world = sensors()
    profile = world.profile()
    path = tmp_path / "c"
    shiftmend.adapt(world.model, world.target, profile, checkpoint=path, **OPTIONS)
    for other in ({"seed": 1}, {"epochs_per_block": 7}, {"learning_rate": 0.2}):
        with pytest.raises(AdaptationError, match="belongs to another run"):
            shiftmend.adapt(world.model, world.target, profile, checkpoint=path, **(OPTIONS | other))
    with pytest.raises(AdaptationError, match="belongs to another run"):
        shiftmend.adapt(world.model, world.target + 1, profile, checkpoint=path, **OPTIONS)
    with pytest.raises(AdaptationError, match="belongs to another run"):
        shiftmend.adapt(world.model, world.target, profile, checkpoint=path, preprocess=lambda x: x.flip(-1), **OPTIONS)
    with pytest.raises(AdaptationError, match="belongs to another run"):
        shiftmend.adapt(world.model, world.target, profile, checkpoint=path, blocks=["4", ["0", "1"]], **OPTIONS)
    one_pixel = world.target.clone()
    one_pixel[333, 2] += 1
    with pytest.raises(AdaptationError, match="belongs to another run"):
        shiftmend.adapt(world.model, one_pixel, profile, checkpoint=path, **OPTIONS)


class Given(Dataset[Tensor]):
    def __init__(self, inputs: Tensor) -> None:
        self.inputs = inputs

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> Tensor:
        return self.inputs[index]


@pytest.mark.slow
@pytest.mark.parametrize("rates", [0.1, [0.1, 0.05]])
@pytest.mark.parametrize(("before", "after"), [(1.1, 0.9), (0.9, 1.1)])
def test_a_run_that_goes_on_keeps_data_as_it_did_though_another_amount_of_memory_is_free(
    before: float, after: float, rates: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world, epochs = sensors(), list[int]()
    data, profile = Given(world.target), world.profile()
    options = {"method": "fr", "epochs": 5, "learning_rate": rates, "batch_size": 100, "progress": False}

    def with_room(part: float, **given: Any) -> shiftmend.Adaptation:
        monkeypatch.setattr("shiftmend.utils.devices.free_host_bytes", lambda: int(part * world.target.nbytes / 0.4))
        return shiftmend.adapt(world.model, data, profile, **(options | given))

    def stop(model: object, row: Epoch) -> None:
        epochs.append(row.epoch)
        if len(epochs) == 3:
            raise Stop

    whole = with_room(before)
    assert whole.manifest["resident"] is (before > 1)
    for _ in range(2):  # what goes on may be cut off again
        epochs.clear()
        with pytest.raises(Stop):
            with_room(before if not any(tmp_path.iterdir()) else after, checkpoint=tmp_path / "c", on_epoch=stop)
    resumed = with_room(after, checkpoint=tmp_path / "c")
    assert resumed.manifest["resident"] is whole.manifest["resident"]
    assert torch.equal(resumed.model[0].weight, whole.model[0].weight)


@pytest.mark.slow
def test_data_that_was_kept_and_is_far_too_large_now_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = sensors()
    given = world.model, Given(world.target), world.profile()
    shiftmend.adapt(*given, checkpoint=tmp_path / "c", **OPTIONS)
    monkeypatch.setattr("shiftmend.utils.devices.free_host_bytes", lambda: world.target.nbytes)
    with pytest.raises(AdaptationError, match="memory"):
        shiftmend.adapt(*given, checkpoint=tmp_path / "c", **OPTIONS)
    monkeypatch.undo()
    with pytest.raises(AdaptationError, match="belongs to another run"):
        shiftmend.adapt(*given, checkpoint=tmp_path / "c", resident=False, **OPTIONS)


def test_a_run_has_one_name_in_whatever_order_its_facts_are_given() -> None:
    name = checkpoints.identify({"seed": 1, "options": {"epochs": 2, "blocks": [3, 4]}})
    assert name == checkpoints.identify({"options": {"blocks": [3, 4], "epochs": 2}, "seed": 1})
    assert name != checkpoints.identify({"seed": 1, "options": {"epochs": 2, "blocks": [4, 3]}})


@pytest.mark.slow
def test_a_place_that_cannot_be_written_is_refused_before_the_first_epoch(tmp_path: Path) -> None:
    world = sensors()
    (tmp_path / "file").write_text("")
    os.mkfifo(tmp_path / "pipe")
    places = {
        tmp_path: "got the folder",
        tmp_path / "file/c": r"Not a directory|File exists",
        tmp_path / ("x" * 300): "File name too long",
        tmp_path / "pipe": "a device or a pipe",
    }
    for path, words in places.items():
        with pytest.raises(AdaptationError, match=words):
            shiftmend.adapt(world.model, world.target, world.profile(), checkpoint=path, **OPTIONS)
    shiftmend.adapt(
        world.model,
        world.target,
        world.profile(),
        checkpoint=tmp_path / "new/folder/c",
        **(OPTIONS | {"epochs_per_block": 1}),
    )
    assert (tmp_path / "new/folder/c").exists()


@pytest.mark.slow
def test_a_second_run_with_the_checkpoint_of_one_under_way_is_refused_and_the_first_ends_as_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = sensors()
    profile, refusals, written = world.profile(), list[str](), checkpoints.save_tensors
    (tmp_path / "link").symlink_to(tmp_path / "c")

    def while_it_is_written(place: Path, *rest: Any) -> None:
        written(place, *rest)
        with pytest.raises(AdaptationError) as caught:
            shiftmend.adapt(world.model, world.target, profile, checkpoint=tmp_path / "link", **OPTIONS)
        refusals.append(str(caught.value))

    monkeypatch.setattr(checkpoints, "save_tensors", while_it_is_written)
    options = OPTIONS | {"epochs_per_block": 1}
    result = shiftmend.adapt(world.model, world.target, profile, checkpoint=tmp_path / "c", **options)
    assert len(refusals) == result.manifest["epochs"]
    assert all(f"{tmp_path / 'link'}, which another run uses" in refusal for refusal in refusals)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c", "link"]


def test_a_full_disk_does_not_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from shiftmend.engine import checkpoint as checkpoints

    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoints, "save_tensors", full)
    world = sensors()
    result = shiftmend.adapt(
        world.model, world.target, world.profile(), checkpoint=tmp_path / "c", **(OPTIONS | {"epochs_per_block": 1})
    )
    assert result.manifest["status"] == "finished"
    assert "No space left" in caplog.text


@pytest.mark.parametrize("content", [b"", b"not a checkpoint", b"\xff" * 100])
def test_damaged_checkpoints_are_refused(tmp_path: Path, content: bytes) -> None:
    world = sensors()
    (tmp_path / "c").write_bytes(content)
    with pytest.raises(AdaptationError, match="no readable shiftmend checkpoint"):
        shiftmend.adapt(world.model, world.target, world.profile(), checkpoint=tmp_path / "c", **OPTIONS)
    assert (tmp_path / "c").read_bytes() == content


@pytest.mark.slow
def test_no_damaged_byte_goes_unnoticed(tmp_path: Path) -> None:
    """Some would change a weight, others its name: the run would go on, to another end."""
    checkpoints.save(tmp_path / "c", "run", 0, 1, [], torch.nn.Linear(2, 1), None)
    whole = (tmp_path / "c").read_bytes()
    assert checkpoints.load(tmp_path / "c", "run") is not None
    for place in range(len(whole)):
        (tmp_path / "c").write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        with pytest.raises(AdaptationError, match=r"no readable.*checkpoint"):
            checkpoints.load(tmp_path / "c", "run")


def test_what_a_killed_process_left_goes_when_the_run_goes_on(tmp_path: Path) -> None:
    (tmp_path / "large disk").mkdir()
    left = tmp_path / "large disk" / ".run.a1b2c3_4.partial"
    left.mkdir()
    os.utime(left, (0, 0))
    (tmp_path / "link").symlink_to(tmp_path / "large disk" / "run")
    with checkpoints.lock(tmp_path / "link") as alone:
        assert alone
    assert not left.exists()


def _swap(tensors: dict[str, Tensor], facts: dict[str, Any]) -> None:
    first, second = [name for name in tensors if name.startswith("model.") and tensors[name].ndim == 2][:2]
    tensors[first], tensors[second] = tensors[second], tensors[first]


def _widen(tensors: dict[str, Tensor], facts: dict[str, Any]) -> None:
    name = next(name for name in tensors if name.startswith("model.") and tensors[name].ndim == 2)
    tensors[name] = tensors[name].double()


def _rename(tensors: dict[str, Tensor], facts: dict[str, Any]) -> None:
    tensors["model.other"] = tensors.pop(next(name for name in tensors if name.startswith("model.")))


def _flatten_momentum(tensors: dict[str, Tensor], facts: dict[str, Any]) -> None:
    name = next(name for name in tensors if name.startswith("optimiser.") and tensors[name].ndim == 2)
    tensors[name] = tensors[name].reshape(-1)


def _cut_history(tensors: dict[str, Tensor], facts: dict[str, Any]) -> None:
    del facts["history"][1]


def _swap_history(tensors: dict[str, Tensor], facts: dict[str, Any]) -> None:
    facts["history"][1], facts["history"][2] = facts["history"][2], facts["history"][1]


def _type_history(tensors: dict[str, Tensor], facts: dict[str, Any]) -> None:
    facts["history"][-1]["losses"] = {"features": "low"}


def _turn_back_steps(tensors: dict[str, Tensor], facts: dict[str, Any]) -> None:
    facts["history"][-1]["steps"] = 0


def _skip_ahead(tensors: dict[str, Tensor], facts: dict[str, Any]) -> None:
    facts["stage"], facts["epoch"] = 99, 1


@pytest.mark.slow
def test_a_resealed_checkpoint_is_checked_against_the_model(tmp_path: Path) -> None:
    world, path = sensors(), tmp_path / "c"
    options = OPTIONS | {"method": "fr", "epochs": 2, "checkpoint": path}
    del options["epochs_per_block"]
    shiftmend.adapt(world.model, world.target, world.profile(), **options)
    good = path.read_bytes()
    for change in (
        *(_swap, _widen, _rename, _flatten_momentum),
        *(_cut_history, _swap_history, _type_history, _turn_back_steps, _skip_ahead),
    ):
        path.write_bytes(good)
        with safe_open(path, framework="pt") as file:
            facts, tensors = json.loads(file.metadata()["facts"]), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        change(tensors, facts)
        metadata = {"format": "shiftmend checkpoint", "facts": json.dumps(facts), **sealing.blank_entries()}
        save_file(tensors, path, metadata)
        with path.open("rb+") as sealed:
            sealing.seal(sealed)
        with pytest.raises(AdaptationError, match="no readable"):
            shiftmend.adapt(world.model, world.target, world.profile(), **options)
