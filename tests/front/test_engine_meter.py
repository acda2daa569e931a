"""A front's figures about its engine's work, derived from the requests that it has submitted."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from support.virtual import VirtualLoop

from edgemoe.cluster.control.messages import CONTROL, MAX_PREFIX_KEYS, MAX_TAKEN, PREFIX_TOKENS, LoadReport
from edgemoe.cluster.rpc.envelope import MAX_ENVELOPE_BYTES
from edgemoe.front import cluster_requests, engine_meter
from edgemoe.front.cluster_requests import GAP_S, LOOK_S, REPEAT_S, LoadReporter
from edgemoe.front.engine_meter import MAX_UNREPORTED, LocalCapacity, LocalLoad
from edgemoe.front.prompt_hints import PrefixKeys
from edgemoe.front.request_table import HeldRequest
from edgemoe.ipc.messages import ExpertDemandReport, Submit
from edgemoe.telemetry import metrics as names
from edgemoe.types.expert_signatures import MOST_ENDED, EndedRequest, ExpertDemand, ExpertSignature
from edgemoe.types.request import Request, Sampling
from edgemoe.types.step import BLOCK_TOKENS

CHOICES = ExpertDemand(b"\xff" * 6, bytes(6), (0.0, 0.001, 0.01), 0.01, 1e-4)


def request(tokens: int, first: int = 0) -> Request:
    return of(range(first, first + tokens))


def of(prompt: Iterable[int], salt: bytes = b"") -> Request:
    return Request(id="r", prompt=tuple(prompt), sampling=Sampling(max_tokens=100), seed=1, salt=salt)


class Engine:
    def __init__(self, slots: int = 2, blocks: int = 100) -> None:
        self.held: list[HeldRequest] = []
        self.stats: dict[str, float] = {}
        self.keys = PrefixKeys()
        facts = LocalCapacity("boot", slots, 10, blocks * BLOCK_TOKENS, self.stats, 64.0)
        self.meter = LocalLoad(self.keys, lambda: facts, lambda: self.held)


def test_a_request_starts_at_once_where_a_slot_and_blocks_are_free_and_no_prompt_waits() -> None:
    engine = Engine()
    assert engine.meter.starts_at_once(request(10_000))  # a request alone, if it fits at all
    engine.held = [HeldRequest(40 * BLOCK_TOKENS, 0, 100)]
    assert not engine.meter.starts_at_once(request(1))  # a prompt waits
    engine.held = [HeldRequest(40 * BLOCK_TOKENS, 1, 100)]
    assert engine.meter.starts_at_once(request(10))
    assert not engine.meter.starts_at_once(request(60 * BLOCK_TOKENS))  # more than there are blocks
    engine.held *= 2
    assert not engine.meter.starts_at_once(request(10))  # no slot


def test_an_engine_knows_a_prompt_of_which_it_has_had_half_of_the_whole_pieces() -> None:
    engine = Engine()

    def known(tokens: int, first: int = 0) -> bool:
        return engine.meter.remembers(engine.keys.prefix(request(tokens, first)))

    assert known(PREFIX_TOKENS - 1), "there is nothing that another could know"
    assert not known(PREFIX_TOKENS)
    engine.meter.note(Submit(request=request(2 * PREFIX_TOKENS), attempt=1))
    assert known(5 * PREFIX_TOKENS - 1)
    assert not known(5 * PREFIX_TOKENS)
    assert not known(2 * PREFIX_TOKENS, first=1)


def test_of_too_many_prompts_the_one_that_was_used_last_longest_ago_is_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engine_meter, "MAX_PREFIXES", 2)
    meter, keys = Engine().meter, [bytes([number]) * 8 for number in range(3)]
    for key in (keys[0], keys[1], keys[0], keys[2]):
        meter._note_key(key)
    assert list(meter._prefixes) == [keys[0], keys[2]]
    assert keys[1] not in meter._unreported


def test_an_engine_that_keeps_no_prompts_offers_no_keys_and_needs_no_others_word_for_them() -> None:
    keys = PrefixKeys(prefix_cache=False)
    meter = LocalLoad(keys, lambda: None, list)
    prompt = request(3 * PREFIX_TOKENS)
    meter.note(Submit(request=prompt, attempt=1))
    assert meter.report(LoadReport()).prefixes == b""
    assert keys.cached(prompt) == b""
    assert meter.remembers(keys.cached(prompt))
    assert len(keys.prefix(prompt)) == 3 * 8  # by which fronts recognise prompts


def test_blocks_that_requests_share_are_counted_once_as_the_engine_says() -> None:
    engine = Engine()
    engine.held = [HeldRequest(50 * BLOCK_TOKENS, 1, 100)] * 2
    assert engine.meter.use().free_blocks == 0
    engine.stats[names.KV_BLOCKS_REFERENCED] = 52.0
    assert engine.meter.use().free_blocks == 48


def test_prefixes_are_told_once_within_the_bounds_of_a_message_and_again_to_another_leader() -> None:
    engine = Engine()
    engine.meter.on_choosing(ExpertDemandReport(choices=CHOICES))
    idle = engine.meter.use()
    for n in range(2 * MAX_TAKEN):
        engine.meter.note(Submit(request=request(3 * PREFIX_TOKENS, n)), ("a", n))
    said = [engine.meter.report(idle) for _ in range(4)]
    assert [len(one.prefixes) // 8 for one in said] == [MAX_PREFIX_KEYS] * 3 + [0]
    assert [one.choices for one in said] == [CHOICES, None, None, None]
    assert engine.meter.report(idle, again=True).choices == CHOICES
    assert CONTROL.read(msgspec.msgpack.encode(said[0])) == said[0]
    engine.meter.mark_unreported()
    assert engine.meter.report(idle) == said[0]


def test_requests_that_have_ended_are_told_once_a_few_at_a_time_and_never_more_than_a_message_takes() -> None:
    engine = Engine()
    idle, small = engine.meter.use(), ExpertSignature(1, bytes(2))
    engine.meter.on_choosing(ExpertDemandReport(choices=CHOICES, ended=(EndedRequest(small, small),) * MOST_ENDED))
    engine.meter.on_choosing(ExpertDemandReport(choices=CHOICES, ended=(EndedRequest(small, small),)))
    assert [len(engine.meter.report(idle).ended) for _ in range(3)] == [MOST_ENDED, 1, 0]
    large = ExpertSignature(1, bytes(1 << 18))
    for _ in range(100):
        engine.meter.on_choosing(ExpertDemandReport(choices=CHOICES, ended=(EndedRequest(large, large),) * MOST_ENDED))
    told = [engine.meter.report(idle) for _ in range(MAX_UNREPORTED)]
    assert [len(one.ended) for one in told] == [1] * MAX_UNREPORTED
    assert all(len(msgspec.msgpack.encode(one)) < MAX_ENVELOPE_BYTES for one in told)
    assert engine.meter.report(idle).ended == ()


def test_hashes_are_the_same_for_the_same_beginning_and_mean_nothing_without_the_secret() -> None:
    keys, others = PrefixKeys(), PrefixKeys()
    long, short = keys.prefix(request(200)), keys.prefix(request(PREFIX_TOKENS))
    assert long[:8] == short
    assert len(long) == 8 * (200 // PREFIX_TOKENS)
    assert keys.prefix(of((9, *range(1, 200))))[8:16] != long[8:16]  # each hash covers all blocks before it
    assert others.prefix(request(200)) != long
    assert keys.name("uid:1000") != others.name("uid:1000")
    assert keys.name("") == 0
    assert len(keys.prefix(of([1 << 31] * PREFIX_TOKENS))) == 8  # the largest number that a message may have
    salted = [keys.prefix(of(range(200), salt)) for salt in (b"", b"1" * 16, b"2" * 16)]
    assert len({key for one in salted for key in (one[:8], one[8:16], one[16:])}) == 9, (
        "none is alike under another salt"
    )
    others.secret = keys.secret
    assert others.prefix(request(200)) == long


def led_by_b(tell: Callable[[LoadReport], None], lost: Sequence[bool] = ()) -> Any:
    """Returns box a's tracker of engines, led by b; each true value of `lost` loses one of the first reports to b."""
    ways = iter(lost)

    def told(node: str, use: LoadReport) -> bool:
        if next(ways, False):
            return False
        tell(use)
        return True

    return SimpleNamespace(
        leader="b",
        leading=0,
        state=SimpleNamespace(node="a", members=["b"], leader_tracker=SimpleNamespace(current=("b", 5))),
        channel=SimpleNamespace(notify_peer=told),
    )


