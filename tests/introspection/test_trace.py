from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from zoo import SMALL, ZOO, SmallViT, Wrapped, hooks

import shiftmend
from shiftmend.errors import TapError
from shiftmend.introspection.modes import preserve_modes
from shiftmend.introspection.taps import attach_taps
from shiftmend.introspection.trace import trace


@pytest.mark.slow
@pytest.mark.parametrize("name", ZOO)
def test_finds_features_and_logits_of_every_kind_of_model(name: str) -> None:
    case = ZOO[name]
    model = case.model().train()
    found = trace(model, case.inputs(2), output=case.output)
    assert found.head == case.head
    assert all(module.training for module in model.modules())
    with torch.no_grad(), preserve_modes(model), attach_taps(model, found.taps) as recorder:
        model.eval()
        result = model(case.inputs(6))
        activations = recorder.read()
    result = result if case.output is None else result[case.output]
    assert activations["features"].shape == (6, case.features)
    assert torch.equal(activations["logits"].reshape(result.shape), result)
    assert hooks(model) == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n in SMALL if n != "paper-cnn"])
def test_features_are_what_the_head_reads(name: str) -> None:
    case = ZOO[name]
    model = case.model()
    found = trace(model, case.inputs(2), output=case.output)
    with torch.no_grad(), attach_taps(model, found.taps) as recorder:
        model(case.inputs(6))
        activations = recorder.read()
    head = model.get_submodule(case.head)
    torch.testing.assert_close(head(activations["features"]), activations["logits"])


def test_the_papers_cnn_taps_its_features_before_their_batch_norm() -> None:
    case = ZOO["paper-cnn"]
    found = trace(case.model(), case.inputs(2))
    assert str(found.taps["features"]) == "linear"
    assert found.extractor == ("conv1", "bn1", "conv2", "bn2", "conv3", "bn3", "linear")
    assert found.order[-2:] == ("bn4", "head")


def test_a_named_head_wins() -> None:
    case = ZOO["tabular"]
    found = trace(case.model(), case.inputs(2), head="3")
    assert str(found.taps["features"]) == "3:input"
    assert found.extractor == ("0", "1")


def test_a_model_that_ends_in_softmax_asks_for_its_head() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3), nn.Softmax(1))
    with pytest.raises(TapError, match="head='2'"):
        trace(model, torch.randn(2, 4))
    assert trace(model, torch.randn(2, 4), head="2").extractor == ("0",)


def test_a_model_without_a_head_is_one_sentence() -> None:
    with pytest.raises(TapError, match="a model with parameters"):
        trace(nn.Flatten(), torch.randn(2, 4))
    with pytest.raises(TapError, match="single layer"):
        trace(nn.Linear(4, 2), torch.randn(2, 4))


@pytest.mark.parametrize("kind", [tuple, dict])
def test_tuples_and_dicts_ask_which_entry(kind: type) -> None:
    if kind is tuple:
        with pytest.raises(TapError, match="output="):
            trace(Wrapped(kind), torch.randn(2, 6))
    else:
        # Its entry is called logits.
        assert trace(Wrapped(kind), torch.randn(2, 6)).taps["logits"].entry is None
    with pytest.raises(TapError, match="another entry"):
        trace(Wrapped(kind), torch.randn(2, 6), output="nothing" if kind is dict else 7)


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 8), nn.ReLU())
        self.species, self.age = nn.Linear(8, 3), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.body(x)
        species = self.species(x)
        return {"species": species, "shares": species.softmax(1), "age": self.age(x)}


def test_an_output_of_another_head_than_the_profile_s_is_refused() -> None:
    model, inputs = TwoHeads().eval(), torch.randn(64, 6)
    profile = shiftmend.profile(model, inputs, output="species", progress=False)
    with pytest.raises(TapError, match=r"'species'.*'age'"):
        shiftmend.adapt(model, inputs, profile, "fr", output="age", epochs=1, progress=False)
    for same in ("species", "shares", None):
        assert trace(model, inputs[:2], taps=profile.specs, output=same).head == "species"


