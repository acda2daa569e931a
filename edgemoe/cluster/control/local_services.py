"""What runs on a box besides its control channel, and is to hear of the other boxes."""

from __future__ import annotations

from typing import Protocol

from edgemoe.cluster.rpc.control_messages import Beat, ControlMessage, Report, RequestGrant
from edgemoe.cluster.rpc.transport import Answer, Question
from edgemoe.errors import PeerRefused
from edgemoe.types.placement import PlacementPlan


class LocalServices(Protocol):
    """Stands for this box's engine and its requests."""

    def load(self) -> Beat:
        """Returns how busy it is; a beat's other fields are filled in later."""

    def report(self) -> Report | None:
        """Returns what the leader is told every ten seconds; None while there is no engine."""

    def look_around(self) -> None:
        """Members or their engines have changed."""

    def hear_beat(self, node: str, beat: Beat) -> None:
        """Takes note of how another box says that it is."""

    def follow(self, plan: PlacementPlan) -> None:
        """Goes by this plan from now on."""

    def granted(self, grant: RequestGrant) -> None:
        """Hears from the leader which engine takes a request that was offered. May be called while offering one."""

    def check_room(self) -> None:
        """Raises PeerBusy where our engine takes no request of another front."""

    def serve(self, question: Question[ControlMessage]) -> Answer[ControlMessage]:
        """Answers a Forward, Tokens, Check, Show or FindStore, and refuses others. Raises PeerError, WireError."""


class NoServices:
    """What runs on a witness."""

    def load(self) -> Beat:
        return Beat()

    def report(self) -> Report | None:
        return None

    def look_around(self) -> None:
        return None

    def hear_beat(self, node: str, beat: Beat) -> None:
        return None

    def follow(self, plan: PlacementPlan) -> None:
        return None

    def granted(self, grant: RequestGrant) -> None:
        return None

    def check_room(self) -> None:
        raise PeerRefused("no requests are served here")

    def serve(self, question: Question[ControlMessage]) -> Answer[ControlMessage]:
        raise PeerRefused("no requests are served here")
