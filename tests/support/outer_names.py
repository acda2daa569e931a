"""All names and positions that are visible outside: messages, their fields, and the content of files, as plain data.

`python tests/support/outer_names.py` prints the entry of protocol.json for the present version.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
from msgspec import NODEFAULT, inspect

from edgemoe.cluster.control.coordination.coord_store import PlanRef
from edgemoe.cluster.control.messages import CONTROL
from edgemoe.cluster.data.messages import BULK, EXPERT_CALLS
from edgemoe.cluster.rpc.envelope import Envelope
from edgemoe.cluster.rpc.keys import Peer
from edgemoe.ipc.messages import FROM_ENGINE, TO_ENGINE, Boot
from edgemoe.store.manifest import Manifest
from edgemoe.telemetry.routing_recording import RecordingHeader, RoutingBlock
from edgemoe.types.placement import PlacementPlan
from edgemoe.wire.protocol import PROTOCOL_VERSIONS, MessageLanguage

GOLDEN = Path(__file__).with_name("protocol.json")
LANGUAGES: dict[str, MessageLanguage[Any]] = {
    "control": CONTROL,
    "calls": EXPERT_CALLS,
    "bulk": BULK,
    "front to engine": TO_ENGINE,
    "engine to front": FROM_ENGINE,
}
STRUCTS: dict[str, type[msgspec.Struct]] = {
    "envelope": Envelope,
    "boot": Boot,
    "plan file": PlacementPlan,
    "plan named in the agreement": PlanRef,
    "manifest.json": Manifest,
    "peers.toml": Peer,
    "recording's header": RecordingHeader,
    "recording's block": RoutingBlock,
}


def outer_names() -> dict[str, Any]:
    """Describes every language, and every struct that is a whole file or frame."""
    languages = {
        name: {tag: message_fields(kind) for tag, kind in sorted(language.messages.items())}
        for name, language in LANGUAGES.items()
    }
    structs = {name: describe(inspect.type_info(kind)) for name, kind in STRUCTS.items()}
    return {**languages, **structs}


def message_fields(kind: type[Any]) -> dict[str, Any]:
    """Describes one message: the version that brought it, and its fields."""
    return {"since": kind.since, **describe(inspect.type_info(kind))}


def describe(type_: Any) -> Any:
    """Describes a type by its visible form, bounds included."""
    match type_:
        case inspect.StructType():
            fields = {field.encode_name: _field(field) for field in type_.fields}
            return {"places": list(fields.items())} if type_.array_like else {"fields": fields}
        case inspect.NamedTupleType():
            return [describe(field.type) for field in type_.fields]
        case inspect.TupleType():
            return [describe(item) for item in type_.item_types]
        case inspect.ListType() | inspect.VarTupleType():
            return {"list": describe(type_.item_type), "most": type_.max_length}
        case inspect.DictType():
            return {"map": [describe(type_.key_type), describe(type_.value_type)], "most": type_.max_length}
        case inspect.UnionType():
            return {"any of": [describe(one) for one in type_.types]}
        case inspect.LiteralType():
            return {"one of": list(type_.values)}
    name = type(type_).__name__.removesuffix("Type").lower()
    bounds = {key: value for key, value in vars_of(type_).items() if value is not None}
    return {name: bounds} if bounds else name


def vars_of(type_: Any) -> dict[str, Any]:
    """Returns the constraints of a plain type."""
    names = ("ge", "gt", "le", "lt", "min_length", "max_length", "pattern")
    return {name: getattr(type_, name, None) for name in names}


def _field(field: inspect.Field) -> Any:
    optional = not field.required
    default = field.default if field.default is not NODEFAULT else None
    plain = default if isinstance(default, bool | int | float | str) else None
    return {"is": describe(field.type), **({"optional": plain} if optional else {})}


def breaks(old: Any, new: Any, where: str = "") -> list[str]:
    """Returns the differences that keep a reader of `old` from understanding `new`, or the other way round."""
    if where.endswith(".any of") and len(old) == len(new):
        return [each for pair in zip(old, new, strict=True) for each in breaks(*pair, where.removesuffix(".any of"))]
    if where.endswith(".places") and new[: len(old)] == old:  # of an array, whose end older releases do not read
        return [
            f"{where}: {name} is new, and must have a default" for name, it in new[len(old) :] if "optional" not in it
        ]
    if not (isinstance(old, dict) and isinstance(new, dict)):
        return [] if old == new else [f"{where}: was {old}, is {new}"]
    found = [f"{where}.{name}: has gone" for name in old.keys() - new.keys()]
    for name in new.keys() - old.keys():
        addition = new[name]
        if where.endswith(".fields"):
            found += [] if "optional" in addition else [f"{where}.{name}: is new, and must have a default"]
        elif isinstance(addition, dict) and "since" in addition:
            found += [] if addition["since"] > 1 else [f"{where}.{name}: is new, and says no `since`"]
        else:
            found.append(f"{where}.{name}: is new")
    for name in sorted(old.keys() & new.keys()):
        found += breaks(old[name], new[name], f"{where}.{name}" if where else name)
    return found


if __name__ == "__main__":
    golden = json.loads(GOLDEN.read_text()) if GOLDEN.exists() else {}
    GOLDEN.write_text(
        json.dumps(golden | {str(PROTOCOL_VERSIONS.highest): outer_names()}, indent=1, sort_keys=True) + "\n"
    )
