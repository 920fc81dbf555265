from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from shiftmend.errors import DataError
from shiftmend.inputs.images import Split
from shiftmend.research.datasets.base import data_root

IMAGES = torch.zeros(4, 1, 2, 2, dtype=torch.uint8)


def test_root_is_the_argument_then_the_environment_then_an_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SHIFTMEND_DATA", str(tmp_path))
    assert data_root() == tmp_path
    assert data_root("/elsewhere") == Path("/elsewhere")
    assert data_root("~/sets") == Path.home() / "sets"
    for empty in ("", None):
        if empty is None:
            monkeypatch.delenv("SHIFTMEND_DATA")
        else:
            monkeypatch.setenv("SHIFTMEND_DATA", empty)
        with pytest.raises(DataError, match="export SHIFTMEND_DATA="):
            data_root()


def test_take_keeps_order_and_names() -> None:
    images = torch.arange(4, dtype=torch.uint8).reshape(4, 1, 1, 1)
    split = Split(images, torch.tensor([0, 1, 2, 1]), "set", ("a", "b", "c"))
    part = split.take(torch.tensor([3, 0, 3]), "part")
    assert part.images.flatten().tolist() == [3, 0, 3]
    assert part.labels is not None
    assert part.labels.tolist() == [1, 0, 1]
    assert (part.name, part.classes, len(part)) == ("part", ("a", "b", "c"), 3)
    assert repr(split).endswith(", 3 classes")
    rest = Split(images, None, "unlabelled").take(torch.tensor([1]))
    assert repr(rest) == f"unlabelled: 1 image {list(images.shape[1:])}, without labels"
    assert (rest.labels, rest.name) == (None, "unlabelled")


@pytest.mark.parametrize(
    ("images", "labels", "message"),
    [
        (IMAGES.float(), None, "uint8"),
        (IMAGES[:, 0], None, r"\[N, C, H, W\]"),
        (IMAGES[:0], None, "at least one image"),
        (IMAGES, torch.zeros(3, dtype=torch.int64), "4 images"),
        (IMAGES, torch.zeros(4), "int64"),
        (IMAGES, torch.tensor([0, 1, 2, 0]), "expected 0 to 1"),
        (IMAGES, torch.tensor([0, -1, 1, 0]), "expected 0 to 1"),
    ],
)
def test_what_is_no_set_of_images_is_refused(images: torch.Tensor, labels: torch.Tensor | None, message: str) -> None:
    with pytest.raises(DataError, match=message):
        Split(images, labels, "set", ("a", "b"))


def test_labels_of_a_set_without_class_names_are_any_class_numbers() -> None:
    assert len(Split(IMAGES, torch.tensor([0, 1, 8, 0]), "set")) == 4
    with pytest.raises(DataError, match="labels from -1 to 8; expected class numbers from 0: "):
        Split(IMAGES, torch.tensor([0, -1, 8, 0]), "set")


@pytest.mark.slow
def test_pillow_is_not_imported_with_the_package() -> None:
    code = "import sys, shiftmend.research.datasets; sys.exit('PIL' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
