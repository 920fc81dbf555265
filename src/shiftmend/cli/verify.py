"""`verify`, `shares` and `evaluate`."""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import typer

from shiftmend.cli import options as opt
from shiftmend.cli.config import add_command
from shiftmend.cli.options import choose_columns, entry, gather, say
from shiftmend.errors import DataError
from shiftmend.utils.json import dumps
from shiftmend.utils.signing import read_public

if TYPE_CHECKING:
    from torch import nn

    from shiftmend.cli.loading import Data, Normalisation
    from shiftmend.profiles.profile import Profile
    from shiftmend.verification.estimate import Estimate
    from shiftmend.verification.verdict import Verification

logger = logging.getLogger(__name__)
LABELLED = "Try one folder per class, an array 'labels' in the .npz, or a table with --label or --quantity"
NOT_REHEARSED = "the profile was not rehearsed; see `shiftmend rehearse`"

Answer = Literal["yes", "no", "unknown"]
EXIT_CODES: dict[Answer, int] = {"yes": 0, "no": 3, "unknown": 4}
"""Exit codes of `verify` with a limit."""


def register(app: typer.Typer) -> None:
    """Add the commands to the application."""
    for command in (verify, shares, evaluate):
        add_command(app, command)


def verify(
    model: opt.Model,
    data: opt.Data,
    profile: opt.ProfileFile,
    weights: opt.Weights = None,
    model_option: opt.Options = None,
    adaptation: Annotated[
        Path | None,
        typer.Option(help="How the model was adapted: the folder that `adapt` wrote, or its manifest.json."),
    ] = None,
    labelled: Annotated[
        Path | None, typer.Option(help="A few labelled samples of the same device, in any form of --data.")
    ] = None,
    at_least: Annotated[
        str | None, typer.Option(help="Accuracy that is needed, e.g. 0.8 or 80%: decides the exit code.")
    ] = None,
    at_most: Annotated[
        str | None, typer.Option(help="The same for the error of a model that predicts quantities.")
    ] = None,
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
    trust: opt.Trust = None,
    as_json: opt.Json = False,
) -> None:
    """Estimate without labels how accurate a model is, and whether its features are distributed as at home.

    The estimate needs a rehearsed profile. How the model was adapted is read from the manifest.json beside its weights,
    or from --adaptation.

    With --at-least (or --at-most, for errors), the exit code is 0 if the whole interval (or the estimate, if it has no
    interval) meets the limit; 3 if the estimate misses the limit; 4 if it is undecided, because the limit lies between
    the estimate and the end of its interval, or because there is no estimate.
    """
    import shiftmend
    from shiftmend.cli.loading import load_data

    home = shiftmend.Profile.load(profile, trust=trust)
    limit = _read_limit(at_least, at_most, home)
    if labelled is not None and home.rehearsal is None:
        raise DataError(
            "Expected a rehearsed profile for --labelled, which narrows an estimate. Try `shiftmend rehearse`, or "
            "`shiftmend evaluate`."
        )
    choice = choose_columns(label, classes, quantity, drop, where, home)
    # If labelled samples are given separately, the data need no labels.
    own = choice if labelled is None else {name: choice[name] for name in choice.keys() & {"drop", "where", "columns"}}
    net, given, preprocess = gather(model, weights, model_option, allow_pickle, data, size, channels, mean, std, own)
    few = None if labelled is None else load_data(labelled, size, choice)
    if few is not None:
        if few.labels is None:
            raise DataError(f"Expected labels in {labelled}, got none that can be used. {LABELLED}.")
        check_labels(net, few, preprocess, output_entry, device)
    found = shiftmend.verify(
        net,
        given.inputs,
        home,
        adaptation=_find_manifest(net, weights, adaptation, None if trust is None else read_public(trust)),
        labelled=None if few is None else (few.inputs, few.labels),
        batch_size=batch_size,
        preprocess=preprocess,
        output=entry(output_entry),
        device=device,
    )
    if weights is None:
        # Weights that are named explicitly may be adapted ones, which differ from the profile's.
        home.check_weights(net)
    answer = None if limit is None else _decide(found.estimate, limit)
    if as_json:
        decision = {} if limit is None else {"decision": {limit.name.replace(" ", "_"): limit.value, "answer": answer}}
        print(dumps(found.to_json() | decision))
    else:
        say("\n".join(_describe(found)))
        if limit is not None:
            say(f"{limit.name} {limit.text}: {answer}")
    if answer is not None:
        raise typer.Exit(EXIT_CODES[answer])


