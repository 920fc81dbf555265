"""Textures: stand-ins, folders, windows, and what a manifest says about them."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
import torch
from PIL import Image

from shiftmend.errors import DataError
from shiftmend.shifts import apply, textures


def save(path, height=40, width=50, seed=0, mode="RGB"):
    random = np.random.default_rng(seed)
    channels = {"RGB": 3, "RGBA": 4}[mode]
    pixels = random.integers(0, 256, (height, width, channels), dtype=np.uint8)
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path)
    return torch.from_numpy(pixels[..., :3].copy()).permute(2, 0, 1)


@pytest.mark.slow
@pytest.mark.parametrize("name", textures.NAMES)
def test_stand_ins_are_colourful_and_always_the_same(name):
    first = textures.texture(name)
    assert first.dtype == torch.uint8
    assert first.shape == (3, 288, 288)
    assert first.float().std() > 15
    textures.draw_texture.cache_clear()
    assert torch.equal(textures.texture(name), first)
    first.zero_()
    assert textures.texture(name).any()


@pytest.mark.slow
def test_stand_ins_look_like_their_names():
    def mean(name):
        return textures.texture(name).float().mean(dim=(1, 2))

    red, green, blue = mean("grass")
    assert green > red + 20
    assert green > blue + 40
    red, green, blue = mean("oranges")
    assert red > green + 40 > blue + 80
    red, _, blue = mean("sky")
    assert blue > red + 40
    red, _, blue = mean("bricks")
    assert red > blue + 30
    assert mean("crystals").max() < 140


def test_stand_ins_wrap_around():
    for name in ("grass", "sky"):
        picture = textures.texture(name).float()
        seam = (picture[:, :, 0] - picture[:, :, -1]).abs().mean()
        inside = (picture[:, :, 1:] - picture[:, :, :-1]).abs().mean()
        assert seam < 2 * inside


@pytest.mark.slow
def test_frost_stand_ins_have_the_colours_of_the_photographs():
    pictures = textures.frost()
    expected = [(77, 149, 166), (201, 205, 214), (201, 205, 214), (138, 153, 166), (112, 123, 135)]
    for picture, colour in zip(pictures, expected, strict=True):
        torch.testing.assert_close(picture.float().mean(dim=(1, 2)), torch.tensor(colour).float(), atol=12, rtol=0)


@pytest.mark.slow
def test_photograph_stand_ins():
    pictures = textures.photographs()
    assert len(pictures) == 30
    assert len({textures._sha256([picture]) for picture in pictures}) == 30


@pytest.mark.parametrize("suffix", [".png", ".jpg", ".jpeg"])
def test_texture_from_folder(tmp_path, suffix):
    pixels = save(tmp_path / f"bricks{suffix}")
    loaded = textures.texture("bricks", tmp_path)
    assert loaded.shape == pixels.shape
    if suffix == ".png":
        assert torch.equal(loaded, pixels)


def test_alpha_is_dropped_not_blended(tmp_path):
    pixels = save(tmp_path / "sky.png", mode="RGBA")
    assert torch.equal(textures.texture("sky", tmp_path), pixels)


def test_missing_file_says_which_and_where(tmp_path):
    with pytest.raises(DataError) as caught:
        textures.texture("grass", tmp_path)
    message = str(caught.value)
    assert str(tmp_path / "grass.png") in message
    assert "\n" not in message
    save(tmp_path / "frost1.png")
    save(tmp_path / "frost" / "frost2.png")
    with pytest.raises(DataError, match=r"frost3.*frost3\.png"):
        textures.frost(tmp_path)
    with pytest.raises(DataError, match="folder with textures"):
        textures.texture("grass", tmp_path / "nowhere")
    with pytest.raises(DataError, match="folder with textures"):
        textures.photographs(tmp_path / "nowhere")
    (tmp_path / "photographs").mkdir()
    with pytest.raises(DataError, match="Expected photographs"):
        textures.photographs(tmp_path)
    with pytest.raises(DataError, match=r"texture.*'wool'"):
        textures.texture("wool")


def test_a_picture_of_16_bits_is_refused_and_not_cut_off_at_white(tmp_path):
    Image.fromarray(np.full((40, 40), 4000, np.uint16)).save(tmp_path / "sky.png")
    with pytest.raises(DataError, match=r"sky\.png.*I;16.*8 bits"):
        textures.texture("sky", tmp_path)


@pytest.mark.parametrize("name", ["sky", "frost", "photographs"])
def test_a_folder_is_named_by_text_or_a_path(name):
    with pytest.raises(DataError, match=r"folder.*got 5"):
        textures.load(name, 5)


def test_damaged_file_is_named(tmp_path):
    (tmp_path / "sky.png").write_bytes(b"no picture")
    with pytest.raises(DataError, match=r"sky\.png.*damaged"):
        textures.texture("sky", tmp_path)


def test_frost_originals_are_reduced_and_others_are_not(tmp_path):
    originals = [save(tmp_path / "frost" / f"frost{i}.png", 315, 560, seed=i) for i in (1, 2, 3)]
    reduced = [save(tmp_path / f"frost{i}.png", 120, 180, seed=i) for i in (4, 5)]
    loaded = textures.frost(tmp_path)
    for original, picture in zip(originals, loaded[:3], strict=True):
        assert picture.shape == (3, 63, 112)
        assert torch.equal(picture, original[:, 2::5, 2::5])
    for small, picture in zip(reduced, loaded[3:], strict=True):
        assert torch.equal(picture, small)


def test_photographs_in_order_of_names(tmp_path):
    second, first = save(tmp_path / "b.png", seed=1), save(tmp_path / "a.png", 60, 45, seed=2)
    (tmp_path / "notes.txt").write_text("no photograph")
    assert [picture.shape for picture in textures.photographs(tmp_path)] == [first.shape, second.shape]
    (tmp_path / "._a.png").write_bytes(b"what a Mac puts beside a file")
    assert len(textures.photographs(tmp_path)) == 2
    only = save(tmp_path / "photographs" / "c.png", 33, 34)
    assert [picture.shape for picture in textures.photographs(tmp_path)] == [only.shape]


def test_windows_lie_inside_and_reach_everywhere_but_the_last_place():
    height, width = 12, 15
    rows, columns = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    picture = torch.stack((rows, columns, torch.zeros_like(rows))).to(torch.uint8)
    windows = textures.crop([picture], 3000, 8, 10, torch.Generator().manual_seed(0))
    tops, lefts = windows[:, 0, 0, 0], windows[:, 1, 0, 0]
    assert set(tops.tolist()) == set(range(height - 8))
    assert set(lefts.tolist()) == set(range(width - 10))
    assert torch.equal(windows[:, 0, :, 0], tops[:, None] + torch.arange(8, dtype=torch.uint8))
    assert torch.equal(windows[:, 1, 0], lefts[:, None] + torch.arange(10, dtype=torch.uint8))
    counts = torch.bincount(tops.long()).double() / 3000
    assert (counts - 0.25).abs().max() < 0.04


def test_windows_come_from_all_pictures_of_any_size():
    pictures = [torch.full((3, 30 + i, 40 - i), i, dtype=torch.uint8) for i in range(5)]
    windows = textures.crop(pictures, 2000, 28, 28, torch.Generator().manual_seed(0))
    shares = torch.bincount(windows[:, 0, 0, 0].long(), minlength=5).double() / 2000
    assert (shares - 0.2).abs().max() < 0.04
    assert (windows.flatten(1).amin(dim=1) == windows.flatten(1).amax(dim=1)).all()


def test_texture_must_be_larger_than_the_images(tmp_path):
    save(tmp_path / "sky.png", 28, 200)
    with pytest.raises(DataError, match="larger than the images"):
        apply("emnist-da/sky", torch.zeros(1, 1, 28, 28, dtype=torch.uint8), textures=tmp_path)
    with pytest.raises(DataError, match="at least one"):
        textures.crop([], 1, 28, 28, torch.Generator())


@pytest.mark.slow
def test_digest_names_origin_and_pixels(tmp_path):
    pixels = save(tmp_path / "sky.png")
    record = textures.digest("sky", tmp_path)
    expected = hashlib.sha256(b"3x40x50" + pixels.contiguous().numpy().tobytes()).hexdigest()
    assert record == {"sky": {"sha256": expected, "origin": str(tmp_path / "sky.png")}}
    procedural_record = textures.digest("sky")
    assert procedural_record["sky"]["origin"] == "procedural"
    assert procedural_record["sky"]["sha256"] != expected
    assert list(textures.digest("frost")) == ["frost1", "frost2", "frost3", "frost4", "frost5"]


def test_digest_of_photographs_is_one_for_all(tmp_path):
    save(tmp_path / "a.png", seed=1)
    before = textures.digest("photographs", tmp_path)["photographs"]
    assert before["origin"] == str(tmp_path)
    save(tmp_path / "b.png", seed=2)
    assert textures.digest("photographs", tmp_path)["photographs"]["sha256"] != before["sha256"]
    assert textures.digest("photographs")["photographs"]["origin"] == "procedural"


def test_mnist_m_is_the_absolute_difference_with_grey_levels():
    generator = torch.Generator().manual_seed(4)
    images = torch.randint(0, 256, (50, 1, 28, 28), dtype=torch.uint8, generator=generator)
    shifted = apply("mnist-m", images, seed=9)
    windows = textures.crop(textures.photographs(), 50, 28, 28, torch.Generator().manual_seed(9))
    assert torch.equal(shifted.int(), (windows.int() - images.int()).abs())


def test_mnist_m_uses_the_folder(tmp_path):
    save(tmp_path / "a.png", 29, 29, seed=1)
    black = torch.zeros(2, 1, 28, 28, dtype=torch.uint8)
    expected = textures.photographs(tmp_path)[0][:, :28, :28]
    assert torch.equal(apply("mnist-m", black, textures=tmp_path)[1], expected)


@pytest.mark.parametrize("content", [b"P6\n4x 40\n255\n", b"P6\n40000 40000\n255\n", b"\x89PNG\r\n\x1a\n", b""])
def test_a_damaged_picture_is_refused_in_one_sentence(tmp_path, content):
    (tmp_path / "sky.png").write_bytes(content)
    with pytest.raises(DataError, match=r"sky\.png.*damaged"):
        textures.texture("sky", tmp_path)
