"""An intruder that asks on every channel of every box, with invalid keys and names (KINDS).

It runs in a box of its own, reads attempts as lines of JSON, and prints the results. A guest with a valid key asks at
the same time. Once the guest has its answers, the intruder would have had them, too.
"""

from __future__ import annotations

import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from edgemoe.cluster.control.messages import Announce, PlanRequest
from edgemoe.cluster.data.messages import FetchExpert, Hello
from edgemoe.cluster.rpc.envelope import seal
from edgemoe.cluster.rpc.keys import load_secret
from tools.testbed.daemons import BULK_PORT, CALLS_PORT, CONTROL_PORT, Cluster, Daemon

KINDS = (
    "wrong",  # a listed name, with a key of its own
    "unlisted",  # a name and a key that no box lists
    "name",  # a listed key, with another box's name
    "server",  # a listed key, and another key expected of the box
    "revoked",  # a key listed until a moment ago, on open and new connections
    "replaced",  # the same, while its name is listed with another key
)
INTRUDER, GUEST = "x", "y"  # listed boxes without a daemon; the second one's key is always valid
LISTEN_S, LONG_S = 0.3, 15.0
QUESTIONS: dict[int, list[msgspec.Struct]] = {
    CONTROL_PORT: [PlanRequest("0"), Announce(release="0", role="box", address="192.0.2.1:1")],
    CALLS_PORT: [Hello("0" * 32, 1, 1, 1, 1, b"\0", b"\0")],
    BULK_PORT: [FetchExpert(0, 0, 0, 4096)],
}


class Line:
    """A connection to one channel of one box."""

    def __init__(self, context: zmq.Context[Any], address: str, name: str, key: Sequence[str], server: str) -> None:
        """Connects with `key`, public and secret, as `name`; `server` is the public key expected there."""
        self.port = int(address.rpartition(":")[2])
        self.handshakes = self.answers = 0
        self._socket = context.socket(zmq.DEALER)
        self._socket.set(zmq.LINGER, 0)
        self._socket.set(zmq.IDENTITY, f"{name}:{secrets.token_hex(4)}".encode())
        self._socket.set(zmq.CURVE_PUBLICKEY, key[0].encode())
        self._socket.set(zmq.CURVE_SECRETKEY, key[1].encode())
        self._socket.set(zmq.CURVE_SERVERKEY, server.encode())
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
        self._socket.connect(f"tcp://{address}")

    def ask(self) -> None:
        """Sends questions, which any admitted peer gets answered."""
        for body in QUESTIONS[self.port]:
            self._socket.send_multipart(seal(body, id=1, remaining_ms=1000))

    def count_answers(self) -> None:
        """Counts the answers and handshakes so far."""
        while self._monitor.poll(0):
            recv_monitor_message(self._monitor)
            self.handshakes += 1
        while self._socket.poll(0):
            self._socket.recv_multipart()
            self.answers += 1

    def close(self) -> None:
        self._socket.disable_monitor()
        self._monitor.close(0)
        self._socket.close(0)


class Try(msgspec.Struct):
    """An attempt: names, keys, and the addresses to ask, each with the public key expected there."""

    places: list[tuple[str, str]]
    name: str
    key: list[str]
    guest_places: list[tuple[str, str]]
    guest_key: list[str]
    keep: bool = False  # keeps the connections for later attempts; returns when they all have their answers


class Found(msgspec.Struct):
    """The result of an attempt."""

    handshakes: int  # completed handshakes
    let_in: int  # answers: frames that got through
    guest: int  # answers to the guest, of `expected`
    expected: int


def child() -> None:
    """Carries out attempts until its standard input ends."""
    context = zmq.Context()
    kept: list[Line] = []
    for told in sys.stdin:
        one = msgspec.json.decode(told, type=Try)
        lines = [*kept, *(Line(context, address, one.name, one.key, server) for address, server in one.places)]
        guests = [Line(context, address, GUEST, one.guest_key, server) for address, server in one.guest_places]
        for line in (*lines, *guests):
            line.handshakes = line.answers = 0
            line.ask()
        expected = sum(len(QUESTIONS[line.port]) for line in guests)
        waited_for = [*guests, *(lines if one.keep else ())]
        enough = sum(len(QUESTIONS[line.port]) for line in waited_for)
        least, most = time.monotonic() + LISTEN_S, time.monotonic() + LONG_S
        while (now := time.monotonic()) < most:
            for line in (*lines, *guests):
                line.count_answers()
            if now > least and sum(line.answers for line in waited_for) >= enough:
                break
            time.sleep(0.01)
        handshakes, let_in = sum(line.handshakes for line in lines), sum(line.answers for line in lines)
        found = Found(handshakes, let_in, sum(line.answers for line in guests), expected)
        print(msgspec.json.encode(found).decode(), flush=True)
        kept += lines if one.keep else ()
        for line in (*guests, *(() if one.keep else lines)):
            line.close()


