"""Messages of the control channel, between the fronts of boxes. Requests name their reply in their docstring.

A leader's messages carry its epoch in Heartbeat.leading.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self, get_args

import msgspec
import xxhash
from msgspec import Meta

from edgemoe.cluster.rpc.envelope import Failure
from edgemoe.cluster.rpc.keys import Peer
from edgemoe.cluster.rpc.roster import Roster
from edgemoe.ipc.messages import SnapshotReply, SnapshotRequest
from edgemoe.types.bounds import (
    MAX_NODES,
    Bitmap,
    Bytes,
    Count,
    Counts,
    LayerBytes,
    LayerCounts,
    LongText,
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
    WallSeconds,
    Word,
    Words,
)
from edgemoe.types.expert_signatures import EndedRequests, ExpertDemand, ExpertSignature
from edgemoe.types.model_info import ModelInfo
from edgemoe.types.request import Phases
from edgemoe.wire.protocol import MAX_TENSOR_BYTES, Buffer, Message, MessageLanguage

MAX_UNWANTED = 2000  # requests named in one answer; the rest with the next
MAX_TAKEN = 256  # offers named as taken or withdrawn in one message
MAX_PREFIX_KEYS = 512  # of one prompt, or in one message; eight bytes each
PREFIX_TOKENS, SECRET_BYTES = 64, 16  # of a prompt that each key of its prefix adds to those before; of a secret
PARCEL_PART_BYTES = 64 << 10  # in one message: few enough that a heartbeat behind them is not late on a slow link
KEY_BYTES = 16
ParcelKey = Annotated[bytes, Meta(min_length=KEY_BYTES, max_length=KEY_BYTES)]
PrefixKeys = Annotated[bytes, Meta(max_length=8 * MAX_PREFIX_KEYS)]
OfferNames = Annotated[tuple[tuple[Text, Count], ...], Meta(max_length=MAX_TAKEN)]  # (node, number)
HttpHeaders = Annotated[tuple[tuple[Word, Text], ...], Meta(max_length=16)]  # by lower-case name
RequestAttempts = Annotated[tuple[tuple[Text, Count], ...], Meta(max_length=MAX_UNWANTED)]  # (request, attempt)


class Heartbeat(Message, frozen=True, tag="Beat"):
    """Says several times a second that the box lives. `leading` is the epoch it leads in, 0 if none. No reply."""

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
    still: bool = False  # the engine has said nothing for a while
    step_s: Seconds = 0.0  # that its decode steps take; 0 while that is not known


class ChannelDescription(msgspec.Struct, frozen=True):
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


class Accusation(msgspec.Struct, frozen=True):
    """Names a box by one of its keys whose answers to expert calls the sender has found wrong."""

    node: Text
    key: Word
    why: Text


class EtcdRun(msgspec.Struct, frozen=True):
    """Names a start of a voter's etcd on its data: the number of the start, and a random word."""

    number: Count = 0
    word: Word = ""


class DoubleBox(msgspec.Struct, frozen=True):
    """Names a box of which two run: the address of the one that the sender follows, and that of the other."""

    node: Text
    followed: Text
    other: Text


class EtcdCard(msgspec.Struct, frozen=True):
    """Describes a voter's etcd member: its port on the host of the control channel, and its certificate (PEM)."""

    port: Port
    certificate: Annotated[str, Meta(max_length=2048)]
    cluster: Word = ""  # token of the cluster that it is a member of; "" while of none
    run: EtcdRun | None = None  # its last start


class FurtherModel(msgspec.Struct, frozen=True, omit_defaults=True):
    """Describes a model that a box serves by its name, beside the cluster's."""

    name: Text
    state: Word
    info: ModelInfo | None = None  # without sizes of single layers; None where its store cannot be read
    context_tokens: Count = 0
    capabilities: Words = ()
    disk_bytes: Bytes = 0
    parameters: Bytes = 0
    ram_bytes: Bytes = 0  # of experts
    vram_bytes: Bytes = 0


class Announce(Message, frozen=True, tag="Announce"):
    """Describes a box, on change or where a Heartbeat asks for it. Reply: Welcome."""

    release: Text
    role: Literal["box", "witness"]
    address: Text  # HOST:PORT of its control channel
    devices: Annotated[tuple[Text, ...], Meta(max_length=64)] = ()
    ram_bytes: Bytes = 0
    engine: ChannelDescription | None = None
    leaving: bool = False
    agreement: Annotated[str, Meta(max_length=400)] = ""  # how it elects a leader; "" of a box that joins
    listed: Annotated[tuple[Peer, ...], Meta(max_length=MAX_NODES)] = ()  # peers that it allows
    serves: Phases = "both"  # the phases of requests that its engine computes
    accuses: Annotated[tuple[Accusation, ...], Meta(max_length=MAX_NODES)] = ()
    etcd: EtcdCard | None = None  # of a voter
    roster: Roster | None = None  # that it follows
    doubles: Annotated[tuple[DoubleBox, ...], Meta(max_length=MAX_NODES)] = ()  # that it sees
    models: Annotated[tuple[Text, ...], Meta(max_length=MAX_NODES)] = ()  # further ones, beside the cluster's
    cuts: Annotated[tuple[Accusation, ...], Meta(max_length=MAX_NODES)] = ()  # boxes that all cut off, while it leads
    may_leave: bool = False  # it is no home of experts
    further: Annotated[tuple[FurtherModel, ...], Meta(max_length=MAX_NODES)] = ()  # `models`, described


