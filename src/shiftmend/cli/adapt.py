"""`demo`, `blocks` and `adapt`."""

from __future__ import annotations

from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shiftmend.cli import options as opt
from shiftmend.cli.options import (
    block_names,
    by_all_processes,
    choose_columns,
    columns,
    entry,
    gather,
    method_option,
    say,
    show,
)
from shiftmend.cli.profile import check_key
from shiftmend.cli.verify import LABELLED, scores_json
from shiftmend.errors import DataError
from shiftmend.utils.files import check_folder
from shiftmend.utils.json import dumps

if TYPE_CHECKING:
    from torch import nn

    from shiftmend.evaluation.classification import Scores
    from shiftmend.evaluation.regression import RegressionScores


def demo(
    folder: Annotated[Path, typer.Option("--out", "-o", help="Folder to write the results to.")] = Path("demo"),
    seed: Annotated[int, typer.Option(help="Seed of all random numbers.")] = 0,
    as_json: opt.Json = False,
) -> None:
    """Train and rehearse a small digit reader, mend it for four devices, and compare estimated with true accuracy.

    The digits are real and handwritten, and nothing is downloaded. It takes about a minute on two cores.
    """
    from shiftmend.demo import run

    report = run(folder, seed=seed, say=None if as_json else say)
    if as_json:
        print(dumps(report.to_json()))


def blocks(
    model: opt.Model,
    shape: Annotated[str, typer.Option(help="Shape of one input, e.g. 3,32,32.")],
    weights: opt.Weights = None,
    model_option: opt.Options = None,
    head: opt.Head = None,
    block: opt.Blocks = None,
    output_entry: opt.Output = None,
    allow_pickle: opt.Pickle = False,
    as_json: opt.Json = False,
) -> None:
    """Show the blocks that BUFR unfreezes one after the other."""
    import torch

    from shiftmend.cli.loading import load_model
    from shiftmend.introspection.blocks import split_blocks
    from shiftmend.introspection.trace import trace

    net = load_model(model, weights, model_option or [], allow_pickle)
    try:
        sides = [int(side) for side in shape.split(",")]
        sample = torch.zeros(2, *sides)
    except (ValueError, TypeError, RuntimeError) as error:
        raise DataError(
            f"Expected --shape to be whole numbers with commas that fit into memory, e.g. 3,32,32, got {shape!r}."
        ) from error
    found = split_blocks(net, trace(net, sample, head=head, output=entry(output_entry)), block_names(block))
    parameters = dict(net.named_parameters())
    rows = [
        {
            "block": one.name,
            "modules": list(one.modules),
            "layers": one.layers,
            "parameters": sum(parameters[name].numel() for name in one.parameters),
        }
        for one in found
    ]
    if as_json:
        print(dumps(rows))
        return
    table = columns("block", "layers", "parameters", numbers=("parameters",))
    for row in rows:
        table.add_row(str(row["block"]), str(row["layers"]), f"{row['parameters']:,}")
    show(table)
    fixed = sum(p.numel() for p in net.parameters()) - sum(int(str(row["parameters"])) for row in rows)
    say(f"{fixed:,} parameters stay fixed: the head and what is behind the features")


