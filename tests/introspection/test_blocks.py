from __future__ import annotations

from collections import OrderedDict

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from zoo import ZOO

from shiftmend.errors import AdaptationError
from shiftmend.introspection.blocks import Block, split_blocks
from shiftmend.introspection.trace import trace
from shiftmend.research.networks import build


def blocks_of(model: nn.Module, inputs: torch.Tensor, names: object = None, output: object = None) -> tuple[Block, ...]:
    return split_blocks(model, trace(model, inputs, output=output), names)  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize("name", ZOO)
def test_blocks_of_every_kind_of_model(name: str) -> None:
    case = ZOO[name]
    model = case.model()
    blocks = blocks_of(model, case.inputs(2), output=case.output)
    assert len(blocks) == case.blocks
    inside = [parameter for block in blocks for parameter in block.parameters]
    assert len(inside) == len(set(inside))
    assert not any(parameter.startswith(f"{case.head}.") for parameter in inside)
    if name != "paper-cnn":  # its BatchNorm behind the features belongs to the classifier
        everything = {n for n, _ in model.named_parameters() if not n.startswith(f"{case.head}.")}
        assert set(inside) == everything


@pytest.mark.slow
def test_the_papers_cnn() -> None:
    case = ZOO["paper-cnn"]
    blocks = blocks_of(case.model(), case.inputs(2))
    assert [b.modules for b in blocks] == [("conv1", "bn1"), ("conv2", "bn2"), ("conv3", "bn3"), ("linear",)]
    assert [b.layers for b in blocks] == [1, 1, 1, 1]


@pytest.mark.slow
def test_resnet_stages_are_found_without_being_told() -> None:
    model = build("resnet18", classes=5).eval()
    told = blocks_of(model, torch.randn(2, 3, 64, 64))
    type(model).shiftmend_blocks, kept = None, type(model).shiftmend_blocks
    try:
        found = blocks_of(model, torch.randn(2, 3, 64, 64))
    finally:
        type(model).shiftmend_blocks = kept
    assert [b.parameters for b in told] == [b.parameters for b in found]
    assert [b.name for b in found] == ["conv1 + bn1", "layer1", "layer2", "layer3", "layer4"]


def test_a_transformer_is_stem_and_layers() -> None:
    case = ZOO["vit"]
    blocks = blocks_of(case.model(), case.inputs(2))
    assert "patches" in blocks[0].modules
    assert {"token", "positions"} <= set(blocks[0].parameters)
    assert [b.name for b in blocks[1:3]] == ["blocks.0", "blocks.1"]
    assert "blocks.1.attention.out_proj.weight" in blocks[2].parameters  # used without being called
    assert "norm.weight" in blocks[3].parameters


def test_a_backbone_in_a_wrapper_and_a_plain_chain() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.features = nn.Sequential(
                nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3)
            )
            self.classifier = nn.Sequential(
                nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 2)
            )

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.classifier(self.features(x).mean((2, 3)))

    blocks = blocks_of(Net().eval(), torch.randn(2, 1, 12, 12))
    assert [b.modules for b in blocks] == [
        ("features.0", "features.1"),
        ("features.3",),
        ("features.5",),
        ("classifier.0",),
        ("classifier.2",),
        ("classifier.4",),
    ]


def test_entries_of_a_list_are_blocks_also_beside_other_stages() -> None:
    """The layers of an encoder between embeddings and a decoder came as one block."""

    def make_layer() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))

    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(make_layer() for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x).relu()
            return x

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.encoder = make_layer(), Encoder()
            self.decoder = nn.ModuleDict({"left": make_layer(), "right": make_layer()})
            self.head = nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            x = self.encoder(self.embedding(x))
            return self.head(self.decoder["left"](x) + self.decoder["right"](x))

    names = [block.name for block in blocks_of(Net().eval(), torch.randn(2, 4))]
    layers = [f"encoder.layers.{index}" for index in range(3)]
    assert names == ["embedding", *layers, "decoder.left", "decoder.right"]


