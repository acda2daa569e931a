"""Hostile checkpoints, GGUF files and recordings, and the command that reads each."""

from __future__ import annotations

import json
import os
import shutil
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from edgemoe.demo import model_path
from edgemoe.store.manifest import Manifest
from edgemoe.store.packer import ensure_store
from edgemoe.telemetry.routing_recording import LENGTH, MAGIC, SUFFIX, RecordingHeader
from tools.fuzzing.recordings import good
from tools.fuzzing.target import KEPT
from tools.testbed.float32_model import float32_demo

FLOAT32 = "demo-float32"
SERVED_ONCE = "tools.attacking.served_once"
Json = dict[str, Any]
Command = list[str]


def _checkpoint(folder: Path) -> Path:
    """Copies the demo model in float32; weights are links."""
    made = folder / "model"
    float32_demo(KEPT.parent)
    shutil.copytree(KEPT.parent / FLOAT32, made, copy_function=_link)
    return made


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system
        shutil.copyfile(source, target)


def _put(path: Path, data: bytes | str) -> None:
    path.unlink(missing_ok=True)  # the link, and not its target
    path.write_bytes(data if isinstance(data, bytes) else data.encode())


def _made_when_asked(make: Callable[[], Callable[[Path], Command]]) -> Callable[[Path], Command]:
    """Makes large contents in the attack that needs them, and none when this module is imported."""
    return lambda folder: make()(folder)


# --- tokenizers and templates ------------------------------------------------------------------------------------


def _served(change: Callable[[Path], None]) -> Callable[[Path], Command]:
    """Serves the demo model with something changed, and asks it."""

    def make(folder: Path) -> Command:
        model = _checkpoint(folder)
        change(model)
        if (kernels := KEPT.parent / "kernels").is_dir():
            shutil.copytree(kernels, folder / "kernels")  # compiled ones lie beside the folder of stores
        return [SERVED_ONCE, str(model), str(folder)]

    return make


def _tokenizer(change: Callable[[Json], Any]) -> Callable[[Path], Command]:
    def put(model: Path) -> None:
        content: Json = json.loads((model / "tokenizer.json").read_text())
        change(content)
        _put(model / "tokenizer.json", json.dumps(content))

    return _served(put)


def _tokenizer_text(text: str | bytes) -> Callable[[Path], Command]:
    return _served(lambda model: _put(model / "tokenizer.json", text))


def _replace(pattern: str, content: str = "x") -> Json:
    return {"type": "Replace", "pattern": {"Regex": pattern}, "content": content}


def _split(pattern: str) -> Json:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def _added(number: int, name: str) -> Json:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": number, "content": name, "special": True, **flags}


TOKENIZERS: dict[str, Callable[[Path], Command]] = {
    "tokenizer: no JSON": _tokenizer_text(b"\0" * 1000),
    "tokenizer: deep": _tokenizer_text('{"model":' + "[" * 1_000_000),
    "tokenizer: 70 MB": _made_when_asked(lambda: _tokenizer_text('{"x": "' + "y" * (70 << 20) + '"}')),
    "tokenizer: long number": _tokenizer_text('{"version": ' + "9" * 1_000_000 + "}"),
    "tokenizer: ids of 2^63": _tokenizer(lambda one: one["model"]["vocab"].update({"zebra": 2**63})),
    "tokenizer: ids of 2^31": _tokenizer(lambda one: one["model"]["vocab"].update({"zebra": 2**31 - 1})),
    "tokenizer: added id of 2^32": _tokenizer(lambda one: one["added_tokens"].append(_added(2**32 - 1, "<zebra>"))),
    "tokenizer: negative id": _tokenizer(lambda one: one["added_tokens"].append(_added(-1, "<zebra>"))),
    "tokenizer: 300,000 added tokens": _tokenizer(
        lambda one: one["added_tokens"].extend(_added(9000 + n, f"<z{n}>") for n in range(300_000))
    ),
    "tokenizer: normalizer with a growing text": _tokenizer(
        lambda one: one.update(normalizer={"type": "Sequence", "normalizers": [_replace("a", "a" * 999)] * 9})
    ),
    "tokenizer: normalizer that backtracks": _tokenizer(lambda one: one.update(normalizer=_replace("(a|a)*(a|aa)+b"))),
    "tokenizer: splitter that backtracks": _tokenizer(lambda one: one.update(pre_tokenizer=_split(r"(a+)+(?=b)"))),
    "tokenizer: quadratic splitter": _tokenizer(lambda one: one.update(pre_tokenizer=_split(r"a*a*a*a*b"))),
    "tokenizer: wrong regex": _tokenizer(lambda one: one.update(pre_tokenizer=_split("(" * 5000))),
    "tokenizer: padding to 2^40": _tokenizer(
        lambda one: one.update(
            padding={
                "strategy": {"Fixed": 1 << 40},
                "direction": "Right",
                "pad_to_multiple_of": None,
                "pad_id": 0,
                "pad_type_id": 0,
                "pad_token": "x",
            }
        )
    ),
    "tokenizer: another kind": _tokenizer(
        lambda one: one.update(model={"type": "Unigram", "unk_id": 2**60, "vocab": [["a", float("nan")]] * 1000})
    ),
}


