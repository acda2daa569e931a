"""Runs `edgemoe launch`: starts a coding agent that uses the running daemon, and no other server, while it runs.

The agent talks to a loopback port, for a token of its own, which passes requests to the daemon's Unix socket. Its
settings hold for this one start: no file of the agent's is written.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from edgemoe.cli.client import Client, socket_of, wait_for_engine
from edgemoe.cli.dashboard import LOOPBACK, DashboardProxy, listen, proxy_server, serve
from edgemoe.errors import ServiceError

PATIENCE_MS = 3_600_000  # that an agent waits for a slow answer, or between two parts of one
COMPACT_SHARE = 0.8  # of the context, at which an agent summarises its conversation
CLAUDE_LEAST_WINDOW = 100_000  # tokens: Claude Code takes no smaller one, but a share of it
LOOK_S = 0.5
KEY_VARIABLE = "EDGEMOE_API_KEY"


@dataclass(frozen=True, slots=True)
class AgentServer:
    """The address, key and model for an agent."""

    url: str  # without /v1
    key: str
    model: str
    context_tokens: int

    @property
    def answer_tokens(self) -> int:
        """Returns the most tokens of one answer: a quarter of the context, at most 32,000."""
        return min(32_000, self.context_tokens // 4)

    @property
    def compact_tokens(self) -> int:
        """Returns the length of a conversation at which the agent should summarise it."""
        return int(self.context_tokens * COMPACT_SHARE)


@dataclass(frozen=True, slots=True)
class Launch:
    """The words that start an agent, before the user's own, and the variables to set (None: to unset)."""

    words: Sequence[str]
    variables: Mapping[str, str | None]


def claude(server: AgentServer) -> Launch:
    """Returns how Claude Code is started."""
    window = max(CLAUDE_LEAST_WINDOW, server.context_tokens)
    share = 100 * server.compact_tokens / (window - server.answer_tokens)
    models = ("", "_DEFAULT_OPUS", "_DEFAULT_SONNET", "_DEFAULT_HAIKU")
    return Launch(
        ["claude"],
        {
            "ANTHROPIC_BASE_URL": server.url,
            "ANTHROPIC_AUTH_TOKEN": server.key,
            "ANTHROPIC_API_KEY": None,
            **{f"ANTHROPIC{name}_MODEL": server.model for name in models},
            "CLAUDE_CODE_SUBAGENT_MODEL": server.model,
            "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(server.answer_tokens),
            "CLAUDE_CODE_AUTO_COMPACT_WINDOW": str(window),
            "CLAUDE_AUTOCOMPACT_PCT_OVERRIDE": str(max(1, int(share))),
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
            "API_TIMEOUT_MS": str(PATIENCE_MS),
            "CLAUDE_STREAM_IDLE_TIMEOUT_MS": str(PATIENCE_MS),
        },
    )


def codex(server: AgentServer) -> Launch:
    """Returns how Codex is started. JSON's strings and numbers are TOML's, too."""
    provider = {
        "name": "edgemoe",
        "base_url": f"{server.url}/v1",
        "env_key": KEY_VARIABLE,
        "wire_api": "responses",
        "stream_idle_timeout_ms": PATIENCE_MS,
    }
    settings = {
        "model": server.model,
        "model_provider": "edgemoe",
        **{f"model_providers.edgemoe.{key}": value for key, value in provider.items()},
        "model_context_window": server.context_tokens,
        "model_auto_compact_token_limit": server.compact_tokens,
        "web_search": "disabled",
        "check_for_update_on_startup": False,
        "analytics.enabled": False,
    }
    words = [word for key, value in settings.items() for word in ("-c", f"{key}={json.dumps(value)}")]
    return Launch(["codex", *words], {KEY_VARIABLE: server.key})


