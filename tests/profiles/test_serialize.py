from __future__ import annotations

import copy
import hashlib
import json
import os
import re
import stat
import struct
import tracemalloc
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st
from same_profiles import same
from torch import Tensor, nn

import shiftmend
from shiftmend.errors import ProfileError
from shiftmend.introspection.taps import Tap
from shiftmend.profiles import serialize as profile_files
from shiftmend.profiles.collect import SLICE_SEEDS
from shiftmend.profiles.fingerprints import InputSummary
from shiftmend.profiles.profile import Profile
from shiftmend.profiles.serialize import problems
from shiftmend.stats.gaussians import FullGaussian, MarginalGaussian
from shiftmend.stats.histograms import Bins, Histogram
from shiftmend.stats.slices import Projector, Slices, random_directions
from shiftmend.stats.statistics import KINDS, Frame, read_whole_number

Facts = dict[str, Any]
Tensors = dict[str, Tensor]


def make(preset: str = "reference", gaussian: Any = None) -> Profile:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 3))
    return shiftmend.profile(model, torch.randn(200, 6), preset=preset, gaussian=gaussian, progress=False)


PROFILE = make()
CONTENT = PROFILE.to_bytes()


def take_apart(content: bytes = CONTENT) -> tuple[Facts, Tensors, dict[str, str]]:
    (length,) = struct.unpack("<Q", content[:8])
    metadata = json.loads(content[8 : 8 + length])["__metadata__"]
    return json.loads(metadata["profile"]), safetensors.torch.load(content), metadata


def forge(facts: Any, tensors: Tensors, metadata: dict[str, str]) -> bytes:
    """A file with a right sum over whatever content, as somebody would write it on purpose."""
    text = facts if isinstance(facts, str) else json.dumps(facts)
    return seal(safetensors.torch.save(tensors, metadata | {"sha256": "0" * 64, "profile": text}))


def seal(content: bytes) -> bytes:
    blank = re.sub(rb'"sha256":"[^"]*"', b'"sha256":"%s"' % (b"0" * 64), content, count=1)
    return blank.replace(b'"sha256":"' + b"0" * 64, b'"sha256":"' + hashlib.sha256(blank).hexdigest().encode(), 1)


def refusal(content: bytes) -> str:
    """The message with which a file's content is refused; anything but a `ProfileError` fails the test."""
    with pytest.raises(ProfileError) as caught:
        profile_files.decode(content)
    message = str(caught.value)
    assert "\n" not in message
    assert 20 < len(message) < 500
    message.encode()  # can be printed
    return message


# --- what is saved comes back --------------------------------------------------------------------------------------


@pytest.mark.parametrize("preset", ["reference", "paper", "sliced"])
def test_round_trip_gives_back_an_equal_profile_and_the_same_bytes(preset: str, tmp_path: Path) -> None:
    made = make(preset)
    made.save(tmp_path / "a.safetensors")
    loaded = Profile.load(tmp_path / "a.safetensors")
    assert same(loaded, made)
    assert problems(loaded) == []
    assert loaded.to_bytes() == made.to_bytes() == (tmp_path / "a.safetensors").read_bytes()


def test_round_trip_keeps_further_taps_axes_and_entries() -> None:
    extra = {
        "tokens": Tap("tokens", "encoder.3", "output", -1, None),
        "second": Tap("second", "gru", "output", 2, 1),
        "named": Tap("named", "wrapper", "input", 1, "hidden"),
    }
    tap = PROFILE.taps["features"]
    copies = {
        name: Histogram(tap.counts.clone(), tap.low.clone(), tap.high.clone(), tap.samples, tap.bins) for name in extra
    }
    statistics = {**PROFILE.statistics, **{f"tap.{name}": copy for name, copy in copies.items()}}
    order = sorted(
        statistics, key=lambda name: ("tap", "gau", "sli", "inp", "ans").index(name[:3])
    )  # as a file has them
    made = replace(PROFILE, statistics={name: statistics[name] for name in order}, specs=PROFILE.specs | extra)
    assert same(profile_files.decode(made.to_bytes()), made)


@dataclass(frozen=True)
class Largest:
    """A statistic that no module of the library knows."""

    kind: ClassVar[str] = "largest-values"
    tensor_dims: ClassVar[Mapping[str, int]] = {"values": 1}
    values: Tensor
    samples: int

    def to(self, device: torch.device) -> Largest:
        return Largest(self.values.to(device), self.samples)

    @classmethod
    def mix(cls, parts: Sequence[Largest], times: Sequence[float]) -> Largest:
        values = torch.stack([part.values for part in parts]).amax(0)
        return Largest(values, round(sum(part.samples * number for part, number in zip(parts, times, strict=True))))

    def divergence(self, values: Tensor) -> Tensor:
        return (values.amax(0) - self.values).abs().mean()

    def tensors(self) -> dict[str, Tensor]:
        return {"values": self.values}

    def facts(self) -> dict[str, Any]:
        return {"samples": self.samples}

    @classmethod
    def from_file(cls, name: str, facts: Mapping[str, Any], tensors: Mapping[str, Tensor], frame: Frame) -> Largest:
        return Largest(tensors["values"], read_whole_number(facts["samples"], f"the number of samples of {name}"))

    def problems(self) -> list[str]:
        return [] if bool(self.values.isfinite().all()) else ["a value is not finite"]


