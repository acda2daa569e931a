"""The boxes whose answers were found wrong: kept on disk by key, and made known to the other boxes.

This box cuts off a box by its own finding, or by that of two boxes on its list. The leader's word, which rests on
either, is enough, too. One other box's word has it check every answer.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Annotated

import msgspec

from edgemoe.cluster.control.messages import Accusation
from edgemoe.durable import read_plain, replace_file
from edgemoe.errors import ConfigError
from edgemoe.types.bounds import MAX_NODES

log = logging.getLogger(__name__)
WITNESSES = 2  # boxes whose word is enough
MAX_FILE_BYTES = 1 << 20
Accusations = Annotated[tuple[Accusation, ...], msgspec.Meta(max_length=MAX_NODES)]


class DistrustedBoxes:
    """Holds the boxes that this box has found wrong, in memory and on disk. Lives on one event loop."""

    def __init__(self, path: Path | None = None) -> None:
        """Keeps nothing on disk without a path. Raises ConfigError for a file that cannot be read."""
        self._path = path
        self.found: Accusations = ()
        if path is None:
            return
        try:
            self.found = msgspec.json.decode(read_plain(path, MAX_FILE_BYTES), type=Accusations)
        except FileNotFoundError:
            pass
        except (OSError, msgspec.MsgspecError) as error:
            raise ConfigError(f"{path}: the boxes that are cut off cannot be read: {error}; remove it") from error

    def add(self, node: str, keys: Collection[str], why: str) -> None:
        """Notes that the box with these keys answers wrongly."""
        new = tuple(Accusation(node, key, why) for key in keys if not self.reason([key]))
        if not new:
            return
        self.found = (*self.found, *new)[-MAX_NODES:]
        if self._path is None:
            return
        try:
            replace_file(self._path, msgspec.json.format(msgspec.json.encode(self.found)) + b"\n")
        except OSError as error:
            log.error("a box that was cut off is forgotten at the next start", extra={"why": error.strerror})

    def reason(self, keys: Collection[str]) -> str:
        """Returns why a box with one of these keys is cut off; "" if it is not."""
        return next((_text(each, self._path) for each in self.found if each.key in keys), "")


def _text(found: Accusation, path: Path | None) -> str:
    return f"{found.node} (key {found.key}) is cut off: {found.why}. Mend it and give it a new key, or see {path}"[:256]


def accusers(keys: Collection[str], words: Iterable[tuple[str, Accusations]]) -> dict[str, Accusation]:
    """Returns by name the boxes that have found a box with one of these keys wrong, of `words` of other boxes."""
    said: dict[str, Accusation] = {}
    for node, accusations in words:
        for accusation in accusations:
            if accusation.key in keys:
                said[node] = accusation
    return said


def reason_by_leader(leader: str, keys: Collection[str], cuts: Accusations) -> str:
    """Returns why the leader has all cut off a box with one of these keys; "" if it has not."""
    why = next((each.why for each in cuts if each.key in keys), "")
    return f"{why} (said by the leader, {leader})"[:256] if why else ""


def reason_by_word(node: str, said: Mapping[str, Accusation]) -> str:
    """Returns why a box is cut off by the word of others; "" if that is not enough."""
    if len(said) < WITNESSES:
        return ""
    first, finders = next(iter(said.values())), " and ".join(sorted(said))
    return f"{node} (key {first.key}) is cut off: {finders} found its answers wrong: {first.why}"[:256]
