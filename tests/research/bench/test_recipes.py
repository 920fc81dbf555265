"""Recipes: their rates against PyTorch's and the formula, their digests, and what is refused."""

import dataclasses
import json
import math
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from shiftmend.errors import DataError
from shiftmend.research.bench.recipes import Recipe, rate

TINY = {"classes": 3, "width": 4, "image_size": 12}
OTHERS: dict[str, Any] = {
    "network": "resnet18-cifar",
    "options": TINY | {"classes": 4},
    "epochs": 3,
    "learning_rate": 0.2,
    "momentum": 0.8,
    "weight_decay": 1e-4,
    "batch_size": 65,
    "label_smoothing": 0.1,
    "augmentation": "rotate-10",
    "schedule": "inverse",
    "pretrained": "weights.safetensors",
    "nesterov": True,
    "autocast": True,
}


def recipe(**changes: Any) -> Recipe:
    return Recipe(**({"network": "digit-cnn", "options": TINY, "epochs": 2, "batch_size": 64} | changes))


def test_cosine_is_pytorchs_and_constant_within_an_epoch() -> None:
    plan = recipe(epochs=7, learning_rate=0.3)
    optimiser = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, 7)
    for epoch in range(7):
        rates = {rate(plan, epoch * 5 + step, 5) for step in range(5)}
        assert len(rates) == 1
        assert rates.pop() == pytest.approx(optimiser.param_groups[0]["lr"], rel=1e-9)
        optimiser.step()
        schedule.step()
    assert rate(plan, 35, 5) == pytest.approx(0, abs=1e-12)


def test_inverse_schedule_falls_with_every_step() -> None:
    plan = recipe(epochs=4, learning_rate=0.2, schedule="inverse")
    rates = [rate(plan, step, 5) for step in range(20)]
    np.testing.assert_allclose(rates, 0.2 * (1 + 10 * np.arange(20) / 20) ** -0.75, rtol=1e-12)
    assert rates[0] == 0.2


def test_digest_changes_with_every_field_and_fact() -> None:
    assert set(OTHERS) == {field.name for field in dataclasses.fields(Recipe)}
    changed = [recipe(**{name: value}) for name, value in OTHERS.items()]
    digests = {plan.digest() for plan in (recipe(), *changed)}
    digests |= {recipe().digest({"data": name}) for name in ("a", "b")}
    assert len(digests) == len(OTHERS) + 3
    assert all(len(digest) == 16 and set(digest) <= set("0123456789abcdef") for digest in digests)


def test_equal_recipes_are_one() -> None:
    first = recipe(options={"classes": 3, "width": 4}, learning_rate=1)
    second = recipe(options={"width": 4, "classes": 3}, learning_rate=1.0)
    assert first == second
    assert len({first, second}) == 1
    assert first.digest({"a": 1, "b": 2}) == second.digest({"b": 2, "a": 1})
    assert Recipe(**json.loads(json.dumps(first.facts()))) == first == pickle.loads(pickle.dumps(first))
    assert dataclasses.replace(first, epochs=9) != first


def test_a_recipe_keeps_its_own_options() -> None:
    options = dict(TINY)
    plan = recipe(options=options)
    options["classes"] = 99
    assert plan.options["classes"] == 3


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("network", "vgg", "one of digit-cnn"),
        ("epochs", 0, "at least 1"),
        ("learning_rate", 0, "above 0"),
        ("learning_rate", math.nan, "above 0"),
        ("momentum", 1, "below 1"),
        ("weight_decay", -1, "at least 0"),
        ("batch_size", 1, "at least 2"),
        ("label_smoothing", 1, "below 1"),
        ("augmentation", "mixup", "one of none, rotate-10"),
        ("schedule", "step", "one of cosine, inverse"),
    ],
)
def test_wrong_fields_are_refused(name: str, value: Any, expected: str) -> None:
    with pytest.raises(DataError, match=rf"{name} of a recipe must be .*{expected}.*, got {value!r}"):
        recipe(**{name: value})


def test_nesterov_needs_momentum() -> None:
    with pytest.raises(DataError, match="nesterov of a recipe must be False without momentum"):
        recipe(nesterov=True, momentum=0)


# --- going on after an interruption


def test_what_is_off_does_not_change_a_recipe() -> None:
    assert "autocast" not in recipe().facts()
    assert recipe(autocast=True).facts()["autocast"] is True
    assert recipe(autocast=True).digest() != recipe().digest()
