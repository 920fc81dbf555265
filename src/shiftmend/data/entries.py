"""What the catalogue says about a dataset: what to fetch, and what has to lie where."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Unpack:
    """What to do with an archive: members whose name begins with `only`, less their first `drop` folders."""

    into: str = "."
    only: str = ""
    drop: int = 0


@dataclass(frozen=True)
class Download:
    """One file to fetch: where it goes under the data root, where it can be had, how it is known to be whole."""

    path: str
    urls: tuple[str, ...]
    md5: str | None = None
    sha256: str | None = None
    size: int | None = None  # bytes, for progress and planning; the checksum is what decides
    unpack: Unpack | None = None


@dataclass(frozen=True)
class Content:
    """One file or folder that has to be there for the readers, and what is known about it."""

    path: str
    md5: str | None = None
    md5_unpacked: str | None = None  # of what a .gz file contains: a file compressed anew is as good
    size: int | None = None
    shape: tuple[int, ...] | None = None  # of an idx or .npy array
    images: int | None = None  # number of image files in a folder
    exact_count: bool = True  # whether another number of images means damage, or only another edition


@dataclass(frozen=True)
class Entry:
    """A dataset. Each of `layouts` is a set of contents that is enough on its own."""

    name: str
    summary: str
    page: str
    layouts: tuple[tuple[Content, ...], ...]
    downloads: tuple[Download, ...] = ()
    licence: str | None = None
    arrangement: str = ""  # how the files are laid out, in words

    def by_hand(self, root: Path) -> str:
        """What to do where nothing can be fetched."""
        if self.downloads:
            places = ", ".join(str(root / download.path) for download in self.downloads)
            return f"get the files from {self.page} in a browser, put them at {places} and run this again"
        return f"get the set from {self.page} in a browser and unpack it so that there is {self.arrangement} in {root}"