def test_reports_that_did_not_reach_the_leader_are_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_requests, "REPEAT_S", 0.0)
    engine, told = Engine(), list[LoadReport]()
    reporter = LoadReporter(led_by_b(told.append, lost=[True]), engine.meter)
    engine.meter.note(Submit(request=request(2 * PREFIX_TOKENS)))
    engine.meter.on_choosing(ExpertDemandReport(choices=CHOICES))
    reporter.report()
    assert not told
    reporter.report()
    assert [(len(one.prefixes) // 8, one.choices) for one in told] == [(2, CHOICES)]


def test_a_leader_that_has_led_in_between_no_longer_is_told_everything_again() -> None:
    engine, told = Engine(), list[LoadReport]()
    plane = led_by_b(told.append)
    reporter = LoadReporter(plane, engine.meter)
    engine.meter.note(Submit(request=request(2 * PREFIX_TOKENS)))
    engine.meter.on_choosing(ExpertDemandReport(choices=CHOICES))
    reporter.report()
    reporter.report()
    assert [len(one.prefixes) // 8 for one in told] == [2]
    plane.state.leader_tracker.current = "b", 7  # the same box after a restart
    reporter.report()
    assert [(len(one.prefixes) // 8, one.choices) for one in told] == [(2, CHOICES)] * 2


def test_changes_are_reported_at_once_a_busy_engine_often_and_an_idle_one_seldom() -> None:
    engine, loop, told = Engine(), VirtualLoop(), list[float]()
    plane = led_by_b(lambda _use: told.append(loop.time()))
    reporter, looks = LoadReporter(plane, engine.meter), list[float]()

    async def follow() -> None:
        while True:
            await reporter.wait(False)
            reporter.report()
            looks.append(loop.time())

    async def run() -> None:
        following = asyncio.ensure_future(follow())
        await asyncio.sleep(10)
        assert len(looks) <= 10 / REPEAT_S + 2
        began_s = loop.time()
        engine.held.append(HeldRequest(10, 0, 100))
        reporter.on_work_changed()
        await asyncio.sleep(GAP_S)
        assert told[-1] == pytest.approx(began_s, abs=GAP_S)
        engine.held[0] = HeldRequest(10, 1, 100)  # of engines that report nothing
        await asyncio.sleep(2 * LOOK_S)
        assert told[-1] <= began_s + GAP_S + LOOK_S + 1e-6
        engine.held.clear()
        await asyncio.sleep(1)
        plane.leader, plane.state.leader_tracker.current = "c", ("c", 6)
        began_s = loop.time()
        reporter.on_beat()
        await asyncio.sleep(GAP_S)
        assert told[-1] == pytest.approx(began_s, abs=GAP_S)
        count = len(looks)
        reporter.on_beat()
        await asyncio.sleep(0.2)
        assert len(looks) <= count + 1
        following.cancel()

    loop.run_until_complete(run())
    loop.close()
