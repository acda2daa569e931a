"""Defines every error that edgemoe raises on purpose, as one tree below EdgemoeError.

A message names the fault, its place, and the remedy.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Sequence
from typing import TypeVar

E = TypeVar("E", bound=BaseException)
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # of writing where there is no room


def write_remedy(error: OSError, usual: str) -> str:
    """Returns the remedy of a failed write: the usual one, unless the disk or its quota is full."""
    return "free some room there, then try again" if error.errno in FULL else usual


class EdgemoeError(Exception):
    """Base of all errors raised on purpose."""


class ConfigError(EdgemoeError):
    """A setting is unknown, of the wrong type, or impossible."""


class UnsupportedProcessor(EdgemoeError):
    """The processor, or code compiled for it, lacks instructions that the kernels need."""


class CheckpointError(EdgemoeError):
    """A Hugging Face checkpoint cannot be packed or loaded."""


class UnsupportedModel(CheckpointError):
    """The checkpoint's architecture, or a variant of it, is not one that the decoder has."""


class ShardCutShort(CheckpointError):
    """A file of the checkpoint ends before its tensors do, as one does that is still arriving."""


class HubError(EdgemoeError):
    """A repository, or a file of it, cannot be had from the hub."""


class StoreError(EdgemoeError):
    """A packed store cannot be used."""


class StoreVersionError(StoreError):
    """The store was written by another version of the format."""


class StoreInUse(StoreError):
    """Another process packs, serves or removes the store."""


class CorruptExpert(StoreError):
    """The bytes of one expert differ from the manifest's checksum."""

    def __init__(self, file: str, layer: int, expert: int, why: str) -> None:
        super().__init__(
            f"{file}: expert {expert} of layer {layer} is damaged ({why}); "
            "pack the checkpoint again, or copy the file from a good store"
        )
        self.file, self.layer, self.expert = file, layer, expert


class CorruptRow(StoreError):
    """The bytes of one row of a table differ from the checksum behind them."""

    def __init__(self, file: str, row: int) -> None:
        super().__init__(
            f"{file}: row {row} is damaged (its checksum is wrong); pack the checkpoint again, or copy the file from a "
            "good store"
        )
        self.file, self.row = file, row


class MissingPart(StoreError):
    """A part of the model that a step needs cannot be had; the boxes that are `away` have it and may come back."""

    away: tuple[str, ...] = ()


class StageUnavailable(MissingPart):
    """The box that holds some of the model's layers cannot compute them now."""

    def __init__(self, layers: str, node: str, why: str) -> None:
        """Takes the layers in words."""
        super().__init__(f"{layers} of the model are held by {node}, which {why}")
        self.away = (node,)


class MissingExpert(MissingPart):
    """An expert is in no tier, on no disk and at no peer that can be reached."""

    def __init__(self, layer: int, expert: int, why: str, *, away: Sequence[str] = ()) -> None:
        """Takes the boxes that have it and are `away`; they may come back."""
        held = f"; {' and '.join(away)} had it when last heard" if away else ""
        super().__init__(f"expert {expert} of layer {layer} is nowhere to be had: {why}{held}")
        self.layer, self.expert, self.away = layer, expert, tuple(away)


class CapacityError(EdgemoeError):
    """A memory budget is too small for its contents."""


class PlacementInfeasible(CapacityError):
    """The boxes together cannot keep every expert as often as asked; `missing_bytes` more would do."""

    def __init__(self, message: str, missing_bytes: int) -> None:
        super().__init__(message)
        self.missing_bytes = missing_bytes


class RequestError(EdgemoeError):
    """One request failed; the daemon goes on.

    `status` is the HTTP status, `kind` the OpenAI error type, `param` the offending field, `code` a stable
    word.
    """

    status = 500
    kind = "server_error"
    code: str | None = None
    again = True  # whether the same request may fare better another time

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        if code is not None:
            self.code = code


class InvalidRequest(RequestError):
    """The request itself is wrong: bad JSON, a wrong type, a prompt longer than the context."""

    status = 400
    kind = "invalid_request_error"


