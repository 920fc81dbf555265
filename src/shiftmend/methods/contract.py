"""What a method gives is checked before it is used: a method may be anybody's own, and a slip must not pass for a run.

Without this, a misspelt parameter would train nothing, and the result would look like any other.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from shiftmend.checks import brief, kind
from shiftmend.distributed import of_first_process
from shiftmend.errors import AdaptationError
from shiftmend.methods.base import (
    Activations,
    Method,
    Network,
    Objective,
    Stage,
    check_decay,
    check_epochs,
    check_positive,
)
from shiftmend.profiles import Profile
from shiftmend.strict_json import dumps
from shiftmend.tracing import trainable

logger = logging.getLogger(__name__)
logger.addFilter(of_first_process)


def facts_of(method: Method) -> dict[str, Any]:
    """Name and hyper-parameters, for a manifest."""
    name: Any = getattr(method, "name", None)
    if not isinstance(name, str) or not name:
        raise AdaptationError(
            f'the class {type(method).__name__} has no name; give it one: name: ClassVar[str] = "..."'
        )
    try:
        facts = {"name": name, **method.hyperparameters()}
        dumps(facts, name)
    except (TypeError, ValueError) as error:
        raise AdaptationError(
            f"the hyper-parameters of {name} cannot be written into a manifest ({error}); expected numbers, text and "
            "lists: let `hyperparameters` return a dict of such"
        ) from error
    return facts


def taps_of(method: Method, profile: Profile | None) -> tuple[str, ...]:
    names: Any = method.taps(profile)
    if not isinstance(names, tuple | list) or not all(isinstance(name, str) for name in names):
        raise AdaptationError(f'`taps` of {method.name} gave {brief(names)}, expected a tuple of names: ("features",)')
    return tuple(names)


def stages_of(method: Method, network: Network, profile: Profile | None) -> list[Stage]:
    """The stages of a method, if they can be run as they stand."""
    given: Any = method.stages(network, profile)
    if not isinstance(given, list | tuple) or not all(isinstance(stage, Stage) for stage in given):
        raise AdaptationError(f"`stages` of {method.name} gave {brief(given)}, expected a list of Stage")
    if not given and method.name != "source-only":
        logger.warning("%s finds nothing to change in this model, which stays as it came", method.name)
    every = network.model.named_parameters(remove_duplicate=False)  # a shared one may go by either name
    known = {name for name, parameter in every if trainable(parameter)}
    for stage in given:
        where = f"stage {stage.name!r} of {method.name}"
        check_epochs(stage.epochs, f"the epochs of {where}")
        names: Any = stage.parameters
        unknown = [name for name in names if name not in known] if isinstance(names, tuple | list) else [names]
        if unknown:
            raise AdaptationError(
                f"{where} trains {brief(unknown[0])}, which is no parameter of the model that can be trained; expected "
                "a tuple of names as in named_parameters, e.g. network.below_features"
            )
        if names:
            check_positive(stage.learning_rate, f"the learning rate of {where}")
            check_decay(stage.weight_decay, f"the weight decay of {where}")
    return list(given)


def check_objective(objective: Any, method: Method, stages: list[Stage]) -> None:
    """A method that trains parameters must have a loss."""
    if not callable(objective) and (objective is not None or any(stage.parameters for stage in stages)):
        raise AdaptationError(
            f"`objective` of {method.name} gave {brief(objective)}, expected a function from activations to named "
            "terms of the loss, since it trains parameters"
        )


def loss_of(objective: Objective, activations: Activations, what: str) -> tuple[dict[str, Tensor], Tensor]:
    """The terms of the loss on a batch, and their sum."""
    try:
        terms: Any = objective(activations)
    except KeyError as error:
        [name, *_] = error.args or ("",)
        if name not in ("features", "logits", "targets") or name in activations:
            raise
        unsaid = "no method has without `by_sample`" if name == "targets" else "its method does not name in `taps`"
        raise AdaptationError(f"the loss of {what!r} reads {name!r}, which {unsaid}") from error
    if not isinstance(terms, Mapping) or not terms:
        given = kind(terms) if not isinstance(terms, Mapping) else "nothing"
        raise AdaptationError(f"the loss of {what!r} gave {given}, expected its terms by name: {{'features': loss}}")
    for name, term in terms.items():
        if not isinstance(term, Tensor) or term.ndim > 0 or not term.is_floating_point():
            form = f"{str(term.dtype).removeprefix('torch.')} {list(term.shape)}" if isinstance(term, Tensor) else ""
            raise AdaptationError(
                f"term {name!r} of the loss of {what!r} is {form or brief(term)}, expected a tensor of one "
                "floating-point number, e.g. loss.mean()"
            )
    total: Tensor = functools.reduce(torch.add, terms.values())
    if not total.requires_grad:
        raise AdaptationError(
            f"what the loss reads does not depend on the parameters of {what!r}: the model cuts the gradient off "
            "(no_grad, detach or a reentrant checkpoint in its forward?), or the loss does"
        )
    return dict(terms), total
