"""Every later release reads the files that a box keeps of its cluster: their bytes of today, written out."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgemoe.cluster.control.admission import KeptWords
from edgemoe.cluster.control.coordination.election_rules import KeptVoters
from edgemoe.cluster.control.coordination.epoch_fence import EpochFence
from edgemoe.cluster.rpc.keys import Peer
from edgemoe.cluster.rpc.roster import KeptRoster, Roster

EPOCH = "12 7ecd2e572c949f74\n"
VOTERS = '["a","b","c"]'
BOXES = (
    '{"b":[{"node":"d","address":"192.0.2.4:7540","key":"k","voter":false,"new_key":"","trusted":false,'
    '"vouches":false}]}'
)


MEMBERS = """{
  "cluster": "0123456789abcdef",
  "version": 3,
  "boxes": [
    {
      "node": "a",
      "address": "192.0.2.1:7540",
      "key": "rq:rM>}U?@Lns47E1%kR.o@n%FcmmsL/@{H8]yf7",
      "voter": true,
      "new_key": "",
      "trusted": false,
      "vouches": false
    }
  ],
  "invited": [],
  "former": ""
}
"""


def test_agreed_members_lie_on_disk_for_ever_as_they_do_now(tmp_path: Path) -> None:
    key = "rq:rM>}U?@Lns47E1%kR.o@n%FcmmsL/@{H8]yf7"
    roster = Roster("0123456789abcdef", 3, (Peer("a", "192.0.2.1:7540", key),))
    KeptRoster(tmp_path / "members").keep(roster)
    assert (tmp_path / "members").read_text() == MEMBERS
    assert KeptRoster(tmp_path / "members").roster == roster


@pytest.mark.parametrize("harm", ["", "{}", MEMBERS[:40], MEMBERS.replace("192", "::"), MEMBERS.replace("rq:", "")])
def test_damaged_members_are_not_used_and_the_fault_names_a_remedy(tmp_path: Path, harm: str) -> None:
    (tmp_path / "members").write_text(harm)
    kept = KeptRoster(tmp_path / "members")
    assert kept.roster is None
    assert "copy it from another box" in kept.fault


def test_damaged_voters_keep_no_box_from_its_work(tmp_path: Path) -> None:
    (tmp_path / "voters").write_text("x")
    kept = KeptVoters(tmp_path / "voters")
    assert kept.names == []
    assert "copy the file from another voter" in kept.fault


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
