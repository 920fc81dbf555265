from __future__ import annotations

import io
import os
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data_layouts import random_images, write_png
from PIL import Image

from shiftmend.errors import DataError
from shiftmend.inputs import folders
from shiftmend.inputs.folders import image_folder


def lay_out(folder: Path, classes: list[str], per_class: int = 3) -> None:
    """Every image has one grey level, which says its class and number."""
    for position, name in enumerate(classes):
        for number in range(per_class):
            write_png(folder / name / f"{number}.png", np.full((4, 5), position * 10 + number, np.uint8))


def test_numeric_classes_are_ordered_by_value(tmp_path: Path) -> None:
    names = [str(number) for number in range(12)]
    lay_out(tmp_path, names)
    split = image_folder(tmp_path)
    assert split.classes == tuple(names)  # as text it would be 0, 1, 10, 11, 2, ...
    assert split.labels is not None
    assert split.labels.tolist() == [label for label in range(12) for _ in range(3)]
    assert split.images.shape == (36, 1, 4, 5)
    assert split.images[:, 0, 0, 0].tolist() == [label * 10 + number for label in range(12) for number in range(3)]


def test_names_that_are_no_numbers_are_ordered_as_text(tmp_path: Path) -> None:
    lay_out(tmp_path, ["b", "a", "10"])
    assert image_folder(tmp_path).classes == ("10", "a", "b")
    lay_out(tmp_path / "dotted", ["10.a", "2.b", "3.png"])  # of which the last is no image
    assert image_folder(tmp_path / "dotted").classes == ("10.a", "2.b", "3.png")


def test_files_with_numbers_are_ordered_by_value(tmp_path: Path) -> None:
    for number in (0, 2, 9, 10, 11, 100):
        write_png(tmp_path / f"{number}.png", np.full((2, 2), number, np.uint8))
    split = image_folder(tmp_path, name="site")
    assert split.images[:, 0, 0, 0].tolist() == [0, 2, 9, 10, 11, 100]
    assert split.labels is None
    assert split.classes == ()
    assert split.name == "site"


def test_colour_and_channels(tmp_path: Path) -> None:
    colour = random_images(1, 4, 4, 3)[0]
    write_png(tmp_path / "a.png", np.full((4, 4), 7, np.uint8))
    assert image_folder(tmp_path).images.shape == (1, 1, 4, 4)
    write_png(tmp_path / "b.png", colour)
    mixed = image_folder(tmp_path)
    assert mixed.images.shape == (2, 3, 4, 4)
    assert (mixed.images[0] == 7).all()
    np.testing.assert_array_equal(mixed.images[1].numpy(), colour.transpose(2, 0, 1))
    grey = image_folder(tmp_path, channels=1).images
    assert grey.shape == (2, 1, 4, 4)
    with pytest.raises(DataError, match="1 or 3 channels"):
        image_folder(tmp_path, channels=2)


def test_mixed_sizes_need_a_size(tmp_path: Path) -> None:
    write_png(tmp_path / "a.png", np.full((4, 6), 10, np.uint8))
    write_png(tmp_path / "b.png", np.full((8, 8), 20, np.uint8))
    with pytest.raises(DataError, match=r"8 x 8.*b\.png.*size="):
        image_folder(tmp_path)
    assert image_folder(tmp_path, size=(3, 5)).images.shape == (2, 1, 3, 5)
    scaled = image_folder(tmp_path, size=6).images
    assert scaled.shape == (2, 1, 6, 6)
    assert scaled.amax((1, 2, 3)).tolist() == [10, 20]


@pytest.mark.parametrize("size", [0, -3, (4, 0), (4,), 3.5, True])
def test_a_size_without_pixels_is_refused(tmp_path: Path, size: Any) -> None:
    with pytest.raises(DataError, match=r"size to be.*pixels"):
        image_folder(tmp_path, size=size)


def test_pixels_of_more_than_8_bits_are_refused(tmp_path: Path) -> None:
    Image.fromarray(np.full((4, 4), 40_000, np.uint16)).save(tmp_path / "deep.png")
    with pytest.raises(DataError, match=r"deep\.png.*mode I;16"):
        image_folder(tmp_path)


