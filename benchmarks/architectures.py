"""Which architectures can be mended as they are? Blocks, taps and one step of AdaBN, FR and BUFR on each.

    python benchmarks/architectures.py --device cuda --page docs/results/architectures.md
    python benchmarks/architectures.py --device cpu --samples 8 --row-limit 4 --page docs/results/architectures.md

Weights and inputs are random, so no accuracy is measured: the question is whether the head is found, what the blocks
are, whether a step reaches each of them and spares the head, and what it costs. Nothing is downloaded. An architecture
that fails becomes a row with its error; the others go on. A run that was cut off goes on from `--out`, and tries failed
rows again. Each row knows the device, the number of samples and the version of torch that it was measured with. On a
CPU, 8 samples answer the question as well as 64. Torchvision and transformers are needed for most rows.
"""

from __future__ import annotations

import argparse
import gc
import logging
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import shiftmend
from bench_models import Deadline, RowFile
from shiftmend.adaptation.result import environment
from shiftmend.introspection.blocks import Block, split_blocks
from shiftmend.introspection.modes import find_batch_norms
from shiftmend.introspection.trace import trace
from shiftmend.utils.devices import resolve_device
from shiftmend.utils.files import write_atomically
from shiftmend.utils.tensor_tree import wrap_inputs

SAMPLES = 64
"""Samples of the site, which are one batch: an epoch is one step."""
METHODS: dict[str, dict[str, Any]] = {"adabn": {}, "fr": {"epochs": 1}, "bufr": {"epochs_per_block": 1}}
TITLES = {"adabn": "AdaBN", "fr": "FR", "bufr": "BUFR"}
CLASSES = 10
SEED = 0

Row = dict[str, Any]
Inputs = Tensor | dict[str, Tensor]


@dataclass(frozen=True)
class Architecture:
    """How a network is built, and the inputs at home and at the site that it takes."""

    origin: str
    make: Callable[[], nn.Module]
    draw: Callable[[int], tuple[Inputs, Inputs]]
    """Returns so many inputs of home and of the site."""


# ---- inputs


def draw_images(samples: int, side: int = 224) -> tuple[Tensor, Tensor]:
    """Draw images of smooth random blobs; those of the site have less contrast and are brighter."""
    coarse = torch.randn(2 * samples, 3, 7, 7)
    home, away = nn.functional.interpolate(coarse, size=(side, side), mode="bilinear").split(samples)
    return home, 0.5 * away + 0.8