def opencode(server: AgentServer) -> Launch:
    """Returns how opencode is started."""
    config = {
        "provider": {
            "edgemoe": {
                "npm": "@ai-sdk/openai-compatible",
                "name": "edgemoe",
                "options": {"baseURL": f"{server.url}/v1", "apiKey": f"{{env:{KEY_VARIABLE}}}", "timeout": PATIENCE_MS},
                "models": {
                    server.model: {
                        "name": server.model,
                        "limit": {"context": server.context_tokens, "output": server.answer_tokens},
                    }
                },
            }
        },
        "model": f"edgemoe/{server.model}",
        "small_model": f"edgemoe/{server.model}",
        "autoupdate": False,
        "share": "disabled",
    }
    return Launch(["opencode"], {KEY_VARIABLE: server.key, "OPENCODE_CONFIG_CONTENT": json.dumps(config)})


@dataclass(frozen=True, slots=True)
class CodingAgent:
    """A coding agent: how it is started, the command that installs it, and the length of its first prompt."""

    start: Callable[[AgentServer], Launch]
    install: str
    first_tokens: int


AGENTS = {
    "claude": CodingAgent(claude, "npm install -g @anthropic-ai/claude-code", 20_000),
    "codex": CodingAgent(codex, "npm install -g @openai/codex", 10_000),
    "opencode": CodingAgent(opencode, "npm install -g opencode-ai", 10_000),
}


def run(args: argparse.Namespace) -> int:
    """Starts the agent, waits for its end, and returns its exit status. Raises ServiceError."""
    agent = AGENTS[args.agent]
    if shutil.which(args.agent) is None:
        raise ServiceError(f"{args.agent} is not installed here, or not on PATH; `{agent.install}` installs it")
    path = socket_of(args)
    with Client(path) as client:
        wait_for_engine(client)
        model, context_tokens = _chosen(json.loads(client.text("/v1/models"))["data"], args.model)
    if context_tokens <= agent.first_tokens:
        print(
            f"{args.agent}'s first prompt has about {agent.first_tokens:,} tokens, and {model}'s context is "
            f"{context_tokens:,}: it will be refused. engine.context_tokens sets the context, up to the model's own",
            file=sys.stderr,
        )
    with _passage(path) as (url, token):
        launch = agent.start(AgentServer(url, token, model, context_tokens))
        env = os.environ | {name: value for name, value in launch.variables.items() if value is not None}
        for name in (name for name, value in launch.variables.items() if value is None):
            env.pop(name, None)
        return _wait([*launch.words, *args.behind], env)


def _chosen(models: Sequence[Mapping[str, object]], name: str | None) -> tuple[str, int]:
    """Returns the id and context length of the first model, or of the model or alias that is asked for."""
    lengths = {str(model["id"]): int(str(model["max_model_len"])) for model in models}
    if name is not None and name not in lengths:
        raise ServiceError(f"the model {name!r} is not served here; {', '.join(lengths)} is")
    chosen = name or next(iter(lengths))
    return chosen, lengths[chosen]


@contextlib.contextmanager
def _passage(path: Path) -> Iterator[tuple[str, str]]:
    """Serves a loopback port from a thread. Yields its URL and the token that it needs."""
    listener, token = listen(0), secrets.token_urlsafe(24)
    port = listener.getsockname()[1]
    passage = DashboardProxy(path, token, port)
    server = proxy_server(passage)
    thread = threading.Thread(target=asyncio.run, args=(serve(passage, listener, server),), daemon=True)
    thread.start()
    try:
        yield f"http://{LOOPBACK}:{port}", token
    finally:
        server.should_exit = True
        thread.join()


def _wait(words: Sequence[str], env: Mapping[str, str]) -> int:
    """Runs the agent in the terminal. Ctrl-C is the agent's alone; a request to end this command ends the agent."""
    process = subprocess.Popen(words, env=env)
    reactions = {signal.SIGINT: lambda *_: None, signal.SIGTERM: lambda *_: process.terminate()}
    before = {number: signal.signal(number, react) for number, react in reactions.items()}
    try:
        status = None
        while status is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                status = process.wait(LOOK_S)  # a signal that another thread gets would not end a longer wait
    finally:
        for number, react in before.items():
            signal.signal(number, react)
    return status if status >= 0 else 128 - status
