"""The paper's networks, by the names that the command line and the benchmarks use.

shiftmend adapts any `nn.Module`. These networks are here to run the paper's experiments.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch import nn

from shiftmend.errors import DataError
from shiftmend.research.networks.digit_cnn import DigitCNN
from shiftmend.research.networks.resnets import ResNet, resnet18, resnet18_cifar, resnet101
from shiftmend.utils.checks import kind

__all__ = ["MODELS", "DigitCNN", "ResNet", "build", "resnet18", "resnet18_cifar", "resnet101"]
MODELS: dict[str, Callable[..., nn.Module]] = {
    "digit-cnn": DigitCNN,
    "resnet18-cifar": resnet18_cifar,
    "resnet18": resnet18,
    "resnet101": resnet101,
}


def build(name: str, **options: Any) -> nn.Module:
    """Make a freshly initialised network.

    A network of your own, put into `MODELS`, may also have options that are fractions or text by their defaults.

    >>> build("digit-cnn", classes=47).head.out_features
    47
    """
    factory = MODELS.get(name)
    if factory is None:
        raise DataError(f"there is no model named {name!r}, the known ones are {', '.join(MODELS)}")
    signature = inspect.signature(factory)
    try:
        signature.bind(**options)
    except TypeError as error:
        accepted = ", ".join(signature.parameters)
        raise DataError(f"wrong options for model {name}: {error}; it takes {accepted}") from error
    for option, value in options.items():
        # Command lines and manifests also deliver text, floats and booleans.
        default = signature.parameters[option].default if option in signature.parameters else None
        if default is None or isinstance(default, float | str):
            continue
        if isinstance(default, bool):
            if not isinstance(value, bool):
                raise DataError(f"option {option} of model {name} must be true or false, got {value!r}")
        elif not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise DataError(f"option {option} of model {name} must be a whole number above 0, got {value!r}")
    model: Any = factory(**options)
    if not isinstance(model, nn.Module):
        raise DataError(f"MODELS[{name!r}] gave {kind(model)}, expected a torch.nn.Module")
    return model
