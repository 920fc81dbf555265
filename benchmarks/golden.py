"""Compute golden digests of what shiftmend does on the CPU, to prove that a refactoring has changed nothing.

    python golden.py --write golden.json      # on the code to compare with
    python golden.py --compare golden.json    # on the changed code; exit code 1 if anything differs

Use names of the public API and the command line alone, so that modules may move. `--only PATTERN` takes the entries
whose names contain it; `--dump FOLDER` also writes every value in full: do so on both sides, and diff the folders.
"""

import argparse
import contextlib
import hashlib
import html
import io
import json
import logging
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from fnmatch import fnmatch
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

# One thread, and instructions that every x86 machine of the last ten years has: sums are rounded alike on all of them.
os.environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "COLUMNS": "100"}
os.environ |= {"MKL_CBWR": "COMPATIBLE", "ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"}
for unwanted in ("SHIFTMEND_DATA", "FORCE_COLOR", "TTY_COMPATIBLE", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
    os.environ.pop(unwanted, None)

import numpy as np  # noqa: E402
import safetensors.torch  # noqa: E402
import torch  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.nn import functional  # noqa: E402
from torch.utils.data import DataLoader, TensorDataset  # noqa: E402

import shiftmend  # noqa: E402
from shiftmend.cli import main  # noqa: E402

Values = dict[str, Any]
KINDS = ("images", "plain", "regression", "dense", "signal", "tokens")
CLASSES, IGNORED = 5, 255
VARYING = {"seconds", "seconds_in_epochs", "environment", "library", "shiftmend", "peak_memory", "finished"}
CASES: dict[str, Callable[[], Values]] = {}


class Tokens(nn.Module):
    """Classify the nine tokens of an image, each by itself; the last axis counts units."""

    shiftmend_taps = {"features": "head:input@-1", "logits": "head@-1"}  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm, self.head = nn.Linear(16, 16), nn.LayerNorm(16), nn.Linear(16, CLASSES)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(16, 2, 32, 0.1, batch_first=True) for _ in range(2))

    def forward(self, images: Tensor) -> Tensor:
        tokens = self.embed(functional.unfold(images, 4, stride=4).transpose(1, 2))
        for layer in self.layers:
            tokens = layer(tokens)
        return self.head(self.norm(tokens)).mean(1)


