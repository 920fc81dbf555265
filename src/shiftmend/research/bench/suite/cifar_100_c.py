"""CIFAR-100-C."""

from __future__ import annotations

from shiftmend.research.bench.benchmark import Setting
from shiftmend.research.bench.suite.cifar_c import benchmark
from shiftmend.research.datasets.cifar import cifar100, cifar100_c

BENCHMARK = benchmark(
    "cifar-100-c",
    classes=100,
    augmentation="crop-flip-rotate-15",
    mean=(0.50708, 0.48655, 0.44092),
    deviation=(0.26733, 0.25644, 0.27615),
    online={
        "shot-im": Setting("shot-im", {"learning_rate": 1e-3}),
        "tent": Setting("tent", {"learning_rate": 1e-2}),
        "fr": Setting("fr", {"learning_rate": 1e-1}),
    },
    clean=cifar100,
    shifted=cifar100_c,
)
