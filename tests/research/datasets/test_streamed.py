from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from data_layouts import random_images, write_png
from torch.utils.data import DataLoader

from shiftmend.errors import DataError
from shiftmend.research.datasets.partitions import few_shot
from shiftmend.research.datasets.streamed import (
    HOSPITALS,
    SOURCE_HOSPITAL,
    VISDA_PER_CLASS,
    ImageFiles,
    camelyon17,
    visda_c,
)

PER_HOSPITAL = 6


def lay_out_camelyon(root: Path, folder: str = "CAMELYON17/camelyon17_v1.0") -> dict[tuple[int, int], np.ndarray]:
    """The release: rows of one hospital are not together, tumour first, patient numbers with leading zeros."""
    base = root / folder
    images: dict[tuple[int, int], np.ndarray] = {}
    rows = [",patient,node,x_coord,y_coord,tumor,slide,center,split"]
    for number in range(PER_HOSPITAL):
        for hospital in HOSPITALS:
            tumour = int(number < PER_HOSPITAL // 2)
            patient, node = f"{hospital * 20 + 4:03d}", hospital % 3
            x, y = 3328 + 32 * number, 21792
            pixels = random_images(1, 96, 96, 3, seed=len(images))[0]
            images[hospital, number] = pixels
            slide = f"patient_{patient}_node_{node}"
            write_png(base / f"patches/{slide}/patch_{slide}_x_{x}_y_{y}.png", pixels)
            rows.append(f"{len(rows) - 1},{patient},{node},{x},{y},{tumour},{hospital * 10},{hospital},0")
    (base / "metadata.csv").write_text("\n".join(rows) + "\n")
    return images


@pytest.mark.parametrize("folder", ["CAMELYON17/camelyon17_v1.0", "camelyon17_v1.0"])
def test_a_hospital_streams_its_own_patches(tmp_path: Path, folder: str) -> None:
    images = lay_out_camelyon(tmp_path, folder)
    hospital = camelyon17(SOURCE_HOSPITAL, tmp_path)
    assert SOURCE_HOSPITAL == 3
    assert len(hospital) == PER_HOSPITAL
    assert hospital.labels.tolist() == [1, 1, 1, 0, 0, 0]
    assert hospital.classes == ("normal", "tumour")
    for index in range(PER_HOSPITAL):
        image, label, position = hospital[index]
        np.testing.assert_array_equal(image.numpy(), images[3, index].transpose(2, 0, 1))
        assert (label, position) == (int(hospital.labels[index]), index)


def test_it_streams_through_workers(tmp_path: Path) -> None:
    images = lay_out_camelyon(tmp_path)
    loader = DataLoader(camelyon17(0, tmp_path), batch_size=4, num_workers=1)
    batches = list(loader)
    pixels = torch.cat([batch[0] for batch in batches])
    expected = np.stack([images[0, number] for number in range(PER_HOSPITAL)]).transpose(0, 3, 1, 2)
    np.testing.assert_array_equal(pixels.numpy(), expected)
    assert pixels.dtype == torch.uint8
    assert torch.cat([batch[1] for batch in batches]).tolist() == [1, 1, 1, 0, 0, 0]
    assert torch.cat([batch[2] for batch in batches]).tolist() == [0, 1, 2, 3, 4, 5]


def test_few_shots_of_a_hospital(tmp_path: Path) -> None:
    lay_out_camelyon(tmp_path)
    hospital = camelyon17(1, tmp_path)
    chosen = few_shot(hospital.labels, 2, seed=7)
    part = hospital.take(chosen)
    assert sorted(part.labels.tolist()) == [0, 0, 1, 1]
    assert [part.path(i) for i in range(4)] == [hospital.path(int(i)) for i in chosen]
    assert len({part.path(i) for i in range(4)}) == 4
    assert (part.name, part.classes) == ("camelyon17-hospital-1", ("normal", "tumour"))
    write_png(part.path(0), random_images(1, 50, 96, 3)[0])
    with pytest.raises(DataError, match="got 50 x 96"):
        part[0]


def test_a_transform_is_applied(tmp_path: Path) -> None:
    lay_out_camelyon(tmp_path)
    hospital = camelyon17(2, tmp_path, transform=lambda image: image.float() / 255)
    assert hospital[0][0].dtype == torch.float32
    assert hospital.take(torch.tensor([1]))[0][0].max() <= 1


def test_camelyon_damage(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"metadata\.csv, which is missing.*fetch\(\"camelyon17\"\)"):
        camelyon17(3, tmp_path)
    with pytest.raises(DataError, match=r"hospital.*got 5"):
        camelyon17(5, tmp_path)
    lay_out_camelyon(tmp_path)
    table = tmp_path / "CAMELYON17/camelyon17_v1.0/metadata.csv"
    whole = table.read_text()
    hospital = camelyon17(3, tmp_path)
    hospital.path(1).unlink()
    with pytest.raises(DataError, match=r"patch_patient_064_node_0_x_3360_y_21792\.png, which is missing"):
        hospital[1]
    write_png(hospital.path(2), random_images(1, 50, 96, 3)[0])
    with pytest.raises(DataError, match="got 50 x 96"):
        hospital[2]
    table.write_text(whole[:-9] + "\n")
    with pytest.raises(DataError, match=r"metadata\.csv.*line 31"):
        camelyon17(3, tmp_path)
    table.write_bytes(whole.encode() + b"\xff\x00,,\n")
    with pytest.raises(DataError, match=r"metadata\.csv.*line 32"):
        camelyon17(3, tmp_path)
    table.write_text(whole.replace("center", "hospital"))
    with pytest.raises(DataError, match="no 'center'"):
        camelyon17(3, tmp_path)
    table.write_text(whole.splitlines()[0])
    with pytest.raises(DataError, match=r"patches of hospital 3"):
        camelyon17(3, tmp_path)
    for hospital in ("three", "inf"):
        table.write_text(whole.replace(",3,0\n", f",{hospital},0\n", 1))
        with pytest.raises(DataError, match=r"metadata\.csv.*line 5"):
            camelyon17(3, tmp_path)
    for label, found in ((2, "0 to 2"), (-1, "-1 to 0")):
        table.write_text(whole.replace(",1,30,3,0", f",{label},30,3,0"))
        with pytest.raises(DataError, match=f"got {found}"):
            camelyon17(3, tmp_path)
    with pytest.raises(DataError, match=r"1 images.*2 labels"):
        ImageFiles(tmp_path, ["a.png"], torch.tensor([0, 1]), "set", ("a", "b"))


def lay_out_visda(root: Path, split: str = "train") -> list[int]:
    """Classes of 1, 5, 3, 3, ... images of all sizes."""
    counts = [1, 5] + [3] * 10
    lines = []
    for label, count in enumerate(counts):
        for number in range(count):
            name = f"class_{label}/image {number}.png"
            write_png(root / f"VisDA-C/{split}/{name}", np.full((10 + label, 20 + number, 3), label * 10, np.uint8))
            lines.append(f"{name} {label}")
    (root / f"VisDA-C/{split}/image_list.txt").write_text("\n".join(lines) + "\n")
    return counts


def test_visda_reads_the_list_and_scales(tmp_path: Path) -> None:
    counts = lay_out_visda(tmp_path, "validation")
    photographs = visda_c("validation", tmp_path, size=(16, 24))
    assert torch.bincount(photographs.labels).tolist() == counts
    for index in (0, 1, len(photographs) - 1):
        image, label, _ = photographs[index]
        assert image.shape == (3, 16, 24)
        assert (image == label * 10).all()
    assert visda_c("validation", tmp_path, size=None)[0][0].shape == (3, 10, 20)
    scaled = visda_c("validation", tmp_path, transform=lambda image: image.float() / 255)[0][0]
    assert (scaled.shape, scaled.dtype) == ((3, 256, 256), torch.float32)


def test_visda_in_small_letters_and_names_of_any_bytes(tmp_path: Path) -> None:
    (tmp_path / "visda-c/train").mkdir(parents=True)
    (tmp_path / "visda-c/train/image_list.txt").write_bytes(b"truck/\xff.png 11\n\nbus/\xc3\xa9.png 2\n")
    rendered = visda_c(root=tmp_path)
    assert (rendered.name, rendered.labels.tolist()) == ("visda-c-train", [11, 2])
    assert os.fsencode(rendered.path(0)) == os.fsencode(tmp_path) + b"/visda-c/train/truck/\xff.png"
    assert rendered.path(1) == tmp_path / "visda-c/train/bus/é.png"


def test_visda_without_label_shift(tmp_path: Path) -> None:
    lay_out_visda(tmp_path)
    level = visda_c("train", tmp_path, per_class=4, seed=3, size=(16, 24))
    assert level.name == "visda-c-train-4-per-class"
    assert level[0][0].shape == (3, 16, 24)
    assert torch.bincount(level.labels).tolist() == [4] * 12
    kept = [level.path(index) for index in range(len(level)) if int(level.labels[index]) == 1]
    assert len(set(kept)) == 4  # dropped, not repeated, where there are enough
    again = visda_c("train", tmp_path, per_class=4, seed=3)
    assert [again.path(i) for i in range(48)] == [level.path(i) for i in range(48)]
    assert VISDA_PER_CLASS == {"train": 11_000, "validation": 3_500}


def test_visda_damage(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"VisDA-C/train/image_list\.txt, which is missing"):
        visda_c("train", tmp_path)
    with pytest.raises(DataError, match=r"split.*got 'test'"):
        visda_c("test", tmp_path)
    lay_out_visda(tmp_path)
    table = tmp_path / "VisDA-C/train/image_list.txt"
    for text in ("no-label\n", "a.png twelve\n", " 3\n"):
        table.write_text(text)
        with pytest.raises(DataError, match=r"line 1.*image_list\.txt"):
            visda_c("train", tmp_path)
    table.write_text("a.png 12\n")
    with pytest.raises(DataError, match="from 0 to 11"):
        visda_c("train", tmp_path)
    table.write_text("\n")
    with pytest.raises(DataError, match="got 0 images"):
        visda_c("train", tmp_path)
