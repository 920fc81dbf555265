"""Commands that only a researcher needs; `shiftmend.cli` loads them by name."""
