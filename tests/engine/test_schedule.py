from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rehearsed_world import make_record
from worlds import sensors

import shiftmend
from shiftmend.engine import schedule
from shiftmend.engine.history import CLOSE, Epoch
from shiftmend.engine.method import Stage
from shiftmend.engine.schedule import (
    GRACE,
    PATIENCE,
    ROUND_STEPS,
    WINDOW,
    has_reached_home,
    has_settled,
    has_worsened,
    plan_rounds,
)
from shiftmend.errors import AdaptationError


def settling(epochs: int = 30) -> Stage:
    return Stage("block", epochs, 0.1, ("0.weight",), settles=True)


def test_a_fixed_schedule_has_one_round_an_epoch() -> None:
    assert plan_rounds(Stage("block", 7), 50) == schedule.Rounds(None, 7)
    # The epochs of a stream in a fixed order are not cut.
    assert plan_rounds(settling(7), None) == schedule.Rounds(None, 7, schedule.WARM_UP_STEPS)


@given(epochs=st.integers(1, 200), steps=st.integers(2, 5000))
def test_rounds_fill_the_published_length_and_never_exceed_it(epochs: int, steps: int) -> None:
    rounds = plan_rounds(settling(epochs), steps)
    assert rounds.steps is not None
    assert 1 <= rounds.steps <= ROUND_STEPS
    assert epochs * steps - rounds.steps < rounds.steps * rounds.at_most <= epochs * steps


def test_few_samples_have_short_rounds() -> None:
    assert plan_rounds(settling(30), 1) == schedule.Rounds(3, 10, warm_up=7)


def test_where_all_data_is_one_batch_a_stage_has_few_steps() -> None:
    assert plan_rounds(settling(150), 1) == schedule.Rounds(8, 8, warm_up=16)


def test_few_samples_are_one_batch_unless_a_size_is_given() -> None:
    world = sensors()
    few = world.target[:400]
    result = shiftmend.adapt(world.model, few, world.profile(), "fr", learning_rate=0.01)
    assert result.manifest["batch_size"] == 400
    assert result.manifest["steps"] <= schedule.ONE_BATCH_STEPS
    assert "batch_size_reduced_from" not in result.manifest
    for options in ({"batch_size": 100}, {"epochs": 2}):
        other = shiftmend.adapt(world.model, few, world.profile(), "fr", learning_rate=0.01, **options)
        assert other.manifest["batch_size"] == options.get("batch_size", 256)


@given(rate=st.floats(0.05, 0.9), start=st.floats(1e-6, 1e6))
def test_a_loss_that_falls_fast_goes_on_whatever_its_scale(rate: float, start: float) -> None:
    losses = [start * (1 - rate) ** index for index in range(WINDOW + 5)]
    assert not any(has_settled(losses[:count], count) for count in range(len(losses) + 1))


@given(start=st.floats(1e-6, 1e6), noise=st.floats(0, 0.01))
def test_a_loss_that_stands_still_is_over_after_a_window(start: float, noise: float) -> None:
    losses = [start * (1 + noise * (-1) ** index) for index in range(WINDOW)]
    assert not has_settled(losses[:-1], WINDOW - 1)
    assert has_settled(losses, WINDOW)