def test_colours_of_16_bits_are_refused_and_not_cut(tmp_path: Path) -> None:
    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = struct.pack(">IIBBBBB", 4, 2, 16, 2, 0, 0, 0)  # 4 x 2 pixels of 3 x 16 bits
    rows = b"".join(b"\0" + np.full((4, 3), 4095, ">u2").tobytes() for _ in range(2))
    whole = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    (tmp_path / "deep.png").write_bytes(b"\x89PNG\r\n\x1a\n" + whole)
    with pytest.raises(DataError, match=r"deep\.png.*16 bits"):
        image_folder(tmp_path)
    (tmp_path / "deep.png").unlink()
    (tmp_path / "deep.ppm").write_bytes(b"P6 4 2 65535\n" + np.full((2, 4, 3), 4095, ">u2").tobytes())
    with pytest.raises(DataError, match=r"deep\.ppm.*16 bits"):
        image_folder(tmp_path)
    (tmp_path / "deep.ppm").unlink()
    for white in (15, 255, 4095):
        pixels = np.full((2, 4, 3), white, "u1" if white < 256 else ">u2")
        (tmp_path / "flat.ppm").write_bytes(b"P6 4 2 %d\n" % white + pixels.tobytes())
        assert (image_folder(tmp_path).images == 255).all()


def test_links_that_lead_nowhere_are_named(tmp_path: Path) -> None:
    write_png(tmp_path / "there.png", np.zeros((4, 5), np.uint8))
    (tmp_path / "linked.png").symlink_to(tmp_path / "there.png")
    assert len(image_folder(tmp_path)) == 2
    for target in ("absent.png", "astray.png"):  # to nothing, and to itself
        (tmp_path / "astray.png").symlink_to(tmp_path / target)
        with pytest.raises(DataError, match=r"astray\.png.*link"):
            image_folder(tmp_path)
        (tmp_path / "astray.png").unlink()


def test_names_need_not_be_text(tmp_path: Path) -> None:
    write_png(tmp_path / "a.png", np.full((4, 5), 7, np.uint8))
    os.rename(tmp_path / "a.png", os.fsencode(tmp_path) + b"/\xff.png")
    assert image_folder(tmp_path).images.unique().tolist() == [7]


def test_images_a_level_deeper_are_not_passed_over(tmp_path: Path) -> None:
    lay_out(tmp_path, ["0", "1"])
    (tmp_path / "1" / "notes").mkdir()
    assert len(image_folder(tmp_path).images) == 6
    write_png(tmp_path / "1" / "more" / "9.png", np.zeros((4, 5), np.uint8))
    with pytest.raises(DataError, match=r"9\.png.*deeper"):
        image_folder(tmp_path)


def test_folders_that_are_no_dataset(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="absent, which is missing"):
        image_folder(tmp_path / "absent")
    with pytest.raises(DataError, match="got none"):
        image_folder(tmp_path)
    lay_out(tmp_path, ["0", "1"])
    (tmp_path / "2").mkdir()
    with pytest.raises(DataError, match="class 2, got none"):
        image_folder(tmp_path)
    (tmp_path / "2").rmdir()
    (tmp_path / ".hidden").mkdir()
    (tmp_path / "notes.txt").write_text("nothing")
    assert len(image_folder(tmp_path)) == 6
    with pytest.raises(DataError, match=r"\(0, 1, 2\).*\(0, 1\)"):
        image_folder(tmp_path, classes=("0", "1", "2"))
    write_png(tmp_path / "stray.png", np.zeros((4, 5), np.uint8))
    with pytest.raises(DataError, match=r"got both \(stray\.png"):
        image_folder(tmp_path)


@pytest.mark.parametrize("size", [None, 4])
def test_a_damaged_image_is_named(tmp_path: Path, size: int | None) -> None:
    write_png(tmp_path / "good.png", random_images(1, 40, 40)[0])
    whole = (tmp_path / "good.png").read_bytes()
    (tmp_path / "half.png").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match=r"half\.png.*damaged"):
        image_folder(tmp_path, size=size)
    (tmp_path / "half.png").write_bytes(b"not an image")
    with pytest.raises(DataError, match=r"half\.png.*damaged"):
        image_folder(tmp_path, size=size)


def test_a_wrong_byte_anywhere_leaves_an_image_or_one_sentence(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    write_png(path, random_images(1, 6, 6)[0])
    whole, reasons = path.read_bytes(), []
    for place in range(len(whole)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0xFF]) + whole[place + 1 :])
        try:
            assert len(image_folder(tmp_path)) == 1
        except DataError as refusal:
            reasons.append(str(refusal))
    assert reasons
    assert all(str(path) in reason for reason in reasons)