def test_a_new_kind_of_statistic_needs_its_class_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    features = PROFILE.taps["features"]
    extra = {"largest.features": Largest(features.high, features.samples)}
    made = replace(PROFILE, statistics={**PROFILE.statistics, **extra})
    content = made.to_bytes()
    assert "is of the kind" in refusal(content)
    monkeypatch.setitem(KINDS, Largest.kind, Largest)
    loaded = profile_files.decode(content)
    assert same(loaded, made)
    assert loaded.to_bytes() == content
    both = made.merge(loaded).statistics["largest.features"]
    assert both.samples == 400
    facts, tensors, metadata = take_apart(content)
    assert facts["statistics"].pop("largest.features") == {"kind": "largest-values", "samples": 200}
    assert torch.equal(tensors.pop("statistics.largest.features.values"), features.high)
    assert same(profile_files.decode(forge(facts, tensors, metadata)), PROFILE)
    with pytest.raises(ProfileError, match="statistics"):
        made.merge(PROFILE)


@pytest.mark.parametrize("name", ["tap.features", "tap.other", "gaussian", "slices.verification"])
def test_statistics_do_not_stand_in_for_others(name: str) -> None:
    facts, tensors, metadata = take_apart()
    facts["statistics"] = {name: facts["taps"]["features"]}
    assert "belongs to another" in refusal(forge(facts, tensors, metadata))


@pytest.mark.parametrize("value", [None, 3, [], {"x": None}, {"x": {}}, {"x": {"kind": "unknown"}}])
def test_malformed_statistics_are_refused(value: Any) -> None:
    facts, tensors, metadata = take_apart()
    facts["statistics"] = value
    assert "not valid" in refusal(forge(facts, tensors, metadata))


def test_a_mixture_says_of_which_shares_it_is() -> None:
    mixed = Profile.mixture([PROFILE, PROFILE], [3, 1])
    back = profile_files.decode(mixed.to_bytes())
    assert back.shares == mixed.shares == (0.75, 0.25)
    assert "\n  mixture     75 %, 25 %\n" in repr(back)
    assert "mixture" not in repr(PROFILE)
    assert mixed.merge(PROFILE).shares == ()


@pytest.mark.parametrize(
    "shares", [None, 1.0, "1", {"0": 1.0}, [1], [True], [0.5, "0.5"], [0.5, 0.6], [-0.5, 1.5], [[1.0]]]
)
def test_shares_that_no_mixture_has_are_refused(shares: Any) -> None:
    facts, tensors, metadata = take_apart()
    facts["shares"] = shares
    assert "shares of its parts" in refusal(forge(facts, tensors, metadata))


def test_the_sum_covers_the_whole_file() -> None:
    *_, metadata = take_apart()
    blank = CONTENT.replace(metadata["sha256"].encode(), b"0" * 64)
    assert hashlib.sha256(blank).hexdigest() == metadata["sha256"]
    facts, tensors, metadata = take_apart()
    assert same(profile_files.decode(forge(facts, tensors, metadata)), PROFILE)  # the tests' own writer is right


