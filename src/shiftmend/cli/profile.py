"""`profile`, `inspect` and `mix`."""

from __future__ import annotations

import logging
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from shiftmend.cli import options as opt
from shiftmend.cli.options import by_all_processes, choose_columns, entry, gather, named_tap, say
from shiftmend.errors import DataError
from shiftmend.utils import sealing
from shiftmend.utils.files import check_folder
from shiftmend.utils.json import dumps

logger = logging.getLogger(__name__)
New = Annotated[Path, typer.Option("--out", "-o", help="The profile to write.")]


@by_all_processes
def profile(
    model: opt.Model,
    data: opt.Data,
    out: New,
    weights: opt.Weights = None,
    model_option: opt.Options = None,
    preset: Annotated[str | None, typer.Option(help="reference (the default), paper or sliced.")] = None,
    temperature: Annotated[
        float | None, typer.Option(help="How soft the bins are (0.01; 0.05 for a network without BatchNorm).")
    ] = None,
    gaussian: Annotated[
        str | None, typer.Option(help="marginal (the default), or full for the method full-gauss.")
    ] = None,
    like: Annotated[
        Path | None, typer.Option(help="Use the ranges, slices and taps of this profile, so that both can be mixed.")
    ] = None,
    private: Annotated[
        float | None,
        typer.Option(metavar="EPSILON", help="Make the profile differentially private within this budget, e.g. 1."),
    ] = None,
    delta: Annotated[float, typer.Option(help="Of --private: the probability that the promise may fail.")] = 1e-6,
    known_range: Annotated[
        list[str] | None,
        typer.Option(
            "--range", help="Of --private: tap=low,high that is known without data, or inputs=0,1; repeatable."
        ),
    ] = None,
    refresh_batchnorm: Annotated[
        Path | None,
        typer.Option(
            metavar="OUT",
            help="Estimate BatchNorm's statistics anew on the data; write these weights (.safetensors), profile them.",
        ),
    ] = None,
    head: opt.Head = None,
    tap: opt.Taps = None,
    output_entry: opt.Output = None,
    label: opt.Label = None,
    classes: opt.Classes = None,
    quantity: opt.Quantities = None,
    drop: opt.Drop = None,
    where: opt.Where = None,
    size: opt.Size = None,
    channels: opt.Channels = None,
    mean: opt.Mean = "0.5",
    std: opt.Deviation = "0.5",
    batch_size: opt.Batch = 256,
    device: opt.Device = "auto",
    allow_pickle: opt.Pickle = False,
    sign: opt.Sign = None,
    as_json: opt.Json = False,
) -> None:
    """Store, at home, how the model's features are distributed on its source data."""
    import shiftmend
    from shiftmend.profiles import presets
    from shiftmend.utils.processes import rank

    check_place(out, weights)
    check_key(sign)
    _read_privacy(private, delta, known_range)
    if refresh_batchnorm is not None:
        _check_weights_place(refresh_batchnorm, out)
    usual = presets.preset("reference" if preset is None else preset).bins
    home = None if like is None else shiftmend.Profile.load(like)
    choice = choose_columns(label, classes, quantity, drop, where, home)
    net, given, preprocess = gather(model, weights, model_option, allow_pickle, data, size, channels, mean, std, choice)
    if refresh_batchnorm is not None:
        net = shiftmend.refresh_batchnorm(
            net, given.inputs, batch_size=batch_size, preprocess=preprocess, device=device
        )
    made = shiftmend.profile(
        net,
        given.as_table(),
        preset=preset,
        bins=None if temperature is None else replace(usual, temperature=temperature),
        gaussian=gaussian,  # type: ignore[arg-type]
        head=head,
        taps=dict(named_tap(text) for text in tap) if tap else None,
        output=entry(output_entry),
        like=home,
        private=_read_privacy(private, delta, known_range),
        batch_size=batch_size,
        preprocess=preprocess,
        device=device,
    )
    if rank() > 0:
        return
    if weights is None:
        logger.warning("no --weights given: this is the profile of the weights that %s gives by itself", model)
    if refresh_batchnorm is not None:
        _write_weights(net, refresh_batchnorm)
    _write(made, out, as_json, sign)


def _read_privacy(epsilon: float | None, delta: float, ranges: list[str] | None) -> Any:
    """Read `--private`, `--delta` and `--range`."""
    import shiftmend

    if epsilon is None:
        if ranges:
            raise DataError("Expected --range beside --private, got it alone. Try --private 1.")
        return None
    return shiftmend.Privacy(epsilon, delta, dict(_named_range(text) for text in ranges or ()))


def _named_range(text: str) -> tuple[str, tuple[float, float]]:
    """Read `--range name=low,high`."""
    name, _, ends = text.partition("=")
    try:
        low, high = (float(end) for end in ends.split(","))
    except ValueError:
        raise DataError(f"Expected --range name=low,high, got {text!r}. Try inputs=0,1.") from None
    return name, (low, high)


def inspect(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A profile.")],
    trust: opt.Trust = None,
    as_json: opt.Json = False,
) -> None:
    """Show what a profile contains, and the results of its rehearsal."""
    import shiftmend

    loaded = shiftmend.Profile.load(file, trust=trust)
    with file.open("rb") as content:
        seal = sealing.check(content)
    if as_json:
        print(dumps(summarise(loaded, file) | {"signer": seal.signer}))
    else:
        say(f"{loaded}\n  file        {file.stat().st_size:,} bytes, {seal}")
        if loaded.rehearsal is not None:
            say(f"\n{loaded.rehearsal}")


