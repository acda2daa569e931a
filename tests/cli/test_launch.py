"""`edgemoe launch`: an agent is started with the daemon's model, a port and a token of its own."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from support.front_kit import running, settings_for, write_model

from edgemoe.cli import parser
from edgemoe.cli.launch_command import AGENTS, AgentServer, claude, codex, opencode
from edgemoe.front.main import Front

pytestmark = pytest.mark.asyncio(loop_scope="module")
# stands for an agent: asks its server for the models, prints its words and settings, and ends with status 3
STANDIN = f"""\
#!{sys.executable}
import json, os, re, sys, urllib.request

said = " ".join([*sys.argv, *(f"{{name}}={{value}}" for name, value in os.environ.items())])
url = re.search(r"http://127.0.0.1:[0-9]+", said)[0]
key = os.environ.get("ANTHROPIC_AUTH_TOKEN") or os.environ["EDGEMOE_API_KEY"]
asked = urllib.request.Request(url + "/v1/models", headers={{"authorization": "Bearer " + key}})
models = json.load(urllib.request.urlopen(asked))["data"]
settings = {{name: value for name, value in os.environ.items() if name.startswith(("ANTHROPIC", "OPENCODE", "CLAUDE"))}}
print(json.dumps({{"models": models, "words": sys.argv[1:], "settings": settings}}), flush=True)
if "wait" in sys.argv:
    sys.stdin.read()
sys.exit(3)
"""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def front(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Front]:
    folder = tmp_path_factory.mktemp("launch")
    api = {"aliases": ["gpt-5"]}
    async with running(settings_for(folder, write_model(folder / "model"), api=api)) as front:
        yield front


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("programs")
    for name in AGENTS:
        (folder / name).write_text(STANDIN)
        (folder / name).chmod(0o755)
    return folder


async def start(front: Front, path: str, *words: str) -> asyncio.subprocess.Process:
    command = [sys.executable, "-m", "edgemoe", "launch", words[0], "--socket", front.settings.api.socket, *words[1:]]
    env = os.environ | {"PATH": path, "ANTHROPIC_API_KEY": "of the user's own"}
    pipe = asyncio.subprocess.PIPE
    return await asyncio.create_subprocess_exec(*command, env=env, stdin=pipe, stdout=pipe, stderr=pipe)


async def launched(front: Front, path: str, *words: str) -> tuple[int, str, str]:
    process = await start(front, path, *words)
    async with asyncio.timeout(120):
        printed, complained = await process.communicate()
    return process.returncode or 0, printed.decode(), complained.decode()


@pytest.mark.parametrize("name", AGENTS)
async def test_an_agent_reaches_the_daemon_and_gets_its_own_words(front: Front, programs: Path, name: str) -> None:
    status, printed, complained = await launched(front, str(programs), name, "--", "run", "--model", "x", "--")
    assert status == 3, complained
    told: dict[str, Any] = json.loads(printed)
    assert told["models"][0]["id"] == "tiny"
    assert f"{name}'s first prompt has about" in complained, "a context of 4,096 tokens is too short for it"
    assert told["words"][-4:] == ["run", "--model", "x", "--"]
    assert name != "claude" or "ANTHROPIC_API_KEY" not in told["settings"]
    assert "tiny" in json.dumps([told["words"], told["settings"]])


@pytest.mark.parametrize("name", AGENTS)
async def test_an_agent_that_is_not_installed_is_named_with_what_installs_it(
    front: Front, tmp_path: Path, name: str
) -> None:
    status, _, complained = await launched(front, str(tmp_path), name)
    assert status == 1
    assert f"{name} is not installed here" in complained
    assert AGENTS[name].install in complained


async def test_a_model_is_chosen_by_an_alias_and_no_other_name(front: Front, programs: Path) -> None:
    _, printed, _ = await launched(front, str(programs), "claude", "--model", "gpt-5")
    assert json.loads(printed)["settings"]["ANTHROPIC_MODEL"] == "gpt-5"
    status, _, complained = await launched(front, str(programs), "claude", "--model", "gpt-6")
    assert status == 1
    assert "the model 'gpt-6' is not served here; tiny, gpt-5 is" in complained


async def test_an_interrupt_is_the_agents_and_an_end_ends_it(front: Front, programs: Path) -> None:
    process = await start(front, str(programs), "codex", "--", "wait")
    assert process.stdout is not None
    async with asyncio.timeout(120):
        await process.stdout.readline()
        process.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGTERM)
        assert await process.wait() == 128 + signal.SIGTERM


async def test_the_command_knows_every_agent() -> None:
    assert tuple(AGENTS) == parser.AGENTS


@pytest.mark.parametrize("context", [4096, 32_768, 131_072, 1 << 20])
async def test_agents_compact_before_the_context_is_full(context: int) -> None:
    server = AgentServer("http://127.0.0.1:1", "key", "m", context)
    variables = claude(server).variables
    window, answer, share = (
        int(variables[name] or 0)
        for name in (
            "CLAUDE_CODE_AUTO_COMPACT_WINDOW",
            "CLAUDE_CODE_MAX_OUTPUT_TOKENS",
            "CLAUDE_AUTOCOMPACT_PCT_OVERRIDE",
        )
    )
    assert 0.7 * context < (window - answer) * share / 100 <= 0.81 * context
    assert f"model_auto_compact_token_limit={int(context * 0.8)}" in codex(server).words
    limit = json.loads(opencode(server).variables["OPENCODE_CONFIG_CONTENT"] or "")["provider"]["edgemoe"]["models"]
    assert limit["m"]["limit"]["context"] == context
