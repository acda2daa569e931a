"""The demo model in few bits behind the front: the text of its dequantised weights, also after an engine dies."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest
from support.dequantised import dequantised, in_float32
from support.front_kit import openai_client, running, settings_for
from support.greedy_texts import greedy_texts
from support.waiting import until
from tokenizers import Tokenizer

from edgemoe.cli import main
from edgemoe.config.settings import MemorySettings
from edgemoe.demo import model_path
from edgemoe.front.main import WORKER, Front
from edgemoe.store.layout import WantedEncodings
from edgemoe.store.manifest import Manifest, spec_of
from edgemoe.store.packer import pack

pytestmark = [pytest.mark.early, pytest.mark.asyncio(loop_scope="session")]
PROMPTS = ["def main(argv):\n    ", "The file system", "12 + 30 =", 'msgid "Cancel"\nmsgstr "']
TOKENS = 24
BEGUN = 12  # tokens of all texts together, after which the engine is killed


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return in_float32(model_path(), tmp_path_factory.mktemp("plain") / "hf")


async def served(front: Front) -> list[str]:
    async with openai_client(front.settings) as client:

        async def one(prompt: str) -> str:
            answer = await client.completions.create(
                model="tiny", prompt=prompt, temperature=0, max_tokens=TOKENS, extra_body={"min_tokens": TOKENS}
            )
            return answer.choices[0].text

        return list(await asyncio.gather(*map(one, PROMPTS)))


@pytest.mark.parametrize(
    ("experts", "share"),
    [
        pytest.param("int8", 1.0, marks=pytest.mark.slow),
        pytest.param("int4", 1.0, marks=pytest.mark.slow),
        ("int4", 0.05),
    ],
)
async def test_the_daemon_generates_the_dequantised_weights_text(
    plain: Path, tmp_path: Path, experts: str, share: float
) -> None:
    tokenizer = Tokenizer.from_file(str(plain / "tokenizer.json"))
    expected = greedy_texts(dequantised(plain, tmp_path / "oracle", experts, "int8"), tokenizer, PROMPTS, TOKENS)
    store = tmp_path / "store"
    pack(plain, store, wanted=WantedEncodings.parse(experts, "int8"))
    geometry = spec_of(Manifest.load(store)).geometry
    memory = MemorySettings(ram_bytes=int(geometry.all_bytes * share), kv_bytes=8 << 20)
    async with running(settings_for(tmp_path, store, memory=memory, service={"max_restarts": 5}), WORKER) as front:
        assert await served(front) == expected
        supervisor = front.supervisor
        assert supervisor is not None
        again = asyncio.ensure_future(served(front))
        await until(lambda: sum(len(live.emitted) for live in supervisor.requests.machine._live.values()) > BEGUN)
        os.kill(supervisor.describe()["engine"]["pid"], signal.SIGKILL)
        assert await again == expected


async def test_with_keys_and_values_in_int8_the_door_says_the_same_after_an_engine_died(
    plain: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = tmp_path / "store"
    pack(plain, store, wanted=WantedEncodings.parse("int4,first=int8", "int8"))
    memory, sections = MemorySettings(kv_bytes=8 << 20), {"service": {"max_restarts": 5}}
    settings = settings_for(tmp_path, store, memory=memory, engine={"kv_cache_dtype": "int8"}, **sections)
    async with running(settings, WORKER) as front:
        expected, supervisor = await served(front), front.supervisor
        assert supervisor is not None
        socket = ["--socket", settings.api.socket]
        assert await asyncio.to_thread(main, ["status", *socket]) == 0
        assert "experts int4, int8; dense int8; KV int8" in " ".join(capsys.readouterr().out.split())
        again = asyncio.ensure_future(served(front))
        await until(lambda: sum(len(live.emitted) for live in supervisor.requests.machine._live.values()) > BEGUN)
        os.kill(supervisor.describe()["engine"]["pid"], signal.SIGKILL)
        assert await again == expected
