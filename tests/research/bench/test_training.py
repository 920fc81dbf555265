"""Training from a recipe: against steps written out by hand, bit for bit from the seed, and through files."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from data_layouts import write_png
from graphs import captured_without_a_gpu
from torch import Tensor, nn

from shiftmend.errors import DataError, ShiftmendError
from shiftmend.inputs.images import Split
from shiftmend.inputs.images import signed as preprocess
from shiftmend.research.bench import recipes, training
from shiftmend.research.bench.recipes import Recipe, build_untrained, learning_rate_at
from shiftmend.research.bench.training import make_batches, train
from shiftmend.research.datasets.streamed import ImageFiles
from shiftmend.research.networks import MODELS, DigitCNN

TINY = {"classes": 3, "width": 4, "image_size": 12}


def toy(count: int = 192, size: int = 12, seed: int = 0) -> Split:
    """Three classes: a bright bar on the left, in the middle, or on the right, under noise."""
    draws = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % 3
    images = torch.randint(0, 90, (count, 1, size, size), generator=draws)
    for label in range(3):
        images[labels == label, :, :, label * size // 3 : (label + 1) * size // 3] += 130
    return Split(images.to(torch.uint8), labels, "toy", ("left", "middle", "right"))


def recipe(**changes: Any) -> Recipe:
    return Recipe(**({"network": "digit-cnn", "options": TINY, "epochs": 2, "batch_size": 64} | changes))


def trained(seed: int = 0, split: Split | ImageFiles | None = None, **changes: Any) -> nn.Module:
    return train(recipe(**changes), split or toy(), preprocess, seed=seed, device="cpu", workers=0)


def differences(first: nn.Module, second: nn.Module) -> list[str]:
    ours, theirs = first.state_dict(), second.state_dict()
    assert list(ours) == list(theirs)
    return [name for name in ours if not torch.equal(ours[name], theirs[name])]


class Scoreboard(nn.Module):
    """Logits that are parameters, one row an image; the gradient is written out in numpy below."""

    def __init__(self, classes: int = 3, rows: int = 6) -> None:
        super().__init__()
        self.scores = nn.Parameter(torch.randn(rows, classes, dtype=torch.float64))

    def forward(self, images: Tensor) -> Tensor:
        return images[:, 0, 0, : len(self.scores)] @ self.scores  # an image is a one-hot row


def one_hot_rows(inputs: Tensor) -> Tensor:
    return inputs.double() / 255


def scoreboard_data() -> Split:
    images = torch.zeros(6, 1, 6, 6, dtype=torch.uint8)
    images[torch.arange(6), 0, 0, torch.arange(6)] = 255
    return Split(images, torch.tensor([0, 1, 2, 2, 1, 0]), "rows")


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"label_smoothing": 0.1},
        {"weight_decay": 0.05},
        {"momentum": 0.0},
        {"nesterov": True},
        {"schedule": "inverse"},
        {"schedule": "inverse", "label_smoothing": 0.3, "weight_decay": 0.01, "nesterov": True, "learning_rate": 1.5},
    ],
)
def test_equals_sgd_written_out(changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MODELS, "scoreboard", Scoreboard)
    steps = Recipe(network="scoreboard", epochs=5, **({"learning_rate": 0.5} | changes))
    model = train(steps, scoreboard_data(), one_hot_rows, seed=3, device="cpu")

    # one batch an epoch, so that the order of the images does not matter
    scores = build_untrained(steps, 3).scores.detach().numpy().copy()
    targets = np.full((6, 3), steps.label_smoothing / 3)
    targets[np.arange(6), [0, 1, 2, 2, 1, 0]] += 1 - steps.label_smoothing
    velocity = np.zeros_like(scores)
    for epoch in range(5):
        factor = (
            (1 + 10 * epoch / 5) ** -0.75 if steps.schedule == "inverse" else (1 + math.cos(math.pi * epoch / 5)) / 2
        )
        likely = np.exp(scores) / np.exp(scores).sum(1, keepdims=True)
        gradient = (likely - targets) / 6 + steps.weight_decay * scores
        velocity = steps.momentum * velocity + gradient
        move = gradient + steps.momentum * velocity if steps.nesterov else velocity
        scores = scores - steps.learning_rate * factor * move
    np.testing.assert_allclose(model.scores.detach().numpy(), scores, rtol=1e-12)


def test_learns_what_is_there_to_learn() -> None:
    model = trained(epochs=3, batch_size=32, augmentation="rotate-10")
    fresh = toy(90, seed=1)
    with torch.no_grad():
        after = (model(preprocess(fresh.images)).argmax(1) == fresh.labels).double().mean()
        before = (build_untrained(recipe()).eval()(preprocess(fresh.images)).argmax(1) == fresh.labels).double().mean()
    assert after > 0.9 > 0.7 > before


@pytest.mark.slow
@pytest.mark.parametrize("augmentation", ["none", "crop-flip-rotate-15"])
def test_the_seed_decides_every_bit(augmentation: str) -> None:
    torch.manual_seed(1)
    first = trained(seed=5, augmentation=augmentation)
    torch.manual_seed(2)
    assert not differences(first, trained(seed=5, augmentation=augmentation))
    other = differences(first, trained(seed=6, augmentation=augmentation))
    assert {"conv1.weight", "head.weight", "bn1.running_mean"} <= set(other)


@pytest.mark.slow
def test_augmentation_and_smoothing_and_decay_matter() -> None:
    plain = trained()
    for changes in (
        {"augmentation": "crop-flip"},
        {"label_smoothing": 0.1},
        {"weight_decay": 5e-4},
        {"schedule": "inverse"},
        {"batch_size": 32},
    ):
        assert "head.weight" in differences(plain, trained(**changes)), changes


def test_leaves_the_global_generator_and_the_data_alone() -> None:
    split = toy()
    before, state = split.images.clone(), torch.get_rng_state()
    trained(split=split, augmentation="crop-flip")
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(split.images, before)


def test_gives_an_ordinary_model_back() -> None:
    with torch.inference_mode():
        model = trained(epochs=1)
    assert not any(module.training for module in model.modules())
    assert all(p.device.type == "cpu" and p.requires_grad and p.grad is None for p in model.parameters())
    assert all(value.is_contiguous() and not value.is_inference() for value in model.state_dict().values())


def test_full_batches_only_in_a_new_order_each_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Tensor] = []

    class Spy(Scoreboard):
        def forward(self, images: Tensor) -> Tensor:
            if self.training:  # it is tried with two images before
                seen.append(images[:, 0, 0, 0].clone())
            return super().forward(images)

    monkeypatch.setitem(MODELS, "spy", Spy)
    numbered = torch.arange(50, dtype=torch.uint8).view(-1, 1, 1, 1).expand(-1, 1, 6, 6)
    split = Split(numbered.contiguous(), torch.arange(50) % 3, "numbered")
    ticks: list[int] = []
    train(
        Recipe(network="spy", epochs=3, batch_size=16, learning_rate=1e-9),
        split,
        lambda images: images.double(),
        seed=0,
        device="cpu",
        tick=lambda: ticks.append(len(seen)),
    )
    assert [len(batch) for batch in seen] == [16] * 9
    assert ticks == [3, 6, 9]
    epochs = [torch.cat(seen[start : start + 3]).int().tolist() for start in (0, 3, 6)]
    assert all(len(set(epoch)) == 48 for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]


def test_fewer_images_than_a_batch_are_one_batch() -> None:
    assert "head.weight" in differences(build_untrained(recipe()), trained(split=toy(20)))


def test_a_diverging_training_is_one_clear_error() -> None:
    with pytest.raises(ShiftmendError, match=r"seed 4 diverged.*\(1e\+30\)"):
        trained(seed=4, learning_rate=1e30, epochs=3)


def test_weights_that_go_bad_in_the_last_step_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MODELS, "scoreboard", Scoreboard)
    # one step: its loss is that of the first weights, and finite
    with pytest.raises(ShiftmendError, match="diverged in epoch 1"):
        train(
            Recipe(network="scoreboard", epochs=1, learning_rate=1e308, weight_decay=1e10),
            scoreboard_data(),
            one_hot_rows,
            seed=0,
            device="cpu",
        )


def test_unusable_data_are_refused() -> None:
    split = toy()
    with pytest.raises(DataError, match="a label for each"):
        trained(split=dataclasses.replace(split, labels=None))
    with pytest.raises(DataError, match="at least two images"):
        trained(split=split.take(torch.tensor([0])))
    with pytest.raises(DataError, match="classes"):
        trained(options=TINY | {"classes": 2})


# --- the recipe itself


class Killed(Exception):
    pass


def killed_after(ticks: int, path: Path, **changes: Any) -> None:
    left = iter(range(ticks - 1))

    def tick() -> None:
        if next(left, None) is None:
            raise Killed

    with pytest.raises(Killed):
        train(recipe(**changes), toy(), preprocess, seed=1, device="cpu", checkpoint=path, tick=tick)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["cosine", "inverse"])
def test_goes_on_to_the_same_end(schedule: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "SECONDS_BETWEEN_CHECKPOINTS", 0)
    plan: dict[str, Any] = {"epochs": 4, "schedule": schedule, "augmentation": "crop-flip"}
    path = tmp_path / "training.checkpoint"
    killed_after(2, path, **plan)
    ticks: list[int] = []
    steps: list[float] = []
    monkeypatch.setattr(training, "learning_rate_at", lambda *args: steps.append(learning_rate_at(*args)) or steps[-1])
    resumed = train(
        recipe(**plan), toy(), preprocess, seed=1, device="cpu", checkpoint=path, tick=lambda: ticks.append(len(steps))
    )
    assert ticks == [0, 0, 3, 6]  # two epochs were not done again
    assert not differences(resumed, trained(seed=1, **plan))


def test_a_checkpoint_of_another_training_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "SECONDS_BETWEEN_CHECKPOINTS", 0)
    path = tmp_path / "training.checkpoint"
    killed_after(1, path)
    with pytest.raises(ShiftmendError, match=r"training\.checkpoint.*another run"):
        train(recipe(), toy(), preprocess, seed=2, device="cpu", checkpoint=path)


def test_a_checkpoint_of_a_network_that_was_changed_since_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training, "SECONDS_BETWEEN_CHECKPOINTS", 0)
    path = tmp_path / "training.checkpoint"
    killed_after(1, path)
    make = recipes.build
    monkeypatch.setattr(recipes, "build", lambda *args, **kw: nn.Sequential(make(*args, **kw)))
    with pytest.raises(ShiftmendError, match=r"training\.checkpoint.*other layers"):
        train(recipe(), toy(), preprocess, seed=1, device="cpu", checkpoint=path)


def test_checkpoints_are_written_now_and_then_only(tmp_path: Path) -> None:
    path = tmp_path / "training.checkpoint"
    train(recipe(), toy(), preprocess, seed=1, device="cpu", checkpoint=path)
    assert not path.exists()


# --- image files


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> ImageFiles:
    from PIL import Image

    folder, split = tmp_path_factory.mktemp("files"), toy(40)
    for number, image in enumerate(split.images.expand(-1, 3, -1, -1)):
        Image.fromarray(image.permute(1, 2, 0).numpy()).save(folder / f"{number}.png")
    assert split.labels is not None
    return ImageFiles(folder, [f"{number}.png" for number in range(40)], split.labels, "files", split.classes)


@pytest.mark.slow
def test_trains_from_files_whatever_the_number_of_workers(files: ImageFiles) -> None:
    state = torch.get_rng_state()
    plan = recipe(batch_size=16, augmentation="rotate-10")
    models = [
        train(plan, files, preprocess, seed=seed, device="cpu", workers=n) for seed, n in ((3, 0), (3, 2), (4, 0))
    ]
    assert torch.equal(torch.get_rng_state(), state)
    assert not differences(models[0], models[1])
    assert "head.weight" in differences(models[0], models[2])
    assert "head.weight" in differences(models[0], build_untrained(plan, 3))


def test_the_order_of_files_is_drawn_from_the_generator_given(files: ImageFiles) -> None:
    orders = []
    for seed, around in ((1, 0), (1, 5), (2, 0)):
        torch.manual_seed(around)
        batches = make_batches(files, 16, torch.device("cpu"), torch.Generator().manual_seed(seed), 0)
        orders.append(torch.cat([labels for _, labels in batches()]))
    assert torch.equal(orders[0], orders[1])
    assert not torch.equal(orders[0], orders[2])


# --- weights to start from


def test_starts_from_everything_but_the_head(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHIFTMEND_DATA", str(tmp_path))
    torch.manual_seed(9)
    given = DigitCNN(classes=8, width=4, image_size=12)
    state = {name: value for name, value in given.state_dict().items() if "num_batches" not in name}
    (tmp_path / "weights").mkdir()
    safetensors.torch.save_file(state, tmp_path / "weights" / "cnn.safetensors")
    # a rate that moves nothing: what comes back is what it started from, statistics apart
    changes = {"learning_rate": 1e-30, "epochs": 1}
    model = trained(seed=2, pretrained="weights/cnn.safetensors", **changes).state_dict()
    fresh = build_untrained(recipe(), 2).state_dict()
    for name, _ in given.named_parameters():
        expected = fresh[name] if name.startswith("head") else state[name]
        torch.testing.assert_close(model[name], expected, rtol=0, atol=1e-20)
    absolute = trained(seed=2, pretrained=str(tmp_path / "weights" / "cnn.safetensors"), **changes)
    assert torch.equal(absolute.state_dict()["conv1.weight"], state["conv1.weight"])


def test_statistics_are_started_from_too(tmp_path: Path) -> None:
    given = DigitCNN(classes=3, width=4, image_size=12)
    nn.init.constant_(given.bn1.running_mean, 1e6)
    safetensors.torch.save_file(given.state_dict(), tmp_path / "cnn.safetensors")
    model = train(
        recipe(pretrained="cnn.safetensors", epochs=1), toy(), preprocess, seed=0, device="cpu", root=tmp_path
    )
    # three batches with a weight of 0.1 each leave 0.9^3 of what was there
    torch.testing.assert_close(model.bn1.running_mean, torch.full((4,), 0.9**3 * 1e6), rtol=1e-4, atol=10)


def test_unusable_weights_are_refused(tmp_path: Path) -> None:
    def start(name: str) -> None:
        train(recipe(pretrained=name), toy(), preprocess, seed=0, device="cpu", root=tmp_path)

    with pytest.raises(DataError, match=r"weights.*absent\.safetensors"):
        start("absent.safetensors")
    (tmp_path / "text.safetensors").write_text("no weights")
    with pytest.raises(DataError, match=r"text\.safetensors.*cannot be read"):
        start("text.safetensors")
    wide = DigitCNN(classes=3, width=5, image_size=12).state_dict()
    safetensors.torch.save_file(wide, tmp_path / "wide.safetensors")
    with pytest.raises(DataError, match=r"conv1\.weight.*\[4, 3, 5, 5\]"):
        start("wide.safetensors")
    few = {"conv1.weight": torch.zeros(4, 3, 5, 5)}
    safetensors.torch.save_file(few, tmp_path / "few.safetensors")
    with pytest.raises(DataError, match=r"conv1\.bias.*\[4\]"):
        start("few.safetensors")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_learns_as_well_and_its_generator_is_left_alone() -> None:
    state = torch.cuda.get_rng_state()
    plan = recipe(epochs=3, batch_size=32, augmentation="rotate-10")
    model = train(plan, toy(), preprocess, seed=0, device="cuda")
    assert torch.equal(torch.cuda.get_rng_state(), state)
    assert next(model.parameters()).device.type == "cpu"
    fresh = toy(90, seed=1)
    assert (model(preprocess(fresh.images)).argmax(1) == fresh.labels).double().mean() > 0.9


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_training_in_bfloat16_learns_as_well() -> None:
    plan = recipe(epochs=4, batch_size=32, autocast=True)
    model = train(plan, toy(), preprocess, seed=0, device="cuda")
    assert {value.dtype for value in model.state_dict().values() if value.is_floating_point()} == {torch.float32}
    fresh = toy(90, seed=1)
    assert (model(preprocess(fresh.images)).argmax(1) == fresh.labels).double().mean() > 0.9
    full = train(dataclasses.replace(plan, autocast=False), toy(), preprocess, seed=0, device="cuda")
    assert not torch.equal(next(full.parameters()), next(model.parameters()))


def test_weights_that_the_callers_autocast_would_keep_are_cast_anew_in_training() -> None:
    found = []
    for cache in (True, False):
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=cache):
            found.append(trained())
    assert differences(*found) == []


@pytest.mark.slow
@pytest.mark.parametrize("compile", [False, True])
def test_captured_training_is_the_training_that_it_stands_for(compile: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    plan, compiled = recipe(epochs=1), list[bool]()  # the rate of other epochs is in memory on a GPU alone
    eager = train(plan, toy(), preprocess, seed=3, device="cpu")
    captured_without_a_gpu(monkeypatch)
    monkeypatch.setattr(training, "_can_be_captured", lambda *_: True)
    original, plainly = training.capture_epoch, torch.compile

    def watched(*arguments: Any, **options: Any) -> Any:
        compiled.append(arguments[1]._compiled_call_impl is not None)
        return original(*arguments, **options)

    monkeypatch.setattr(training, "capture_epoch", watched)
    monkeypatch.setattr(torch, "compile", lambda function, **_: plainly(function, backend="eager"))
    model = train(plan, toy(), preprocess, seed=3, device="cpu", compile=compile)
    torch._dynamo.reset()  # the compiler is not to remember what it saw while a graph was recorded
    assert compiled == [compile]
    assert model._compiled_call_impl is None
    for name, value in eager.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], value)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("augmentation", "compile"), [("none", False), ("none", True), ("crop-flip-rotate-15", False)])
def test_training_on_a_gpu_is_captured_and_learns_as_an_eager_one(
    augmentation: str, compile: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = recipe(epochs=4, batch_size=32, augmentation=augmentation)
    captured: list[bool] = []
    original = training.capture_epoch

    def watched(*arguments: Any, compiled: bool) -> Any:
        captured.append((made := original(*arguments, compiled=compiled)) is not None and compiled == compile)
        return made

    monkeypatch.setattr(training, "capture_epoch", watched)
    model = train(plan, toy(), preprocess, seed=0, device="cuda", compile=compile)
    assert captured == [True]
    again = train(plan, toy(), preprocess, seed=0, device="cuda", compile=compile)
    first = build_untrained(plan, 0)
    for one, other, begun in zip(model.parameters(), again.parameters(), first.parameters(), strict=True):
        # cuDNN adds in no fixed order; another seed ends as far away as the training went
        assert (one - other).norm() <= 0.1 * (one - begun).norm() + 1e-5
    monkeypatch.setattr(training, "capture_epoch", lambda *_, **__: None)
    eager = train(plan, toy(), preprocess, seed=0, device="cuda")
    for one, other, begun in zip(model.parameters(), eager.parameters(), first.parameters(), strict=True):
        # a rate that did not fall, or other draws, would end more than 0.24 of the way off
        assert (one - other).norm() <= 0.2 * (one - begun).norm() + 1e-5
    fresh = toy(90, seed=1)
    enough = 0.9 if augmentation == "none" else 0.6  # turned and mirrored, the patterns take longer to learn
    for one in (model, eager):
        assert (one(preprocess(fresh.images)).argmax(1) == fresh.labels).double().mean() > enough


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("augmentation", ["none", "crop-flip-rotate-15"])
def test_nothing_waits_for_a_gpu_within_an_epoch(augmentation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    epochs: list[Tensor] = []

    def watched(images: Tensor) -> Tensor:
        torch.cuda.set_sync_debug_mode("error")  # from the first batch to the end of the epoch
        return preprocess(images)

    def finite(total: Tensor, model: nn.Module) -> bool:
        torch.cuda.set_sync_debug_mode("default")
        epochs.append(total)
        return True

    monkeypatch.setattr(training, "_is_finite", finite)
    try:
        monkeypatch.setattr(training, "capture_epoch", lambda *_, **__: None)
        train(recipe(augmentation=augmentation), toy(), watched, seed=0, device="cuda")
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(epochs) == 2


@pytest.mark.parametrize(
    ("last", "ready", "sentence"),
    [
        (nn.Sequential(nn.Flatten(), nn.Linear(4, 2)), lambda images: images, r"inputs.*uint8"),
    ],
)
def test_a_network_of_ones_own_that_does_not_fit(
    monkeypatch: pytest.MonkeyPatch, last: nn.Module, ready: Any, sentence: str
) -> None:
    monkeypatch.setitem(MODELS, "own", lambda: nn.Sequential(nn.Conv2d(1, 1, 1), last))
    images = Split(torch.zeros(4, 1, 2, 2, dtype=torch.uint8), torch.tensor([0, 1, 0, 1]), "four")
    with pytest.raises(DataError, match=sentence):
        train(Recipe(network="own", epochs=1, batch_size=4), images, ready, seed=0, device="cpu")


def test_flat_inputs_train(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MODELS, "own", lambda: nn.Linear(4, 2))
    labels = torch.arange(64) % 2
    images = Split((labels[:, None, None, None] * 255).to(torch.uint8).expand(64, 1, 2, 2), labels, "flat")
    recipe = Recipe(network="own", epochs=5, batch_size=16)
    model = train(recipe, images, lambda images: images.flatten(1) / 255, seed=0, device="cpu")
    with torch.no_grad():
        assert torch.equal(model(images.images.flatten(1) / 255).argmax(1), labels)


# ---- The batches of a training: whole, drawn from the generator given, and labels with their own images

COUNT, SIZE = 11, 4
LABELS = torch.arange(COUNT) % 5
HERE = torch.device("cpu")


def test_images_in_memory_come_in_the_generators_order() -> None:
    images = torch.arange(COUNT, dtype=torch.uint8).view(COUNT, 1, 1, 1)
    batches = make_batches(Split(images, LABELS, "few"), SIZE, HERE, torch.Generator().manual_seed(3), None)
    draws = torch.Generator().manual_seed(3)
    for _ in range(2):
        order = torch.randperm(COUNT, generator=draws)
        torch.manual_seed(0)  # which must not matter
        given = list(batches())
        assert [batch.flatten().tolist() for batch, _ in given] == [order[:4].tolist(), order[4:8].tolist()]
        assert [labels.tolist() for _, labels in given] == [LABELS[order[:4]].tolist(), LABELS[order[4:8]].tolist()]


def test_files_come_in_whole_batches_and_in_another_order_each_time(tmp_path: Path) -> None:
    names = [f"{number}.png" for number in range(COUNT)]
    for number, name in enumerate(names):
        write_png(tmp_path / name, np.full((2, 3, 3), number, np.uint8))
    files = ImageFiles(tmp_path, names, LABELS, "few", tuple("abcde"))
    orders = []
    for seed in (3, 3, 4):
        batches = make_batches(files, SIZE, HERE, torch.Generator().manual_seed(seed), 0)
        for _ in range(2):
            given = list(batches())
            assert [len(batch) for batch, _ in given] == [SIZE, SIZE]
            seen = torch.cat([batch[:, 0, 0, 0] for batch, _ in given]).long()
            assert len(seen.unique()) == 2 * SIZE
            assert torch.equal(torch.cat([labels for _, labels in given]), LABELS[seen])
            orders.append(seen.tolist())
    assert orders[:2] == orders[2:4]
    assert len({tuple(order) for order in orders}) == 4
