"""Fuzzes the HTTP API with bodies drawn from its endpoints' types, sent to a daemon with the demo model.

Numbers of tokens are kept low. Each answer must be a success or a documented refusal in the API's error object. Daemon
and engine must survive without a restart and without growth.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from typing import Any

import httpx

from edgemoe.api.endpoints import anthropic, ollama, responses
from edgemoe.api.llama_bodies import Infill
from edgemoe.api.schema import Chat, Completion, Detokenize, Tokenize
from edgemoe.heap import GIVE_BACK_S
from tools.fuzzing.target import GROWTH_MB, Target, rss_mb, target
from tools.fuzzing.values import Values

PATHS: dict[str, tuple[str, type[Any]]] = {
    "chat": ("/v1/chat/completions", Chat),
    "completions": ("/v1/completions", Completion),
    "responses": ("/v1/responses", responses.ResponsesBody),
    "messages": ("/v1/messages", anthropic.MessagesBody),
    "count_tokens": ("/v1/messages/count_tokens", anthropic.MessagesBody),
    "tokenize": ("/tokenize", Tokenize),
    "detokenize": ("/detokenize", Detokenize),
    "ollama_chat": ("/api/chat", ollama.OllamaChat),
    "ollama_generate": ("/api/generate", ollama.OllamaPrompt),
    "infill": ("/infill", Infill),
}
WHATS = tuple(PATHS)
WEIGHTS = (4, 4, 2, 3, 1, 1, 1, 2, 2, 1)
EARLY = 0.2  # of the bodies are sent before memory is measured first
REFUSALS = {400, 404, 413, 429}  # 408 is for bodies slower than any here
AT_ONCE = 8
ANSWER_S = 900.0  # on a busy machine
LONG_RUN = 5_000  # bodies from which on growth is judged
# Sent before memory is measured. The engine remembers 64 grammars, the tokenizer 10,000 words.
PROMPTS, GRAMMARS, WORDS, WORD_LETTERS = 400, 80, 12_000, 40
WORDS_AT_ONCE = 400  # 12,000 tokens: /tokenize takes eight contexts, which are 16,384
BODIES_BEFORE, AT_ONCE_BEFORE = 5_000, 32
MOST_TOKENS, MOST_CHOICES = 3, 3
SCHEMA: Any = {"type": "object", "properties": {"a": {"enum": [1, "x"]}, "b": {"type": "boolean"}}, "required": ["a"]}
FUNCTION = {"name": "f", "description": "d", "parameters": SCHEMA}
CALL = {"type": "function", "function": FUNCTION}
ODD_SCHEMAS: list[Any] = [{}, False, {"$ref": "#/x"}, {"anyOf": []}]
FORMATS: list[Any] = [
    None,
    {"type": "text"},
    {"type": "json_object"},
    {"type": "json_schema", "json_schema": {"schema": SCHEMA}},
    *({"type": "regex", "regex": regex} for regex in ("(ab)+", "[0-9]{1,5}", "[", r"[^\s\S]", "a{9999}")),
    *({"type": "json_schema", "json_schema": {"schema": odd}} for odd in ODD_SCHEMAS),
]
HINTS: dict[str, list[Any]] = {
    "role": ["user", "assistant", "system", "tool"],
    "type": ["text", "function", "tool_use", "tool_result", "custom", "auto", "message", "thinking"],
}
COMMON: dict[str, list[Any]] = {  # field of a body -> values that are valid there
    "model": [None, None, "edgemoe-demo", "gpt-4o"],
    "max_tokens": [1, 2, 3],
    "n": [None, 1, 2],
    "min_tokens": [None, 0, 1],
    "logit_bias": [None, None, None, {"5": -100}, {"6": 100, "0": -100}, {"99999": 1}],
    "stop": [None, "e", ["the", " "]],
    "stop_token_ids": [None, None, None, [5], [0, 2], [99999]],
    "chat_template_kwargs": [None, {"enable_thinking": False}, {"messages": 1}, {"add_generation_prompt": 7}],
}
USER: Any = {"role": "user", "content": "Who are you?"}
OWN: dict[str, dict[str, list[Any]]] = {
    "chat": {
        "messages": [[USER], [USER, {"role": "assistant", "content": "I am"}], [{"role": "tool", "content": "x"}]],
        "tools": [None, None, [CALL], [CALL, {"function": {"name": "g"}}]],
        "tool_choice": [None, None, None, "auto", "none", "required", {"function": {"name": "f"}}],
        "response_format": FORMATS,
        "top_logprobs": [None, None, None, 0, 20],
        "logprobs": [None, True, True],
        "stream_options": [None, {"include_usage": True}],
    },
    "completions": {
        "prompt": ["Once upon a time", ["a", "b"], [5, 6, 7], [[8, 9], [10]], "", [[]], [4095], "é" * 3000],
        "response_format": FORMATS,
    },
    "responses": {
        "input": ["hello", [USER], [{"type": "function_call_output", "call_id": "c", "output": "x"}]],
        "tools": [None, [{"type": "function", **FUNCTION}]],
        "tool_choice": [None, None, None, "auto", "required", {"type": "function", "name": "f"}],
        **{key: [None] for key in ("background", "previous_response_id", "conversation", "prompt")},
        "n": [None, 1],
    },
    "messages": {
        "messages": [[USER], [USER, {"role": "assistant", "content": [{"type": "text", "text": "I am"}]}]],
        "system": [None, "be brief", [{"type": "text", "text": "be"}]],
        "tools": [None, [{"name": "f", "input_schema": SCHEMA}]],
        "tool_choice": [None, None, None, {"type": "auto"}, {"type": "any"}, {"type": "tool", "name": "f"}],
        "n": [None, 1],
        "output_config": [None, {"format": {"type": "json_schema", "schema": SCHEMA}}],
    },
    "tokenize": {"prompt": ["a b c", None], "messages": [None, [USER]]},
    "detokenize": {"tokens": [[5, 6, 7], [], [4095, 4096]]},
    "ollama_chat": {
        "model": [None, "edgemoe-demo", "edgemoe-demo:latest"],
        "messages": [[USER], [USER, {"role": "assistant", "content": "I am"}], []],
        "tools": [None, None, [CALL]],
        "format": [None, "json", SCHEMA, *ODD_SCHEMAS],
        "think": [None, True, False, "low"],
        "keep_alive": [None, 0, "5m", -1],
    },
    "ollama_generate": {
        "model": [None, "edgemoe-demo", "edgemoe-demo:latest"],
        "prompt": ["Once upon a time", "", "é" * 3000],
        "format": [None, "json", SCHEMA, *ODD_SCHEMAS],
        "suffix": [None, None, "end"],
        "raw": [None, True],
        "context": [None, None, [5, 6, 7], [4095]],
    },
    "infill": {
        "input_prefix": ["def f(", ""],
        "input_suffix": ["return", ""],
        "prompt": ["", "x"],
        "input_extra": [[], [{"filename": "a.py", "text": "x = 1"}]],
    },
}
OWN["count_tokens"] = OWN["messages"]
MEANT = 0.8  # share of valid values in those fields


class Bodies:
    """Draws requests; the same seed draws the same ones."""

    def __init__(self, seed: int, what: str = "") -> None:
        self._rng = random.Random(seed)
        self._values = Values(self._rng, HINTS)
        self._whats = (what,) if what else WHATS
        self._weights = None if what else WEIGHTS

    def draw(self) -> tuple[str, bytes]:
        """Draws a path and a JSON body for it."""
        (what,) = self._rng.choices(self._whats, self._weights)
        path, kind = PATHS[what]
        body = self._values.message(kind)
        body.pop("type", None)
        for field, values in {**COMMON, **OWN[what]}.items():
            if self._rng.random() < MEANT:
                body[field] = self._rng.choice(values)
        _shorten(body, what)
        try:
            text = json.dumps(body, default=str)
        except (RecursionError, ValueError):
            return path, b"[" * 2000
        if self._rng.random() < 0.9:  # most are JSON
            text = text.replace("NaN", "0.25").replace("Infinity", "1e300")
        return path, text.encode()


def _shorten(body: dict[str, Any], what: str) -> None:
    """Limits the tokens and choices of a body."""
    if what.startswith("ollama"):
        options = body.get("options")
        body["options"] = {**(options if isinstance(options, dict) else {}), "num_predict": MOST_TOKENS}
        return
    limits = {"chat": "max_completion_tokens", "responses": "max_output_tokens"}
    for field, most in (
        ("max_tokens", MOST_TOKENS),
        (limits.get(what, "max_tokens"), MOST_TOKENS),
        ("n", MOST_CHOICES),
    ):
        if isinstance(body.get(field), int) and body[field] > most:
            body[field] = most
    body.setdefault(limits.get(what, "max_tokens"), 2)
    if body[limits.get(what, "max_tokens")] is None:
        body[limits.get(what, "max_tokens")] = 2


def complaint(path: str, answer: httpx.Response) -> str:
    """Returns the fault of an answer; "" if there is none."""
    if path.startswith("/api/"):
        return _ollama_complaint(answer)
    if answer.status_code == 200:
        if not answer.headers["content-type"].startswith("text/event-stream"):
            return "" if isinstance(answer.json(), dict) else "no object"
        failures = [line for line in answer.text.splitlines() if line.startswith("data: ") and '"error":{' in line]
        return failures[0] if any("server_error" in line or "api_error" in line for line in failures) else ""
    if answer.status_code not in REFUSALS:
        return f"status {answer.status_code}: {answer.text[:300]}"
    error = answer.json()["error"]
    wanted = {"type", "message"} if path.startswith("/v1/messages") else {"type", "message", "param", "code"}
    return "" if error.keys() == wanted and error["message"] else f"no error object: {answer.text[:300]}"


def _ollama_complaint(answer: httpx.Response) -> str:
    """Returns the fault of an answer in lines of JSON; "" if there is none."""
    lines = [json.loads(line) for line in answer.text.splitlines()]
    if answer.status_code not in {200} | REFUSALS:
        return f"status {answer.status_code}: {answer.text[:300]}"
    if answer.status_code != 200:
        return "" if lines and lines[0].keys() == {"error"} and lines[0]["error"] else f"no error: {answer.text[:300]}"
    failures = [str(line["error"]) for line in lines if "error" in line]
    return next((why for why in failures if "log" in why), "") or (
        "" if lines[-1].get("done") or failures else "no end"
    )


class Attack:
    """Sends bodies, some at a time."""

    def __init__(self, client: httpx.AsyncClient, bodies: Bodies) -> None:
        self.statuses: Counter[str] = Counter()
        self.complaints: list[str] = []
        self._client, self._bodies = client, bodies

    async def send(self, count: int, at_once: int = AT_ONCE) -> None:
        """Sends `count` bodies. Failures are recorded as complaints, not raised."""
        left = iter(range(count))
        await asyncio.gather(*(self._send_some(left) for _ in range(at_once)))

    async def _send_some(self, left: Any) -> None:
        for _ in left:
            path, body = self._bodies.draw()
            try:
                answer = await self._client.post(path, content=body)
                wrong = complaint(path, answer)
                self.statuses[f"{path} {answer.status_code}"] += 1
            except (httpx.HTTPError, ValueError, KeyError) as error:
                wrong = repr(error)
            if wrong:
                self.complaints.append(f"{path} {body[:2000].decode(errors='replace')} -> {wrong}")


def fuzz(what: str, count: int, seed: int) -> dict[str, Any]:
    """Sends `count` bodies to one endpoint, or to all of them."""
    with target() as (box, child):
        health, right = box.health(), box.ask()
        seen = asyncio.run(_attack(box, (child.pid, health["engine"]["pid"]), Bodies(seed, what), count))
        alive = child.poll() is None and box.health()["engine"] == health["engine"]
        seen |= {"alive": alive, "answered_after": box.still_answers(right)}
        seen["ok"] = bool(alive and seen["answered_after"] and not seen["wrong"] and seen["grown_mb"] < GROWTH_MB)
        if not seen["ok"]:
            seen["log"] = (box.folder / "log").read_text()[-4000:]
        return seen


async def _fill(client: httpx.AsyncClient, attack: Attack) -> None:
    """Fills all bounded memory before it is measured.

    It consists of KV blocks, code for all prompt lengths, the heap of steps, grammars, and the tokenizer's words.
    Parallel bodies take some, too.
    """
    rng = random.Random(0)
    prompts = [[rng.randrange(10, 4000) for _ in range(rng.randrange(1, 2000))] for _ in range(PROMPTS)]
    bodies: list[tuple[str, dict[str, Any]]] = [
        ("/v1/completions", {"prompt": one, "max_tokens": 1, "logprobs": 5, "n": 1}) for one in prompts
    ]
    for n in range(GRAMMARS):
        schema = {**SCHEMA, "properties": {**SCHEMA["properties"], f"text {n}": {"type": "string"}}}
        form = {"type": "json_schema", "json_schema": {"schema": schema}}
        bodies.append(("/v1/completions", {"prompt": "once", "max_tokens": 1, "response_format": form}))
    for _ in range(WORDS // WORDS_AT_ONCE):
        words = " ".join("".join(rng.choices("abcdefghij", k=WORD_LETTERS)) for _ in range(WORDS_AT_ONCE))
        bodies.append(("/tokenize", {"prompt": words}))
    left = iter(bodies)

    async def send() -> None:
        for path, body in left:
            (await client.post(path, json=body)).raise_for_status()

    await asyncio.gather(*(send() for _ in range(AT_ONCE_BEFORE)))
    await attack.send(BODIES_BEFORE, AT_ONCE_BEFORE)


async def _attack(box: Target, pids: tuple[int, int], bodies: Bodies, count: int) -> dict[str, Any]:
    """Attacks the daemon; `pids` are its front and engine."""
    transport = httpx.AsyncHTTPTransport(uds=str(box.folder / "api.sock"))
    memory: list[tuple[float, ...]] = []
    async with httpx.AsyncClient(transport=transport, base_url="http://box", timeout=ANSWER_S) as client:
        attack = Attack(client, bodies)
        if count >= LONG_RUN:
            await _fill(client, attack)
        took_s = 0.0
        for part in (EARLY, 1 - EARLY):
            began_s = time.monotonic()
            await attack.send(round(count * part))
            took_s += time.monotonic() - began_s
            if count >= LONG_RUN:
                await asyncio.sleep(1.5 * GIVE_BACK_S)  # memory returns after a moment
            memory.append(tuple(rss_mb((pid,)) for pid in pids))
    return {
        "sent": count,
        "a_second": round(count / took_s),
        "statuses": dict(sorted(attack.statuses.items())),
        "wrong": len(attack.complaints),
        "complaints": attack.complaints[:5],
        "front_and_engine_mb": memory,
        "grown_mb": round(sum(memory[1]) - sum(memory[0]), 1),
    }
