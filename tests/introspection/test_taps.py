from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from zoo import ZOO, InPlace, hooks

from shiftmend.errors import DataError, TapError
from shiftmend.introspection.taps import Tap, attach_taps
from shiftmend.introspection.trace import trace


def test_in_place_layers_do_not_overwrite_what_was_tapped() -> None:
    model = InPlace().eval()
    x = torch.randn(8, 3, 16, 16)
    with torch.no_grad(), attach_taps(model, {"raw": Tap.parse("raw", "squeeze")}) as recorder:
        model(x)
        raw = recorder.read()["raw"]
        expected = model.squeeze(model.body(x).mean((2, 3)))
    assert bool((expected < 0).any())
    assert torch.equal(raw, expected)


def test_gradients_flow_through_a_tap_before_an_in_place_layer() -> None:
    model = InPlace()
    with attach_taps(model, {"raw": Tap.parse("raw", "squeeze")}) as recorder:
        model(torch.randn(8, 3, 16, 16)).sum()
        recorder.read()["raw"].square().sum().backward()
    assert model.squeeze.weight.grad is not None
    assert model.fc.weight.grad is None


def test_hooks_are_gone_after_an_error() -> None:
    case = ZOO["tabular"]
    model = case.model()
    taps = trace(model, case.inputs(2)).taps
    with pytest.raises(RuntimeError, match="on purpose"), attach_taps(model, taps):
        raise RuntimeError("on purpose")
    assert hooks(model) == 0
    with pytest.raises(DataError, match=r"shape \[99\]"):
        trace(model, torch.randn(2, 99))
    assert hooks(model) == 0


