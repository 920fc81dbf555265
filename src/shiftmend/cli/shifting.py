"""`shift` and `shifts`."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from shiftmend.errors import DataError

console = Console(highlight=False, soft_wrap=True)
Textures = Annotated[Path | None, typer.Option(help="A folder with your own texture pictures.")]
Severity = Annotated[int | None, typer.Option(help="Severity, from 1; default: that of the published set.")]
Seed = Annotated[int, typer.Option(help="Seed of the random draws.")]
Json = Annotated[bool, typer.Option("--json", help="Print machine-readable results.")]


def register(app: typer.Typer) -> None:
    app.command()(shift)
    app.command()(shifts)


def shift(
    name: Annotated[str, typer.Argument(help="A name from `shiftmend shifts`.")],
    source: Annotated[Path, typer.Argument(help="A folder of images, or an .npz.")],
    target: Annotated[Path, typer.Argument(help="The .npz or the new folder to write.")],
    severity: Severity = None,
    seed: Seed = 0,
    textures: Textures = None,
    as_json: Json = False,
) -> None:
    """Apply a shift to a folder of images or an .npz; a manifest beside the result says how it was made."""
    import shiftmend
    from shiftmend import shifts as library
    from shiftmend.data import image_folder, npz_file
    from shiftmend.files import write_atomically
    from shiftmend.shifts.textures import digest

    found = library.find(name)
    split = image_folder(source) if source.is_dir() else npz_file(source)
    if target.exists() and target.suffix != ".npz":
        raise DataError(f"{target} is there already; name a new folder, or an .npz file")
    shifted = library.apply(name, split.images, severity=severity, seed=seed, textures=textures)
    manifest: dict[str, Any] = {
        "shift": name,
        "severity": severity or found.default,
        "parameters": dict(found.parameters(severity)),
        "seed": seed,
        "source": str(source),
        "images": len(shifted),
        "textures": digest(found.texture, textures) if found.texture else {},
        "shiftmend": shiftmend.__version__,
    }
    beside = target.with_suffix(".json") if target.suffix == ".npz" else target / "manifest.json"
    if target.suffix == ".npz":
        import numpy as np

        arrays = {"images": shifted.numpy()} | ({} if split.labels is None else {"labels": split.labels.numpy()})
        buffer = io.BytesIO()
        np.savez_compressed(buffer, **arrays)  # type: ignore[arg-type]
        write_atomically(target, buffer.getvalue())
    else:
        _write_folder(shifted, split, target)
    write_atomically(beside, (json.dumps(manifest, indent=1) + "\n").encode())
    if as_json:
        print(json.dumps(manifest))
    else:
        console.print(f"{len(shifted):,} images under {name} written to {target}, manifest in {beside}", markup=False)


def _write_folder(images: Any, split: Any, target: Path) -> None:
    """One PNG an image, in a folder per class where the source had classes."""
    from PIL import Image

    partial = target.with_name(f".{target.name}.partial")
    if partial.exists():
        raise DataError(f"{partial} is left from a run that was cut off; delete it and start again")
    digits = len(str(len(images) - 1))
    for index, image in enumerate(images.movedim(1, -1).numpy()):
        home = partial if split.labels is None else partial / _class_name(split, int(split.labels[index]))
        home.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image.squeeze(-1) if image.shape[-1] == 1 else image).save(home / f"{index:0{digits}d}.png")
    partial.rename(target)


def _class_name(split: Any, label: int) -> str:
    return str(split.classes[label]) if split.classes else str(label)


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
        raise DataError(f"no shift begins with {only!r}; see `shiftmend shifts`")
    if sheet is not None:
        from shiftmend.shifts.sheet import contact_sheet

        contact_sheet(_sheet_images(data), list(chosen), sheet, severity=severity, seed=seed, textures=textures)
        console.print(f"written to {sheet}", markup=False)
        return
    if as_json:
        rows = [
            {
                "name": name,
                "summary": entry.summary,
                "default": entry.default,
                "severities": [dict(level) for level in entry.severities],
                "random": entry.random,
                "texture": entry.texture,
            }
            for name, entry in chosen.items()
        ]
        print(json.dumps(rows))
        return
    table = Table("shift", "severities", "what it does", box=None)
    for name, entry in chosen.items():
        table.add_row(name, f"{len(entry.severities)}, default {entry.default}", entry.summary)
    console.print(table)


def _sheet_images(data: Path | None) -> Any:
    from shiftmend.data import image_folder, npz_file

    if data is not None:
        return (image_folder(data) if data.is_dir() else npz_file(data)).images[:8]
    from shiftmend.demo import digits

    return digits().images[:8]
