"""Drive Chromium over its debugging pipe: JSON messages on two file descriptors, nothing to install."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CHROMIUM = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None
)
PATIENCE = 60


class Browser:
    """One page of a headless browser, and everything it reported."""

    def __init__(self, read: int, write: int) -> None:
        self._read, self._write, self._rest, self._number = read, write, b"", 0
        self.events: list[dict[str, Any]] = []
        self._session: str | None = None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return dict(answer["result"])
            self.events.append(answer)

    def _next(self) -> dict[str, Any]:
        deadline = time.monotonic() + PATIENCE
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._read], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, "the browser did not answer"
            part = os.read(self._read, 1 << 20)
            assert part, "the browser has ended"
            self._rest += part
        first, _, self._rest = self._rest.partition(b"\0")
        return dict(json.loads(first))

    def open(self, page: Path, width: int, height: int = 900, dark: bool = False, scripts: bool = True) -> None:
        self.call("Emulation.setScriptExecutionDisabled", value=not scripts)
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", media="", features=[scheme])
        self.events.clear()
        self.call("Page.navigate", url=page.as_uri())
        while not any(event.get("method") == "Page.loadEventFired" for event in self.events):
            self.events.append(self._next())

    def ask(self, expression: str) -> Any:
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def requests(self) -> list[str]:
        """Return the addresses that the page loaded, except for itself and the data inside it."""
        asked = [e["params"]["request"]["url"] for e in self.events if e.get("method") == "Network.requestWillBeSent"]
        return [url for url in asked if not url.startswith("data:")][1:]

    def complaints(self) -> list[dict[str, Any]]:
        """Return errors and warnings: exceptions, console messages, broken policies."""
        kinds = ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded")
        return [event["params"] for event in self.events if event.get("method") in kinds]

    def screenshot(self, path: Path, whole: bool = True) -> bytes:
        png = base64.b64decode(self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)["data"])
        path.write_bytes(png)
        return png


@contextmanager
def browser(home: Path) -> Iterator[Browser]:
    """Start a browser with a profile of its own under `home`, and end it with the block."""
    assert CHROMIUM is not None
    to_read, to_write = os.pipe(), os.pipe()
    # well above 3 and 4, the numbers under which the browser looks for its pipe
    theirs = [fcntl.fcntl(end, fcntl.F_DUPFD, 50) for end in (to_read[0], to_write[1])]
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--remote-debugging-pipe"]
    command += [f"--user-data-dir={home / 'chromium'}", "--disable-dev-shm-usage", "about:blank"]
    shell = ["bash", "-c", f'exec "$@" 3<&{theirs[0]} 4>&{theirs[1]}', "bash", *command]
    process = subprocess.Popen(shell, pass_fds=theirs, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    for end in (*theirs, to_read[0], to_write[1]):
        os.close(end)
    try:
        yield Browser(to_write[0], to_read[1])
    finally:
        process.terminate()
        process.wait(PATIENCE)
        os.close(to_write[0])
        os.close(to_read[1])
