"""A headless Chromium to look at pages with, driven over the DevTools protocol.

The protocol is JSON over a web socket; tornado, which Bokeh brings, speaks it.
"""

import asyncio
import base64
import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tornado.websocket import WebSocketClientConnection, websocket_connect

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
START_SECONDS = 60.0  # a cold browser on a loaded machine
ANSWER_SECONDS = 60.0  # software rendering of the largest page


def browser_path() -> str | None:
    """Return the program of an installed Chromium; None if there is none."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Page:
    """A tab of the browser.

    Attributes:
        messages: Warnings and errors of the console, and exceptions, in order.
        requests: Addresses that the page has asked for, its own included.
    """

    def __init__(self, socket: WebSocketClientConnection, loop: asyncio.AbstractEventLoop) -> None:
        self._socket, self._loop, self._number = socket, loop, 0
        self._seen: list[dict[str, Any]] = []
        self.messages: list[str] = []
        self.requests: list[str] = []

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Return the answer to a command of the protocol.

        Raises:
            RuntimeError: If the browser refuses it or closes the connection.
        """
        self._number += 1
        self._run(_write(self._socket, {"id": self._number, "method": method, "params": params}))
        while True:
            message = self._next()
            if message.get("id") == self._number:
                if "error" in message:
                    raise RuntimeError(f"{method}: {message['error']}")
                answer: dict[str, Any] = message["result"]
                return answer

    def evaluate(self, script: str) -> Any:
        """Return the value of a JavaScript expression; promises are waited for.

        Raises:
            RuntimeError: If it throws.
        """
        found = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in found:
            raise RuntimeError(json.dumps(found["exceptionDetails"])[:2000])
        return found["result"].get("value")

    def open(self, address: str, *, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        """Show a page of the given size and wait until it and its scripts are loaded."""
        self.resize(width, height)
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.call("Emulation.setEmulatedMedia", features=scheme)
        self.messages.clear()
        self.requests.clear()
        self._seen.clear()
        self.call("Page.navigate", url=address)
        while not any(message.get("method") == "Page.loadEventFired" for message in self._seen):
            self._next()

    def resize(self, width: int, height: int) -> None:
        """Give the window another size."""
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )

    def screenshot(self, path: Path, *, whole: bool = True) -> None:
        """Write what is to be seen, or the whole page, as PNG."""
        found = self.call("Page.captureScreenshot", captureBeyondViewport=whole, **(self._clip() if whole else {}))
        path.write_bytes(base64.b64decode(found["data"]))

    def _clip(self) -> dict[str, Any]:
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        return {"clip": {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}}

    def _next(self) -> dict[str, Any]:
        text = self._run(asyncio.wait_for(_read(self._socket), ANSWER_SECONDS))
        if text is None:
            raise RuntimeError("the browser closed the connection")
        message: dict[str, Any] = json.loads(text)
        self._seen.append(message)
        params = message.get("params", {})
        match message.get("method"):
            case "Runtime.consoleAPICalled" if params["type"] in ("error", "warning", "assert"):
                self.messages.append(" ".join(str(arg.get("value", arg)) for arg in params["args"]))
            case "Runtime.exceptionThrown":
                self.messages.append(json.dumps(params["exceptionDetails"])[:2000])
            case "Log.entryAdded" if params["entry"]["level"] in ("error", "warning"):
                self.messages.append(params["entry"]["text"])
            case "Network.requestWillBeSent":
                self.requests.append(params["request"]["url"])
        return message

    def _run(self, work: Any) -> Any:
        return self._loop.run_until_complete(work)


async def _write(socket: WebSocketClientConnection, message: dict[str, Any]) -> None:
    await socket.write_message(json.dumps(message))


async def _read(socket: WebSocketClientConnection) -> Any:
    return await socket.read_message()


@contextmanager
def open_browser(program: str) -> Iterator[Page]:
    """Start a browser and yield its tab; both are gone afterwards.

    Raises:
        RuntimeError: If it does not start.
    """
    # processes of the browser may still write to its profile when it has ended
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile, tempfile.TemporaryFile() as log:
        command = [program, "--headless=new", "--no-sandbox", "--disable-gpu-sandbox", "--hide-scrollbars"]
        command += ["--disable-background-networking", "--no-first-run", "--remote-debugging-port=0"]
        command += [f"--user-data-dir={profile}", "about:blank"]
        process = subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, "HOME": profile})
        loop = asyncio.new_event_loop()
        try:
            address = _address(Path(profile) / "DevToolsActivePort", process)
            socket = loop.run_until_complete(_connect(address))
            page = Page(socket, loop)
            for domain in ("Page", "Runtime", "Network", "Log"):
                page.call(f"{domain}.enable")
            yield page
            socket.close()
        finally:
            process.terminate()
            process.wait()
            loop.close()


def _address(port_file: Path, process: "subprocess.Popen[bytes]") -> str:
    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end and process.poll() is None:
        if port_file.exists() and len(lines := port_file.read_text().split()) == 2:
            return f"ws://127.0.0.1:{lines[0]}{lines[1]}"
        time.sleep(0.05)
    raise RuntimeError(f"the browser did not start (exit code {process.poll()})")


async def _connect(browser: str) -> WebSocketClientConnection:
    """Return a connection to the first tab of a browser."""
    socket = await websocket_connect(browser)
    await _write(socket, {"id": 1, "method": "Target.getTargets"})
    while True:
        message = json.loads(str(await socket.read_message()))
        if message.get("id") == 1:
            break
    target = next(info["targetId"] for info in message["result"]["targetInfos"] if info["type"] == "page")
    socket.close()
    return await websocket_connect(
        f"ws://{urlsplit(browser).netloc}/devtools/page/{target}", max_message_size=256 * 2**20
    )
