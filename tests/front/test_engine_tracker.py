"""A front reports to the others the figures that its engine has reported to it."""

from __future__ import annotations

import msgspec
from support.model_info import MODEL

from edgemoe.cluster.control.messages import BoxReport
from edgemoe.front.engine_tracker import LocalEngine
from edgemoe.ipc.messages import ChannelsOpened, ExpertActivity, PeerLinkMeasured

SAID = ExpertActivity(
    tokens=1.0,
    chosen=b"ab",
    pairs=b"bc",
    resident=b"c",
    passed=b"de",
    steps=6,
    tokens_per_s=7.0,
    computed=b"gh",
    steps_per_token=0.5,
)


def test_a_report_has_all_that_the_engine_said_of_its_requests() -> None:
    own = LocalEngine()
    own.on_channels_opened("boot", ChannelsOpened(calls_port=1, bulk_port=1, model=MODEL))
    own.activity = SAID
    told = own.report()
    assert told is not None
    assert told.model == "d"
    fields = msgspec.structs.asdict(SAID)
    assert all(fields.values()), "each has a value of its own"
    assert {name: getattr(told, name) for name in fields} == fields
    assert fields.keys() <= set(BoxReport.__struct_fields__)


def test_there_is_no_report_before_the_engine_has_said_anything() -> None:
    own = LocalEngine()
    assert own.report() is None
    own.on_channels_opened("boot", ChannelsOpened(calls_port=1, bulk_port=1, model=MODEL))
    assert own.report() is None


def test_links_to_boxes_that_have_left_are_not_reported() -> None:
    own = LocalEngine()
    own.on_channels_opened("boot", ChannelsOpened(calls_port=1, bulk_port=1, model=MODEL))
    own.activity = SAID
    for node in ("a", "b"):
        own.seen[node] = PeerLinkMeasured(node=node, boot="boot", latency_s=0.001, bytes_per_s=1e8, unit_s=0.0)
    own.keep_links({"b": "boot"})
    told = own.report()
    assert told is not None
    assert [link.node for link in told.links] == ["b"]
