"""Refuse models that cannot be used, with what to do."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from zoo import ZOO, hooks

from shiftmend.errors import AdaptationError, DataError, TapError
from shiftmend.introspection.trace import trace
from shiftmend.introspection.validate import check_model, copy_model, unwrap, validate


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (None, "None"),
        (nn.Linear, "the class Linear"),
        ("net.pt", r"a str\..*Build"),
        (nn.Linear(2, 2).state_dict(), r"an OrderedDict\..*Build"),
        (nn.Linear(2, 2, device="meta"), "with values"),
        (nn.LazyLinear(2), "lazy"),
    ],
)
def test_what_is_no_model_is_refused_with_what_to_do(model: Any, words: str) -> None:
    with pytest.raises(TapError, match=words):
        unwrap(model)


@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_compiled_forms_that_take_no_hooks_are_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    exported = torch.export.export(model, (torch.zeros(2, 4),)).module()
    with pytest.raises(TapError, match="exported"):
        unwrap(exported)
    assert unwrap(torch.fx.symbolic_trace(model))
    model[1] = torch.jit.script(model[1])  # has nothing to be trained, and may stay
    assert trace(model, torch.zeros(2, 4)).extractor == ("0",)
    model[0] = torch.jit.script(model[0])
    with pytest.raises(TapError, match="'0', which is scripted"):
        trace(model, torch.zeros(2, 4))


@pytest.mark.slow
def test_compiled_models_are_unwrapped() -> None:
    case = ZOO["tabular"]
    model = case.model()
    compiled = torch.compile(model, backend="eager")
    assert unwrap(compiled) is model
    found = trace(unwrap(compiled), case.inputs(2))
    assert found.head == case.head


def test_inputs_in_another_precision_are_refused_with_what_to_do() -> None:
    model = nn.Linear(3, 2)
    with pytest.raises(DataError, match=r"inputs\.to\(torch\.float32\)\.$"):
        check_model(model, [torch.zeros(2, 3).double()])
    with pytest.raises(DataError) as refused:
        check_model(model, [torch.zeros(2, 4)])
    assert "convert" not in str(refused.value)
    with pytest.raises(DataError, match=r"inputs\.to\(torch\.float64\)\.$"):
        check_model(model.double(), [torch.zeros(2, 3)])


def test_inputs_that_would_do_as_fractions_are_refused_with_what_to_do() -> None:
    model = nn.Linear(3, 2)
    images = torch.zeros(2, 3, dtype=torch.uint8)
    with pytest.raises(DataError, match=r"inputs\.to\(torch\.float32\) / 255\.$"):
        check_model(model, [images])
    with pytest.raises(DataError, match=r"inputs\.to\(torch\.float32\)\.$"):
        check_model(model, [images.long()])
    with pytest.raises(DataError) as caught:  # tokens of another vocabulary are no fractions
        check_model(nn.Embedding(5, 2), [torch.full((2, 3), 7)])
    assert "preprocess" not in str(caught.value)
    with pytest.raises(DataError, match="first axis"):
        check_model(model, [torch.zeros(2)])


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
    with pytest.raises(DataError, match=rf"\[3\].*float32: {words}\.$") as caught:
        check_model(Raises(error), [torch.zeros(2, 3)])
    assert caught.value.__cause__ is error


def test_an_entry_that_the_model_does_not_return_is_refused_beforehand() -> None:
    check_model(nn.Linear(3, 2), [torch.zeros(2, 3)])
    with pytest.raises(TapError, match="under 'logits'"):
        check_model(nn.Linear(3, 2), [torch.zeros(2, 3)], output="logits")


class Siamese(nn.Linear):
    def forward(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(left - right)


def test_a_model_of_two_inputs_is_told_what_is_called() -> None:
    with pytest.raises(DataError, match=r"'right'.*takes several"):
        check_model(Siamese(4, 2), [torch.zeros(2, 4)])
    with pytest.raises(DataError, match="mat1 and mat2") as caught:
        check_model(nn.Linear(4, 2), [torch.zeros(2, 3)])
    assert "several" not in str(caught.value)


class Bound(nn.Module):
    """Holds a function that refers to the module itself; that of a copy refers to the module that was copied."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8)), nn.Linear(8, 3)
        self.below = lambda x: self.body(x).relu()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.below(x))  # type: ignore[no-any-return]


def test_a_copy_that_runs_layers_of_the_original_is_a_problem() -> None:
    model, inputs = Bound(), torch.zeros(4, 6)
    copied = copy_model(model)
    (problem,) = validate(copied, [inputs], original=model)
    assert "calls 'body'" in problem.message
    assert problem.error is AdaptationError
    assert hooks(model) == hooks(copied) == 0
    assert model.body[1].num_batches_tracked == 0


class Asking(nn.Linear):
    """Lets another thread ask a model while it runs itself."""

    other: nn.Module | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.other is not None:
            with ThreadPoolExecutor(1) as pool:
                pool.submit(self.other, x).result()
        return super().forward(x)


def test_another_thread_may_predict_with_the_original_meanwhile() -> None:
    model = Asking(3, 2)
    copied = copy_model(model)
    vars(copied)["other"] = model
    assert validate(copied, [torch.zeros(2, 3)], original=model) == []


def test_every_problem_is_listed() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    assert validate(model, [torch.zeros(2, 3)], trained=True, traced=True) == []
    for layer in model:
        nn.init.constant_(layer.weight, torch.nan)
    found = validate(model, [torch.zeros(2, 3)], trained=True)
    assert ["0.weight" in problem.message for problem in found] == [True, False]
    with pytest.raises(AdaptationError, match=r"0\.weight"):
        unwrap(model, trained=True)
    assert unwrap(model) is model


def test_a_model_without_hooks_can_be_run_all_the_same() -> None:
    exported = torch.export.export(nn.Linear(4, 2), (torch.zeros(2, 4),)).module()
    assert validate(exported, [torch.zeros(2, 4)], tapped=False) == []
    assert [problem.error for problem in validate(exported, [torch.zeros(2, 4)])] == [TapError]


def test_one_sample_is_too_few_for_statistics_of_the_batch() -> None:
    model = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4, track_running_stats=False))
    with pytest.raises(DataError, match="at least two samples"):
        check_model(model, [torch.zeros(1, 2)])


def test_colours_for_a_model_of_grey_images() -> None:
    with pytest.raises(DataError, match="--channels 1"):
        check_model(nn.Conv2d(1, 2, 3), [torch.zeros(2, 3, 8, 8)])
    with pytest.raises(DataError) as caught:
        check_model(nn.Conv2d(2, 2, 3), [torch.zeros(2, 3, 8, 8)])
    assert "--channels" not in str(caught.value)


def test_a_copy_that_shares_tensors_with_the_original_is_refused() -> None:
    class Sharing(nn.Linear):
        def __deepcopy__(self, memo: dict[int, Any]) -> Sharing:
            return self

    with pytest.raises(AdaptationError, match=r"'0\.weight' shared"):
        copy_model(nn.Sequential(Sharing(3, 2)))


def test_a_copy_has_the_values_of_tensors_that_hang_on_a_graph() -> None:
    model = nn.Linear(3, 2)
    model.remembered = model(torch.ones(1, 3))  # type: ignore[assignment]
    copied = copy_model(model)
    assert torch.equal(copied.remembered, model.remembered)  # type: ignore[arg-type]
    assert copied.remembered.grad_fn is None
