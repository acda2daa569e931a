# ruff: noqa: E402
"""This release as the next one would be: with one more protocol version, message and field.

Run `python tests/support/next_release.py -m edgemoe serve --config FILE`, or `... daemon_process.py SETTINGS_JSON`.
Its engines are of the next release too. Import it before anything of edgemoe. The log has "next release: greeted N,
spared N, moods N"; see `Greet` and `Beat`.
"""

from __future__ import annotations

import logging
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec

sys.path.insert(0, str(Path(__file__).parents[1]))

from edgemoe.wire import protocol

protocol.PROTOCOL_VERSIONS = protocol.Versions(
    protocol.PROTOCOL_VERSIONS.lowest, protocol.PROTOCOL_VERSIONS.highest + 1
)

from edgemoe.cluster.control import messages as control_messages
from edgemoe.wire.protocol import Message, MessageLanguage


class Greet(Message, frozen=True, tag="Greet"):
    """A new message of the control channel, which a box sends to all others with each beat.

    `greeted` counts them; `spared` counts boxes of the release before, which do not get it.
    """

    since = protocol.PROTOCOL_VERSIONS.highest
    words: control_messages.Text = ""


class Beat(control_messages.Heartbeat, frozen=True, tag="Beat"):
    """A heartbeat with a field that the release before ignores."""

    mood: control_messages.Text = "fine"


kept = [kind for tag, kind in control_messages.CONTROL.messages.items() if tag != "Beat"]
control_messages.Heartbeat = Beat  # type: ignore[misc]
control_messages.CONTROL = MessageLanguage(*kept, Beat, Greet)

from edgemoe.cluster.control import control_plane as plane
from edgemoe.cluster.rpc.envelope import Answer, Question
from edgemoe.config.settings import Settings
from edgemoe.errors import PeerError
from edgemoe.front.engine_process import EngineProcess

figures = {"greeted": 0, "spared": 0, "moods": 0}


class NextPlane(plane.ControlPlane):
    """A control plane that uses the new message and field."""

    async def _serve(self, question: Question[Any]) -> Answer[Any] | None:
        match question.message:
            case Greet():
                figures["greeted"] += 1
                return Answer(control_messages.Welcome())
            case Beat() as beat:
                figures["moods"] += getattr(beat, "mood", "") == "well"
        return await super()._serve(question)

    def send_beat(self) -> None:
        load = msgspec.structs.replace(self._local.load(), mood="well")
        with mock.patch.object(self._local, "load", return_value=load):
            super().send_beat()
        if self._group is not None:
            for member in self.state.members:
                self.spawn(self._greet(member.peer.node))

    async def _greet(self, node: str) -> None:
        try:
            await self.channel.ask(node, Greet("hello"), timeout_s=1.0)
        except PeerError as error:
            figures["spared"] += "does not know Greet" in str(error)
        log.info("next release: " + ", ".join(f"{name} {count}" for name, count in figures.items()))


log = logging.getLogger(__name__)
plane.ControlPlane = NextPlane  # type: ignore[misc]

start = EngineProcess.start.__func__  # type: ignore[attr-defined]


async def start_next(
    cls: type[EngineProcess], command: Sequence[str], settings: Settings, address: str
) -> EngineProcess:
    """Starts an engine of the next release."""
    made: EngineProcess = await start(cls, (command[0], __file__, *command[1:]), settings, address)
    return made


EngineProcess.start = classmethod(start_next)  # type: ignore[assignment, method-assign]

if __name__ == "__main__":
    del sys.argv[0]
    if sys.argv[0] == "-m":
        del sys.argv[0]
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(sys.argv[0], run_name="__main__")
