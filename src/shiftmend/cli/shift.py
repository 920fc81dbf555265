"""`shift` and `shifts`."""

from __future__ import annotations

import io
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shiftmend.cli.options import Json, columns, say, show
from shiftmend.errors import DataError
from shiftmend.utils.files import said_where, write_atomically, write_together
from shiftmend.utils.json import dumps, loads

if TYPE_CHECKING:
    from torch import Tensor

    from shiftmend.cli.loading import Data
    from shiftmend.shifts import Shift

Textures = Annotated[Path | None, typer.Option(help="A folder with your own texture pictures.")]
Severity = Annotated[int | None, typer.Option(help="Severity, from 1; default: that of the published set.")]
Seed = Annotated[int, typer.Option(help="Seed of the random draws.")]
Size = Annotated[int | None, typer.Option(min=1, help="Scale the images to this height and width.")]


def register(app: typer.Typer) -> None:
    """Add the commands to the application."""
    app.command()(shift)
    app.command()(shifts)


def shift(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A name from `shiftmend shifts`.")],
    source: Annotated[Path, typer.Argument(metavar="SOURCE", help="A folder of images, or an .npz.")],
    target: Annotated[Path, typer.Argument(metavar="TARGET", help="The .npz or the new folder to write.")],
    severity: Severity = None,
    seed: Seed = 0,
    textures: Textures = None,
    size: Size = None,
    as_json: Json = False,
) -> None:
    """Apply a shift to a folder of images or an .npz; a manifest beside the result records how it was made."""
    import shiftmend
    from shiftmend import shifts as library
    from shiftmend.shifts.textures import digest

    found = library.find(name)
    beside = target.with_suffix(".json") if target.suffix == ".npz" else target / "manifest.json"
    _check_target(target, beside, found)
    data = _read_signals(source, size) if found.domain == "signal" else _read_images(source, size)
    if target.exists() and target.samefile(source):
        raise DataError(f"Expected a new file, got {target}, which holds the images to shift. Name another file.")
    shifted = library.apply(name, data.inputs, severity=severity, seed=seed, textures=textures)
    manifest: dict[str, Any] = {
        "shift": name,
        "severity": severity or found.default,
        "parameters": dict(found.parameters(severity)),
        "seed": seed,
        "source": str(source),
        f"{found.domain}s": len(shifted),
        "textures": digest(found.texture, textures) if found.texture else {},
        "shiftmend": shiftmend.__version__,
    }
    text = (dumps(manifest, "the manifest", indent=1) + "\n").encode()
    with said_where(target):
        if target.suffix == ".npz":
            arrays = _compress("images" if found.domain == "image" else "inputs", shifted, data)
            write_together({target: arrays, beside: text})
        else:
            _write_folder(shifted, data, target, text)
    if as_json:
        print(dumps(manifest))
    else:
        say(f"{len(shifted):,} {found.domain}s under {name} written to {target}, manifest in {beside}")


def _check_target(target: Path, manifest: Path, shift: Shift) -> None:
    """Refuse to overwrite anything except an .npz and its manifest."""
    if target.exists() and (target.suffix != ".npz" or target.is_dir()):
        raise DataError(f"Expected a new folder or an .npz file, got {target}, which exists. Name another.")
    if shift.domain == "signal" and target.suffix != ".npz":
        raise DataError(
            f"Expected an .npz file for the signals of {shift.name}, got {target}. Name one ending in .npz."
        )
    if manifest.is_file():
        try:
            found = loads(manifest.read_bytes())
        except (OSError, ValueError):
            found = None
        if not isinstance(found, dict) or not {"shift", "shiftmend"} <= found.keys():
            raise DataError(
                f"Expected no file, or a manifest, at {manifest}, got another file. Name another .npz file."
            )


def _read_signals(source: Path, size: int | None) -> Data:
    """Read an `.npz` with an array `inputs` of signals `[N, C, L]`."""
    from shiftmend.cli.loading import load_data

    if source.suffix != ".npz":
        raise DataError(f"Expected an .npz file with an array 'inputs' of signals [N, C, L], got {source}.")
    data = load_data(source, size)
    return data._replace(inputs=data.inputs.float())


def _read_images(source: Path, size: int | None = None) -> Data:
    from shiftmend.cli.loading import Data, check_npz, scale_images
    from shiftmend.inputs.arrays import npz_file
    from shiftmend.inputs.folders import image_folder

    if source.is_dir():
        split = image_folder(source, size=size)
        return Data(split.images, split.labels, split.classes)
    check_npz(source)
    split = npz_file(source)
    return Data(scale_images(split.images, size), split.labels, split.classes)


