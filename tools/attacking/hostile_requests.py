"""Sends single odd requests to a daemon: each must end by a documented status, and tell nothing of other clients.

    python -m tools.attacking.hostile_requests [--only NAME]

Prints a line of JSON for each: its status, seconds, and faults. No URL that a request names may be asked for.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from tools.attacking.attacked import ATTACKER, VICTIM, Attacked, attacked_daemon

WITHIN_S = 60.0  # on a busy machine
SECRET = "the password of the house is 4711"
STATUSES = {200, 204, 206, 304, 400, 401, 403, 404, 405, 408, 409, 411, 413, 415, 417, 421, 429, 431, 501, 505}
TOKENS = 32
PAUSE_S, STREAM_S, MOST_BYTES = 2.0, 10.0, 1 << 20  # of an answer
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
SAY: Any = [{"role": "user", "content": "hello"}]
Make = Callable[["Site"], bytes]


@dataclass(slots=True)
class Site:
    """Values that a request may name: the attacker's key, and the URL of the listener."""

    key: str
    url: str


@dataclass(slots=True)
class Told:
    """How a request ended. `faults` is empty where all was well."""

    name: str
    status: int = 0  # 0: the connection was closed without an answer
    seconds: float = 0.0
    faults: list[str] = field(default_factory=list)