def shares(
    model: opt.Model,
    data: opt.Data,
    profile: opt.ProfileFile,
    weights: opt.Weights = None,
    model_option: opt.Options = None,
    adaptation: Annotated[
        Path | None,
        typer.Option(help="How the model was adapted: the folder that `adapt` wrote, or its manifest.json."),
    ] = None,
    size: opt.Size = None,
    channels: opt.Channels = None,
    mean: opt.Mean = "0.5",
    std: opt.Deviation = "0.5",
    batch_size: opt.Batch = 256,
    device: opt.Device = "auto",
    allow_pickle: opt.Pickle = False,
    drop: opt.Drop = None,
    where: opt.Where = None,
    trust: opt.Trust = None,
    as_json: opt.Json = False,
) -> None:
    """Estimate without labels how frequent the classes are in some data.

    The profile must have been rehearsed with labels. If the device changed, pass the weights of the adapted model.
    """
    import shiftmend
    from shiftmend.utils.signing import read_public

    home = shiftmend.Profile.load(profile, trust=trust)
    choice = choose_columns(None, None, None, drop, where, home)
    net, given, preprocess = gather(model, weights, model_option, allow_pickle, data, size, channels, mean, std, choice)
    found = shiftmend.shares(
        net,
        given.inputs,
        home,
        adaptation=_find_manifest(net, weights, adaptation, None if trust is None else read_public(trust)),
        batch_size=batch_size,
        preprocess=preprocess,
        device=device,
    )
    if as_json:
        print(dumps(found.to_json() | {"reliable": found.reliable, "distance": round(found.distance, 5)}))
    else:
        say(str(found))


def check_labels(
    net: nn.Module,
    given: Data,
    preprocess: Normalisation,
    output_entry: str | None,
    device: str,
    ignore_label: int | None = None,
) -> None:
    """Score the model on a few inputs, so that wrong labels fail before the long part of a command."""
    import shiftmend
    from shiftmend.cli.loading import pick_telling_rows

    if given.labels is None:
        return
    rows = pick_telling_rows(given.labels, ignore_label)
    shiftmend.evaluate(
        net,
        (given.inputs[rows], given.labels[rows]),
        preprocess=preprocess,
        output=entry(output_entry),
        device=device,
        classes=given.classes,
        ignore_label=ignore_label,
    )


def _find_manifest(
    net: nn.Module, weights: Path | None, adaptation: Path | None, trust: str | None
) -> dict[str, Any] | None:
    """Read how a model was adapted, from the given file or the manifest beside the weights.

    The manifest is used only if it belongs to exactly these weights, because an estimate for another model would be
    wrong.
    """
    from shiftmend.profiles import fingerprints
    from shiftmend.report.saved import read_manifest

    if adaptation is not None:
        path = adaptation / "manifest.json" if adaptation.is_dir() else adaptation
        if not path.is_file():
            raise DataError(f"Expected --adaptation to be what `shiftmend adapt` wrote, got {path}, which is no file.")
        manifest = read_manifest(path, trust)
        if manifest["adapted_weights"] != fingerprints.weights(net):
            raise DataError(
                f"Expected the weights that {path} describes, got others. Try --weights "
                f"{path.parent}/model.safetensors."
            )
        return manifest
    beside = None if weights is None else weights.parent / "manifest.json"
    if beside is None or not beside.is_file():
        return None
    try:
        manifest = read_manifest(beside, trust)
    except DataError:
        # Other programs write files of this name as well, and an unsigned one is not trusted.
        return None
    return manifest if manifest["adapted_weights"] == fingerprints.weights(net) else None


class _Limit(NamedTuple):
    """A limit of a score: `at least` for accuracy, `at most` for errors."""

    name: Literal["at least", "at most"]
    text: str
    value: float


