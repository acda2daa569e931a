"""Makes the console that commands print tables to: names, paths and errors are printed as they are, not as markup."""

from __future__ import annotations

import os
import sys
from typing import Any

from rich.console import Console
from rich.text import Text

from edgemoe.outputs import CONTROL

UNCUT = 10_000  # columns, so that names are not cut in pipes and files


class PlainConsole(Console):
    """Prints texts without their control characters: names of stores and boxes come from outside."""

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(CONTROL.sub("", text), **options)


def console() -> Console:
    """Returns a console as wide as the terminal or as COLUMNS says, and without limit in pipes and files."""
    return PlainConsole(markup=False, width=None if sys.stdout.isatty() or "COLUMNS" in os.environ else UNCUT)
