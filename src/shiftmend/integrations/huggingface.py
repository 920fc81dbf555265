"""Hugging Face: columns of `datasets` as data, and `save_pretrained` of adapted `transformers` models.

Such models can be profiled and adapted directly: dicts of inputs are passed by name, and `logits` is the output.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from shiftmend.adaptation.result import Adaptation
from shiftmend.errors import AdaptationError, DataError
from shiftmend.utils.files import as_path, write_atomically
from shiftmend.utils.json import dumps

Row = Tensor | dict[str, Tensor]


class Columns(Dataset[Any]):
    """Columns of a `datasets.Dataset` as tensors; made by `as_dataset`."""

    def __init__(self, dataset: Any, inputs: str | Sequence[str], labels: str | None = None) -> None:
        names = [inputs] if isinstance(inputs, str) else list(inputs)
        known = list(getattr(dataset, "column_names", None) or [])
        for name in [*names, *([labels] if labels is not None else [])]:
            if name not in known:
                raise DataError(
                    f"Expected a column {name!r} of the dataset, got {', '.join(known) or 'none'}. Name another column."
                )
        self.inputs, self.labels = inputs, labels
        chosen = dataset.select_columns([*names, *([labels] if labels is not None else [])])
        self._rows = chosen.with_format("torch")

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, place: int) -> Any:
        return self._convert(self._rows[place])

    def _convert(self, row: dict[str, Any]) -> Any:
        inputs: Any = row[self.inputs] if isinstance(self.inputs, str) else {name: row[name] for name in self.inputs}
        return inputs if self.labels is None else (inputs, torch.as_tensor(row[self.labels]))


def as_dataset(dataset: Any, inputs: str | Sequence[str], labels: str | None = None) -> Columns:
    """Make data for shiftmend from columns of a `datasets.Dataset`.

    Args:
        dataset: A `datasets.Dataset` with numbers or images in these columns.
        inputs: Name of the column that the model is called with, or several names, which are passed by name.
        labels: Name of the column of labels, for `evaluate` and `rehearse`; labels never reach a method.

    Returns:
        A `torch.utils.data.Dataset`, which every function of shiftmend accepts.

    Raises:
        DataError: If a column does not exist.

    Example:
        >>> rows = datasets.load_dataset("my/scans", split="test")  # doctest: +SKIP
        >>> shiftmend.adapt(model, as_dataset(rows, "pixel_values"), profile)  # doctest: +SKIP
    """
    return Columns(dataset, inputs, labels)


def save_pretrained(result: Adaptation, folder: str | os.PathLike[str], **options: Any) -> None:
    """Write an adapted model that `from_pretrained` can load, together with manifest and history.

    Args:
        result: The result of `shiftmend.adapt` for a model of `transformers`.
        folder: Folder to write into.
        options: Options of the model's own `save_pretrained`.

    Raises:
        AdaptationError: If the model has no `save_pretrained`, or maps inputs or features, which
            `from_pretrained` would lose.

    Example:
        >>> save_pretrained(result, "mended")  # doctest: +SKIP
        >>> model = AutoModelForSequenceClassification.from_pretrained("mended")  # doctest: +SKIP
    """
    model: Any = result.model
    if not hasattr(model, "save_pretrained"):
        raise AdaptationError(
            f"Expected a model with save_pretrained, got {type(model).__name__}. Use result.save(folder)."
        )
    if any("shiftmend_" in name for name, _ in model.named_buffers()):
        method = result.manifest["method"]["name"]
        raise AdaptationError(
            f"Expected a model without maps, got one of {method}, which from_pretrained would lose. Use "
            "result.save(folder)."
        )
    home = as_path(folder, "the folder to write into")
    model.save_pretrained(home, **options)
    rows = [row.to_json() for row in result.history]
    write_atomically(home / "history.json", (dumps(rows, "the history", indent=1) + "\n").encode())
    write_atomically(home / "manifest.json", (dumps(result.manifest, "the manifest", indent=1) + "\n").encode())