def test_nothing_in_the_file_is_a_sample() -> None:
    """Its size does not depend on how many samples went in: what leaves the site are counts."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 3))
    many = shiftmend.profile(model, torch.randn(2000, 6), progress=False)
    assert abs(len(many.to_bytes()) - len(CONTENT)) < 64  # digits of the number of samples and of the mean


def sized(
    units: int, outputs: int, slices: dict[str, int], preset: str = "reference", samples: int = 50_000
) -> Profile:
    """A profile of given size with plausible numbers in it."""
    generator = torch.Generator().manual_seed(0)

    def histogram(rows: int) -> Histogram:
        shares = torch.rand(rows, 10, generator=generator)
        low = torch.randn(rows, generator=generator)
        counts = shares / shares.sum(1, keepdim=True) * samples
        return Histogram(counts, low, low + 1 + torch.rand(rows, generator=generator), samples, Bins())

    features = histogram(units)
    mean, deviation = torch.randn(units, generator=generator), torch.rand(units, generator=generator) + 0.1
    return Profile(
        statistics={
            "tap.features": features,
            "tap.logits": histogram(outputs),
            "gaussian": MarginalGaussian(mean, deviation.square(), samples),
        }
        | {
            f"slices.{name}": Slices(
                histogram(count), seed, Projector.build(mean, deviation, features.usable, count, seed)
            )
            for name, count in slices.items()
            for seed in [SLICE_SEEDS[name]]
        },
        mean=mean,
        deviation=deviation,
        specs={"features": Tap("features", "fc", "input"), "logits": Tap("logits", "fc")},
        preset=preset,
        architecture="a" * 64,
        weights="b" * 64,
        inputs=InputSummary((3, 32, 32), "float32", 0.0, 1.0, (0.49, 0.48, 0.45), (0.25, 0.24, 0.26)),
        inputs_seen=samples,
    )


def test_a_profile_for_resnet18_on_cifar_is_at_most_48_kib(tmp_path: Path) -> None:
    made = sized(512, 10, {"verification": 128})
    made.save(tmp_path / "p")
    assert (tmp_path / "p").stat().st_size <= 48 * 1024
    assert same(Profile.load(tmp_path / "p"), made)


@pytest.mark.parametrize("preset", ["reference", "sliced"])
def test_a_full_gaussian_comes_back_with_every_covariance(preset: str, tmp_path: Path) -> None:
    made = make(preset, "full")
    assert isinstance(made.gaussian, FullGaussian)
    made.save(tmp_path / "p")
    loaded = Profile.load(tmp_path / "p")
    assert same(loaded, made)
    assert isinstance(loaded.gaussian, FullGaussian)
    assert torch.equal(loaded.gaussian.covariance, made.gaussian.covariance)
    assert loaded.to_bytes() == (tmp_path / "p").read_bytes()
    facts, tensors, _ = take_apart(made.to_bytes())
    assert facts["gaussian"] == {"kind": "full-gaussian", "samples": 200}
    assert tensors["gaussian.covariance"].shape == (8 * 9 // 2,)  # a symmetric matrix is stored once
    assert {entry["kind"] for entry in facts["taps"].values()} == {"soft-histogram"}
    assert {entry["kind"] for entry in facts["slices"].values()} == {"sliced-histogram"}


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_file_is_read_alike_whatever_precision_is_usual_there(dtype: torch.dtype) -> None:
    made = make("sliced", "full")
    content = made.to_bytes()
    torch.set_default_dtype(dtype)
    try:
        loaded = profile_files.decode(content)
    finally:
        torch.set_default_dtype(torch.float32)
    assert same(loaded, made)


def test_a_full_profile_of_128_features_is_at_most_53_kib() -> None:
    """32 of them are the 8,256 covariances, a symmetric matrix, stored once; 2.6 are quantiles of the 20 inputs."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 128), nn.Linear(128, 10))
    sizes = {
        kind: len(shiftmend.profile(model, torch.randn(300, 20), gaussian=kind, progress=False).to_bytes())
        for kind in ("marginal", "full")
    }
    assert sizes["full"] <= 53 * 1024
    assert 4 * (128 * 129 // 2 - 128) <= sizes["full"] - sizes["marginal"] <= 4 * 128 * 129 // 2 + 64


# --- five hundred kinds of damage ----------------------------------------------------------------------------------


def damaged(generator: np.random.Generator) -> bytes:
    """One random accident of a file on its way: transmission, disk, editor, or a cut connection."""
    content = bytearray(CONTENT)
    size = len(content)
    at = int(generator.integers(size))
    length = int(generator.integers(1, 64))
    match int(generator.integers(9)):
        case 0:  # cut off
            del content[at:]
        case 1:  # one bit
            content[at] ^= 1 << int(generator.integers(8))
        case 2:  # something in between
            content[at:at] = generator.bytes(length)
        case 3:  # something missing
            del content[at : at + length]
        case 4:  # overwritten
            content[at : at + length] = generator.bytes(len(content[at : at + length]))
        case 5:  # zeroed, as after a crash
            content[at:] = bytes(size - at)
        case 6:  # something at the end
            content += generator.bytes(length)
        case 7:  # another length of the header
            content[:8] = struct.pack("<Q", int(generator.integers(1 << 63)) >> int(generator.integers(63)))
        case 8:  # two places swapped
            other = int(generator.integers(size))
            content[at], content[other] = content[other], content[at]
    return bytes(content)


@pytest.mark.slow
def test_five_hundred_accidents_are_all_refused(tmp_path: Path) -> None:
    generator = np.random.default_rng(20240229)
    path = tmp_path / "p.safetensors"
    cases: set[bytes] = set()
    while len(cases) < 600:
        content = damaged(generator)
        if content != CONTENT:
            cases.add(content)
    for content in cases:
        path.write_bytes(content)
        with pytest.raises(ProfileError) as caught:
            Profile.load(path)
        message = str(caught.value)
        assert message.startswith(str(path))
        assert "\n" not in message


def test_every_single_bit_of_the_header_counts() -> None:
    (length,) = struct.unpack("<Q", CONTENT[:8])
    accepted = []
    for at in range(8 + length):
        content = bytearray(CONTENT)
        content[at] ^= 1 << (at % 8)
        try:
            profile_files.decode(bytes(content))
            accepted.append(at)
        except ProfileError:
            pass
    assert accepted == []


def test_accidents_in_the_header_of_a_sealed_file_are_refused() -> None:
    """The sum is made right again, so that the checks behind it have to notice."""
    generator = np.random.default_rng(7)
    (length,) = struct.unpack("<Q", CONTENT[:8])
    silent = []
    for _ in range(400):
        content = bytearray(CONTENT)
        content[8 + int(generator.integers(length))] = int(generator.integers(32, 127))
        sealed = seal(bytes(content))
        try:
            loaded = profile_files.decode(sealed)
        except ProfileError:
            continue
        # a name, a mean or a version may have become another valid one; what is counted may not have
        if not all(torch.equal(loaded.taps[name].counts, PROFILE.taps[name].counts) for name in ("features", "logits")):
            silent.append(sealed)
    assert silent == []


@given(st.binary(max_size=400))
def test_any_bytes_are_refused_in_one_sentence(content: bytes) -> None:
    refusal(content)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
)


