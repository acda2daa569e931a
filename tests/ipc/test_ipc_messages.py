"""Messages of the wire arrive unchanged; foreign ones are refused by name."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.model_info import MODEL

from edgemoe.errors import UnknownMessage, WireError, WireVersionError
from edgemoe.ipc import messages
from edgemoe.ipc.messages import (
    FRAMING,
    MAGIC,
    Cancel,
    Drain,
    Emissions,
    ExpertActivity,
    Failed,
    Limits,
    Loading,
    Message,
    Ping,
    Ready,
    Reload,
    Reloaded,
    Stats,
    Stop,
    Submit,
    decode_from_engine,
    decode_to_engine,
    encode,
)
from edgemoe.types.request import Emission, Request, Sampling
from edgemoe.wire.protocol import PROTOCOL_VERSIONS

SAMPLING = Sampling(temperature=0.5, logit_bias={3: -1.5}, stop_token_ids=(1, 2), grammar="start: /a/", logprobs=2)
HEADER = MAGIC + bytes((FRAMING, *PROTOCOL_VERSIONS))
REQUEST = Request(id="r-0-0", prompt=(1, 2, 3), sampling=SAMPLING, seed=2**64 - 1, user="uid:1000/é")
TO_ENGINE = [
    Submit(request=REQUEST, emitted=(5, 6), attempt=3, remaining_ms=12.5),
    Cancel(request="r-0-0", attempt=1),
    Drain(),
    Stop(),
    Ping(),
    Reload(),
]
FROM_ENGINE = [
    Loading(phase="weights", fraction=0.25),
    Ready(boot_id="b", model=MODEL, limits=Limits(context_tokens=1, kv_tokens=2, max_sequences=3, max_queue=4)),
    Emissions(items=[Emission(request="r", attempt=1, index=0, token=7, logprob=-0.5, top=((7, -0.5),))]),
    Stats(values={'edgemoe_tier_hits_total{tier="vram"}': 3.0}, step_s=0.5),
    Failed(error="StoreError", message="no store", fatal=True),
    Reloaded(message="the old one stays", refused=True),
    ExpertActivity(tokens=12.5, chosen=bytes(8), pairs=bytes(16), resident=b"\x03"),
]


@pytest.mark.parametrize("message", TO_ENGINE, ids=lambda message: type(message).__name__)
def test_a_front_s_messages_arrive_unchanged(message: Message) -> None:
    assert decode_to_engine(encode(message)) == message


@pytest.mark.parametrize("message", FROM_ENGINE, ids=lambda message: type(message).__name__)
def test_an_engine_s_messages_arrive_unchanged(message: Message) -> None:
    assert decode_from_engine(encode(message)) == message


def test_a_message_for_the_other_side_is_refused() -> None:
    with pytest.raises(UnknownMessage, match="Loading"):
        decode_to_engine(encode(FROM_ENGINE[0]))
    with pytest.raises(UnknownMessage, match="Submit"):
        decode_from_engine(encode(TO_ENGINE[0]))


def test_another_version_is_named() -> None:
    frame = bytearray(encode(Stop()))
    frame[4] += 1
    with pytest.raises(WireVersionError, match=f"framing {FRAMING + 1}"):
        decode_to_engine(bytes(frame))


def test_values_out_of_bounds_are_refused() -> None:
    body = {"type": "Submit", "request": msgspec.to_builtins(REQUEST), "attempt": 0}
    with pytest.raises(WireError, match="attempt"):
        decode_to_engine(HEADER + msgspec.msgpack.encode(body))


def test_a_frame_over_the_limit_is_refused_on_both_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, "MAX_FRAME_BYTES", 64)
    with pytest.raises(WireError, match="over"):
        encode(TO_ENGINE[0])
    with pytest.raises(WireError, match="over"):
        decode_to_engine(bytes(65))


@given(st.binary(max_size=64))
def test_noise_raises_nothing_but_wire_errors(noise: bytes) -> None:
    for frame in (noise, HEADER + noise):
        for decode in (decode_to_engine, decode_from_engine):
            try:
                decode(frame)
            except WireError:
                continue


@given(st.integers(0, 200), st.integers(0, 255))
def test_a_flipped_byte_is_decoded_or_refused_but_never_escapes(at: int, value: int) -> None:
    frame = bytearray(encode(TO_ENGINE[0]))
    frame[at % len(frame)] = value
    try:
        decode_to_engine(bytes(frame))
    except WireError:
        return
