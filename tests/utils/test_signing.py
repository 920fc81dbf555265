from __future__ import annotations

import io
import json
import stat
from pathlib import Path

import pytest
import safetensors.torch
import torch

import shiftmend
from shiftmend.cli import main
from shiftmend.errors import DataError, ProfileError, ShiftmendError
from shiftmend.report.saved import load_adaptation, read_manifest
from shiftmend.research.bench.benchmark import Cell, Outcome, Result
from shiftmend.research.bench.store import from_compact, load_results, to_compact
from shiftmend.utils import sealing, signing

pytest.importorskip("cryptography")


@pytest.fixture
def key(tmp_path: Path) -> signing.Key:
    return signing.new_key(tmp_path / "key")


@pytest.fixture
def other(tmp_path: Path) -> signing.Key:
    return signing.new_key(tmp_path / "other")


def make_model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 2)).eval()


def test_a_key_is_private_and_never_replaced(tmp_path: Path, key: signing.Key) -> None:
    assert stat.S_IMODE((tmp_path / "key").stat().st_mode) == 0o600
    assert signing.load_key(tmp_path / "key").public == key.public
    assert signing.read_public(tmp_path / "key.pub") == signing.read_public(key.public.upper()) == key.public
    assert key.public in repr(key)
    content = (tmp_path / "key").read_bytes()
    with pytest.raises(ShiftmendError, match="exists"):
        signing.new_key(tmp_path / "key")
    assert (tmp_path / "key").read_bytes() == content


@pytest.mark.parametrize(
    "content", [b"", b"-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----", b"\xff" * 64]
)
def test_other_files_are_no_keys(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "file").write_bytes(content)
    for read in (signing.load_key, signing.read_public):
        for path in (tmp_path / "file", tmp_path / "nowhere", tmp_path):
            with pytest.raises(ShiftmendError, match="key"):
                read(path)


def test_a_signature_is_that_of_this_content_and_purpose(key: signing.Key, other: signing.Key) -> None:
    digest = "ab" * 32
    signature = key.sign(digest)
    assert signing.is_valid(key.public, signature, digest)
    assert not signing.is_valid(other.public, signature, digest)
    assert not signing.is_valid(key.public, signature, "ac" + digest[2:])
    assert not signing.is_valid(key.public, key.private.sign(bytes.fromhex(digest)).hex(), digest)
    assert not signing.is_valid("xy", "zz", digest)


def test_a_signed_profile(tmp_path: Path, key: signing.Key, other: signing.Key) -> None:
    profile = shiftmend.profile(make_model(), torch.randn(100, 4), progress=False)
    path = tmp_path / "home.profile"
    profile.save(path, sign=tmp_path / "key")
    assert shiftmend.Profile.load(path).to_bytes() == profile.to_bytes()
    assert shiftmend.Profile.load(path, trust=tmp_path / "key.pub").samples == 100
    with pytest.raises(ProfileError, match="signed by"):
        shiftmend.Profile.load(path, trust=other.public)
    profile.save(tmp_path / "plain.profile")
    assert shiftmend.Profile.load(tmp_path / "plain.profile").samples == 100
    with pytest.raises(ProfileError, match="not signed"):
        shiftmend.Profile.load(tmp_path / "plain.profile", trust=key.public)


@pytest.mark.parametrize("what", ["content", "metadata", "signer"])
def test_an_altered_and_sealed_profile_is_refused(tmp_path: Path, key: signing.Key, what: str) -> None:
    path = tmp_path / "home.profile"
    shiftmend.profile(make_model(), torch.randn(100, 4), progress=False).save(path, sign=tmp_path / "key")
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    metadata = json.loads(content[8 : 8 + length])["__metadata__"]
    tensors = safetensors.torch.load(content)
    if what == "content":
        tensors["features.mean"] = tensors["features.mean"] + 1
    elif what == "metadata":
        metadata["profile"] = metadata["profile"].replace('"samples": 100', '"samples": 101')
    else:
        metadata["signer"] = "cd" * 32
    file = io.BytesIO(safetensors.torch.save(tensors, metadata | sealing.blank_entries()))
    sealing.seal(file)
    path.write_bytes(file.getvalue())
    for trust in (None, metadata["signer"]):
        with pytest.raises(ProfileError, match="signature"):
            shiftmend.Profile.load(path, trust=trust)


def test_a_signed_result(tmp_path: Path, key: signing.Key, other: signing.Key) -> None:
    model = make_model()
    result = shiftmend.adapt(model, torch.randn(64, 4), method="adabn", progress=False)
    home = tmp_path / "mended"
    result.save(home, sign=tmp_path / "key")
    assert load_adaptation(home, model, key.public).manifest == read_manifest(home / "manifest.json")
    with pytest.raises(DataError, match="signed by"):
        load_adaptation(home, model, other.public)
    history = (home / "history.json").read_text()
    (home / "history.json").write_text(history.replace("1", "2", 1))
    with pytest.raises(DataError, match="seals"):
        load_adaptation(home, model, key.public)
    (home / "history.json").write_text(history)
    manifest = json.loads((home / "manifest.json").read_text())
    manifest |= {"seed": 99, "sha256": "0" * 64}
    (home / "manifest.json").write_text(sealing.seal_json(json.dumps(manifest)))
    with pytest.raises(DataError, match="signature"):
        load_adaptation(home, model)
    result.save(home)
    with pytest.raises(DataError, match="not signed"):
        load_adaptation(home, model, key.public)


def test_signed_benchmark_results(tmp_path: Path, key: signing.Key, other: signing.Key) -> None:
    cell = Cell("digits", "offline", "adabn", "usps", 1, "recipe")
    result = Result(cell, "published", last=Outcome(1, 0.5, 0.1, 0.1, 1.0, 0.2), finished="2026-01-01T00:00:00Z")
    text = to_compact([result], key)
    assert from_compact(text, key.public) == from_compact(text) == from_compact(to_compact([result]))
    with pytest.raises(DataError, match="signed by"):
        from_compact(text, other.public)
    with pytest.raises(DataError, match="not signed"):
        from_compact(to_compact([result]), key.public)
    with pytest.raises(DataError, match="no signature"):
        load_results(tmp_path, trust=key.public)


def test_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def run(*arguments: object) -> tuple[int, str]:
        with pytest.raises(SystemExit) as ended:
            main([str(argument) for argument in arguments])
        said = capsys.readouterr()
        return int(ended.value.code or 0), said.out + said.err

    code, said = run("key", "new", tmp_path / "mine", "--json")
    assert code == 0
    public = json.loads(said)["public"]
    profile = shiftmend.profile(make_model(), torch.randn(100, 4), progress=False)
    profile.save(tmp_path / "signed", sign=tmp_path / "mine")
    profile.save(tmp_path / "plain")
    code, said = run("inspect", tmp_path / "signed", "--trust", tmp_path / "mine.pub")
    assert (code, f"signed by {public}" in said) == (0, True)
    code, said = run("inspect", tmp_path / "plain", "--trust", public)
    assert (code, "not signed" in said) == (2, True)
    code, said = run(
        "mix", tmp_path / "plain", tmp_path / "signed", "--shares", "1,1", "-o", tmp_path / "m", "--trust", public
    )
    assert (code, (tmp_path / "m").exists()) == (2, False)