@pytest.mark.slow
@given(JSON)
def test_any_json_in_place_of_the_description_is_refused(value: Any) -> None:
    _, tensors, metadata = take_apart()
    assert "not valid" in refusal(forge(value, tensors, metadata))


# --- damage on purpose: the sum is right, so the checks behind it have to refuse -------------------------------------


def change(alter: Callable[[Facts, Tensors, dict[str, str]], Any]) -> bytes:
    facts, tensors, metadata = take_apart()
    alter(facts, tensors, metadata)
    return forge(facts, tensors, metadata)


def put(name: str, alter: Callable[[Tensor], Tensor]) -> bytes:
    def apply(facts: Facts, tensors: Tensors, metadata: dict[str, str]) -> None:
        tensors[name] = alter(tensors[name].clone()).contiguous()

    return change(apply)


def first(value: float) -> Callable[[Tensor], Tensor]:
    def apply(tensor: Tensor) -> Tensor:
        tensor.view(-1)[0] = value
        return tensor

    return apply


TENSORS = sorted(take_apart()[1])


@pytest.mark.parametrize("name", TENSORS)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_numbers_that_are_none_are_refused(name: str, value: float) -> None:
    assert re.search("not finite", refusal(put(name, first(value))))


@pytest.mark.parametrize("name", TENSORS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.int32, torch.bool], ids=str)
def test_other_dtypes_are_refused(name: str, dtype: torch.dtype) -> None:
    assert f"'{name}' should be float32" in refusal(put(name, lambda tensor: tensor.to(dtype)))