@by_all_processes
def adapt(
    model: opt.Model,
    data: opt.Data,
    profile: opt.ProfileFile,
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for the adapted model, history and manifest.")],
    method: Annotated[
        str,
        typer.Option(
            "--method",
            "-m",
            help="auto tries several and keeps the best; bufr, fr, adabn, ..., or file.py:Class of your own.",
        ),
    ] = "auto",
    candidates: opt.Candidates = None,
    option: Annotated[
        list[str] | None,
        typer.Option(
            help="name=value for the named method; repeatable. With learning_rate=0.01,0.1 the better is chosen."
        ),
    ] = None,
    keep: Annotated[
        str | None,
        typer.Option(
            help="Epoch to keep: last, or selected by the verification slices. The default depends on the method."
        ),
    ] = None,
    calibrate: Annotated[
        bool,
        typer.Option(
            "--calibrate/--no-calibrate",
            help="Set the mean confidence to the estimated accuracy; predictions do not change.",
        ),
    ] = True,
    block: opt.Blocks = None,
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
    batch_size: opt.MaybeBatch = None,
    seed: Annotated[int, typer.Option(help="Seed of the order of batches and of all other random numbers.")] = 0,
    device: opt.Device = "auto",
    autocast: Annotated[bool, typer.Option(help="Run the network in bfloat16.")] = False,
    compile: Annotated[bool, typer.Option(help="On a GPU, compile the steps; worthwhile for long runs.")] = False,
    checkpoint: Annotated[
        Path | None, typer.Option(help="Checkpoint file, written after each epoch; a killed run resumes from it.")
    ] = None,
    allow_pickle: opt.Pickle = False,
    ignore_label: opt.Ignore = None,
    sign: opt.Sign = None,
    trust: opt.Trust = None,
    as_json: opt.Json = False,
) -> None:
    """Adapt the model to a new site from unlabelled data and a profile, and estimate the gain.

    By default, several methods are tried, and the model with the best estimate is kept, perhaps the untouched one. Only
    the method target-supervised uses labels. If there are labels, they are used to score the model afterwards.
    """
    import shiftmend
    from shiftmend.cli.loading import load_candidates, load_method, pick_telling_rows
    from shiftmend.introspection.model_state import check_types, full_state_dict
    from shiftmend.methods import METHODS
    from shiftmend.utils.processes import rank

    _check_place(out, weights)
    check_key(sign)
    chosen, named = load_method(method), load_candidates(candidates)
    home = shiftmend.Profile.load(profile, trust=trust)
    choice = choose_columns(label, classes, quantity, drop, where, home)
    net, given, preprocess = gather(model, weights, model_option, allow_pickle, data, size, channels, mean, std, choice)
    inputs, labels, names = given.inputs, given.labels, given.classes
    options = _method_options(option)
    supervised = getattr(METHODS.get(chosen) if isinstance(chosen, str) else chosen, "takes_labels", False)
    if supervised:
        if labels is None:
            raise DataError(f"Expected labels in {data}, which {method} needs, got none. {LABELLED}.")
        options["labels"] = labels

    def score(which: nn.Module, rows: list[int] | slice = slice(None)) -> Scores | RegressionScores:
        assert labels is not None
        pairs = (inputs[rows], labels[rows])
        return shiftmend.evaluate(
            which,
            pairs,
            preprocess=preprocess,
            output=entry(output_entry),
            device=device,
            classes=names,
            ignore_label=ignore_label,
        )

    home.check_architecture(net)
    check_types(full_state_dict(net))
    if labels is not None:
        # Labels are checked before the work, so that mistakes in them do not show up only at the end.
        score(net, pick_telling_rows(labels, ignore_label))
    result = shiftmend.adapt(
        net,
        inputs,
        home,
        chosen,
        candidates=named,
        calibrate=calibrate,
        batch_size=batch_size,
        seed=seed,
        preprocess=preprocess,
        blocks=block_names(block),
        output=entry(output_entry),
        device=device,
        autocast=autocast,
        compile=compile,
        keep=keep,  # type: ignore[arg-type]
        checkpoint=checkpoint,
        **options,
    )
    if rank() > 0:
        return
    result.save(out, sign=sign)
    scores = {} if labels is None else {"before": score(net), "after": score(result.model)}
    if as_json:
        numbers = {name: scores_json(found) for name, found in scores.items()}
        print(dumps({"manifest": result.manifest, "scores": numbers, "folder": str(out)}))
    else:
        say(f"{result}\nwritten to {out}/: model.safetensors, history.json, manifest.json")
        for name, found in scores.items():
            seen = " (on the labels that it was trained with)" if supervised and name == "after" else ""
            say(f"{name}: {found}{seen}")
    if result.interrupted:
        # The partial result is saved, but the exit code stops scripts from continuing with it.
        raise typer.Exit(130)


def _check_place(out: Path, weights: Path | None) -> None:
    """Refuse to overwrite the weights that the adaptation starts from; an earlier result may be replaced."""
    check_folder(out)
    result = out / "model.safetensors"
    if weights is not None and result.exists() and weights.exists() and result.samefile(weights):
        raise DataError(
            f"Expected a new folder as --out, got {out}, which would replace the weights {weights}. Name another "
            "folder."
        )


def _method_options(texts: list[str] | None) -> dict[str, Any]:
    """Read hyper-parameters given as name=value; refuse arguments of `adapt`, which are not hyper-parameters."""
    import shiftmend

    options = dict(method_option(text) for text in texts or [])
    foreign = set(options) & set(signature(shiftmend.adapt).parameters)
    if foreign:
        raise DataError(
            f"Expected an option of a method, got {min(foreign)!r}, which is one of adapt. See `shiftmend adapt "
            "--help`."
        )
    return options
