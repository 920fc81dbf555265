"""Building networks by name."""

import pytest
import torch
from torch import nn

from shiftmend.errors import DataError
from shiftmend.research.networks import MODELS, build


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(MODELS))
def test_builds_every_known_model(name: str) -> None:
    with torch.device("meta"):
        model = build(name, classes=4)
        size = 28 if name == "digit-cnn" else 64
        assert model(torch.empty(2, 3, size, size)).shape == (2, 4)


def test_known_models() -> None:
    assert set(MODELS) == {"digit-cnn", "resnet18-cifar", "resnet18", "resnet101"}


def test_passes_options_on() -> None:
    model = build("digit-cnn", classes=3, channels=1, width=2, image_size=16)
    assert model(torch.zeros(2, 1, 16, 16)).shape == (2, 3)


def test_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(DataError, match=r"no model named 'vgg'.*digit-cnn, resnet18-cifar, resnet18, resnet101"):
        build("vgg")


def test_unknown_option_lists_the_known_ones() -> None:
    with pytest.raises(
        DataError, match=r"digit-cnn.*'depth'; it takes classes, channels, width, image_size, weight_norm$"
    ):
        build("digit-cnn", depth=3)


def test_missing_option_is_named() -> None:
    with pytest.raises(DataError, match=r"resnet101.*missing.*'classes'"):
        build("resnet101")


@pytest.mark.parametrize("value", [0, -3, 2.0, "10", True, None])
def test_option_of_the_wrong_kind(value: object) -> None:
    with pytest.raises(DataError, match=r"option classes of model resnet18 must be a whole number above 0"):
        build("resnet18", classes=value)


def test_a_network_of_ones_own(monkeypatch: pytest.MonkeyPatch) -> None:
    def own(classes: int, slope: float = 0.1, **more: object) -> nn.Module:
        return nn.Sequential(nn.LeakyReLU(slope), nn.Linear(4, classes, **more))  # type: ignore[arg-type]

    monkeypatch.setitem(MODELS, "own", own)
    model = build("own", classes=3, slope=0.2, bias=False)
    assert model[0].negative_slope == 0.2  # type: ignore[index]
    assert model[1].bias is None  # type: ignore[index]
    with pytest.raises(DataError, match="option classes of model own must be a whole number above 0"):
        build("own", classes=0.5)
    monkeypatch.setitem(MODELS, "own", lambda: len)
    with pytest.raises(DataError, match=r"MODELS\['own'\] gave a builtin_function.*, expected a torch.nn.Module"):
        build("own")


def test_switches_are_true_or_false() -> None:
    plain, normed = (build("digit-cnn", width=2, weight_norm=value) for value in (False, True))
    assert "head.weight" in plain.state_dict()
    assert "head.parametrizations.weight.original0" in normed.state_dict()
    for value in (1, 0, "true", None):
        with pytest.raises(DataError, match=r"option weight_norm of model digit-cnn must be true or false"):
            build("digit-cnn", weight_norm=value)
