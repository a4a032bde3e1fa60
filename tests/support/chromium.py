"""A headless Chromium, driven over the pipe of its debugging protocol: pages as a person sees and uses them."""

from __future__ import annotations

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

CHROMIUM = next((found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), "")
ABSENT = "no Chromium on this machine: install chromium"
READ_FD, WRITE_FD = 3, 4  # by which Chromium reads and writes


class Tab:
    """One page in the browser.

    Args:
        write: Descriptor that Chromium reads calls from.
        read: Descriptor of its answers and events.
    """

    def __init__(self, write: int, read: int) -> None:
        self._write, self._read, self._buffer, self._number, self._session = write, read, b"", 0, ""
        self.errors: list[str] = []  # of scripts and of the page's policy
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method of the protocol."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            found = self._next()
            if found.get("id") == self._number:
                assert "error" not in found, found["error"]
                return found["result"]
            self._note(found)

    def size(self, width: int, height: int, dark: bool = False) -> None:
        """Set the window's size in pixels, and the theme."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 500)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def open(self, address: str) -> None:
        """Go to an address and wait until the page is complete."""
        self.leave(f"location.href = {json.dumps(address)}")

    def leave(self, script: str) -> None:
        """Run a script that leads to another page, such as a click, and wait until that page is complete."""
        self.run(f"window.left = true; {script}")
        self.wait("!window.left && document.readyState === 'complete' && document.querySelector('main')")

    def run(self, script: str) -> Any:
        """Return the value of an expression in the page; it may be a promise."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait(self, condition: str, seconds: float = 60) -> None:
        """Wait until an expression holds."""
        deadline = time.monotonic() + seconds
        while not self.run(f"Boolean({condition})"):
            assert time.monotonic() < deadline, f"never: {condition}"
            time.sleep(0.1)

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            assert select.select([self._read], [], [], 60)[0], "Chromium does not answer"
            part = os.read(self._read, 1 << 20)
            assert part, "Chromium has ended"
            self._buffer += part
        message, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(message)

    def _note(self, event: dict[str, Any]) -> None:
        if event.get("method") == "Runtime.exceptionThrown":
            self.errors.append(str(event["params"]["exceptionDetails"]))
        elif event.get("method") == "Log.entryAdded" and event["params"]["entry"]["level"] == "error":
            self.errors.append(event["params"]["entry"]["text"])


@contextmanager
def chromium(folder: Path) -> Iterator[Tab]:
    """Start a browser with an empty profile in `folder` and end it afterwards."""
    their_read, write = os.pipe()
    read, their_write = os.pipe()

    def pipes() -> None:
        high = [os.dup(their_read), os.dup(their_write)]  # 3 and 4 may be among the four
        os.dup2(high[0], READ_FD)
        os.dup2(high[1], WRITE_FD)

    options = [
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--no-first-run",
        "--remote-debugging-pipe",
    ]
    process = subprocess.Popen(
        [CHROMIUM, *options, f"--user-data-dir={folder}"], preexec_fn=pipes, close_fds=False, stderr=subprocess.DEVNULL
    )
    os.close(their_read)
    os.close(their_write)
    try:
        yield Tab(write, read)
    finally:
        os.close(write)
        os.close(read)
        process.terminate()
        process.wait(20)
