from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data_layouts import random_images

from shiftmend.errors import DataError
from shiftmend.inputs.arrays import map_npy, npz_file

GREY = random_images(4, 8, 9)
COLOUR = random_images(4, 8, 9, 3)


def test_grey_colour_first_or_last(tmp_path: Path) -> None:
    path = tmp_path / "site.npz"
    for stored, expected in (
        (GREY, GREY[:, None]),
        (GREY[..., None], GREY[:, None]),
        (GREY[:, None], GREY[:, None]),
        (COLOUR, COLOUR.transpose(0, 3, 1, 2)),
        (COLOUR.transpose(0, 3, 1, 2), COLOUR.transpose(0, 3, 1, 2)),
    ):
        np.savez(path, images=stored, labels=np.array([0, 1, 2, 1], np.int32))
        split = npz_file(path, classes=("a", "b", "c"))
        np.testing.assert_array_equal(split.images.numpy(), expected)
        assert split.labels is not None
        assert split.labels.tolist() == [0, 1, 2, 1]
        assert split.name == "site"


def test_other_names_and_no_labels(tmp_path: Path) -> None:
    path = tmp_path / "site.npz"
    np.savez_compressed(path, pictures=GREY)
    split = npz_file(path, images="pictures", name="office")
    assert (split.labels, split.name) == (None, "office")
    with pytest.raises(DataError, match=r"'images'.*pictures"):
        npz_file(path)


def test_channels_that_cannot_be_told_apart(tmp_path: Path) -> None:
    path = tmp_path / "odd.npz"
    odd = random_images(2, 3, 5, 3)
    np.savez(path, images=odd)
    with pytest.raises(DataError, match="Pass channels_last="):
        npz_file(path)
    np.testing.assert_array_equal(npz_file(path, channels_last=False).images.numpy(), odd)
    np.testing.assert_array_equal(npz_file(path, channels_last=True).images.numpy(), odd.transpose(0, 3, 1, 2))


def test_one_image_is_not_taken_for_its_rows(tmp_path: Path) -> None:
    for one, shape in ((COLOUR[0, ..., :1], r"\[8, 9, 1\]"), (COLOUR[0], r"\[8, 9, 3\]")):
        np.savez(tmp_path / "one.npz", images=one)
        with pytest.raises(DataError, match=f"{shape}.*one image"):
            npz_file(tmp_path / "one.npz")
    assert npz_file(tmp_path / "one.npz", channels_last=False).images.shape == (8, 1, 9, 3)


def test_bad_archives(tmp_path: Path) -> None:
    path = tmp_path / "bad.npz"
    with pytest.raises(DataError, match=r"bad\.npz, which is missing"):
        npz_file(path)
    np.savez(path, images=GREY)
    whole = path.read_bytes()
    path.write_bytes(whole[:100])
    with pytest.raises(DataError, match=r"bad\.npz"):
        npz_file(path)
    path.write_bytes(whole[:150] + bytes([whole[150] ^ 255]) + whole[151:])
    with pytest.raises(DataError, match=r"bad\.npz is damaged"):
        npz_file(path)
    np.savez(path, images=np.array([{}, {}], dtype=object))  # would need unpickling
    with pytest.raises(DataError, match=r"bad\.npz.*objects"):
        npz_file(path)
    for images, labels in ((GREY.astype(float), [0] * 4), (GREY[0], [0] * 8), (GREY, [0.5] * 4), (GREY, [[0]] * 4)):
        np.savez(path, images=images, labels=np.array(labels))
        with pytest.raises(DataError, match=r"bad\.npz, got"):
            npz_file(path)
    np.savez(path, images=GREY, labels=np.zeros(3, int))
    with pytest.raises(DataError, match="each of 4 images"):
        npz_file(path)
    with path.open("wb") as handle:
        np.save(handle, GREY)
    with pytest.raises(DataError, match="a single array"):
        npz_file(path)


class RunMe:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def test_what_is_no_single_array_is_refused_and_not_run(tmp_path: Path) -> None:
    path, mark = tmp_path / "fog.npy", tmp_path / "was-run"
    path.write_bytes(pickle.dumps(RunMe(mark)))
    with pytest.raises(DataError, match=r"fog\.npy, truncated.*fetch"):
        map_npy(path, "images", "fetch it")
    assert not mark.exists()
    with path.open("wb") as handle:
        np.savez(handle, images=GREY)
    with pytest.raises(DataError, match=r"fog\.npy.*archive"):
        map_npy(path, "images", "fetch it")


def test_a_damaged_header_is_refused_in_one_sentence(tmp_path: Path) -> None:
    path = tmp_path / "fog.npy"
    np.save(path, GREY)
    path.write_bytes(path.read_bytes().replace(b"}", b" ", 1))
    with pytest.raises(DataError, match=r"fog\.npy, truncated.*fetch"):
        map_npy(path, "images", "fetch it")


def test_a_member_that_seems_encrypted_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    np.savez(path, images=GREY)
    content = bytearray(path.read_bytes())
    content[content.index(b"PK\x01\x02") + 8] |= 1  # in the directory of the archive
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"'images'.*encrypted"):
        npz_file(path)


def test_a_damaged_stream_and_a_foreign_file_are_refused_in_one_sentence(tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    np.savez_compressed(path, images=np.zeros((50, 28, 28), np.uint8))
    content = bytearray(path.read_bytes())
    start = content.index(b"images.npy") + len("images.npy")
    reasons = []
    for place in range(start, start + 60):  # headers, the stream itself, the array inside: some bytes do not matter
        content[place] ^= 0xFF
        path.write_bytes(content)
        try:
            assert not npz_file(path).images.any()
        except DataError as refusal:
            reasons.append(str(refusal))
        content[place] ^= 0xFF
    assert any("while decompressing" in reason for reason in reasons)
    path.write_text("neither a zip nor an array")
    with pytest.raises(DataError, match=r"an \.npz archive") as refused:
        npz_file(path)
    assert "pickle" not in str(refused.value)
