"""The commands and the README's examples against a real daemon with the demo model."""

from __future__ import annotations

import json
import os
import pty
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from support.kept import KERNELS
from support.readme import CURL, PARSED, PYTHON, README, TALK
from support.waiting import wait_until

from edgemoe.cli.client import Client
from edgemoe.cli.parser import build_parser
from edgemoe.front.listen import tcp_socket

ROOT = Path(__file__).parents[2]
SMALL = ("device.0.kind=emulated", "device.0.expert_bytes=4MiB", "device.0.link_bytes_per_s=1GB/s")
SMALL += ("memory.ram_bytes=8MiB", "memory.kv_bytes=16MiB", "memory.headroom_bytes=0", "engine.threads=1")
SETS = tuple(word for setting in SMALL for word in ("--set", setting))


@pytest.fixture(scope="module")
def env(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The environment of a user with a running daemon, which must end cleanly."""
    home = tmp_path_factory.mktemp("home")
    env = os.environ | {"HOME": str(home), "XDG_RUNTIME_DIR": str(home), "XDG_CACHE_HOME": str(home / "cache")}
    env["PATH"] = f"{Path(sys.executable).parent}:{env['PATH']}"
    env.pop("XDG_CONFIG_HOME", None)
    KERNELS.mkdir(mode=0o700, parents=True, exist_ok=True)
    (home / "cache/edgemoe").mkdir(parents=True)
    (home / "cache/edgemoe/kernels").symlink_to(KERNELS)
    env["PORT"] = str(free_port())
    command = ["edgemoe", "serve", "--port", env["PORT"], *(word for setting in SMALL for word in ("--set", setting))]
    log = home / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(command, env=env, stdout=output, stderr=output)
    try:
        with Client(home / "edgemoe.sock") as client:
            wait_until(lambda: client.is_ready() or process.poll() is not None)
        assert process.poll() is None, log.read_text()
        yield env
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0, log.read_text()
    finally:
        process.kill()
        process.wait()


def free_port() -> int:
    with tcp_socket("127.0.0.1:0") as free:
        return int(free.getsockname()[1])


def run(env: dict[str, str], *words: str, text: str | None = None, within_s: float = 60) -> str:
    done = subprocess.run(words, env=env, input=text, capture_output=True, text=True, timeout=within_s, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_generate_streams_the_same_text_for_the_same_prompt(env: dict[str, str]) -> None:
    words = ("edgemoe", "generate", "--max-tokens", "12", "--temperature", "0")
    first = run(env, *words, "def add(a, b):")
    assert first.strip()
    assert run(env, *words, text="def add(a, b):") == first


def test_chat_answers_one_question_and_holds_a_conversation(env: dict[str, str]) -> None:
    options = ("--max-tokens", "8", "--temperature", "0")
    assert run(env, "edgemoe", "chat", "Hello!", *options).strip()
    said = run(env, "edgemoe", "chat", *options, text="Hello!\nWhat is 2 + 2?\n\n")
    assert len(said.splitlines()) >= 2


def test_a_conversation_takes_commands_and_is_saved(env: dict[str, str], tmp_path: Path) -> None:
    saved = tmp_path / "talk.md"
    lines = ["/help", "/system Be brief.", "Hello!", f"/save {saved}", "", "/clear", "/stats", "Bye!", "/stat", "/quit"]
    words = ["edgemoe", "chat", "--max-tokens", "8", "--temperature", "0"]
    text = "\n".join([*lines, "this is not said"])
    done = subprocess.run(words, env=env, input=text, capture_output=True, text=True, timeout=60, check=True)
    assert re.findall(r"(?m)^## (\w+)\n\n(.*)", saved.read_text())[:2] == [("system", "Be brief."), ("user", "Hello!")]
    assert f"2 messages are in {saved}" in done.stderr
    assert re.search(r"\[\d+ tokens of prompt in [\d.]+ s; 8 tokens at [\d.]+ tokens/s\]", done.stderr)
    assert "There is no /stat." in done.stderr
    assert len(done.stdout.splitlines()) == 2


def test_on_a_terminal_lines_are_edited_and_kept(env: dict[str, str]) -> None:
    leader, follower = pty.openpty()
    words = ["edgemoe", "chat", "--max-tokens", "4"]
    terminal = env | {"TERM": "xterm"}
    with subprocess.Popen(words, env=terminal, stdin=follower, stdout=follower, stderr=follower) as process:
        for typed in (b"Helo\x1b[Dl\n", b"\x04"):
            shown = b""
            while not re.search(rb"\n\S*> $", shown):  # the prompt, after the codes of bracketed paste
                shown += os.read(leader, 4096)
            os.write(leader, typed)
        assert process.wait(60) == 0
    os.close(leader)
    os.close(follower)
    history = Path(env["HOME"]) / ".local/state/edgemoe/chat-history"
    assert history.read_text() == "Hello\n"
    assert history.stat().st_mode & 0o777 == 0o600


def test_text_that_is_not_utf8_is_asked_with_marks_in_its_place(env: dict[str, str]) -> None:
    words: list[str | bytes] = ["edgemoe", "generate", "--max-tokens", "2"]
    for given, text in (([*words, b"caf\xe9 is"], None), (words, b"caf\xe9 is")):
        done = subprocess.run(given, env=env | {"LC_ALL": "C.UTF-8"}, input=text, capture_output=True, timeout=60)
        assert done.returncode == 0, done.stderr


def test_a_refusal_of_the_daemon_is_one_clear_line(env: dict[str, str]) -> None:
    words = ["edgemoe", "generate", "x", "--temperature", "-1"]
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "temperature" in done.stderr
    assert done.stderr.count("\n") == 1


def test_ctrl_c_ends_a_stream_and_frees_its_request(env: dict[str, str]) -> None:
    words = ["env", "--default-signal=INT"]  # the tests' parent may ignore it, which is inherited
    words += ["edgemoe", "generate", "Once upon a time", "--max-tokens", "1500", "--temperature", "2"]
    with subprocess.Popen(words, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout
        assert process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
    with Client(Path(env["XDG_RUNTIME_DIR"]) / "edgemoe.sock") as client:
        wait_until(lambda: not json.loads(client.text("/health"))["requests"]["live"])


def test_status_shows_every_tier_and_speaks_json(env: dict[str, str]) -> None:
    shown = run(env | {"COLUMNS": "120"}, "edgemoe", "status")
    assert all(word in shown for word in ("ready", "VRAM", "RAM", "NVME", "Requests", "KV cache"))
    told = json.loads(run(env, "edgemoe", "status", "--json"))
    assert told["health"]["status"] == "ready"
    assert sum(value for name, value in told["figures"].items() if name.startswith("edgemoe_tier_hits_total")) > 0


def test_the_store_that_was_packed_is_listed_and_whole(env: dict[str, str]) -> None:
    (listed,) = json.loads(run(env, "edgemoe", "models", "list", "--json"))
    assert listed["in_use"]
    store = Path(listed["path"])
    assert "is whole" in run(env, "edgemoe", "models", "verify", store.name)


def test_a_second_daemon_on_the_same_socket_is_refused(env: dict[str, str]) -> None:
    done = subprocess.run(["edgemoe", "serve"], env=env, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "another daemon" in done.stderr


def test_bench_measures_the_daemon_at_each_number_of_streams(env: dict[str, str]) -> None:
    words = ("--prompt", "8", "--tokens", "4", "--json", "--set", "model.store_dir=/nowhere")
    told = json.loads(run(env, "edgemoe", "bench", *words))
    assert told["allowed"] == []  # of a missing store
    assert [row["streams"] for row in told["streams"]] == [1, 4, 16]
    for row in told["streams"]:
        assert 0 < row["tokens_per_s"] <= row["streams"] * 4 / row["first_token_s"] * 2
        assert row["per_output_token_s"] > 0
    assert sum(told["served_by"].values()) == pytest.approx(1, abs=1e-3)


@pytest.mark.slow
@pytest.mark.timeout(1800)  # compiles kernels
def test_bench_shows_the_machine_s_limits_beside_its_figures(env: dict[str, str]) -> None:
    told = json.loads(run(env, "edgemoe", "bench", "--prompt", "8", "--tokens", "32", "--json", *SETS, within_s=600))
    for row, allowed in zip(told["streams"], told["allowed"], strict=True):
        assert row["streams"] == allowed["streams"]
        assert allowed["limit"] in ("memory and processor", "link", "disk")
        assert 0 < allowed["per_output_token_s"] < 3 * row["per_output_token_s"]  # both on a machine that may be busy
    assert "limit" in run(env, "edgemoe", "bench", "--prompt", "8", "--tokens", "4", *SETS, within_s=600)


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not here")
def test_the_readmes_examples_work_as_they_stand_there(env: dict[str, str]) -> None:
    """One shell runs them from top to bottom, as a reader would."""
    script = "\n".join(["set -e", TALK, CURL, "echo; cat <<'EOF' | python3", f"{PYTHON}EOF"])
    said = run(env, "bash", "-c", script)
    assert said.count("Paris") >= 3, said


def test_every_command_in_the_readme_exists() -> None:
    commands = re.findall(r"(?m)^(?:sudo )?edgemoe (.*)$", "\n".join([TALK, *PARSED]))
    assert len(commands) > 5
    for command in commands:
        build_parser().parse_args(shlex.split(command, comments=True))
    for tool in re.findall(r"(?m)^(tools/\w+)", "\n".join(PARSED)):
        assert os.access(ROOT / tool, os.X_OK)


def test_the_readmes_tree_names_existing_files() -> None:
    tree = README.partition("## The house")[2].partition("```\n")[2].partition("```")[0]
    names = re.findall(r"(?m)^(  )?([\w.]+/?)  ", tree)
    assert len(names) > 15
    for indent, name in names:
        assert (ROOT / ("edgemoe" if indent else "") / name).exists(), name


def test_by_tcp_a_key_is_needed_that_was_made_at_the_first_start(env: dict[str, str]) -> None:
    said = (Path(env["HOME"]) / "log").read_text()
    url = f"http://127.0.0.1:{env['PORT']}"
    ready = said[said.index(" is ready at ") :].splitlines()
    assert f" is ready at {url}/v1 (`edgemoe key show`" in ready[0]
    assert ready[1] == f"Next, in another terminal: edgemoe chat; in a browser: {url}/"
    key = run(env, "edgemoe", "key", "show").strip()
    (file,) = Path(env["HOME"]).rglob("api-keys")
    assert file.stat().st_mode & 0o777 == 0o600
    made = run(env, "edgemoe", "key", "new", "laptop", "--at-once", "2").strip()
    assert json.loads(run(env, "edgemoe", "key", "--json"))[-1] == {"name": "laptop", "at_once": 2}
    for secret, status in ((key, 200), (made, 200), ("sk-wrong", 401)):
        answer = httpx.get(f"{url}/v1/models", headers={"authorization": f"Bearer {secret}"}, timeout=60)
        assert answer.status_code == status
    run(env, "edgemoe", "key", "remove", "laptop")
    assert httpx.get(f"{url}/v1/models", headers={"x-api-key": made}, timeout=60).status_code == 401