def mix(
    parts: Annotated[
        list[Path], typer.Argument(metavar="PARTS", help="Profiles of a part each, such as a class, made with --like.")
    ],
    shares: Annotated[str, typer.Option(help="How frequent each part is at the new site, e.g. 9,1 or 0.9,0.1.")],
    out: New,
    sign: opt.Sign = None,
    trust: opt.Trust = None,
    as_json: opt.Json = False,
) -> None:
    """Mix the profiles of several classes for a site where the classes have other shares."""
    from shiftmend.profiles.profile import Profile

    check_place(out)
    if out.exists() and any(part.exists() and out.samefile(part) for part in parts):
        raise DataError(
            f"Expected a new file as --out, got {out}, one of the parts, which would be lost. Name another file."
        )
    try:
        numbers = [float(share) for share in shares.split(",")]
    except ValueError:
        raise DataError(f"Expected --shares to be numbers with commas, e.g. 9,1, got {shares!r}.") from None
    check_key(sign)
    _write(Profile.mixture([Profile.load(part, trust=trust) for part in parts], numbers), out, as_json, sign)


def check_key(sign: Path | None) -> None:
    """Check that the private key of `--sign` can be used, so that a wrong key fails before anything is computed.

    Args:
        sign: Path of the private key; None to sign nothing.

    Raises:
        ShiftmendError: If the file cannot be read or is not an Ed25519 key.
    """
    from shiftmend.utils.signing import load_key

    if sign is not None:
        load_key(sign)


def _write(made: Any, out: Path, as_json: bool, sign: Path | None) -> None:
    """Save a profile and print what it holds."""
    made.save(out, sign=sign)
    if as_json:
        print(dumps(summarise(made, out)))
    else:
        say(f"{made}\nwritten to {out} ({out.stat().st_size:,} bytes)")


def _write_weights(net: Any, out: Path) -> None:
    """Save the weights of a refreshed model, which should be used from then on."""
    from shiftmend.introspection.model_state import full_state_dict, save_tensors
    from shiftmend.utils.files import replacing

    try:
        with replacing(out) as (place,):
            save_tensors(place, full_state_dict(net))
    except OSError as error:
        raise DataError(
            f"File {out} of --refresh-batchnorm cannot be written ({error.strerror}). Name another file."
        ) from error
    logger.warning("the profile is that of the refreshed weights in %s: use them from now on", out)


def _check_weights_place(place: Path, out: Path) -> None:
    """Refuse to overwrite anything by refreshed weights."""
    check_folder(place.parent)
    if place.suffix != ".safetensors":
        raise DataError(f"Expected --refresh-batchnorm to name a file ending in .safetensors, got {place}.")
    if place.exists() or place.resolve() == out.resolve():
        raise DataError(
            f"Expected a new file for --refresh-batchnorm, got {place}, which exists or is --out. Name another file."
        )


def check_place(out: Path, weights: Path | None = None) -> None:
    """Check that `--out` names a new file or an existing profile, and not the file of the weights.

    Raises:
        DataError: If the file exists and is not a profile, or is a folder.
    """
    from shiftmend.errors import ProfileError
    from shiftmend.profiles.profile import Profile

    check_folder(out.parent)
    if out.is_dir():
        raise DataError(f"Expected --out to name a file, got the folder {out}. Name a file in it.")
    if weights is not None and out.exists() and weights.exists() and out.samefile(weights):
        raise DataError(f"Expected a new file as --out, got {out}, the file of the weights. Name another file.")
    if out.is_file():
        try:
            Profile.load(out)
        except ProfileError:
            raise DataError(
                f"Expected a new file or a profile to replace as --out, got {out}, which is none. Remove it, or name "
                "another file."
            ) from None


def summarise(profile: Any, file: Path) -> dict[str, Any]:
    """Summarise a profile for `--json`."""
    return {
        "file": str(file),
        "bytes": file.stat().st_size,
        "preset": profile.preset,
        "samples": profile.samples,
        **({"shares": list(profile.shares)} if profile.shares else {}),
        "bins": asdict(profile.bins),
        "taps": {
            name: {"at": str(profile.specs[name]), "units": tap.units, "constant": profile.unusable[name]}
            for name, tap in profile.taps.items()
        },
        "gaussian": profile.gaussian.kind,
        "slices": {name: part.histogram.units for name, part in profile.slices.items()},
        "inputs": profile.inputs.to_json(),
        "architecture": profile.architecture,
        "weights": profile.weights,
        "library": profile.library,
        **({} if profile.privacy is None else {"privacy": profile.privacy.to_json()}),
        **({} if profile.rehearsal is None else {"rehearsal": rehearsal_json(profile.rehearsal)}),
    }


def rehearsal_json(record: Any) -> dict[str, Any]:
    """Summarise a rehearsal for `--json`."""

    def describe(place: int, shift: Any, size: int) -> dict[str, Any]:
        return {
            "name": shift.name,
            "family": shift.family,
            "strength": shift.strength,
            "size": record.sizes[size],
            "scores": dict(zip(record.candidates, record.scores[place, size].tolist(), strict=True)),
            "chosen": record.candidates[int(record.chosen[place, size])],
            "estimate": float(record.estimates[place, size, -1]),
        }

    return {
        "metric": record.metric,
        "labelled": record.labelled,
        "samples": record.samples,
        "score": record.score,
        "sizes": list(record.sizes),
        "candidates": list(record.candidates),
        "mean_error": record.mean_error,
        "shifts": [
            describe(place, shift, size)
            for place, shift in enumerate(record.shifts)
            for size in range(len(record.sizes))
        ],
    }