def make(kind: str = "images") -> nn.Module:
    """Build the network for a kind of task; the command line calls this, too."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(KINDS.index(kind))
        if kind == "tokens":
            return Tokens().eval()
        one = kind == "signal"
        convolve, normalise = (nn.Conv1d, nn.BatchNorm1d) if one else (nn.Conv2d, nn.BatchNorm2d)
        body = [convolve(1 + one, 8, 3, padding=1), normalise(8), nn.ReLU()]
        body += [convolve(8, 16, 3, padding=1), normalise(16), nn.ReLU()]
        if kind == "plain":
            body = [layer for layer in body if not isinstance(layer, normalise)]
        if kind == "dense":
            return nn.Sequential(*body, nn.Conv2d(16, 3, 1)).eval()
        body += [nn.AdaptiveAvgPool1d(4) if one else nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Dropout(0.2)]
        return nn.Sequential(*body, nn.Linear(64, 2 if kind == "regression" else CLASSES)).eval()


def data(kind: str, seed: int, shifted: bool = False) -> tuple[Tensor, Tensor]:
    """Draw inputs, images among them in 8-bit steps from -1 to 1, and what is to be predicted of them."""
    # so many images that verdicts are decided, so many pixels of dense ones that a verification leaves some out
    count, side = {"images": (1000, 12), "dense": (80, 18)}.get(kind, (320, 12))
    dice = torch.Generator().manual_seed(seed)
    labels = torch.randint(CLASSES, (count,), generator=dice)
    coarse = torch.rand(CLASSES, 1, 4, 4, generator=torch.Generator().manual_seed(1))
    clean = functional.interpolate(coarse, side, mode="bilinear")[labels]
    clean = clean * (0.6 + 0.4 * torch.rand(count, 1, 1, 1, generator=dice))
    noisy = clean + 0.1 * torch.randn(clean.shape, generator=dice)
    if shifted:
        noisy = 0.5 * noisy + 0.35 * (torch.arange(side) % 3 == 0)
    inputs = noisy.clamp(0, 1).mul(255).round() / 255 * 2 - 1
    if kind == "regression":
        return inputs, torch.stack([clean.mean((1, 2, 3)), clean[..., :6].amax((1, 2, 3))], 1)
    if kind == "dense":
        return inputs, (3 * clean[:, 0]).long().clamp(0, 2).masked_fill(torch.arange(side) < 2, IGNORED)
    return inputs.reshape(count, 2, -1) if kind == "signal" else inputs, labels


@cache
def task(kind: str = "images") -> SimpleNamespace:
    """Train a model for a few epochs in plain torch; give it with data from home and from a shifted device."""
    model, (home, home_labels), (away, away_labels) = make(kind).train(), data(kind, 10), data(kind, 11, True)
    classify = partial(functional.cross_entropy, ignore_index=IGNORED)
    compare = functional.mse_loss if kind == "regression" else classify
    optimiser = torch.optim.Adam(model.parameters(), lr=0.01)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for _ in range(6):
            for rows in torch.randperm(len(home)).split(64):
                optimiser.zero_grad()
                compare(model(home[rows]), home_labels[rows]).backward()
                optimiser.step()
    return SimpleNamespace(model=model.eval(), home=(home, home_labels), away=(away, away_labels))


def home_profile(kind: str = "images", **options: Any) -> shiftmend.Profile:
    """Profile a model at home; the version, which stands in the bytes of a profile, is made one that stays."""
    return replace(shiftmend.profile(task(kind).model, task(kind).home, batch_size=128, **options), library="golden")


def raw(tensor: Tensor) -> bytes:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def weights(model: nn.Module) -> bytes:
    """Join the names and exact bytes of all parameters and buffers."""
    tensors = sorted({**dict(model.named_parameters()), **dict(model.named_buffers())}.items())
    return b"".join(f"{name} {value.dtype} {[*value.shape]} ".encode() + raw(value) for name, value in tensors)


def steady(value: Any) -> Any:
    """Leave out what varies from run to run, or with the version."""
    if isinstance(value, dict):
        return {key: steady(one) for key, one in value.items() if key not in VARYING}
    return [steady(one) for one in value] if isinstance(value, list | tuple) else value


def as_json(value: Any) -> str:
    return json.dumps(steady(value), sort_keys=True, indent=1)


def described(result: shiftmend.Adaptation) -> Values:
    """Write down all of an adaptation."""
    last = result.history[-1]
    return {
        "weights": weights(result.model),
        "last": f"epoch {last.epoch}, loss {last.loss!r}, verification {last.verification!r}, kept {result.kept.epoch}",
        "history": as_json([row.to_json() if hasattr(row, "to_json") else asdict(row) for row in result.history]),
        "before": str(result.before),
        "after": str(result.after),
        "repr": repr(result),
        "manifest": as_json(result.manifest),
    }


GIVEN: Values = {"learning_rate": 0.1}
METHODS: dict[str, Values] = {name: {"epochs": 2} for name in ("pl", "shot-im", "shot", "tent", "bnm", "bnm-im", "fr")}
METHODS |= {"source-only": {}, "adabn": {}, "bufr": {"epochs_per_block": 2}}
METHODS["full-gauss"] = {"epochs": 2, "profile": {"gaussian": "full"}, "batch_size": 128}
METHODS["target-supervised"] = {"epochs": 2, "learning_rate": 0.05, "labels": True}
RESTORING: dict[str, Values] = {kind: {"kind": kind} for kind in KINDS[1:]} | {
    "rate": GIVEN,
    "autocast": GIVEN | {"autocast": True},
    "keep selected": {"learning_rate": 5.0, "keep": "selected"},
    "several rates": {"learning_rate": [0.001, 0.1, 3.0], "keep": "selected"},
    "another seed": GIVEN | {"seed": 7},
    "taps": GIVEN | {"profile": {"taps": {"early": "2"}}, "align": ("features", "early")},
    "bins": {"profile": {"bins": shiftmend.Bins(6, temperature=0.05)}},
    "preset paper": {"profile": {"preset": "paper"}},
    "preset sliced": GIVEN | {"profile": {"preset": "sliced"}},
    "streamed": GIVEN | {"resident": False, "batch_size": None},
    "preprocess": GIVEN | {"preprocess": lambda images: images / 127.5 - 1},
    "blocks": GIVEN | {"blocks": ["0", ["1", "3", "4"]]},
    "diverging": {"learning_rate": 1e30},
}


def adapted(method: str, kind: str = "images", profile: Values | None = None, **options: Any) -> Values:
    """Adapt the model of one kind, and see that the caller's is as it was."""
    model, (target, labels), options = task(kind).model, task(kind).away, {"batch_size": 64} | options
    before = weights(model)
    if "labels" in options:
        options["labels"] = labels
    if "preprocess" in options:
        target = ((target + 1) * 127.5).round().byte()
    if "resident" in options:
        dice = torch.Generator().manual_seed(3)
        target = DataLoader(TensorDataset(target, labels), 48, shuffle=True, generator=dice)
    try:
        result, said = shiftmend.adapt(model, target, home_profile(kind, **profile or {}), method, **options), ""
    except shiftmend.DivergedError as error:
        result, said = error.adaptation, str(error)
    return described(result) | {"error": said, "caller's model untouched": weights(model) == before}


