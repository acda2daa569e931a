"""Channels between neighbouring releases: N as it is, and N + 1 with one more message and one more field."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import xxhash
from support.boxes import LANGUAGE, Box, Echo, running, secret
from support.waiting import until

from edgemoe.cluster.control.messages import CONTROL
from edgemoe.cluster.rpc import envelope
from edgemoe.cluster.rpc.envelope import seal
from edgemoe.errors import PeerOutdated, PeerRefused, PeerUnavailable, WireVersionError
from edgemoe.wire.protocol import PROTOCOL_VERSIONS, Message, MessageLanguage, Versions

OF_0_1_0 = (  # a heartbeat and an announcement, as commit 9647715 seals them
    "454d5052021e122b0726dd1a299700c2920102cb0000000000000000909081a474797065a442656174",
    "454d505202bbd7bb369561612f9700c2920102cb0000000000000000909084a474797065a8416e6e6f756e6365a772656c65617365"
    "a5302e312e30a4726f6c65a3626f78a761646472657373ae3139322e302e322e373a37353430",
)
NEXT = Versions(PROTOCOL_VERSIONS.lowest, PROTOCOL_VERSIONS.highest + 1)


class NextEcho(Message, frozen=True, tag="Echo"):
    """Echo, with a field that N does not know."""

    text: str
    tone: str = "plain"


class Wave(Message, frozen=True, tag="Wave"):
    """A message that N does not know."""

    since = NEXT.highest


NEXT_LANGUAGE: MessageLanguage[Any] = MessageLanguage(
    NextEcho, *[m for m in LANGUAGE.messages.values() if m is not Echo], Wave
)


def boxes(**of_b: Any) -> tuple[Box, Box]:
    """Builds a of release N + 1, and b of release N unless `of_b` says otherwise."""
    a_key, b_key = secret(), secret()
    allowed = {"a": a_key, "b": b_key}
    a = Box("a", a_key, allowed, language=NEXT_LANGUAGE, speaks=NEXT)
    return a, Box("b", b_key, allowed, **of_b)


async def connected(a: Box, b: Box) -> None:
    a.channel.connect(b.peer)
    b.channel.connect(a.peer)
    await until(lambda: a.channel.is_up("b") and b.channel.is_up("a"))


async def test_a_field_that_an_older_release_does_not_know_is_ignored_and_one_that_it_lacks_has_its_default() -> None:
    a, b = boxes()
    async with running(a, b):
        await connected(a, b)
        assert (await a.channel.ask("b", NextEcho("x", tone="loud"), timeout_s=5)).message == NextEcho("x")
        assert (await b.channel.ask("a", Echo("y"), timeout_s=5)).message == Echo("y")


async def test_a_message_of_the_next_release_is_not_sent_to_one_who_lacks_it() -> None:
    a, b = boxes()
    async with running(a, b):
        await connected(a, b)
        with pytest.raises(PeerOutdated, match="does not know Wave"):  # also before b has stated its versions
            await a.channel.ask("b", Wave(), timeout_s=5)
        await a.channel.ask("b", NextEcho("x"), timeout_s=5)
        assert a.channel.version("b") == PROTOCOL_VERSIONS.highest
        with pytest.raises(PeerOutdated, match="does not know Wave"):
            await a.channel.ask("b", Wave(), timeout_s=5)
        assert not a.channel.notify_peer("b", Wave())
        await a.channel.ask("b", NextEcho("x"), timeout_s=5)
        assert b.channel.mishaps.rejected == 0


async def test_two_of_the_next_release_use_its_features_once_they_have_met() -> None:
    a, b = boxes(language=NEXT_LANGUAGE, speaks=NEXT)
    async with running(a, b):
        await connected(a, b)
        await a.channel.ask("b", NextEcho("x"), timeout_s=5)
        assert a.channel.version("b") == b.channel.version("a") == NEXT.highest
        assert (await a.channel.ask("b", Wave(), timeout_s=5)).message == Wave()


async def test_a_message_that_is_not_known_is_answered_with_a_typed_refusal_and_costs_nothing_else() -> None:
    a, b = boxes()
    async with running(a, b):
        await connected(a, b)
        a.channel._codec._speaks["b"] = NEXT  # a assumes that b has its own release
        with pytest.raises(PeerOutdated, match="'Wave' is no message"):
            await a.channel.ask("b", Wave(), timeout_s=5)
        a.channel.notify_peer("b", Wave())
        assert (await a.channel.ask("b", NextEcho("on"), timeout_s=5)).message == NextEcho("on")


async def test_a_message_that_cannot_be_read_is_refused_at_once() -> None:
    a, b = boxes()
    async with running(a, b):
        await connected(a, b)

        class Wrong(Message, frozen=True, tag="Echo"):
            text: int

        with pytest.raises(PeerRefused, match="Echo that cannot be read"):
            await a.channel.ask("b", Wrong(3), timeout_s=5)


async def test_releases_without_a_common_version_refuse_each_other_and_say_so() -> None:
    a, b = boxes(speaks=Versions(5, 6))
    foreign: dict[str, str] = {}
    a.channel.on_foreign = b.channel.on_foreign = foreign.__setitem__
    async with running(a, b):
        await connected(a, b)
        with pytest.raises((PeerRefused, PeerUnavailable)):
            await a.channel.ask("b", NextEcho("x"), timeout_s=0.5)
        with pytest.raises((PeerRefused, PeerUnavailable)):
            await b.channel.ask("a", Echo("x"), timeout_s=0.5)
        await until(lambda: len(foreign) == 2)
    assert foreign["a"].startswith(f"a speaks versions {NEXT} of the protocol, b 5 to 6")
    assert foreign["b"].startswith(f"b speaks versions 5 to 6 of the protocol, a {NEXT}")


@pytest.mark.parametrize("sealed", OF_0_1_0)
async def test_a_box_of_0_1_0_is_refused_by_name_and_so_are_we_there(sealed: str) -> None:
    codec = envelope.EnvelopeCodec("b", PROTOCOL_VERSIONS, "control", CONTROL, 1 << 20)
    with pytest.raises(WireVersionError, match=f"a speaks versions 1 to 2 of the protocol, b {PROTOCOL_VERSIONS}: run"):
        codec.open("a", [memoryview(bytes.fromhex(sealed))])
    (ours,) = codec.seal_failure(PeerRefused("no"))
    theirs = envelope.EnvelopeCodec("a", Versions(1, 2), "control", CONTROL, 1 << 20)  # its rule, and its framing
    with pytest.raises(WireVersionError, match=f"b speaks versions {PROTOCOL_VERSIONS} of the protocol, a 1 to 2"):
        theirs.open("b", [memoryview(ours)])


def test_an_envelope_of_a_later_release_may_have_more_at_its_end() -> None:
    opened = envelope.unseal(seal(Echo("x"), id=3))
    row = [*msgspec.msgpack.decode(msgspec.msgpack.encode(opened)), "news"]
    packed = msgspec.msgpack.encode(row)
    head = envelope.HEAD.pack(envelope.MAGIC, envelope.FRAMING, xxhash.xxh3_64_digest(packed))
    assert envelope.unseal([head + packed]).id == 3