class Welcome(Message, frozen=True, tag="Welcome"):
    """Confirms an Announce, or says that another box of the asker's name is followed."""

    boot: Text = ""  # incarnation that answers
    prefers: Text = ""  # address of that other box
    remembers: EtcdRun | None = None  # the last start of the asker's etcd before this announcement


class EtcdJoin(Message, frozen=True, tag="EtcdJoin"):
    """Asks a voter to add the asker to the members of its etcd. Reply: EtcdMembers."""


class EtcdMembers(Message, frozen=True, tag="EtcdMembers"):
    """Names the members of an etcd cluster and their URLs, the asker included."""

    cluster: Word
    members: Annotated[tuple[tuple[Text, Text], ...], Meta(max_length=MAX_NODES)]
    whole: bool = False  # every voter has been a member with a vote


class MemberChange(Message, frozen=True, tag="MemberChange"):
    """Asks a voter to change the members of the cluster. Reply: MemberChanged."""

    verb: Literal["begin", "voting", "vote", "unvote", "remove", "invite", "join", "key"]
    node: Text = ""
    dead: bool = False  # remove: the box is gone for good
    key: Word = ""  # of the invitation, of the box that joins, or the next one of this box
    address: Text = ""  # of the box that joins
    until_s: WallSeconds = 0.0  # of the invitation


class MemberChanged(Message, frozen=True, tag="MemberChanged"):
    """Confirms a MemberChange, in words for the owner."""

    said: LongText = ""
    roster: Roster | None = None  # of the cluster that the asker has joined


class JoinCluster(Message, frozen=True, tag="JoinCluster"):
    """Asks, with the key of an invitation, to belong to the cluster with this key. Reply: MemberChanged."""

    key: Word
    address: Text


class HandOver(Message, frozen=True, tag="HandOver"):
    """Asks a box that will be removed to give its experts to the others first. Reply: Welcome."""


class LinkReport(msgspec.Struct, frozen=True):
    """A link to another box as its engine measured it."""

    node: Text
    latency_s: Seconds
    bytes_per_s: Rate
    unit_s: Seconds = 0.0  # that the box takes to compute one unit of work; 0 until measured


class BoxReport(Message, frozen=True, tag="Report"):
    """Reports the experts chosen (see ExpertActivity) and the links to the leader alone every ten seconds. No reply."""

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


class LoadReport(Message, frozen=True, tag="EngineUse"):
    """Reports the load of a box's engine to the leader alone, on change. No reply.

    An empty `engine` says that it accepts no requests. `prefixes` are keyed hashes of the prompts since the last one.
    """

    engine: Text = ""  # boot
    slots: Small = 0  # requests that run at once
    capacity: Small = 0  # that may be there, waiting ones included
    running: Small = 0  # that have a token
    waiting: Small = 0  # that have none
    prefill_tokens: Count = 0  # of waiting requests' prompts
    remaining_tokens: Count = 0  # of output that the requests there will probably still write
    blocks: Count = 0  # for keys and values
    free_blocks: Count = 0
    tokens_per_s: Rate = 0.0  # of prefill; 0 until measured
    taken: OfferNames = ()  # offers that have reached it lately
    prefixes: PrefixKeys = b""
    choices: ExpertDemand | None = None  # None: unchanged
    ended: EndedRequests = ()  # some of the requests that have


