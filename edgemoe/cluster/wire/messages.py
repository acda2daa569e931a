"""The messages between a front and an engine, and their encoding. One frame is one message.

    frame = magic (4 bytes) | version (1 byte) | msgpack of one tagged struct

Whatever arrives is checked: length, magic, version, tag, every field's type and bound. What does not fit raises
WireError (WireVersionError for another version); nothing else is ever raised by `decode_*`.

    front -> engine   Submit Cancel Drain Stop Ping Reload, and among several boxes Peers Plan
    engine -> front   Loading* Ready (Emissions | Stats | Reloaded)* ; Failed at any time, before it exits
                      among several boxes Listening once before Ready, then Holds and PeerSeen

Times are remaining or elapsed, never clock readings, so that a message means the same on any machine.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from edgemoe.errors import WireError, WireVersionError
from edgemoe.types import Emission, ModelInfo, PlacementPlan, Request

MAGIC = b"EMOE"
VERSION = 1
HEADER = MAGIC + bytes([VERSION])
MAX_FRAME_BYTES = 64 << 20  # a prompt of a million tokens with a large grammar stays well below

Count = Annotated[int, Meta(ge=0, le=1 << 62)]
Attempt = Annotated[int, Meta(ge=1, le=1 << 31)]
Name = Annotated[str, Meta(min_length=1, max_length=256)]
Text = Annotated[str, Meta(max_length=64 << 10)]


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """Base of all messages; the struct's name is its tag."""


class Submit(Message, frozen=True):
    """Runs `request` from its prompt and the tokens `emitted` so far; the next index is `len(emitted)`.

    `attempt` counts this front's submissions of the request, from 1; every Emission carries it back.
    """

    request: Request
    emitted: tuple[int, ...] = ()
    attempt: Attempt = 1
    remaining_ms: Annotated[float, Meta(ge=0)] = 600_000.0


class Cancel(Message, frozen=True):
    """Forgets the request if it still runs as `attempt`; no emission of it follows the next step."""

    request: Name
    attempt: Attempt


class Drain(Message, frozen=True):
    """Finish what runs; nothing more will be submitted."""


class Stop(Message, frozen=True):
    """Exit now, cleanly."""


class Ping(Message, frozen=True):
    """Answered with Stats at once."""


class Reload(Message, frozen=True):
    """Read the ScoutGate export that the settings name again. Answered with Reloaded."""


class PeerEngine(msgspec.Struct, frozen=True, kw_only=True):
    """Another box's engine, and where its lanes listen ("host:port")."""

    node: Name
    boot: Name
    calls: Name
    bulk: Name


class Peers(Message, frozen=True):
    """Whose keys may speak (node -> public key), and the engines of those that live, to connect to.

    Both are complete: a key that is not in it is revoked, an engine that is not in it is disconnected.
    """

    keys: dict[Name, Name] = {}
    engines: tuple[PeerEngine, ...] = ()


class Plan(Message, frozen=True):
    """Adopt this plan: keep what is at home here."""

    plan: PlacementPlan


class Listening(Message, frozen=True):
    """The ports that the engine's lanes listen on, and the model that it is loading."""

    calls_port: Annotated[int, Meta(ge=1, le=65535)]
    bulk_port: Annotated[int, Meta(ge=1, le=65535)]
    model: ModelInfo


class Holds(Message, frozen=True):
    """Experts as bitmaps of L * E bits (`types.pack_bits`): readable from the disk, and in memory.

    `budget_experts` is how many can be at home here. Sent when it has changed, at most once a second.
    """

    disk: bytes
    ram: bytes
    budget_experts: Count


class PeerSeen(Message, frozen=True):
    """The link to a peer as measured: a round trip, and bytes per second. At most once a second for each."""

    node: Name
    boot: Name
    latency_s: Annotated[float, Meta(ge=0)]
    bytes_per_s: Annotated[float, Meta(ge=0)]


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """What the engine can take, decided when it worked out its memory."""

    context_tokens: Count  # prompt and output of one request, at most
    kv_tokens: Count  # of all running requests together
    max_sequences: Count  # running at once
    max_queue: Count  # waiting behind them


