"""Messages between a front and the engine of its box, and how a frame carries one.

    frame = magic (4 bytes) | framing (1) | lowest, highest version that the sender speaks (1, 1) | msgpack of a message

Receivers answer an invalid frame with MessageRefused, or end the one request that it was about. Times are durations.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, get_args

import msgspec
from msgspec import Meta

from edgemoe.errors import WireError, WireVersionError
from edgemoe.types.bounds import (
    MAX_NODES,
    Attempt,
    Bitmap,
    Count,
    Counts,
    Finite,
    LongText,
    Milliseconds,
    Name,
    PairTable,
    Port,
    Rate,
    Salt,
    Seconds,
    Share,
    ShareTable,
    Small,
    Text,
    Tokens,
)
from edgemoe.types.expert_signatures import EndedRequests, ExpertDemand, ExpertSignature
from edgemoe.types.model_info import ModelInfo
from edgemoe.types.placement import PlacementPlan
from edgemoe.types.request import Emission, Request
from edgemoe.types.snapshot import ServingSnapshot
from edgemoe.wire import protocol
from edgemoe.wire.protocol import Message, MessageLanguage, Versions

MAGIC = b"EMOE"
FRAMING = 2
_HEADER_BYTES = len(MAGIC) + 3
MAX_FRAME_BYTES = 64 << 20  # a prompt of a million tokens with a large grammar stays well below
MAX_EMISSIONS = 1 << 16  # in one message
MAX_METRICS = 1 << 14
PLACE_BYTES = 256  # where the loading of an engine is, in shared memory


class Submit(Message, frozen=True, kw_only=True, tag="Submit"):
    """Runs `request` from its prompt and the tokens `emitted` so far; the next index is `len(emitted)`.

    `attempt` counts this front's submissions of the request, from 1; every Emission carries it back. `waited_ms` is the
    time since the front received the request. `hand_over` asks for LastChunkStarted, because another box will decode;
    `signature` asks for PromptSignature.
    """

    request: Request
    emitted: Tokens = ()
    attempt: Attempt = 1
    remaining_ms: Milliseconds = 600_000.0
    waited_ms: Milliseconds = 0.0
    hand_over: bool = False
    signature: bool = False


class Cancel(Message, frozen=True, kw_only=True, tag="Cancel"):
    """Ends the request without an answer, if it still runs as `attempt`. After the next step it emits nothing."""

    request: Name
    attempt: Attempt


class Drain(Message, frozen=True, kw_only=True, tag="Drain"):
    """Asks the engine to finish running requests; nothing more will be submitted."""


class Stop(Message, frozen=True, kw_only=True, tag="Stop"):
    """Asks the engine to exit now, cleanly."""


class Ping(Message, frozen=True, kw_only=True, tag="Ping"):
    """Asks for Stats at once."""


class Reload(Message, frozen=True, kw_only=True, tag="Reload"):
    """Asks the engine to read the ScoutGate export again. Answered with Reloaded."""


Keys = Annotated[tuple[Name, ...], Meta(min_length=1, max_length=2)]


class PeerEngine(msgspec.Struct, frozen=True, kw_only=True):
    """Another box's engine, and where its channels listen ("host:port").

    An engine whose box is not heard at the moment stays connected, but is asked nothing.
    """

    node: Name
    boot: Name
    calls: Name
    bulk: Name
    heard: bool = True


class PeerList(Message, frozen=True, kw_only=True, tag="Peers"):
    """Lists the allowed keys by node (two while a key is being replaced), and the engines to connect to.

    Both lists are complete: keys that are not listed are revoked, engines that are not listed are disconnected.
    """

    keys: Annotated[dict[Name, Keys], Meta(max_length=MAX_NODES)] = msgspec.field(default_factory=dict)
    engines: Annotated[tuple[PeerEngine, ...], Meta(max_length=MAX_NODES)] = ()
    suspected: Annotated[tuple[Name, ...], Meta(max_length=MAX_NODES)] = ()  # another box found their answers wrong
    trusted: Annotated[tuple[Name, ...], Meta(max_length=MAX_NODES)] = ()  # their KV blocks serve all requests


class Plan(Message, frozen=True, kw_only=True, tag="Plan"):
    """Asks the engine to follow this plan and keep the experts that are at home on its box."""

    plan: PlacementPlan
    digest: Text = ""  # of the plan, as boxes name it


class ChannelsOpened(Message, frozen=True, kw_only=True, tag="Listening"):
    """Announces the ports of the engine's channels, and the model that it is loading."""

    calls_port: Port
    bulk_port: Port
    model: ModelInfo


class HeldExperts(Message, frozen=True, kw_only=True, tag="Holds"):
    """Experts on the disk, and those at home in memory: verified, they stay. On change, at most once a second."""

    disk: Bitmap
    ram: Bitmap
    budget_experts: Count
    plan: Text = ""  # digest of the one that says so
    rooms: Counts = ()  # how many of each size can be at home here, the smallest first