def resumed(method: str, **options: Any) -> Values:
    """Interrupt a run in its second epoch, go on from the checkpoint, and compare with one that was left alone."""

    def stop(model: nn.Module, row: Any) -> None:
        if row.epoch == 2:
            raise KeyboardInterrupt

    given = task().model, task().away, home_profile(), method
    run = partial(shiftmend.adapt, *given, batch_size=64, keep="selected", learning_rate=0.01, **options)
    first = run(checkpoint="checkpoint", on_epoch=stop)
    second, alone = described(run(checkpoint="checkpoint")), described(run())
    differing = [name for name, value in alone.items() if second[name] != value]
    found = described(first) | {"interrupted": first.interrupted, "weights of resumed": second["weights"]}
    return found | {"resumed differs from uninterrupted in": differing}


def streamed(method: str, **options: Any) -> Values:
    """Step through five batches, the last of them a single sample."""
    online = shiftmend.stream(task().model, home_profile(), method, window=3, **options)
    steps = [(online.step(batch), dict(online.losses)) for batch in task().away[0][:241].split(60)]
    return {
        "outputs": b"".join(raw(output) for output, _ in steps),
        "losses": repr([losses for _, losses in steps]),
        "verification": f"{online.verification} {online.verification!r}",
        "repr": repr(online),
        "snapshot": weights(online.snapshot()),
    }


def profiled(kind: str = "images", made: shiftmend.Profile | None = None, **options: Any) -> Values:
    """Write down all of a profile; it must survive its file."""
    replace(made or home_profile(kind, **options), library="golden").save("profile")
    loaded, content = shiftmend.Profile.load("profile"), Path("profile").read_bytes()
    return {"bytes": content, "repr": repr(loaded), "survives its file": loaded.to_bytes() == content}


def put_together(mixture: bool) -> Values:
    """Profile each class like the whole, and merge or mix them."""
    (inputs, labels), whole = task().home, home_profile()
    made = [shiftmend.profile(task().model, inputs[labels == number], like=whole) for number in range(3)]
    return profiled(made=whole.mixture(made, [9, 1, 0]) if mixture else made[0].merge(made[1]).merge(made[2]))