class Listener:
    """Counts connections to a port of loopback."""

    def __init__(self) -> None:
        self.count = 0
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}/secret.json"
        threading.Thread(target=self._run, daemon=True).start()

    def close(self) -> None:
        self._socket.close()

    def _run(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                self._socket.accept()[0].close()
                self.count += 1


# --- requests as bytes -----------------------------------------------------------------------------------------------


def _raw(head: bytes, body: bytes = b"", *, key: bool = True, host: bytes = b"localhost") -> Make:
    def make(site: Site) -> bytes:
        lines = [head, b"Host: " + host] if host else [head]
        lines += [b"Authorization: Bearer " + site.key.encode()] if key else []
        return b"\r\n".join(lines) + b"\r\n\r\n" + body

    return make


def _get(path: bytes, *headers: bytes, key: bool = True) -> Make:
    return _raw(b"\r\n".join((b"GET " + path + b" HTTP/1.1", b"Connection: close", *headers)), key=key)


def _post(path: bytes, body: bytes, *headers: bytes) -> Make:
    plain = (
        () if any(one.lower().startswith(b"content-type") for one in headers) else (b"Content-Type: application/json",)
    )
    size = b"Content-Length: %d" % len(body)
    return _raw(b"\r\n".join((b"POST " + path + b" HTTP/1.1", b"Connection: close", size, *plain, *headers)), body)


def _chunked(*chunks: bytes) -> Make:
    head = b"POST /v1/completions HTTP/1.1\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n"
    return _raw(head + b"Content-Type: application/json", b"".join(chunks))


PLAIN = b'{"prompt": "a", "max_tokens": 1}'
HEADS: dict[str, Make] = {
    "chunk of 2^68": _chunked(b"FFFFFFFFFFFFFFFFF\r\n", b"x" * 100),
    "negative chunk": _chunked(b"-1\r\n", b"x" * 100),
    "chunk extension of 60 kB": _chunked(b"20;" + b"a" * 60_000 + b"\r\n", PLAIN, b"\r\n0\r\n\r\n"),
    "many chunk extensions": _chunked(*[b"1;a=b\r\n \r\n"] * 60_000, b"20\r\n", PLAIN, b"\r\n0\r\n\r\n"),
    "trailers without end": _chunked(b"20\r\n", PLAIN, b"\r\n0\r\n", b"a: b\r\n" * 60_000),
    "chunks and a length": _post(b"/v1/completions", PLAIN, b"Transfer-Encoding: chunked"),
    "another coding": _post(b"/v1/completions", PLAIN, b"Transfer-Encoding: gzip, chunked"),
    "length of two values": _raw(b"POST /tokenize HTTP/1.1\r\nContent-Length: 3, 4", b"{}  "),
    "length with an underscore": _raw(b"POST /tokenize HTTP/1.1\r\nContent-Length: 1_0", b"{}        "),
    "length of other digits": _raw("POST /tokenize HTTP/1.1\r\nContent-Length: ²".encode(), b"{}"),
    "10,000 headers": _get(b"/health", *[b"X: y"] * 10_000),
    "one header of 1 MB": _get(b"/health", b"X: " + b"y" * (1 << 20)),
    "a key of 60 kB": _get(b"/v1/models", b"Authorization: Bearer " + b"k" * 60_000, key=False),
    "a key of other letters": _get(b"/v1/models", "Authorization: Bearer kéy\u0660".encode(), key=False),
    "basic authorization": _get(b"/v1/models", b"Authorization: Basic " + b"QUFB" * 999, key=False),
    "key in the address": _get(b"/v1/models?key=em-0123456789abcdef&api_key=em-0123456789abcdef", key=False),
    "a cookie of 60 kB": _get(b"/", b"Cookie: a=" + b"b" * 60_000, key=False),
    "a method of 5,000 letters": _raw(b"A" * 5000 + b" / HTTP/1.1\r\nConnection: close"),
    "trace": _raw(b"TRACE / HTTP/1.1\r\nConnection: close"),
    "connect": _raw(b"CONNECT 127.0.0.1:22 HTTP/1.1\r\nConnection: close"),
    "options of all": _raw(b"OPTIONS * HTTP/1.1\r\nConnection: close"),
    "propfind": _raw(b"PROPFIND / HTTP/1.1\r\nConnection: close\r\nContent-Length: 0"),
    "no host": _raw(b"GET / HTTP/1.1\r\nConnection: close", host=b""),
    "host with a user": _raw(b"GET / HTTP/1.1\r\nConnection: close", host=b"localhost@evil.example", key=False),
    "host with a port of 2^40": _raw(
        b"GET / HTTP/1.1\r\nConnection: close", host=b"localhost:1099511627776", key=False
    ),
    "half an IPv6 host": _raw(b"GET / HTTP/1.1\r\nConnection: close", host=b"[::1", key=False),
    "host of a name that begins as this one": _raw(
        b"GET / HTTP/1.1\r\nConnection: close", host=b"localhost.evil.example", key=False
    ),
    "expects something else": _post(b"/v1/completions", PLAIN, b"Expect: the-unexpected"),
    "continue without a body": _raw(b"POST /tokenize HTTP/1.1\r\nExpect: 100-continue\r\nContent-Length: 0"),
    "websocket": _get(
        b"/events",
        b"Upgrade: websocket",
        b"Connection: Upgrade",
        b"Sec-WebSocket-Key: AAAA",
        b"Sec-WebSocket-Version: 13",
    ),
    "h2c with settings": _get(
        b"/health", b"Connection: Upgrade, HTTP2-Settings", b"Upgrade: h2c", b"HTTP2-Settings: AAMA"
    ),
    "a path of 60 kB": _get(b"/" + b"a" * 60_000),
    "a query of 60 kB": _get(b"/health?" + b"a&" * 30_000),
    "many parameters": _get(b"/v1/models?" + b"&".join(b"a%d=%%41" % n for n in range(5000))),
    "paths upwards": _get(b"/page/../../../../etc/passwd"),
    "paths upwards, encoded": _get(b"/page/%2e%2e/%2e%2e/%2e%2e/etc/passwd"),
    "paths upwards, twice encoded": _get(b"/page/%252e%252e/%252e%252e/etc/passwd"),
    "paths upwards, with a backslash": _get(b"/page/..%5c..%5c..%5cetc%5cpasswd"),
    "a path with a zero": _get(b"/page/style.css%00.png"),
    "a path that is no text": _get(b"/page/%ff%fe%80"),
    "a model's name upwards": _get(b"/v1/models/..%2f..%2f..%2fetc%2fpasswd"),
    "a thousand slashes": _get(b"/" * 1000 + b"v1/models"),
    "a thousand versions": _get(b"/v1" * 1000 + b"/models"),
    "a thousand ranges": _get(
        b"/page/style.css", b"Range: bytes=" + b",".join(b"0-%d" % n for n in range(1000)), key=False
    ),
    "overlapping ranges": _get(b"/page/style.css", b"Range: bytes=" + b",".join([b"0-"] * 1000), key=False),
    "a range of 5,000 digits": _get(b"/page/style.css", b"Range: bytes=0-" + b"9" * 5000, key=False),
    "a range of other digits": _get(b"/page/style.css", "Range: bytes=²-³".encode(), key=False),
    "a thousand tags": _get(b"/page/style.css", b"If-None-Match: " + b",".join([b'"a"'] * 1000), key=False),
    "a date without sense": _get(
        b"/page/style.css", b"If-Modified-Since: Thu, 99 Foo 99999999999 99:99:99 GMT", key=False
    ),
    "languages": _get(b"/", b"Accept-Language: " + b",".join(b"a%d;q=0.%d" % (n, n) for n in range(5000)), key=False),
    "origin null": _post(b"/v1/completions", PLAIN, b"Origin: null"),
    "a page of another site, without a key": _raw(
        b"POST /v1/completions HTTP/1.1\r\nConnection: close\r\nOrigin: http://evil.example\r\nContent-Type: text/plain"
        b"\r\nContent-Length: %d" % len(PLAIN),
        PLAIN,
        key=False,
    ),
    "preflight with a thousand headers": _raw(
        b"OPTIONS /v1/completions HTTP/1.1\r\nConnection: close\r\nOrigin: http://evil.example\r\n"
        b"Access-Control-Request-Method: POST\r\nAccess-Control-Request-Headers: " + b",".join([b"x-a"] * 1000),
        key=False,
    ),
    "a body in UTF-16": _post(
        b"/v1/completions", PLAIN.decode().encode("utf-16"), b"Content-Type: application/json; charset=utf-16"
    ),
    "a body in UTF-7": _post(b"/v1/completions", b"+AHsAIg-", b"Content-Type: application/json; charset=utf-7"),
    "a form": _post(b"/v1/chat/completions", b"--x\r\n" * 9999, b"Content-Type: multipart/form-data; boundary=x"),
    "a boundary of 60 kB": _post(
        b"/v1/chat/completions", b"x", b"Content-Type: multipart/form-data; boundary=" + b"x" * 60_000
    ),
    "a forwarded address": _get(b"/metrics", b"X-Forwarded-For: 127.0.0.1", b"Forwarded: for=127.0.0.1", key=False),
    "another method by a header": _get(b"/reload", b"X-HTTP-Method-Override: POST"),
    "reload by TCP": _post(b"/reload", b""),
    "members by TCP": _post(b"/cluster", b'{"verb": "remove", "node": "box"}'),
    "members are read by TCP": _get(b"/cluster"),
    "reach by TCP": _get(b"/reach"),
    "slots": _get(b"/slots"),
    "properties": _get(b"/props"),
    "metrics": _get(b"/metrics"),
    "health": _get(b"/health"),
    "change of properties": _post(b"/props", b'{"chat_template": "{{ 1 }}"}'),
    "a slot is saved": _post(b"/slots/0?action=save", b'{"filename": "../../../tmp/x"}'),
    "a model is pulled": _post(b"/api/pull", b'{"model": "../../etc", "insecure": true}'),
    "a model is deleted": _post(b"/api/delete", b'{"model": "edgemoe-demo"}'),
    "a model is copied": _post(b"/api/copy", b'{"source": "edgemoe-demo", "destination": "../../x"}'),
    "a model is made": _post(b"/api/create", b'{"model": "x", "from": "/etc/passwd", "files": {"a": "../../b"}}'),
    "a blob": _post(b"/api/blobs/sha256:../../../etc/passwd", b"x"),
    "a model is shown": _post(b"/api/show", b'{"model": "../../../etc/passwd"}'),
    "a model is unloaded": _post(b"/api/generate", b'{"model": "edgemoe-demo", "keep_alive": 0}'),
    "an adapter": _post(b"/v1/load_lora_adapter", b'{"lora_name": "x", "lora_path": "/etc/passwd"}'),
}


# --- requests as JSON ------------------------------------------------------------------------------------------------


def _json(path: str, body: Callable[[Site], Any]) -> Make:
    return lambda site: _post(path.encode(), json.dumps(body(site)).encode())(site)


def _chat(**fields: Any) -> Make:
    return _json(CHAT, lambda site: {"messages": SAY, "max_tokens": 2, **fields})


def _text(body: bytes, path: str = CHAT) -> Make:
    return _post(path.encode(), body)


def _deep(depth: int, opening: str = "[", closing: str = "]") -> str:
    return opening * depth + closing * depth


def _called(arguments: Any) -> Make:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return _chat(messages=[*SAY, {"role": "assistant", "content": None, "tool_calls": [call]}, *SAY])


def _part(of_url: Callable[[str], Any]) -> Make:
    return _json(CHAT, lambda site: {"messages": [{"role": "user", "content": [of_url(site.url)]}], "max_tokens": 2})


BODIES: dict[str, Make] = {
    "100,000 times one field": _text(b'{"messages": [], ' + b'"n": 1, ' * 100_000 + b'"max_tokens": 1}'),
    "a number of 100,000 digits": _text(b'{"messages": [], "seed": ' + b"9" * 100_000 + b"}"),
    "an exponent of ten digits": _text(b'{"messages": [], "temperature": 1E+9999999999}'),
    "a fraction of 100,000 digits": _text(b'{"messages": [], "top_p": 0.' + b"3" * 100_000 + b"}"),
    "half a pair": _text(b'{"messages": [{"role": "user", "content": "\\ud800"}], "max_tokens": 1}'),
    "half a pair in a name": _text(b'{"model": "\\udfff", "messages": [{"role": "user", "content": "a"}]}'),
    "half a pair in a stop": _text(b'{"prompt": "a", "stop": ["\\ud800"], "max_tokens": 1}', COMPLETIONS),
    "half a pair in a user": _text(b'{"prompt": "a", "user": "\\ud800", "max_tokens": 1}', COMPLETIONS),
    "half a pair in a salt": _text(b'{"prompt": "a", "cache_salt": "\\ud800", "max_tokens": 1}', COMPLETIONS),
    "half a pair in a bias": _text(b'{"prompt": "a", "logit_bias": {"\\ud800": 1}, "max_tokens": 1}', COMPLETIONS),
    "half a pair in a schema": _text(
        b'{"messages": [{"role": "user", "content": "a"}], "max_tokens": 1, "response_format": {"type": "json_schema", '
        b'"json_schema": {"schema": {"type": "object", "properties": {"\\ud800": {"const": "\\udfff"}}}}}}'
    ),
    "bytes that are no UTF-8": _text(b'{"messages": [{"role": "user", "content": "\xff\xfe\xc0\x80"}]}'),
    "a mark of byte order": _text(b"\xef\xbb\xbf" + PLAIN, COMPLETIONS),
    "letters that grow when normalised": _chat(messages=[{"role": "user", "content": "\ufdfa" * 20_000}]),
    "100,000 accents": _chat(messages=[{"role": "user", "content": "e" + "\u0301" * 100_000}]),
    "directions": _chat(messages=[{"role": "user", "content": "\u202e\u2066\u200f" * 5000}]),
    "zeros": _chat(messages=[{"role": "user", "content": "\0" * 5000}], user="\0" * 100, model="\0"),
    "a name with escape sequences": _chat(model="\x1b[2J\x1b]0;owned\x07\r\nfake log line"),
    "a name of 1 MB": _chat(model="m" * (1 << 20)),
    "a name upwards": _chat(model="../../../../etc/passwd"),
    "a user of 1 MB": _chat(user="u" * (1 << 20), safety_identifier="s" * (1 << 20)),
    "10^5 stops": _chat(stop=[f"s{n}" for n in range(100_000)]),
    "10^6 stop tokens": _chat(stop_token_ids=list(range(1_000_000))),
    "biases of odd names": _chat(logit_bias=dict.fromkeys(("1e3", "²", "0x10", "-1", "9" * 5000, " 7 ", "٣"), 1)),
    "deep arguments of a call": _called(_deep(100_000)),
    "deep objects in the arguments of a call": _called('{"a":' * 50_000 + "1" + "}" * 50_000),
    "arguments of a number of 10^5 digits": _called('{"a": ' + "9" * 100_000 + "}"),
    "arguments that are no number": _called('{"a": NaN, "b": Infinity, "a": -0}'),
    "deep arguments of the template": _text(
        b'{"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": {"a": ' + _deep(900).encode() + b"}}"
    ),
    "arguments of the template with names of its own": _chat(
        chat_template_kwargs={
            "messages": [],
            "raise_exception": 1,
            "self": 2,
            "loop": 3,
            "namespace": 4,
            "__class__": 5,
        }
    ),
    "a template of the client's": _chat(chat_template="{% for i in range(99999999) %}{{ i }}{% endfor %}"),
    "deep metadata": _text(b'{"messages": [], "metadata": {"a": ' + _deep(100_000).encode() + b"}}"),
    "a picture by a URL": _part(lambda url: {"type": "image_url", "image_url": {"url": url}}),
    "a picture by a file": _part(lambda url: {"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}),
    "a file by a URL": _part(lambda url: {"type": "input_file", "file_url": url}),
    "sound by a URL": _part(lambda url: {"type": "audio_url", "audio_url": {"url": url}}),
    "a document by a URL": _json(
        "/v1/messages",
        lambda site: {
            "max_tokens": 2,
            "messages": [
                {"role": "user", "content": [{"type": "document", "source": {"type": "url", "url": site.url}}]}
            ],
        },
    ),
    "a server of tools": _json(
        "/v1/responses",
        lambda site: {
            "input": "a",
            "max_output_tokens": 2,
            "tools": [{"type": "mcp", "server_label": "x", "server_url": site.url, "require_approval": "never"}],
        },
    ),
    "a search of the web": _json(
        "/v1/responses", lambda site: {"input": site.url, "max_output_tokens": 2, "tools": [{"type": "web_search"}]}
    ),
    "an answer of before": _json(
        "/v1/responses",
        lambda site: {"input": "a", "previous_response_id": "../../../etc/passwd", "max_output_tokens": 2},
    ),
    "a prompt of a file": _json(
        "/v1/responses", lambda site: {"prompt": {"id": "../../etc/passwd"}, "max_output_tokens": 2}
    ),
    "a hook": _json("/v1/responses", lambda site: {"input": "a", "background": True, "webhook": site.url}),
    "detokenized: 2^63": _json("/detokenize", lambda site: {"tokens": [2**63, -1, 2**31]}),
    "tokenized: special marks": _json("/tokenize", lambda site: {"prompt": "<|endoftext|><|im_start|>" * 2000}),
    "a prompt of tokens beyond": _json(COMPLETIONS, lambda site: {"prompt": [2**31, 4_000_000_000], "max_tokens": 1}),
    "a prompt of a negative token": _json(COMPLETIONS, lambda site: {"prompt": [-1], "max_tokens": 1}),
    "10^5 prompts": _json(COMPLETIONS, lambda site: {"prompt": ["a"] * 100_000, "max_tokens": 1}),
    "10^5 empty prompts": _json(COMPLETIONS, lambda site: {"prompt": [[]] * 100_000, "max_tokens": 1}),
    "tokens of a million": _json(COMPLETIONS, lambda site: {"prompt": [5] * 1_000_000, "max_tokens": 1}),
    "10^4 tools": _chat(tools=[{"type": "function", "function": {"name": f"f{n}"}} for n in range(10_000)]),
    "a tool's name upwards": _chat(tools=[{"type": "function", "function": {"name": "../../etc/passwd"}}]),
    "a tool's name of control characters": _chat(tools=[{"type": "function", "function": {"name": "\x1b[2J\n"}}]),
}


def _schema(schema: Any) -> Make:
    return _chat(response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": schema}})


def _grammar(text: str) -> Make:
    return _chat(guided_grammar=text)


GRAMMARS: dict[str, Make] = {
    "a reference to a URL": _json(
        CHAT,
        lambda site: {
            "messages": SAY,
            "max_tokens": 2,
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "a", "schema": {"$id": site.url, "$ref": site.url, "$schema": site.url}},
            },
        },
    ),
    "a reference to a file": _schema({"$ref": "file:///etc/passwd"}),
    "a grammar that imports": _grammar('%import "/etc/passwd"\nstart: WORD'),
    "a grammar that imports names": _grammar("%import ....etc.passwd.X\nstart: X"),
    "a grammar of a grammar": _grammar('start: %llguidance {"grammars": [{"json_schema": {"multipleOf": 99999989}}]}'),
    "a grammar of a schema": _grammar('start: %json {"type": "integer", "multipleOf": 99999989}'),
    "10^9 repetitions": _grammar('start: "x"{1,1000000000}'),
    "nested repetitions": _grammar('start: a{1,9999}\na: b{1,9999}\nb: c{1,9999}\nc: "x"{1,9999}'),
    "empty repetitions": _grammar('start: a*\na: b*\nb: c*\nc: ""*'),
    "left recursion": _grammar('start: start start start | start start | "x" |'),
    "rules in a circle": _grammar("start: a\na: b\nb: a"),
    "50,000 rules": _grammar(
        "start: r0\n" + "".join(f"r{n}: r{n + 1} r{n + 1}\n" for n in range(50_000)) + 'r50000: "x"'
    ),
    "ambiguity": _grammar('start: (a|b|c)*\na: "x"* "y"?\nb: "x"? "y"*\nc: ("x"|"y")*'),
    "a regex with flags": _chat(guided_regex="(?i)(?x)(?s)(?m)" + "[a-z]{1,200}" * 40),
    "a regex with references": _chat(guided_regex=r"(a+)\1{99}(?<=b)(?!c)"),
    "a regex of all letters": _chat(guided_regex=r"[\p{L}\p{M}\p{N}\p{S}]{1,100000}"),
    "a regex of classes in classes": _chat(guided_regex="[" * 5000 + "a" + "]" * 5000),
    "a regex of nested groups": _chat(guided_regex="(" * 50_000 + "a" + ")" * 50_000),
    "a regex of counts": _chat(guided_regex="(((a{0,99}){0,99}){0,99}){0,99}"),
    "a regex of wide counts": _chat(guided_regex="a{0,4294967295}b{18446744073709551615}"),
    "twenty patterns at once": _schema(
        {"allOf": [{"type": "string", "pattern": f"^(a|b{{{n}}})*$"} for n in range(20)]}
    ),
    "patterns against patterns": _schema({"type": "string", "pattern": "^.*a.{20}$", "not": {"pattern": "b.{20}$"}}),
    "all formats": _schema(
        {
            "allOf": [
                {"type": "string", "format": name, "minLength": 9}
                for name in ("date-time", "email", "uri", "uuid", "ipv6", "hostname", "regex", "json-pointer")
            ]
        }
    ),
    "an interval of 5,000 digits": _text(
        b'{"messages": [{"role": "user", "content": "a"}], "max_tokens": 2, "response_format": {"type": "json_schema", '
        b'"json_schema": {"schema": {"type": "integer", "minimum": -'
        + b"9" * 5000
        + b', "maximum": 1'
        + b"0" * 5000
        + b"}}}}"
    ),
    "an interval of tiny numbers": _schema({"type": "number", "exclusiveMinimum": 5e-324, "maximum": 1.7e308}),
    "a multiple within tiny bounds": _schema(
        {"type": "number", "multipleOf": 1e-9, "minimum": 0.1, "maximum": 0.100000001}
    ),
    "items without end": _schema({"type": "array", "minItems": 2**62, "maxItems": 2**63, "uniqueItems": True}),
    "properties without end": _schema(
        {"type": "object", "minProperties": 2**40, "propertyNames": {"pattern": "^(a|aa)+$"}}
    ),
    "100,000 required names": _schema({"type": "object", "required": [f"p{n}" for n in range(100_000)]}),
    "deep properties": _text(
        b'{"messages": [{"role": "user", "content": "a"}], "response_format": {"type": "json_schema", "json_schema": '
        b'{"schema": ' + b'{"properties": {"a": ' * 5000 + b"{}" + b"}}" * 5000 + b"}}}"
    ),
    "references that double": _schema(
        {
            "$ref": "#/$defs/a0",
            "$defs": {f"a{n}": {"anyOf": [{"$ref": f"#/$defs/a{n + 1}"}] * 9} for n in range(200)} | {"a200": {}},
        }
    ),
    "references by odd pointers": _schema({"$ref": "#/" + "~1" * 20_000 + "%2e%2e/" * 999}),
    "conditions in conditions": _schema(
        {
            "if": {"if": {"if": {"const": 1}}, "then": {"not": {"not": {}}}},
            "else": {"dependentRequired": {"a": ["b"] * 999}},
        }
    ),
    "prefixes that are alike": _schema({"enum": ["a" * n for n in range(1, 3000)]}),
    "a structural tag": _chat(
        response_format={
            "type": "structural_tag",
            "structures": [{"begin": "<" * 9999, "schema": {"multipleOf": 99999989}, "end": ">"}] * 99,
            "triggers": ["<"] * 999,
        }
    ),
    "choices without end": _chat(guided_choice=["c" * n for n in range(3000)]),
}
REQUESTS: dict[str, Make] = {**HEADS, **BODIES, **GRAMMARS}


# --- running ---------------------------------------------------------------------------------------------------------


def exchange(address: str, request: bytes) -> bytes:
    """Returns the answer to a request, or its part before a pause. Raises TimeoutError if none comes."""
    host, _, port = address.rpartition(":")
    answer, ends_s = b"", time.monotonic() + WITHIN_S
    with socket.create_connection((host, int(port)), timeout=WITHIN_S) as one:
        with contextlib.suppress(ConnectionError):
            one.sendall(request)
        with contextlib.suppress(ConnectionError):
            while len(answer) < MOST_BYTES and time.monotonic() < ends_s:
                try:
                    part = one.recv(1 << 16)
                except TimeoutError:
                    if not answer:
                        raise
                    break
                if not part:
                    break
                answer += part
                one.settimeout(PAUSE_S)
                ends_s = min(ends_s, time.monotonic() + STREAM_S)
    return answer


def ask_once(name: str, attacked: Attacked, site: Site) -> Told:
    """Sends one request and judges its answer."""
    told, began_s = Told(name), time.monotonic()
    try:
        answer = exchange(attacked.address, REQUESTS[name](site))
    except TimeoutError:
        answer = b""
        told.faults.append("no answer")
    told.seconds = round(time.monotonic() - began_s, 2)
    line = answer.split(b"\r\n", 1)[0].split()
    told.status = int(line[1]) if len(line) > 1 else 0
    if told.status not in STATUSES | {0}:
        told.faults.append(f"status {told.status}: {answer[-200:].decode(errors='replace')}")
    for leak in (SECRET.encode(), b"root:", attacked.keys[VICTIM].encode(), b"Traceback"):
        if leak in answer:
            told.faults.append(f"{leak[:20]!r} is told")
    if b"\x1b" in answer or b"\x07" in answer:
        told.faults.append("control characters are told")
    return told


def run(attacked: Attacked, names: list[str]) -> Iterator[Told]:
    """Sends requests one after the other; the victim's stream is looked at after each."""
    listener, right = Listener(), attacked.stream(TOKENS).text
    site = Site(attacked.keys[ATTACKER], listener.url)
    attacked.say(SECRET)
    engines, lines = attacked.health()["engine"]["starts"], attacked.log_lines()
    for name in names:
        told = ask_once(name, attacked, site)
        told.faults += ["a URL was asked for"] if listener.count else []
        told.faults += ["the victim's tokens are wrong"] if attacked.stream(TOKENS).text != right else []
        told.faults += ["an engine ended"] if attacked.health()["engine"]["starts"] != engines else []
        listener.count, engines = 0, attacked.health()["engine"]["starts"]
        now = attacked.log_lines()
        told.faults += [f"{now - lines} log lines"] if now - lines > 5 else []
        lines = now
        yield told
    listener.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", choices=REQUESTS)
    names = parser.parse_args().only or list(REQUESTS)
    wrong = False
    with attacked_daemon() as attacked:
        before_mb = attacked.peaks_mb()
        for told in run(attacked, names):
            print(json.dumps(asdict(told), ensure_ascii=True), flush=True)
            wrong |= bool(told.faults)
        log = attacked.log.read_text(errors="replace") if attacked.log else ""
        odd = sorted({letter for letter in log if ord(letter) < 32 and letter != "\n"})
        shown = {"front_and_engine_mb": (before_mb, attacked.peaks_mb()), "log_bytes": len(log), "odd_letters": odd}
        secret = [word for word in (SECRET, "em-0123456789abcdef", "Traceback", attacked.keys[ATTACKER]) if word in log]
        print(json.dumps(shown | {"told_in_the_log": secret}))
    return int(wrong or bool(odd) or bool(secret))


if __name__ == "__main__":
    sys.exit(main())