def test_a_block_that_changes_nothing_is_over_after_half_a_window() -> None:
    losses = [1.0] * (2 * WINDOW)
    assert not has_settled(losses, WINDOW // 2 - 1)
    assert has_settled(losses, WINDOW // 2)


def test_a_loss_that_rises_when_a_block_is_unfrozen_does_not_end_the_block() -> None:
    risen = [1.0] * WINDOW + [2.0, 1.9, 1.8, 1.7]
    assert not has_settled(risen, WINDOW // 2)
    # Its own rounds decide: the loss falls from there, then stands still.
    assert not has_settled([*risen, 1.5, 1.4, 1.3, 1.2], WINDOW)
    assert has_settled([*risen, *[1.7] * WINDOW], WINDOW + WINDOW // 2)


def test_slices_that_lose_little_of_what_was_gained_do_not_end_the_run() -> None:
    # A ResNet-18 on blurred CIFAR-10, in its first block.
    slices = [0.623, 0.0254, 0.0448, 0.0258, 0.0354, 0.0188, 0.022, 0.0333, 0.0433, 0.0395]
    assert not has_worsened(slices, GRACE)
    assert has_worsened([0.03, *slices[1:]], GRACE)


def test_slices_that_get_much_worse_end_the_run_after_several_rounds() -> None:
    falling = [1.0, 0.5, 0.1]
    assert not has_worsened(falling, GRACE)
    assert not has_worsened([*falling, *[0.3] * (PATIENCE - 1)], GRACE)
    assert has_worsened([*falling, *[0.3] * PATIENCE], GRACE)
    # Newly unfrozen weights may move the features away for a while.
    assert not has_worsened([*falling, *[0.3] * PATIENCE], GRACE - 1)
    assert has_worsened([*falling, *[math.nan] * PATIENCE], GRACE)
    assert not has_worsened([*falling, 0.3, 0.3, 0.1], GRACE)


def test_home_is_reached_only_with_every_signal() -> None:
    home = {"slices": 0.02, "marginals": 0.1}
    assert has_reached_home({"slices": 0.02, "marginals": 0.05, "entropy": 3.0}, home)
    assert not has_reached_home({"slices": 0.01, "marginals": 0.11}, home)
    assert not has_reached_home({"slices": 0.01}, home)
    assert not has_reached_home({"slices": 0.01, "marginals": 0.05}, {"slices": 0.02, "marginals": math.nan})
    assert not has_reached_home({"slices": 0.0, "marginals": 0.0}, {})


@pytest.mark.parametrize("method", ["fr", "bufr"])
def test_a_run_ends_as_soon_as_the_features_are_as_close_to_the_profile_as_home(method: str) -> None:
    world = sensors()
    options: dict[str, Any] = {"batch_size": 100, "learning_rate": 0.01}
    alone = shiftmend.adapt(world.model, world.target, world.profile(), method, **options)
    middle = alone.history[len(alone.history) // 2].signals
    levels = torch.tensor([[1.01 * middle[name] for name in ("slices", "marginals")]])
    three = {"shares": torch.full((3,), 1 / 3), "confusion": torch.full((3, 3), 10.0)}
    record = make_record(signals=("slices", "marginals"), home_mean=levels, cross_fitted=False, **three)
    rehearsed = replace(world.profile(), rehearsal=record)
    result = shiftmend.adapt(world.model, world.target, rehearsed, method, **options)
    home = dict(zip(record.signals, levels[0].tolist(), strict=True))
    reached = [has_reached_home(row.signals, home) for row in alone.history]
    assert 1 < len(result.history) == 1 + reached.index(True) < len(alone.history)
    assert [row.losses for row in result.history] == [row.losses for row in alone.history[: len(result.history)]]
    assert result.manifest["steps"] < alone.manifest["steps"]


def test_the_default_ends_by_itself_and_says_so() -> None:
    world = sensors()
    rows: list[Epoch] = []
    result = shiftmend.adapt(
        world.model, world.target, world.profile(), "bufr", batch_size=100, on_epoch=lambda _, row: rows.append(row)
    )
    assert 0 < result.manifest["steps"] <= 30 * len(result.manifest["stages"]) * (len(world.target) // 100)
    assert result.manifest["kept"] == "selected"
    assert all(stage["settles"] for stage in result.manifest["stages"])
    assert result.manifest["method"]["epochs_per_block"] == "auto"
    assert [row.steps for row in rows] == [row.steps for row in result.history]
    steps = [row.steps or 0 for row in rows]
    assert steps[0] == 0
    assert all(0 < later - before <= ROUND_STEPS for before, later in itertools.pairwise(steps))
    assert {row.block for row in rows[1:]} == {stage["name"] for stage in result.manifest["stages"]}


@pytest.mark.parametrize("method", ["fr", "bufr"])
def test_the_kept_state_is_the_latest_with_slices_close_to_the_lowest(method: str) -> None:
    world = sensors()
    result = shiftmend.adapt(world.model, world.target, world.profile(), method, batch_size=100)
    slices = [row.verification for row in result.history]
    lowest, kept = math.inf, 0
    for index, value in enumerate(slices):
        assert value is not None
        lowest = min(lowest, value)
        kept = index if value <= lowest * (1 + CLOSE) else kept
    assert result.selected == kept
    again = shiftmend.verify(result.model, world.target, world.profile())
    assert again.divergence == pytest.approx(slices[kept], rel=1e-4)


def test_data_as_at_home_ends_a_run_after_a_few_rounds_and_hardly_moves_the_features() -> None:
    world = sensors()
    result = shiftmend.adapt(world.model, world.source[:500], world.profile(), "bufr", batch_size=100)
    before, kept = result.history[0].verification, result.kept.verification
    assert before is not None
    assert kept is not None
    assert kept <= before * (1 + CLOSE)
    assert len(result.history) <= 1 + PATIENCE + WINDOW


def test_the_length_counts_steps_not_epochs() -> None:
    world = sensors()

    def steps(samples: int) -> int:
        target = world.target.repeat(20, *[1] * (world.target.ndim - 1))[:samples]
        result = shiftmend.adapt(world.model, target, world.profile(), "fr", batch_size=100, learning_rate=0.01)
        return int(result.manifest["steps"])

    assert steps(20_000) < 4 * steps(1_000)


@pytest.mark.parametrize("options", [{"epochs": "automatic"}, {"epochs": 0}, {"epochs": None}])
def test_lengths_that_mean_nothing_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(AdaptationError, match="auto"):
        shiftmend.methods.method("fr", **options)