@pytest.mark.slow
def test_unknown_modules_get_a_hint() -> None:
    case = ZOO["in-place"]
    for mistake, meant in {
        "squeze": "'squeeze'",
        "1": "'body.1'",
        "body.o": "'body.4' or 'body.3' or 'body.2'",
    }.items():
        with pytest.raises(TapError, match=rf"Try {meant}"):
            trace(case.model(), case.inputs(2), taps={"mine": mistake})


def test_the_head_inside_a_wrapper_whose_inner_net_owns_tokens() -> None:
    model = nn.Sequential(nn.Conv2d(3, 3, 1), SmallViT()).eval()
    found = trace(model, torch.randn(2, 3, 16, 16))
    assert found.head == "1.head"
    assert "1.blocks.0.mlp.0" in found.extractor


def test_a_linear_head_on_tokens_counts_the_last_axis() -> None:
    model = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 3)).eval()
    found = trace(model, torch.randn(2, 5, 6))
    assert (str(found.taps["features"]), str(found.taps["logits"])) == ("2:input@-1", "2@-1")


@pytest.mark.slow
def test_a_compiled_submodule_is_seen_through() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = torch.compile(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8)), backend="eager")
            self.head = nn.Linear(8, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.body(x))

    model = Net().eval()
    model(torch.randn(2, 4))
    assert len(trace(model, torch.randn(2, 4)).extractor) == 2


def test_weight_normalised_heads_are_found() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.utils.parametrizations.weight_norm(nn.Linear(8, 3)))
    found = trace(model, torch.randn(2, 4))
    assert (found.head, found.extractor) == ("2", ("0",))


class Segmenter(nn.Module):
    """A segmentation network as those of torchvision: a dict with maps that were brought to the size of the inputs."""

    def __init__(self, **resizing: Any) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv2d(1, 4, 3, stride=2, padding=1), nn.BatchNorm2d(4), nn.ReLU())
        self.classifier = nn.Sequential(nn.Conv2d(4, 6, 3, padding=1), nn.ReLU(), nn.Conv2d(6, 3, 1))
        self.resizing = resizing

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        maps = self.classifier(self.backbone(x))
        return {"out": functional.interpolate(maps, size=x.shape[-2:], **self.resizing)}


RESIZINGS: list[dict[str, Any]] = [
    {"mode": "bilinear", "align_corners": False},
    {"mode": "bilinear", "align_corners": True},
    {"mode": "bicubic", "align_corners": False},
    {"mode": "nearest"},
]


@pytest.mark.parametrize("resizing", RESIZINGS, ids=lambda way: "-".join(map(str, way.values())))
def test_a_head_whose_maps_are_resized_is_found(resizing: dict[str, Any]) -> None:
    """The networks for segmentation of torchvision asked for a head."""
    found = trace(Segmenter(**resizing).eval(), torch.randn(2, 1, 13, 16))
    assert found.head == "classifier.2"
    assert found.units == {"features": 6, "logits": 3}
    assert found.extractor == ("backbone.0", "backbone.1", "classifier.0")


def test_maps_that_were_resized_and_changed_still_ask_for_the_head() -> None:
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Conv2d(4, 3, 1), nn.Upsample(scale_factor=2), nn.Softmax(1))
    with pytest.raises(TapError, match="head='1'"):
        trace(model.eval(), torch.randn(2, 1, 8, 8))


@pytest.mark.slow
@pytest.mark.parametrize("method", ["adabn", "fr", "bufr"])
def test_a_network_whose_maps_are_resized_is_adapted(method: str) -> None:
    model = Segmenter(**RESIZINGS[0]).eval()
    home = torch.randn(48, 1, 12, 12)
    profile = shiftmend.profile(model, home, progress=False)
    length = {"adabn": {}, "fr": {"epochs": 1}, "bufr": {"epochs_per_block": 1}}[method]
    result = shiftmend.adapt(model, 2 * home + 1, profile, method, batch_size=16, progress=False, **length)
    before, after = model.state_dict(), result.model.state_dict()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert "backbone.1.running_mean" in changed
    assert ("classifier.0.weight" in changed) == (method != "adabn")
    assert not any(name.startswith("classifier.2.") for name in changed)
