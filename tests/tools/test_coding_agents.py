"""Real coding agents edit a file with a scripted model behind a real front: `edgemoe launch`, and by the page's blocks.

An agent that is not on PATH is installed with npm, once; the test is skipped where that fails.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from subprocess import DEVNULL, PIPE, STDOUT
from typing import Any

import pytest
from support.front_kit import running, settings_for, write_model
from support.ports import free_ports

from edgemoe.front.main import Front

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/clients.md"
KEPT = ROOT / ".cache/clients/agents"
CONTEXT, KEY = 200_000, "a-key-for-the-agents-of-this-test"
ANSWER_S, INSTALL_S = 300.0, 900.0
FLEET = """
import json, sys

TOOL = {"name": "find_car", "description": "Finds a car.", "inputSchema": {"type": "object"}}
for line in sys.stdin:
    asked = json.loads(line)
    answers = {
        "initialize": lambda: {
            "protocolVersion": asked["params"]["protocolVersion"],
            "capabilities": {"tools": {}},
            "serverInfo": {"name": "fleet", "version": "1"},
        },
        "tools/list": lambda: {"tools": [TOOL]},
        "tools/call": lambda: {"content": [{"type": "text", "text": "car " + asked["params"]["arguments"]["plate"]}]},
    }
    if "id" in asked:
        result = answers.get(asked["method"], dict)()
        print(json.dumps({"jsonrpc": "2.0", "id": asked["id"], "result": result}), flush=True)
"""


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


PATCH = "*** Begin Patch\n*** Update File: greet.txt\n-hello world\n+goodbye world\n*** End Patch\n"
THOUGHT = "<think>\nI look first.\n</think>\n\nLet me look.\n"
DONE = "It says goodbye now."


@dataclass(frozen=True)
class Played:
    """An agent's package, its words for one task, the model's answers, and the heading of its block on the page."""

    package: str
    words: Callable[[Path], list[str]]
    turns: Callable[[Path], list[str]]
    heading: str
    file: str  # where the block is written, below the home directory


AGENTS = {
    "codex": Played(
        "@openai/codex@0.171.0",
        lambda folder: ["exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", "say goodbye"],
        lambda folder: [
            f"{THOUGHT}{call('exec_command', cmd='cat greet.txt')}",
            call("exec_command", cmd=f"apply_patch <<'EOF'\n{PATCH}EOF\n"),
            DONE,
        ],
        "Codex CLI",
        ".codex/config.toml",
    ),
    "claude": Played(
        "@anthropic-ai/claude-code@2.1.332",
        lambda folder: ["-p", "say goodbye", "--permission-mode", "acceptEdits"],
        lambda folder: [
            f"{THOUGHT}{call('Read', file_path=str(folder / 'greet.txt'))}",
            call("Edit", file_path=str(folder / "greet.txt"), old_string="hello", new_string="goodbye"),
            DONE,
        ],
        "Claude Code",
        ".claude/settings.json",
    ),
    "opencode": Played(
        "opencode-ai@1.18.33",
        lambda folder: ["run", "say goodbye"],
        lambda folder: [
            f"{THOUGHT}{call('read', filePath=str(folder / 'greet.txt'))}",
            call("edit", filePath=str(folder / "greet.txt"), oldString="hello", newString="goodbye"),
            DONE,
        ],
        "opencode",
        ".config/opencode/opencode.json",
    ),
}


CLINE = Played(
    "cline@3.0.65",
    lambda folder: ["say goodbye"],
    lambda folder: [
        f"{THOUGHT}{call('read_files', files=[{'path': str(folder / 'greet.txt')}])}",
        call("editor", path=str(folder / "greet.txt"), old_text="hello", new_text="goodbye"),
        DONE,
    ],
    "Cline",
    "",
)


@pytest.fixture(scope="module", params=AGENTS)
def agent(request: Any) -> tuple[str, Path]:
    """The name of an agent and the folder of its program. Skips where it cannot be had."""
    return request.param, programs_of(request.param, AGENTS[request.param])


def programs_of(name: str, played: Played) -> Path:
    """Returns the folder of an agent's program, which is installed if it is missing. Skips where it cannot be had."""
    if shutil.which("npm") is None:
        pytest.skip("npm is not installed")
    package = played.package.rpartition("@")[0]
    home = KEPT / package.replace("/", "-")
    program = home / "node_modules/.bin" / name
    if not program.exists():
        words = ["npm", "install", "--no-audit", "--no-fund", "--prefix", str(home), played.package]
        done = subprocess.run(words, capture_output=True, text=True, timeout=INSTALL_S, check=False)
        for script in ("install.cjs", "postinstall.mjs"):  # npm asks before it runs the scripts of packages
            if (folder := home / "node_modules" / package).joinpath(script).is_file():
                subprocess.run(["node", script], cwd=folder, capture_output=True, timeout=INSTALL_S, check=False)
        if not program.exists():
            pytest.skip(f"{played.package} cannot be installed: {done.stderr[-200:]}")
    return program.parent


@asynccontextmanager
async def model(folder: Path, turns: list[str], quick: pytest.MonkeyPatch) -> AsyncIterator[Front]:
    """Yields a front on a socket and a port, whose engine says these turns."""
    play, key = folder / "turns.json", folder / "key"
    play.write_text(json.dumps({"turns": turns, "otherwise": json.dumps({"title": "goodbye"})}))
    key.touch(0o600)
    key.write_text(KEY)
    quick.setenv("SCRIPTED_TURNS", str(play))
    quick.setenv("SCRIPTED_CONTEXT", str(CONTEXT))
    api = {"tcp": f"127.0.0.1:{free_ports(1)[0]}", "api_key_file": str(key)}
    async with running(settings_for(folder, write_model(folder / "model"), api=api)) as front:
        yield front


