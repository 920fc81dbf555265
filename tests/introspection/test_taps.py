from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from zoo import ZOO, InPlace, hooks

from shiftmend.errors import DataError, TapError
from shiftmend.introspection.modes import modes
from shiftmend.introspection.outputs import pick, tensors_in
from shiftmend.introspection.taps import Tap, tapped
from shiftmend.introspection.trace import trace
from shiftmend.introspection.validate import check_takes, unwrap


def test_in_place_layers_do_not_overwrite_what_was_tapped() -> None:
    model = InPlace().eval()
    x = torch.randn(8, 3, 16, 16)
    with torch.no_grad(), tapped(model, {"raw": Tap.parse("raw", "squeeze")}) as recorder:
        model(x)
        raw = recorder.read()["raw"]
        expected = model.squeeze(model.body(x).mean((2, 3)))
    assert bool((expected < 0).any())
    assert torch.equal(raw, expected)


def test_gradients_flow_through_a_tap_before_an_in_place_layer() -> None:
    model = InPlace()
    with tapped(model, {"raw": Tap.parse("raw", "squeeze")}) as recorder:
        model(torch.randn(8, 3, 16, 16)).sum()
        recorder.read()["raw"].square().sum().backward()
    assert model.squeeze.weight.grad is not None
    assert model.fc.weight.grad is None


def test_hooks_are_gone_after_an_error() -> None:
    case = ZOO["tabular"]
    model = case.model()
    taps = trace(model, case.inputs(2)).taps
    with pytest.raises(RuntimeError, match="on purpose"), tapped(model, taps):
        raise RuntimeError("on purpose")
    assert hooks(model) == 0
    with pytest.raises(DataError, match=r"does not take inputs of shape \[99\] and type float32"):
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
    with tapped(model, {"mine": Tap.parse("mine", module)}) as recorder:
        model(torch.randn(2, 4))
        with pytest.raises(TapError, match=f"'mine' watches '{module}', which {words}"):
            recorder.read()
    with pytest.raises(TapError, match="'mine'"):
        trace(model, torch.randn(2, 4), taps={"mine": module})
    assert hooks(model) == 0


def test_reading_starts_afresh() -> None:
    model = Odd()
    with tapped(model, {"mine": Tap.parse("mine", "fc")}) as recorder:
        for _ in range(3):
            model(torch.randn(2, 4))
            recorder.read()


def test_more_taps_and_other_axes() -> None:
    case = ZOO["vit"]
    model = case.model()
    found = trace(model, case.inputs(2), taps={"tokens": "blocks.1@-1", "patches": "patches"})
    with torch.no_grad(), tapped(model, found.taps) as recorder:
        model(case.inputs(3))
        seen = recorder.read()
    assert seen["tokens"].shape == (3 * 17, 16)
    assert seen["patches"].shape == (3 * 16, 16)
    assert list(found.taps) == ["features", "logits", "tokens", "patches"]


@pytest.mark.parametrize("spec", ["fc:out", "fc@x", "fc:input@1@2", "fc@²", "fc@--1"])
def test_tap_grammar_errors(spec: str) -> None:
    with pytest.raises(TapError, match="expected 'module'"):
        Tap.parse("mine", spec)


@pytest.mark.parametrize("spec", ["fc", "fc:input", "a.b.c@-1", "a:input@2"])
def test_tap_text_round_trip(spec: str) -> None:
    assert str(Tap.parse("mine", spec)) == spec


@pytest.mark.slow
def test_compiled_models_are_unwrapped() -> None:
    case = ZOO["tabular"]
    model = case.model()
    compiled = torch.compile(model, backend="eager")
    assert unwrap(compiled) is model
    found = trace(unwrap(compiled), case.inputs(2))
    assert found.head == case.head


def test_a_model_compiled_in_place_is_tapped_eagerly_and_stays_compiled() -> None:
    case = ZOO["tabular"]
    model = case.model()
    model.compile(backend="eager")
    model(case.inputs(2))
    call = model._compiled_call_impl
    found = trace(model, case.inputs(2))
    with tapped(model, found.taps) as recorder:
        model(case.inputs(2))
        assert set(recorder.read()) == {"features", "logits"}
    assert model._compiled_call_impl is call


def test_an_axis_that_is_not_there_is_named() -> None:
    case = ZOO["tabular"]
    with pytest.raises(TapError, match="axis 7"):
        trace(case.model(), case.inputs(2), taps={"mine": "0@7"})