class RequestOffer(Message, frozen=True, tag="RequestOffer"):
    """Offers the leader a request that waits at its front, without its tokens. Reply: RequestGrant, at once or later.

    `number` is the front's. `principal`, `user` and `prefix` are hashes keyed with the cluster's secret. Each hash of
    the prefix covers a piece of the prompt and all pieces before it.
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
    signature: ExpertSignature | None = None  # of its prompt, or of one that is likely to be like it
    stage: Literal["prefill", "decode"] = "prefill"  # decode: it is prefilled; answered at once, for good
    principal: Sum64 = 0  # 0: not stated


class RequestGrant(Message, frozen=True, tag="RequestGrant"):
    """Names the engine that takes the offered request (NODE:BOOT, "" while none has room), and the reason if any."""

    number: Count
    place: Text = ""
    why: Text = ""


class OfferWithdrawal(Message, frozen=True, tag="Withdrawal"):
    """Withdraws offers: waiting ones, and granted ones that the engine did not start. No reply."""

    numbers: Annotated[tuple[Count, ...], Meta(max_length=MAX_TAKEN)]


class PlanRequest(Message, frozen=True, tag="GetPlan"):
    """Asks for the plan with this digest. Reply: PlanReply."""

    digest: Text


class PlanReply(Message, frozen=True, tag="PlanIs"):
    """Carries the encoded plan as its tensor."""


class Parcel(msgspec.Struct, frozen=True):
    """Names a long frame that waits at the sender. The checksum covers the key and the frame.

    Each sending draws a new key, so that no part of an earlier frame is taken for one of this.
    """

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
    """Asks on the second connection for `bytes` bytes of a long frame from `offset`. Reply: ParcelPart."""

    key: ParcelKey
    offset: Bytes
    bytes: Annotated[int, Meta(ge=1, le=PARCEL_PART_BYTES)]


class ParcelPart(Message, frozen=True, tag="ParcelPart"):
    """Carries that part as its tensor."""


class ForwardedFrame(Message, frozen=True, tag="Forward"):
    """Brings a frame (Submit, Cancel or FetchPrefixKV) for the engine that serves this model. Reply: FrameAccepted.

    The tensor is the frame. A long frame is named by `parcel` instead, and the receiver fetches it with FetchParcel.
    """

    model: Text  # digest
    offer: Count = 0  # number of the offer by which it comes; 0: by none
    parcel: Parcel | None = None  # the frame, where it is long


class ForwardedEmissions(Message, frozen=True, tag="Tokens"):
    """Carries a frame of Emissions from an engine as its tensor. Reply: FrameAccepted."""


class FrameAccepted(Message, frozen=True, tag="Taken"):
    """Confirms a ForwardedFrame or ForwardedEmissions. `unwanted` are the (request, attempt) nobody waits for."""

    unwanted: RequestAttempts = ()


class ForwardedHttp(Message, frozen=True, tag="Http"):
    """Brings a client's POST request for a model that the receiver serves by name. Reply: FrameAccepted.

    The tensor is the body. A long body is named by `parcel` instead. The asker then fetches the answer in parts.
    """

    number: Count  # of the asker's requests
    path: Text
    principal: Text
    headers: HttpHeaders = ()
    parcel: Parcel | None = None  # the body, where it is long


class HttpPartQuery(Message, frozen=True, tag="HttpNext"):
    """Asks on the second connection for a part of the answer, which confirms all parts before. Reply: HttpPart."""

    number: Count
    part: Count  # from 0


class HttpPart(Message, frozen=True, tag="HttpPart"):
    """Carries the bytes of an answer since the last part, perhaps none, as its tensor.

    Without `more` the answer ends here. Where it `broke_off` before its own end, the client's connection does, too.
    """

    status: Annotated[int, Meta(ge=0, le=599)] = 0  # 0: its head has not come yet
    headers: HttpHeaders = ()
    more: bool = True
    broke_off: bool = False


class HttpWithdrawal(Message, frozen=True, tag="HttpWithdrawal"):
    """Withdraws a forwarded HTTP request, whose client has gone. No reply."""

    number: Count


class LostRequestsQuery(Message, frozen=True, tag="Check"):
    """Asks once a second which (request, attempt) the engine of that boot has lost. Reply: LostRequestsReply."""

    engine: Text
    requests: RequestAttempts


class LostRequestsReply(Message, frozen=True, tag="Dropped"):
    """Names requests that neither run here nor are on their way back: their owner runs them again."""

    requests: RequestAttempts = ()


class PortProbeRequest(Message, frozen=True, tag="Reach"):
    """Asks a box to connect to the asker's ports. Reply: PortProbeReply."""


class PortProbeReply(Message, frozen=True, tag="Reached"):
    """Names the channels whose ports did not answer, with the times of arrival and answer by this box's clock."""

    came_s: WallSeconds
    answered_s: WallSeconds
    unreached: Words = ()


class StoreLocationRequest(Message, frozen=True, tag="FindStore"):
    """Asks which store the box's engine serves. Reply: StoreLocationReply."""


class StoreLocationReply(Message, frozen=True, tag="StoreAt"):
    """Names the served store, and the port of the bulk channel that has its pieces."""

    bulk_port: Port
    model: Annotated[str, Meta(pattern="^[0-9a-f]{32}$")]  # digest
    name: Text  # as clients call it
    store: Annotated[str, Meta(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]*$", max_length=255)]  # its directory's name


OfRequests = (
    RequestOffer
    | RequestGrant
    | OfferWithdrawal
    | ForwardedFrame
    | FetchParcel
    | ParcelPart
    | ForwardedEmissions
    | FrameAccepted
    | ForwardedHttp
    | HttpPartQuery
    | HttpPart
    | HttpWithdrawal
    | LostRequestsQuery
    | LostRequestsReply
)
OfBoxes = (
    Heartbeat
    | Announce
    | Welcome
    | BoxReport
    | LoadReport
    | PlanRequest
    | PlanReply
    | PortProbeRequest
    | PortProbeReply
    | EtcdJoin
    | EtcdMembers
    | MemberChange
    | MemberChanged
    | HandOver
    | JoinCluster
)
ControlMessage = (
    OfRequests | OfBoxes | SnapshotRequest | SnapshotReply | StoreLocationRequest | StoreLocationReply | Failure
)
CONTROL: MessageLanguage[ControlMessage] = MessageLanguage(*get_args(ControlMessage))


def _checksum(key: bytes, frame: Buffer) -> str:
    digest = xxhash.xxh3_128(key)
    digest.update(frame)
    return digest.hexdigest()
