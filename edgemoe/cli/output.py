"""Makes the console that commands print tables to, without markup in names, paths and errors, and progress bars."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.progress import Progress as Bar
from rich.text import Text

from edgemoe.outputs import CONTROL
from edgemoe.store.packer import Progress

UNCUT = 10_000  # columns, so that names are not cut in pipes and files


class PlainConsole(Console):
    """Prints texts without their control characters: names of stores and boxes come from outside."""

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(CONTROL.sub("", text), **options)


def console() -> Console:
    """Returns a console as wide as the terminal or as COLUMNS says, and without limit in pipes and files."""
    return PlainConsole(markup=False, width=None if sys.stdout.isatty() or "COLUMNS" in os.environ else UNCUT)


@contextmanager
def progress_bar(title: str, console: Console | None = None) -> Iterator[Progress]:
    """Opens a bar with rate and time left; yields its `progress` callback for `pack` and `verify`."""
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Bar(*columns, console=console) as bar:
        task = bar.add_task(title, visible=False)
        yield lambda done_bytes, total_bytes: bar.update(task, completed=done_bytes, total=total_bytes, visible=True)
