"""A model directory without weights, and a front with a scripted engine behind it, for tests of api and daemon."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from edgemoe.cluster.rpc.keys import generate
from edgemoe.config.settings import (
    ApiSettings,
    ClusterSettings,
    EngineSettings,
    ModelSettings,
    ServiceSettings,
    Settings,
)
from edgemoe.front.main import Front
from support.kept import STORES
from support.ports import free_ports
from support.waiting import until

SCRIPTED = (sys.executable, str(Path(__file__).parent / "scripted_engine.py"))
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MARKS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
TEXT = "The quick brown fox jumps over the lazy dog; Größe, naïve café, 東京 and 🦊. " * 8

TEMPLATE = """\
{%- if tools %}
    {{- '<|im_start|>system\\n# Tools\\n' }}
    {%- for tool in tools %}{{ tool | tojson }}{{ '\\n' }}{% endfor %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role not in ['system', 'user', 'assistant', 'tool'] %}
        {{- raise_exception('unknown role ' + message.role) }}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content }}
    {%- for call in message.tool_calls or [] %}
        {{- '<tool_call>\\n' + (call.function | tojson) + '\\n</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""


def byte_level_tokenizer(special_marks: bool = False, marks: Sequence[str] = MARKS) -> Tokenizer:
    """Makes byte-level BPE like Qwen's: every byte, a few merges, special tokens, and marks, optionally special too."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=340, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([TEXT], trainer)
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIALS])
    add = tokenizer.add_special_tokens if special_marks else tokenizer.add_tokens
    add([AddedToken(text, special=special_marks, normalized=False) for text in marks])
    return tokenizer


def write_model(directory: Path, template: str = TEMPLATE, tokenizer: Tokenizer | None = None) -> Path:
    """Writes all files of a model that the front reads."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = tokenizer or byte_level_tokenizer()
    tokenizer.save(str(directory / "tokenizer.json"))
    ends = [tokenizer.token_to_id("<|im_end|>"), tokenizer.token_to_id("<|endoftext|>")]
    files: dict[str, Any] = {
        "tokenizer_config.json": {"eos_token": "<|im_end|>", "chat_template": template},
        "generation_config.json": {"eos_token_id": ends, "temperature": 0.6, "top_p": 0.95, "top_k": 20},
        "config.json": {"vocab_size": tokenizer.get_vocab_size()},
    }
    for name, content in files.items():
        (directory / name).write_text(json.dumps(content))
    return directory


def settings_for(folder: Path, model: Path, **sections: Any) -> Settings:
    """Returns settings of a daemon that keeps everything in `folder`."""
    api = {"socket": str(folder / "api.sock"), **sections.pop("api", {})}
    service = {"runtime_dir": str(folder / "run"), "drain_s": 5.0, **sections.pop("service", {})}
    return Settings(
        model=ModelSettings(path=str(model), name="tiny", store_dir=str(STORES)),
        api=ApiSettings(**api),
        service=ServiceSettings(**service),
        engine=EngineSettings(**sections.pop("engine", {})),
        **sections,
    )


def listed_boxes(
    folder: Path,
    model: Path,
    nodes: Sequence[str],
    ways: Mapping[tuple[str, str], int] | None = None,
    **cluster: Any,
) -> list[Settings]:
    """Returns settings of boxes that list each other; `ways` are ports at which one reaches another, if not its own."""
    ports = dict(zip(nodes, free_ports(len(nodes)), strict=True))
    keys = {node: generate(folder / f"{node}.key").public.decode() for node in nodes}
    made = []
    for node in nodes:
        (folder / node).mkdir()
        entries = []
        for other, port in ports.items():
            at = (ways or {}).get((node, other), port)
            entries.append(f'[[peer]]\nnode = "{other}"\naddress = "127.0.0.1:{at}"\nkey = "{keys[other]}"\n')
        (folder / node / "peers.toml").write_text("\n".join(entries))
        settings = ClusterSettings(
            node=node,
            key_file=str(folder / f"{node}.key"),
            listen=f"127.0.0.1:{ports[node]}",
            peers_file=str(folder / node / "peers.toml"),
            state_dir=str(folder / node / "state"),
            **cluster,
        )
        made.append(settings_for(folder / node, model, cluster=settings, service={"max_restarts": 50}))
    return made


@asynccontextmanager
async def running(settings: Settings, command: tuple[str, ...] = SCRIPTED) -> AsyncIterator[Front]:
    """Runs a front in this process, its engine ready; stops it and checks its consistency at the end."""
    async with started(settings, ready, command) as front:
        yield front


@asynccontextmanager
async def started(
    settings: Settings, is_up: Callable[[Front], bool], command: tuple[str, ...] = SCRIPTED, **options: Any
) -> AsyncIterator[Front]:
    """Runs a front in this process, and yields it once it is up; stops it and checks its consistency at the end."""
    front = Front(settings, command, env={}, **options)
    serving = asyncio.ensure_future(front.serve())
    try:
        await until(lambda: serving.done() or is_up(front))
        if serving.done():
            serving.result()
        yield front
        assert front.pool is not None
        front.pool.check_integrity()
        assert not front.integrity_errors
    finally:
        front.stop()
        front.stop()
        await serving


def ready(front: Front) -> bool:
    return front.supervisor is not None and front.supervisor.state == "ready"


KEY = "0123456789abcdef"


def keyed_address(folder: Path) -> tuple[str, dict[str, Any]]:
    """Returns a free address, and the API's settings to listen there for clients with `KEY`."""
    keys, (port,) = folder / "keys", free_ports(1)
    keys.write_text(KEY + "\n")
    keys.chmod(0o600)
    return f"127.0.0.1:{port}", {"tcp": f"127.0.0.1:{port}", "api_key_file": str(keys)}


def http_client(settings: Settings, **options: Any) -> httpx.AsyncClient:
    transport = httpx.AsyncHTTPTransport(uds=settings.api.socket, verify=False)  # certificates take 26 ms to read
    return httpx.AsyncClient(transport=transport, base_url="http://edgemoe", timeout=120.0, **options)


def openai_client(settings: Settings, **options: Any) -> openai.AsyncOpenAI:
    """Opens the real client, over the Unix socket."""
    options = {"max_retries": 0, **options}
    return openai.AsyncOpenAI(
        base_url="http://edgemoe/v1", api_key="none", http_client=http_client(settings), **options
    )
