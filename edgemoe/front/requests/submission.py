"""The requests of one HTTP request, as the application sees them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

from edgemoe.errors import RequestError
from edgemoe.types.request import Emission


class LoggedSubmission:
    """The requests of one HTTP request: an async iterator over what they emit, in batches."""

    def __init__(self, end: Callable[[str], None], deadline: float) -> None:
        """`end` has the request log forget a request."""
        self.deadline = deadline
        self.live: set[str] = set()
        self._end = end
        self._items: list[Emission] = []
        self._error: RequestError | None = None
        self._news = asyncio.Event()

    async def __aiter__(self) -> AsyncIterator[list[Emission]]:
        while True:
            await self._news.wait()
            self._news.clear()
            if items := self._items:
                self._items = []
                yield items
            if self._error is not None:
                raise self._error.with_traceback(None)  # others are told the same one
            if not self.live and not self._items:
                return

    def cancel(self, request: str) -> None:
        """Ends one of the requests."""
        self._end(request)
        self._news.set()

    def put(self, emission: Emission) -> None:
        """Hands over an emission. Called by the request log."""
        self._items.append(emission)
        self._news.set()

    def fail(self, error: RequestError) -> None:
        """Ends the iteration with `error`, after what is already there. Called by the request log."""
        self._error = self._error or error
        self._news.set()