class Intruder:
    """The controlling side of `child`. `with Intruder(cluster) as intruder:`"""

    def __init__(self, cluster: Cluster) -> None:
        """Uses a cluster in which the boxes INTRUDER and GUEST are empty."""
        self._cluster = cluster
        self._child: Any = None

    def __enter__(self) -> Intruder:
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self._child = self._cluster.bed[INTRUDER].spawn([sys.executable, "-m", "tools.bench.intruder"], **pipes)
        return self

    def __exit__(self, *_: object) -> None:
        for pipe in (self._child.stdin, self._child.stdout):
            pipe.close()
        self._child.wait(20)

    def try_(self, kind: str, victim: str) -> Found:
        """Makes an attempt of one of KINDS; some use the name of the box `victim`."""
        fresh = [part.decode() for part in zmq.curve_keypair()]
        places, own = self._places(QUESTIONS), self._pair(INTRUDER)
        match kind:
            case "wrong":
                return self._attempt(places, victim, fresh)
            case "unlisted":
                return self._attempt(places, "nobody", fresh)
            case "name":
                return self._attempt(places, victim, own)
            case "server":
                return self._attempt([(address, fresh[0]) for address, _ in places], INTRUDER, own)
            case _:
                held = self._attempt(self._places([CONTROL_PORT]), INTRUDER, own, keep=True)
                assert held.let_in == held.expected, "a listed key was not let in"
                with self._listed_otherwise(fresh[0] if kind == "replaced" else ""):
                    return self._attempt(places, INTRUDER, own)

    @contextmanager
    def _listed_otherwise(self, key: str) -> Iterator[None]:
        """Lists the intruder with another key everywhere, or not at all."""
        self._list({INTRUDER: key})
        try:
            if not key:  # admitted connections end when no list has it any more
                self._wait(lambda daemon: INTRUDER not in _members(daemon))
            yield
        finally:
            self._list({})

    def _list(self, instead: Mapping[str, str]) -> None:
        """Writes the lists, and waits until every box has read its own."""
        marks = {daemon.box.name: daemon.log_bytes() for daemon in self._cluster}
        self._cluster.list(instead)
        self._wait(lambda daemon: any("read again" in line["event"] for line in daemon.events(marks[daemon.box.name])))

    def _wait(self, condition: Callable[[Daemon], bool]) -> None:
        """Waits until the condition holds for every box."""
        ends = time.monotonic() + LONG_S
        for daemon in self._cluster:
            while not condition(daemon):
                assert time.monotonic() < ends, f"{daemon.box.name} goes by another list"
                time.sleep(0.02)

    def _places(self, ports: Iterable[int]) -> list[tuple[str, str]]:
        boxes = [daemon.box for daemon in self._cluster]
        return [(f"{box.address}:{port}", self._pair(box.name)[0]) for port in ports for box in boxes]

    def _pair(self, name: str) -> list[str]:
        secret = load_secret(self._cluster.key_file(name))
        return [secret.public.decode(), secret.secret.decode()]

    def _attempt(self, places: list[tuple[str, str]], name: str, key: list[str], *, keep: bool = False) -> Found:
        told = Try(places, name, key, self._places([CONTROL_PORT]), self._pair(GUEST), keep)
        self._child.stdin.write(msgspec.json.encode(told).decode() + "\n")
        self._child.stdin.flush()
        return msgspec.json.decode(self._child.stdout.readline(), type=Found)


def _members(daemon: Daemon) -> set[str]:
    """Returns the boxes that it lists as members."""
    return {member["node"] for member in daemon.http.get("/health").json()["cluster"]["members"]}


if __name__ == "__main__":
    child()