def judged(kind: str) -> Values:
    """Verify and evaluate a model on new samples from home, as they are and a little brighter, and away."""
    found, profile, new = {}, home_profile(kind), data(kind, 12)
    for where, (inputs, labels) in {"home": new, "brighter": (new[0] + 0.03, new[1]), "away": task(kind).away}.items():
        verification = shiftmend.verify(task(kind).model, inputs, profile, batch_size=100)
        ignored = IGNORED if kind == "dense" else None
        scores = shiftmend.evaluate(task(kind).model, (inputs, labels), ignore_label=ignored)
        found |= {f"{where} verified": str(verification), f"{where} verified exactly": repr(verification)}
        found |= {f"{where} evaluated": str(scores), f"{where} evaluated exactly": repr(scores)}
    return found


def stats_layer() -> Values:
    layer = shiftmend.StatsLayer(1, shiftmend.Bins(6, "paper"))
    for mode, (inputs, _) in (("range", task().home), ("counts", task().home), ("align", task().away)):
        layer.track(mode)(inputs)
    return {"repr": repr(layer), "buffers": weights(layer), "loss": layer.loss().item()}


def shell(*arguments: str) -> str:
    """Run a command; give all that it prints, and its exit code."""
    out, err, code = io.StringIO(), io.StringIO(), None
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main([*arguments])
        except SystemExit as end:
            code = end.code
    return f"{out.getvalue()}--- standard error, exit code {code}\n{err.getvalue()}"


def neutral(text: str) -> str:
    """Leave versions and durations out of what was printed."""
    text = re.sub(rf'(shiftmend"?:? "?){re.escape(shiftmend.__version__)}', r"\1VERSION", text)
    return re.sub(r"\b\d+(\.\d+)? (s|min|h)\b", "SOME TIME", text)


def json_of(*arguments: str) -> Any:
    """Run a command that prints JSON."""
    return json.loads(shell(*arguments).partition("\n--- standard error, exit code 0\n")[0])


def files(kind: str) -> list[str]:
    """Write weights, profile and data of one kind here; give the words that name the model."""
    shutil.copy(__file__, "nets.py")
    safetensors.torch.save_file(task(kind).model.state_dict(), f"{kind}.safetensors")
    for where, (inputs, labels) in {"home": task(kind).home, "away": task(kind).away}.items():
        named = {"images": ((inputs + 1) * 127.5).round().byte()} if kind == "images" else {"inputs": inputs}
        np.savez(f"{where}.npz", **{name: value.numpy() for name, value in named.items()}, labels=labels.numpy())
    home_profile(kind).save("home.profile")
    return ["nets.py:make", "--model-option", f"kind={kind}", "--weights", f"{kind}.safetensors"]