class ModelNotFound(InvalidRequest):
    """The request names a model that is not served here."""

    status = 404
    code = "model_not_found"


class QueueFull(RequestError):
    """The waiting queue is full; try again after `retry_after_s` seconds."""

    status = 429
    kind = "rate_limit_error"
    code = "queue_full"

    def __init__(self, message: str, *, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class RequestQuarantined(RequestError):
    """Engines ended with this request, or with several of its principal's; it is tried again after `retry_after_s`."""

    status = 429
    kind = "rate_limit_error"
    code = "quarantined"
    again = False

    def __init__(self, message: str, *, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class MembersRefused(RequestError):
    """The cluster's members stay as they are; the message says why."""

    status = 409
    kind = "invalid_request_error"
    code = "members_refused"


class ReloadRefused(RequestError):
    """A reload failed; the settings and exports in use before stay in use."""

    status = 409
    kind = "invalid_request_error"
    code = "reload_refused"


class DeadlineExceeded(RequestError):
    """The request's deadline passed before it was finished."""

    status = 504
    kind = "timeout_error"
    code = "deadline_exceeded"


class EngineCrashed(RequestError):
    """Engines ended, one after the other, while they worked on this request; the next one would, too."""

    code = "engine_crashed"
    again = False


class EngineUnavailable(RequestError):
    """There is no engine to serve the request, and none is coming back in time."""

    status = 503
    kind = "server_error"
    code = "engine_unavailable"

    def __init__(self, message: str, *, code: str | None = None, retry_after_s: float = 2.0) -> None:
        super().__init__(message, code=code)
        self.retry_after_s = retry_after_s


class WireError(EdgemoeError):
    """A message between processes that cannot be sent, or cannot be read."""


class WireVersionError(WireError):
    """The other side speaks another version of the protocol."""


class UnknownMessage(WireError):
    """A message that this release does not have."""


class PeerError(EdgemoeError):
    """Something asked of another box did not come about."""


class PeerUnavailable(PeerError):
    """The box is not connected, or did not answer in time."""


class PeerBusy(PeerError):
    """The box has as much to do as it can within the deadline."""


class PeerRefused(PeerError):
    """The box will not do it: another version, model or epoch, or an error of its own."""


class PeerOutdated(PeerRefused):
    """The box runs a release that does not know the question."""


class Unsendable(PeerRefused):
    """The question for another box is larger than any message; nothing was sent."""


class HandOverFailed(PeerError):
    """Keys and values did not come from another box; `reason` says why in a word."""

    def __init__(self, reason: str, why: str) -> None:
        super().__init__(why)
        self.reason = reason


class CoordError(EdgemoeError):
    """The boxes' agreement on leader, members and plan."""


class CoordUnavailable(CoordError):
    """The agreement cannot be reached; whether the change was made is unknown. Asking again is safe."""


class StaleEpoch(CoordError):
    """The epoch that a command or change was made in is over."""


class EpochLeap(CoordError):
    """An epoch is so far above all known ones that it can only be damage; it is not taken over."""


class PlanningFailed(CoordError):
    """No placement could be worked out this time; the plan in force stays."""


class PlanConflict(CoordError):
    """Another plan was committed in between."""


class RosterConflict(CoordError):
    """Another change of the cluster's members was agreed in between."""


class HelperFailed(EdgemoeError):
    """A helper process died, was late or answered something else."""


class HelperMissing(HelperFailed):
    """There is no helper process, and none can be started."""


class ServiceError(EdgemoeError):
    """The daemon, its socket or its unit files cannot be put in place."""


def code_of(error: EdgemoeError) -> str:
    """Returns the error's stable code: a request error's own, else the class's name in snake case."""
    if isinstance(error, RequestError) and error.code:
        return error.code
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", type(error).__name__).lower()


def first_error(group: BaseExceptionGroup[E]) -> E:
    """Returns the error of a group to report: the first EdgemoeError if there is one, else the first of all."""
    leaves: list[E] = []
    for error in group.exceptions:
        leaves.append(first_error(error) if isinstance(error, BaseExceptionGroup) else error)
    return next((error for error in leaves if isinstance(error, EdgemoeError)), leaves[0])