class _Encoder(nn.Module):
    """Layers, a table of positions of its own, and normalisation at the end, like the encoder of torchvision's ViT."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Parameter(torch.randn(1, 5, 4))
        self.layers = nn.Sequential(*(nn.Sequential(nn.LayerNorm(4), _make_pair()) for _ in range(2)))
        self.norm = nn.LayerNorm(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.layers(x + self.positions))  # type: ignore[no-any-return]


def _make_pair() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))


def test_positions_inside_an_encoder_belong_to_the_stem() -> None:
    """They were a block of their own, which holds no layer."""
    model = nn.Sequential(OrderedDict(patches=nn.Linear(3, 4), encoder=_Encoder(), head=nn.Linear(4, 2))).eval()
    blocks = blocks_of(model, torch.randn(2, 5, 3))
    stem = "patches + encoder (own parameters)"
    assert [(block.name, block.layers) for block in blocks] == [
        (stem, 1), ("encoder.layers.0", 2), ("encoder.layers.1 + encoder.norm", 2)
    ]  # fmt: skip
    assert blocks[0].parameters == ("patches.weight", "patches.bias", "encoder.positions")


def test_positions_join_the_first_layer_where_nothing_runs_before() -> None:
    blocks = blocks_of(
        nn.Sequential(OrderedDict(encoder=_Encoder(), head=nn.Linear(4, 2))).eval(), torch.randn(2, 5, 4)
    )
    assert [block.layers for block in blocks] == [2, 2]
    assert blocks[0].parameters[0] == "encoder.positions"


def test_a_backbone_below_a_large_decoder_is_split() -> None:
    """The backbone of a DeepLab was one block, since its decoder has several layers, too."""
    stages = [nn.Sequential(_make_pair(), _make_pair()) for _ in range(3)]
    backbone = nn.Sequential(nn.Linear(4, 4), *stages)
    decoder = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    model = nn.Sequential(OrderedDict(backbone=backbone, decoder=decoder)).eval()
    names = [block.name for block in blocks_of(model, torch.randn(2, 4))]
    assert names == [*(f"backbone.{index}" for index in range(4)), "decoder.0 + decoder.2"]


def test_a_stage_that_holds_most_layers_is_one_block() -> None:
    """The third stage of a deep ResNet holds seven tenths of all layers."""
    model = nn.Sequential(*(nn.Sequential(*(_make_pair() for _ in range(pairs))) for pairs in (2, 2, 14, 2)))
    blocks = blocks_of(nn.Sequential(model, nn.Linear(4, 2)).eval(), torch.randn(2, 4))
    assert [block.name for block in blocks] == [f"0.{index}" for index in range(4)]


def test_a_dict_of_modules_with_a_forward_pass_is_one_stage() -> None:
    """The dense blocks of a DenseNet fell apart into their layers."""

    class Dense(nn.ModuleDict):
        def forward(self, x: Tensor) -> Tensor:
            for layer in self.values():
                x = layer(x).relu()
            return x

    stages = [Dense({name: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)) for name in "ab"}) for _ in range(2)]
    blocks = blocks_of(nn.Sequential(*stages, nn.Linear(4, 2)).eval(), torch.randn(2, 4))
    assert [block.name for block in blocks] == ["0", "1"]


def test_normalisation_over_whole_maps_is_no_layer_of_its_own() -> None:
    """Its scale has as many axes as a kernel."""
    layers = [nn.Conv2d(1, 4, 3), nn.LayerNorm([4, 6, 6]), nn.Conv2d(4, 4, 3), nn.LayerNorm([4, 4, 4]), nn.Flatten()]
    blocks = blocks_of(nn.Sequential(*layers, nn.Linear(64, 2)).eval(), torch.randn(2, 1, 8, 8))
    assert [(block.modules, block.layers) for block in blocks] == [(("0", "1"), 1), (("2", "3"), 1)]


def test_blocks_that_are_parts_of_a_container_have_names_of_their_own() -> None:
    layers = [layer for _ in range(4) for layer in (nn.Linear(6, 6), nn.BatchNorm1d(6), nn.ReLU())]
    model = nn.Sequential(nn.Sequential(*layers), nn.Linear(6, 2)).eval()
    names = [block.name for block in blocks_of(model, torch.randn(2, 6))]
    assert names == ["0.0 + 0.1", "0.3 + 0.4", "0.6 + 0.7", "0.9 + 0.10"]


def test_running_order_counts_not_the_order_of_definition() -> None:
    class Backwards(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(4, 2)
            self.second = nn.Linear(4, 4)
            self.first = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.second(self.first(x).relu()).relu())

    assert [b.name for b in blocks_of(Backwards(), torch.randn(2, 4))] == ["first", "second"]


def test_shared_weights_with_the_head_stay_fixed() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(4, 4, bias=False)
            self.middle = nn.Linear(4, 4)
            self.head = nn.Linear(4, 4)
            self.head.weight = self.first.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.middle(self.first(x)))

    model = Tied()
    trained = {p for b in blocks_of(model, torch.randn(2, 4)) for p in b.parameters}
    assert trained == {"middle.weight", "middle.bias"}


@pytest.mark.slow
def test_names_given_by_the_user() -> None:
    case = ZOO["vit"]
    blocks = blocks_of(case.model(), case.inputs(2), ["patches", ["blocks.0", "blocks.1"], "blocks.2"])
    assert [b.layers for b in blocks] == [1, 6, 3]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("names", "words"),
    [
        (["nowhere"], "name a module"),
        (["head"], "below the features"),
        (["blocks.0", "blocks"], "twice"),
        ([], "empty"),
    ],
)
def test_wrong_names_are_one_sentence(names: list[str], words: str) -> None:
    case = ZOO["vit"]
    with pytest.raises(AdaptationError, match=words):
        blocks_of(case.model(), case.inputs(2), names)


def test_a_head_on_raw_inputs_has_nothing_to_adapt() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 2))
    with pytest.raises(AdaptationError, match="parameters below the features"):
        blocks_of(model, torch.randn(2, 4))


@pytest.mark.parametrize("names", [3, [0], [["0", 1]], {"0": 1}, nn.Linear(2, 2), [nn.Linear(2, 2)], [None]])
def test_blocks_are_given_by_name(names: object) -> None:
    case = ZOO["tabular"]
    model = case.model()
    with pytest.raises(AdaptationError, match="names of modules"):
        split_blocks(model, trace(model, case.inputs(2)), names)  # type: ignore[arg-type]


class Heads(nn.Module):
    """Two heads on the same features; a list of parameters below them."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.ParameterList([nn.Parameter(torch.ones(6)), nn.Parameter(torch.ones(6))])
        self.encoder = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU())
        self.location, self.classes = nn.Linear(8, 2), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        for scale in self.scales:
            x = x * scale
        hidden = self.encoder(x)
        return {"location": self.location(hidden), "classes": self.classes(hidden)}


