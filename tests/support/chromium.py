"""Headless Chromium, driven by its own protocol through two pipes: no driver, no library."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

WHERE = shutil.which("chromium") or ""
WITHOUT = "chromium is not installed (apt-get install chromium)"
FLAGS = (
    "--headless=new --remote-debugging-pipe --no-sandbox --disable-gpu --disable-dev-shm-usage --hide-scrollbars "
    "--disable-background-networking --disable-component-update --disable-sync --no-first-run --disable-extensions"
)
LIMIT = 64 << 20  # of a message; a screenshot is one
DESKTOP, PHONE = (1360, 860, 1.0), (390, 844, 2.0)


class Tab:
    """A page in the browser."""

    def __init__(self, reader: asyncio.StreamReader, writer: int) -> None:
        self._reader, self._writer, self._session = reader, writer, ""
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._sent = 0
        self.errors: list[str] = []  # uncaught errors, and refusals by the content policy

    async def read(self) -> None:
        """Reads the browser's messages until it is gone."""
        while message := await self._reader.readuntil(b"\0"):
            told = json.loads(message[:-1])
            if (waiting := self._waiting.pop(told.get("id", 0), None)) is not None and not waiting.done():
                waiting.set_result(told)
            elif told.get("method") == "Runtime.exceptionThrown":
                self.errors.append(json.dumps(told["params"]["exceptionDetails"]))
            elif told.get("method") == "Log.entryAdded" and told["params"]["entry"]["source"] == "security":
                self.errors.append(told["params"]["entry"]["text"])

    async def call(self, method: str, **params: Any) -> Any:
        self._sent += 1
        body = {"id": self._sent, "method": method, "params": params}
        if self._session:
            body["sessionId"] = self._session
        self._waiting[self._sent] = answer = asyncio.get_running_loop().create_future()
        os.write(self._writer, json.dumps(body).encode() + b"\0")
        told = await asyncio.wait_for(answer, 60)
        assert "error" not in told, f"{method}: {told.get('error')}"
        return told["result"]

    async def open(self) -> None:
        target = await self.call("Target.createTarget", url="about:blank")
        session = await self.call("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        self._session = session["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            await self.call(f"{domain}.enable")

    async def shape(self, size: tuple[int, int, float] = DESKTOP, scheme: str = "dark") -> None:
        """Sets the window's width, height and device pixel ratio, and a dark or light scheme."""
        width, height, ratio = size
        await self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=ratio,
            mobile=width < 600,
        )
        await self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    async def go(self, address: str) -> None:
        """Opens an address, and waits until its scripts have run."""
        await self.call("Page.navigate", url=address)
        await self.until(
            f"location.href.startsWith({address.partition('#')[0]!r}) && document.readyState === 'complete'"
        )

    async def run(self, script: str) -> Any:
        """Returns the value of an expression, which may be a promise."""
        told = await self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in told, told["exceptionDetails"]
        return told["result"].get("value")

    async def until(self, condition: str, seconds: float = 30.0) -> None:
        """Waits until an expression is true."""
        ends = asyncio.get_running_loop().time() + seconds
        while not await self.run(f"Boolean({condition})"):
            assert asyncio.get_running_loop().time() < ends, f"not within {seconds} s: {condition}; {self.errors}"
            await asyncio.sleep(0.1)

    async def picture(self, file: Path) -> None:
        """Writes a screenshot of the window as PNG."""
        told = await self.call("Page.captureScreenshot", format="png")
        file.write_bytes(base64.b64decode(told["data"]))


@contextlib.asynccontextmanager
async def browser(folder: Path) -> AsyncIterator[Tab]:
    """Opens a tab of a browser that keeps its profile in `folder`."""
    (theirs_in, ours_out), (ours_in, theirs_out) = os.pipe(), os.pipe()
    command = f"exec {WHERE} {FLAGS} --user-data-dir={folder}/profile 3<&{theirs_in} 4>&{theirs_out}"
    process = await asyncio.create_subprocess_exec(
        "bash",
        "-c",
        command,
        pass_fds=(theirs_in, theirs_out),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
        process_group=0,
    )
    os.close(theirs_in)
    os.close(theirs_out)
    reader = asyncio.StreamReader(limit=LIMIT)
    pipe = os.fdopen(ours_in, "rb")
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), pipe
    )
    tab = Tab(reader, ours_out)
    reading = asyncio.ensure_future(tab.read())
    try:
        await tab.open()
        yield tab
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, 9)
        await process.wait()
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        transport.close()
        os.close(ours_out)
