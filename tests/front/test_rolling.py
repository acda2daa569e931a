"""Three boxes under load are restarted one after the other, by this release and the next: no request is lost."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import pytest
from support.rolling import NEXT, THIS, WITHIN_S, agreed, roll, three
from support.waiting import until

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("rounds", [[THIS], [NEXT, THIS]], ids=["restart", "upgrade and back"])
async def test_boxes_restart_one_by_one_and_no_request_is_lost(
    rounds: Sequence[Sequence[str]], tmp_path: Path, model_dir: Path
) -> None:
    async with three(tmp_path, model_dir) as boxes:

        def noted(what: str) -> int:
            """Returns the sum of a count, such as `greeted`, over the logs of boxes of the next release."""
            return sum(int(n) for box in boxes for n in re.findall(rf"{what} (\d+)", box.log.read_text()))

        async def after() -> None:
            if NEXT in rounds:
                await until(lambda: noted("greeted"), WITHIN_S)
            await agreed(boxes)

        load = await roll(boxes, rounds, after)
        assert load.lost == []
        assert load.completed > len(boxes)
        if NEXT in rounds:
            assert noted("spared")
