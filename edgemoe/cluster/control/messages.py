"""Messages of the control channel, from front to front.

    Beat         sent several times a second: the box lives; whether it leads, which plan it follows, how busy it is
    Announce     asked on change, or where a Beat wants it; answered Welcome (or refused): what the box is and has
    Report       sent to the leader every ten seconds, without an answer: what requests choose, how the links are
    EngineUse    sent to the leader when it has changed, without an answer: what a box's engine has to do
    RequestOffer asked of the leader for a request that waits, answered RequestGrant: where it runs, or sent one later
    Withdrawal   sent to the leader, without an answer: offers that do not stand, or whose engine would not take them
    GetPlan      answered PlanIs, with the plan as a tensor
    Forward      a frame for the other box's engine, as it would go to our own, as a tensor; answered Taken
    FetchParcel  asked where a Forward names a long frame instead, answered ParcelPart: a part of that frame
    Tokens       what that engine emits, likewise; answered Taken, which names requests that are not wanted any more
    Check        asked once a second of boxes that run requests of ours, answered Dropped: those they do not have
    Show         asked once a second while somebody looks here, answered Shown: what the box's engine shows of itself
    Reach        asked where somebody wants to know, answered Reached: which of our ports the box reaches, its clock
    FindStore    asked by a command beside a daemon, answered StoreAt: which store the box serves, and where
    RaftPayload  sent without an answer: messages of the embedded Raft

A leader's messages carry its epoch in Beat.leading.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self, get_args

import msgspec
import xxhash
from msgspec import Meta

from edgemoe.cluster.rpc.envelope import MAX_TENSOR_BYTES, Buffer, Failure
from edgemoe.cluster.rpc.keys import Peer
from edgemoe.ipc.messages import Show, Shown
from edgemoe.types.bounds import (
    MAX_NODES,
    Bitmap,
    Bytes,
    Count,
    Counts,
    LayerBytes,
    LayerCounts,
    Milliseconds,
    PairTable,
    Port,
    Rate,
    Seconds,
    ShareTable,
    Small,
    Sum64,
    Text,
    TokenCount,
    Words,
)
from edgemoe.types.expert_signatures import EndedRequests, EngineChoices, SignatureTable
from edgemoe.types.request import Phases
from edgemoe.wire.protocol import Language, Message

MAX_PAYLOAD_BYTES = 1 << 20  # of the agreement in one message
MAX_UNWANTED = 2000  # requests named in one answer; the rest with the next
MAX_TAKEN = 256  # offers named as taken or withdrawn in one message
MAX_PREFIX_KEYS = 512  # of one prompt, or in one message; eight bytes each
PREFIX_TOKENS, SECRET_BYTES = 64, 16  # of a prompt that each key of its prefix adds to those before; of a secret
PARCEL_PART_BYTES = 64 << 10  # in one message: few enough that a heartbeat behind them is not late on a slow link
KEY_BYTES = 16
ParcelKey = Annotated[bytes, Meta(min_length=KEY_BYTES, max_length=KEY_BYTES)]
WallSeconds = Annotated[float, Meta(ge=0, le=1e12)]  # since 1970
PrefixKeys = Annotated[bytes, Meta(max_length=8 * MAX_PREFIX_KEYS)]
OfferNames = Annotated[tuple[tuple[Text, Count], ...], Meta(max_length=MAX_TAKEN)]  # (node, number)
RequestAttempts = Annotated[tuple[tuple[Text, Count], ...], Meta(max_length=MAX_UNWANTED)]  # (request, attempt)


class RaftPayload(Message, frozen=True, tag="RaftPayload"):
    """A message between the members of the embedded agreement; opaque here."""

    data: Annotated[bytes, Meta(max_length=MAX_PAYLOAD_BYTES)]


class Beat(Message, frozen=True, tag="Beat"):
    """A sign of life. `leading` is the epoch in which the box leads, 0 if it does not."""

    leading: Count = 0
    seen: Count = 0  # the highest epoch that the box knows of
    plan_version: Count = 0  # that the box follows; the leader's is the one that all must follow
    plan_digest: Text = ""
    engine: Text = ""  # boot of the engine that takes requests; "" while none does
    requests: Count = 0  # running and waiting there
    slots: Count = 0  # that run at once
    capacity: Count = 0  # that may be there, waiting ones included
    unmet: bool = False  # this box has no announcement of the receiver yet and wants one
    secret: Annotated[bytes, Meta(max_length=SECRET_BYTES)] = b""  # the leader's: it hashes users and prefixes


class EngineCard(msgspec.Struct, frozen=True):
    """Describes an engine that has opened its channels."""

    boot: Text
    calls_port: Port
    bulk_port: Port
    model: Text  # digest
    layers: Small
    experts: Small
    expert_bytes: Bytes  # of a largest one
    budget_experts: Count  # that can be at home there
    disk: Bitmap
    ram: Bitmap
    shares: bool  # computes for others
    layer_experts: LayerCounts = ()  # of each layer; (): all have `experts`
    plan: Text = ""  # digest of the one by which `ram` is at home
    encodings: Words = ()  # that experts are stored in, the commonest first
    layer_bytes: LayerBytes = ()  # of an expert of each layer; (): `expert_bytes`
    rooms: Counts = ()  # of `budget_experts` for each size, the smallest first; () where there is one

    @property
    def experts_of_layers(self) -> tuple[int, ...]:
        """Returns how many experts each layer has: `experts` where the engine does not state a number for each."""
        return self.layer_experts if len(self.layer_experts) == self.layers else (self.experts,) * self.layers

    @property
    def bytes_of_layers(self) -> tuple[int, ...]:
        """Returns the size of an expert of each layer, likewise."""
        return self.layer_bytes if len(self.layer_bytes) == self.layers else (self.expert_bytes,) * self.layers


class Announce(Message, frozen=True, tag="Announce"):
    """Describes a box: release, role, address, memory, engine, peers."""

    release: Text
    role: Literal["box", "witness"]
    address: Text  # HOST:PORT of its control channel
    devices: Annotated[tuple[Text, ...], Meta(max_length=64)] = ()
    ram_bytes: Bytes = 0
    engine: EngineCard | None = None
    leaving: bool = False
    agreement: Annotated[str, Meta(max_length=400)] = ""  # how it elects a leader; "" of a box that joins
    listed: Annotated[tuple[Peer, ...], Meta(max_length=MAX_NODES)] = ()  # peers that it allows
    serves: Phases = "both"  # what its engine does of requests


class Welcome(Message, frozen=True, tag="Welcome"):
    """Confirms an announcement."""


class LinkReport(msgspec.Struct, frozen=True):
    """A link to another box as its engine measured it."""

    node: Text
    latency_s: Seconds
    bytes_per_s: Rate
    unit_s: Seconds = 0.0  # that the box takes to compute one unit of work; 0 until measured


class Report(Message, frozen=True, tag="Report"):
    """Tells the leader, and nobody else, what a box's own requests choose (see Activity) and how its links are."""

    model: Text  # digest
    tokens: Annotated[float, Meta(ge=0, le=1e15)]  # that the tables are shares of
    chosen: ShareTable
    pairs: PairTable = b""
    resident: Bitmap = b""
    links: Annotated[tuple[LinkReport, ...], Meta(max_length=MAX_NODES)] = ()
    passed: PairTable = b""
    steps: Count = 0
    tokens_per_s: Rate = 0.0  # 0 of a box that does not say
    computed: ShareTable = b""  # shares of steps
    steps_per_token: Rate = 0.0  # likewise


