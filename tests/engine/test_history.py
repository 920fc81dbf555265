"""The choice without labels, on histories made by hand."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shiftmend.engine.history import MAX_REFINED_RATIO, TIE, Choice, Epoch, choose


def rows(*seen: tuple[float | None, float | None] | float) -> list[Epoch]:
    """A history from pairs of (verification, entropy), or from verifications alone."""
    pairs = [entry if isinstance(entry, tuple) else (entry, None) for entry in seen]
    found = [{"slices": slices, "entropy": entropy} for slices, entropy in pairs]
    known = [{name: value for name, value in row.items() if value is not None} for row in found]
    return [Epoch(i, "all", 0.1, {}, 0.0, signals) for i, signals in enumerate(known)]


def chosen(*seen: tuple[float | None, float | None] | float, free: bool = True) -> int:
    return choose(rows(*seen), entropy_may_decide=free)


def test_the_lowest_divergence_wins() -> None:
    assert chosen(5.0, 3.0, 1.0, 2.0) == 2
    assert chosen(1.0, 3.0, 5.0) == 0  # the model as it was is a candidate
    assert chosen(5.0, 3.0, 1.0) == 2
    assert chosen(1.0, 1.0) == 0  # nothing to choose: what came first stays
    assert chosen(1.0, (None, 0.1)) == 0  # what was not judged does not replace what was


def test_entropy_decides_between_equally_good_ones() -> None:
    assert chosen((5.0, 0.1), (1.0, 0.8), (1.09, 0.3), (1.05, 0.5)) == 2
    assert chosen((1.0, 0.8), (1.0, 0.7)) == 1
    assert chosen((1.0, 0.7), (1.0, 0.7)) == 0  # nothing to choose: what came first stays
    assert chosen((1.0, 0.8), (1.11, 0.1)) == 0  # beyond the tie no certainty helps


def test_entropy_says_nothing_about_those_who_minimise_it() -> None:
    history = ((5.0, 0.1), (1.0, 0.8), (1.09, 0.3), (0.99, 0.9))
    assert chosen(*history, free=False) == 3
    assert chosen(*history[:3], free=False) == 1


def test_missing_entropies_leave_the_choice_to_the_slices() -> None:
    assert chosen((1.0, None), (0.95, None), (0.97, None)) == 1
    assert chosen((1.0, 0.5), (0.95, None)) == 1
    assert chosen((1.0, None), (1.05, 0.1)) == 0


def test_predictions_that_are_no_numbers_give_way_to_equally_good_ones() -> None:
    assert chosen((1.0, math.nan), (1.05, 0.1)) == 1
    assert chosen((1.0, math.nan), (0.95, math.nan), (1.01, 2.0), (1.0, math.nan)) == 2
    assert chosen((1.0, math.nan), (1.2, 0.1)) == 0  # beyond the tie the slices judge


def test_a_slow_rise_with_falling_entropy_does_not_creep_away() -> None:
    creeping = [(1.02**i, 1.0 - 0.01 * i) for i in range(50)]
    kept = creeping[chosen(*creeping)]
    assert kept[0] <= 1 + TIE
    assert kept == max((row for row in creeping if row[0] <= 1 + TIE), key=lambda row: row[0])
    falling = [(1.02**-i, 0.01 * i) for i in range(50)]
    assert falling[chosen(*falling)][0] <= (1 + TIE) * falling[-1][0]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("free", [True, False])
def test_what_is_not_finite_is_never_chosen(bad: float, free: bool) -> None:
    assert chosen((2.0, 0.5), (bad, 0.1), free=free) == 0
    assert chosen((2.0, 0.5), (bad, 0.1), (1.0, 0.9), (bad, 0.0), free=free) == 2
    assert chosen((bad, 0.5), (2.0, 0.9), free=free) == 1  # also where it comes first
    assert chosen((bad, bad), (bad, 0.1), (2.0, bad), (3.0, 0.1), free=free) == 2
    assert chosen((bad, 0.5), (bad, 0.1), free=free) == 0  # nothing else there: the model as it was


def test_without_a_judge_the_last_is_kept() -> None:
    assert chosen((None, 0.1), (None, 0.9), (None, 0.5)) == 2


def test_nothing_to_choose_from() -> None:
    with pytest.raises(ValueError, match="nothing to choose from"):
        choose([], entropy_may_decide=True)


def kept_after(restored: list[float], refined: list[float | None]) -> int:
    """Position of the kept row, when some rows restore and the others refine."""
    first = rows(*restored)
    more = [
        Epoch(len(first) + i, "refined", 0.1, {}, 0.0, {} if slices is None else {"slices": slices})
        for i, slices in enumerate(refined)
    ]
    choice = Choice(entropy_may_decide=False, refining=("refined",))
    for row in (*first, *more):
        choice.consider(row)
    assert choice.kept is not None
    return choice.kept.epoch


def test_of_epochs_that_refine_the_latest_harmless_one_is_kept() -> None:
    assert kept_after([5.0, 1.0], [1.2, 1.5, 1.4]) == 4
    assert kept_after([5.0, 1.0, 3.0], [1.2]) == 3  # refining began with the kept state, of slices 1.0
    limit = MAX_REFINED_RATIO
    assert kept_after([5.0, 1.0], [1.2, limit, limit + 0.01]) == 3
    assert kept_after([5.0, 1.0], [limit + 0.01]) == 1  # harmful from the beginning: nothing is refined
    assert kept_after([5.0, 1.0], [1.9, 2.1, 3.0]) == 2  # the limit does not creep with what is kept


@pytest.mark.parametrize("bad", [math.nan, math.inf, None])
def test_epochs_that_refine_to_something_without_slices_are_not_kept(bad: float | None) -> None:
    assert kept_after([5.0, 1.0], [1.1, bad]) == 2


def test_without_a_judge_the_last_refined_epoch_is_kept() -> None:
    choice = Choice(entropy_may_decide=False, refining=("refined",))
    last = Epoch(1, "refined", 0.1, {}, 0.0)
    assert choice.consider(Epoch(0, "", 0.0, {}, 0.0))
    assert choice.consider(last)
    assert choice.kept is last


@pytest.mark.slow
@given(st.lists(st.tuples(st.floats(1e-3, 10), st.one_of(st.none(), st.floats(0, 3))), min_size=1), st.booleans())
def test_what_is_kept_is_at_any_time_within_the_tie_of_the_lowest(
    seen: list[tuple[float, float | None]], free: bool
) -> None:
    choice = Choice(entropy_may_decide=free)
    lowest = math.inf
    for row in rows(*seen):
        before = choice.kept
        taken = choice.consider(row)
        lowest = min(lowest, row.verification or 0.0)
        assert (choice.kept is row) == taken
        assert taken or choice.kept is before
        assert choice.kept is not None
        assert (choice.kept.verification or 0.0) <= lowest * (1 + TIE)
        if not free:
            assert choice.kept.verification == lowest


@pytest.mark.slow
@given(st.lists(st.tuples(st.floats(1.0, 1 + TIE), st.floats(0, 3)), min_size=1, unique_by=lambda pair: pair[1]))
def test_among_equally_good_ones_the_order_does_not_matter(seen: list[tuple[float, float]]) -> None:
    seen = [(1.0, 2.9), *seen]
    best = min(entropy for _, entropy in seen)
    assert seen[chosen(*seen)][1] == best
    assert seen[::-1][chosen(*seen[::-1])][1] == best
