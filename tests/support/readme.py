"""The README's examples, as they stand there."""

from __future__ import annotations

import re
from pathlib import Path

README = (Path(__file__).parents[2] / "README.md").read_text()
BLOCKS = re.findall(r"(?ms)^```(sh|python)\n(.*?)^```", README)  # (language, text), in order


def block(mark: str) -> str:
    """Returns the only block that contains `mark`."""
    (found,) = (text for _, text in BLOCKS if mark in text)
    return str(found)


# The commands of "Use it", for use while a daemon runs.
TALK = block("edgemoe chat")
CURL = block("curl --unix-socket")
PYTHON = block("import os\n")
# The other blocks install, serve or change this machine. Their commands are parsed, and not run.
PARSED = [text for language, text in BLOCKS if language == "sh" and text not in (TALK, CURL)]
