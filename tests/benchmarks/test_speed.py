"""That speed is measured, not how fast it is: timings are no tests."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import speed
from shiftmend.errors import DataError, ShiftmendError
from shiftmend.research.bench.suite import find
from speed import compilation, growth, histogram, large_network, packing, precision, setting_up, steps, timing
from speed.timing import Table, Timing

CPU = torch.device("cpu")
TINY = steps.Workload("tiny", "digit-cnn", 4, (3, 28, 28), 8, 16)
ROOT = Path(__file__).parents[2]
gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def test_a_timing_is_a_median_with_its_spread() -> None:
    calls: list[int] = []
    found = timing.timed(lambda: calls.append(1), CPU, repeats=5, inner=3)
    assert len(calls) == 1 + 5 * 3  # warm first
    assert 0 <= found.low <= found.median <= found.high
    assert Timing(0.5, 0.001234, 1.5).milliseconds == "500 (1.23 to 1,500)"
    assert Timing(1.0, 0.5, 2.0) / 4 == Timing(0.25, 0.125, 0.5)


def test_memory_on_a_cpu_is_that_of_all_tensors_alive_at_once(capfd: pytest.CaptureFixture[str]) -> None:
    def run() -> Tensor:
        one = torch.zeros(1000, 100)
        two = one.exp()
        del one
        return two.sum(0) + torch.ones(100)

    found = timing.memory_of(run, CPU)
    assert found is not None
    assert 2 * 400_000 <= found < 2 * 400_000 + 4000
    print("still there", file=sys.stderr)
    assert capfd.readouterr().err == "still there\n"


@pytest.mark.slow
def test_a_step_is_set_beside_a_plain_loop_and_beside_its_floor() -> None:
    found = steps.step_times(TINY, CPU, 1, throughput=1e9)
    assert found.ratio == found.ours.median / found.supervised.median
    assert found.speedup == found.eager.median / found.ours.median
    assert found.images == 8 / found.ours.median
    assert found.share == pytest.approx(found.flops / found.ours.median / 1e9)
    assert found.peak_memory is None
    # forward: 2 operations a multiplication; backward: about twice that
    assert 2.5 < found.flops / (2 * 8 * _multiplications()) < 3.1
    facts = json.loads(json.dumps(found.facts()))
    assert facts["workload"]["batch"] == 8
    assert facts["ratio"] == found.ratio
    (line,) = steps.table([found]).rows
    assert line[0] == "tiny, batch 8"
    assert line[2] == found.ours.milliseconds


def _multiplications() -> int:
    """Of the paper's CNN on one 28 x 28 image, by hand."""
    first, second, third = 14 * 14 * 64 * 3 * 25, 8 * 8 * 128 * 64 * 9, 5 * 5 * 256 * 128 * 9
    return first + second + third + 6400 * 128 + 128 * 4


def test_both_loops_minimise_the_same_divergence() -> None:
    stage = steps.scene(TINY, CPU)
    generator = torch.Generator().manual_seed(0)
    activations = {name: torch.randn(8, home.units, generator=generator) for name, home in stage.homes.items()}
    mine, plain = steps.ours(stage)(activations), steps.plain(stage)(activations)
    assert mine.keys() == plain.keys() == {"features", "logits"}
    for name, value in mine.items():
        assert float(value) == pytest.approx(float(plain[name]), rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "layout"), precision.COMBINATIONS)
def test_each_precision_and_layout_is_what_it_is_called(kind: str, layout: str) -> None:
    seen: set[torch.dtype] = set()
    stage = steps.scene(TINY, CPU, precision.LAYOUTS[layout])

    def objective(activations: Any) -> dict[str, Tensor]:
        seen.update(values.dtype for values in activations.values())
        return steps.ours(stage)(activations)

    steps.time_step(stage, objective, autocast=precision.PRECISIONS[kind], repeats=1)
    assert seen == {getattr(torch, kind)}
    weight = stage.model.get_parameter("conv2.weight")
    assert weight.is_contiguous(memory_format=precision.LAYOUTS[layout])
    assert weight.is_contiguous() == (layout == "NCHW")