class Odd(nn.Module):
    """One layer that never runs and one that runs twice."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Linear(4, 4)
        self.twice = nn.Linear(4, 4)
        self.fc = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(self.twice(self.twice(x)))


@pytest.mark.parametrize(("module", "words"), [("unused", "never ran"), ("twice", "ran 2 times")])
def test_a_tap_that_did_not_fire_once_is_named(module: str, words: str) -> None:
    model = Odd()
    with attach_taps(model, {"mine": Tap.parse("mine", module)}) as recorder:
        model(torch.randn(2, 4))
        with pytest.raises(TapError, match=words):
            recorder.read()
    with pytest.raises(TapError, match="'mine'"):
        trace(model, torch.randn(2, 4), taps={"mine": module})
    assert hooks(model) == 0


def test_reading_starts_afresh() -> None:
    model = Odd()
    with attach_taps(model, {"mine": Tap.parse("mine", "fc")}) as recorder:
        for _ in range(3):
            model(torch.randn(2, 4))
            recorder.read()


def test_more_taps_and_other_axes() -> None:
    case = ZOO["vit"]
    model = case.model()
    found = trace(model, case.inputs(2), taps={"tokens": "blocks.1@-1", "patches": "patches"})
    with torch.no_grad(), attach_taps(model, found.taps) as recorder:
        model(case.inputs(3))
        seen = recorder.read()
    assert seen["tokens"].shape == (3 * 17, 16)
    assert seen["patches"].shape == (3 * 16, 16)
    assert list(found.taps) == ["features", "logits", "tokens", "patches"]


@pytest.mark.parametrize("spec", ["fc:out", "fc@x", "fc:input@1@2", "fc@²", "fc@--1"])
def test_tap_grammar_errors(spec: str) -> None:
    with pytest.raises(TapError, match="to read 'module'"):
        Tap.parse("mine", spec)


@pytest.mark.parametrize("spec", ["fc", "fc:input", "a.b.c@-1", "a:input@2"])
def test_tap_text_round_trip(spec: str) -> None:
    assert str(Tap.parse("mine", spec)) == spec


@pytest.mark.slow
def test_a_model_compiled_in_place_is_tapped_eagerly_and_stays_compiled() -> None:
    case = ZOO["tabular"]
    model = case.model()
    model.compile(backend="eager")
    model(case.inputs(2))
    call = model._compiled_call_impl
    found = trace(model, case.inputs(2))
    with attach_taps(model, found.taps) as recorder:
        model(case.inputs(2))
        assert set(recorder.read()) == {"features", "logits"}
    assert model._compiled_call_impl is call


def test_an_axis_that_is_not_there_is_named() -> None:
    case = ZOO["tabular"]
    with pytest.raises(TapError, match="axis 7"):
        trace(case.model(), case.inputs(2), taps={"mine": "0@7"})


def test_a_tap_on_a_module_of_several_tensors_says_how_to_name_one() -> None:
    model = nn.Sequential(nn.GRU(3, 4, batch_first=True))
    inputs = torch.randn(2, 5, 3)
    with (
        attach_taps(model, {"mine": Tap("mine", "0")}),
        pytest.raises(TapError, match=r"e.g. Tap\(\.\.\., entry=0\)\.$"),
    ):
        model(inputs)
    with attach_taps(model, {"mine": Tap("mine", "0", channel_axis=2, entry=0)}) as recorder:
        model(inputs)
        assert recorder.read()["mine"].shape == (10, 4)


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: Tap("a", nn.Linear(2, 2)), "tap 'a'.*Linear"),
        (lambda: Tap("a", "0", "both"), "side.*'both'"),
        (lambda: Tap("a", "0", channel_axis="1"), "axis '1'"),
        (lambda: Tap.parse("a", "0@0"), "axis 0"),
        (lambda: Tap.parse("a", None), "tap 'a'.*None"),
    ],
)
def test_a_tap_of_the_wrong_kind_is_refused_where_it_is_made(make: Any, sentence: str) -> None:
    with pytest.raises(TapError, match=sentence):
        make()


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"taps": ["0"]}, r"taps.*\['0'\]"),
        ({"taps": "0"}, "taps.*got '0'"),
        ({"taps": Tap("a", "0")}, "taps.*got a Tap"),
        ({"head": 5}, "head.*got 5"),
        ({"head": ""}, "head.*got ''"),
        ({"head": nn.Linear(2, 2)}, "head.*got Linear"),
        ({"output": "logits"}, "under 'logits'"),
        ({"output": "logits", "head": "0"}, "under 'logits'"),
        ({"taps": {"early": "0@-2"}}, "axis -2"),
    ],
)
def test_taps_and_head_are_given_by_name(wrong: dict[str, Any], sentence: str) -> None:
    case = ZOO["tabular"]
    with pytest.raises(TapError, match=sentence):
        trace(case.model(), case.inputs(2), **wrong)


class Summed(nn.Module):
    """A module inside sees one number, such as a penalty, of all samples together."""

    def __init__(self) -> None:
        super().__init__()
        self.below, self.penalty, self.head = nn.Linear(4, 6), nn.Identity(), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        below = self.below(x)
        self.penalty(below.sum())
        return self.head(below)


def test_one_number_of_all_samples_is_no_activation() -> None:
    with pytest.raises(TapError, match="a single number"):
        trace(Summed(), torch.zeros(2, 4), taps={"sum": "penalty"})


def test_padded_positions_are_the_same_with_and_without_gradients() -> None:
    """`nn.TransformerEncoder` puts zeros there where it needs no gradient: no step would ever be at home."""

    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2)
            self.head = nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.encoder(x, src_key_padding_mask=(x == 0).all(-1)))  # type: ignore[no-any-return]

    torch.manual_seed(0)
    model = Masked().eval()
    inputs = torch.randn(4, 6, 8)
    inputs[:2, 4:] = 0
    taps = {"features": Tap("features", "head", "input", -1), "inner": Tap("inner", "encoder.layers.1", "output", -1)}
    seen = []
    for gradients in (False, True):
        with torch.set_grad_enabled(gradients), attach_taps(model, taps) as recorder:
            model(inputs)
            seen.append(recorder.read())
    for name in taps:
        torch.testing.assert_close(seen[0][name], seen[1][name])
    assert model.encoder.use_nested_tensor
