"""Everything that a model goes through, on a device that can do as little as Apple's `mps`: see `away.py`."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import shiftmend
from shiftmend import report, shifts
from shiftmend.methods import METHODS
from shiftmend.utils import devices

AWAY = "away"
HELPERS = str(Path(__file__).parent / "helpers")
LABELS = torch.arange(60) % 4


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(24, 8),
        nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 4),
    ).eval()  # fmt: skip


def images(seed: int, count: int = 60) -> Tensor:
    return torch.randn(count, 1, 8, 8, generator=torch.Generator().manual_seed(seed))


def source(device: str = AWAY) -> shiftmend.Profile:
    return shiftmend.profile(network(), images(1), device=device, gaussian="full")


@functools.cache
def rehearsed() -> shiftmend.Profile:
    """A profile with histograms of each class."""
    home = images(3, 120), torch.arange(120) % 4
    battery = {"darker": lambda inputs: inputs / 2}
    return shiftmend.rehearse(
        network(), home, source(), battery=battery, candidates=["adabn"], quick=True, device=AWAY, progress=False
    )


def adapted(name: str, device: str = AWAY, **options: Any) -> shiftmend.Adaptation:
    if METHODS[name].frees_shares:
        return shiftmend.adapt(network(), images(2) / 2, rehearsed(), name, steps=3, device=device)
    options |= {"labels": LABELS} if METHODS[name].takes_labels else {}
    options |= {"epochs": 2} if hasattr(METHODS[name], "epochs") else {}
    options |= {"epochs_per_block": 1} if name == "bufr" else {}
    options |= {"shrinkage": 0.5} if name == "full-gauss" else {}
    return shiftmend.adapt(network(), images(2) / 2, source(device), name, batch_size=20, device=device, **options)


def refusals() -> None:
    there = torch.ones(2).to(AWAY)
    for wrong in (there.double, lambda: there.to("cpu", torch.float64), lambda: there.cpu().double().to(AWAY)):
        with pytest.raises(TypeError, match="float64"):
            wrong()
    with pytest.raises(RuntimeError, match="background"):
        torch.ones(2).to(AWAY, non_blocking=True)
    with pytest.raises(RuntimeError, match="two devices"):
        there + torch.ones(2)


def like_at_home() -> None:
    """The same numbers as on the CPU, but for rounding."""
    here, there = (adapted("bufr", device) for device in ("cpu", AWAY))
    for own, other in zip(here.model.state_dict().values(), there.model.state_dict().values(), strict=True):
        torch.testing.assert_close(own, other, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(here.history[-1].verification, there.history[-1].verification, rtol=1e-3, atol=1e-4)


def kept_there() -> None:
    """A model, data and a profile that lie there, without a word about the device."""
    model, profile = network().to(AWAY), source().to(AWAY)
    result = shiftmend.adapt(model, images(2).to(AWAY), profile, "fr", epochs=1)
    assert devices.device_of(result.model).type == AWAY
    with tempfile.TemporaryDirectory() as folder:
        result.save(folder)
        profile.merge(profile).save(Path(folder) / "profile")


def taken_up() -> None:
    with tempfile.TemporaryDirectory() as folder:
        once = adapted("fr", checkpoint=f"{folder}/run", keep="selected")
        again = adapted("fr", checkpoint=f"{folder}/run", keep="selected")
    assert [row.losses for row in again.history] == [row.losses for row in once.history]


def streamed() -> None:
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(images(2)), batch_size=20, shuffle=True)
    shiftmend.adapt(network(), loader, source(), "fr", epochs=1, device=AWAY, resident=False)
    stream = shiftmend.stream(network(), source(), "fr", device=AWAY)
    stream.step(images(2))
    assert stream.verification is not None


def judged() -> None:
    report.gather(network(), images(2), source(), adapted("fr"), labels=LABELS, device=AWAY)
    shiftmend.evaluate(network(), (images(2), LABELS), device=AWAY)
    model, quantities = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1)), np.random.default_rng(0).random(30)
    inputs = torch.randn(30, 3)
    shiftmend.evaluate(model, (inputs.double(), quantities), device=AWAY)
    report.gather(model, inputs, shiftmend.profile(model, inputs, device=AWAY), labels=quantities, device=AWAY)


def chosen() -> None:
    """A model on the CPU is adapted on another device by the default method, and comes back on the CPU."""
    result = shiftmend.adapt(network(), images(2) / 2, rehearsed(), device=AWAY)
    assert devices.device_of(result.model).type == "cpu"
    assert [one.failure for one in result.candidates] == [None] * len(result.candidates)
    few = shiftmend.verify(network(), images(2), rehearsed(), labelled=(images(2), LABELS), device=AWAY)
    assert few.estimate is not None
    assert shiftmend.shares(network(), images(2), rehearsed(), device=AWAY).samples == 60
    shiftmend.adapt(network().to(AWAY), images(2) / 2, source(), candidates=["match-moments", "adabn"])


def shifted() -> None:
    pictures = torch.randint(0, 256, (2, 3, 16, 16), dtype=torch.uint8)
    assert torch.equal(shifts.apply("cifar-c/fog", pictures.to(AWAY)).cpu(), shifts.apply("cifar-c/fog", pictures))


def layered() -> None:
    layer, values = shiftmend.StatsLayer(3).to(AWAY), torch.randn(20, 3).to(AWAY)
    for mode in ("range", "counts", "align"):
        layer.track(mode)(values)  # type: ignore[arg-type]
    assert float(layer.loss()) < 1e-3


def halved() -> None:
    adapted("fr", autocast=True)


WORK: dict[str, Callable[[], object]] = {
    work.__name__: work
    for work in (refusals, like_at_home, kept_there, taken_up, streamed, judged, chosen, shifted, layered, halved)
} | {name: functools.partial(adapted, name) for name in METHODS}


def main() -> None:
    import away

    registered = away.register()
    devices.WITHOUT_FLOAT64.add(AWAY)
    failed = {}
    for name, work in WORK.items():
        try:
            work()
        except BaseException as error:
            failed[name] = repr(error)[:200]
    print(json.dumps(failed))
    del registered


@pytest.mark.slow
@pytest.mark.skipif(
    not hasattr(torch.utils.backend_registration, "_setup_privateuseone_for_python_backend"),
    reason="this torch knows no devices made in Python",
)
def test_nothing_needs_float64_or_copies_in_the_background_on_a_device() -> None:
    done = subprocess.run(
        [sys.executable, __file__],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTHONPATH": HELPERS},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout) == {}


if __name__ == "__main__":
    main()
