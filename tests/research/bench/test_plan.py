"""Which cells there are, in which order, and when two of them are the same."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import small_worlds
import torch
from hypothesis import given
from hypothesis import strategies as st
from small_worlds import BENCHMARK, SETTINGS

from shiftmend.errors import DataError
from shiftmend.inputs.images import standardised
from shiftmend.research.bench.benchmark import Benchmark, FewShot, Offline, Online, Rehearsed, Setting
from shiftmend.research.bench.plan import _list_defaults, describe, hash_recipe, plan, rates_for, with_another_source
from shiftmend.research.bench.suite import BENCHMARKS, find


def test_the_order_shares_models_and_data() -> None:
    cells = plan(BENCHMARK)
    assert len(set(cells)) == len(cells) == 2 * (3 * len(SETTINGS) + 1)
    assert [cell.seed for cell in cells] == sorted(cell.seed for cell in cells)
    first = [cell for cell in cells if cell.seed == 1]
    assert [cell.shift for cell in first] == [s for s in small_worlds.SHIFTS for _ in SETTINGS] + ["clean"]
    assert [cell.method for cell in first[: len(SETTINGS)]] == list(SETTINGS)
    assert {cell.benchmark for cell in cells} == {"small"}
    assert {cell.protocol for cell in cells} == {"offline"}


def test_clean_images_are_for_the_source_model_offline() -> None:
    clean = [cell for cell in plan(BENCHMARK) if cell.shift == "clean"]
    assert [(cell.method, cell.seed) for cell in clean] == [("source-only", 1), ("source-only", 2)]
    for protocol in ("online", "few-shot-5"):
        assert not [cell for cell in plan(BENCHMARK, protocol) if cell.shift == "clean"]
        with pytest.raises(DataError, match="clean is a shift"):
            plan(BENCHMARK, protocol, shifts=["clean"])
    with pytest.raises(DataError, match="something to run"):
        plan(BENCHMARK, methods=["fr"], shifts=["clean"])


def test_who_starts_from_another_model_is_known_by_the_model_and_not_by_name() -> None:
    assert with_another_source(BENCHMARK, "offline") == ["shot"]
    assert with_another_source(find("usps"), "offline") == ["shot"]  # though each shift has a source model of its own
    last = dict(reversed(BENCHMARK.settings["offline"].items()))  # source-only is the measure wherever it stands
    assert with_another_source(replace(BENCHMARK, settings={"offline": last}), "offline") == ["shot"]
    rows = {"first": Setting("fr", source="shot"), "second": Setting("fr", source="shot"), "third": Setting("fr")}
    assert with_another_source(replace(BENCHMARK, settings={"offline": rows}), "offline") == ["third"]


def test_a_choice_keeps_the_benchmarks_order_and_its_recipes() -> None:
    everything = set(plan(BENCHMARK))
    some = plan(BENCHMARK, methods=["fr", "adabn", "fr"], shifts=["inverse", "dim"], seeds=[2, 2])
    assert [(cell.shift, cell.method) for cell in some] == [
        ("dim", "adabn"),
        ("dim", "fr"),
        ("inverse", "adabn"),
        ("inverse", "fr"),
    ]
    assert {cell.seed for cell in some} == {2}
    assert set(some) < everything
    other = plan(BENCHMARK, methods=["fr"], shifts=["dim"], seeds=[99])
    assert [cell.seed for cell in other] == [99]
    assert other[0].recipe == some[1].recipe


def test_unknown_names_get_a_sentence_with_the_nearest() -> None:
    for wanted, message in (
        ({"methods": ["burf"]}, r"'burf'.*Try"),
        ({"shifts": ["inverted"]}, r"'inverted'.*Try inverse"),
        ({"shifts": ["x"]}, r"clean, got"),
        ({"protocol": "of-line"}, r"offline, apart.*'of-line'"),
        ({"methods": []}, r"at least one method.*source-only"),
        ({"shifts": []}, r"at least one shift"),
        ({"seeds": []}, r"at least one seed"),
    ):
        with pytest.raises(DataError, match=message):
            plan(BENCHMARK, **wanted)


# ---- recipes: a hash of what decides a result


def made(
    benchmark: Benchmark = BENCHMARK, protocol: str = "offline", setting: Setting = SETTINGS["fr"], **more: Any
) -> str:
    return hash_recipe(benchmark, protocol, setting, more.pop("shift", "dim"), **more)


def with_recipe(**changes: Any) -> Benchmark:
    return replace(BENCHMARK, sources=dict(BENCHMARK.sources) | {"plain": replace(small_worlds.RECIPE, **changes)})


def with_protocol(protocol: Offline | Online | FewShot) -> Benchmark:
    return replace(BENCHMARK, protocols=dict(BENCHMARK.protocols) | {"offline": protocol})


INGREDIENTS: dict[str, Callable[[], str]] = {
    "as it is": lambda: made(),
    "another method": lambda: made(setting=Setting("bufr", SETTINGS["fr"].options)),
    "another rate": lambda: made(setting=Setting("fr", {"epochs": 6, "learning_rate": 0.2})),
    "more epochs": lambda: made(setting=Setting("fr", {"epochs": 7, "learning_rate": 0.05})),
    "one option more": lambda: made(setting=Setting("fr", {**SETTINGS["fr"].options, "align": ("features",)})),
    "another source": lambda: made(setting=replace(SETTINGS["fr"], source="shot")),
    "trained longer": lambda: made(with_recipe(epochs=9)),
    "trained faster": lambda: made(with_recipe(learning_rate=0.2)),
    "another network": lambda: made(with_recipe(options={"classes": 3, "width": 5, "image_size": 12})),
    "augmented": lambda: made(with_recipe(augmentation="rotate-10")),
    "larger batches": lambda: made(with_protocol(Offline(batch_size=33))),
    "another temperature": lambda: made(with_protocol(Offline(batch_size=32, temperature=0.02))),
    "scored less often": lambda: made(with_protocol(Offline(batch_size=32, score_every=2))),
    "other parts": lambda: made(with_protocol(Offline(batch_size=32, supervised_parts=(0.7, 0.2, 0.1)))),
    "five images a class": lambda: made(with_protocol(FewShot(batch_size=32, per_class=5))),
    "six images a class": lambda: made(with_protocol(FewShot(batch_size=32, per_class=6))),
    "a stream": lambda: made(with_protocol(Online(batch_size=32, temperature=0.01))),
    "published images": lambda: made(replace(BENCHMARK, origin=lambda shift, root: "published")),
    "normalised otherwise": lambda: made(replace(BENCHMARK, preprocess=standardised((0.5,) * 3, (0.25,) * 3))),
    "a rate to choose": lambda: made(rates=[0.1, 1.0]),
    "other rates to choose": lambda: made(rates=[0.1, 0.5]),
    "slices aligned too": lambda: made(setting=replace(SETTINGS["fr"], preset="sliced")),
    "as in the paper's text": lambda: made(setting=replace(SETTINGS["fr"], preset="paper")),
}


def test_every_ingredient_changes_the_recipe() -> None:
    hashes = {name: make() for name, make in INGREDIENTS.items()}
    assert len(set(hashes.values())) == len(hashes), hashes
    assert all(len(value) == 16 for value in hashes.values())


def test_data_of_another_name_are_another_ingredient() -> None:
    """Two recipes may agree in all but the data that `load_source` gives for their names."""
    twins = replace(BENCHMARK, sources={"plain": small_worlds.RECIPE, "balanced": small_worlds.RECIPE})
    plain, balanced = Setting("fr"), Setting("fr", source="balanced")
    assert made(twins, setting=plain) != made(twins, setting=balanced)
    by_shift = replace(twins, source_for=lambda setting, shift: "balanced" if shift == "inverse" else "plain")
    assert made(by_shift, setting=plain) == made(twins, setting=plain)
    assert made(by_shift, setting=plain, shift="inverse") == made(twins, setting=balanced)


def test_nothing_else_does() -> None:
    usual = made()
    same = {
        "order of options": made(setting=Setting("fr", {"learning_rate": 0.05, "epochs": 6})),
        "title": made(replace(BENCHMARK, title="other", name="other", small=True)),
        "seeds": made(replace(BENCHMARK, seeds=(5,))),
        "shifts": made(replace(BENCHMARK, shifts=("dim",), groups={})),
        "another shift of the same origin": made(shift="inverse"),
        "the same normalisation": made(replace(BENCHMARK, preprocess=lambda images: images.float() / 127.5 - 1)),
        "another row": made(replace(BENCHMARK, settings={"offline": {"fr": SETTINGS["fr"]}})),
        "order of the network's options": made(with_recipe(options={"image_size": 12, "width": 4, "classes": 3})),
    }
    assert set(same.values()) == {usual}, same
    one, also_one = Setting("fr", {"learning_rate": 1}), Setting("fr", {"learning_rate": 1.0})
    assert made(setting=one) == made(setting=also_one)
    assert made(setting=one, rates=[2, 0.1, 0.1]) == made(setting=Setting("fr"), rates=(0.1, 2.0))


@pytest.mark.parametrize(
    ("protocol", "row", "expected"),
    [
        ("offline", "fr", "e51a75142f6d5234"),
        ("offline", "shot", "53afa318e8c14ece"),
        ("online", "fr", "888e448a60899cbf"),
    ],
)
def test_recipes_of_stores_from_before_rows_had_presets_are_the_same(protocol: str, row: str, expected: str) -> None:
    """Computed then. Where this fails, all that was ever run has to be run again."""
    setting = BENCHMARK.settings[protocol][row]
    assert made(protocol=protocol, setting=setting) == expected
    assert made(protocol=protocol, setting=replace(setting, preset="reference")) == expected


def test_recipes_of_rows_with_a_preset_stay_the_same() -> None:
    assert made(setting=replace(SETTINGS["fr"], preset="sliced")) == "24dfb2285d846f4b"


def test_images_of_an_unknown_origin_are_refused_before_anything_is_run() -> None:
    with pytest.raises(DataError, match="origin"):
        plan(replace(BENCHMARK, origin=lambda shift, root: "found"))  # type: ignore[arg-type]


def test_a_preprocessing_that_wants_other_images_is_no_obstacle() -> None:
    def picky(images: torch.Tensor) -> torch.Tensor:
        return images.float().reshape(-1, 1, 12, 12)

    assert made(replace(BENCHMARK, preprocess=picky)) != made()


@given(st.permutations(["a", "b", "c", "d"]))
def test_the_order_of_options_never_matters(order: list[str]) -> None:
    values = {"a": 1, "b": 2.5, "c": "text", "d": (1, 2)}
    assert made(setting=Setting("fr", {name: values[name] for name in order})) == made(setting=Setting("fr", values))


# ---- learning rates to choose from


def test_rates_are_for_methods_that_have_one() -> None:
    assert rates_for(Setting("fr", {"learning_rate": 1.0}), [0.1, 1, 0.1]) == (0.1, 1.0)
    assert rates_for(Setting("fr"), [1, 0.1]) == (0.1, 1.0)  # however they are written down
    assert rates_for(Setting("fr"), [0.1]) == (0.1,)  # its own default is a rate, too
    assert rates_for(Setting("adabn", {"passes": 2}), [0.1]) == ()
    assert rates_for(Setting("source-only"), [0.1]) == ()
    assert rates_for(Setting("fr"), None) == rates_for(Setting("fr"), ()) == ()
    usual, searched = plan(BENCHMARK, "online", shifts=["dim"]), plan(BENCHMARK, "online", shifts=["dim"], rates=[0.1])
    assert {cell.method for cell in set(usual) & set(searched)} <= {"source-only", "adabn"}


def test_only_cells_that_have_a_rate_become_others() -> None:
    usual, searched = plan(BENCHMARK, shifts=["dim"]), plan(BENCHMARK, shifts=["dim"], rates=[0.1, 1.0])
    same = {cell.method for cell, other in zip(usual, searched, strict=True) if cell == other}
    assert same == {"source-only", "adabn"}


def test_bfloat16_is_for_offline_adaptation_on_a_gpu() -> None:
    with pytest.raises(DataError, match="autocast"):
        Online(autocast=True)
    protocol = Offline(autocast=True)
    assert protocol.in_bfloat16(torch.device("cuda", 0))
    assert not protocol.in_bfloat16(torch.device("cpu"))
    assert not Offline().in_bfloat16(torch.device("cuda", 0))
    assert "autocast" not in Offline().facts()
    assert protocol.facts()["autocast"] is True


# ---- A benchmark in plain values


@pytest.mark.parametrize("name", BENCHMARKS)
def test_everything_that_decides_a_number_is_there(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SHIFTMEND_DATA", raising=False)
    benchmark = find(name)
    facts = json.loads(json.dumps(describe(benchmark)))
    assert list(facts["shifts"]) == list(benchmark.shifts)
    assert set(facts["shifts"].values()) <= {"published", "rebuilt", "regenerated", "own"}
    assert set(facts["sources"]) == set(benchmark.sources)
    assert {protocol: list(rows) for protocol, rows in facts["settings"].items()} == {
        protocol: list(rows) for protocol, rows in benchmark.settings.items()
    }
    for protocol, rows in facts["settings"].items():
        if isinstance(benchmark.protocols[protocol], Rehearsed):
            # Its rows have the defaults of `adapt`.
            assert all(row["options"] == {} for row in rows.values())
            continue
        for row in rows.values():
            given = row["options"] | row["defaults"]
            assert ("epochs" in given or "epochs_per_block" in given) == (
                protocol != "online" and row["method"] not in ("source-only", "adabn")
            )


def test_defaults_are_those_of_the_method_that_a_setting_leaves() -> None:
    digits = find("digits")
    offline, online = digits.protocols["offline"], digits.protocols["online"]
    assert _list_defaults(digits.settings["offline"]["bnm-im"], offline) == {"weight": 10.0}
    assert _list_defaults(digits.settings["offline"]["adabn"], offline) == {"passes": 2}
    assert _list_defaults(digits.settings["online"]["adabn"], online) == {}
    assert "labels" not in _list_defaults(digits.settings["offline"]["target-supervised"], offline)
