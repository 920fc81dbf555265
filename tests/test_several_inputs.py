"""Models that take several tensors, through the whole library."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from graphs import captured_without_a_gpu
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

import shiftmend
from shiftmend.errors import AdaptationError, DataError
from shiftmend.inputs.feed import Feed
from shiftmend.introspection.call import call_model
from shiftmend.report import gather, write
from shiftmend.utils.tensor_tree import TensorTree

Named = dict[str, Tensor]


class Fusion(nn.Module):
    """Tokens with a mask, and sensors beside them; returns a dict as models of text do."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(45, 8)
        self.tokens, self.sensors = nn.Linear(8, 16), nn.Linear(4, 16)
        self.norm, self.head = nn.BatchNorm1d(16), nn.Linear(16, 3)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, sensors: Tensor) -> Named:
        mask = attention_mask.unsqueeze(-1).float()
        words = (self.embed(input_ids) * mask).sum(1) / mask.sum(1)
        features = torch.relu(self.norm(self.tokens(words) + self.sensors(sensors)))
        return {"hidden": features, "logits": self.head(features)}


class InOrder(Fusion):
    """The same model under another name, for a tuple."""


class OneDict(nn.Module):
    """The same model, called with the dict itself."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, batch: Named) -> Named:
        result: Named = self.inner(**batch)
        return result


def draw(samples: int, seed: int, offset: float = 0.0) -> tuple[Named, Tensor]:
    rng = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 3, (samples,), generator=rng)
    mask = (torch.rand(samples, 7, generator=rng) > 0.2).long()
    mask[:, 0] = 1
    inputs = {
        "input_ids": torch.randint(0, 15, (samples, 7), generator=rng) + 15 * labels[:, None],
        "attention_mask": mask,
        "sensors": torch.randn(samples, 4, generator=rng) + labels[:, None] + offset,
    }
    return inputs, labels


@functools.cache
def trained() -> Fusion:
    torch.manual_seed(0)
    model = Fusion()
    inputs, labels = draw(400, 0)
    optimiser = torch.optim.Adam(model.parameters(), 0.02)
    for _ in range(40):
        optimiser.zero_grad()
        functional.cross_entropy(model(**inputs)["logits"], labels).backward()
        optimiser.step()
    return model.eval()


@functools.cache
def profiled() -> shiftmend.Profile:
    return shiftmend.profile(trained(), draw(400, 0), progress=False)


class Rows(Dataset[Any]):
    def __init__(self, inputs: Named, labels: Tensor, form: str) -> None:
        self.inputs, self.labels, self.form = inputs, labels, form

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, place: int) -> Any:
        row = {name: part[place] for name, part in self.inputs.items()}
        if self.form == "named":
            return {**row, "labels": self.labels[place], "file": "a.txt"}
        return (row if self.form == "pairs" else tuple(row.values())), self.labels[place]


FORMS: dict[str, Callable[[Named, Tensor], Any]] = {
    "dict with labels": lambda inputs, labels: {**inputs, "labels": labels},
    "dict of arrays": lambda inputs, labels: ({name: part.numpy() for name, part in inputs.items()}, labels.numpy()),
    "(dict, labels)": lambda inputs, labels: (inputs, labels),
    "(tuple, labels)": lambda inputs, labels: (tuple(inputs.values()), labels),
    "Dataset of dicts": lambda inputs, labels: Rows(inputs, labels, "named"),
    "DataLoader of pairs": lambda inputs, labels: DataLoader(Rows(inputs, labels, "pairs"), batch_size=16),
    "DataLoader of tuples": lambda inputs, labels: DataLoader(Rows(inputs, labels, "tuples"), batch_size=16),
}


@pytest.mark.parametrize("room", [{}, {"limit": 0}, {"resident": False}], ids=["resident", "streamed", "not resident"])
@pytest.mark.parametrize("form", FORMS)
def test_every_form_gives_every_input_once_with_its_label(form: str, room: dict[str, Any]) -> None:
    inputs, labels = draw(33, 1)
    feed = Feed(FORMS[form](inputs, labels), **room)
    seen = [*feed.labelled_batches()]
    assert torch.equal(torch.cat([label for _, label in seen]), labels)
    for place, name in enumerate(inputs):
        parts = [batch.value[place if isinstance(batch.value, tuple) else name] for batch, _ in seen]  # type: ignore[union-attr]
        assert torch.equal(torch.cat(parts), inputs[name]), name
    assert feed.samples == 33
    assert len(feed.first(5)) == 5
    assert sum(len(batch) for batch in feed.subset(20, 0)) == 20
    assert all(len(batch) >= 16 for batch, _ in feed.epoch(0, 1))


@pytest.mark.parametrize(
    ("source", "keyword"),
    [
        ({"a": torch.zeros(4, 2), "b": torch.zeros(5, 2)}, "4 in 'a', 5 in 'b'"),
        ([{"a": [torch.zeros(2), torch.zeros(3)], "b": torch.zeros(2, 2)}], "'a'.* list of 2 tensors.*Pad and stack"),
        ({"ids": [[1, 2], [3]], "mask": torch.zeros(2, 2)}, "'ids'.* list of 2 lists.*Pad and stack"),
        ([([torch.zeros(3, 8), torch.zeros(3, 9)], torch.zeros(2))], "2 labels for 3.*Pad and stack"),
        (((torch.zeros(4, 2), "a name"), torch.zeros(4)), "got a str"),
        ({"names": ["a", "b"]}, "tensors or arrays by name"),
        ({"a": torch.zeros(2, 2), "b": torch.tensor([[1.0], [torch.nan]])}, "in 'b',.* NaN.*sample 1"),
    ],
)
def test_inputs_that_do_not_fit_together_get_one_sentence(source: Any, keyword: str) -> None:
    with pytest.raises(DataError, match=keyword):
        Feed(source)


def test_a_model_is_called_by_name_in_order_or_with_the_dict_itself() -> None:
    inputs, _ = draw(8, 1)
    expected = trained()(**inputs)["logits"]
    for model, value in (
        (trained(), inputs),
        (trained(), tuple(inputs.values())),
        (OneDict(trained()), inputs),
    ):
        assert torch.equal(call_model(model, TensorTree(value))["logits"], expected)


@pytest.mark.parametrize("method", ["adabn", "bufr", "neo"])
@pytest.mark.parametrize("way", ["by name", "in order", "one dict"])
def test_a_shifted_sensor_is_mended_in_every_way_of_calling(method: str, way: str) -> None:
    inputs, labels = draw(300, 2, offset=3.0)
    model: nn.Module = OneDict(trained()) if way == "one dict" else trained()
    source, target = ((tuple(part.values()), None) if way == "in order" else part for part in (draw(400, 0)[0], inputs))
    profile = shiftmend.profile(model, source, progress=False)
    options: dict[str, Any] = {"epochs_per_block": 4} if method == "bufr" else {}
    mended = shiftmend.adapt(model, target, profile, method=method, progress=False, **options)
    labelled = (target[0] if way == "in order" else inputs, labels)
    before, after = (shiftmend.evaluate(each, labelled, progress=False) for each in (model, mended.model))
    assert isinstance(before, shiftmend.Scores)
    assert isinstance(after, shiftmend.Scores)
    assert after.accuracy > before.accuracy + 0.05
    assert mended.after is not None
    assert shiftmend.verify(mended.model, target, profile, progress=False).divergence == pytest.approx(
        mended.after.divergence, rel=1e-4
    )


def test_the_profile_names_its_inputs_survives_its_file_and_compares_them(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    profile = profiled()
    assert "inputs" not in profile.statistics
    assert "attention_mask [7] int64" in repr(profile)
    profile.save(tmp_path / "profile.safetensors")
    assert shiftmend.Profile.load(tmp_path / "profile.safetensors").inputs == profile.inputs
    mixed = profile.merge(shiftmend.profile(trained(), draw(200, 5), like=profile, progress=False))
    assert mixed.inputs.sizes == profile.inputs.sizes
    shiftmend.verify(trained(), draw(50, 3, offset=40.0)[0], profile, progress=False)
    assert "'sensors'" in caplog.text
    assert "'input_ids'" not in caplog.text


def test_methods_that_map_inputs_refuse_and_auto_leaves_them_out() -> None:
    inputs, _ = draw(60, 2)
    with pytest.raises(AdaptationError, match=r"one tensor.*got 3"):
        shiftmend.adapt(trained(), inputs, profiled(), method="match-mean", progress=False)
    chosen = shiftmend.adapt(trained(), inputs, profiled(), candidates=["adabn"], progress=False)
    assert chosen.manifest["target"]["sha256"]


def test_a_stream_takes_batches_of_several_inputs() -> None:
    inputs, labels = draw(64, 2, offset=3.0)
    online = shiftmend.stream(trained(), profiled(), method="adabn")
    by_name = online.step(inputs)
    assert by_name.shape == (64, 3)
    assert torch.equal(shiftmend.stream(trained(), profiled(), method="adabn").step((inputs, labels)), by_name)


@pytest.mark.slow
def test_a_rehearsal_takes_functions_of_the_inputs_and_simulates_nothing_itself() -> None:
    held_out = draw(150, 4)
    with pytest.raises(DataError, match="battery="):
        shiftmend.rehearse(trained(), held_out, profiled(), progress=False)

    def move(amount: float) -> Callable[[Named], Named]:
        return lambda inputs: {**inputs, "sensors": inputs["sensors"] + amount}

    battery = {f"offset {amount:g}": move(amount) for amount in (-3, -2, -1, 1, 2, 3)}
    rehearsed = shiftmend.rehearse(
        trained(), held_out, profiled(), battery=battery, candidates=["adabn"], quick=True, progress=False
    )
    assert rehearsed.rehearsal is not None
    assert rehearsed.rehearsal.candidates == ("source-only", "adabn")
    with pytest.raises(DataError, match="sensors float32"):
        shiftmend.rehearse(
            trained(), held_out, profiled(), battery={"lost": lambda inputs: inputs["sensors"]}, progress=False
        )


def test_a_report_is_written_without_pictures_of_the_inputs(tmp_path: Path) -> None:
    inputs, labels = draw(80, 2, offset=3.0)
    mended = shiftmend.adapt(trained(), inputs, profiled(), method="adabn", progress=False)
    page = tmp_path / "report.html"
    write(gather(trained(), inputs, profiled(), adaptation=mended, labels=labels), page)
    assert "attention_mask" in page.read_text()


def test_preprocess_gets_and_returns_the_same_form() -> None:
    inputs, _ = draw(20, 2)
    seen: list[Any] = []

    def shift(batch: Named) -> Named:
        seen.append(batch)
        return {**batch, "sensors": batch["sensors"] - 1}

    (batch,) = Feed(inputs, preprocess=shift).batches()
    assert isinstance(batch, TensorTree)
    assert torch.equal(batch.value["sensors"], inputs["sensors"] - 1)  # type: ignore[call-overload]
    assert set(seen[0]) == set(inputs)
    with pytest.raises(DataError, match="as many samples"):
        [*Feed(inputs, preprocess=lambda batch: {name: part[:3] for name, part in batch.items()}).batches()]


def test_an_entry_that_forward_does_not_take_is_named() -> None:
    inputs, _ = draw(20, 2)
    with pytest.raises(DataError, match="Leave out 'index'"):
        shiftmend.profile(trained(), {**inputs, "index": torch.arange(20)}, progress=False)
    with pytest.raises(DataError, match="takes several"):
        shiftmend.profile(trained(), inputs["sensors"], progress=False)


def run_captured_and_eagerly(device: str) -> None:
    inputs, _ = draw(300, 2, offset=3.0)
    options: dict[str, Any] = {"method": "bufr", "epochs_per_block": 3, "progress": False, "device": device}
    captured, eager = (
        shiftmend.adapt(trained(), inputs, profiled(), capture=capture, **options) for capture in (True, False)
    )
    for name, value in eager.model.state_dict().items():
        assert torch.allclose(captured.model.state_dict()[name].float(), value.float(), atol=1e-4), name


def test_captured_steps_of_several_inputs_give_the_same(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    captured_without_a_gpu(monkeypatch)
    run_captured_and_eagerly("cpu")
    assert "not captured" not in caplog.text


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_captured_steps_give_the_same_on_a_gpu() -> None:
    run_captured_and_eagerly("cuda")