def _compress(key: str, images: Tensor, data: Data) -> bytes:
    import numpy as np

    arrays: dict[str, Any] = {key: images.numpy()}
    if data.labels is not None:
        arrays["labels"] = data.labels.numpy()
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **arrays)
    return buffer.getvalue()


def _write_folder(images: Tensor, data: Data, target: Path, manifest: bytes) -> None:
    """Write one PNG per image, in one folder per class if there are classes; write everything or nothing."""
    from PIL import Image

    labels, classes = data.labels, data.classes
    if labels is not None and not classes and len(labels.unique()) <= int(labels.max()):
        raise DataError(
            f"Expected images of every class below {int(labels.max())}, since folders number classes in order, got "
            "none of some. Write an .npz, which keeps labels."
        )
    partial = target.with_name(f".{target.name}.partial")
    if partial.exists():
        raise DataError(f"Expected no {partial}, which is left from a run that was cut off. Delete it and start again.")
    digits = len(str(len(images) - 1))
    try:
        for index, image in enumerate(images.movedim(1, -1).numpy()):
            home = partial
            if labels is not None:
                home = partial / (classes[labels[index]] if classes else str(int(labels[index])))
            home.mkdir(parents=True, exist_ok=True)
            picture = image.squeeze(-1) if image.shape[-1] == 1 else image
            Image.fromarray(picture).save(home / f"{index:0{digits}d}.png")
        write_atomically(partial / "manifest.json", manifest)
        partial.rename(target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def shifts(
    sheet: Annotated[Path | None, typer.Option(help="Draw a contact sheet: rows are shifts, columns images.")] = None,
    data: Annotated[Path | None, typer.Option("--data", "-d", help="Images for the sheet; default: digits.")] = None,
    only: Annotated[str, typer.Option(help="Only names that begin with this, e.g. emnist-da.")] = "",
    severity: Severity = None,
    seed: Seed = 0,
    textures: Textures = None,
    as_json: Json = False,
) -> None:
    """List the shifts, and draw them."""
    from shiftmend.shifts import SHIFTS

    chosen = {name: entry for name, entry in SHIFTS.items() if name.startswith(only)}
    if not chosen:
        raise DataError(f"Expected shifts whose names begin with {only!r}, got none. See `shiftmend shifts`.")
    if sheet is not None:
        names = _draw_sheet(sheet, chosen, data, severity=severity, seed=seed, textures=textures)
        if as_json:
            print(dumps({"sheet": str(sheet), "shifts": names}))
        else:
            say(f"written to {sheet}")
        return
    if any(given is not None for given in (data, severity, textures)):
        raise DataError(
            "Expected --data, --severity and --textures only for a sheet, got no --sheet. Name its file with --sheet."
        )
    if as_json:
        rows = [
            {
                "name": name,
                "summary": entry.summary,
                "default": entry.default,
                "severities": [dict(level) for level in entry.severities],
                "random": entry.random,
                "texture": entry.texture,
                "domain": entry.domain,
            }
            for name, entry in chosen.items()
        ]
        print(dumps(rows))
        return
    table = columns("shift", "severities", "what it does")
    for name, entry in chosen.items():
        table.add_row(name, f"{len(entry.severities)}, default {entry.default}", entry.summary)
    show(table)


def _draw_sheet(sheet: Path, chosen: dict[str, Shift], data: Path | None, **options: Any) -> list[str]:
    """Draw eight images under each of the chosen shifts; return the names of the shifts."""
    from shiftmend.inputs.digits import enlarged_digits
    from shiftmend.shifts.sheet import contact_sheet

    images = enlarged_digits().images if data is None else _read_images(data).inputs
    # Shifts of colours reject grey images, and shifts of glyphs need three equal channels.
    images = images[:8].expand(-1, 3, -1, -1) if images.shape[1] == 1 else images[:8]
    names = [name for name, entry in chosen.items() if entry.domain == "image" and not name.endswith("/identity")]
    if not names:
        raise DataError(
            "Expected a shift of images, got shifts of signals alone, which are not drawn. Try another --only."
        )
    with said_where(sheet):
        contact_sheet(images, ["mnist-c/identity", *names], sheet, **options)
    return names
