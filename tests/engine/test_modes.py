"""The modes of a model while it is adapted, and what is trained."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shiftmend.engine.method import Stage
from shiftmend.engine.modes import (
    enter_adapting_modes,
    hold_layer_options,
    is_finite,
    make_ordinary,
    refuse_shared_tensors,
    unfreeze,
)
from shiftmend.errors import AdaptationError
from shiftmend.introspection.model_state import tensors_of
from shiftmend.methods.fr import FR


def small() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(), nn.LSTM(4, 4))
    model.register_parameter("codes", nn.Parameter(torch.arange(3), requires_grad=False))
    return model


@pytest.mark.parametrize("dropout", [False, True])
def test_while_adapting_batch_norm_and_recurrent_layers_train_and_dropout_only_if_wanted(dropout: bool) -> None:
    for model in (small().train(), small().eval()):
        enter_adapting_modes(model, dropout)
        assert [module.training for module in model] == [dropout, True, dropout, True]


@pytest.mark.parametrize("dropout", [False, True])
def test_what_holds_for_the_length_of_a_run_is_undone(dropout: bool) -> None:
    model = nn.Sequential(
        nn.BatchNorm1d(4, momentum=None), nn.BatchNorm1d(4, momentum=0.3), nn.GRU(4, 4, 2, dropout=0.4)
    )

    def facts() -> list[float | None]:
        return [model[0].momentum, model[1].momentum, model[2].dropout]

    def interrupted_run() -> None:
        with hold_layer_options(model, dropout=True) if dropout else hold_layer_options(model):
            assert facts() == [0.1, 0.3, 0.4 if dropout else 0.0]
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted_run()
    assert facts() == [None, 0.3, 0.4]


def test_only_what_a_stage_trains_has_a_gradient_and_no_gradient_is_left_over() -> None:
    model = small()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    stage = Stage("some", 1, 0.5, ("0.weight", "1.bias"), 0.25)
    trained = unfreeze(model, stage)
    (group,) = FR().make_optimiser(trained, stage).param_groups
    assert (group["lr"], group["momentum"], group["weight_decay"]) == (0.5, 0.9, 0.25)
    assert [name for name, p in model.named_parameters() if p.requires_grad] == ["0.weight", "1.bias"]
    assert [id(p) for p in group["params"]] == [id(model[0].weight), id(model[1].bias)]
    assert all(parameter.grad is None for parameter in model.parameters())
    assert unfreeze(model, Stage("nothing", 1)) == []


def test_a_shared_parameter_is_trained_by_either_name() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    for name in ("0.weight", "1.weight"):
        stage = Stage("some", 1, 0.5, (name,))
        trained = unfreeze(model, stage)
        assert [id(p) for p in trained] == [id(model[0].weight)]
        with pytest.raises(AdaptationError, match=r"shares '0.weight' with the caller's own"):
            refuse_shared_tensors(model, model, [stage])


def test_a_settled_model_is_in_eval_mode_with_the_gradient_flags_of_another() -> None:
    like, model = small(), small().train()
    like[0].weight.requires_grad_(False)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    settled = make_ordinary(model, like)
    assert not any(module.training for module in settled.modules())
    assert [p.requires_grad for p in settled.parameters()] == [p.requires_grad for p in like.parameters()]
    assert all(parameter.grad is None for parameter in settled.parameters())


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_has_gone_bad_is_noticed_and_what_never_was_finite_is_not(bad: float) -> None:
    model = nn.Linear(2, 2)
    model.register_buffer("mask", torch.tensor([0.0, -torch.inf]))
    model.register_buffer("waves", torch.ones(2, dtype=torch.complex64))
    model.register_buffer("nothing", torch.empty(0))
    model.register_buffer("last", torch.zeros(2))
    before = tensors_of(model)
    model.last = torch.zeros(5)  # as some models do in each pass
    assert is_finite(model, before)
    for value in (model.weight.data[0], model.mask, model.waves):
        good = value[0].clone()
        value[0] = bad
        assert not is_finite(model, before)
        value[0] = good
    assert is_finite(model, before)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_large_weights_are_finite_however_large_their_squares(dtype: torch.dtype) -> None:
    model = nn.Linear(2, 2).to(dtype)
    before = tensors_of(model)
    model.weight.data.fill_(torch.finfo(dtype).max)
    assert is_finite(model, before)
    model.weight.data[0, 0] = torch.inf
    assert not is_finite(model, before)
