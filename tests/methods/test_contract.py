from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from worlds import sensors

import shiftmend
from shiftmend.engine.method import Activations, Method, Network, Objective, Stage
from shiftmend.errors import AdaptationError
from shiftmend.methods import method
from shiftmend.profiles.profile import Profile


@dataclass(frozen=True, kw_only=True)
class Centred(Method):
    """What somebody may write: it pulls the mean of each feature to that of the source."""

    name: ClassVar[str] = "centred"
    needs_profile: ClassVar[bool] = True
    epochs: int = 2
    learning_rate: float = 0.01

    def taps(self, profile: Profile | None) -> tuple[str, ...]:
        return ("features",)

    def stages(self, network: Network, profile: Profile | None) -> list[Stage]:
        return [Stage("all blocks", self.epochs, self.learning_rate, network.below_features)]

    def objective(self, profile: Profile | None, device: torch.device) -> Objective:
        assert profile is not None
        home = profile.gaussian.mean.to(device)

        def losses(activations: Activations) -> dict[str, Tensor]:
            return {"features": (activations["features"].mean(0) - home).pow(2).mean()}

        return losses


def changed(**members: Any) -> Method:
    made: Method = type("Changed", (Centred,), members)()
    return made


def with_loss(loss: Any) -> Method:
    return changed(objective=lambda self, profile, device: loss)


def with_stage(*arguments: Any) -> Method:
    return changed(stages=lambda self, network, profile: [Stage("some", *arguments)])


@pytest.mark.slow
def test_a_method_by_its_class_takes_options_and_several_rates() -> None:
    world = sensors()
    result = shiftmend.adapt(
        world.model, world.target, world.profile(), Centred, epochs=3, learning_rate=[0.001, 0.01], progress=False
    )
    assert result.manifest["method"]["name"] == "centred"
    assert [row["learning_rate"] for row in result.manifest["learning_rates_tried"]] == [0.001, 0.01]
    losses = [row.losses["features"] for row in result.history[1:]]
    assert len(losses) == 3
    assert losses[-1] < losses[0]
    online = shiftmend.stream(world.model, world.profile(), Centred, learning_rate=0.02)
    online.step(world.target[:50])
    assert set(online.losses) == {"features"}


def test_what_is_no_method_is_one_sentence() -> None:
    with pytest.raises(AdaptationError, match=r"method.*class int"):
        method(int)  # type: ignore[arg-type]
    with pytest.raises(AdaptationError, match=r"epochs, learning_rate.*'rate'"):
        method(Centred, rate=1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        (with_loss(None), r"objective\(\).*None"),
        (with_loss(lambda seen: seen["features"].mean()), r"by name.*Tensor"),
        (with_loss(lambda seen: {}), r"by name.*nothing"),
        (with_loss(lambda seen: {"x": 1.0}), r"'x'.*number, got 1\.0"),
        (with_loss(lambda seen: {"x": seen["features"].mean()[None]}), r"number, got float32 \[1\]"),
        (with_loss(lambda seen: {"x": seen["features"].argmax()}), r"number, got int64 \[\]"),
        (with_loss(lambda seen: {"x": seen["features"].mean().detach()}), "with a gradient"),
        (
            with_loss(lambda seen: {"x": seen["logits"].mean()}),
            "got 'logits'",
        ),
        (with_loss(lambda seen: {"x": seen["targets"].mean()}), "Set by_sample"),
        (with_stage(1, 0.1, ("nowhere.weight",)), r"parameters.*'nowhere\.weight'"),
        (with_stage(1, 0.1, "0.weight"), r"by name.*'0\.weight'"),
        (with_stage(1, 0.0, ("0.weight",)), r"learning rate.*'some'.*positive"),
        (
            with_stage(1, 0.1, ("0.weight",), -1),
            r"weight decay.*'some'.*0",
        ),
        (with_stage(0, 0.1, ("0.weight",)), r"epochs.*'some'.*whole"),
        (changed(stages=lambda self, network, profile: iter(())), r"stages\(\).*list"),
        (changed(taps=lambda self, profile: "features"), r"taps\(\).*'features'"),
        (changed(hyperparameters=lambda self: {"home": torch.zeros(2)}), r"centred.*manifest"),
        (changed(name=None), "Changed to have a name"),
    ],
)
def test_what_a_method_of_ones_own_gets_wrong_is_one_sentence(wrong: Method, sentence: str) -> None:
    world = sensors()
    with pytest.raises(AdaptationError, match=sentence):
        shiftmend.adapt(world.model, world.target, world.profile(), wrong, progress=False)
    with pytest.raises(AdaptationError, match=sentence):
        shiftmend.stream(world.model, world.profile(), wrong).step(world.target[:50])


def test_what_only_the_whole_data_can_give_is_refused_on_a_stream() -> None:
    world = sensors()
    staged = changed(stages=lambda self, network, profile: [Stage("some", 1, 0.1, network.below_features)] * 2)
    with pytest.raises(AdaptationError, match=r"one stage.*centred with 2"):
        shiftmend.stream(world.model, world.profile(), staged).step(world.target[:50])
    with pytest.raises(AdaptationError, match=r"stream.*centred"):
        shiftmend.stream(world.model, world.profile(), changed(by_sample=True))


def test_targets_that_are_no_tensor() -> None:
    world = sensors()
    wrong = changed(by_sample=True, targets=lambda self, network, look: None)
    with pytest.raises(AdaptationError, match=r"targets\(\).*tensor, got None"):
        shiftmend.adapt(world.model, world.target, world.profile(), wrong, progress=False)


def test_batches_smaller_than_the_method_needs(caplog: pytest.LogCaptureFixture) -> None:
    world = sensors()
    hungry = changed(smallest_batch=lambda self, profile: 100)
    with pytest.raises(AdaptationError, match=r"100.*centred.*50"):
        shiftmend.adapt(world.model, world.target, world.profile(), hungry, batch_size=50, progress=False)
    online = shiftmend.stream(world.model, world.profile(), hungry)
    online.step(world.target[:50])
    assert online.losses == {}
    assert "50 samples are too few to learn from" in caplog.text
    online.step(world.target[:100])
    assert set(online.losses) == {"features"}