def commands() -> Values:
    """Run the commands about a model one after the other, as a user does."""
    model, home, away = files("images"), ["--data", "home.npz"], ["--data", "away.npz"]
    judge = [*model, *away, "--profile", "home.profile"]
    bufr = ["--method", "bufr", "--option", "epochs_per_block=1"]
    fr = ["--method", "fr", "--option", "epochs=2", "--batch-size", "64"]
    calls = {
        "profile": ["profile", *model, *home, "--out", "a.profile"],
        "profile sliced": ["profile", *model, *home, "--out", "b.profile", "--preset", "sliced"],
        "profile like": ["profile", *model, *away, "--out", "c.profile", "--like", "a.profile"],
        "inspect": ["inspect", "a.profile"],
        "mix": ["mix", "a.profile", "c.profile", "--shares", "3,1", "--out", "d.profile"],
        "blocks": ["blocks", *model, "--shape", "1,12,12"],
        "blocks built in": ["blocks", "resnet18", "--shape", "3,32,32", "--model-option", "classes=10", "--json"],
        "verify": ["verify", *judge],
        "verify json": ["verify", *judge, "--json"],
        "evaluate": ["evaluate", *model, *away],
        "evaluate json": ["evaluate", *model, *away, "--json"],
        "adapt": ["adapt", *judge, "--out", "mended", *bufr, "--batch-size", "64"],
        "evaluate mended": ["evaluate", *model[:3], "--weights", "mended/model.safetensors", *away],
        "no weights": ["evaluate", *model[:3], *away],
        "no data": ["evaluate", *model, "--data", "none.npz"],
        "no such method": ["adapt", *judge, "--out", "other", "--method", "frr"],
        "no such command": ["adopt"],
    }
    found: Values = {name: neutral(shell(*call)) for name, call in calls.items()}
    found["adapt json"] = as_json(json_of("adapt", *judge, "--out", "again", *fr, "--json"))
    mended = safetensors.torch.load_file("mended/model.safetensors")
    return found | {"weights": b"".join(name.encode() + raw(value) for name, value in sorted(mended.items()))}


def reported(kind: str, *more: str, where: str = "away", mended: bool = False) -> Values:
    """Write a report; give its text as it stands, and what a reader sees of it."""
    common = [*files(kind), "--data", f"{where}.npz", "--profile", "home.profile"]
    if mended:
        shell("adapt", *common, "--out", "mended", "--method", "fr", "--option", "epochs=2", "--batch-size", "64")
        for file in map(Path, ("mended/manifest.json", "mended/history.json")):
            text = re.sub(r'("seconds\w*": )[\d.]+', r"\g<1>1.5", file.read_text())
            file.write_text(re.sub(r'("environment": )\{.*?\}', r'\1{"device": "cpu"}', text, flags=re.DOTALL))
        more += ("--adapted", "mended")
    said = shell("report", *common, "--out", "report.html", *more)
    page = neutral(Path("report.html").read_text(encoding="utf-8"))
    seen = re.sub(r"<[^>]*>", " ", re.sub(r"<(style|script)\b.*?</\1>", " ", page, flags=re.DOTALL))
    return {"said": said, "page": page, "visible text": " ".join(html.unescape(seen).split())}


def shifted_by(domain: str) -> Values:
    """Apply every shift of a domain to a few inputs."""
    images = torch.rand(6, 1, 7, 7, generator=torch.Generator().manual_seed(5))
    images = functional.interpolate(images, 28, mode="bilinear").mul(255).byte().expand(-1, 3, -1, -1)
    np.savez("images.npz", images=images.numpy(), labels=np.arange(6) % 3)
    np.savez("signals.npz", inputs=data("signal", 12)[0][:6].numpy())
    found: Values = {"list": shell("shifts")}
    for name in (one["name"] for one in json_of("shifts", "--json") if one["domain"] == domain):
        said = neutral(shell("shift", name, f"{domain}s.npz", "out.npz", "--seed", "1", "--json"))
        found[name] = said.encode() + b"".join(array.tobytes() for array in np.load("out.npz").values())
    return found


def bench_run() -> Values:
    """Run a few cells of the benchmark that needs no files; their recipes and source models have hashes."""
    some = ["digits", "--folder", "bench", "--seeds", "123", "--shifts", "stripe", "--workers", "1", "--device", "cpu"]
    calls = {
        "run": ["--methods", "source-only,fr,target-supervised"],
        "run again": ["--methods", "source-only,fr"],
        "run online": ["--protocol", "online"],
        "run few shots": ["--protocol", "few-shot-20", "--methods", "adabn,full-gauss"],
        "run rates": ["--methods", "pl", "--learning-rates", "0.001,0.01"],
    }
    found: Values = {name: neutral(shell("bench", "run", *some, *call)) for name, call in calls.items()}
    for row in json_of("bench", "export", "digits", "--folder", "bench", "--format", "json"):
        name = f"{row['protocol']} {row['method']}"
        row["manifest"].pop("profile_sha256", None)  # of bytes with the version in them
        found |= {name: as_json(row), f"{name} accuracy": row["last_accuracy"]}
        found[f"{name} recipe"] = f"{row['recipe']}, from {row['manifest']['source']['file']}"
    for protocol in ("offline", "online"):
        found[f"table {protocol}"] = shell("bench", "table", "digits", "--folder", "bench", "--protocol", protocol)
    return found


