"""`verify` and `evaluate`."""

from __future__ import annotations

import logging
from dataclasses import asdict
from typing import Any

import typer

from shiftmend.cli import options as opt
from shiftmend.cli.options import entry, gather, say
from shiftmend.errors import DataError
from shiftmend.utils.json import dumps

logger = logging.getLogger(__name__)
LABELLED = "expected one folder per class, or an array 'labels' in the .npz, of numbers"


def register(app: typer.Typer) -> None:
    """Add the commands to the application."""
    for command in (verify, evaluate):
        app.command()(command)


def verify(
    model: opt.Model,
    data: opt.Data,
    profile: opt.ProfileFile,
    weights: opt.Weights = None,
    model_option: opt.Options = None,
    size: opt.Size = None,
    channels: opt.Channels = None,
    mean: opt.Mean = "0.5",
    std: opt.Deviation = "0.5",
    batch_size: opt.Batch = 256,
    device: opt.Device = "auto",
    allow_pickle: opt.Pickle = False,
    as_json: opt.Json = False,
) -> None:
    """Ask, without labels, whether a model's features on some data are distributed as at home."""
    import shiftmend

    net, given, preprocess = gather(model, weights, model_option, allow_pickle, data, size, channels, mean, std)
    found = shiftmend.verify(net, given.inputs, profile, batch_size=batch_size, preprocess=preprocess, device=device)
    if weights is None:
        # Weights that are named may be adapted ones, and differ from the profile's.
        shiftmend.Profile.load(profile).check_weights(net)
    if as_json:
        print(dumps(asdict(found) | {"verdict": found.verdict}))
    else:
        say(str(found))


def evaluate(
    model: opt.Model,
    data: opt.Data,
    weights: opt.Weights = None,
    model_option: opt.Options = None,
    output_entry: opt.Output = None,
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
    """Score a model on labelled data: accuracy and calibration, or the errors of one that predicts quantities."""
    import shiftmend

    net, given, preprocess = gather(model, weights, model_option, allow_pickle, data, size, channels, mean, std)
    if given.labels is None:
        raise DataError(f"{data} has no labels that can be used here: {LABELLED}")
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
    """Summarise scores for `--json`: all but the reliability bins, and classes and quantities where there are any."""
    found = {name: value for name, value in vars(scores).items() if name != "reliability" and value != ()}
    return found | ({"quantities": [scores_json(one) for one in scores.quantities]} if "quantities" in found else {})
