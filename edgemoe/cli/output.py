"""Makes the console that commands print tables to: names, paths and errors are printed as they are, not as markup."""

from __future__ import annotations

import os
import sys

from rich.console import Console

UNCUT = 10_000  # columns, so that names are not cut in pipes and files


def console() -> Console:
    """Returns a console as wide as the terminal or as COLUMNS says, and without limit in pipes and files."""
    return Console(markup=False, width=None if sys.stdout.isatty() or "COLUMNS" in os.environ else UNCUT)
