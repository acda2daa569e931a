"""Every later release reads the files that a box keeps of its cluster: their bytes of today, written out."""

from __future__ import annotations

from pathlib import Path

from edgemoe.cluster.control.admission import KeptWords
from edgemoe.cluster.control.coordination.election_rules import KeptVoters
from edgemoe.cluster.control.coordination.epoch_fence import EpochFence
from edgemoe.cluster.rpc.keys import Peer

EPOCH = "12 7ecd2e572c949f74\n"
VOTERS = '["a","b","c"]'
BOXES = (
    '{"b":[{"node":"d","address":"192.0.2.4:7540","key":"k","voter":false,"new_key":"","trusted":false,'
    '"vouches":false}]}'
)


def test_epoch_voters_and_boxes_lie_on_disk_for_ever_as_they_do_now(tmp_path: Path) -> None:
    words = {"b": (Peer("d", "192.0.2.4:7540", "k", voter=False),)}
    EpochFence(tmp_path / "epoch").admit(12)
    KeptVoters(tmp_path / "voters").keep(["a", "b", "c"])
    KeptWords(tmp_path / "boxes").keep(words)
    written = {"epoch": EPOCH, "voters": VOTERS, "boxes": BOXES}
    assert {name: (tmp_path / name).read_text() for name in written} == written
    for name, text in written.items():
        (tmp_path / name).write_text(text)
    assert EpochFence(tmp_path / "epoch").highest == 12
    assert KeptVoters(tmp_path / "voters").names == ["a", "b", "c"]
    assert KeptWords(tmp_path / "boxes").words == words
