"""Weights that the training of a source model starts from."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import safetensors
import safetensors.torch
from torch import nn

from shiftmend.data.base import PathLike, data_root
from shiftmend.errors import DataError


def load_pretrained(model: nn.Module, network: str, file: str, root: PathLike | None) -> None:
    """Take everything but the head from a file, which has to have all of it.

    `network` is the model's name, for messages. A relative path starts in the data folder, which `root` may name.
    """
    named = Path(file).expanduser()
    path = named if named.is_absolute() else data_root(root) / named
    if not path.is_file():
        raise DataError(
            f"{path} is missing: expected the weights that {network} starts from, as a safetensors file; put it "
            "there by hand, or train from scratch with pretrained=None"
        )
    try:
        found = safetensors.torch.load_file(path)
    except (safetensors.SafetensorError, OSError) as error:
        raise DataError(f"{path} is no readable safetensors file ({error}); replace it") from error
    taps: Mapping[str, str] = model.shiftmend_taps  # type: ignore[assignment]
    head = taps["logits"].partition(":")[0]
    wanted = {
        name: value
        for name, value in model.state_dict().items()
        # how many batches there were is absent from old files, and nothing here reads it
        if not name.startswith(f"{head}.") and not name.endswith("num_batches_tracked")
    }
    for name, value in wanted.items():
        if name not in found or found[name].shape != value.shape:
            other = list(found[name].shape) if name in found else "nothing"
            raise DataError(
                f"{path} does not fit {network}: expected {name} of shape {list(value.shape)}, found {other}; "
                "get weights of this very network"
            )
    model.load_state_dict({name: found[name] for name in wanted}, strict=False)
