"""`profile` and `adapt` on two processes against one.

Two processes are started once and work through everything in `SAME` and `APART` below; what they leave behind is
compared with what this process finds by itself, on the whole batches. The model and the data are float64, so that
nothing but the order of sums differs. The last tests start real `torchrun` commands.
"""

from __future__ import annotations

import contextlib
import copy
import datetime
import functools
import io
import json
import logging
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import safetensors.torch
import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import shiftmend
from shiftmend.adaptation.result import Adaptation
from shiftmend.distributed import collectives as distributed
from shiftmend.engine import checkpoint as checkpoints
from shiftmend.engine import trainer as loop
from shiftmend.engine.history import Epoch
from shiftmend.errors import AdaptationError
from shiftmend.inputs import feed as feeds
from shiftmend.profiles.profile import Profile
from shiftmend.stats.gaussians import FullGaussian
from shiftmend.utils.devices import resolve_device
from shiftmend.verification import signals as verification

Tensors = dict[str, Tensor]

pytestmark = pytest.mark.skipif(
    not (dist.is_available() and dist.is_gloo_available()), reason="this torch has no gloo to talk between processes"
)

HERE = Path(__file__).parents[1] / "helpers"
WORLD = 2
TIMEOUT = datetime.timedelta(seconds=60)
BATCH = 15
"""Eight samples for the first process, seven for the second."""
SAMPLES = 4 * BATCH + 1
"""The last sample alone cannot be shared."""


def network(tracking: bool = True, channels: int = 2) -> nn.Module:
    generator = torch.Generator().manual_seed(3)
    model = nn.Sequential(
        nn.Conv2d(channels, 4, 3),
        nn.BatchNorm2d(4, track_running_stats=tracking),
        nn.ReLU(inplace=True),
        nn.Flatten(),
        nn.Linear(16, 6),
        nn.BatchNorm1d(6),
        nn.Linear(6, 3),
    )
    for parameter in model.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator) / 2
    model.double()
    settled = Path(os.environ.get("SHIFTMEND_TEST_FOLDER", "")) / f"settled-{tracking}-{channels}"
    if settled.is_file():  # The same in one process as in two, to the last bit.
        safetensors.torch.load_model(model, settled)
        return model.eval()
    with torch.no_grad():
        for _ in range(40):  # BatchNorm settles
            model(source(channels))
    return model.eval()


