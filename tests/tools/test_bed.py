"""The test bed itself, with plain processes: rates, faults, limits, and a clean end."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.waiting import wait_until

from tools.testbed.__main__ import main
from tools.testbed.bed import NAMESPACES, PREFIX, Bed, leftovers, sweep, why_not
from tools.testbed.limits import Limits, groups

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not() or "it can be built")

ECHO = """
    import socket
    door = socket.create_server(("0.0.0.0", 7000))
    print("open", flush=True)
    while True:
        line, _ = door.accept()
        while data := line.recv(1 << 16):
            line.sendall(data[:1])
        line.close()
"""
ASK = """
    import socket, sys, time
    line = socket.create_connection((sys.argv[1], 7000), timeout=1)
    total, began = int(sys.argv[2]), time.monotonic()
    line.sendall(bytes(total))
    line.shutdown(socket.SHUT_WR)
    while line.recv(1 << 16):
        pass
    print(time.monotonic() - began)
"""


def python(code: str, *arguments: str) -> list[str]:
    return [sys.executable, "-c", textwrap.dedent(code), *arguments]


@pytest.fixture(scope="module")
def bed() -> Iterator[Bed]:
    with Bed(["a", "b", "c"]) as made:
        server = made["b"].spawn(python(ECHO), stdout=subprocess.PIPE, text=True)
        assert server.stdout is not None
        assert server.stdout.readline() == "open\n"
        yield made
        made["b"].kill()
        server.wait(60)
        server.stdout.close()


@pytest.fixture(autouse=True)
def mended(bed: Bed) -> Iterator[None]:
    yield
    bed.mend()


def ask(bed: Bed, total_bytes: int) -> float | None:
    """Returns the seconds that `total_bytes` take from a to b and back; None if they do not arrive."""
    asked = bed["a"].spawn(
        python(ASK, bed["b"].address, str(total_bytes)), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    try:
        out, _ = asked.communicate(timeout=60)
    except subprocess.TimeoutExpired:
        asked.kill()
        asked.communicate()
        return None
    return float(out) if asked.returncode == 0 else None


def test_a_link_has_its_rate_and_a_slow_one_another(bed: Bed) -> None:
    bed["b"].rate(20)
    slow = ask(bed, 1_000_000)
    bed["b"].rate(500)
    assert slow is not None
    assert slow > 0.3  # 8 Mbit through 20 Mbit/s
    before = bed["a"].sent_bytes()
    assert ask(bed, 10_000_000) is not None
    assert 10_000_000 < bed["a"].sent_bytes() - before < 11_000_000


def test_a_cable_that_is_pulled_carries_nothing_until_it_is_back(bed: Bed) -> None:
    assert ask(bed, 1) is not None
    bed["b"].link(up=False)
    assert ask(bed, 1) is None
    bed["b"].link(up=True)
    assert ask(bed, 1) is not None


def test_a_cut_goes_one_way_only(bed: Bed) -> None:
    script = """
        import socket, sys
        udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        udp.bind(("0.0.0.0", 7001))
        print("open", flush=True)
        sys.stdin.readline()  # until it has been sent
        udp.settimeout(0.5)
        try:
            print(udp.recv(10).decode())
        except TimeoutError:
            print("nothing")
    """

    def send(sender: str, receiver: str) -> str:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        waiting = bed[receiver].spawn(python(script), **pipes, text=True)
        assert waiting.stdout is not None
        assert waiting.stdout.readline() == "open\n"
        say = "import socket, sys; socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', (sys.argv[1], 7001))"
        bed[sender].spawn(python(say, bed[receiver].address)).wait(60)
        return waiting.communicate("sent\n", timeout=60)[0].strip()

    assert send("a", "c") == send("c", "a") == "x"
    bed["a"].cut(bed["c"])
    assert (send("a", "c"), send("c", "a")) == ("nothing", "x")
    bed["a"].mend(bed["c"])
    assert send("a", "c") == "x"


def test_a_paused_box_answers_when_it_is_resumed(bed: Bed) -> None:
    bed["b"].pause()
    assert ask(bed, 1) is None
    bed["b"].resume()
    assert ask(bed, 1) is not None


def test_a_killed_box_is_empty(bed: Bed) -> None:
    sleeper = bed["c"].spawn(["sh", "-c", "sleep 100 & sleep 100"])
    wait_until(lambda: len(bed["c"].pids()) == 3)
    bed["c"].kill()
    assert bed["c"].pids() == []
    sleeper.wait(60)


def test_verbs_reach_a_bed_that_another_process_built(bed: Bed) -> None:
    found = Bed.found(bed.prefix)
    assert {name: box.address for name, box in found.boxes.items()} == {n: b.address for n, b in bed.boxes.items()}


@pytest.mark.skipif(bool(Limits(cpus=1).why_not()), reason="no control groups of version 1")
def test_a_box_gets_its_share_of_the_processor() -> None:
    burn = "import time; t=time.monotonic(); [0 for _ in iter(lambda: time.monotonic() - t < 1, False)]"
    with Bed(["x"], limits=Limits(cpus=0.25, memory_bytes=1 << 30)) as bed:
        child = bed["x"].spawn(python(burn))
        _, _, used = os.wait4(child.pid, 0)
        child.returncode = 0
        assert used.ru_utime + used.ru_stime < 0.6
        assert (
            Path("/sys/fs/cgroup/memory") / bed["x"].group.name / "memory.limit_in_bytes"
        ).read_text().strip() == str(1 << 30)


def test_a_crashed_run_s_remains_are_swept() -> None:
    code = """
        import os, sys
        from tools.testbed.bed import Bed
        bed = Bed(["x", "y"])
        bed.__enter__()
        bed["x"].spawn(["sleep", "1000"], stdout=2)
        print(os.getpid(), flush=True)
        os.kill(os.getpid(), 9)
    """
    crashed = subprocess.run(python(code), stdout=subprocess.PIPE, text=True)
    prefix = f"{PREFIX}{crashed.stdout.strip()}.0-"
    assert prefix in leftovers()
    sweep(prefix)
    assert prefix not in leftovers()
    assert not list(NAMESPACES.glob(f"{prefix}*"))
    assert not groups(prefix)


def test_impossible_verbs_of_the_command_are_refused(bed: Bed, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["stop", "nobody", "--bed", bed.prefix]) == 1
    assert "there is no box nobody" in capsys.readouterr().err
    assert main(["cut", "a", "b", "--bed", bed.prefix]) == 0
    assert ask(bed, 1) is None
    assert main(["mend", "--bed", bed.prefix]) == 0
    assert ask(bed, 1) is not None
