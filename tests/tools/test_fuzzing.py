"""What `tools/fuzz` sends, and a short run of it at the channels of a daemon."""

from __future__ import annotations

import random
from pathlib import Path

import msgspec
import pytest

from edgemoe.cluster.rpc.keys import generate
from edgemoe.errors import WireError
from tools.fuzzing.channel import fuzz
from tools.fuzzing.peer import LANGUAGES, HostilePeer, read
from tools.fuzzing.values import Values


@pytest.mark.parametrize("channel", LANGUAGES)
def test_unspoilt_messages_are_within_all_bounds_and_some_spoilt_ones_are_not(channel: str) -> None:
    language, values = LANGUAGES[channel], Values(random.Random(3))
    refused = 0
    for kind in list(language.messages.values()) * 30:
        info = msgspec.inspect.type_info(kind)
        if kind.__name__ not in ("Chunk", "KVPart"):  # whose checksum is a pattern
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


def test_the_largest_message_that_can_be_read_is_found_ahead_of_all(tmp_path: Path) -> None:
    key = generate(tmp_path / "key")
    one, two = (HostilePeer("x", key, key.public, "127.0.0.1:9", "control", random.Random(7)) for _ in range(2))
    try:
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
    finally:
        one.close()
        two.close()


def test_no_listed_peer_ends_a_daemon_or_changes_what_it_answers() -> None:
    seen = fuzz("", 1000, seed=11)
    assert seen["ok"], seen
