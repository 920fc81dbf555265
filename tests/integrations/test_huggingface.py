from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shiftmend
from shiftmend.errors import AdaptationError, DataError
from shiftmend.integrations.huggingface import as_dataset, save_pretrained


@functools.cache
def make_world() -> tuple[Any, dict[str, torch.Tensor], shiftmend.Profile]:
    """A tiny random BERT, tokens with their mask, and a profile."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=40, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, num_labels=3
    )
    model = transformers.BertForSequenceClassification(config).eval()
    tokens = {"input_ids": torch.randint(0, 40, (60, 9)), "attention_mask": torch.ones(60, 9, dtype=torch.long)}
    tokens["attention_mask"][::2, 6:] = 0
    return model, tokens, shiftmend.profile(model, tokens, gaussian="full", progress=False)


@pytest.mark.slow
def test_a_mended_transformer_comes_back_by_from_pretrained(tmp_path: Path) -> None:
    model, tokens, profile = make_world()
    assert str(profile.specs["logits"]) == "classifier"
    target = {**tokens, "input_ids": tokens["input_ids"] // 2}
    result = shiftmend.adapt(model, target, profile, method="fr", epochs=1, progress=False)
    save_pretrained(result, tmp_path / "mended")
    loaded = type(model).from_pretrained(tmp_path / "mended").eval()
    with torch.no_grad():
        found, expected = loaded(**target).logits, result.model(**target).logits
        assert torch.allclose(found, expected, atol=1e-6)
        assert not torch.allclose(found, model(**target).logits, atol=1e-4)
    stored = json.loads((tmp_path / "mended/manifest.json").read_text())
    assert stored["adapted_weights"] == result.manifest["adapted_weights"]
    assert shiftmend.verify(loaded, target, profile, progress=False).divergence == pytest.approx(
        shiftmend.verify(result.model, target, profile, progress=False).divergence
    )


@pytest.mark.slow
def test_maps_and_other_models_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    model, tokens, profile = make_world()
    mapped = shiftmend.adapt(model, tokens, profile, method="neo", progress=False)
    with pytest.raises(AdaptationError, match="without maps"):
        save_pretrained(mapped, tmp_path / "mended")
    plain = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)).eval()
    with pytest.raises(AdaptationError, match="save_pretrained"):
        save_pretrained(shiftmend.adapt(plain, torch.randn(20, 4), method="adabn", progress=False), tmp_path / "mended")
    assert not (tmp_path / "mended").exists()


@pytest.mark.slow
def test_columns_of_a_dataset_are_data() -> None:
    datasets = pytest.importorskip("datasets")
    model, tokens, profile = make_world()
    rows = datasets.Dataset.from_dict(
        {name: part.tolist() for name, part in tokens.items()} | {"label": [0, 1, 2] * 20, "text": ["a"] * 60}
    )
    both = as_dataset(rows, ["input_ids", "attention_mask"])
    again = shiftmend.profile(model, both, progress=False)
    assert again.inputs == profile.inputs
    assert torch.allclose(again.mean, profile.mean, atol=1e-5)
    scores = shiftmend.evaluate(model, as_dataset(rows, list(tokens), "label"), progress=False)
    direct = shiftmend.evaluate(model, (tokens, torch.arange(60) % 3), progress=False)
    assert isinstance(scores, shiftmend.Scores)
    assert isinstance(direct, shiftmend.Scores)
    assert scores.accuracy == direct.accuracy
    with pytest.raises(DataError, match=r"'pixels'.*input_ids"):
        as_dataset(rows, "pixels")
    with pytest.raises(DataError, match="as_dataset"):
        shiftmend.profile(model, rows, progress=False)