class PeerLinkMeasured(Message, frozen=True, kw_only=True, tag="PeerSeen"):
    """The link to a peer as measured: a round trip, bytes per second, computing. At most once a second for each."""

    node: Name
    boot: Name
    latency_s: Seconds
    bytes_per_s: Rate
    unit_s: Seconds = 0.0  # that the peer takes to compute one unit of work; 0 until measured


class PeerCutOff(Message, frozen=True, kw_only=True, tag="PeerCut"):
    """Says that the engine asks nothing of a peer any more, because its answers to expert calls were wrong."""

    since: ClassVar[int] = 3
    node: Name
    why: Text


class ExpertActivity(Message, frozen=True, kw_only=True, tag="Activity"):
    """Reports the experts chosen lately by this engine's own requests, as shares of tokens in units of 1 / 65535.

    `chosen` is uint16 [L, E], as is `computed`, of steps; `pairs` uint16 [P, 4]: layer, both experts, share; the
    heaviest of each layer. `resident` are the experts in memory, at home or not. Sent every ten seconds.
    """

    tokens: Annotated[float, Meta(ge=0, le=1e15)]  # with decay
    chosen: ShareTable
    pairs: PairTable = b""
    resident: Bitmap = b""
    passed: PairTable = b""  # in place of pairs: an expert, and one of the next layer
    steps: Count = 0  # of this engine
    tokens_per_s: Rate = 0.0  # of late, however short a time has been counted
    computed: ShareTable = b""
    steps_per_token: Rate = 0.0


class PrefixSignatureRequest(Message, frozen=True, kw_only=True, tag="FindPrefix"):
    """Asks for the experts that the cached part of a waiting request's prompt chose."""

    request: Name
    prompt: Tokens
    salt: Salt = b""  # of the request


class PrefixSignatureReply(Message, frozen=True, kw_only=True, tag="PrefixFound"):
    """Answers PrefixSignatureRequest with the sum over the prompt's cached blocks; None where there are none."""

    request: Name
    signature: ExpertSignature | None = None


class PromptSignature(Message, frozen=True, kw_only=True, tag="PromptRead"):
    """Reports the experts that a prompt's whole blocks chose, blocks from the prefix cache included."""

    request: Name
    attempt: Attempt
    signature: ExpertSignature


class ExpertDemandReport(Message, frozen=True, kw_only=True, tag="Choosing"):
    """Reports the experts that running requests are expected to choose, on change, a few times a second at most."""

    choices: ExpertDemand
    ended: EndedRequests = ()


class LastChunkStarted(Message, frozen=True, kw_only=True, tag="LastChunk"):
    """Says that the prefill of a request submitted with `hand_over` computes its last chunk, or has just ended.

    Before they are, where most of the prompt was computed by steps before: by then its signature says enough.
    """

    request: Name
    attempt: Attempt
    signature: ExpertSignature | None = None


class FetchPrefixKV(Message, frozen=True, kw_only=True, tag="PullPrefix"):
    """Asks the engine to fetch this prompt's KV blocks from a peer, including blocks still being computed there.

    Answered with PrefixKVFetched, after `remaining_ms` at the latest. Only the prefix cache keeps the blocks.
    """

    request: Name
    attempt: Attempt
    node: Name  # whose engine has them
    prompt: Tokens
    salt: Salt = b""  # of the request
    private_salt: Salt = b""  # likewise
    remaining_ms: Milliseconds = 60_000.0


