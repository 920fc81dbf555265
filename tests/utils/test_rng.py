"""Random numbers of one run."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import Tensor, nn

import shiftmend
from shiftmend.accelerate.cuda_graphs import CapturedEpoch, capture_epoch
from shiftmend.profiles import fingerprints
from shiftmend.utils.gpu_sharing import share_gpu
from shiftmend.utils.rng import DeviceGenerator, isolate_rng, reseed

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
PLACES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, gpu])]
STEPS, UNITS = 12, 256


def place_of(name: str) -> torch.device:
    return torch.device(name, 0) if name == "cuda" else torch.device(name)


def dropped(device: torch.device) -> Tensor:
    return nn.functional.dropout(torch.ones(UNITS, device=device), 0.5, training=True)


@pytest.mark.parametrize("name", PLACES)
def test_dropout_follows_the_seed_and_the_global_generators_stay_as_they_are(name: str) -> None:
    device = place_of(name)
    found = []
    for seed, around in ((3, 0), (3, 1), (4, 0)):
        torch.manual_seed(around)
        expected = dropped(device)
        torch.manual_seed(around)
        generator = DeviceGenerator(device)
        with generator.as_default():
            generator.seed(seed)
            found.append(dropped(device))
        assert torch.equal(dropped(device), expected)
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])


@pytest.mark.parametrize("name", PLACES)
def test_an_error_inside_puts_the_global_generator_back(name: str) -> None:
    device = place_of(name)
    torch.manual_seed(0)
    expected = dropped(device)
    torch.manual_seed(0)
    generator = DeviceGenerator(device)

    def fails() -> None:
        with generator.as_default():
            generator.seed(1)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()
    assert torch.equal(dropped(device), expected)


class Noisy(nn.Module):
    """Dropout that is on in eval mode, too."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(x, 0.2, training=True)


@pytest.mark.slow
@pytest.mark.parametrize("where", ["model", "preprocess"])
@pytest.mark.parametrize("name", PLACES)
def test_what_is_drawn_in_eval_mode_follows_the_seed_and_not_the_global_generators(name: str, where: str) -> None:
    device = place_of(name)
    torch.manual_seed(0)
    noise, preprocess = (Noisy(), None) if where == "model" else (nn.Identity(), Noisy())
    model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), noise, nn.Linear(16, 4)).to(device)
    home, away = torch.randn(300, 6), 2 * torch.randn(300, 6) + 1
    found = []
    for around in (0, 1):
        torch.manual_seed(around)
        expected = dropped(device)
        torch.manual_seed(around)
        profile = shiftmend.profile(model, home, preprocess=preprocess)
        again = shiftmend.profile(model, home, preprocess=preprocess, keep_bytes=0)
        verified = shiftmend.verify(model, away, profile, preprocess=preprocess)
        adapted = [
            shiftmend.adapt(model, away, profile, method, epochs=3, seed=5, preprocess=preprocess)
            for method in ("fr", "shot")
        ]
        assert torch.equal(dropped(device), expected)
        weights = [fingerprints.weights(one.model) for one in adapted]
        found.append((profile.to_bytes(), again.to_bytes(), verified, weights, [one.after for one in adapted]))
    assert found[0] == found[1]
    assert found[0][0] == found[0][1], "each of the three passes has to draw the same"


def test_a_look_inside_another_leaves_the_numbers_of_the_outer_one_alone() -> None:
    device = torch.device("cpu")
    found = []
    for inside in (False, True):
        with isolate_rng(device, lambda: dropped(device)):
            reseed(3)
            if inside:
                with isolate_rng(device, lambda: dropped(device)):
                    dropped(device)
            first = dropped(device)
            reseed(4)
            found.append(torch.stack([first, dropped(device)]))
    assert torch.equal(*found)


def test_threads_that_take_turns_leave_the_global_generators_alone() -> None:
    device = torch.device("cpu")
    expected = [dropped(device), dropped(device)]
    torch.manual_seed(0)
    with share_gpu(threading.Lock()), isolate_rng(device, lambda: dropped(device)):
        reseed(3)
        found = [dropped(device)]
    assert torch.equal(torch.stack([*found, dropped(device)]), torch.stack(expected))


@pytest.mark.parametrize("name", PLACES)
def test_seeds_of_any_size_are_taken(name: str) -> None:
    generator = DeviceGenerator(place_of(name))
    with generator.as_default():
        for seed in (0, (1 << 63) + 5, 10**30):
            generator.seed(seed)


class Masks:
    """Steps that write down what dropout did, captured with a generator of their own."""

    def __init__(self, device: torch.device) -> None:
        self.generator, self.device = DeviceGenerator(device), device
        self.model = nn.Linear(4, 2).to(device)
        self.optimiser = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)
        self.seen = torch.zeros(STEPS, UNITS, device=device)
        self.at = torch.zeros(1, dtype=torch.int64, device=device)
        with self.generator.as_default():
            self.captured = capture_epoch(self._once, self.model, self.optimiser, device, 2 * STEPS, 2)

    def _once(self, index: Tensor) -> dict[str, Tensor]:
        kept = dropped(self.device)
        self.seen.index_copy_(0, self.at, kept[None])
        self.at.add_(1).remainder_(STEPS)
        loss = self.model(index.float().view(-1, 1).expand(-1, 4)).square().mean() * kept.mean()
        self.optimiser.zero_grad(set_to_none=True)
        loss.backward()
        self.optimiser.step()
        return {"loss": loss.detach()}

    def run(self, seed: int) -> Tensor:
        assert isinstance(self.captured, CapturedEpoch)
        self.at.zero_()
        self.generator.seed(seed)
        self.captured.run(torch.arange(2 * STEPS, device=self.device))
        torch.cuda.current_stream().synchronize()
        return self.seen.clone()


@pytest.mark.gpu
@gpu
def test_captured_steps_draw_from_their_own_generator_whatever_the_global_generator_does() -> None:
    masks = Masks(torch.device("cuda", 0))
    before = torch.cuda.get_rng_state()
    first = masks.run(5)
    assert torch.equal(torch.cuda.get_rng_state(), before)
    assert len(torch.unique(first, dim=0)) == STEPS, "dropout drew the same in several steps"
    torch.manual_seed(9)
    dropped(masks.device)
    assert torch.equal(masks.run(5), first)
    assert not torch.equal(masks.run(6), first)


@pytest.mark.gpu
@gpu
def test_generators_of_several_threads_do_not_mix() -> None:
    several = [Masks(torch.device("cuda", 0)) for _ in range(4)]
    alone = [masks.run(seed) for seed, masks in enumerate(several)]
    wrong: list[int] = []

    def again(seed: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(20):
                if not torch.equal(several[seed].run(seed), alone[seed]):
                    wrong.append(seed)

    torch.cuda.synchronize()
    threads = [threading.Thread(target=again, args=(seed,)) for seed in range(len(several))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_the_global_generator_of_mps_is_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    states = [torch.tensor([3])]
    monkeypatch.setattr(torch.mps, "get_rng_state", lambda: states[-1])
    monkeypatch.setattr(torch.mps, "set_rng_state", states.append)
    with DeviceGenerator(torch.device("mps")).as_default():
        states.append(torch.tensor([4]))
    assert [int(state) for state in states] == [3, 4, 3]