def source(channels: int = 2) -> Tensor:
    return torch.randn(SAMPLES, channels, 4, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def target() -> Tensor:
    return source().flip(0) * torch.tensor([1.5, 0.7]).view(2, 1, 1) + 0.3


def labelled() -> tuple[Tensor, Tensor]:
    return target(), torch.arange(SAMPLES) % 3


def profiled(**options: Any) -> Profile:
    given = {"batch_size": BATCH, "progress": False, "taps": {"early": "0"}, "device": device()} | options
    model, data = given.pop("model", network()), given.pop("data", source())
    return shiftmend.profile(model, data, **given)


def adapted(method: str, /, data: Any = None, **options: Any) -> Adaptation:
    given = {"batch_size": BATCH, "seed": 5, "progress": False, "device": device()} | options
    if method in ("fr", "bufr"):
        given = {"learning_rate": 0.001, "align": ("features", "logits", "early")} | given
    model, profile = given.pop("model", network()), given.pop("profile", home())
    return shiftmend.adapt(model, target() if data is None else data, profile, method, **given)


def device() -> str:
    return os.environ["SHIFTMEND_TEST_DEVICE"]


@functools.cache
def home(preset: str = "reference") -> Profile:
    """Read from a file, so that it is the same in one process as in two, to the last bit."""
    return Profile.load(Path(os.environ["SHIFTMEND_TEST_FOLDER"]) / preset)


def of_profile(profile: Profile) -> Tensors:
    found = {"mean": profile.mean, "deviation": profile.deviation, "moments": profile.gaussian.mean}
    full = isinstance(profile.gaussian, FullGaussian)
    found["spread"] = profile.gaussian.covariance if full else profile.gaussian.variance
    histograms = profile.taps | {name: part.histogram for name, part in profile.slices.items()}
    for name, histogram in histograms.items():
        found |= {f"{name}.counts": histogram.counts, f"{name}.low": histogram.low, f"{name}.high": histogram.high}
        found[f"{name}.samples"] = torch.tensor(histogram.samples)
    found["inputs seen"] = torch.tensor(profile.inputs_seen)
    found["inputs"] = torch.tensor([profile.inputs.low, profile.inputs.high, *profile.inputs.mean])
    return found


def of_adaptation(result: Adaptation) -> Tensors:
    found = {f"state.{name}": value for name, value in result.model.state_dict().items()}
    for row in result.history:
        numbers = (
            row.learning_rate,
            *row.losses.values(),
            *row.signals.values(),
        )
        found[f"epoch {row.epoch}"] = torch.tensor([np.nan if number is None else number for number in numbers])
    for name, judged in (("before", result.before), ("after", result.after)):
        if judged is not None:
            found[name] = torch.tensor([judged.divergence, judged.floor, judged.samples])
    found["selected"] = torch.tensor(result.selected)
    return found


def streamed(**options: Any) -> DataLoader[Any]:
    return DataLoader(TensorDataset(target()), batch_size=BATCH, shuffle=True, **options)


SAME: dict[str, Callable[[], Tensors]] = {
    "profile kept": lambda: of_profile(profiled()),
    "profile in three passes": lambda: of_profile(profiled(keep_bytes=0, preset="paper")),
    "profile kept by none if not by all": lambda: of_profile(
        profiled(keep_bytes=room_for_the_second(), model=network(tracking=False))
    ),
    "profile with covariance and slices": lambda: of_profile(profiled(gaussian="full", preset="sliced")),
    "profile like another": lambda: of_profile(profiled(data=target(), like=home(), taps=None)),
    "profile of a stream": lambda: profile_of_a_stream(),
    "profile of batch statistics": lambda: of_profile(profiled(model=network(tracking=False))),
    "fr": lambda: of_adaptation(adapted("fr", epochs=4)),
    "fr with slices": lambda: of_adaptation(adapted("fr", profile=home("sliced"), epochs=2)),
    "fr streamed": lambda: of_adaptation(adapted("fr", streamed(), epochs=3, batch_size=None, resident=False)),
    "fr verified on a part": lambda: verified_on_a_part(31),
    "fr selected": lambda: of_adaptation(adapted("fr", epochs=3, keep="selected", learning_rate=[0.005, 0.001])),
    "fr of batch statistics": lambda: of_adaptation(adapted("fr", model=network(tracking=False), epochs=2)),
    "bufr": lambda: of_adaptation(adapted("bufr", epochs_per_block=2)),
    "adabn": lambda: of_adaptation(adapted("adabn")),
    "match-moments": lambda: of_adaptation(adapted("match-moments")),
    "adabn without a profile": lambda: of_adaptation(adapted("adabn", profile=None)),
    "source-only": lambda: of_adaptation(adapted("source-only")),
    "positions of maps": lambda: of_maps(),
}
"""What one process and two must agree on."""


def of_maps() -> Tensors:
    """Of which verification counts some positions, whichever process an input falls to."""
    generator = torch.Generator().manual_seed(4)
    model = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.Tanh(), nn.Conv2d(4, 4, 1), nn.Tanh(), nn.Conv2d(4, 3, 1))
    for parameter in model.double().parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    with mock.patch.object(verification, "POSITIONS", 5):
        return of_adaptation(adapted("source-only", model=model, profile=profiled(model=model, taps=None)))


def profile_of_a_stream() -> Tensors:
    """As where the data is too large to be kept."""
    with mock.patch.object(feeds, "max_resident_bytes", return_value=0):
        return of_profile(profiled(data=DataLoader(TensorDataset(source()), BATCH), batch_size=None, keep_bytes=0))


def verified_on_a_part(samples: int) -> Tensors:
    with mock.patch.object(loop, "VERIFIED_PER_EPOCH", samples):
        return of_adaptation(adapted("fr", epochs=2))


