"""`edgemoe witness` as a process: its vote lets one of two boxes lead after the other has died."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from support.rolling import THIS, Box, settings_of
from support.waiting import until


@pytest.mark.slow
async def test_with_the_vote_of_a_witness_one_of_two_boxes_leads_alone(tmp_path: Path, model_dir: Path) -> None:
    made = settings_of(tmp_path, model_dir, ("a", "b", "w"), coordination="raft")
    boxes = {one.cluster.node: Box(one, tmp_path / f"{one.cluster.node}.log") for one in made}
    cluster = msgspec.to_builtins(made[2].cluster)
    kept = ("node", "key_file", "listen", "peers_file", "state_dir")
    options = [f"--set=cluster.{key}={cluster[key]}" for key in kept]
    command = [sys.executable, "-m", "edgemoe", "witness", *options, "--set=cluster.coordination=raft"]
    witness = boxes.pop("w")
    try:
        with witness.log.open("ab") as log:
            witness.process = subprocess.Popen(command, stdout=log, stderr=log)
        for box in boxes.values():
            box.start(THIS)

        async def leader(of: str) -> str:
            return str((await boxes[of].health()).get("cluster", {}).get("leader", ""))

        async def agree() -> bool:
            return "" != await leader("a") == await leader("b")

        await until(agree)
        first = await leader("a")
        assert first in boxes
        died, left = boxes[first], next(node for node in boxes if node != first)
        assert died.process is not None
        died.process.kill()

        async def leads() -> bool:
            return await leader(left) == left

        await until(leads)
        witness.process.send_signal(signal.SIGTERM)
        assert witness.process.wait(60) == 0
    finally:
        for box in (*boxes.values(), witness):
            if box.process is not None and box.process.poll() is None:
                box.process.kill()
                box.process.wait(60)
