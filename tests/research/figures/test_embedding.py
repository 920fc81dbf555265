from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import shiftmend
from shiftmend.errors import DataError, ProfileError
from shiftmend.inputs.feed import Feed
from shiftmend.research.figures import embedding

Pair = tuple[Tensor, Tensor]


def clusters(count: int, offset: float, seed: int) -> Pair:
    """Make three classes that are far apart in four dimensions."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % 3
    centres = 6 * torch.eye(4)[:3]
    return centres[labels] + 0.3 * torch.randn(count, 4, generator=generator) + offset, labels


class Identity(nn.Module):
    """A network with a diagonal layer; the largest feature is the class."""

    def __init__(self, outputs: int = 3) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 4), nn.Linear(4, outputs, bias=False)
        with torch.no_grad():
            self.body.weight.copy_(torch.eye(4))
            self.body.bias.zero_()
            self.head.weight.copy_(torch.eye(4)[:outputs])

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


@pytest.fixture
def setting() -> tuple[nn.Module, Pair, Pair, shiftmend.Profile]:
    model, source, target = Identity(), clusters(36, 0.0, 0), clusters(30, 0.5, 1)
    return model, source, target, shiftmend.profile(model, source[0], device="cpu", progress=False)


@pytest.mark.slow
def test_one_panel_a_model_with_its_accuracy(setting: tuple[nn.Module, Pair, Pair, shiftmend.Profile]) -> None:
    model, source, target, profile = setting
    wrong = Identity()
    with torch.no_grad():
        wrong.body.weight.copy_(torch.eye(4)[[1, 0, 2, 3]])  # two of three classes change places
    figure = embedding.draw_embedding(model, {"swapped": wrong}, source, target, profile, classes=[0, 2], device="cpu")
    assert [axis.get_title() for axis in figure.axes] == ["source-only (100 %)", "swapped (33 %)"]
    for axis in figure.axes:
        drawn = {part.get_label(): len(part.get_offsets()) for part in axis.collections}
        assert drawn == {"target 0": 10, "source 0": 12, "target 2": 10, "source 2": 12}
        dark = {part.get_label(): part.get_facecolor()[0, :3].mean() for part in axis.collections}
        assert all(dark[f"source {one}"] < dark[f"target {one}"] for one in (0, 2))
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["class 0", "class 2"]
    named_alike = embedding.draw_embedding(model, {"source-only": wrong}, source, target, profile, device="cpu")
    assert [axis.get_title() for axis in named_alike.axes] == ["source-only (100 %)", "source-only (33 %)"]


@pytest.mark.slow
def test_the_same_seed_gives_the_same_points(setting: tuple[nn.Module, Pair, Pair, shiftmend.Profile]) -> None:
    model, source, target, profile = setting
    options = {"samples": 12, "seed": 3, "device": "cpu"}
    one, two = (
        embedding.draw_embedding(model, {}, source, target, profile, **options).axes[0]  # type: ignore[arg-type]
        for _ in range(2)
    )
    for left, right in zip(one.collections, two.collections, strict=True):
        assert np.array_equal(left.get_offsets(), right.get_offsets())


@pytest.mark.slow
def test_classes_stay_together_and_apart(setting: tuple[nn.Module, Pair, Pair, shiftmend.Profile]) -> None:
    _, source, target, _ = setting
    places = embedding.embed(source[0].double().numpy(), target[0].double().numpy())
    labels = np.concatenate([source[1].numpy(), target[1].numpy()])
    assert places.shape == (66, 2)
    gaps = np.linalg.norm(places[:, None] - places[None], axis=2)
    np.fill_diagonal(gaps, np.inf)
    assert np.mean(labels[gaps.argmin(1)] == labels) == 1


def test_features_are_of_the_chosen_samples_and_scored_over_all() -> None:
    model, (inputs, labels) = Identity(), clusters(31, 0.0, 2)
    with torch.no_grad():
        model.body.bias[:] = torch.tensor([1.0, 2.0, 3.0, 4.0])
    spoiled = labels.clone()
    spoiled[:4] = (spoiled[:4] + 1) % 3
    profile = shiftmend.profile(model, inputs, device="cpu", progress=False)
    feed = Feed((inputs, spoiled), batch_size=8)
    chosen = torch.tensor([0, 7, 8, 23, 30])
    expected = (inputs[chosen] + torch.tensor([1.0, 2.0, 3.0, 4.0])).double().numpy()
    values, accuracy = embedding.read_features(model, feed, profile, chosen)
    assert np.allclose(values, expected)
    assert accuracy == pytest.approx(27 / 31)
    values, accuracy = embedding.read_features(model, feed, profile, chosen, all_scored=False)
    assert np.allclose(values, expected)
    assert accuracy == pytest.approx(4 / 5)


def test_chosen_samples_are_of_the_classes_and_no_more_than_asked() -> None:
    labels = torch.tensor([0, 1, 2, 0, 1, 2, 0, 1])
    assert embedding.choose_samples(labels, [0, 2], 100, seed=0).tolist() == [0, 2, 3, 5, 6]
    few = embedding.choose_samples(labels, [0, 2], 3, seed=0).tolist()
    assert len(few) == 3
    assert set(few) <= {0, 2, 3, 5, 6}
    assert few == sorted(few)


def test_wrong_input_is_one_sentence(setting: tuple[nn.Module, Pair, Pair, shiftmend.Profile]) -> None:
    model, source, target, profile = setting

    def draw(source: object = source, target: object = target, **options: object) -> None:
        embedding.draw_embedding(model, {}, source, target, profile, device="cpu", **options)  # type: ignore[arg-type]

    with pytest.raises(DataError, match="classes"):
        draw(classes=[1])
    with pytest.raises(DataError, match="class 9"):
        draw(classes=[1, 9])
    with pytest.raises(DataError, match="at least 10"):
        draw(samples=3)
    with pytest.raises(DataError, match="Expected labels in"):
        draw(target=target[0])
    with pytest.raises(DataError, match="class number"):
        draw(target=(target[0], target[1].float()))
    with pytest.raises(DataError, match="class 2"):
        draw(class_names=["nought", "one"])
    with pytest.raises(ProfileError, match="other layers"):
        embedding.draw_embedding(Identity(2), {}, source, target, profile, device="cpu")


def test_regression_and_tokens_are_refused_in_a_sentence() -> None:
    inputs, labels = clusters(30, 0.0, 0)
    single = Identity(1)
    profile = shiftmend.profile(single, inputs, device="cpu", progress=False)
    with pytest.raises(DataError, match="one number"):
        embedding.draw_embedding(single, {}, (inputs, labels), (inputs, labels), profile, device="cpu")
    tokens = inputs.unsqueeze(1).repeat(1, 2, 1)
    model = Identity()
    profile = shiftmend.profile(model, tokens, device="cpu", progress=False)
    with pytest.raises(DataError, match="several vectors"):
        embedding.draw_embedding(model, {}, (tokens, labels), (tokens, labels), profile, device="cpu")