ONE = torch.ones(2, 3)


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        ({"loss": None, "logits": ONE}, "a dict with entries 'loss', 'logits'; say .* e.g. output='logits'"),
        ((None, ONE), "a tuple of 2 entries; say which entry is meant, e.g. output=1"),
        ([ONE, ONE], "a list of 2 entries; say which entry is meant, e.g. output=0"),
        ({"loss": 1.5}, "a dict with entries 'loss'; expected a tensor"),
        ({}, "an empty dict; expected a tensor"),
        (None, "None; expected a tensor"),
        (1.5, "a float; expected a tensor"),
    ],
)
def test_what_is_no_tensor_gets_advice_that_works(value: Any, sentence: str) -> None:
    with pytest.raises(TapError, match=f"^the model returned {sentence}$"):
        pick(value, None, "the model")


@pytest.mark.parametrize("entry", [0, -1, 7, "logits"])
def test_a_tensor_has_no_entries(entry: int | str) -> None:
    assert pick(ONE, None, "the model") is ONE
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(TapError, match=f"a single tensor, which has no entry {entry!r}; leave the entry out"):
            pick(ONE, entry, "the model")


def test_entries_are_picked_and_refused_by_name() -> None:
    assert pick({"logits": ONE}, "logits", "the model") is ONE
    assert pick((None, ONE), -1, "the model") is ONE
    for value, entry in (({"logits": ONE}, 0), ((ONE,), 3), ((ONE,), "logits"), (None, 0)):
        with pytest.raises(TapError, match=f"which has no entry {entry!r}"):
            pick(value, entry, "the model")
    with pytest.raises(TapError, match="entry 0 of what the model returned is a tuple of 2 entries; expected a tensor"):
        pick(((ONE, ONE),), 0, "the model")


def test_a_tap_on_a_module_of_several_tensors_says_how_to_name_one() -> None:
    model = nn.Sequential(nn.GRU(3, 4, batch_first=True))
    inputs = torch.randn(2, 5, 3)
    with tapped(model, {"mine": Tap("mine", "0")}), pytest.raises(TapError, match=r"e.g. Tap\(\.\.\., entry=0\)$"):
        model(inputs)
    with tapped(model, {"mine": Tap("mine", "0", channel_axis=2, entry=0)}) as recorder:
        model(inputs)
        assert recorder.read()["mine"].shape == (10, 4)


def test_inputs_in_another_precision_are_refused_with_what_to_do() -> None:
    model = nn.Linear(3, 2)
    with pytest.raises(
        DataError,
        match=r"type float64: .*; convert them first, e\.g\. preprocess=lambda inputs: inputs\.to\(torch\.float32\)$",
    ):
        check_takes(model, torch.zeros(2, 3).double())
    with pytest.raises(DataError) as refused:
        check_takes(model, torch.zeros(2, 4))
    assert "convert" not in str(refused.value)
    with pytest.raises(DataError, match=r"inputs\.to\(torch\.float64\)$"):
        check_takes(model.double(), torch.zeros(2, 3))


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: Tap(3, "0"), "the name of a tap is 3, expected text"),
        (lambda: Tap("a", nn.Linear(2, 2)), "tap 'a' is Linear.*, expected the name of a module"),
        (lambda: Tap("a", "0", "both"), "tap 'a' has the side 'both', expected 'input' or 'output'"),
        (lambda: Tap("a", "0", channel_axis="1"), "tap 'a' counts units on axis '1', expected a whole number"),
        (lambda: Tap.parse("a", "0@0"), "tap 'a' counts units on axis 0, which is that of the samples"),
        (lambda: Tap.parse("a", None), "tap 'a' is None, expected the name of a module, e.g. 'layer1', or a Tap"),
    ],
)
def test_a_tap_of_the_wrong_kind_is_refused_where_it_is_made(make: Any, sentence: str) -> None:
    with pytest.raises(TapError, match=sentence):
        make()


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"taps": ["0"]}, r"taps is \['0'\], expected names with where to tap, e.g. taps=\{'early': 'layer1'\}"),
        ({"taps": "0"}, "taps is '0', expected names"),
        ({"taps": Tap("a", "0")}, "taps is a Tap, expected names"),
        ({"head": 5}, "head is 5, expected the name of the module that classifies"),
        ({"head": ""}, "head is '', expected the name"),
        ({"head": nn.Linear(2, 2)}, "head is Linear.*, expected the name"),
        ({"output": "logits"}, "a single tensor, which has no entry 'logits'"),
        ({"output": "logits", "head": "0"}, "a single tensor, which has no entry 'logits'"),
        ({"taps": {"early": "0@-2"}}, r"tap 'early' counts units on axis -2 of \[2, 32\]"),
    ],
)
def test_taps_and_head_are_given_by_name(wrong: dict[str, Any], sentence: str) -> None:
    case = ZOO["tabular"]
    with pytest.raises(TapError, match=sentence):
        trace(case.model(), case.inputs(2), **wrong)


