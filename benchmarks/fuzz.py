"""Damage files of every kind and read them: a reader may refuse in one sentence, or read what was written.

    python benchmarks/fuzz.py --minutes 10

For each reader one good file is made. Copies of that file are damaged (bits, bytes, cuts, blocks, numbers in the text,
and for sealed files content that is sealed again) and read. What counts:

- crash: the process dies, which the driver sees, because each reader works in a process of its own;
- raw error: anything but a `ShiftmendError` in one line;
- silent change: a sealed file whose bytes were changed and that is read as something else than before.
"""

from __future__ import annotations

import argparse
import bz2
import contextlib
import gzip
import io
import json
import logging
import multiprocessing
import random
import re
import sqlite3
import tarfile
import tempfile
import time
import traceback
import zipfile
from collections import Counter
from collections.abc import Callable
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch

import shiftmend
from shiftmend.cli.loading import _read_weights, load_data
from shiftmend.engine import checkpoint as checkpoints
from shiftmend.engine.history import Epoch
from shiftmend.errors import ShiftmendError
from shiftmend.inputs.arrays import map_npy
from shiftmend.inputs.folders import image_folder
from shiftmend.report.saved import load_adaptation
from shiftmend.research.bench.benchmark import Cell, Outcome, Result
from shiftmend.research.bench.store import Store, read_compact, to_compact
from shiftmend.research.datasets.digits import read_idx
from shiftmend.research.datasets.download import unpack
from shiftmend.research.datasets.files import read_pickled_arrays, read_whole
from shiftmend.utils import sealing, signing

Read = Callable[[Path], Any]

OUTCOME = (1, 0.5, 0.1, 0.1, 1.0, 0.2)
"""Scores of the stored result."""


@dataclass(frozen=True)
class Target:
    """A reader, and a file that it reads.

    Attributes:
        name: What the reader reads.
        content: A good file.
        read: Reads a file and returns something that tells contents apart.
        reseal: Seals damaged content again, as somebody would who alters a file on purpose; None if there is no seal.
        sealed: Whether any changed byte must be noticed.
        suffix: How the name of the file ends.
    """

    name: str
    content: bytes
    read: Read
    reseal: Callable[[bytes], bytes] | None = None
    sealed: bool = False
    suffix: str = ""


# ---- good files


def make_targets(folder: Path) -> list[Target]:
    """Make one good file of each kind, and say how each is read."""
    logging.disable(logging.CRITICAL)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.BatchNorm1d(6), torch.nn.Linear(6, 2)).eval()
    profile = shiftmend.profile(model, torch.randn(60, 4), progress=False)
    result = shiftmend.adapt(model, torch.randn(40, 4), method="adabn", progress=False)
    result.save(folder / "mended")
    history = [Epoch(0, "", 0.0, {}, 0.0, {"slices": 0.5}, 0), Epoch(1, "all", 0.1, {"f": 0.2}, 1.0, {}, 3)]
    checkpoints.save(folder / "checkpoint", "run", 0, 1, history, model, None)
    cell = Cell("digits", "offline", "adabn", "usps", 1, "recipe")
    outcome = Outcome(*OUTCOME)
    stored = Result(cell, "published", last=outcome, history=({"epoch": 1},), manifest={"seed": 1}, finished="2026")
    with Store(folder / "store.sqlite") as store:
        store.record(stored)
    images = np.arange(4 * 8 * 8, dtype=np.uint8).reshape(4, 8, 8)
    weights = safetensors.torch.save(model.state_dict())
    targets = [
        Target("profile", profile.to_bytes(), _read_profile, _reseal_tensors, True),
        Target("checkpoint", (folder / "checkpoint").read_bytes(), _read_checkpoint, _reseal_tensors, True),
        Target("compact results", to_compact([stored]).encode(), _read_results, _reseal_json, True),
        Target("store", (folder / "store.sqlite").read_bytes(), _read_store, sealed=True),
        Target("npz", _npz(images=images, labels=np.arange(4)), _read_npz, suffix=".npz"),
        Target("npz of inputs", _npz(inputs=np.ones((3, 2)), labels=np.ones(3)), _read_npz, suffix=".npz"),
        Target("npy", _npy(images), _read_npy, suffix=".npy"),
        Target("weights", weights, _read_safetensors, suffix=".safetensors"),
        Target("idx.gz", gzip.compress(_idx(images)), read_idx, suffix=".gz"),
        Target("idx", _idx(images), read_idx),
        Target("bz2", bz2.compress(b"1 1:0.5\n" * 9), lambda path: read_whole(path, "lines", "fetch"), suffix=".bz2"),
        Target("pickled arrays", _pickled(images), lambda path: read_pickled_arrays(path.read_bytes(), path)),
        Target("zip", _zip({"a/b.txt": b"text", "c": bytes(99)}), _unpack, suffix=".zip"),
        Target("tar", _tar({"a/b.txt": b"text", "c": bytes(99)}), _unpack, suffix=".tar"),
        Target("tar.gz", gzip.compress(_tar({"a": b"text"})), _unpack, suffix=".tar.gz"),
        Target("png", _png(images[0]), _read_picture, suffix=".png"),
        Target("public key", b"ab" * 32, lambda path: signing.read_public(path)),
    ]
    for name in ("manifest.json", "history.json", "model.safetensors"):
        reader = _Folder(folder / "mended", name, model)
        reseal = _reseal_json if name == "manifest.json" else None
        targets.append(Target(f"result: {name}", (folder / "mended" / name).read_bytes(), reader, reseal, True))
    if signing.is_available():
        key = signing.new_key(folder / "key")
        profile.save(folder / "signed", sign=folder / "key")
        signed = (folder / "signed").read_bytes()
        trusting = _Trusting(key.public)
        targets.append(Target("signed profile", signed, trusting, _reseal_tensors, True))
        targets.append(Target("private key", (folder / "key").read_bytes(), lambda path: signing.load_key(path).public))
    return targets


