"""CAMELYON17: tumours in patches of lymph nodes, from one hospital to four others. A real shift, nothing is made.

The profile is made from the whole of the source hospital and adaptation uses the whole of the target's, as in the
reference implementation. A small last batch of an epoch is left out here, and every fifth epoch is scored.
"""

from __future__ import annotations

from shiftmend.inputs.images import standardised
from shiftmend.research.bench.benchmark import CLEAN, Benchmark, FewShot, Offline, Origin, Root, Setting, Source, Target
from shiftmend.research.bench.recipes import Recipe
from shiftmend.research.datasets.partitions import fractions
from shiftmend.research.datasets.streamed import HOSPITALS, SOURCE_HOSPITAL, camelyon17

SHIFTS = tuple(f"hospital-{number}" for number in HOSPITALS if number != SOURCE_HOSPITAL)

SHOTS = (5, 10, 50, 500)

SPLIT_SEED = 0

SETTINGS = {
    "source-only": Setting("source-only"),
    "adabn": Setting("adabn", {"passes": 2}),
    "pl": Setting("pl", {"epochs": 15, "learning_rate": 1e-4}),
    "shot-im": Setting("shot-im", {"epochs": 15, "learning_rate": 1e-4}),
    "fr": Setting("fr", {"epochs": 15, "learning_rate": 1e-5}),
    "bufr": Setting("bufr", {"epochs_per_block": 15, "learning_rate": 1e-5, "decay": 5.0}),
}


def load_source(source: str, root: Root) -> Source:
    """Load the patches of the source hospital: parts for training and testing."""
    whole = camelyon17(SOURCE_HOSPITAL, root)
    train, _, test = fractions(len(whole), seed=SPLIT_SEED)
    return Source(whole.take(train, f"{whole.name}-train"), whole, whole.take(test, f"{whole.name}-test"))


def load_target(shift: str, root: Root) -> Target:
    """Load all patches of another hospital."""
    if shift == CLEAN:
        test = load_source("plain", root).test
        return Target(test, test, test)
    whole = camelyon17(int(shift.removeprefix("hospital-")), root)
    return Target(whole, whole)


def origin(shift: str, root: Root) -> Origin:
    """Tell where images come from: the set is the published one."""
    return "published"


BENCHMARK = Benchmark(
    name="camelyon17",
    title="CAMELYON17: tumours in tissue, four hospitals",
    shifts=SHIFTS,
    groups={},
    sources={
        "plain": Recipe(
            network="resnet18",
            options={"classes": 2},
            epochs=10,
            learning_rate=0.01,
            weight_decay=1e-3,
            batch_size=128,
        )
    },
    protocols={
        "offline": Offline(batch_size=200, score_every=5),
        **{f"few-shot-{n}": FewShot(batch_size=min(2 * n, 200), per_class=n, score_every=5) for n in SHOTS},
    },
    settings={"offline": SETTINGS, **{f"few-shot-{n}": SETTINGS for n in SHOTS}},
    load_source=load_source,
    load_target=load_target,
    origin=origin,
    preprocess=standardised((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
)
