"""How long a body may take to arrive, on a clock that jumps to the next timer."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any

import pytest
from starlette.exceptions import HTTPException
from starlette.requests import Request

from edgemoe.api.http.bodies import BODY_S, LEAST_BYTES_PER_S, STALL_S, BodyBudget
from edgemoe.types.request import Principal

MAX_BYTES = 1 << 20


class JumpingSelector(selectors.SelectSelector):
    """Never waits: its time goes to the end of each time-out."""

    now_s = 0.0

    def select(self, timeout: float | None = None) -> Any:
        if not (ready := super().select(0)):
            assert timeout is not None, "everybody waits for ever"
            self.now_s += max(timeout, 0.0)
        return ready


class JumpingLoop(asyncio.SelectorEventLoop):
    """An event loop on the selector's time."""

    def __init__(self) -> None:
        self.jumping = JumpingSelector()
        super().__init__(self.jumping)

    def time(self) -> float:
        return self.jumping.now_s


def run(work: Coroutine[Any, Any, Any]) -> Any:
    loop = JumpingLoop()
    try:
        return loop.run_until_complete(work)
    finally:
        loop.close()


async def read(chunk_bytes: int, pause_s: float, total_bytes: int) -> tuple[int, float]:
    """Returns the status of a body that comes in chunks (200 where it is read whole), and when that was known."""
    left, loop, budget = total_bytes, asyncio.get_running_loop(), BodyBudget(MAX_BYTES)

    async def receive() -> dict[str, Any]:
        nonlocal left
        await asyncio.sleep(pause_s)
        left -= chunk_bytes
        return {"type": "http.request", "body": b" " * chunk_bytes, "more_body": left > 0}

    request = Request({"type": "http", "method": "POST", "headers": []}, receive)
    try:
        with budget.open(Principal("p")) as body:
            whole = await budget.read(body, request)
            assert len(whole) == total_bytes
    except HTTPException as error:
        return error.status_code, loop.time()
    finally:
        assert budget.held_bytes == 0
    return 200, loop.time()


@pytest.mark.parametrize(
    ("chunk_bytes", "pause_s", "ends_s"),
    [
        (1, STALL_S + 1, STALL_S),  # nothing comes
        (1, STALL_S - 1, BODY_S),  # as little as keeps it from stalling
        (10, 1.0, BODY_S + 1),
        (LEAST_BYTES_PER_S // 2, 1.0, 2 * BODY_S + 1),
    ],
)
def test_a_body_below_the_least_rate_is_given_up(chunk_bytes: int, pause_s: float, ends_s: float) -> None:
    status, at_s = run(read(chunk_bytes, pause_s, MAX_BYTES))
    assert status == 408
    assert at_s <= ends_s + 1


@pytest.mark.parametrize("chunk_bytes", [LEAST_BYTES_PER_S, 8 * LEAST_BYTES_PER_S, MAX_BYTES])
def test_a_body_at_the_least_rate_is_read_whole(chunk_bytes: int) -> None:
    assert run(read(chunk_bytes, 1.0, MAX_BYTES))[0] == 200