def _npz(**arrays: Any) -> bytes:
    file = io.BytesIO()
    np.savez_compressed(file, **arrays)
    return file.getvalue()


def _npy(array: Any) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def _idx(images: Any) -> bytes:
    return bytes([0, 0, 8, images.ndim]) + np.array(images.shape, ">u4").tobytes() + images.tobytes()


def _pickled(images: Any) -> bytes:
    from shiftmend.research.datasets.made_sets import write_pickled_arrays

    file = io.BytesIO()
    write_pickled_arrays(file, {"data": images})
    return file.getvalue()


def _zip(files: dict[str, bytes]) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return file.getvalue()


def _tar(files: dict[str, bytes]) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return file.getvalue()


def _png(image: Any) -> bytes:
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(image).save(file, "png")
    return file.getvalue()


# ---- readers: each returns something that tells contents apart


def _read_profile(path: Path) -> Any:
    return shiftmend.Profile.load(path).to_bytes()


class _Trusting:
    """The reader of profiles that are signed with a key."""

    def __init__(self, public: str) -> None:
        self.public = public

    def __call__(self, path: Path) -> Any:
        return shiftmend.Profile.load(path, trust=self.public).to_bytes()


def _read_checkpoint(path: Path) -> Any:
    found = checkpoints.load(path, "run")
    assert found is not None
    return found.history, found.stage, found.epoch, {name: value.tolist() for name, value in found.model.items()}


def _read_results(path: Path) -> Any:
    return [(result.cell, result.last, result.manifest) for result in read_compact(path)]


def _read_store(path: Path) -> Any:
    with Store(path, read_only=True) as store:
        results = store.results()
    if any("unsealed" in result.manifest for result in results):
        raise ShiftmendError("a row has lost its seal, and is marked so")
    # SQLite gives 1 for 1.0 where the type of a column is damaged.
    return [(one.cell, one.last and astuple(one.last) == OUTCOME, one.history, one.manifest) for one in results]


def _read_npz(path: Path) -> Any:
    data = load_data(path, None)
    return data.inputs.tolist(), None if data.labels is None else data.labels.tolist()


def _read_npy(path: Path) -> Any:
    return np.array(map_npy(path, "an array", "fetch it")).tolist()


def _read_safetensors(path: Path) -> Any:
    return {name: value.tolist() for name, value in _read_weights(path, False).items()}


def _unpack(path: Path) -> Any:
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        return unpack(path, Path(folder) / "out")


def _read_picture(path: Path) -> Any:
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        (Path(folder) / "image.png").write_bytes(path.read_bytes())
        return image_folder(folder).images.tolist()


class _Folder:
    """The reader of a saved adaptation of which one file is damaged."""

    def __init__(self, folder: Path, name: str, model: torch.nn.Module) -> None:
        self.files = {file.name: file.read_bytes() for file in folder.iterdir()}
        self.name, self.model = name, model

    def __call__(self, path: Path) -> Any:
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            for name, content in self.files.items():
                (Path(folder) / name).write_bytes(path.read_bytes() if name == self.name else content)
            found = load_adaptation(Path(folder), self.model)
        return found.history, found.manifest


def _reseal_tensors(content: bytes) -> bytes:
    blank = re.sub(rb'"sha256":"[0-9a-f]{64}"', b'"sha256":"%s"' % (b"0" * 64), content, count=1)
    file = io.BytesIO(blank)
    sealing.seal(file)
    return file.getvalue()


def _reseal_json(content: bytes) -> bytes:
    blank = re.sub(rb'"sha256": "[0-9a-f]{64}"', b'"sha256": "%s"' % (b"0" * 64), content, count=1)
    return sealing.seal_json(blank.decode()).encode()


# ---- damage

_NUMBERS = (b"0", b"-1", b"1e308", b"1e999", b"99999999999999999999", b"NaN", b"null", b"true", b'"x"', b"[]", b"{}")


def damage(content: bytes, rng: random.Random) -> bytes:
    """Change content in one of many ways, now and then in several."""
    for _ in range(1 if rng.random() < 0.7 else rng.randint(2, 6)):
        content = rng.choice(_WAYS)(content, rng)
    return content


