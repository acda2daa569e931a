"""Messages of `tools/fuzz`, and a short run of it at the channels of a daemon."""

from __future__ import annotations

import contextlib
import random

import msgspec
import pytest

from edgemoe.cluster.data.messages import ExpertChunk, KVPart
from edgemoe.cluster.rpc import envelope
from edgemoe.errors import WireError
from edgemoe.ipc.messages import TO_ENGINE
from tools.fuzzing.fuzz_channel import fuzz
from tools.fuzzing.messages import LANGUAGES, PASSED_ON, ChannelMessages, read
from tools.fuzzing.values import Values

CHECKED = {ExpertChunk, KVPart}  # whose checksum is a pattern


@pytest.mark.parametrize("channel", LANGUAGES)
def test_unspoilt_messages_are_within_all_bounds_and_some_spoilt_ones_are_not(channel: str) -> None:
    language, values = LANGUAGES[channel], Values(random.Random(3))
    refused = 0
    for kind in list(language.messages.values()) * 30:
        info = msgspec.inspect.type_info(kind)
        if kind not in CHECKED:
            assert type(language.read(msgspec.msgpack.encode(values.of(info, 0.0)))) is kind
        try:
            language.read(msgspec.msgpack.encode(values.of(info, 0.4)))
        except Exception:
            refused += 1
    assert refused > 20


def test_the_same_seed_makes_the_same_messages() -> None:
    kind = LANGUAGES["control"].messages["Announce"]
    one, two = (Values(random.Random(5)) for _ in range(2))
    assert repr([one.message(kind) for _ in range(50)]) == repr([two.message(kind) for _ in range(50)])


def test_the_largest_message_that_can_be_read_is_found_ahead_of_all() -> None:
    one, two = (ChannelMessages("control", random.Random(8)) for _ in range(2))
    found = one.largest(400)
    coming = [two.draw() for _ in range(400)]
    assert [one.draw() for _ in range(400)] == coming
    assert read("control", found)
    assert found in coming
    larger = [frames for frames in coming if sum(map(len, frames)) > sum(map(len, found))]
    assert larger
    for frames in larger:
        with pytest.raises(WireError):
            read("control", frames)


@pytest.mark.parametrize("channel", LANGUAGES)
def test_every_message_of_a_channel_is_drawn_so_that_it_can_be_read(channel: str) -> None:
    messages, kinds = ChannelMessages(channel, random.Random(2)), set[type]()
    for _ in range(16000):
        frames = messages.draw()
        with contextlib.suppress(WireError):
            kinds.add(type(LANGUAGES[channel].read(envelope.unseal(frames).body)))
            kinds.add(type(read(channel, frames)))
    passed_on = {*TO_ENGINE.messages.values(), *PASSED_ON} if channel == "control" else set()
    assert {*LANGUAGES[channel].messages.values(), *passed_on} - CHECKED <= kinds


def test_no_listed_peer_ends_a_daemon_or_changes_its_answers() -> None:
    seen = fuzz("", 1000, seed=12)
    assert seen["ok"], seen
    control = seen["channels"]["control"]
    assert control["answers"]["RequestGrant"]  # its offers are valid ones of a live box
    assert control["asked"].keys() >= {"Announce", "Beat"}
