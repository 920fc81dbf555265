"""Which datasets there are, where they come from, and what lies where once they are there.

A checksum stands here only if the publisher states it or several independent sources agree on it; None means
that none is known, not that none is needed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from shiftmend.data import checksums
from shiftmend.data.digits import EMNIST_COUNTS
from shiftmend.data.entries import Content, Download, Entry, Unpack
from shiftmend.data.shifted import CIFAR_CORRUPTIONS, EMNIST_SHIFTS, MNIST_CORRUPTIONS
from shiftmend.errors import DataError


def find_entry(name: str, catalogue: Mapping[str, Entry] | None = None) -> Entry:
    """By name; capitals, hyphens and underscores make no difference."""
    entries = CATALOGUE if catalogue is None else catalogue
    for key, entry in entries.items():
        if _plain(key) == _plain(name):
            return entry
    raise DataError(f"there is no dataset called {name!r}; expected one of {', '.join(entries)}")


def _plain(name: str) -> str:
    return name.lower().replace("-", "").replace("_", "")


def _like_mnist(
    name: str,
    summary: str,
    page: str,
    folder: str,
    files: Iterable[checksums.IdxFile],
    *mirrors: str,
    licence: str | None = None,
) -> Entry:
    """MNIST and its relatives: four files."""
    downloads, contents = [], []
    for file in files:
        path = f"{folder}/raw/{file.name}.gz"
        urls = tuple(f"{mirror}/{file.name}.gz" for mirror in mirrors)
        count = 60_000 if file.name.startswith("train") else 10_000
        shape = (count, 28, 28) if "images" in file.name else (count,)
        downloads.append(Download(path, urls, md5=file.md5, size=file.size))
        contents.append(Content(path, md5=file.md5, md5_unpacked=file.md5_unpacked, shape=shape))
    return Entry(
        name,
        f"{summary}, 28 x 28 grey, 60,000 + 10,000",
        page,
        (tuple(contents),),
        tuple(downloads),
        licence=licence,
        arrangement=f"{folder}/raw/{{train,t10k}}-{{images-idx3,labels-idx1}}-ubyte.gz (or without .gz)",
    )


def _emnist_contents() -> tuple[Content, ...]:
    """The publisher states a checksum of the whole archive only, and rebuilt sets of other sizes are in use."""
    contents = []
    for split, count in EMNIST_COUNTS.items():
        stem = f"EMNIST/raw/emnist-balanced-{split}"
        contents.append(Content(f"{stem}-images-idx3-ubyte.gz", shape=(count, 28, 28), exact_count=False))
        contents.append(Content(f"{stem}-labels-idx1-ubyte.gz", shape=(count,), exact_count=False))
    return tuple(contents)


def _mnist_c_contents() -> tuple[Content, ...]:
    contents = []
    for corruption in MNIST_CORRUPTIONS:
        for split, count in (("train", 60_000), ("test", 10_000)):
            stem = f"mnist_c/{corruption}/{split}"
            contents.append(Content(f"{stem}_images.npy", shape=(count, 28, 28, 1)))
            contents.append(Content(f"{stem}_labels.npy", shape=(count,)))
    return tuple(contents)


def _zenodo(record: int, file: str) -> tuple[str, str]:
    """A file of a record, at the address of today and at the one before."""
    return (
        f"https://zenodo.org/records/{record}/files/{file}?download=1",
        f"https://zenodo.org/record/{record}/files/{file}",
    )


def _cifar_archive(classes: int, folder: str, md5: str, size: int) -> Download:
    file = f"cifar-{classes}-binary.tar.gz"
    urls = (f"https://www.cs.toronto.edu/~kriz/{file}",)
    return Download(file, urls, md5=md5, size=size, unpack=Unpack(only=f"{folder}/"))


def _cifar_c(classes: int, record: int, md5: str, size: int, sums: Mapping[str, str]) -> Entry:
    """One array per corruption, and the labels they share."""
    folder = f"CIFAR-{classes}-C"
    shapes: dict[str, tuple[int, ...]] = dict.fromkeys(CIFAR_CORRUPTIONS, (50_000, 32, 32, 3))
    shapes["labels"] = (50_000,)
    archive = Download(
        f"{folder}.tar", _zenodo(record, f"{folder}.tar"), md5=md5, size=size, unpack=Unpack(only=f"{folder}/")
    )
    return Entry(
        folder.lower(),
        f"the CIFAR-{classes} test images under 19 corruptions at 5 severities",
        f"https://zenodo.org/records/{record}",
        (tuple(Content(f"{folder}/{name}.npy", md5=sums[name], shape=shape) for name, shape in shapes.items()),),
        (archive,),
        licence="CC BY 4.0",
        arrangement=f"{folder}/<corruption>.npy and {folder}/labels.npy",
    )


_LIBSVM = "https://www.csie.ntu.edu.tw/~cjlin/libsvmtools/datasets/multiclass"
_CIFAR_LICENCE = "none stated; the authors ask for a citation of their technical report"
_ENTRIES = (
    _like_mnist(
        "mnist",
        "handwritten digits",
        "https://ossci-datasets.s3.amazonaws.com/mnist/",
        "MNIST",
        checksums.MNIST,
        "https://ossci-datasets.s3.amazonaws.com/mnist",
        "https://storage.googleapis.com/cvdf-datasets/mnist",
    ),
    Entry(
        "emnist",
        "handwritten digits and letters (Balanced), 47 classes, 28 x 28 grey, 112,800 + 18,800",
        "https://www.nist.gov/itl/products-and-services/emnist-dataset",
        (_emnist_contents(),),
        (
            Download(
                "EMNIST/gzip.zip",
                ("https://biometrics.nist.gov/cs_links/EMNIST/gzip.zip",),
                md5="58c8d27c78d21e728a6bc7b3cc06412e",
                size=561_753_746,
                unpack=Unpack("EMNIST/raw", only="gzip/emnist-balanced-", drop=1),
            ),
        ),
        arrangement="EMNIST/raw/emnist-balanced-{train,test}-{images-idx3,labels-idx1}-ubyte.gz (or without .gz)",
    ),
    Entry(
        "usps",
        "digits from envelopes, 16 x 16 grey, 7,291 + 2,007",
        "https://www.csie.ntu.edu.tw/~cjlin/libsvmtools/datasets/multiclass.html#usps",
        (
            tuple(Content(f"USPS/{name}", md5=md5) for name, md5 in checksums.USPS.items()),
            (Content("USPS/usps.npz"),),
        ),
        tuple(Download(f"USPS/{name}", (f"{_LIBSVM}/{name}",), md5=md5) for name, md5 in checksums.USPS.items()),
        arrangement="USPS/usps.bz2 and USPS/usps.t.bz2, or USPS/usps.npz with x_train, y_train, x_test, y_test",
    ),
    _like_mnist(
        "fashion-mnist",
        "pictures of clothes",
        "https://github.com/zalandoresearch/fashion-mnist",
        "FashionMNIST",
        checksums.FASHION_MNIST,
        "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com",
        licence="MIT",
    ),
    _like_mnist(
        "kmnist",
        "old Japanese cursive characters",
        "https://github.com/rois-codh/kmnist",
        "KMNIST",
        checksums.KMNIST,
        "http://codh.rois.ac.jp/kmnist/dataset/kmnist",
        licence="CC BY-SA 4.0",
    ),
    Entry(
        "cifar-10",
        "small photographs, 10 classes, 32 x 32 colour, 50,000 + 10,000",
        "https://www.cs.toronto.edu/~kriz/cifar.html",
        (
            tuple(
                Content(f"cifar-10-batches-bin/{name}", md5=md5, size=10_000 * 3073)
                for name, md5 in checksums.CIFAR10_BINARY.items()
            ),
            tuple(Content(f"cifar-10-batches-py/{name}", md5=md5) for name, md5 in checksums.CIFAR10_PICKLED.items()),
        ),
        (_cifar_archive(10, "cifar-10-batches-bin", "c32a1d4ab5d03f1284b67883e8d87530", 170_052_171),),
        licence=_CIFAR_LICENCE,
        arrangement="cifar-10-batches-bin/{data_batch_1..5,test_batch}.bin, or the folder cifar-10-batches-py",
    ),
    Entry(
        "cifar-100",
        "small photographs, 100 classes, 32 x 32 colour, 50,000 + 10,000",
        "https://www.cs.toronto.edu/~kriz/cifar.html",
        (
            (
                Content("cifar-100-binary/train.bin", size=50_000 * 3074),
                Content("cifar-100-binary/test.bin", size=10_000 * 3074),
            ),
            (
                Content("cifar-100-python/train", md5="16019d7e3df5f24257cddd939b257f8d"),
                Content("cifar-100-python/test", md5="f0ef6b0ae62326f3e7ffdfab6717acfc"),
            ),
        ),
        (_cifar_archive(100, "cifar-100-binary", "03b5dce01913d631647c71ecec9e9cb8", 168_513_733),),
        licence=_CIFAR_LICENCE,
        arrangement="cifar-100-binary/{train,test}.bin, or the folder cifar-100-python",
    ),
    _cifar_c(10, 2535967, "56bf5dcef84df0e2308c6dcbcbbd8499", 2_918_471_680, checksums.CIFAR10_C),
    _cifar_c(100, 3555552, "11f0ed0f1191edbf9fa23466ae6021d3", 2_918_473_216, checksums.CIFAR100_C),
    Entry(
        "mnist-c",
        "MNIST under 15 corruptions",
        "https://zenodo.org/records/3239543",
        (_mnist_c_contents(),),
        (
            Download(
                "mnist_c.zip",
                _zenodo(3239543, "mnist_c.zip"),
                md5="4b34b33045869ee6d424616cd3a65da3",
                unpack=Unpack(only="mnist_c/"),
            ),
        ),
        licence="CC BY 4.0",
        arrangement="mnist_c/<corruption>/{train,test}_{images,labels}.npy",
    ),
    Entry(
        "mnist-m",
        "MNIST digits blended with patches of photographs, 28 x 28 colour; needs mnist for its labels",
        "https://github.com/VanushVaswani/keras_mnistm/releases/tag/1.0",
        (
            (Content("MNISTM/keras_mnistm.pkl.gz"),),
            (Content("MNISTM/keras_mnistm.pkl"),),
            (
                Content("MNISTM/train", images=60_000, exact_count=False),
                Content("MNISTM/test", images=10_000, exact_count=False),
            ),
        ),
        (
            Download(
                "MNISTM/keras_mnistm.pkl.gz",
                ("https://github.com/VanushVaswani/keras_mnistm/releases/download/1.0/keras_mnistm.pkl.gz",),
            ),
        ),
        arrangement="MNISTM/keras_mnistm.pkl.gz, or MNISTM/{train,test}/<0..9>/*.png",
    ),
    Entry(
        "emnist-da",
        "EMNIST under the 13 shifts of the paper; only the test folders are needed",
        "https://zenodo.org/records/6602351",
        (tuple(Content(f"EMNIST/{shift}/test", images=18_800) for shift in EMNIST_SHIFTS),),
        arrangement="EMNIST/<shift>/test/<0..46>/<number>.png",
    ),
    Entry(
        "camelyon17",
        "patches of lymph-node tissue from five hospitals, 96 x 96 colour (WILDS v1.0)",
        "https://wilds.stanford.edu/downloads",
        tuple(
            (Content(f"{folder}/metadata.csv"), Content(f"{folder}/patches", images=455_954))
            for folder in ("CAMELYON17/camelyon17_v1.0", "camelyon17_v1.0")
        ),
        (
            Download(
                "CAMELYON17/archive.tar.gz",
                ("https://worksheets.codalab.org/rest/bundles/0xe45e15f39fb54e9d9e919556af67aabe/contents/blob/",),
                size=10_658_709_504,
                unpack=Unpack("CAMELYON17/camelyon17_v1.0"),
            ),
        ),
        licence="CC0",
        arrangement="CAMELYON17/camelyon17_v1.0/metadata.csv and patches/patient_*_node_*/*.png beside it",
    ),
    Entry(
        "visda-c",
        "rendered objects and photographs of them, 12 classes, 152,397 + 55,388",
        "http://ai.bu.edu/visda-2017/",
        (
            (
                Content("VisDA-C/train/image_list.txt"),
                Content("VisDA-C/train", images=152_397),
                Content("VisDA-C/validation/image_list.txt"),
                Content("VisDA-C/validation", images=55_388),
            ),
        ),
        tuple(
            Download(f"VisDA-C/{file}", (f"http://csr.bu.edu/ftp/visda17/clf/{file}",), unpack=Unpack("VisDA-C"))
            for file in ("train.tar", "validation.tar")
        ),
        arrangement="VisDA-C/{train,validation}/image_list.txt and the images it lists",
    ),
    Entry(
        "bsds500",
        "the Berkeley photographs, backgrounds of MNIST-M",
        "https://www2.eecs.berkeley.edu/Research/Projects/CS/vision/grouping/resources.html",
        ((Content("BSDS500/images/train", images=200, exact_count=False),),),
        (
            Download(
                "BSDS500/BSR_bsds500.tgz",
                ("http://www.eecs.berkeley.edu/Research/Projects/CS/vision/grouping/BSR/BSR_bsds500.tgz",),
                unpack=Unpack("BSDS500", only="BSR/BSDS500/data/images/", drop=3),
            ),
        ),
        arrangement="BSDS500/images/train/*.jpg",
    ),
)
CATALOGUE: dict[str, Entry] = {entry.name: entry for entry in _ENTRIES}
