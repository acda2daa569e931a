"""A box whose answers were found wrong is cut off by its finder at once, and by the others on two boxes' word."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
from support.boxes import secret
from support.planes import ABC, Front, fronts
from support.waiting import until

from edgemoe.cluster.control.distrust import DistrustedBoxes
from edgemoe.cluster.control.membership import BoxState
from edgemoe.cluster.control.messages import Accusation
from edgemoe.errors import ConfigError
from edgemoe.types.bounds import MAX_NODES

NODES = ("a", "b", "c", "d")


@pytest.fixture
async def four(tmp_path: Path) -> AsyncIterator[dict[str, Front]]:
    async with fronts(tmp_path, NODES) as made:
        await until(
            lambda: all(
                member.state is BoxState.MEMBER for front in made.values() for member in front.plane.state.members
            )
        )
        yield made


def refusal(front: Front, of: str) -> str:
    return front.plane.state.members[of].refusal


async def test_one_finding_cuts_the_box_off_here_and_two_cut_it_off_everywhere(four: dict[str, Front]) -> None:
    a, b, _, d = four.values()
    a.plane.distrust("c", "2 wrong answers of 9")
    assert "c (key " in refusal(a, "c")
    assert "2 wrong answers of 9" in refusal(a, "c")
    assert a.peers["c"].key in refusal(a, "c")
    assert not a.plane.state.members["c"].can_take_part
    await until(lambda: b.plane.state.suspected() == d.plane.state.suspected() == ("c",))
    assert not refusal(d, "c")
    b.plane.distrust("c", "3 wrong answers of 7")
    await until(lambda: refusal(d, "c") != "")
    assert "a and b found its answers wrong" in refusal(d, "c")
    assert d.plane.state.suspected() == ()
    assert not refusal(d, "a")


async def test_a_box_stays_cut_off_after_a_restart_until_its_entry_has_another_key(
    four: dict[str, Front], tmp_path: Path
) -> None:
    a = four["a"]
    a.plane.distrust("c", "sums differ")
    await a.die()
    await a.start()
    await until(lambda: a.plane.state.members.is_alive("c"))
    assert "sums differ" in refusal(a, "c")
    assert [each.node for each in a.plane.announcement.accuses] == ["c"]
    await until(lambda: four["b"].plane.state.suspected() == ("c",))
    mended = msgspec.structs.replace(a.peers["c"], key=secret().public.decode())
    a.plane.set_peers({**a.peers, "c": mended})
    assert not refusal(a, "c")


async def test_the_word_of_a_box_that_this_one_does_not_list_counts_for_nothing(tmp_path: Path) -> None:
    async with fronts(tmp_path, ABC, voters=["b"], coordination="single", leader="b") as three:
        a, b, c = three.values()
        c.plane.set_peers({node: peer for node, peer in c.peers.items() if node != "a"})
        await until(lambda: "a" in c.plane.state.members)  # b vouches for it
        a.plane.distrust("b", "sums differ")
        b.plane.distrust("a", "sums differ")
        await until(lambda: c.plane.state.suspected() == ("a",))
        heard = c.plane.state.members["a"]
        await until(lambda: heard.announcement is not None and bool(heard.announcement.accuses))
        assert c.plane.state.suspected() == ("a",)


def test_findings_are_bounded_and_a_damaged_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "distrusted.json"
    kept = DistrustedBoxes(path)
    for n in range(MAX_NODES + 5):
        kept.add(f"n{n}", [f"key{n}"], "sums differ")
        kept.add(f"n{n}", [f"key{n}"], "again")
    again = DistrustedBoxes(path)
    assert len(again.found) == MAX_NODES
    assert again.found[-1] == Accusation(f"n{MAX_NODES + 4}", f"key{MAX_NODES + 4}", "sums differ")
    assert again.reason(["key0"]) == ""
    path.write_text("[{]")
    with pytest.raises(ConfigError, match=r"distrusted\.json.*remove it"):
        DistrustedBoxes(path)
