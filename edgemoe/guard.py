"""Refuses unpickling in the whole process: none of our data formats needs it."""

from __future__ import annotations

import sys


def refuse_pickle() -> None:
    """Forbids unpickling of classes and functions from now on: it raises RuntimeError. Cannot be undone."""
    sys.addaudithook(_refuse)


def _refuse(event: str, args: tuple[object, ...]) -> None:
    if event == "pickle.find_class":
        raise RuntimeError(f"unpickling is refused in this process: {args}")