def _flip(content: bytes, rng: random.Random) -> bytes:
    place = rng.randrange(len(content)) if content else 0
    return content[:place] + bytes([content[place] ^ 1 << rng.randrange(8)]) + content[place + 1 :] if content else b"x"


def _overwrite(content: bytes, rng: random.Random) -> bytes:
    place, length = rng.randrange(len(content) + 1), rng.choice((1, 2, 4, 8))
    return content[:place] + rng.choice((b"\0", b"\xff", b"\x7f", b"[", b'"')) * length + content[place + length :]


def _cut(content: bytes, rng: random.Random) -> bytes:
    return content[: rng.randrange(len(content) + 1)]


def _remove(content: bytes, rng: random.Random) -> bytes:
    place = rng.randrange(len(content) + 1)
    return content[:place] + content[place + rng.choice((1, 8, 64, 512)) :]


def _insert(content: bytes, rng: random.Random) -> bytes:
    place = rng.randrange(len(content) + 1)
    return content[:place] + rng.randbytes(rng.choice((1, 8, 64))) + content[place:]


def _copy_block(content: bytes, rng: random.Random) -> bytes:
    start, place = rng.randrange(len(content) + 1), rng.randrange(len(content) + 1)
    return content[:place] + content[start : start + rng.choice((4, 32, 256))] + content[place:]


def _change_number(content: bytes, rng: random.Random) -> bytes:
    found = list(re.finditer(rb"-?\d+(\.\d+)?", content))
    if not found:
        return _flip(content, rng)
    one = rng.choice(found)
    return content[: one.start()] + rng.choice(_NUMBERS) + content[one.end() :]


def _nest(content: bytes, rng: random.Random) -> bytes:
    place = rng.randrange(len(content) + 1)
    return content[:place] + b"[" * rng.choice((10, 2000, 100_000)) + content[place:]


_WAYS = (_flip, _flip, _flip, _overwrite, _cut, _remove, _insert, _copy_block, _change_number, _change_number, _nest)


# ---- the run


def attack(target: Target, seconds: float, seed: int, limit: int | None = None) -> Counter[str]:
    """Damage and read copies of one file until the time is over; return counts, and an example of each raw error."""
    logging.disable(logging.CRITICAL)
    rng, counts = random.Random(seed), Counter[str]()
    ends = time.monotonic() + seconds
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"file{target.suffix}"
        path.write_bytes(target.content)
        good = _describe(target.read(path))
        while time.monotonic() < ends and (limit is None or counts["tried"] < limit):
            content = damage(target.content, rng)
            resealed = False
            if target.reseal is not None and rng.random() < 0.5:
                with contextlib.suppress(ValueError):
                    content, resealed = target.reseal(content), True
            if content == target.content:
                continue
            counts["tried"] += 1
            path.unlink(missing_ok=True)
            path.write_bytes(content)
            outcome = _try(target, path)
            if outcome == "read" and target.sealed and not resealed and _describe(target.read(path)) != good:
                outcome = "silent change"
            counts[outcome] += 1
    return counts


def _try(target: Target, path: Path) -> str:
    try:
        target.read(path)
    except ShiftmendError as error:
        text = str(error)
        return "refused" if "\n" not in text and len(text) < 2000 else f"raw error: long sentence of {target.name}"
    except sqlite3.Error as error:
        return f"raw error: {type(error).__name__} of {target.name}"
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        return f"raw error: {type(error).__name__} of {target.name} at {Path(where.filename).name}:{where.lineno}"
    return "read"


def _describe(value: Any) -> str:
    return json.dumps(value, default=str, sort_keys=True) if not isinstance(value, bytes) else value.hex()


def _work(number: int, seconds: float, seed: int, results: Any) -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        target = make_targets(Path(folder))[number]
        results.put((target.name, dict(attack(target, seconds, seed))))


def run(minutes: float, seed: int) -> dict[str, Counter[str]]:
    """Attack every reader in a process of its own, one after the other, in equal shares of the time."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        names = [target.name for target in make_targets(Path(folder))]
    found: dict[str, Counter[str]] = {}
    context = multiprocessing.get_context("fork")
    for number, name in enumerate(names):
        results = context.SimpleQueue()
        process = context.Process(target=_work, args=(number, 60 * minutes / len(names), seed, results))
        process.start()
        process.join()
        found[name] = Counter(results.get()[1]) if process.exitcode == 0 else Counter({"crash": 1})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    found = run(given.minutes, given.seed)
    print("| reader | files | refused | read | crashes | raw errors | silent changes |\n|---|---|---|---|---|---|---|")
    whole: Counter[str] = Counter()
    for name, counts in found.items():
        raw = sum(number for what, number in counts.items() if what.startswith("raw error"))
        counts["raw"] = raw
        whole += counts
        print(_row(name, counts))
    print(_row("all", whole))
    for what in sorted(what for what in whole if what.startswith("raw error")):
        print(f"{whole[what]} x {what}")


def _row(name: str, counts: Counter[str]) -> str:
    numbers = (counts[what] for what in ("tried", "refused", "read", "crash", "raw", "silent change"))
    return f"| {name} | {' | '.join(f'{number:,}' for number in numbers)} |"


if __name__ == "__main__":
    main()
