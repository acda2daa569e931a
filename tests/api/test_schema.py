"""Bodies that arrive at once."""

from __future__ import annotations

import subprocess
import sys

FIRST_TOGETHER = """
import sys, threading
from edgemoe.api.schema import Chat, convert

def first():
    together.wait()
    convert({"messages": [{"role": "user", "content": "x"}]}, Chat)

sys.setswitchinterval(1e-6)
together = threading.Barrier(8)
threads = [threading.Thread(target=first) for _ in range(8)]
for thread in threads:
    thread.start()
"""


def test_the_first_bodies_of_a_kind_may_come_in_several_threads_at_once() -> None:
    """In a process of its own: msgspec crashed on an unfinished description of the type."""
    subprocess.run([sys.executable, "-c", FIRST_TOGETHER], check=True, timeout=60)
