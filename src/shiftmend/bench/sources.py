"""Source models that are kept: each is trained once, and found again by what it was trained from."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn

from shiftmend import checkpoints, fingerprints
from shiftmend.__about__ import __version__
from shiftmend.bench.recipes import Recipe, untrained
from shiftmend.bench.training import train
from shiftmend.checks import kind
from shiftmend.data.base import PathLike, Split
from shiftmend.data.streamed import ImageFiles
from shiftmend.errors import DataError
from shiftmend.feeds import Preprocess
from shiftmend.files import said_where, write_atomically

FORMAT = "shiftmend source model"


def obtain(
    home: Path,
    recipe: Recipe,
    seed: int,
    data: Split | ImageFiles,
    preprocess: Preprocess,
    *,
    device: str | torch.device = "auto",
    tick: Callable[[], None] | None = None,
    root: PathLike | None = None,
    compile: bool = False,
) -> tuple[nn.Module, Path]:
    """The source model of this recipe, seed and data, and its file under `home/sources`; trained if there is none yet.

    `device`, `tick`, `root` and `compile` are those of `train`. A training that was killed goes on at the next call. Of
    two processes that train the same model at once, both end up with the file of the one that finished first; the
    first to begin has the checkpoint.
    """
    digest = recipe.digest(identity(data, preprocess))
    probe = preprocess(data.images[:2]) if isinstance(data, Split) else None
    path = home / "sources" / f"{recipe.network}-{digest}-{seed}.safetensors"
    if not path.exists():
        checkpoint = path.with_suffix(".checkpoint")
        with checkpoints.alone_at(checkpoint) as alone:
            model = train(
                recipe,
                data,
                preprocess,
                seed=seed,
                device=device,
                tick=tick,
                checkpoint=checkpoint if alone else None,
                root=root,
                compile=compile,
            )
        if not path.exists():
            facts = {"digest": digest, "recipe": json.dumps(recipe.facts()), "data": data.name}
            _write(path, model, facts | _answers(model, probe), seed)
        checkpoint.unlink(missing_ok=True)
    # Read back even when just written: whoever asks, now or later, gets the model that is on the disk.
    return _read(path, recipe, digest, seed, probe), path


def identity(data: Split | ImageFiles, preprocess: Preprocess) -> dict[str, Any]:
    """What tells these data, and the inputs they become, from others.

    Image files are known by name, number and labels alone: to read them all would take as long as an epoch.
    """
    facts = {
        "data": data.name,
        "number": len(data),
        "labels": None if data.labels is None else fingerprints.digest(data.labels),
    }
    if isinstance(data, Split):
        facts["images"] = fingerprints.digest(data.images)
        shape = tuple(data.images.shape[1:])
    else:
        shape = (3, *(data.size or (8, 8)))
    return facts | {"preprocess": _response(preprocess, shape)}


def _response(preprocess: Preprocess, shape: tuple[int, ...]) -> list[Any]:
    """What becomes of a black and of a white image: another normalisation or layout shows here, a new name does not."""
    black = torch.zeros(shape, dtype=torch.uint8)
    seen: Any = preprocess(torch.stack([black, black + 255]))
    if not isinstance(seen, Tensor) or seen.ndim < 2 or len(seen) != 2:
        given = list(seen.shape) if isinstance(seen, Tensor) else kind(seen)
        raise DataError(f"preprocess gave {given} for two images, expected a tensor of two inputs")
    levels = seen.double().reshape(*seen.shape[:2], -1).mean(2)
    return [list(seen.shape[1:]), str(seen.dtype), [[round(level, 4) for level in row] for row in levels.tolist()]]


def _write(path: Path, model: nn.Module, facts: dict[str, str], seed: int) -> None:
    metadata = facts | {
        "format": FORMAT,
        "seed": str(seed),
        "weights": fingerprints.weights(model),
        "shiftmend": __version__,
        "torch": str(torch.__version__),
    }
    tensors = {name: value.contiguous() for name, value in model.state_dict().items()}
    with said_where(path):
        write_atomically(path, safetensors.torch.save(tensors, metadata))


@torch.no_grad()
def _answers(model: nn.Module, probe: Tensor | None) -> dict[str, str]:
    """What the model makes of two images: the same weights in other code would give something else."""
    return {} if probe is None else {"answers": json.dumps(model.eval()(probe).flatten().tolist())}


def _alike(answers: str, others: str | None) -> bool:
    """But for what two machines round differently."""
    first, second = (torch.tensor(json.loads(text or "[]")) for text in (answers, others))
    return first.shape == second.shape and torch.allclose(first, second, rtol=1e-2, atol=1e-2, equal_nan=True)


def _read(path: Path, recipe: Recipe, digest: str, seed: int, probe: Tensor | None) -> nn.Module:
    model = untrained(recipe)
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
        model.load_state_dict(state)
        json.loads(metadata.get("answers", "[]"))
    except (safetensors.SafetensorError, OSError, RuntimeError, ValueError) as error:
        raise _unfit(path, "it cannot be read") from error
    if (metadata.get("format"), metadata.get("digest"), metadata.get("seed")) != (FORMAT, digest, str(seed)):
        raise _unfit(path, "it was written for something else")
    if metadata.get("weights") != fingerprints.weights(model):
        raise _unfit(path, "its weights have changed")
    if "answers" in metadata and not _alike(metadata["answers"], _answers(model, probe).get("answers")):
        raise _unfit(path, "the code of its network has changed")
    return model.eval()


def _unfit(path: Path, reason: str) -> DataError:
    return DataError(
        f"{path} is damaged or foreign ({reason}); expected the source model that its name promises: delete it to "
        "train again"
    )
