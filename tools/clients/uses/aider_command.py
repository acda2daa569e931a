"""aider, the command, over TCP. It asks one question, streamed and not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import use

WORDS = (
    *("--yes-always", "--no-git", "--no-pretty", "--no-check-update", "--no-show-release-notes", "--analytics-disable"),
    *("--no-show-model-warnings", "--no-auto-lint", "--edit-format", "ask", "--map-tokens", "0", "--no-gitignore"),
)


def ask(*words: str) -> None:
    env = os.environ | {"OPENAI_API_BASE": use.URL, "OPENAI_API_KEY": use.KEY}
    command = [str(Path(sys.executable).with_name("aider")), "--model", f"openai/{use.MODEL}", *WORDS, *words]
    command += ["--message", use.QUESTION]
    done = subprocess.run(
        command,
        env=env,
        cwd=use.FOLDER,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    said = done.stdout + done.stderr
    assert done.returncode == 0, said[-500:]
    assert "litellm." not in said, said[-500:]
    assert "Tokens:" in said, said[-500:]  # the end of an answer


if __name__ == "__main__":
    use.run(chat=lambda: ask("--no-stream"), streaming=lambda: ask("--stream"))