def _read_limit(at_least: str | None, at_most: str | None, profile: Profile) -> _Limit | None:
    """Parse `--at-least 0.8`, `--at-least 80%` or `--at-most 2.5`."""
    if at_least is not None and at_most is not None:
        raise DataError(
            "Expected either --at-least (accuracy) or --at-most (an error), got both. Leave one of them out."
        )
    record = profile.rehearsal
    if at_least is not None:
        if record is not None and not record.higher_is_better:
            raise DataError(
                f"Expected --at-most, since the profile was rehearsed for the {record.metric}, an error, got "
                "--at-least."
            )
        value = _number(at_least.removesuffix("%")) / (100 if at_least.endswith("%") else 1)
        if not 0 <= value <= 1:
            raise DataError(f"Expected --at-least from 0 to 1, or a percentage, got {at_least}. Try 0.8 or 80%.")
        return _Limit("at least", at_least, value)
    if at_most is not None:
        if record is not None and record.higher_is_better:
            raise DataError(
                f"Expected --at-least, since the profile was rehearsed for the {record.metric}, which is no error, got "
                "--at-most."
            )
        value = _number(at_most)
        if not value >= 0:
            raise DataError(f"Expected --at-most to be a number of at least 0, got {at_most}.")
        return _Limit("at most", at_most, value)
    return None


def _number(text: str) -> float:
    """Parse a number; NaN if the text is not a number."""
    try:
        return float(text)
    except ValueError:
        return math.nan


def _decide(estimate: Estimate | None, limit: _Limit) -> Answer:
    """Tell whether the whole interval of an estimate meets a limit, the estimate misses it, or neither."""
    if estimate is None or estimate.best_guess is None:
        return "unknown"
    sign, worse, better = 1, estimate.low, estimate.high
    if limit.name == "at most":
        sign, worse, better = -1, estimate.high, estimate.low
    worse = estimate.value if worse is None else worse
    # Of a range, only all of it can miss the limit.
    likely = better if estimate.value is None else estimate.value
    assert worse is not None
    assert likely is not None
    if sign * worse >= sign * limit.value:
        return "yes"
    return "no" if sign * likely < sign * limit.value else "unknown"


def _describe(found: Verification) -> list[str]:
    """Describe the estimate, and then the features, one line each."""
    from shiftmend.profiles.rehearsal import format_score

    estimate = found.estimate
    if estimate is None:
        lines = [f"no estimate: {NOT_REHEARSED}"]
    else:
        lines = [str(estimate).replace("adaptation=", "--adaptation")]
        if estimate.labelled is not None:
            *scores, samples = estimate.labelled
            value, low, high = (format_score(score, estimate.task) for score in scores)
            ends = f"{low.removesuffix(' %')} to {high.removesuffix(' %')}"
            lines.append(f"  the {samples:,} labelled samples alone: {value} ({ends})")
    return [*lines, f"features {found}"]


def evaluate(
    model: opt.Model,
    data: opt.Data,
    profile: Annotated[
        Path | None, typer.Option("--profile", "-p", help="The source's profile, which knows the columns of a table.")
    ] = None,
    weights: opt.Weights = None,
    model_option: opt.Options = None,
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
    ignore_label: opt.Ignore = None,
    as_json: opt.Json = False,
) -> None:
    """Score a model on labelled data: accuracy and calibration, or errors of a regression."""
    import shiftmend

    home = None if profile is None else shiftmend.Profile.load(profile)
    choice = choose_columns(label, classes, quantity, drop, where, home)
    net, given, preprocess = gather(model, weights, model_option, allow_pickle, data, size, channels, mean, std, choice)
    if given.labels is None:
        raise DataError(f"Expected labels in {data}, got none that can be used. {LABELLED}.")
    scores = shiftmend.evaluate(
        net,
        (given.inputs, given.labels),
        batch_size=batch_size,
        preprocess=preprocess,
        output=entry(output_entry),
        device=device,
        classes=given.classes,
        ignore_label=ignore_label,
    )
    if weights is None:
        logger.warning("no --weights given: these are the scores of the weights that %s gives by itself", model)
    if as_json:
        print(dumps(scores_json(scores)))
    else:
        say(str(scores))


def scores_json(scores: Any) -> dict[str, Any]:
    """Convert scores to a dict for `--json`.

    Args:
        scores: `Scores` or `RegressionScores`.

    Returns:
        The scores by field name, without `reliability` and empty tuples; None is kept. For several quantities, the
        entry `quantities` is a list with one such dict for each.
    """
    found = {name: value for name, value in vars(scores).items() if name != "reliability" and value != ()}
    return found | ({"quantities": [scores_json(one) for one in scores.quantities]} if "quantities" in found else {})