def stored(file: Path) -> Values:
    """Merge results that are kept in the repository, and look at them in every way."""
    name, folder = file.stem, ("--folder", "merged")
    found: Values = {"merge": shell("bench", "merge", str(file), *folder).replace(str(file), file.name)}
    if not Path("merged").exists():
        return found
    found |= {look: shell("bench", look, name, *folder) for look in ("table", "status", "correlate", "page")}
    found["compare"] = shell("bench", "compare", name, "fr", "bufr", *folder)
    for way in ("markdown", "html", "latex"):
        found[way] = shell("bench", "table", name, *folder, "--format", way, "--metric", "ece", "--per-shift")
    again = json_of("bench", "export", name, *folder, "--format", "compact")
    return found | {"exported as it was": again == json.loads(file.read_text(encoding="utf-8"))}


def helped() -> Values:
    """List the benchmarks with their settings, and ask commands for their help."""
    found = {f"show {name}": shell("bench", "show", name, "--json") for name in ("digits", "emnist-da", "cifar-10-c")}
    asked = [[], *([name] for name in ("profile", "mix", "blocks", "adapt", "verify", "evaluate", "shift", "report"))]
    asked += [["bench", name] for name in ("run", "export", "table", "merge", "page", "compare")]
    return found | {" ".join(["help", *words]): shell(*words, "--help") for words in asked}


for name, options in METHODS.items():
    CASES[f"adapt/{name}"] = partial(adapted, name, **options)
for name, options in RESTORING.items():
    CASES[f"adapt/fr/{name}"] = partial(adapted, "fr", epochs=3, **options)
    CASES[f"adapt/bufr/{name}"] = partial(adapted, "bufr", epochs_per_block=2, **options)
for kind in KINDS:
    CASES |= {f"profile/{kind}": partial(profiled, kind), f"judge/{kind}": partial(judged, kind)}
CASES |= {
    "adapt/fr/resumed": partial(resumed, "fr", epochs=3),
    "adapt/bufr/resumed": partial(resumed, "bufr", epochs_per_block=2),
    "stream/fr": partial(streamed, "fr", learning_rate=0.05),
    "stream/tent": partial(streamed, "tent", learning_rate=0.05),
    "stream/adabn": partial(streamed, "adabn"),
    "profile/full gaussian": partial(profiled, gaussian="full"),
    "profile/paper": partial(profiled, preset="paper"),
    "profile/sliced": partial(profiled, preset="sliced"),
    "profile/taps": partial(profiled, taps={"early": "2"}),
    "profile/three passes": partial(profiled, keep_bytes=0),
    "profile/merge": partial(put_together, False),
    "profile/mixture": partial(put_together, True),
    "stats layer": stats_layer,
    "cli/commands": commands,
    "cli/help": helped,
    "report/at home": partial(reported, "images", where="home"),
    "report/away": partial(reported, "images"),
    "report/mended": partial(reported, "images", "--title", "digits <5>", mended=True),
    "report/without samples": partial(reported, "images", "--samples", "0", mended=True),
    "report/regression": partial(reported, "regression", mended=True),
    "report/dense": partial(reported, "dense", "--ignore-label", str(IGNORED)),
    "report/signal": partial(reported, "signal"),
    "shift/images": partial(shifted_by, "image"),
    "shift/signals": partial(shifted_by, "signal"),
    "bench/run": bench_run,
}


