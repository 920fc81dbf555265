"""A pseudo-terminal whose screen a test can read."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import sys
import termios
import threading
import time
from types import TracebackType
from typing import Self


class Terminal:
    """A terminal of 140 columns: what programs write into `inner` appears on its screen, line by line."""

    def __init__(self) -> None:
        self._outer, self._slave = pty.openpty()
        fcntl.ioctl(self._slave, termios.TIOCSWINSZ, struct.pack("HHHH", 50, 140, 0, 0))
        self.everything = ""
        self._thread = threading.Thread(target=self._read, daemon=True)

    @property
    def inner(self) -> int:
        return self._slave

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._slave)
        self._thread.join(10)
        os.close(self._outer)

    def _read(self) -> None:
        while True:
            try:
                data = os.read(self._outer, 65536)
            except OSError:  # nobody has it open any more
                return
            self.everything += data.decode(errors="replace")

    def type(self, text: str) -> None:
        os.write(self._outer, text.encode())

    def screen(self) -> str:
        """Read the screen as it is now."""
        lines, row = [""], 0
        for part in re.split(r"(\x1b\[[0-9;?]*[A-Za-z]|\r|\n)", self.everything):
            if part == "\n":
                row += 1
                lines += [""] * (row + 1 - len(lines))
            elif part == "\x1b[1A":
                row -= 1
            elif part == "\x1b[2K":
                lines[row] = ""
            elif not part.startswith("\x1b") and part != "\r":
                lines[row] += part
        return "\n".join(lines)

    def shows(self, pattern: str, seconds: float = 120.0) -> bool:
        end = time.monotonic() + seconds
        while not re.search(pattern, self.screen()):
            if time.monotonic() > end:
                sys.__stdout__.write(self.screen())  # type: ignore[union-attr]
                return False
            time.sleep(0.05)
        return True
