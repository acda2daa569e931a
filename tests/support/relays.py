"""TCP relays on loopback, between boxes: each connection can be stopped after a number of bytes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

PIECE_BYTES = 4096


class Relays:
    """Relays whose connections carry everything, until `limit` is called."""

    def __init__(self) -> None:
        self.stopped = 0  # directions of connections
        self._left: dict[asyncio.StreamWriter, int] = {}  # bytes that each direction may carry yet
        self._limit: int | None = None
        self._go_on = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._writers: set[asyncio.StreamWriter] = set()
        self._is_closed = False

    def limit(self, count: int) -> None:
        """Stops each connection after `count` more bytes in either direction."""
        self._go_on.clear()
        self._left.clear()
        self._limit, self.stopped = count, 0

    def release(self) -> None:
        """Lets all connections go on."""
        self._limit = None
        self._go_on.set()

    async def serve(self, port: int, target: int) -> asyncio.Server:
        """Relays connections from one port to the other."""

        async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            if self._is_closed:  # the connection came before the server was closed
                writer.transport.abort()
                return
            accepting = asyncio.current_task()
            assert accepting is not None
            self._writers.add(writer)
            self._tasks.add(accepting)
            accepting.add_done_callback(self._tasks.discard)
            try:
                there, to_there = await asyncio.open_connection("127.0.0.1", target)
            except OSError:
                writer.close()
                return
            self._writers.add(to_there)
            for source, sink in ((reader, to_there), (there, writer)):
                task = asyncio.ensure_future(self._carry(source, sink))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

        return await asyncio.start_server(accept, "127.0.0.1", port)

    async def _carry(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError), contextlib.closing(sink):
            while piece := await source.read(PIECE_BYTES):
                if self._limit is not None:
                    self._left[sink] = self._left.get(sink, self._limit) - len(piece)
                    if self._left[sink] < 0:
                        self.stopped += 1
                        await self._go_on.wait()
                sink.write(piece)
                await sink.drain()

    async def close(self) -> None:
        """Closes all connections and ends their tasks."""
        self._is_closed = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for writer in self._writers:  # a task that had not begun has closed none
            writer.close()


@asynccontextmanager
async def relays(ports: Sequence[tuple[int, int]]) -> AsyncIterator[Relays]:
    """Runs relays from each first port to each second one."""
    made = Relays()
    servers = [await made.serve(*each) for each in ports]
    try:
        yield made
    finally:
        for server in servers:
            server.close()
        await made.close()