def test_a_picture_too_large_to_be_one_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_png(tmp_path / "bomb.png", np.zeros((10, 10), np.uint8))
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 40)
    with pytest.raises(DataError, match=r"bomb\.png.*exceeds limit"):
        image_folder(tmp_path)


def test_the_cache_is_used_until_a_file_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    images, cache = tmp_path / "images", tmp_path / "cache"
    lay_out(images, ["0", "1"])
    decoded = 0
    original = folders.decode_image

    def counting(*arguments: object) -> object:
        nonlocal decoded
        decoded += 1
        return original(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(folders, "decode_image", counting)
    first = image_folder(images, cache=cache)
    assert decoded == 6
    (kept,) = cache.glob("*.npy")
    np.testing.assert_array_equal(np.load(kept), first.images.numpy())
    second = image_folder(images, cache=cache)
    assert decoded == 6
    assert (second.images == first.images).all()
    assert second.labels is not None
    assert second.labels.tolist() == [0, 0, 0, 1, 1, 1]

    changed = images / "1" / "2.png"
    length = changed.stat().st_size
    write_png(changed, np.full((4, 5), 13, np.uint8))
    os.utime(changed, ns=(1, 1))  # even if the clock did not move on
    assert changed.stat().st_size == length  # the time alone gives it away
    third = image_folder(images, cache=cache)
    assert decoded == 12
    assert third.images[5, 0, 0, 0] == 13
    assert len(list(cache.glob("*"))) == 1  # the old array is gone

    (images / "0" / "1.png").unlink()
    assert len(image_folder(images, cache=cache)) == 5
    assert decoded == 17
    image_folder(images, cache=cache, size=8)  # another size is another array, and does not displace the first
    assert decoded == 22
    assert image_folder(images, cache=cache).images.shape[1:] == (1, 4, 5)
    assert decoded == 22
    assert image_folder(images, cache=cache, channels=3).images.shape[1:] == (3, 4, 5)
    assert decoded == 27
    image_folder(images, cache=cache, name="../a site")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["cache", "images"]
    assert len(list(cache.glob(".._a_site-*.npy"))) == 1


def test_a_damaged_cache_is_made_anew(tmp_path: Path) -> None:
    images, cache = tmp_path / "images", tmp_path / "cache"
    lay_out(images, ["0", "1"])
    first = image_folder(images, cache=cache)
    (kept,) = cache.glob("*.npy")
    whole = kept.read_bytes()
    others = [io.BytesIO() for _ in range(4)]
    for buffer, array in zip(others, (first.images[:5], first.images[:, 0], first.images / 255), strict=False):
        np.save(buffer, array.numpy())
    np.savez(others[3], images=first.images.numpy())
    unclosed = whole.replace(b"}", b" ", 1)
    for damage in (whole[:-1], b"", b"nonsense", unclosed, *(buffer.getvalue() for buffer in others)):
        kept.write_bytes(damage)
        assert (image_folder(images, cache=cache).images == first.images).all()
        assert kept.read_bytes() == whole


def test_a_cache_that_cannot_be_written_does_not_matter(tmp_path: Path) -> None:
    lay_out(tmp_path / "images", ["0", "1"])
    (tmp_path / "file").write_text("a file where the cache folder would be")
    assert len(image_folder(tmp_path / "images", cache=tmp_path / "file" / "cache")) == 6


@pytest.mark.parametrize("wrong", [None, 3, "", ["a.png"]])
def test_a_folder_has_a_name(wrong: object) -> None:
    with pytest.raises(DataError, match=r"Expected a name.*folder"):
        image_folder(wrong)  # type: ignore[arg-type]


def test_grey_pictures_before_and_behind_the_first_coloured_one(tmp_path: Path) -> None:
    for position, mode in enumerate(["L", "L", "RGB", "L"]):
        colour = 50 * position + 9 if mode == "L" else (1, 2, 3)
        Image.new(mode, (4, 5), colour).save(tmp_path / f"{position}.png")
    found = image_folder(tmp_path).images
    assert found.shape == (4, 3, 5, 4)
    assert found[:, :, 0, 0].tolist() == [[9] * 3, [59] * 3, [1, 2, 3], [159] * 3]


def test_decoded_images_are_not_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lay_out(tmp_path, ["0"], per_class=2)
    decoded = np.zeros((2, 3, 8, 8), np.uint8)
    monkeypatch.setattr(folders, "decode_images", lambda *_: decoded)
    assert image_folder(tmp_path).images.data_ptr() == decoded.ctypes.data