class Loading(Message, frozen=True):
    """The engine is coming up: a short word and the share done."""

    phase: Name  # pack | weights | experts | warm-up
    fraction: Annotated[float, Meta(ge=0, le=1)] = 0.0


class Ready(Message, frozen=True):
    """The engine takes Submits from now on."""

    boot_id: Name
    model: ModelInfo
    limits: Limits


class Emissions(Message, frozen=True):
    """What one step added, all requests in one message."""

    items: list[Emission]


class Stats(Message, frozen=True):
    """Sent every half second and on Ping, by the engine's event loop: it is the heartbeat too.

    `values` maps final Prometheus names, labels included, to numbers. `step_s` is the age of the step that the
    compute thread is in (0 between steps): how the front sees a compute thread that hangs.
    """

    values: dict[str, float]
    step_s: Annotated[float, Meta(ge=0)] = 0.0


class Reloaded(Message, frozen=True):
    """What came of a Reload, in words; where it was refused, what was in use before still is."""

    message: Text
    refused: bool = False


class Failed(Message, frozen=True):
    """The engine cannot go on and is about to exit; `fatal` if starting it again would fail the same way."""

    error: Name  # the error's class
    message: Text
    fatal: bool = False


class Boot(msgspec.Struct, frozen=True, kw_only=True):
    """What `python -m edgemoe.worker` reads from its standard input, as JSON, up to end of file."""

    boot_id: Name  # drawn by the front for each start; the DEALER's identity
    address: str  # of the front's ROUTER
    settings: dict[str, Any]  # msgspec.to_builtins of config.Settings


ToEngine = Submit | Cancel | Drain | Stop | Ping | Reload | Peers | Plan
FromEngine = Loading | Ready | Emissions | Stats | Reloaded | Failed | Listening | Holds | PeerSeen

_encoder = msgspec.msgpack.Encoder()
_to_engine: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine)
_from_engine: msgspec.msgpack.Decoder[FromEngine] = msgspec.msgpack.Decoder(FromEngine)


def encode(message: Message) -> bytes:
    """The frame for `message`. Raises WireError where it would be longer than a frame may be."""
    frame = HEADER + _encoder.encode(message)
    if len(frame) > MAX_FRAME_BYTES:
        raise WireError(f"{type(message).__name__} of {len(frame)} bytes is over the {MAX_FRAME_BYTES} of a frame")
    return frame


def decode_to_engine(frame: bytes | memoryview) -> ToEngine:
    """The message in a frame that a front sent. Raises WireError, WireVersionError."""
    body = _body(frame)
    try:
        return _to_engine.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise WireError(f"a front sent a message that cannot be read: {error}") from error


def decode_from_engine(frame: bytes | memoryview) -> FromEngine:
    """The message in a frame that an engine sent. Raises WireError, WireVersionError."""
    body = _body(frame)
    try:
        return _from_engine.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise WireError(f"an engine sent a message that cannot be read: {error}") from error


def _body(frame: bytes | memoryview) -> memoryview:
    view = memoryview(frame)
    if len(view) > MAX_FRAME_BYTES:
        raise WireError(f"a frame of {len(view)} bytes is over the limit of {MAX_FRAME_BYTES}")
    if view[: len(MAGIC)] != MAGIC or len(view) <= len(HEADER):
        raise WireError(f"a frame of {len(view)} bytes does not start with {MAGIC!r}: not one of ours")
    if (version := view[len(MAGIC)]) != VERSION:
        raise WireVersionError(
            f"the other side speaks version {version} of the wire and this one {VERSION}; "
            "run the same release of edgemoe on both"
        )
    return view[len(HEADER) :]
