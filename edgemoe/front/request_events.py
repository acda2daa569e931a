"""The events and instructions of `RequestStateMachine` (docs/design/requests.md).

A place names an engine: BOOT of this box's engine, NODE:BOOT of another box's. A node "" is this box.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

from edgemoe.api.backend import NOTHING
from edgemoe.errors import RequestError
from edgemoe.ipc.messages import Cancel, FetchPrefixKV, Submit
from edgemoe.types.expert_signatures import ExpertSignature
from edgemoe.types.request import Emission, Request

# --- events ---------------------------------------------------------------------------------------------------


class RequestsAccepted(NamedTuple):
    """The choices of one HTTP request, for which `check_room` found room."""

    requests: Sequence[Request]
    timeout_s: float  # each ends that makes no progress for so long
    emitted: Mapping[str, Sequence[int]] = NOTHING  # tokens that a client got elsewhere before, by request


class RequestCancelled(NamedTuple):
    """A client no longer wants the answer."""

    request: str


class AllRequestsFailed(NamedTuple):
    """The front stops: every request ends with this error."""

    error: RequestError


class TimePassed(NamedTuple):
    """Some time has passed; the clock says how much."""


class EnginesChanged(NamedTuple):
    """Engines came or went, or requests without an engine must be routed again."""


class TokensEmitted(NamedTuple):
    """An engine of that box emitted tokens."""

    node: str
    items: Sequence[Emission]


class SubmitArrived(NamedTuple):
    """The box of that engine took the attempt."""

    request: str
    attempt: int
    place: str


class SubmitRefused(NamedTuple):
    """The attempt did not reach that engine, or was turned away."""

    request: str
    attempt: int
    place: str


class RequestsForgotten(NamedTuple):
    """The box of that engine reported that it does not have these attempts."""

    place: str
    requests: Sequence[tuple[str, int]]


class LoadReported(NamedTuple):
    """A box reported how busy its engine is."""

    node: str
    place: str


class CachedPartReported(NamedTuple):
    """This box's engine reported the experts that a prompt's cached part chose; None if it did not in time."""

    request: str
    signature: ExpertSignature | None


class OfferAnswered(NamedTuple):
    """The leader answered an offer; `place` is "" while it has not decided."""

    number: int
    place: str = ""
    why: str = ""


class OfferUnanswered(NamedTuple):
    """The leader did not answer an offer in time, or refused it."""

    number: int


class OfferGranted(NamedTuple):
    """The leader decided on an offer that it had taken in before."""

    number: int
    place: str
    why: str = ""


class PromptEnded(NamedTuple):
    """An engine that prefills has computed the prompt of the attempt, or is about to."""

    node: str
    request: str
    attempt: int
    signature: ExpertSignature | None = None


class PrefixFetched(NamedTuple):
    """An engine has fetched the attempt's KV blocks; `why` is the reason for missing ones, "" without any."""

    node: str
    request: str
    attempt: int
    why: str = ""


class FetchArrived(NamedTuple):
    """The box of that engine took the order to fetch the attempt's KV blocks."""

    request: str
    attempt: int
    place: str


class FetchRefused(NamedTuple):
    """The order to fetch the attempt's KV blocks did not reach that engine, or was turned away."""

    request: str
    attempt: int
    place: str


RequestEvent = (
    RequestsAccepted
    | RequestCancelled
    | AllRequestsFailed
    | TimePassed
    | EnginesChanged
    | TokensEmitted
    | SubmitArrived
    | SubmitRefused
    | RequestsForgotten
    | LoadReported
    | CachedPartReported
    | OfferAnswered
    | OfferUnanswered
    | OfferGranted
    | PromptEnded
    | PrefixFetched
    | FetchArrived
    | FetchRefused
)

# --- instructions ---------------------------------------------------------------------------------------------


class SendSubmit(NamedTuple):
    """Submit an attempt to that engine. Answered with SubmitRefused, or by another box with SubmitArrived.

    `offer` is the number of the offer by which the leader chose the engine, 0 for none.
    """

    place: str
    message: Submit
    offer: int = 0


class SendCancel(NamedTuple):
    """Cancel an attempt, or the fetch for it, at that engine. Not answered."""

    place: str
    message: Cancel


class SendOffer(NamedTuple):
    """Offer a request to that leader. Answered with OfferAnswered or OfferUnanswered.

    `stage` is "decode" for a request that is prefilled. `starts_here` says that this box's engine could start it in its
    next step. `signature` is of the prompt or its cached part.
    """

    leader: str
    number: int
    request: Request
    waited_ms: float
    stage: Literal["prefill", "decode"] = "prefill"
    starts_here: bool = False
    signature: ExpertSignature | None = None


class SendWithdrawal(NamedTuple):
    """Tell the leader that an offer no longer stands. Not answered."""

    number: int


class AskCachedPart(NamedTuple):
    """Ask this box's engine about the cached part of a prompt. Answered with CachedPartReported."""

    request: Request


class SendFetch(NamedTuple):
    """Have that engine fetch KV blocks. Answered with FetchRefused, or by another box with FetchArrived."""

    place: str
    message: FetchPrefixKV


class DeliverToken(NamedTuple):
    """Hand an emission to the request's client. One with `finish` is the request's last."""

    emission: Emission


class FailRequest(NamedTuple):
    """End a request with an error."""

    request: str
    error: RequestError


RequestInstruction = (
    SendSubmit | SendCancel | SendOffer | SendWithdrawal | AskCachedPart | SendFetch | DeliverToken | FailRequest
)