def test_the_table_of_precisions_names_the_best() -> None:
    times = (4.0, 3.0, 2.0, 1.0)
    rows = [
        precision.PrecisionTime(TINY, kind, layout, Timing(time, time, time), "cuda")
        for (kind, layout), time in zip(precision.COMBINATIONS, times, strict=True)
    ]
    found = precision.table(rows)
    assert found.titles[1:] == ("float32, NCHW", "float32, channels last", "bfloat16, NCHW", "bfloat16, channels last")
    assert [cell.split()[0] for cell in found.rows[0][1:]] == ["4,000", "3,000", "2,000", "1,000"]
    assert "best in bfloat16, channels last, 4.00 times as fast as float32, NCHW" in found.notes[0]
    named = "run as TF32" if torch.backends.cudnn.allow_tf32 else "in full"
    assert f"convolutions {named}" in found.notes[1]


class StandIn:
    """In place of a captured epoch, on a CPU: one step while it is made, and none when it is run."""

    def __init__(self, once: Any, samples: int, size: int) -> None:
        self.steps = samples // size
        once(torch.arange(size))

    def run(self, order: Tensor) -> tuple[dict[str, Tensor], int]:
        return {}, self.steps


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Steps are captured and compiled on a CPU, as far as that goes; for each capture whether it was compiled."""
    plainly, captures = torch.compile, list[bool]()

    def captured(once: Any, model: nn.Module, *_: Any, **__: Any) -> StandIn:
        captures.append(model._compiled_call_impl is not None)
        return StandIn(once, 16, 8)

    monkeypatch.setattr("shiftmend.engine.step.capture_epoch", captured)
    monkeypatch.setattr("shiftmend.engine.step.Steps._can_be_captured", lambda self: True)
    monkeypatch.setattr(torch, "compile", lambda function, **_: plainly(function, backend="eager"))
    return captures


@pytest.mark.slow
def test_compiled_steps_are_set_beside_those_as_they_are(as_on_a_gpu: list[bool]) -> None:
    stage = steps.scene(TINY, CPU)
    found = compilation.compiled_time(stage, repeats=2)
    assert as_on_a_gpu == [False, True]
    assert found.compiled is not None
    assert found.compiled.seconds > stage.steps * found.compiled.step.high  # the first epoch alone has a step in it
    assert stage.model._compiled_call_impl is None


@pytest.mark.slow
def test_steps_that_cannot_be_compiled_are_not_called_compiled(
    as_on_a_gpu: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refusing(once: Any, model: nn.Module, *_: Any, **__: Any) -> StandIn | None:
        return None if model._compiled_call_impl is not None else StandIn(once, 16, 8)

    monkeypatch.setattr("shiftmend.engine.step.capture_epoch", refusing)
    found = compilation.compiled_time(steps.scene(TINY, CPU), repeats=1)
    assert found.compiled is None
    assert found.derived() == {"images": 8 / found.plain.median}
    shown = compilation.table([found])
    assert shown.rows[0][2] == "failed"
    assert "tiny: could not be compiled" in shown.notes[0]


def test_the_table_of_compiled_steps_says_when_compiling_pays() -> None:
    plain, fast, slow = (Timing(time, time, time) for time in (0.004, 0.002, 0.005))
    rows = [compilation.CompiledTime(TINY, plain, compilation.Compiled(step, 10.0)) for step in (fast, slow)]
    found = compilation.table(rows)
    assert found.rows[0][1:] == (plain.milliseconds, fast.milliseconds, "2.00", "10.0")
    assert found.notes[0] == "tiny: 4,000 images a second, 2,000 as it is; won back after 5,000 steps"
    assert found.notes[1].endswith("never won back")
    facts = json.loads(json.dumps(rows[0].facts()))
    assert (facts["gain"], facts["won_back"], facts["compiled"]["seconds"]) == (2.0, 5000.0, 10.0)


def test_what_torch_keeps_of_compilations_is_set_aside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "mine")
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    with compilation.nothing_kept():
        places = [Path(os.environ[name]) for name in compilation.CACHES]
        assert len(set(places)) == 2
        for place in places:
            place.mkdir()
            (place / "kernel").touch()
    assert not any(place.parent.exists() for place in places)
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == "mine"
    assert "TRITON_CACHE_DIR" not in os.environ


def test_a_cpu_says_why_nothing_is_compiled() -> None:
    assert list(compilation.measure(CPU, 1)) == []
    assert "CUDA device only" in compilation.table([]).notes[0]


@pytest.mark.gpu
@gpu
def test_steps_are_compiled_on_a_gpu() -> None:
    found = compilation.compiled_time(steps.scene(TINY, torch.device("cuda", 0)), repeats=1)
    assert found.compiled is not None
    assert found.compiled.seconds > 0


@pytest.mark.slow
def test_the_soft_histogram_is_set_beside_the_softmax_and_one_read() -> None:
    found = histogram.histogram_times(6000, 7, CPU, repeats=1)
    assert (found.samples, found.units, found.called) == (6000, 7, None)
    assert 0 < found.error < 1e-6
    assert 0 < found.naive_error < 1e-6
    assert found.naive_memory is not None
    assert found.memory is not None
    assert found.naive_memory >= 4 * 6000 * 7 * 10 > 10 * 4 * 6000  # all of samples x units x bins
    assert found.memory < found.naive_memory
    facts = found.facts()
    assert facts["ours_bytes_a_second"] == 4 * 6000 * 7 / found.ours.median
    assert facts["ours_to_read"] == found.ours.median / found.read.median


def test_errors_are_taken_against_float64() -> None:
    values = torch.rand(2500, 3, generator=torch.Generator().manual_seed(1)) * 1.2 - 0.1
    bins = histogram.Bins()
    cuts = np.arange(9) / 8
    offsets = np.concatenate([[0.0], -np.cumsum(cuts)])
    logits = (values.double().numpy()[..., None] * np.arange(1, 11) + offsets) / 0.01
    logits -= logits.max(-1, keepdims=True)
    expected = (np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)).mean(0)
    np.testing.assert_allclose(histogram._in_float64(values, bins).numpy(), expected, atol=1e-12)


def test_growth_doubles_one_thing_at_a_time() -> None:
    base = growth.Size(10, 3)
    found = growth.sizes(base)
    for what, grown in found.items():
        assert [(size.samples, size.units, size.bins.inner, size.taps) for size in grown] == [
            (
                10 * (factor if what == "samples" else 1),
                3 * (factor if what == "units" else 1),
                8 * (factor if what.startswith("bins") else 1),
                factor if what == "taps" else 1,
            )
            for factor in (1, 2, 4, 8)
        ]
    assert {size.bins.inner * size.bins.temperature for size in found["bins, equally sharp"]} == {0.08}
    assert {size.bins.temperature for size in found["bins, one temperature"]} == {0.01}


def test_growth_is_told_as_a_ratio_to_the_base() -> None:
    rows = list(growth.grow("taps", growth.sizes(growth.Size(20, 3))["taps"], CPU, repeats=1))
    assert [row.factor for row in rows] == [1, 2, 4, 8]
    assert [row.ratio for row in rows] == [row.time.median / rows[0].time.median for row in rows]
    assert growth.table(rows).rows[0][2:] == tuple(f"{row.ratio:.2f}" for row in rows[1:])
    gradients = growth.divergence(growth.Size(20, 3, taps=2), CPU)()
    assert [gradient.shape for gradient in gradients] == [(20, 3), (20, 3)]
    assert all(bool(gradient.any()) for gradient in gradients)


@pytest.fixture
def small(tmp_path: Path) -> str:
    """Cells of a second, and one kind that fails."""
    text = "from speed.packing import make_benchmark\n"
    text += "SMALL = make_benchmark(samples=96, epochs_per_block=1, width=2, batch=32)\n"
    text += "DOOMED = make_benchmark(samples=96, epochs_per_block=1, width=2, batch=32, learning_rate=1e30)\n"
    (tmp_path / "small.py").write_text(text)
    return f"{tmp_path / 'small.py'}:"


@pytest.mark.slow
def test_cells_are_counted_by_the_minute(small: str) -> None:
    (found,) = packing.packed_times([1], CPU, f"{small}SMALL")
    assert (found.at_once, found.cells) == (1, packing.MIN_CELLS)
    assert found.a_minute == 60 * 4 / found.seconds
    assert found.cell.low <= found.cell.median <= found.cell.high
    assert 4 * found.cell.low <= found.seconds


def test_a_cell_is_as_in_the_benchmark_it_stands_for() -> None:
    noise, real = find(packing.NOISE), find("emnist-da")
    ours, theirs = noise.protocols["offline"], real.protocols["offline"]
    for name in ("batch_size", "score_every", "autocast"):
        assert getattr(ours, name) == getattr(theirs, name)
    assert len(noise.settings["offline"]) == max(packing.AT_ONCE)
    (setting,) = set(map(repr, noise.settings["offline"].values()))
    assert "bufr" in setting
    assert "'epochs_per_block': 8" in setting
    row = packing.PackedTime(1, 4, 8.0, Timing(2.0, 1.5, 2.5))
    shown = packing.table([row])
    assert shown.rows[0] == ("1", "30.0", "1.00", "2.00 (1.50 to 2.50)")
    assert "8 epochs a block" in shown.notes[0]
    assert "bfloat16, verified after each epoch, scored after every 5" in shown.notes[0]


@pytest.mark.slow
def test_cells_that_fail_give_no_figure(small: str) -> None:
    with pytest.raises(ShiftmendError, match=r"cell-0.*seed 1 failed"):
        list(packing.packed_times([1], CPU, f"{small}DOOMED"))


@pytest.mark.gpu
@gpu
def test_cells_are_packed_in_lanes(small: str) -> None:
    found = list(packing.packed_times([1, 2], torch.device("cuda", 0), f"{small}SMALL"))
    assert [row.at_once for row in found] == [1, 2]
    assert packing.table(found).rows[0][2] == "1.00"


@pytest.mark.gpu
@gpu
def test_runs_are_captured_as_often_as_they_are_divided_by() -> None:
    device = torch.device("cuda", 0)
    total = torch.zeros(1, device=device)
    replay = timing.captured(lambda: total.add_(1), device, inner=5)
    before = float(total)
    replay()
    assert float(total) == before + 5


def test_a_cpu_says_why_no_cells_are_packed() -> None:
    assert list(packing.measure(CPU, 1)) == []
    assert "GPU only" in packing.table([]).notes[0]


@dataclass(frozen=True)
class Row:
    number: int

    def facts(self) -> dict[str, Any]:
        return {"number": self.number}


def test_each_row_is_written_and_each_table_shown_as_soon_as_it_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, events = tmp_path / "folder" / "speed.json", []

    def measure(device: torch.device, repeats: int) -> Iterator[Row]:
        for number in range(2):
            rows = json.loads(out.read_text()).get("growth", [])
            events.append(("measured", repeats, len(rows)))
            yield Row(number)

    fake = speed._Measured(measure, lambda rows: Table(("a",), [(str(len(rows)),)]))
    monkeypatch.setattr(speed, "TABLES", {"steps": fake, "growth": fake})
    facts = speed.report("cpu", ["growth"], repeats=4, show=lambda table: events.append(table.rows), out=out)
    assert events == [(), ("measured", 4, 0), ("measured", 4, 1), [("2",)]]
    assert json.loads(out.read_text()) == facts
    assert facts["growth"] == [{"number": 0}, {"number": 1}]
    assert facts["environment"]["threads"] == torch.get_num_threads()
    assert facts["environment"]["processor"]
    assert "steps" not in facts


def test_wrong_wishes_are_refused_before_anything_is_measured(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"'step'.*did you mean steps"):
        speed.report("cpu", ["step"])
    with pytest.raises(DataError, match="no table is named"):
        speed.report("cpu", [])
    with pytest.raises(DataError, match=r"repeats.*got 0"):
        speed.report("cpu", ["packed"], repeats=0)
    with pytest.raises(DataError, match="cannot be written"):
        speed.report("cpu", ["packed"], out=tmp_path)
    assert speed.choose(["growth", "steps"]) == ["steps", "growth"]
    tables = ["steps", "precision", "compiled", "histogram", "packed", "growth", "set_up", "large"]
    assert speed.choose(None) == tables


@pytest.mark.slow
def test_the_script_needs_no_more_than_torch_and_rich(tmp_path: Path) -> None:
    out = tmp_path / "speed.json"
    program = (
        "import sys, runpy\n"
        "for name in ('typer', 'pydantic', 'PIL', 'matplotlib', 'sklearn', 'scipy'): sys.modules[name] = None\n"
        f"sys.argv = ['speed.py', '--device', 'cpu', '--only', 'packed', '--out', {str(out)!r}]\n"
        f"runpy.run_path({str(ROOT / 'benchmarks' / 'speed')!r}, run_name='__main__')\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "medians of 3" in done.stdout
    assert "GPU only" in done.stdout
    assert json.loads(out.read_text())["packed"] == []


@pytest.mark.slow
def test_set_up_is_all_of_an_adaptation_but_training() -> None:
    task = setting_up.Task("tiny", "digit-cnn", 10, (3, 28, 28), 40, method="fr", options={"epochs": 1})
    cold, warm = setting_up.measure_task(task, CPU, 1)
    assert (cold.cold, warm.cold) == (True, False)
    for found in (cold, warm):
        assert found.captures == 0
        assert 0 < found.before + found.after == found.set_up < found.total
        assert found.share == found.set_up / found.total
    assert not cold.parts
    assert set(warm.parts) == set(setting_up.PARTS)
    assert all(seconds > 0 for seconds in warm.parts.values()), "each part is a function that is called"
    facts = json.loads(json.dumps(warm.facts()))
    assert facts["share"] == warm.share
    shown = setting_up.table([cold, warm])
    assert [line[-1] for line in shown.rows] == [f"{100 * one.share:.0f} %" for one in (cold, warm)]
    assert ("missed" in shown.notes[-1]) == (warm.share > 0.2)


@pytest.mark.slow
def test_steps_of_a_large_network_stand_beside_the_supervised_one(monkeypatch: pytest.MonkeyPatch) -> None:
    work = steps.Workload("small", "resnet18", 4, (3, 32, 32), 2, 4)
    monkeypatch.setattr(large_network, "workload", lambda device: work)
    found = [*large_network.measure(CPU, 1)]
    assert [(row.precision, row.trained) for row in found] == [
        (kind, trained) for kind in ("bfloat16", "float32") for trained in ("supervised", "all blocks", "first block")
    ]
    for floor, *others in (found[:3], found[3:]):
        assert floor.ratio is None
        assert floor.images == 2 / floor.time.median
        assert all(other.ratio == other.time.median / floor.time.median for other in others)
    assert json.loads(json.dumps(found[1].facts()))["images"] == found[1].images
    failed = replace(found[0], time=None)
    fitted = large_network.FittedBatch(work, 24, 64, 3.0, 2**30)
    shown = large_network.table([failed, *found[1:], fitted])
    assert shown.rows[0][2] == "failed"
    assert "24 GiB: adapt chose batches of 64" in shown.notes[0]


@gpu
@pytest.mark.gpu
def test_batches_that_fit_are_found_on_a_gpu() -> None:
    work = steps.Workload("small", "resnet18", 4, (3, 224, 224), 256, 512)
    found = large_network.fitted_batch(work, torch.device("cuda", 0), 4)
    assert found.batch_size is not None
    assert found.batch_size < 256
    assert found.peak_memory < 4 * 2**30
