"""Datasets from their official files: read, list, fetch and verify them.

A set that fits in memory is a `Split`: one uint8 tensor of images and one of labels. CAMELYON17 and VisDA-C do not fit
and are `ImageFiles`, a torch `Dataset` for a `DataLoader`. docs/data.md lists the place of each file.
"""

from __future__ import annotations

from shiftmend.inputs.arrays import npz_file
from shiftmend.inputs.digits import enlarged_digits
from shiftmend.inputs.folders import image_folder
from shiftmend.inputs.images import Split
from shiftmend.research.datasets.catalogue import (
    CATALOGUE,
    Content,
    Download,
    Entry,
    ListingRow,
    Progress,
    Unpack,
    VerifyRow,
    find_entry,
    listing,
    verify,
)
from shiftmend.research.datasets.cifar import CIFAR_CORRUPTIONS, cifar10, cifar10_c, cifar100, cifar100_c
from shiftmend.research.datasets.digits import (
    EMNIST_SHIFTS,
    MNIST_CORRUPTIONS,
    emnist,
    emnist_da,
    fashion_mnist,
    kmnist,
    mnist,
    mnist_c,
    mnist_m,
    usps,
)
from shiftmend.research.datasets.download import fetch
from shiftmend.research.datasets.files import data_root
from shiftmend.research.datasets.made_sets import MadeSet, make
from shiftmend.research.datasets.partitions import balanced, emnist_source, few_shot, fractions, held_out
from shiftmend.research.datasets.streamed import (
    HOSPITALS,
    SOURCE_HOSPITAL,
    VISDA_PER_CLASS,
    ImageFiles,
    camelyon17,
    visda_c,
)

__all__ = [
    "CATALOGUE",
    "CIFAR_CORRUPTIONS",
    "EMNIST_SHIFTS",
    "HOSPITALS",
    "MNIST_CORRUPTIONS",
    "SOURCE_HOSPITAL",
    "VISDA_PER_CLASS",
    "Content",
    "Download",
    "Entry",
    "ImageFiles",
    "ListingRow",
    "MadeSet",
    "Progress",
    "Split",
    "Unpack",
    "VerifyRow",
    "balanced",
    "camelyon17",
    "cifar10",
    "cifar10_c",
    "cifar100",
    "cifar100_c",
    "data_root",
    "emnist",
    "emnist_da",
    "emnist_source",
    "enlarged_digits",
    "fashion_mnist",
    "fetch",
    "few_shot",
    "find_entry",
    "fractions",
    "held_out",
    "image_folder",
    "kmnist",
    "listing",
    "make",
    "mnist",
    "mnist_c",
    "mnist_m",
    "npz_file",
    "usps",
    "verify",
    "visda_c",
]
