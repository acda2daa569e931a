"""Values made from types: within their bounds, at them, beyond them, or of another type altogether."""

from __future__ import annotations

import copy
import functools
import math
import random
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from msgspec import inspect

INTS = (-1, 0, 1, 255, 2**16, 2**24, 2**31, 2**32, 2**53, 2**62, 2**63 - 1, 2**64 - 1, -(2**63))
FLOATS = (math.inf, -math.inf, math.nan, -1.0, -0.0, 5e-324, 1e-50, 1e9, 1e308, -1e308)
TEXTS = ("", "\0", "/", "../../x", "a/b/c", "%s{0}", "é" * 90, "x" * 250, "x" * 257, "x" * 1025, "x" * 70_000)
ODDITIES: tuple[Any, ...] = (None, True, -1, 2**64 - 1, math.nan, "", "x", b"", b"\0" * 9, [], {}, [[]], {"": {}})
DEPTH = 600  # of needless nesting


MATCHING = {  # texts that match each pattern of the messages
    "^[0-9a-f]{32}$": ("0" * 32, "f" * 32, "0123456789abcdef" * 2),
    r"^[A-Za-z0-9_][A-Za-z0-9_.-]*$": ("m", "_", "a..b", "A-1_2.3", "x" * 255),
}


@functools.cache
def _type_info(kind: Any) -> inspect.Type:
    return inspect.type_info(kind)


class Values:
    """Draws values. `hints` are values by field name that the reader knows."""

    def __init__(
        self, rng: random.Random, hints: Mapping[str, Sequence[Any]] | None = None, sure: Collection[str] = ()
    ) -> None:
        """Makes fields in `sure` always one of their hints, unless the value is damaged."""
        self.rng, self.hints, self.sure = rng, hints or {}, sure

    def message(self, kind: Any) -> dict[str, Any]:
        """Draws a message of that kind: half of them lie within all bounds, the rest break some."""
        rng = self.rng
        spoilt = rng.choice((0.0, 0.0, 0.0, 0.02, 0.1, 0.4))
        made = self._struct(_type_info(kind), spoilt)
        if rng.random() < 0.1:
            made[rng.choice(("zz", "", "type2", "since"))] = self.oddity()
        if spoilt and rng.random() < 0.1:
            made["type"] = rng.choice(("", "Zebra", "x" * 9000, 7, None, made.get("type")))
        return made

    def of(self, type_: Any, spoilt: float, name: str = "") -> Any:
        """Draws a value of the type; each part breaks the type with the chance `spoilt`."""
        rng = self.rng
        if spoilt and rng.random() < spoilt:
            return self.oddity() if rng.random() < 0.5 else self.beyond(type_)
        if name in self.hints and not _has_parts(type_) and (name in self.sure or rng.random() < 0.6):
            return rng.choice(self.hints[name])
        match type_:
            case inspect.StructType():
                return self._struct(type_, spoilt)
            case inspect.ListType() | inspect.VarTupleType():
                most = min(type_.max_length or 8, rng.choice((0, 1, 2, 3, 3, 8, 200 if spoilt else 8)))
                items = [self.of(type_.item_type, spoilt, name) for _ in range(min(most, 3))]
                more = spoilt > 0 and rng.random() < 0.1
                return (items * (most // 3 + 1))[: most + more]  # some of it more than once
            case inspect.TupleType():
                return [self.of(item, spoilt) for item in type_.item_types]
            case inspect.DictType():
                pairs = ((self.of(type_.key_type, 0.0), self.of(type_.value_type, spoilt)) for _ in range(3))
                return {key: value for key, value in pairs if isinstance(key, str | int)}
            case inspect.UnionType():
                return self.of(rng.choice(type_.types), spoilt, name)
            case inspect.LiteralType():
                return rng.choice(type_.values)
            case inspect.IntType():
                return self._int(type_)
            case inspect.FloatType():
                low, high = type_.ge if type_.ge is not None else -1.0, type_.le if type_.le is not None else 1e9
                return rng.choice((low, high, rng.uniform(low, min(high, low + 10.0)), 0.5))
            case inspect.StrType(pattern=str() as pattern):
                return rng.choice(MATCHING[pattern])
            case inspect.StrType():
                return self._text(type_.min_length or 0, type_.max_length or 64)
            case inspect.BytesType():
                return rng.randbytes(
                    max(type_.min_length or 0, min(type_.max_length or 64, rng.choice((0, 1, 24, 64, 4096))))
                )
            case inspect.BoolType():
                return rng.random() < 0.5
        return None

    def beyond(self, type_: Any) -> Any:
        """Draws a value of the right kind, out of its bounds as often as not."""
        rng = self.rng
        match type_:
            case inspect.IntType():
                return rng.choice((*INTS, (type_.le or 0) + 1, (type_.ge or 0) - 1))
            case inspect.FloatType():
                return rng.choice(FLOATS)
            case inspect.StrType():
                return rng.choice(TEXTS)
            case inspect.BytesType():
                return bytes(rng.choice((0, 1, 7, 1 << 12, (type_.max_length or 64) + 1 if rng.random() < 0.05 else 3)))
            case inspect.ListType() | inspect.VarTupleType():
                return [self.oddity()] * rng.choice((1, 65, 300))
        return self.oddity()

    def oddity(self) -> Any:
        """Draws a value of another type; one time in fifty, deeply nested."""
        if self.rng.random() < 0.02:
            deep: Any = []
            for _ in range(DEPTH):
                deep = [deep]
            return deep
        return copy.deepcopy(self.rng.choice(ODDITIES))  # a copy, for the caller may add to it

    def _struct(self, type_: Any, spoilt: float) -> dict[str, Any]:
        made: dict[str, Any] = {"type": type_.tag} if type_.tag is not None else {}
        for field in type_.fields:
            if (not field.required and self.rng.random() < 0.3) or self.rng.random() < spoilt / 4:
                continue
            made[field.encode_name] = self.of(field.type, spoilt, field.encode_name)
        return made

    def _int(self, type_: Any) -> int:
        low = type_.ge if type_.ge is not None else 0
        high = type_.le if type_.le is not None else 2**64 - 1
        return int(self.rng.choice((low, high, low + 1, self.rng.randint(low, min(high, low + 8)), min(high, low + 3))))

    def _text(self, least: int, most: int) -> str:
        length = max(least, min(most, self.rng.choice((0, 1, 8, 40, 40, 256, most if most < 5000 else 40))))
        return "".join(self.rng.choices("abcdef0123456789-/:. é", k=length))


def _has_parts(type_: Any) -> bool:
    """Whether the type has parts, at least in one of its forms."""
    forms = type_.types if isinstance(type_, inspect.UnionType) else (type_,)
    return any(isinstance(one, inspect.StructType | inspect.ListType | inspect.VarTupleType) for one in forms)
