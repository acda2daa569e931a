"""Every field of a message has a bound on its size, and every number is finite."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from msgspec import inspect
from support.outer_names import LANGUAGES, STRUCTS

from edgemoe.cluster.control.messages import MAX_UNWANTED, FrameAccepted
from edgemoe.cluster.rpc.envelope import MAX_ENVELOPE_BYTES, seal
from edgemoe.errors import WireError
from edgemoe.ipc.messages import Submit, decode_to_engine, encode
from edgemoe.types import bounds
from edgemoe.types.request import Request, Sampling

OURS = {"settings"}  # of Boot: it comes from our own front, and is checked as a configuration
TRAVEL = {f"{name}.{tag}": kind for name, language in LANGUAGES.items() for tag, kind in language.messages.items()}
TRAVEL |= {name: STRUCTS[name] for name in ("envelope", "boot", "plan file", "plan named in the agreement")}
SIXTY_FOUR_BITS = inspect.type_info(bounds.Seed)


def boundless(type_: Any, where: str) -> Iterator[str]:
    """Yields the names of the fields without a bound."""
    match type_:
        case inspect.StructType() | inspect.DataclassType():
            for field in type_.fields:
                if field.name not in OURS:
                    yield from boundless(field.type, f"{where}.{field.name}")
        case inspect.IntType() if type_ != SIXTY_FOUR_BITS:
            if type_.ge is None or type_.le is None:
                yield where
        case inspect.FloatType():
            if type_.ge is None or type_.le is None or not math.isfinite(type_.le - type_.ge):
                yield where
        case inspect.StrType():
            if type_.max_length is None and not (type_.pattern or "").endswith("}$"):
                yield where
        case inspect.BytesType():
            if type_.max_length is None:
                yield where
        case inspect.ListType() | inspect.VarTupleType():
            if type_.max_length is None:
                yield where
            yield from boundless(type_.item_type, f"{where}[]")
        case inspect.DictType():
            if type_.max_length is None:
                yield where
            yield from boundless(type_.key_type, f"{where}{{key}}")
            yield from boundless(type_.value_type, f"{where}{{}}")
        case inspect.TupleType():
            for item in type_.item_types:
                yield from boundless(item, f"{where}()")
        case inspect.UnionType():
            for one in type_.types:
                yield from boundless(one, where)
        case inspect.AnyType():
            yield where


@pytest.mark.parametrize("name", TRAVEL)
def test_every_field_of_a_message_is_bounded(name: str) -> None:
    assert list(boundless(inspect.type_info(TRAVEL[name]), name)) == []


def test_a_field_without_a_bound_would_be_found() -> None:
    class Loose(msgspec.Struct):
        number: int
        share: float
        text: str
        rows: list[bounds.Count]
        names: dict[str, bytes]
        kept: bounds.Count = 0

    found = list(boundless(inspect.type_info(Loose), "Loose"))
    wanted = ["number", "share", "text", "rows", "names", "names{key}", "names{}"]
    assert found == [f"Loose.{name}" for name in wanted]


@pytest.mark.parametrize("wrong", [math.inf, -math.inf, math.nan, -1.0, 1e9 + 1])
def test_a_time_that_cannot_be_is_refused(wrong: float) -> None:
    request = Request(id="r", prompt=(1,), sampling=Sampling(), seed=1)
    with pytest.raises(WireError, match="remaining_ms"):
        decode_to_engine(encode(Submit(request=request, remaining_ms=wrong)))
    assert decode_to_engine(encode(Submit(request=request, remaining_ms=1e9)))


@pytest.mark.parametrize("wrong", [{"top_p": 1.5}, {"temperature": math.inf}, {"logit_bias": {1: math.nan}}])
def test_sampling_that_cannot_be_is_refused(wrong: dict[str, Any]) -> None:
    request = Request(id="r", prompt=(1,), sampling=Sampling(**wrong), seed=1)
    with pytest.raises(WireError, match=next(iter(wrong))):
        decode_to_engine(encode(Submit(request=request)))


def test_as_many_unwanted_requests_as_are_named_fit_into_an_envelope() -> None:
    name = "n" * bounds.REQUEST_CHARS
    taken = FrameAccepted(tuple((name, 1 << 31) for _ in range(MAX_UNWANTED)))
    assert memoryview(seal(taken)[0]).nbytes < MAX_ENVELOPE_BYTES
