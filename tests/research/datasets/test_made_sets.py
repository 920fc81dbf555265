"""Sets that are made: read back by the readers of the published files, they are what benchmarks make in memory."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from data_layouts import random_images, write_idx

from shiftmend import shifts
from shiftmend.cli import main
from shiftmend.errors import DataError
from shiftmend.inputs.images import Split
from shiftmend.research.bench.suite import find
from shiftmend.research.datasets import made_sets as making
from shiftmend.research.datasets import verify
from shiftmend.research.datasets.cifar import cifar10, cifar10_c, cifar100_c
from shiftmend.research.datasets.digits import emnist, emnist_da, mnist, mnist_c, mnist_m
from shiftmend.research.datasets.made_sets import MANIFEST, SEED, find_origin, make

COUNT = 30


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Clean sets of a few images; portions are small, so that each set has several."""
    monkeypatch.setattr(shifts, "MAX_IMAGES", 8)
    monkeypatch.setattr(shifts, "MAX_VALUES", 1 << 20)
    for seed, split in enumerate(("train", "t10k")):
        stem = tmp_path / "MNIST" / "raw" / split
        write_idx(Path(f"{stem}-images-idx3-ubyte"), random_images(COUNT, 28, 28, seed=seed))
        write_idx(Path(f"{stem}-labels-idx1-ubyte"), np.arange(COUNT) % 10)
    for seed, split in enumerate(("train", "test")):
        stem = tmp_path / "EMNIST" / "raw" / f"emnist-balanced-{split}"
        write_idx(Path(f"{stem}-images-idx3-ubyte"), random_images(94, 28, 28, seed=seed))
        write_idx(Path(f"{stem}-labels-idx1-ubyte"), (np.arange(94) * 5) % 47)
    for folder, files, labels in (
        ("cifar-10-batches-bin", [f"data_batch_{number}.bin" for number in range(1, 6)] + ["test_batch.bin"], 1),
        ("cifar-100-binary", ["train.bin", "test.bin"], 2),
    ):
        (tmp_path / folder).mkdir()
        for number, file in enumerate(files):
            records = random_images(COUNT, labels + 3072, seed=number)
            records[:, :labels] = (np.arange(COUNT) % 10)[:, None]
            (tmp_path / folder / file).write_bytes(records.tobytes())
    return tmp_path


def assert_same(found: Split, images: torch.Tensor, labels: torch.Tensor | None) -> None:
    assert torch.equal(found.images, images)
    assert found.labels is not None
    assert labels is not None
    assert torch.equal(found.labels, labels)


@pytest.mark.slow
def test_mnist_c_is_read_back(root: Path) -> None:
    made = make("mnist-c", root, root=root, only=["fog", "identity"])
    assert (made.folder, made.made, made.found) == (root / "mnist_c", 4, 0)
    for split in ("train", "test"):
        clean = mnist(split, root)
        assert_same(mnist_c("fog", split, root), shifts.apply("mnist-c/fog", clean.images, seed=SEED), clean.labels)
        assert_same(mnist_c("identity", split, root), clean.images, clean.labels)