class PrefixKVFetched(Message, frozen=True, kw_only=True, tag="PrefixPulled"):
    """Says how many of a prompt's blocks are here. `why` is "" where all are, else the reason in a word."""

    request: Name
    attempt: Attempt
    blocks: Small = 0
    why: Text = ""


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of the engine, which follow from its memory budgets."""

    context_tokens: Count  # prompt and output of one request, at most
    kv_tokens: Count  # of all running requests together
    max_sequences: Count  # running at once
    max_queue: Count  # waiting behind them


class Loading(Message, frozen=True, kw_only=True, tag="Loading"):
    """Reports the phase of loading and the share of it that is done."""

    phase: Name  # start | verifying | kernels | weights | experts | warm-up
    fraction: Share = 0.0
    detail: Text = ""


class Ready(Message, frozen=True, kw_only=True, tag="Ready"):
    """Says that the engine takes Submits from now on, or, with `takes_requests` false, works for other boxes only."""

    boot_id: Name
    model: ModelInfo
    limits: Limits
    takes_requests: bool = True


class Emissions(Message, frozen=True, kw_only=True, tag="Emissions"):
    """Carries the emissions of one step, for all requests."""

    items: Annotated[list[Emission], Meta(max_length=MAX_EMISSIONS)]


class Stats(Message, frozen=True, kw_only=True, tag="Stats"):
    """Sent every half second and on Ping, by the engine's event loop: it is the heartbeat too.

    `values` maps final Prometheus names, labels included, to numbers. `step_s` is for how long the
    compute thread's step has come no further (0 between steps): how the front sees one that hangs.
    """

    values: Annotated[dict[LongText, Finite], Meta(max_length=MAX_METRICS)]
    step_s: Seconds = 0.0


class SnapshotRequest(Message, frozen=True, tag="Show"):
    """Asks an engine to show itself for a while; from a front to its engine, too."""


class SnapshotReply(Message, frozen=True, tag="Shown"):
    """Shows an engine; None where none has shown itself yet. From an engine to its front, too."""

    snapshot: ServingSnapshot | None = msgspec.field(default=None, name="glimpse")


class Reloaded(Message, frozen=True, kw_only=True, tag="Reloaded"):
    """Reports the outcome of a Reload in words; after a refusal the old export stays in use."""

    message: LongText
    refused: bool = False


class Failed(Message, frozen=True, kw_only=True, tag="Failed"):
    """Says that the engine must exit; `fatal` if starting it again would fail in the same way."""

    error: Name  # the error's class
    message: LongText
    fatal: bool = False


class MessageRefused(Message, frozen=True, kw_only=True, tag="Refused"):
    """Names by tag a message that could not be read, and why. Sent by either side."""

    what: Text
    why: LongText


class Boot(msgspec.Struct, frozen=True, kw_only=True):
    """Configures `python -m edgemoe.worker`, which reads it as JSON from standard input up to the end of file."""

    boot_id: Name  # drawn by the front for each start; the DEALER's identity
    address: LongText  # of the front's ROUTER
    speaks: Versions = Versions(1, 1)  # the front
    settings: dict[str, Any]  # msgspec.to_builtins of config.Settings
    # shared memory of PLACE_BYTES, into which the engine writes where its loading is; -1 without
    place_fd: Annotated[int, Meta(ge=-1, le=1 << 20)] = -1


ToEngine = (
    Submit
    | Cancel
    | Drain
    | Stop
    | Ping
    | SnapshotRequest
    | Reload
    | PeerList
    | Plan
    | FetchPrefixKV
    | PrefixSignatureRequest
    | MessageRefused
)
ToCluster = (
    ChannelsOpened
    | HeldExperts
    | PeerLinkMeasured
    | PeerCutOff
    | ExpertActivity
    | LastChunkStarted
    | PrefixKVFetched
    | PromptSignature
    | PrefixSignatureReply
    | ExpertDemandReport
)  # for other boxes' sake
FromEngine = Loading | Ready | Emissions | Stats | SnapshotReply | Reloaded | Failed | ToCluster | MessageRefused
TO_ENGINE: MessageLanguage[ToEngine] = MessageLanguage(*get_args(ToEngine))
FROM_ENGINE: MessageLanguage[FromEngine] = MessageLanguage(*get_args(FromEngine))

_encoder = msgspec.msgpack.Encoder()


def encode(message: Message, speaks: Versions | None = None) -> bytes:
    """Returns the frame of `message`. Raises WireError where it would exceed MAX_FRAME_BYTES."""
    frame = MAGIC + bytes((FRAMING, *(speaks or protocol.PROTOCOL_VERSIONS))) + _encoder.encode(message)
    if len(frame) > MAX_FRAME_BYTES:
        raise WireError(f"{type(message).__name__} of {len(frame)} bytes is over the {MAX_FRAME_BYTES} of a frame")
    return frame


def decode_to_engine(frame: bytes | memoryview) -> ToEngine:
    """Returns the message in a frame that a front sent. Raises WireError."""
    return TO_ENGINE.read(body_of(frame))


def decode_from_engine(frame: bytes | memoryview) -> FromEngine:
    """Returns the message in a frame that an engine sent. Raises WireError."""
    return FROM_ENGINE.read(body_of(frame))


def versions_of(frame: bytes | memoryview) -> Versions:
    """Returns the protocol versions of a frame's sender. Raises WireError for other bytes."""
    view = memoryview(frame)
    if len(view) > MAX_FRAME_BYTES:
        raise WireError(f"a frame of {len(view)} bytes is over the limit of {MAX_FRAME_BYTES}")
    if view[: len(MAGIC)] != MAGIC or len(view) <= _HEADER_BYTES:
        raise WireError(f"a frame of {len(view)} bytes does not start with {MAGIC!r}: not one of ours")
    framing, lowest, highest = view[len(MAGIC) : _HEADER_BYTES]
    if framing != FRAMING:
        raise WireVersionError(f"a frame of framing {framing}, {FRAMING} is read here; run the same release on both")
    return Versions(lowest, highest)


def body_of(frame: bytes | memoryview) -> memoryview:
    """Returns the encoded message in a frame. Raises WireError."""
    theirs = versions_of(frame)
    if not protocol.PROTOCOL_VERSIONS.common(theirs):
        raise WireVersionError(
            f"the other side speaks versions {theirs} of the protocol and this one {protocol.PROTOCOL_VERSIONS}; "
            "run neighbouring releases of edgemoe"
        )
    return memoryview(frame)[_HEADER_BYTES:]