def room_for_the_second() -> int:
    """Bytes that hold the activations of the smaller share of the data, and not those of the larger one."""
    units = 8 * (6 + 3 + 4 * 4)
    return units * (SAMPLES // 2)


def refusal(call: Callable[[], Any]) -> str:
    with pytest.raises(AdaptationError) as error:
        call()
    return str(error.value)


def refusals() -> Any:
    rank = distributed.rank()
    other = network()
    other[0].weight.data += rank
    return {
        "data": refusal(lambda: adapted("fr", target() + rank, epochs=1)),
        "order": refusal(lambda: adapted("fr", target().roll(rank, 0), epochs=1)),
        "model": refusal(lambda: adapted("fr", model=other, epochs=1)),
        "seed": refusal(lambda: adapted("fr", epochs=1, seed=rank)),
        "stream": refusal(lambda: adapted("adabn", streamed_list()[rank:], batch_size=None, resident=False)),
        "method": refusal(lambda: adapted("tent", epochs=1)),
        "batch": refusal(lambda: adapted("fr", epochs=1, batch_size=1)),
        "source data": refusal(lambda: profiled(data=source() + rank)),
        "source model": refusal(lambda: profiled(model=other)),
        "settings": refusal(lambda: profiled(preset=("paper", "reference")[rank])),
        "preprocessing": refusal(lambda: profiled(preprocess=lambda inputs: inputs * (rank + 1))),
    }


def streamed_list() -> list[Tensor]:
    return list(target()[: 4 * BATCH].split(BATCH))


def resumed(folder: Path) -> Any:
    """Stopped by force in the third epoch, then resumed; and one that a single process has begun."""

    def stop(model: nn.Module, row: Epoch) -> None:
        if row.epoch == 3:
            raise InterruptedError

    checkpoint = folder / "two.ckpt"
    with pytest.raises(InterruptedError):
        adapted("bufr", epochs_per_block=2, checkpoint=checkpoint, on_epoch=stop)
    written = checkpoint.stat().st_mtime_ns
    with mock.patch.object(checkpoints, "save", wraps=checkpoints.save) as save:
        result = adapted("bufr", epochs_per_block=2, checkpoint=checkpoint)
        begun = adapted("bufr", epochs_per_block=2, checkpoint=folder / "one.ckpt")
    with checkpoints.lock(folder / "busy.ckpt") if distributed.rank() == 0 else contextlib.nullcontext():
        busy = refusal(lambda: adapted("adabn", checkpoint=folder / "busy.ckpt"))
    missing = refusal(lambda: adapted("adabn", checkpoint=folder / f"adabn-{distributed.rank()}.ckpt"))
    return {
        "two": digest_of(result),
        "one": digest_of(begun),
        "writes": save.call_count,
        "rows": [row.epoch for row in result.history],
        "changed": checkpoint.stat().st_mtime_ns != written,
        "missing": missing,
        "busy": busy,
    }


def digest_of(result: Adaptation) -> list[float]:
    """The weights, in an order that JSON can carry."""
    return torch.cat([v.double().flatten() for v in result.model.state_dict().values()]).tolist()


def callbacks() -> Any:
    """The first process evaluates and verifies after each epoch, the other one does nothing meanwhile."""
    seen: list[list[float]] = []

    def look(model: nn.Module, row: Epoch) -> None:
        assert not distributed.is_distributed()
        if distributed.rank() == 0:
            scores = shiftmend.evaluate(model, labelled(), batch_size=BATCH)
            found = shiftmend.verify(model, target(), home(), batch_size=BATCH)
            seen.append([scores.accuracy, scores.samples, found.divergence, row.verification])

    adapted("fr", epochs=2, on_epoch=look)
    return seen


def endings() -> Any:
    """What ends a run early ends it on both, and what is said is said once."""
    messages: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.append(record.getMessage())

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    handler = Handler(level=logging.WARNING)
    logging.getLogger("shiftmend").addHandler(handler)
    try:
        with pytest.raises(shiftmend.DivergedError) as error:
            adapted("fr", epochs=3, learning_rate=1e300)
        with pytest.raises(KeyboardInterrupt):
            adapted("fr", epochs=1, on_epoch=stop)
    finally:
        logging.getLogger("shiftmend").removeHandler(handler)
    result = adapted("adabn")
    return {
        "diverged": error.value.adaptation.manifest["status"],
        "state": digest_of(error.value.adaptation),
        "said": messages,
        "facts": [distributed.world_size(), result.manifest["environment"]["world_size"], distributed.is_distributed()],
        "batch size": result.manifest["batch_size"],
    }


def profile_command(folder: Path) -> Any:
    """The processes are in a group already; what is left is who writes and prints."""
    from shiftmend.cli import main

    out = folder / f"of-{distributed.rank()}.safetensors"
    data = folder / f"site-{distributed.rank()}"
    with contextlib.redirect_stdout(io.StringIO()) as printed, pytest.raises(SystemExit) as end:
        main(["profile", *site(data), "-o", str(out)])
    return {"printed": printed.getvalue(), "code": end.value.code, "written": out.exists()}


def site(folder: Path) -> list[str]:
    """A model and data in files, and what the command line wants to know about them."""
    folder.mkdir(exist_ok=True)
    (folder / "factory.py").write_text(
        f"import sys\nsys.path.append({str(Path(__file__).parent)!r})\n"
        "from test_torchrun import network\nmake = lambda: network(channels=1).float()\n"
    )
    images = np.random.default_rng(0).integers(0, 256, (SAMPLES, 4, 4), dtype=np.uint8)
    np.savez(folder / "data.npz", images=images, labels=np.arange(SAMPLES) % 3)
    files = [f"{folder}/factory.py:make", "-d", f"{folder}/data.npz"]
    return [*files, "--batch-size", str(BATCH), "--device", "cpu", "--json"]


APART: dict[str, Callable[[Path], Any]] = {
    "refusals": lambda folder: refusals(),
    "resumed": resumed,
    "callbacks": lambda folder: callbacks(),
    "endings": lambda folder: endings(),
    "profile command": profile_command,
}
"""What each of two processes reports by itself."""


def work(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=WORLD, timeout=TIMEOUT
    )
    try:
        found = {f"{name}/{part}": value for name, check in SAME.items() for part, value in check().items()}
        packed = {name: value.clone(memory_format=torch.contiguous_format) for name, value in found.items()}
        safetensors.torch.save_file(packed, f"{folder}/{rank}.safetensors")
        reports = {name: report(Path(folder)) for name, report in APART.items()}
        Path(f"{folder}/{rank}.json").write_text(json.dumps(reports))
        dist.barrier()  # see `torchrun_process_group`
    finally:
        dist.destroy_process_group()


without_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, without_gpu])])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where two processes have left what they found; a run that one process has begun was there before.

    On CUDA both of them work on one GPU, which gloo can do and nccl cannot.
    """
    place = tmp_path_factory.mktemp("processes")
    os.environ |= {"SHIFTMEND_TEST_FOLDER": str(place), "SHIFTMEND_TEST_DEVICE": request.param}
    home.cache_clear()
    safetensors.torch.save_model(network(), str(place / "settled-True-2"))
    for preset in ("reference", "sliced"):
        profiled(preset=preset).save(place / preset)

    def stop(model: nn.Module, row: Epoch) -> None:
        if row.epoch == 2:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        adapted("bufr", epochs_per_block=2, checkpoint=place / "one.ckpt", on_epoch=stop)
    with pytest.raises(InterruptedError):
        adapted("adabn", checkpoint=place / "adabn-0.ckpt", on_epoch=stop)
    torch.multiprocessing.spawn(work, (str(place),), WORLD)
    yield place
    del os.environ["SHIFTMEND_TEST_FOLDER"], os.environ["SHIFTMEND_TEST_DEVICE"]


@pytest.fixture
def reports(folder: Path) -> list[Any]:
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(WORLD)]


@pytest.mark.slow
@pytest.mark.parametrize("name", SAME)
def test_two_processes_find_what_one_finds(folder: Path, name: str) -> None:
    expected = SAME[name]()
    both = [safetensors.torch.load_file(folder / f"{rank}.safetensors") for rank in range(WORLD)]
    first, second = (
        {key.removeprefix(f"{name}/"): value for key, value in own.items() if key.startswith(f"{name}/")}
        for own in both
    )
    assert first.keys() == expected.keys()
    assert len(first) > 8
    for part, value in expected.items():
        torch.testing.assert_close(first[part], second[part], rtol=0, atol=0, equal_nan=True)
        # weights are float64 throughout; what is stored in a profile, and what slices say, is rounded to float32
        exact = part.startswith("state.") and name != "fr with slices"
        tolerance = {"rtol": 1e-9, "atol": 1e-11} if exact else {"rtol": 5e-6, "atol": 5e-6}
        torch.testing.assert_close(
            first[part], value, equal_nan=True, msg=lambda text, part=part: f"{part}: {text}", **tolerance
        )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fr", "fr with slices", "fr streamed", "fr selected", "bufr", "adabn"])
def test_what_is_compared_has_moved(folder: Path, name: str) -> None:
    """So that agreement means something."""
    both = safetensors.torch.load_file(folder / "0.safetensors")
    before = network().state_dict()
    moved = [key for key, value in before.items() if not torch.equal(both[f"{name}/state.{key}"], value)]
    assert "1.running_mean" in moved
    assert ("0.weight" in moved) == (name != "adabn")
    assert "6.weight" not in moved


SENTENCES = {
    "data": "the same target data .* process 1",
    "order": "the same target data .* process 1",
    "model": "the same model .* process 1",
    "seed": r"the same run \(profile, method, options, or .*\) .* process 1",
    "stream": "the same target data .* process 1",
    "method": r"one process for tent.*got 2.* or one of source-only, .*, adabn, .*fr.*, bufr\.$",
    "batch": "got a batch size of one",
    "source data": "the same source data .* process 1",
    "source model": "the same model .* process 1",
    "settings": "the same way to profile .* process 1",
    "preprocessing": "the same way to profile .* process 1",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SENTENCES)
def test_what_does_not_fit_together_is_one_sentence_on_every_process(reports: list[Any], name: str) -> None:
    first, second = (report["refusals"][name] for report in reports)
    assert first == second
    assert re.search(SENTENCES[name], first)


@pytest.mark.slow
def test_a_run_of_two_processes_resumes_and_so_does_one_that_a_single_process_began(reports: list[Any]) -> None:
    expected = digest_of(adapted("bufr", epochs_per_block=2))
    for report in reports:
        found = report["resumed"]
        np.testing.assert_allclose(found["two"], expected, rtol=1e-9, atol=1e-11)
        np.testing.assert_allclose(found["one"], expected, rtol=1e-9, atol=1e-11)
        assert found["rows"] == [0, 1, 2, 3, 4]
        assert found["missing"].startswith("Expected the same checkpoint")
        assert "another run uses" in found["busy"]
    # both runs stood after an epoch that was saved: two, and one, of four
    assert [report["resumed"]["writes"] for report in reports] == [2 + 3, 0]
    assert reports[0]["resumed"]["changed"]


@pytest.mark.slow
def test_the_first_process_may_evaluate_by_itself_after_each_epoch(reports: list[Any]) -> None:
    first, second = (report["callbacks"] for report in reports)
    assert second == []
    assert len(first) == 3
    model = copy.deepcopy(network())
    scores = shiftmend.evaluate(model, labelled(), batch_size=BATCH)
    assert first[0][0] == pytest.approx(scores.accuracy)
    for _, samples, verified, in_history in first:
        assert samples == SAMPLES
        assert verified == pytest.approx(in_history, rel=1e-4)


@pytest.mark.slow
def test_what_ends_a_run_ends_it_everywhere_and_is_said_once(reports: list[Any]) -> None:
    for report in reports:
        assert report["endings"]["diverged"] == "diverged"
        assert report["endings"]["facts"] == [2, 2, False]
        assert report["endings"]["batch size"] == BATCH
        assert report["endings"]["state"] == digest_of(adapted("source-only"))  # the last good one
    assert len(reports[0]["endings"]["said"]) >= 1
    assert reports[1]["endings"]["said"] == []


@pytest.mark.slow
def test_the_first_process_alone_writes_and_prints(reports: list[Any]) -> None:
    first, second = (report["profile command"] for report in reports)
    assert json.loads(first["printed"])["samples"] == SAMPLES
    assert second["printed"] == ""
    assert (first["code"], second["code"]) == (0, 0)
    assert (first["written"], second["written"]) == (True, False)


@pytest.mark.slow
def test_processes_that_do_not_know_of_each_other(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    shiftmend.profile(network(), source(), progress=False)
    assert "WORLD_SIZE" not in caplog.text
    monkeypatch.setenv("WORLD_SIZE", "4")
    shiftmend.profile(network(), source(), progress=False)
    assert caplog.text.count("WORLD_SIZE is 4, but there is no process group") == 1
    shiftmend.adapt(network(), target(), method="source-only", progress=False)
    assert caplog.text.count("WORLD_SIZE is 4, but there is no process group") == 2


@pytest.mark.slow
def test_each_process_takes_its_own_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert resolve_device("auto") == torch.device("cuda:0")  # alone
    monkeypatch.setattr("shiftmend.utils.devices.world_size", lambda: 2)
    assert resolve_device("auto") == torch.device("cuda:1")
    assert resolve_device("auto", nn.Linear(1, 1, device="meta")) == torch.device("meta")
    monkeypatch.setenv("LOCAL_RANK", "2")  # more processes than GPUs
    assert resolve_device("auto") == torch.device("cuda:0")
    monkeypatch.delenv("LOCAL_RANK")  # started otherwise
    assert resolve_device("auto") == torch.device("cuda:0")


def torchrun(folder: Path, *command: object) -> str:
    """Start two processes as a user does; what they print."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    paths = os.pathsep.join([str(HERE), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [*launcher, *map(str, command)],
        cwd=folder,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": paths, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_the_script_on_the_page_of_several_gpus(tmp_path: Path) -> None:
    page = (HERE.parents[1] / "docs/several-gpus.md").read_text()
    (script,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    from worlds import sensors

    world = sensors()
    world.profile().save(tmp_path / "home.safetensors")
    # Trained anew, each process would round the model in its own way.
    torch.save((world.model, world.target), tmp_path / "world.pt")
    given = [
        "import torch",
        "import shiftmend",
        "model, target = torch.load('world.pt', weights_only=False)",
        "profile = 'home.safetensors'",
        "",
    ]
    (tmp_path / "script.py").write_text("\n".join(given) + script.replace('"bufr"', '"bufr", epochs_per_block=1'))
    torchrun(tmp_path, "script.py")
    manifest = json.loads((tmp_path / "mended/manifest.json").read_text())
    assert manifest["environment"]["world_size"] == 2
    alone = shiftmend.adapt(
        world.model, world.target, world.profile(), "bufr", epochs_per_block=1, batch_size=256, device="cpu"
    )
    written = safetensors.torch.load_file(tmp_path / "mended/model.safetensors")
    for name, value in alone.model.state_dict().items():
        torch.testing.assert_close(written[name], value, rtol=1e-3, atol=1e-4)
    assert manifest["batch_size"] == alone.manifest["batch_size"]


@pytest.mark.slow
def test_the_command_line_under_torchrun(tmp_path: Path) -> None:
    from shiftmend.cli import main

    given = site(tmp_path)
    with pytest.raises(SystemExit):
        main(["profile", *given, "-o", str(tmp_path / "p.safetensors")])
    script = Path(sys.executable).with_name("shiftmend")
    options = ["-p", "p.safetensors", "-m", "fr", "--option", "epochs=2", "-o", "mended"]
    printed = torchrun(tmp_path, "--no-python", script, "adapt", *given, *options)
    result = json.loads(printed)  # one of them: the other process keeps quiet
    assert result["manifest"]["environment"]["world_size"] == 2
    assert set(result["scores"]) == {"before", "after"}
    assert {path.name for path in (tmp_path / "mended").iterdir()} == {
        "model.safetensors",
        "history.json",
        "manifest.json",
    }