class EngineUse(Message, frozen=True, tag="EngineUse"):
    """Tells the leader, and nobody else, what a box's engine has to do; with an empty `engine`, that it takes nothing.

    `prefixes` are new since the last one: keyed hashes of the prompts that it has had.
    """

    engine: Text = ""  # boot
    slots: Small = 0  # requests that run at once
    capacity: Small = 0  # that may be there, waiting ones included
    running: Small = 0  # that have a token
    waiting: Small = 0  # that have none
    prefill_tokens: Count = 0  # of the prompts of those that wait
    remaining_tokens: Count = 0  # of output, that those there are expected to write yet
    blocks: Count = 0  # for keys and values
    free_blocks: Count = 0
    tokens_per_s: Rate = 0.0  # of prefill; 0 until measured
    taken: OfferNames = ()  # offers that have reached it lately
    prefixes: PrefixKeys = b""
    choices: EngineChoices | None = None  # where they have changed
    ended: EndedRequests = ()  # some of the requests that have


class RequestOffer(Message, frozen=True, tag="RequestOffer"):
    """Offers the leader a request that waits at its front, under a number of that front. No tokens are told.

    `principal`, `user` and `prefix` are hashes keyed with the cluster's secret; each of the prefix covers a piece of
    the prompt with all before it.
    """

    number: Count
    model: Text  # digest
    prompt_tokens: Small
    max_tokens: TokenCount
    expected_tokens: TokenCount = 0  # of output
    user: Sum64 = 0  # of a principal; 0: nobody's
    prefix: PrefixKeys = b""
    waited_ms: Milliseconds = 0.0
    remaining_ms: Milliseconds = 0.0  # that the offer stands
    signature: SignatureTable | None = None  # of its prompt, or of one that is likely to be like it
    stage: Literal["prefill", "decode"] = "prefill"  # decode: it is prefilled; answered at once, for good
    principal: Sum64 = 0  # 0: not stated