def environment(home: Path, programs: Path) -> dict[str, str]:
    """Returns the variables of an agent with a home of its own, which reaches nothing but this machine."""
    nowhere = "http://127.0.0.1:9"
    kept = {name: os.environ[name] for name in ("PATH", "LANG", "VIRTUAL_ENV") if name in os.environ}
    return {
        **kept,
        "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "HOME": str(home),
        "EDGEMOE_API_KEY": KEY,
        "HTTPS_PROXY": nowhere,
        "HTTP_PROXY": nowhere,
        "NO_PROXY": "127.0.0.1,localhost",
    }


async def edits(words: list[str], folder: Path, env: dict[str, str]) -> str:
    """Runs an agent in a folder of its own until it has edited the file. Returns the text that it printed."""
    (folder / "greet.txt").write_text("hello world\n")
    process = await asyncio.create_subprocess_exec(
        *words, cwd=folder, env=env, stdin=DEVNULL, stdout=PIPE, stderr=STDOUT
    )
    try:
        async with asyncio.timeout(ANSWER_S):
            printed, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 0, printed.decode()
    assert (folder / "greet.txt").read_text() == "goodbye world\n", printed.decode()
    assert DONE in printed.decode()
    return printed.decode()


@pytest.mark.slow
@pytest.mark.asyncio
async def test_an_agent_that_is_launched_edits_a_file(
    agent: tuple[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, programs = agent
    work, home, played = tmp_path / "work", tmp_path / "home", AGENTS[name]
    for each in (work, home):
        each.mkdir()
    async with model(tmp_path, played.turns(work), monkeypatch) as front:
        words = [sys.executable, "-m", "edgemoe", "launch", name, "--socket", front.settings.api.socket, "--"]
        await edits([*words, *played.words(work)], work, environment(home, programs))


@pytest.mark.slow
@pytest.mark.asyncio
async def test_an_agent_with_the_pages_settings_edits_a_file(
    agent: tuple[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, programs = agent
    work, home, played = tmp_path / "work", tmp_path / "home", AGENTS[name]
    file = home / played.file
    for each in (work, file.parent):
        each.mkdir(parents=True)
    async with model(tmp_path, played.turns(work), monkeypatch) as front:
        block = block_of(played.heading).replace("127.0.0.1:8080", front.settings.api.tcp)
        block = block.replace("32768", str(CONTEXT)).replace("26000", str(CONTEXT * 4 // 5))
        file.write_text(block.replace("edgemoe-demo", "tiny").replace("THE-KEY", KEY))
        await edits([name, *played.words(work)], work, environment(home, programs))


@pytest.mark.slow
@pytest.mark.asyncio
async def test_cline_after_the_pages_commands_edits_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    programs = programs_of("cline", CLINE)
    work, home = tmp_path / "work", tmp_path / "home"
    for each in (work, home):
        each.mkdir()
    async with model(tmp_path, CLINE.turns(work), monkeypatch) as front:
        signs_in, _ = block_of(CLINE.heading).strip().splitlines()
        signs_in = signs_in.replace("127.0.0.1:8080", front.settings.api.tcp).replace("THE-KEY", KEY)
        env = environment(home, programs) | {"CLINE_SESSION_BACKEND_MODE": "local"}  # leaves no process behind
        words = [str(programs / "cline"), *shlex.split(signs_in.replace("edgemoe-demo", "tiny"))[1:]]
        await asyncio.to_thread(subprocess.run, words, env=env, stdin=DEVNULL, timeout=ANSWER_S, check=True)
        await edits([str(programs / "cline"), *CLINE.words(work)], work, env)


@pytest.mark.slow
@pytest.mark.asyncio
async def test_codex_calls_the_tool_of_an_mcp_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    programs = KEPT / "@openai-codex/node_modules/.bin"
    if not (programs / "codex").exists():
        pytest.skip("codex is not installed")
    work, home, played = tmp_path / "work", tmp_path / "home", AGENTS["codex"]
    for each in (work, home):
        each.mkdir()
    (work / "fleet.py").write_text(FLEET)
    server = {"command": sys.executable, "args": [str(work / "fleet.py")]}
    options = [word for key, value in server.items() for word in ("-c", f"mcp_servers.fleet.{key}={json.dumps(value)}")]
    _, *rest = played.turns(work)
    async with model(tmp_path, [call("mcp__fleet__find_car", plate="K-AB 1"), *rest], monkeypatch) as front:
        words = [sys.executable, "-m", "edgemoe", "launch", "codex", "--socket", front.settings.api.socket, "--"]
        printed = await edits([*words, *options, *played.words(work)], work, environment(home, programs))
    assert "fleet/find_car (completed)" in printed


def block_of(heading: str) -> str:
    """Returns the first block under a heading of the page."""
    found = re.search(rf"^### {heading}\n.*?^```\w+\n(.*?)^```$", PAGE.read_text(), re.M | re.S)
    assert found is not None, heading
    return found[1]


@pytest.mark.parametrize("played", [*AGENTS.values(), CLINE], ids=lambda played: played.package)
def test_the_page_names_the_release_that_is_tried(played: Played) -> None:
    assert played.package.rpartition("@")[2] in PAGE.read_text()
