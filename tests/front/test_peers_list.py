"""The list of peers, followed as it changes."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from edgemoe.cluster.rpc.keys import generate
from edgemoe.config.settings import ClusterSettings
from edgemoe.front import peers_list


class Plane:
    """Records the lists that it is given."""

    def __init__(self) -> None:
        self.listed: list[Any] = []

    def list(self, peers: Any) -> None:
        self.listed.append(peers)


@pytest.mark.parametrize("joins", [False, True])
async def test_a_box_without_a_list_follows_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, joins: bool
) -> None:
    """In particular not the current folder, which an empty path means."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(peers_list, "LOOK_S", 0.01)
    public = generate(tmp_path / "key").public.decode()
    join, plane = f"a,127.0.0.1:7540,{public}" if joins else "", Plane()
    settings = ClusterSettings(node="b", key_file="key", listen="127.0.0.1:7541", join=join)
    following = asyncio.ensure_future(peers_list.follow_list(settings, plane))  # type: ignore[arg-type]
    await asyncio.sleep(0.05)
    (tmp_path / "new").write_text("x")
    await asyncio.sleep(0.05)
    following.cancel()
    assert (plane.listed, caplog.records) == ([], [])
