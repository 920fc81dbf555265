"""CIFAR-10-C."""

from __future__ import annotations

from shiftmend.research.bench.benchmark import Setting
from shiftmend.research.bench.suite.cifar_c import benchmark
from shiftmend.research.datasets.cifar import cifar10, cifar10_c

BENCHMARK = benchmark(
    "cifar-10-c",
    classes=10,
    augmentation="crop-flip",
    mean=(0.4914, 0.4822, 0.4465),
    deviation=(0.2023, 0.1994, 0.2010),
    online={
        "shot-im": Setting("shot-im", {"learning_rate": 1e-3}),
        "tent": Setting("tent", {"learning_rate": 1e-3}),
        "fr": Setting("fr", {"learning_rate": 1e-2}),
    },
    clean=cifar10,
    shifted=cifar10_c,
)