@pytest.mark.parametrize("frozen", [(), ("encoder",), ("location", "classes"), ("",)])
@pytest.mark.parametrize("output", ["location", "classes"])
def test_no_head_is_in_a_block_whichever_is_adapted_for(output: str, frozen: tuple[str, ...]) -> None:
    model = Heads()
    for name in frozen:
        model.get_submodule(name).requires_grad_(False)
    flags = [parameter.requires_grad for parameter in model.parameters()]
    blocks = blocks_of(model, torch.randn(2, 6), output=output)
    assert [block.modules for block in blocks] == [("", "encoder.0"), ("encoder.2",)]
    assert blocks[0].parameters[:2] == ("scales.0", "scales.1")
    assert [parameter.requires_grad for parameter in model.parameters()] == flags
    assert all(parameter.grad is None for parameter in model.parameters())


class _Borrowing(nn.Module):
    """Uses the weights of a layer that it never calls, and has another that nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.unused = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 2)
        self.head = nn.Linear(8, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = functional.linear(inputs, self.first.weight, self.first.bias).relu()
        return self.head(self.second(hidden).relu())  # type: ignore[no-any-return]


def test_weights_of_a_layer_that_is_never_called_are_named(caplog: pytest.LogCaptureFixture) -> None:
    model = _Borrowing()
    (block,) = split_blocks(model, trace(model, torch.randn(3, 4)))
    assert block.parameters == ("second.weight", "second.bias")
    (said,) = [record.getMessage() for record in caplog.records]
    assert said.startswith("Parameters of 'first' stay fixed")
    caplog.clear()
    plain = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    split_blocks(plain, trace(plain, torch.randn(3, 4)))
    assert not caplog.records