@pytest.mark.parametrize(
    ("model", "sentence"),
    [
        (None, "the model is None, expected a torch.nn.Module$"),
        (nn.Linear, "the model is the class Linear, expected a torch.nn.Module$"),
        ("net.pt", "the model is a str, .*; build the network and load its weights into it first"),
        (nn.Linear(2, 2).state_dict(), "the model is an OrderedDict, .*; build the network and load its weights"),
        (nn.Linear(2, 2, device="meta"), "hold no values yet .*load its weights first"),
        (nn.LazyLinear(2), "hold no values yet .*run a batch through it if it is lazy"),
    ],
)
def test_what_is_no_model_is_refused_with_what_to_do(model: Any, sentence: str) -> None:
    with pytest.raises(TapError, match=sentence):
        unwrap(model)


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
    with pytest.raises(TapError, match="tap 'sum' watches 'penalty', which gives a single number for all samples"):
        trace(Summed(), torch.zeros(2, 4), taps={"sum": "penalty"})


class Raises(nn.Module):
    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise self.error


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (AssertionError("height 32 does not match 224"), "AssertionError height 32 does not match 224"),
        (AssertionError(), "AssertionError"),
        (KeyError("pixels"), "KeyError 'pixels'"),
        (AttributeError("no size"), "AttributeError no size"),
        (RuntimeError("shapes\ndiffer"), "shapes"),
    ],
)
def test_whatever_a_model_raises_is_one_sentence(error: Exception, words: str) -> None:
    with pytest.raises(DataError, match=rf"does not take inputs of shape \[3\] and type float32: {words}$") as caught:
        check_takes(Raises(error), torch.zeros(2, 3))
    assert caught.value.__cause__ is error


@pytest.mark.filterwarnings("error")  # of torch's, about sequences as indices
@pytest.mark.parametrize("read", [lambda batch: batch["x"], lambda batch: batch["tokens"]])
def test_a_model_that_is_called_with_a_dict_is_to_be_wrapped(read: Callable[[Any], Tensor]) -> None:
    class Named(nn.Module):
        def forward(self, batch: Any) -> Tensor:
            return read(batch)

    with pytest.raises(DataError, match="expected a model that is called with one tensor: wrap it in a module"):
        check_takes(Named(), torch.zeros(2, 3))


def test_inputs_that_would_do_as_fractions_are_refused_with_what_to_do() -> None:
    model = nn.Linear(3, 2)
    images = torch.zeros(2, 3, dtype=torch.uint8)
    with pytest.raises(DataError, match=r"e\.g\. preprocess=lambda inputs: inputs\.to\(torch\.float32\) / 255$"):
        check_takes(model, images)
    with pytest.raises(DataError, match=r"e\.g\. preprocess=lambda inputs: inputs\.to\(torch\.float32\)$"):
        check_takes(model, images.long())
    with pytest.raises(DataError) as caught:  # tokens of another vocabulary are no fractions
        check_takes(nn.Embedding(5, 2), torch.full((2, 3), 7))
    assert "preprocess" not in str(caught.value)
    with pytest.raises(DataError, match=r"expected samples along the first axis"):
        check_takes(model, torch.zeros(2))


def test_an_entry_that_the_model_does_not_return_is_refused_beforehand() -> None:
    check_takes(nn.Linear(3, 2), torch.zeros(2, 3))
    with pytest.raises(TapError, match="the model returned a single tensor, which has no entry 'logits'"):
        check_takes(nn.Linear(3, 2), torch.zeros(2, 3), "logits")


@dataclass
class Outputs:
    loss: None
    logits: torch.Tensor


class Pair(NamedTuple):
    logits: torch.Tensor
    hidden: torch.Tensor


