"""Fuzzes the channels of a daemon with its engine, from three listed peers, each hostile on one channel.

The peer on the control channel sends beats and shows an engine. Meanwhile requests at the socket must get the same
answer as before. For every second seed, the leader alone routes requests.
"""

from __future__ import annotations

import contextlib
import json
import random
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import httpx
import zmq

from edgemoe.cluster.control.messages import Announce, ChannelDescription, Heartbeat, LoadReport
from edgemoe.demo import model_path
from edgemoe.heap import GIVE_BACK_S
from tools.fuzzing.messages import ChannelMessages
from tools.fuzzing.peer import HostilePeer
from tools.fuzzing.presence import Presence
from tools.fuzzing.target import ASK_S, CHANNELS, CLOSED_PORT, GROWTH_MB, Target, rss_mb, target

WHATS = CHANNELS
LATE = 0.2  # share of the messages, at the end, in which a channel's memory is measured last
LOOK_EVERY = 100  # messages
LONG_RUN = 50_000  # messages from which on free memory has its time to be returned
PAUSE_S = 0.1  # between two requests
ROUTES = ("pull", "gimbal", "eldr")
AGREEMENT = "single: box"
ENGINE = "x"  # boot of the engine that a peer says it has


class Others:
    """Asks in a thread of its own; records answers that differ from `right`."""

    def __init__(self, asked: Target, right: str) -> None:
        self.times_s: list[float] = []
        self.wrong: list[str] = []
        self._asked, self._right, self._over = asked, right, threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._over.set()
        self._thread.join(2 * ASK_S)

    def _run(self) -> None:
        while not self._over.wait(PAUSE_S):
            began_s = time.monotonic()
            try:
                text = self._asked.ask()
            except (httpx.HTTPError, json.JSONDecodeError) as error:
                text = repr(error)
            self.times_s.append(time.monotonic() - began_s)
            if text != self._right:
                self.wrong.append(text)


class Looker:
    """Reads the daemon's dashboard in a thread of its own; `shown` counts its events by box."""

    def __init__(self, asked: Target) -> None:
        self.shown: Counter[str] = Counter()
        self.wrong = ""
        self._asked, self._over = asked, threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._over.set()
        self._thread.join(2 * ASK_S)

    def _run(self) -> None:
        try:
            with self._asked.http.stream("GET", "/events") as answer:
                for line in answer.iter_lines():
                    if line.startswith("data: "):
                        seen = json.loads(line[len("data: ") :])
                        self.shown[seen.get("box", "")] += 1
                    if self._over.is_set():
                        return
            self.wrong = f"it ended: status {answer.status_code}"
        except (httpx.HTTPError, json.JSONDecodeError) as error:
            self.wrong = repr(error)


def fuzz(what: str, count: int, seed: int) -> dict[str, Any]:
    """Sends `count` messages to the channel, or to each of the three."""
    with target(ROUTES[seed % len(ROUTES)]) as (box, child):
        health, right = box.health(), box.ask()
        others, looker = Others(box, right), Looker(box)
        seen: dict[str, Any] = {"channels": {}}
        try:
            for channel in (what,) if what else WHATS:
                seen["channels"][channel] = _attack(box, child, channel, count, seed)
        finally:
            others.stop()
            looker.stop()
        engine = health["engine"]
        seen |= {
            "alive": child.poll() is None and box.health()["engine"] == engine,
            "others": len(others.times_s),
            "others_wrong": others.wrong[:5],
            "shown": dict(looker.shown),
            "page_wrong": looker.wrong,
            "others_slowest_s": round(max(others.times_s, default=0.0), 3),
            "answered_after": box.still_answers(right),
        }
        flat = all(channel["grown_mb"] < GROWTH_MB and channel["read"] for channel in seen["channels"].values())
        well = seen["alive"] and seen["answered_after"] and not others.wrong and not looker.wrong
        seen["ok"] = bool(well and flat and others.times_s and looker.shown["box"])
        if not seen["ok"]:
            seen["log"] = (box.folder / "log").read_text()[-4000:]
        return seen


def hostile(box: Target, channel: str, seed: int) -> HostilePeer:
    """Builds the peer that is hostile on this channel."""
    messages = ChannelMessages(channel, random.Random(seed), hints(box))
    return HostilePeer(channel, box.keys[channel], box.own.public, f"127.0.0.1:{box.ports[channel]}", messages)