def draw_tokens(samples: int, length: int = 64, words: int = 1000) -> tuple[Inputs, Inputs]:
    """Draw texts of random words; at the site a third of the words is lost to the unknown word 1."""
    ids = torch.randint(2, words, (2 * samples, length))
    mask = (torch.arange(length) < torch.randint(length // 2, length + 1, (2 * samples, 1))).long()
    home, away = ids.split(samples)
    away = torch.where(torch.rand(away.shape) < 1 / 3, 1, away)
    kept = mask.split(samples)
    return {"input_ids": home, "attention_mask": kept[0]}, {"input_ids": away, "attention_mask": kept[1]}


def draw_signals(samples: int, channels: int = 6, length: int = 128) -> tuple[Tensor, Tensor]:
    """Draw random walks; the site's sensor has another gain and an offset."""
    home, away = torch.randn(2 * samples, channels, length).cumsum(-1).div(length**0.5).split(samples)
    return home, 1.5 * away + 0.5


# ---- networks of our own


class Mixer(nn.Module):
    """An MLP-Mixer: layers that mix patches alternate with layers that mix channels."""

    def __init__(self, side: int = 224, patch: int = 16, width: int = 512, depth: int = 8) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, patch, patch)
        self.layers = nn.ModuleList(MixerLayer((side // patch) ** 2, width) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        tokens = self.stem(images).flatten(2).transpose(1, 2)
        for layer in self.layers:
            tokens = layer(tokens)
        return self.head(self.norm(tokens).mean(1))


class MixerLayer(nn.Module):
    def __init__(self, patches: int, width: int) -> None:
        super().__init__()
        self.before_patches, self.before_channels = nn.LayerNorm(width), nn.LayerNorm(width)
        self.patches = nn.Sequential(nn.Linear(patches, width // 2), nn.GELU(), nn.Linear(width // 2, patches))
        self.channels = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, tokens: Tensor) -> Tensor:
        tokens = tokens + self.patches(self.before_patches(tokens).transpose(1, 2)).transpose(1, 2)
        return tokens + self.channels(self.before_channels(tokens))


class UNet(nn.Module):
    """A U-Net: the way down, the way up, and connections between them."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        widths = [width, 2 * width, 4 * width, 8 * width]
        self.down = nn.ModuleList(_convolve_twice(i, o) for i, o in zip([3, *widths], widths, strict=False))
        self.up = nn.ModuleList(_convolve_twice(3 * o, o) for o in reversed(widths[:-1]))
        self.head = nn.Conv2d(width, CLASSES, 1)

    def forward(self, images: Tensor) -> Tensor:
        kept: list[Tensor] = []
        for stage in self.down:
            images = stage(nn.functional.max_pool2d(images, 2) if kept else images)
            kept.append(images)
        for stage, beside in zip(self.up, reversed(kept[:-1]), strict=True):
            images = stage(torch.cat([nn.functional.interpolate(images, scale_factor=2), beside], 1))
        return self.head(images)


def _convolve_twice(inputs: int, outputs: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for width in (inputs, outputs):
        layers += [nn.Conv2d(width, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers)


class Recurrent(nn.Module):
    """A convolution and a recurrent network over a signal."""

    def __init__(self, channels: int = 6, width: int = 64) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv1d(channels, width, 5, stride=2), nn.BatchNorm1d(width), nn.ReLU())
        self.gru = nn.GRU(width, width, num_layers=2, batch_first=True)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, signals: Tensor) -> Tensor:
        return self.head(self.gru(self.stem(signals).transpose(1, 2))[0][:, -1])


# ---- networks of other libraries


def _vision(name: str, **options: Any) -> Callable[[], nn.Module]:
    """Return a maker of a network of torchvision with random weights."""

    def make() -> nn.Module:
        from torchvision import models

        made: nn.Module = models.get_model(name, weights=None, num_classes=CLASSES, **options)
        return made

    return make


def make_small_vit() -> nn.Module:
    from torchvision.models import VisionTransformer

    made: nn.Module = VisionTransformer(
        image_size=224, patch_size=16, num_layers=12, num_heads=6, hidden_dim=384, mlp_dim=1536, num_classes=CLASSES
    )
    # Torchvision begins with a head of zeros, whose logits are constant.
    nn.init.normal_(made.heads.head.weight, std=0.05)
    return made


def make_base_vit() -> nn.Module:
    made = _vision("vit_b_16")()
    nn.init.normal_(made.heads.head.weight, std=0.05)
    return made


def make_deeplab() -> nn.Module:
    made = _vision("deeplabv3_mobilenet_v3_large", weights_backbone=None)()
    # Random weights shrink the maps to 1e-9, and so to constant logits, unless BatchNorm knows their size.
    return shiftmend.refresh_batchnorm(made, draw_images(64, 64)[0], batch_size=32, device="cpu", progress=False)


def make_deit() -> nn.Module:
    from transformers import DeiTConfig, DeiTForImageClassification

    made: nn.Module = DeiTForImageClassification(
        DeiTConfig(hidden_size=384, num_attention_heads=6, intermediate_size=1536, num_labels=CLASSES)
    )
    return made


def make_bert() -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    made: nn.Module = BertForSequenceClassification(
        BertConfig(
            vocab_size=1000, hidden_size=256, num_hidden_layers=4, num_attention_heads=4, intermediate_size=1024,
            num_labels=CLASSES,
        )
    )  # fmt: skip
    return made


def make_segformer() -> nn.Module:
    from transformers import SegformerConfig, SegformerForSemanticSegmentation

    made: nn.Module = SegformerForSemanticSegmentation(SegformerConfig(num_labels=CLASSES))
    return made


CATALOGUE: dict[str, Architecture] = {
    "ResNet-50": Architecture("torchvision", _vision("resnet50"), draw_images),
    "RegNetY-800MF": Architecture("torchvision", _vision("regnet_y_800mf"), draw_images),
    "DenseNet-121": Architecture("torchvision", _vision("densenet121"), draw_images),
    "EfficientNet-B0": Architecture("torchvision", _vision("efficientnet_b0"), draw_images),
    "MobileNetV3-L": Architecture("torchvision", _vision("mobilenet_v3_large"), draw_images),
    "ConvNeXt-T": Architecture("torchvision", _vision("convnext_tiny"), draw_images),
    "Swin-T": Architecture("torchvision", _vision("swin_t"), draw_images),
    "ViT-S/16": Architecture("torchvision", make_small_vit, draw_images),
    "ViT-B/16": Architecture("torchvision", make_base_vit, draw_images),
    "DeiT-S": Architecture("transformers", make_deit, draw_images),
    "MLP-Mixer": Architecture("written in the script", Mixer, draw_images),
    "BERT, 4 layers, dict inputs": Architecture("transformers", make_bert, draw_tokens),
    "GRU on signals": Architecture("written in the script", Recurrent, draw_signals),
    "FCN-ResNet-50, segmentation": Architecture(
        "torchvision", _vision("fcn_resnet50", weights_backbone=None), lambda samples: draw_images(samples, 64)
    ),
    "DeepLabV3-MobileNetV3, segmentation": Architecture(
        "torchvision", make_deeplab, lambda samples: draw_images(samples, 64)
    ),
    "SegFormer-B0, segmentation": Architecture(
        "transformers", make_segformer, lambda samples: draw_images(samples, 64)
    ),
    "U-Net, segmentation": Architecture(
        "written in the script", UNet, lambda samples: draw_images(samples, 64)
    ),
}  # fmt: skip


# ---- measuring


def measure(architecture: Architecture, device: torch.device, samples: int = SAMPLES) -> Row:
    """Build a network, profile it and adapt it by one step of each method; an error becomes part of the row."""
    row: Row = {"origin": architecture.origin}
    try:
        torch.manual_seed(SEED)
        model = architecture.make().eval()
        home, away = architecture.draw(samples)
        found = trace(model, wrap_inputs(home)[:2])
        blocks = split_blocks(model, found)
        row |= {
            "parameters": sum(parameter.numel() for parameter in model.parameters()),
            "batchnorms": len(find_batch_norms(model)),
            "head": found.head,
            "taps": {name: {"at": str(tap), "units": found.units[name]} for name, tap in found.taps.items()},
            "blocks": [block.name for block in blocks],
        }
        began = time.perf_counter()
        profile = shiftmend.profile(model, home, device=device, batch_size=samples, progress=False)
        row |= {"profile_seconds": round(time.perf_counter() - began, 3), "profile_bytes": len(profile.to_bytes())}
    except Exception as error:  # The table is about what fails, whatever the reason.
        return row | {"error": _describe_error(error), "methods": {}}
    names = [name for name in METHODS if row["batchnorms"] or name != "adabn"]
    row["methods"] = {name: adapt_once(model, away, profile, name, device, samples, blocks) for name in names}
    return row


def adapt_once(
    model: nn.Module,
    away: Inputs,
    profile: shiftmend.Profile,
    method: str,
    device: torch.device,
    samples: int,
    blocks: Sequence[Block],
) -> Row:
    """Adapt by one step, of each block for BUFR; return what changed and what it cost."""
    on_cuda = device.type == "cuda"
    gc.collect()
    if on_cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    began = time.perf_counter()
    try:
        result = shiftmend.adapt(
            model, away, profile, method, batch_size=samples, device=device, progress=False, **METHODS[method]
        )
    except Exception as error:
        return {"error": _describe_error(error)}
    seconds = time.perf_counter() - began
    before, after = model.state_dict(), result.model.state_dict()
    changed = {name for name, value in before.items() if not torch.equal(value, after[name].to(value.device))}
    inside = {name for block in blocks for name in block.parameters}
    parameters = {name for name, _ in model.named_parameters()}
    return {
        "seconds": round(seconds, 3),
        "peak_mebibytes": round(torch.cuda.max_memory_allocated(device) / 2**20, 1) if on_cuda else None,
        "blocks_changed": sum(any(name in changed for name in block.parameters) for block in blocks),
        "buffers_changed": len(changed - parameters),
        "outside_changed": sorted((changed & parameters) - inside),
    }


def _describe_error(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]


class TooLong(BaseException):
    """A row took longer than its limit. No `except Exception` on the way takes it for an error of the network."""


@contextmanager
def limit(seconds: float | None) -> Iterator[None]:
    """Raise `TooLong` inside the block after so many seconds, between two operations of torch."""

    def stop(number: int, frame: object) -> None:
        raise TooLong

    if seconds is None:
        yield
        return
    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def measure_all(
    catalogue: Mapping[str, Architecture],
    file: RowFile,
    device: torch.device,
    deadline: Deadline,
    samples: int,
    row_seconds: float | None = None,
) -> None:
    """Measure what the file does not hold yet, until the deadline; failed rows are tried again.

    An architecture that takes longer than `row_seconds` is left out, as if it had not been tried.
    """
    facts: dict[str, Any] = {name: value for name, value in environment(device).items() if name != "platform"}
    if device.type == "cpu":
        facts["threads"] = torch.get_num_threads()
    manifest = {"environment": facts, "samples": samples, "seed": SEED, "methods": METHODS}
    file.rows[:] = [row for row in file.rows if not find_errors(row)]
    for name, architecture in catalogue.items():
        if file.has(name) or not deadline.allows():
            continue
        try:
            with limit(row_seconds):
                row = measure(architecture, device, samples)
        except TooLong:
            print(f"{name}: left out, since it took longer than {row_seconds:.0f} s", flush=True)
        else:
            print(describe_row(file.add((name,), row, manifest)), flush=True)
        deadline.done()
    if deadline.skipped:
        print(f"{deadline.skipped} architectures are left for another run", flush=True)


def find_errors(row: Row) -> dict[str, str]:
    """Return the errors of a row by where they came up."""
    found = {"profile": row["error"]} if "error" in row else {}
    return found | {name: one["error"] for name, one in row["methods"].items() if "error" in one}


# ---- the page


def describe_row(row: Row) -> str:
    errors = "; ".join(f"{name} failed: {text}" for name, text in find_errors(row).items())
    parts = [f"{name} {one['seconds']:.2f} s" for name, one in row["methods"].items() if "seconds" in one]
    return f"{row['architecture']}: {len(row.get('blocks', ()))} blocks, {', '.join(parts)}" + (
        errors and f"; {errors}"
    )


def describe_method(row: Row, name: str) -> str:
    """Return the cell of a method: seconds and peak memory, or what went wrong."""
    one = row["methods"].get(name)
    if one is None:
        return "–"
    if "error" in one:
        return "failed"
    memory = "" if one["peak_mebibytes"] is None else f", {one['peak_mebibytes'] / 1024:.1f} GiB"
    wrong = " **outside its blocks**" if one["outside_changed"] else ""
    trains = name != "adabn"
    missing = len(row["blocks"]) - one["blocks_changed"] if trains else 0
    wrong += f" **{missing} blocks unchanged**" if missing else ""
    wrong += "" if trains or one["buffers_changed"] else " **nothing changed**"
    return f"{one['seconds']:.1f} s{memory}{wrong}"


def describe_where(manifest: Mapping[str, Any]) -> str:
    """Return the device, the number of samples and the version of torch of a row, in short."""
    facts = manifest["environment"]
    device = "CPU" if facts["device"] == "cpu" else facts["device"]
    if "threads" in facts:
        device += f" ({facts['threads']} thread{'s' * (facts['threads'] > 1)})"
    return f"{device}, {manifest['samples']} samples, torch {facts['torch'].partition('+')[0]}"


def write_page(file: RowFile, order: Sequence[str]) -> str:
    """Write the page of all rows, in the order of the catalogue."""
    rows = sorted(file.rows, key=lambda row: order.index(row["architecture"]) if row["architecture"] in order else 99)
    worked = [row for row in rows if not find_errors(row)]
    lines = [
        "# Architectures",
        "",
        "Made by `python benchmarks/architectures.py --page` from `results/architectures.json` and from nothing else.",
        "Networks have random weights and inputs are random; no accuracy is measured. Each network is passed as it",
        "is: no option names its head, its taps or its blocks. *Run on* tells the device, the samples, which are one",
        "batch, and the version of torch. Seconds are a whole call of `adapt` with one step (BUFR: one step a block),",
        "with its checks and its verification before and after. Compare them only between rows run on the same, and",
        "roughly: a CPU may have had other work. *GiB* is the peak memory of a GPU. A step changed every block and",
        "nothing outside the blocks, unless a cell says otherwise.",
        "",
        "Constant logits are refused, which random weights may cause: torchvision's ViTs get a random head instead of",
        "one of zeros, and DeepLab's BatchNorm its statistics from inputs of home. Trained networks need neither.",
        "",
        f"**{len(worked)} of {len(rows)} architectures went through all methods that apply to them.**",
        "",
        "| architecture | from | million parameters | head | features | blocks | run on | "
        + " | ".join(TITLES[name] for name in METHODS)
        + " |",
        "|" + "---|" * (7 + len(METHODS)),
    ]
    for row in rows:
        where = describe_where(file.manifests[row["manifest"]])
        if "blocks" not in row:
            failed_cells = " – |" * 4 + f" {where} |" + " failed |" * len(METHODS)
            lines.append(f"| {row['architecture']} | {row['origin']} |{failed_cells}")
            continue
        cells = [row["architecture"], row["origin"], f"{row['parameters'] / 1e6:.1f}", f"`{row['head']}`"]
        cells += [str(row["taps"]["features"]["units"]), str(len(row["blocks"])), where]
        methods = [describe_method(row, name) if row["methods"] else "failed" for name in METHODS]
        lines.append(f"| {' | '.join([*cells, *methods])} |")
    lines += ["", "AdaBN needs BatchNorm; a dash stands where a network has none."]
    missing = [name for name in order if name not in {row["architecture"] for row in rows}]
    lines += ["", f"Not run yet: {'; '.join(missing)}."] if missing else []
    failed = {row["architecture"]: errors for row in rows if (errors := find_errors(row))}
    if failed:
        lines += ["", "## What failed", ""]
        lines += [f"- {name}, {where}: {text}" for name, errors in failed.items() for where, text in errors.items()]
    lines += ["", "## Blocks", "", "In the order in which BUFR unfreezes them.", ""]
    lines += [
        f"- {row['architecture']}: {', '.join(f'`{name}`' for name in row['blocks'])}"
        for row in rows
        if "blocks" in row
    ]
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="architectures to try; all by default")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--samples", type=int, default=SAMPLES, help="samples of home and of the site, one batch")
    parser.add_argument("--time-limit", type=float, metavar="MINUTES", help="begin nothing that would last longer")
    parser.add_argument("--row-limit", type=float, metavar="MINUTES", help="leave out what takes longer")
    parser.add_argument("--out", type=Path, default=Path("results/architectures.json"))
    parser.add_argument("--page", type=Path, help="write the page of all rows in --out")
    parser.add_argument("--only-page", action="store_true", help="measure nothing")
    options = parser.parse_args(arguments)
    unknown = [name for name in options.names if name not in CATALOGUE]
    if unknown:
        parser.error(f"Expected names of {', '.join(CATALOGUE)}, got {unknown[0]}.")
    file = RowFile(options.out, ("architecture",))
    if not options.only_page:
        logging.getLogger("shiftmend").setLevel(logging.ERROR)
        chosen = {name: CATALOGUE[name] for name in options.names or CATALOGUE}
        deadline = Deadline(options.time_limit and 60 * options.time_limit)
        device = resolve_device(options.device)
        # The first run of all loads libraries and compiles kernels, which is no cost of its architecture.
        measure(CATALOGUE["GRU on signals"], device, options.samples)
        measure_all(chosen, file, device, deadline, options.samples, options.row_limit and 60 * options.row_limit)
    if options.page is not None:
        write_atomically(options.page, write_page(file, list(CATALOGUE)).encode())


if __name__ == "__main__":
    main()