def test_the_source_part_of_mnist_is_what_the_benchmark_shifts(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The benchmark shifts 54,000 of the 60,000 in one call, and random numbers depend on the place in a call."""
    from shiftmend.research.bench.suite import mnist_c as suite

    monkeypatch.setattr(making, "MNIST_VALIDATION", 7)
    divide = making.held_out
    for module in (making, suite):
        monkeypatch.setattr(module, "held_out", lambda count: divide(count, 7))
    benchmark = find("mnist-c")
    before = benchmark.load_target("shot_noise", root)
    assert benchmark.origin("shot_noise", root) == "regenerated"
    make("mnist-c", root, root=root, only=["shot_noise"])
    after = benchmark.load_target("shot_noise", root)
    assert benchmark.origin("shot_noise", root) == "regenerated"
    for one, other in ((before.adapt, after.adapt), (before.score, after.score)):
        assert isinstance(one, Split)
        assert isinstance(other, Split)
        assert_same(other, one.images, one.labels)
    assert len(after.adapt) == COUNT - 7


@pytest.mark.parametrize(("name", "read"), [("cifar-10-c", cifar10_c), ("cifar-100-c", cifar100_c)])
def test_cifar_c_is_read_back_at_every_severity(root: Path, name: str, read: Any) -> None:
    make(name, root, root=root, only=["contrast", "shot_noise"])
    benchmark = find(name)
    clean = benchmark.load_target("clean", root).score
    assert isinstance(clean, Split)
    for corruption in ("contrast", "shot_noise"):
        for severity in (1, 5):
            expected = shifts.apply(f"cifar-c/{corruption}", clean.images, severity=severity, seed=SEED)
            assert_same(read(corruption, severity, root, per_severity=COUNT), expected, clean.labels)
    array = np.load(root / name.upper() / "contrast.npy")
    assert (array.shape, array.dtype) == ((5 * COUNT, 32, 32, 3), np.uint8)
    assert benchmark.origin("contrast", root) == "regenerated"


@pytest.mark.slow
def test_emnist_da_is_read_back_sorted_by_class(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(making, "emnist_source", lambda labels: (torch.arange(47), None))
    made = make("emnist-da", root, root=root, only=["oranges", "inverse", "identity"])
    assert made.made == 6  # no images are left for a validation split
    clean = emnist("test", root)
    assert clean.labels is not None
    order = torch.argsort(clean.labels, stable=True)
    for shift in ("oranges", "inverse", "identity"):
        expected = shifts.apply(f"emnist-da/{shift}", clean.images, seed=SEED)[order]
        assert_same(emnist_da(shift, "test", root), expected, clean.labels[order])
    assert len(emnist_da("inverse", "train", root)) == 47
    benchmark = find("emnist-da")
    assert benchmark.origin("oranges", root) == "rebuilt"
    assert benchmark.origin("inverse", root) == "regenerated"
    target = benchmark.load_target("inverse", root)
    assert isinstance(target.score, Split)
    assert isinstance(target.clean, Split)
    assert torch.equal(255 - target.clean.images, target.score.images)


@pytest.mark.slow
def test_mnist_m_is_read_back(root: Path) -> None:
    make("mnist-m", root, root=root)
    for split in ("train", "test"):
        clean = mnist(split, root)
        assert_same(mnist_m(split, root), shifts.apply("mnist-m", clean.images, seed=SEED), clean.labels)
    assert find("mnist-m").origin("mnist-m", root) == "rebuilt"
    assert [path.name for path in sorted((root / "MNISTM").iterdir())] == ["keras_mnistm.pkl.gz", MANIFEST]


def test_the_pickle_is_one_that_python_reads(tmp_path: Path) -> None:
    arrays = {"train": random_images(300, 4, 5, 3), "test": random_images(2, 4, 5, 3)}
    with (tmp_path / "file").open("wb") as handle:
        making.write_pickled_arrays(handle, arrays)
    read = pickle.loads((tmp_path / "file").read_bytes())
    assert set(read) == set(arrays)
    for name, array in arrays.items():
        np.testing.assert_array_equal(read[name], array)


def test_making_goes_on_where_it_was_stopped(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = root / "elsewhere"
    write, written = making._write_mnist_c, []

    def stop_at_third(*args: Any) -> None:
        written.append(args[1:3])
        if len(written) == 3:
            args[-1][0].write_bytes(b"half")
            raise KeyboardInterrupt
        write(*args)

    monkeypatch.setattr(making, "_write_mnist_c", stop_at_third)
    with pytest.raises(KeyboardInterrupt):
        make("mnist-c", out, root=root, only=["fog", "stripe"])
    assert not (out / "mnist_c/stripe/train_images.npy").exists()
    times = {path: path.stat().st_mtime_ns for path in (out / "mnist_c/fog").iterdir()}
    seen: list[tuple[str, int, int]] = []
    made = make("mnist-c", out, root=root, only=["fog", "stripe"], report=lambda *facts: seen.append(facts))
    assert (made.made, made.found) == (2, 2)
    assert {path: path.stat().st_mtime_ns for path in times} == times
    assert seen[0] == ("fog/train", 0, 4)
    assert not list(out.rglob("*.partial"))
    # A part that was damaged is made again, to the same bytes.
    file = out / "mnist_c/fog/test_images.npy"
    whole = file.read_bytes()
    file.write_bytes(whole[:-1] + b"?")
    assert make("mnist-c", out, root=root, only=["fog"]).made == 1
    assert file.read_bytes() == whole
    assert make("mnist-c", out, root=root, only=["fog"]).made == 0


@pytest.mark.slow
def test_the_manifest_has_checksums_and_names_no_folder(root: Path) -> None:
    make("cifar-10-c", root, root=root, only=["frost"])
    text = (root / "CIFAR-10-C" / MANIFEST).read_text()
    assert str(root) not in text
    manifest = json.loads(text)
    assert (manifest["set"], manifest["seed"]) == ("cifar-10-c", SEED)
    frost = manifest["parts"]["frost"]
    assert frost["origin"] == "rebuilt"
    assert frost["outputs"]["frost.npy"]["bytes"] == (root / "CIFAR-10-C/frost.npy").stat().st_size
    assert len(frost["outputs"]["frost.npy"]["sha256"]) == 64
    assert {key for key in frost["made_from"] if key.startswith("picture")} == {
        f"picture frost{i}" for i in range(1, 6)
    }
    (row,) = verify(root, ["cifar-10-c"])
    assert (row.state, "not the published" in row.detail) == ("complete", True)
    (root / "CIFAR-10-C/frost.npy").write_bytes(b"")
    (row,) = verify(root, ["cifar-10-c"])
    assert (row.state, "frost.npy" in row.detail) == ("damaged", True)


def test_what_is_not_ours_is_left_alone(root: Path) -> None:
    (root / "mnist_c/fog").mkdir(parents=True)
    (root / "mnist_c/fog/train_images.npy").write_bytes(b"published")
    with pytest.raises(DataError, match="not made here"):
        make("mnist-c", root, root=root, only=["fog"])
    assert find_origin(root, "mnist-c", "fog/train") is None
    make("mnist-c", root, root=root, only=["stripe"])
    write_idx(root / "MNIST/raw/t10k-images-idx3-ubyte", random_images(COUNT, 28, 28, seed=9))
    with pytest.raises(DataError, match="one from others"):
        make("mnist-c", root, root=root, only=["stripe"])
    (root / "mnist_c" / MANIFEST).write_text("[]")
    with pytest.raises(DataError, match="manifest"):
        make("mnist-c", root, root=root, only=["zigzag"])
    assert find_origin(root, "mnist-c", "stripe/test") == "rebuilt"


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("mnist", {}, "mnist-c"),
        ("mnist-c", {"only": ["sky"]}, "sky"),
        ("mnist-c", {"splits": ["valid"]}, "valid"),
    ],
)
def test_unknown_names_are_refused(root: Path, name: str, options: dict[str, Any], said: str) -> None:
    with pytest.raises(DataError, match=said):
        make(name, root, root=root, **options)


def test_the_command(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["data", "make", "mnist-c", "--out", str(tmp_path / "new"), "--data-root", str(root)]
    command += ["--shifts", "fog, stripe", "--splits", "test"]
    for expected in ((2, 0), (0, 2)):
        with pytest.raises(SystemExit, match="0"):
            main([*command, "--json"])
        found = json.loads(capsys.readouterr().out)
        assert (found["made"], found["found"]) == expected
    assert len(cifar10("test", root)) == COUNT