@contextmanager
def presence(box: Target, peer: HostilePeer, seed: int) -> Iterator[Presence]:
    """Runs the peer on the control channel, with an engine that serves the box's model."""
    address, model = f"127.0.0.1:{box.ports['control']}", box.health()["model"]
    lies = ChannelMessages("control", random.Random(~seed), hints(box))
    made = Presence("control", peer.boot, box.keys["control"], box.own.public, address, box.peer_port, lies)
    layers, experts = model["layers"], model["experts"]
    engine = ChannelDescription(
        boot=ENGINE,
        calls_port=CLOSED_PORT,
        bulk_port=CLOSED_PORT,
        model=model["digest"],
        layers=layers,
        experts=experts,
        expert_bytes=model["expert_bytes"],
        budget_experts=layers * experts // 2,
        disk=b"\xff" * (layers * experts // 8),
        ram=b"",
        shares=True,
    )
    card = Announce("0", "box", f"127.0.0.1:{box.peer_port}", engine=engine, agreement=AGREEMENT)
    use = LoadReport(engine=ENGINE, slots=8, capacity=64, blocks=4096, free_blocks=4096, tokens_per_s=1e6)
    made.begin([card, Heartbeat(engine=ENGINE, slots=8, capacity=64), use])
    try:
        yield made
    finally:
        made.close()


def hints(box: Target) -> dict[str, Sequence[Any]]:
    """Returns values that the box knows, by field."""
    health = box.health()
    digest, layers, experts = (health["model"][name] for name in ("digest", "layers", "experts"))
    return {
        "model": [*[digest] * 8, digest[:5], "0" * 32],
        "node": ["box", *WHATS],
        "boot": [*[ENGINE] * 8, "", health["engine"].get("boot", "y")],
        "engine": [*[ENGINE] * 8, "", "y"],
        "agreement": [AGREEMENT, AGREEMENT, AGREEMENT, "", "single: control"],
        "address": [f"127.0.0.1:{box.peer_port}"],
        "number": range(1, 40),
        "numbers": range(1, 40),
        "verb": ["voting", "vote", "unvote", "key", "invite", "join"],
        "plan_digest": ["", "0" * 64],
        "request": ["r-1", "r-1/2", "box/x/r-1"],
        "leading": [0, 0, 1, 2],
        "seen": [*[0] * 2000, 1, 2, 7, 1 << 19, 1 << 40],
        "layers": [layers],
        "experts": [experts, 1, 2, 20],
        "expert_bytes": [health["model"]["expert_bytes"]],
        "row_bytes": [_row_bytes()],
        "ram": [bytes(-(-layers * experts // 8)), b""],
        "disk": [bytes(-(-layers * experts // 8))],
        "layer": [0, 1, health["model"]["layers"]],
        "bytes": [1, 4096, 1 << 20],
    }


def _attack(box: Target, child: subprocess.Popen[bytes], channel: str, count: int, seed: int) -> dict[str, Any]:
    """Measures memory once the largest message was read, and last at its smallest towards the end.

    Python returns the memory of a message, some eight times its bytes, only if no other message's objects lie between.
    It also keeps up to 40,000 freed tuples until it collects garbage, tens of megabytes after any large message.
    """
    peer, health = hostile(box, channel, seed), box.health()
    pids = (child.pid, health["engine"]["pid"])
    began_s, early, middle, late, read = time.monotonic(), 0.0, 0.0, float("inf"), False
    living = presence(box, peer, seed) if channel == "control" else contextlib.nullcontext()
    try:
        with living as half:
            if half is not None:
                half.wait_met()
            peer.send_largest(count)
            early = rss_mb(pids)
            began_s = time.monotonic()
            for number in range(count):
                peer.send()
                if number == count // 2:
                    middle = rss_mb(pids)
                if number >= (1 - LATE) * count and number % LOOK_EVERY == 0:
                    late = min(late, rss_mb(pids))
            peer.wait_until_read()
            read = True
            if count >= LONG_RUN:
                time.sleep(1.5 * GIVE_BACK_S)  # front and engine return free memory only so often
    except zmq.Again:
        pass  # it reads no more messages; `read` counts them
    finally:
        took_s = time.monotonic() - began_s
        peer.close()
    late = min(late, rss_mb(pids))
    return {
        "sent": peer.sent,
        "read": read,
        "lost": peer.lost,
        "a_second": round(peer.sent / took_s),
        "answers": dict(peer.answers.most_common(20)),
        "asked": dict(half.asked) if half is not None else {},
        "early_mb": early,
        "middle_mb": middle,
        "late_mb": late,
        "grown_mb": round(late - early, 1),
    }


def _row_bytes() -> int:
    """Returns the bytes of one row of the demo model's hidden states."""
    config = json.loads((model_path() / "config.json").read_text())
    return int(config["hidden_size"]) * (4 if config["torch_dtype"] == "float32" else 2)
