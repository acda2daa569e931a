"""Helper processes: each has bounds of its own, in any code, and the next question starts another."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time

import psutil
import pytest
from support.waiting import wait_until

from edgemoe.errors import HelperFailed
from edgemoe.helper.child_process import HelperPool, NumberedMessage

CHILD = """
import sys
import msgspec
from edgemoe.helper.child_process import MemoryBound, NumberedMessage, serve
class Question(NumberedMessage, frozen=True):
    code: str
class Answer(NumberedMessage, frozen=True):
    value: str
def answer(asked):
    return Answer(asked.number, str(eval(asked.code)))
serve(sys.stdin.buffer, sys.stdout.buffer, Question, answer, 0.3, memory=MemoryBound(64 << 20, 16, 128 << 20))
"""


class Question(NumberedMessage, frozen=True):
    code: str


class Answer(NumberedMessage, frozen=True):
    value: str


ENDLESS = {
    "a loop": "[0 for _ in iter(int, 1)]",
    "one operation": "9 ** (9 ** 9)",
    "memory": "len('a' * (1 << 30))",
    "its end": "__import__('os').abort()",
    "another answer": "__import__('sys').stdout.buffer.write(b'\\xff' * 64)",
}


@pytest.mark.parametrize("name", ENDLESS)
async def test_a_job_beyond_its_bounds_ends_its_process_only(name: str) -> None:
    pool = HelperPool([sys.executable, "-c", CHILD], 60.0)
    began_s = time.monotonic()
    attack = asyncio.create_task(pool.ask(Question(0, ENDLESS[name]), Answer, principal="mallory"))
    await asyncio.sleep(0)
    assert (await pool.ask(Question(0, "6 * 7"), Answer, principal="bob")).value == "42"
    with pytest.raises(HelperFailed):
        await attack
    assert time.monotonic() - began_s < 45.0, "it was not ended by its own bounds"
    assert (await pool.ask(Question(0, "1 + 1"), Answer, principal="mallory")).value == "2"
    await pool.close()
    assert pool.pids == []


@pytest.mark.parametrize("code", [*ENDLESS.values(), "__import__('os').write(2, b'loud') and 1 / 0"])
async def test_nothing_that_a_question_causes_is_logged(
    code: str, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    pool = HelperPool([sys.executable, "-c", CHILD], 60.0)
    for _ in range(3):
        with pytest.raises(HelperFailed):
            await pool.ask(Question(0, code), Answer)
    await pool.close()
    assert capfd.readouterr().err == ""
    assert [record.getMessage() for record in caplog.records if record.levelname != "DEBUG"] == []


TAKEN = """(lambda held: [held.append(bytes(1 << 20)) for _ in range(400)] and len(held))([])"""
PADDING = " " * (4 << 20)  # of a question that may take 64 MiB more


@pytest.mark.parametrize(("code", "is_enough"), [(TAKEN, False), (TAKEN.replace("400", "100") + PADDING, True)])
async def test_memory_grows_with_the_question(code: str, *, is_enough: bool) -> None:
    pool = HelperPool([sys.executable, "-c", CHILD], 60.0)
    if is_enough:
        assert (await pool.ask(Question(0, code), Answer)).value == "100"
    with pytest.raises(HelperFailed):
        await pool.ask(Question(0, code.strip().replace("100", "400")), Answer)
    with pytest.raises(HelperFailed):  # the most of all, however long the question is
        await pool.ask(Question(0, TAKEN.replace("400", "150") + 4 * PADDING), Answer)
    await pool.close()


async def test_large_questions_share_one_process() -> None:
    pool = HelperPool([sys.executable, "-c", CHILD], 60.0)
    asked = [pool.ask(Question(0, "6 * 7"), Answer, principal=who, is_large=True) for who in "abcd"]
    assert {one.value for one in await asyncio.gather(*asked)} == {"42"}
    assert len(pool.pids) == 1
    await pool.close()


PARENT = """
import asyncio, sys, time
from edgemoe.helper.child_process import HelperProcess
async def main():
    helper = HelperProcess([sys.executable, "-c", "import time; time.sleep(600)"], 60.0)
    await helper.prepare()
    print(helper.pid, flush=True)
    time.sleep(600)
asyncio.run(main())
"""


def test_a_helper_at_work_dies_with_its_killed_parent() -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        helper = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
    wait_until(lambda: not helper.is_running() or helper.status() == psutil.STATUS_ZOMBIE)