def _template(text: str) -> Callable[[Path], Command]:
    return _served(lambda model: _put(model / "chat_template.jinja", text))


LOOP = "{% for i in range(99999) %}" * 3 + "{% endfor %}" * 3
TEMPLATES: dict[str, Callable[[Path], Command]] = {
    "template: endless": _template(LOOP),
    "template: growing": _template(
        "{% set n = namespace(a='a') %}{% for i in range(99) %}{% set n.a = n.a ~ n.a %}{% endfor %}"
    ),
    "template: one long string": _template("{{ 'a' * 10**10 }}"),
    "template: one large number": _template("{{ (9 ** 9999999) | string }}"),
    "template: constant of a large number": _template("{% if 9 ** 9999999 %}{% endif %}"),
    "template: calls itself": _template("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}"),
    "template: deep": _template("{{ " + "(" * 100_000),
    "template: wide format": _template("{{ '%0999999999d' % 1 }}"),
    "template: sandbox": _template(
        "{{ ('{0.__globals__[json].codecs.sys.modules[os].environ}' | attr('format'))(raise_exception) }}"
    ),
    "template: includes": _template("{% include '/etc/passwd' %}"),
}

# --- weights -----------------------------------------------------------------------------------------------------


def _header(header: bytes, length: int | None = None, rest: bytes = b"") -> Callable[[Path], Command]:
    def make(folder: Path) -> Command:
        model = _checkpoint(folder)
        size = len(header) if length is None else length
        _put(model / "model.safetensors", struct.pack("<Q", size) + header + rest)
        return _pack(model, folder)

    return make


def _pack(model: Path, folder: Path) -> Command:
    return ["edgemoe", "pack", str(model), str(folder / "store")]


def _entry(shape: list[int], begin: int, end: int, dtype: str = "F32") -> Json:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def _entries(**entries: Json) -> bytes:
    return json.dumps(entries).encode()


SAFETENSORS: dict[str, Callable[[Path], Command]] = {
    "safetensors: length of 2^64": _header(b"{}", 2**64 - 1),
    "safetensors: deep": _header(b'{"a":' + b"[" * 1_000_000),
    "safetensors: long number": _header(b'{"a": ' + b"9" * 1_000_000 + b"}"),
    "safetensors: 90 MB": _made_when_asked(lambda: _header(b'{"' + b"a" * (90 << 20) + b'": 1}')),
    "safetensors: 500,000 names": _made_when_asked(
        lambda: _header(_entries(**{f"t{n}": _entry([0], 0, 0) for n in range(500_000)}))
    ),
    "safetensors: sizes of 2^63": _header(_entries(a=_entry([2**62, 2**62, 0], 0, 0), b=_entry([2**63], 0, 2**63))),
    "safetensors: negative": _header(_entries(a=_entry([-1], 4, 0)), rest=b"1234"),
    "safetensors: overlapping": _header(_entries(a=_entry([2], 0, 8), b=_entry([2], 4, 12)), rest=b"1" * 12),
    "safetensors: escape sequences": _header(_entries(**{"\x1b[2J\x1b]0;owned\x07": _entry([1], 0, 9)}), rest=b"1" * 4),
}


def _config(change: Json) -> Callable[[Path], Command]:
    def make(folder: Path) -> Command:
        model = _checkpoint(folder)
        content = json.loads((model / "config.json").read_text()) | change
        _put(model / "config.json", json.dumps(content))
        return _pack(model, folder)

    return make


CONFIGS: dict[str, Callable[[Path], Command]] = {
    "config: 2^40 layers": _config({"num_hidden_layers": 1 << 40}),
    "config: 2^40 experts": _config({"num_experts": 1 << 40}),
    "config: 2^62 wide": _config({"hidden_size": 1 << 62, "moe_intermediate_size": 1 << 62}),
    "config: escape sequences": _config({"architectures": ["\x1b[2J\x1b]0;owned\x07"], "model_type": "\x1b[31mx"}),
    "config: not numbers": _config({"rms_norm_eps": float("nan"), "rope_theta": float("inf")}),
}


