"""Turns: the principal that has had the least time comes next, with few places each."""

from __future__ import annotations

import asyncio

from edgemoe.helper.turns import FairTurns, TaskTurns


def test_the_user_with_the_least_time_comes_next() -> None:
    turns = FairTurns[str](places=1, each=1)
    for at in range(3):
        turns.put("mallory", f"m{at}")
    turns.put("bob", "b0")
    order = []
    for took_s in (5.0, 0.1, 0.1, 5.0):
        taken = turns.next_job()
        assert taken is not None
        assert turns.next_job() is None, "there is one place"
        order.append(taken[1])
        turns.give_back(taken[0], took_s)
        if taken[1] == "b0":
            turns.put("bob", "b1")
    assert order == ["m0", "b0", "b1", "m1"]
    assert len(turns) == 1


def test_one_principal_leaves_a_place_to_the_others() -> None:
    turns = FairTurns[str](places=2, each=1)
    for job in ("m0", "m1"):
        turns.put("mallory", job)
    assert turns.next_job() == ("mallory", "m0")
    assert turns.next_job() is None
    turns.put("bob", "b0")
    assert turns.next_job() == ("bob", "b0")
    turns.give_back("mallory", 1.0)
    assert turns.next_job() == ("mallory", "m1")


def test_a_newcomer_has_no_credit_for_the_time_before() -> None:
    turns = FairTurns[int](places=1, each=1)
    turns.put("old", 0)
    for at in range(1, 100):
        turns.put("old", at)
        assert turns.next_job() == ("old", at - 1)
        turns.give_back("old", 1.0)
    turns.put("new", 0)
    order = []
    for _ in range(3):
        taken = turns.next_job()
        assert taken is not None
        order.append(taken[0])
        turns.give_back(taken[0], 1.0)
        turns.put(taken[0], 0)
    assert set(order) == {"old", "new"}


def test_ended_users_are_forgotten() -> None:
    turns = FairTurns[int](places=1, each=1)
    for at in range(1000):
        turns.put(f"principal {at}", at)
        assert turns.next_job() is not None
        turns.give_back(f"principal {at}", 0.0)
    assert len(turns._principals) <= 1
    turns.put("a", 1)
    assert turns.drop("a", 1)
    assert not turns.drop("a", 1)
    assert turns.next_job() is None


async def test_tasks_that_are_cancelled_give_their_turns_back() -> None:
    turns = TaskTurns(places=1, each=1)
    done = list[str]()

    async def work(principal: str) -> None:
        async with turns.turn(principal):
            done.append(principal)
            await asyncio.sleep(0)

    async with turns.turn("holder"):
        waiting = [asyncio.create_task(work(name)) for name in ("a", "b", "c")]
        await asyncio.sleep(0)
        waiting[0].cancel()
        await asyncio.sleep(0)
        assert done == []
    waiting[1].cancel()  # it has been given the place, and has not run since
    await asyncio.gather(*waiting, return_exceptions=True)
    assert done == ["c"]
    async with asyncio.timeout(1.0):
        await work("d")