class Keyed(OrderedDict[str, Any]):
    """A dict whose entries are attributes as well, as many libraries return it."""

    def __getattr__(self, name: str) -> Any:
        return self[name]


@pytest.mark.parametrize("make", [
    lambda logits: Outputs(None, logits), lambda logits: Pair(logits, logits + 1), lambda logits: Keyed(logits=logits),
])  # fmt: skip
def test_parts_with_names_are_picked_by_name(make: Callable[[torch.Tensor], Any]) -> None:
    logits = torch.randn(2, 3)
    value = make(logits)
    assert pick(value, "logits", "the model") is logits
    with pytest.raises(TapError, match="which has no entry 'scores'"):
        pick(value, "scores", "the model")
    with pytest.raises(TapError, match=r"with entries .*'logits'.*; say which entry is meant, e.g. output='logits'"):
        pick(value, None, "the model")


def test_what_cannot_be_picked_from_a_dataclass() -> None:
    value = Outputs(None, torch.zeros(2, 3))
    with pytest.raises(TapError, match="entry 'loss' of what the model returned is None; expected a tensor"):
        pick(value, "loss", "the model")
    with pytest.raises(TapError, match="returned an Outputs with entries 'loss', 'logits', which has no entry 1"):
        pick(value, 1, "the model")


class Siamese(nn.Linear):
    def forward(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(left - right)


def test_a_model_of_two_inputs_is_told_what_is_called() -> None:
    with pytest.raises(DataError, match="'right'; expected a model that is called with one tensor: wrap it"):
        check_takes(Siamese(4, 2), torch.zeros(2, 4))
    with pytest.raises(DataError, match="mat1 and mat2") as caught:
        check_takes(nn.Linear(4, 2), torch.zeros(2, 3))
    assert "one tensor" not in str(caught.value)


@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_compiled_forms_that_take_no_hooks_are_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    exported = torch.export.export(model, (torch.zeros(2, 4),)).module()
    with pytest.raises(TapError, match="an exported model cannot be tapped; pass the module it was exported from"):
        unwrap(exported)
    assert unwrap(torch.fx.symbolic_trace(model))
    model[1] = torch.jit.script(model[1])  # has nothing to be trained, and may stay
    assert trace(model, torch.zeros(2, 4)).extractor == ("0",)
    model[0] = torch.jit.script(model[0])
    with pytest.raises(TapError, match="'0' is scripted and cannot be tapped; put the module it was scripted from"):
        trace(model, torch.zeros(2, 4))


def test_all_tensors_of_a_value_are_found_also_where_it_holds_itself() -> None:
    tensors = [torch.tensor(float(index)) for index in range(5)]
    value: dict[str, Any] = {"a": [tensors[0], (tensors[1], None)], "b": Outputs(None, tensors[2]), "kind": Outputs}
    value |= {"c": Pair(tensors[3], tensors[4]), "self": value}
    assert sorted(float(tensor) for tensor in tensors_in(value)) == [0, 1, 2, 3, 4]
    with pytest.raises(TapError, match="returned the class Outputs; expected a tensor"):
        pick(Outputs, None, "the model")


class Merging(nn.Module):
    """Adds its adapter to its weight for inference, and takes it out again to train."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.adapter = nn.Parameter(torch.ones(3, 3)), nn.Parameter(torch.ones(3, 3))

    def train(self, mode: bool = True) -> Merging:
        if mode != self.training:
            self.weight.data += -self.adapter.data if mode else self.adapter.data
        return super().train(mode)


@pytest.mark.parametrize("training", [True, False])
def test_what_a_module_does_to_change_its_mode_is_undone(training: bool) -> None:
    model = nn.Sequential(nn.Linear(3, 3), Merging(), nn.BatchNorm1d(3)).train(training)
    model[2].train(not training)
    weight = model[1].weight.clone()
    with modes(model):
        model.train(not training)
        assert not torch.equal(model[1].weight, weight)
    assert torch.equal(model[1].weight, weight)
    assert [module.training for module in model.modules()] == [training, training, training, not training]


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
        with torch.set_grad_enabled(gradients), tapped(model, taps) as recorder:
            model(inputs)
            seen.append(recorder.read())
    for name in taps:
        torch.testing.assert_close(seen[0][name], seen[1][name])
    assert model.encoder.use_nested_tensor
