"""Where commands print tables and pictures."""

from __future__ import annotations

import os
import sys

from rich.console import Console

UNCUT = 10_000  # columns: what reads a pipe or a file needs names whole


def console() -> Console:
    """As wide as the terminal; as wide as what is printed where standard output is none (COLUMNS says otherwise)."""
    return Console(width=None if sys.stdout.isatty() or "COLUMNS" in os.environ else UNCUT)