SHAPES: dict[str, Callable[[Tensor], Tensor]] = {
    "one row less": lambda tensor: tensor[:-1],
    "one row more": lambda tensor: torch.cat([tensor, tensor[:1]]),
    "no rows": lambda tensor: tensor[:0],
    "one axis more": lambda tensor: tensor[None],
    "a number": lambda tensor: tensor.reshape(-1)[0],
    "transposed": lambda tensor: tensor.T if tensor.ndim == 2 else tensor.repeat(2),
    "one bin less": lambda tensor: tensor[..., :-1],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", TENSORS)
@pytest.mark.parametrize("shape", SHAPES)
def test_other_shapes_are_refused(name: str, shape: str) -> None:
    assert "not valid" in refusal(put(name, SHAPES[shape]))


@pytest.mark.parametrize("name", TENSORS)
def test_missing_tensors_are_refused(name: str) -> None:
    assert f"tensor '{name}' is missing" in refusal(change(lambda facts, tensors, metadata: tensors.pop(name)))


@pytest.mark.parametrize("name", ["surplus", "tap.other.counts", "tap.features.count", "slices.alignment.low", ""])
def test_surplus_tensors_are_refused(name: str) -> None:
    content = change(lambda facts, tensors, metadata: tensors.update({name: torch.zeros(3)}))
    assert "missing or unexpected" in refusal(content)


COUNTS = [name for name in TENSORS if name.endswith("counts")]


@pytest.mark.parametrize("name", COUNTS)
def test_impossible_counts_are_refused(name: str) -> None:
    assert "negative" in refusal(put(name, first(-1.0)))
    assert "add up" in refusal(put(name, lambda counts: counts * 1.01))
    assert "add up" in refusal(put(name, lambda counts: counts.zero_()))
    assert "add up" in refusal(put(name, first(1e9)))
    # a pair of errors that cancels out in the sum over everything, but not in each row
    assert "add up" in refusal(
        put(name, lambda counts: counts * torch.tensor([1.5, 0.5]).repeat(999)[: len(counts), None])
    )


def test_impossible_ranges_and_moments_are_refused() -> None:
    for part in ("tap.features", "tap.logits", "slices.verification"):
        assert "above its highest" in refusal(put(f"{part}.low", first(1e6)))
        assert "above its highest" in refusal(put(f"{part}.high", first(-1e6)))
    assert "deviation is negative" in refusal(put("features.deviation", first(-0.1)))
    varied = int(PROFILE.taps["features"].usable.nonzero()[0])

    def flatten(deviation: Tensor) -> Tensor:
        deviation[varied] = 0
        return deviation

    assert "deviation is zero" in refusal(put("features.deviation", flatten))


FULL = make(gaussian="full").to_bytes()


def alter_gaussian(alter: Callable[[Facts, Tensors], Any], content: bytes = FULL) -> str:
    facts, tensors, metadata = take_apart(content)
    alter(facts["gaussian"], tensors)
    return refusal(forge(facts, tensors, metadata))


@pytest.mark.parametrize(
    "kind", ["", "Full-Gaussian", "soft-histogram", "mixture", None, 3, True, ["full-gaussian"], {}]
)
@pytest.mark.parametrize("content", [CONTENT, FULL], ids=["marginal", "full"])
def test_unknown_kinds_of_gaussian_are_refused(kind: Any, content: bytes) -> None:
    message = alter_gaussian(lambda facts, tensors: facts.update(kind=kind), content)
    assert "'gaussian' is of the kind" in message


def test_a_gaussian_that_is_of_the_other_kind_is_refused() -> None:
    for content, kind in ((CONTENT, "full-gaussian"), (FULL, "marginal-gaussian")):
        assert "missing or unexpected" in alter_gaussian(lambda facts, tensors, k=kind: facts.update(kind=k), content)


@pytest.mark.parametrize("group", ["taps", "slices"])
@pytest.mark.parametrize("kind", ["", "full-gaussian", "histogram", None, 3, ["soft-histogram"]])
def test_unknown_kinds_of_taps_and_slices_are_refused(group: str, kind: Any) -> None:
    name = {"taps": "features", "slices": "verification"}[group]
    message = refusal(change(lambda facts, tensors, metadata: facts[group][name].update(kind=kind)))
    assert f".{name}' is of the kind" in message


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", ["gaussian.mean", "gaussian.covariance"])
def test_full_gaussians_of_other_sizes_are_refused(name: str, shape: str) -> None:
    message = alter_gaussian(lambda facts, tensors: tensors.update({name: SHAPES[shape](tensors[name]).contiguous()}))
    assert "as many units as the features" in message or "float32 with 1 dimensions" in message


def test_a_whole_matrix_in_place_of_its_triangle_is_refused() -> None:
    message = alter_gaussian(lambda facts, tensors: tensors.update({"gaussian.covariance": torch.zeros(64)}))
    assert "as many units as the features" in message
    message = alter_gaussian(lambda facts, tensors: tensors.update({"gaussian.covariance": torch.zeros(8, 8)}))
    assert "float32 with 1 dimensions" in message


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("place", [0, 1, 35])  # a variance, a covariance, the last variance
def test_covariances_that_are_no_numbers_are_refused(value: float, place: int) -> None:
    def spoil(facts: Facts, tensors: Tensors) -> None:
        tensors["gaussian.covariance"][place] = value

    assert "not finite" in alter_gaussian(spoil)


def test_impossible_variances_are_refused() -> None:
    varied = int(PROFILE.taps["features"].usable.nonzero()[0])
    for content, name, place in (
        (CONTENT, "gaussian.variance", varied),
        (FULL, "gaussian.covariance", sum(8 - row for row in range(varied))),  # where that row of the triangle begins
    ):

        def spoil(facts: Facts, tensors: Tensors, name: str = name, place: int = place) -> None:
            tensors[name][place] = -0.1

        assert "variance is negative" in alter_gaussian(spoil, content)


@pytest.mark.parametrize("samples", [0, -1, True, 200.0, "200", None, [200], 1 << 53, 100, 201])
@pytest.mark.parametrize("content", [CONTENT, FULL], ids=["marginal", "full"])
def test_gaussians_of_other_samples_than_the_features_are_refused(samples: Any, content: bytes) -> None:
    message = alter_gaussian(lambda facts, tensors: facts.update(samples=samples), content)
    assert "samples of the" in message


def test_correlations_beyond_one_are_refused() -> None:
    def spoil(facts: Facts, tensors: Tensors) -> None:
        tensors["gaussian.covariance"][1] = 1e6

    assert "covariance" in alter_gaussian(spoil)


@pytest.mark.parametrize("samples", [0, -1, True, False, 200.0, "200", None, [200], {}, 1 << 53, 10**30, 100, 201, 1])
@pytest.mark.parametrize("group", ["taps", "slices"])
def test_impossible_numbers_of_samples_are_refused(group: str, samples: Any) -> None:
    name = "features" if group == "taps" else "verification"
    content = change(lambda facts, tensors, metadata: facts[group][name].update(samples=samples))
    assert re.search("samples", refusal(content))


def test_slices_of_other_samples_than_the_features_are_refused() -> None:
    def double(facts: Facts, tensors: Tensors, metadata: dict[str, str]) -> None:
        facts["slices"]["verification"]["samples"] *= 2
        tensors["slices.verification.counts"] *= 2

    assert "not of the 200 samples" in refusal(change(double))


@pytest.mark.parametrize("seed", [-1, 1 << 64, 1.0, "20220425", True, None, [1]])
def test_impossible_seeds_are_refused(seed: Any) -> None:
    content = change(lambda facts, tensors, metadata: facts["slices"]["verification"].update(seed=seed))
    assert "seed" in refusal(content)


@pytest.mark.parametrize("preset", ["", "Reference", "unknown", "x" * 10_000, "reference\n", "\ud800"])
def test_unknown_presets_are_refused(preset: str) -> None:
    assert "preset" in refusal(change(lambda facts, tensors, metadata: facts.update(preset=preset)))


def test_a_preset_whose_slices_are_missing_is_refused() -> None:
    assert "alignment" in refusal(change(lambda facts, tensors, metadata: facts.update(preset="sliced")))


@pytest.mark.parametrize("schema", ["0", "2", "4", "3.0", "", "three", "9" * 5000])
def test_other_schemas_are_refused(schema: str) -> None:
    message = refusal(change(lambda facts, tensors, metadata: metadata.update(schema=schema)))
    assert "schema" in message
    assert "reads 3" in message


@pytest.mark.parametrize("key", ["format", "schema", "sha256", "profile"])
def test_missing_metadata_is_refused(key: str) -> None:
    *_, tensors, metadata = take_apart()
    del metadata[key]
    refusal(safetensors.torch.save(tensors, metadata))


@pytest.mark.parametrize("sum_", ["", "0" * 64, "f" * 64, "x", "\\ud800", "\\u0000", '"'])
def test_other_sums_are_refused(sum_: str) -> None:
    digest = take_apart()[2]["sha256"].encode()
    assert "damaged" in refusal(CONTENT.replace(digest, sum_.encode().ljust(64), 1))


BINS: list[dict[str, Any]] = [
    {"count": 9},
    {"count": 0},
    {"count": -1},
    {"count": 8.0},
    {"count": True},
    {"count": "8"},
    {"count": 10**9},
    {"count": None},
    {"layout": "paper"},
    {"layout": "other"},
    {"layout": ["reference"]},
    {"temperature": 0},
    {"temperature": -0.01},
    {"temperature": float("nan")},
    {"temperature": float("inf")},
    {"temperature": True},
    {"temperature": "0.01"},
    {"temperature": None},
    {"surplus": 1},
]


@pytest.mark.parametrize("update", BINS, ids=str)
def test_impossible_bins_are_refused(update: dict[str, Any]) -> None:
    refusal(change(lambda facts, tensors, metadata: facts["bins"].update(update)))


def test_one_bin_named_true_is_refused() -> None:
    """Python would take true for 1: a file that fits one inner bin in everything else."""

    def alter(facts: Facts, tensors: Tensors, metadata: dict[str, str]) -> None:
        facts["bins"]["count"] = True
        for name in COUNTS:
            tensors[name] = torch.full((len(tensors[name]), 3), 200 / 3)

    assert "bins" in refusal(change(alter))


@pytest.mark.parametrize("spec", ["head@x", "head:side", "head@--1", "head@²", 3, None, True, ["head"]])
@pytest.mark.parametrize("name", ["features", "logits"])
def test_impossible_taps_are_refused(name: str, spec: Any) -> None:
    refusal(change(lambda facts, tensors, metadata: facts["taps"][name].update(spec=spec)))


@pytest.mark.parametrize("name", ["features", "logits"])
def test_a_profile_without_its_two_taps_is_refused(name: str) -> None:
    def drop(facts: Facts, tensors: Tensors, metadata: dict[str, str]) -> None:
        del facts["taps"][name]
        for part in ("counts", "low", "high"):
            del tensors[f"tap.{name}.{part}"]

    assert "lacks the taps" in refusal(change(drop))


INPUTS: list[dict[str, Any]] = [
    {"shape": "328"},
    {"shape": [3.0]},
    {"shape": [True]},
    {"shape": [-3]},
    {"shape": 3},
    {"dtype": ""},
    {"dtype": "a b"},
    {"low": 1e9},
    {"low": True},
    {"low": "0"},
    {"high": 10**400},
    {"mean": []},
    {"mean": "1"},
    {"mean": [True]},
    {"mean": [None]},
    {"mean": [0.1, 0.2]},
    {"deviation": [-0.1]},
    {"deviation": []},
    {"surplus": 1},
]


@pytest.mark.parametrize("update", INPUTS, ids=lambda update: str(update)[:30])
def test_an_impossible_description_of_inputs_is_refused(update: dict[str, Any]) -> None:
    message = refusal(change(lambda facts, tensors, metadata: facts["inputs"].update(update)))
    assert "description of its inputs" in message


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    if isinstance(value, dict | list):
        for key in value if isinstance(value, dict) else range(len(value)):
            yield from places(value[key], (*path, key))


WRONG: dict[type, list[Any]] = {
    dict: [None, True, 3, 1.5, "text", [], {}, ["features", "logits"], {"features": None}],
    list: [None, True, 3, 1.5, "abc", {}, [None], ["a"], [[1]], [{}]],
    str: [None, True, 3, 1.5, [], {}, ["reference"]],
    int: [None, True, 1.5, "3", [], {}, -1, float("nan")],
    float: [None, True, "1", [], {}, float("nan"), float("inf"), -float("inf")],
    type(None): [True, 1.5, [], {}],
}


@pytest.mark.slow
def test_wrong_types_everywhere_in_the_description_are_refused() -> None:
    original, tensors, metadata = take_apart()
    tried = 0
    for path in places(original):
        spot = original
        for key in path:
            spot = spot[key]
        for wrong in WRONG[type(spot)]:
            facts = copy.deepcopy(original)
            if path:
                owner = facts
                for key in path[:-1]:
                    owner = owner[key]
                owner[path[-1]] = wrong
            else:
                facts = wrong
            try:
                refusal(forge(facts, tensors, metadata))
            except BaseException as error:
                raise AssertionError(f"{path} = {wrong!r} was not refused properly") from error
            tried += 1
        if path and isinstance(path[-1], str):
            facts = copy.deepcopy(original)
            owner = facts
            for key in path[:-1]:
                owner = owner[key]
            del owner[path[-1]]
            refusal(forge(facts, tensors, metadata))
            tried += 1
    assert tried > 200


@pytest.mark.parametrize("text", ["", "null", "{", "[" * 100_000, '{"a":' * 100_000, "1" * 5000, "NaN", '"\\ud800"'])
def test_a_description_that_is_no_json_object_is_refused(text: str) -> None:
    _, tensors, metadata = take_apart()
    refusal(forge(text, tensors, metadata))


HEADERS = [b"", b"{", b"null", b"[]", b"3", b'"text"', b"{}", b'{"__metadata__":3}', b'{"__metadata__":[]}',
           b'{"__metadata__":{"format":3}}', b'{"__metadata__":[["format",[]]]}', b"[" * 100_000, b'{"a":' * 100_000,
           b"\xff\xfe{", b"\x00\x00\x00{", b"9" * 5000, b'{"__metadata__":{"format":"\\ud800"}}']  # fmt: skip


@pytest.mark.parametrize("header", HEADERS, ids=lambda header: repr(header[:24]))
def test_headers_that_are_none_are_refused(header: bytes) -> None:
    refusal(struct.pack("<Q", len(header)) + header + bytes(64))


@pytest.mark.parametrize("length", [0, 1, 1 << 22, (1 << 22) + 1, 1 << 31, 1 << 62, (1 << 64) - 1])
def test_lying_lengths_of_the_header_are_refused_without_making_room_for_them(length: int) -> None:
    tracemalloc.start()
    try:
        refusal(struct.pack("<Q", length) + CONTENT[8:])
        assert tracemalloc.get_traced_memory()[1] < 1 << 24
    finally:
        tracemalloc.stop()


def test_offsets_that_point_elsewhere_are_refused() -> None:
    (length,) = struct.unpack("<Q", CONTENT[:8])
    header = json.loads(CONTENT[8 : 8 + length])
    for name in TENSORS:
        for offsets in ([0, 0], [0, 1 << 40], [-4, 4], [8, 4], [0], "04"):
            changed = copy.deepcopy(header)
            if changed[name]["data_offsets"] == offsets:
                continue
            changed[name]["data_offsets"] = offsets
            text = json.dumps(changed, separators=(",", ":")).encode()
            refusal(seal(struct.pack("<Q", len(text)) + text + CONTENT[8 + length :]))


def test_names_of_any_length_make_one_short_sentence() -> None:
    def rename(facts: Facts, tensors: Tensors, metadata: dict[str, str]) -> None:
        facts["taps"]["x\n" * 5000] = facts["taps"]["logits"]

    refusal(change(rename))

    def nameless(facts: Facts, tensors: Tensors, metadata: dict[str, str]) -> None:
        name = "line\nbreak " * 500
        facts["taps"][name] = {"spec": "2", "entry": None, "samples": 200}
        for part in ("counts", "low", "high"):
            tensors[f"tap.{name}.{part}"] = tensors[f"tap.logits.{part}"].clone()
        tensors[f"tap.{name}.low"] += 1e6

    assert "above its highest" not in refusal(change(nameless))[:300]  # cut, because the name comes first


# --- what a small file may cost --------------------------------------------------------------------------------------


def test_more_slices_than_memory_allows_are_refused_before_they_are_built(monkeypatch: pytest.MonkeyPatch) -> None:
    """Directions are rebuilt from a seed, so that a small file could ask for any amount of memory."""

    def build(*_: Any) -> Projector:
        raise AssertionError("built")

    monkeypatch.setattr(Projector, "build", staticmethod(build))
    facts, tensors, metadata = take_apart()
    units = 9000
    for name, rows in (("tap.features", units), ("slices.verification", units)):
        tensors[f"{name}.counts"] = torch.full((rows, 10), 20.0)
        tensors[f"{name}.low"], tensors[f"{name}.high"] = torch.zeros(rows), torch.ones(rows)
    for name in ("features.mean", "features.deviation", "gaussian.mean", "gaussian.variance"):
        tensors[name] = torch.ones(units)
    assert "weights" in refusal(forge(facts, tensors, metadata))


def test_more_sets_of_slices_than_a_preset_has_are_refused_before_they_are_built(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(Projector, "build")

    def more(facts: Facts, tensors: Tensors, metadata: dict[str, str]) -> None:
        for index in range(3):
            facts["slices"][f"more {index}"] = facts["slices"]["verification"]
            for part in ("counts", "low", "high"):
                tensors[f"slices.more {index}.{part}"] = tensors[f"slices.verification.{part}"].clone()

    assert "its slices are" in refusal(change(more))


def test_surplus_slices_are_refused() -> None:
    def more(facts: Facts, tensors: Tensors, metadata: dict[str, str]) -> None:
        facts["slices"]["alignment"] = facts["slices"]["verification"]
        for part in ("counts", "low", "high"):
            tensors[f"slices.alignment.{part}"] = tensors[f"slices.verification.{part}"].clone()

    assert "its slices are" in refusal(change(more))


def test_files_beyond_the_limit_are_not_read_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profile_files, "MAX_BYTES", 1000)
    (tmp_path / "p").write_bytes(CONTENT)
    with pytest.raises(ProfileError, match="at most 1,000 bytes"):
        Profile.load(tmp_path / "p")
    if Path("/dev/zero").exists():  # has no size, and no end
        with pytest.raises(ProfileError, match="at most 1,000 bytes"):
            Profile.load("/dev/zero")


@pytest.mark.slow
def test_large_networks_fit() -> None:
    """Eight thousand features with the preset that stores most."""
    made = sized(8192, 1000, {"verification": 128, "alignment": 512}, "sliced")
    content = made.to_bytes()
    assert len(content) < profile_files.MAX_BYTES
    assert same(profile_files.decode(content), made)


# --- what is not a profile -------------------------------------------------------------------------------------------


def test_what_is_no_profile_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").write_bytes(b"")
    (tmp_path / "text").write_text("this is a text about profiles, and a rather long one\n" * 100)
    (tmp_path / "weights").write_bytes(safetensors.torch.save({"weight": torch.zeros(3)}))
    (tmp_path / "other").write_bytes(safetensors.torch.save({"weight": torch.zeros(3)}, {"format": "pt"}))
    (tmp_path / "pickle").write_bytes(b"\x80\x04\x95" + bytes(500))
    (tmp_path / "folder").mkdir()
    for name, expected in {
        "empty": "damaged or no safetensors file",
        "text": "damaged or no safetensors file",
        "weights": "no shiftmend profile",
        "other": "no shiftmend profile",
        "pickle": "damaged or no safetensors file",
        "folder": "cannot be read",
        "missing": "cannot be read",
    }.items():
        with pytest.raises(ProfileError, match=expected) as caught:
            Profile.load(tmp_path / name)
        assert str(tmp_path / name) in str(caught.value)
        with pytest.raises(ProfileError, match=expected):
            Profile.load(str(tmp_path / name))


# --- saving ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", ["replace", "fsync"])
def test_a_failure_leaves_the_old_file_and_nothing_else(
    step: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "p.safetensors"
    PROFILE.save(path)
    path.chmod(0o640)

    def fail(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, step, fail)
    with pytest.raises(ProfileError, match="No space left"):
        make("paper").save(path)
    monkeypatch.undo()
    assert path.read_bytes() == CONTENT
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert [entry.name for entry in tmp_path.iterdir()] == ["p.safetensors"]


def test_saving_again_keeps_the_permissions(tmp_path: Path) -> None:
    path = tmp_path / "p.safetensors"
    PROFILE.save(path)
    path.chmod(0o604)
    make("paper").save(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o604
    assert Profile.load(path).preset == "paper"
    assert [entry.name for entry in tmp_path.iterdir()] == ["p.safetensors"]


def test_directions_are_rebuilt_from_the_seed_alone() -> None:
    facts, tensors, _ = take_apart()
    seed = facts["slices"]["verification"]["seed"]
    loaded = profile_files.decode(CONTENT).slices["verification"]
    usable = PROFILE.taps["features"].usable.double()
    directions = random_directions(128, 8, seed).double() * usable
    directions /= directions.norm(dim=1, keepdim=True)
    expected = directions / torch.where(usable > 0, tensors["features.deviation"].double(), 1.0)
    torch.testing.assert_close(loaded.projector.weight.double(), expected, rtol=1e-5, atol=1e-7)


def test_a_tap_elsewhere_is_noticed_at_first_use() -> None:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 3))
    facts, tensors, metadata = take_apart()
    facts["taps"]["features"]["spec"] = "1"
    moved = profile_files.decode(forge(facts, tensors, metadata))
    inputs = torch.randn(50, 6)
    for use in (
        lambda: shiftmend.verify(model, inputs, moved, progress=False),
        lambda: shiftmend.adapt(model, inputs, moved, "fr", epochs=1, progress=False),
        lambda: shiftmend.stream(model, moved).step(inputs),
    ):
        with pytest.raises(ProfileError, match=r"8 units.*got 12"):
            use()
