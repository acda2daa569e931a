"""Two releases in one cluster, as processes: this one, and the next as tests/support/next_release.py makes it."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec
from support.front_kit import openai_client
from support.rolling import NEXT, THIS, settings_of
from support.waiting import until

from edgemoe.config.settings import Settings


@contextmanager
def box(command: Sequence[str], settings: Settings, log: Path) -> Iterator[None]:
    """Runs a daemon until the block is left."""
    with log.open("ab") as file:
        process = subprocess.Popen([*command, msgspec.json.encode(settings).decode()], stderr=file)
    try:
        yield
    finally:
        process.terminate()
        try:
            process.wait(60)
        finally:
            process.kill()


def noted(log: Path) -> dict[str, int]:
    """Returns the last counts that a box of the next release has logged."""
    lines = re.findall(r"next release: greeted (\d+), spared (\d+), moods (\d+)", log.read_text())
    return dict(zip(("greeted", "spared", "moods"), map(int, lines[-1]), strict=True)) if lines else {"spared": 0}


async def ask(settings: Settings) -> str:
    async with openai_client(settings) as client:
        answer = await client.completions.create(model="tiny", prompt="hello", seed=1, max_tokens=20)
        return answer.choices[0].text


async def test_neighbouring_releases_work_together_and_use_new_features_only_among_themselves(
    tmp_path: Path, model_dir: Path
) -> None:
    a, b = settings_of(tmp_path, model_dir, ("a", "b"), leader="a")
    log_a, log_b, log_b2 = (tmp_path / name for name in ("a.log", "b.log", "b2.log"))
    with box(NEXT, a, log_a):
        with box(THIS, b, log_b):
            await until(lambda: noted(log_a)["spared"] > 2)
            said = await ask(b)
            assert [await ask(one) for one in (a, b, a, b)] == [said] * 4
        assert noted(log_a)["greeted"] == noted(log_a)["moods"] == 0
        assert "dropped" not in log_b.read_text()
        with box(NEXT, b, log_b2):
            await until(lambda: noted(log_b2).get("greeted", 0) > 2 and noted(log_b2)["moods"] > 2)
            assert await ask(b) == said
