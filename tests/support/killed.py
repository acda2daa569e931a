"""Runs a packer in a process that dies at a step of its work."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

# Counts every step that touches the disk (block copied, file opened, renamed, removed, synced) and dies at the n-th.
SCRIPT = """
import os, signal, sys
{modules}
left = int(sys.argv[3])
def step(*_):
    global left
    left -= 1
    if left == 0:
        os.kill(os.getpid(), signal.SIGKILL)
def watched(event, arguments):
    if event in ("open", "os.rename", "os.remove", "os.mkdir", "os.listdir", "fcntl.flock"):
        step()
def counted(call):
    def stepped(*arguments):
        step()
        return call(*arguments)
    return stepped
os.fsync, os.pwrite = counted(os.fsync), counted(os.pwrite)
sys.addaudithook(watched)
{call}
print(int(sys.argv[3]) - left)
"""


def script_of(call: str) -> str:
    """Returns the script that runs `import; call`, which packs argv[1] to argv[2] and tells `step` of progress."""
    modules, _, call = call.partition("; ")
    return SCRIPT.format(modules=modules, call=call)


def killed(call: str, source: Path, target: Path, steps: int) -> subprocess.CompletedProcess[str]:
    """Runs the script of a call up to this step; 0 lets it finish, and it prints its steps."""
    arguments = [sys.executable, "-c", script_of(call), str(source), str(target), str(steps)]
    return subprocess.run(arguments, capture_output=True, text=True, timeout=60, check=False)
