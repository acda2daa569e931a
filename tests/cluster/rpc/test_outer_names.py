"""Public names stay when names inside change; older releases can ignore the added ones."""

from __future__ import annotations

import copy
import json
from typing import Any

import msgspec
import pytest
from support.outer_names import GOLDEN, LANGUAGES, breaks, outer_names

from edgemoe.wire.protocol import PROTOCOL_VERSIONS

KEPT: dict[str, Any] = json.loads(GOLDEN.read_text())
PLACES = KEPT[str(PROTOCOL_VERSIONS.highest)]["recording's header"]["places"]
MESSAGES = [kind for language in LANGUAGES.values() for kind in language.messages.values()]


def test_public_names_are_unchanged() -> None:
    now = json.loads(json.dumps(outer_names()))
    for version in range(PROTOCOL_VERSIONS.lowest, PROTOCOL_VERSIONS.highest):
        assert breaks(KEPT[str(version)], now) == []
    assert now == KEPT[str(PROTOCOL_VERSIONS.highest)], (
        "what was released cannot change: raise protocol.SPOKEN for additions, then run tests/support/outer_names.py"
    )


@pytest.mark.parametrize("kind", MESSAGES, ids=lambda kind: kind.__name__)
def test_a_class_that_is_renamed_keeps_its_tag(kind: type[msgspec.Struct]) -> None:
    renamed = msgspec.defstruct("Renamed", [], bases=(kind,), frozen=True)
    assert renamed.__struct_config__.tag == kind.__struct_config__.tag


def test_tags_of_a_language_are_told_apart() -> None:
    for language in LANGUAGES.values():
        assert len(language.messages) == len({id(kind) for kind in language.messages.values()})


def changed(path: list[str], value: Any = None) -> dict[str, Any]:
    """Returns today's names with one entry replaced or removed."""
    names: dict[str, Any] = json.loads(json.dumps(outer_names()))
    at = names
    for step in path[:-1]:
        at = at[step]
    if value is None:
        del at[path[-1]]
    else:
        at[path[-1]] = value
    return names


@pytest.mark.parametrize(
    ("new", "complaint"),
    [
        (changed(["control", "Beat"]), "control.Beat: has gone"),
        (changed(["control", "Beat", "fields", "seen"]), "seen: has gone"),
        (changed(["control", "Beat", "fields", "mood"], {"is": "bool"}), "must have a default"),
        (
            changed(["control", "Announce", "fields", "engine", "is", "any of", 0, "fields", "mood"], {"is": "bool"}),
            "engine.is.fields.mood: is new, and must have a default",
        ),
        (changed(["control", "Wave"], {"since": 1, "fields": {}}), "says no `since`"),
        (changed(["control", "Announce", "fields", "release", "is"], "bool"), "release.is: was"),
        (changed(["manifest.json", "fields", "dtype"]), "dtype: has gone"),
        (changed(["plan file", "fields", "homes"]), "homes: has gone"),
        (changed(["recording's header", "places"], [*PLACES, ["mood", {"is": "bool"}]]), "mood is new, and must have"),
        (changed(["recording's header", "places"], [*PLACES[1:], PLACES[0]]), "places: was"),
        (changed(["recording's header", "places"], PLACES[:-1]), "places: was"),
    ],
)
def test_a_change_that_older_releases_cannot_bear_is_named(new: dict[str, Any], complaint: str) -> None:
    old = json.loads(json.dumps(outer_names()))
    assert any(complaint in one for one in breaks(old, new)), breaks(old, new)


@pytest.mark.parametrize(
    "new",
    [
        changed(["control", "Beat", "fields", "mood"], {"is": "bool", "optional": False}),
        changed(["control", "Wave"], {"since": 2, "fields": {}}),
        changed(["recording's header", "places"], [*PLACES, ["mood", {"is": "bool", "optional": False}]]),
    ],
)
def test_additions_that_older_releases_can_ignore_are_no_break(new: dict[str, Any]) -> None:
    assert breaks(json.loads(json.dumps(outer_names())), copy.deepcopy(new)) == []