class RequestGrant(Message, frozen=True, tag="RequestGrant"):
    """Says which engine takes the request of that offer: NODE:BOOT, or "" while none has room; perhaps why."""

    number: Count
    place: Text = ""
    why: Text = ""


class Withdrawal(Message, frozen=True, tag="Withdrawal"):
    """Takes offers back, whether they wait or were granted and have come to nothing."""

    numbers: Annotated[tuple[Count, ...], Meta(max_length=MAX_TAKEN)]


class GetPlan(Message, frozen=True, tag="GetPlan"):
    """Asks for the plan of this digest."""

    digest: Text


class PlanIs(Message, frozen=True, tag="PlanIs"):
    """Carries the plan's bytes as its tensor."""


class Parcel(msgspec.Struct, frozen=True):
    """A frame of so many bytes. The checksum is of the key and all of them."""

    key: ParcelKey
    bytes: Annotated[int, Meta(ge=1, le=MAX_TENSOR_BYTES)]
    checksum: Annotated[str, Meta(pattern="^[0-9a-f]{32}$")]

    @classmethod
    def of(cls, key: ParcelKey, frame: Buffer) -> Self:
        """Returns the name of a frame."""
        return cls(key, len(frame), _checksum(key, frame))

    def is_intact(self, frame: Buffer) -> bool:
        """Returns whether these bytes are the frame."""
        return self.checksum == _checksum(self.key, frame)


class FetchParcel(Message, frozen=True, tag="FetchParcel"):
    """Asks for `bytes` bytes from `offset`."""

    key: ParcelKey
    offset: Bytes
    bytes: Annotated[int, Meta(ge=1, le=PARCEL_PART_BYTES)]


class ParcelPart(Message, frozen=True, tag="ParcelPart"):
    """Carries the bytes asked for."""


class Forward(Message, frozen=True, tag="Forward"):
    """Carries as its tensor, or names, a frame for an engine that serves this model: Submit, Cancel or PullPrefix."""

    model: Text  # digest
    offer: Count = 0  # number of the offer by which it comes; 0: by none
    parcel: Parcel | None = None  # the frame, where it is long


class Tokens(Message, frozen=True, tag="Tokens"):
    """Carries as its tensor a frame from an engine: Emissions."""


class Taken(Message, frozen=True, tag="Taken"):
    """Confirms a Forward or Tokens. `unwanted` are the (request, attempt) that nobody waits for."""

    unwanted: RequestAttempts = ()


class Check(Message, frozen=True, tag="Check"):
    """Asks which of these requests, by (request, attempt), the engine of that boot does not have."""

    engine: Text
    requests: RequestAttempts


class Dropped(Message, frozen=True, tag="Dropped"):
    """Names requests that neither run nor are on their way back; their owner must run them again."""

    requests: RequestAttempts = ()


class Reach(Message, frozen=True, tag="Reach"):
    """Asks a box to try the asker's ports."""


class Reached(Message, frozen=True, tag="Reached"):
    """Names the lanes whose ports did not answer, and the time when the question came and when it was answered."""

    came_s: WallSeconds
    answered_s: WallSeconds
    unreached: Words = ()


class FindStore(Message, frozen=True, tag="FindStore"):
    """Asks which store the box's engine serves."""


class StoreAt(Message, frozen=True, tag="StoreAt"):
    """Names a store, and the port on which its pieces are to be had."""

    bulk_port: Port
    model: Annotated[str, Meta(pattern="^[0-9a-f]{32}$")]  # digest
    name: Text  # as clients call it
    store: Annotated[str, Meta(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]*$", max_length=255)]  # its directory's name


OfRequests = (
    RequestOffer | RequestGrant | Withdrawal | Forward | FetchParcel | ParcelPart | Tokens | Taken | Check | Dropped
)
OfBoxes = RaftPayload | Beat | Announce | Welcome | Report | EngineUse | GetPlan | PlanIs | Reach | Reached
ControlMessage = OfRequests | OfBoxes | Show | Shown | FindStore | StoreAt | Failure
CONTROL: Language[ControlMessage] = Language(*get_args(ControlMessage))


def _checksum(key: bytes, frame: Buffer) -> str:
    digest = xxhash.xxh3_128(key)
    digest.update(frame)
    return digest.hexdigest()
