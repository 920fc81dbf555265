"""Datasets from their official files: read them, list them, fetch them, verify them.

A set that fits in memory is a `Split`: one uint8 tensor of images and one of labels. CAMELYON17 and VisDA-C
do not fit and are `ImageFiles`, a torch `Dataset` for a `DataLoader`. See docs/data.md for which file goes
where.
"""

from shiftmend.data.arrays import npz_file
from shiftmend.data.base import Split, data_root
from shiftmend.data.catalogue import CATALOGUE, find_entry
from shiftmend.data.cifar import cifar10, cifar100
from shiftmend.data.digits import emnist, enlarged_digits, fashion_mnist, kmnist, mnist, usps
from shiftmend.data.download import fetch
from shiftmend.data.entries import Content, Download, Entry, Unpack
from shiftmend.data.folders import image_folder
from shiftmend.data.integrity import ListingRow, Progress, VerifyRow, listing, verify
from shiftmend.data.partitions import balanced, emnist_source, few_shot, fractions, held_out
from shiftmend.data.shifted import (
    CIFAR_CORRUPTIONS,
    EMNIST_SHIFTS,
    MNIST_CORRUPTIONS,
    cifar10_c,
    cifar100_c,
    emnist_da,
    mnist_c,
    mnist_m,
)
from shiftmend.data.streamed import (
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
    "mnist",
    "mnist_c",
    "mnist_m",
    "npz_file",
    "usps",
    "verify",
    "visda_c",
]
