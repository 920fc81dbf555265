"""shiftmend."""

from shiftmend.__about__ import __version__ as __version__