def _gguf(data: bytes) -> Callable[[Path], Command]:
    def make(folder: Path) -> Command:
        path = folder / "model.gguf"
        path.write_bytes(data)
        return _pack(path, folder)

    return make


def _text(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


HEAD = b"GGUF" + struct.pack("<I", 3)
STRING, ARRAY, U32 = 8, 9, 4
GGUFS: dict[str, Callable[[Path], Command]] = {
    "GGUF: 2^63 tensors": _gguf(HEAD + struct.pack("<QQ", 2**63, 0)),
    "GGUF: 2^63 keys": _gguf(HEAD + struct.pack("<QQ", 0, 2**63)),
    "GGUF: a name of 2^62": _gguf(HEAD + struct.pack("<QQ", 0, 1) + struct.pack("<Q", 2**62)),
    "GGUF: an array of 2^60": _gguf(
        HEAD + struct.pack("<QQ", 0, 1) + _text(b"a") + struct.pack("<IIQ", ARRAY, U32, 2**60)
    ),
    "GGUF: deep arrays": _gguf(
        HEAD
        + struct.pack("<QQ", 0, 1)
        + _text(b"a")
        + struct.pack("<I", ARRAY)
        + struct.pack("<IQ", ARRAY, 1) * 100_000
    ),
    "GGUF: escape sequences": _gguf(
        HEAD
        + struct.pack("<QQ", 0, 1)
        + _text(b"general.architecture")
        + struct.pack("<I", STRING)
        + _text(b"\x1b[2J\x1b]0;owned\x07")
    ),
}

# --- recordings --------------------------------------------------------------------------------------------------


def _recording(header: list[Any], *blocks: bytes, lengths: tuple[int, ...] = ()) -> Callable[[Path], Command]:
    """Converts a recording of the demo model for training, with blocks that may lie about their `lengths`."""

    def make(folder: Path) -> Command:
        store, recorded = ensure_store(model_path(), KEPT), folder / "recorded"
        recorded.mkdir()
        data = MAGIC
        for number, part in enumerate((_part([Manifest.load(store).digest, *header[1:]]), *blocks)):
            data += LENGTH.pack(lengths[number] if number < len(lengths) else len(part)) + part
        (recorded / f"a{SUFFIX}").write_bytes(data)
        return ["scoutgate.convert", str(recorded), "--model", str(store), "--out", str(folder / "out")]

    return make


def _part(content: Any) -> bytes:
    return zlib.compress(msgspec.msgpack.encode(content))


def _lying(**changed: Any) -> list[Any]:
    """Returns a block of a recording with some of its fields changed."""
    names = ("requests", "query_lens", "decode", "tokens", "positions", "ids", "weights", "conversations", "hinted")
    block = good()[1]
    for name, value in changed.items():
        block[names.index(name)] = value
    return block


OWN = good()[0]
STEPS = 12
RECORDINGS: dict[str, Callable[[Path], Command]] = {
    "recording: length of 2^32": _recording(OWN, b"x", lengths=(len(_part(["0" * 32, *OWN[1:]])), 2**32 - 1)),
    "recording: bomb": _made_when_asked(lambda: _recording(OWN, zlib.compress(bytes(1 << 30)))),
    "recording: deep": _recording(OWN, zlib.compress(b"\x91" * 1_000_000)),
    "recording: no experts": _recording(list(msgspec.structs.astuple(RecordingHeader("", 0, 0, 0)))),
    "recording: 2^30 experts": _recording(["", 2**30, 2**30, 2**30, True]),
    "recording: tokens of 2^31": _recording(
        OWN, _part(_lying(tokens=struct.pack("<i", 2**31 - 1) * STEPS, positions=struct.pack("<i", -1) * STEPS))
    ),
    "recording: expert -1": _recording(OWN, _part(_lying(ids=struct.pack("<h", -1) * (2 * STEPS * 2)))),
    "recording: weights that are no numbers": _recording(OWN, _part(_lying(weights=b"\xff\x7f" * (2 * STEPS * 2)))),
}

FILES: dict[str, Callable[[Path], Command]] = {
    **TOKENIZERS,
    **TEMPLATES,
    **SAFETENSORS,
    **CONFIGS,
    **GGUFS,
    **RECORDINGS,
}