def run(case: Callable[[], Values]) -> Values:
    """Run a case in a folder of its own; what it logs, and the global generator, are part of what it gives."""
    logger, lines = logging.getLogger("shiftmend"), io.StringIO()
    logger.handlers, logger.propagate = [logging.StreamHandler(lines)], False
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        try:
            found = case()
        except Exception as error:
            found = {"raised": f"{type(error).__name__}: {error}"}
    return found | {"logged": lines.getvalue(), "global generator": torch.rand(1).item()}


def brief(value: Any) -> str:
    """Keep what a person can read, and a digest of all else."""
    text = value if isinstance(value, str | bytes) else repr(value)
    if isinstance(text, str) and len(text) <= 120 and "\n" not in text:
        return text
    content = text.encode() if isinstance(text, str) else text
    return f"sha256 {hashlib.sha256(content).hexdigest()} of {len(content)} bytes"


def dump(folder: Path, values: Values) -> None:
    """Write every value of a case in full."""
    folder.mkdir(parents=True, exist_ok=True)
    for key, value in values.items():
        file = folder / re.sub(r"[^\w.-]", "_", key)
        file.write_bytes(value if isinstance(value, bytes) else f"{value}\n".encode())


def compare(golden: dict[str, Values], now: dict[str, Values]) -> int:
    """Print what differs; give how many entries do."""
    different = 0
    for name in sorted({*golden, *now}):
        old, new = golden.get(name, {}), now.get(name, {})
        keys = [key for key in {**old, **new} if old.get(key) != new.get(key)]
        for key in keys:
            print(f"{name}: {key}\n  golden: {old.get(key, '(none)')}\n  now:    {new.get(key, '(none)')}")
        different += bool(keys)
    print(f"{different} of {len({*golden, *now})} entries differ")
    return different


def start() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--write", type=Path, metavar="FILE", help="with --only, other entries in it stay")
    action.add_argument("--compare", type=Path, metavar="FILE")
    parser.add_argument("--only", default="", metavar="PATTERN")
    parser.add_argument("--dump", type=Path, metavar="FOLDER")
    parser.add_argument("--results", type=Path, default=Path(shiftmend.__file__).parents[2] / "results")
    given = parser.parse_args()
    torch.set_num_threads(1)
    for file in given.results.resolve().glob("*.json"):
        if file.stem == "time-to-mend":  # Written by a script, in a form of its own.
            continue
        CASES[f"bench/stored/{file.stem}"] = partial(stored, file)
    began, now, failed = time.perf_counter(), {}, False
    for name in sorted(name for name in CASES if fnmatch(name, f"*{given.only}*")):
        started, found = time.perf_counter(), run(CASES[name])
        now[name], failed = {key: brief(value) for key, value in found.items()}, failed or "raised" in found
        print(f"{time.perf_counter() - started:6.1f} s  {name}  {found.get('raised', '')}", file=sys.stderr, flush=True)
        if given.dump:
            dump(given.dump / name.replace(" ", "_"), found)
    print(f"{len(now)} entries of {shiftmend.__file__} in {time.perf_counter() - began:.0f} s", file=sys.stderr)
    versions = {"torch": torch.__version__, "numpy": np.__version__, "python": sys.version.split()[0]}
    file = given.write or given.compare
    old = json.loads(file.read_text()) if given.compare or (given.only and file.exists()) else {"entries": {}}
    if given.write:
        entries = dict(sorted((old["entries"] | now).items()))
        file.write_text(json.dumps({"made with": versions, "entries": entries}, indent=1) + "\n")
        return int(failed)
    if old["made with"] != versions:
        print(f"made with {old['made with']}, and this is {versions}: rounding may differ", file=sys.stderr)
    wanted = {name: entry for name, entry in old["entries"].items() if fnmatch(name, f"*{given.only}*")}
    return int(compare(wanted, now) > 0)


if __name__ == "__main__":
    sys.exit(start())
